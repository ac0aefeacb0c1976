"""The packs that one rank trains on, planned and decoded ahead of time (paper: packing).

    StepPlan  --balance_packs-->  packs of this rank  --DataLoader, Decoder-->  rows of data.Example

The first rank plans and sends each StepPlan to all ranks. Each rank decodes its share of
the packs, and under context parallelism only its share of the crops. With --workers, processes of
torch's DataLoader measure and decode. If a record cannot be decoded, a placeholder of the same
size without loss replaces it, so that packs stay as planned.
"""

import atexit
import os
import signal
import threading
import warnings
from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from multiprocessing import active_children, parent_process

import numpy as np
import torch
from torch.utils.data import DataLoader

import data
import packing
import parallel
from records.errors import DataError, Unreadable
from records.mixture import Mixture
from training.config import Config, RankError
from training.planner import BadRecords, StepPlanner, add_counts, measure
from training.ranks import Ranks

CHUNK = 64  # examples that a process measures at a time

# torch warns if --workers is larger than the number of cores, but the user has chosen it
warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)


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


def measure_in_order(measurer, n_processes, start=0):
    """Yields the results of `measure` for the indices start, start + 1, .. in this order. Processes
    compute them ahead of time."""
    chunks = (range(k, k + CHUNK) for k in count(start, CHUNK))
    for found in iterate(measurer, n_processes, sampler=chunks):
        for each in found:
            if isinstance(each, Exception):
                raise each
            yield each


@dataclass
class Decoder:
    """The data set of a DataLoader. A pack, [arguments of `decode`, ..] -> [data.Example, ..]."""

    mixture: Mixture
    tokenizer: object
    config: Config

    def __getitem__(self, pack):
        try:
            return [self.decode(*each) for each in pack]
        except (DataError, OSError) as e:
            return e

    def decode(self, item, shard=None, reason=""):
        """A packing.Item, a parallel.CropShard (None: all crops) -> data.Example of the planned
        size. It is a placeholder if a reason is given or if the record cannot be decoded."""
        source, i, epoch = self.mixture[item.index]
        record = source[i]
        config = self.config
        planned = item.tokens, item.crops
        if not reason:
            try:
                example = data.encode(
                    record, self.tokenizer, config.data, config.seed, epoch, shard)
                n_crops = 0 if example.image_id is None else len(example.image_id)
                size = len(example.tokens), n_crops
                if size == planned:
                    return example
                reason = f"size differs: {size} tokens and crops, {planned} planned"
            except Unreadable as e:
                reason = str(e)
        example = placeholder(record["id"], *planned, config.data, reason)
        return parallel.select_crops(example, shard)


def placeholder(name, n_tokens, n_crops, config, reason):
    """-> a data.Example without loss, of the planned size, for a record that cannot be decoded."""
    example = data.text_example(np.zeros(n_tokens, np.int64), 0, id=name, unreadable=reason)
    if n_crops:
        example.images = np.zeros((n_crops, config.vision.n_patch, config.vision.n_pixel), np.uint8)
        example.image_id = np.arange(n_crops, dtype=np.int32)
    return example


