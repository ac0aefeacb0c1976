"""Points and tracks as text, both ways, against the official formatter (conformance/point_formatting.json)."""

import json
from pathlib import Path

import numpy as np
import pytest

import data

CASES = json.loads((Path(__file__).parents[1] / "conformance" / "point_formatting.json").read_text())["cases"]
SEPARATOR = {"html-v1": "\t", "html-v2": ";"}
MODE = {"point_then_count": "point_count", "count_then_point": "count_point"}      # two names for one sentence


def cases(kind):
    """The cases of a kind, without those that pin down a bug: ours clips a y outside the image, the official code does not."""
    some = [c for c in CASES if c["kind"] == kind and "known bug" not in c["input"].get("label", "")]
    return pytest.mark.parametrize("case", some, ids=[str(c["input"].get("label", c["input"].get("text"))) for c in some])


def unit(points, scale):
    sx, sy = scale if isinstance(scale, list) else (scale, scale)
    return [(x / sx, y / sy) for x, y in points]


def format_points(c, groups):
    return data.format_points(groups, c["label"], MODE.get(c["mode"], c["mode"]), SEPARATOR[c["format"]], c.get("alt"))


@cases("image")
def test_points_of_an_image_equal_the_official_text(case):
    c = case["input"]
    assert format_points(c, [(1, unit(c["points"], c["scale"]))]) == case["expected"]


@cases("multi_image")
def test_points_of_several_images_equal_the_official_text(case):
    c = case["input"]
    groups = [(i, unit(*points)) for i, *points in zip(c["image_indices"], c["points"], c["scale"], strict=True)]
    assert format_points(c, groups) == case["expected"]


@cases("video_points")
def test_points_of_a_video_equal_the_official_text(case):
    # an integer time stays one ("5"), as the training data has it; the formatter's own default would write "5.0"
    c = case["input"]
    groups = [(t, unit(points, c["scale"])) for t, points in zip(c["timestamps"], c["points"], strict=True)]
    assert format_points(c, groups) == case["expected"]


def frames_of(c):
    """A case's tracks as format_tracks takes them: seconds, visible objects only, fractions; and its three selections."""
    frames = []
    for frame in c["tracks"]:
        time = frame["time"]
        if isinstance(time, str):
            minutes, seconds = time.split(":")
            time = int(minutes) * 60 + float(seconds)
        seen = {name: p["point"] for name, p in frame["points"].items() if not p["occluded"]}
        frames.append((time, dict(zip(seen, unit(seen.values(), c["scale"]), strict=True))))
    if c.get("start_end_only"):                                          # of every object its first and its last frame
        times = {name: [t for t, seen in frames if name in seen] for _, seen in frames for name in seen}
        frames = [(t, {name: p for name, p in seen.items() if t in (times[name][0], times[name][-1])}) for t, seen in frames]
    if "from_initial_points" in c:                                       # the prompt has the start: the answer goes on from there
        frames = [(t, seen) for t, seen in frames if t > c["from_initial_points"][0]["time"]]
    return frames


@cases("tracks")
def test_tracks_equal_the_official_text(case):
    c = case["input"]
    assert data.format_tracks(frames_of(c), c["label"], SEPARATOR[c["format"]], c.get("alt_text")) == case["expected"]


@cases("extract")
def test_parsed_points_equal_the_official_ones(case):
    c = case["input"]
    ours, expected = data.parse_points(c["text"], c["w"], c["h"]), case["expected"]["with_ids"]
    assert [p[:2] for p in ours] == [tuple(p[:2]) for p in expected]
    assert [xy for p in ours for xy in p[2:]] == pytest.approx([xy for p in expected for xy in p[2:]], rel=1e-12)


@cases("extract_tracks")
def test_parsed_tracks_equal_the_official_ones(case):
    c = case["input"]
    frames = {}
    for time, name, x, y in data.parse_points(c["text"], c["w"], c["h"]):
        frame = frames.setdefault(time, {"time": time, "frame": round(time * c["video_fps"]), "points": {}})
        frame["points"][name] = {"point": [x, y]}
    assert list(frames.values()) == case["expected"]


def test_points_outside_the_image_are_clipped():
    assert data.format_points([(1, [(0.5, 1.05)])], "a") == '<points coords="1 1 500 1000">a</points>'
    assert data.format_points([(1, [(-0.01, 0.5)])], "a") == '<points coords="1 1 000 500">a</points>'


@pytest.mark.parametrize("separator", SEPARATOR.values(), ids=SEPARATOR)
def test_points_come_back_sorted_and_within_half_a_thousandth(separator):
    rng = np.random.default_rng(0)
    for _ in range(100):
        groups = [(float(t), rng.random((rng.integers(1, 8), 2)).tolist()) for t in np.unique(rng.integers(0, 200, size=3)) / 2]
        parsed = data.parse_points(data.format_points(groups, "a thing", separator=separator), 1.0, 1.0)
        assert [number for _, number, _, _ in parsed] == [str(i + 1) for i in range(len(parsed))]
        assert [frame for frame, *_ in parsed] == [t for t, points in groups for _ in points]
        for t, points in groups:
            back = [(x, y) for frame, _, x, y in parsed if frame == t]
            assert back == sorted(back)
            # rounding can swap two points that are nearly level: match each with what is left
            left = list(back)
            for x, y in points:
                near = min(left, key=lambda p: max(abs(p[0] - x), abs(p[1] - y)))
                assert max(abs(near[0] - x), abs(near[1] - y)) <= 0.0005 + 1e-9
                left.remove(near)


def test_tracks_come_back_with_one_number_per_object():
    rng = np.random.default_rng(0)
    frames = [(t / 2, {name: tuple(rng.random(2)) for name in "abcd" if rng.random() < 0.6}) for t in range(20)]
    parsed = data.parse_points(data.format_tracks(frames, "a thing"), 1.0, 1.0)
    numbers = {}
    assert len(parsed) == sum(len(seen) for _, seen in frames)
    for t, seen in frames:
        rows = {number: (x, y) for frame, number, x, y in parsed if frame == t}
        for name, (x, y) in seen.items():
            near = [n for n, p in rows.items() if max(abs(p[0] - x), abs(p[1] - y)) <= 0.0005 + 1e-9]
            assert near == [numbers.setdefault(name, near[0])]
    assert sorted(numbers.values()) == ["1", "2", "3", "4"]
