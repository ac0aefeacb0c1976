"""Attention in packed rows: under one dense mask, in a loop over examples, and in this project.

    python -m tools.bench attend                       # rows of 4,096 and 16,384 tokens on the CPU
    python -m tools.bench attend --tokens 2048 --rounds 2
    python -m tools.bench attend --tokens 4096 --branches 12
    python -m tools.bench attend --device cuda --dtype bfloat16 --heads 32 --kv-heads 8 --dim 128 \\
        --tokens 16384 36864

Rows are packs of the stream of tools.bench pack (of stage 3 from 36,864 tokens on, else of stage 2,
with crops in proportion): trunks, visual tokens that see each other, annotations as branches.
--branches fills each row with one video and its annotations. Every way computes the same, forward
and backward, which is checked first.

    dense   SDPA under one mask (1,1,T,T)
    loop    SDPA for each example, with a mask of its own; all outputs concatenated
    ours    attention.attend under attention.packed_mask: FlexAttention on a GPU, else documents
            in chunks, which a GPU measures as well
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import NamedTuple

import torch

import attention
import packing
from tools.bench.measure import check_device, clock, in_turn, spread
from tools.bench.stream import ExampleSize, recipe, stream

VISUAL_PERIOD = 88  # tokens of a frame, its markers and the text of its time
VISUAL_TOKENS = 83  # of these, the frame and its markers
STREAM = 400  # examples that rows are drawn from
TIMES = ("mask", "forward", "both")  # seconds; both: forward and backward
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # of the largest value

# ------------------------------------------------------------------------------------------------
# rows


class Row(NamedTuple):
    """The mask fields (1,T) int32 of a packed row, and where its examples and its padding begin."""

    visible_until: torch.Tensor
    bidir: torch.Tensor
    starts: list  # one more than there are examples

    def to(self, device):
        return Row(self.visible_until.to(device), self.bidir.to(device), self.starts)


def packed_row(examples, tokens):
    """[ExampleSize, ..] -> Row of so many tokens.

    A token of a trunk is visible until its example ends, a token of a branch until the branch ends,
    padding until the row ends. The visual tokens of an example share one bidir number, which is
    unique in the row. They stand in the trunk as frames do: 83 of every 88 tokens; an example of
    text alone has none.
    """
    visible_until = torch.full((tokens,), tokens, dtype=torch.int32)
    bidir = torch.zeros(tokens, dtype=torch.int32)
    starts = list(accumulate((e.tokens for e in examples), initial=0))
    for number, (start, example) in enumerate(zip(starts, examples, strict=False), 1):
        end = start + example.trunk
        visible_until[start:end] = start + example.tokens
        place = torch.arange(example.trunk)
        is_visual = (place > 0) & (place % VISUAL_PERIOD < VISUAL_TOKENS) & (example.crops > 0)
        bidir[start:end] = number * is_visual
        for length in example.branches:
            visible_until[end : end + length] = end + length
            end += length
    return Row(visible_until[None], bidir[None], starts)


def one_video(tokens, branches):
    """A video that fills a quarter of a row, with annotations of equal length in the rest."""
    trunk = tokens // 4
    length = (tokens - trunk) // branches
    return ExampleSize(trunk + branches * length, 1, trunk, [length] * branches)


def rows(tokens, count, seed=0, branches=0):
    """The first packs of the stream that fill at least 0.8 of a row -> [Row, ..]. Where the number
    of branches is given, one video with so many in each row."""
    if branches:
        return [packed_row([one_video(tokens, branches)], tokens)] * count
    stage = 3 if tokens >= recipe(3).max_tokens else 2
    limits = recipe(stage)
    max_crops = max(limits.max_crops * tokens // limits.max_tokens, 1)
    examples = stream(stage, STREAM, seed)
    found = []
    for pack in packing.Planner([(e.tokens, e.crops) for e in examples], tokens, max_crops):
        members = [examples[i] for i in pack]
        if sum(e.tokens for e in members) >= 0.8 * tokens:
            found.append(members)
    if len(found) < count:
        raise ValueError(
            f"--tokens {tokens}: {STREAM} examples fill {len(found)} such rows, not {count}."
        )
    return [packed_row(members, tokens) for members in found[:count]]


# ------------------------------------------------------------------------------------------------
# ways to attend


class Way(NamedTuple):
    make_mask: Callable  # Row -> mask
    attend: Callable  # q (1,T,H,D), k and v (1,T,G,D), mask -> (1,T,H,D)


def example_masks(row):
    """[(tokens of the example, its mask (1,t,t)), ..]; padding counts as an example."""
    masks = []
    n_tokens = row.bidir.shape[1]
    for start, end in pairwise([*row.starts, n_tokens]):
        if start < end:
            at = slice(start, end)
            masks.append((at, attention.allow(row.visible_until, row.bidir, at, at)))
    return masks


def attend_in_loop(q, k, v, masks):
    outputs = [attention.attend(q[:, at], k[:, at], v[:, at], mask) for at, mask in masks]
    return torch.cat(outputs, dim=1)


def with_mask(mask_function):
    """The Way of a function of (visible_until, bidir) that attention.attend takes the result of."""
    return Way(lambda row: mask_function(row.visible_until, row.bidir), attention.attend)


WAYS = {
    "dense": with_mask(attention.allow),
    "loop": Way(example_masks, attend_in_loop),
    "ours": with_mask(attention.packed_mask),
}
# on a GPU also the form of mask that "ours" has elsewhere
GPU_WAYS = WAYS | {"documents": with_mask(attention.document_mask)}


# ------------------------------------------------------------------------------------------------
# measuring


def measure(way, row, inputs, device):
    """One forward and backward -> {each of TIMES, "bytes": the most memory beyond what was there
    before, None on a CPU}, and [output, gradients of q, k and v]."""
    cuda = device.type == "cuda"
    memory_before = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        memory_before = torch.cuda.memory_allocated(device)
    start = clock(device)
    mask = way.make_mask(row)
    made = clock(device)
    output = way.attend(*inputs, mask)
    forward = clock(device)
    gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
    end = clock(device)
    times = {"mask": made - start, "forward": forward - made, "both": end - made}
    times["bytes"] = None
    if cuda:
        times["bytes"] = torch.cuda.max_memory_allocated(device) - memory_before
    return times, [output.detach(), *gradients]


def check_ways(ways, several, inputs, device, tolerance):
    """Every way against the dense mask, forward and backward -> {way: largest difference, relative
    to the largest value}. Also warms up, and compiles. RuntimeError where a way differs."""
    errors = dict.fromkeys(ways, 0.0)
    for row in several:
        expected = measure(ways["dense"], row, inputs, device)[1]
        for name, way in ways.items():
            found = measure(way, row, inputs, device)[1]
            for x, y in zip(found, expected, strict=True):
                errors[name] = max(errors[name], float((x - y).abs().max() / y.abs().max()))
            del found
            if errors[name] > tolerance:
                raise RuntimeError(
                    f"{name} differs from dense by {errors[name]:.1e} of the largest value."
                )
    return errors


def measure_rounds(ways, several, inputs, device, rounds):
    """-> [{way: means over the rows} for each round]. The ways take turns."""
    found = []
    for k in range(rounds):
        means = {}
        for name in in_turn(ways, k):
            results = [measure(ways[name], row, inputs, device)[0] for row in several]
            means[name] = {key: fmean(r[key] for r in results) for key in TIMES}
            means[name]["bytes"] = None
            if device.type == "cuda":
                means[name]["bytes"] = max(r["bytes"] for r in results)
        found.append(means)
    return found


def summarise(name, rounds):
    """One way: medians over the rounds, and the ratios of the dense mask and the loop to it."""
    row = {}
    for key in TIMES:
        row[key] = median(means[name][key] for means in rounds)
    row["bytes"] = None
    if rounds[0][name]["bytes"] is not None:
        row["bytes"] = max(means[name]["bytes"] for means in rounds)
    for other in ("dense", "loop"):
        row[f"{other}_over"] = spread(r[other]["both"] / r[name]["both"] for r in rounds)
    return row


def allowed_share(several, tokens):
    """The share of all pairs that the rule allows, padding included."""
    allowed = sum(attention.allowed_pairs(row.visible_until[0], row.bidir[0]) for row in several)
    return allowed / (tokens**2 * len(several))


def bench_row_length(tokens, args):
    """Prints the table of rows of so many tokens -> its numbers."""
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    several = [row.to(device) for row in rows(tokens, args.rows, branches=args.branches)]
    inputs = []
    for heads in (args.heads, args.kv_heads, args.kv_heads):
        x = torch.randn(1, tokens, heads, args.dim, generator=generator)
        inputs.append(x.to(device, dtype).requires_grad_())
    # a GPU may round float32 products to TF32
    tolerance = TOLERANCE[args.dtype if args.device == "cpu" else "bfloat16"]
    ways = GPU_WAYS if device.type == "cuda" else WAYS
    errors = check_ways(ways, several, inputs, device, tolerance)
    rounds = measure_rounds(ways, several, inputs, device, args.rounds)
    case = {
        "rows": args.rows,
        "examples": sum(len(row.starts) - 1 for row in several),
        "area": allowed_share(several, tokens),
        "ways": {name: summarise(name, rounds) | {"off": errors[name]} for name in ways},
    }
    print(
        f"\n{args.rows} rows of {tokens} tokens, {case['examples']} examples, {case['area']:.1%} "
        "of all pairs allowed; times of one row\n"
        "way             mask ms  forward ms  with backward ms   MiB   dense / it (range)"
        "   loop / it (range)   off"
    )
    for name, r in case["ways"].items():
        memory = "-" if r["bytes"] is None else r["bytes"] // 2**20
        dense = "{median:.2f} ({min:.2f}-{max:.2f})".format(**r["dense_over"])
        loop = "{median:.2f} ({min:.2f}-{max:.2f})".format(**r["loop_over"])
        print(
            f"{name:12s} {r['mask'] * 1e3:10.1f} {r['forward'] * 1e3:11.1f} "
            f"{r['both'] * 1e3:17.1f} {memory:>5} {dense:>20} {loop:>19}   {r['off']:.0e}",
            flush=True,
        )
    return case


def add_arguments(parser):
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of a row")
    parser.add_argument("--rows", type=int, default=3, help="rows of each length")
    parser.add_argument(
        "--branches", type=int, default=0, help="one video with so many annotations in each row"
    )
    parser.add_argument("--heads", type=int, default=8, help="heads of the queries")
    parser.add_argument("--kv-heads", type=int, default=2, help="heads of keys and values")
    parser.add_argument("--dim", type=int, default=64, help="of a head")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ..")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each row")


def run(args):
    """Prints a table per length -> {"4096": its numbers, ..}. ValueError for flags that nothing can
    be measured with."""
    smallest = min(*args.tokens, args.rows, args.rounds, args.kv_heads, args.heads, args.dim)
    if smallest < 1 or args.heads % args.kv_heads:
        raise ValueError(
            "--tokens, --rows, --rounds and --dim must be at least 1, and --heads a multiple of "
            "--kv-heads."
        )
    if not 0 <= args.branches <= min(args.tokens) // 2:
        raise ValueError(f"--branches {args.branches}: from 0 to half of a row's tokens.")
    check_device(args.device)
    return {str(tokens): bench_row_length(tokens, args) for tokens in args.tokens}
