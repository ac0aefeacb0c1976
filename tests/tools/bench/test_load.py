"""The bench of decoders: all of them are asked for the same frames, another frame is noticed, and memory is that of who used it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch

import vision
from records import media
from tools.bench import __main__ as command
from tools.bench import load as bench


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A film of 2 s whose first frame appears at 0.7 s of the file."""
    folder = tmp_path_factory.mktemp("film")
    bench.film(folder / "a.mp4", 2, "96x64")
    shift = ["-itsoffset", "0.7", "-i", str(folder / "a.mp4"), "-c", "copy", str(folder / "b.mkv")]
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", *shift], check=True)
    return folder / "b.mkv"


@pytest.mark.parametrize("name", [name for name in bench.CONTENDERS if name != bench.FFMPEG])
def test_everyone_shows_the_frames_that_are_on_display(clip, name):
    """All 60 decoded, and the one that appeared last by each time looked up by hand: at times between frames, at those at which one
    appears, twice in the same one, from the middle on, and at the end."""
    contender, package = bench.CONTENDERS[name]
    if package and bench.missing(package):
        pytest.skip(bench.missing(package))
    raw = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(clip), "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    every = np.frombuffer(subprocess.run(raw, stdout=subprocess.PIPE, check=True).stdout, np.uint8).reshape(60, 64, 96, 3)
    video = media.probe(clip)
    first = float(video.pts[0] * video.time_base)
    assert first == pytest.approx(0.7, abs=0.002)
    last = video.times[-1]
    for times in (0.0, 0.04, 0.05, 0.9, 1.5), (video.times[31], video.times[31] + 0.01, video.times[32], last), (1.0, 1.02, last):
        expected = [np.flatnonzero(video.times <= t + 1e-9)[-1] for t in times]
        shown = [frame.copy() for frame in contender(clip, list(times), first)]
        assert len(shown) == len(times)
        for n, frame in zip(expected, shown, strict=True):
            nearest = np.abs(every.astype(int) - frame).mean((1, 2, 3)).argmin()
            assert nearest == n, f"{name} shows frame {nearest} where {n} is on display"


def test_the_times_asked_for(clip):
    """No more frames than there are, evenly spread to the last one; then a clip from the middle."""
    video = media.probe(clip)
    cases = bench.cases_of(video, [384, 128, 9])
    assert list(cases) == ["60 frames", "9 frames", "0.3333 s from 1 s"]
    np.testing.assert_allclose(cases["9 frames"], [*np.arange(8) / 4, video.times[-1]], atol=0.002)
    assert cases["0.3333 s from 1 s"] == pytest.approx([1, 4 / 3], abs=0.002)


def looks_of(path, times):
    return np.stack([vision.frame(frame)[0][0].mean(1) for frame in media.frames(media.probe(path), times)])


def test_a_neighbouring_frame_is_noticed(tmp_path):
    """Of the film that is made, at its size: every frame differs from the next by well over what is let pass."""
    bench.film(tmp_path / "a.mp4", 0.4, "1280x720")
    looks = looks_of(tmp_path / "a.mp4", [k / 30 for k in range(12)])
    assert np.abs(np.diff(looks, axis=0)).mean(1).min() > 2 * bench.SAME


def test_medians_ratios_and_who_is_left_out(clip, monkeypatch):
    """Three rounds by a measure that is made up: a ratio is to the same round's decoding, memory is the worst, a failure is told."""
    seconds = {bench.FFMPEG: [2, 4, 1], "ours": [2, 5, 3], "late": [4, 4, 4]}
    asked = []

    def made_up(name, path, times, first, looks):
        asked.append((name, len(times)))
        if name == "broken":
            return {"note": "fails: of course"}
        k = asked.count((name, len(times))) - 1
        took = {"seconds": seconds[name][k], "cpu": 1.0, "mib": 100 + k, "mib_before": 50, "mib_child": 10}
        if times:
            shown = np.full((len(times), 729), 100.0)
            shown[1] += 2 * bench.SAME * (name == "late")
            np.save(looks, shown)
            took["frames"] = len(times)
        return took

    monkeypatch.setattr(bench, "measure", made_up)
    monkeypatch.setattr(bench, "CONTENDERS", {bench.FFMPEG: (None, None), "ours": (None, None), "late": (None, "numpy"),
                                              "broken": (None, "numpy"), "absent": (None, "no_such_package")})
    results = bench.compare(clip, [5], 3)
    assert list(results) == [bench.FFMPEG, "5 frames", "0.3333 s from 1 s"]
    rows = results["5 frames"]
    assert rows["ours"] == {"seconds": 3, "cpu": 1.0, "mib": 102, "mib_before": 50, "mib_child": 10, "frames": 5, "times_decode": 1.25,
                            "times_decode_range": [1, 3], "times_decode_cpu": 1.0, "fps": 5 / 3, "off": 0.0}
    assert rows["late"]["off"] > bench.SAME and rows["late"]["note"] == "not the same frame at 0.50 s"
    assert rows["broken"] == {"note": "fails: of course"}
    assert rows["absent"] == {"note": "not installed (pip install no_such_package)"}
    assert asked.count(("broken", 5)) == 1 and not any(name == "absent" for name, _ in asked)
    assert [name for name, _ in asked[:4]] == [bench.FFMPEG, "ours", "late", "broken"]
    assert [name for name, _ in asked[7:12]] == ["late", "ours", "late", "ours", bench.FFMPEG], "the second round, from the end"


