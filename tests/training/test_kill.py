"""Runs on the command line that are killed, asked to end, or out of disk on one of their ranks."""

import itertools
import json
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
from tests.training.runs import SMALL, assert_same_run, back_to, logged, skipped
from training import checkpoint

STEPS = 60


@pytest.fixture(scope="module")
def long(tmp_path_factory, records):
    """A longer run that nothing interrupted, by the command line."""
    out = tmp_path_factory.mktemp("runs") / "long"
    stderr_of(start(out, *SMALL, *records, "--steps", str(STEPS), "--save-every", "4"))
    assert sorted(logged(out)) == [*range(1, STEPS + 1)]
    return out


def kill_at_random(process, out, rng, in_a_save):
    """Kills a run after 6 to 11 more steps, in_a_save: as soon as a checkpoint is begun then."""
    wanted = n_lines(out) + rng.randint(6, 11)
    if runs_until(process, lambda: n_lines(out) >= wanted):
        if in_a_save:
            runs_until(process, lambda: list(out.glob("*.part")))
        time.sleep(rng.random() * (0.05 if in_a_save else 0.3))
    process.kill()


@pytest.mark.slow
def test_resume_is_bitwise(records, long, tmp_path):
    """Killed at random moments, the middle of a save among them, with 0, 1 and 2 workers in turn,
    and resumed each time; at the end from the last checkpoint but one, on two ranks and on one."""
    rng = random.Random(7)
    out = tmp_path / "killed"
    flags = [*SMALL, *records, "--steps", str(STEPS), "--save-every", "4", "--keep", "3"]
    n_killed = 0
    n_in_a_save = 0
    resumed_from = []
    for turn in itertools.count():
        resume = ["--resume"] if turn else []
        process = start(out, *flags, "--workers", str(turn % 3), *resume)
        if turn < 6:
            kill_at_random(process, out, rng, in_a_save=turn % 2 == 1)
        _, text = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL), text
        assert "Traceback" not in text
        n_killed += process.returncode != 0
        n_in_a_save += bool(list(out.glob("*.part")))
        resumed_from.append(checkpoint.newest_step(out))
        if process.returncode == 0:
            break
    assert n_killed >= 5
    assert n_in_a_save >= 1
    assert len(set(resumed_from)) >= 4, resumed_from
    assert_same_run(out, long)
    newest, second = checkpoint.complete_steps(out)[:2]
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
@pytest.mark.parametrize("receiver", ["the process", "torchrun", "one rank"])
def test_sigterm_saves_and_ends_and_the_resumed_run_is_the_whole_one(records, long, tmp_path,
                                                                     receiver):
    """As Slurm and spot machines ask for it. Resumed on one process, whatever it was before."""
    alone = receiver == "the process"
    out = tmp_path / "out"
    flags = [*SMALL, *records, "--steps", str(STEPS), "--save-every", "0"]
    process = start(out, *flags, ranks=0 if alone else 2)
    wait_for(process, lambda: n_lines(out) >= 5)
    os.kill(pids_of_ranks(process)[1] if receiver == "one rank" else process.pid, signal.SIGTERM)
    text = stderr_of(process, 143 if alone else 1)       # torchrun has a status of its own
    assert receiver != "one rank" or "exitcode  : 143" in text, text
    (step,) = checkpoint.complete_steps(out)
    (sentence,) = [line for line in text.splitlines() if "train.py: " in line]
    assert f"SIGTERM: ended after step {step}" in sentence
    assert sorted(logged(out)) == [*range(1, step + 1)]
    assert step < STEPS
    assert not list(out.glob("*.part"))
    stderr_of(start(out, *flags, "--resume"))
    if alone:
        assert_same_run(out, long)
    assert skipped(out) == skipped(long)
    for n, line in logged(long).items():
        assert logged(out)[n]["ids"] == line["ids"]
        assert logged(out)[n]["loss"] == pytest.approx(line["loss"], rel=1e-6), n


