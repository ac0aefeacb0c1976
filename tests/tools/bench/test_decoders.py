"""Decoders that are compared show the same frames, and memory is that of the process that used
it."""

import os
import subprocess
import sys
import time

import imageio_ffmpeg
import numpy as np
import pytest

import vision
from records import media
from records.video import probe
from tools.bench import decoders, load
from tools.bench.measure import process_memory


def patch_means(path, times):
    frames = media.frames(probe(path), times)
    return np.stack([vision.frame(frame)[0][0].mean(1) for frame in frames])


@pytest.mark.parametrize("name", [name for name in decoders.DECODERS if name != decoders.FFMPEG])
def test_every_decoder_shows_the_frame_on_display(video, name):
    """Against all 60 frames, decoded at once: at times between frames, at those at which one
    appears, twice in the same frame, from the middle on, and at the end."""
    decoder = decoders.DECODERS[name]
    if reason := decoders.unavailable(decoder):
        pytest.skip(reason)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(video)]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    raw = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    all_frames = np.frombuffer(raw, np.uint8).reshape(60, 64, 96, 3)
    probed = probe(video)
    first = float(probed.pts[0] * probed.time_base)
    assert first == pytest.approx(0.7, abs=0.002)
    appears = probed.times
    last = appears[-1]
    for times in (
        (0.0, 0.04, 0.05, 0.9, 1.5),
        (appears[31], appears[31] + 0.01, appears[32], last),
        (1.0, 1.02, last),
    ):
        found = [frame.copy() for frame in decoder.decode(video, list(times), first)]
        assert len(found) == len(times)
        for t, frame in zip(times, found, strict=True):
            expected = np.flatnonzero(appears <= t + 1e-9)[-1]
            nearest = np.abs(all_frames.astype(int) - frame).mean((1, 2, 3)).argmin()
            assert nearest == expected, f"{name}: frame {nearest} where {expected} is on display"


def test_a_neighbouring_frame_is_noticed(tmp_path):
    """In the video that the benchmark makes, at its size: every frame differs from the next by more
    than twice what passes as the same frame."""
    load.make_video(tmp_path / "a.mp4", 0.4, "1280x720")
    means = patch_means(tmp_path / "a.mp4", [k / 30 for k in range(12)])
    assert np.abs(np.diff(means, axis=0)).mean(1).min() > 2 * load.SAME_FRAME


def test_a_package_that_does_not_load_is_told_from_one_that_is_missing(tmp_path, monkeypatch):
    source = "raise RuntimeError('Likely causes: 1. ..\\n\\nOSError: libavutil.so.60: no file\\n')"
    (tmp_path / "halfway.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def reason(package):
        return decoders.unavailable(decoders.Decoder(None, package, package))

    assert reason("halfway") == "does not load: libavutil.so.60: no file"
    assert reason("no_such_package") == "not installed (pip install no_such_package)"
    assert reason("numpy") is None
    assert reason(None) is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_a_child_has_its_own_memory():
    """Not what this process had when it started the child, as getrusage would say; and all that the
    child had at once."""
    assert process_memory("self", "VmHWM") > 150
    command = ["dd", "if=/dev/zero", "of=/dev/null", "bs=64M"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        try:
            end = time.monotonic() + 5
            peak = 0.0
            while peak < 64 and time.monotonic() < end:
                peak = max(peak, decoders.child_peaks(os.getpid()).get(str(child.pid), 0.0))
        finally:
            child.kill()
    assert 64 <= peak < 90


def test_a_run_is_a_process_of_its_own(video, tmp_path):
    """With its own memory, that of its ffmpeg included, and its frames in a file."""
    output = tmp_path / "means.npy"
    result = decoders.measure("ours", video, [0.0, 1.0], 0.7, output)
    assert result["frames"] == 2
    assert result["seconds"] > 0
    assert result["cpu"] > 0
    np.testing.assert_allclose(np.load(output), patch_means(video, [0.0, 1.0]), atol=1e-3)
    if sys.platform == "linux":  # torch is in the process, and not in its child
        own = result["mib"] - result["mib_child"]
        assert 10 < result["mib_child"] < 150 < result["mib_before"] < own


def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    command = [sys.executable, "-c", "raise ValueError('of course')"]
    monkeypatch.setattr(decoders, "child_command", lambda *_: command)
    result = decoders.measure("ours", tmp_path / "a.mp4", [0.0], 0.0, tmp_path / "means.npy")
    assert result == {"note": "fails: ValueError: of course"}
