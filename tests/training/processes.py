"""Runs train.py in separate processes, for tests that kill them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(out, *flags, ranks=0, program="train.py", cwd=ROOT, env=None, **options):
    """Starts a program of this repository or of a test, with torchrun if ranks > 0. Without `out`
    it has no flag --out."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [sys.executable, *(launcher if ranks else []), str(ROOT / program), *flags]
    if out is not None:
        words.append(f"--out={out}")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=env, **options)


def outputs_of(process, status=0):
    """Waits for the end of a process, asserts its exit status -> its stdout and stderr."""
    stdout, stderr = process.communicate(timeout=300)
    expected = {status}
    if status and "torch.distributed.run" in process.args:
        expected.add(-signal.SIGABRT)  # now and then, torchrun aborts at the end of Python
    assert process.returncode in expected, stderr
    return stdout, stderr


def stderr_of(process, status=0):
    return outputs_of(process, status)[1]


def runs_until(process, happened):
    """Waits until happened() or the end of the process -> is the process still running?"""
    end = time.monotonic() + 120
    while process.poll() is None and not happened():
        time.sleep(0.002)
        assert time.monotonic() < end
    return process.poll() is None


def wait_for(process, happened):
    if not runs_until(process, happened):
        pytest.fail(process.communicate()[1])


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def n_lines(out):
    path = out / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def workers_of(pid):
    """The processes of the data loaders of a run: forks of one of its children, the server."""
    return [worker for child in children_of(pid) for worker in children_of(child)]


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE, text=True)
    return [int(child) for child in found.stdout.split()]


def pids_of_ranks(launcher):
    """-> {rank: process id} of the processes that torchrun started."""
    pids = {}
    for pid in children_of(launcher.pid):
        for variable in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            if variable.startswith("RANK="):
                pids[int(variable[5:])] = pid
    return pids


def is_running(pid):
    """False for a zombie, too: a process that has ended, whose parent has not read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids, within_s=30):
    """Waits for processes -> have all ended? They close their pipes slightly before they end."""
    end = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(is_running, pids))
