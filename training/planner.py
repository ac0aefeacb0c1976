"""Which packs form a step (paper: packing; docs/molmo2.md 8).

    index 0, 1, 2 ..  --measure-->  (tokens, crops)  --Planner-->  packs  -->  StepPlan

The packs of a step depend only on the data, the seed and the number of the step. A record that
cannot be used is skipped here and counted. A record that cannot be decoded later keeps its
position in the row (training/loader.py).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise
from math import ceil

import numpy as np

import data
import packing
from records.errors import DataError, Unreadable, plural, warn
from records.mixture import Mixture
from records.visual import read_headers
from text.prompts import kinds_and_weights, most_points
from training.config import Config
from training.processes import iterate
from training.sources import list_changes

CHUNK = 64  # records that a process measures at a time
MANY = 100  # a run can end after so many bad records of one file


@dataclass
class BadRecords:
    """Counts the bad records of each source that were found while planning or while decoding.
    Raises `error` after MANY bad records in a row. Also raises it if at least MANY different
    records are bad and these are more than max_skip of all records drawn. An epoch draws each
    record once, so one damaged image among 20 ends no run, however long it is."""

    consequence: str  # end of the warnings
    error: type
    max_skip: float
    counts: dict = field(default_factory=dict)  # {source: {kind: n}}
    tried: dict = field(default_factory=dict)  # {source: n}, records drawn
    in_a_row: dict = field(default_factory=dict)  # {source: n}, bad records since the last good one
    warned: set = field(default_factory=set)  # "file:line" of records with a warning

    def count(self, records, where, reason=""):
        """Counts a record of a file. With a reason it is bad, and the first time this prints a
        warning."""
        source = records.name
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
        epochs = ceil(tried / len(records))
        are_too_many = bad / epochs >= MANY and bad > self.max_skip * tried
        if self.in_a_row[source] >= MANY or are_too_many:
            raise self.error(
                f"{bad} of {tried} draws from {source} gave a record that could not be used, "
                f"the last {self.in_a_row[source]} of them in a row. The last one is {where}: "
                f"{reason}. 'python -m tools.check FILE --decode' lists all of them. Repair their "
                "images or videos, then continue with --resume. --max-skip sets the allowed share")

    def state(self):
        """-> the fields from which `replace` makes an object that continues to count."""
        return {"counts": self.counts, "tried": dict(self.tried), "in_a_row": dict(self.in_a_row)}


def name_kind(reason):
    """The text of an Unreadable, "kind: sentence" -> its kind."""
    return reason.partition(":")[0]


def add_counts(counts, others):
    """-> the sum of two {source: {kind: n}}."""
    total = dict(counts)
    for source, kinds in others.items():
        total[source] = dict(Counter(total.get(source)) + Counter(kinds))
    return total


@dataclass(frozen=True)
class StepPlan:
    packs: list  # of packs, each a list of packing.Item
    ids: list  # of str, the ids of the records in the packs, in their order
    skipped: dict  # records skipped while planning so far, {source: {kind: n}}
    state: dict  # state of the planner after this step, from which a resumed run continues

    @property
    def hash(self):
        """-> a hash of the record ids for the log, 16 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measured:
    where: str  # "file:line"
    reason: str = ""  # the text of an Unreadable, if the record is skipped
    id: str = ""
    size: tuple = None  # (tokens, crops)
    n_branches: int = 0
    dropped_branches: int = 0


def measure(mixture, tokenizer, config, index):
    """-> Measured. It reads the text and the headers of media files, but decodes nothing."""
    source, i, epoch = mixture[index]
    try:
        record = source[i]
        info = read_headers(record, config.data)
        example, max_crops = data.build(
            record, info, tokenizer, config.data, config.model.vision, config.seed, epoch)
    except Unreadable as e:
        return Measured(source.where(i), str(e))
    size = data.size_of(example, info, max_crops, config.model.vision)
    return Measured(record["where"], skip_reason(record, size, config), record["id"], size,
                    example.n_branches, example.dropped_branches)


