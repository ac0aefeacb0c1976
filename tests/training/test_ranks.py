"""Whole runs of several processes: the same log on any layout, and one end for all of them."""

import itertools
import json
import os
import shutil
import signal
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel
from records.mixture import Mixture
from records.reader import Records
from tests.ranks import run_ranks
from tests.training.processes import (
    ROOT,
    all_end,
    n_lines,
    pids_of_ranks,
    start,
    stderr_of,
    wait_for,
)
from tests.training.runs import SMALL
from training.config import parse
from training.loader import Loader
from training.planner import StepPlanner, kind_of
from training.setup import open_on_first_rank, open_tokenizer
from training.sources import open_sources
from weights import files

pytestmark = pytest.mark.slow
RUN = [*SMALL, "--eval_images=1", "--save-every", "0"]


def sentences(stderr):
    return [line for line in stderr.splitlines() if line.startswith("train.py:")]


# --------------------------------------------------------------------------------------------------
# one log

# processes, context-parallel degree, micro-batch, ranks that hold the weights together
LAYOUTS = [(1, 1, 2, 0), (2, 2, 1, 0), (2, 1, 1, 1), (4, 2, 2, 2)]
ROUNDED = ("loss", "grad_norm", "grad_norms", "nll_by_source")


def test_a_run_logs_the_same_numbers_on_any_layout(tmp_path):
    """Through the command line: ids, counts and scores exactly, loss and norms to rounding."""
    flags = ["--stage", "3", "--tiny", "--steps", "3", "--batch", "4", "--vit_steps=0",
             "--deterministic", "--device", "cpu", "--eval_images=1", "--model.n_layer=1",
             "--pool_size=8", "--eval-every", "2"]
    logs = []
    for world, cp, micro_batch, shard in LAYOUTS:
        out = tmp_path / f"{world}-{cp}-{micro_batch}"
        layout = ["--cp", str(cp), "--micro-batch", str(micro_batch), "--shard", str(shard)]
        process = start(out, *flags, *layout, ranks=world if world > 1 else 0)
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        assert "view tensor" not in stderr               # a warning of FSDP
        assert json.loads(stdout.splitlines()[-1])["steps"] == 3
        logs.append([json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()])
        assert files.load(out).config.n_layer == 1
    first = logs[0]
    for lines in logs[1:]:
        assert len(lines) == len(first) == 1 + 3 + 2     # head, steps, scores
        assert lines[0]["params"] == first[0]["params"]
        for ours, theirs in zip(lines[1:], first[1:], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - {"seconds"}:
                expected = theirs[key]
                if key in ROUNDED:
                    expected = pytest.approx(expected, rel=2e-5)
                elif key == "weight":
                    expected = pytest.approx(expected)
                assert ours[key] == expected, key


def mixed_records(folder):
    """Flags that train on real images and a video; one image, of several, is cut short."""
    media = ROOT / "tests" / "media"
    shutil.copytree(media, folder / "media")
    whole = (media / "coffee.png").read_bytes()
    (folder / "media" / "cut.png").write_bytes(whole[:90_000])
    qa = [{"type": "qa", "question": "What?", "answer": "That."}]
    records = [{"images": ["chelsea.png", "coins.png", "cut.png"], "annotations": qa},
               {"image": "rocket.jpg", "annotations": qa}]
    for name in ("films", "records"):
        records += map(json.loads, (media / f"{name}.jsonl").read_text().splitlines())
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, records)))
    return ["--data", str(folder / "mixed.jsonl"), "--media", str(folder / "media")]


