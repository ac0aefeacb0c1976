"""The packs that one rank trains on, planned and decoded ahead of time (paper: packing).

    StepPlan  --share_packs-->  packs of this rank  --DataLoader, Decoder-->  rows of data.Example

The first rank plans and sends each StepPlan to all ranks. Each rank decodes its share of
the packs, and under context parallelism only its share of the crops. With --workers, processes of
torch's DataLoader decode. If a record cannot be decoded, a placeholder of the same
size without loss replaces it, so that packs stay as planned.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

import data
import packing
import parallel
from records.errors import DataError, RankDataError, RankError, Unreadable
from records.mixture import Mixture
from training.config import Config
from training.planner import BadRecords
from training.processes import iterate
from training.ranks import Ranks


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
                example = data.encode(record, self.tokenizer, config.data, config.model.vision,
                                      config.seed, epoch, shard)
                n_crops = 0 if example.image_id is None else len(example.image_id)
                size = len(example.tokens), n_crops
                if size == planned:
                    return example
                reason = f"size differs: {size} tokens and crops, {planned} planned"
            except Unreadable as e:
                reason = str(e)
        example = placeholder(record["id"], *planned, config.model.vision, reason)
        return select_crops(example, shard)


def text_example(tokens, weight, **fields):
    """Tokens (T,) -> a data.Example without pixels and branches, with one loss weight for all. It
    is a placeholder, or serves to measure memory: only its size matters, so no target is shifted.
    """
    n = len(tokens)
    weights = np.full(n, weight, np.float32)
    until = np.full(n, n, np.int32)
    zeros = np.zeros(n, np.int32)  # no visual token, no annotation
    return data.Example(tokens, tokens, weights, np.arange(n), until, zeros, zeros, **fields)


def placeholder(name, n_tokens, n_crops, vision_config, reason):
    """-> a data.Example without loss, of the planned size, for a record that cannot be decoded."""
    example = text_example(np.zeros(n_tokens, np.int64), 0, id=name, unreadable=reason)
    if n_crops:
        shape = n_crops, vision_config.n_patch, vision_config.n_pixel
        example.images = np.zeros(shape, np.uint8)
        example.image_id = np.arange(n_crops, dtype=np.int32)
    return example


def select_crops(example, shard):
    """A data.Example with all of its crops -> the same with the crops of one rank, which has a
    parallel.CropShard. It is for examples that data.encode has not made, such as placeholders;
    encode decodes the rank's crops only."""
    if shard is None or example.image_id is None:
        return example
    # of_crop: for each crop the index of its image
    ids, of_crop = np.unique(example.image_id, return_inverse=True)
    n_crops = np.bincount(of_crop, minlength=len(ids))
    cp_rank = shard.ranks(n_crops)[of_crop]
    images = example.images[cp_rank == shard.cp_rank]
    return replace(example, images=images, cp_rank=cp_rank)


