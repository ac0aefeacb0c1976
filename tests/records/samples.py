"""Records that tests begin with, and files of them."""

import json

import pytest

from records.errors import DataError, Unreadable
from records.reader import Records

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


def verdict(folder, line):
    """Why the record after a blank line, behind a good one, cannot be used; "" if it can be."""
    path = write(folder / "r.jsonl", GOOD, "", line)
    records = Records(path, stop_on_mistakes=False)
    assert records.where(1) == f"{path}:3"
    try:
        records[1]
    except Unreadable as error:
        reason = str(error)
    else:
        return ""
    with pytest.raises(DataError) as stop:           # a native file stops with the same words
        Records(path)
    assert str(stop.value) == f"{path}:3: {reason}"
    return reason.removeprefix("wrong record: ")