def skip_reason(record, size, config):
    """-> "kind: sentence", why a record of size (tokens, crops) is skipped. "" if it is used."""
    tokens, crops = size
    if size == (0, 0):  # nothing with loss fits a row
        with_loss = [a for a in record["annotations"] if has_loss(a, config.data)]
        limit = config.data.max_points
        if not with_loss:
            return "nothing to train on: none of its annotations has loss"
        if all(most_points(a) > limit for a in with_loss):
            return f"too many points: each annotation has more than {limit}"
        return "too long: no annotation fits into a row, or no point is on a sampled frame"
    if tokens > config.data.max_tokens or crops > config.pack_crops:
        return (f"too long: {plural(tokens, 'token')} and {plural(crops, 'crop')} do not fit into "
                f"a row of {config.data.max_tokens} and {config.pack_crops}")
    return ""


def has_loss(a, config):
    """Does an annotation have a token with loss? config: data.DataConfig."""
    if a.get("style") == "transcript" and not config.n_transcripts:
        return False
    return bool(a["weight"]) and any(weight for _, weight in kinds_and_weights(a))


@dataclass
class Measurer:
    """The data set of a DataLoader. A range of indices -> [Measured, ..]. An error becomes the last
    element and is not raised, because the DataLoader would add a traceback to its message."""

    mixture: Mixture
    tokenizer: object
    config: Config

    def __getitem__(self, indices):
        found = []
        try:
            for index in indices:
                found.append(measure(self.mixture, self.tokenizer, self.config, index))
        except (DataError, OSError) as e:
            found.append(e)
        return found


def measure_in_order(measurer, n_processes, start):
    """Yields the results of `measure` for the indices start, start + 1, .. in this order. Processes
    compute them ahead of time."""
    size = CHUNK if n_processes else 1  # without processes, nothing is measured ahead of time
    chunks = (range(k, k + size) for k in count(start, size))
    for found in iterate(measurer, n_processes, sampler=chunks):
        for each in found:
            if isinstance(each, Exception):
                raise each
            yield each


class StepPlanner(Iterator):
    """Iterates over StepPlans, without an end. n_processes measure the records; 0: this one does.

    One process measures the examples of only 48 steps of the toy in a second (docs/log.md). A GPU
    may be faster.
    """

    def __init__(self, mixture, tokenizer, config, n_processes=0):
        self.mixture = mixture
        self.config = config
        self.measurer = Measurer(mixture, tokenizer, config)
        self.n_processes = n_processes
        self.measured = None  # iterator over Measured, made when the first size is needed
        self.skipped = BadRecords("skipped", DataError, config.max_skip)
        self.ids = {}  # of the examples in the pool
        self.planner = packing.Planner(self.size, config.data.max_tokens, config.pack_crops,
                                       config.pool_size)

    def size(self, index):
        """-> (tokens, crops) of the record at an index. If it is skipped: None, and it counts."""
        if self.measured is None:
            self.measured = measure_in_order(self.measurer, self.n_processes, index)
        found = next(self.measured)
        self.skipped.count(self.mixture[index][0], found.where, found.reason)
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
        """Continues after the step with this state. If the data have changed, the pool is empty."""
        if not same_data:
            self.planner.restore(state["planner"] | {"pool": []})
            return
        self.planner.restore(state["planner"])
        self.ids = dict(state["ids"])
        self.skipped = replace(self.skipped, **state["skipped"])

    def close(self):
        """Ends the processes."""
        if self.measured:
            self.measured.close()


class PlanFile(Iterator):
    """Iterates over the StepPlans of a file that tools.plan wrote; replaces a StepPlanner.

    DataError if the file is too short, or if its fingerprint differs (training/sources.py).
    """
    COLUMNS = ("index", "tokens", "crops", "arrived")

    def __init__(self, path, made_for, config):
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            theirs = json.loads(bytes(columns["made_for"]))
            entries = zip(*(columns[name].tolist() for name in self.COLUMNS), strict=True)
        except Exception as e:  # NumPy and zipfile raise many kinds of errors for other files
            raise DataError(f"--plan {path}: not a plan that tools.plan wrote: {e}") from None
        changes = list_changes(theirs, made_for)
        if len(columns["ends"]) < config.steps * config.batch:
            n_packs = plural(len(columns["ends"]), "pack")
            changes = f"it has {n_packs}, fewer than --steps times --batch"
        if changes:
            raise DataError(f"--plan {path}: run tools.plan again, because this plan was made for "
                            f"another run: {changes}")
        self.columns = columns
        self.starts = [0, *columns["ends"].tolist()]  # of packs
        self.ids = bytes(columns["ids"]).decode().split("\0")
        self.items = [packing.Item(*entry) for entry in entries]
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

    def close(self):
        """It has no processes to end."""
