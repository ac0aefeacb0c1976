"""Which examples share a row, and rows as one Batch (paper: packing; docs/molmo2.md 8).

in    sizes (tokens, crops) of examples, then the encoded examples of the packs that were planned
out   packs of example indices, which rank gets which pack, Batch

The planner sees sizes only: a pool of hundreds of examples costs bytes, its state is a counter and
some numbers, and a pack can be planned on one machine and decoded on another. An example is never
cut.

    row 0    | example 17: trunk, branch, branch | example 4: trunk, branch | example 21 | ......
    example    0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0   1 1 1 1 1 1 1 1 1 1 1 1   2 2 2 2 2 2  padding
"""

import copy
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor             # (B,T) int64, input ids; 0 where padding
    targets: torch.Tensor            # (B,T) int64, the next token, already shifted
    weights: torch.Tensor            # (B,T) float32, loss weight of each target; 0: no loss
    pos: torch.Tensor                # (B,T) int64, RoPE position; 0 where padding
    visible_until: torch.Tensor      # (B,T) int32, as is bidir: the mask (attention.py)
    bidir: torch.Tensor
    example: torch.Tensor            # (B,T) int32, whose token it is; the last number is padding
    images: torch.Tensor             # (N,P,F) uint8, crops, one at least; blank ones come last
    pool_src: torch.Tensor           # (M,K) int64, flat patch ids n*P+p of a visual token; -1: none
    pool_dst: torch.Tensor           # (M,) int64, flat token index b*T+t that receives it
    ids: list                        # of str, record ids
    # preference pairs (training/preferences.py)
    answer: torch.Tensor = None      # (B,T) int32, 2k + 1, 2k + 2: answers of pair k; 0: none
    pairs: list = ()                 # of str, names
    pair_weights: list = ()
    # under context parallelism (parallel.py)
    cp_rank: torch.Tensor = None     # (n,) int32, rank of each crop; `images` has this rank's
    dispatch: tuple = None           # (sent, received): pooled tokens to and from each rank
    queries: torch.Tensor = None     # (t,) int64, places that attend here; None: all
    # (L,) int64, flat indices of tokens with loss, found here so that no GPU is waited for
    labelled: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "labelled", self.weights.flatten().nonzero()[:, 0])

    def to(self, device):
        """To a GPU from pinned memory, so that the copy runs beside the computation."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if torch.is_tensor(value):
                if torch.device(device).type == "cuda" and not value.is_cuda:
                    value = value.pin_memory()
                object.__setattr__(moved, name, value.to(device, non_blocking=True))
        return moved


# --------------------------------------------------------------------------------------------------
# planning


class Item(NamedTuple):
    """An example in the planner's pool."""
    index: int
    tokens: int
    crops: int
    arrived: int  # packs that had been made when it came


N_BINS = 256  # of a row's tokens, for the search; finer ones gain nothing
MAX_WAIT = 64  # packs after which an example goes into the next one


