"""A run writes to a directory of its own, and leaves the files of others alone."""

from pathlib import Path

import pytest

import train
from tests.training.processes import n_lines, start, wait_for
from tests.training.runs import RECIPE, SMALL, run, sentence
from training.config import UserError, parse
from training.resume import Checkpoint, find_checkpoint, make_run_directory

TINY = ["--stage", "1", "--tiny"]


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


def test_a_run_without_a_name_renames_the_one_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args, config = parse(TINY)
    for n in range(3):
        out = make_run_directory(args, config, Checkpoint())
        assert (out / "model").is_dir()
        (out / "log.jsonl").write_text(str(n))
    names = ("stage1-tiny", "stage1-tiny.old-1", "stage1-tiny.old-2")
    assert [Path("runs", name, "log.jsonl").read_text() for name in names] == ["2", "0", "1"]
    assert "is now in runs/stage1-tiny.old-2" in capsys.readouterr().err


def test_a_run_that_continues_stays_where_it_is(whole, tmp_path):
    args, config = parse([*RECIPE, "--resume", "--out", str(whole)])
    before = contents(whole)
    found, config = find_checkpoint(args, config)
    assert (found.folder, found.step) == (whole / "step-6", 6)
    assert make_run_directory(args, config, found) == whole
    assert contents(whole) == before


def test_without_a_checkpoint_else_init_is_where_a_run_starts(whole, tmp_path, capsys):
    flags = [*RECIPE, "--resume", "--else-init", "weights", "--out"]
    args, config = parse([*flags, str(tmp_path / "out")])
    assert find_checkpoint(args, config)[0] == Checkpoint()
    assert args.init == "weights"
    assert "no checkpoint" in capsys.readouterr().err
    args, config = parse([*flags, str(whole)])
    assert find_checkpoint(args, config)[0].step == 6
    assert args.init is None


def test_a_named_directory_is_new_or_empty(tmp_path):
    args, config = parse([*TINY, "--out", str(tmp_path)])
    assert find_checkpoint(args, config) == (Checkpoint(), config)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not empty; name another directory, or .* --resume"):
        find_checkpoint(args, config)


@pytest.mark.parametrize("named", [True, False])
def test_resume_does_not_rename_a_folder_that_is_no_run_directory(tmp_path, monkeypatch, capsys,
                                                                  named):
    monkeypatch.chdir(tmp_path)
    out = Path("photos" if named else "runs/stage1-tiny")
    out.mkdir(parents=True)
    (out / "cat.txt").write_text("not ours")
    before = contents(tmp_path)
    if named:
        assert run(out, *SMALL, "--resume") == 2
    else:
        monkeypatch.setattr("sys.argv", ["train.py", *SMALL, "--resume"])
        assert run_without_name() == 2
    text = capsys.readouterr().err
    assert f"train.py: --out {out}: not a run directory (no log.jsonl, no model)" in text
    assert "Traceback" not in text
    assert contents(tmp_path) == before


def run_without_name():
    """Calls train.main with the words of sys.argv -> its exit status."""
    with pytest.raises(SystemExit) as end:
        train.main()
    return end.value.code


@pytest.mark.slow
def test_a_second_run_with_the_default_directory_is_refused_and_the_first_continues(
        tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "stage1-tiny"
    flags = [*SMALL, "--steps", "100000", "--save-every", "0"]
    first = start(None, *flags, cwd=tmp_path)
    try:
        wait_for(first, lambda: n_lines(out) >= 3)
        names = sorted(path.name for path in out.iterdir())
        monkeypatch.setattr("sys.argv", ["train.py", *SMALL])
        assert run_without_name() == 2
        sentence(capsys, "--out", "another run is writing there", f"process {first.pid}")
        assert sorted(path.name for path in out.iterdir()) == names
        assert sorted(path.name for path in out.parent.iterdir()) == [".stage1-tiny.lock",
                                                                      "stage1-tiny"]
        n = n_lines(out)
        wait_for(first, lambda: n_lines(out) > n)
    finally:
        first.kill()
        first.communicate()


def test_a_run_that_was_stopped_before_its_first_step_is_a_run_directory(tmp_path):
    """Its folder has model/ before it has a log."""
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    args, config = parse([*RECIPE, "--out", str(out), "--resume"])
    assert make_run_directory(args, config, Checkpoint()) == out
    assert (tmp_path / "out.old-1").is_dir()
