"""Tests the numbers of a step, the files of a run, and the messages when it ends."""

import json
import os
import re
import shlex
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

import train
from records.errors import DataError, RankDataError, RankError, RunError, Terminated, UserError
from records.mixture import Mixture
from records.reader import Records
from tests.records.samples import GOOD, QA, write
from tests.test_layout import ROOT
from tests.training.runs import SMALL, logged, run, sentence
from training import checkpoint, log
from training.checkpoint import Checkpoint
from training.config import parse
from training.loader import text_example
from training.log import read_log, read_steps


def test_of_a_step_that_is_logged_twice_the_later_line_counts_and_lines_of_others_do_not(tmp_path):
    steps = [{"step": step, "loss": loss, "lr": {}} for step, loss in ((1, 9), (2, 8), (2, 7))]
    others = [{"config": {}}, {"step": 2, "eval": {}}, {"step": "a", "loss": 1, "lr": {}}, [1]]
    lines = map(json.dumps, [*steps, *others])
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "lo')
    assert read_steps(read_log(tmp_path / "log.jsonl")) == [steps[0], steps[2]]


def test_fields_of_older_runs_have_the_names_of_today(tmp_path):
    older = {"masked_tokens": 1, "pairs": 2, "dropped": {}, "step": 3}
    path = write(tmp_path / "log.jsonl", older)
    assert read_log(path) == [
        {"unreadable_tokens": 1, "attention_pairs": 2, "skipped": {}, "step": 3}]


def test_the_page_of_questions_has_every_field_of_the_log(tmp_path):
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    table = page.partition("## The fields of the log")[2]
    stated = {"run": set(), "step": set(), "scores": set()}
    for names, lines in re.findall(r"^\| (`.*?`) \| ([a-z, ]+) \|", table, re.MULTILINE):
        for line in lines.split(", "):
            stated[line] |= set(re.findall(r"`(\w+)`", names))
    data = write(tmp_path / "a.jsonl", {"annotations": [QA]})
    assert run(tmp_path / "run", "--stage=1", "--tiny", "--device=cpu", "--init=toy",
               "--batch=1", "--steps=1", f"--data={data}", f"--eval={data}") == 0
    head, step, scores = read_log(tmp_path / "run" / "log.jsonl")
    assert stated == {"run": set(head), "step": set(step), "scores": set(scores)}


def test_a_step_of_small_weights_learns_as_any_other(tmp_path):
    found = []
    for weight in (1, 1e-9):
        path = write(tmp_path / f"{weight}.jsonl", {"id": "0", "weight": weight, "annotations": [
            {"type": "text", "weight": weight, "text": "as any other"}]})
        assert run(tmp_path / str(weight), *SMALL, f"--data={path}", "--steps=2") == 0
        found.append(logged(tmp_path / str(weight)))
    for step in (1, 2):
        for key in ("loss", "grad_norm"):
            assert found[1][step][key] == pytest.approx(found[0][step][key], rel=1e-4), key


ENDS = [
    (UserError("a mistake"), 2, "a mistake"),
    (DataError("r.jsonl:1: no record"), 2, "r.jsonl:1: no record"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    (Terminated(), 143,
     "SIGTERM: ended; nothing was written; start again with: python train.py --init 'a b' "
     "--overwrite"),
    (KeyboardInterrupt(), 130,
     "interrupted; nothing was written; start again with: python train.py --init 'a b' "
     "--overwrite"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 1,
     "out of memory; use a smaller --micro-batch or --data.max_tokens, or a larger --cp; python -m "
     "tools.memory computes the memory of a step: DefaultCPUAllocator: can't allocate memory: "
     "you tried to allocate 9 bytes"),
    (RuntimeError("[gloo/pair.cc:534] Connection closed by peer\nmore"), 1,
     "another process has ended or hangs: [gloo/pair.cc:534] Connection closed by peer"),
]


@pytest.mark.parametrize(("error", "status", "words"), ENDS, ids=lambda x: type(x).__name__)
def test_an_error_that_ends_a_run_is_a_sentence_and_a_status(tmp_path, monkeypatch, capsys, error,
                                                             status, words):
    def start_run(*_):
        raise error

    monkeypatch.setattr(train, "start_run", start_run)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--init", "a b", "--overwrite"])
    assert run(tmp_path / "out", *SMALL) == status
    assert capsys.readouterr().err == f"train.py: {words}\n"


GO_ON = [  # processes, processes per node, the words after python -> the command
    (1, 1, "train.py --overwrite", "python train.py --resume"),
    (1, 1, "train.py --resume", "python train.py --resume"),
    (1, 1, "train.py --resume-anyway", "python train.py --resume-anyway"),
    (1, 1, "-m examples.preferences", "python -m examples.preferences --resume"),
    (2, 2, "-u train.py --cp=2",
     "torchrun --standalone --nproc-per-node 2 train.py --cp=2 --resume"),
    (16, 8, "-u -m examples.preferences",
     "torchrun on every node as before, with -m examples.preferences --resume"),
]


@pytest.mark.parametrize(("world", "local", "words", "command"), GO_ON)
def test_the_command_that_continues_a_run_is_for_as_many_processes(
        tmp_path, monkeypatch, world, local, words, command):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split()])
    started = SimpleNamespace(out=tmp_path)
    (tmp_path / "step-2.part").mkdir()
    assert checkpoint.how_to_go_on(started) == f"nothing was saved; start again with: {command}"
    (tmp_path / "model").mkdir()
    weights = f"the trained weights are in {tmp_path}/model, but were not evaluated"
    assert checkpoint.how_to_go_on(started) == weights
    (tmp_path / "step-2").mkdir()
    assert checkpoint.how_to_go_on(started) == f"continue with: {command}"


