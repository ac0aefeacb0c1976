"""Fixtures that several tests of the benchmarks use."""

import json
import sys
from dataclasses import replace

import pytest

from tests.small_model import SMALL, VISION
from tools.bench import __main__ as command
from tools.bench import rows


@pytest.fixture
def tiny(monkeypatch):
    """Replaces the preset "bench" by a tiny model config. Some of its windows are not full."""
    config = replace(SMALL, vision=replace(VISION, grid=7))
    monkeypatch.setitem(rows.PRESETS, "bench", config)
    return config


@pytest.fixture
def bench(monkeypatch, capsys):
    """bench(*flags) runs tools.bench -> (its JSON line as a dict, its table)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])
        command.main()
        table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
        return json.loads(line), table

    return run
