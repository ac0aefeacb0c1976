"""Starts the ranks of a test as forks of a process that has already imported torch.

Importing torch and this project takes three seconds per process. With eight ranks on two cores,
this would be most of the time of a test.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

mp.get_context("forkserver").set_forkserver_preload(["parallel", "training.setup"])


def run_ranks(function, arguments, nprocs):
    """Calls function(rank, *arguments) in processes. An error in one of them is raised here."""
    mp.start_processes(function, arguments, nprocs=nprocs, start_method="forkserver")


def run_group(function, folder, world, *arguments, **options):
    """Calls function(rank, world, *arguments, **options) in the ranks of a group of gloo, each with
    one thread -> what the function returns on rank 0."""
    run_ranks(call_in_group, (world, folder, function, arguments, options), world)
    return torch.load(folder / "found.pt", weights_only=False)


def call_in_group(rank, world, folder, function, arguments, options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = function(rank, world, *arguments, **options)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


@contextmanager
def first_of_two_ranks():
    """In this block, this process is the first rank of two. The second does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
