"""The packs of a run, decoded ahead, as one rank sees them (paper: packing).

    StepPlan  --balance_packs-->  packs of this rank  --DataLoader, Decoder-->  rows of data.Example

The first rank plans and sends each StepPlan to all ranks: sizes are measured once. Each rank
decodes the packs dealt to it, and under context parallelism only its share of the crops. With
--workers both happen ahead, in the processes of torch's DataLoader. A record that turns out bad
here is masked: it keeps its place in the row, without loss, so that packs stay as planned.
"""

import os
import signal
import threading
from collections import Counter, deque
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import active_children, parent_process

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

import data
import packing
import parallel
from records.errors import DataError, Unreadable
from training.config import RankError
from training.planner import BadRecords, add_counts, record_at, source_at


class PlansAhead(IterableDataset):
    """The first n StepPlans, as the data set of a DataLoader. An error is a value, since the
    DataLoader would add a traceback to it."""

    def __init__(self, plans, n):
        self.plans = plans
        self.n = n

    def __iter__(self):
        try:
            yield from islice(self.plans, self.n)
        except DataError as e:
            yield e


@dataclass(frozen=True)
class PackToDecode:
    items: list                      # of packing.Item
    shards: list                     # of each example: data.CropShard, or None for all of its crops
    reasons: list                    # of each example: why it is masked unseen, or ""


class Decoder:
    """The data set of the DataLoader: PackToDecode -> [data.Example, ..], or a DataError."""

    def __init__(self, mixture, tokenizer, config):
        self.mixture, self.tokenizer, self.config = mixture, tokenizer, config

    def __getitem__(self, pack):
        each = zip(pack.items, pack.shards, pack.reasons, strict=True)
        try:
            return [self.decode(item, shard, reason) for item, shard, reason in each]
        except DataError as e:       # as a value, see PlansAhead
            return e

    def decode(self, item, shard=None, reason=""):
        """An Item -> data.Example of its size, a placeholder if it cannot be had."""
        record, epoch = record_at(self.mixture, item.index)
        config = self.config
        if reason:
            return self.placeholder(record["id"], item, shard, reason)
        try:
            example = data.encode(record, self.tokenizer, config.data, config.seed, epoch, shard)
            n_crops = 0 if example.image_id is None else len(example.image_id)
            if (len(example.tokens), n_crops) != (item.tokens, item.crops):
                raise Unreadable("size differs", f"{len(example.tokens)} tokens, {n_crops} crops; "
                                 f"planned: {item.tokens} and {item.crops}")
        except Unreadable as e:
            return self.placeholder(record["id"], item, shard, str(e))
        return example

    def placeholder(self, name, item, shard, reason):
        """An Example of the planned size without loss."""
        example = data.placeholder(name, item.tokens, item.crops, self.config.data, reason)
        return data.select_crops(example, shard)


