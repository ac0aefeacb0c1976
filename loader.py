"""Which packs form a step, decoded ahead and dealt to ranks (paper: packing; spec 8).

in    sources and rates, tokenizer, config; a plan or a cache made ahead
out   Steps, and for each the micro-batches of one rank: rows of data.Example

    draw 0, 1, 2 ..  --size-->  Planner  --packs-->  Step  --deal-->  ranks  --encode, ahead-->  micro-batches

A step is a function of the seed and its number alone: every rank plans every pack, which costs no pixel, and then
decodes only those dealt to it. What is bad is found in one of two places: while planning, then the draw is left out;
or while decoding, then the example keeps its place without loss, so that the packs stay as they were planned.
"""

import os
import signal
import sys
import threading
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait

import numpy as np
from tqdm import tqdm

import data
import packing
import plans


class RunError(Exception):
    """Ends the command with status 1 and one sentence: the run itself failed. everywhere: all ranks found it, one may say so."""

    def __init__(self, sentence, everywhere=False):
        super().__init__(sentence)
        self.everywhere = everywhere


@dataclass(frozen=True)
class Step:
    packs: list                      # in plan order, each [(draw, tokens, crops), ..]
    ids: list                        # of str, the records in the same order
    waited: int                      # packs that the one of them that waited longest saw go by
    dropped: dict                    # draws left out while planning so far, by "source: reason"
    state: dict                      # of the planning after this step: where a resume goes on


