"""Compares how well different packers fill rows with the same streams of examples.

    python -m tools.bench pack --n 2000 --seeds 1

For each stage, a first table shows how full the packs of each packer are, and how long planning
takes. A second table shows how many rows are needed with and without message trees and packing.
"over" is the number of packs divided by a lower bound for any packer. A packer is a function
(sizes, max_tokens, max_crops) -> packs, each a list of example numbers.
"""

import time
from functools import partial
from statistics import fmean

import numpy as np

import packing
from tools.bench.stream import recipe, stream
from tools.command import positive, print_table


def lower_bound(sizes, limits):
    """sizes (n,2), limits (2,) -> a number of packs that every packer needs at least. It comes from
    dual feasible functions (Martello and Toth; Fekete and Schepers), separately for tokens and
    crops.

    For a threshold <= limit / 2, a size below the threshold counts as 0, and a size above
    limit - threshold counts as the limit. The sizes in one pack still sum to at most the limit,
    because beside such a large size there is room only for sizes that count as 0. So every
    packing needs at least sum / limit packs.
    """
    bounds = []
    for resource, limit in zip(sizes.T, limits, strict=True):
        for threshold in {0, *np.linspace(1, limit // 2, 500).astype(int).tolist()}:
            counted = np.where(resource >= threshold, resource, 0)
            counted = np.where(resource > limit - threshold, limit, counted)
            bounds.append(-(-counted.sum() // limit))
    return int(max(bounds))


def knapsack(sizes, max_tokens, max_crops, image_weight, granularity):
    """The official choice (docs/molmo2.md 8): from sizes [(tokens, crops), ..], the subset with the
    highest sum of tokens + image_weight * crops -> its numbers, from the last to the first.

    Tokens are counted in steps of `granularity`, rounded up. best[s, c], float32, is the highest
    value of a subset with at most s steps and c crops. improved[i, s, c] is true if example i
    raised it. The subset is found by going backwards through `improved`.
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
        raise RuntimeError("No example in the pool fits into a pack.")
    return chosen


def official(sizes, max_tokens, max_crops, image_weight, pool=48):
    """The official packer (docs/molmo2.md 8). When the pool is full and one more example arrives,
    the knapsack choice from the pool becomes a pack. The age of the examples has no influence.

    An example that fills a row becomes a pack at once. At the end of the stream, the pool is
    emptied by the same rule. RuntimeError if no example in the pool fits into a pack.
    """
    granularity = max(1, max_tokens // 512)
    max_steps = -(-max_tokens // granularity)
    waiting = []  # of (number, (tokens, crops))

    def take_pack():
        pool_sizes = [size for _, size in waiting]
        chosen = knapsack(pool_sizes, max_tokens, max_crops, image_weight, granularity)
        # from the last to the first, so that the indices of the others stay the same
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


def ours(sizes, *limits):
    return ([item.index for item in pack] for pack in packing.Planner(sizes, *limits))


OFFICIAL = "official knapsack, 48"


def packers(stage):
    """-> {name in the table: packer}. The official packer weights crops differently in stage 1."""
    return {
        "none": lambda sizes, *limits: ([i] for i, _ in enumerate(sizes)),
        OFFICIAL: partial(official, image_weight=1 if stage == 1 else 30),
        "ours": ours,
    }


def measure(packer, sizes, bound, limits):
    """Runs one packer on sizes [(tokens, crops), ..] -> its row of the table."""
    start = time.process_time()
    packs = list(packer(sizes, *limits))
    seconds = time.process_time() - start
    fill = np.array([np.sum([sizes[i] for i in pack], axis=0) for pack in packs])
    return {
        "packs": len(packs),
        "over": len(packs) / bound,
        "examples": len(sizes) / len(packs),
        "tokens": fill[:, 0].mean() / limits[0],
        "crops": fill[:, 1].mean() / limits[1],
        "us": seconds / len(sizes) * 1e6,
    }


def count_rows(examples, limits):
    """[ExampleSize, ..] -> {name: number of rows}, with and without message trees and packing."""
    trees = [(e.tokens, e.crops) for e in examples]
    single = [(e.prefix + text, e.crops) for e in examples for text in e.branches]
    # in random order, as in training, so that the annotations of a video are in different rows
    order = np.random.default_rng(0).permutation(len(single))
    single = [single[i] for i in order]
    return {"one annotation per row": len(single), "message trees": len(trees),
            "packing": len(list(ours(single, *limits))), "both": len(list(ours(trees, *limits)))}


def summarise(rows):
    """The table rows of a packer, one per stream -> their means, and the range of "over"."""
    over = [row["over"] for row in rows]
    means = {key: fmean(row[key] for row in rows) for key in rows[0]}
    return means | {"over_range": (min(over), max(over))}


def bench_stage(stage, n, seeds):
    """Prints the two tables of one stage -> their numbers."""
    limits = recipe(stage)[:2]  # tokens and crops
    streams = [stream(stage, n, seed) for seed in range(seeds)]
    sizes = [[(e.tokens, e.crops) for e in examples] for examples in streams]
    bounds = [lower_bound(np.array(of_stream), limits) for of_stream in sizes]
    print(f"\nstage {stage}: at least {fmean(bounds):.0f} packs of {limits} tokens and crops")
    table = {}
    for name, packer in packers(stage).items():
        rows = [measure(packer, sizes[k], bounds[k], limits) for k in range(seeds)]
        table[name] = summarise(rows)
    print_table("packers", table)

    rows = count_rows(streams[0], limits)
    most = max(rows.values())
    print_table("rows", {name: {"rows": n, "fewer": most / n} for name, n in rows.items()})
    return {"limits": limits, "bounds": bounds, "packers": table, "rows": rows}


def add_arguments(parser):
    add = parser.add_argument
    add("--n", type=positive, default=20_000, help="number of examples of each stream")
    add("--seeds", type=positive, default=3, help="number of streams of each stage")


def run(args):
    """Prints the tables of every stage -> {"stage 1": their numbers, ..}."""
    return {f"stage {stage}": bench_stage(stage, args.n, args.seeds) for stage in (1, 2, 3)}
