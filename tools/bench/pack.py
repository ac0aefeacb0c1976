"""Packers side by side on a seeded stream of sizes: how full the packs are, how long examples wait, what it costs.

    python -m tools.bench pack                              # stages 1 to 3, three streams of 20,000 examples each: a minute
    python -m tools.bench pack --n 4000 --seeds 1 --stages 2

The stream stands in for the training mixture: its groups at the official rates, tokens and crops counted as training counts them. How
long videos and answers are, how large images, how many annotations there are is ASSUMED: nobody published it. One number is fitted, the
scale of videos, so that the official packer puts 3.8 examples in a pack of stage 2, as the paper reports. Pixels are left out: a packer
sees (tokens, crops) and makes packs of example numbers. Per stage a table of packers and one of what trees and packing save; then JSON.
"""

import gc
import importlib
import math
import statistics
import time
from bisect import bisect, insort
from functools import partial
from itertools import accumulate, chain, islice
from typing import NamedTuple

import numpy as np

import loader
import packing
import vision

# ---- the stream

class Kind(NamedTuple):
    share: float                     # of the stream; the shares of a list are taken relative to their sum
    seen: tuple                      # ("images", fewest, most) or ("video", median seconds, sigma of its logarithm, longest)
    annotations: tuple               # mean, fewest, most
    text: tuple                      # tokens of one annotation: median, sigma of its logarithm, fewest, most
    subtitles: float = 0.0           # share of the videos that come with some


POINTS = ("images", 1, 1), (4, 1, 12), (45, 0.9, 15, 600)
TEXT = ("images", 0, 0), (1, 1, 1), (450, 0.9, 30, 2304)
CAPTIONS = [Kind(0.6, ("images", 1, 1), (2, 2, 2), (240, 0.35, 60, 600)),                   # a caption and a transcript
            Kind(0.3, *POINTS), Kind(0.1, *TEXT)]
MIXTURE = [                          # as released, the rates sum to 1.1
    Kind(0.15 * 0.40, ("video", 55, 0.9, 3600), (3, 1, 8), (180, 0.8, 30, 1500)),           # demonstrations: long answers, about a video,
    Kind(0.15 * 0.15, ("images", 2, 5), (3, 1, 8), (120, 0.7, 20, 700)),                    # several images
    Kind(0.15 * 0.45, ("images", 1, 1), (3, 1, 10), (140, 0.8, 20, 700)),                   # or one
    Kind(0.20 * 0.35, ("video", 90, 0.7, 3600), (4.5, 1, 16), (55, 0.8, 15, 700), 0.15),    # academic videos: minutes long,
    Kind(0.20 * 0.65, ("video", 11, 0.8, 3600), (4.5, 1, 16), (55, 0.8, 15, 700), 0.15),    # or short clips
    Kind(0.25 * 0.20, ("images", 2, 5), (5, 1, 20), (35, 0.8, 12, 500)),                    # academic images
    Kind(0.25 * 0.80, ("images", 1, 1), (5, 1, 20), (35, 0.8, 12, 500)),
    Kind(0.15, ("video", 12, 0.8, 120), (3, 1, 8), (200, 0.9, 30, 1500)),                   # tracking
    Kind(0.15, ("video", 32, 0.6, 63), (4, 1, 12), (70, 0.9, 15, 900)),                     # pointing in clips of up to 63 s
    Kind(0.10, *POINTS), Kind(0.10, *TEXT)]
SUBTITLES = (700, 0.8, 60, 4000)     # tokens, as Kind.text
VIDEO_SCALE = 0.90                   # times every median duration: the number that was fitted


class Example(NamedTuple):
    tokens: int                      # all of them
    crops: int
    trunk: int                       # tokens that its annotations share: BOS, what is seen, subtitles
    branches: list                   # tokens of each annotation


def recipe(stage):
    """((tokens, crops) of a pack, most frames of a video) from the stage's recipe."""
    r = importlib.import_module(f"stages.stage{stage}").RECIPE
    return (r["data.max_tokens"], r["pack_crops"]), r["data.max_frames"]


