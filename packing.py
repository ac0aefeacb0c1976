"""Which examples share a row, and the rows as one Batch (paper: packing; spec 8).

in    sizes (tokens, crops) of examples, then the encoded examples of the packs that were planned
out   packs of example numbers; Batch

The planner sees sizes only, so a pool of hundreds costs nothing, its state is a counter and some numbers, and a
pack can be planned on one machine and decoded on another. An example is never cut.

    row 0   | example 17: trunk, branch, branch | example 4: trunk, branch | example 21 | .....
    doc       0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0   1 1 1 1 1 1 1 1 1 1 1 1   2 2 2 2 2 2  -1-1-1
"""

import copy
import dataclasses
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor             # (B,T) int64, 0 where padding
    targets: torch.Tensor            # (B,T) int64, the next token, already shifted
    weights: torch.Tensor            # (B,T) float32, loss weight of each target; 0: no loss
    pos: torch.Tensor                # (B,T) int64, RoPE position; 0 where padding
    doc: torch.Tensor                # (B,T) int32, packed example; -1 where padding
    branch: torch.Tensor             # (B,T) int32, 0 trunk, j the j-th annotation
    bidir: torch.Tensor              # (B,T) int32, equal non-zero ids see each other both ways
    images: torch.Tensor             # (N,P,F) uint8, crops of the whole batch; at least one, blank ones last
    pool_src: torch.Tensor           # (M,K) int64, flat patch ids n*P+p of each visual token, -1 none; at least one row
    pool_dst: torch.Tensor           # (M,) int64, flat token index b*T+t that receives it
    ids: list                        # of str, record ids
    unit: torch.Tensor = None        # (n,) int32, which image or frame each crop belongs to that is not blank
    owner: torch.Tensor = None       # (n,) int32, whose it is under context parallelism: then images hold those of one rank
    route: object = None             # ... and who needs which pooled token
    # (L,) int64, flat indices b*T+t of the tokens here with loss: looked up where the batch is made, so that no GPU has to be waited for
    labelled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "labelled", self.weights.flatten().nonzero()[:, 0])

    def to(self, device):
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if torch.is_tensor(value):
                object.__setattr__(moved, name, to_device(value, device))
        return moved


def to_device(x, device):
    """x on a device; to a GPU from pinned memory, so that the copy goes on beside what it computes, and nobody waits for it."""
    if torch.device(device).type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


N_BINS = 256                               # steps of tokens in a row, for the search; twice as many cost twice the time and gain nothing
MAX_WAIT = 64                                 # packs after which an example is packed next, whatever else would be fuller