class Loader:
    """Iterates over the remaining steps: (StepPlan, the micro-batches of this rank).

    A micro-batch is a list of rows, and a row is a list of data.Example.
    plans: a StepPlanner or PlanFile on the first rank, None on the others.
    known_unreadable {index: reason}: records that a run found unreadable before it was resumed.
    newly_unreadable: records found unreadable since the last call of `exchange`.
    """

    def __init__(self, mixture, tokenizer, config, plans, ranks=None, start=0):
        self.mixture = mixture
        self.config = config
        self.plans = plans
        self.ranks = ranks or Ranks()
        self.decoder = Decoder(mixture, tokenizer, config)
        self.sources = [reader.name for reader in mixture.sources]
        self.n_steps = config.steps - start
        self.examples_per_step = 0  # `begin` sets it
        self.steps = self.plan_steps()
        # StepPlans whose packs were sent to the decoder
        self.planned = deque()
        self.in_flight = deque()  # the packs of these plans that are not decoded yet
        self.unreadable = BadRecords("its tokens have no loss", RankError, config.max_skip)
        self.newly_unreadable = []
        self.known_unreadable = {}

    def restore(self, position, skips, same_data=True):
        """Continues after the step that saved this position. Records in skips, the lines of
        skips.jsonl, count as unreadable without decoding. If the data have changed, only the index
        in the stream of records is kept, because sizes and skips belong to the old records."""
        if self.plans:
            self.plans.restore(position["plans"], same_data)
        if same_data:
            self.known_unreadable = {skip["index"]: skip["reason"] for skip in skips}
            if self.ranks.first:  # these are sums over all ranks, so only one rank may have them
                self.unreadable = replace(self.unreadable, **position["unreadable"])

    def __iter__(self):
        config = self.config
        if self.n_steps <= 0:  # a run that continues after its last step
            return
        # `iterate` sets batch_size=None: packs are decoded one by one and returned in their order
        decoded = iterate(self.decoder, config.workers, sampler=self.packs_to_decode())
        n_micro_batches = config.batch // self.ranks.dp // config.micro_batch
        for _ in range(self.n_steps):
            micro_batches = ([self.next_row(decoded) for _ in range(config.micro_batch)]
                             for _ in range(n_micro_batches))
            first = next(micro_batches)  # afterwards self.planned has the plan of this step
            yield self.planned.popleft(), chain([first], micro_batches)

    def begin(self):
        """Plans the first step, so that unusable data end a run before it writes anything."""
        first = [*islice(self.steps, 1)]
        self.examples_per_step = len(first[0].ids) if first else 0
        self.steps = chain(first, self.steps)

    def plan_steps(self):
        """On all ranks, yields the StepPlans of the first rank, or raises the error of its plan."""
        workers = self.config.workers
        measured = None
        if workers and isinstance(self.plans, StepPlanner):
            # One process measures the examples of only 48 steps of the toy in a second
            # (docs/log.md). A GPU may be faster, so several processes measure.
            measurer = Measurer(self.mixture, self.decoder.tokenizer, self.config)
            measured = measure_in_order(
                measurer, -(-workers // 2), self.plans.planner.next_index)
            self.plans.measured = measured
        for _ in range(self.n_steps):
            plan = None
            try:
                if self.plans:
                    plan = next(self.plans)
            except (DataError, OSError) as e:  # sent to all ranks, or the others would wait
                plan = e
            plan = self.ranks.broadcast(plan)
            if isinstance(plan, Exception):
                raise plan
            yield plan
        if measured:
            measured.close()  # ends its processes

    def packs_to_decode(self):
        """Yields this rank's packs in their order, and plans a step when its packs are needed. This
        is the sampler of a DataLoader, so `next` of the DataLoader waits for the first rank."""
        ranks = self.ranks
        for plan in self.steps:
            self.planned.append(plan)
            for k in packing.balance_packs(plan.packs, ranks.dp)[ranks.dp_rank]:
                items = plan.packs[k]
                shards = [None] * len(items)
                if ranks.cp > 1:
                    *before, n_crops = np.cumsum([0, *(e.crops for e in items)]).tolist()
                    shards = [parallel.CropShard(ranks.cp_rank, ranks.cp, n, n_crops)
                              for n in before]
                reasons = [self.known_unreadable.get(e.index, "") for e in items]
                self.in_flight.append([*zip(items, shards, reasons, strict=True)])
                yield self.in_flight[-1]

    def next_row(self, decoded):
        """-> the next pack, as a row of examples. If one of the ranks that share the row cannot
        read a record, all of them have a placeholder for it."""
        examples = next(decoded)
        if isinstance(examples, Exception):
            raise RankError(str(examples))
        reasons = [example.unreadable for example in examples]
        of_ranks = self.ranks.gather_in_row(reasons)
        reasons = [next(filter(None, each), "") for each in zip(*of_ranks, strict=True)]
        row = []
        pack = self.in_flight.popleft()
        for (item, shard, _), example, reason in zip(pack, examples, reasons, strict=True):
            # unreadable on another rank of the group
            if reason and not example.unreadable:
                example = self.decoder.decode(item, shard, reason)
            source, i, _ = self.mixture[item.index]
            example.source = source.name
            where = source[i]["where"] if reason else ""
            if reason and item.index not in self.known_unreadable:
                self.newly_unreadable.append({"index": item.index, "id": example.id, "where": where,
                                          "reason": reason})
            self.unreadable.count(example.source, where, reason)
            row.append(example)
        return row

    def exchange(self, stop):
        """-> must one of the ranks stop, the records that any rank found unreadable for the first
        time, and the state of `unreadable` summed over all ranks. All ranks call it."""
        mine = stop, self.ranks.cp_rank, self.newly_unreadable, self.unreadable.state()
        self.newly_unreadable = []
        newly_unreadable = []
        counts = {}
        tried = Counter()
        of_ranks = self.ranks.all_gather(mine)
        for _, cp_rank, new, unreadable in of_ranks:
            if cp_rank == 0:  # the ranks of a group have the same records
                newly_unreadable += new
                counts = add_counts(counts, unreadable["counts"])
                tried.update(unreadable["tried"])
        state = {"counts": counts, "tried": tried, "in_a_row": {}}
        return any(stop for stop, *_ in of_ranks), newly_unreadable, state


CHILDREN = []  # the processes of all loaders


def iterate(dataset, n, **options):
    """-> an iterator over the elements of a data set, with n processes of a DataLoader."""
    options["generator"] = torch.Generator()  # so that torch's global generator is not used
    if n:
        options |= {"num_workers": n, "worker_init_fn": start_child, "prefetch_factor": 2,
                    "multiprocessing_context": "spawn"}
    others = active_children()
    iterator = iter(DataLoader(dataset, batch_size=None, **options))
    CHILDREN.extend(child for child in active_children() if child not in others)
    return iterator


def start_child(*_):
    """Makes a child ignore SIGINT and SIGTERM, which the trainer handles, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


def end_with_parent():
    """Ends this process when its parent ends, even if it is blocked on a full pipe."""
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


@atexit.register
def kill_children():
    """Kills the children at the end. They ignore SIGTERM, so Python would wait for them."""
    if CHILDREN:  # for each killed child, torch's handler of SIGCHLD would raise
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in CHILDREN:
        process.kill()
