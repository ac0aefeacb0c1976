"""Records that tests begin with, and files of them."""

import json
import re

from records.reader import DataError, Records, Unreadable

GOOD = {"annotations": [{"type": "text", "text": "x"}]}
CAPTION = {"type": "caption", "text": "x"}
QA = {"type": "qa", "question": "q", "answer": "a"}
CHOICE = {"type": "qa", "question": "q", "options": ["a", "b"], "answer_idx": 1}
POINT = {"type": "point", "label": "l", "coords": "percent", "points": [{"x": 4, "y": 2}]}
VIDEO_POINT = {**POINT, "points": [{"x": 4, "y": 2, "t": 1}]}
TRACK = {"type": "track", "label": "l", "coords": "percent",
         "points": [{"t": 1, "id": 1, "x": 4, "y": 2}]}
CLIP = {"path": "a.mp4", "start": 2, "end": 8}


def image(*annotations, **more):
    """A record of the image a.png."""
    return {"image": "a.png", "annotations": list(annotations), **more}


def video(*annotations, **more):
    """A record of the video a.mp4."""
    return {"video": "a.mp4", "annotations": list(annotations), **more}


def turn(**more):
    """A record of one turn in a list of turns."""
    turns = [{"question": "q", "answer": "a", **more}]
    return {"annotations": [{"type": "qa", "turns": turns}]}


def write(path, *lines):
    """A .jsonl file of records, or of texts as they stand."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def verdict(folder, line, **options):
    """(code, message) of the second record of a file whose first is sound; else ("", "")."""
    path = write(folder / "r.jsonl", GOOD, "", line)
    try:
        records = Records(path, **options)
    except DataError as error:
        where, code, message = re.fullmatch(r"(.*?): ([ESW]\d\d) (.*)", str(error)).groups()
        assert where == f"{path}:3"
        return code, message
    assert records.where(1) == f"{path}:3"
    try:
        records[1]
    except Unreadable as error:
        reason = str(error)
    else:
        return next(((code, found.first) for code, found in records.found.items()), ("", ""))
    assert [r["id"] for r in records] == ["r.jsonl:1"]
    assert reason[:3] in records.found
    return reason[:3], reason[4:]


SOUND = [
    GOOD,
    image(CAPTION, image="a/../b.png"),                          # stays in the folder
    image(QA, image="café 1:2.png"),
    image({**POINT, "points": []}),
    image({**POINT, "points": [{"x": 0.5, "y": 1.5}]}),
    image({**POINT, "coords": "pixel"}),
    image({**CHOICE, "answer_idx": [0, 1], "options": ["", "b"], "shuffle_options": True,
           "letters": False, "explanation": "e"}),
    image(CAPTION, weight=0.5, id=" ", meta={"anything": [None, {"a": 1}]}),
    image({**CAPTION, "weight": 0, "object": "dog"}),
    {"images": ["a"], "annotations": [POINT]},
    {"images": ["a"], "annotations": [{**QA, "question": [{"image": 0}]}]},
    video(VIDEO_POINT, {**TRACK, "points": [], "times": [0, 0.5]},
          {**QA, "question": [{"video": 0}, "q"]}, subtitles="words"),
    # 0.2 s outside the clip is less than half a frame
    video({**VIDEO_POINT, "points": [{"x": 4, "y": 2, "t": 8.2}]},
          {**CAPTION, "start": 1.8, "end": 8}, video=CLIP),
    video({**TRACK, "mode": "from_point", "fps": 2, "query": {"t": 0, "id": 1, "x": 4, "y": 2}},
          subtitles=[]),
    {"annotations": [{"type": "text", "text": "x", "prompt": "p"}, {**QA, "system": "s"}]},
    turn(weight=0),
]
