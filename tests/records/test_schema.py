"""The tables of fields, sound records, and the limit of a text."""

import json
import re
from pathlib import Path

import pytest

from records import schema
from records.check import check
from records.reader import Records
from tests.records.samples import (
    CAPTION,
    CHOICE,
    POINT,
    QA,
    SOUND,
    image,
    turn,
    verdict,
    video,
    write,
)

TESTS = Path(__file__).parents[1]

LONG = "x" * (schema.MAX_TEXT + 1)
HALVES = [LONG[: schema.MAX_TEXT // 2 + 1]] * 2
LONG_TEXTS = {
    "text": image({**CAPTION, "text": LONG}),
    "blanks": image({**CAPTION, "text": "x" + " " * schema.MAX_TEXT}),
    "label": image({**POINT, "label": LONG}),
    "system": {"annotations": [{**QA, "system": LONG}]},
    "question": turn(question=LONG),
    "parts of a question": image({**QA, "question": [HALVES[0], {"image": 0}, HALVES[1]]}),
    "answer": turn(answer=LONG),
    "answers": {"annotations": [{"type": "qa", "question": "q", "answers": ["a", LONG]}]},
    "options": {"annotations": [{**CHOICE, "options": ["a", LONG]}]},
    "explanation": {"annotations": [{**CHOICE, "explanation": LONG}]},
    "subtitles": video(QA, subtitles=LONG),
    "lines of subtitles": video(QA, subtitles=[{"start": 0, "end": 1, "text": half}
                                               for half in HALVES]),
    "parts of a row": {"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "text", "text": half} for half in HALVES]}]},
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_text_of_more_than_a_million_characters_is_refused(tmp_path, name):
    """The tokenizer would take long, in every draw, or panic."""
    code, message = verdict(tmp_path, LONG_TEXTS[name])
    assert code == "E07"
    assert re.match(r"a text has 1,000,00\d characters, more than 1,000,000 \(", message)


def test_a_text_of_a_million_characters_and_long_meta_data_are_sound():
    assert check(image({**CAPTION, "text": LONG[1:]}, meta={"a": LONG}), "here") == []


@pytest.mark.parametrize("record", SOUND, ids=range(len(SOUND)))
def test_a_sound_record_passes_and_comes_back_as_it_was(tmp_path, record):
    path = write(tmp_path / "r.jsonl", record)
    records = Records(path)
    assert not check(record, "here")
    assert not records.found
    found = records[0]
    assert found.pop("id") == record.get("id", "r.jsonl:1")
    assert found.pop("where") == f"{path}:1"
    assert found.pop("source") is records
    assert found == {key: value for key, value in record.items() if key != "id"}


def test_the_tables_are_those_of_the_schema():
    json_schema = json.loads((TESTS / "conformance/record.schema.json").read_text())
    parts = json_schema["$defs"]
    tables = {
        "record": json_schema, "image": parts["image"]["oneOf"][1],
        "video": parts["video"]["oneOf"][1], "subtitle": parts["subtitle"], "turn": parts["turn"],
        "point of a point": parts["point"],
        "box": parts["box"], "box of a box": parts["box"]["properties"]["boxes"]["items"],
        "point of a track": parts["track_point"],
        "caption": parts["caption"], "qa": parts["qa"], "point": parts["point_annotation"],
        "count": parts["count"], "track": parts["track"], "text": parts["text_annotation"]}
    assert set(tables) == set(schema.TABLES)
    types = parts["annotation"]["properties"]["type"]["enum"]
    assert types == list(schema.ANNOTATION_TYPES)
    for name, part in tables.items():
        table = schema.TABLES[name]
        required = {key for key, kind in table.items() if kind.endswith("!")}
        assert set(table) == set(part["properties"]), name
        assert required - {"type"} == set(part.get("required", [])), name
    modes = {"coords": parts["coords"],
             "box form": parts["box"]["properties"]["form"],
             "point mode": parts["point_annotation"]["properties"]["mode"],
             "track mode": parts["track"]["properties"]["mode"]}
    assert {name: tuple(mode["enum"]) for name, mode in modes.items()} == schema.MODES
