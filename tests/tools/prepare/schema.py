"""What the record format asks for, written down a second time (docs/records.md)."""

import math
import re

from records import reader

QA = {"question", "answer", "answers", "options", "answer_idx", "shuffle_options", "letters",
      "explanation", "turns", "system"}
COMMON = {"type", "style", "weight", "meta"}
FIELDS = {
    "caption": {"text"},
    "qa": QA,
    "point": {"label", "question", "coords", "size", "points", "count", "mode"},
    "box": {"label", "coords", "form", "boxes"},
    "count": {"label", "question", "count"},
    "track": {"label", "coords", "size", "mode", "fps", "times", "query", "points"},
}


def assert_valid(record):
    """... and that the check of the trainer finds nothing wrong either."""
    allowed = {"id", "image", "images", "video", "subtitles", "annotations", "weight", "meta"}
    assert set(record) <= allowed
    assert record["annotations"]
    assert_valid_media(record)
    for annotation in record["annotations"]:
        assert set(annotation) <= COMMON | FIELDS[annotation["type"]]
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", annotation.get("style", "x"))
        if annotation["type"] == "qa":
            for turn in annotation.get("turns", [annotation]):
                assert_valid_turn(turn, record)
        if annotation["type"] in ("point", "box", "count", "track"):
            assert (annotation.get("label") or annotation.get("question")).strip()
            count = annotation.get("count", 0)
            assert isinstance(count, int)
            assert count >= 0
        if "points" in annotation:
            assert_valid_points(annotation, record)
    # W03: a point in the corner of the image has a suspicious unit; garbage has such points
    assert {code for code, _ in reader.check(record, "here")} <= {"W03"}


def assert_valid_media(record):
    assert len({"image", "images", "video"} & set(record)) <= 1
    if "image" in record:
        media = [record["image"]]
    elif "video" in record:
        media = [record["video"]]
    else:
        media = record.get("images", [])
    allowed = {"path", "start", "end"} if "video" in record else {
        "path", "url", "sha256", "width", "height"}
    for entry in media:
        entry = {"path": entry} if isinstance(entry, str) else entry
        assert set(entry) <= allowed
        assert entry["path"]
        assert not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:|/", entry["path"])
        assert ".." not in entry["path"].split("/")
        assert ("start" in entry) == ("end" in entry)
        assert 0 <= entry.get("start", 0) < entry.get("end", math.inf)
    assert "subtitles" not in record or "video" in record
    for line in record.get("subtitles", []):
        assert set(line) == {"start", "end", "text"}
        assert 0 <= line["start"] <= line["end"]
        assert line["text"].strip()


def assert_valid_turn(turn, record):
    assert len({"answer", "answers", "options"} & set(turn)) == 1
    question = turn["question"]
    if isinstance(question, str):
        assert question.strip()
    else:
        assert question
        for part in question:
            assert isinstance(part, str) or part["image"] < len(record["images"])
    texts = [turn.get("answer", "x"), turn.get("explanation", "x"), *turn.get("answers", "x")]
    assert all(isinstance(text, str) and text.strip() for text in texts)
    if "options" in turn:
        assert 2 <= len(turn["options"]) <= 26
        assert 0 <= turn["answer_idx"] < len(turn["options"])


def assert_valid_points(annotation, record):
    width, height = annotation.get("size", (math.inf, math.inf))
    if annotation["coords"] == "percent":
        width, height = 100, 100
    keys = {"x", "y"}
    if "video" in record:
        keys.add("t")
    elif "images" in record:
        keys.add("image")
    if annotation["type"] == "track":
        keys.add("id")
    points = annotation["points"]
    query = [annotation["query"]] if "query" in annotation else []
    for point in points + query:
        assert set(point) - {"occluded"} == keys
        assert -width / 100 <= point["x"] <= 1.01 * width
        assert -height / 100 <= point["y"] <= 1.01 * height
        assert point.get("t", 0) >= 0
        assert 0 <= point.get("image", 0) < len(record.get("images", [0]))
    assert annotation.get("count", len(points)) == len(points)
    assert annotation.get("fps", 1) > 0
    if annotation["type"] == "track":
        assert len({(point["t"], point["id"]) for point in points}) == len(points)
