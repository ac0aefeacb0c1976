"""Which packs form a step (paper: packing; docs/molmo2.md 8).

    index 0, 1, 2 ..  --measure-->  (tokens, crops)  --Planner-->  packs  -->  StepPlan

A step is a function of seed and number alone. A record that cannot be used is skipped here, and
counted; one that turns out bad while decoding keeps its place (training/loader.py).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise

import numpy as np

import data
import packing
from records.errors import DataError, Unreadable, plural, warn
from text.prompts import kinds_and_weights, most_points
from training.sources import list_changes

MANY = 100  # bad records of a source that can end a run


@dataclass
class BadRecords:
    """Counts the bad records of each source, skipped while planning or found while decoding.
    Raises `error` after MANY in a row, or MANY that are more than max_skip of those tried. A record
    counts whenever it is drawn, once in an epoch."""

    consequence: str  # as messages say it
    error: type
    max_skip: float
    counts: dict = field(default_factory=dict)  # {source: {kind: n}}
    tried: dict = field(default_factory=dict)  # {source: n}, records drawn
    in_a_row: dict = field(default_factory=dict)  # bad ones since the last good one
    warned: set = field(default_factory=set)  # places that have been told

    def count(self, source, where, reason=""):
        """Counts a record, which is bad if there is a reason, and says so once."""
        self.tried[source] = self.tried.get(source, 0) + 1
        self.in_a_row[source] = self.in_a_row.get(source, 0) + 1 if reason else 0
        if not reason:
            return
        self.counts = add_counts(self.counts, {source: {name_kind(reason): 1}})
        if where not in self.warned:
            warn(f"{where}: {reason}; {self.consequence}")
        self.warned.add(where)
        bad = sum(self.counts[source].values())
        tried = self.tried[source]
        if self.in_a_row[source] >= MANY or (bad >= MANY and bad > self.max_skip * tried):
            raise self.error(
                f"{bad} of {tried} draws from {source} gave a record that could not be used, "
                f"the last {self.in_a_row[source]} of them in a row. The last one is {where}: "
                f"{reason}. 'python -m tools.check FILE --decode' lists them all, --max_skip "
                "allows more")

    def state(self):
        """The fields with which `replace` makes one that goes on counting."""
        return {"counts": self.counts, "tried": dict(self.tried), "in_a_row": dict(self.in_a_row)}


def name_kind(reason):
    """The kind of an Unreadable, given as text."""
    return reason.partition(":")[0]


def add_counts(counts, others):
    """Sums of {source: {kind: n}}."""
    total = dict(counts)
    for source, kinds in others.items():
        total[source] = dict(Counter(total.get(source)) + Counter(kinds))
    return total


@dataclass(frozen=True)
class StepPlan:
    packs: list  # of packs, each a list of packing.Item
    ids: list  # of str, the records of the packs in their order
    skipped: dict  # records skipped while planning so far, {source: {kind: n}}
    state: dict  # of the planner after this step: where a resume goes on

    @property
    def hash(self):
        """Of the record ids, for the log: 16 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measured:
    where: str  # "file:line"
    reason: str = ""  # why it is skipped, an Unreadable as text
    id: str = ""
    size: tuple = None  # (tokens, crops)


def measure(mixture, tokenizer, config, index):
    """-> Measured, from text and headers."""
    source, i, epoch = mixture[index]
    try:
        record = source[i]
        size = data.size(record, tokenizer, config.data, config.seed, epoch)
    except Unreadable as e:
        return Measured(source.where(i), str(e))
    return Measured(record["where"], skip_reason(record, size, config), record["id"], size)


def skip_reason(record, size, config):
    """Why a record of (tokens, crops) is skipped, "kind: sentence"; "" if it is used."""
    tokens, crops = size
    if not config.beta and any(a["type"] == "preference" for a in record["annotations"]):
        return "needs --beta: it has a preference; --beta 0.1 trains on pairs"
    if size == (0, 0):  # nothing with loss fits a row
        with_loss = [a for a in record["annotations"] if has_loss(a, config.data)]
        limit = config.data.max_points
        if not with_loss:
            return "nothing to train on: none of its annotations has loss"
        if all(most_points(a) > limit for a in with_loss):
            return f"too many points: each annotation has more than {limit}"
        return "too long: none of its annotations fits a row, or no point is on a frame"
    if tokens > config.data.max_tokens or crops > config.pack_crops:
        return (f"too long: {plural(tokens, 'token')} and {plural(crops, 'crop')} do not fit "
                f"a row of {config.data.max_tokens} and {config.pack_crops}")
    return ""


