"""Tests the rules of records: what a record may contain, and the messages about mistakes."""

import json
from pathlib import Path

import pytest

from records.parse import parse
from records.reader import Records
from tests.records.samples import (
    CAPTION,
    CHOICE,
    CLIP,
    GOOD,
    POINT,
    QA,
    TRACK,
    VIDEO_POINT,
    image,
    turn,
    verdict,
    video,
    write,
)
from tools import check as tools_check

TESTS = Path(__file__).parents[1]


def point(**fields):
    """A record of an image with the annotation POINT, in which these fields are replaced."""
    return image({**POINT, **fields})


def track(**fields):
    return video({**TRACK, **fields})


def clip(**fields):
    return video({**CAPTION, **fields})


def choice(**fields):
    return image({**CHOICE, **fields})


SUBTITLES = [{"start": s, "end": s + 1, "text": "x"} for s in (3, 1)]
INTACT = [
    GOOD,
    image(QA, image="café 1:2.png"),
    image(QA, image="/data/a.png"),
    point(points=[]),
    point(points=[{"x": 0.5, "y": 1.5}]),
    point(coords="pixel"),
    image({**POINT, "coords": "pixel", "size": [1, 1], "points": [{"x": 0, "y": 1}]},
          image={"path": "a.png", "width": 1, "height": 1}),
    point(mode=["point_count", "point"], label=["cups", "mugs"]),
    point(points=[{"x": 100.9, "y": -0.9}]),       # points may be 1 % outside
    choice(answer_idx=[0, 1], options=["", "b"], shuffle_options=True, letters=False,
           explanation="e"),
    image(CAPTION, weight=0.5, id="0", meta={"anything": [None, {"a": 1}]}),
    image({**CAPTION, "weight": 0, "object": "dog"}),
    image({**CAPTION, "text": "<image> <|im_end|>"}),  # special tokens have no meaning in texts
    {"images": ["a"], "annotations": [POINT]},
    {"images": ["a"], "annotations": [{**QA, "question": [{"image": 0}]}]},
    video(VIDEO_POINT, {**TRACK, "points": [], "times": [0, 0.5]},
          {**QA, "question": [{"video": 0}, "q"]}, subtitles="words"),
    video({**CAPTION, "start": 1.8, "end": 8}, video=CLIP, subtitles=SUBTITLES),
    video(QA, subtitles=[{"start": 1, "end": 1, "text": "x"}]),
    video({**TRACK, "mode": "from_point", "fps": 2, "query": {"t": 0, "id": 1, "x": 4, "y": 2}},
          subtitles=[]),
    track(points=[{**TRACK["points"][0], "occluded": True}]),
    {"annotations": [{"type": "text", "text": "x", "prompt": "p"}, {**QA, "system": "s"}]},
    turn(weight=0),
    turn(answer=r"In JSON a NUL is written \u0000, and \ud800 is half a character."),
]


@pytest.mark.parametrize("record", INTACT, ids=lambda record: json.dumps(record)[:60])
def test_what_a_record_may_hold(tmp_path, record):
    assert verdict(tmp_path, record) == ""


