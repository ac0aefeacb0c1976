"""Rules of records: what is found, with which code, and with which words."""

import json
import re

import pytest

from records.check import check
from records.reader import DataError, Records
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

# What a user may write, one line each, with the code of docs/records.md.
LINES = r"""
E01 {"image":"a.jpg","annotations":[{"type":"caption","text":"x"}]
E03 {"image":"a.jpg","weight":NaN,"annotations":[{"type":"caption","text":"x"}]}
E04 {"a":1,"a":2}
E05 [1,2]
E06 {"instruction":"hi","output":"yo"}
E07 {"image":"a.jpg","anotations":[],"annotations":[{"type":"caption","text":"x"}]}
E10 {"image":"https://x/y.jpg","annotations":[{"type":"caption","text":"x"}]}
E16 {"videos":["a.mp4"],"audios":["a.mp3"],"messages":
     [{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}
E20 {"conversations":[{"from":"gpt","value":"hi"},{"from":"human","value":"x"}]}
E21 {"conversations":[{"from":"human","value":"x"},{"from":"function_call","value":"{}"}]}
E24 {"image":"a.jpg","conversations":
     [{"from":"human","value":"x"},{"from":"gpt","value":"<image>"}]}
E30 {"conversations":[{"from":"human","value":"<image>\nq"},{"from":"gpt","value":"a"}]}
E31 {"image":["a","b"],"conversations":
     [{"from":"human","value":"<image>\nq"},{"from":"gpt","value":"a"}]}
E33 {"image":"a","annotations":
     [{"type":"qa","question":"q","options":["a","b"],"answer_idx":2}]}
E40 {"video":{"path":"a","start":5,"end":5},"annotations":[{"type":"caption","text":"x"}]}
E50 {"image":"a","annotations":[{"type":"track","label":"l","coords":"percent","points":[]}]}
E60 {"video":"a","annotations":
     [{"type":"point","label":"l","coords":"percent","points":[{"x":4,"y":2}]}]}
E61 {"images":["a","b"],"annotations":
     [{"type":"point","label":"l","coords":"percent","points":[{"x":4,"y":2}]}]}
E62 {"image":"a","annotations":
     [{"type":"point","label":"l","coords":"percent","points":[{"x":400,"y":2}]}]}
E07 {"image":"a","annotations":[{"type":"point","label":"l","points":[{"x":4,"y":2}]}]}
S01 {"conversations":[{"from":"human","value":"x"}]}
S11 {"image":"a","annotations":
     [{"type":"point","label":"l","coords":"percent","count":2,"points":[{"x":4,"y":2}]}]}
"""
LINES = [(line[:3], line[4:]) for line in re.sub("\n +", "", LINES).split("\n") if line]


@pytest.mark.parametrize(("code", "line"), LINES)
def test_the_lines_of_the_format_have_their_codes(tmp_path, code, line):
    assert verdict(tmp_path, line)[0] == code
    # strict and not lenient: each of them stops the run
    assert verdict(tmp_path, line, lenient=False, strict=True)[0] == code
    with pytest.raises(DataError):
        Records(tmp_path / "r.jsonl", lenient=False, strict=True)


