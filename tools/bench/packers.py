"""Packers to compare with packing.Planner, and how few packs any packer can reach.

A packer is a function (sizes, max_tokens, max_crops) -> packs, each a list of example numbers. It
takes the next (tokens, crops) from the iterable `sizes` only when it needs another example.
"""

from bisect import insort
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

import packing

# ------------------------------------------------------------------------------------------------
# lower bounds


def dual_feasible(sizes, threshold, limit):
    """Sizes (n,) with those below the threshold <= limit / 2 set to 0, and those above
    limit - threshold set to the limit (Martello and Toth; Fekete and Schepers).

    Whatever fits into one pack still sums to the limit at most: beside a size above
    limit - threshold there is only room for sizes that are set to 0. So any packing needs at least
    sum(result) / limit packs.
    """
    kept = np.where(sizes >= threshold, sizes, 0)
    return np.where(sizes > limit - threshold, limit, kept)


def lower_bounds(sizes, limits):
    """sizes (n,2), limits (2,) -> (packs by volume, packs by dual feasible functions): no packer
    needs fewer than either. Tokens and crops are bounded apart; the larger bound counts."""
    by_volume = []
    by_dual = []
    for resource, limit in zip(sizes.T, limits, strict=True):
        by_volume.append(-(-resource.sum() // limit))
        for threshold in np.unique(np.linspace(1, limit // 2, 500).astype(int)):
            by_dual.append(-(-dual_feasible(resource, threshold, limit).sum() // limit))
    return int(max(by_volume)), int(max(by_dual))


# ------------------------------------------------------------------------------------------------
# packers


def no_packing(sizes, max_tokens, max_crops):
    """Every example is a pack."""
    for i, _ in enumerate(sizes):
        yield [i]


def in_order(sizes, max_tokens, max_crops):
    """Example after example until the next one does not fit."""
    pack = []
    used_tokens = 0
    used_crops = 0
    for i, (tokens, crops) in enumerate(sizes):
        if used_tokens + tokens > max_tokens or used_crops + crops > max_crops:
            yield pack
            pack = []
            used_tokens = 0
            used_crops = 0
        pack.append(i)
        used_tokens += tokens
        used_crops += crops
    yield pack


class OpenPack(NamedTuple):
    tokens: int = 0
    crops: int = 0
    members: tuple = ()


def internvl_buffer(sizes, max_tokens, max_crops, max_open=20):
    """InternVL's buffer without overflow: up to max_open unfinished packs, most crops first.

    An example joins the first pack that has room for it. A pack leaves when it is exactly full, or
    as the first of too many.
    """
    unfinished = []
    for i, (tokens, crops) in enumerate(sizes):
        pack = OpenPack()
        for k, candidate in enumerate(unfinished):
            if candidate.tokens + tokens <= max_tokens and candidate.crops + crops <= max_crops:
                pack = unfinished.pop(k)
                break
        pack = OpenPack(pack.tokens + tokens, pack.crops + crops, (*pack.members, i))
        if pack.tokens == max_tokens or pack.crops == max_crops:
            yield list(pack.members)
        else:
            insort(unfinished, pack, key=lambda p: -p.crops)
        if len(unfinished) > max_open:
            yield list(unfinished.pop(0).members)
    for pack in unfinished:
        yield list(pack.members)


def first_fit(sizes, max_tokens, max_crops, pool=48):
    """First-fit decreasing on a pool: the oldest example first, so that none starves, then from
    the largest down every example that still fits."""
    waiting = []  # of (number, (tokens, crops))
    stream = enumerate(sizes)
    while True:
        waiting += islice(stream, pool - len(waiting))
        if not waiting:
            return
        oldest = waiting[0]
        others = sorted(
            waiting[1:], key=lambda e: -max(e[1][0] / max_tokens, e[1][1] / max_crops)
        )
        pack = []
        used_tokens = 0
        used_crops = 0
        for i, (tokens, crops) in [oldest, *others]:
            if used_tokens + tokens <= max_tokens and used_crops + crops <= max_crops:
                pack.append(i)
                used_tokens += tokens
                used_crops += crops
        waiting = [(i, size) for i, size in waiting if i not in pack]
        yield pack


def knapsack(sizes, max_tokens, max_crops, image_weight, granularity):
    """The official choice (docs/molmo2.md 8): which of sizes [(tokens, crops), ..] give the highest
    sum of tokens + image_weight * crops -> their numbers, from the last to the first.

    Tokens count in steps of the granularity, rounded up. best[s, c], float32, is the highest value
    of a subset with at most s steps and c crops; improved[i] says where example i raised it. The
    subset is read off backwards, from the last example to the first.
    """
    max_steps = -(-max_tokens // granularity)
    best = np.zeros((max_steps + 1, max_crops + 1), np.float32)
    improved = np.zeros((len(sizes), *best.shape), bool)
    for i, (tokens, crops) in enumerate(sizes):
        steps = -(-tokens // granularity)
        if steps > max_steps or crops > max_crops:
            continue
        value = np.float32(tokens + image_weight * crops)
        with_example = best[: max_steps + 1 - steps, : max_crops + 1 - crops] + value
        without = best[steps:, crops:]
        np.greater(with_example, without, out=improved[i, steps:, crops:])
        np.maximum(with_example, without, out=without)

    chosen = []
    step = max_steps
    crop = max_crops
    for i in reversed(range(len(sizes))):
        if improved[i, step, crop]:
            chosen.append(i)
            step -= -(-sizes[i][0] // granularity)
            crop -= sizes[i][1]
    if not chosen:
        raise RuntimeError(f"None of the {len(sizes)} examples in the pool fits into a pack.")
    return chosen


def official(sizes, max_tokens, max_crops, image_weight, pool=48):
    """The official packer (docs/molmo2.md 8): when the pool is full and one more example arrives,
    the knapsack of the pool is a pack, whatever the age of the examples.

    An example that fills a row leaves alone and at once. RuntimeError where nothing in the pool can
    ever leave. The official stream never ends; at the end of this one the same rule empties the
    pool.
    """
    granularity = max(1, max_tokens // 512)
    max_steps = -(-max_tokens // granularity)
    waiting = []  # of (number, (tokens, crops))

    def take_pack():
        pool_sizes = [size for _, size in waiting]
        chosen = knapsack(pool_sizes, max_tokens, max_crops, image_weight, granularity)
        # from the last to the first, so that the places of the others do not move
        return [waiting.pop(k)[0] for k in chosen]

    for i, size in enumerate(sizes):
        if -(-size[0] // granularity) >= max_steps:
            yield [i]
            continue
        if len(waiting) == pool:
            yield take_pack()
        waiting.append((i, size))
    while waiting:
        yield take_pack()


OFFICIAL = "official knapsack, 48"


def packers(stage):
    """{name in the table: packer}; the official one weighs crops by stage."""
    return {
        "none": no_packing,
        "in order until full": in_order,
        "InternVL's buffer, 20": internvl_buffer,
        "first fit, oldest first, 48": first_fit,
        OFFICIAL: partial(official, image_weight=1 if stage == 1 else 30),
        "ours": packing.Planner,
    }
