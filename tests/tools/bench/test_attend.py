"""tools.bench attend: rows like the stream's, ways that compute the same, a table and one JSON
line."""

import json
import os
import sys
from datetime import date

import pytest
import torch

import attention
from tools.bench import __main__ as command
from tools.bench import attend as bench
from tools.bench.stream import ExampleSize, stream
from training import log


def relative_visibility(example):
    """visible_until of an example's own tokens, as the rule of message trees has it."""
    expected = [example.tokens] * example.trunk
    for length in example.branches:
        expected += [len(expected) + length] * length
    return tuple(expected)


@pytest.mark.parametrize("tokens", [700, 4096])
def test_a_row_is_a_pack_of_the_stream(tokens):
    rows = bench.rows(tokens, 4)
    assert len(rows) == 4
    known = {relative_visibility(e) for e in stream(2, 400, 0)}
    for row in rows:
        assert row.visible_until.shape == row.bidir.shape == (1, tokens)
        assert row.visible_until.dtype == row.bidir.dtype == torch.int32
        until = row.visible_until[0].tolist()
        for start, end in zip(row.starts, row.starts[1:], strict=False):
            assert tuple(x - start for x in until[start:end]) in known
        n_used = row.starts[-1]
        assert n_used >= 0.8 * tokens
        assert set(until[n_used:]) <= {tokens}
        assert not row.bidir[0, n_used:].any()
    assert any(row.bidir.any() for row in rows)
    assert any(len(row.starts) > 2 for row in rows)


def test_the_mask_of_a_row_is_the_rule_of_message_trees():
    """Against a loop over pairs: a query sees the trunk and its own branch before it, and the
    visual tokens of its example if it is one. 83 of every 88 tokens of a trunk are visual."""
    examples = [
        ExampleSize(130, 2, 100, [10, 20]),
        ExampleSize(9, 0, 4, [5]),
        ExampleSize(20, 1, 10, [4, 6]),
    ]
    places = []  # of each token: example, branch (0 the trunk), whether it is visual
    for number, example in enumerate(examples):
        for place in range(example.trunk):
            visual = place > 0 and place % 88 < 83 and example.crops > 0
            places.append((number, 0, visual))
        for branch, length in enumerate(example.branches, 1):
            places += [(number, branch, False)] * length
    places += [(-1, 0, False)] * 3  # padding
    expected = torch.zeros(len(places), len(places), dtype=torch.bool)
    for q, (example, branch, visual) in enumerate(places):
        for k, (key_example, key_branch, key_visual) in enumerate(places):
            if example == key_example:
                causal = k <= q and key_branch in (0, branch)
                expected[q, k] = causal or (visual and key_visual)
    row = bench.packed_row(examples, len(places))
    assert torch.equal(attention.allow(row.visible_until, row.bidir)[0], expected)
    assert row.starts == [0, 130, 139, 159]


def test_a_row_of_branches_is_one_video_with_so_many():
    row, other = bench.rows(512, 2, branches=6)
    assert row is other
    ends = [512] * 128
    for branch in range(6):
        ends += [128 + 64 * (branch + 1)] * 64
    assert row.visible_until[0].tolist() == ends
    assert (row.bidir[0, :128] > 0).sum() > 100
    assert not row.bidir[0, 128:].any()


def test_ways_agree_and_one_that_does_not_ends_the_run(monkeypatch, capsys):
    flags = "--tokens=700 --rows=2 --heads=4 --dim=8 --rounds=2"
    monkeypatch.setattr(sys, "argv", ["bench", "attend", *flags.split()])
    command.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert str(os.cpu_count()) in result["hardware"]
    assert result["commit"] == log.commit()
    assert result["date"] == str(date.today())
    case = result["cases"]["700"]
    masks = [attention.allow(row.visible_until, row.bidir) for row in bench.rows(700, 2)]
    area = sum(float(mask.float().mean()) for mask in masks) / 2
    assert case["area"] == pytest.approx(area, rel=1e-3)
    assert set(case["ways"]) == {"dense", "loop", "ours"}
    assert case["ways"]["dense"]["dense_over"]["median"] == 1
    for way in case["ways"].values():
        assert way["both"] > way["forward"] > 0
        assert way["off"] < 1e-4

    def wrong(q, k, v, mask):
        return attention.attend(q, k, 2 * v, mask)

    monkeypatch.setitem(bench.WAYS, "ours", bench.WAYS["ours"]._replace(attend=wrong))
    with pytest.raises(RuntimeError, match="ours differs from dense"):
        command.main()


def test_what_is_timed_includes_the_gradients():
    (row,) = bench.rows(700, 1)
    inputs = [torch.randn(1, 700, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    for way in bench.GPU_WAYS.values():
        times, (output, *gradients) = bench.measure(way, row, inputs, torch.device("cpu"))
        assert output.shape == inputs[0].shape
        assert [x.shape for x in gradients] == [x.shape for x in inputs]
        assert all(x.abs().sum() > 0 for x in (output, *gradients))
        assert 0 < times["forward"] < times["both"]
        assert times["bytes"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokens 0", "at least 1"),
        ("--rows 0", "at least 1"),
        ("--heads 3", "multiple of --kv"),
        ("--tokens 3", "fill 0"),
        ("--dim 0", "at least 1"),
        ("--branches -1", "--branches -1"),
        ("--tokens 64 --branches 33", "half of a row"),
        ("--device nowhere", "--device nowhere"),
    ],
)
def test_a_mistake_ends_in_one_sentence(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "attend", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
