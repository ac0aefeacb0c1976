"""Records: what is read, what is refused and with which words, where it stands in the file, and the index that remembers it."""

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from records import reader as records
from records.reader import DataError, Records, Unreadable, check, parse_line

HERE = Path(__file__).parents[1]
MEDIA = HERE / "media"
GOOD = {"annotations": [{"type": "text", "text": "x"}]}
CAPTION = {"type": "caption", "text": "x"}
QA = {"type": "qa", "question": "q", "answer": "a"}
CHOICE = {"type": "qa", "question": "q", "options": ["a", "b"], "answer_idx": 1}
POINT = {"type": "point", "label": "l", "coords": "percent", "points": [{"x": 4, "y": 2}]}
FILM_POINT = {**POINT, "points": [{"x": 4, "y": 2, "t": 1}]}
TRACK = {"type": "track", "label": "l", "coords": "percent", "points": [{"t": 1, "id": 1, "x": 4, "y": 2}]}
FILM = {"path": "a.mp4", "start": 2, "end": 8}


def image(*annotations, **more):
    return {"image": "a.png", "annotations": list(annotations), **more}


def film(*annotations, video="a.mp4", **more):
    return {"video": video, "annotations": list(annotations), **more}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def verdict(folder, line, **options):
    """(code, words) of the second record of a file whose first is sound; code "" if nothing is found."""
    path = write(folder / "r.jsonl", GOOD, "", line)
    try:
        source = Records(path, **options)
    except DataError as e:
        where, code, words = re.fullmatch(r"(.*?): ([ESW]\d\d) (.*)", str(e)).groups()
        assert where == f"{path}:3"
        return code, words
    assert source.where(1) == f"{path}:3"
    try:
        source[1]
    except Unreadable as e:
        reason = str(e)
    else:
        return next(((code, first) for code, (_, first) in source.found.items()), ("", ""))
    assert [r["id"] for r in source] == ["r.jsonl:1"] and reason[:3] in source.found
    return reason[:3], reason[4:]


# ---------------------------------------------------------------------------------------------------------------
# what is found, and with which words

LINES = [                            # formats.md 9, word for word, but for the dots that stand for turns
    ('{"image":"a.jpg","annotations":[{"type":"caption","text":"x"}]', "E01"),
    ('{"image":"a.jpg","weight":NaN,"annotations":[{"type":"caption","text":"x"}]}', "E03"),
    ('{"a":1,"a":2}', "E04"),
    ("[1,2]", "E05"),
    ('{"instruction":"hi","output":"yo"}', "E06"),
    ('{"image":"a.jpg","anotations":[],"annotations":[{"type":"caption","text":"x"}]}', "E07"),
    ('{"image":"https://x/y.jpg","annotations":[{"type":"caption","text":"x"}]}', "E10"),
    ('{"videos":["a.mp4"],"audios":["a.mp3"],"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}', "E16"),
    ('{"conversations":[{"from":"gpt","value":"hi"},{"from":"human","value":"x"}]}', "E20"),
    ('{"conversations":[{"from":"human","value":"x"},{"from":"function_call","value":"{}"}]}', "E21"),
    ('{"image":"a.jpg","conversations":[{"from":"human","value":"x"},{"from":"gpt","value":"<image>"}]}', "E24"),
    ('{"conversations":[{"from":"human","value":"<image>\\nq"},{"from":"gpt","value":"a"}]}', "E30"),
    ('{"image":["a","b"],"conversations":[{"from":"human","value":"<image>\\nq"},{"from":"gpt","value":"a"}]}', "E31"),
    ('{"image":"a","annotations":[{"type":"qa","question":"q","options":["a","b"],"answer_idx":2}]}', "E33"),
    ('{"video":{"path":"a","start":5,"end":5},"annotations":[{"type":"caption","text":"x"}]}', "E40"),
    ('{"image":"a","annotations":[{"type":"track","label":"l","coords":"percent","points":[]}]}', "E50"),
    ('{"video":"a","annotations":[{"type":"point","label":"l","coords":"percent","points":[{"x":4,"y":2}]}]}', "E60"),
    ('{"images":["a","b"],"annotations":[{"type":"point","label":"l","coords":"percent","points":[{"x":4,"y":2}]}]}', "E61"),
    ('{"image":"a","annotations":[{"type":"point","label":"l","coords":"percent","points":[{"x":400,"y":2}]}]}', "E62"),
    ('{"image":"a","annotations":[{"type":"point","label":"l","points":[{"x":4,"y":2}]}]}', "E07"),
    ('{"conversations":[{"from":"human","value":"x"}]}', "S01"),
    ('{"image":"a","annotations":[{"type":"point","label":"l","coords":"percent","count":2,"points":[{"x":4,"y":2}]}]}', "S11"),
]


@pytest.mark.parametrize(("line", "code"), LINES, ids=[f"{code}-{i}" for i, (_, code) in enumerate(LINES)])
def test_the_lines_of_the_format_have_their_codes(tmp_path, line, code):
    assert verdict(tmp_path, line)[0] == code
    strict = verdict(tmp_path, line, lenient=False, strict=True)           # then each of them stops the run
    assert strict[0] == code
    with pytest.raises(DataError):
        Records(tmp_path / "r.jsonl", lenient=False, strict=True)


def turned(**more):
    return {"annotations": [{"type": "qa", "turns": [{"question": "q", "answer": "a", **more}]}]}


