"""Which packs form a step, planned ahead (paper: packing; docs/molmo2.md 8).

    index 0, 1, 2 ..  --measure-->  (tokens, crops)  --Planner-->  packs  -->  StepPlan

A step is a function of seed and number alone. A record that cannot be used is skipped here, and
counted; one that turns out bad while decoding keeps its place (training/loader.py).
"""

import hashlib
import json
import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from multiprocessing import active_children, get_context, parent_process

import numpy as np

import data
import packing
from packing import Item
from records.errors import DataError, Unreadable, warn
from training.sources import check_fingerprint

MAX_CONSECUTIVE = 100       # records of a source that cannot be used, one after the other


class RunError(Exception):
    """Ends the command with status 1 and one sentence: the run itself failed.

    on_all_ranks: every rank has found it, so that one of them may say it.
    """

    def __init__(self, sentence, on_all_ranks=False):
        super().__init__(sentence)
        self.on_all_ranks = on_all_ranks


class BadRecords:
    """Counts records that cannot be used and ends a run that has too many of them.

    One instance counts what is skipped while planning, another what is masked after decoding.
    """

    def __init__(self, done, error, max_share=None):
        self.done = done             # "skipped" or "masked", for messages
        self.error, self.max_share = error, max_share
        self.counts = Counter()      # {"source: kind": n}, see records.errors.Unreadable
        self.tried = Counter()       # {source: n}
        self.consecutive = Counter() # {source: n}, since its last good one
        self.warned = set()

    def good(self, source):
        self.tried[source] += 1
        self.consecutive[source] = 0

    def bad(self, source, where, reason):
        """Counts it and says so once; `error` in a sentence if there are too many."""
        self.tried[source] += 1
        self.consecutive[source] += 1
        self.counts[f"{source}: {kind_of(reason)}"] += 1
        if where not in self.warned:
            warn(f"{where}: {reason}; {self.done}")
        self.warned.add(where)
        if self.consecutive[source] >= MAX_CONSECUTIVE:
            raise self.error(f"of the last {MAX_CONSECUTIVE} records of {source} none could be "
                             f"used; the last: {where}: {reason}")
        lost = sum(n for key, n in self.counts.items() if key.rpartition(": ")[0] == source)
        tried = self.tried[source]
        if self.max_share is not None and tried >= 1000 and lost > self.max_share * tried:
            raise self.error(
                f"{lost} of {tried} records of {source} could not be used, more than --max_skip="
                f"{self.max_share}; the last: {where}: {reason}; repair or take out what "
                "'python -m tools.check FILE --decode' lists, or allow more")

    def state(self):
        return {"counts": dict(self.counts), "tried": dict(self.tried),
                "consecutive": dict(self.consecutive)}

    def restore(self, state):
        self.counts, self.tried = Counter(state["counts"]), Counter(state["tried"])
        self.consecutive = Counter(state["consecutive"])


def kind_of(reason):
    """The kind of an Unreadable, given as text."""
    return reason.partition(":")[0]


# --------------------------------------------------------------------------------------------------
# planning


