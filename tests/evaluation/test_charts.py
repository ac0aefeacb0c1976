"""Charts: ticks are round, a line lies where its numbers say, names do not cover each other, a log is read as it counts."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from evaluation import charts


def pixels(picture):
    """A picture, its pixels or its path -> (h,w,3) int"""
    return np.asarray(picture if isinstance(picture, (Image.Image, np.ndarray)) else Image.open(picture)).astype(int)


def of_colour(picture, colour, slack=6):
    """(rows, columns) of the pixels that have it."""
    return np.nonzero(np.abs(pixels(picture) - np.array(colour)).max(-1) <= slack)


@pytest.fixture
def drawn(monkeypatch):
    """What `lines` was asked to draw: [(series, xlabel, how), ..]"""
    asked = []
    monkeypatch.setattr(charts, "lines", lambda series, path, xlabel, **how: asked.append((series, xlabel, how)))
    return asked


@pytest.mark.parametrize(("values", "names"), [
    ([0.2, 6.6], ["0", "2", "4", "6", "8"]),
    ([2.1, 2.4], ["2.10", "2.15", "2.20", "2.25", "2.30", "2.35", "2.40"]),              # 0 would cost more than half of it
    ([3200], ["1,000", "2,000", "3,000", "4,000", "5,000"]),
    ([0, 0], ["-0.6", "-0.4", "-0.2", "0", "0.2", "0.4", "0.6"]),
    ([-3, 12], ["-5.0", "-2.5", "0", "2.5", "5.0", "7.5", "10.0", "12.5"]),
    ([0, 30000], ["0", "5,000", "10,000", "15,000", "20,000", "25,000", "30,000"]),
])
def test_ticks_are_round_and_hold_every_value(values, names):
    axis = charts.axis(values, 100, 0)
    assert axis.names == names and axis.low <= min(values) and max(values) <= axis.high
    assert [float(name.replace(",", "")) for name in axis.names] == pytest.approx(axis.ticks)            # no tick is told rounded
    assert (axis(axis.low), axis(axis.high)) == (100, 0) and 4 <= len(names) <= 8


@pytest.mark.parametrize("seed", range(30))
def test_any_values_have_ticks(seed):
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=5) * 10.0 ** rng.integers(-8, 9) + rng.normal() * 10.0 ** rng.integers(-8, 9)).tolist()
    for log in (False, True):
        given = [abs(v) for v in values] if log else values
        axis = charts.axis(given, 0, 1, log)
        assert axis.low <= min(given) * (1 if min(given) < 0 else 1 + 1e-9) and max(given) <= axis.high + 1e-9 * abs(axis.high)
        assert len(axis.ticks) == len(axis.names) >= 2 and all(0 <= axis(v) <= 1 or math.isclose(axis(v), round(axis(v)), abs_tol=1e-6)
                                                               for v in given)


def test_a_log_axis_has_powers_of_ten():
    axis = charts.axis([3e-6, 2e-4], 0, 100, log=True)
    assert axis.names == ["2e-6", "5e-6", "1e-5", "2e-5", "5e-5", "1e-4", "2e-4"]
    assert axis(math.sqrt(axis.low * axis.high)) == pytest.approx(50)
    assert charts.axis([1e-8, 1e-3], 0, 1, log=True).names == ["1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "0.001"]
    assert charts.axis([0.5, 0.5], 0, 1, log=True).names == ["0.5", "1"]


def test_names_are_moved_apart_and_no_further():
    rng = np.random.default_rng(0)
    for _ in range(200):
        wanted = rng.uniform(10, 90, rng.integers(1, 7)).tolist()
        found = charts.apart(wanted, 15, 10, 100)
        order = np.argsort(wanted)
        assert (np.diff(np.array(found)[order]) >= 15 - 1e-9).all() and min(found) >= 10 - 1e-9 and max(found) <= 100 + 1e-9
    assert charts.apart([20, 50, 80], 15, 0, 100) == [20, 50, 80]
    assert charts.apart([50, 50, 50], 15, 0, 60) == [30, 45, 60]


def test_a_line_lies_where_its_numbers_are():
    """In units of its own axis: the corners of a zigzag, between grid lines whose values are known."""
    picture = charts.chart({"a": [(0, 0), (50, 1), (100, 0.5)]}, "step", y=(0, 1))
    assert picture.size == (1440, 720)
    rows, columns = np.nonzero((pixels(picture) == charts.GRID).all(-1))
    top, left, right = rows.min() + 0.5, columns.min(), columns.max()                    # of y = 1; lines are two pixels wide
    bottom = np.nonzero((pixels(picture)[:, left + 20] == charts.SOFT).all(-1))[0].max() - 0.5
    rows, columns = of_colour(picture, charts.COLOURS[0])
    for t in range(2, 99, 4):
        at = round(left + (right - left) * t / 100)
        wanted = t / 50 if t <= 50 else 1 - (t - 50) / 100
        assert (bottom - rows[columns == at].mean()) / (bottom - top) == pytest.approx(wanted, abs=0.02), t


def test_names_of_lines_that_end_together_do_not_cover_each_other():
    series = {f"line number {k}": [(0, 0.1 * k), (10, 1.0)] for k in range(12)}
    picture = charts.chart(series, "step")
    taken = [of_colour(pixels(picture)[:, 1262:], colour)[0] for colour in charts.COLOURS]
    spans = sorted((rows.min(), rows.max()) for rows in taken)
    assert all(len(rows) > 40 for rows in taken) and all(a[1] < b[0] for a, b in pairwise(spans))
    assert len(of_colour(pixels(picture)[:, 200:1000], charts.OTHERS)[0]) > 500          # the other five are there, grey


def test_a_long_name_keeps_both_ends():
    name = "data/" + "x" * 90 + "/films.jsonl 0.312"
    cut = charts.short(name, 200)
    assert charts.font().getlength(cut) <= 400 and cut.startswith("data/") and cut.endswith("0.312") and charts.short("a", 200) == "a"


def test_what_is_not_a_number_is_left_out(tmp_path):
    holes = {"a": [(0, 1.0), (1, None), (2, float("nan")), (3, float("inf")), (4, 2.0)], "none": [(0, None)]}
    assert np.array_equal(pixels(charts.chart(holes, "x")), pixels(charts.chart({"a": [(0, 1.0), (4, 2.0)]}, "x")))
    assert np.array_equal(pixels(charts.chart({"a": [(0, 0.0), (1, 1.0), (2, 10.0)]}, "x", log=True)),
                          pixels(charts.chart({"a": [(1, 1.0), (2, 10.0)]}, "x", log=True)))
    charts.lines({"none": [(0, None)]}, tmp_path / "none.png", "x")
    assert not (tmp_path / "none.png").exists()


def test_the_running_mean_is_that_of_neighbours():
    values = np.random.default_rng(0).normal(size=1000)
    found = charts.running_mean(list(enumerate(values.tolist())))
    wanted = [values[max(k - 10, 0) : k + 11].mean() for k in range(1000)]
    assert [x for x, _ in found] == list(range(1000)) and np.allclose([v for _, v in found], wanted)
    assert charts.running_mean([(1, 5.0), (2, 7.0)]) == [(1, 5.0), (2, 7.0)]             # a short run is shown as it is


LOG = [{"config": {}}, {"step": 1, "loss": 3.0, "lr": {"vit": 1e-6, "llm": 1e-5}, "seconds": 30, "nll_by_source": {"b": 2.0, "a": 4.0}},
       {"step": 2, "loss": 9.0, "lr": {"vit": 2e-6, "llm": 2e-5}, "seconds": 30, "nll_by_source": {"b": 9.0}},
       {"step": 2, "eval": {"point_f1": 0.25, "count_accuracy": 0.5}},
       {"step": 2, "loss": 2.0, "lr": {"vit": 3e-6, "llm": 3e-5}, "seconds": 30, "nll_by_source": {"b": 2.5}},    # after a resume
       {"step": 3, "loss": None, "lr": {"vit": 4e-6, "llm": 4e-5}, "seconds": 60, "nll_by_source": None},             # not finite
       {"step": 3, "eval": {"point_f1": 0.75, "caption_exact": 0.5}}]


def test_losses_are_read_by_source_and_the_later_line_counts(drawn):
    charts.losses(LOG, "loss.png")
    (series, xlabel, how), = drawn
    every = [(1, 3.0), (2, 2.0)]
    assert series == {"loss 2.000": every, "b 2.500": [(1, 2.0), (2, 2.5)], "a 4.000": [(1, 4.0)], "": [*every, (3, None)]}, xlabel
    assert how["log"] and how["faint"] == ("",)
    assert how["colours"]["loss 2.000"] == charts.INK and how["colours"]["b 2.500"] == charts.COLOURS[0]


def test_rates_are_read_by_group(drawn):
    charts.rates(LOG, "lr.png")
    (series, _, how), = drawn
    assert series == {"vit": [(1, 1e-6), (2, 3e-6), (3, 4e-6)], "llm": [(1, 1e-5), (2, 3e-5), (3, 4e-5)]} and how["log"]


def test_scores_stand_at_the_minutes_trained_by_then(drawn):
    charts.progress(LOG, "eval.png", begun=60)
    (series, xlabel, how), = drawn
    assert series == {"point_f1": [(2.0, 0.25), (3.5, 0.75)]} and xlabel == "minutes" and how["y"] == (0, 1)


def test_curves_of_a_run_are_files_and_none_where_there_is_nothing(tmp_path):
    log = json.loads(json.dumps(LOG))
    for name, draw in (("loss", charts.losses), ("lr", charts.rates), ("eval", charts.progress)):
        draw(log, tmp_path / f"{name}.png")
        assert pixels(tmp_path / f"{name}.png").shape == (720, 1440, 3)
        draw([LOG[0]], tmp_path / f"no-{name}.png")
        assert not (tmp_path / f"no-{name}.png").exists()
    many = [{"step": k, "loss": 1.0, "lr": {}, "nll_by_source": {f"s{n:02}": 1.0 for n in range(40)}} for k in range(1, 4)]
    charts.losses(many, tmp_path / "many.png")
    assert len(of_colour(tmp_path / "many.png", charts.COLOURS[-1])[0]) > 40


def test_error_bars_reach_as_far_as_their_numbers(tmp_path):
    rows = [("as it is", 0.8, 0.7, 0.9), ("without trees", 0.5, 0.45, 0.6), ("with nothing", 0.2, 0.2, 0.2)]
    charts.bars(rows, tmp_path / "bars.png", "point F1", baseline=0.8)
    found = []
    for k, (_, *numbers) in enumerate(rows):
        middle = round((12 + 26 * (k + 0.5)) * 2)
        columns = of_colour(pixels(tmp_path / "bars.png")[middle - 11 : middle - 8], charts.COLOURS[0])[1]  # ends rise above the dot
        found += [(numbers[1], columns.min()), (numbers[2], columns.max())]
    values, at = np.array(found).T
    slope, start = np.polyfit(values, at, 1)
    assert np.abs(slope * values + start - at).max() < 5 and slope > 100
    line = of_colour(pixels(tmp_path / "bars.png")[: 12 * 2 + 6], charts.COLOURS[1])[1]
    assert abs(line.mean() - (slope * 0.8 + start)) < 3
    with pytest.raises(AssertionError):
        charts.bars([("wrong", 0.8, 0.9, 0.7)], tmp_path / "bars.png")


def test_a_sheet_holds_pictures_of_different_sizes(tmp_path):
    for name, size, colour in (("a", (30, 20), "red"), ("b", (10, 50), "blue"), ("c", (5, 5), "lime")):
        Image.new("RGB", size, colour).save(tmp_path / f"{name}.png")
    charts.sheet([tmp_path / f"{name}.png" for name in "abc"], tmp_path / "sheet.png", columns=2)
    found = pixels(tmp_path / "sheet.png")
    assert found.shape == (104, 64, 3) and found[5, 5].tolist() == [255, 0, 0] and found[40, 40].tolist() == [0, 0, 255]
    assert found[56, 2].tolist() == [0, 255, 0]
    charts.sheet([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
