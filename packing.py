"""Which examples share a row, and rows as one Batch (paper: 3.2 and appendix B; docs/molmo2.md 8).

in    sizes (tokens, crops) of examples, then the encoded examples of the packs that were planned
out   packs of example indices, which rank gets which pack, Batch

A row is a packed sequence, a pack is the list of its examples. With one example per row, stage 2
would need 3.9 times as many rows as a lower bound; with this planner it needs 1.001 times as many
(RESULTS.md). The planner gets sizes only and no pixels. So an example in the pool is a few numbers,
the state is easy to save, and one process can plan packs that others decode. An example is never
cut into two rows.

    row 0    | example 17: prefix, branch, branch | example 4: prefix, branch | example 21 | .....
    example    0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1 1 1 1 1 1    2 2 2 2 2 2  padding
"""

import copy
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


@dataclass
class Batch:
    tokens: torch.Tensor             # (B,T) int64, input ids; 0 where padding
    targets: torch.Tensor            # (B,T) int64, the next token; data.layout has shifted it
    weights: torch.Tensor            # (B,T) float32, loss weight of each target; 0: no loss
    pos: torch.Tensor                # (B,T) int64, RoPE position; 0 where padding
    visible_until: torch.Tensor      # (B,T) int32, as is bidir: the mask (attention.py)
    bidir: torch.Tensor
    example: torch.Tensor            # (B,T) int32, number of its example; padding: n examples
    annotation: torch.Tensor         # (B,T) int32, of the example, from 1; 0: prefix or padding
    images: torch.Tensor             # (N,P,F) uint8, crops, at least one; blank crops are last
    pool_src: torch.Tensor           # (M,K) int64, patches n*P+p that a visual token pools, or -1
    pool_dst: torch.Tensor           # (M,) int64, flat index b*T+t of the <im_patch> that gets it
    ids: list                        # of str, record ids
    # under context parallelism (parallel.py)
    cp_rank: torch.Tensor = None     # (n,) int32, rank of every crop; `images` has this rank's
    dispatch: tuple = None           # two lists: numbers of tokens sent to, received from each rank
    queries: torch.Tensor = None     # (t,) int64, positions of this rank's queries; None: all
    # (L,) int64, flat indices of tokens with loss. They are found here on the CPU,
    # because on a GPU nonzero would make the CPU wait for the result.
    labelled: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.labelled = self.weights.flatten().nonzero()[:, 0]

    def to(self, device):
        """-> the Batch on a device. From pinned memory, the CPU need not wait for the copy."""
        device = torch.device(device)
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if not torch.is_tensor(value):
                continue
            if device.type == "cuda" and not value.is_cuda:
                value = value.pin_memory()
            value = value.to(device, non_blocking=True)
            setattr(moved, name, value)
        return moved


# --------------------------------------------------------------------------------------------------
# planning


class Item(NamedTuple):
    """An example in the pool of the planner."""
    index: int
    tokens: int
    crops: int
    arrived: int  # how many packs had been made when it came into the pool


N_BINS = 256  # bins in which the search counts tokens; 512 bins gain nothing (docs/log.md)
MAX_WAIT = 64  # after so many packs, a waiting example begins the next pack


