"""--tensorboard repeats log.jsonl, and says how to install what it needs."""

import json

import pytest

from tests.test_layout import ROOT
from tests.training.runs import SMALL, run
from training import config
from training.tensorboard import MAX_PICTURES, numbers

MEDIA = ROOT / "tests" / "media"
PHOTOS = ["--data", str(MEDIA / "records.jsonl"), "--media", str(MEDIA)]


def test_numbers_are_named_by_their_path_in_a_line():
    line = {"step": 3, "loss": 0.5, "lr": {"vit": 1e-6, "llm": 2}, "ids": "ab", "grad_norm": None,
            "eval": {"a.jsonl": {"point_f1": 1.0}, "hits": "box"}}
    assert numbers(line) == {"step": 3, "loss": 0.5, "lr/vit": 1e-6, "lr/llm": 2,
                             "eval/a.jsonl/point_f1": 1.0}


def test_a_missing_package_is_named_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    assert run(tmp_path / "out", *SMALL, "--tensorboard") == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_and_its_continuation_are_the_lines_of_their_log(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [*SMALL, *PHOTOS, "--steps", "4", "--save-every", "2", "--keep", "0", "--tensorboard",
             "--eval", str(MEDIA / "records.jsonl"), "--data.max_tokens=640"]
    out = tmp_path / "out"
    assert run(out, *flags) == 0
    (out / "step-4").rename(tmp_path / "step-4")
    assert run(out, *flags, "--resume") == 0
    board = EventAccumulator(str(out / "tensorboard"), {"images": 0, "scalars": 0}).Reload()
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:]]
    wanted = {}
    for line in lines:
        for name, value in numbers(line).items():
            wanted.setdefault(name, {})[line["step"]] = value
    tags = board.Tags()
    assert set(tags["scalars"]) == set(wanted)
    for name, values in wanted.items():
        if name != "seconds":                            # the last line has those of the command
            found = {event.step: event.value for event in board.Scalars(name)}
            assert found == pytest.approx(values, rel=1e-6)
    assert 0 < len(tags["images"]) <= MAX_PICTURES
