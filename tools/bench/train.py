"""Times optimizer steps of train.py, with random weights and random packs.

    python -m tools.bench train "--stage 1 --tiny --batch 2" --steps 1

The packs come from the stream of tools.bench pack. The time includes collating, copying to
the device, forward, backward, clipping and the optimizer. It does not include planning and
decoding, which mostly happen in other processes.

With --gpus N, this is the first of N ranks: it has one part of the weights, and with --cp one
part of each row. The other ranks do not exist. What they would send is replaced by a copy of
what this rank has, so the time of communication is not included.

MFU is explained in tools.bench run. At the end, one more step is profiled. It gives the time
of every kernel (on a CPU: of every operator).
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import median
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
from tools.bench.flops import batch_work, flops
from tools.bench.measure import clock
from tools.bench.step_cases import n_crops, stream_case
from tools.bench.stream import Recipe
from tools.command import positive, print_table
from training.ranks import Ranks
from training.setup import apply_recipe, dry_run_largest_batch
from weights import lora


class GatherCopies:
    """Replaces the all-gather of FSDP: every rank has the same shard as this one."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        # the input is already the first part of the output
        output_tensor.view(-1, len(input_tensor))[1:].copy_(input_tensor)


class KeepOwnPart(GatherCopies):
    """Replaces the reduce-scatter of FSDP: nothing is added to the gradients of this rank."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor[: len(output_tensor)])


def exchange_with_copies(out, x, received=None, sent=None, group=None):
    """Replaces dist.all_to_all_single: fills `out` with the lines of x, again and again."""
    if len(x):
        out.copy_(x[torch.arange(len(out), device=x.device) % len(x)])


def open_run(args):
    """The flags -> a run, as far as train.forward_backward needs it, its model, groups of trained
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


def draw_rows(config, n):
    """-> n packed rows of the stream, with random pixels."""
    limits = Recipe(config.data.max_tokens, config.pack_crops, config.data.max_frames)
    return stream_case(config.model, n, config.stage, limits).rows


def cut(rows, config):
    """Whole rows -> rows with the crops of the first of the ranks that share a row."""
    if config.cp == 1:
        return rows
    found = []
    for row in rows:
        *before, total = accumulate(map(n_crops, row), initial=0)
        shards = [parallel.CropShard(0, config.cp, n, total) for n in before]
        found.append([parallel.select_crops(*pair) for pair in zip(row, shards, strict=True)])
    return found


def count_work(model, config, rows):
    """-> tokens and FLOPs of one rank for these rows."""
    tokens = n_flops = 0
    for row in rows:
        batch = packing.collate([row], config.data.max_tokens, config.model.vision)
        work = batch_work(model, batch)
        tokens += work.tokens
        n_flops += flops(model, work, config.train, config.freeze_embedding, config.lora.rank)
    return tokens / config.cp, n_flops / config.cp


def train_step(run, model, groups, optimizer, rows):
    """One optimizer step, as in train.train, with a learning rate of 0."""
    size = run.config.micro_batch
    weights = []
    for start in range(0, len(rows), size):
        parallel.set_last_micro_batch(model, start + size >= len(rows))
        batch, *_ = train.forward_backward(run, model, rows[start : start + size])
        weights.append(batch.weights.sum())
    train.divide_and_clip(run, groups, float(sum(weights)))
    optimizer.step()
    optimizer.zero_grad()


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
    add("--steps", type=positive, default=5, help="number of steps that are timed")
    add("--kernels", type=positive, default=5, help="how many kernels are listed")
    add("--peak", type=float, default=989, help=(
        "peak TFLOP/s of one GPU in the dtype of the run; 989 for an H100 in bfloat16"))


def peak_gib(device):
    """-> the memory that torch allocated and reserved at its peaks, in GiB. On a CPU: nothing."""
    if device.type != "cuda":
        return {}
    return {"GiB allocated": torch.cuda.max_memory_allocated() / memory.GIB,
            "GiB reserved": torch.cuda.max_memory_reserved() / memory.GIB}


def measure_steps(step, halves, counts, n, device):
    """Times n steps, which use the first and the second half of the packs in turn -> {name:
    median}. counts: tokens and FLOPs of each half."""
    seconds = []
    tokens_per_second = []
    flops_per_second = []
    for k in range(n):
        start = clock(device)
        step(halves[k % 2])
        spent = clock(device) - start
        n_tokens, n_flops = counts[k % 2]
        seconds.append(spent)
        tokens_per_second.append(n_tokens / spent)
        flops_per_second.append(n_flops / spent)
    return {"seconds": median(seconds), "tokens_per_second": median(tokens_per_second),
            "flops_per_second": median(flops_per_second)}


def run(args):
    """Prints two tables -> their numbers."""
    device = args.device
    torch.set_flush_denormal(True)  # as in train.py
    started = clock(device)
    run, model, groups, optimizer = open_run(args)
    config = run.config
    n_packs = config.batch // run.ranks.dp
    rows = draw_rows(config, 2 * n_packs)
    halves = rows[:n_packs], rows[n_packs:]
    counts = [count_work(model, config, half) for half in halves]
    halves = [cut(half, config) for half in halves]
    step = partial(train_step, run, model, groups, optimizer)
    opened = clock(device)
    with patch.object(dist, "all_to_all_single", exchange_with_copies):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            dry_run_largest_batch(run, groups, partial(train.forward_backward, run, model))
        largest = peak_gib(device).get("GiB allocated")
        for half in halves:  # warm-up: compiles what these shapes need
            step(half)
        warm = clock(device)
        found = measure_steps(step, halves, counts, args.steps, device)
        found |= peak_gib(device)
        kernels = time_kernels(partial(step, halves[0]), device)
    if args.gpus > 1:
        dist.destroy_process_group()
    found |= {
        "mfu": found["flops_per_second"] / (args.peak * 1e12),
        "GiB of the largest batch": largest,
        "seconds to open": opened - started,
        "seconds to warm up": warm - opened,
    }
    print_table(args.flags, {"one rank": found})
    total = sum(kernels.values())
    found["kernels"] = {name: {"seconds": s, "share": s / total}
                        for name, s in kernels.most_common(args.kernels)}
    print_table(f"{total:.4g} s in kernels, of one step", found["kernels"])
    return found
