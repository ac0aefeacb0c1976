"""A pytest plugin that puts a reader's function in the place of the project's.

Which function, and of which file, two environment variables say, so that processes that a test
starts find them too. Run by tools/walk/check.py: python -m pytest -p tools.walk.swap TESTS
"""

import importlib
import importlib.util
import os
from pathlib import Path

import attention
import data
import packing
import parallel
import train

FILE, NAME = "WALK_FILE", "WALK_EXERCISE"
MODULE_OF = {"allow": attention, "best_subset": packing, "token_weight": data,
             "ulysses": parallel, "forward_backward": train}


def load(path):
    """A reader's file as a module; whatever it raises is the reader's to see."""
    found = importlib.util.spec_from_file_location("mine", Path(path))
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def adapt(name, mine):
    """The reader's function with the arguments of the project's."""
    if name != "allow":
        return mine

    def allow(visible_until, bidir, rows=slice(None), keys=slice(None)):
        return mine(visible_until, bidir)[:, rows][:, :, keys]

    return allow


def swap_in():
    """Puts the function there, in this process."""
    name = os.environ[NAME]
    mine = getattr(load(os.environ[FILE]), name)
    setattr(MODULE_OF[name], name, adapt(name, mine))


def swapped_worker(*arguments):
    """The worker of tests/test_parallel.py in a process of its own, which imports everything
    anew."""
    swap_in()
    importlib.import_module("tests.test_parallel").worker(*arguments)


def pytest_configure(config):
    swap_in()


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item.module, "run_workers", None):
            item.module.worker = swapped_worker
