"""Fixtures of this folder: records, and a run that trains on them."""

import os
import signal

import pytest

from tests.equal_runs import write_records
from tests.training.runs import RECIPE, logged, run
from tests.training.stream import write_files
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
    return ["--data", str(write_records(tmp_path_factory.mktemp("data")))]


@pytest.fixture(scope="session")
def recipe(records):
    """-> flags of a run of six steps, with checkpoints after steps 2, 4 and 6."""
    return [*RECIPE, *records]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """-> the paths of the two files of stream.write_files."""
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory, recipe):
    """-> the uninterrupted run of this recipe."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert run(out, *recipe) == 0
    assert checkpoint.list_steps(out) == [6, 4, 2]
    assert sorted(logged(out)) == [1, 2, 3, 4, 5, 6]
    assert sum(line["unreadable"].get("records.jsonl", 0) for line in logged(out).values()) >= 3
    return out
