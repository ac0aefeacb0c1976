"""Pytest plugin that replaces a function of the project by a function of the reader.

The file and the function are given by the environment variables WALK_FILE and WALK_EXERCISE, so
that processes which are started by a test also get them.
"""

import importlib
import os
import runpy

import attention
import data
import packing
import parallel
import train
import vision

OWNER_OF = {"allow": attention, "best_subset": packing, "token_weight": data,
            "windows": vision, "pool": vision.Pool, "ulysses": parallel, "forward_backward": train}


def swap_in():
    """Replaces the function in this process."""
    name = os.environ["WALK_EXERCISE"]
    mine = runpy.run_path(os.environ["WALK_FILE"])[name]

    def allow(visible_until, bidir, queries=slice(None), keys=slice(None)):
        return mine(visible_until, bidir)[:, queries][:, :, keys]

    # the exercise `pool` is the method vision.Pool.forward
    attribute = "forward" if name == "pool" else name
    setattr(OWNER_OF[name], attribute, allow if name == "allow" else mine)


def swapped_worker(*arguments, **options):
    """The worker of tests/test_parallel.py. It runs in a new process, which must swap again."""
    swap_in()
    return importlib.import_module("tests.test_parallel").worker(*arguments, **options)


def pytest_configure(config):
    swap_in()


def pytest_collection_modifyitems(items):
    for item in items:
        item.module.worker = swapped_worker  # only tests/test_parallel.py uses it
