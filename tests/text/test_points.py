"""Points and tracks as text, in both directions, against the official formatter."""

import json
from pathlib import Path

import pytest

from text import points

CONFORMANCE = Path(__file__).parents[1] / "conformance"
CASES = json.loads((CONFORMANCE / "point_formatting.json").read_text())["cases"]
SEPARATOR = {"html-v1": "\t", "html-v2": ";"}
# the official code has two names for one sentence
MODE = {"point_then_count": "point_count", "count_then_point": "count_point"}


def cases(*kinds):
    """Parametrizes a test by the cases of these kinds.

    Without those of a known bug: the official code does not clip a y outside the image, ours does.
    And without those with an `alt`, which no record of the published sets has.
    """
    chosen = []
    names = []
    for case in CASES:
        given = case["input"]
        left_out = given.get("alt") or given.get("alt_text")
        if case["kind"] in kinds and "known bug" not in given.get("label", "") and not left_out:
            chosen.append(case)
            names.append(str(given.get("label", given.get("text"))))
    return pytest.mark.parametrize("case", chosen, ids=names)


def fractions(positions, scale):
    width, height = scale if isinstance(scale, list) else (scale, scale)
    return [(x / width, y / height) for x, y in positions]


@cases("image", "multi_image", "video_points")
def test_points_of_images_and_videos_equal_the_official_text(case):
    """An integer time stays one ("5"), as in the training data; the official default writes
    "5.0"."""
    given = case["input"]
    positions, scales = given["points"], given["scale"]
    if case["kind"] == "image":
        columns = [1], [positions], [scales]
    elif case["kind"] == "multi_image":
        columns = given["image_indices"], positions, scales
    else:
        columns = given["timestamps"], positions, [scales] * len(positions)
    groups = [(n, fractions(*group)) for n, *group in zip(*columns, strict=True)]
    mode = MODE.get(given["mode"], given["mode"])
    found = points.format_points(groups, given["label"], mode, SEPARATOR[given["format"]])
    assert found == case["expected"]


@cases("extract")
def test_parsed_points_equal_the_official_ones(case):
    given = case["input"]
    ours = points.parse_points(given["text"], given["w"], given["h"])
    expected = case["expected"]["with_ids"]
    assert [(p.frame, p.id) for p in ours] == [(frame, number) for frame, number, _, _ in expected]
    positions = [xy for p in ours for xy in (p.x, p.y)]
    official = [xy for p in expected for xy in p[2:]]
    assert positions == pytest.approx(official, rel=1e-12)


@cases("extract_tracks")
def test_parsed_tracks_equal_the_official_ones(case):
    given = case["input"]
    frames = {}
    for p in points.parse_points(given["text"], given["w"], given["h"]):
        number = round(p.frame * given["video_fps"])
        frame = frames.setdefault(p.frame, {"time": p.frame, "frame": number, "points": {}})
        frame["points"][p.id] = {"point": [p.x, p.y]}
    assert list(frames.values()) == case["expected"]


def test_tracks_come_back_with_one_number_per_object():
    frames = [(0.5, {"b": (0.2, 0.1), "a": (0.1, 0.9)}), (1.0, {"b": (0.3, 0.1)}),
              (1.5, {"c": (0.0, 1.0), "a": (0.2, 0.8)})]
    parsed = points.parse_points(points.format_tracks(frames, "an object"), 1000, 1000)
    assert parsed == [(0.5, "1", 100, 900), (0.5, "2", 200, 100), (1.0, "2", 300, 100),
                      (1.5, "1", 200, 800), (1.5, "3", 0, 1000)]


@pytest.mark.parametrize(("text", "ids"), [
    ('<points coords="1 1 100 200 2 300 400', "12"),
    ('<points coords="1 1 100 200 2 300 40', "1"),
    ('<points coords="1 1 100 200 2 300 100', "1"),  # the last number may become 1000
    ('<points coords="1 1 100 200 2 300 1000', "12"),
    ('<points coords="1 1 100 200 2 300 100 ', "12"),
    ('<tracks coords="0.0 1 100 200;0.5 1 100 300;1', "11"),
    ('<points coords="1 1 100 200">a</points> <points coords="1 2 100 200 3', "12"),
    ('<points coords="1 1 100 200 and', ""),         # damaged, not cut
])
def test_the_complete_points_of_a_cut_answer_are_read_but_not_scored(text, ids):
    found = points.parse_points(text, 1000, 1000, open_end=True)
    assert "".join(p.id for p in found) == ids
    assert len(points.parse_points(text, 1000, 1000)) == text.count(">a<")


def test_an_id_counts_once_in_each_tag():
    """Two tags are two answers: a cat and a dog that both have the id 1."""
    cat = '<points coords="1 1 100 100">cat</points>'
    dog = '<points coords="1 1 900 900">dog</points>'
    found = points.parse_points(f"{cat} {dog}", 1000, 1000)
    assert [(p.x, p.y) for p in found] == [(100, 100), (900, 900)]
    twice = '<points coords="1 1 100 100 1 900 900">cat</points>'
    assert len(points.parse_points(twice, 10, 10)) == 1


@pytest.mark.parametrize(("coords", "read"), [
    ("1 1 100 200 2 30 40 3 500 600", [(1, "1"), (1, "3")]),
    ("0.5 1 04 80 2 095 799;1.0 2 553 443", [(0.5, "2"), (1.0, "2")]),
    ("2. 4 417 497;.5 1 100 200", [(2.0, "4"), (0.5, "1")]),
    ("0.0 1 100 2.0 2 300 400", [(0.0, "2")]),
    ("0.0 1 100 200;0.5;1.0 1 100", [(0.0, "1")]),
])
def test_a_damaged_triple_costs_one_point(coords, read):
    """The values are those of the official parser."""
    found = points.parse_points(f'<tracks coords="{coords}">cat</tracks>', 1000, 1000)
    assert [(p.frame, p.id) for p in found] == read
