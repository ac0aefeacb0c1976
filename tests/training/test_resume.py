"""A run is never lost: what it stopped at, it continues from bit by bit, or says why it cannot."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import data
import model
import train
from tests.training.faulty_disk import FaultyDisk
from tests.training.runs import RECIPE, assert_same_run, back_to, logged, run, sentence, weights
from training import checkpoint
from training.checkpoint_files import Reader
from training.config import UserError, parse
from training.log import read_skips
from training.resume import check_recipe, config_as_text


@pytest.fixture
def encoded(monkeypatch):
    """The ids of the records that are decoded."""
    ids = []
    encode = data.encode

    def noted(record, *args, **kwargs):
        ids.append(record["id"])
        return encode(record, *args, **kwargs)

    monkeypatch.setattr(data, "encode", noted)
    return ids


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_resumed_run_is_the_run_that_nothing_stopped(whole, records, tmp_path, step, capsys,
                                                       encoded):
    """Dropout included. Without a checkpoint it begins and says so; with one it decodes nothing of
    the steps before, and of those after not what the run knows to be bad, for it was there once."""
    out = back_to(whole, tmp_path / "out", step)
    assert run(out, *RECIPE, *records, "--resume") == 0
    assert_same_run(out, whole)
    assert ("no checkpoint" in capsys.readouterr().err) == (step == 0)
    if step:
        lines = logged(whole)
        used = sum(lines[n]["examples"] for n in range(step + 1, 7))
        known = [skip for skip in read_skips(whole) if skip["step"] > step]
        assert len(encoded) == used - len(known) > 0
        assert known or step == 4


def test_a_partial_line_is_cut_off_and_the_log_is_never_written_anew(whole, records, tmp_path):
    """... so that a kill in the middle of a resume costs none of it; nothing is logged twice."""
    out = back_to(whole, tmp_path / "out", 4)
    kept = {}
    for name, n in (("log.jsonl", 6), ("skips.jsonl", 1)):       # the rest had not reached the disk
        lines = (out / name).read_bytes().splitlines(keepends=True)
        kept[name] = b"".join(lines[:n])
        (out / name).write_bytes(kept[name] + lines[n][:20])
    with open(out / "log.jsonl", "rb") as old:
        assert run(out, *RECIPE, *records, "--resume") == 0
        assert old.read() == (out / "log.jsonl").read_bytes()
    for name, content in kept.items():
        assert (out / name).read_bytes().startswith(content)
    assert logged(out) == logged(whole)
    assert weights(out) == weights(whole)
    indices = [skip["index"] for skip in read_skips(out)]
    assert len(indices) == len(set(indices))


LAYOUTS = [
    ["--micro-batch", "1"],
    ["--activation_checkpointing=true", "--crop_bucket=4", "--save-every", "3", "--keep", "1"],
]


@pytest.mark.parametrize("flags", LAYOUTS, ids=[flags[0] for flags in LAYOUTS])
def test_another_layout_is_no_other_recipe(whole, records, tmp_path, flags):
    """... and trains on the same records, with the same loss but for rounding (and for dropout,
    where rows are taken one by one)."""
    out = back_to(whole, tmp_path / "out", 4)
    assert run(out, *RECIPE, *records, "--resume", *flags) == 0
    tolerance = 0.1 if "--micro-batch" in flags else 1e-6
    for step in (5, 6):
        ours = logged(out)[step]
        theirs = logged(whole)[step]
        for field in ("ids", "tokens", "weight", "lr"):
            assert ours[field] == theirs[field]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)


OTHER_RECIPES = [
    (["--lr.vit=1"], "lr.vit was 5e-05 and is 1.0"),
    (["--steps", "7"], "steps was 6 and is 7"),
    (["--seed", "3"], "seed was 0 and is 3"),
    (["--batch", "4"], "batch was 2 and is 4"),
    (["--data.max_points=5"], "data.max_points"),
    (["--clip=2", "--z_loss=0"], "clip was"),
    (["--clip=2", "--z_loss=0"], "z_loss was"),
    (["--dtype", "bfloat16"], "dtype"),
    (["--model.n_hidden=96"], "another model"),
]


@pytest.mark.parametrize(("flags", "words"), OTHER_RECIPES, ids=[w for _, w in OTHER_RECIPES])
def test_another_recipe_is_refused_with_the_fields_named(whole, records, capsys, flags, words):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert run(whole, *RECIPE, *records, "--resume", *flags) == 2
    sentence(capsys, "--resume:", "step-6", words)
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_a_field_that_is_younger_than_the_checkpoint_had_its_default():
    args, config = parse(RECIPE)
    ours = config_as_text(config)
    theirs = {name: value for name, value in ours.items() if name != "toy_kinds"}
    check_recipe(args, "step-2", theirs, ours)
    with pytest.raises(UserError, match='toy_kinds was "few" and is "many"'):
        check_recipe(args, "step-2", theirs, {**ours, "toy_kinds": '"many"'})


def test_resume_anyway_insists(whole, records, tmp_path):
    out = back_to(whole, tmp_path / "out", 4)
    flags = ["--resume-anyway", "--lr.vit=1", "--warmup.vit=0"]
    assert run(out, *RECIPE, *records, *flags) == 0
    assert logged(out)[5]["loss"] == logged(whole)[5]["loss"] != logged(out)[6]["loss"]
    assert logged(out)[6]["loss"] != logged(whole)[6]["loss"]


def test_other_data_are_refused_and_taken_when_insisted_on(whole, records, tmp_path, capsys):
    other = tmp_path / "r.jsonl"
    more = json.dumps({"annotations": [{"type": "text", "text": "more"}]})
    other.write_text(Path(records[1]).read_text() + "\n" + more)
    out = back_to(whole, tmp_path / "out", 4)
    flags = ["--data", str(other), "--media", str(Path(records[1]).parent)]
    assert run(out, *RECIPE, *flags, "--resume") == 2
    sentence(capsys, "is of other data", "(data changed)", "--resume-anyway")
    assert run(out, *RECIPE, *flags, "--resume-anyway") == 0


def test_init_and_resume_exclude_each_other(whole, tmp_path, capsys):
    assert run(tmp_path / "out", *RECIPE, "--resume", "--init", str(whole)) == 2
    sentence(capsys, "--init", "--resume")


def test_a_checkpoint_that_lost_a_write_costs_the_steps_since_the_one_before(whole, records,
                                                                              tmp_path):
    out = back_to(whole, tmp_path / "out", 6)
    os.truncate(out / "step-6" / "__0_0.distcp", 100)
    assert run(out, *RECIPE, *records, "--resume") == 0
    assert_same_run(out, whole)
    assert checkpoint.complete_steps(out) == [6, 4, 2]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(whole, records, tmp_path,
                                                                     capsys):
    out = back_to(whole, tmp_path / "out", 2)
    os.truncate(out / "step-2" / "complete", 100)
    before = sorted(tmp_path.rglob("*"))
    assert run(out, *RECIPE, *records, "--resume") == 2
    sentence(capsys, str(out), "step-2", "--resume starts a new run only where")
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".out.lock"] == before


# --------------------------------------------------------------------------------------------------
# losses that are not finite


@pytest.fixture
def nan_at_3(monkeypatch):
    """The loss of step 3 is NaN."""
    steps = []
    dropout_seed = train.dropout_seed
    nll = model.Molmo2.nll

    def noted(seed, step, rank):
        steps.append(step)
        return dropout_seed(seed, step, rank)

    def nan(self, *args):
        factor = float("nan") if steps[-1] == 3 else 1
        return tuple(x * factor for x in nll(self, *args))

    monkeypatch.setattr(train, "dropout_seed", noted)
    monkeypatch.setattr(model.Molmo2, "nll", nan)


def tensors_of(folder):
    """{name: tensor} of a checkpoint, read without a model."""
    metadata = Reader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(meta.size) for name, meta in metadata.items()}
    dcp.load(tensors, storage_reader=Reader(folder), no_dist=True)
    return tensors


def test_a_step_that_is_not_finite_stops_the_run_and_leaves_its_batch(records, tmp_path, nan_at_3,
                                                                      capsys):
    out = tmp_path / "out"
    assert run(out, *RECIPE, *records) == 1
    text = sentence(capsys, "step 3: loss nan", "nonfinite-step-3-")
    (path,) = out.glob("nonfinite-step-3-*.npz")
    with np.load(path, allow_pickle=False) as batch:
        assert {"ids", "tokens", "targets", "weights", "images", "pool_src"} <= set(batch)
        assert len(batch["ids"])
        assert all(name in text for name in batch["ids"])
        assert batch["tokens"].shape == (2, 256)
    assert sorted(logged(out)) == [1, 2]                 # no optimizer step: see test_parallel


def test_a_step_that_is_not_finite_waits_for_the_checkpoint_of_the_step_before(
        records, tmp_path, nan_at_3, monkeypatch):
    out, found = tmp_path / "out", []
    complete, report = checkpoint.Saver.complete, train.report_nonfinite

    def slowly(self, *args):
        time.sleep(0.3)
        complete(self, *args)

    def noted(*args):
        found.append(checkpoint.complete_steps(out))
        report(*args)

    monkeypatch.setattr(checkpoint.Saver, "complete", slowly)
    monkeypatch.setattr(train, "report_nonfinite", noted)
    assert run(out, *RECIPE, *records, "--save-every", "2") == 1
    assert found == [[2]]


def test_a_dry_run_comes_before_the_state_of_a_resumed_run(whole, records, tmp_path, monkeypatch):
    """Else a rank would hold twice the state of the optimizer. The run goes on as it would."""
    order = []
    for owner, name in ((train, "dry_run_largest_batch"), (checkpoint, "restore")):
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, act=act: (
            order.append(name), act(*args))[1])
    out = back_to(whole, tmp_path / "out", 2)
    assert run(out, *RECIPE, *records, "--resume", "--dry_run=true") == 0
    assert order == ["dry_run_largest_batch", "restore"]
    assert_same_run(out, whole)


def test_a_skipped_step_changes_no_weight_and_is_counted_after_a_resume_too(records, tmp_path,
                                                                            nan_at_3):
    whole = tmp_path / "whole"
    flags = [*RECIPE, *records, "--on-nonfinite", "skip", "--save-every", "1"]
    assert run(whole, *flags) == 0
    lines = logged(whole)
    assert [lines[n]["skipped_steps"] for n in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert lines[3]["loss"] is None
    assert lines[4]["loss"] > 0
    before, skipped, after = (tensors_of(whole / f"step-{n}") for n in (2, 3, 4))
    assert before.keys() == skipped.keys()
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    out = back_to(whole, tmp_path / "out", 3)
    assert run(out, *flags, "--resume") == 0
    assert_same_run(out, whole)


# --------------------------------------------------------------------------------------------------
# the disk


def test_a_full_disk_ends_the_run_in_one_sentence_and_resume_continues(whole, records, tmp_path,
                                                                       capsys):
    out = tmp_path / "out"

    def full_at_4(n, what, path):
        if what == "write" and "step-4.part" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with FaultyDisk(out, full_at_4):
        assert run(out, *RECIPE, *records) == 1
    sentence(capsys, "the checkpoint of step 4 cannot be written", "No space left",
             "step-2 is complete")
    assert checkpoint.complete_steps(out) == [2]
    assert not list(out.glob("*.part"))
    assert run(out, *RECIPE, *records, "--resume") == 0
    assert_same_run(out, whole)


def test_the_step_does_not_wait_for_the_disk(whole, records, tmp_path, monkeypatch):
    """The tensors of step 2 are written only once the optimizer has taken step 4, before the next
    save begins."""
    out = tmp_path / "out"
    taken = []
    waited = []
    go = threading.Event()
    optimizer_step = torch.optim.AdamW.step

    def counted(self, *args):
        optimizer_step(self, *args)
        taken.append(1)
        if len(taken) == 4:
            go.set()

    def slow(n, what, path):
        if what == "create" and "step-2.part/__0" in path:
            waited.append(go.wait(60))

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    with FaultyDisk(out, slow):
        assert run(out, *RECIPE, *records) == 0
    assert waited == [True]
    assert_same_run(out, whole)
    assert checkpoint.complete_steps(out) == [6, 4, 2]
