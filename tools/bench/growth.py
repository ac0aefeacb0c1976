"""How the time of our training step grows with the length of a row, with and without attention.

Each row holds videos with 300 tokens of text each: several of 16 frames, or one that fills the row.
Its step is timed as it is, and with attention replaced by a sum, which leaves all else as it was.
The attention of the ViT is part of both.
"""

from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import numpy as np

import attention
import packing
from tools.bench.flops import allowed_pairs, count_crops
from tools.bench.measure import spread
from tools.bench.step_cases import Case, Plain, plain_example, random_tree
from tools.bench.training_step import training_step

LENGTHS = [4096, 8192, 16_384, 36_864]
KINDS = ("several", "one")
TEXT = 300  # tokens of text of each video
SHORT = 16  # frames of a video where a row holds several


@contextmanager
def no_attention(model):
    """Replaces attention by the sum of queries, keys and values, without a mask: everything else of
    a step stays, with the gradients of all three."""

    def add(q, k, v, mask):
        return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], dim=2)

    attend = model.attend
    packed_mask = attention.packed_mask
    model.attend = add
    attention.packed_mask = lambda *_: None
    try:
        yield
    finally:
        model.attend = attend
        attention.packed_mask = packed_mask


class Row(NamedTuple):
    case: Case
    dtype: str
    kind: tuple  # rows are compared with the first of the same kind


def make_rows(config, args):
    """-> {name: Row} and {name: counts of the row}, for each length, kind of videos and dtype."""
    rng = np.random.default_rng(0)

    def tokens_of(n_frames):
        return len(random_tree(config, rng, [], n_frames, [(0, TEXT)]).whole.tokens)

    # tokens of a frame whose time has four digits: no frame takes more
    per_frame = tokens_of(1001) - tokens_of(1000)
    wanted = {}  # (length, frames, dtype): None, in order and without repetition
    for length in args.lengths:
        filling = max((length - TEXT - 1) // per_frame, 0)
        for kind in args.videos:
            n_frames = min(SHORT, filling) if kind == "several" else filling
            for dtype in args.dtypes:
                wanted[length, n_frames, dtype] = None

    rows = {}
    held = {}
    for length, n_frames, dtype in wanted:
        video = plain_example(config, rng, Plain(TEXT, frames=n_frames))
        videos = [video] * max(length // len(video.tokens), 1)
        n_tokens = len(video.tokens) * len(videos)
        batch = packing.collate([videos], n_tokens, config.vision)
        pairs = allowed_pairs(batch)
        name = f"{n_tokens} tokens in {len(videos)} video(s), {dtype}"
        rows[name] = Row(Case([videos], [], n_tokens), dtype, (dtype, n_frames > SHORT))
        held[name] = {
            "tokens": n_tokens,
            "documents": len(videos),
            "crops": count_crops(batch, config.vision),
            "pairs": pairs,
            "mask_share": pairs / n_tokens**2,
        }
    return rows, held


class Seconds(NamedTuple):
    whole: float
    rest: float  # without attention


def measure(rows, config, model, args):
    """-> [{name: Seconds} of each round]; the rows take turns, and a first round warms up."""
    rounds = []
    for _ in range(args.rounds + 1):
        seconds = {}
        for name, row in rows.items():
            step = ("ours", model, config, row.case, row.dtype, args)
            whole = training_step(*step).seconds
            with no_attention(model):
                rest = training_step(*step).seconds
            seconds[name] = Seconds(whole, rest)
        rounds.append(seconds)
    return rounds[1:]


def run(config, model, args):
    """Prints the table -> {row: its numbers}. The time per token apart from attention is compared
    with that of the first row of the same kind, within each round."""
    rows, found = make_rows(config, args)
    rounds = measure(rows, config, model, args)
    print(
        "\n                                        crops    mask  us a token: all  attention"
        "     rest  rest / first (range)  ns a pair"
    )
    for name, r in found.items():
        first = next(other for other in rows if rows[other].kind == rows[name].kind)
        whole = median(seconds[name].whole for seconds in rounds)
        rest = median(seconds[name].rest for seconds in rounds)
        tokens_ratio = found[first]["tokens"] / r["tokens"]
        growth = spread(s[name].rest / s[first].rest * tokens_ratio for s in rounds)
        r["seconds"] = whole
        r["rest_seconds"] = rest
        r["rest_over_first"] = growth
        per_token = 1e6 / r["tokens"]
        print(
            f"{name:38s}{r['crops']:7d} {r['mask_share']:7.1%} {whole * per_token:16.1f} "
            f"{(whole - rest) * per_token:10.1f} {rest * per_token:8.1f}  "
            f"{growth['median']:6.2f} ({growth['min']:.2f}-{growth['max']:.2f}) "
            f"{(whole - rest) / r['pairs'] * 1e9:16.1f}",
            flush=True,
        )
    return found
