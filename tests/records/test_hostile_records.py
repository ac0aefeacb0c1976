"""Record files made to do harm: each ends as one sentence, in bounded time and memory, and nothing
is run and no file outside the media folder is read.
"""

import ast
import io
import json
import os
import re
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
from evaluation.pictures import draw
from records import index, parse
from records.check import check
from records.errors import printable, short_repr
from records.reader import DataError, Records, Unreadable
from tests.records.samples import GOOD, image
from text.tokenizer import ByteTokenizer
from tools.check import main as check_command
from training.ending import Ending
from training.planner import BadRecords, RunError

MEDIA = Path(__file__).parents[1] / "media"
REPOSITORY = Path(__file__).parents[2]
CAPTION = {"annotations": [{"type": "caption", "text": "x"}]}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def is_one_sentence(error, *words):
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert all(word in message for word in words), message


# --------------------------------------------------------------------------------------------------
# the index beside a file


def test_a_pickle_in_place_of_an_index_does_not_run(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD))
    monkeypatch.setattr(index, "MIN_INDEXED_BYTES", 0)
    stamp = Records(path).stamp
    armed = np.array([Payload(tmp_path / "harm")], dtype=object)
    arrays = dict.fromkeys(("offset", "length", "line", "skip", "found"), armed)
    np.savez(index.index_path(path), stamp=np.array(stamp), **arrays)
    assert [r["annotations"][0]["text"] for r in Records(path)] == ["x"]
    assert not (tmp_path / "harm").exists()


def test_an_index_that_claims_to_be_larger_than_memory_is_made_anew(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD))
    monkeypatch.setattr(index, "MIN_INDEXED_BYTES", 0)
    assert len(Records(path)) == 1
    with io.BytesIO() as file:
        header = {"descr": "<u8", "fortran_order": False, "shape": (2**50,)}
        np.lib.format.write_array_header_1_0(file, header)
        content = file.getvalue()
    with zipfile.ZipFile(index.index_path(path), "a") as archive:
        archive.writestr("order.npy", content)
    assert len(Records(path)) == 1


def test_an_index_that_somebody_else_made_opens_no_file_outside_the_media_folder(
        tmp_path, monkeypatch):
    """It has the right stamp and says of a bad record that it is good."""
    monkeypatch.setattr(index, "MIN_INDEXED_BYTES", 0)
    (tmp_path / "media").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"image": "../secret.png", **CAPTION}, GOOD])))
    assert len(list(Records(path, lenient=True))) == 1
    arrays = dict(np.load(index.index_path(path)))
    assert arrays["skip"].tolist() == [1, 0]
    np.savez(index.index_path(path), **arrays | {"skip": np.zeros(2, np.uint8)})
    records = Records(path, lenient=True)
    assert len(list(records)) == 2
    for read in (records.image_sizes, records.images):
        with pytest.raises(Unreadable, match=r"^S20 .* leaves the media folder"):
            read(records[0])


# --------------------------------------------------------------------------------------------------
# paths


def test_links_are_followed_inside_the_folder_and_not_out_of_it(tmp_path):
    outside = tmp_path / "outside"
    inside = tmp_path / "media"
    for folder in (outside / "deep", inside / "deep"):
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "a.png")
    links = {
        "in.png": "deep/a.png", "chain.png": "in.png", "by parents.png": "deep/../deep/a.png",
        "folder": "deep", "whole": inside / "deep/a.png", "out.png": outside / "deep/a.png",
        "chained.png": "out.png", "elsewhere": "../outside/deep", "up": "..", "deep/up": "../..",
        "root": "/"}
    for name, target in links.items():
        (inside / name).symlink_to(target)
    good = ["in.png", "chain.png", "by parents.png", "folder/a.png", "whole",
            "folder/../deep/a.png"]
    bad = ["out.png", "chained.png", "elsewhere/a.png", "up/outside/deep/a.png",
           "deep/up/outside/deep/a.png", "folder/up/outside/deep/a.png",
           f"root{outside}/deep/a.png", "up/media/../outside/deep/a.png"]
    rows = []
    for name in (*good, *bad):
        rows.append({"image": name, **CAPTION})
        rows.append({"video": {"frames": ["in.png", name], "fps": 1}, **CAPTION})
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = Records(tmp_path / "r.jsonl", inside)
    for record in list(records)[: 2 * len(good)]:
        assert len(records.paths_of(record)) in (1, 2)
    for record in list(records)[2 * len(good) :]:
        with pytest.raises(Unreadable, match=r"^S20 .* leaves the media folder"):
            data.size(record, ByteTokenizer(), data.DataConfig(), 0, 0)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes in folders")
def test_a_pipe_in_place_of_records_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "r.jsonl")
    with pytest.raises(DataError, match=r"r.jsonl: this is not a plain file"):
        Records(tmp_path / "r.jsonl")
    assert check_command([str(tmp_path / "r.jsonl")]) == 2


