"""Fixtures of this folder: records, and a run that trains on them."""

import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import RECIPE, logged, run
from training import checkpoint


@pytest.fixture(autouse=True)
def restored_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Tests need no fsync, since no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """-> flags that train on twelve records with images. Three image files are truncated."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(12):
        path = folder / f"{i}.png"
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(path)
        text = "".join(rng.choice(list("abc "), int(rng.integers(2, 40))))
        annotation = {"type": "caption", "text": text}
        lines.append(json.dumps({"image": path.name, "annotations": [annotation]}))
        if i in (2, 5, 7):
            path.write_bytes(path.read_bytes()[:3000])
    (folder / "r.jsonl").write_text("\n".join(lines))
    return ["--data", str(folder / "r.jsonl")]


@pytest.fixture(scope="session")
def whole(tmp_path_factory, records):
    """-> an uninterrupted run of six steps, with checkpoints after steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert run(out, *RECIPE, *records) == 0
    assert checkpoint.list_steps(out) == [6, 4, 2]
    assert sorted(logged(out)) == [1, 2, 3, 4, 5, 6]
    assert sum(line["unreadable"].get("r.jsonl", 0) for line in logged(out).values()) >= 3
    return out
