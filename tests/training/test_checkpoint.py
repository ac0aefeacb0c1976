"""A run is never lost: stopped, killed or out of disk at any moment, it goes on bit by bit, or says in one sentence why not."""

import builtins
import copy
import errno
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image

import data
import model
import train
from training import checkpoint

ROOT = Path(__file__).parents[2]
SMALL = ["--stage", "1", "--tiny", "--batch", "2", "--vit_steps=0", "--pool_size=4", "--device", "cpu", "--model.n_layer=1", "--model.n_embd=32",
         "--model.n_hidden=64", "--model.vision.n_embd=32", "--model.vision.n_hidden=64", "--data.max_tokens=256"]
RECIPE = [*SMALL, "--steps", "6", "--save-every", "2", "--keep", "0", "--response_dropout=0.2"]


@pytest.fixture(autouse=True)
def restored_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    until_written()


def until_written():
    """What a run left behind that ended in this process: no thread of it writes any more."""
    for thread in threading.enumerate():
        if thread.name.startswith("AsyncCheckpoint"):
            thread.join(60)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """-> the flags that train on twelve records with pictures, of which three are cut short."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    lines = []
    for i in range(12):
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(folder / f"{i}.png")
        words = "".join(rng.choice(list("abc "), int(rng.integers(2, 40))))
        lines.append(json.dumps({"image": f"{i}.png", "annotations": [{"type": "caption", "text": words}]}))
    for i in (2, 5, 7):
        (folder / f"{i}.png").write_bytes((folder / f"{i}.png").read_bytes()[:3000])
    (folder / "r.jsonl").write_text("\n".join(lines))
    return ["--data", str(folder / "r.jsonl")]


def run(out, *flags):
    """train.main in this process -> its status, 0 for success."""
    try:
        train.main([*flags, "--out", str(out)])
    except SystemExit as end:
        return end.code
    finally:
        until_written()
    return 0


def logged(out):
    """{step: line} as the interface says: a torn last line is cut, of a step that stands twice the later line counts; without seconds."""
    *rows, _ = (out / "log.jsonl").read_bytes().split(b"\n")
    return {line["step"]: {key: value for key, value in line.items() if key != "seconds"} for line in map(json.loads, rows) if "lr" in line}


def skipped(out):
    return sorted((s["draw"], s["id"], s["reason"]) for s in map(json.loads, (out / "skips.jsonl").read_text().splitlines()))


def weights(out):
    return {path.name: path.read_bytes() for path in sorted((out / "model").iterdir())}


def sentence(capsys, *words):
    """The one sentence with which a command ended, besides what tells of pictures that cannot be read; no traceback."""
    said = capsys.readouterr().err
    assert "Traceback" not in said
    mine = [line[10:] for line in said.splitlines() if line.startswith("train.py: ")]
    assert len(mine) == 1 and len(mine[0]) < 1000 and all(word in mine[0] for word in words), said
    return mine[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, records):
    """A run of six steps that nothing interrupted, with its checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert run(out, *RECIPE, *records) == 0
    assert checkpoint.complete_steps(out) == [6, 4, 2] and sorted(logged(out)) == [1, 2, 3, 4, 5, 6] and len(skipped(out)) >= 3
    return out


def back_to(whole, out, step):
    """The run as it was at a step that it saved, but for the log."""
    shutil.copytree(whole, out)
    for later in checkpoint.complete_steps(out):
        if later > step:
            shutil.rmtree(out / f"step-{later}")
    return out


def equal(out, whole):
    assert logged(out) == logged(whole) and weights(out) == weights(whole) and skipped(out) == skipped(whole)
    return True


# ---------------------------------------------------------------------------------------------------------------
# in one process


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_resumed_run_is_the_run_that_nothing_stopped(whole, records, tmp_path, step, capsys):
    """Dropout included; without a checkpoint it starts afresh and says so."""
    out = back_to(whole, tmp_path / "out", step)
    assert run(out, *RECIPE, *records, "--resume") == 0 and equal(out, whole)
    assert ("the run starts afresh" in capsys.readouterr().err) == (step == 0)


def test_a_resume_decodes_nothing_of_the_steps_before(whole, records, tmp_path, monkeypatch):
    """... and of those after not what the run knows to be bad, for it got there before."""
    asked, encode = [], data.encode
    monkeypatch.setattr(data, "encode", lambda record, *a, **k: (asked.append(record["id"]), encode(record, *a, **k))[1])
    for step in (2, 4):
        asked.clear()
        assert run(back_to(whole, tmp_path / str(step), step), *RECIPE, *records, "--resume") == 0
        taken = sum(logged(whole)[n]["examples"] for n in range(step + 1, 7))
        skips = [json.loads(line) for line in (whole / "skips.jsonl").read_text().splitlines()]
        assert len(asked) == taken - sum(s["step"] > step for s in skips) > 0 and any(s["step"] > 2 for s in skips)