# --------------------------------------------------------------------------------------------------
# texts and numbers


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_record_of_hundreds_of_megabytes_is_refused_unread(tmp_path, suffix):
    path = tmp_path / f"r{suffix}"
    array = suffix == ".json"
    with open(path, "wb") as file:
        file.write(b"[" * array + json.dumps(GOOD).encode() + b"," * array)
        file.write(b'\n{"annotations": "')
        for _ in range(300):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"r{suffix}:2: E01 ") as error:
        Records(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    is_one_sentence(error, "is longer than 16 MiB")
    assert peak < 8 * parse.MAX_RECORD_BYTES


LETTERS = "x" * 8_000_000


@pytest.mark.parametrize("record", [
    {LETTERS: 1, **GOOD}, {"annotations": [{"type": LETTERS}]},
    image({"type": "point", "label": "l", "coords": LETTERS, "points": []}),
    image({"type": "caption", "text": LETTERS})], ids=["key", "type", "coords", "text"])
def test_a_key_or_a_value_of_millions_of_letters_costs_no_time(record):
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        check(record, "f:1")
    is_one_sentence(error, "E07")
    assert time.monotonic() - began < 1


def test_nesting_is_limited_whoever_calls():
    """Python's own limit depends on the caller: what check lets pass could stop a run."""
    def nested(n):
        return ('{"annotations": [{"type": "text", "text": "x"}], "meta": {"a": '
                + "[" * n + "]" * n + "}}")

    assert parse.parse_line(nested(parse.MAX_DEPTH - 2), "f:1")
    for n in (parse.MAX_DEPTH - 1, 500, *range(900, 1000, 7), 100_000):
        with pytest.raises(DataError, match=r"^f:1: E01 the record is nested ") as error:
            parse.parse_line(nested(n), "f:1")
        is_one_sentence(error)


@pytest.mark.parametrize(("place", "value", "words"), [
    ("weight", 1e308, "at most a million"),
    ("annotations.0.weight", 1e308, "at most a million"),
    ("video.fps", 1e-300, "0.0001 to 10000"),
    ("video.fps", 1e308, "0.0001 to 10000"),
    ("annotations.0.fps", 1e308, "0.0001 to 10000"),
    ("video.duration", 1e300, "at most a million")])
def test_numbers_that_would_overflow_later_are_refused_at_once(place, value, words):
    """Of 1e308 a product of weights is infinite, and so is the loss; 1e-300 frames a second make a
    video of 1e300 seconds."""
    track = {"type": "track", "label": "l", "coords": "unit", "fps": 1, "weight": 1,
             "points": [{"t": 0, "id": 1, "x": 0, "y": 0}]}
    record = {"video": {"frames": ["a.png"] * 4, "fps": 1, "start": 0, "end": 4}, "weight": 1,
              "annotations": [track], "subtitles": [{"start": 0, "end": 1, "text": "x"}]}
    assert not check(record, "f:1")
    *above, key = place.split(".")
    holder = record
    for part in above:
        holder = holder[int(part) if part.isdecimal() else part]
    holder[key] = value
    with pytest.raises(DataError, match=words) as error:
        check(record, "f:1")
    is_one_sentence(error)


# --------------------------------------------------------------------------------------------------
# the terminal

CONTROL = ["a\n.png", "\x1b[31m.png", "a\x7f.png", "\x9b31m.png"]


@pytest.mark.parametrize("name", CONTROL)
def test_a_path_that_would_write_to_the_terminal_is_refused(name):
    with pytest.raises(DataError, match=r"E10 the path .* holds a control character") as error:
        check({"image": name, **CAPTION}, "f:1")
    is_one_sentence(error)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", [*CONTROL, "\u202egnp.a", "\x00", "\ud800"])
def test_printed_text_carries_no_control_characters(name):
    assert printable(name.replace("\n", "")).isprintable()
    assert short_repr(name).isprintable()
    assert short_repr({name: [name]}).isprintable()


def test_printed_text_stays_as_it_is_where_it_does_no_harm():
    assert printable("é 象 😀 'a'\\n\nb") == "é 象 😀 'a'\\n\nb"
    assert printable("\x1b[31mred") == "\\x1b[31mred"


def test_check_prints_no_escape_sequence_of_a_file(tmp_path, capsys):
    folder = tmp_path / "\x1b[31m"
    folder.mkdir()
    lines = [{**GOOD, "id": "\x1b[2J"}] * 2 + [{"\x1b[31m": 1, **GOOD}]
    (folder / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert check_command([str(folder / "r.jsonl")]) == 1
    assert check_command([str(folder / "none.jsonl")]) == 2
    printed = "".join(capsys.readouterr())
    assert "\x1b" not in printed
    assert r"\x1b[31m/r.jsonl:2: E08" in printed


RECORD_ID = "\x1b[2J\x9b31m"


def test_messages_of_a_run_print_no_escape_sequence_of_a_record(tmp_path, capsys):
    where = f"{RECORD_ID}.jsonl:2"
    BadRecords("skipped", DataError).bad("r", where, f"S20 there is no file {RECORD_ID}")
    records = [{"id": RECORD_ID, "where": where}] * 2
    prediction = {"id": RECORD_ID, "annotation": 0, "medium": "image", "type": "point", "true": []}
    draw([prediction], records, tmp_path)
    with pytest.raises(SystemExit), Ending():
        raise RunError(f"step 3: loss nan; records: {RECORD_ID}")
    printed = capsys.readouterr().err
    assert len(re.findall(r"\\x1b\[2J\\x9b31m", printed)) == 4
    assert not {"\x1b", "\x9b"} & set(printed)


def test_every_message_on_stderr_goes_through_the_function_that_escapes():
    """print and tqdm.write with a file=sys.stderr of their own print constants only."""
    found = []
    for path in REPOSITORY.rglob("*.py"):
        if {"tests", ".git", "runs"} & set(path.relative_to(REPOSITORY).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func)
            to_stderr = any(ast.unparse(k.value) == "sys.stderr" for k in node.keywords)
            written = ast.unparse(node.args[0])
            safe = isinstance(node.args[0], ast.Constant) or written.startswith("printable(")
            if name in ("print", "tqdm.write") and to_stderr and not safe:
                found.append(f"{path.name}:{node.lineno}: {written}")
    assert not found