class Planner:
    """Iterates over packs: lists of Items whose tokens and crops fit a row.

    sizes: a sequence of (tokens, crops), or a function i -> (tokens, crops) without end. Examples
    whose size is None, or that no row can hold, are left out. A pack is an anchor from the pool,
    the largest example, or the oldest once it has waited MAX_WAIT packs, and the others that fill
    the row best beside it (best_subset).
    """

    def __init__(self, sizes, max_tokens, max_crops, pool_size=48):
        assert pool_size > 0, pool_size
        self.n_examples = math.inf if callable(sizes) else len(sizes)
        self.size_of = sizes if callable(sizes) else sizes.__getitem__
        self.max_tokens, self.max_crops, self.pool_size = max_tokens, max_crops, pool_size
        self.next_index = 0
        self.n_packs = 0
        self.pool = []  # of Item, oldest first

    def fill_pool(self):
        while len(self.pool) < self.pool_size and self.next_index < self.n_examples:
            index = self.next_index
            size = self.size_of(index)
            self.next_index += 1
            if size is None:
                continue
            tokens, crops = map(int, size)  # no NumPy: the search uses long integers
            if tokens <= self.max_tokens and crops <= self.max_crops:
                self.pool.append(Item(index, tokens, crops, self.n_packs))

    def __iter__(self):
        return self

    def __next__(self):
        self.fill_pool()
        if not self.pool:
            raise StopIteration
        T, C = self.max_tokens, max(self.max_crops, 1)
        largest_first = sorted(self.pool, key=lambda e: (-max(e.tokens / T, e.crops / C), e.index))
        oldest = self.pool[0]
        anchor = oldest if self.n_packs - oldest.arrived >= MAX_WAIT else largest_first[0]
        largest_first.remove(anchor)
        # what the pool asks for most runs out first: weigh crops against tokens by a steep function
        tokens, crops = sum(e.tokens for e in self.pool) / T, sum(e.crops for e in self.pool) / C
        weight = crops**16 / (tokens**16 + crops**16 + 1e-300)
        others = best_subset(largest_first, T - anchor.tokens, self.max_crops - anchor.crops,
                             -(-T // N_BINS), (1 - weight) / T, weight / C)
        pack = [anchor, *others]
        taken = {e.index for e in pack}
        self.pool = [e for e in self.pool if e.index not in taken]
        self.n_packs += 1
        return pack

    def state(self):
        return {"next": self.next_index, "packs": self.n_packs,
                "pool": [list(e) for e in self.pool]}

    def restore(self, state):
        self.next_index = state["next"]
        self.n_packs = state["packs"]
        self.pool = [Item(*e) for e in state["pool"]]


def best_subset(items, tokens, crops, bin_size, per_token, per_crop):
    """The items that fill `tokens` and `crops` best, worth per_token and per_crop each: subset-sum.

    Every sum that some subset reaches is a bit of one long integer: a line of bits per number of
    crops, in it a bit per bin_size tokens (items are rounded up, so that what is reached fits). One
    more item is one shift, because lines and bits move alike:

        2 crops   . . . .              . . . #
        1 crop    . . # .      ->      . # # .           an item of one crop and one bin: to the
        0 crops   # . . .              # . . .           sums (0, 0), (1, 2) come (1, 1), (2, 3)

    Larger items come first and are taken where sums are equal, so that small ones can fill gaps.
    """
    items = [e for e in items if e.tokens <= tokens and e.crops <= crops]
    n_bins = tokens // bin_size + 1  # of a line
    line = -(-n_bins // 8) * 8  # bits of a line: whole bytes
    all_bits = (1 << line * (crops + 1)) - 1
    line_starts = all_bits // ((1 << line) - 1)  # the first bit of every line
    sums = [1]
    for e in items:
        bins = -(-e.tokens // bin_size)
        with_room = line_starts * ((1 << max(n_bins - bins, 0)) - 1)  # sums that it still fits
        shifted = (sums[-1] & with_room) << (e.crops * line + bins) & all_bits
        sums.append(sums[-1] | shifted)

    best, place = -1.0, 0
    table = sums[-1].to_bytes(line // 8 * (crops + 1), "little")
    for c in range(crops + 1):
        of_line = int.from_bytes(table[c * line // 8 : (c + 1) * line // 8], "little")
        bins = of_line.bit_length() - 1  # the most tokens with c crops
        worth = c * per_crop + bins * bin_size * per_token
        if bins >= 0 and worth > best:
            best, place = worth, c * line + bins

    chosen, rest = [], []
    for k in reversed(range(len(items))):  # the smallest first
        if sums[k] >> place & 1:  # the sum is reached without it
            rest.append(items[k])
        else:
            chosen.append(items[k])
            place -= items[k].crops * line + -(-items[k].tokens // bin_size)
    return fill_gaps(chosen, rest, tokens, crops, per_token, per_crop)


def fill_gaps(chosen, rest, tokens, crops, per_token, per_crop):
    """Uses what rounding left free: all that still fits, then the one swap that gains most."""
    def worth(e):
        return e.tokens * per_token + e.crops * per_crop

    tokens -= sum(e.tokens for e in chosen)
    crops -= sum(e.crops for e in chosen)
    for e in sorted(rest, key=worth, reverse=True):
        if e.tokens <= tokens and e.crops <= crops:
            chosen = [*chosen, e]
            rest.remove(e)
            tokens -= e.tokens
            crops -= e.crops
    best_gain, swap = 1e-12, None
    for a in chosen:
        for b in rest:
            fits = b.tokens - a.tokens <= tokens and b.crops - a.crops <= crops
            if fits and worth(b) - worth(a) > best_gain:
                best_gain, swap = worth(b) - worth(a), (a, b)
    if swap is None:
        return chosen
    return [e for e in chosen if e is not swap[0]] + [swap[1]]


def balance_packs(packs, n_ranks):
    """Packs of Items -> a list of pack numbers for each rank, equally many, heaviest first.

    Ranks wait for the slowest: a pack of a slowest rank and one of another rank are exchanged as
    long as that lessens the sum of squares of the ranks' loads, crops and attention alike. Within a
    rank heavy packs come first, so that those of different ranks run side by side.
    """
    n = len(packs)
    assert n % n_ranks == 0, f"{n} packs do not go evenly to {n_ranks} ranks"
    work = [(sum(e.crops for e in pack), sum(e.tokens**2 for e in pack)) for pack in packs]
    share = np.array(work, np.float64) / np.maximum(np.sum(work, axis=0), 1)  # (n,2)
    order = np.argsort(-share.sum(1), kind="stable")
    turn, place = divmod(np.arange(n), n_ranks)
    rank_of = np.empty(n, np.int64)
    rank_of[order] = np.where(turn % 2 == 1, n_ranks - 1 - place, place)  # 0 1 2 2 1 0 0 1 2 ..

    def loads():
        return np.stack([np.bincount(rank_of, share[:, k], n_ranks) for k in (0, 1)], 1)

    for _ in range(10 * n):
        load = loads()
        slowest = np.flatnonzero(np.isin(rank_of, load.argmax(0)))  # their packs
        more = share[None] - share[slowest, None]  # (m,n,2): what a's rank gains with b
        difference = load[rank_of[slowest]][:, None] - load[rank_of][None]
        change = (more * (difference + more)).sum(2)  # half of what it adds to the squares
        a, b = divmod(int(change.argmin()), n)
        if change[a, b] > -1e-12:
            break
        rank_of[slowest[a]], rank_of[b] = rank_of[b], rank_of[slowest[a]]
    return [[int(k) for k in order if rank_of[k] == rank] for rank in range(n_ranks)]


# --------------------------------------------------------------------------------------------------
# rows -> Batch


def collate(rows, max_tokens, vision_config, crop_bucket=1, share_images=False):
    """rows: one list of data.Example per row -> Batch of rows x max_tokens, on the CPU.

    Crops are padded with blank ones to a multiple of crop_bucket (if there are none, to 2 at most),
    so that a compiled model meets few shapes. share_images: examples with the same array of crops,
    several questions about one video, pool from one copy, which is encoded once.
    """
    B, T = len(rows), max_tokens
    n_examples = sum(map(len, rows))
    kinds = {"tokens": np.int64, "targets": np.int64, "weights": np.float32, "pos": np.int64}
    fields = {name: np.zeros((B, T), kind) for name, kind in kinds.items()}
    until = np.full((B, T), T, np.int32)
    bidir = np.zeros((B, T), np.int32)
    example = np.full((B, T), n_examples, np.int32)
    answer = np.zeros((B, T), np.int32)
    pairs, pair_weights = [], []
    crops = Crops(vision_config.n_patch, share_images)
    number = 0
    for b, row in enumerate(rows):
        start = 0
        for e, x in enumerate(row, 1):
            stop = start + len(x.tokens)
            assert stop <= T, f"row {b} overflows at {x.id}: {stop} > {T} tokens"
            place = np.s_[b, start:stop]
            for name, array in fields.items():
                array[place] = getattr(x, name)
            until[place] = start + x.visible_until
            bidir[place] = e * x.bidir  # unique in the row
            example[place] = number
            for name, (weight, answers) in x.pairs.items():
                # a record may have a preference twice
                for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
                    answer[place][chosen] = 2 * len(pairs) + 1
                    answer[place][rejected] = 2 * len(pairs) + 2
                    pairs.append(name)
                    pair_weights.append(weight)
            if x.images is not None:
                crops.add(x, b * T + start)
            number += 1
            start = stop
    fields |= {"visible_until": until, "bidir": bidir, "example": example, "answer": answer}
    fields |= crops.arrays(crop_bucket, vision_config.n_pixel)
    return Batch(**{name: torch.from_numpy(array) for name, array in fields.items()},
                 ids=[x.id for row in rows for x in row], pairs=pairs, pair_weights=pair_weights)


class Crops:
    """The crops of a batch as they are collected: images, pool_src, pool_dst, cp_rank."""

    def __init__(self, n_patch, share_images):
        self.n_patch, self.share_images = n_patch, share_images
        self.images, self.pool_src, self.pool_dst, self.cp_rank = [], [], [], []
        self.n_crops = 0
        self.first_crop = {}  # of an array of images that several examples share

    def add(self, x, first_token):
        P = self.n_patch
        assert len(x.pool_src) == len(x.pool_dst), f"{x.id}: a window for every patch token"
        images, source, image_id, cp_rank = x.images, x.pool_src, x.image_id, x.cp_rank
        if len(image_id) == 2 and image_id[0] == image_id[1]:
            # a mosaic of one crop has the pixels of the low-resolution crop: both pool from one,
            # though the planner has counted two
            source = np.where(source >= P, source - P, source)
            images, image_id = images[:1], image_id[:1]
            cp_rank = None if cp_rank is None else cp_rank[:1]
        first = self.n_crops
        if self.share_images:
            first = self.first_crop.setdefault(id(x.images), self.n_crops)
        self.pool_src.append(np.where(source >= 0, source + first * P, -1))
        self.pool_dst.append(x.pool_dst + first_token)
        if first == self.n_crops:
            self.images.append(images)
            self.cp_rank += [] if cp_rank is None else cp_rank.tolist()
            self.n_crops += len(image_id)

    def arrays(self, bucket, n_pixel):
        n = sum(map(len, self.images))  # of one rank, with a CropShard
        padded = max(-(-n // bucket) * bucket, min(bucket, 2))  # a compiler makes 1 a constant
        blank = np.zeros((padded - n, self.n_patch, n_pixel), np.uint8)
        source, target = self.pool_src, self.pool_dst
        if not any(map(len, source)):  # one empty window: collectives need some tensor
            source, target = [np.full((1, 4), -1)], [np.zeros(1, np.int64)]
        K = max(s.shape[1] for s in source)
        source = [np.pad(s, ((0, 0), (0, K - s.shape[1])), constant_values=-1) for s in source]
        return {"images": np.concatenate([*self.images, blank]), "pool_src": np.concatenate(source),
                "pool_dst": np.concatenate(target), "cp_rank": np.array(self.cp_rank, np.int32)}
