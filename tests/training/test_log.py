"""The numbers of a step, the files of a run, and how it ends."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import train
from records.errors import DataError
from tests.training.runs import SMALL, logged, run
from training import config, log
from training.config import RankError, RunError, UserError
from training.log import read_log, read_steps


def test_of_a_step_that_is_logged_twice_the_later_line_counts(tmp_path):
    steps = [{"step": step, "loss": loss, "lr": {}} for step, loss in ((1, 9), (2, 8), (2, 7))]
    lines = map(json.dumps, [{"config": {}}, *steps, {"step": 2, "eval": {}}])
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "lo')
    assert read_steps(read_log(tmp_path / "log.jsonl")) == [steps[0], steps[2]]


def test_a_rank_without_pairs_logs_the_margins_of_the_others(monkeypatch):
    others = {"preferences": 2, "margin": 1.5, "preferred": 1}
    stats = log.StepStats(["a"], 1)
    monkeypatch.setattr(log, "all_reduce_sums", lambda numbers: {
        name: type(n)(n + others.get(name, 0)) for name, n in numbers.items()})
    stats.all_reduce()
    assert stats.preferences == {"preferences": 2, "margin": 0.75, "preferred": 0.5}


def test_a_step_of_small_weights_learns_as_any_other(tmp_path):
    found = []
    for weight in (1, 1e-9):
        path = tmp_path / f"{weight}.jsonl"
        path.write_text(json.dumps({"id": "0", "weight": weight, "annotations": [
            {"type": "text", "weight": weight, "text": "as any other"}]}))
        assert run(tmp_path / str(weight), *SMALL, "--data", str(path), "--steps", "2") == 0
        found.append(logged(tmp_path / str(weight)))
    for step in (1, 2):
        for key in ("loss", "grad_norm"):
            assert found[1][step][key] == pytest.approx(found[0][step][key], rel=1e-4), key


def test_tensorboard_has_the_numbers_of_the_log_by_their_path():
    found = {}
    board = SimpleNamespace(add_scalar=lambda name, *numbers: found.update({name: numbers}))
    line = {"loss": 0.5, "lr": {"vit": 1e-6}, "ids": "ab", "eval": {"a.jsonl": {"point_f1": 1.0}}}
    log.add_scalars(board, line, 3)
    assert found == {"loss": (0.5, 3), "lr/vit": (1e-6, 3), "eval/a.jsonl/point_f1": (1.0, 3)}


def test_a_run_with_tensorboard_writes_it_beside_its_log(tmp_path, records):
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    assert run(out, *SMALL, *records, "--steps", "1", "--save-every", "0", "--tensorboard") == 0
    assert list((out / "tensorboard").iterdir())
    assert sorted(logged(out)) == [1]


ENDS = [
    (UserError("a mistake"), 2, "a mistake"),
    (DataError("r.jsonl:1: no record"), 2, "r.jsonl:1: no record"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    (config.Terminated(3), 143,
     "SIGTERM: ended after step 3; continue with: python train.py --init 'a b' --resume"),
    (KeyboardInterrupt(), 130,
     "interrupted; continue with: python train.py --init 'a b' --resume"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 1,
     "out of memory; use a smaller --micro-batch or --data.max_tokens, or a larger --cp; python -m "
     "tools.memory counts what a step takes: DefaultCPUAllocator: can't allocate memory: you tried "
     "to allocate 9 bytes"),
    (RuntimeError("[gloo/pair.cc:534] Connection closed by peer\nmore"), 1,
     "another process has ended or hangs: [gloo/pair.cc:534] Connection closed by peer"),
]


@pytest.mark.parametrize(("error", "status", "words"), ENDS, ids=lambda x: type(x).__name__)
def test_an_error_that_ends_a_run_is_a_sentence_and_a_status(tmp_path, monkeypatch, capsys, error,
                                                             status, words):
    def start_run(*_):
        raise error

    monkeypatch.setattr(train, "start_run", start_run)
    monkeypatch.setattr(sys, "argv", ["train.py", "--init", "a b", "--overwrite"])
    assert run(tmp_path / "out", *SMALL) == status
    assert capsys.readouterr().err == f"train.py: {words}\n"


def test_what_one_rank_has_met_is_told_by_it_and_what_all_have_met_once(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(log.os, "_exit", lambda status: None)
    for error, local_rank, told in ((RunError("nan"), "0", "\ntrain.py: nan\n"),
                                    (RunError("nan"), "1", ""),
                                    (RankError("full"), "1", "\ntrain.py: rank 3: full\n")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit):
            log.end(1, error)
        assert capsys.readouterr().err == told
