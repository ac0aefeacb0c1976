"""The packs of a run, decoded ahead, as one rank sees them (paper: packing).

    StepPlan  --balance_packs-->  packs of this rank  --DataLoader, Decoder-->  rows of data.Example

The first rank plans, in a process of its own where there are workers, and sends each StepPlan to
all ranks: sizes are measured once. Each rank decodes the packs dealt to it, in the workers of a
torch DataLoader, and under context parallelism only its share of the crops. A record that turns out
bad here is masked: it keeps its place in the row, without loss, so that packs stay as planned.
"""

from collections import deque
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import active_children
from threading import Timer

import numpy as np
from torch.utils.data import DataLoader

import data
import packing
import parallel
from records.errors import DataError, Unreadable, warn
from training.planner import (
    BadRecords,
    RunError,
    in_process,
    kill_children,
    record_at,
    source_at,
    start_child,
)

DECODE_TIMEOUT_S = 900      # for the next pack to be planned and decoded


@dataclass(frozen=True)
class PackToDecode:
    items: list                      # of packing.Item
    shards: list                     # of each example: data.CropShard, or None for all of its crops
    reasons: list                    # of each example: why it is masked unseen, or ""


class Decoder:
    """The data set of the DataLoader: PackToDecode -> [data.Example, ..]."""

    def __init__(self, mixture, tokenizer, config):
        self.mixture, self.tokenizer, self.config = mixture, tokenizer, config

    def __getitem__(self, pack):
        each = zip(pack.items, pack.shards, pack.reasons, strict=True)
        try:
            return [self.decode(item, shard, reason) for item, shard, reason in each]
        except DataError as e:       # as a value: the DataLoader would add a traceback to it
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
        example = data.placeholder(name, item.tokens, item.crops, self.config.data, reason)
        return data.select_crops(example, shard)


class Loader:
    """Iterates over the steps that are left: (StepPlan, this rank's micro-batches of it).

    A micro-batch is a list of rows, a row a list of data.Example.
    plans: a StepPlanner or PlanFile on the first rank, None on the others. known_masked {index:
    reason}: what the run masked before it stopped; it is masked again without decoding.
    newly_masked: what this rank has masked since the caller last emptied the list.
    """

    def __init__(self, mixture, tokenizer, config, plans, ranks=None, start=0):
        self.mixture, self.config, self.plans = mixture, config, plans
        self.ranks = ranks or parallel.Ranks()
        self.decoder = Decoder(mixture, tokenizer, config)
        self.sources = [reader.name for reader in mixture.sources]
        self.n_steps = config.steps - start
        self.first_plan = None
        self.planned = deque()       # StepPlans whose packs have gone to the decoder
        self.in_flight = deque()     # PackToDecode
        self.masked = BadRecords("masked", RunError)
        self.newly_masked, self.known_masked = [], {}

    def begin(self):
        """Plans the first step: data that cannot be used at all end the run before it begins."""
        if self.plans and self.config.workers:
            self.plans = in_process(self.plans, self.n_steps)
        self.first_plan = self.receive_plan()

    def receive_plan(self):
        plan = None
        if self.plans:
            try:
                plan = next(self.plans)
            except (DataError, RunError) as e:       # sent to all, or the others would wait
                e.on_all_ranks = True
                plan = e
        plan = parallel.broadcast(plan)
        if isinstance(plan, Exception):
            raise plan
        return plan

    def packs_to_decode(self):
        """Yields this rank's packs in the order of training, and plans steps as they are needed."""
        for n in range(self.n_steps):
            plan = self.receive_plan() if n else self.first_plan
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

    def __iter__(self):
        config = self.config
        if self.n_steps <= 0:                        # a run that continues after its last step
            return
        ahead = {}
        if config.workers:
            ahead = {"num_workers": config.workers, "worker_init_fn": start_child,
                     "prefetch_factor": 2, "multiprocessing_context": "spawn"}
        if not self.first_plan:
            self.begin()
        # batch_size=None: packs go to the data set one by one, and come back in their order
        sampler = self.packs_to_decode()
        decoded = iter(DataLoader(self.decoder, batch_size=None, sampler=sampler, **ahead))
        for _ in range(self.n_steps):
            rows = (self.next_row(decoded) for _ in range(config.batch // self.ranks.dp))
            first = next(rows)                       # now its plan is there
            yield self.planned.popleft(), batched(chain([first], rows), config.micro_batch)

    def next_row(self, decoded):
        # the DataLoader's own timeout does not end a wait for the second half of a pack
        timer = Timer(DECODE_TIMEOUT_S, end_stuck_children)
        timer.start()
        try:
            examples = next(decoded)
        except RuntimeError as e:
            raise self.worker_error(e) from None
        finally:
            timer.cancel()
        if isinstance(examples, DataError):
            examples.on_one_rank = True
            raise examples
        pack = self.in_flight.popleft()
        reasons = [example.mask_reason for example in examples]
        if self.ranks.cp > 1:                        # what one rank of a group masks, all mask
            group = self.ranks.mesh["cp"].get_group()
            of_ranks = parallel.all_gather(reasons, group)
            reasons = [next(filter(None, each), "") for each in zip(*of_ranks, strict=True)]
        each = zip(pack.items, pack.shards, examples, reasons, strict=True)
        return [self.finish(*parts) for parts in each]

    def finish(self, item, shard, example, reason):
        source = source_at(self.mixture, item.index)
        if not reason:
            self.masked.good(source)
        else:
            if not example.mask_reason:
                example = self.decoder.placeholder(example.id, item, shard, reason)
            where = record_at(self.mixture, item.index)[0]["where"]
            self.newly_masked.append({"id": example.id, "where": where, "index": item.index,
                                      "reason": reason})
            self.masked.bad(source, where, reason)
        example.source = source
        return example

    def worker_error(self, error):
        """What to raise for a RuntimeError of the DataLoader, or of its signal handler."""
        cause = first_line(error)
        if not cause.startswith("DataLoader "):
            return error
        kill_children()
        items = self.in_flight[0].items if self.in_flight else []    # none before the first pack
        ids = [record_at(self.mixture, item.index)[0]["id"] for item in items]
        return RunError("a decoding worker died, of too little memory perhaps, or is stuck "
                        f"({cause}); the next records are {', '.join(ids)[:400]}")


def end_stuck_children():
    """Runs in a thread. The DataLoader, in the main thread, raises when its workers die."""
    warn(f"no pack arrived in {DECODE_TIMEOUT_S} s: planner and decoding workers are ended")
    for process in active_children():
        process.kill()


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def batched(items, n):
    while batch := list(islice(items, n)):
        yield batch
