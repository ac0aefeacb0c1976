"""What several tests of the benchmarks share."""

import json
import sys

import pytest

import model as models
from tools.bench import __main__ as command
from tools.bench import peers
from vision import VisionConfig

VISION = VisionConfig(n_layer=2, n_embd=32, n_head=2, n_hidden=64, feature_layers=(1, 0), grid=7,
                      patch=4, overlap_margin=1)
TINY = models.ModelConfig(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, n_hidden=48,
                          n_vocab=400, vision=VISION)


@pytest.fixture
def tiny(monkeypatch):
    """A model config that stands in for the preset "small"."""
    monkeypatch.setitem(peers.PRESETS, "small", TINY)
    return TINY


@pytest.fixture
def bench(monkeypatch, capsys):
    """A function that runs tools.bench with flags -> (its JSON line as a dict, its table)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])
        command.main()
        table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
        return json.loads(line), table

    return run
