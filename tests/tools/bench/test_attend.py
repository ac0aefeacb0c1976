"""tools.bench attend: rows like the stream's, ways that compute the same, a table and one JSON line."""

import json
import os
import sys
from datetime import date

import pytest
import torch

import attention
from tools.bench import __main__ as bench
from tools.bench import attend as attend_bench
from tools.bench import pack as pack_bench
from training import log as journal


@pytest.mark.parametrize("tokens", [700, 4096])
def test_a_row_is_a_pack_of_the_stream(tokens):
    rows = attend_bench.rows(tokens, 4)
    known = {(e.tokens, e.trunk, *e.branches) for e in pack_bench.stream(2, 400, 0)}
    for doc, branch, bidir in rows:
        assert doc.shape == branch.shape == bidir.shape == (1, tokens) and (doc >= 0).sum() >= 0.8 * tokens
        for number in range(int(doc.max()) + 1):
            of = branch[doc == number]
            assert (len(of), *(int((of == j).sum()) for j in range(int(of.max()) + 1))) in known
        assert not bidir[branch > 0].any()
    docs, branches, images = map(torch.cat, zip(*rows, strict=True))
    assert images.any() and branches.max() > 1 and docs.max() > 0 and len(docs) == 4


def test_a_row_of_branches_is_one_film_with_so_many():
    (doc, branch, bidir), other = attend_bench.rows(512, 2, branches=6)
    assert branch[0].bincount().tolist() == [128, *[64] * 6] and not doc.any() and all(map(torch.equal, (doc, branch, bidir), other))
    assert bidir[branch == 0].sum() > 100 and not bidir[branch > 0].any()


def test_ways_agree_and_one_that_does_not_ends_the_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "attend", "--tokens=700", "--rows=2", "--heads=4", "--dim=8", "--rounds=2"])
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    case = result["cases"]["700"]
    assert str(os.cpu_count()) in result["hardware"] and result["commit"] == journal.commit() and result["date"] == str(date.today())
    assert case["area"] == pytest.approx(sum(float(attention.allow(*row).float().mean()) for row in attend_bench.rows(700, 2)) / 2,
                                         rel=1e-3)
    assert set(case["ways"]) == {"dense", "loop", "ours"} and case["ways"]["dense"]["dense_over"]["median"] == 1
    assert all(way["both"] > way["forward"] > 0 and way["off"] < 1e-4 for way in case["ways"].values())
    monkeypatch.setitem(attend_bench.WAYS, "ours", (attention.packed_mask, lambda q, k, v, mask: attention.attend(q, k, 2 * v, mask)))
    with pytest.raises(RuntimeError, match="ours differs from dense"):
        bench.main()


def test_a_gpu_is_called_by_its_name_and_a_processor_by_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert journal.hardware(torch.device("cuda:1")) == "GPU of cuda:1"
    monkeypatch.setattr(journal.Path, "is_file", lambda path: False)     # not on Linux
    monkeypatch.setattr(journal.platform, "processor", lambda: "")
    monkeypatch.setattr(journal.platform, "machine", lambda: "arm64")
    assert journal.hardware("mps") == f"{os.cpu_count()} cores, arm64"


def test_four_digits_of_every_float_and_no_other_number():
    assert bench.short({"a": [1234567, 0.123456, {"b": 2.23456e11}], "c": "0.123456", "d": None, "e": True}) == {
        "a": [1234567, 0.1235, {"b": 2.235e11}], "c": "0.123456", "d": None, "e": True}


@pytest.mark.parametrize(("flags", "said"), [("--tokens 0", "at least 1"), ("--rows 0", "at least 1"), ("--heads 3", "multiple of --kv"),
                                             ("--tokens 3", "fill 0"), ("--dim 0", "at least 1"),
                                             ("--branches -1", "--branches -1"), ("--tokens 64 --branches 33", "half of a row"),
                                             ("--device nowhere", "--device nowhere")])
def test_mistakes_end_in_one_sentence(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "attend", *flags.split()])
    with pytest.raises(SystemExit) as end:
        bench.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and said in error


def test_what_is_timed_includes_the_gradients():
    fields, = attend_bench.rows(700, 1)
    given = [torch.randn(1, 700, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    times, found = attend_bench.measure(attend_bench.WAYS["loop"], fields, given, torch.device("cpu"))
    assert [x.shape for x in found[1:]] == [x.shape for x in given] and all(x.abs().sum() > 0 for x in found)
    assert 0 < times["forward"] < times["both"] and times["bytes"] is None
