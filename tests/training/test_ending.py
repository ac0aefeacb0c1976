"""How a run ends: one sentence, an exit status, and the name of a rank that does not answer."""

import os
import time
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from parallel import Ranks
from records.errors import DataError
from training import ending as endings
from training.config import UserError
from training.ending import Ending, Terminated, is_lost_peer, silent_ranks
from training.planner import RunError


@pytest.fixture
def ends(monkeypatch, capsys):
    """ends(error, ranks) -> exit status and stderr of a run with this error."""
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))

    def end(error, ranks=None, out=None):
        ending = Ending()
        ending.ranks = ranks or Ranks()
        ending.out = out
        with pytest.raises(SystemExit) as ended, ending:
            raise error
        return ended.value.code, capsys.readouterr().err.strip()

    return end


STATUSES = [
    (UserError("a mistake"), 2, "a mistake"),
    (DataError("r.jsonl:1: E01 no record"), 2, "r.jsonl:1: E01 no record"),
    (RunError("step 3: loss nan"), 1, "step 3: loss nan"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    (Terminated("SIGTERM: ended after step 3"), 143, "SIGTERM: ended after step 3"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried much"), 1,
     "CUDA out of memory; python -m tools.memory counts what a step takes"),
]


@pytest.mark.parametrize(("error", "status", "words"), STATUSES, ids=lambda x: type(x).__name__)
def test_an_error_that_ends_a_run_is_a_sentence_and_a_status(ends, error, status, words):
    assert ends(error) == (status, f"train.py: {words}")


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("timed out"), AssertionError()])
def test_a_mistake_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)), Ending():
        raise error


def test_of_an_error_on_all_ranks_one_process_of_each_machine_tells(ends, monkeypatch):
    error = RunError("step 3: loss nan", on_all_ranks=True)
    for local_rank, stderr in (("0", "train.py: step 3: loss nan"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert ends(error, Ranks(rank=3, world=4)) == (1, stderr)


def test_an_error_on_one_rank_is_told_with_its_number(ends, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    expected = (1, "train.py: rank 3: the largest batch does not fit")
    assert ends(RunError("the largest batch does not fit"), Ranks(rank=3, world=4)) == expected


# --------------------------------------------------------------------------------------------------
# ranks that do not answer

LOST = [
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242",
    "Read error: Connection reset by peer",
    "Timed out waiting 20000ms for recv operation to complete",
    "NCCL communicator was aborted on rank 1",
]


def test_errors_of_an_exchange_are_told_from_our_own():
    assert all(is_lost_peer(RuntimeError(text)) for text in LOST)
    assert is_lost_peer(dist.DistNetworkError("The client socket has failed"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(ValueError("timed out"))


@pytest.fixture
def store(monkeypatch):
    """The launcher's store."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=30))
    monkeypatch.setattr(endings, "ROLL_CALL_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_a_roll_call_finds_the_ranks_that_do_not_answer(store, monkeypatch):
    for rank in (0, 2):
        store.set(f"roll_call/0/{rank}", "here")
    assert silent_ranks(Ranks(rank=3, world=5)) == [1, 4]
    # the answers were to the roll call of the first attempt
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert silent_ranks(Ranks(rank=3, world=5)) == [0, 1, 2, 4]


SPEAKERS = [                         # rank, those that are silent, the sentence
    (0, [2], "rank 2 of 3 has ended or hangs; all end"),
    (1, [2], ""),
    (1, [0], "rank 0 of 3 has ended or hangs; all end"),
    (1, [0, 2], "rank 0, 2 of 3 has ended or hangs; all end"),
    (0, [], "the ranks have lost each other; all end"),
    (0, None, "the launcher does not answer; all end"),
    (1, None, ""),
]


@pytest.mark.parametrize(("rank", "silent", "sentence"), SPEAKERS)
def test_the_first_rank_that_answers_names_those_that_do_not(ends, monkeypatch, rank, silent,
                                                             sentence):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(endings, "silent_ranks", lambda ranks: silent)
    error = RuntimeError("Connection closed by peer")
    status, stderr = ends(error, Ranks(rank=rank, world=3))
    assert status == 1
    expected = f"train.py: {sentence} (Connection closed by peer)" if sentence else ""
    assert stderr == expected


def blocked_child():
    time.sleep(600)


def test_an_error_ends_the_processes_that_the_run_started(ends):
    """A planner that is blocked on a full pipe would be waited for at the exit."""
    process = get_context("spawn").Process(target=blocked_child, daemon=True)
    process.start()
    assert ends(RunError("step 3: loss nan"))[0] == 1
    process.join(30)
    assert process.exitcode is not None