class Loader:
    """The steps of a run as one rank sees them. rank, ranks: among those that hold different packs (data-parallel).

    `bad` collects what turned out bad while decoding, until the caller takes it; `known_bad` {draw: reason} is masked
    unseen, so that a resumed run masks what the first one did. config: config.Config.

    part: (number, degree) of this rank among those that share each row (context-parallel): it decodes its share of the row's
    images and frames. What one of them found bad, all must mask: agree(reasons of a row) -> the reasons of all of them.
    """

    def __init__(self, sources, rates, tokenizer, config, rank=0, ranks=1, plan=None, cache=None, measured=None, part=(0, 1),
                 agree=lambda reasons: reasons):
        if config.batch % (ranks * config.micro_batch):
            raise data.DataError(f"--batch {config.batch}: no multiple of {ranks} ranks times --micro-batch {config.micro_batch}")
        self.config, self.rank, self.ranks, self.part, self.agree = config, rank, ranks, part, agree
        self.setup = data.Mixture(sources, rates, config.seed), tokenizer, config
        self.measured = measured or (lambda draw: measure(self.setup, draw))
        self.dropped, self.masked, self.drawn, self.in_a_row, self.bad_in_a_row = Counter(), Counter(), Counter(), 0, 0
        self.ids, self.warned, self.bad, self.known_bad, self.first = {}, set(), [], {}, None
        made_for = plans.purpose(sources, rates, tokenizer, config) if plan or cache else None
        self.cache = plans.Cache(cache, made_for, config.steps * config.batch) if cache else None
        if plan:
            self.planner = plans.Plan(plan, made_for, config.steps * config.batch, self.ids, self.dropped)
        else:
            self.planner = packing.Planner(self.size, config.data.max_tokens, config.pack_crops, config.pool_size)

    # planning

    def size(self, draw):
        """(tokens, crops) of a draw, or None with the reason counted."""
        name, where, size, reason = self.measured(draw)
        source = self.source_of(draw)
        self.drawn[source] += 1
        if not reason:
            self.ids[draw], self.in_a_row = name, 0
            return size
        self.warn(where, reason, "skipped", self.rank == self.part[0] == 0)      # every rank finds it
        self.dropped[f"{source}: {reason[:3]}"] += 1
        self.in_a_row += 1
        if self.in_a_row >= 100:
            raise data.DataError(f"of the last 100 draws no record could be used; the last: {where}: {reason}")
        lost = sum(n for key, n in self.dropped.items() if key.startswith(f"{source}: "))
        if self.drawn[source] >= 1000 and lost > self.config.max_skip * self.drawn[source]:
            raise data.DataError(f"{lost} of {self.drawn[source]} draws of {source} could not be used, more than --max_skip="
                                 f"{self.config.max_skip}; the last: {where}: {reason}; 'python -m tools.check FILE --decode' lists what "
                                 "to repair or to take out, or allow more")
        return None

    def names(self):
        """Of all sources."""
        return [source.name for source in self.setup[0].sources]

    def source_of(self, draw):
        return self.setup[0].sources[self.setup[0][draw][0]].name

    def warn(self, where, reason, what, aloud=True):
        if where not in self.warned and aloud:
            tqdm.write(f"{where}: {reason}; {what}", file=sys.stderr)
        self.warned.add(where)

    def begin(self):
        """Plans the first step now: that nothing can be used is found before anything takes its time."""
        self.first = self.next_step()
        return self

    def next_step(self):
        if self.first:
            first, self.first = self.first, None
            return first
        packs, waited = [], 0
        for _ in range(self.config.batch):
            next(self.planner)
            packs.append([e[:3] for e in self.planner.last])
            waited = max(waited, *(self.planner.packs - 1 - came for *_, came in self.planner.last))
        ids, dropped = [self.ids.pop(e[0]) for pack in packs for e in pack], dict(self.dropped)
        state = {"planner": self.planner.state(), "ids": list(self.ids.items()), "dropped": dropped, "drawn": dict(self.drawn),
                 "in_a_row": self.in_a_row}
        return Step(packs, ids, waited, dropped, state)

    def state(self, step):
        """Where a run goes on after a step, once that step was taken: fit for JSON."""
        return {**step.state, "masked": dict(self.masked)}

    def restore(self, state):
        """Goes on after the step whose `state` this is; it costs the same after ten steps and after a million."""
        if set(state["planner"]) != set(self.planner.state()):
            raise data.DataError("--plan: a run that began with a plan goes on with it, and one without goes on without")
        self.first = None
        self.planner.restore(state["planner"])
        self.in_a_row = state["in_a_row"]
        for held, found in ((self.ids, state["ids"]), (self.dropped, state["dropped"]), (self.drawn, state["drawn"]),
                            (self.masked, state.get("masked", {}))):
            held.clear()                                     # in place: a plan made ahead counts in them too
            held.update(found)

    # decoding

    def __iter__(self):
        """Yields (Step, an iterator over its micro-batches on this rank: lists of rows, each a list of data.Example)."""
        size, count = self.config.micro_batch, self.config.batch // self.ranks // self.config.micro_batch
        rows = self._rows()

        def micro_batch():
            return [next(rows)[1] for _ in range(size)]

        for step, row in rows:
            first = [row, *(next(rows)[1] for _ in range(size - 1))]
            yield step, chain([first], (micro_batch() for _ in range(count - 1)))

    def _rows(self):
        """Yields (step, row) in the order of training, decoded in worker processes two micro-batches ahead.

        What a worker decodes is a function of the draw alone, so any number of workers gives the same rows; what waits in memory is
        bounded by packs, whatever the batch.
        """
        workers = 0 if self.cache else self.config.workers
        room, ahead = 2 * self.config.micro_batch + workers if workers else 1, deque()
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (self.setup,)) if workers else None
        try:
            for step, pack in self._packs():
                asked = [(e, share, self.known_bad.get(e[0], "")) for e, share in zip(pack, self.shares(pack), strict=True)]
                ahead.append((step, pack, [pool.submit(_encode_in_worker, *a) for a in asked] if workers else asked))
                if len(ahead) == room:
                    yield self._finished(*ahead.popleft())
            while ahead:
                yield self._finished(*ahead.popleft())
        except BrokenProcessPool:
            for worker in active_children():
                worker.kill()                                # the pool would ask them in vain
            ids = ", ".join(record_of(self.setup, e[0])[0]["id"] for _, pack, _ in ahead for e in pack)
            raise RunError(f"a decoding worker died, of too little memory perhaps; the next records are {ids[:400]}") from None
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _cached(self, planned, share, bad):
        example = self.cache[planned[0]]
        if bad and not example.bad:
            return placeholder(self.setup, planned, share, example.id, bad)
        return data.select_crops(example, share) if share else example

    def _packs(self):
        """Yields (step, pack) of this rank in the order of training, until a plan made ahead ends."""
        while True:
            try:
                step = self.next_step()
            except StopIteration:
                return
            for k in balance_packs([work_of(pack) for pack in step.packs], self.ranks)[self.rank]:
                yield step, step.packs[k]

    def shares(self, pack):
        """What of each example of a pack is this rank's to decode; None: all of it."""
        crops = [e[2] for e in pack]
        if self.part[1] == 1:
            return [None] * len(pack)
        return [data.CropShard(*self.part, sum(crops[:k]), sum(crops)) for k in range(len(pack))]

    def _finished(self, step, pack, asked):
        row = [a.result() if hasattr(a, "result") else self._cached(*a) if self.cache else encode(self.setup, *a) for a in asked]
        reasons = self.agree([example.bad for example in row])
        row = [placeholder(self.setup, e, share, example.id, reason) if reason and not example.bad else example
               for example, e, share, reason in zip(row, pack, self.shares(pack), reasons, strict=True)]
        for (draw, *_), example in zip(pack, row, strict=True):
            example.source = self.source_of(draw)
            if example.bad:
                where = record_of(self.setup, draw)[0]["where"]
                self.warn(where, example.bad, "masked", self.part[0] == 0)
                self.bad.append({"id": example.id, "where": where, "draw": draw, "reason": example.bad})
                self.masked[f"{self.source_of(draw)}: {example.bad[:3]}"] += 1
            self.bad_in_a_row = self.bad_in_a_row + 1 if example.bad else 0
            if self.bad_in_a_row >= 100:
                raise RunError(f"of the last 100 draws no record could be decoded; the last: {where}: {example.bad}")
        return step, row


def record_of(setup, draw):
    """-> the record of a draw and its epoch. setup: (mixture, tokenizer, config), here and below."""
    source, index, epoch = setup[0][draw]
    return setup[0].sources[source][index], epoch