@dataclass(frozen=True)
class StepPlan:
    packs: list                      # of packs, each a list of packing.Item
    ids: list                        # of str, the records of the packs in their order
    longest_wait: int                # packs that one of its examples saw go by before it
    skipped: dict                    # records skipped while planning so far, {"source: kind": n}
    state: dict                      # of the planner after this step: where a resume goes on

    @property
    def hash(self):
        """Of the record ids, for the log: 16 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measured:
    id: str
    where: str                       # "file:line"
    size: tuple = None               # (tokens, crops)
    reason: str = ""                 # why it is skipped, an Unreadable as text


def record_at(mixture, index):
    """-> the record at an index of the mixture, and its epoch."""
    source, i, epoch = mixture[index]
    return mixture.sources[source][i], epoch


def source_at(mixture, index):
    return mixture.sources[mixture[index][0]].name


def measure(mixture, tokenizer, config, index):
    """-> Measured, from text and headers."""
    source, i, _ = mixture[index]
    try:
        record, epoch = record_at(mixture, index)
    except Unreadable as e:
        where = mixture.sources[source].where(i)
        return Measured(where, where, reason=str(e))
    try:
        size = data.size(record, tokenizer, config.data, config.seed, epoch)
        reason = skip_reason(record, size, config)
    except Unreadable as e:
        return Measured(record["id"], record["where"], reason=str(e))
    return Measured(record["id"], record["where"], size, reason)


def skip_reason(record, size, config):
    """Why a record of (tokens, crops) is skipped, "kind: sentence"; "" if it is used."""
    tokens, crops = size
    if size == (0, 0):               # nothing with loss fits a row
        with_loss = [a for a in record["annotations"] if has_loss(a, config)]
        too_many = [len(a.get("points", ())) > config.data.max_points and a["type"] != "track"
                    for a in with_loss]
        if with_loss and all(too_many):
            return f"too many points: each annotation has more than {config.data.max_points}"
        if with_loss:
            return ("too long: none of its annotations fits a row, or its tracks have no point on "
                    "a frame")
        return "nothing to learn: none of its annotations has loss"
    if tokens > config.data.max_tokens or crops > config.pack_crops:
        return (f"too long: {tokens} tokens and {crops} crops do not fit a row of "
                f"{config.data.max_tokens} and {config.pack_crops}")
    return ""


def has_loss(a, config):
    if a.get("style") == "transcript" and not config.data.n_transcripts:
        return False
    return bool(a.get("weight", 1)) and any(turn.get("weight", 1) for turn in a.get("turns", [a]))


class StepPlanner:
    """Iterates over StepPlans, without end. measure_index(index) -> Measured: if not as here."""

    def __init__(self, mixture, tokenizer, config, measure_index=None):
        self.mixture, self.config = mixture, config
        self.measure = measure_index or partial(measure, mixture, tokenizer, config)
        self.skipped = BadRecords("skipped", DataError, config.max_skip)
        self.ids = {}                # of the examples in the pool
        self.planner = packing.Planner(self.size, config.data.max_tokens, config.pack_crops,
                                       config.pool_size)

    def size(self, index):
        found, source = self.measure(index), source_at(self.mixture, index)
        if found.reason:
            self.skipped.bad(source, found.where, found.reason)
            return None
        self.skipped.good(source)
        self.ids[index] = found.id
        return found.size

    def __iter__(self):
        return self

    def __next__(self):
        packs, ids, longest_wait = [], [], 0
        for _ in range(self.config.batch):
            next(self.planner)
            pack = self.planner.last
            packs.append(pack)
            ids += [self.ids.pop(e.index) for e in pack]
            waits = [self.planner.n_packs - 1 - e.arrived for e in pack]
            longest_wait = max(longest_wait, *waits)
        return StepPlan(packs, ids, longest_wait, dict(self.skipped.counts), self.state())

    def state(self):
        return {"planner": self.planner.state(), "ids": list(self.ids.items()),
                "skipped": self.skipped.state()}

    def restore(self, state):
        if "plan_file" in state:
            raise DataError("--plan: the run began with a plan; go on with it")
        self.planner.restore(state["planner"])
        self.ids = dict(map(tuple, state["ids"]))
        self.skipped.restore(state["skipped"])


class PlanFile:
    """StepPlans from a file that tools.plan wrote, in place of a StepPlanner: nothing is measured.

    DataError if it was made for other data, another tokenizer or config (`made_for`), or is short.
    """
    COLUMNS = ("index", "tokens", "crops", "arrived")

    def __init__(self, path, made_for, config):
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in self.COLUMNS}
                self.ends, self.skipped_in = file["ends"], file["skipped_in"]      # packs
                self.starts = np.array([0, *self.ends])
                self.skipped_why = file["skipped_why"]
                theirs = json.loads(bytes(file["made_for"]))
                self.ids = bytes(file["ids"]).decode().split("\0")
            lengths = {len(self.ids), int(self.ends[-1]), *map(len, columns.values())}
            if len(lengths) > 1 or not isinstance(theirs, dict):
                raise ValueError(f"its columns have the lengths {sorted(lengths)}")
        except Exception as e:           # NumPy and zipfile raise many kinds for a damaged file
            raise DataError(f"--plan {path}: not a plan that tools.plan wrote: {e}") from None
        check_fingerprint(f"--plan {path}", theirs, made_for)
        wanted = config.steps * config.batch
        if len(self.ends) < wanted:
            raise DataError(f"--plan {path}: holds {len(self.ends)} packs, and the run asks for "
                            f"{wanted} (--steps times --batch)")
        rows = zip(*(columns[name].tolist() for name in self.COLUMNS), strict=True)
        self.items = [Item(*row) for row in rows]
        self.batch, self.n_packs = config.batch, 0

    def __iter__(self):
        return self

    def __next__(self):
        first, last = self.n_packs, self.n_packs + self.batch
        starts = self.starts[first : last + 1].tolist()      # of the items of these packs
        packs = [self.items[begin:end] for begin, end in pairwise(starts)]
        waits = [n - e.arrived for n, pack in enumerate(packs, first) for e in pack]
        skipped = Counter(self.skipped_why[: np.searchsorted(self.skipped_in, last)].tolist())
        self.n_packs = last
        return StepPlan(packs, self.ids[starts[0] : starts[-1]], max(waits), dict(skipped),
                        self.state())

    def state(self):
        return {"plan_file": True, "packs": self.n_packs}

    def restore(self, state):
        if "plan_file" not in state:
            raise DataError("--plan: the run began without a plan; go on without it")
        self.n_packs = state["packs"]


def in_process(plans, n_steps):
    """Yields the first n_steps of `plans`, made ahead in a process of its own.

    They come through a pipe, which holds the process back when it is full.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_plans, args=(plans, n_steps, sender), daemon=True)
    process.start()
    sender.close()                   # so that the pipe ends with the process
    for _ in range(n_steps):
        try:
            plan = receiver.recv()
        except EOFError:
            raise RunError("the planning process died, of too little memory perhaps") from None
        if isinstance(plan, Exception):
            raise plan
        yield plan
    process.join()


def send_plans(plans, n_steps, sender):
    start_child()
    try:
        for plan in islice(plans, n_steps):
            sender.send(plan)
    except BrokenPipeError:          # the trainer is gone
        return
    except Exception as e:
        sender.send(e)


def start_child(*_):
    """In a process of the planner or of a decoder: it leaves signals to the trainer, ends with it.

    SIGINT and SIGTERM reach all processes of a run. A thread watches the trainer, because a process
    that is blocked on a full pipe notices nothing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_trainer, daemon=True).start()


def kill_children():
    """Ends planner and decoders at once; a stopped one would be waited for at the exit."""
    if hasattr(signal, "SIGCHLD"):                   # torch's handler would raise for each of them
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in active_children():
        process.kill()


def end_with_trainer():
    parent_process().join()
    os._exit(1)
