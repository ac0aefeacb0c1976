"""What several tests of the benchmarks share."""

import json
import sys
from dataclasses import replace

import pytest

from tests.small_model import SMALL, VISION
from tools.bench import __main__ as command
from tools.bench import peers


@pytest.fixture
def tiny(monkeypatch):
    """A model config that stands in for the preset "small". Its windows are not all full."""
    config = replace(SMALL, vision=replace(VISION, grid=7))
    monkeypatch.setitem(peers.PRESETS, "small", config)
    return config


@pytest.fixture
def bench(monkeypatch, capsys):
    """A function that runs tools.bench with flags -> (its JSON line as a dict, its table)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])
        command.main()
        table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
        return json.loads(line), table

    return run