FILE_MISTAKES = [                    # line, code, words of the message
    ("[" * 100_000, "E01", "deep"),
    ('{"annotations":[{"type":"text","text":"half a lin', "E01", "truncated?"),
    (json.dumps(GOOD) + " " + json.dumps(GOOD), "E01", "one record per line"),
    ('{"image": "coins.png", "annotations": [', "E01", "several lines"),
    ('{"type": "caption", "text": "x"},', "E01", "one record per line"),
    (json.dumps(GOOD).replace("}]", "},]"), "E01", "a comma too many?"),
    ('{"weight":' + "9" * 400 + ',"annotations":[]}', "E01", "400 digits"),
    ('{"annotations":[{"type":"text","text":"\\ud800"}]}', "E02", "surrogate"),
    ('{"annotations":[{"type":"text","text":"a\\u0000"}]}', "E02", "NUL"),
    ('{"annotations":[{"type":"text","text":"a\0"}]}', "E02", "NUL"),
    ('{"annotations":[{"type":"text","text":"a","meta":{"b":["\\uDFff"]}}]}', "E02", "surrogate"),
    ('{"weight":1e999,"annotations":[]}', "E03", "1e999"),
    ('{"weight":-Infinity,"annotations":[]}', "E03", "Infinity"),
    ('{"image":{"path":"a","path":"b"},"annotations":[]}', "E04", "'path'"),
    ('"text"', "E05", "object"),
    ({}, "E06", "none"),
    ({"image": "a.png"}, "E06", "its fields are image"),
    ({"image": "a.png", "annotation": [CAPTION]}, "E06",
     "did you mean 'annotations' by 'annotation'?"),
    ({"image": "a.png", "text": "a cat"}, "E06", "a known form has one of"),
    ({"annotations": [CAPTION], "messages": []}, "E06", "one of"),
    ({"images": [], "annotations": [], "categories": []}, "E06", "COCO"),
]
FIELD_MISTAKES = [
    (image(), "E07", "empty"),
    (image({"type": "captoin", "text": "x"}), "E07", "did you mean 'caption'"),
    (image({"type": "caption", "txt": "x"}), "E07", "did you mean 'text'"),
    (image({"type": "caption"}), "E07", "'text' is missing"),
    (image({**CAPTION, "text": " \n"}), "E07", "blank"),
    (image("caption"), "E07", "type"),
    (image(CAPTION, weight=0), "E07", "above 0"),
    (image(CAPTION, weight="0.1"), "E07", "without quotes?"),
    (image(CAPTION, weight=True), "E07", "'weight'"),
    (image({**CAPTION, "weight": -1}), "E07", "not negative"),
    (image({**CAPTION, "style": "a b"}), "E07", "'style'"),
    (image(CAPTION, id=""), "E07", "'id'"),
    (image(CAPTION, meta=[]), "E07", "an object"),
    (image(CAPTION, image={"path": "a", "width": 0, "height": 4}), "E07", "at least 1 pixel"),
    (image(CAPTION, image={"path": "a", "width": 4}), "E07", "'width' is given without 'height'"),
    (image(CAPTION, image={"path": "a", "sha256": "00"}), "E07", "hexadecimal"),
    (image(CAPTION, image=""), "E07", "path"),
    ({"images": [], "annotations": [CAPTION]}, "E07", "'images' is empty"),
    (video(CAPTION, video={"frames": ["a.png"]}), "E07", "fps"),
    (video(CAPTION, video={"path": "a", "frames": ["b"], "fps": 1}), "E07", "either"),
    (video(CAPTION, video={"path": "a", "start": 1}), "E07", "'start' is given without 'end'"),
    (image(QA, subtitles="hello"), "E07", "need a video"),
    (video(QA, subtitles=[{"start": 1, "text": "x"}]), "E07", "'end' is missing"),
    (image({"type": "qa", "question": "q"}), "E07", "exactly one"),
    (image({**QA, "answers": ["b"]}), "E07", "exactly one"),
    (image({**QA, "turns": [{"question": "q", "answer": "a"}]}), "E07", "either"),
    (image({"type": "qa", "answer": "a"}), "E07", "either"),
    (image({"type": "qa", "question": "q", "answers": ["a", " "]}), "E07", "'answers'"),
    (image({**CHOICE, "answer_idx": "1"}), "E07", "'answer_idx'"),
    (image({"type": "qa", "question": "q", "options": ["a", "b"]}), "E07", "without 'answer_idx'"),
    (image({**CHOICE, "options": ["a"] * 27}), "E07", "26"),
    (image({**QA, "letters": False}), "E07", "without 'options'"),
    (image({**QA, "question": [{"image": 0, "video": 0}]}), "E07", "a part of a question"),
    (image({**QA, "question": [" "]}), "E07", "blank"),
    (turn(question=" "), "E07", "annotations[0].turns[0]"),
    (turn(wieght=1), "E07", "did you mean 'weight'"),
    (image({**POINT, "coords": "pixels"}), "E07", "did you mean 'pixel'"),
    (image({**POINT, "size": [4]}), "E07", "[width, height]"),
    (image({**POINT, "points": [{"x": "4", "y": 2}]}), "E07", "'x'"),
    (image({**POINT, "points": [3]}), "E07", "annotations[0].points[0]"),
    (image({**POINT, "points": [{"x": 4, "y": 2, "box": 5}]}), "E07", "'box'"),
    (image({**POINT, "mode": "per_frame"}), "E07", "'mode'"),
    (image({**POINT, "count": -1}), "E07", "'count'"),
    (image({"type": "point", "coords": "unit", "points": []}), "E07", "label or a question"),
    (image({"type": "count", "label": "l", "count": 1.5}), "E07", "whole number"),
    (video({**TRACK, "times": ["0"]}), "E07", "times"),
]
MEDIA_MISTAKES = [
    (image(CAPTION, image="../y.png"), "E10", "'..'"),
    (image(CAPTION, image="a/../../y.png"), "E10", "'..'"),
    (image(CAPTION, image="/y.png"), "E10", "absolute"),
    (image(CAPTION, image="C:\\y.png"), "E10", "absolute"),
    (image(CAPTION, image="data:image/png;base64,AAAA"), "E10", "URL"),
    (image(CAPTION, image="a/b/"), "E10", "folder"),
    (image(CAPTION, image="a" * 300), "E10", "longer than"),
    (video(CAPTION, video={"frames": ["a.png", "https://x/b.png"], "fps": 1}), "E10", "frames[1]"),
    (image(CAPTION, images=["b.png"]), "E13", "'images'"),
    (image(CAPTION, video="b.mp4"), "E14", "'video'"),
    ({"images": ["a", "b"], "video": "b.mp4", "annotations": [CAPTION]}, "E14", "'video'"),
    (video(CAPTION, video=["a.mp4", "b.mp4"]), "E15", "2 videos"),
    ({"videos": ["a.mp4", "b.mp4"], "annotations": [CAPTION]}, "E15", "2 videos"),
    ({"audio": "a.mp3", "annotations": [QA]}, "E16", "'audio'"),
    (image({"type": "qa", "turns": []}), "E25", "empty"),
    (image({**QA, "question": ["q", {"image": 1}]}), "E32", "{'image': 1}"),
    (image({**QA, "question": ["q", {"video": 0}]}), "E32", "{'video': 0}"),
    ({"annotations": [{**QA, "question": ["q", {"image": 0}]}]}, "E32", "{'image': 0}"),
    ({"images": ["a", "b"], "annotations": [{**POINT, "points": [{"x": 4, "y": 2, "image": 2}]}]},
     "E32", "no image 2"),
    (image({**CHOICE, "options": []}), "E33", "2 to 26"),
    (image({**CHOICE, "answer_idx": [1, 1]}), "E33", "each once"),
    (image({**CHOICE, "answer_idx": []}), "E33", "each once"),
    (image({**CHOICE, "answer_idx": -1}), "E33", "-1"),
]
TIME_MISTAKES = [
    (video(CAPTION, video={**CLIP, "start": -1}), "E40", "'start'"),
    (video({**CAPTION, "start": 3, "end": 3}), "E40", "starts at 3"),
    (video({**CAPTION, "at": 1}, video=CLIP), "E40", "outside the clip"),
    (video({**CAPTION, "start": 1, "end": 3}, video=CLIP), "E40", "outside the clip"),
    (video({**TRACK, "times": [-1]}), "E40", "times"),
    (video(QA, subtitles=[{"start": 3, "end": 2, "text": "x"}]), "E41", "starts at 3"),
    (GOOD | {"annotations": [CAPTION]}, "E50", "needs an image"),
    (GOOD | {"annotations": [POINT]}, "E50", "needs an image"),
    (GOOD | {"annotations": [{"type": "count", "label": "l", "count": 1}]}, "E50", "an image"),
    (image({**CAPTION, "at": 1}), "E50", "needs a video"),
    (image(VIDEO_POINT), "E60", "has no t"),
    (video({**TRACK, "points": [{"id": 1, "x": 4, "y": 2}]}), "E60", "needs t"),
    (video({**VIDEO_POINT, "points": [{"x": 4, "y": 2, "t": 9}]}, video=CLIP), "S10",
     "9 s is outside the clip"),
    (video({**TRACK, "points": [{"t": 9, "id": 1, "x": 4, "y": 2}]},
           video={"path": "a", "duration": 8}), "S10", "0 to 8 s"),
    (video({**TRACK, "times": [1, 9]}, video=CLIP | {"start": 0}), "S10",
     "9 s is outside the clip"),
    (video({**CAPTION, "at": 3}, video={"frames": ["a"] * 4, "fps": 2}), "S10", "0 to 2 s"),
    (video(CAPTION, video={**CLIP, "duration": 1}), "S23", "starts at 2 s"),
    (video(QA, subtitles=[{"start": s, "end": s + 1, "text": "x"} for s in (3, 1)]), "E41",
     "sorted"),
]


