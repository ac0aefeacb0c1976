"""python -m tools.bench: help, the JSON line, and mistakes in the flags of every benchmark."""

import os
import sys
from datetime import date

import pytest

from tools.bench import measure, pack
from tools.command import print_table
from training import log

pytestmark = pytest.mark.slow


def test_the_json_line_holds_flags_machine_and_four_digits_of_every_float(bench, monkeypatch):
    results = {"a": [1234567, 0.123456, {"b": 2.23456e11}], "c": "0.123456", "d": None, "e": True}
    monkeypatch.setattr(pack, "run", lambda args: results)
    line, _ = bench("pack", "--n", 7)
    expected = {"a": [1234567, 0.1235, {"b": 2.235e11}], "c": "0.123456", "d": None, "e": True}
    assert line["cases"] == expected
    assert (line["bench"], line["n"], line["seeds"]) == ("pack", 7, 3)
    assert str(os.cpu_count()) in line["hardware"]
    assert (line["commit"], line["date"]) == (log.commit(), str(date.today()))


def test_implementations_alternate_in_every_round():
    called = []
    runs = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    results = measure.run_rounds(runs, 3)
    assert "".join(called) == "abccbaabc"
    assert results[1] == {"c": 4, "b": 5, "a": 6}


def test_a_table_shows_four_digits_and_the_range_of_ratios(capsys):
    ratio = measure.spread([3.0, 1.0, 2.0])
    print_table("unit", {"ours": {"s": 0.123456, "x": ratio}, "b": {"s": 12345, "x": None}})
    assert capsys.readouterr().out.splitlines() == [
        "unit       s        x",
        "ours  0.1235  2 (1-3)",
        "b      12345        -",
    ]


@pytest.mark.parametrize(("flags", "message"), [
    ("pack --n 0", "argument --n: 0 must be at least 1"),
    ("attend --tokens 3", "argument --tokens: 3 must be at least 512"),
    ("step --cases image", "pip install -r requirements-dev.txt"),
    *((f"{name} --device cuda:99", "--device cuda:99 cannot be used")
      for name in ("step", "attend", "generate", "load")),
])
def test_a_mistake_ends_in_one_sentence(flags, message, tiny, bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="2"):
        bench(*flags.split())
    printed = capsys.readouterr()
    (sentence,) = printed.err.splitlines()
    assert message in sentence
    assert not printed.out
