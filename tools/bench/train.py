"""Times optimizer steps of train.py, with random weights and random packs.

    python -m tools.bench train "--stage 1 --tiny --batch 2" --rounds 1

At least eight packs are drawn from the stream of tools.bench pack, and all of them are used
equally often. A rate is a sum over all steps divided by the sum of their seconds. The time
includes collating, copying to the device, forward, backward, clipping and the optimizer. It does
not include planning and decoding, which mostly happen in other processes.

With --gpus N, this is the first of N ranks: it has one part of the weights, and with --cp one
part of each row. The other ranks do not exist. What they would send is replaced by a copy of
what this rank has, so the time of communication is not included. "copies" is the time of these
copies in one step. The seconds include it.

MFU is explained in tools.bench run. "mfu_all_pairs" counts the same seconds as torchtitan and
OLMo-core do: each token attends to all tokens of its row, padding is a token, and each token has
logits. It is higher, because we count only what the mask and the loss need. At the end, one more
step is profiled. It gives the time of every kernel (on a CPU: of every operator).
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.testing._internal.distributed.fake_pg import FakeStore

import model as models
import packing
import parallel
import train
from tools import memory
from tools.bench.flops import all_pairs, batch_work, flops
from tools.bench.measure import clock
from tools.bench.rows import draw_rows, n_crops
from tools.bench.stream import Recipe
from tools.command import positive, print_table
from training.loader import Ahead, select_crops
from training.ranks import Ranks
from training.setup import apply_recipe, dry_run_largest_batch
from weights import lora


class Copies:
    """The seconds of the copies that stand in for other ranks, if `device` is set."""
    device = None
    seconds = 0.0


def stands_in(copy):
    """Decorates a copy, so that its seconds are added to Copies."""

    def timed(*args, **options):
        if not Copies.device:
            return copy(*args, **options)
        start = clock(Copies.device)
        copy(*args, **options)
        Copies.seconds += clock(Copies.device) - start

    return timed


class GatherCopies:
    """Replaces the all-gather of FSDP: every rank has the same shard as this one."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    @stands_in
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        # the input is already the first part of the output
        output_tensor.view(-1, len(input_tensor))[1:].copy_(input_tensor)


class KeepOwnPart(GatherCopies):
    """Replaces the reduce-scatter of FSDP: nothing is added to the gradients of this rank."""

    @stands_in
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor[: len(output_tensor)])


@stands_in
def exchange_with_copies(out, x, received=None, sent=None, group=None):
    """Replaces dist.all_to_all_single: fills `out` with the lines of x, again and again."""
    if len(x):
        out.copy_(x[torch.arange(len(out), device=x.device) % len(x)])


class Parts:
    """Iterates over steps without an end, in place of a Loader. Each step has the rows of one of
    the parts, in turn."""
    sources = ("",)

    def __init__(self, parts, micro_batch):
        self.parts = parts
        self.size = micro_batch

    def __iter__(self):
        for rows in cycle(self.parts):
            yield None, (rows[k : k + self.size] for k in range(0, len(rows), self.size))


