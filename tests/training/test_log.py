"""The numbers of a step, the files of a run, and how it ends."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import data
import packing
import train
from parallel import Ranks
from records.errors import DataError
from tests.training.runs import SMALL, logged, run
from text.tokenizer import ByteTokenizer
from training import config, log
from training.config import RankError, RunError, UserError
from training.log import RunLog, StepStats, read_log, read_steps

TOKENIZER = ByteTokenizer()
CONFIG = data.DataConfig(max_tokens=64)
STEP = {"step": 1, "loss": 2.5, "lr": {"llm": 1e-3}, "seconds": 0.1}


# --------------------------------------------------------------------------------------------------
# the numbers of a step


def row_of(source, *n_answers):
    """A row with one example, whose branches have a question of 3 ids and so long an answer."""
    branches = [data.Branch([([5] * 3, 0), ([6] * n, 1)], weight=0.5) for n in n_answers]
    example = data.layout([TOKENIZER.bos], [False], branches, CONFIG)
    example.source = source
    return [example]


def add(stats, rows, nll=1.0):
    batch = packing.collate(rows, CONFIG.max_tokens, CONFIG.vision)
    stats.add(rows, batch, torch.full(batch.tokens.shape, nll))


def test_a_micro_batch_is_read_once_the_next_has_begun():
    """Else a GPU would wait for its host."""
    stats = StepStats(["a", "b"], cp=1)
    counted = []
    for rows in [[row_of("a", 4)], [row_of("b", 2, 3)], [row_of("a", 7)]]:
        add(stats, rows)
        counted.append(stats.counts["loss_tokens"])
    assert counted == [0, 4, 9]
    stats.all_reduce()
    assert stats.counts["loss_tokens"] == 4 + 5 + 7
    assert stats.counts["branches"] == 4
    assert stats.counts["examples"] == stats.counts["packs"] == 3


# --------------------------------------------------------------------------------------------------
# files


def step(n, **more):
    return {**STEP, "step": n, **more}


def masked(*indices):
    return [{"index": i, "id": f"r:{i}", "where": f"r.jsonl:{i}", "reason": "damaged image: x"}
            for i in indices]


def open_log(out, resumed_from=0, rank=0):
    of_run = SimpleNamespace(out=out, ranks=Ranks(rank=rank),
                             resume_from=SimpleNamespace(step=resumed_from))
    return RunLog(of_run, {"config": {}})


def test_a_resumed_log_continues_after_the_last_whole_line(tmp_path):
    """It repeats no skip that is there. Only the first rank writes, and of a step that is logged
    twice the later line counts."""
    first = open_log(tmp_path)
    first.step(step(1), masked(7, 4))
    first.step(step(2, loss=1.5), masked(5))
    first.write({"step": 2, "eval": {"f1": 0.5}})
    first.file.write('{"step": 3, "lo')
    first.file.close()
    with open(tmp_path / "skips.jsonl", "a") as skips:
        skips.write('{"index": 6, "rea')
    resumed = open_log(tmp_path, 2)
    resumed.step(step(2, loss=1.4), masked(5, 6))
    open_log(tmp_path, 2, rank=1).step(step(9), masked(9))
    lines = read_log(tmp_path / "log.jsonl")
    assert lines == [{"config": {}}, step(1), step(2, loss=1.5),
                     {"step": 2, "eval": {"f1": 0.5}}, step(2, loss=1.4)]
    assert read_steps(lines) == [step(1), step(2, loss=1.4)]
    assert json.loads((tmp_path / "config.json").read_text()) == {"config": {}}
    skips = read_log(tmp_path / "skips.jsonl")
    assert [(skip["step"], skip["index"]) for skip in skips] == [(1, 4), (1, 7), (2, 5), (2, 6)]


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


# --------------------------------------------------------------------------------------------------
# ends

ENDS = [
    (UserError("a mistake"), 2, "a mistake"),
    (DataError("r.jsonl:1: no record"), 2, "r.jsonl:1: no record"),
    (RunError("step 3: loss nan"), 1, "step 3: loss nan"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    (config.Terminated("SIGTERM: ended after step 3"), 143, "SIGTERM: ended after step 3"),
    (KeyboardInterrupt(), 130, "interrupted; there is no checkpoint yet"),
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
    assert run(tmp_path / "out", *SMALL) == status
    assert capsys.readouterr().err == f"train.py: {words}\n"


def test_a_mistake_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    def start_run(*_):
        raise RuntimeError("shapes")

    monkeypatch.setattr(train, "start_run", start_run)
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", *SMALL)


def test_an_interrupted_run_is_told_how_to_go_on(tmp_path, monkeypatch):
    (tmp_path / "step-4").mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py", "--init", "a b", "--overwrite"])
    assert log.how_to_resume(tmp_path) == (
        "continue with: python train.py --else-init 'a b' --resume")


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
