"""tools.bench load: which frames are asked for, and a table of times over decoding."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tools.bench import load

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_times_asked_for():
    """No more frames than there are, evenly spread to the last one; then a clip of the middle."""
    video = SimpleNamespace(duration=2.0, times=np.arange(60) / 30)
    cases = load.choose_times(video, [384, 9])
    assert list(cases) == ["60 frames", "9 frames", "0.3333 s from 1 s"]
    evenly = [*np.arange(8) / 4, 59 / 30]
    np.testing.assert_allclose(cases["9 frames"], evenly, atol=0.002)
    assert cases["0.3333 s from 1 s"] == pytest.approx([1, 4 / 3], abs=0.002)


def test_a_ratio_is_the_median_over_the_rounds(bench):
    line, table = bench("load", "--seconds", 1, "--frames", 5, "--rounds", 2)
    results = line["cases"]["results"]
    assert list(results) == [load.FFMPEG, "5 frames", "0.1667 s from 0.5 s"]
    assert results[load.FFMPEG][load.FFMPEG]["times_decode"]["median"] == 1
    ours = results["5 frames"]["ours"]
    assert ours["frames"] == 5
    assert ours["fps"] == pytest.approx(5 / ours["seconds"], rel=1e-3)
    prepared = results["5 frames"]["prepared"]
    assert prepared["frames"] == 5
    assert 0 < prepared["MB"] < ours["MB"]
    assert line["threads"] == 1  # as a worker of the training loader has
    assert "5 frames" in table
    rounds = [{load.FFMPEG: a, "x": b} for a, b in ((2, 2), (4, 5), (1, 3))]
    row = load.summarise(rounds, "x", 6, [])
    assert row == {"seconds": 3, "times_decode": {"median": 1.25, "min": 1, "max": 3},
                   "frames": 6, "fps": 2, "MB": 0}
