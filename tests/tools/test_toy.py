"""python -m tools.toy: its files contain the toy world."""

import re

import numpy as np
import pytest

import data
from model import TOY_VISION
from records.reader import Records
from tests.test_layout import ROOT
from tests.toy.test_world import CONFIG, TOKENIZER
from text.points import parse_points
from tools import toy
from toy.world import SOURCES


@pytest.mark.parametrize("kind", ["images", "series", "videos", "long-tracks"])
def test_the_world_as_files_is_the_same_world(kind, tmp_path):
    """Tokens, pixels and masks are bit-identical."""
    source = SOURCES[kind]("test")
    toy.export(tmp_path, source, 5)
    records = Records(tmp_path / "records.jsonl")
    masks = np.load(tmp_path / "masks.npz")
    assert len(records) == 5
    for i in range(5):
        assert records[i]["id"] == source[i]["id"]
        assert len(records[i]["annotations"]) == len(source[i]["annotations"])
        here = data.encode(source[i], TOKENIZER, CONFIG, TOY_VISION, 0, 0)
        # random choices depend on the line in the file, so the key is the same here
        of_file = records[i] | {"key": source[i]["key"]}
        there = data.encode(of_file, TOKENIZER, CONFIG, TOY_VISION, 0, 0)
        for name in ("tokens", "targets", "weights", "images", "pool_src"):
            assert np.array_equal(getattr(here, name), getattr(there, name)), name
        for k, a in enumerate(source[i]["annotations"]):
            if a["type"] in ("point", "track"):
                name = f"{source[i]['id']}/{k}"
                found = source.masks(source[i], a)
                if isinstance(found, dict):
                    assert np.array_equal(masks[f"{name}/times"], found["times"])
                    found = found["masks"]
                assert np.array_equal(masks[name], found)


def test_the_command_replaces_files_only_in_a_folder_that_it_has_made(tmp_path, capsys):
    for n in (1, 2):
        toy.main([str(tmp_path / "own"), "--n", str(n)])
    assert len(Records(tmp_path / "own/records.jsonl")) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"2 records, the media and masks.npz were written to {tmp_path}/own."


def test_a_command_that_fails_leaves_no_records_without_their_masks(tmp_path, monkeypatch):
    out = str(tmp_path / "own")
    toy.main([out, "--n", "1"])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toy.np, "savez_compressed", full)
    with pytest.raises(SystemExit, match="1"):
        toy.main([out, "--n", "2", "--seed", "1"])
    assert not list((tmp_path / "own").glob("*.jsonl"))


def test_the_code_of_the_page_on_preferences_makes_pairs(tmp_path, monkeypatch):
    """The chosen answer lists the points from right to left, and the rejected one does not."""
    monkeypatch.chdir(tmp_path)
    toy.main(["runs/shapes", "--n", "30", "--split", "train"])
    _, code = re.findall(r"```python\n(.*?)```",
                         (ROOT / "docs/preferences.md").read_text(), re.DOTALL)
    exec(code, {})
    records = Records("runs/shapes/pairs.jsonl")
    assert len(records) > 10
    for record in records:
        texts = [a["text"] for a in record["annotations"]]
        chosen, rejected = ([p.x for p in parse_points(text, 1, 1)] for text in texts)
        assert chosen == sorted(chosen, reverse=True) and sorted(chosen) == sorted(rejected)
        assert texts[0] != texts[1]
