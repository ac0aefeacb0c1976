"""Runs of several processes write the same log on all layouts, and end together."""

import json
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import model as models
import parallel
import train
from tests.ranks import run_ranks
from tests.training.processes import (
    ROOT,
    all_end,
    free_port,
    n_lines,
    outputs_of,
    pids_of_ranks,
    start,
    stderr_of,
    wait_for,
    workers_of,
)
from tests.training.runs import SMALL
from training import ranks
from training.log import read_log
from weights import files

pytestmark = pytest.mark.slow
TINY = models.PRESETS["toy"]
LIMIT_S = 5  # instead of ten minutes; enough for two processes to connect on a busy machine
LATE_S = 7
RUN = [*SMALL, "--eval_images=1", "--save-every=0"]


# processes, --cp, --cp_exchange, --micro-batch, --shard
LAYOUTS = [(1, 1, "heads", 2, 0), (2, 2, "gather", 1, 0), (2, 1, "heads", 1, 1),
           (4, 2, "heads", 2, 2)]
ROUNDED = ("loss", "grad_norm", "grad_norms", "nll_by_source")


def test_a_run_logs_the_same_numbers_on_any_layout(tmp_path):
    """On the command line. Ids, counts and scores are equal; loss and norms agree to rounding."""
    flags = ["--stage=3", "--tiny", "--steps=3", "--batch=4",
             "--deterministic", "--device=cpu", "--eval_images=1", "--model.n_layer=1",
             "--pool_size=8", "--eval-every=2", "--json"]
    logs = []
    for world, cp, exchange, micro_batch, shard in LAYOUTS:
        out = tmp_path / f"{world}-{cp}-{micro_batch}"
        layout = [f"--cp={cp}", f"--cp_exchange={exchange}", f"--micro-batch={micro_batch}",
                  f"--shard={shard}"]
        process = start(out, *flags, *layout, ranks=world if world > 1 else 0)
        stdout, stderr = outputs_of(process)
        assert "view tensor" not in stderr  # a warning of FSDP
        assert json.loads(stdout.splitlines()[-1])["steps"] == 3
        logs.append(read_log(out / "log.jsonl"))
        assert files.load(out).config.n_layer == 1
    first = logs[0]
    for lines in logs[1:]:
        assert len(lines) == len(first) == 1 + 3 + 2  # head, steps, scores
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


def join_two(rank, port):
    """-> Ranks of two processes that share rows. The timeout of step tensors is LIMIT_S."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    ten_minutes = {"minutes": 10}
    ranks.timedelta = lambda **time: timedelta(
        **({"seconds": LIMIT_S} if time == ten_minutes else time))
    return ranks.join_ranks(2, torch.device("cpu"))


def exchange_objects(rank, port):
    """In every exchange, one rank is late."""
    of_two = join_two(rank, port)
    exchanges = (of_two.all_gather, [0, 1]), (of_two.gather_in_row, [0, 1]), (of_two.broadcast, 0)
    for late, (exchange, expected) in enumerate(exchanges):
        time.sleep(LATE_S if rank == late % 2 else 0)
        assert exchange(rank) == expected
    of_two.leave()
    raise AssertionError("the process has not ended")


def test_a_rank_may_be_late_with_objects_for_longer_than_with_the_tensors_of_a_step():
    run_ranks(exchange_objects, (free_port(),), 2)


def finish_late(rank, port, folder):
    """Writing the model takes the first rank longer than the timeout of tensors."""
    of_two = join_two(rank, port)
    model = files.meta_model(TINY).to_empty(device="cpu")
    parallel.parallelize(model, of_two.mesh)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(files, "save", lambda *_: time.sleep(LATE_S))
    config = SimpleNamespace(data=None)
    run = SimpleNamespace(ranks=of_two, config=config, out=Path(folder), tokenizer=SimpleNamespace(
        save=lambda folder: None))
    monkeypatch.setattr(files, "save_data_config", lambda *_: None)
    report = SimpleNamespace(
        scores=lambda run, model, _: [p.full_tensor() for p in model.parameters()],
        end=lambda *_: Path(folder, "ended").touch())
    train.finish(run, model, None, report, 0, False)


def test_a_first_rank_that_writes_for_long_is_waited_for(tmp_path):
    run_ranks(finish_late, (free_port(), str(tmp_path)), 2)
    assert (tmp_path / "ended").exists()


def mixed_records(folder):
    """-> flags that train on real images and a video. One of several images is truncated."""
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
    return [f"--data={folder}/mixed.jsonl", f"--media={folder}/media"]


def test_videos_several_images_and_a_bad_record_log_the_same_on_shared_rows(tmp_path):
    """Only one rank decodes the truncated image. Both ranks give its record no loss, and the
    log counts it once."""
    flags = ["--stage=3", "--tiny", *mixed_records(tmp_path), "--data.max_tokens=1024",
             "--data.max_frames=8", "--steps=6", "--batch=2",
             "--deterministic", "--device=cpu", "--model.n_layer=1", "--pool_size=6",
             "--max_skip=1", "--workers=1"]
    logs = []
    for cp in (1, 2):
        out = tmp_path / str(cp)
        ranks = cp if cp > 1 else 0
        stderr_of(start(out, *flags, f"--cp={cp}", ranks=ranks))
        logs.append(read_log(out / "log.jsonl")[1:-1])
    alone, shared = logs
    assert any(step["unreadable"] for step in alone)
    assert len(alone) == len(shared) == 6
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
        assert ours["weight"] == pytest.approx(theirs["weight"])
        for key in ("ids", "tokens", "crops", "loss_tokens", "unreadable_tokens", "unreadable",
                    "examples"):
            assert ours[key] == theirs[key], key


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(tmp_path, victim):
    """All decoding workers end, too."""
    out = tmp_path / "out"
    launcher = start(out, *RUN, "--steps=100000", "--workers=1", ranks=2)
    wait_for(launcher, lambda: n_lines(out) >= 4)
    pids = pids_of_ranks(launcher)
    assert sorted(pids) == [0, 1]
    workers = [worker for pid in pids.values() for worker in workers_of(pid)]
    assert len(workers) >= 3  # two decode, one measures
    os.kill(pids[victim], signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    # torchrun reports the rank, unless the other rank noticed the failure first and ended
    named = "another process has ended or hangs" in stderr
    assert f"rank      : {victim}" in stderr or named, stderr
    assert all_end([*pids.values(), *workers])
