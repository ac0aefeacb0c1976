"""Two runs do not write into one directory, and a run that was killed does not keep others out."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import SMALL, run, sentence
from training import lock
from training.config import UserError
from training.lock import RunLock

HOLD = """
import sys
from training.lock import RunLock
lock = RunLock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that holds the lock of tmp_path / "out"."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], text=True,
                             cwd=Path(__file__).parents[2], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    assert child.stdout.readline() == "locked\n"
    yield child
    child.kill()
    child.communicate()


def test_another_process_is_kept_out_until_the_first_ends(tmp_path, other_process, capsys):
    """... by a name that leads there too, after the directory was renamed, and by train.py before
    it changes anything. A kill releases the lock."""
    out = tmp_path / "out"
    refusal = rf"another run is writing there \(process {other_process.pid} on "
    with pytest.raises(UserError, match=refusal):
        RunLock(out)
    out.mkdir()
    (out / "log.jsonl").write_text("{}\n")
    assert run(out, *SMALL, "--resume") == 2
    sentence(capsys, str(out), "another run is writing there")
    assert [path.name for path in out.iterdir()] == ["log.jsonl"]
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(UserError, match=refusal):
        RunLock(tmp_path / "link")
    out.rename(tmp_path / "out.old-1")
    with pytest.raises(UserError, match=refusal):
        RunLock(out)
    with RunLock(tmp_path / "out.old-1"), RunLock(tmp_path / "other"):
        pass
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    with RunLock(out):
        pass


def test_a_lock_leaves_nothing_behind(tmp_path):
    out = tmp_path / "runs" / "stage1" / "out"
    with RunLock(out):
        assert [path.name for path in out.parent.iterdir()] == [".out.lock"]
        with pytest.raises(UserError):
            RunLock(out)
    assert not list(tmp_path.iterdir())
    with RunLock(out):
        out.mkdir()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_lock_file_that_was_just_removed_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """Between opening the file and locking it, its holder may end, and a third run may begin."""
    out = tmp_path / "out"
    first = RunLock(out)
    real_flock = lock.fcntl.flock
    third = []

    def late(handle, how):
        if not third:
            first.release()
            third.append(None)                   # the lock of the third needs no such delay
            third[0] = RunLock(out)
        real_flock(handle, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with pytest.raises(UserError, match="another run"):
        RunLock(out)
    third[0].release()
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_made_beside_it_the_directory_itself_is_locked(tmp_path):
    out = tmp_path / "out"
    (tmp_path / ".out.lock").mkdir()             # stands for a folder that cannot be written
    with pytest.raises(UserError, match="Is a directory"):
        RunLock(out)
    out.mkdir()
    with RunLock(out), pytest.raises(UserError, match="another run is writing there"):
        RunLock(out)
    with RunLock(out):
        pass
    assert not list(out.iterdir())


def test_the_ranks_of_a_run_share_its_lock(tmp_path, monkeypatch):
    with RunLock(tmp_path / "out"):
        monkeypatch.setenv("RANK", "1")
        with RunLock(tmp_path / "out"):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError):
            RunLock(tmp_path / "out")


def unsupported(handle, how):
    raise OSError(38, "Function not implemented")


def test_a_system_without_locks_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with RunLock(tmp_path / "out"), RunLock(tmp_path / "out"):
        assert capsys.readouterr().err.count("is not locked (Function not implemented)") == 2
    monkeypatch.setattr(lock, "fcntl", None)     # Windows
    with RunLock(tmp_path / "out"):
        assert "is not locked (this system has no fcntl)" in capsys.readouterr().err


def test_processes_that_a_run_starts_do_not_keep_its_lock(tmp_path):
    with RunLock(tmp_path / "out"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                                 close_fds=False)
    with RunLock(tmp_path / "out"):
        pass
    child.communicate(b"\n")
    assert os.listdir(tmp_path) == []
