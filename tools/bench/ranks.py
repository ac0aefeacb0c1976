"""Processes without a model: the start of their groups, and a step's exchange of small numbers.

    python -m tools.bench ranks --ranks 2 8 32 64

Each process joins as a rank of train.py with --cp 2 (parallel.join), then repeats what a step sends
over gloo beside weights and gradients: sums of counts and losses, the squares of three norms, and
an object of every rank (training/sync.py). All processes share the cores of this machine, so wall
time is about (ranks x CPU seconds of one) / cores. A line through the CPU seconds of one rank is
extended to 1,024 ranks, without the latency of a network.
"""

import os
import socket
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import parallel
from training.stats import StepStats, batch_counts
from training.sync import sync_ranks


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64], metavar="N")
    parser.add_argument("--steps", type=int, default=20)


def exchange(step, ranks):
    """What train.train sends over gloo in a step, with thirty sources of data."""
    stats = StepStats([f"source {k}" for k in range(30)], ranks.cp)
    stats.counts.update(batch_counts([]))
    stats.all_reduce()
    parallel.all_reduce_sums({"vit": 1.0, "connector": 1.0, "llm": 1.0})     # divide_and_clip
    loader = SimpleNamespace(newly_masked=[], masked=SimpleNamespace(counts=Counter()))
    sync_ranks(step, loader, SimpleNamespace(done=lambda: None), [], ranks)


def worker(rank, world, port, args, results):
    """Puts into results (start, step) of the slowest rank, each [wall, CPU] seconds."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port), "TORCH_GLOO_LAZY_INIT": "1"}
    clocks = [np.array([time.monotonic(), time.process_time()])]
    ranks = parallel.join(cp=2, device=torch.device("cpu"))
    exchange(0, ranks)                           # connects the ranks that talk in a step
    for step in range(1 + args.steps):
        clocks.append(np.array([time.monotonic(), time.process_time()]))
        exchange(step, ranks)
    found = clocks[1] - clocks[0], (clocks[-1] - clocks[1]) / args.steps
    of_ranks = parallel.all_gather(found)
    if ranks.first:
        results.put(np.max(of_ranks, axis=0).tolist())
    dist.destroy_process_group()


def run(args):
    """Prints a row for each number of ranks and the extended lines -> the same numbers."""
    results = mp.get_context("fork").SimpleQueue()
    rows = {}
    print("ranks    start: s  CPU s    step: ms  CPU ms   (of the slowest rank)")
    for n in args.ranks:
        if n < 2 or n % 2:
            raise ValueError(f"{n} ranks cannot form pairs that share a row.")
        port = socket.create_server(("localhost", 0)).getsockname()[1]       # closed at once
        # forked: the processes share the pages of torch, and importing it is not measured
        mp.start_processes(worker, (n, port, args, results), n, start_method="fork")
        rows[n] = results.get()
        (start, start_cpu), (step, step_cpu) = rows[n]
        print(f"{n:5} {start:11.2f} {start_cpu:6.2f} {1e3 * step:11.1f} {1e3 * step_cpu:7.1f}")
    cpu = np.array(list(rows.values()))[:, :, 1]
    lines = np.polyfit(list(rows), cpu, min(len(rows) - 1, 1))
    start, step = (float(np.polyval(line, 1024)) for line in lines.T)
    print(f" 1024, by a line: {start:10.2f} {1e3 * step:19.1f}   CPU s, CPU ms")
    return {"start_and_step": {str(n): row for n, row in rows.items()}, "cpu_1024": [start, step]}
