"""Prompts and answers of tracks: official text, modes, rates, and the frames that are shown."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

import vision
from records.mixture import rng_for
from tests.text.annotations import (
    LATER,
    N_DRAWS,
    STAGE1,
    TRACK,
    TRACK_FROM_POINT,
    VIDEO,
    VIDEO_FROM_30,
    all_turns,
    answer_of,
    drawn_questions,
    draws,
    one_turn,
    share,
)

CONFORMANCE = Path(__file__).parents[1] / "conformance"
CASES = []
for case in json.loads((CONFORMANCE / "point_formatting.json").read_text())["cases"]:
    if case["kind"] == "tracks" and not {"alt_text", "from_initial_points"} & set(case["input"]):
        CASES.append(case)
NAMES = [case["input"]["label"] + str(case["input"].get("start_end_only", "")) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_tracks_equal_the_official_text(case):
    given = case["input"]
    points = []
    for frame in given["tracks"]:
        time = frame["time"]
        if isinstance(time, str):
            minutes, seconds = time.split(":")
            time = int(minutes) * 60 + float(seconds)
        for name, point in frame["points"].items():
            x, y = point["point"]
            occluded = point["occluded"]
            points.append({"t": time, "id": name, "x": x, "y": y, "occluded": occluded})
    scale = given["scale"]
    annotation = {
        "type": "track",
        "label": given["label"],
        "coords": "pixel",
        "size": scale if isinstance(scale, list) else [scale, scale],
        "points": points[::-1],
        "mode": "start_end" if given.get("start_end_only") else "per_frame",
    }
    config = STAGE1 if given["format"] == "html-v1" else LATER
    turns = all_turns(annotation, VIDEO, config, rng_for(0))
    # a deviation: the official code learns an empty answer where all points are occluded
    assert [answer for _, answer in turns] == [case["expected"]] * bool(case["expected"])


def test_a_track_of_every_mode():
    start_end = {**TRACK, "mode": "start_end"}
    assert answer_of(TRACK, VIDEO_FROM_30) == (
        '<tracks coords="0.0 1 500 200;0.5 1 600 200 2 050 050;1.0 1 700 200">the Duck</tracks>')
    assert answer_of(start_end, VIDEO_FROM_30) == (
        '<tracks coords="0.0 1 500 200;0.5 2 050 050;1.0 1 700 200">the Duck</tracks>')
    question, answer = one_turn(TRACK_FROM_POINT, VIDEO_FROM_30)
    assert '<points coords="0.0 1 500 200">the Duck</points>' in question
    # later frames of the same object only
    assert answer == '<tracks coords="0.5 1 600 200;1.0 1 700 200">the Duck</tracks>'

    assert answer_of({**TRACK, "points": []}, VIDEO_FROM_30) == "There are none."
    occluded = [{**point, "occluded": True} for point in TRACK["points"]]
    assert not all_turns({**TRACK, "points": occluded}, VIDEO_FROM_30)


def test_a_fifth_of_single_point_tracks_start_elsewhere_on_the_track():
    start = re.compile(r'<points coords="(\S+) 1 (\d+)')
    questions = drawn_questions(TRACK_FROM_POINT, VIDEO_FROM_30)
    starts = Counter(start.search(question).groups() for question in questions)
    assert set(starts) == {("0.0", "500"), ("0.5", "600")}
    assert abs(starts["0.5", "600"] / N_DRAWS - 0.1) < 0.02
    # the query lies between two points; the last one is never a start
    query = TRACK["points"][0] | {"t": 30.2}
    two = TRACK_FROM_POINT | {"points": TRACK["points"][:2], "query": query}
    questions = drawn_questions(two, VIDEO_FROM_30, n=100)
    assert {start.search(question)[1] for question in questions} == {"0.0", "0.2"}
    one = two | {"points": TRACK["points"][:1]}
    assert not any(all_turns(one, VIDEO_FROM_30, rng=rng_for(i)) for i in range(20))


RATE = re.compile(r"(\d+) (fps|frames per second|points per second)")


@pytest.mark.parametrize("track", [TRACK, TRACK_FROM_POINT], ids=["per_frame", "from_point"])
@pytest.mark.parametrize(("fps", "rate", "share_named"), [
    (1, "1", 1.0), (2.0, "2", 0.5), (6, "2", 0.5), (5, "1", 1.0), (12.5, None, 0.0),
    (None, None, 0.0),
])
def test_the_rate_is_named_always_or_half_the_time_where_it_is_2(track, fps, rate, share_named):
    annotation = {**track, "fps": fps}
    if fps is None:
        del annotation["fps"]
    questions = drawn_questions(annotation, VIDEO_FROM_30, n=400)
    found = [RATE.search(question) for question in questions]
    if share_named == 0.5 and track is TRACK:
        assert abs(share(found) - 0.5) <= 0.08
    else:  # the prompt of a single point always names the rate
        assert share(found) == math.ceil(share_named)
    assert {match[1] for match in found if match} == ({rate} if rate else set())
    questions = drawn_questions({**annotation, "mode": "start_end"}, VIDEO_FROM_30, n=50)
    assert not any(RATE.search(question) for question in questions)


def track_of(times, **fields):
    """The track of one object. The x of its points is 1, 2, 3, .."""
    points = [{"t": t, "id": 1, "x": x, "y": 0} for x, t in enumerate(times, 1)]
    return {"type": "track", "label": "x", "coords": "percent", "points": points, **fields}


def groups_of(answer):
    """{time: x in thousandths of the one object}"""
    groups = [group.split() for group in re.search('coords="(.*?)"', answer)[1].split(";")]
    return {time: int(x) for time, _, x, _ in groups}


def test_tracks_keep_to_the_rate_asked_for_and_to_the_frames_that_are_shown():
    track = track_of([30 + k / 6 for k in range(13)], fps=6)

    def times(annotation, shown=None):
        return list(groups_of(answer_of(annotation, VIDEO_FROM_30, times=shown)))

    assert times(track) == ["0.0", "0.5", "1.0", "1.5", "2.0"]
    assert times(track, [0.0, 0.75, 1.005, 2.0]) == ["0.0", "1.0", "2.0"]
    assert times({**track, "fps": 12.5})[:4] == ["0.0", "0.2", "0.3", "0.5"]
    assert not all_turns(track, VIDEO_FROM_30, times=[0.25])
    # start and end are those of the frames that are shown
    assert times({**track, "mode": "start_end"}, [0.5, 1.0, 1.5]) == ["0.5", "1.5"]


def test_points_at_every_15th_frame_of_29_97_a_second_are_all_answered():
    track = track_of([k * 15 / 29.97 for k in range(39)])
    shown = vision.track_times(20, 128, [2, 6])
    answer = groups_of(answer_of(track, VIDEO, times=shown))
    assert list(answer.values()) == [10 * k for k in range(1, 40)]
    assert set(map(float, answer)) <= {round(time, 1) for time in shown}


def test_points_of_a_clip_that_starts_between_them_are_all_answered():
    record = {"video": {"path": "a.mp4", "start": 0.3, "end": 10.3}}
    shown = vision.track_times(10, 128, [2])
    for fields in ({}, {"fps": 2}):
        track = track_of([0.5 * k for k in range(1, 20)], **fields)
        answer = groups_of(answer_of(track, record, times=shown))
        # 0.2 s of the clip on frame 0.0, 0.7 s on 0.5, ..
        assert answer == {str(0.5 * k): 10 * (k + 1) for k in range(19)}
    # the point that a track starts from has the time of its frame, too
    question, answer = one_turn(
        {**track, "mode": "from_point", "query": track["points"][0]}, record, times=shown)
    assert '<points coords="0.0 1 010 000">' in question
    assert list(groups_of(answer))[:2] == ["0.5", "1.0"]


def test_an_object_that_is_occluded_or_absent_on_a_frame_is_not_taken_from_a_neighbour():
    for fields in ({}, {"fps": 10}):
        track = track_of([k / 10 for k in range(21)], **fields)
        track["points"][5]["occluded"] = True
        del track["points"][10]
        answer = answer_of(track, VIDEO, times=[0.0, 0.5, 1.0, 1.5])
        assert groups_of(answer) == {"0.0": 10, "1.5": 160}


def test_the_nearest_point_counts_and_one_further_than_half_an_interval_does_not():
    """1.6 s is 0.1 s away from 1.5 s, and half of 1/6 s is 0.083 s. Of two points that are equally
    near, the earlier one counts."""
    track = track_of([0.05, 0.95, 1.02, 1.6, 1.9375, 2.0625], fps=6)
    answer = answer_of(track, VIDEO, times=[0.0, 0.5, 1.0, 1.5, 2.0])
    assert groups_of(answer) == {"0.0": 10, "1.0": 30, "2.0": 50}


def test_a_track_never_starts_behind_the_frames_that_are_shown():
    """Of 60 s at 2 points a second, 32 frames show the first 16: no draw may be lost."""
    points = [{"t": k / 2, "id": 1, "x": 50, "y": 50} for k in range(120)]
    track = TRACK_FROM_POINT | {"fps": 2, "points": points, "query": points[0]}
    times = [k / 2 for k in range(32)]
    answers = [answer for _, answer in draws(track, VIDEO, n=100, times=times)]
    assert all(answers)
    assert len(set(answers)) > 5