PLANTED = [
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
    ({"image": "a.png", "annotation": [CAPTION]}, "E06", "did you mean 'annotations' by 'annotation'?"),
    ({"image": "a.png", "text": "a cat"}, "E06", "a known form has one of"),
    ({"annotations": [CAPTION], "messages": []}, "E06", "one of"),
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
    (image(CAPTION, image={"path": "a", "width": 4}), "E07", "'width' without 'height'"),
    (image(CAPTION, image={"path": "a", "sha256": "00"}), "E07", "hexadecimal"),
    (image(CAPTION, image=""), "E07", "path"),
    ({"images": [], "annotations": [CAPTION]}, "E07", "'images' is empty"),
    (film(CAPTION, video={"frames": ["a.png"]}), "E07", "fps"),
    (film(CAPTION, video={"path": "a", "frames": ["b"], "fps": 1}), "E07", "either"),
    (film(CAPTION, video={"path": "a", "start": 1}), "E07", "'start' without 'end'"),
    (image(QA, subtitles="hello"), "E07", "need a video"),
    (film(QA, subtitles=[{"start": 1, "text": "x"}]), "E07", "'end' is missing"),
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
    (turned(question=" "), "E07", "annotations[0].turns[0]"),
    (turned(wieght=1), "E07", "did you mean 'weight'"),
    (image({**POINT, "coords": "pixels"}), "E07", "did you mean 'pixel'"),
    (image({**POINT, "size": [4]}), "E07", "[width, height]"),
    (image({**POINT, "points": [{"x": "4", "y": 2}]}), "E07", "'x'"),
    (image({**POINT, "mode": "per_frame"}), "E07", "'mode'"),
    (image({**POINT, "count": -1}), "E07", "'count'"),
    (image({"type": "point", "coords": "unit", "points": []}), "E07", "label or a question"),
    (image({"type": "count", "label": "l", "count": 1.5}), "E07", "whole number"),
    (film({**TRACK, "times": ["0"]}), "E07", "times"),
    (image(CAPTION, image="../y.png"), "E10", "'..'"),
    (image(CAPTION, image="a/../../y.png"), "E10", "'..'"),
    (image(CAPTION, image="/y.png"), "E10", "absolute"),
    (image(CAPTION, image="C:\\y.png"), "E10", "absolute"),
    (image(CAPTION, image="data:image/png;base64,AAAA"), "E10", "URL"),
    (image(CAPTION, image="a/b/"), "E10", "folder"),
    (image(CAPTION, image="a" * 300), "E10", "longer than"),
    (film(CAPTION, video={"frames": ["a.png", "https://x/b.png"], "fps": 1}), "E10", "frames[1]"),
    (image(CAPTION, images=["b.png"]), "E13", "'images'"),
    (image(CAPTION, video="b.mp4"), "E14", "'video'"),
    ({"images": ["a", "b"], "video": "b.mp4", "annotations": [CAPTION]}, "E14", "'video'"),
    (film(CAPTION, video=["a.mp4", "b.mp4"]), "E15", "2 videos"),
    ({"videos": ["a.mp4", "b.mp4"], "annotations": [CAPTION]}, "E15", "2 videos"),
    ({"audio": "a.mp3", "annotations": [QA]}, "E16", "'audio'"),
    (image({"type": "qa", "turns": []}), "E25", "empty"),
    (image({**QA, "question": ["q", {"image": 1}]}), "E32", "{'image': 1}"),
    (image({**QA, "question": ["q", {"video": 0}]}), "E32", "{'video': 0}"),
    ({"annotations": [{**QA, "question": ["q", {"image": 0}]}]}, "E32", "{'image': 0}"),
    ({"images": ["a", "b"], "annotations": [{**POINT, "points": [{"x": 4, "y": 2, "image": 2}]}]}, "E32", "no image 2"),
    (image({**CHOICE, "options": []}), "E33", "2 to 26"),
    (image({**CHOICE, "answer_idx": [1, 1]}), "E33", "each once"),
    (image({**CHOICE, "answer_idx": []}), "E33", "each once"),
    (image({**CHOICE, "answer_idx": -1}), "E33", "-1"),
    (film(CAPTION, video={**FILM, "start": -1}), "E40", "'start'"),
    (film({**CAPTION, "start": 3, "end": 3}), "E40", "starts at 3"),
    (film({**CAPTION, "at": 1}, video=FILM), "E40", "outside the clip"),
    (film({**CAPTION, "start": 1, "end": 3}, video=FILM), "E40", "outside the clip"),
    (film({**TRACK, "times": [-1]}), "E40", "times"),
    (film(QA, subtitles=[{"start": 3, "end": 2, "text": "x"}]), "E41", "starts at 3"),
    (GOOD | {"annotations": [CAPTION]}, "E50", "no image"),
    (GOOD | {"annotations": [POINT]}, "E50", "no image"),
    (GOOD | {"annotations": [{"type": "count", "label": "l", "count": 1}]}, "E50", "no image"),
    (image({**CAPTION, "at": 1}), "E50", "needs a video"),
    (image(FILM_POINT), "E60", "has no t"),
    (film({**TRACK, "points": [{"id": 1, "x": 4, "y": 2}]}), "E60", "needs t"),
    (image({**POINT, "points": [{"x": 4, "y": 2, "image": 0}]}), "E61", "several"),
    ({"images": ["a"], "annotations": [{**POINT, "points": [{"x": 4, "y": 2, "image": 0}]}]}, "E61", "several"),
    (image({**POINT, "points": [{"x": 4, "y": -2}]}), "E62", "y=-2"),
    (image({**POINT, "coords": "unit"}), "E62", "looks like pixels"),
    (image({**POINT, "coords": "pixel", "size": [10, 10], "points": [{"x": 4, "y": 11}]}), "E62", "y=11"),
    (image({**POINT, "coords": "pixel"}, image={"path": "a", "width": 3, "height": 9}), "E62", "x=4"),
    (film({**TRACK, "points": [{"t": 1, "id": 1, "x": 4, "y": 200}]}), "E62", "y=200"),
    (film({**TRACK, "points": TRACK["points"] * 2}), "E63", "twice at 1 s"),
    (film({**TRACK, "mode": "from_point"}), "E64", "needs a query"),
    (film({**TRACK, "query": {"t": 0, "id": "1", "x": 4, "y": 2}}), "E64", "'1'"),
    (film({**FILM_POINT, "points": [{"x": 4, "y": 2, "t": 9}]}, video=FILM), "S10", "9 s is outside the clip"),
    (film({**TRACK, "points": [{"t": 9, "id": 1, "x": 4, "y": 2}]}, video={"path": "a", "duration": 8}), "S10", "0 to 8 s"),
    (film({**TRACK, "times": [1, 9]}, video=FILM | {"start": 0}), "S10", "9 s is outside the clip"),
    (film({**CAPTION, "at": 3}, video={"frames": ["a"] * 4, "fps": 2}), "S10", "0 to 2 s"),
    (image({**POINT, "count": 2}), "S11", "count 2"),
    (film({**TRACK, "points": [{**TRACK["points"][0], "occluded": True}]}), "S13", "occluded"),
    (film({**TRACK, "fps": 12.5}), "S13", "12.5 fps"),
    (film(CAPTION, video={**FILM, "duration": 1}), "S23", "starts at 2 s"),
    (image({**POINT, "points": [{"x": 100.9, "y": 2}]}), "W01", "clipped"),
    (image({**POINT, "points": [{"x": 0.2, "y": 0.9}, {"x": 0.3, "y": 0.5}]}), "W03", "unit"),
    (image({**POINT, "coords": "pixel", "points": [{"x": 0.2, "y": 0.9}]}), "W03", "unit"),
    (image({**CAPTION, "text": "<image> a cat"}), "W05", "<image>"),
    (image({**QA, "question": ["see <video>"]}), "W05", "<video>"),
    (turned(answer="<|im_end|>"), "W07", "never as the token"),
    (turned(answer="<im_patch>"), "W07", "never as the token"),
    (film(QA, subtitles=[{"start": 3, "end": 4, "text": "b"}, {"start": 1, "end": 2, "text": "a"}]), "E41", "sorted"),
]