def around(rng, median, sigma, least, most):
    """A log-normal number, held between least and most."""
    return min(max(median * math.exp(sigma * rng.standard_normal()), least), most)


def picture(rng):
    """(height, width) in pixels: a photograph, an image from the web, a chart or a scanned page."""
    kind = bisect((0.40, 0.70, 0.88), rng.random())
    if kind == 1:
        area, aspect = around(rng, 7e5, 0.7, 1, 1e9), around(rng, math.exp(0.2), 0.35, 0.01, 100)
        return int(math.sqrt(area / aspect)), int(math.sqrt(area * aspect))
    if kind == 2:
        return int(np.clip(rng.normal(600, 120), 200, 1200)), int(np.clip(rng.normal(850, 150), 300, 1600))
    often, otherwise, share = ((480, 640), (640, 480), 0.65) if kind == 0 else ((2200, 1700), (1600, 1200), 0.8)
    return often if rng.random() < share else otherwise


def image_size(h, w):
    """(tokens, crops) of an image (spec 2.3): two grids between their markers, a column end after every row of the mosaic."""
    low, high, crops = vision.pooled_grids(h, w, max_crops=8)
    return low[0] * low[1] + 2 + high[0] * (high[1] + 1) + 2, crops


def video_size(seconds, max_frames):
    """(tokens, crops) of a video (spec 3.2): 81 and two markers a frame, and its time, one token a character: "0.0 ", then " 0.5 "."""
    times = vision.frame_times(seconds, max_frames)
    return sum(81 + 2 + len(f" {t:.1f} ") for t in times) - 1, len(times)


def example(rng, kind, max_tokens, max_frames):
    (what, *how), trunk, crops = kind.seen, 1, 0
    if what == "video":
        median, sigma, longest = how
        tokens, crops = video_size(around(rng, median * VIDEO_SCALE, sigma, 2, longest), max_frames)
        subtitles = around(rng, *SUBTITLES) if rng.random() < kind.subtitles else 0
        trunk = min(1 + tokens + int(subtitles), max_tokens - 1)
    else:
        count = int(rng.integers(how[0], how[1] + 1))
        for _ in range(count):
            tokens, more = image_size(*picture(rng))
            trunk, crops = trunk + tokens + 3 * (count > 1), crops + more         # "Image 1" before each where there are several
    mean, fewest, most = kind.annotations
    texts = [int(around(rng, *kind.text)) for _ in range(min(max(1 + rng.poisson(mean - 1), fewest), most))]
    ends = np.minimum(np.cumsum([trunk, *texts]), max_tokens).tolist()        # what a row has no room for is cut off the last ones
    return Example(ends[-1], crops, trunk, np.diff(ends).tolist())


def stream(stage, n, seed):
    """n Examples, a function of the stage and the seed alone."""
    rng, kinds, ((max_tokens, _), max_frames) = np.random.default_rng([seed, stage]), CAPTIONS if stage == 1 else MIXTURE, recipe(stage)
    edges = list(accumulate(kind.share for kind in kinds))
    return [example(rng, kinds[bisect(edges, rng.random() * edges[-1])], max_tokens, max_frames) for _ in range(n)]


# ---- how few packs there can be

def lifted(x, least, limit):
    """Sizes (n,) with those below `least` <= limit / 2 counted as nothing, and those above limit - least as a whole pack.

    Dual feasible (Martello and Toth; Fekete and Schepers): what fits in one pack still sums to `limit` at most, because beside a size
    above limit - least there is room only for what counts as nothing. So any packing needs at least sum(lifted) / limit packs.
    """
    return np.where(x > limit - least, limit, np.where(x >= least, x, 0))


