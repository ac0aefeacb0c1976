"""tools.bench attend: rows like the stream's, and implementations that compute the same."""

import pytest
import torch

import attention
from tools.bench import attend
from tools.bench.stream import ExampleSize

pytestmark = pytest.mark.slow


def test_the_mask_of_a_row_is_the_rule_of_message_trees():
    """Against a loop over pairs: a query sees the trunk and its own branch before it, and the
    visual tokens of its example if it is one. 83 of every 88 tokens of a trunk are visual."""
    examples = [ExampleSize(130, 2, 100, [10, 20]), ExampleSize(9, 0, 4, [5]),
                ExampleSize(20, 1, 10, [4, 6])]
    positions = []  # of each token: example, branch (0 the trunk), whether it is visual
    for number, example in enumerate(examples):
        for position in range(example.trunk):
            visual = position > 0 and position % 88 < 83 and example.crops > 0
            positions.append((number, 0, visual))
        for branch, length in enumerate(example.branches, 1):
            positions += [(number, branch, False)] * length
    positions += [(-1, 0, False)] * 3  # padding
    expected = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for q, (example, branch, visual) in enumerate(positions):
        for k, (key_example, key_branch, key_visual) in enumerate(positions):
            if example == key_example:
                causal = k <= q and key_branch in (0, branch)
                expected[q, k] = causal or (visual and key_visual)
    row = attend.packed_row(examples, len(positions))
    assert torch.equal(attention.allow(row.visible_until, row.bidir)[0], expected)
    assert row.starts == [0, 130, 139, 159]


def test_implementations_agree_and_one_that_does_not_ends_the_run(bench, monkeypatch):
    flags = ["attend", "--tokens=700", "--rows=2", "--rounds=2"]
    line, table = bench(*flags)
    case = line["cases"]["700"]
    masks = [attention.allow(row.visible_until, row.bidir) for row in attend.rows(700, 2)]
    area = sum(float(mask.float().mean()) for mask in masks) / 2
    assert case["area"] == pytest.approx(area, rel=1e-3)
    assert list(case["ways"]) == ["dense", "loop", "ours"]
    assert case["ways"]["dense"]["dense_over"]["median"] == 1
    for name, way in case["ways"].items():
        assert f"\n{name} " in table
        assert way["both"] > way["forward"] > 0

    def wrong(row):
        return lambda q, k, v: attend.dense(row)(q, k, 2 * v)

    monkeypatch.setitem(attend.WAYS, "ours", wrong)
    with pytest.raises(RuntimeError, match="ours differs from dense"):
        bench(*flags)
