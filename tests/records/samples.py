"""Records that tests use or change, and functions that write them to files."""

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
    """A record with the image a.png."""
    return {"image": "a.png", "annotations": list(annotations), **more}


def video(*annotations, **more):
    """A record with the video a.mp4."""
    return {"video": "a.mp4", "annotations": list(annotations), **more}


def turn(**more):
    """A record with one annotation, whose list of turns has one turn."""
    turns = [{"question": "q", "answer": "a", **more}]
    return {"annotations": [{"type": "qa", "turns": turns}]}


def write(path, *lines):
    """Writes a .jsonl file. A line is a record, or a text that is written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def verdict(folder, line):
    """-> why the record in this line cannot be used, or "". It follows a good and a blank line."""
    path = write(folder / "r.jsonl", GOOD, "", line)
    records = Records(path, stop_on_mistakes=False)
    assert records.where(1) == f"{path}:3"
    try:
        records[1]
    except Unreadable as error:
        reason = str(error)
    else:
        return ""
    with pytest.raises(DataError) as stop:           # opening the file fails with the same message
        Records(path)
    assert str(stop.value) == f"{path}:3: {reason}"
    return reason.removeprefix("wrong record: ")