class Planner:
    """Iterates over packs: lists of example numbers whose tokens and crops fit a row.

    sizes: a sequence of (tokens, crops), or a function i -> (tokens, crops) without end; None stands for an example
    to leave out. One pack at a time, from a pool: an anchor, the largest example, or the oldest once it has seen MAX_WAIT
    packs go by, so that nothing starves; and the others that fill the row best beside it (`best_subset`). `oversize`
    lists what no row can hold; it never enters the pool.
    """

    def __init__(self, sizes, max_tokens, max_crops, pool=48):
        self.length = None if callable(sizes) else len(sizes)
        self.size_of = sizes if callable(sizes) else sizes.__getitem__
        assert pool > 0, pool
        self.limits, self.depth = (max_tokens, max_crops), pool
        self.next = self.packs = 0
        self.pool, self.oversize = [], []                    # pool: [(i, tokens, crops, packs made before it came)], oldest first
        self.last = []                                       # the pack made last, of such entries

    def _fill(self):
        while len(self.pool) < self.depth and (self.length is None or self.next < self.length):
            i, size = self.next, self.size_of(self.next)
            self.next += 1
            if size is None:
                continue
            tokens, crops = map(int, size)                   # plain integers: the search makes long ones of them
            if tokens > self.limits[0] or crops > self.limits[1]:
                self.oversize.append(i)
            else:
                self.pool.append((i, tokens, crops, self.packs))

    def __iter__(self):
        return self

    def __next__(self):
        self._fill()
        if not self.pool:
            raise StopIteration
        T, C = self.limits[0], max(self.limits[1], 1)
        rest = sorted(self.pool, key=lambda e: (-max(e[1] / T, e[2] / C), e[0]))
        anchor = self.pool[0] if self.packs - self.pool[0][3] >= MAX_WAIT else rest[0]
        rest.remove(anchor)
        # a row runs out of what the pool asks for most: weigh the fill of crops against that of tokens by a steep function of both
        tokens, crops = sum(e[1] for e in self.pool) / T, sum(e[2] for e in self.pool) / C
        weight = crops**16 / (tokens**16 + crops**16 + 1e-300)
        self.last = [anchor, *best_subset(rest, T - anchor[1], self.limits[1] - anchor[2], -(-T // N_BINS), (1 - weight) / T, weight / C)]
        taken = {e[0] for e in self.last}
        self.pool = [e for e in self.pool if e[0] not in taken]
        self.packs += 1
        return [e[0] for e in self.last]

    def state(self):
        return {"next": self.next, "packs": self.packs, "pool": [list(e) for e in self.pool], "oversize": list(self.oversize)}

    def restore(self, state):
        self.next, self.packs, self.oversize = state["next"], state["packs"], list(state["oversize"])
        self.pool = [tuple(e) for e in state["pool"]]


def best_subset(examples, tokens, crops, step, per_token, per_crop):
    """The examples (i, tokens, crops, ..) that fill `tokens` and `crops` best, worth per_token and per_crop each: exact subset-sum.

    Every sum that some subset reaches is a bit of one integer, a line of bits per number of crops, a bit per `step` of
    tokens (rounded up, so that what is reached fits). One more example is one shift, since lines and bits move alike:

        2 crops   . . . .              . . . #
        1 crop    . . # .      ->      . . # .           an example of one crop and one step, beside the sums so far
        0 crops   # . . .              # # . .           (0, 0) and (1, 2): it adds (1, 1) and (2, 3)

    Larger examples come first and are taken where sums are equal, so that small ones stay to fill gaps.
    """
    examples = [e for e in examples if e[1] <= tokens and e[2] <= crops]
    cells = tokens // step + 1                           # of a line
    line = -(-cells // 8) * 8                            # bits: whole bytes
    whole = (1 << line * (crops + 1)) - 1
    starts = whole // ((1 << line) - 1)                  # the first bit of every line
    sums = [1]
    for _, t, c, *_ in examples:
        n = -(-t // step)
        from_here = starts * ((1 << max(cells - n, 0)) - 1)                  # sums with room for it in their line
        sums.append(sums[-1] | (sums[-1] & from_here) << (c * line + n) & whole)

    best, at, table = -1.0, 0, sums[-1].to_bytes(line // 8 * (crops + 1), "little")
    for c in range(crops + 1):
        n = int.from_bytes(table[c * line // 8 : (c + 1) * line // 8], "little").bit_length() - 1
        if n >= 0 and c * per_crop + n * step * per_token > best:
            best, at = c * per_crop + n * step * per_token, c * line + n
    chosen, left = [], []
    for k in range(len(examples) - 1, -1, -1):           # from the smallest: is the sum reached without it?
        e = examples[k]
        if sums[k] >> at & 1:
            left.append(e)
        else:
            chosen.append(e)
            at -= e[2] * line - (-e[1] // step)
    return fill_gaps(chosen, left, tokens, crops, per_token, per_crop)


def fill_gaps(chosen, left, tokens, crops, per_token, per_crop):
    """What rounding left free, used: the chosen with all else that fits, then with the one swap that gains most."""
    worth = lambda e: e[1] * per_token + e[2] * per_crop                     # noqa: E731
    tokens, crops = tokens - sum(e[1] for e in chosen), crops - sum(e[2] for e in chosen)
    for e in sorted(left, key=worth, reverse=True):
        if e[1] <= tokens and e[2] <= crops:
            chosen, tokens, crops = [*chosen, e], tokens - e[1], crops - e[2]
            left.remove(e)
    gain, out, into = 1e-12, None, None
    for a in chosen:
        for b in left:
            if b[1] - a[1] <= tokens and b[2] - a[2] <= crops and worth(b) - worth(a) > gain:
                gain, out, into = worth(b) - worth(a), a, b
    return [e for e in chosen if e is not out] + ([into] if out else [])


def collate(rows, max_tokens, vision_config, crop_bucket=1, shared=False):
    """rows: one list of data.Example per row -> Batch of rows x max_tokens, on the CPU.

    Crops are padded with blank ones to a multiple of crop_bucket, so that a compiled model meets few shapes. shared: examples that
    hold the same array of crops, several questions about one film, pool from one copy, which is encoded once.
    """
    B, T, P = len(rows), max_tokens, vision_config.n_patch
    kinds = {"tokens": np.int64, "targets": np.int64, "weights": np.float32, "pos": np.int64, "branch": np.int32, "bidir": np.int32}
    row_of = {field: np.zeros((B, T), kind) for field, kind in kinds.items()}
    doc = np.full((B, T), -1, np.int32)
    images, unit, owner, sources, targets_of, first = [], [], [], [], [], {}
    n_crops = n_units = 0
    for b, row in enumerate(rows):
        start = 0
        for e, x in enumerate(row):
            n = len(x.tokens)
            assert start + n <= T, f"row {b} overflows at {x.id}: {start} + {n} > {T} tokens"
            place = np.s_[b, start : start + n]
            for field, rows_of_field in row_of.items():
                rows_of_field[place] = getattr(x, field)
            doc[place] = e
            if x.images is not None:
                assert len(x.pool_src) == len(x.pool_dst), f"{x.id}: {len(x.pool_src)} windows for {len(x.pool_dst)} patch tokens"
                crops, source, of_rank = x.images, x.pool_src, x.owner
                of_unit = np.arange(len(crops)) if x.unit is None else x.unit
                if len(of_unit) == 2 and of_unit[0] == of_unit[1]:
                    # a mosaic of one crop repeats the view: encode it once, both pool from it; the same numbers for half the work
                    crops, source, of_unit = crops[:1], np.where(source >= P, source - P, source), of_unit[:1]
                    of_rank = None if of_rank is None else of_rank[:1]
                known = first.setdefault(id(x.images), n_crops) if shared else n_crops
                sources.append(np.where(source >= 0, source + known * P, -1))
                targets_of.append(x.pool_dst + b * T + start)
                if known == n_crops:
                    images.append(crops)
                    unit += (n_units + of_unit).tolist()
                    owner += [] if of_rank is None else of_rank.tolist()
                    n_crops, n_units = n_crops + len(of_unit), unit[-1] + 1
            start += n
    held = sum(map(len, images))     # by this rank, where the crops of a row are shared out
    filled = max(-(-held // crop_bucket) * crop_bucket, min(crop_bucket, 2))         # of one crop, a compiler makes a case of its own
    images.append(np.zeros((filled - held, P, vision_config.n_pixel), np.uint8))
    if not any(map(len, sources)):   # nothing to pool: one blank crop and one window of nothing, so that shapes and collectives stay
        sources, targets_of = [np.full((1, 4), -1)], [np.zeros(1, np.int64)]
    width = max(s.shape[1] for s in sources)
    sources = [np.pad(s, ((0, 0), (0, width - s.shape[1])), constant_values=-1) for s in sources]
    joined = [np.concatenate(parts) for parts in (images, sources, targets_of)]
    fields = dict(zip(("images", "pool_src", "pool_dst"), joined, strict=True)) | row_of | {"doc": doc}
    return Batch(**{name: torch.from_numpy(a) for name, a in fields.items()},
                 ids=[x.id for row in rows for x in row], unit=torch.tensor(unit, dtype=torch.int32),
                 owner=torch.tensor(owner, dtype=torch.int32))