def test_a_package_that_does_not_load_is_told_from_one_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("raise RuntimeError('Likely causes: 1. ..\\n\\nOSError: libavutil.so.60: cannot open\\n')")
    monkeypatch.syspath_prepend(tmp_path)
    assert bench.missing("halfway") == "does not load: libavutil.so.60: cannot open"
    assert bench.missing("no_such_package") == "not installed (pip install no_such_package)"
    assert bench.missing("numpy") is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_a_child_has_its_own_memory():
    """Not what this process had when it started it, as getrusage would say; and all that the child had at once."""
    assert bench.memory("self", "VmHWM") > 150
    with subprocess.Popen(["dd", "if=/dev/zero", "of=/dev/null", "bs=64M"], stderr=subprocess.DEVNULL) as child:
        try:
            end, seen = time.monotonic() + 5, 0.0
            while seen < 64 and time.monotonic() < end:
                seen = max(seen, bench.children(os.getpid()).get(str(child.pid), 0.0))
        finally:
            child.kill()
    assert 64 <= seen < 90


def test_a_run_is_a_process_of_its_own(clip, tmp_path):
    """With its own memory, that of its ffmpeg included, and what it saw in a file; the reason where it fails."""
    took = bench.measure("ours", clip, [0.0, 1.0], 0.7, tmp_path / "looks.npy")
    assert took["frames"] == 2 and took["seconds"] > 0 and took["cpu"] > 0
    np.testing.assert_allclose(np.load(tmp_path / "looks.npy"), looks_of(clip, [0.0, 1.0]), atol=1e-3)
    if sys.platform == "linux":      # torch is in the one and not in the other
        assert 10 < took["mib_child"] < 150 < took["mib_before"] < took["mib"] - took["mib_child"]


def test_the_command_prints_a_table_and_json(monkeypatch, capsys):
    """From the making of the film to the last line; who is not installed is named. In this process, since torch takes long to start."""
    def here(*given):
        threads = torch.get_num_threads()
        took = json.loads(json.dumps(bench.work(*map(str, given[:2]), *given[2:])))
        torch.set_num_threads(threads)
        return took | {"mib": took.pop("mib_own"), "mib_child": 0.0}

    monkeypatch.setattr(bench, "measure", here)
    kept = {name: bench.CONTENDERS[name] for name in (bench.FFMPEG, "ours")}
    monkeypatch.setattr(bench, "CONTENDERS", kept | {"nobody": (None, "no_such_package")})
    monkeypatch.setattr(sys, "argv", ["bench", "load", "--seconds", "1", "--size", "96x64", "--rounds", "1", "--frames", "4"])
    command.main()
    *table, line = capsys.readouterr().out.splitlines()
    assert sum("not installed (pip install no_such_package)" in row for row in table) == 2
    told = json.loads(line)
    assert told["bench"] == "load" and told["frames"] == [4] and told["torch"]
    found = told["cases"]
    assert str(os.cpu_count()) in told["hardware"] and {"system", "load", "versions", "video", "bars", "results"} == set(found)
    assert found["versions"]["ffmpeg"] and found["video"]["frames"] == 30
    ours, floor = found["results"]["4 frames"]["ours"], found["results"][bench.FFMPEG][bench.FFMPEG]
    assert ours["frames"] == 4 and ours["off"] == 0 and ours["seconds"] > 0 and ours["cpu"] > 0
    assert ours["times_decode"] == pytest.approx(ours["seconds"] / floor["seconds"], rel=2e-3)
    assert ours["fps"] == pytest.approx(4 / ours["seconds"], rel=1e-3)
    assert set(ours) >= {"mib", "mib_before", "mib_child", "times_decode_range"}
    assert found["bars"]["times_decode"]["held"] is None, "of so short a film the start of processes is most"


@pytest.mark.parametrize(("wrong", "what"), [("--rounds 0", "at least 1"), ("--size 720p", "WIDTHxHEIGHT"), ("--frames 0", "at least 1"),
                                             ("--seconds nan", "above 0"), ("--video no.mp4", "no file"), ("--size 1x1", "--size 1x1")])
def test_a_mistake_is_one_sentence(monkeypatch, capsys, wrong, what):
    monkeypatch.setattr(sys, "argv", ["bench", "load", *wrong.split()])
    with pytest.raises(SystemExit) as stop:
        command.main()
    said = capsys.readouterr()
    assert stop.value.code == 2 and what in said.err and len(said.err.splitlines()) == 1 and not said.out


def test_what_cannot_be_decoded_is_one_sentence(clip, monkeypatch, capsys, tmp_path):
    """Not a table without ours in it."""
    broken = Path(tmp_path, "broken.mkv")
    broken.write_bytes(clip.read_bytes())
    monkeypatch.setattr(bench, "measure", lambda *_: {"note": "fails: media.Unreadable: S23"})
    monkeypatch.setattr(sys, "argv", ["bench", "load", "--video", str(broken), "--rounds", "1"])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2 and "fails" in capsys.readouterr().err
