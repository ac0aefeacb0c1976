"""Times attention in packed rows, compared with a dense mask and a loop over the examples.

    python -m tools.bench attend --tokens 1024 --rounds 1

Rows are packs of the stream of tools.bench pack. Rows of 36,864 tokens or more are from
stage 3 and others from stage 2. The number of crops is in proportion to the tokens. Before
timing, a check makes sure that the first three implementations have the same outputs and
gradients.

    dense   SDPA with one mask (1,1,T,T)
    loop    SDPA for each example with its own mask; then the outputs are concatenated
    ours    attention.attend with attention.packed_mask: FlexAttention on a GPU,
            else chunks of documents
    causal  SDPA with is_causal, for comparison only: every token attends to all tokens before it,
            so the results are different (on a GPU this is FlashAttention)
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import attention
import packing
from tools.bench.measure import clock, relative_error, run_rounds, spread
from tools.bench.rows import PRESETS, SMALL, draw_rows
from tools.bench.stream import Recipe, recipe
from tools.command import positive, print_table, whole_number
from training.log import allowed_pairs

TIMES = ("mask", "forward", "both")  # seconds; both: forward and backward
# patches of one pixel; the tokens are the same as with real crops, and pixels are not used
SHAPE = replace(SMALL, vision=replace(SMALL.vision, patch=1))


class Row(NamedTuple):
    """The mask fields (1,T) int32 of a packed row, and the positions where its examples start."""
    visible_until: torch.Tensor
    bidir: torch.Tensor
    starts: list  # start of each example, then the end of the last one


def rows(tokens, count, device="cpu"):
    """-> [Row, ..], `count` packed rows of the stream with so many tokens each."""
    stage = 3 if tokens >= recipe(3).max_tokens else 2
    limits = recipe(stage)
    n_crops = max(limits.max_crops * tokens // limits.max_tokens, 1)
    drawn, _ = draw_rows(SHAPE, count, stage, Recipe(tokens, n_crops, n_crops))
    found = []
    for examples in drawn:
        batch = packing.collate([examples], tokens, SHAPE.vision).to(device)
        starts = list(accumulate((len(x.tokens) for x in examples), initial=0))
        found.append(Row(batch.visible_until, batch.bidir, starts))
    return found


# Each implementation below is a function: Row -> attend. attend is also a function:
# q (1,T,H,D), k and v (1,T,G,D) -> (1,T,H,D).


def dense(row):
    return partial(attention.attend, mask=attention.allow(row.visible_until, row.bidir))


def loop(row):
    parts = []  # (tokens, mask) of each example and of the padding
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


def causal(row):
    def attend(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


WAYS = {"dense": dense, "loop": loop, "ours": ours, "causal": causal}


def measure(way, row, inputs, device):
    """One forward and backward pass -> {name in TIMES: seconds}, [output, gradients of q, k, v]."""
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
    """-> {way: largest difference of an output or a gradient from the dense mask, relative to the
    largest value; None for causal}. RuntimeError if it is above the tolerance. This is also the
    warm-up, with compilation."""
    largest = dict.fromkeys(WAYS, 0.0) | {"causal": None}
    for row in several:
        _, expected = measure(WAYS["dense"], row, inputs, device)
        for name, way in WAYS.items():
            _, found = measure(way, row, inputs, device)
            if name == "causal":
                continue
            off = max(relative_error(x, y) for x, y in zip(found, expected, strict=True))
            if off > tolerance:
                raise RuntimeError(f"{name} differs from dense by {off:.1e}.")
            largest[name] = max(largest[name], off)
    return largest


def summarise(name, rounds):
    """-> the medians of one way over the rounds, and the times of the dense mask and of the loop
    divided by its time."""
    summary = {key: median(means[name][key] for means in rounds) for key in TIMES}
    for other in ("dense", "loop"):
        summary[f"{other}_over"] = spread([r[other]["both"] / r[name]["both"] for r in rounds])
    return summary


def bench_row_length(tokens, args):
    """Prints the table for rows of `tokens` tokens -> its numbers."""
    device = args.device
    dtype = getattr(torch, args.dtype)
    model = PRESETS[args.preset]
    generator = torch.Generator().manual_seed(0)
    several = rows(tokens, args.rows, device)
    inputs = []
    for n_heads in (model.n_head, model.n_kv_head, model.n_kv_head):  # of q, k and v
        x = torch.randn(1, tokens, n_heads, model.head_dim, generator=generator)
        inputs.append(x.to(device, dtype).requires_grad_())
    # in bfloat16 the tolerance must be larger; a GPU may also add in another order
    exact = device.type == "cpu" and args.dtype == "float32"
    torch.compiler.reset()  # as in training, all rows have one length, which is a constant
    attention.compiled_flex_attention.cache_clear()
    graphs = counters["stats"]["unique_graphs"]
    off = check_ways(several, inputs, device, tolerance=1e-4 if exact else 0.05)
    graphs = counters["stats"]["unique_graphs"] - graphs

    def measure_rows(way):
        times = [measure(way, row, inputs, device)[0] for row in several]
        return {key: fmean(t[key] for t in times) for key in TIMES}

    runs = {name: partial(measure_rows, way) for name, way in WAYS.items()}
    rounds = run_rounds(runs, args.rounds)
    n_allowed = sum(allowed_pairs(r.visible_until[0].cpu().numpy(), r.bidir[0].cpu().numpy())
                    for r in several)
    case = {
        "examples": sum(len(row.starts) - 1 for row in several),
        "area": n_allowed / (tokens**2 * len(several)),
        "compilations": graphs,
        "ways": {name: {"difference": off[name]} | summarise(name, rounds) for name in WAYS},
    }
    print(f"\n{args.rows} rows of {tokens} tokens: {case['examples']} examples,", end=" ")
    print(f"{case['area']:.1%} of all query-key pairs are allowed, {graphs} compilations")
    print_table("seconds of one row", case["ways"])
    return case


def add_arguments(parser):
    add = parser.add_argument
    add("--tokens", type=whole_number(512), nargs="+", default=[4096, 16384],
        help="lengths of rows in tokens")
    add("--rows", type=positive, default=3, help="number of rows of each length")
    add("--preset", choices=PRESETS, default="bench", help="model whose heads are used")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of q, k and v")
    add("--rounds", type=positive, default=5, help="measurements of each row")


def run(args):
    """Prints one table for each length -> {"4096": its numbers, ..}."""
    return {str(tokens): bench_row_length(tokens, args) for tokens in args.tokens}
