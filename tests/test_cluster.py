"""Runs stages/cluster.sh and stages/slurm.sh with fake torchrun, srun and scontrol commands."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTE_CALL = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$NOTES"
"""
SLURM = {
    "SLURM_JOB_NODELIST": "[one-two]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "40007",
}


@pytest.fixture
def folder(tmp_path):
    """A copy of the scripts, and a folder of the fake commands, which is first on the PATH."""
    (tmp_path / "stages").mkdir()
    for name in ("cluster.sh", "slurm.sh"):
        shutil.copy(ROOT / "stages" / name, tmp_path / "stages" / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "notes").touch()
    return tmp_path


def fake(folder, name, body):
    path = folder / "bin" / name
    path.write_text(NOTE_CALL + body)
    path.chmod(0o755)


def start(folder, script, *flags, **env):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "NOTES": str(folder / "notes"), "GPUS": "2", **env}
    command = ["bash", str(folder / "stages" / script), *flags]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def run(folder, script, *flags, **env):
    """-> (exit status, calls of the fake commands, stderr)"""
    child = start(folder, script, *flags, **env)
    _, stderr = child.communicate(timeout=60)
    return child.returncode, (folder / "notes").read_text().splitlines(), stderr


def test_one_node_resumes_or_starts_from_weights_and_torchrun_restarts_it(folder):
    """Each attempt has its own store, gloo connects lazily, and the limit of open files is raised.
    A variable that the user has exported is kept."""
    fake(folder, "torchrun", 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $TORCH_GLOO_LAZY_INIT '
                             '$(ulimit -n) $(ulimit -Hn)" >> "$NOTES"; exit 1')
    flags = ("--stage", "3", "--out", "out", "--cp", "2")
    status, (call, seen), _ = run(folder, "cluster.sh", *flags, INIT="runs/two")
    assert status == 1
    assert call == ("torchrun --standalone --max-restarts 3 --nproc-per-node 2 train.py --stage 3 "
                    "--out out --cp 2 --resume --else-init runs/two")
    own_store, lazy, soft, hard = seen.split()
    assert (own_store, lazy) == ("1", "1")
    assert soft == hard
    (folder / "notes").unlink()
    env = {"RESTARTS": "0", "TORCH_GLOO_LAZY_INIT": "0"}
    _, (call, seen), _ = run(folder, "cluster.sh", "--stage", "3", "--out=a b", **env)
    assert call == ("torchrun --standalone --max-restarts 0 --nproc-per-node 2 train.py --stage 3 "
                    "--out=a b --resume")
    assert seen.split()[1] == "0"


@pytest.mark.parametrize(("flags", "env", "message"), [
    (["--stage", "2"], {}, "--out DIR is needed"),
    (["--out", "o"], {"GPUS": "0"}, "no GPU found"),
    (["--out", "o"], {"NODES": "2"}, "HEAD=host:port"),
])
def test_a_missing_setting_is_reported_before_anything_starts(folder, flags, env, message):
    fake(folder, "torchrun", "exit 0")
    status, calls, stderr = run(folder, "cluster.sh", *flags, **env)
    assert status == 2
    assert calls == []
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("script", ["cluster.sh", "slurm.sh"])
def test_sigterm_reaches_torchrun_and_slurm_requeues_the_run(folder, script):
    for name in ("torchrun", "srun"):
        fake(folder, name, "trap 'sleep 0.2; touch saved; exit 1' TERM\n"
                           "echo started >&2; while :; do sleep 0.1; done")
    fake(folder, "scontrol", "printf 'one\\n'")
    with start(folder, script, "--out", "out", **SLURM, SLURM_SUBMIT_DIR=str(folder)) as child:
        assert "started\n" in child.stderr  # blocks until this line, or the end of the process
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=30)
        assert (folder / "saved").exists()
    requeued = "scontrol requeue 40007" in (folder / "notes").read_text()
    assert requeued == (script == "slurm.sh")


def test_slurm_starts_the_script_on_every_node(folder):
    fake(folder, "scontrol", "printf 'one\\ntwo\\n'")
    fake(folder, "srun", 'echo "$NODES $HEAD $RUN $GPUS" >> "$NOTES"')
    flags = ("--stage", "3", "--out", "out")
    status, calls, stderr = run(folder, "slurm.sh", *flags, **SLURM, SLURM_SUBMIT_DIR=str(folder))
    assert status == 0, stderr
    assert calls == [
        "scontrol show hostnames [one-two]",
        "srun --kill-on-bad-exit=1 --cpu-bind=none bash stages/cluster.sh --stage 3 --out out",
        "2 one:20007 40007.0 2",
    ]
