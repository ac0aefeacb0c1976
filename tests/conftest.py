"""Settings of all tests: the threads of OpenMP, and skipping tests whose packages are missing.

By default, OpenMP threads without work spin. Two of them beside another process on two cores make a
test up to four times slower, so here they sleep. With several workers (pytest -n 2), each worker
has one thread. The variables are set before torch is imported. Child processes inherit them.
"""

import os
import signal
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.extras import missing

MEDIA = Path(__file__).parent / "media"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _command_name(monkeypatch, request):
    """Messages start with the name of the command. In tests of tools/x it is tools.x."""
    module = request.path.stem.removeprefix("test_")
    is_tool = request.path.is_relative_to(request.config.rootpath / "tests" / "tools")
    name = f"tools.{module}" if is_tool else "train.py"
    monkeypatch.setattr(sys, "argv", [name])


@pytest.fixture(autouse=True, scope="session")
def _decoded_once():
    """ffmpeg decodes each frame of the videos in tests/media once."""
    media = import_module("records.media")         # imports torch, after the variables are set
    probe, decode = media.probe, media.decode
    probe_once = cache(probe)
    decoded = {}

    def frames(video, wanted):
        if MEDIA not in Path(video.path).parents:
            return decode(video, wanted)
        new = [k for k in wanted if (video.path, k) not in decoded]
        for k, frame in zip(new, decode(video, new) if new else (), strict=True):
            decoded[video.path, k] = frame
        return (decoded[video.path, k].copy() for k in wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media, "decode", frames)
        patch.setattr(media, "probe", lambda path: (
            probe_once if MEDIA in Path(path).parents else probe)(path))
        yield


@pytest.fixture(autouse=True)
def _ctrl_c():
    """A command that was ended by Ctrl-C ignores further signals, but the tests do not."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored after nohup
    yield
    signal.signal(signal.SIGINT, handler)


def pytest_runtest_setup(item):
    """Skips a test marked `extras("safetensors", ...)` if a package is not installed."""
    for mark in item.iter_markers("extras"):
        if sentence := missing(*mark.args):
            pytest.skip(sentence)