@pytest.mark.parametrize(("line", "code", "words"), PLANTED, ids=[f"{code}-{i}" for i, (_, code, _) in enumerate(PLANTED)])
def test_a_planted_mistake_is_found_with_its_code_line_and_reason(tmp_path, line, code, words):
    found, said = verdict(tmp_path, line)
    assert found == code and words in said and "\n" not in said


def test_every_code_that_text_can_tell_is_planted():
    codes = {code for _, code, *_ in (*LINES, *PLANTED)} | {"E08", "E22", "E23"}      # these three: below, and in test_dialects
    known = {"E": "01 02 03 04 05 06 07 08 10 13 14 15 16 20 21 22 23 24 25 30 31 32 33 40 41 50 60 61 62 63 64",
             "S": "01 10 11 13 23", "W": "01 03 05 07"}
    assert codes == {letter + number for letter, numbers in known.items() for number in numbers.split()}


SOUND = [
    GOOD,
    image(CAPTION, image="a/../b.png"),                                   # stays in the folder
    image(QA, image="café 1:2.png"),
    image({**POINT, "points": []}), image({**POINT, "points": [{"x": 0.5, "y": 0.5}]}), image({**POINT, "coords": "pixel"}),
    image({**CHOICE, "answer_idx": [0, 1], "options": ["", "b"], "shuffle_options": True, "letters": False, "explanation": "e"}),
    image(CAPTION, weight=0.5, id=" ", meta={"anything": [None, {"a": 1}]}), image({**CAPTION, "weight": 0, "object": "dog"}),
    {"images": ["a"], "annotations": [POINT]}, {"images": ["a"], "annotations": [{**QA, "question": [{"image": 0}]}]},
    film(FILM_POINT, {**TRACK, "points": [], "times": [0, 0.5]}, {**QA, "question": [{"video": 0}, "q"]}, subtitles="words"),
    film({**FILM_POINT, "points": [{"x": 4, "y": 2, "t": 8.2}]}, {**CAPTION, "start": 1.8, "end": 8}, video=FILM),     # half a frame
    film({**TRACK, "mode": "from_point", "fps": 2, "query": {"t": 0, "id": 1, "x": 4, "y": 2}}, subtitles=[]),
    {"annotations": [{"type": "text", "text": "x", "prompt": "p"}, {**QA, "system": "s"}]},
    turned(weight=0),
]


@pytest.mark.parametrize("record", SOUND, ids=range(len(SOUND)))
def test_a_sound_record_passes_and_comes_back_as_it_was(tmp_path, record):
    path = write(tmp_path / "r.jsonl", record)
    source = Records(path)
    assert not check(record, "here") and not source.found
    back = source[0]
    assert (back.pop("id"), back.pop("where"), back.pop("source")) == (record.get("id", "r.jsonl:1"), f"{path}:1", source)
    assert back == {k: v for k, v in record.items() if k != "id"}


