"""Runs on the command line are killed, or stopped by SIGTERM, and then resumed."""

import itertools
import os
import random
import signal
import time

import pytest

from tests.training.processes import (
    n_lines,
    pids_of_ranks,
    runs_until,
    start,
    stderr_of,
    wait_for,
)
from tests.training.runs import SMALL, assert_same_run, back_to, logged
from training import checkpoint

STEPS = 60


@pytest.fixture(scope="module")
def long(tmp_path_factory, records):
    """-> a longer uninterrupted run on the command line."""
    out = tmp_path_factory.mktemp("runs") / "long"
    flags = [*SMALL, *records, f"--steps={STEPS}", "--save-every=4"]
    stderr_of(start(out, *flags))
    assert sorted(logged(out)) == [*range(1, STEPS + 1)]
    return out


def kill_at_random(process, out, rng, in_a_save):
    """Kills a run after 6 to 11 more steps; with in_a_save, while it then writes a checkpoint."""
    wanted = n_lines(out) + rng.randint(6, 11)
    if runs_until(process, lambda: n_lines(out) >= wanted):
        if in_a_save:
            runs_until(process, lambda: list(out.glob("*.part")))
        time.sleep(rng.random() * (0.05 if in_a_save else 0.3))
    process.kill()


@pytest.mark.slow
def test_resume_is_bitwise(records, long, tmp_path):
    """A run with 0, 1 and 2 workers in turn is killed at random moments, also during a save, and
    resumed. Finally it is resumed from the second newest checkpoint, on two ranks and on one."""
    rng = random.Random(7)
    out = tmp_path / "killed"
    flags = [*SMALL, *records, f"--steps={STEPS}", "--save-every=4", "--keep=3"]
    n_killed = 0
    n_in_a_save = 0
    resumed_from = []
    for turn in itertools.count():
        resume = ["--resume"] if turn else []
        process = start(out, *flags, f"--workers={turn % 3}", *resume)
        if turn < 6:
            kill_at_random(process, out, rng, in_a_save=turn % 2 == 1)
        _, text = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL), text
        assert "Traceback" not in text
        n_killed += process.returncode != 0
        n_in_a_save += bool(list(out.glob("*.part")))
        resumed_from.append(checkpoint.list_steps(out)[:1])
        if process.returncode == 0:
            break
    assert n_killed >= 5
    assert n_in_a_save >= 1
    assert len(set(map(tuple, resumed_from))) >= 4, resumed_from
    assert_same_run(out, long)
    newest, second = checkpoint.list_steps(out)[:2]
    assert newest == STEPS
    for ranks in (2, 0):
        again = back_to(out, tmp_path / str(ranks), second)
        stderr_of(start(again, *flags, "--resume", ranks=ranks))
        ours = logged(again)
        theirs = logged(long)
        assert sorted(ours) == sorted(theirs)
        assert ours[second] == theirs[second]
        for step in range(second + 1, STEPS + 1):
            assert ours[step]["ids"] == theirs[step]["ids"]
            loss = theirs[step]["loss"]
            assert ours[step]["loss"] == (pytest.approx(loss, rel=1e-6) if ranks else loss)


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["the process", "all processes", "torchrun", "one rank"])
def test_sigterm_saves_and_ends_and_the_resumed_run_is_the_whole_one(records, long, tmp_path,
                                                                     receiver):
    """Slurm and spot machines send this signal, also to decoding workers. All runs are resumed on
    one process."""
    alone = receiver in ("the process", "all processes")
    out = tmp_path / "out"
    flags = [*SMALL, *records, f"--steps={STEPS}", "--save-every=0"]
    process = start(out, *flags, "--workers=1", ranks=0 if alone else 2,
                              start_new_session=True)
    wait_for(process, lambda: n_lines(out) >= 5)
    if receiver == "all processes":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        one = pids_of_ranks(process)[1] if receiver == "one rank" else process.pid
        os.kill(one, signal.SIGTERM)
    text = stderr_of(process, 143 if alone else 1)  # torchrun has its own status
    assert receiver != "one rank" or "exitcode  : 143" in text, text
    (step,) = checkpoint.list_steps(out)
    (sentence,) = [line for line in text.splitlines() if "train.py: SIGTERM" in line]
    assert f"SIGTERM: ended after step {step}" in sentence
    assert sorted(logged(out)) == [*range(1, step + 1)]
    assert step < STEPS
    assert not list(out.glob("*.part"))
    stderr_of(start(out, *flags, "--resume"))
    if alone:
        assert_same_run(out, long)
    for n, line in logged(long).items():
        assert logged(out)[n]["ids"] == line["ids"]
        assert logged(out)[n]["loss"] == pytest.approx(line["loss"], rel=1e-6), n
