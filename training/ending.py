"""How a run ends when it does not end well: one sentence on stderr and an exit status.

    0 success | 1 the run failed | 2 a user's mistake | 130 Ctrl-C | 143 SIGTERM, once saved
"""

import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import parallel
from records.errors import DataError, Unreadable
from training.checkpoint import LoadError, SaveError, newest_step
from training.config import UserError
from training.loader import first_line
from training.planner import RunError, kill_children

LOST_PEER = r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|NCCL|gloo"
ROLL_CALL_S = 5


class Terminated(Exception):
    """Ends the command with status 143 and one sentence, the same on every rank."""


class Ending:
    """`with Ending() as ending:` turns the errors that end a run into a sentence and a status.

    Other errors, which are our mistakes, keep their traceback. ranks, loader and out are filled in
    as the run begins.
    """

    def __init__(self):
        self.ranks, self.loader, self.out = parallel.Ranks(), None, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            kill_children()
        if self.loader and isinstance(error, RuntimeError):
            error = self.loader.worker_error(error)
        if isinstance(error, (UserError, DataError, LoadError)):
            self.exit(2, error, alone=getattr(error, "on_one_rank", False))
        if isinstance(error, (RunError, Unreadable, SaveError, OSError)):
            self.exit(1, error, alone=not getattr(error, "on_all_ranks", False))
        if isinstance(error, Terminated):
            self.exit(143, error)
        if isinstance(error, KeyboardInterrupt):
            step = newest_step(self.out) if self.out else None
            saved = f"; --resume continues from step {step}" if step else ""
            self.exit(130, f"interrupted{saved}")
        if isinstance(error, torch.OutOfMemoryError):
            self.exit(1, f"{first_line(error).split('.')[0]}; python -m tools.memory counts what a "
                         "step takes", alone=True)
        if dist.is_initialized() and is_lost_peer(error):
            self.end_without_peers(error)

    def exit(self, status, sentence, alone=False):
        """alone: only this rank knows; else the first process of each machine says it."""
        if alone and self.ranks.world > 1:
            sentence = f"rank {self.ranks.rank}: {sentence}"
        if alone or os.environ.get("LOCAL_RANK", "0") == "0":
            gap = "\n" if self.ranks.world > 1 else ""
            print(f"{gap}train.py: {sentence}", file=sys.stderr, flush=True)
        if self.ranks.world > 1:
            os._exit(status)         # leaving the process group would wait for the others
        raise SystemExit(status) from None

    def end_without_peers(self, error):
        """Another rank has ended or hangs. torchrun ends all others of one that has ended and names
        it; of one that hangs, the first of those that answer a roll call says which it is."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        silent = silent_ranks(self.ranks)
        if silent is None:
            who = "the launcher does not answer"
        elif silent:
            who = f"rank {', '.join(map(str, silent))} of {self.ranks.world} has ended or hangs"
        else:
            who = "the ranks have lost each other"
        answering = set(range(self.ranks.world)) - set(silent or ())
        if self.ranks.rank == min(answering, default=0):
            sentence = f"{who}; all end ({first_line(error)[:150]})"
            print(f"\ntrain.py: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)


def is_lost_peer(error):
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(re.search(LOST_PEER, str(error))))


def silent_ranks(ranks):
    """The ranks that do not answer a roll call over the launcher's store; None if that is gone."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                              is_master=False, timeout=timedelta(seconds=30))
        store.set(f"roll_call/{attempt}/{ranks.rank}", "here")
        time.sleep(ROLL_CALL_S)
        return [r for r in range(ranks.world) if not store.check([f"roll_call/{attempt}/{r}"])]
    except RuntimeError:
        return None