def test_the_tables_are_those_of_the_schema():
    schema = json.loads((HERE / "conformance/record.schema.json").read_text())
    parts, named = schema["$defs"], {"record": schema}
    named |= {name: parts[name]["oneOf"][1] for name in ("image", "video")}
    named |= {"subtitle": parts["subtitle"], "turn": parts["turn"], "point of a point": parts["point"],
              "point of a track": parts["track_point"], "caption": parts["caption"], "qa": parts["qa"],
              "point": parts["point_annotation"], "count": parts["count"],
              "track": parts["track"], "text": parts["text_annotation"]}
    assert set(named) == set(records.TABLES)
    assert parts["annotation"]["properties"]["type"]["enum"] == list(records.TYPES)
    for name, part in named.items():
        needed = {key for key, kind in records.TABLES[name].items() if kind.endswith("!")}
        assert set(records.TABLES[name]) == set(part["properties"]), name
        assert needed - {"type"} == set(part.get("required", [])), name
    modes = {"coords": parts["coords"], "point mode": parts["point_annotation"]["properties"]["mode"],
             "track mode": parts["track"]["properties"]["mode"]}
    assert {name: tuple(mode["enum"]) for name, mode in modes.items()} == records.MODES


def test_a_check_names_the_place_in_the_file_and_in_the_record():
    with pytest.raises(DataError, match=r"^f.jsonl:7: E62 point x=400 lies outside .* \(annotations\[1\]\.points\[0\]\) - looks like"):
        check(image(CAPTION, {**POINT, "points": [{"x": 400, "y": 2}]}), "f.jsonl:7")
    found = check(image({**POINT, "count": 3, "points": [{"x": 101, "y": -1}] * 2}, CAPTION | {"text": "<image>"}), "f.jsonl:7")
    assert sorted(code for code, _ in found) == ["S11", "W01", "W05"]     # each once a record


def test_up_to_twenty_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(DataError) as error:
        Records(write(tmp_path / "r.jsonl", *["{}", GOOD] * 30))
    lines = str(error.value).split("\n")
    assert [line.split(": ")[0] for line in lines] == [f"{tmp_path}/r.jsonl:{n}" for n in range(1, 41, 2)]


def test_what_is_skipped_keeps_its_number_and_iterating_passes_it_over(tmp_path, capsys):
    bad = image({**POINT, "count": 2})
    path = write(tmp_path / "r.jsonl", GOOD, bad, GOOD, bad, bad)
    source = Records(path)
    assert len(source) == 5 and [r["where"] for r in source] == [f"{path}:1", f"{path}:3"]
    with pytest.raises(Unreadable, match=r"^S11 count 2, but 1 points \(annotations\[0\]\)$"):
        source[3]
    assert source[-3]["where"] == f"{path}:3"
    with pytest.raises(IndexError):
        source[5]
    assert source.found["S11"][0] == 3
    assert capsys.readouterr().err == f"{path}:2: S11 count 2, but 1 points (annotations[0]); skipped (3 times in this file)\n"
    with pytest.raises(DataError, match=r"r.jsonl:2: S11 .*\n.*:4: S11"):
        Records(path, strict=True)
    with pytest.raises(DataError, match=r"r.jsonl:1: S11 .* as are all 2 records"):
        Records(write(path, bad, bad))


def test_native_files_are_strict_unless_they_are_a_third_partys(tmp_path):
    wrong = image(CAPTION, image="/a.png")
    assert verdict(tmp_path, wrong)[0] == "E10"
    source = Records(write(tmp_path / "r.jsonl", GOOD, wrong), lenient=True)
    with pytest.raises(Unreadable, match=r"^E10 the path '/a.png' is absolute"):
        source[1]
    for line in ("{}", "[]", "{", '{"a":1,"a":2}'):                       # not even a record: no leniency
        with pytest.raises(DataError):
            Records(write(tmp_path / "r.jsonl", GOOD, line), lenient=True)


def test_an_id_that_comes_twice_is_told_but_does_no_harm(tmp_path, capsys):
    lines = [{**GOOD, "id": name} for name in ("a", "b", "a", "c", "a")] + [GOOD, GOOD]
    source = Records(write(tmp_path / "r.jsonl", *lines))
    assert len(list(source)) == 7 and "r.jsonl:3: E08 the id 'a' was given before (2 times" in capsys.readouterr().err
    assert list(records.repeated(np.array([0, 7, 0, 7, 9, 7], np.uint64))) == [3, 5]


def test_subtitles_come_sorted_and_options_are_added(tmp_path):
    subtitles = [{"start": s, "end": s + 1, "text": str(s)} for s in (3, 1, 2)]
    path = write(tmp_path / "r.jsonl", film(QA, {**QA, "style": "own"}, subtitles=subtitles, weight=3))
    record = Records(path, style="vqa2", weight=0.5)[0]
    assert [line["start"] for line in record["subtitles"]] == [1, 2, 3] and record["weight"] == 1.5
    assert [a["style"] for a in record["annotations"]] == ["vqa2", "own"]
    for wrong in ({"style": "a b"}, {"weight": 0}):
        with pytest.raises(DataError, match=f"the option {next(iter(wrong))} must be"):
            Records(path, **wrong)


# ---------------------------------------------------------------------------------------------------------------
# files