class Planner:
    """Iterates over packs: lists of Items whose tokens and crops fit into a row.

    sizes: a sequence of (tokens, crops), or an endless function i -> (tokens, crops). An example is
    skipped if its size is None, or larger than a row. A pack begins with an anchor: the largest
    example of the pool, or the oldest one if it has waited for MAX_WAIT packs. Then best_subset
    chooses the examples that fill the rest of the row best.
    """

    def __init__(self, sizes, max_tokens, max_crops, pool_size=48):
        assert pool_size > 0, pool_size
        if callable(sizes):
            self.n_examples = math.inf
            self.size_of = sizes
        else:
            self.n_examples = len(sizes)
            self.size_of = sizes.__getitem__
        self.max_tokens = max_tokens
        self.max_crops = max_crops
        self.pool_size = pool_size
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
            tokens, crops = map(int, size)  # not NumPy's: best_subset needs integers of any length
            if tokens <= self.max_tokens and crops <= self.max_crops:
                self.pool.append(Item(index, tokens, crops, self.n_packs))

    def __iter__(self):
        return self

    def __next__(self):
        self.fill_pool()
        if not self.pool:
            raise StopIteration
        T = self.max_tokens
        C = max(self.max_crops, 1)  # only a divisor, so never 0

        def share(e):
            return max(e.tokens / T, e.crops / C)

        # The largest first, because it fits with few others. The index decides between
        # equal sizes, so that the packs of a run are always the same.
        largest_first = sorted(self.pool, key=lambda e: (-share(e), e.index))
        anchor = largest_first[0]
        oldest = self.pool[0]
        waited = self.n_packs - oldest.arrived
        if waited >= MAX_WAIT:
            anchor = oldest
        largest_first.remove(anchor)
        # If the crops of the pool need more rows than its tokens do, they decide how many rows
        # there will be. Then a good row is one that is full of crops. crop_worth is a soft
        # switch: nearly 1 if crops decide, nearly 0 if tokens do.
        rows_for_tokens = sum(e.tokens for e in self.pool) / T
        rows_for_crops = sum(e.crops for e in self.pool) / C
        token_power = rows_for_tokens**16
        crop_power = rows_for_crops**16
        crop_worth = crop_power / (token_power + crop_power + 1e-300)  # 1e-300: never 0 / 0
        per_token = (1 - crop_worth) / T
        per_crop = crop_worth / C
        free_tokens = T - anchor.tokens
        free_crops = self.max_crops - anchor.crops
        bin_size = math.ceil(T / N_BINS)
        others = best_subset(
            largest_first, free_tokens, free_crops, bin_size, per_token, per_crop)
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
    """The items that fill `tokens` and `crops` best, if a token is worth per_token and a crop
    per_crop. This is a subset-sum problem in two dimensions.

    One long integer has a bit for every sum that some subset reaches. It has a line of bits per
    number of crops, and in a line a bit per bin_size tokens. The tokens of an item are rounded up
    to bins, so that every sum fits. Adding an item to all sums is one shift of the integer. Here,
    an item of one crop and one bin is added to the sums (0 crops, 0 bins) and (1 crop, 2 bins):

        bins      0 1 2 3              0 1 2 3
        2 crops   . . . .              . . . #
        1 crop    . . # .      ->      . # # .       the new sums are (1, 1) and (2, 3)
        0 crops   # . . .              # . . .

    Planning takes 57 microseconds per example in stage 3. The official code computes a table of all
    sums, which takes 466 (RESULTS.md).
    """
    items = [e for e in items if e.tokens <= tokens and e.crops <= crops]
    n_bins = tokens // bin_size + 1  # sums of 0, 1, 2 .. bins
    line = math.ceil(n_bins / 8) * 8  # bits of a line, rounded up to whole bytes
    all_bits = ones(line * (crops + 1))
    line_starts = all_bits // ones(line)  # a one at the start of every line: 111111 // 11 = 10101
    sums = [1]  # sums[k]: what the first k items reach; at first only the empty sum, bit 0
    shifts = []  # of each item, in bits
    for e in items:
        bins = math.ceil(e.tokens / bin_size)
        shift = e.crops * line + bins
        # Keep sums that have room for the item. Others would be shifted into the next line.
        # The product has the same run of ones in every line.
        with_room = line_starts * ones(max(n_bins - bins, 0))
        shifted = (sums[-1] & with_room) << shift
        sums.append(sums[-1] | (shifted & all_bits))
        shifts.append(shift)

    # for each number of crops only the highest sum of tokens can be the best one
    best = -1.0
    bit = 0
    # as bytes, so that a line can be cut out without a shift of the whole integer
    n_bytes = line // 8
    table = sums[-1].to_bytes(n_bytes * (crops + 1), "little")
    for c in range(crops + 1):
        line_sums = table[c * n_bytes : (c + 1) * n_bytes]
        bins = int.from_bytes(line_sums, "little").bit_length() - 1  # the most tokens with c crops
        worth = c * per_crop + bins * bin_size * per_token
        if bins >= 0 and worth > best:
            best = worth
            bit = c * line + bins
    chosen, rest = items_of_sum(items, shifts, sums, bit)
    return fill_gaps(chosen, rest, tokens, crops, per_token, per_crop)


def items_of_sum(items, shifts, sums, bit):
    """The variables of best_subset, and the bit of a sum -> items that give this sum, the others.

    It goes from the smallest item to the largest. An item is not used if the larger ones reach the
    sum without it. So small ones stay in the pool to fill gaps.
    """
    chosen = []
    rest = []
    for k in reversed(range(len(items))):
        if (sums[k] >> bit) & 1:  # the items before k reach the sum, too
            rest.append(items[k])
        else:
            chosen.append(items[k])
            bit -= shifts[k]
    return chosen, rest