def test_a_run_that_is_stopped_before_its_first_step_says_how_to_start_again(
        tmp_path, monkeypatch, capsys):
    flags = [*SMALL, "--steps=1", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *flags, "--overwrite"])
    with monkeypatch.context() as patch:
        patch.setattr(train, "place", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert run(tmp_path, *flags, "--overwrite") == 143
    text = sentence(capsys, "nothing was saved; start again with: ")
    _, program, *words = shlex.split(text.split("start again with: ")[1])
    assert program == "train.py"
    assert run(tmp_path, *words) == 0
    assert sorted(logged(tmp_path)) == [1]


def test_what_one_rank_has_met_is_told_by_it_and_what_all_have_met_once(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(log.os, "_exit", lambda status: None)
    for error, local_rank, told in ((RunError("nan"), "0", "\ntrain.py: nan\n"),
                                    (RunError("nan"), "1", ""),
                                    (RankError("full"), "1", "\ntrain.py: rank 3: full\n"),
                                    (RankDataError("\x1b[2J: changed"), "1",
                                     "\ntrain.py: rank 3: \\x1b[2J: changed\n")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit):
            log.end(1, error)
        assert capsys.readouterr().err == told


def test_a_line_of_the_log_has_the_share_of_the_batch_that_tokens_and_crops_fill():
    config = parse(["--stage=1", "--tiny", "--batch=4", "--data.max_tokens=100",
                    "--pack_crops=10"])[1]
    text = text_example(np.arange(30), 1)
    image = text_example(np.arange(50), 1)
    image.image_id = np.zeros(8, np.int32)
    counts = log.count_rows([[text, image], [text]])
    found = [counts[name] for name in ("tokens", "crops", "examples", "packs")]
    assert found == [110, 8, 3, 2]
    stats = SimpleNamespace(counts=counts, loss=1.0, total_weight=1.0, nll_by_source={},
                            unreadable={"a": 1})
    plan = SimpleNamespace(skipped={}, hash="")
    line = log.make_line(config, 1, plan, stats, {"llm": 3.0, "vit": 4.0}, {})
    assert (line["fill_tokens"], line["fill_crops"]) == (110 / 400, 8 / 40)
    assert line["grad_norm"] == 5.0


def test_a_run_says_how_many_epochs_of_each_file_it_takes(tmp_path):
    sources = []
    for name, n in (("a.jsonl", 10), ("b.jsonl", 50)):
        sources.append(Records(write(tmp_path / name, *[GOOD] * n)))
    config = SimpleNamespace(steps=20, batch=3)
    loader = SimpleNamespace(mixture=Mixture(sources, [1, 3], 0), examples_per_step=10)
    run = SimpleNamespace(config=config, loader=loader, out=tmp_path, resume_from=Checkpoint())
    sentence = ("data: 60 packs, about 200 examples in 20 steps, "
                "epochs of a.jsonl: 5, epochs of b.jsonl: 3")
    assert log.describe_length(run) == sentence
    # after --resume it says the same, although the next step has another number of examples
    steps = [{"step": step, "loss": 1, "lr": {}, "examples": n} for step, n in ((1, 10), (2, 7))]
    write(tmp_path / "log.jsonl", *steps)
    loader.examples_per_step = 7
    run.resume_from = Checkpoint(step=2)
    assert log.describe_length(run) == sentence