def bound(sizes, limits):
    """sizes (n,2), limits (2,) -> (packs by volume, packs by dual feasible functions): nobody can do with fewer than either.

    Of each resource alone: a function of both at once (nothing if small in either, else whole if large in either) gave not one pack more.
    """
    resources = list(zip(sizes.T, limits, strict=True))
    dual = [-(-lifted(x, least, limit).sum() // limit) for x, limit in resources
            for least in np.unique(np.linspace(1, limit // 2, 500).astype(int))]
    return int(max(-(-x.sum() // limit) for x, limit in resources)), int(max(dual))


# ---- packers: (sizes, max_tokens, max_crops) -> packs of example numbers. A size is read when the packer needs the example

def in_order(sizes, max_tokens, max_crops):
    """Example after example until the next one does not fit."""
    pack, tokens, crops = [], 0, 0
    for i, (t, c) in enumerate(sizes):
        if tokens + t > max_tokens or crops + c > max_crops:
            yield pack
            pack, tokens, crops = [], 0, 0
        pack, tokens, crops = [*pack, i], tokens + t, crops + c
    yield pack


def internvl(sizes, max_tokens, max_crops, room=20):
    """InternVL's buffer, without overflow: up to `room` unfinished packs, the one with the most crops first.

    An example joins the first pack that it fits in. A pack leaves when it is exactly full, or as the first of too many.
    """
    unfinished = []                  # [(crops, tokens, numbers)]
    for i, (t, c) in enumerate(sizes):
        at = next((k for k, (crops, tokens, _) in enumerate(unfinished) if tokens + t <= max_tokens and crops + c <= max_crops), None)
        crops, tokens, numbers = (0, 0, []) if at is None else unfinished.pop(at)
        crops, tokens, numbers = crops + c, tokens + t, [*numbers, i]
        if crops == max_crops or tokens == max_tokens:
            yield numbers
        else:
            insort(unfinished, (crops, tokens, numbers), key=lambda pack: -pack[0])
        if len(unfinished) > room:
            yield unfinished.pop(0)[2]
    yield from (numbers for _, _, numbers in unfinished)


def first_fit(sizes, max_tokens, max_crops, pool=48):
    """Of the pool, the oldest, then from the largest down whatever still fits: first-fit decreasing, and nothing starves."""
    waiting, fresh = [], enumerate(sizes)
    while waiting := waiting + list(islice(fresh, pool - len(waiting))):
        rest = sorted(waiting[1:], key=lambda e: -max(e[1][0] / max_tokens, e[1][1] / max_crops))
        pack, tokens, crops = [], 0, 0
        for i, (t, c) in [waiting[0], *rest]:
            if tokens + t <= max_tokens and crops + c <= max_crops:
                pack, tokens, crops = [*pack, i], tokens + t, crops + c
        waiting = [e for e in waiting if e[0] not in pack]
        yield pack


def knapsack(sizes, max_tokens, max_crops, image_weight, grain):
    """The official choice (spec 8): of sizes [(tokens, crops), ..], which to take for the highest sum of tokens + image_weight * crops.

    Tokens count in steps of `grain`, rounded up. After every example, float32: the best value that so many steps and crops can hold. An
    example is taken where it raised that value, looking back from the last one, which is also their order in the pack.
    """
    steps = -(-max_tokens // grain)
    best = np.zeros((steps + 1, max_crops + 1), np.float32)
    raised = np.zeros((len(sizes), *best.shape), bool)
    for i, (t, c) in enumerate(sizes):
        a = -(-t // grain)
        if a <= steps and c <= max_crops:
            with_it, without = best[: steps + 1 - a, : max_crops + 1 - c] + np.float32(t + image_weight * c), best[a:, c:]
            np.greater(with_it, without, out=raised[i, a:, c:])
            np.maximum(with_it, without, out=without)
    chosen, step, crop = [], steps, max_crops
    for i in reversed(range(len(sizes))):
        if raised[i, step, crop]:
            chosen.append(i)
            step, crop = step - -(-sizes[i][0] // grain), crop - sizes[i][1]
    if not chosen:
        raise RuntimeError(f"nothing of a pool of {len(sizes)} fits in a pack")
    return chosen


def official(sizes, max_tokens, max_crops, image_weight, pool=48):
    """The official packer (spec 8): when the pool is full and one more comes, the knapsack of the pool is a pack; nothing looks at ages.

    What is too long for company goes alone and at once. RuntimeError where nothing in the pool can ever leave. The official stream never
    ends; at the end of this one the pool is emptied by the same rule.
    """
    grain, waiting = max(1, max_tokens // 512), []

    def leave():
        chosen = knapsack([size for _, size in waiting], max_tokens, max_crops, image_weight, grain)
        return [waiting.pop(k)[0] for k in chosen]                                # from the last back: the others keep their places

    for i, size in enumerate(sizes):
        if -(-size[0] // grain) >= -(-max_tokens // grain):
            yield [i]
            continue
        if len(waiting) == pool:
            yield leave()
        waiting.append((i, size))
    while waiting:
        yield leave()


def packers(stage):
    return {"none": lambda sizes, *_: ([i] for i, _ in enumerate(sizes)), "in order until full": in_order,
            "InternVL's buffer, 20": internvl, "first fit, oldest first, 48": first_fit,
            "official knapsack, 48": partial(official, image_weight=1 if stage == 1 else 30), "ours": packing.Planner}


# ---- measuring

class Read(list):
    """Sizes that know how far they were read: an example arrives when it is first looked at."""
    n = 0

    def __getitem__(self, i):
        self.n = max(self.n, i + 1)
        return super().__getitem__(i)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def measure(packer, sizes, limits, fewest):
    """One packer on sizes [(tokens, crops), ..] -> its row of the table; AssertionError if a pack is too large or an example is lost.

    A wait in packs counts those made after an example arrived and before its own; a wait in arrivals the examples that came after it.
    """
    read, packs, seen = Read(sizes), [], []
    start = time.process_time()
    for pack in packer(read, *limits):
        packs.append(pack)
        seen.append(read.n)
    seconds = time.process_time() - start
    assert sorted(chain.from_iterable(packs)) == list(range(len(sizes))), "each example once"
    fill = np.array([np.sum([sizes[i] for i in pack], axis=0) for pack in packs])
    assert (fill <= limits).all(), f"a pack of {fill.max(axis=0)}, where {limits} fit"
    number, seen = np.concatenate(packs), np.array(seen)
    left = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])        # the pack that each of `number` left in
    assert (seen[left] > number).all(), "an example left before its size was read"
    wait = left - np.searchsorted(seen, number, side="right")
    return {"packs": len(packs), "over": len(packs) / fewest, "examples": len(sizes) / len(packs),
            "tokens": fill[:, 0].mean() / limits[0], "crops": fill[:, 1].mean() / limits[1],
            "wait": wait.mean(), "wait_p99": np.percentile(wait, 99), "wait_max": wait.max(),
            "arrivals_max": (seen[left] - 1 - number).max(), "late": (wait > 1000).sum(), "us": seconds / len(sizes) * 1e6}


def savings(examples, limits):
    """What message trees and packing save -> {way: sequences, tokens in batches of 8 padded to their longest, real tokens, crops}."""
    def packed(sizes):
        return [tuple(map(sum, zip(*(sizes[i] for i in pack), strict=True))) for pack in packing.Planner(sizes, *limits)]

    def count(rows):
        tokens, crops = zip(*rows, strict=True)
        batches = [tokens[k : k + 8] for k in range(0, len(tokens), 8)]
        return {"sequences": len(rows), "batches": sum(max(b) * len(b) for b in batches), "tokens": sum(tokens), "crops": sum(crops)}

    trees = [(e.tokens, e.crops) for e in examples]
    single = [(e.trunk + text, e.crops) for e in examples for text in e.branches]
    single = [single[i] for i in np.random.default_rng(0).permutation(len(single))]        # as they would come: not one video in a row
    return {"one annotation per sequence": count(single), "message trees": count(trees), "packing": count(packed(single)),
            "both": count(packed(trees))}


def balance(sizes, limits, ranks, batch=128):
    """How much more than an even share the slowest rank has in a step of `batch` packs, on average over the steps -> {way: (crops,
    attention)}, 1 where all have the same. In turn: pack k goes to rank k modulo ranks; dealt: loader.balance_packs."""
    work = [loader.work_of([(i, *sizes[i]) for i in pack]) for pack in packing.Planner(sizes, *limits)]
    found = {"in turn": [], "dealt": []}
    for k in range(0, len(work) - batch + 1, batch):
        step = np.array(work[k : k + batch], float)
        for way, shares in (("in turn", [range(r, batch, ranks) for r in range(ranks)]), ("dealt", loader.balance_packs(step, ranks))):
            loads = np.array([step[list(share)].sum(0) for share in shares])
            found[way].append(loads.max(0) / loads.mean(0))
    return {way: np.mean(ratios, axis=0).tolist() for way, ratios in found.items() if ratios}


def bench_stage(stage, n, seeds):
    limits, streams = recipe(stage)[0], [stream(stage, n, seed) for seed in range(seeds)]
    sizes, mean = [[e[:2] for e in examples] for examples in streams], statistics.fmean
    volume, dual = zip(*(bound(np.array(s), limits) for s in sizes), strict=True)
    fewest, (tokens, crops) = list(map(max, volume, dual)), np.mean(sizes, axis=(0, 1))
    annotations = mean(len(e.branches) for examples in streams for e in examples)
    print(f"\nstage {stage}, {limits[0]} tokens and {limits[1]} crops a pack: {seeds} x {n} examples of {tokens:.0f} tokens, "
          f"{crops:.1f} crops, {annotations:.2f} annotations\nat least {mean(fewest):.0f} packs, by volume alone {mean(volume):.0f}. Means "
          "over the streams, but the worst of each maximum; waits in packs, the longest also in arrivals\n"
          "packer                        packs  / bound  (range)      examples tokens crops   wait  p99   max arrivals >1000  us/example")
    gc.freeze()                      # else the collector walks the streams, at some packer's expense
    table = {}
    for name, packer in packers(stage).items():
        rows = [measure(packer, s, limits, least) for s, least in zip(sizes, fewest, strict=True)]
        r = {k: float((max if k.endswith("max") else mean)(row[k] for row in rows)) for k in rows[0]}
        r["over_range"] = low, high = min(row["over"] for row in rows), max(row["over"] for row in rows)
        print(f"{name:27s} {r['packs']:7.0f} {r['over']:8.4f} ({low:.4f}-{high:.4f}) {r['examples']:6.2f} {r['tokens']:7.1%} "
              f"{r['crops']:5.1%} {r['wait']:6.1f} {r['wait_p99']:4.0f} {r['wait_max']:5.0f} {r['arrivals_max']:8.0f} {r['late']:5.0f} "
              f"{r['us']:11.1f}", flush=True)
        table[name] = r
    gc.unfreeze()
    saved = savings(streams[0], limits)
    print("what is saved (stream 1)       full-length rows tokens, batches of 8         real tokens               crops")
    for name, row in saved.items():
        ratios = {k: saved["one annotation per sequence"][k] / max(row[k], 1) for k in row}
        print(f"{name:27s}" + "".join(f"{row[k]:12d} {ratios[k]:6.2f}x" for k in row))
    slowest = {f"{ranks} ranks": balance(sizes[0], limits, ranks) for ranks in (8, 32)}
    for ranks, ways in slowest.items():
        for way, (in_crops, in_attention) in ways.items():
            print(f"slowest of {ranks:9s} {way:8s} {in_crops:8.3f} of an even share in crops, {in_attention:.3f} in attention")
    return {"limits": limits, "slowest_rank": slowest, "mean_tokens": tokens, "mean_crops": crops, "mean_annotations": annotations,
            "bound_volume": volume, "bound_dual": dual, "packers": table, "savings": saved}


def add_arguments(parser):
    parser.add_argument("--n", type=int, default=20_000, help="examples of a stream (default 20000)")
    parser.add_argument("--seeds", type=int, default=3, help="streams per stage (default 3)")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="default 1 2 3")


def run(args):
    """Prints both tables of every stage -> {"stage 1": what they show, ..}. ValueError where there is nothing to pack."""
    if args.n < 1 or args.seeds < 1:
        raise ValueError("--n and --seeds must be at least 1")
    return {f"stage {stage}": bench_stage(stage, args.n, args.seeds) for stage in args.stages}
