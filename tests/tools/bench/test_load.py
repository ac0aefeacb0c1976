"""tools.bench load: decoders show the frame on display, and a table of times over decoding."""

import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
import torch

import vision
from records import media
from records.video import probe
from tools.bench import load


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """A video of 2 s whose first frame appears at 0.7 s of the file."""
    folder = tmp_path_factory.mktemp("video")
    load.make_video(folder / "a.mp4", 2, "96x64")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-itsoffset", "0.7"]
    command += ["-i", str(folder / "a.mp4"), "-c", "copy", str(folder / "b.mkv")]
    subprocess.run(command, check=True)
    return folder / "b.mkv"


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["ours", "PyAV", "torchcodec"])
def test_every_decoder_shows_the_frame_on_display(video, name):
    """Against all 60 frames, decoded at once: at times between frames, at those at which one
    appears, twice in the same frame, from the middle on, and at the end."""
    probed = probe(video)
    first = float(probed.pts[0] * probed.time_base)
    assert first == pytest.approx(0.7, abs=0.002)
    if reason := load.explain_failure(name, video, first):
        pytest.skip(reason)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(video)]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    raw = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    all_frames = np.frombuffer(raw, np.uint8).reshape(60, 64, 96, 3)
    appears = probed.times
    last = appears[-1]
    for times in (
        (0.0, 0.04, 0.05, 0.9, 1.5),
        (appears[31], appears[31] + 0.01, appears[32], last),
        (1.0, 1.02, last),
    ):
        found = [frame.copy() for frame in load.DECODERS[name](video, list(times), first)]
        assert len(found) == len(times)
        for t, frame in zip(times, found, strict=True):
            expected = np.flatnonzero(appears <= t + 1e-9)[-1]
            nearest = np.abs(all_frames.astype(int) - frame).mean((1, 2, 3)).argmin()
            assert nearest == expected, f"{name}: frame {nearest} where {expected} is on display"


def test_a_neighbouring_frame_is_noticed(tmp_path):
    """In the video that the benchmark makes, at its size: every frame differs from the next by more
    than twice what passes as the same frame."""
    load.make_video(tmp_path / "a.mp4", 0.4, "1280x720")
    frames = media.frames(probe(tmp_path / "a.mp4"), [k / 30 for k in range(12)])
    means = np.stack([vision.frame(frame)[0][0].mean(1) for frame in frames])
    assert np.abs(np.diff(means, axis=0)).mean(1).min() > 2 * load.SAME_FRAME


def test_the_times_asked_for(video):
    """No more frames than there are, evenly spread to the last one; then a clip of the middle."""
    probed = probe(video)
    cases = load.choose_times(probed, [384, 128, 9])
    assert list(cases) == ["60 frames", "9 frames", "0.3333 s from 1 s"]
    evenly = [*np.arange(8) / 4, probed.times[-1]]
    np.testing.assert_allclose(cases["9 frames"], evenly, atol=0.002)
    assert cases["0.3333 s from 1 s"] == pytest.approx([1, 4 / 3], abs=0.002)


def test_ratios_are_within_a_round_and_other_frames_are_named(video, bench, monkeypatch):
    """PyAV fails; torchcodec shows each frame one too late."""

    def late(path, times, first):
        return media.frames(probe(path), [t + 0.04 for t in times])

    def broken(path, times, first):
        raise OSError("of course\nand more")

    def missing(path, times, first):
        raise ModuleNotFoundError("No module named 'abc'", name="abc")

    monkeypatch.setitem(load.DECODERS, "PyAV", missing)
    assert load.explain_failure("PyAV", video, 0) == "not installed (pip install abc)"
    monkeypatch.setitem(load.DECODERS, "PyAV", broken)
    monkeypatch.setitem(load.DECODERS, "torchcodec", late)
    line, table = bench("load", "--video", video, "--frames", 5, "--rounds", 2)
    results = line["cases"]["results"]
    assert list(results) == [load.FFMPEG, "5 frames", "0.3333 s from 1 s"]
    assert results[load.FFMPEG][load.FFMPEG]["times_decode"] == 1
    rows = results["5 frames"]
    assert rows["PyAV"] == {"note": "fails: of course"}
    assert rows["torchcodec"]["note"].startswith("not the same frame at ")
    ours = rows["ours"]
    assert (ours["frames"], ours["off"]) == (5, 0)
    assert ours["fps"] == pytest.approx(5 / ours["seconds"], rel=1e-3)
    low, high = ours["times_decode_range"]
    assert 0 < low <= ours["times_decode"] <= high
    assert line["threads"] == 1  # as a worker of the training loader has
    assert "fails: of course" in table
    assert load.summarise([2, 5, 3], [2, 4, 1]) == {
        "seconds": 3,
        "times_decode": 1.25,
        "times_decode_range": [1, 3],
    }