def test_videos_several_images_and_a_bad_record_log_the_same_on_shared_rows(tmp_path):
    """The image that is cut short, which one rank of the group alone finds, is masked by both and
    listed once."""
    flags = ["--stage", "3", "--tiny", *mixed_records(tmp_path), "--data.max_tokens=1024",
             "--data.max_frames=8", "--steps", "3", "--batch", "2", "--vit_steps=0",
             "--deterministic", "--device", "cpu", "--model.n_layer=1", "--pool_size=6",
             "--max_skip=1", "--workers", "1"]
    logs = []
    for cp in (1, 2):
        out = tmp_path / str(cp)
        stderr_of(start(out, *flags, "--cp", str(cp), ranks=cp if cp > 1 else 0))
        steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:-1]]
        skips = [json.loads(line) for line in (out / "skips.jsonl").read_text().splitlines()]
        logs.append((steps, [(s["index"], s["id"], kind_of(s["reason"])) for s in skips]))
    (alone, skipped), (shared, skipped_by_two) = logs
    assert skipped == skipped_by_two
    assert len(skipped) > 0
    assert len(alone) == len(shared) == 3
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
        assert ours["weight"] == pytest.approx(theirs["weight"])
        for key in ("ids", "tokens", "crops", "loss_tokens", "masked_tokens", "dropped",
                    "examples"):
            assert ours[key] == theirs[key], key


# --------------------------------------------------------------------------------------------------
# one end


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(tmp_path, victim):
    out = tmp_path / "out"
    launcher = start(out, *RUN, "--steps", "100000", ranks=2)
    wait_for(launcher, lambda: n_lines(out) >= 4)
    pids = pids_of_ranks(launcher)
    assert sorted(pids) == [0, 1]
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert launcher.returncode == 1
    # torchrun's report names the rank, unless the other has found out first and ended by itself
    named = [line.split(";")[0] for line in sentences(stderr)]
    assert named in ([], [f"train.py: rank {victim} of 2 has ended or hangs"]), stderr
    assert f"rank      : {victim}" in stderr or named, stderr
    assert all_end(pids.values())


HANG = """
import functools, os, time
import parallel, train
from evaluation import report

def slow_scores(*args):
    if not evaluated and os.environ["RANK"] == "0":
        time.sleep(TIMEOUT_S + 10)
    evaluated.append(1)
    return {}

evaluated = []
parallel.join = functools.partial(parallel.join, timeout_s=TIMEOUT_S)
report.final_scores = slow_scores
train.main()
"""


def test_a_rank_that_hangs_ends_the_others_and_is_named_and_one_that_evaluates_does_not(tmp_path):
    """Evaluation on the first rank may take longer than the timeout, an exchange may not."""
    timeout_s = 20
    program = tmp_path / "program.py"
    program.write_text(HANG.replace("TIMEOUT_S", str(timeout_s)))
    out = tmp_path / "out"
    # torchrun gives a stopped process this time before it kills it
    launcher = start(out, *RUN, "--steps", "100000", "--eval-every", "2", ranks=2,
                     program=str(program), env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"})
    wait_for(launcher, lambda: n_lines(out) >= 7)        # head, four steps, two evaluations
    pids = pids_of_ranks(launcher)
    began = time.monotonic()
    os.kill(pids[1], signal.SIGSTOP)
    try:
        _, stderr = launcher.communicate(timeout=timeout_s + 60)
    finally:
        for pid in pids.values():
            if not all_end([pid], within_s=10):
                os.kill(pid, signal.SIGKILL)
                pytest.fail("a rank is left running")
    assert timeout_s - 5 < time.monotonic() - began < timeout_s + 60
    assert launcher.returncode == 1
    named = [line.split(";")[0] for line in sentences(stderr)]
    assert named == ["train.py: rank 1 of 2 has ended or hangs"], stderr


def wait_in_a_group(rank, folder):
    """Rank 1 waits for rank 0 in their group, and notes the seconds until it gives up."""
    timeout = timedelta(seconds=5)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", timeout, world_size=4, rank=rank)
    group = parallel.make_mesh(2)["cp"].get_group()
    note = Path(folder) / "seconds"
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=group)
        note.write_text(str(time.monotonic() - began))
    while not note.exists() and time.monotonic() < began + 60:
        time.sleep(0.1)


