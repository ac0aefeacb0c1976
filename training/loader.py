"""The packs of a run as one rank sees them, planned and decoded ahead (paper: packing).

    StepPlan  --balance_packs-->  packs of this rank  --DataLoader, Decoder-->  rows of data.Example

The first rank plans and sends each StepPlan to all ranks. Each rank decodes its share of
the packs, and under context parallelism only its share of the crops. With --workers both happen in
processes of torch's DataLoader. A record that turns out to be unreadable here keeps its place in
the row, without loss, so that packs stay as planned.
"""

import atexit
import os
import signal
import threading
import warnings
from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import chain, islice
from multiprocessing import active_children, parent_process

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

import data
import packing
import parallel
from records.errors import DataError, Unreadable
from records.mixture import Mixture
from training.config import Config, RankError
from training.planner import BadRecords, add_counts
from training.ranks import Ranks

# --workers is the user's number; torch would prefer the number of cores
warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)


@dataclass
class PlansAhead(IterableDataset):
    """The first n StepPlans, as the data set of a DataLoader. An error is a value: to one that is
    raised the DataLoader would add a traceback."""

    plans: object  # a StepPlanner or PlanFile
    n: int

    def __iter__(self):
        try:
            yield from islice(self.plans, self.n)
        except (DataError, OSError) as e:
            yield e


@dataclass
class Decoder:
    """The data set of a DataLoader: [arguments of `decode`, ..] of a pack -> [data.Example, ..]."""

    mixture: Mixture
    tokenizer: object
    config: Config

    def __getitem__(self, pack):
        try:
            return [self.decode(*each) for each in pack]
        except (DataError, OSError) as e:
            return e

    def decode(self, item, shard=None, reason=""):
        """A packing.Item, a parallel.CropShard (None: all crops) -> data.Example of its size; with
        a reason, or if it cannot be had, a placeholder."""
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
    """Takes the place of a record that cannot be decoded: as large as planned, without loss."""
    example = data.text_example(np.zeros(n_tokens, np.int64), 0, id=name, unreadable=reason)
    if n_crops:
        example.images = np.zeros((n_crops, config.vision.n_patch, config.vision.n_pixel), np.uint8)
        example.image_id = np.arange(n_crops, dtype=np.int32)
    return example


class Loader:
    """Iterates over the steps that are left: (StepPlan, this rank's micro-batches of it).

    A micro-batch is a list of rows, a row a list of data.Example.
    plans: a StepPlanner or PlanFile on the first rank, None on the others. known_unreadable {index:
    reason}: what the run found before it stopped. newly_unreadable: since the last exchange.
    """

    def __init__(self, mixture, tokenizer, config, plans, ranks=None, start=0):
        self.mixture = mixture
        self.config = config
        self.plans = plans
        self.ranks = ranks or Ranks()
        self.decoder = Decoder(mixture, tokenizer, config)
        self.sources = [reader.name for reader in mixture.sources]
        self.n_steps = config.steps - start
        self.examples_per_step = 0  # from `begin` on
        self.steps = self.plan_steps()
        # StepPlans whose packs have gone to the decoder
        self.planned = deque()
        self.in_flight = deque()  # their packs, not decoded yet
        self.unreadable = BadRecords("its tokens have no loss", RankError, config.max_skip)
        self.newly_unreadable = []
        self.known_unreadable = {}

    def restore(self, position, skips, same_data=True):
        """Continues after the step at whose end `exchange` and StepPlan.state gave this position.
        The records in the lines of skips.jsonl stay unreadable without decoding. With other data
        only the place in it is kept: sizes and masks belong to the old records."""
        if self.plans:
            self.plans.restore(position["plans"], same_data)
        if same_data:
            self.known_unreadable = {skip["index"]: skip["reason"] for skip in skips}
            if self.ranks.first:  # the counts are of all ranks, which are added up
                self.unreadable = replace(self.unreadable, **position["unreadable"])

    def __iter__(self):
        config = self.config
        if self.n_steps <= 0:  # a run that continues after its last step
            return
        # batch_size=None: packs go to the data set one by one, and come back in their order
        decoded = iterate(self.decoder, config.workers, sampler=self.packs_to_decode())
        n_micro_batches = config.batch // self.ranks.dp // config.micro_batch
        for _ in range(self.n_steps):
            micro_batches = ([self.next_row(decoded) for _ in range(config.micro_batch)]
                             for _ in range(n_micro_batches))
            first = next(micro_batches)  # now its plan is there
            yield self.planned.popleft(), chain([first], micro_batches)

    def begin(self):
        """Plans the first step: useless data end a run before it writes anything."""
        first = [*islice(self.steps, 1)]
        self.examples_per_step = len(first[0].ids) if first else 0
        self.steps = chain(first, self.steps)

    def plan_steps(self):
        """Yields the StepPlans of the first rank, or raises its error, on all ranks."""
        plans = None
        if self.plans:
            plans = iterate(PlansAhead(self.plans, self.n_steps), min(self.config.workers, 1))
        for _ in range(self.n_steps):
            plan = self.ranks.broadcast(None if plans is None else next(plans))
            if isinstance(plan, Exception):
                raise plan
            yield plan

    def packs_to_decode(self):
        """Yields this rank's packs in their order; plans steps as they are needed. It is the
        sampler of a DataLoader, whose `next` therefore waits for the plan of the first rank."""
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
        """The next pack as a row of examples, with the masks of all ranks that share it."""
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
        """-> does one of the ranks have to stop, the records that they found unreadable for the
        first time, and the state of `unreadable` over all of them."""
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
    """A DataLoader's iterator over single elements, with n processes."""
    options["generator"] = torch.Generator()  # leaves torch's own random numbers alone
    if n:
        options |= {"num_workers": n, "worker_init_fn": start_child, "prefetch_factor": 2,
                    "multiprocessing_context": "spawn"}
    others = active_children()
    iterator = iter(DataLoader(dataset, batch_size=None, **options))
    CHILDREN.extend(child for child in active_children() if child not in others)
    return iterator


def start_child(*_):
    """A process that plans or decodes leaves SIGINT and SIGTERM to the trainer and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


def end_with_parent():
    """Ends this process when its parent does, even where it is blocked on a full pipe."""
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


@atexit.register
def kill_children():
    """However the trainer ends: Python would wait for processes that leave SIGTERM to it."""
    if CHILDREN:  # torch's handler would raise for each of them
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in CHILDREN:
        process.kill()