def test_a_line_that_a_kill_cut_short_is_cut_off(whole, records, tmp_path):
    """Of the log and of the skips: whatever is appended stands on lines of its own, and nothing is told twice."""
    out = back_to(whole, tmp_path / "out", 4)
    for name, keep in (("log.jsonl", 6), ("skips.jsonl", 1)):            # what came later had not reached the disk
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(b"".join(lines[:keep]) + lines[keep][:20])
    with open(out / "log.jsonl", "ab") as log:
        log.write(b'{"step": 5, "lo')
    assert run(out, *RECIPE, *records, "--resume") == 0
    assert logged(out) == logged(whole) and weights(out) == weights(whole)
    told = [json.loads(line)["draw"] for line in (out / "skips.jsonl").read_text().splitlines()]
    assert len(told) == len(set(told))


def test_the_log_is_never_written_anew(whole, records, tmp_path):
    """Cut, and added to: a kill in the middle of a resume costs none of it."""
    out = back_to(whole, tmp_path / "out", 4)
    before, old = (out / "log.jsonl").read_bytes(), open(out / "log.jsonl", "rb")
    with open(out / "log.jsonl", "ab") as log:
        log.write(b'{"st')
    assert run(out, *RECIPE, *records, "--resume") == 0
    with old:
        assert old.read() == (out / "log.jsonl").read_bytes() and (out / "log.jsonl").read_bytes().startswith(before)


LAYOUTS = [["--micro-batch", "1"], ["--activation_checkpointing=true"], ["--crop_bucket=4"], ["--save-every", "3", "--keep", "1"]]


@pytest.mark.parametrize("flags", LAYOUTS, ids=[flags[0] for flags in LAYOUTS])
def test_another_layout_is_no_other_recipe(whole, records, tmp_path, flags):
    """... and trains on the same records, with the same loss but for rounding (and for dropout, where rows are taken one by one)."""
    out = back_to(whole, tmp_path / "out", 4)
    assert run(out, *RECIPE, *records, "--resume", *flags) == 0
    for n in (5, 6):
        a, b = logged(out)[n], logged(whole)[n]
        assert (a["ids"], a["tokens"], a["weight"], a["lr"]) == (b["ids"], b["tokens"], b["weight"], b["lr"])
        assert a["loss"] == (pytest.approx(b["loss"], rel=1e-6) if flags[0] != "--micro-batch" else pytest.approx(b["loss"], rel=0.1))


OTHERS = [
    (["--lr.vit=1"], "lr.vit was 5e-05 and is 1.0"), (["--steps", "7"], "steps was 6 and is 7"), (["--seed", "3"], "seed was 0 and is 3"),
    (["--batch", "4"], "batch was 2 and is 4"), (["--data.max_points=5"], "data.max_points"), (["--clip=2", "--z_loss=0"], "clip was"),
    (["--clip=2", "--z_loss=0"], "z_loss was"), (["--dtype", "bfloat16"], "dtype"), (["--model.n_hidden=96"], "another model"),
]


@pytest.mark.parametrize(("flags", "words"), OTHERS, ids=[words for _, words in OTHERS])
def test_another_recipe_is_refused_with_the_fields_named(whole, records, tmp_path, capsys, flags, words):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert run(whole, *RECIPE, *records, "--resume", *flags) == 2
    sentence(capsys, "--resume:", "step-6", words)
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_resume_anyway_insists(whole, records, tmp_path):
    out = back_to(whole, tmp_path / "out", 4)
    assert run(out, *RECIPE, *records, "--resume-anyway", "--lr.vit=1", "--warmup.vit=0") == 0
    assert logged(out)[5]["loss"] == logged(whole)[5]["loss"] != logged(out)[6]["loss"] != logged(whole)[6]["loss"]


def test_other_data_are_refused_and_taken_when_insisted_on(whole, records, tmp_path, capsys):
    other = tmp_path / "r.jsonl"
    other.write_text(Path(records[1]).read_text() + "\n" + json.dumps({"annotations": [{"type": "text", "text": "more"}]}))
    out = back_to(whole, tmp_path / "out", 4)
    flags = ["--data", str(other), "--media", str(Path(records[1]).parent)]
    assert run(out, *RECIPE, *flags, "--resume") == 2
    sentence(capsys, "is of other data", "(data changed)", "--resume-anyway")
    assert run(out, *RECIPE, *flags, "--resume-anyway") == 0