def test_an_exchange_within_a_group_ends_with_the_timeout_of_the_process_group(tmp_path):
    run_ranks(wait_in_a_group, (str(tmp_path),), 4)
    assert 4 < float((tmp_path / "seconds").read_text()) < 30


def open_records(rank, folder):
    """Opens a file of records, which only the first rank may read for that."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": (Path(folder) / "port").read_text()}
    ranks = parallel.join(1, torch.device("cpu"))
    if rank:
        Records.__init__ = None
    args, config = parse(["--stage", "1", "--data", f"{folder}/records.jsonl"])
    (opened,), _, _ = open_on_first_rank(ranks, args, config)
    found = parallel.all_gather((len(opened), opened.fingerprint, opened[9]["id"]))
    assert len(set(found)) == 1
    ranks.barrier()
    dist.destroy_process_group()


def test_a_file_is_opened_by_the_first_rank_alone(tmp_path):
    record = {"annotations": [{"type": "text", "text": "x" * 1000}]}
    (tmp_path / "records.jsonl").write_text(f"{json.dumps(record)}\n" * 1100)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    run_ranks(open_records, (str(tmp_path),), 3)


NAN = """
import os
import torch
import model, train

nll_of = model.Molmo2.nll
step_of = torch.optim.AdamW.step
steps = []

def nll(self, *args):
    nll, lse = nll_of(self, *args)
    broken = len(steps) == 1 and os.environ["RANK"] == "1"
    return (nll * float("nan") if broken else nll), lse

def step(self):
    steps.append(1)
    print("the weights move", flush=True)
    step_of(self)

model.Molmo2.nll = nll
torch.optim.AdamW.step = step
train.main()
"""


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_weights_move(tmp_path):
    """... and names the records of that rank, once. The optimizer does not take step 2."""
    program = tmp_path / "program.py"
    program.write_text(NAN)
    out = tmp_path / "out"
    flags = [*RUN, "--steps", "9"]
    process = start(out, *flags, ranks=2, program=str(program))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 1, stderr
    assert stdout.count("the weights move") == 2         # step 1, on both
    (sentence,) = sentences(stderr)
    assert "step 2: loss nan" in sentence
    args, config = parse(flags)
    sources, rates, _ = open_sources(args, config)
    tokenizer, config = open_tokenizer(args, replace(config, micro_batch=1))
    mixture = Mixture(sources, rates, config.seed)
    loader = Loader(mixture, tokenizer, config, StepPlanner(mixture, tokenizer, config))
    loader.ranks = replace(loader.ranks, dp=2, dp_rank=1)
    steps = [[example.id for rows in micro_batches for row in rows for example in row]
             for _, micro_batches in itertools.islice(loader, 2)]
    named = sentence.partition("records: ")[2].partition(";")[0].split(", ")
    assert named == steps[1][:20]
    assert [path.name for path in out.glob("*.npz")] == ["nonfinite-step-2-rank-1-0.npz"]


SEES_OTHER_CHECKPOINTS = """
import os
from pathlib import Path
from training import resume, setup
import train

def find_checkpoint(args, config):
    _, config = resume.find_checkpoint(args, config)
    return resume.Checkpoint(Path(f"step-{1 + int(os.environ['RANK'])}"), {}), config

setup.find_checkpoint = find_checkpoint
train.main()
"""


def test_ranks_that_see_different_checkpoints_stop(tmp_path):
    """As on machines whose directories are not the same disk."""
    program = tmp_path / "program.py"
    program.write_text(SEES_OTHER_CHECKPOINTS)
    stderr = stderr_of(start(tmp_path / "out", *RUN, "--steps", "3", ranks=2,
                             program=str(program)), 1)
    assert sentences(stderr) == [
        "train.py: --resume: the ranks see different checkpoints: step-1, step-2"]
    assert [path.name for path in Path(tmp_path).iterdir()] == ["program.py"]