MISTAKES = [                         # a line, part of the message
    ('{"annotations":[', "JSONDecodeError: Expecting value"),
    ("[" * 100_000, "recursion"),
    ({"annotations": [QA], "meta": {"a": [{"\ud800": 1}]}}, "surrogates not allowed"),
    (turn(answer="before \0 behind"), "a text contains a NUL character"),
    ('{"weight":NaN,"annotations":[]}', "'weight' must be a number from 1e-9 to 1e12, not nan"),
    ({"weight": 1e-30, "annotations": []}, "'weight' must be a number from 1e-9 to 1e12"),
    (image({**CAPTION, "weight": 1e-30}), "'weight' must be 0, or a number from 1e-9 to 1e12"),
    ([1, 2], "one array of records, its name must end in .json"),
    ('"text"', "the record: this must be an object, not 'text'"),
    ({"image": "a.png"}, "'annotations' is missing"),
    ({"image": "a.png", "anotations": [CAPTION]}, "did you mean 'annotations'"),
    ({"audio\n": "a.mp3", "annotations": [QA]}, r"unknown field 'audio\n'"),
    (image(), "'annotations' must not be empty"),
    (image({"type": "captoin", "text": "x"}), "did you mean 'caption'"),
    (image({"type": "caption", "caption": "x"}), "unknown field 'caption'; 'text' is missing"),
    (image({**CAPTION, "text": " \n"}), "'text' must be a text that is not blank"),
    (image(CAPTION, meta=[]), "'meta' must be an object"),
    (image(CAPTION, image={"path": "a", "width": 0, "height": 4}), "a whole number, 1 or larger"),
    (image(CAPTION, image={"path": "a", "width": 4}), "'width' and 'height' must be given"),
    ({"images": [], "annotations": [CAPTION]}, "'images' must not be empty"),
    (image(CAPTION, images=["b.png"]), "use only one of image and images"),
    (video(CAPTION, video=["a.png", "b.png"], fps=2), 'write frames as {"frames": [..], "fps": 2}'),
    (video(CAPTION, video={"frames": ["a.png"]}), "'frames' need their frame rate"),
    (video(CAPTION, video={"path": "a", "frames": ["b"], "fps": 1}), "either 'path' or 'frames'"),
    (video(CAPTION, video={"path": "a", "start": 5, "end": 5}), "video: 'end' must be later than"),
    (video(CAPTION, video={**CLIP, "start": -1}), "'start' must be a number, 0 or larger"),
    (image(QA, subtitles="hello"), "need a 'video'"),
    (video(QA, subtitles=3), "a text or a list of"),
    (video(QA, subtitles=[{"start": 1, "text": "x"}]), "subtitles[0]: the field 'end' is missing"),
    (video(QA, subtitles=[*SUBTITLES, {"start": 2, "end": 1, "text": "x"}]),
     "subtitles[2]: 'end' is before 'start'"),
    (image(QA, image="https://x/y.png"), "image: 'path' must be the path of a downloaded file"),
    ({"images": ["a", "data:image/png;base64,AA"], "annotations": [QA]}, "images[1]: 'path' must"),
    (video(CAPTION, video={"frames": ["a", "s3://x"], "fps": 1}), "paths of downloaded files"),
    (clip(start=3, end=3), "annotations[0]: 'end' must be later"),
    (clip(start=3), "'start' and 'end' must be given"),
    (clip(style="video_clip_caption_start_end"), "of a clip needs 'start'"),
    (clip(style="video_frame_caption_timestamp"), "a single frame needs 'at'"),
    (clip(object="a", style="video_frame_caption_timestamp"), "needs 'at'"),
    (image({**CAPTION, "at": 1}), "needs a video"),
    (image({"type": "qa", "question": "q"}), "give exactly one of 'answer', 'answers'"),
    (image({**QA, "turns": [{"question": "q", "answer": "a"}]}), "either 'turns'"),
    (image({"type": "qa", "turns": []}), "'turns' must not be empty"),
    (image({"type": "qa", "question": "q", "answers": ["a", " "]}), "'answers'"),
    (choice(answer_idx=2), "'answer_idx' must be"),
    (choice(answer_idx=[]), "'answer_idx' must be"),
    (choice(options=["a"] * 27), "2 to 26 texts"),
    (image({**QA, "question": [" "]}), "'question' must be"),
    (image({**QA, "question": ["q", {"image": 1}]}), "'question' must be"),
    (turn(question=" "), "annotations[0].turns[0]: 'question' must be"),
    (image({"type": "point", "label": "l", "points": []}),
     "'coords' is missing; it is one of unit, percent, pixel"),
    (image({"type": "point", "label": "l", "coords": "pixel", "points": [[1, 2]]}),
     'this must be an object, not [1, 2]; write {"x": .., "y": ..}'),
    (point(size=[4]), "[width, height]"),
    (point(size=[0, 4]), "[width, height]"),
    (point(points=[{"x": "4", "y": 2}]), "points[0]: 'x' must be a number, not '4'"),
    (point(mode="points"), "a list of them, not 'points' - did you mean 'point'?"),
    (point(mode=["point", "where"]), "count_point, or a list of them, not ['point',"),
    (point(mode=[]), "or a list of them, not []"),
    (point(label=["cup", ""]), "'label' must be a text that is not blank, or a list"),
    (point(count=2), "'count' is 2, but the number of points is 1"),
    (image({"type": "point", "coords": "unit", "points": []}), "'label' or 'question'"),
    (image({"type": "count", "label": "l", "count": 1.5}), "'count' must be a whole number"),
    (image(VIDEO_POINT), "'t' is needed in a video"),
    (point(points=[{"x": 4, "y": 2, "image": 0}]), "is needed with several images"),
    ({"images": ["a", "b"], "annotations": [{**POINT, "points": [{"x": 4, "y": 2, "image": 2}]}]},
     "there is no image 2"),
    (point(coords="unit"), "check the unit and the size"),
    (point(coords="pixel", size=[10, 10], points=[{"x": 4, "y": 11}]),
     "outside the image with coords=pixel"),
    (image({**POINT, "coords": "pixel"}, image={"path": "a", "width": 3, "height": 9}), "outside"),
    (image(TRACK), "a track needs a video"),
    (GOOD | {"annotations": [CAPTION]}, "without them, the type must be text or qa"),
    (track(times=[-1]), "'times' must be a list of times in seconds"),
    (track(points=[{"t": 1, "id": [], "x": 4, "y": 2}]), "a whole number or a text"),
    (track(points=TRACK["points"] * 2), "two points at the same time"),
    (track(mode="from_point"), "needs 'query'"),
    (track(style="video_single_point_track_per_frame"), "needs 'query'"),
    (track(query={"t": 0, "id": "1", "x": 4, "y": 2}), "no point has the id"),
    (track(query={"t": 0, "id": 1, "x": 5000, "y": -90}),
     "the query lies outside the image"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_planted_mistake_is_found_in_one_sentence(tmp_path, capsys, line, words):
    line = line if isinstance(line, str) else json.dumps(line)
    message = verdict(tmp_path, line)
    assert words in message
    assert "\n" not in message
    path = write(tmp_path / "r.jsonl", GOOD, line)
    assert tools_check.main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{path}:2: wrong record: {message}"


SHAPES = """
null ; {"annotations":{}} ; {"annotations":[null]} ; {"annotations":[{"type":[]}]}
{"image":{},"annotations":[[]]} ; {"video":{"frames":[[]],"fps":1},"annotations":[{}]}
{"video":"a","subtitles":[3],"annotations":[{"type":"text","text":"x"}]}
{"annotations":[{"type":"qa","turns":[3]}]} ; {"annotations":[{"type":"qa","turns":[{}]}]}
{"annotations":[{"type":"qa","question":{},"answer":"a"}]}
{"image":"a","annotations":[{"type":"point","label":"l","coords":[],"points":[[]]}]}
{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[],"query":[]}]}
{"conversations":{}} ; {"messages":[]}
"""
SHAPES = [line.strip() for line in SHAPES.replace(" ; ", "\n").split("\n") if line.strip()]


@pytest.mark.parametrize("line", SHAPES)
def test_values_of_wrong_types_at_every_depth_are_refused(tmp_path, line):
    assert verdict(tmp_path, line)


def test_points_that_look_like_fractions_are_warned_about_once(tmp_path, capsys):
    small = [point(coords=coords, points=[{"x": 0.2, "y": 0.9}])
             for coords in ("unit", "percent", "pixel")]
    path = write(tmp_path / "r.jsonl", *small)
    assert len(list(Records(path))) == 3
    assert capsys.readouterr().err == (
        f"train.py: {path}:2: annotations[0]: every coordinate is at most 1 "
        "with coords=percent; should it be coords=unit?\n")


LARGE = {"path": "a.png", "width": 4000, "height": 3000}


@pytest.mark.parametrize(("points", "size", "media", "is_warned"), [
    ([(500, 300), (1000, 1000)], {}, LARGE, True),
    ([(500, 300), (1001, 20)], {}, LARGE, False),            # the other point is above 1,000
    ([(500, 300), (1000, 1000)], {"size": [1000, 1000]}, LARGE, False),
    ([(500, 300), (900, 900)], {"size": [1920, 1080]}, "a.png", True),
    ([(500, 300), (900, 900)], {}, "a.png", False),          # the record does not contain the size
    ([(500, 300), (900, 900)], {}, {**LARGE, "height": 1000}, False),
])
def test_thousandths_in_pixels_of_large_images_are_warned_about_as_a_file(
        tmp_path, capsys, points, size, media, is_warned):
    rows = [image({**POINT, "coords": "pixel", "points": [{"x": x, "y": y}], **size}, image=media)
            for x, y in points]
    path = write(tmp_path / "r.jsonl", image(CAPTION), *rows)
    Records(path)
    warning = (f"train.py: {path}: every coordinate is at most 1,000 with coords=pixel, but every "
               "image is larger; if coordinates are from 0 to 1,000, each annotation needs "
               '"size": [1000, 1000]\n')
    assert capsys.readouterr().err == warning * is_warned


def test_the_examples_pass_without_a_word(capsys):
    path = TESTS / "conformance/examples.jsonl"
    examples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(examples) == 12
    for example in examples:
        parse(example)
    ids = [record["id"] for record in Records(TESTS / "media/records.jsonl")]
    assert ids == ["chelsea", "coffee", "astronaut", "coins", "rocket", "text-only"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("turn", "reason"), [
    (POINT, ""), ({"type": "count", "label": "l", "count": 2}, ""),
    ({"type": "box", "label": "l", "coords": "percent", "form": "xyxy",
      "boxes": [{"box": [1, 2, 3, 4]}]}, ""),
    (CAPTION, "annotations[0].turns[1].type: the type of a turn must be one of qa (the "
     "default), point, box, count, track"),
    (TRACK, "annotations[0].turns[1]: a track needs a video"),
    ({**POINT, "points": [{"x": 400, "y": 2}]}, "annotations[0].turns[1]: point 0 lies outside the "
     "image with coords=percent; check the unit and the size"),
    ({**POINT, "style": "point_count", "mode": ["point", "point_count"]},
     "annotations[0].turns[1]: the style point_count has one mode, but 'mode' has 2"),
    ({**POINT, "pints": 1}, "annotations[0].turns[1]: unknown field 'pints' - did you mean "
     "'points'?"),
])
def test_a_turn_of_a_conversation_may_ask_for_points(tmp_path, turn, reason):
    question = {"question": "q", "answer": "a"}
    assert verdict(tmp_path, image({"type": "qa", "turns": [question, turn]})) == reason
