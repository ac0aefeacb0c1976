"""The command: kills, resumption, mistakes, links in the media folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.prepare.cases import messages, xy
from tests.tools.prepare.command import prepare, published
from tests.tools.prepare.image_cases import POINTS
from tools.prepare import __main__ as command
from tools.prepare import store
from tools.prepare.media import files_below
from tools.prepare.sets import SETS

ROOT = Path(__file__).parents[3]

# ------------------------------------------------------------------------------------------------
# kills


def two_files(folder):
    """pixmo-points in two files of two row groups; every image has rows in both."""
    rows = []
    for i in range(40):
        rows.append({"image_url": f"https://example.org/{i % 7}", "points": xy((i, i)),
                     "count": 1 if i % 5 else 2, "label": f"l{i}",
                     "collection_method": "counting"})
    return [published(folder / f"train-{k}", POINTS, rows[k::2], row_group_size=11)
            for k in range(2)]


def files_of(out):
    return {path.relative_to(out).as_posix(): path.read_bytes()
            for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stop", [0, 1, 7, 11, 12, 19, 20, 33, 39, "write"])
def test_a_run_that_is_broken_off_anywhere_ends_as_if_it_had_not_been(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BATCH", 4)
    source = two_files(tmp_path)
    prepare("pixmo-points", source, tmp_path / "whole")
    converted = []
    convert = store.convert

    def convert_until_stop(row, *rest):
        if len(converted) == stop:
            raise MemoryError
        converted.append(row)
        return convert(row, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(store, "convert", convert_until_stop)
        if stop == "write":
            broken.setattr(store, "split_by_points", None)
        with pytest.raises((MemoryError, TypeError)):
            prepare("pixmo-points", source, tmp_path / "broken")
    converted.clear()
    monkeypatch.setattr(store, "convert", lambda row, *rest: (converted.append(row),
                                                              convert(row, *rest))[1])
    prepare("pixmo-points", source, tmp_path / "broken")
    assert files_of(tmp_path / "broken") == files_of(tmp_path / "whole")
    if stop == "write":              # what was done was not done again
        assert not converted
    elif stop >= 12:
        assert len(converted) < 40 - stop + 4


def test_a_killed_process_leaves_nothing_that_stops_the_next_one(tmp_path):
    source = tmp_path / "big.jsonl"
    with open(source, "w") as lines:
        for i in range(6_000):
            row = {"image_url": f"https://example.org/{i * 7919 % 3001}", "question": f"q{i}?",
                   "answer": "a" * (i % 50)}
            lines.write(json.dumps(row) + "\n")
    killed = tmp_path / "killed"
    arguments = [sys.executable, "-m", "tools.prepare", "pixmo-ask-model-anything", str(source),
                 str(killed)]
    quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(arguments, **quiet)
    try:
        log = killed / "prepare.sqlite-wal"
        while child.poll() is None and not (log.exists() and log.stat().st_size > 1 << 18):
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.wait()
    assert child.returncode == -signal.SIGKILL
    assert not (killed / "records.jsonl").exists()
    assert subprocess.run(arguments, **quiet).returncode == 0
    _, counts = prepare("pixmo-ask-model-anything", source, tmp_path / "whole")
    assert counts["skipped"] == {"empty answer": 120}
    assert counts["records"] > 2500
    assert files_of(killed) == files_of(tmp_path / "whole")


def test_another_command_does_not_go_on_from_what_one_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "BATCH", 4)
    source = two_files(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(store, "split_by_points", None)
        with pytest.raises(TypeError):
            prepare("pixmo-points", source, tmp_path / "out")
    records, counts = prepare("pixmo-points-high-frequency", source[:1], tmp_path / "out")
    assert counts["annotations"] == 16
    assert all(record["id"].startswith("pixmo-points-high-frequency-") for record in records)
    assert "begun anew" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# links


def test_links_in_a_circle_do_not_hang_the_search_for_media(tmp_path):
    media = tmp_path / "media"
    (media / "a").mkdir(parents=True)
    (media / "a/x.mp4").touch()
    for name in ("here", "here too"):
        (media / name).symlink_to(".")
    (media / "a/above").symlink_to("..")
    (media / "b").mkdir()
    (media / "b/to a").symlink_to("../a")
    (media / "a/to b").symlink_to("../b")
    assert list(files_below(media)) == ["a/x.mp4", "b/to a/x.mp4"]


def test_a_linked_folder_is_searched_under_its_name(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/x.mp4").touch()
    (tmp_path / "media").mkdir()
    for name in ("first", "second"):
        (tmp_path / "media" / name).symlink_to("../disk")
    assert list(files_below(tmp_path / "media")) == ["first/x.mp4", "second/x.mp4"]


# ------------------------------------------------------------------------------------------------
# mistakes

MISTAKES = [
    (["pixmo-point", "rows.jsonl"], "did you mean 'pixmo-points'"),
    (["zzz", "rows.jsonl"], "no set is called 'zzz'"),
    (["tulu", "nowhere"], "nowhere: no such file"),
    (["tulu", "empty"], "no .parquet, .json or .jsonl file"),
    (["pixmo-cap", "rows.jsonl"],
     "has no column image_url, caption: expected image_url, caption; found instruction, output"),
    (["pixmo-cap", "torn.parquet"], "not a parquet file"),
    (["pixmo-cap", "torn.json"], "not JSON"),
    (["tulu", "object.json"], "not an array"),
    (["tulu", "split"], "holds the splits train, validation"),
    (["tulu", "split", "--split", "dev"], "of the split 'dev'"),
    (["cosyn-400k", "rows.jsonl"], "say --type"),
    (["tulu", "rows.jsonl", "--media", "nowhere"], "nowhere: no such"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_costs_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    if "torn.parquet" in arguments:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"instruction": "hi", "output": "yo"}\n')
    Path("torn.parquet").write_bytes(b"PAR1 and no more")
    Path("torn.json").write_text('[{"a": 1}')
    Path("object.json").write_text('{"a": 1}')
    for folder in ("empty", "split"):
        Path(folder).mkdir()
    for split in ("train", "validation"):
        Path(f"split/{split}-00000-of-00001.jsonl").write_text("{}")
    with pytest.raises(SystemExit) as end:
        command.main([*arguments[:2], "out", *arguments[2:]])
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_without_pyarrow_json_is_read_and_parquet_says_what_to_install(tmp_path, monkeypatch,
                                                                       capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = tmp_path / "t.jsonl"
    source.write_text(json.dumps({"messages": messages("a", "b")}))
    [record], _ = prepare("tulu", source, tmp_path / "out")
    assert record["annotations"][0]["turns"] == [{"question": "a", "answer": "b"}]
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(SystemExit) as end:
        command.main(["tulu", str(tmp_path / "t.parquet"), str(tmp_path / "out")])
    assert end.value.code == 2
    assert "pip install pyarrow" in capsys.readouterr().err


def test_every_set_that_is_read_has_a_row_in_the_documentation():
    table = (ROOT / "docs" / "datasets.md").read_text()
    assert not [name for name in SETS if f"`{name}`" not in table]
