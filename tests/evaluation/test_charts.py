"""A line lies where its numbers say, between the grid lines of round numbers."""

import numpy as np
import pytest
from PIL import Image

from evaluation import charts


def column_of(x):
    """The column of pixels at x on an axis from 0 to 100."""
    return round(charts.LEFT + (charts.RIGHT - charts.LEFT) * x / 100)


def row_of(y):
    """The row of pixels at y on an axis from 0 to 1."""
    return charts.BOTTOM - (charts.BOTTOM - charts.TOP) * y


def test_only_finite_numbers_are_drawn():
    points = [(1, 0.5), (2, None), (3, "4"), (4, float("inf")), (5, 0), (6, [7])]
    assert charts.finite(points, log=False) == [(1, 0.5), (5, 0)]
    assert charts.finite(points, log=True) == [(1, 0.5)]


@pytest.mark.parametrize("log", [False, True])
def test_a_line_lies_where_its_numbers_are(tmp_path, log):
    """The second of two series, from 0.1 to 1, straight on its axis; the first is out of the
    way."""
    first, second = [(0, 0.1), (100, 0.1)], [(k, 10 ** (k / 100 - 1) if log else k / 100)
                                              for k in range(10, 101)]
    path = tmp_path / "chart.png"
    series = {"first": first, "second": second}
    charts.line_chart(series, path, "step", "score", log=log)
    off = np.asarray(Image.open(path)).astype(int) - charts.COLOURS[1]  # (h,w,3)
    for x in (20, 50, 90):
        rows = np.nonzero(np.abs(off[:, column_of(x)]).max(-1) <= 6)[0]
        assert rows.mean() == pytest.approx(row_of(x / 100), abs=2)


def test_labels_stand_at_the_ends_of_their_lines_and_30_pixels_apart():
    assert charts.spread([100, 300]) == [100, 300]
    assert charts.spread([100, 110, 115, 400]) == [100, 130, 160, 400]
    assert charts.spread([600, 610, 635]) == [charts.BOTTOM - 60, charts.BOTTOM - 30, charts.BOTTOM]


@pytest.mark.parametrize(("name", "label"), [
    ("held out coco-held-out.jsonl 0.802", "held out coco-held-out.jsonl 0.802"),
    (f"held out {'a' * 90}.jsonl 0.802", "held out aaaaaaa..aaa.jsonl 0.802"),
])
def test_a_long_label_loses_its_middle_and_keeps_its_number(name, label, tmp_path):
    font = charts.ImageFont.load_default(24)
    found = charts.shorten(name, font)
    assert (found[:15], found[-12:]) == (label[:15], label[-12:])
    assert 300 < font.getlength(found) < charts.WIDTH - charts.RIGHT - 16
    for text in (name, found):
        charts.line_chart({text: [(0, 0.5)]}, tmp_path / f"{len(text)}.png", "step", "score")
    pages = [Image.open(tmp_path / f"{len(text)}.png").tobytes() for text in (name, found)]
    assert pages[0] == pages[1]


def test_pale_points_are_joined_below_the_lines_and_ticks_have_their_numbers(tmp_path):
    """A pale line from corner to corner, and what is left of the axis without the other ticks."""
    path = tmp_path / "chart.png"
    pixels = []
    for pale in ((), [(0, 0.03), (100, 0.97)]):
        charts.line_chart({"a": [(0, 0.5), (100, 0.5)]}, path, "step", "score", pale=pale)
        pixels.append(np.asarray(Image.open(path)).astype(int))
    changed = (pixels[0] != pixels[1]).any(-1)
    rows = np.nonzero(changed[:, column_of(30)])[0]
    assert rows.mean() == pytest.approx(row_of(0.03 + 0.94 * 0.3), abs=2)
    for y in (0, 0.2, 0.4, 0.6, 0.8, 1):
        row = round(row_of(y))
        number = pixels[0][row - 10 : row + 10, charts.LEFT - 50 : charts.LEFT - 12]
        assert (number < 200).any(), y
