"""Starts the ranks of a test as forks of a process that has already imported torch.

Importing torch and this project takes three seconds per process. With eight ranks on two cores,
this would be most of the time of a test.
"""

import torch.multiprocessing as mp

mp.get_context("forkserver").set_forkserver_preload(["parallel", "training.setup"])


def run_ranks(function, arguments, nprocs):
    """Calls function(rank, *arguments) in processes. An error in one of them is raised here."""
    mp.start_processes(function, arguments, nprocs=nprocs, start_method="forkserver")
