"""Prompts and answers of points and counts: modes, scales, times, several images."""

import re
from collections import Counter

import pytest

from records.mixture import rng_for
from tests.text.annotations import (
    COUNT,
    IMAGE,
    IMAGES,
    LATER,
    POINT,
    POINTS_IN_TIME,
    POINTS_ON_IMAGES,
    STAGE1,
    VIDEO,
    VIDEO_FROM_30,
    XY,
    draws,
    one_turn,
    question_of,
    share,
)

TAG = '<points coords="1 1 100 900 2 500 200">cat</points>'


def test_points_and_counts_of_an_image():
    answers = {
        "point": TAG,
        "point_count": f"Counting the {TAG} shows a total of 2.",
        "count_point": f"There are 2 {TAG}.",
    }
    for mode, expected in answers.items():
        assert {answer for _, answer in draws({**POINT, "mode": mode}, n=20)} == {expected}
    assert one_turn(COUNT) == ("How many cat are there? Answer with a number.", "2")
    assert one_turn({**COUNT, "count": 0})[1] == "There are none."
    assert one_turn({**POINT, "points": []})[1] == "There are none."
    # the points are known, but only their number is wanted
    assert one_turn({**POINT, "style": "count"})[1] == "2"
    questions = [question.lower() for question, _ in draws({**COUNT, "style": "point_count"}, n=50)]
    assert not any(re.search("point to|pointing", question) for question in questions)
    own = {"type": "point", "style": "cosyn_point", "question": "Which Bar?"}
    assert one_turn({**own, "coords": "percent", "points": [XY]}) == (
        "Which Bar?", '<points coords="1 1 500 200">Which Bar?</points>')


def test_of_several_labels_one_is_drawn_for_the_question_and_the_answer():
    annotation = {**POINT, "label": ["Cat", "kitten"], "mode": "point"}
    pairs = draws(annotation, config=STAGE1, n=400)
    counts = Counter(re.search(">(.*)<", answer)[1] for _, answer in pairs)
    assert counts.keys() == {"cat", "kitten"}
    assert min(counts.values()) > 160
    assert all(f">{question.removeprefix('pointing: ')}<" in answer for question, answer in pairs)
    assert one_turn(annotation)[1] == TAG                        # the first one, in evaluation
    assert {answer for _, answer in draws({**COUNT, "label": ["Cat", "kitten"]}, n=9)} == {"2"}


@pytest.mark.parametrize(("coords", "size", "record"), [
    ("unit", None, IMAGE),
    ("percent", None, IMAGE),
    ("pixel", None, IMAGE),
    ("pixel", None, {"image": {"path": "a", "width": 200, "height": 50}}),
    ("pixel", [400, 20], {"image": {"path": "a", "width": 200, "height": 50}}),
    ("pixel", [400, 20], VIDEO),
], ids=str)
def test_the_scale_of_points_is_their_own_size_or_the_declared_one_or_the_files(
        coords, size, record):
    declared = next(iter(record.values()))
    of_record = (200, 50) if isinstance(declared, dict) else (10, 10)
    scales = {"unit": (1, 1), "percent": (100, 100), "pixel": size or of_record}
    width, height = scales[coords]
    point = {"x": 0.25 * width, "y": 0.5 * height}
    if "video" in record:
        point["t"] = 1
    annotation = {"type": "point", "label": "l", "coords": coords, "points": [point]}
    if size:
        annotation["size"] = size
    assert ' 1 250 500">' in one_turn(annotation, record, rng=rng_for(0))[1]


def test_points_of_a_video_are_grouped_by_seconds_from_the_start_of_the_clip():
    # the label of a video keeps its capitals
    tag = '<points coords="0.5 1 900 400 2 911 800;3.0 3 500 200">Cat</points>'
    assert one_turn({**POINTS_IN_TIME, "mode": "point"}, VIDEO_FROM_30)[1] == tag
    counted = one_turn({**POINTS_IN_TIME, "mode": "point_count"}, VIDEO_FROM_30)[1]
    assert counted == f"Counting the {tag} shows a total of 3."
    assert 'coords="30.5 1 900 400 2 911 800;33.0 3' in one_turn(POINTS_IN_TIME, VIDEO)[1]
    # times that are the same in the text are one group
    points = [{"t": t, **XY} for t in (29.98, 30.02, 30.26, 30.3)]
    groups = 'coords="0.0 1 500 200 2 500 200;0.3 3 500 200 4 500 200"'
    assert groups in one_turn({**POINTS_IN_TIME, "points": points}, VIDEO_FROM_30)[1]


def test_questions_about_several_images_mean_all_of_them_or_name_some():
    pairs = draws({**POINTS_ON_IMAGES, "mode": "point_count"}, IMAGES)
    named = [(re.findall(r"image_(\d)", question), answer) for question, answer in pairs]
    assert abs(share([names for names, _ in named]) - 0.5) < 0.03
    assert abs(share(["all images" in question for question, _ in pairs]) - 0.25) < 0.03
    subsets = Counter()
    for names, answer in named:
        assert names == sorted(set(names))
        subsets[tuple(names)] += 1
        wanted = {int(k) for k in names} or {1, 2, 3, 4}
        total = 2 * (1 in wanted) + (3 in wanted)
        assert answer.endswith(f"total of {total}." if total else "There are none.")
        coords = re.search('coords="(.*?)"', answer)
        groups = coords[1].split(";") if coords else []
        assert {int(group.split()[0]) for group in groups} == wanted & {1, 3}
    assert len(subsets) == 16            # every non-empty subset of four, and none named
    for question, _ in pairs:
        assert not re.search(r"\w (Look|Consider)", question)
        if re.findall(r"image_(\d)", question) == ["2", "4"]:
            assert re.search(r"image_2, image_4(?!\d)", question)
    assert "all images" in question_of(POINTS_ON_IMAGES, IMAGES, LATER)
    assert one_turn(POINTS_ON_IMAGES, IMAGES, STAGE1, rng_for(0))[0].endswith(": cat")
    for question, answer in draws({**POINTS_ON_IMAGES, "question": "Where?"}, IMAGES, n=50):
        assert "image_" not in question
        assert answer.startswith("<points")