def has_loss(a, config):
    """Does an annotation have a token to learn from? config: data.DataConfig."""
    if a.get("style") == "transcript" and not config.n_transcripts:
        return False
    return bool(a["weight"]) and any(weight for _, weight in kinds_and_weights(a))


class StepPlanner(Iterator):
    """StepPlans, without end. measure_index(index) -> Measured takes the place of `measure`:
    tools.plan measures in parallel."""

    def __init__(self, mixture, tokenizer, config, measure_index=None):
        self.mixture = mixture
        self.config = config
        self.measure = measure_index or partial(measure, mixture, tokenizer, config)
        self.skipped = BadRecords("skipped", DataError, config.max_skip)
        self.ids = {}  # of the examples in the pool
        self.planner = packing.Planner(self.size, config.data.max_tokens, config.pack_crops,
                                       config.pool_size)

    def size(self, index):
        """(tokens, crops) of the record at an index; None, and counted, if it is skipped."""
        found = self.measure(index)
        self.skipped.count(self.mixture[index][0].name, found.where, found.reason)
        if found.reason:
            return None
        self.ids[index] = found.id
        return found.size

    def __next__(self):
        packs = list(islice(self.planner, self.config.batch))
        ids = [self.ids.pop(e.index) for pack in packs for e in pack]
        state = {"planner": self.planner.state(), "ids": list(self.ids.items()),
                 "skipped": self.skipped.state()}
        return StepPlan(packs, ids, self.skipped.counts, state)

    def restore(self, state, same_data=True):
        """Goes on after the step with this state; with other data, with an empty pool."""
        if not same_data:
            self.planner.restore(state["planner"] | {"pool": []})
            return
        self.planner.restore(state["planner"])
        self.ids = dict(state["ids"])
        self.skipped = replace(self.skipped, **state["skipped"])


class PlanFile(Iterator):
    """StepPlans from a file that tools.plan wrote, in place of a StepPlanner.

    DataError if it is too short, or was made for another fingerprint (training/sources.py).
    """
    COLUMNS = ("index", "tokens", "crops", "arrived")

    def __init__(self, path, made_for, config):
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            theirs = json.loads(bytes(columns["made_for"]))
            rows = zip(*(columns[name].tolist() for name in self.COLUMNS), strict=True)
        except Exception as e:  # NumPy and zipfile raise many kinds for another file
            raise DataError(f"--plan {path}: not a plan that tools.plan wrote: {e}") from None
        changes = list_changes(theirs, made_for)
        if len(columns["ends"]) < config.steps * config.batch:
            n_packs = plural(len(columns["ends"]), "pack")
            changes = f"it has {n_packs}, fewer than --steps times --batch"
        if changes:
            raise DataError(f"--plan {path}: made for another run: {changes}")
        self.columns = columns
        self.starts = [0, *columns["ends"].tolist()]  # of packs
        self.ids = bytes(columns["ids"]).decode().split("\0")
        self.items = [packing.Item(*row) for row in rows]
        self.batch = config.batch
        self.n_packs = 0

    def __next__(self):
        last = self.n_packs + self.batch
        starts = self.starts[self.n_packs : last + 1]
        packs = [self.items[begin:end] for begin, end in pairwise(starts)]
        skipped = {}
        n_skipped = np.searchsorted(self.columns["skipped_in"], last)
        for why in self.columns["skipped_why"][:n_skipped].tolist():
            source, _, kind = why.rpartition(": ")
            skipped = add_counts(skipped, {source: {kind: 1}})
        self.n_packs = last
        return StepPlan(packs, self.ids[starts[0] : starts[-1]], skipped, {"packs": last})

    def restore(self, state, same_data=True):
        self.n_packs = state["packs"]
