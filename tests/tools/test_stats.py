"""python data.py stats: counted by the command, and counted here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
import packing
import train
from tools import stats

ROOT = Path(__file__).parents[2]


def test_stats_are_those_of_the_encoded_examples(tmp_path):
    """Of records that fit, that do not, that cannot be opened and that nothing is learned from, by encoding each."""
    rng, lines = np.random.default_rng(0), []
    for i in range(40):
        Image.new("RGB", (50, 40)).save(tmp_path / f"{i}.png")
        lines.append({"image": f"{i}.png", "annotations": [{"type": "caption", "text": "a" * int(rng.integers(1, 300))}
                                                            for _ in range(int(rng.integers(1, 6)))]})
    lines += [{"image": "gone.png", "annotations": [{"type": "caption", "text": "a"}]},
              {"annotations": [{"type": "text", "text": "b" * 2000}]},
              {"annotations": [{"type": "text", "text": "b", "weight": 0}]}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = data.Records(tmp_path / "r.jsonl")
    config = train.parse(["--stage", "1", "--tiny", "--data.max_tokens=800", "--pool_size=5"])[1]
    tokenizer = data.ByteTokenizer()
    found = stats.stats(source, tokenizer, config)
    whole = [data.encode(source[i], tokenizer, config.data, 0, 0) for i in range(40)]
    assert found["records"] == 43 and found["usable"] == 40 and found["skipped"] == {"S20": 1, "S03": 1, "S04": 1}
    assert found["tokens"] == sum(len(e.tokens) for e in whole) and found["crops"] == sum(len(e.images) for e in whole)
    assert found["branches"] == sum(max(e.branch.max(), 1) for e in whole)
    assert found["branches_dropped"] == sum(e.dropped for e in whole) > 0
    assert found["longest"] == max(len(e.tokens) for e in whole) == len(whole[int(found["longest_id"].split(":")[1]) - 1].tokens)
    packs = list(packing.Planner([(len(e.tokens), len(e.images)) for e in whole], 800, config.pack_crops, 5))
    assert found["packs"] == len(packs) and found["examples_per_pack"] == round(40 / len(packs), 2)
    assert found["fill_tokens"] == pytest.approx(found["tokens"] / len(packs) / 800, abs=1e-4)


def test_the_command_prints_them_and_a_mistake_is_one_sentence(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_text('{"annotations": [{"type": "text", "text": "abc"}]}')
    command = [sys.executable, "-m", "tools.stats", str(tmp_path / "r.jsonl"), "--stage", "2", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["tokens"] == 4
    with pytest.raises(SystemExit) as refused:
        stats.main(["stats", str(tmp_path / "none.jsonl")])
    said = capsys.readouterr().err.strip()
    assert refused.value.code == 2 and said.endswith("none.jsonl: no such file") and len(said.splitlines()) == 1