FULL_DISK = """
import errno, json, os, sys, time
from functools import partial
from pathlib import Path
import torch, torch.distributed as dist
from text.tokenizer import ByteTokenizer
from training import checkpoint
from training.planner import RunError
from training.sync import all_ranks_or_none

def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

def save(saver, step, model, optimizer):
    all_ranks_or_none(partial(saver.begin, step, ByteTokenizer()))
    saver.save(step, model, optimizer, {"step": step})
    all_ranks_or_none(saver.wait)

def save_4(out, where, late):
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    saver = checkpoint.Saver(out, 2, rank == 0, group)
    save(saver, 2, model, optimizer)
    filesystem = checkpoint.dcp.filesystem
    here = {"tensors of rank 1": (1, filesystem, "_write_files_from_queue"),
            "the last files of rank 0": (0, saver, "complete"), "the folder": (0, Path, "mkdir")}
    rank_of_failure, owner, name = here[where]
    before = getattr(owner, name)
    if rank == rank_of_failure:
        setattr(owner, name, full)
    time.sleep(rank == late)        # whichever is late, none makes the folder again
    try:
        save(saver, 4, model, optimizer)
    except RunError as e:
        return str(e)
    finally:
        setattr(owner, name, before)

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group(backend="gloo")
for n, case in enumerate(json.loads(sys.argv[1])):
    out = Path(sys.argv[3])
    (out / f"sentence-{n}-{rank}").write_text(save_4(out / str(n), *case))
dist.destroy_process_group()
"""
WHERE_AND_LATE_RANK = [("tensors of rank 1", 0), ("the last files of rank 0", 1), ("the folder", 0),
                       ("the folder", 1)]


def assert_no_space(sentence, out):
    assert "the checkpoint of step 4 cannot be written: " in sentence
    assert "step-2 is complete" in sentence
    assert "No space left" in sentence
    assert checkpoint.complete_steps(out) == [2]
    assert not list(out.glob("*.part"))


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_fails_the_save_of_both(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FULL_DISK)
    cases = json.dumps(WHERE_AND_LATE_RANK)
    process = start(tmp_path, cases, ranks=2, program=str(program))
    stderr_of(process, 0)
    for n in range(len(WHERE_AND_LATE_RANK)):
        of_rank_0, of_rank_1 = ((tmp_path / f"sentence-{n}-{r}").read_text() for r in range(2))
        assert of_rank_0 == of_rank_1
        assert_no_space(of_rank_0, tmp_path / str(n))


FULL_FOR_RANK_1 = """
import errno, os
import train
from training import checkpoint

begin = checkpoint.Saver.begin

def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

def begin_on_a_full_disk(self, step, *args):
    if step == 4 and os.environ["RANK"] == "1":
        checkpoint.dcp.filesystem._write_files_from_queue = full
    begin(self, step, *args)

checkpoint.Saver.begin = begin_on_a_full_disk
if os.environ["RANK"] == "0":        # it hears of the failure from rank 1, still writing itself
    checkpoint.Saver.done = lambda self: False
train.main()
"""


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_ends_the_run_with_one_sentence(records, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FULL_FOR_RANK_1)
    out = tmp_path / "out"
    flags = [*SMALL, *records, "--steps", "8", "--save-every", "2"]
    text = stderr_of(start(out, *flags, ranks=2, program=str(program)), 1)
    (sentence,) = [line for line in text.splitlines() if "train.py: " in line]
    assert_no_space(sentence, out)


SLOW_DECODING = """
import time
import data, train

encode = data.encode
data.encode = lambda *args: (time.sleep(0.1), encode(*args))[1]
if __name__ == "__main__":
    train.main()
"""


@pytest.mark.slow
def test_sigterm_to_all_processes_of_a_run_is_the_trainers_to_answer(records, tmp_path):
    """Slurm signals the decoding workers too; here they are what the trainer waits for."""
    program = tmp_path / "program.py"
    program.write_text(SLOW_DECODING)
    out = tmp_path / "out"
    flags = [*SMALL, *records, "--steps", "200", "--save-every", "0", "--workers", "1"]
    process = start(out, *flags, program=str(program), start_new_session=True)
    wait_for(process, lambda: n_lines(out) >= 4)
    os.killpg(process.pid, signal.SIGTERM)
    text = stderr_of(process, 143)
    (step,) = checkpoint.complete_steps(out)
    assert f"SIGTERM: ended after step {step}" in text
    assert "Traceback" not in text
