"""python -m tools.plan without --out: compares its numbers with numbers that are counted here."""

import json

import numpy as np
import pytest
from PIL import Image

import data
import packing
from records.reader import Records
from tests.records.samples import image, write
from tests.tools.command import run_main
from text.tokenizer import ByteTokenizer
from tools import plan
from training.config import parse

N_USABLE = 40


def test_the_numbers_are_those_of_the_encoded_examples(tmp_path):
    """Records fit, are too long, cannot be opened, or have no loss."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(N_USABLE):
        Image.new("RGB", (50, 40)).save(tmp_path / f"{i}.png")
        captions = [{"type": "caption", "text": "a" * n}
                    for n in rng.integers(1, 300, size=rng.integers(1, 6))]
        lines.append(image(*captions, image=f"{i}.png"))
    lines += [image({"type": "caption", "text": "a"}, image="gone.png"),
              {"annotations": [{"type": "text", "text": "b" * 2000}]},
              {"annotations": [{"type": "text", "text": "b", "weight": 0}]}]
    reader = Records(write(tmp_path / "r.jsonl", *lines))
    _, config = parse(["--stage", "1", "--tiny", "--data.max_tokens=800", "--pool_size=5"])
    tokenizer = ByteTokenizer()
    found = plan.count_records([reader], tokenizer, config)
    examples = [data.encode(reader[i], tokenizer, config.data, config.model.vision, 0, 0)
                for i in range(N_USABLE)]
    assert (found["records"], found["usable"]) == (43, N_USABLE)
    assert found["skipped"] == {"missing file": 1, "too long": 1, "nothing to train on": 1}
    assert found["tokens"] == sum(len(e.tokens) for e in examples)
    assert found["crops"] == sum(len(e.images) for e in examples)
    assert found["branches"] == sum(e.n_branches for e in examples)
    assert found["branches_dropped"] == sum(e.dropped_branches for e in examples) > 0
    n_annotations = sum(len(line["annotations"]) for line in lines[:N_USABLE])
    assert found["branches"] + found["branches_dropped"] == n_annotations
    assert found["longest"] == max(len(e.tokens) for e in examples)
    longest = int(found["longest_id"].split(":")[1]) - 1         # the id is "r.jsonl:line"
    assert found["longest"] == len(examples[longest].tokens)
    sizes = [(len(e.tokens), len(e.images)) for e in examples]
    packs = list(packing.Planner(sizes, 800, config.pack_crops, 5))
    assert found["packs"] == len(packs)
    assert found["examples_per_pack"] == round(N_USABLE / len(packs), 2)
    assert found["fill_tokens"] == pytest.approx(found["tokens"] / len(packs) / 800, abs=1e-4)
    _, out, _ = run_main(plan.main, "--stage=1", "--tiny", "--data.max_tokens=800", "--pool_size=5",
                         f"--data={tmp_path}/r.jsonl")
    *lines, last = out.splitlines()
    printed = json.loads(last)
    assert (printed.pop("data"), printed.pop("stage")) == ([f"{tmp_path}/r.jsonl"], 1)
    assert lines == [f"{name:18} {value}" for name, value in printed.items()]
    assert printed.keys() == found.keys()


def test_the_longest_wait_is_that_between_the_pack_before_an_example_and_its_own():
    _, config = parse(["--stage", "1", "--tiny"])
    packs = [[packing.Item(0, 9, 1, 0)], [packing.Item(2, 9, 1, 1)], [packing.Item(1, 9, 1, 0)]]
    assert plan.describe_packs(packs, config)["longest_wait"] == 2
