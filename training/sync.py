"""What the ranks tell each other after a step, and what all of them must be able to do."""

from collections import Counter
from typing import NamedTuple

import parallel
from training.checkpoint import SaveError
from training.planner import RunError


class Synced(NamedTuple):
    """What all ranks know after a step."""
    newly_masked: list               # records masked in it
    masked: Counter                  # of all masked so far, {"source: code": n}
    stop: bool                       # one of the ranks got SIGTERM


def sync_ranks(step, loader, saver, stop_requested, ranks):
    """-> Synced; RunError on all ranks if the checkpoint being written fails on one of them."""
    mine = (loader.newly_masked, loader.masked.counts) if ranks.cp_rank == 0 else ([], Counter())
    of_ranks = parallel.all_gather((error_of(saver.done), bool(stop_requested), *mine))
    loader.newly_masked = []
    newly_masked, masked = [], Counter()
    for failure, _, new, counts in of_ranks:
        if failure:
            error_of(saver.wait)     # whichever rank failed, the first removes the unfinished files
            raise RunError(f"step {step}: {failure}", on_all_ranks=True)
        newly_masked += new
        masked += counts
    return Synced(newly_masked, masked, any(stop for _, stop, *_ in of_ranks))


def error_of(act):
    """Why act() cannot write a checkpoint; "" if it can."""
    try:
        act()
    except SaveError as e:
        return str(e)
    return ""


def all_ranks_or_none(act):
    """Does what every rank must be able to do; if one of them cannot, all of them end."""
    failures = [failure for failure in parallel.all_gather(error_of(act)) if failure]
    if failures:
        raise RunError(failures[0], on_all_ranks=True)