class Loader:
    """Iterates over the steps that are left: (StepPlan, this rank's micro-batches of it).

    A micro-batch is a list of rows, a row a list of data.Example.
    plans: a StepPlanner or PlanFile on the first rank, None on the others. known_masked {index:
    reason}: what the run masked before it stopped. newly_masked: since the last exchange.
    """

    def __init__(self, mixture, tokenizer, config, plans, ranks=None, start=0):
        self.mixture = mixture
        self.config = config
        self.plans = plans
        self.ranks = ranks or parallel.Ranks()
        self.decoder = Decoder(mixture, tokenizer, config)
        self.sources = [reader.name for reader in mixture.sources]
        self.n_steps = config.steps - start
        self.steps = self.plan_steps()
        self.planned = deque()       # StepPlans whose packs have gone to the decoder
        self.in_flight = deque()     # PackToDecode
        self.masked = BadRecords("masked", RankError, config.max_skip)
        self.newly_masked = []
        self.known_masked = {}

    def restore(self, position, skips, same_data=True):
        """Continues after the step at whose end `exchange` and StepPlan.state gave this position;
        records masked before it, the lines of skips.jsonl, are masked again without decoding. With
        other data only the place in it is kept."""
        if self.plans:
            self.plans.restore(position["plans"], same_data)
        if same_data:
            self.known_masked = {skip["index"]: skip["reason"] for skip in skips}
        if same_data and self.plans:
            self.masked.restore(position["masked"])

    def __iter__(self):
        config = self.config
        if self.n_steps <= 0:                        # a run that continues after its last step
            return
        # batch_size=None: packs go to the data set one by one, and come back in their order
        decoded = iter(DataLoader(self.decoder, batch_size=None, sampler=self.packs_to_decode(),
                                  **in_processes(config.workers)))
        for _ in range(self.n_steps):
            rows = (self.next_row(decoded) for _ in range(config.batch // self.ranks.dp))
            first = next(rows)                       # now its plan is there
            yield self.planned.popleft(), batched(chain([first], rows), config.micro_batch)

    def begin(self):
        """Plans the first step: data that cannot be used at all end a run before it begins."""
        first = list(islice(self.steps, 1))
        self.steps = chain(first, self.steps)

    def plan_steps(self):
        """Yields the StepPlans of the first rank, on all ranks; DataError if there are none."""
        plans = None
        if self.plans:
            plans = iter(DataLoader(PlansAhead(self.plans, self.n_steps), batch_size=None,
                                    **in_processes(min(self.config.workers, 1))))
        for _ in range(self.n_steps):
            plan = parallel.broadcast(None if plans is None else next(plans))
            if isinstance(plan, DataError):
                raise plan
            yield plan

    def packs_to_decode(self):
        """Yields this rank's packs in the order of training, and plans steps as they are needed."""
        for plan in self.steps:
            self.planned.append(plan)
            for k in packing.balance_packs(plan.packs, self.ranks.dp)[self.ranks.dp_rank]:
                items = plan.packs[k]
                reasons = [self.known_masked.get(e.index, "") for e in items]
                pack = PackToDecode(items, self.shards(items), reasons)
                self.in_flight.append(pack)
                yield pack

    def shards(self, items):
        """What of each example of a pack this rank decodes; None: all of it."""
        ranks = self.ranks
        if ranks.cp == 1:
            return [None] * len(items)
        before = np.cumsum([0, *(e.crops for e in items)]).tolist()
        return [data.CropShard(ranks.cp_rank, ranks.cp, n, before[-1]) for n in before[:-1]]

    def next_row(self, decoded):
        """The next pack as a row of examples, with the masks of all ranks that share it."""
        examples = next(decoded)
        if isinstance(examples, DataError):
            raise RankError(str(examples))
        pack = self.in_flight.popleft()
        reasons = [example.mask_reason for example in examples]
        if self.ranks.cp > 1:
            of_ranks = parallel.all_gather(reasons, self.ranks.mesh["cp"].get_group())
            reasons = [next(filter(None, each), "") for each in zip(*of_ranks, strict=True)]
        each = zip(pack.items, pack.shards, examples, reasons, strict=True)
        return [self.finish(*parts) for parts in each]

    def finish(self, item, shard, example, reason):
        """Counts an example -> the example, or its placeholder if another rank has masked it."""
        if reason and not example.mask_reason:
            example = self.decoder.placeholder(example.id, item, shard, reason)
        example.source = source_at(self.mixture, item.index)
        where = record_at(self.mixture, item.index)[0]["where"] if reason else ""
        if reason:
            self.newly_masked.append({"id": example.id, "where": where, "index": item.index,
                                      "reason": reason})
        self.masked.count(example.source, where, reason)
        return example

    def exchange(self, stop):
        """What all ranks know after a step -> is one of them to stop, the records that were masked
        in it, and the state of `masked` for all ranks."""
        mine = self.newly_masked, self.masked.state()
        newly_masked = []
        total = BadRecords("", None, 0).state()
        of_ranks = parallel.all_gather((stop, self.ranks.cp_rank, *mine))
        for _, cp_rank, new, masked in of_ranks:
            if cp_rank == 0:                         # the ranks of a group have the same records
                newly_masked += new
                add_counts(total["counts"], masked["counts"])
                total["tried"] = dict(Counter(total["tried"]) + Counter(masked["tried"]))
        self.newly_masked = []
        return any(stop for stop, *_ in of_ranks), newly_masked, total


def batched(items, n):
    """Lists of n items."""
    while batch := list(islice(items, n)):
        yield batch


def in_processes(n):
    """Options of a DataLoader with n processes, which leaves torch's random numbers alone."""
    options = {"generator": torch.Generator()}
    if n:
        options |= {"num_workers": n, "worker_init_fn": start_child, "prefetch_factor": 2,
                    "multiprocessing_context": "spawn"}
    return options


def start_child(*_):
    """In a process that plans or decodes: it leaves SIGINT and SIGTERM, which reach all processes
    of a run, to the trainer, and ends with it, even where it is blocked on a full pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def kill_children():
    """Ends these processes at once; the exit of the trainer would wait for one that is blocked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # torch's handler would raise for each of them
    for process in active_children():
        process.kill()