def track_at(*times, **fields):
    return {**TRACK, **fields, "points": [{"t": t, "id": 1, "x": 4, "y": 2} for t in times]}


POINT_MISTAKES = [
    (image({**POINT, "points": [{"x": 4, "y": 2, "image": 0}]}), "E61", "several"),
    ({"images": ["a"], "annotations": [{**POINT, "points": [{"x": 4, "y": 2, "image": 0}]}]},
     "E61", "several"),
    (image({**POINT, "points": [{"x": 4, "y": -2}]}), "E62", "y=-2"),
    (image({**POINT, "coords": "unit"}), "E62", "looks like pixels"),
    (image({**POINT, "coords": "pixel", "size": [10, 10], "points": [{"x": 4, "y": 11}]}), "E62",
     "y=11"),
    (image({**POINT, "coords": "pixel"}, image={"path": "a", "width": 3, "height": 9}), "E62",
     "x=4"),
    (video({**TRACK, "points": [{"t": 1, "id": 1, "x": 4, "y": 200}]}), "E62", "y=200"),
    (video({**TRACK, "points": TRACK["points"] * 2}), "E63", "twice at 1 s"),
    (video({**TRACK, "mode": "from_point"}), "E64", "needs a query"),
    (video({**TRACK, "query": {"t": 0, "id": "1", "x": 4, "y": 2}}), "E64", "'1'"),
    (image({**POINT, "count": 2}), "S11", "the count is 2"),
    (video({**TRACK, "points": [{**TRACK["points"][0], "occluded": True}]}), "S13", "occluded"),
    (video({**TRACK, "fps": 12.5}), "S13", "12.5 fps"),
    (image({**POINT, "points": [{"x": 100.9, "y": 2}]}), "W01", "clipped"),
    (video(track_at(0.5, 0.6, 0.7, 1.0)), "W08", "2 of 4 visible points"),
    (video(track_at(2.6, 2.7, 3.0), video=CLIP), "W08", "1 of 3 visible points"),
    (video(track_at(1 / 6, 2 / 6, fps=6)), "W08", "2 of 2 visible points"),
    (image({**POINT, "points": [{"x": 0.2, "y": 0.9}, {"x": 0.3, "y": 0.5}]}), "W03", "unit"),
    (image({**POINT, "points": [{"x": 0.5, "y": 0.5}]}), "W03", "unit"),
    (image(POINT, {**POINT, "points": [{"x": 0.5, "y": 0.5}]}), "W03", "annotations[1]"),
    (image({**POINT, "coords": "pixel", "points": [{"x": 0.2, "y": 0.9}]}), "W03", "unit"),
]
TEXT_MISTAKES = [
    (image({**CAPTION, "text": "<image> a cat"}), "W05", "<image>"),
    (image({**QA, "question": ["see <video>"]}), "W05", "<video>"),
    (turn(answer="<|im_end|>"), "W07", "never as the token"),
    (turn(answer="<im_patch>"), "W07", "never as the token"),
]
PLANTED = [*FILE_MISTAKES, *FIELD_MISTAKES, *MEDIA_MISTAKES, *TIME_MISTAKES, *POINT_MISTAKES,
           *TEXT_MISTAKES]
