"""Packers side by side on a seeded stream of sizes: how full the packs are, how long examples wait
and how much time planning takes.

    python -m tools.bench pack              # stages 1 to 3, three streams of 20,000 examples each
    python -m tools.bench pack --n 4000 --seeds 1 --stages 2

Prints per stage a table of packers, a table of the savings by message trees and by packing, and how
much more work than an even share the slowest rank has. tools/bench/stream.py describes the stream.
"""

import gc
import time
from itertools import chain
from statistics import fmean

import numpy as np

import packing
from tools.bench.packers import lower_bounds, packers
from tools.bench.stream import recipe, stream

BATCH = 128  # packs of one training step
LONG_WAIT = 1000  # packs

# ------------------------------------------------------------------------------------------------
# one packer


class CountedSizes(list):
    """Sizes that know how many of them were read: an example arrives when it is first read."""

    n_read = 0

    def __getitem__(self, i):
        self.n_read = max(self.n_read, i + 1)
        return super().__getitem__(i)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def measure(packer, sizes, limits, fewest):
    """One packer on sizes [(tokens, crops), ..] -> its row of the table.

    A wait in packs counts the packs that were made after an example arrived and before its own; a
    wait in arrivals counts the examples that arrived after it. AssertionError if a pack is too
    large, or an example is lost, doubled or packed before its size was read.
    """
    counted = CountedSizes(sizes)
    packs = []
    n_read = []  # when each pack left
    start = time.process_time()
    for pack in packer(counted, *limits):
        packs.append(pack)
        n_read.append(counted.n_read)
    seconds = time.process_time() - start

    assert sorted(chain.from_iterable(packs)) == list(range(len(sizes))), "each example once"
    fill = np.array([np.sum([sizes[i] for i in pack], axis=0) for pack in packs])
    assert (fill <= limits).all(), f"a pack of {fill.max(axis=0)} where the limits are {limits}"
    members = np.concatenate(packs)
    n_read = np.array(n_read)
    pack_of = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    assert (n_read[pack_of] > members).all(), "an example was packed before its size was read"

    waits = pack_of - np.searchsorted(n_read, members, side="right")
    arrivals = n_read[pack_of] - 1 - members
    return {
        "packs": len(packs),
        "over": len(packs) / fewest,
        "examples": len(sizes) / len(packs),
        "tokens": fill[:, 0].mean() / limits[0],
        "crops": fill[:, 1].mean() / limits[1],
        "wait": waits.mean(),
        "wait_p99": np.percentile(waits, 99),
        "wait_max": waits.max(),
        "arrivals_max": arrivals.max(),
        "late": (waits > LONG_WAIT).sum(),
        "us": seconds / len(sizes) * 1e6,
    }


# ------------------------------------------------------------------------------------------------
# message trees, packing, dealing to ranks


def pack_totals(sizes, limits):
    """Packs of sizes [(tokens, crops), ..] by packing.Planner -> (tokens, crops) of each pack."""
    totals = []
    for pack in packing.Planner(sizes, *limits):
        tokens = sum(sizes[i][0] for i in pack)
        crops = sum(sizes[i][1] for i in pack)
        totals.append((tokens, crops))
    return totals


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
    single = []
    for e in examples:
        for text in e.branches:
            single.append((e.trunk + text, e.crops))
    # in random order, as training draws them: not all annotations of a video in one row
    order = np.random.default_rng(0).permutation(len(single))
    single = [single[i] for i in order]
    return {
        "one annotation per sequence": count_sequences(single),
        "message trees": count_sequences(trees),
        "packing": count_sequences(pack_totals(single, limits)),
        "both": count_sequences(pack_totals(trees, limits)),
    }


def balance(sizes, limits, ranks, batch=BATCH):
    """The work of the slowest rank over an even share of it, the mean over steps of `batch` packs
    -> {way: (crops, attention)}; 1 where all ranks have the same work.

    "in turn" gives pack k to rank k modulo ranks; "dealt" is packing.balance_packs. Attention
    within examples costs the square of their tokens.
    """
    planner = packing.Planner(sizes, *limits)
    packs = [planner.last for _ in planner]
    ratios = {"in turn": [], "dealt": []}
    for start in range(0, len(packs) - batch + 1, batch):
        step = packs[start : start + batch]
        work = []
        for pack in step:
            crops = sum(item.crops for item in pack)
            attention = sum(item.tokens**2 for item in pack)
            work.append((crops, attention))
        work = np.array(work, float)
        shares = {
            "in turn": [list(range(rank, batch, ranks)) for rank in range(ranks)],
            "dealt": packing.balance_packs(step, ranks),
        }
        for way, packs_of_ranks in shares.items():
            loads = np.array([work[numbers].sum(axis=0) for numbers in packs_of_ranks])
            ratios[way].append(loads.max(axis=0) / loads.mean(axis=0))
    return {way: np.mean(r, axis=0).tolist() for way, r in ratios.items() if r}


