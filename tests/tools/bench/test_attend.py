"""tools.bench attend: implementations that compute the same in rows of the stream."""

import pytest

import attention
from tools.bench import attend

pytestmark = pytest.mark.slow


def test_implementations_agree_and_one_that_does_not_ends_the_run(bench, monkeypatch):
    flags = ["attend", "--tokens=1024", "--rows=2", "--rounds=2"]
    line, table = bench(*flags)
    case = line["cases"]["1024"]
    rows = attend.rows(1024, 2)
    assert [row.starts for row in rows] == [[0, 796, 1010], [0, 916]]
    assert [bool(row.bidir.any()) for row in rows] == [False, True]      # text; images
    masks = [attention.allow(row.visible_until, row.bidir) for row in rows]
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