PLANTED_IDS = [f"{code}-{i}" for i, (_, code, _) in enumerate(PLANTED)]


@pytest.mark.parametrize(("line", "code", "words"), PLANTED, ids=PLANTED_IDS)
def test_a_planted_mistake_is_found_with_its_code_line_and_reason(tmp_path, line, code, words):
    found, message = verdict(tmp_path, line)
    assert found == code
    assert words in message
    assert "\n" not in message


def test_every_code_that_text_can_tell_is_planted():
    codes = {code for code, _ in LINES} | {code for _, code, _ in PLANTED}
    codes |= {"E08", "E22", "E23"}   # in test_reader.py and test_dialects.py
    known = """E01 E02 E03 E04 E05 E06 E07 E08 E10 E13 E14 E15 E16 E20 E21 E22 E23 E24 E25 E30 E31
               E32 E33 E40 E41 E50 E60 E61 E62 E63 E64 S01 S10 S11 S13 S23 W01 W03 W05 W07 W08"""
    assert codes == set(known.split())


def test_a_check_names_the_place_in_the_file_and_in_the_record():
    record = image(CAPTION, {**POINT, "points": [{"x": 400, "y": 2}]})
    message = r"^f.jsonl:7: E62 point x=400 .* \(annotations\[1\]\.points\[0\]\) - it looks like"
    with pytest.raises(DataError, match=message):
        check(record, "f.jsonl:7")