def share_packs(packs, n_ranks, n_together, micro_batch):
    """Packs of Items -> for each rank the numbers of its packs, in the order of its micro-batches.

    The n_together ranks of a node gather parameters together. So they wait for each other in
    every micro-batch, and get packs of nearly equal work at the same time. Different nodes wait for
    each other only once per step, and get nearly equal work in the whole step.
    """
    (heaviest_first,) = packing.balance_packs(packs, 1)
    groups = [heaviest_first[k : k + n_together] for k in range(0, len(packs), n_together)]
    merged = [[item for k in group for item in packs[k]] for group in groups]
    ranks = [[] for _ in range(n_ranks)]
    for node, of_node in enumerate(packing.balance_packs(merged, n_ranks // n_together)):
        for start in range(0, len(of_node), micro_batch):
            numbers = [k for group in of_node[start : start + micro_batch] for k in groups[group]]
            shares = packing.balance_packs([packs[k] for k in numbers], n_together)
            for rank, share in enumerate(shares, node * n_together):
                ranks[rank] += [numbers[k] for k in share]
    return ranks


class Loader:
    """Iterates over the remaining steps: (StepPlan, the micro-batches of this rank).

    A micro-batch is a list of rows, and a row is a list of data.Example.
    planner: a StepPlanner or PlanFile on the first rank, None on the others.
    """

    def __init__(self, mixture, tokenizer, config, planner, ranks=None, start=0):
        self.mixture = mixture
        self.config = config
        self.planner = planner
        self.ranks = ranks or Ranks()
        # how many data-parallel ranks gather parameters together (parallel.parallelize)
        together = max((config.shard or self.ranks.world) // self.ranks.cp, 1)
        self.together = math.gcd(together, self.ranks.dp)
        self.decoder = Decoder(mixture, tokenizer, config)
        self.sources = [reader.name for reader in mixture.sources]
        self.n_steps = config.steps - start
        self.examples_per_step = 0  # `begin` sets it
        self.plans = self.make_plans()
        self.plans_ahead = deque()  # StepPlans whose packs were given to the decoder
        self.packs_ahead = deque()  # packs that were given to the decoder, but are not decoded yet
        self.unreadable = BadRecords("its tokens have no loss", RankDataError, config.max_skip)

    def begin(self):
        """Plans the first step, so that unusable data end a run before it writes anything."""
        first = [*islice(self.plans, 1)]
        if first:  # a run that continues after its last step has no plan
            self.examples_per_step = len(first[0].ids)
        self.plans = chain(first, self.plans)

    def __iter__(self):
        config = self.config
        if self.n_steps <= 0:  # a run that continues after its last step
            return
        # `iterate` sets batch_size=None: packs are decoded one by one and returned in their order
        decoded = iterate(self.decoder, config.workers, sampler=self.packs_to_decode())
        n_micro_batches = config.batch // self.ranks.dp // config.micro_batch
        for _ in range(self.n_steps):
            micro_batches = (self.next_rows(decoded) for _ in range(n_micro_batches))
            first = next(micro_batches)  # afterwards plans_ahead has the plan of this step
            yield self.plans_ahead.popleft(), chain([first], micro_batches)

    def make_plans(self):
        """On all ranks, yields the StepPlans of the first rank, or raises the error of its plan."""
        for _ in range(self.n_steps):
            plan = None
            try:
                if self.planner:
                    plan = next(self.planner)
            except (DataError, OSError) as e:  # sent to all ranks, or the others would wait
                plan = e
            plan = self.ranks.broadcast(plan)
            if isinstance(plan, Exception):
                raise plan
            yield plan
        if self.planner:
            self.planner.close()

    def packs_to_decode(self):
        """Yields this rank's packs in their order, and plans a step when its packs are needed. This
        is the sampler of a DataLoader, so `next` of the DataLoader waits for the first rank."""
        ranks = self.ranks
        for plan in self.plans:
            self.plans_ahead.append(plan)
            shares = share_packs(plan.packs, ranks.dp, self.together, self.config.micro_batch)
            for k in shares[ranks.dp_rank]:
                items = plan.packs[k]
                shards = [None] * len(items)
                if ranks.cp > 1:
                    *before, n_crops = np.cumsum([0, *(e.crops for e in items)]).tolist()
                    shards = [parallel.CropShard(ranks.cp_rank, ranks.cp, n, n_crops)
                              for n in before]
                pack = [*zip(items, shards, strict=True)]
                self.packs_ahead.append(pack)
                yield pack

    def next_rows(self, decoded):
        """-> the rows of a micro-batch. After an error the other rows are taken, too, because the
        DataLoader may need the next plan for them, which all ranks exchange."""
        rows = []
        errors = []
        for _ in range(self.config.micro_batch):
            try:
                rows.append(self.next_row(decoded))
            except (DataError, RankError) as e:
                errors.append(e)
        if errors:
            raise errors[0]
        return rows

    def next_row(self, decoded):
        """-> the next pack, as a row of examples. If one of the ranks that share the row cannot
        read a record, all of them have a placeholder for it."""
        examples = next(decoded)
        pack = self.packs_ahead.popleft()
        failed = isinstance(examples, Exception)
        reasons = examples if failed else [example.unreadable for example in examples]
        # Reasons are rare, so the ranks exchange them only if there is one.
        if self.ranks.any_in_row(failed or any(reasons)):
            of_ranks = self.ranks.gather_in_row(reasons)
            for error in of_ranks:
                if isinstance(error, Exception):
                    # the exit status is the same as when the planner finds the mistake first
                    kind = RankDataError if isinstance(error, DataError) else RankError
                    raise kind(str(error))
            reasons = [next(filter(None, each), "") for each in zip(*of_ranks, strict=True)]
        row = []
        for (item, shard), example, reason in zip(pack, examples, reasons, strict=True):
            # unreadable on another rank of the group
            if reason and not example.unreadable:
                example = self.decoder.decode(item, shard, reason)
            source, i, _ = self.mixture[item.index]
            example.source = source.name
            self.unreadable.count(source, source.where(i) if reason else "", reason)
            row.append(example)
        return row


class Ahead(Iterator):
    """Iterates over the elements of an iterator. `fetch` takes the next element before it is due.
    An error of the data is raised when the element is due, so that the step before is complete."""

    def __init__(self, elements):
        self.elements = elements
        self.error = None
        self.is_fetched = False

    def fetch(self):
        self.is_fetched = True
        try:
            self.element = next(self.elements, None)
        except (DataError, RankError, OSError) as e:
            self.error = e

    def __next__(self):
        if not self.is_fetched:
            self.fetch()
        self.is_fetched = False
        if self.error:
            raise self.error
        return self.element