def ones(n):
    """-> an integer whose lowest n bits are ones."""
    return (1 << n) - 1


def fill_gaps(chosen, rest, tokens, crops, per_token, per_crop):
    """Rounding to bins leaves some tokens free. Adds every item that still fits, then makes the one
    exchange of two items that gains most."""
    def worth(e):
        return e.tokens * per_token + e.crops * per_crop

    free_tokens = tokens - sum(e.tokens for e in chosen)
    free_crops = crops - sum(e.crops for e in chosen)
    for e in sorted(rest, key=worth, reverse=True):
        if e.tokens <= free_tokens and e.crops <= free_crops:
            chosen = [*chosen, e]
            rest.remove(e)  # from the list, not from the sorted copy
            free_tokens -= e.tokens
            free_crops -= e.crops
    best_gain = 1e-12  # a gain below this is rounding
    swap = None
    for a in chosen:
        for b in rest:
            fits = b.tokens - a.tokens <= free_tokens and b.crops - a.crops <= free_crops
            gain = worth(b) - worth(a)
            if fits and gain > best_gain:
                best_gain = gain
                swap = a, b
    if swap is None:
        return chosen
    removed, added = swap
    kept = [e for e in chosen if e is not removed]
    return [*kept, added]


def balance_packs(packs, n_ranks):
    """Packs of Items -> for each rank a list of pack numbers, all of equal length, heaviest first.

    In every step all ranks wait for the slowest one. So a pack of a slowest rank and one of another
    rank are exchanged as long as this reduces the sum of squares of the loads of all ranks, in
    crops and in attention. For 32 ranks of stage 3, the slowest then has 1.03 times the mean
    attention; with round-robin it has 1.91 times (docs/log.md).
    """
    n = len(packs)
    assert n % n_ranks == 0, f"{n} packs cannot be divided evenly among {n_ranks} ranks"
    # the ViT's work grows with crops; attention with the square of each example, not of the row
    work = np.zeros((n, 2))
    for k, pack in enumerate(packs):
        work[k] = sum(e.crops for e in pack), sum(e.tokens**2 for e in pack)
    total = np.maximum(work.sum(0), 1)
    share = work / total  # (n,2)
    order = np.argsort(-share.sum(1), kind="stable")
    # a good start is 0 1 2 2 1 0 0 1 2 ..: the rank with the heaviest pack gets the lightest next
    turn, position = divmod(np.arange(n), n_ranks)
    rank_of = np.empty(n, np.int64)
    backwards = n_ranks - 1 - position
    rank_of[order] = np.where(turn % 2 == 1, backwards, position)
    for _ in range(10 * n):
        crops = np.bincount(rank_of, share[:, 0], n_ranks)
        attention = np.bincount(rank_of, share[:, 1], n_ranks)
        load = np.stack([crops, attention], 1)  # (n_ranks,2)
        # packs of the ranks with the most crops or the most attention
        slowest = np.flatnonzero(np.isin(rank_of, load.argmax(0)))
        # Exchange a, one of the m packs of the slowest ranks, for each pack b. The loads x and y of
        # their ranks become x + more, y - more; squares grow by 2 more (x - y + more).
        more = share[None] - share[slowest, None]
        difference = load[rank_of[slowest]][:, None] - load[rank_of][None]
        change = (more * (difference + more)).sum(2)
        i, b = divmod(int(change.argmin()), n)
        if change[i, b] > -1e-12:
            break
        a = slowest[i]
        rank_of[a], rank_of[b] = rank_of[b], rank_of[a]
    # heaviest first on every rank, so that packs which run at the same time are about equal
    packs_of = [[] for _ in range(n_ranks)]
    for k in order.tolist():
        packs_of[rank_of[k]].append(k)
    return packs_of


# --------------------------------------------------------------------------------------------------
# rows -> Batch