@pytest.mark.parametrize(("name", "content", "words"), [
    ("r.jsonl", b"", "E05 the file holds no record"), ("r.jsonl", b"\n \r\n", "E05"), ("r.json", b" ", "E05"), ("r.json", b"[ ]", "E05"),
    ("r.jsonl", b"\xff\xfe{\0}\0", ":1: E02 not UTF-8 but UTF-16"), ("r.jsonl", b"{\0}\0\n\0", ":1: E02 a NUL"),
    ("r.jsonl", b'\n{"a":"\xe9"}', r":2: E02 not UTF-8 at byte 6"), ("r.json", b'[\n{"a":"\xe9"}]', r":2: E02 not UTF-8 at byte 6"),
    ("r.jsonl", b"\n[\n {}\n]", r":2: E05 a JSON array.* name it .json"), ("r.jsonl", b'[{"a": 1}, {}]', r":1: E05 a JSON array"),
    ("r.json", b'\n{"a": 1}\n{"a": 2}', r":2: E05 not an array.* Name it .jsonl"), ("r.json", b"12", ":1: E05 not an array of records"),
    ("r.json", b'[\n{"annotations": [{"type": "text", "text": "x"}]},\n\n 3]', ":4: E05 a record must be an object, not 3"),
    ("r.json", b'[\n{},\n {"a": [1, }\n]', r":3: E01 the record that begins here is not JSON"),
    ("r.json", b'[\n\n{"a": "b', ":3: E01.*truncated"),
    ("r.json", b"[\n{},\n]", ":3: E01"), ("r.json", b"[{}\n{}]", ":2: E01 .* where , or ] should stand"), ("r.json", b"[,{}]", ":1: E01"),
    ("r.json", b"[{}\n", ":2: E01 the array is not ended"), ("r.json", b"[{}]\n\n[", r":3: E01 '\[' after the end"),
    ("r.json", b"[" * 100_000, "E01 .*deep"), ("r.csv", b"a,b", "E05 a file of records is named"),
    ("r.json", b"[ 123456]", "E05 a record must be an object, not 123456"),
    ("r.json", b'[{"weight": NaN}]', ":1: E03"), ("r.json", b'[{"a": 1, "a": 2}]', ":1: E04"),
])
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_a_file_that_is_none_of_records_is_refused_with_the_line(tmp_path, monkeypatch, name, content, words, chunk):
    monkeypatch.setattr(records, "CHUNK", chunk)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        Records(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match=str(missing)):
            Records(missing)
    with pytest.raises(DataError, match="--media"):
        Records(MEDIA / "records.jsonl", tmp_path / "none")
    write(tmp_path / "r.jsonl", json.dumps(GOOD)[:-1] + " " * 200 + "}")
    limit = records.LONGEST
    try:
        records.LONGEST = 100
        with pytest.raises(DataError, match="E01 a line of more than"):
            Records(tmp_path / "r.jsonl")
    finally:
        records.LONGEST = limit


RANDOM = random.Random(0)


def word():
    return "".join(RANDOM.choice('ab [{"\\é象😀\u2028 ]},:') for _ in range(RANDOM.randrange(1, 12))) + "x"


def some_records(n):
    """Sound records of any kind with random texts, as a file may hold them."""
    found = []
    for i in range(n):
        record = json.loads(json.dumps(RANDOM.choice(SOUND)))
        record["meta"] = {word(): [word(), RANDOM.random(), -3, None, {word(): True}]}
        record |= {"id": f"{word()}{i}"} if RANDOM.random() < 0.5 else {}
        record["annotations"] += [{"type": "text", "text": word()} for _ in range(RANDOM.randrange(3))]
        found.append(record)
    return found


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_records_of_any_kind_come_back_from_an_array_with_the_lines_they_begin_at(tmp_path, monkeypatch, indent, newline, start, chunk):
    monkeypatch.setattr(records, "CHUNK", chunk)
    many = some_records(40)
    text = json.dumps(many, indent=indent, ensure_ascii=RANDOM.random() < 0.3)
    (tmp_path / "r.json").write_bytes(start + text.replace("\n", newline).encode())
    lines = [1] * 40 if not indent else [k for k, line in enumerate(text.split("\n"), 1) if line == " {"]
    for k, (record, true) in enumerate(zip(Records(tmp_path / "r.json"), many, strict=True)):
        assert record["where"] == f"{tmp_path}/r.json:{lines[k]}"
        assert record["id"] == true.get("id", f"r.json:{lines[k]}")
        assert {k: v for k, v in record.items() if k not in ("id", "where", "source")} == {k: v for k, v in true.items() if k != "id"}


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_records_of_any_kind_come_back_from_lines_in_any_order(tmp_path, start):
    many = some_records(60)
    blank = [RANDOM.randrange(3) for _ in many]
    (tmp_path / "r.jsonl").write_bytes(start + "".join("\r\n" * n + json.dumps(r, ensure_ascii=n == 0) + "\n"
                                                       for n, r in zip(blank, many, strict=True)).encode())
    source = Records(tmp_path / "r.jsonl")
    for i in RANDOM.sample(range(60), 60):
        record = source[i]
        assert record["where"] == f"{tmp_path}/r.jsonl:{sum(blank[: i + 1]) + i + 1}" == source.where(i)
        assert record["annotations"] == many[i]["annotations"] and record["meta"] == many[i]["meta"]


def test_the_examples_and_the_real_records_pass_without_a_word(capsys):
    examples = [json.loads(line) for line in (HERE / "conformance/examples.jsonl").read_text().splitlines()]
    source = Records(HERE / "conformance/examples.jsonl")
    assert len(examples) == 12 and [{k: v for k, v in r.items() if k not in ("where", "source")} for r in source] == examples
    assert [r["id"] for r in Records(MEDIA / "records.jsonl")] == ["chelsea", "coffee", "astronaut", "coins", "rocket", "text-only"]
    assert capsys.readouterr().err == ""


def test_a_line_is_read_as_json_says_and_no_further():
    assert parse_line(b'\t{"a": [1, 2.5, "\xc3\xa9\\ud83d\\ude00"]}\r\n', "f:1") == {"a": [1, 2.5, "é😀"]}
    with pytest.raises(DataError, match=r"^f:1: E01 not JSON: .* at column 6 - truncated"):
        parse_line('{"a":', "f:1")


# ---------------------------------------------------------------------------------------------------------------
# the index


@pytest.fixture
def indexed(tmp_path, monkeypatch):
    """A file whose index is kept, however small; and how often files were scanned."""
    monkeypatch.setattr(records, "WORTH", 0)
    scans, scan = [], records.scan
    monkeypatch.setattr(records, "scan", lambda *given: scans.append(given) or scan(*given))
    lines = [{**GOOD, "id": str(i)} for i in range(20)] + [image({**POINT, "count": 2}), {**GOOD, "id": "3"}]
    return write(tmp_path / "r.jsonl", *lines), scans


