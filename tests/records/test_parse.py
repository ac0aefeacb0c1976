"""Files to rows, and rows to JSON values: positions, lines, and what is no file of records."""

import json
import random

import pytest

from records import parse
from records.parse import parse_line
from records.reader import DataError, Records
from tests.records.samples import GOOD, SOUND, write

RANDOM = random.Random(0)


def test_a_line_is_read_as_json_says_and_no_further():
    line = b'\t{"a": [1, 2.5, "\xc3\xa9\\ud83d\\ude00"]}\r\n'
    assert parse_line(line, "f:1") == {"a": [1, 2.5, "é😀"]}
    with pytest.raises(DataError, match=r"^f:1: E01 the text is not JSON: .* column 6 - is it "):
        parse_line('{"a":', "f:1")


WRONG_FILES = [
    ("r.jsonl", b"", "E05 the file holds no record"),
    ("r.jsonl", b"\n \r\n", "E05"),
    ("r.json", b" ", "E05"),
    ("r.json", b"[ ]", "E05"),
    ("r.jsonl", b"\xff\xfe{\0}\0", ":1: E02 the file is not UTF-8 but UTF-16"),
    ("r.jsonl", b"{\0}\0\n\0", ":1: E02 the text holds a NUL"),
    ("r.jsonl", b'\n{"a":"\xe9"}', r":2: E02 byte 6 of the record is not UTF-8"),
    ("r.json", b'[\n{"a":"\xe9"}]', r":2: E02 byte 6 of the record is not UTF-8"),
    ("r.jsonl", b"\n[\n {}\n]", r":2: E05 this is a JSON array.* name the file .json"),
    ("r.jsonl", b'[{"a": 1}, {}]', r":1: E05 this is a JSON array"),
    ("r.json", b'\n{"a": 1}\n{"a": 2}', r":2: E05 .* not an array.* Name the file .jsonl"),
    ("r.json", b"12", ":1: E05 the file is not an array of records"),
    ("r.json", b'[\n{"annotations": [{"type": "text", "text": "x"}]},\n\n 3]',
     ":4: E05 a record must be an object, not 3"),
    ("r.json", b'[\n{},\n {"a": [1, }\n]', r":3: E01 the record that begins here is not JSON"),
    ("r.json", b'[\n\n{"a": "b', ":3: E01.*truncated"),
    ("r.json", b"[\n{},\n]", ":3: E01"),
    ("r.json", b"[{}\n{}]", ":2: E01 .* where , or ] should stand"),
    ("r.json", b"[,{}]", ":1: E01"),
    ("r.json", b"[{}\n", ":2: E01 the array does not end"),
    ("r.json", b"[{},\n", ":2: E01 .*truncated"),
    ("r.json", b"[{}]\n\n[", r":3: E01 '\[' stands after the end of the array"),
    ("r.json", b"[" * 100_000, "E01 .*deep"),
    ("r.csv", b"a,b", "E05 the name of a file of records ends in"),
    ("r.json", b"[ 123456]", "E05 a record must be an object, not 123456"),
    ("r.json", b'[{"weight": NaN}]', ":1: E03"),
    ("r.json", b'[{"a": 1, "a": 2}]', ":1: E04"),
]


@pytest.mark.parametrize(("name", "content", "words"), WRONG_FILES)
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_a_wrong_file_is_refused_with_the_line(tmp_path, monkeypatch, name, content, words, chunk):
    monkeypatch.setattr(parse, "CHUNK_BYTES", chunk)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        Records(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))


COCO = {
    "info": {"year": 2017},
    "images": [{"id": 1, "file_name": "a.jpg", "width": 4, "height": 4}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}],
    "categories": [{"id": 1, "name": "cat"}],
}


@pytest.mark.parametrize("n_annotations", [0, 1, 40_000])
@pytest.mark.parametrize("name", ["r.json", "r.jsonl"])
def test_a_coco_file_is_told_what_it_is(tmp_path, name, n_annotations):
    """Its last key may be megabytes behind the first."""
    content = COCO | {"annotations": COCO["annotations"] * n_annotations}
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r":1: E0[56] .*COCO annotations.*convert them to records"):
        Records(tmp_path / name)


def test_a_record_of_too_many_bytes_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "r.jsonl", json.dumps(GOOD)[:-1] + " " * 200 + "}")
    (tmp_path / "r.json").write_text(f"[{json.dumps(GOOD)[:-1] + ' ' * 200}")
    monkeypatch.setattr(parse, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(parse, "CHUNK_BYTES", 10)
    for name in ("r.jsonl", "r.json"):
        with pytest.raises(DataError, match=r"1: E01 the .* is longer than"):
            Records(tmp_path / name)


# --------------------------------------------------------------------------------------------------
# random records


def random_word():
    letters = 'ab [{"\\é象😀\u2028 ]},:'
    return "".join(RANDOM.choice(letters) for _ in range(RANDOM.randrange(1, 12))) + "x"


def random_records(n):
    """Sound records of any kind with random texts, as a file may hold them."""
    found = []
    for i in range(n):
        record = json.loads(json.dumps(RANDOM.choice(SOUND)))
        values = [random_word(), RANDOM.random(), -3, None, {random_word(): True}]
        record["meta"] = {random_word(): values}
        if RANDOM.random() < 0.5:
            record["id"] = f"{random_word()}{i}"
        for _ in range(RANDOM.randrange(3)):
            record["annotations"].append({"type": "text", "text": random_word()})
        found.append(record)
    return found


def without(record, *keys):
    return {key: value for key, value in record.items() if key not in keys}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_records_come_back_from_an_array_with_the_lines_they_begin_at(
        tmp_path, monkeypatch, indent, newline, start, chunk):
    monkeypatch.setattr(parse, "CHUNK_BYTES", chunk)
    path = tmp_path / "r.json"
    many = random_records(40)
    text = json.dumps(many, indent=indent, ensure_ascii=RANDOM.random() < 0.3)
    path.write_bytes(start + text.replace("\n", newline).encode())
    lines = [1] * 40
    if indent:
        lines = [k for k, line in enumerate(text.split("\n"), 1) if line == " {"]
    for record, expected, line in zip(Records(path), many, lines, strict=True):
        assert record["where"] == f"{path}:{line}"
        assert record["id"] == expected.get("id", f"r.json:{line}")
        assert without(record, "id", "where", "source") == without(expected, "id")


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_records_come_back_from_lines_in_any_order(tmp_path, start):
    path = tmp_path / "r.jsonl"
    many = random_records(60)
    blank_lines = [RANDOM.randrange(3) for _ in many]
    text = ""
    for n, record in zip(blank_lines, many, strict=True):
        text += "\r\n" * n + json.dumps(record, ensure_ascii=n == 0) + "\n"
    path.write_bytes(start + text.encode())
    records = Records(path)
    for i in RANDOM.sample(range(60), 60):
        line = sum(blank_lines[: i + 1]) + i + 1
        assert records[i]["where"] == records.where(i) == f"{path}:{line}"
        assert records[i]["annotations"] == many[i]["annotations"]
        assert records[i]["meta"] == many[i]["meta"]
