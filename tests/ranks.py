"""Ranks of a test, as processes that begin as copies of one that has imported torch.

To import torch and this project takes each process three seconds; eight ranks on two cores would
spend most of a test on it.
"""

import torch.multiprocessing as mp

mp.get_context("forkserver").set_forkserver_preload(["parallel", "training.setup"])


def run_ranks(function, arguments, n):
    """function(rank, *arguments) in n processes; an error of one of them is raised here."""
    mp.start_processes(function, arguments, nprocs=n, start_method="forkserver")
