"""Videos to model input beside other decoders: seconds, frames per second, peak memory.

    python -m tools.bench load              # 384 and 128 frames of three minutes at 720p
    python -m tools.bench load --seconds 6 --rounds 1 --frames 32
    python -m tools.bench load --video FILE --frames 128

Every decoder turns the same times into the same array, with one thread and the same resize: frames
evenly spread over the video, and ten seconds from its middle at two frames a second, which should
not cost what comes before them. Each run is a process of its own. The unit of the table is ffmpeg
that only decodes the file once: the least that looking at a whole video can cost. PyAV and
torchcodec are compared where they are installed (pip install av torchcodec).
"""

import importlib.metadata
import math
import os
import platform
import re
import statistics
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np

import vision
from records.errors import Unreadable, warn
from records.video import probe
from tools.bench.decoders import DECODERS, FFMPEG, measure, unavailable
from tools.bench.measure import in_turn

LIMITS = {"times_decode": 1.3, "mib": 450}  # aims for our decoder: time over decoding, memory
SHORTEST_JUDGED = 120  # seconds; of a shorter video, starting processes is too large a part
# Mean difference of the patch means of a frame, in levels of 255, up to which two frames count as
# the same. Neighbouring frames of the video made here differ by more than twice as much.
SAME_FRAME = 0.5

# ------------------------------------------------------------------------------------------------
# videos and times


def make_video(path, seconds, size):
    """Writes H.264 at 30 frames a second and 4 Mbit/s, a key frame every two seconds: a test
    pattern that moves as a whole and in parts, under noise."""
    pattern = f"testsrc2=s={size}:r=30:d={seconds},scroll=h=0.002:v=0.001,noise=alls=10:allf=t"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-loglevel", "error"]
    command += ["-f", "lavfi", "-i", pattern]
    command += ["-c:v", "libx264", "-preset", "veryfast", "-b:v", "4M", "-g", "60"]
    command += ["-pix_fmt", "yuv420p", str(path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["no message"])[0]
        raise ValueError(f"ffmpeg cannot make a video with --size {size}: {reason}")


def cases_of(video, frames):
    """{name: seconds at which frames are asked for}: no more frames than the video has, and none
    after the last one appears."""
    cases = {}
    for n in frames:
        n = min(n, len(video.times))
        cases[f"{n} frames"] = vision.frame_times(video.duration, n, fps=math.inf)
    start = video.duration / 2
    length = min(10, video.duration / 6)
    clip = [start + t for t in vision.frame_times(length, 2048)]
    cases[f"{length:.4g} s from {start:.4g} s"] = clip
    last = float(video.times[-1])
    return {name: [min(t, last) for t in times] for name, times in cases.items()}


# ------------------------------------------------------------------------------------------------
# all runs


class Key(NamedTuple):
    case: str
    name: str  # of the decoder


def run_rounds(path, cases, first, rounds):
    """-> {Key: [result of each round]} and {Key: patch means of the frames}. A decoder that cannot
    run is tried once, and its only result is {"note": reason}. The decoders take turns."""
    keys = [Key(FFMPEG, FFMPEG)]
    for case in cases:
        keys += [Key(case, name) for name in DECODERS if name != FFMPEG]
    results = {key: [] for key in keys}
    for key in keys:
        if reason := unavailable(DECODERS[key.name]):
            results[key].append({"note": reason})

    patch_means = {}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "patch_means.npy")
        for k in range(rounds):
            for key in in_turn(keys, k):
                if any("note" in result for result in results[key]):
                    continue
                result = measure(key.name, path, cases.get(key.case, []), first, output)
                results[key].append(result)
                outcome = result.get("note") or f"{result['seconds']:.2f} s"
                warn(f"round {k + 1} of {rounds}: {key.case}, {key.name}: {outcome}")
                if "frames" in result:
                    patch_means[key] = np.load(output)
    return results, patch_means


def summarise(rounds, decoding):
    """The rounds of one decoder -> medians, the highest memory, the ratio to decoding alone.
    decoding: the rounds of FFMPEG."""
    row = {}
    for key in rounds[0]:
        values = [result[key] for result in rounds]
        if None in values:
            row[key] = None
        else:
            row[key] = max(values) if key.startswith("mib") else statistics.median(values)
    pairs = zip(rounds, decoding, strict=True)
    ratios = [result["seconds"] / floor["seconds"] for result, floor in pairs]
    row["times_decode"] = statistics.median(ratios)
    row["times_decode_range"] = [min(ratios), max(ratios)]
    # CPU time varies less than wall time on a machine that is busy with other work
    decoding_cpu = statistics.median(result["cpu"] for result in decoding)
    row["times_decode_cpu"] = row["cpu"] / max(decoding_cpu, 1e-9)
    if "frames" in row:
        row["fps"] = row["frames"] / row["seconds"]
    return row


def frame_errors(found, expected):
    """Patch means (n,P) of the same frames by two decoders -> (n,) mean difference in levels; 255
    where the shapes differ."""
    if found.shape != expected.shape:
        return np.array([255.0])
    return np.abs(found - expected).mean(1)


