"""tools.bench load: which frames are asked for, and a table of times over decoding."""

import numpy as np
import pytest
import torch

from records.video import probe
from tools.bench import load


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """A video of 2 s, 60 frames."""
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    load.make_video(path, 2, "96x64")
    return path


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_times_asked_for(video):
    """No more frames than there are, evenly spread to the last one; then a clip of the middle."""
    probed = probe(video)
    cases = load.choose_times(probed, [384, 128, 9])
    assert list(cases) == ["60 frames", "9 frames", "0.3333 s from 1 s"]
    evenly = [*np.arange(8) / 4, probed.times[-1]]
    np.testing.assert_allclose(cases["9 frames"], evenly, atol=0.002)
    assert cases["0.3333 s from 1 s"] == pytest.approx([1, 4 / 3], abs=0.002)


def test_a_ratio_is_the_median_over_the_rounds(video, bench):
    line, table = bench("load", "--video", video, "--frames", 5, "--rounds", 2)
    results = line["cases"]["results"]
    assert list(results) == [load.FFMPEG, "5 frames", "0.3333 s from 1 s"]
    assert results[load.FFMPEG][load.FFMPEG]["times_decode"]["median"] == 1
    ours = results["5 frames"]["ours"]
    assert ours["frames"] == 5
    assert ours["fps"] == pytest.approx(5 / ours["seconds"], rel=1e-3)
    assert line["threads"] == 1  # as a worker of the training loader has
    assert "5 frames" in table
    rounds = [{load.FFMPEG: a, "x": b} for a, b in ((2, 2), (4, 5), (1, 3))]
    row = load.summarise(rounds, "x")
    assert row == {"seconds": 3, "times_decode": {"median": 1.25, "min": 1, "max": 3}}
