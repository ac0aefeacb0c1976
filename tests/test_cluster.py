"""stages/cluster.sh and slurm.sh, with a torchrun, srun and scontrol that note what they are told."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$NOTES"
"""


@pytest.fixture
def place(tmp_path):
    """A copy of the scripts, and fakes before all else on the PATH."""
    (tmp_path / "stages").mkdir()
    for name in ("cluster.sh", "slurm.sh"):
        shutil.copy(ROOT / "stages" / name, tmp_path / "stages" / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def fake(place, name, body):
    path = place / "bin" / name
    path.write_text(NOTE + body)
    path.chmod(0o755)


def run(place, script, *flags, wait=True, **env):
    env = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "NOTES": str(place / "notes"), "GPUS": "2", **env}
    (place / "notes").touch()
    child = subprocess.Popen(["bash", str(place / "stages" / script), *flags], cwd=place, env=env, stderr=subprocess.PIPE, text=True)
    if not wait:
        return child
    said = child.communicate(timeout=60)[1]
    return child.returncode, (place / "notes").read_text().splitlines(), said


def test_one_node_goes_on_or_starts_from_weights_and_is_started_again_by_torchrun(place):
    fake(place, "torchrun", "exit 1")
    status, told, _ = run(place, "cluster.sh", "--stage", "3", "--out", "out", "--cp", "2", INIT="runs/two")
    common = "torchrun --standalone --max-restarts 3 --nproc-per-node 2 train.py --stage 3 --out out --cp 2 --resume"
    assert status == 1 and told == [f"{common} --else-init runs/two"]
    (place / "notes").unlink()
    assert run(place, "cluster.sh", "--stage", "3", "--out=a b", RESTARTS="0")[:2] == (
        1, ["torchrun --standalone --max-restarts 0 --nproc-per-node 2 train.py --stage 3 --out=a b --resume"])


def test_nodes_meet_at_the_head(place):
    fake(place, "torchrun", "exit 0")
    status, told, _ = run(place, "cluster.sh", "--out", "out", NODES="4", HEAD="one:29400", RUN="r")
    assert status == 0 and told == ["torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint one:29400 --rdzv-id r --max-restarts 3 "
                                    "--nproc-per-node 2 train.py --out out --resume"]


@pytest.mark.parametrize(("flags", "env", "words"), [
    (["--stage", "2"], {}, "--out DIR is needed"), (["--out", "o"], {"GPUS": "0"}, "no GPU found"),
    (["--out", "o"], {"NODES": "2"}, "HEAD=host:port"),
])
def test_what_is_missing_is_told_before_anything_starts(place, flags, env, words):
    fake(place, "torchrun", "exit 0")
    status, told, said = run(place, "cluster.sh", *flags, **env)
    assert status == 2 and told == [] and words in said and len(said.strip().splitlines()) == 1


def test_sigterm_reaches_torchrun(place):
    fake(place, "torchrun", "trap 'touch saved; exit 1' TERM; touch started; while :; do sleep 0.1; done")
    child = run(place, "cluster.sh", "--out", "out", wait=False)
    while not (place / "started").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    assert (place / "saved").exists()


SLURM = {"SLURM_JOB_NODELIST": "[one-two]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "40007"}


def test_slurm_puts_a_run_that_it_told_to_end_back_into_the_queue(place):
    fake(place, "scontrol", "printf 'one\\n'")
    fake(place, "srun", "trap 'sleep 0.5; touch saved; exit 1' TERM; touch started; while :; do sleep 0.1; done")
    child = run(place, "slurm.sh", "--out", "out", wait=False, **SLURM, SLURM_SUBMIT_DIR=str(place))
    while not (place / "started").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    assert child.returncode == 1 and (place / "saved").exists()
    assert (place / "notes").read_text().splitlines()[-1] == "scontrol requeue 40007"


def test_slurm_starts_the_script_on_every_node(place):
    fake(place, "scontrol", "printf 'one\\ntwo\\n'")
    fake(place, "srun", 'echo "$NODES $HEAD $RUN $GPUS" >> "$NOTES"')
    status, told, said = run(place, "slurm.sh", "--stage", "3", "--out", "out", **SLURM, SLURM_SUBMIT_DIR=str(place))
    assert status == 0, said
    assert told == ["scontrol show hostnames [one-two]", "srun --kill-on-bad-exit=1 bash stages/cluster.sh --stage 3 --out out",
                    "2 one:20007 40007.0 2"]
