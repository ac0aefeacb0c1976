"""Ticks are round, a line lies where its numbers say, labels do not cover each other."""

import math
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from evaluation import charts


def pixels(image):
    """A PIL image or the path of one -> (h,w,3) int"""
    return np.asarray(image if isinstance(image, Image.Image) else Image.open(image)).astype(int)


def of_colour(array, colour, tolerance=6):
    """Rows and columns of the pixels (h,w,3) that have the colour."""
    return np.nonzero(np.abs(array - np.array(colour)).max(-1) <= tolerance)


# -------------------------------------------------------------------------------------------------
# axes


@pytest.mark.parametrize(("values", "labels"), [
    ([0.2, 6.6], ["0", "2", "4", "6", "8"]),
    # 0 would cost more than half of the axis
    ([2.1, 2.4], ["2.10", "2.15", "2.20", "2.25", "2.30", "2.35", "2.40"]),
    ([3200], ["1,000", "2,000", "3,000", "4,000", "5,000"]),
    ([0, 0], ["-0.6", "-0.4", "-0.2", "0", "0.2", "0.4", "0.6"]),
    ([-3, 12], ["-5.0", "-2.5", "0", "2.5", "5.0", "7.5", "10.0", "12.5"]),
    ([0, 30000], ["0", "5,000", "10,000", "15,000", "20,000", "25,000", "30,000"]),
])
def test_ticks_are_round_and_hold_every_value(values, labels):
    axis = charts.linear_axis(values, 100, 0)
    assert axis.labels == labels
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    # no label is rounded
    assert [float(label.replace(",", "")) for label in labels] == pytest.approx(axis.ticks)
    assert (axis.place(axis.low), axis.place(axis.high)) == (100, 0)
    assert 4 <= len(labels) <= 8


@pytest.mark.parametrize("seed", range(30))
def test_any_values_have_ticks(seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=5) * 10.0 ** rng.integers(-8, 9)
    values = (values + rng.normal() * 10.0 ** rng.integers(-8, 9)).tolist()
    for make, given in ((charts.linear_axis, values), (charts.log_axis, [abs(v) for v in values])):
        axis = make(given, 0, 1)
        assert axis.low <= min(given) * (1 if min(given) < 0 else 1 + 1e-9)
        assert max(given) <= axis.high + 1e-9 * abs(axis.high)
        assert len(axis.ticks) == len(axis.labels) >= 2
        for value in given:
            place = axis.place(value)
            assert 0 <= place <= 1 or math.isclose(place, round(place), abs_tol=1e-6)


