"""Videos to model input beside other decoders: seconds, frames per second, peak memory.

    python -m tools.bench load                              # 384 and 128 frames of three minutes at 720p: a quarter of an hour
    python -m tools.bench load --seconds 6 --rounds 1 --frames 32           # under half a minute, most of it the start of processes
    python -m tools.bench load --video FILE --frames 128

Every contender turns the same times into the same array, by one decoding thread and the same resize: `frames` evenly spread over the
video, and ten seconds from its middle at two a second, which ought not to cost what stands before them. Each run is a process of its own;
contenders take turns. Beside them, ffmpeg only decodes the file, once: the least that looking at a whole video can cost, and the unit of
the table. PyAV and torchcodec are compared where they are installed (pip install av torchcodec) and named where they are not.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import torch

import data
import vision
from records import media
from records.video import ffmpeg_error, run_ffmpeg

BARS = {"times_decode": 1.3, "mib": 450}     # ours: at most so many times as long as decoding alone; less memory than that
JUDGED = 120                                 # seconds: of a shorter video the start of processes is too large a part
SAME = 0.5                                   # levels that means of patches may be off, averaged over a frame; the next frame is by 1.3
FFMPEG = "ffmpeg, decoding alone"


# ---- contenders: (path, ascending seconds from the first frame, that frame's second in the file) -> frames (H,W,3) uint8, one by one

def decode(path, times, first):
    """No frames: what media.py starts, writing to nowhere."""
    with run_ffmpeg(path, ["-threads", "1"], ["-fps_mode", "passthrough", "-f", "null"], "error") as (child, log):
        child.stdout.read()
        if child.wait():
            raise ffmpeg_error(path, "cannot be decoded", log)
    return []


def ours(path, times, first):
    return media.frames(media.probe(path), times)


def pyav(path, times, first):
    import av
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        if times[0] > 0:
            container.seek(int((times[0] + first) / stream.time_base), stream=stream)
        coming, shown = container.decode(stream), None
        after = next(coming)
        for t in times:
            # 1e-9: as in media.frames
            while after is not None and float(after.pts * stream.time_base) <= t + first + 1e-9:
                shown, after, pixels = after, next(coming, None), None
            if pixels is None:
                pixels = shown.to_ndarray(format="rgb24")
            yield pixels


def torchcodec(path, times, first):
    from torchcodec.decoders import VideoDecoder
    decoder = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
    for t in times:
        yield decoder.get_frame_played_at(t + first + 1e-9).data.numpy()


CONTENDERS = {FFMPEG: (decode, None), "ours": (ours, None), "PyAV": (pyav, "av"), "torchcodec": (torchcodec, "torchcodec")}


def missing(package):
    """Why a contender's package cannot be used, or None."""
    if not importlib.util.find_spec(package):
        return f"not installed (pip install {package})"
    try:
        importlib.import_module({"torchcodec": "torchcodec.decoders"}.get(package, package))
    except (ImportError, OSError, RuntimeError) as e:
        cause = re.search(r"\w+Error: (.+)", str(e))     # torchcodec tells the whole story of every FFmpeg that it looked for
        return f"does not load: {cause[1] if cause else (str(e).splitlines() or [type(e).__name__])[0]}"
    return None


# ---- one run, in a process of its own

def memory(pid, key):
    """MiB of a process as Linux counts them: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def work(name, path, times, first, looks):
    """Times to model input -> what it took; in `looks`, the mean of every patch. One thread, as a worker of the loader has."""
    contender, package = CONTENDERS[name]
    if package and (reason := missing(package)):
        return {"note": reason}          # loads it before the clock runs
    torch.set_num_threads(1)
    config = data.DataConfig()
    vision.frame(np.zeros((9, 9, 3), np.uint8))
    linux = sys.platform == "linux"
    before, used, began = memory("self", "VmRSS") if linux else None, os.times(), time.perf_counter()
    frames = contender(Path(path), times, first)
    images = data.frame_crops(frames, len(times), config) if name != FFMPEG else None
    seconds, now = time.perf_counter() - began, os.times()
    took = {"seconds": seconds, "cpu": sum(now[:4]) - sum(used[:4]), "mib_before": before}
    took["mib_own"] = memory("self", "VmHWM") if linux else None
    if images is not None:
        took["frames"] = len(images)
        np.save(looks, np.stack([image.mean(1, dtype=np.float32) for image in images]))
    return took


def children(pid):
    """{number: MiB at most so far} of a process's children. One that is not yet another program than its parent still has its memory."""
    found = {}
    with suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in listed.read_text().split():
                with suppress(OSError):
                    if os.readlink(f"/proc/{child}/exe") != os.readlink(f"/proc/{pid}/exe"):
                        found[child] = memory(child, "VmHWM")
    return found