def collate(rows, max_tokens, vision_config, crop_bucket=1, share_images=False):
    """rows: one list of data.Example per row -> Batch of rows x max_tokens, on the CPU.

    The crops are filled with blank ones to a multiple of crop_bucket, so that a compiled model gets
    few different shapes. share_images: if examples have the same array of crops, such as several
    questions about one video, it is encoded once.
    """
    B = len(rows)
    T = max_tokens
    n_examples = sum(map(len, rows))
    dtypes = {"tokens": np.int64, "targets": np.int64, "weights": np.float32, "pos": np.int64,
              "annotation": np.int32}
    fields = {name: np.zeros((B, T), dtype) for name, dtype in dtypes.items()}
    # Padding is visible until the row ends, so padding attends to padding. The softmax
    # of a query without any key would be NaN.
    until = np.full((B, T), T, np.int32)
    bidir = np.zeros((B, T), np.int32)
    example = np.full((B, T), n_examples, np.int32)
    crops = Crops(vision_config.n_patch, share_images)
    number = 0
    for b, row in enumerate(rows):
        start = 0
        for e, x in enumerate(row, 1):
            stop = start + len(x.tokens)
            assert stop <= T, f"row {b} overflows at {x.id}: {stop} > {T} tokens"
            span = np.s_[b, start:stop]
            for name, array in fields.items():
                array[span] = getattr(x, name)
            # from positions in the example to positions in the row; pos, for RoPE, stays as it is
            until[span] = start + x.visible_until
            # one number per example, or images of different examples could attend to each other
            bidir[span] = e * x.bidir
            example[span] = number
            if x.images is not None:
                crops.add(x, b * T + start)
            number += 1
            start = stop
    fields |= {"visible_until": until, "bidir": bidir, "example": example}
    fields |= crops.arrays(crop_bucket, vision_config.n_pixel)
    tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
    ids = [x.id for row in rows for x in row]
    return Batch(**tensors, ids=ids)


class Crops:
    """The crops of a batch as they are collected: images, pool_src, pool_dst, cp_rank."""

    def __init__(self, n_patch, share_images):
        self.n_patch = n_patch
        self.share_images = share_images
        self.images = []
        self.pool_src = []
        self.pool_dst = []
        self.cp_rank = []
        self.n_crops = 0
        self.first_crop = {}  # {id of an array of crops: number of its first crop}

    def add(self, x, first_token):
        P = self.n_patch
        assert len(x.pool_src) == len(x.pool_dst), f"{x.id}: one window per <im_patch>"
        images = x.images
        image_id = x.image_id
        cp_rank = x.cp_rank
        source = x.pool_src
        if len(image_id) == 2 and image_id[0] == image_id[1]:
            # A small image has a mosaic of one crop, with the same pixels as the
            # low-resolution crop. Encode one of them, and let the windows of both pool
            # from it. The planner has counted two, which is on the safe side.
            source = np.where(source >= P, source - P, source)
            images = images[:1]
            image_id = image_id[:1]
            if cp_rank is not None:
                cp_rank = cp_rank[:1]
        first = self.n_crops
        if self.share_images:
            first = self.first_crop.setdefault(id(x.images), self.n_crops)
        # from patches of the example to patches of the batch; -1 stays "no patch"
        self.pool_src.append(np.where(source >= 0, source + first * P, -1))
        self.pool_dst.append(x.pool_dst + first_token)
        if first == self.n_crops:  # these crops are not in the batch yet
            self.images.append(images)
            if cp_rank is not None:
                self.cp_rank += cp_rank.tolist()
            self.n_crops += len(image_id)  # crops of all ranks, also if `images` has fewer

    def arrays(self, bucket, n_pixel):
        n = sum(map(len, self.images))  # with a CropShard, these are the crops of one rank
        # At least one crop, so that the ViT runs on every rank: FSDP gathers its weights from all.
        # Two if crops are padded anyway, because torch.compile makes a size of 1 a constant.
        least = 1 if bucket == 1 else 2
        padded = max(math.ceil(n / bucket) * bucket, least)
        blank = np.zeros((padded - n, self.n_patch, n_pixel), np.uint8)
        source = self.pool_src
        target = self.pool_dst
        if not any(map(len, source)):  # no visual token: empty windows, for the same reasons
            source = [np.full((least, 4), -1)]
            target = [np.zeros(least, np.int64)]
        K = max(s.shape[1] for s in source)  # 4 for images, 9 if the batch contains a video
        source = [np.pad(s, ((0, 0), (0, K - s.shape[1])), constant_values=-1) for s in source]
        return {"images": np.concatenate([*self.images, blank]), "pool_src": np.concatenate(source),
                "pool_dst": np.concatenate(target), "cp_rank": np.array(self.cp_rank, np.int32)}
