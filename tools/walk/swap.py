"""Pytest plugin that replaces a function of the project by the reader's.

The environment variables WALK_FILE and WALK_EXERCISE name the file and the function, so that
processes that a test starts find them too.
"""

import importlib
import os
import runpy

import attention
import data
import packing
import parallel
import train

MODULE_OF = {"allow": attention, "best_subset": packing, "token_weight": data,
             "ulysses": parallel, "forward_backward": train}


def swap_in():
    """Replaces the function in this process."""
    name = os.environ["WALK_EXERCISE"]
    mine = runpy.run_path(os.environ["WALK_FILE"])[name]

    def allow(visible_until, bidir, rows=slice(None), keys=slice(None)):
        return mine(visible_until, bidir)[:, rows][:, :, keys]

    # the project has no `merge`, only its test does
    module = MODULE_OF.get(name) or importlib.import_module("tests.test_attention")
    setattr(module, name, allow if name == "allow" else mine)


def swapped_worker(*arguments):
    """The worker of tests/test_parallel.py for a new process, which imports everything again."""
    swap_in()
    importlib.import_module("tests.test_parallel").worker(*arguments)


def pytest_configure(config):
    swap_in()


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item.module, "run_workers", None):
            item.module.worker = swapped_worker