def compare(path, frames, rounds):
    """-> {case: {decoder: its row}}, with FFMPEG as a case of its own. A row is the summary of the
    rounds, or {"note": why the decoder could not run}. ValueError if ours or ffmpeg fails."""
    video = probe(path)
    first = float(video.pts[0] * video.time_base)
    cases = cases_of(video, frames)
    results, patch_means = run_rounds(path, cases, first, rounds)
    decoding = results[Key(FFMPEG, FFMPEG)]
    for key in results:
        if "note" in results[key][-1] and key.name in (FFMPEG, "ours"):
            raise ValueError(f"{key.name}: {results[key][-1]['note']}")

    table = {}
    for key, rounds_of_key in results.items():
        rows = table.setdefault(key.case, {})
        if "note" in rounds_of_key[-1]:
            rows[key.name] = {"note": rounds_of_key[-1]["note"]}
            continue
        row = rows[key.name] = summarise(rounds_of_key, decoding)
        if key.name == FFMPEG:
            continue
        errors = frame_errors(patch_means[key], patch_means[Key(key.case, "ours")])
        row["off"] = float(errors.max())
        if row["off"] > SAME_FRAME:
            wrong = cases[key.case][int(errors.argmax())]
            row["note"] = f"not the same frame at {wrong:.2f} s"
    return table


# ------------------------------------------------------------------------------------------------
# the command


def versions():
    found = {
        "python": platform.python_version(),
        "ffmpeg": imageio_ffmpeg.get_ffmpeg_version(),
    }
    for package in ("torch", "numpy", "av", "torchcodec"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def print_table(results):
    print(
        f"{'':36s} seconds  x decode (range)          CPU s  x decode  frames/s    MiB  before"
        "  child   off"
    )
    for case, rows in results.items():
        if case != FFMPEG:
            print(case)
        for name, row in rows.items():
            label = name if case == FFMPEG else f"  {name}"
            if "seconds" not in row:
                print(f"{label:36s} {row['note']}")
                continue
            low, high = row["times_decode_range"]
            memory = ""
            for key in ("mib", "mib_before", "mib_child"):
                memory += f"{'-':>8s}" if row[key] is None else f"{row[key]:8.0f}"
            fps = f"{row['fps']:9.1f}" if "fps" in row else f"{'-':>9s}"
            off = f"{row['off']:5.2f}" if "off" in row else f"{'-':>5s}"
            line = (
                f"{label:36s} {row['seconds']:7.2f} {row['times_decode']:9.3f} "
                f"({low:.3f}-{high:.3f}) {row['cpu']:12.2f} {row['times_decode_cpu']:9.3f} "
                f"{fps}{memory} {off}  {row.get('note', '')}"
            )
            print(line.rstrip())


def judge(results, seconds):
    """Our rows of whole videos against LIMITS -> {key: {"bar", "worst", "held"}}; held is None
    where the video is too short, or the system does not tell."""
    ours = [rows["ours"] for case, rows in results.items() if case.endswith(" frames")]
    bars = {}
    for key, limit in LIMITS.items():
        worst = max((row[key] for row in ours if row[key] is not None), default=None)
        held = None
        if worst is not None and seconds >= SHORTEST_JUDGED:
            held = worst <= limit
        bars[key] = {"bar": limit, "worst": worst, "held": held}
        verdict = {True: "held", False: "missed", None: "not judged"}[held]
        shown = "-" if worst is None else f"{worst:.4g}"
        print(f"ours at worst, {key}: {shown}, aim {limit}: {verdict}")
    return bars


def add_arguments(parser):
    parser.add_argument("--seconds", type=float, default=180, help="of the video that is made")
    parser.add_argument("--size", default="1280x720", help="of its frames")
    parser.add_argument("--video", metavar="FILE", help="decode this file instead")
    parser.add_argument(
        "--frames", type=int, nargs="+", default=[384, 128], help="frames of the whole video"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case")


def run(args):
    """Prints the table -> {"system", "load", "versions", "video", "bars", "results"}.

    load: the machine's load average (processes that want a core, over one minute) before and
    after. ValueError for flags or a file that nothing can be measured with.
    """
    if min(args.frames) < 1 or args.rounds < 1:
        raise ValueError("--frames and --rounds must be at least 1.")
    if not 0 < args.seconds < math.inf or not re.fullmatch(r"\d+x\d+", args.size):
        raise ValueError("--seconds must be above 0, and --size must be WIDTHxHEIGHT.")
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.video or Path(folder, "made.mp4")).absolute()
        if not args.video:
            make_video(path, args.seconds, args.size)
        try:
            video = probe(path)
            results = compare(path, args.frames, args.rounds)
        except Unreadable as e:
            raise ValueError(str(e)) from None
        n_bytes = path.stat().st_size
    load.append(os.getloadavg()[0])
    n_frames = len(video.times)
    mbit_per_second = n_bytes * 8e-6 / max(video.duration, 1e-9)
    print(
        f"{video.duration:.1f} s of {video.width} x {video.height}, {n_frames} frames, "
        f"{mbit_per_second:.1f} Mbit/s; medians of {args.rounds} round(s), highest memory; "
        f"{os.cpu_count()} cores, load {load[0]:.1f} to {load[1]:.1f}"
    )
    print_table(results)
    return {
        "system": platform.platform(),
        "load": load,
        "versions": versions(),
        "video": {
            "path": args.video,
            "width": video.width,
            "height": video.height,
            "seconds": video.duration,
            "frames": n_frames,
            "bytes": n_bytes,
            "mbit_per_second": mbit_per_second,
        },
        "bars": judge(results, video.duration),
        "results": results,
    }
