"""Processes beside the trainer, which measure and decode records ahead of time."""

import atexit
import os
import signal
import sys
import threading
import warnings
from multiprocessing import active_children, forkserver, get_context, parent_process
from pathlib import Path

import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
CHILDREN = []  # the processes of all data loaders

# torch warns if --workers is larger than the number of cores, but the user has chosen it
warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)


def process_context():
    """-> the context of multiprocessing that starts processes.

    On Linux, one server process imports torch and this project, and every process is a fork of it.
    So a process starts at once, and its memory is shared with the server (docs/log.md). A fork of
    the trainer itself would copy the locks of its threads. macOS does not support such forks.
    """
    if sys.platform == "darwin":
        return get_context("spawn")
    forkserver.set_forkserver_preload(["training.loader"])
    folder = Path.cwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # The server imports from the folder in which it starts. In another folder it would find
        # nothing, or a user's own training/loader.py.
        os.chdir(ROOT)
        # The server inherits this. Slurm sends SIGTERM to all processes of a run, and the run still
        # needs its processes to finish the step.
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        forkserver.ensure_running()  # does nothing if it runs already
    finally:
        os.chdir(folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return get_context("forkserver")


def iterate(dataset, n, **options):
    """-> an iterator over the elements of a data set, with n processes of a DataLoader."""
    options["generator"] = torch.Generator()  # so that torch's global generator is not used
    if n:
        options |= {"num_workers": n, "worker_init_fn": start_child, "prefetch_factor": 2,
                    "multiprocessing_context": process_context()}
    others = active_children()
    iterator = iter(DataLoader(dataset, batch_size=None, **options))
    CHILDREN.extend(child for child in active_children() if child not in others)
    return iterator


def start_child(*_):
    """Makes a child ignore SIGINT and SIGTERM, which the trainer handles, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


def end_with_parent():
    """Ends this process when its parent ends, even if it is blocked on a full pipe."""
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


@atexit.register
def kill_children():
    """Kills the children at the end. They ignore SIGTERM, so Python would wait for them."""
    if CHILDREN:  # for each killed child, torch's handler of SIGCHLD would raise
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in CHILDREN:
        process.kill()