def measure(name, path, times, first, looks):
    """-> what `work` says, with the memory of the process it ran in and of that one's children; {"note": ..} where it cannot run.

    rusage would not do: a child's peak is inherited from before it became another program. Ours has one child at a time, so
    the sum of both peaks is the most that there can have been at once.
    """
    command = [sys.executable, "-m", "tools.load_bench", json.dumps([name, str(path), times, first, str(looks)])]
    peaks = {}
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True,
                                                                stdout=subprocess.PIPE, stderr=said) as child:
        while child.poll() is None:
            peaks |= children(child.pid)
            time.sleep(0.01)
        told = child.stdout.read()
        said.seek(0)
        if child.returncode:
            return {"note": f"fails: {(said.read().splitlines() or ['without a word'])[-1]}"}
    took = json.loads(told.splitlines()[-1])
    if "note" not in took:
        took["mib_child"], own = max(peaks.values(), default=0.0), took.pop("mib_own")
        took["mib"] = None if own is None else took["mib_child"] + own * (name != FFMPEG)
    return took


# ---- all of them

def film(path, seconds, size):
    """Writes an H.264 file of 30 frames a second and 4 Mbit/s: a test pattern that moves as a whole and in parts, under noise; key frames
    every two seconds."""
    picture = f"testsrc2=s={size}:r=30:d={seconds},scroll=h=0.002:v=0.001,noise=alls=10:allf=t"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-loglevel", "error", "-f", "lavfi", "-i", picture, "-c:v", "libx264",
               "-preset", "veryfast", "-b:v", "4M", "-g", "60", "-pix_fmt", "yuv420p", str(path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(f"ffmpeg makes no video of --size {size}: {(done.stderr.splitlines() or ['without a word'])[0]}")


def cases_of(video, frames):
    """{name: seconds at which a video is looked at}: no more frames than it has, and none after the last one appears."""
    counts = dict.fromkeys(min(n, len(video.times)) for n in frames)
    cases = {f"{n} frames": vision.frame_times(video.duration, n, fps=math.inf) for n in counts}
    start, length = video.duration / 2, min(10, video.duration / 6)
    cases[f"{length:.4g} s from {start:.4g} s"] = [start + t for t in vision.frame_times(length, 2048)]
    last = float(video.times[-1])
    return {name: [min(t, last) for t in times] for name, times in cases.items()}


def compare(path, frames, rounds):
    """-> {case: {contender: what it took}}, FFMPEG a case of its own; the medians of the rounds, or a note why there are none."""
    video = media.probe(path)
    first, cases, runs, looks = float(video.pts[0] * video.time_base), cases_of(video, frames), {}, {}
    out = {name: missing(package) for name, (_, package) in CONTENDERS.items() if package}      # {name: why it cannot run, or None}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(rounds):
            order = [(FFMPEG, FFMPEG)] + [(case, name) for case in cases for name in CONTENDERS if name != FFMPEG]
            for case, name in order[:: -1 if k % 2 else 1]:
                old = runs.setdefault((case, name), [])
                if out.get(name):
                    old[:] = [{"note": out[name]}]
                if old and "note" in old[-1]:
                    continue
                file = Path(folder, "looks.npy")
                old.append(measure(name, path, cases.get(case, []), first, file))
                print(f"round {k + 1} of {rounds}: {case}, {name}: {old[-1].get('note') or format(old[-1]['seconds'], '.2f') + ' s'}",
                      file=sys.stderr, flush=True)
                if "frames" in old[-1]:
                    looks[case, name] = np.load(file)
    for (_, name), took in runs.items():
        if "note" in took[-1] and name in (FFMPEG, "ours"):
            raise ValueError(f"{name}: {took[-1]['note']}")

    results, floors = {}, [took["seconds"] for took in runs[FFMPEG, FFMPEG]]
    for (case, name), took in runs.items():
        row = results.setdefault(case, {}).setdefault(name, {})
        if "note" in took[-1]:
            row["note"] = took[-1]["note"]
            continue
        for key in took[0]:
            values = [one[key] for one in took]
            row[key] = None if None in values else (max if key.startswith("mib") else statistics.median)(values)
        ratios = [one["seconds"] / floor for one, floor in zip(took, floors, strict=True)]
        row |= {"times_decode": statistics.median(ratios), "times_decode_range": [min(ratios), max(ratios)]}
        # of processor time: on a machine that is busy with other work, this ratio moves less
        row["times_decode_cpu"] = row["cpu"] / max(results[FFMPEG][FFMPEG]["cpu"], 1e-9)
        if name != FFMPEG:
            row["fps"] = row["frames"] / row["seconds"]
            theirs, mine = looks[case, name], looks[case, "ours"]
            off = np.abs(theirs - mine).mean(1) if theirs.shape == mine.shape else np.array([255.0])
            row["off"] = float(off.max())
            if row["off"] > SAME:
                row["note"] = f"not the same frame at {cases[case][int(off.argmax())]:.2f} s"
    return results


def versions():
    found = {"python": platform.python_version(), "ffmpeg": imageio_ffmpeg.get_ffmpeg_version()}
    for package in ("torch", "numpy", "av", "torchcodec"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def table(results):
    print(f"{'':36s} seconds  x decode (range)          CPU s  x decode  frames/s    MiB  before  child   off")
    for case, rows in results.items():
        if case != FFMPEG:
            print(case)
        for name, r in rows.items():
            label = name if case == FFMPEG else f"  {name}"
            if "seconds" not in r:
                print(f"{label:36s} {r['note']}")
                continue
            low, high = r["times_decode_range"]
            mib = "".join(f"{'-' if r[key] is None else format(r[key], '.0f'):>8s}" for key in ("mib", "mib_before", "mib_child"))
            line = (f"{label:36s} {r['seconds']:7.2f} {r['times_decode']:9.3f} ({low:.3f}-{high:.3f}) {r['cpu']:12.2f} "
                    f"{r['times_decode_cpu']:9.3f} {r.get('fps', math.nan):9.1f}{mib} {r.get('off', math.nan):5.2f}  {r.get('note', '')}")
            print(line.replace("nan", "  -").rstrip())


def add_arguments(parser):
    parser.add_argument("--seconds", type=float, default=180, help="of the video that is made (default 180)")
    parser.add_argument("--size", default="1280x720", help="of its frames (default 1280x720)")
    parser.add_argument("--video", help="a file to look at instead")
    parser.add_argument("--frames", type=int, nargs="+", default=[384, 128], help="how many to look at (default 384 128)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")


def run(args):
    """Prints the table -> {"system": .., "versions": .., "load": .., "video": .., "bars": .., "results": {case: {contender: ..}}}.

    load: of the machine, before and after: processes that wanted a core, mean of a minute. ValueError where there is nothing to do.
    """
    if min(args.frames) < 1 or args.rounds < 1 or not 0 < args.seconds < math.inf or not re.fullmatch(r"\d+x\d+", args.size):
        raise ValueError("--frames and --rounds must be at least 1, --seconds above 0, --size WIDTHxHEIGHT")
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.video or Path(folder, "film.mp4")).absolute()
        if not args.video:
            film(path, args.seconds, args.size)
        try:
            video = media.probe(path)
            results = compare(path, args.frames, args.rounds)
        except media.Unreadable as e:
            raise ValueError(str(e)) from None
        size = path.stat().st_size
    shown = {"path": args.video, "width": video.width, "height": video.height, "seconds": video.duration, "frames": len(video.times),
             "bytes": size, "mbit_per_second": size * 8e-6 / max(video.duration, 1e-9)}
    load.append(os.getloadavg()[0])
    print(f"{shown['seconds']:.1f} s of {video.width} x {video.height}, {shown['frames']} frames, {shown['mbit_per_second']:.1f} Mbit/s; "
          f"medians of {args.rounds} round(s), greatest memory; {os.cpu_count()} cores, load {load[0]:.1f} to {load[1]:.1f}")
    table(results)
    whole = [rows["ours"] for case, rows in results.items() if case.endswith(" frames")]
    bars = {}
    for key, bar in BARS.items():
        worst = max((r[key] for r in whole if r[key] is not None), default=None)
        judged = worst is not None and video.duration >= JUDGED
        bars[key] = {"bar": bar, "worst": worst, "held": worst <= bar if judged else None}
    verdict = {True: "held", False: "missed", None: "left open"}
    for key, b in bars.items():
        print(f"ours at worst, {key}: {b['worst'] or math.nan:.4g}, bar {b['bar']}: {verdict[b['held']]}")
    return {"system": platform.platform(), "load": load, "versions": versions(),
            "video": shown, "bars": bars, "results": results}


if __name__ == "__main__":           # one run of `measure`
    print(json.dumps(work(*json.loads(sys.argv[1]))))