def seen(source):
    return len(source), source.found, [{k: v for k, v in r.items() if k != "source"} for r in source]


def test_an_index_spares_the_scan_and_changes_nothing(indexed, capsys):
    path, scans = indexed
    first = Records(path)
    told = capsys.readouterr().err
    again = Records(path)
    assert (path.parent / ".r.jsonl.index.npz").is_file() and len(scans) == 1
    assert seen(first) == seen(again) and set(first.found) == {"S11", "E08"}
    assert capsys.readouterr().err == told and told.count("\n") == 2
    assert not list(path.parent.glob("*.part"))


def test_an_index_is_made_anew_when_file_options_or_rules_change(indexed, monkeypatch):
    path, scans = indexed
    Records(path)
    text = path.read_text()
    status = path.stat()
    path.write_text(text.replace('"text": "x"', '"text": "y"'))                           # as long as before, and as old
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Records(path)[0]["annotations"][0]["text"] == "y" and len(scans) == 2
    path.write_text(path.read_text() + json.dumps(GOOD) + "\n")
    assert len(Records(path)) == 23 and len(scans) == 3
    Records(path, lenient=True)
    assert len(scans) == 4
    assert Records(path, lenient=True, style="a", weight=2)[0]["weight"] == 2 and len(scans) == 4      # these change no line's fate
    monkeypatch.setattr(records, "VERSION", 0)
    Records(path, lenient=True)
    assert len(scans) == 5
    (path.parent / ".r.jsonl.index.npz").write_bytes(b"PK\3\4 no index")
    assert len(Records(path)) == 23 and len(scans) == 6


def test_a_folder_that_cannot_be_written_costs_the_time_only(indexed, capsys, monkeypatch):
    path, scans = indexed

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records.os, "replace", refuse)
    assert len(Records(path)) == 22 and "its index cannot be written" in capsys.readouterr().err
    assert len(Records(path)) == 22 and len(scans) == 2 and os.listdir(path.parent) == ["r.jsonl"]


def test_a_file_that_changes_while_it_is_open_is_noticed(indexed):
    source = Records(indexed[0])
    indexed[0].write_text(indexed[0].read_text().replace('"text": "x"', '"text": "longer"'))
    with pytest.raises(DataError, match="has changed since it was opened"):
        source[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_source_that_was_pickled_reads_the_same(indexed, monkeypatch, kept):
    path, scans = indexed
    monkeypatch.setattr(records, "WORTH", 0 if kept else 1 << 30)
    source = Records(path)
    source[0]                                                             # holds the file open
    sent = pickle.dumps(source)
    assert len(sent) < 1000 or not kept                                   # the index itself does not travel
    assert seen(pickle.loads(sent)) == seen(source) and len(scans) == 1


def _ids(source, numbers):
    return [source[i]["id"] for i in numbers]


def test_another_process_reads_the_same(tmp_path):
    source = Records(write(tmp_path / "r.jsonl", *({**GOOD, "id": str(i)} for i in range(50))))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(_ids, source, [49, 0, 7]).result() == ["49", "0", "7"]


def test_the_fingerprint_is_of_the_bytes_and_the_options(tmp_path):
    path, other = write(tmp_path / "a.jsonl", GOOD), write(tmp_path / "b.jsonl", GOOD)
    one = Records(path).fingerprint
    assert re.fullmatch("[0-9a-f]{64}", one) and one == Records(other).fingerprint != Records(path, style="a").fingerprint
    write(path, {**GOOD, "id": "a"})
    assert Records(path).fingerprint != one


def test_records_of_one_picture_become_one_where_the_first_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "WORTH", 0)
    named = lambda text, **more: {**image({"type": "caption", "text": text}), **more}      # noqa: E731
    lines = [named("a", id="first", weight=2), GOOD, named("b", image="b.png"), named("c"), GOOD,
             {"images": ["a.png"], "annotations": [{**CAPTION, "text": "d", "weight": 3}], "weight": 0.5},
             image({**POINT, "count": 9}), film(QA, video=FILM), film(QA), film(CAPTION, video=FILM)]
    path = write(tmp_path / "r.jsonl", *lines)
    for _ in range(2):                                                    # by the scan, then from the index
        source = Records(path, group_by_media=True)
        assert len(source) == 7 and len(list(source)) == 6
        assert [int(source.where(i).split(":")[1]) for i in range(7)] == [1, 2, 3, 5, 7, 8, 9]
        assert source[0]["id"] == "first" and "weight" not in source[0]
        assert [(a["text"], a.get("weight")) for a in source[0]["annotations"]] == [("a", 2), ("c", None), ("d", 1.5)]
        assert [a["type"] for a in source[5]["annotations"]] == ["qa", "caption"] and len(source[6]["annotations"]) == 1


# ---------------------------------------------------------------------------------------------------------------
# media


def test_the_folder_of_media_is_beside_the_file_unless_named(tmp_path):
    path = write(tmp_path / "r.jsonl", image(CAPTION, image="sub/a.png"))
    assert Records(path).paths_of(Records(path)[0]) == [tmp_path / "sub/a.png"]
    (tmp_path / "media").mkdir()
    assert Records(path).media == tmp_path / "media" and Records(path, tmp_path).media == tmp_path