# ------------------------------------------------------------------------------------------------
# tables


def summarise(rows):
    """A packer's rows, one per stream -> means, the worst of each maximum, the range of "over"."""
    summary = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        summary[key] = float(max(values) if key.endswith("max") else fmean(values))
    over = [row["over"] for row in rows]
    summary["over_range"] = min(over), max(over)
    return summary


def bench_packers(stage, sizes, fewest):
    """Prints the table of packers -> {packer: row}. sizes: one list for each stream; fewest: the
    lower bound of each stream."""
    limits = recipe(stage).limits
    print(
        "packer                        packs  / bound  (range)      examples tokens crops"
        "   wait  p99   max arrivals >1000  us/example"
    )
    gc.freeze()  # or the garbage collector would walk the streams during some packer's turn
    table = {}
    for name, packer in packers(stage).items():
        rows = []
        for stream_sizes, bound in zip(sizes, fewest, strict=True):
            rows.append(measure(packer, stream_sizes, limits, bound))
        r = table[name] = summarise(rows)
        low, high = r["over_range"]
        print(
            f"{name:27s} {r['packs']:7.0f} {r['over']:8.4f} ({low:.4f}-{high:.4f}) "
            f"{r['examples']:6.2f} {r['tokens']:7.1%} {r['crops']:5.1%} {r['wait']:6.1f} "
            f"{r['wait_p99']:4.0f} {r['wait_max']:5.0f} {r['arrivals_max']:8.0f} {r['late']:5.0f} "
            f"{r['us']:11.1f}",
            flush=True,
        )
    gc.unfreeze()
    return table


def print_savings(saved):
    print(
        "savings (stream 1)             full-length rows tokens, batches of 8"
        "         real tokens               crops"
    )
    most = saved["one annotation per sequence"]
    for name, row in saved.items():
        cells = [f"{n:12d} {most[key] / max(n, 1):6.2f}x" for key, n in row.items()]
        print(f"{name:27s}" + "".join(cells))


def print_balance(slowest):
    for ranks, ways in slowest.items():
        for way, (crops, attention) in ways.items():
            print(
                f"slowest of {ranks:9s} {way:8s} {crops:8.3f} of an even share in crops, "
                f"{attention:.3f} in attention"
            )


def bench_stage(stage, n, seeds):
    """Prints the tables of one stage -> their numbers."""
    limits = recipe(stage).limits
    streams = [stream(stage, n, seed) for seed in range(seeds)]
    sizes = [[(e.tokens, e.crops) for e in examples] for examples in streams]
    bounds = [lower_bounds(np.array(stream_sizes), limits) for stream_sizes in sizes]
    volume = [by_volume for by_volume, _ in bounds]
    dual = [by_dual for _, by_dual in bounds]
    fewest = [max(bound) for bound in bounds]
    mean_tokens, mean_crops = np.mean(sizes, axis=(0, 1))
    annotations = fmean(len(e.branches) for e in chain.from_iterable(streams))
    print(
        f"\nstage {stage}, {limits[0]} tokens and {limits[1]} crops a pack: {seeds} x {n} examples "
        f"of {mean_tokens:.0f} tokens, {mean_crops:.1f} crops, {annotations:.2f} annotations\n"
        f"at least {fmean(fewest):.0f} packs, by volume alone {fmean(volume):.0f}. Means over the "
        "streams, but the worst of each maximum; waits in packs, the longest also in arrivals"
    )
    table = bench_packers(stage, sizes, fewest)
    saved = savings(streams[0], limits)
    print_savings(saved)
    slowest = {f"{ranks} ranks": balance(sizes[0], limits, ranks) for ranks in (8, 32)}
    print_balance(slowest)
    return {
        "limits": limits,
        "slowest_rank": slowest,
        "mean_tokens": mean_tokens,
        "mean_crops": mean_crops,
        "mean_annotations": annotations,
        "bound_volume": volume,
        "bound_dual": dual,
        "packers": table,
        "savings": saved,
    }


def add_arguments(parser):
    parser.add_argument("--n", type=int, default=20_000, help="examples of a stream")
    parser.add_argument("--seeds", type=int, default=3, help="streams per stage")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])


def run(args):
    """Prints the tables of every stage -> {"stage 1": their numbers, ..}. ValueError for flags
    that leave nothing to pack."""
    if args.n < 1 or args.seeds < 1:
        raise ValueError("--n and --seeds must be at least 1.")
    return {f"stage {stage}": bench_stage(stage, args.n, args.seeds) for stage in args.stages}