def test_a_log_axis_has_powers_of_ten():
    axis = charts.log_axis([3e-6, 2e-4], 0, 100)
    assert axis.labels == ["2e-6", "5e-6", "1e-5", "2e-5", "5e-5", "1e-4", "2e-4"]
    assert axis.place(math.sqrt(axis.low * axis.high)) == pytest.approx(50)
    wide = charts.log_axis([1e-8, 1e-3], 0, 1)
    assert wide.labels == ["1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "0.001"]
    assert charts.log_axis([0.5, 0.5], 0, 1).labels == ["0.5", "1"]


# -------------------------------------------------------------------------------------------------
# line charts


def test_labels_are_moved_apart_and_no_further():
    rng = np.random.default_rng(0)
    for _ in range(200):
        wanted = rng.uniform(10, 90, rng.integers(1, 7)).tolist()
        found = charts.spread(wanted, 15, 10, 100)
        in_order = np.array(found)[np.argsort(wanted)]
        assert (np.diff(in_order) >= 15 - 1e-9).all()
        assert min(found) >= 10 - 1e-9
        assert max(found) <= 100 + 1e-9
    assert charts.spread([20, 50, 80], 15, 0, 100) == [20, 50, 80]
    assert charts.spread([50, 50, 50], 15, 0, 60) == [30, 45, 60]


def test_a_line_lies_where_its_numbers_are():
    """The corners of a zigzag, between grid lines whose values are known."""
    image = charts.line_chart({"a": [(0, 0), (50, 1), (100, 0.5)]}, "step", ylimits=(0, 1))
    assert image.size == (1440, 720)
    array = pixels(image)
    rows, columns = np.nonzero((array == charts.GRID).all(-1))
    left, right = columns.min(), columns.max()
    top = rows.min() + 0.5                               # of y = 1; lines are two pixels wide
    bottom = np.nonzero((array[:, left + 20] == charts.SOFT).all(-1))[0].max() - 0.5
    rows, columns = of_colour(array, charts.COLOURS[0])
    for x in range(2, 99, 4):
        column = round(left + (right - left) * x / 100)
        wanted = x / 50 if x <= 50 else 1 - (x - 50) / 100
        found = (bottom - rows[columns == column].mean()) / (bottom - top)
        assert found == pytest.approx(wanted, abs=0.02), x


def test_labels_of_lines_that_end_together_do_not_cover_each_other():
    series = {f"line number {k}": [(0, 0.1 * k), (10, 1.0)] for k in range(12)}
    array = pixels(charts.line_chart(series, "step"))
    rows_of = [of_colour(array[:, 1262:], colour)[0] for colour in charts.COLOURS]
    assert all(len(rows) > 40 for rows in rows_of)
    spans = sorted((rows.min(), rows.max()) for rows in rows_of)
    assert all(above[1] < below[0] for above, below in pairwise(spans))
    # the other five lines are there, grey
    assert len(of_colour(array[:, 200:1000], charts.OTHERS)[0]) > 500


def test_a_long_name_keeps_both_ends():
    short = charts.shorten("data/" + "x" * 90 + "/films.jsonl 0.312", 200)
    assert charts.text_width(short) <= 200
    assert short.startswith("data/")
    assert short.endswith("0.312")
    assert charts.shorten("a", 200) == "a"


def test_points_that_are_not_finite_or_positive_are_left_out(tmp_path):
    def same(first, second, **options):
        return np.array_equal(pixels(charts.line_chart(first, "x", **options)),
                              pixels(charts.line_chart(second, "x", **options)))

    holes = [(0, 1.0), (1, None), (2, float("nan")), (3, float("inf")), (4, 2.0)]
    assert same({"a": holes, "none": [(0, None)]}, {"a": [(0, 1.0), (4, 2.0)]})
    assert same({"a": [(0, 0.0), (1, 1.0), (2, 10.0)]}, {"a": [(1, 1.0), (2, 10.0)]}, log=True)
    charts.save_line_chart({"none": [(0, None)]}, tmp_path / "none.png", "x")
    assert not (tmp_path / "none.png").exists()


# -------------------------------------------------------------------------------------------------
# error bars


def test_error_bars_reach_as_far_as_their_numbers(tmp_path):
    rows = [
        ("as it is", 0.8, 0.7, 0.9), ("without trees", 0.5, 0.45, 0.6),
        ("with nothing", 0.2, 0.2, 0.2),
    ]
    charts.save_bars(rows, tmp_path / "bars.png", "point F1", baseline=0.8)
    array = pixels(tmp_path / "bars.png")
    values, places = [], []
    for k, (_, _, low, high) in enumerate(rows):
        middle = round((12 + 26 * (k + 0.5)) * 2)
        above_dot = array[middle - 11 : middle - 8]      # the bar's ends rise higher than the dot
        columns = of_colour(above_dot, charts.COLOURS[0])[1]
        values += [low, high]
        places += [columns.min(), columns.max()]
    slope, start = np.polyfit(values, places, 1)
    assert np.abs(slope * np.array(values) + start - places).max() < 5
    assert slope > 100
    baseline = of_colour(array[: 12 * 2 + 6], charts.COLOURS[1])[1]
    assert abs(baseline.mean() - (slope * 0.8 + start)) < 3
    with pytest.raises(AssertionError):
        charts.save_bars([("wrong", 0.8, 0.9, 0.7)], tmp_path / "bars.png")
