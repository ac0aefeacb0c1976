"""For all tests: how many threads work, that those without work wait asleep, and which tests need
packages that requirements.txt does not install.

By default OpenMP's threads spin, and two of them beside another process on two cores make a test up
to four times as slow. With several workers (pytest -n 2) each has one thread. The variables count
when torch is imported, which is after this file; the processes that a test starts inherit them.
"""

import os
import sys

import pytest

from tests.extras import missing

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _command_name(monkeypatch, request):
    """Messages begin with the name of the command: of tools.x for the tests of tools/x."""
    module = request.path.stem.removeprefix("test_")
    is_tool = request.path.is_relative_to(request.config.rootpath / "tests" / "tools")
    name = f"tools.{module}" if is_tool else "train.py"
    monkeypatch.setattr(sys, "argv", [name])


def pytest_runtest_setup(item):
    """Skips a test marked `extras("safetensors", ...)` where a package is not installed."""
    for mark in item.iter_markers("extras"):
        if sentence := missing(*mark.args):
            pytest.skip(sentence)
