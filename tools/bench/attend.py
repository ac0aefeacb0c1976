"""Times attention in packed rows, against a dense mask and a loop over the examples.

    python -m tools.bench attend --tokens 1024 --rounds 1

Rows are packs of the stream of tools.bench pack (of stage 3 from 36,864 tokens on, else of
stage 2, with crops in proportion). All implementations compute the same, forward and backward,
which is checked before they are timed.

    dense   SDPA under one mask (1,1,T,T)
    loop    SDPA for each example under its own mask; all outputs concatenated
    ours    attention.attend under attention.packed_mask: FlexAttention on a GPU,
            else chunks of documents
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import NamedTuple

import torch

import attention
import packing
from tools.bench.measure import clock, relative_error, run_rounds, spread
from tools.bench.peers import SMALL
from tools.bench.step_cases import stream_case
from tools.bench.stream import Recipe, recipe
from tools.command import positive, print_table, whole_number

TIMES = ("mask", "forward", "both")  # seconds; both: forward and backward
# patches of one pixel: the tokens are those of real crops, and pixels do not matter
SHAPE = replace(SMALL, vision=replace(SMALL.vision, patch=1))


class Row(NamedTuple):
    """The mask fields (1,T) int32 of a packed row, and where its examples begin."""
    visible_until: torch.Tensor
    bidir: torch.Tensor
    starts: list  # one more than there are examples


def rows(tokens, count, device="cpu"):
    """Packed rows of the stream of that many tokens, with crops in proportion -> [Row, ..]."""
    stage = 3 if tokens >= recipe(3).max_tokens else 2
    limits = recipe(stage)
    n_crops = max(limits.max_crops * tokens // limits.max_tokens, 1)
    case = stream_case(SHAPE, count, stage, Recipe(tokens, n_crops, n_crops))
    found = []
    for examples in case.rows:
        batch = packing.collate([examples], tokens, SHAPE.vision).to(device)
        starts = list(accumulate((len(x.tokens) for x in examples), initial=0))
        found.append(Row(batch.visible_until, batch.bidir, starts))
    return found


# A way to attend is a function: Row -> function (q (1,T,H,D), k and v (1,T,G,D)) -> (1,T,H,D).


def dense(row):
    return partial(attention.attend, mask=attention.allow(row.visible_until, row.bidir))


def loop(row):
    parts = []  # of each example, and of padding: its tokens, its mask
    for start, end in pairwise([*row.starts, row.bidir.shape[1]]):
        if start < end:
            at = slice(start, end)
            parts.append((at, attention.allow(row.visible_until, row.bidir, at, at)))

    def attend(q, k, v):
        outputs = [attention.attend(q[:, at], k[:, at], v[:, at], mask) for at, mask in parts]
        return torch.cat(outputs, dim=1)

    return attend


def ours(row):
    return partial(attention.attend, mask=attention.packed_mask(row.visible_until, row.bidir))


WAYS = {"dense": dense, "loop": loop, "ours": ours}


def measure(way, row, inputs, device):
    """One forward and backward -> {each of TIMES}, and [output, gradients of q, k and v]."""
    start = clock(device)
    attend = way(row)
    made = clock(device)
    output = attend(*inputs)
    forward = clock(device)
    gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
    end = clock(device)
    times = {"mask": made - start, "forward": forward - made, "both": end - made}
    return times, [output.detach(), *gradients]


def check_ways(several, inputs, device, tolerance):
    """RuntimeError unless all WAYS give the output and gradients of the dense mask, within a
    tolerance relative to the largest value. Also compiles."""
    for row in several:
        _, expected = measure(WAYS["dense"], row, inputs, device)
        for name, way in WAYS.items():
            _, found = measure(way, row, inputs, device)
            for x, y in zip(found, expected, strict=True):
                off = relative_error(x, y)
                if off > tolerance:
                    raise RuntimeError(f"{name} differs from dense by {off:.1e}.")


def summarise(name, rounds):
    """One way: medians over the rounds, and the ratios of the dense mask and the loop to it."""
    summary = {key: median(means[name][key] for means in rounds) for key in TIMES}
    for other in ("dense", "loop"):
        summary[f"{other}_over"] = spread([r[other]["both"] / r[name]["both"] for r in rounds])
    return summary


def bench_row_length(tokens, args):
    """Prints the table of rows of so many tokens -> its numbers."""
    device = args.device
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    several = rows(tokens, args.rows, device)
    inputs = []
    for n_heads in (8, 2, 2):  # of q, k and v
        x = torch.randn(1, tokens, n_heads, 64, generator=generator)
        inputs.append(x.to(device, dtype).requires_grad_())
    # a GPU may round to TF32
    exact = device.type == "cpu" and args.dtype == "float32"
    check_ways(several, inputs, device, tolerance=1e-4 if exact else 0.05)

    def measure_rows(way):
        times = [measure(way, row, inputs, device)[0] for row in several]
        return {key: fmean(t[key] for t in times) for key in TIMES}

    runs = {name: partial(measure_rows, way) for name, way in WAYS.items()}
    rounds = run_rounds(runs, args.rounds)
    n_allowed = sum(attention.allowed_pairs(r.visible_until[0], r.bidir[0]) for r in several)
    case = {
        "examples": sum(len(row.starts) - 1 for row in several),
        "area": n_allowed / (tokens**2 * len(several)),
        "ways": {name: summarise(name, rounds) for name in WAYS},
    }
    print(f"\n{args.rows} rows of {tokens} tokens: {case['examples']} examples,", end=" ")
    print(f"{case['area']:.1%} of all pairs allowed")
    print_table("seconds of one row", case["ways"])
    return case


def add_arguments(parser):
    add = parser.add_argument
    add("--tokens", type=whole_number(512), nargs="+", default=[4096, 16384],
        help="tokens of a row")
    add("--rows", type=positive, default=3, help="rows of each length")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of q, k and v")
    add("--rounds", type=positive, default=5, help="measurements of each row")


def run(args):
    """Prints a table per length -> {"4096": its numbers, ..}."""
    return {str(tokens): bench_row_length(tokens, args) for tokens in args.tokens}