def test_images_of_a_record_are_measured_and_read_in_order(tmp_path):
    lines = [{"images": ["coffee.png", {"path": "coins.png"}], "annotations": [CAPTION]}, GOOD, image(CAPTION, image="gone.png")]
    source = Records(write(tmp_path / "r.jsonl", *lines), MEDIA)
    assert source.image_sizes(source[0]) == [(600, 400), (384, 303)] and source.image_sizes(source[1]) == source.images(source[1]) == []
    for k, name in enumerate(("coffee", "coins")):
        assert np.array_equal(source.images(source[0])[k], records.media.read_image(MEDIA / f"{name}.png"))
    with pytest.raises(Unreadable, match="S20"):
        source.image_sizes(source[2])


def test_a_video_is_told_by_its_file_or_its_frames_and_its_clip(tmp_path):
    frames = {"frames": ["a.png", "b.png"], "fps": 2}
    source = Records(write(tmp_path / "r.jsonl", film(QA), film(QA, video=FILM), film(QA, video=frames)), tmp_path)
    assert [source.video_of(source[i]) for i in (0, 1)] == [(tmp_path / "a.mp4", 0, np.inf), (tmp_path / "a.mp4", 2, 8)]
    with pytest.raises(Unreadable, match="S24 no frame"):
        source.video_of(source[2])
    for name in ("a.png", "b.png"):
        shutil.copy(MEDIA / "coins.png", tmp_path / name)
    pictures, start, end = source.video_of(source[2])
    assert (pictures.paths, pictures.fps, start, end) == ([tmp_path / "a.png", tmp_path / "b.png"], 2, 0, np.inf)
    assert source.video_size(source[2]) == (384, 303, 1.0, 0.25)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media/own").mkdir()
    shutil.copy(MEDIA / "coins.png", tmp_path / "secret.png")
    shutil.copy(MEDIA / "coins.png", tmp_path / "media/own/a.png")
    (tmp_path / "media/out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "media/in.png").symlink_to(tmp_path / "media/own/a.png")
    (tmp_path / "media/up").symlink_to(tmp_path)
    source = Records(write(tmp_path / "r.jsonl", *(image(CAPTION, image=name) for name in ("in.png", "out.png", "up/secret.png"))))
    assert source.image_sizes(source[0]) == [(384, 303)]
    for i in (1, 2):
        with pytest.raises(Unreadable, match=r"S20 .* leaves the media folder"):
            source.images(source[i])


def test_points_in_pixels_are_checked_against_the_file_only_when_it_is_opened(tmp_path):
    """... and not even then if the record declares the size of what was annotated."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    Image.new("RGB", (10, 90)).save(tmp_path / "b.png")
    pixels = {**POINT, "coords": "pixel"}
    several = {**pixels, "points": [{"image": 0, "x": 39, "y": 2}, {"image": 1, "x": 4, "y": 88}]}
    source = Records(write(
        tmp_path / "r.jsonl", image({**pixels, "points": [{"x": 39, "y": 31}]}), image({**pixels, "points": [{"x": 39, "y": 30.2}]}),
        image({**pixels, "points": [{"x": 390, "y": 2}]}, image={"path": "a.png", "width": 400, "height": 300}),
        image({**pixels, "size": [400, 300], "points": [{"x": 390, "y": 2}]}), {"images": ["a.png", "b.png"], "annotations": [several]},
        {"images": ["b.png", "a.png"], "annotations": [several]}))
    assert len(list(source)) == 6
    assert [source.image_sizes(source[i])[0] for i in (1, 2, 3, 4)] == [(40, 30)] * 4
    with pytest.raises(Unreadable, match=r"^E62 point y=31 lies outside 0\.\.30 "):
        source.image_sizes(source[0])
    with pytest.raises(Unreadable, match=r"^E62 point x=39 lies outside 0\.\.10 "):
        source.image_sizes(source[5])


# ---------------------------------------------------------------------------------------------------------------
# check


def run(capsys, *argv):
    status = records.check_command([str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_check_tells_line_code_and_reason_then_the_sum(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", GOOD, {**GOOD, "id": "a"}, "{", image(CAPTION, image="no.png"),
                 image({**POINT, "count": 2}, image="no.png"), {**GOOD, "id": "a"}, turned(answer="<image>"))
    status, out, _ = run(capsys, path)
    places = [line.split(" ", 2)[:2] for line in out]
    assert status == 1 and places[:-1] == [[f"{path}:3:", "E01"], [f"{path}:4:", "S20"], [f"{path}:5:", "S11"], [f"{path}:7:", "W05"],
                                           [f"{path}:6:", "E08"]]
    assert out[-1] == f"{path}: 7 records; E01 1, E08 1, S11 1, S20 1, W05 1; 1 of 1 media files are missing"


def test_check_leaves_with_0_unless_something_is_wrong(tmp_path, capsys):
    assert run(capsys, write(tmp_path / "r.jsonl", GOOD)) == (0, [f"{tmp_path}/r.jsonl: 1 records; nothing wrong"], "")
    status, out, _ = run(capsys, write(tmp_path / "r.jsonl", *[turned(answer="<image>")] * 30))
    assert status == 0 and len(out) == 2 and out[-1].endswith("30 records; W05 30")      # a warning is told once
    path = write(tmp_path / "r.jsonl", *["{}"] * 30)
    assert [len(run(capsys, path, *more)[1]) for more in ((), ("--all",))] == [21, 31]
    rows = write(tmp_path / "r.jsonl", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": " "}]}, GOOD)
    assert run(capsys, rows)[0] == 1 and "; skipped" in run(capsys, rows)[1][0]
    assert run(capsys, tmp_path / "none.jsonl")[0] == run(capsys, rows, "--media", tmp_path / "none")[0] == 2


@pytest.mark.parametrize("decode", [False, True])
def test_check_opens_the_files_only_when_told_to(tmp_path, capsys, decode):
    for name in ("coins.png", "bigbuckbunny.mp4"):
        shutil.copy(MEDIA / name, tmp_path / name)
    whole = (tmp_path / "coins.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:9000])
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "bigbuckbunny.mp4").read_bytes()[:9000])
    (tmp_path / "folder.png").mkdir()
    Image.new("CMYK", (40, 30)).save(tmp_path / "inks.tif")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "turned.jpg", exif=exif)
    Image.new("RGB", (40, 30)).save(tmp_path / "moving.gif", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")])
    digest, bunny = hashlib.sha256(whole).hexdigest(), {"path": "bigbuckbunny.mp4"}
    lines = {
        "": image(CAPTION, image={"path": "coins.png", "width": 384, "height": 303, "sha256": digest}),
        "E10": image(CAPTION, image="folder.png"),
        "S20": image(CAPTION, image="gone.png"),
        "S24": film(CAPTION, video={"frames": ["coins.png", "gone.png"], "fps": 2}),
        "S21": image(CAPTION, image="cut.png"), "S21 ": image(CAPTION, image={"path": "coins.png", "sha256": "0" * 64}),
        "S23": film(CAPTION, video="cut.mp4"), "S23 ": film(CAPTION, video={**bunny, "start": 60, "end": 70}),
        "W02": image(CAPTION, image={"path": "coins.png", "width": 38, "height": 30}),
        "W02 ": film(CAPTION, video={**bunny, "duration": 9}),
        "W06": image(CAPTION, image="inks.tif"), "W06 ": image(CAPTION, image="turned.jpg"), "W06  ": image(CAPTION, image="moving.gif"),
        "S10": film({**FILM_POINT, "points": [{"x": 4, "y": 2, "t": 8}]}, video=bunny),
        "E62": film({**FILM_POINT, "coords": "pixel", "points": [{"x": 4, "y": 730, "t": 1}]}, video=bunny),
        "  ": film({**FILM_POINT, "coords": "pixel", "points": [{"x": 4, "y": 715, "t": 1}]}, video=bunny),
        "E62 ": film({**FILM_POINT, "coords": "pixel", "points": [{"x": 4, "y": 310, "t": 0}]}, video={"frames": ["coins.png"], "fps": 1}),
    }
    path = write(tmp_path / "r.jsonl", *lines.values())
    status, out, _ = run(capsys, path, "--all", *["--decode"] * decode)
    found = {int(line.split(":")[1]): line.split(" ")[1] for line in out[:-1]}
    there = ("E10", "S20", "S24") if not decode else lines
    assert status == 1 and found == {k: code.strip() for k, code in enumerate(lines, 1) if code.strip() and code in there}


WORST = [
    'null', 'true', '12', '""', '[]', '{}', '{"annotations":{}}', '{"annotations":[null]}', '{"annotations":[{"type":[]}]}',
    '{"annotations":[{"type":{}}]}', '{"image":[],"annotations":[{"type":"caption","text":"x"}]}', '{"image":{},"annotations":[[]]}',
    '{"video":{"frames":[[]],"fps":1},"annotations":[{}]}', '{"video":[],"annotations":[{"type":"text","text":"x"}]}',
    '{"video":"a","subtitles":[3],"annotations":[{"type":"text","text":"x"}]}', '{"annotations":[{"type":"qa","turns":[3]}]}',
    '{"annotations":[{"type":"qa","turns":[{}]}]}', '{"annotations":[{"type":"qa","question":{},"answer":"a"}]}',
    '{"annotations":[{"type":"qa","question":[[]],"answer":"a"}]}',
    '{"annotations":[{"type":"qa","question":"q","options":[[]],"answer_idx":[[]]}]}',
    '{"annotations":[{"type":"qa","question":"q","options":["a","b"],"answer_idx":[[]]}]}',
    '{"annotations":[{"type":"qa","question":[{"image":"0"}],"answer":"a"}]}',
    '{"image":"a","annotations":[{"type":"point","label":"l","coords":[],"points":[]}]}',
    '{"image":"a","annotations":[{"type":"point","label":"l","coords":"unit","points":[[]]}]}',
    '{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[3]}]}',
    '{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[{"t":1,"id":[],"x":0,"y":0}]}]}',
    '{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[],"query":[]}]}',
    '{"video":"a","annotations":[{"type":"track","label":"l","coords":"unit","points":[],"times":{}}]}', '{"conversations":{}}',
    '{"conversations":[[]]}', '{"conversations":[{"from":[],"value":{}}]}', '{"conversations":[{"from":"human","value":[[]]}]}',
    '{"messages":[{"role":"user","content":[{"type":[]}]}]}', '{"messages":[{"role":"user","content":[{"type":"image","image":[3]}]}]}',
    '{"image":[[3]],"texts":[{"user":"q","assistant":"a"}]}', '{"image":{"bytes":3},"texts":[3]}', '{"video":[[]],"texts":[null]}',
    '{"id":[],"weight":{},"style":3,"system":[],"start":[],"video":"a","texts":[{"user":"q","assistant":"a"}]}',
    '{"video":"a","clip":"x","texts":[{"user":"q","assistant":"a"}]}', '{"\\u00e9":1}', '\\', '{"annotations":', 'NaN', '	{]',
]


@pytest.mark.parametrize("line", WORST)
def test_nothing_that_a_line_may_hold_ends_in_a_traceback(tmp_path, capsys, line):
    """... and what is refused by check is refused by opening, and the other way round."""
    path = write(tmp_path / "r.jsonl", GOOD, line)
    status, out, _ = run(capsys, path)
    assert status == 1 and re.match(rf"{re.escape(str(path))}:2: [ES]\d\d \S", out[0])
    assert verdict(tmp_path, line)[0] == out[0].split(" ")[1]
