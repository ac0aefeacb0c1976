"""Estimates what bounds a step on 8 to 512 GPUs, from assumed bandwidths.

    python -m tools.bench scale

Nothing is measured here. "compute" comes from the times of one H200 in RESULTS.md. Three kinds of
communication are estimated. FSDP gathers parameters and sums gradients in a node, which
computation can hide. The copies of different nodes are summed once per step. With --cp, heads are
exchanged, which is not hidden. "slowest" is the time of the slowest rank divided by the mean of
all ranks, for packs of the stream of tools.bench pack. Ranks of a node wait for each other in
every micro-batch.

"save" is the time to write a checkpoint. A crash loses half an interval on average. So saves and
crashes together cost least if the interval is the square root of 2 x save x the time between
crashes (Young's formula). "save every" is this interval in steps. "cost" is what saves and crashes
then cost.
"""

from itertools import islice
from statistics import fmean
from typing import NamedTuple

import numpy as np

import packing
from tools.bench.stream import recipe, stream
from tools.command import print_table
from training.loader import share_packs

GPUS = (8, 32, 64, 128, 512)
BATCH = 128  # rows of a step
NODE = 8


class Stage(NamedTuple):
    """A stage on one H200. The shares say which part of a row's time grows with crops and pairs."""
    cp: int
    micro_batch: int
    seconds: float  # of a row
    crops: float  # share of the ViT
    pairs: float  # share of attention in the decoder
    parameters: float  # trained
    in_blocks: float  # of the decoder, gathered in bfloat16; the others in float32
    saved: float  # numbers in a checkpoint: all parameters, and two per trained parameter


STAGES = {
    "stage 1, 4B": Stage(1, 4, 2.005 / 8, 0.30, 0.13, 4.07e9, 3.63e9, 12.6e9),
    "stage 2, 4B": Stage(1, 1, 4.279 / 2, 0.36, 0.25, 4.07e9, 3.63e9, 12.6e9),
    "stage 3, 8B": Stage(8, 1, 1.864, 0.20, 0.52, 8.04e9, 6.95e9, 24.7e9),
}


def slowest(stage, steps, gpus):
    """-> time of the slowest rank / mean time, the mean over the steps (lists of packs)."""
    together = NODE // stage.cp
    micro_batch = min(stage.micro_batch, BATCH * stage.cp // gpus)
    found = []
    for packs in steps:
        work = np.array([(sum(e.crops for e in p), sum(e.tokens**2 for e in p)) for p in packs])
        shares = np.array([stage.crops, stage.pairs])
        cost = 1 - shares.sum() + work / work.mean(0) @ shares
        order = share_packs(packs, gpus // stage.cp, together, micro_batch)
        of_nodes = cost[order].reshape(gpus // NODE, together, -1, micro_batch).sum(3)
        found.append(of_nodes.max(1).sum(1).max() * gpus / stage.cp / cost.sum())
    return fmean(found)


def estimate(stage, steps, gpus, args):
    """-> a line of the table: seconds of the parts of a step on `gpus` GPUs."""
    rows = BATCH * stage.cp // gpus
    n_micro_batches = max(rows // stage.micro_batch, 1)
    others = stage.parameters - stage.in_blocks
    gathered = 2 * (2 * stage.in_blocks + 4 * others) + 4 * stage.parameters
    found = {
        "rows": rows,
        "compute": rows * stage.seconds,
        "FSDP": gathered * n_micro_batches * 7 / 8 / (args.nvlink * 1e9),
        "nodes": 2 * (1 - NODE / gpus) * 4 * stage.parameters / NODE / (args.network * 1e9),
        "heads": (stage.cp > 1) * rows * 3 * 36 * 79 * 2**20 / (args.nvlink * 1e9),
        "slowest": slowest(stage, steps, gpus),
        "save": 4 * stage.saved / (args.disk * 1e9),
    }
    seconds = found["compute"] * found["slowest"] + found["nodes"] + found["heads"]
    interval = (2 * found["save"] * args.gpu_days * 86400 / gpus) ** 0.5
    return found | {"save every": interval / seconds, "cost": 2 * found["save"] / interval}


def add_arguments(parser):
    add = parser.add_argument
    add("--nvlink", type=float, default=330, help="GB/s of a GPU in collectives of its node")
    add("--network", type=float, default=42, help="GB/s of a GPU to other nodes")
    add("--disk", type=float, default=5, help="GB/s of the disk, for all GPUs together")
    add("--gpu-days", type=float, default=1900, help=(
        "days between crashes of a run, times its GPUs; Llama 3 had 466 interruptions in 54 days "
        "on 16,384 GPUs (arXiv 2407.21783)"))


def run(args):
    """Prints a table of each stage -> their numbers."""
    found = {}
    for number, (name, stage) in enumerate(STAGES.items(), 1):
        limits = recipe(number)
        sizes = [(e.tokens, e.crops) for e in stream(number, 16_000, 0)]
        planner = packing.Planner(sizes, limits.max_tokens, limits.max_crops)
        steps = [[*islice(planner, BATCH)] for _ in range(4)]
        found[name] = {str(gpus): estimate(stage, steps, gpus, args)
                       for gpus in GPUS if gpus // stage.cp <= BATCH}
        print_table(f"{name}, GPUs", found[name])
    return found