def test_each_code_is_reported_once_a_record():
    points = {**POINT, "count": 3, "points": [{"x": 101, "y": -1}] * 2}
    found = check(image(points, CAPTION | {"text": "<image>"}), "f.jsonl:7")
    assert sorted(finding.code for finding in found) == ["S11", "W01", "W05"]


# Values of wrong types at every depth, and what is no record at all.
WORST = r"""
null
true
12
""
[]
{}
{"annotations":{}}
{"annotations":[null]}
{"annotations":[{"type":[]}]}
{"annotations":[{"type":{}}]}
{"image":[],"annotations":[{"type":"caption","text":"x"}]}
{"image":{},"annotations":[[]]}
{"video":{"frames":[[]],"fps":1},"annotations":[{}]}
{"video":[],"annotations":[{"type":"text","text":"x"}]}
{"video":"a","subtitles":[3],"annotations":[{"type":"text","text":"x"}]}
{"annotations":[{"type":"qa","turns":[3]}]}
{"annotations":[{"type":"qa","turns":[{}]}]}
{"annotations":[{"type":"qa","question":{},"answer":"a"}]}
{"annotations":[{"type":"qa","question":[[]],"answer":"a"}]}
{"annotations":[{"type":"qa","question":"q","options":[[]],"answer_idx":[[]]}]}
{"annotations":[{"type":"qa","question":"q","options":["a","b"],"answer_idx":[[]]}]}
{"annotations":[{"type":"qa","question":[{"image":"0"}],"answer":"a"}]}
{"image":"a","annotations":[{"type":"point","label":"l","coords":[],"points":[]}]}
{"image":"a","annotations":[{"type":"point","label":"l","coords":"unit","points":[[]]}]}
{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[3]}]}
{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":
 [{"t":1,"id":[],"x":0,"y":0}]}]}
{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[],"query":[]}]}
{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[],"times":{}}]}
{"conversations":{}}
{"conversations":[[]]}
{"conversations":[{"from":[],"value":{}}]}
{"conversations":[{"from":"human","value":[[]]}]}
{"messages":[{"role":"user","content":[{"type":[]}]}]}
{"messages":[{"role":"user","content":[{"type":"image","image":[3]}]}]}
{"image":[[3]],"texts":[{"user":"q","assistant":"a"}]}
{"image":{"bytes":3},"texts":[3]}
{"video":[[]],"texts":[null]}
{"id":[],"weight":{},"style":3,"system":[],"start":[],"video":"a","texts":
 [{"user":"q","assistant":"a"}]}
{"video":"a","clip":"x","texts":[{"user":"q","assistant":"a"}]}
{"\u00e9":1}
\
{"annotations":
NaN
	{]
"""
WORST = [line for line in re.sub("\n ", "", WORST).split("\n") if line]


@pytest.mark.parametrize("line", WORST)
def test_opening_and_check_refuse_whatever_a_line_holds_alike(tmp_path, capsys, line):
    path = write(tmp_path / "r.jsonl", GOOD, line)
    assert tools_check.main([str(path)]) == 1
    printed = capsys.readouterr().out.splitlines()[0]
    code = re.match(rf"{re.escape(str(path))}:2: ([ES]\d\d) \S", printed)[1]
    assert verdict(tmp_path, line)[0] == code