def test_init_and_resume_exclude_each_other(whole, tmp_path, capsys):
    assert run(tmp_path / "out", *RECIPE, "--resume", "--init", str(whole)) == 2
    sentence(capsys, "--init", "--resume")


def test_a_checkpoint_that_lost_a_write_is_passed_over_for_the_one_before(whole, records, tmp_path, capsys):
    names = sorted(path.name for path in (whole / "step-6").iterdir())
    assert {".metadata", "__0_0.distcp", "complete", "state.json", "tokenizer.json"} == set(names)
    for name, damage in itertools.product(names, ("cut", "gone", "empty")):
        out = tmp_path / "out"
        (out / "step-7").mkdir(parents=True)                             # and these are no checkpoints at all
        (out / "step-9").write_text("{}")
        for other in ("step-7.part", "step-x", "step-", "step-8 "):
            shutil.copytree(whole / "step-6", out / other)
        for step in (4, 6):
            shutil.copytree(whole / f"step-{step}", out / f"step-{step}")
        path = out / "step-6" / name
        path.unlink() if damage == "gone" else os.truncate(path, path.stat().st_size // 2 if damage == "cut" else 0)
        assert checkpoint.complete_steps(out) == [4], (name, damage)
        shutil.rmtree(out)
    out = back_to(whole, tmp_path / "out", 6)
    os.truncate(out / "step-6" / "__0_0.distcp", 100)
    assert run(out, *RECIPE, *records, "--resume") == 0 and equal(out, whole) and checkpoint.complete_steps(out) == [6, 4, 2]


# ---------------------------------------------------------------------------------------------------------------
# non-finite numbers


@pytest.fixture
def nan_at_3(monkeypatch):
    """The loss of step 3 is no number."""
    now, seed_of, nll = [], train.seed_of, model.Molmo2.nll
    monkeypatch.setattr(train, "seed_of", lambda seed, step, rank: (now.append(step), seed_of(seed, step, rank))[1])
    monkeypatch.setattr(model.Molmo2, "nll", lambda self, *a: tuple(x * (float("nan") if now[-1] == 3 else 1) for x in nll(self, *a)))


def tensors_of(folder):
    """{name: tensor} of a checkpoint, read without a model."""
    into = {name: torch.empty(meta.size) for name, meta in checkpoint.Reader(folder).read_metadata().state_dict_metadata.items()}
    dcp.load(into, storage_reader=checkpoint.Reader(folder), no_dist=True)
    return into


def test_a_step_that_is_not_finite_stops_the_run_and_leaves_its_batch(records, tmp_path, nan_at_3, capsys):
    assert run(tmp_path / "out", *RECIPE, *records) == 1
    said = sentence(capsys, "step 3: loss nan", "nonfinite-step-3-")
    left, = (tmp_path / "out").glob("nonfinite-step-3-*.npz")
    with np.load(left, allow_pickle=False) as batch:                     # nothing of it is a pickle
        assert {"ids", "tokens", "targets", "weights", "images", "pool_src"} <= set(batch)
        assert all(i in said for i in batch["ids"]) and len(batch["ids"]) and batch["tokens"].shape == (2, 256)
    assert sorted(logged(tmp_path / "out")) == [1, 2]                    # and the optimizer was not called: see test_parallel


def test_a_skipped_step_leaves_the_weights_as_they_were_and_is_counted_after_a_resume_too(records, tmp_path, nan_at_3):
    flags = [*RECIPE, *records, "--on-nonfinite", "skip", "--save-every", "1"]
    assert run(tmp_path / "a", *flags) == 0
    lines = logged(tmp_path / "a")
    assert [lines[n]["skipped_steps"] for n in range(1, 7)] == [0, 0, 1, 1, 1, 1] and lines[3]["loss"] is None and lines[4]["loss"] > 0
    before, skipped, after = (tensors_of(tmp_path / "a" / f"step-{n}") for n in (2, 3, 4))
    assert all(torch.equal(before[name], skipped[name]) for name in before) and before.keys() == skipped.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    out = back_to(tmp_path / "a", tmp_path / "b", 3)
    assert run(out, *flags, "--resume") == 0 and equal(out, tmp_path / "a")


# ---------------------------------------------------------------------------------------------------------------
# a file layer that fails


class Dead(BaseException):
    """What a process that is no more cannot do."""


class File(io.FileIO):
    """Unbuffered: what is written has left the process."""

    def write(self, content):
        content = content.encode() if isinstance(content, str) else bytes(content)
        try:
            self.disk.act("write", self.name)
        except BaseException:
            super().write(content[: len(content) // 2])                  # torn
            raise
        self.disk.dirty.add(os.fstat(self.fileno()).st_ino)
        return super().write(content)


class Disk:
    """Stands between this process and a folder while it is entered. `hook(n, what, path)` is called before the n-th operation that
    changes anything, from 0: it may raise, or take its time.

    What was not synced is not on the disk: `lose` takes it away, as an outage would.
    """

    def __init__(self, folder, hook=lambda n, what, path: None):
        self.folder, self.hook, self.count, self.lock = str(folder), hook, 0, threading.RLock()
        self.dirty, self.fresh = set(), {}           # inodes whose content, and {inode: of its folder} whose name is not synced

    def act(self, what, path):
        with self.lock:
            n, self.count = self.count, self.count + 1
        self.hook(n, what, str(path))

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        real = {name: getattr(os, name) for name in ("fsync", "mkdir", "rename", "unlink", "rmdir")}

        def changing(name, path, *args, **kwargs):
            if kwargs.get("dir_fd") is None and not str(path).startswith(self.folder):
                return real[name](path, *args, **kwargs)
            self.act(name, path)
            done = real[name](path, *args, **kwargs)
            if name in ("mkdir", "rename"):
                self.named(args[0] if name == "rename" else path)
            return done

        def fsync(handle):
            self.act("fsync", handle)
            real["fsync"](handle)
            inode = os.fstat(handle).st_ino
            self.dirty.discard(inode)
            self.fresh = {child: parent for child, parent in self.fresh.items() if parent != inode}

        def opened(path, mode="r", *args, **kwargs):
            if not str(path).startswith(self.folder) or not set(mode) & set("wax"):
                return plain(path, mode, *args, **kwargs)
            self.act("create", path)
            file = File(str(path), mode.replace("t", "").replace("b", ""))
            file.disk = self
            self.dirty.add(os.fstat(file.fileno()).st_ino)
            self.named(path)
            return file

        plain = builtins.open
        for name in real:
            self.patch.setattr(os, name, fsync if name == "fsync" else partial(changing, name))
        for place in (builtins, io):
            self.patch.setattr(place, "open", opened)
        return self

    def named(self, path):
        self.fresh[os.stat(path).st_ino] = os.stat(os.path.dirname(path)).st_ino

    def __exit__(self, *error):
        self.patch.undo()

    def lose(self):
        for path in sorted(Path(self.folder).rglob("*"), key=lambda p: -len(p.parts)):
            inode, n = path.stat().st_ino, path.stat().st_size
            if path.is_file() and inode in self.dirty:
                os.truncate(path, n // 2)
            if inode in self.fresh:
                path.unlink() if path.is_file() else path.rename(f"{path}.part") if path.suffix != ".part" else shutil.rmtree(path)


class Toy:
    """The smallest thing that can be saved: five numbers that learn, two that do not, a tokenizer."""

    def __init__(self):
        self.model = torch.nn.Linear(5, 2)
        self.model.bias.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([self.model.weight], fused=True)
        self.tokenizer = data.ByteTokenizer()

    def learn(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 5)).square().sum().backward()
        self.optimizer.step()
        return self

    def save(self, saver, step, wait=True):
        saver.begin(step, self.tokenizer)
        saver.save(step, self.model, self.optimizer, {"step": step})
        if wait:
            saver.wait()

    def now(self):
        return {name: t.clone() for name, t in checkpoint.tensors(self.model, self.optimizer).items()}

    def holds(self, folder):
        """Does a checkpoint restore these numbers, bit by bit, and no other names?"""
        fresh = Toy()
        checkpoint.restore(folder, fresh.model, fresh.optimizer)
        mine, theirs = self.now(), fresh.now()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def boundaries(out, before):
    """The operations on files that a save of step 2 takes; before: was step 1 saved?"""
    told = []
    saver, toy = checkpoint.Saver(out, keep=1), Toy().learn()
    if before:
        toy.save(saver, 1)
    with Disk(out, lambda n, what, path: told.append((what, Path(path).name))):
        toy.save(saver, 2)
    return told


def fails_at(k, what, out, before, way):
    """A save of step 2 that fails at its k-th operation on a file, `what` -> whether it was told."""
    saver, old = checkpoint.Saver(out, keep=1), Toy().learn()
    if before:
        old.save(saver, 1)
    new, error = copy.deepcopy(old).learn(), None

    def hook(n, *_):
        if n == k and way == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if n >= k and way == "killed":
            raise Dead

    with Disk(out, hook) as disk:
        try:
            new.save(saver, 2)
        except (Dead, checkpoint.SaveError) as e:
            error = e
    assert disk.count > k
    for power in (True, False) if way == "killed" else (True,):
        if not power:
            disk.lose()
        left = checkpoint.complete_steps(out)
        assert left or not before, "nothing is left"
        assert all((new if step == 2 else old).holds(out / f"step-{step}") for step in left), left
    if error and way == "full":
        said = str(error)
        assert "\n" not in said and "step 2" in said and "No space left" in said, said
        assert (f"step-{left[0]} is complete" if left else "there is none before it") in said and not list(out.glob("*.part")), said
    if not error:                                                        # an old one may stay, a folder was there already
        assert what[0] in ("unlink", "rmdir", "mkdir") and checkpoint.complete_steps(out)[0] == 2
    new.learn().save(saver if way == "full" else checkpoint.Saver(out, keep=1), 2)
    assert [path.name for path in out.iterdir()] == ["step-2"] and new.holds(out / "step-2")
    return error is not None


@pytest.mark.parametrize("way", ["killed", "full"])
@pytest.mark.parametrize(("before", "every"), [(True, 8), pytest.param(True, 1, marks=pytest.mark.slow),
                                               pytest.param(False, 4, marks=pytest.mark.slow)])
def test_a_save_that_fails_anywhere_costs_nothing_but_itself(tmp_path, way, before, every):
    """At each operation on a file (of the many that write tensors each `every`-th): the one before restores bit by bit, and the next
    save of the same step works and leaves nothing else; with --keep 1.

    killed: nothing is done from there on; then the power goes as well, and what was not synced is lost. full: that operation alone
    fails, which is told in one sentence that names what is left, and nothing lies in the way.
    """
    told, failed = boundaries(tmp_path / "count", before), 0
    chosen = [k for k, what in enumerate(told) if k % every == 0 or what != ("write", "__0_0.distcp")]
    assert len(chosen) >= 30 and {"create", "write", "fsync", "mkdir", "rename"} <= {what for what, _ in told}
    for k in chosen:
        try:
            failed += fails_at(k, told[k], tmp_path / str(k), before, way)
        except Exception as e:
            raise AssertionError(f"operation {k} of {len(told)}, {' '.join(told[k])}: {e}") from e
    assert failed >= 30


def test_a_full_disk_stops_the_run_with_one_sentence_and_resume_goes_on(whole, records, tmp_path, capsys):
    out = tmp_path / "out"

    def hook(n, what, path):
        if what == "write" and "step-4.part" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Disk(out, hook):
        assert run(out, *RECIPE, *records) == 1
    sentence(capsys, "the checkpoint of step 4 cannot be written", "No space left", "step-2 is complete")
    assert checkpoint.complete_steps(out) == [2] and not list(out.glob("*.part"))
    assert run(out, *RECIPE, *records, "--resume") == 0 and equal(out, whole)


# ---------------------------------------------------------------------------------------------------------------
# beside the step


def test_save_returns_before_anything_is_written_and_what_is_written_is_of_that_step(tmp_path):
    """... whatever happens to the weights meanwhile, in place."""
    saver, toy, go = checkpoint.Saver(tmp_path), Toy().learn(), threading.Event()
    toy.save(saver, 1)
    then = copy.deepcopy(toy)
    with Disk(tmp_path, lambda n, what, path: go.wait(60) if ".distcp" in path else None):
        toy.save(saver, 2, wait=False)
        assert not saver.done() and not list((tmp_path / "step-2.part").glob("*.distcp")) and checkpoint.complete_steps(tmp_path) == [1]
        toy.learn().learn()
        with torch.no_grad():
            toy.model.bias.add_(1)
        go.set()
        saver.wait()
    assert saver.done() and then.holds(tmp_path / "step-2") and not toy.holds(tmp_path / "step-2")


def test_the_step_does_not_wait_for_the_disk(whole, records, tmp_path, monkeypatch):
    """The tensors of step 2 are written only once the optimizer has taken step 4, before the next save begins."""
    out, taken, go, waited = tmp_path / "out", [], threading.Event(), []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (step(self, *a), taken.append(1), len(taken) == 4 and go.set()))
    with Disk(out, lambda n, what, path: waited.append(go.wait(60)) if what == "create" and "step-2.part/__0" in path else None):
        assert run(out, *RECIPE, *records) == 0
    assert waited == [True] and equal(out, whole) and checkpoint.complete_steps(out) == [6, 4, 2]


def test_the_newest_are_kept_and_one_being_written_is_not_removed(tmp_path):
    for keep, expected in ((1, [4]), (2, [4, 3]), (0, [4, 3, 2, 1])):
        out, go = tmp_path / str(keep), threading.Event()
        saver, toy = checkpoint.Saver(out, keep), Toy().learn()
        for step in (1, 2, 3):
            toy.save(saver, step)
        with Disk(out, lambda n, what, path, go=go: go.wait(60) if ".distcp" in path else None):
            toy.save(saver, 4, wait=False)
            assert checkpoint.complete_steps(out) == ([3, 2, 1][:keep] if keep else [3, 2, 1]) and (out / "step-4.part").is_dir()
            assert not saver.done()
            go.set()
            while not saver.done():
                time.sleep(0.01)
        assert checkpoint.complete_steps(out) == expected and {p.name for p in out.iterdir()} == {f"step-{n}" for n in expected}


# ---------------------------------------------------------------------------------------------------------------
# hostile


class Payload:
    """What makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def tampered(whole, out, **files):
    """A run whose newest checkpoint somebody else wrote: files by name, of the sizes that `complete` tells."""
    out = back_to(whole, out, 6)
    sizes = json.loads((out / "step-6" / "complete").read_text())
    for name, content in files.items():
        (out / "step-6" / name).write_bytes(content)
        sizes[name] = len(content)
    (out / "step-6" / "complete").write_text(json.dumps(sizes))
    assert checkpoint.complete_steps(out) == [6, 4, 2]
    return out


def contents(whole, change):
    """.metadata of the newest checkpoint, each entry changed."""
    metadata = pickle.loads((whole / "step-6" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        change(info)
    return pickle.dumps(metadata)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_in_place_of_a_checkpoints_contents_does_not_run(whole, records, tmp_path, capsys, protocol):
    out = tampered(whole, tmp_path / "out", **{".metadata": pickle.dumps(Payload(tmp_path / "ran"), protocol)})
    assert run(out, *RECIPE, *records, "--resume") == 2 and not (tmp_path / "ran").exists()
    sentence(capsys, "step-6", "mkdir")


@pytest.mark.parametrize("elsewhere", ["../x.distcp", "/etc/passwd", "a/b", "..", "."])
def test_a_checkpoint_names_no_file_outside_its_folder(whole, records, tmp_path, capsys, elsewhere):
    shutil.copy(whole / "step-6" / "__0_0.distcp", tmp_path / "x.distcp")
    out = tampered(whole, tmp_path / "out", **{".metadata": contents(whole, lambda info: setattr(info, "relative_path", elsewhere))})
    shutil.copy(whole / "step-6" / "__0_0.distcp", out / "x.distcp")
    assert run(out, *RECIPE, *records, "--resume") == 2
    sentence(capsys, "step-6", "outside the folder")


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "noise", "other tensor"])
def test_a_pickle_in_place_of_a_tensor_does_not_run(whole, records, tmp_path, capsys, form):
    hostile, tensor = Payload(tmp_path / "ran"), io.BytesIO()
    if form.endswith("torch"):
        torch.save(hostile, tensor, _use_new_zipfile_serialization=form == "torch")
    elif form == "other tensor":
        torch.save(torch.zeros(3), tensor)
    else:
        tensor.write(pickle.dumps(hostile) if form == "pickle" else random.Random(0).randbytes(1000))
    content = tensor.getvalue()
    said = contents(whole, lambda info: (setattr(info, "offset", 0), setattr(info, "length", len(content))))
    out = tampered(whole, tmp_path / "out", **{"__0_0.distcp": content, ".metadata": said})
    assert run(out, *RECIPE, *records, "--resume") == 2 and not (tmp_path / "ran").exists()
    sentence(capsys, "step-6", "not readable as a checkpoint")


def test_a_pickle_that_builds_known_things_wrongly_is_refused(whole, records, tmp_path, capsys):
    metadata = pickle.loads((whole / "step-6" / ".metadata").read_bytes())
    metadata.storage_data = ["no table"]
    for content in (pickle.dumps(metadata), pickle.dumps(torch.float32), pickle.dumps([]), b"", b"\x80\x04", b"garbage"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        out = tampered(whole, tmp_path / "out", **{".metadata": content})
        assert run(out, *RECIPE, *records, "--resume") == 2
        sentence(capsys, "step-6", "not readable as a checkpoint")


def wrong_states(state):
    """{what is wrong: the content of state.json}"""
    text, changed = json.dumps(state).encode(), lambda **c: json.dumps({**state, **c}).encode()
    missing = {f"without {key}": json.dumps({k: v for k, v in state.items() if k != key}).encode() for key in state}
    return {"cut": text[: len(text) // 2], "empty": b"", "zeros": bytes(len(text)), "list": b"[]", "nested": b"[" * 100_000,
            "not text": b"\xff\xfe{}", "another step": changed(step=4), "step": changed(step="6"), "model": changed(model={"n_layer": 1}),
            "absurd model": changed(model={**state["model"], "n_embd": -3}), "config": changed(config=[]), "loader": changed(loader={}),
            "planner": changed(loader={**state["loader"], "planner": 3}), "ids": changed(loader={**state["loader"], "ids": [[1]]}),
            "pool": changed(loader={**state["loader"], "planner": {**state["loader"]["planner"], "pool": 7}}), **missing}


def test_a_state_that_is_damaged_ends_in_one_sentence(whole, records, tmp_path, capsys):
    """... though the sizes of its files are right."""
    state = json.loads((whole / "step-6" / "state.json").read_text())
    for what, content in wrong_states(state).items():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        out = tampered(whole, tmp_path / "out", **{"state.json": content})
        assert run(out, *RECIPE, *records, "--resume") == 2, what
        sentence(capsys, "step-6")


@pytest.mark.parametrize("content", [b"[]", b"3", b"[" * 100_000, b'{"state.json": "many"}', b'{"": 1}', b"\xff", b'{"\\u0000": 3}'])
def test_a_list_of_files_that_is_none_is_no_checkpoint(whole, tmp_path, content):
    shutil.copytree(whole / "step-6", tmp_path / "step-6")
    (tmp_path / "step-6" / "complete").write_bytes(content)
    assert checkpoint.complete_steps(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------
# through the command line


def command(out, *flags, ranks=0, program="train.py", **options):
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *many, program, *flags, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=env, **options)


def ended(process, status=0):
    out, said = process.communicate(timeout=300)
    assert process.returncode == status, said
    return out, said


def until(process, happened):
    """Waits until something has happened, or the process has ended -> whether it has not."""
    end = time.monotonic() + 120
    while process.poll() is None and not happened():
        time.sleep(0.002)
        assert time.monotonic() < end
    return process.poll() is None


def lines_in(out):
    return (out / "log.jsonl").read_bytes().count(b"\n") if (out / "log.jsonl").exists() else 0


STEPS = 60


@pytest.fixture(scope="module")
def long(tmp_path_factory, records):
    """A longer run that nothing interrupted, by the command line."""
    out = tmp_path_factory.mktemp("runs") / "long"
    ended(command(out, *SMALL, *records, "--steps", str(STEPS), "--save-every", "4"))
    assert sorted(logged(out)) == [*range(1, STEPS + 1)]
    return out


@pytest.mark.slow
def test_resume_is_bitwise(records, long, tmp_path):
    """Killed at random moments, the middle of a save among them, with 0, 1 and 4 workers in turn, and resumed each time; at the end from
    the last checkpoint but one, on two ranks and on one."""
    rng, out, expected = random.Random(7), tmp_path / "killed", logged(long)
    flags = [*SMALL, *records, "--steps", str(STEPS), "--save-every", "4", "--keep", "3"]
    in_a_save, died, resumed = 0, 0, []
    for turn in itertools.count():
        process = command(out, *flags, "--workers", str((0, 1, 4)[turn % 3]), *["--resume"] * (turn > 0))
        if turn < 7:
            here = lines_in(out)
            more = here + rng.randint(6, 11)
            if until(process, lambda: lines_in(out) >= more):            # noqa: B023
                if turn % 2:
                    until(process, lambda: list(out.glob("*.part")))
                time.sleep(rng.random() * (0.05 if turn % 2 else 0.3))
            process.kill()
        _, said = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL) and "Traceback" not in said, said
        in_a_save += bool(list(out.glob("*.part")))
        died += process.returncode != 0
        resumed.append((checkpoint.complete_steps(out) or [0])[0])
        if process.returncode == 0:
            break
    assert died >= 5 and in_a_save >= 1 and len(set(resumed)) >= 4, (died, in_a_save, resumed)
    assert logged(out) == expected                                       # ids, losses, norms, what was dropped: every bit
    assert weights(out) == weights(long) and skipped(out) == skipped(long)
    newest, second = checkpoint.complete_steps(out)[:2]
    assert newest == STEPS
    for ranks in (2, 1):
        again = back_to(out, tmp_path / str(ranks), second)
        ended(command(again, *flags, "--resume", ranks=ranks if ranks > 1 else 0))
        assert sorted(logged(again)) == sorted(expected) and logged(again)[second] == expected[second]
        for n in range(second + 1, STEPS + 1):
            assert logged(again)[n]["ids"] == expected[n]["ids"]
            assert logged(again)[n]["loss"] == (pytest.approx(expected[n]["loss"], rel=1e-6) if ranks > 1 else expected[n]["loss"])


def ranks_of(launcher):
    """{rank: process id} of what torchrun started."""
    pids = map(int, subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True).stdout.split())
    environments = {pid: dict(line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line)
                    for pid in pids}
    return {env["RANK"]: pid for pid, env in environments.items() if "RANK" in env}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the process", "torchrun", "one rank"])
def test_sigterm_saves_and_ends_and_the_resumed_run_is_the_whole_one(records, long, tmp_path, to):
    """As Slurm and spot machines ask for it. Resumed on one process, whatever it was before."""
    flags, out = [*SMALL, *records, "--steps", str(STEPS), "--save-every", "0"], tmp_path / "out"
    process = command(out, *flags, ranks=0 if to == "the process" else 2)
    assert until(process, lambda: lines_in(out) >= 5)
    os.kill(ranks_of(process)["1"] if to == "one rank" else process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (143 if to == "the process" else 1), said               # torchrun has a status of its own
    assert to != "one rank" or "exitcode  : 143" in said, said
    step, = checkpoint.complete_steps(out)
    mine = [line for line in said.splitlines() if "train.py: " in line]
    assert len(mine) == 1 and f"SIGTERM: ended after step {step}" in mine[0], said
    assert sorted(logged(out)) == [*range(1, step + 1)] and step < STEPS and not list(out.glob("*.part"))
    ended(command(out, *flags, "--resume"))
    for n, line in logged(long).items():
        assert logged(out)[n]["ids"] == line["ids"]
        assert logged(out)[n]["loss"] == (line["loss"] if to == "the process" else pytest.approx(line["loss"], rel=1e-6)), n
    assert skipped(out) == skipped(long) and (to != "the process" or weights(out) == weights(long))


FULL = ("tensors of rank 1", 0), ("the last files of rank 0", 1), ("the folder", 0), ("the folder", 1)           # and who is late


@pytest.mark.slow
@pytest.mark.parametrize(("where", "slow"), FULL)
def test_a_disk_that_is_full_for_one_rank_ends_both_with_one_sentence(records, tmp_path, where, slow):
    (tmp_path / "program.py").write_text(f"""
import errno, os, time, checkpoint, train
rank, where, complete = int(os.environ["RANK"]), {where!r}, checkpoint.Saver.complete
slow = {slow}

def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

def third(self, step, part, state):
    full() if step == 4 and where == "the last files of rank 0" else complete(self, step, part, state)

checkpoint.Saver.complete = third
begin = checkpoint.Saver.begin
def begun(self, step, *args):
    if step == 4 and where == "tensors of rank 1" and rank == 1:
        checkpoint.dcp.filesystem._write_files_from_queue = full
    if step == 4 and where == "the folder" and rank == 0:
        checkpoint.Path.mkdir = full
    time.sleep(rank == slow)        # whichever is late, none makes the folder again
    begin(self, step, *args)
checkpoint.Saver.begin = begun
train.main()
""")
    out = tmp_path / "out"
    flags = [*SMALL, *records, "--steps", "8", "--save-every", "2"]
    began = time.monotonic()
    _, said = ended(command(out, *flags, ranks=2, program=str(tmp_path / "program.py")), 1)
    assert time.monotonic() - began < 100
    mine = [line for line in said.splitlines() if "train.py: " in line]
    assert len(mine) == 1 and "the checkpoint of step 4 cannot be written: " in mine[0] and "step-2 is complete" in mine[0], said
    assert "No space left" in mine[0] and checkpoint.complete_steps(out) == [2] and not list(out.glob("*.part"))


@pytest.mark.slow
def test_sigterm_to_all_processes_of_a_run_is_the_trainers_to_answer(records, tmp_path):
    """Slurm asks the decoding workers too; here they are what the trainer waits for."""
    (tmp_path / "program.py").write_text("""
import time, data, train
encode = data.encode
data.encode = lambda *a: (time.sleep(0.1), encode(*a))[1]
if __name__ == "__main__":
    train.main()
""")
    flags, out = [*SMALL, *records, "--steps", "200", "--save-every", "0", "--workers", "1"], tmp_path / "out"
    process = command(out, *flags, program=str(tmp_path / "program.py"), start_new_session=True)
    assert until(process, lambda: lines_in(out) >= 4)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = ended(process, 143)
    step, = checkpoint.complete_steps(out)
    assert f"SIGTERM: ended after step {step}" in said and "Traceback" not in said
