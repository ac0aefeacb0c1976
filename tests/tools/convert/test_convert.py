"""python -m tools.convert: its input, paths of media, its output, and its exit status."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from records.errors import DataError
from records.parse import parse
from records.reader import Records, names_of
from tests.records.samples import CAPTION, GOOD, QA, image, video, write
from tests.tools.convert.command import TESTS, read, run
from tools import check
from tools.convert import write as write_files

ROW = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
MADE = {"annotations": [{"type": "qa", "turns": [{"question": "q", "answer": "a"}]}]}
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------------------------------
# input


@pytest.mark.parametrize(("indent", "start"), [(None, "\ufeff"), (2, "")])
def test_an_array_holds_the_same_records_as_lines(tmp_path, indent, start):
    rows = [{**GOOD, "id": text} for text in ("a", "ünï ]},", "\\ \"", "日本")]
    array = tmp_path / "array.json"
    array.write_text(start + json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(start + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    for path in (array, lines):
        out = tmp_path / f"{path.stem}.records.jsonl"
        assert run(path, out) == (0, {"rows": 4, "records": 4, "skipped": {}}, "")
        assert read(out) == rows
    assert "ünï" in out.read_text(encoding="utf-8")


def test_rows_of_all_kinds_lie_in_one_file_and_keep_their_ids_as_text(tmp_path):
    """A record stays a record, although its texts contain names of fields of chats."""
    spoken = {"annotations": [{**QA, "question": '"messages" and "conversations"?'}]}
    chat = {**ROW, "id": 7, "note": "annotations"}
    of_a_table = {**ROW, "annotations": None}  # rows of a table all have the same fields
    path = write(tmp_path / "r.jsonl", ROW, spoken, chat, of_a_table)
    run(path, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl") == [MADE, spoken, {"id": "7", **MADE}, MADE]


# --------------------------------------------------------------------------------------------------
# paths


ENTRIES = [
    image(CAPTION), image(CAPTION, image={"path": "a.png", "width": 384, "height": 303}),
    {"images": ["a.png", {"path": "a.png"}], "annotations": [CAPTION]}, video(CAPTION),
    video(CAPTION, video={"path": "a.mp4", "start": 1, "end": 2}),
    video(CAPTION, video={"frames": ["a.png", "a.png"], "fps": 1}),
    {**ROW, "image": "a.png"}, {**ROW, "video": [["a.png"]], "fps": 2}]


@pytest.mark.parametrize(("media", "flags", "out", "expected"), [
    ("in", (), "in/out.jsonl", "{}"),                     # next to both files
    ("in/media", (), "in/out.jsonl", "{}"),               # in media/ next to both
    ("in", (), "out.jsonl", "in/{}"),                     # below the folder of OUT
    ("in/media", (), "out.jsonl", "in/media/{}"),
    ("photos/deep", ("--media", "photos/deep"), "out.jsonl", "photos/deep/{}"),
    ("media/deep", ("--media", "media/deep"), "out.jsonl", "deep/{}"),   # below media/ of OUT
    ("in", (), "runs/out.jsonl", "{folder}/in/{}"),       # elsewhere: an absolute path
    ("photos", ("--media", "in/../photos"), "runs/out.jsonl", "{folder}/photos/{}"),
])
def test_training_finds_the_media_without_a_flag(tmp_path, monkeypatch, media, flags, out,
                                                 expected):
    monkeypatch.chdir(tmp_path)
    for folder in ("in", media):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(TESTS / "media/coins.png", tmp_path / media / "a.png")
    shutil.copy(TESTS / "media/bigbuckbunny.mp4", tmp_path / media / "a.mp4")
    rows = write(tmp_path / "in/rows.jsonl", *ENTRIES)
    status, counts, err = run("in/rows.jsonl", out, *flags)
    assert (status, counts["records"], err) == (0, len(ENTRIES), "")
    for record in read(tmp_path / out):
        for name in names_of(parse(record)):
            assert name == expected.format(os.path.basename(name), folder=tmp_path)
    monkeypatch.chdir(TESTS)                              # from any working directory
    assert check.main([str(tmp_path / out)]) == 0
    assert rows.read_text() == "".join(json.dumps(entry) + "\n" for entry in ENTRIES)


@pytest.mark.parametrize(("name", "expected"), [
    ("/data/a.png", "/data/a.png"), ("frame:1.png", "{}/in/frame:1.png"),
    ("../a.png", "{}/a.png"), ("link/../a.png", "{}/a.png"), ("../runs/b/a.png", "b/a.png"),
])
def test_an_absolute_path_stays_and_others_lead_to_the_same_file(tmp_path, name, expected):
    (tmp_path / "in").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "far")   # the parent of this folder is not in/
    path = write(tmp_path / "in/r.jsonl", image(CAPTION, image=name))
    run(path, tmp_path / "runs/out.jsonl")
    (record,) = read(tmp_path / "runs/out.jsonl")
    assert record["image"] == (expected or name).format(tmp_path)


# --------------------------------------------------------------------------------------------------
# output and exit status


def test_a_row_that_is_no_record_is_named_and_skipped(tmp_path):
    rows = [ROW, {"id": 17, "messages": []}, image(CAPTION, id="\ud800"), 3, {"text": "\0"}, ROW]
    broken = ("{", '{"annotations": %s' % ("[" * 100_000), '{"messages": [], "messages": []}')
    lines = write(tmp_path / "r.jsonl", *rows, *broken)
    status, counts, err = run(lines, tmp_path / "out.jsonl")
    assert (status, counts) == (0, {
        "rows": 9, "records": 2, "skipped": {"not JSON": 3, "wrong record": 4}})
    places = [sentence.split(": ")[1:3] for sentence in err.splitlines()]
    names = {2: " id 17", 3: r" id '\ud800'"}
    assert places == [[f"{lines}:{n}{names.get(n, '')}", "not JSON" if n > 6 else "wrong record"]
                      for n in (2, 3, 4, 5, 7, 8, 9)]
    assert read(tmp_path / "out.jsonl") == [MADE, MADE]
    array = tmp_path / "r.json"
    array.write_text(json.dumps(rows))
    status, counts, err = run(array, tmp_path / "array.jsonl")
    assert counts == {"rows": 6, "records": 2, "skipped": {"wrong record": 4}}
    places = [sentence.split(": ")[1] for sentence in err.splitlines()]
    assert places == [f"{array}[1] id 17", rf"{array}[2] id '\ud800'", f"{array}[3]", f"{array}[4]"]


def test_twenty_reasons_are_printed_or_all_skipped_rows(tmp_path):
    rows = [{f"{k}": 1} for k in range(24)]
    path = write(tmp_path / "r.jsonl", rows[0], *rows, GOOD)
    _, counts, err = run(path, tmp_path / "out.jsonl")
    sentences = err.splitlines()
    assert len(sentences) == 21
    assert sentences[0].startswith(f"tools.convert: {path}:1: unknown format: ")
    assert sentences[0].endswith("; skipped, and 1 more for this reason")
    assert sentences[19].startswith(f"tools.convert: {path}:21: ")
    assert sentences[20] == "tools.convert: 4 more reasons; --all prints them"
    assert counts["skipped"] == {"unknown format": 25}
    assert len(run(path, tmp_path / "out.jsonl", "--overwrite", "--all")[2].splitlines()) == 25


@pytest.mark.parametrize(("name", "content"), [("r.jsonl", ""), ("r.json", "[3]")])
def test_without_a_record_the_status_is_1_and_nothing_is_written(tmp_path, name, content):
    """The file of an earlier command is kept."""
    (tmp_path / name).write_text(content)
    status, counts, err = run(tmp_path / name, tmp_path / "out.jsonl")
    assert (status, counts["records"]) == (1, 0)
    assert f"{tmp_path / 'out.jsonl'} is not written" in err
    assert files_of(tmp_path) == [name]
    (tmp_path / "out.jsonl").write_text("old")
    assert run(tmp_path / name, tmp_path / "out.jsonl", "--overwrite")[0] == 1
    assert (tmp_path / "out.jsonl").read_text() == "old"


def test_overwrite_replaces_a_file_and_not_what_it_links_to(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROW)
    (tmp_path / "old.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("old.jsonl")
    assert run(path, tmp_path / "link.jsonl", "--overwrite")[0] == 0
    assert (tmp_path / "old.jsonl").read_text() == "old"
    assert run(path, tmp_path / "old.jsonl", "--overwrite")[0] == 0
    assert read(tmp_path / "old.jsonl") == read(tmp_path / "link.jsonl") == [MADE]
    assert not (tmp_path / "link.jsonl").is_symlink()


@pytest.mark.parametrize(("error", "status"), [
    (KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 1)])
def test_a_command_that_ends_early_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch,
                                                                       error, status):
    path = write(tmp_path / "rows.jsonl", ROW, ROW)
    (tmp_path / "out.jsonl").write_text("old")
    add = write_files.Output.add
    calls = []

    def fail_at_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return add(*arguments)

    monkeypatch.setattr(write_files.Output, "add", fail_at_second)
    assert run(path, tmp_path / "out.jsonl", "--overwrite")[0] == status
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert files_of(tmp_path) == ["out.jsonl", "rows.jsonl"]


def test_under_a_locale_without_letters_the_file_is_utf_8(tmp_path):
    (tmp_path / "ü").mkdir()
    (tmp_path / "ü/a.png").touch()
    row = {"id": "日本", "image": "a.png", "messages": [{"role": "user", "content": "ü?"},
                                    {"role": "assistant", "content": "é"}]}
    path = tmp_path / "ü/r.json"
    path.write_text(json.dumps([row, {"messages": "ü"}], ensure_ascii=False), encoding="utf-8")
    words = [sys.executable, "-m", "tools.convert", path, tmp_path / "runs/out.jsonl"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | ASCII)
    assert done.returncode == 0, done.stderr
    assert "r.json: read as chats (2)" in done.stderr
    assert json.loads(done.stdout) == {"rows": 2, "records": 1, "skipped": {"wrong record": 1}}
    assert read(tmp_path / "runs/out.jsonl") == [{
        "id": "日本", "image": f"{tmp_path}/ü/a.png",
        "annotations": [{"type": "qa", "turns": [{"question": "ü?", "answer": "é"}]}]}]


def test_the_command_that_a_refusal_names_makes_a_file_that_is_taken(tmp_path, capsys):
    shutil.copy(TESTS / "media/coins.png", tmp_path / "a.png")
    (tmp_path / "my rows.json").write_text(json.dumps([{**ROW, "image": "a.png"}]))
    chats = write(tmp_path / "chats.jsonl", {**ROW, "image": "a.png"})
    for path in (tmp_path / "my rows.json", chats):
        with pytest.raises(DataError) as error:
            Records(path)
        assert check.main([str(path)]) == 2
        assert capsys.readouterr().err == f"tools.convert: {error.value}\n"
        words = shlex.split(str(error.value).split("convert it with: ")[1])
        assert words[:3] == ["python", "-m", "tools.convert"]
        assert run(*words[3:])[0] == 0
        assert check.main([words[4], "--decode"]) == 0
