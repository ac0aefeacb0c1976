"""tools.bench load: all decoders are asked for the same frames, and tables tell who is left out."""

import json
import os
import sys

import numpy as np
import pytest
import torch

from records.video import probe
from tools.bench import __main__ as command
from tools.bench import decoders
from tools.bench import load as bench
from tools.bench.decoders import FFMPEG, Decoder


def test_the_times_asked_for(video):
    """No more frames than there are, evenly spread to the last one; then a clip of the middle."""
    probed = probe(video)
    cases = bench.cases_of(probed, [384, 128, 9])
    assert list(cases) == ["60 frames", "9 frames", "0.3333 s from 1 s"]
    evenly = [*np.arange(8) / 4, probed.times[-1]]
    np.testing.assert_allclose(cases["9 frames"], evenly, atol=0.002)
    assert cases["0.3333 s from 1 s"] == pytest.approx([1, 4 / 3], abs=0.002)


def test_medians_ratios_and_decoders_that_are_left_out(video, monkeypatch):
    """Three rounds of made-up measurements: a ratio is to the decoding of the same round, memory is
    the highest, and a failure is named."""
    seconds = {FFMPEG: [2, 4, 1], "ours": [2, 5, 3], "late": [4, 4, 4]}
    asked = []

    def made_up(name, path, times, first, output):
        asked.append((name, len(times)))
        if name == "broken":
            return {"note": "fails: of course"}
        k = asked.count((name, len(times))) - 1
        result = {
            "seconds": seconds[name][k],
            "cpu": 1.0,
            "mib": 100 + k,
            "mib_before": 50,
            "mib_child": 10,
        }
        if times:
            means = np.full((len(times), 729), 100.0)
            means[1] += 2 * bench.SAME_FRAME * (name == "late")
            np.save(output, means)
            result["frames"] = len(times)
        return result

    monkeypatch.setattr(bench, "measure", made_up)
    made_up_decoders = {
        FFMPEG: Decoder(None),
        "ours": Decoder(None),
        "late": Decoder(None, "numpy", "numpy"),
        "broken": Decoder(None, "numpy", "numpy"),
        "absent": Decoder(None, "no_such_package", "no_such_package"),
    }
    monkeypatch.setattr(bench, "DECODERS", made_up_decoders)
    results = bench.compare(video, [5], 3)
    assert list(results) == [FFMPEG, "5 frames", "0.3333 s from 1 s"]
    rows = results["5 frames"]
    assert rows["ours"] == {
        "seconds": 3,
        "cpu": 1.0,
        "mib": 102,
        "mib_before": 50,
        "mib_child": 10,
        "frames": 5,
        "times_decode": 1.25,
        "times_decode_range": [1, 3],
        "times_decode_cpu": 1.0,
        "fps": 5 / 3,
        "off": 0.0,
    }
    assert rows["late"]["off"] > bench.SAME_FRAME
    assert rows["late"]["note"] == "not the same frame at 0.50 s"
    assert rows["broken"] == {"note": "fails: of course"}
    assert rows["absent"] == {"note": "not installed (pip install no_such_package)"}
    names = [name for name, _ in asked]
    assert asked.count(("broken", 5)) == 1
    assert "absent" not in names
    assert names[:4] == [FFMPEG, "ours", "late", "broken"]
    second_round = ["late", "ours", "late", "ours", FFMPEG]
    assert names[7:12] == second_round, "from the end"


def test_the_command_prints_a_table_and_json(monkeypatch, capsys):
    """From the making of the video to the last line; a decoder that is not installed is named. In
    this process, since torch takes seconds to start."""

    def in_this_process(name, path, times, first, output):
        threads = torch.get_num_threads()
        result = decoders.decode_in_child(name, str(path), times, first, str(output))
        torch.set_num_threads(threads)
        result = json.loads(json.dumps(result))
        return result | {"mib": result.pop("mib_own"), "mib_child": 0.0}

    monkeypatch.setattr(bench, "measure", in_this_process)
    kept = {name: decoders.DECODERS[name] for name in (FFMPEG, "ours")}
    absent = Decoder(None, "no_such_package", "no_such_package")
    monkeypatch.setattr(bench, "DECODERS", kept | {"absent": absent})
    flags = "--seconds 1 --size 96x64 --rounds 1 --frames 4"
    monkeypatch.setattr(sys, "argv", ["bench", "load", *flags.split()])
    command.main()
    *table, line = capsys.readouterr().out.splitlines()
    assert sum("not installed (pip install no_such_package)" in row for row in table) == 2
    printed = json.loads(line)
    assert printed["bench"] == "load"
    assert printed["frames"] == [4]
    assert printed["torch"]
    assert str(os.cpu_count()) in printed["hardware"]
    cases = printed["cases"]
    assert set(cases) == {"system", "load", "versions", "video", "bars", "results"}
    assert cases["versions"]["ffmpeg"]
    assert cases["video"]["frames"] == 30
    ours = cases["results"]["4 frames"]["ours"]
    decoding = cases["results"][FFMPEG][FFMPEG]
    assert ours["frames"] == 4
    assert ours["off"] == 0
    assert ours["cpu"] > 0
    ratio = ours["seconds"] / decoding["seconds"]
    assert ours["times_decode"] == pytest.approx(ratio, rel=2e-3)
    assert ours["fps"] == pytest.approx(ours["frames"] / ours["seconds"], rel=1e-3)
    assert set(ours) >= {"mib", "mib_before", "mib_child", "times_decode_range"}
    assert cases["bars"]["times_decode"]["held"] is None, "starting processes is most of it"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rounds 0", "at least 1"),
        ("--size 720p", "WIDTHxHEIGHT"),
        ("--frames 0", "at least 1"),
        ("--seconds nan", "above 0"),
        ("--video no.mp4", "no file"),
        ("--size 1x1", "--size 1x1"),
    ],
)
def test_a_mistake_ends_in_one_sentence(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["bench", "load", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


def test_a_video_that_cannot_be_decoded_is_one_sentence_and_no_table(video, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_: {"note": "fails: media.Unreadable: S23"})
    monkeypatch.setattr(sys, "argv", ["bench", "load", "--video", str(video), "--rounds", "1"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    printed = capsys.readouterr()
    assert "fails" in printed.err
    assert "ffmpeg, decoding alone  " not in printed.out
