"""Packers side by side on a seeded stream of sizes: how full the packs are, how long examples wait
and how much time planning takes.

    python -m tools.bench pack              # stages 1 to 3, three streams of 20,000 examples each
    python -m tools.bench pack --n 4000 --seeds 1 --stages 2


Prints for each stage a table of packers and a table of what message trees and packing save.
tools/bench/stream.py describes the stream. The bound is the number of packs that any packer needs
at least. A packer is a function (sizes, max_tokens, max_crops) -> packs, each a list of example
numbers; it takes the next (tokens, crops) from the iterable `sizes` only when it needs one more.
"""

import time
from bisect import insort
from functools import partial
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import numpy as np

import packing
from tools.bench.measure import positive, print_table
from tools.bench.stream import recipe, stream


def lower_bound(sizes, limits):
    """sizes (n,2), limits (2,) -> packs that any packer needs, by dual feasible functions (Martello
    and Toth; Fekete and Schepers). Tokens and crops are bounded apart.

    Sizes below a threshold <= limit / 2 count as 0, sizes above limit - threshold as the limit.
    Whatever fits into one pack still sums to the limit at most: beside a size above
    limit - threshold there is only room for sizes that count as 0. So any packing needs at least
    their sum / limit packs. With threshold 0 that is the volume.
    """
    bounds = []
    for resource, limit in zip(sizes.T, limits, strict=True):
        for threshold in {0, *np.linspace(1, limit // 2, 500).astype(int).tolist()}:
            counted = np.where(resource >= threshold, resource, 0)
            counted = np.where(resource > limit - threshold, limit, counted)
            bounds.append(-(-counted.sum() // limit))
    return int(max(bounds))


# ------------------------------------------------------------------------------------------------
# packers


def no_packing(sizes, max_tokens, max_crops):
    """Every example is a pack."""
    return ([i] for i, _ in enumerate(sizes))


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
        others = sorted(
            waiting[1:], key=lambda e: -max(e[1][0] / max_tokens, e[1][1] / max_crops)
        )
        pack = []
        used_tokens = 0
        used_crops = 0
        for i, (tokens, crops) in [waiting[0], *others]:
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
        # from the last to the first, so that the positions of the others do not move
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


class CountedSizes(list):
    """Sizes that know how many of them were read: an example arrives when it is first read."""

    n_read = 0

    def __getitem__(self, i):
        self.n_read = max(self.n_read, i + 1)
        return super().__getitem__(i)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def measure(packer, sizes, bound, limits):
    """One packer on sizes [(tokens, crops), ..] -> its row of the table. bound: packs that any
    packer needs. The wait of an example counts the packs that were made after it arrived and before
    its own."""
    counted = CountedSizes(sizes)
    packs = []
    n_read = []  # sizes read when each pack was made
    start = time.process_time()
    for pack in packer(counted, *limits):
        packs.append(pack)
        n_read.append(counted.n_read)
    seconds = time.process_time() - start

    fill = np.array([np.sum([sizes[i] for i in pack], axis=0) for pack in packs])
    pack_of = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    # the first pack that was made after each example had arrived
    arrived = np.searchsorted(n_read, np.concatenate(packs), side="right")
    waits = pack_of - arrived
    return {
        "packs": len(packs),
        "over": len(packs) / bound,
        "examples": len(sizes) / len(packs),
        "tokens": fill[:, 0].mean() / limits[0],
        "crops": fill[:, 1].mean() / limits[1],
        "wait": waits.mean(),
        "wait_p99": np.percentile(waits, 99),
        "wait_max": waits.max(),
        "us": seconds / len(sizes) * 1e6,
    }


def pack_totals(sizes, limits):
    """Packs of sizes [(tokens, crops), ..] by packing.Planner -> (tokens, crops) of each pack."""
    packs = packing.Planner(sizes, *limits)
    return [tuple(np.sum([sizes[i] for i in pack], axis=0).tolist()) for pack in packs]


def count_sequences(sequences):
    """Sequences [(tokens, crops), ..] -> how many, tokens in batches of 8 padded to the longest of
    each batch, tokens without padding, crops."""
    tokens = [t for t, _ in sequences]
    batches = [tokens[k : k + 8] for k in range(0, len(tokens), 8)]
    return {
        "sequences": len(sequences),
        "batches": sum(max(batch) * len(batch) for batch in batches),
        "tokens": sum(tokens),
        "crops": sum(c for _, c in sequences),
    }


def savings(examples, limits):
    """[ExampleSize, ..] -> the sequences, tokens and crops that message trees and packing leave,
    each alone and both together."""
    trees = [(e.tokens, e.crops) for e in examples]
    single = [(e.trunk + text, e.crops) for e in examples for text in e.branches]
    # in random order, as training draws them: not all annotations of a video in one row
    order = np.random.default_rng(0).permutation(len(single))
    single = [single[i] for i in order]
    return {
        "one annotation per sequence": count_sequences(single),
        "message trees": count_sequences(trees),
        "packing": count_sequences(pack_totals(single, limits)),
        "both": count_sequences(pack_totals(trees, limits)),
    }


def summarise(rows):
    """A packer's rows, one per stream -> means, the worst of each maximum, the range of "over"."""
    summary = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        summary[key] = float(max(values) if key.endswith("max") else fmean(values))
    over = [row["over"] for row in rows]
    summary["over_range"] = min(over), max(over)
    return summary


def bench_stage(stage, n, seeds):
    """Prints the tables of one stage -> their numbers."""
    limits = recipe(stage).limits
    streams = [stream(stage, n, seed) for seed in range(seeds)]
    sizes = [[(e.tokens, e.crops) for e in examples] for examples in streams]
    bounds = [lower_bound(np.array(of_stream), limits) for of_stream in sizes]
    print(f"\nstage {stage}: at least {fmean(bounds):.0f} packs of {limits} tokens and crops")
    table = {}
    for name, packer in packers(stage).items():
        streams_of_packer = zip(sizes, bounds, strict=True)
        rows = [measure(packer, each, bound, limits) for each, bound in streams_of_packer]
        table[name] = summarise(rows)
    print_table("packers", table)

    saved = savings(streams[0], limits)
    most = saved["one annotation per sequence"]
    times_fewer = {}
    for name, row in saved.items():
        times_fewer[name] = {key: most[key] / max(n, 1) for key, n in row.items()}
    print_table("how many there are", saved)
    print_table("how many times fewer", times_fewer)
    return {"limits": limits, "bounds": bounds, "packers": table, "savings": saved}


def add_arguments(parser):
    add = parser.add_argument
    add("--n", type=positive, default=20_000, help="examples of a stream")
    add("--seeds", type=positive, default=3, help="streams per stage")
    add("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="recipes")


def run(args):
    """Prints the tables of every stage -> {"stage 1": their numbers, ..}."""
    return {f"stage {stage}": bench_stage(stage, args.n, args.seeds) for stage in args.stages}