def measure(setup, draw):
    """A draw -> record id, where it stands, (tokens, crops) or None, and the reason why none."""
    mixture, tokenizer, config = setup
    source, index, _ = mixture[draw]
    try:
        record, epoch = record_of(setup, draw)
    except data.Unreadable as e:                             # it has been found wrong when the file was opened
        where = mixture.sources[source].where(index)
        return where, where, None, str(e)
    size = None
    try:
        size = data.size(record, tokenizer, config.data, config.seed, epoch)
        reason = misfit(record, size, config)
    except data.Unreadable as e:
        reason = str(e)
    return record["id"], record["where"], None if reason else size, reason


def misfit(record, size, config):
    """Why a record of (tokens, crops) is left out, with its code; "" if it is not."""
    limits = config.data.max_tokens, config.pack_crops
    if size == (0, 0):
        taught = [a for a in record["annotations"] if a.get("weight", 1) and any(turn.get("weight", 1) for turn in a.get("turns", [a]))
                  and not (a.get("style") == "transcript" and not config.data.n_transcripts)]
        if taught and all(a["type"] != "track" and len(a.get("points", ())) > config.data.max_points for a in taught):
            return f"S12 more than {config.data.max_points} points"
        return "S03 none of its annotations fits a row" if taught else "S04 none of its annotations has loss"
    fits = size[0] <= limits[0] and size[1] <= limits[1]
    return "" if fits else f"S03 {size[0]} tokens and {size[1]} crops do not fit a row of {limits[0]} and {limits[1]}"


def encode(setup, planned, share=None, bad=""):
    """planned: (draw, tokens, crops) -> data.Example of that size, with the crops of a data.CropShard, or all.

    Where its pixels cannot be had, or are no longer what was planned (or bad says so already), a blank one of that size without loss.
    """
    (record, epoch), (_, tokenizer, config) = record_of(setup, planned[0]), setup
    try:
        if bad:
            raise data.Unreadable(bad)
        example = data.encode(record, tokenizer, config.data, config.seed, epoch, share)
        size = len(example.tokens), 0 if example.unit is None else len(example.unit)
        if size != tuple(planned[1:]):
            raise data.Unreadable(f"S21 {record['where']}: {size[0]} tokens and {size[1]} crops; planned: {planned[1]} and {planned[2]}")
    except data.Unreadable as e:
        return placeholder(setup, planned, share, record["id"], str(e))
    return example


def placeholder(setup, planned, share, name, reason):
    example = data.placeholder(name, *planned[1:], setup[2].data, reason)
    return data.select_crops(example, share) if share else example


def _start_worker(setup):
    global _setup
    import torch

    torch.set_num_threads(1)
    _setup = setup
    for sent in (signal.SIGINT, signal.SIGTERM):             # to all processes of a run: the trainer's to answer
        signal.signal(sent, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(trainer):
    """A trainer that is killed cannot end its workers: they look after it."""
    wait([trainer.sentinel])
    os._exit(1)


def _encode_in_worker(*asked):
    return encode(_setup, *asked)


# ---------------------------------------------------------------------------------------------------------------
# dealing the packs of a step to ranks


def work_of(pack):
    """(crops, attention) of a pack: what differs between rows of one length. Attention within examples, in pairs of tokens."""
    return sum(e[2] for e in pack), sum(e[1] ** 2 for e in pack)


def balance_packs(work, ranks):
    """Packs to ranks -> a list of pack numbers for each rank, equally many, heaviest first. work: (crops, attention) of each pack.

    Ranks wait for each other, so the slowest one counts: a pack of a slowest rank and another change places as long as that
    lessens the sum of squares of the ranks' loads, crops and attention alike; the best exchange first. Within a rank heavy
    packs come first, so that those of different ranks run side by side.
    """
    n = len(work)
    assert n % ranks == 0, f"{n} packs do not go evenly to {ranks} ranks"
    share = np.array(work, np.float64) / np.maximum(np.sum(work, axis=0), 1)         # (n,2)
    order = np.argsort(-share.sum(1), kind="stable")
    at = np.empty(n, np.int64)
    turns = np.arange(n) // ranks % 2 == 1
    at[order] = np.where(turns, ranks - 1 - np.arange(n) % ranks, np.arange(n) % ranks)       # 0 1 2 2 1 0 0 1 2 ..
    loads = np.stack([np.bincount(at, share[:, k], ranks) for k in (0, 1)], 1)
    for _ in range(10 * n):
        mine = np.flatnonzero(np.isin(at, loads.argmax(0)))                          # packs of the slowest ranks
        more = share[None] - share[mine, None]                                       # (m,n,2): what the rank of a gains from b for a
        gain = (more * (loads[at[mine]][:, None] - loads[at][None] + more)).sum(2)   # half the change of the sum of squares
        a, b = divmod(int(gain.argmin()), n)
        if gain[a, b] > -1e-12:
            break
        at[mine[a]], at[b] = at[b], at[mine[a]]
        loads = np.stack([np.bincount(at, share[:, k], ranks) for k in (0, 1)], 1)
    return [[int(k) for k in order if at[k] == rank] for rank in range(ranks)]
