"""A line lies where its numbers say, between the grid lines of round numbers."""

import numpy as np
import pytest
from PIL import Image

from evaluation import charts

BLUE = charts.COLOURS[1]


def draw(tmp_path, series, **options):
    """-> (720,1440,3) int; None without a file"""
    path = tmp_path / "chart.png"
    path.unlink(missing_ok=True)
    charts.line_chart(series, path, "step", "score", **options)
    return np.asarray(Image.open(path)).astype(int) if path.exists() else None


def height(array, column, colour):
    """The middle row of the pixels in a column that have the colour."""
    rows = np.nonzero(np.abs(array[:, column] - np.array(colour)).max(-1) <= 6)[0]
    return rows.mean()


@pytest.mark.parametrize("log", [False, True])
def test_a_line_lies_where_its_numbers_are(tmp_path, log):
    """The second of two series, from 0.1 to 1, straight on its axis; the first is out of the
    way."""
    first, second = [(0, 0.1), (100, 0.1)], [(k, 10 ** (k / 100 - 1) if log else k / 100)
                                              for k in range(10, 101)]
    array = draw(tmp_path, {"first": first, "second": second}, log=log)
    for x in (20, 50, 90):
        column = round(charts.LEFT + (charts.RIGHT - charts.LEFT) * x / 100)
        wanted = charts.BOTTOM - (charts.BOTTOM - charts.TOP) * x / 100
        assert height(array, column, BLUE) == pytest.approx(wanted, abs=2)
