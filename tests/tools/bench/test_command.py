"""python -m tools.bench: help, and what its JSON line holds."""

import os
import sys

import pytest
import torch

from tools.bench import __main__ as command
from training import log


@pytest.mark.parametrize("words", [[], *([name] for name in command.COMMANDS)])
def test_help_says_what_is_measured(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words, "--help"])
    with pytest.raises(SystemExit, match="0"):
        command.main()
    printed = capsys.readouterr().out
    assert f"usage: {' '.join(['python -m tools.bench', *words])}" in printed
    assert f"    python -m tools.bench {' '.join(words)}" in printed
    assert "None)" not in printed


def test_floats_have_four_digits_and_no_other_number_changes():
    results = {"a": [1234567, 0.123456, {"b": 2.23456e11}], "c": "0.123456", "d": None, "e": True}
    expected = {"a": [1234567, 0.1235, {"b": 2.235e11}], "c": "0.123456", "d": None, "e": True}
    assert command.four_digits(results) == expected


def test_the_json_line_names_the_gpu_or_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert log.hardware(torch.device("cuda:1")) == "GPU of cuda:1"
    monkeypatch.setattr(log.Path, "is_file", lambda path: False)  # not on Linux
    monkeypatch.setattr(log.platform, "processor", lambda: "")
    monkeypatch.setattr(log.platform, "machine", lambda: "arm64")
    assert log.hardware("mps") == f"{os.cpu_count()} cores, arm64"