def open_run(args):
    """The flags -> a run, as far as train.step_once needs it, its model, groups of trained
    parameters and optimizer."""
    device = args.device
    _, given, config = memory.read_command([*args.flags.split(), "--gpus", str(args.gpus)])
    if "compile" not in given.fields:  # as training.setup.choose_layout does
        config = replace(config, compile=device.type == "cuda" and not given.tiny)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    torch.manual_seed(0)
    with device:  # a GPU draws billions of random numbers in a second
        model = models.Molmo2(config.model).init_weights()
    apply_recipe(model, config).train()
    if config.lora.rank:
        lora.hold_frozen(model, dtype)
        lora.init_adapters(model, 0)
    ranks = Ranks()
    if args.gpus > 1:
        dist.init_process_group("fake", rank=0, world_size=args.gpus, store=FakeStore())
        mesh = parallel.make_mesh(config.cp, device.type, config.cp_heads)
        ranks = Ranks(0, args.gpus, mesh, args.gpus // config.cp, 0, config.cp, 0)
    run = SimpleNamespace(config=config, ranks=ranks, device=device, dtype=dtype)
    train.place(run, model)
    for unit in model.modules() if args.gpus > 1 else ():
        if isinstance(unit, parallel.FSDPModule):
            unit.set_custom_all_gather(GatherCopies())
            unit.set_custom_reduce_scatter(KeepOwnPart())
    return run, model, *train.build_optimizer(run, model)


def rows_of(config, n):
    """-> n packed rows of the stream, with random pixels."""
    limits = Recipe(config.data.max_tokens, config.pack_crops, config.data.max_frames)
    rows, _ = draw_rows(config.model, n, config.stage, limits)
    return rows


def cut(rows, config):
    """Whole rows -> rows with the crops of the first of the ranks that share a row."""
    if config.cp == 1:
        return rows
    found = []
    for row in rows:
        *before, total = accumulate(map(n_crops, row), initial=0)
        shards = [parallel.CropShard(0, config.cp, n, total) for n in before]
        found.append([select_crops(*pair) for pair in zip(row, shards, strict=True)])
    return found


def count_work(model, config, rows):
    """-> tokens of one rank for these rows, their FLOPs, and their FLOPs with all pairs."""
    found = [0, 0, 0]
    for row in rows:
        batch = packing.collate([row], config.data.max_tokens, config.model.vision)
        work = batch_work(model, batch)
        found[0] += work.tokens
        for k, counted in enumerate((work, all_pairs(work, config.data.max_tokens)), 1):
            found[k] += flops(
                model, counted, config.train, config.freeze_embedding, config.lora.rank)
    return [n / config.cp for n in found]


def time_kernels(step, device):
    """Profiles one step -> Counter {kernel or operator: seconds}."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        clock(device)
    seconds = Counter()
    for event in profiler.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds[event.key] += spent / 1e6
    return seconds


def add_arguments(parser):
    add = parser.add_argument
    add("flags", help='the flags of train.py, in quotes: "--stage 1 --preset 4b"')
    add("--gpus", type=positive, default=1, help="number of GPUs of the run, in nodes of 8")
    add("--rounds", type=positive, default=2, help="how often every pack is used and timed")
    add("--kernels", type=positive, default=5, help="how many kernels are listed")
    add("--peak", type=float, default=989, help=(
        "peak TFLOP/s of one GPU in the dtype of the run; 989 for an H100 in bfloat16"))


def peak_gib(device):
    """-> the memory that torch allocated and reserved at its peaks, in GiB. On a CPU: nothing."""
    if device.type != "cuda":
        return {}
    return {"GiB allocated": torch.cuda.max_memory_allocated() / memory.GIB,
            "GiB reserved": torch.cuda.max_memory_reserved() / memory.GIB}


def measure_steps(step, n, work, device):
    """Times n steps -> {name: number}. work: sums over these steps, as in count_work."""
    start = clock(device)
    for _ in range(n):
        step()
    seconds = clock(device) - start
    rates = dict(zip(("tokens", "flops", "flops_all_pairs"), work, strict=True))
    return {"seconds": seconds / n,
            **{f"{name}_per_second": total / seconds for name, total in rates.items()}}


def run(args):
    """Prints two tables -> their numbers."""
    device = args.device
    torch.set_flush_denormal(True)  # as in train.py
    run, model, groups, optimizer = open_run(args)
    config = run.config
    n_packs = config.batch // run.ranks.dp
    n_parts = max(2, -(-8 // n_packs))
    rows = rows_of(config, n_parts * n_packs)
    work = [args.rounds * n for n in count_work(model, config, rows)]
    rows = cut(rows, config)
    parts = [rows[k : k + n_packs] for k in range(0, len(rows), n_packs)]
    run.loader = Parts(parts, config.micro_batch)
    steps = Ahead(train.steps_with_batches(run, train.batch_of))
    step = partial(train.step_once, run, model, groups, optimizer, train.forward_backward, 1,
                   steps, train.Stop())
    with patch.object(dist, "all_to_all_single", exchange_with_copies):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            dry_run_largest_batch(run, groups, train.batch_of,
                                  partial(train.forward_backward, run, model))
        largest = peak_gib(device).get("GiB allocated")
        for _ in parts:  # warm-up: compiles what these shapes need
            step()
        found = measure_steps(step, args.rounds * n_parts, work, device)
        found |= peak_gib(device)
        kernels = time_kernels(step, device)
        Copies.seconds, Copies.device = 0.0, device
        step()
        Copies.device = None
    if args.gpus > 1:
        dist.destroy_process_group()
    found |= {
        "mfu": found["flops_per_second"] / (args.peak * 1e12),
        "mfu_all_pairs": found["flops_all_pairs_per_second"] / (args.peak * 1e12),
        "copies": Copies.seconds,
        "GiB of the largest batch": largest,
    }
    print_table(args.flags, {"one rank": found})
    total = sum(kernels.values())
    found["kernels"] = {name: {"seconds": s, "share": s / total}
                        for name, s in kernels.most_common(args.kernels)}
    print_table(f"{total:.4g} s in kernels, of one step", found["kernels"])
    return found
