"""Videos to model input beside other decoders: seconds and frames per second.

    python -m tools.bench load              # 384 and 128 frames of three minutes at 720p
    python -m tools.bench load --seconds 6 --rounds 1 --frames 32
    python -m tools.bench load --video FILE --frames 128


Every decoder turns the same times into the same array, with one thread and the same resize: frames
evenly spread over the video, and ten seconds from its middle at two frames a second, which should
not cost what comes before them. The unit of the table is ffmpeg that only decodes the file once,
the least that looking at a whole video can cost. PyAV and torchcodec are compared where they are
installed (pip install av torchcodec).
"""

import math
import re
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np
import torch

import data
import vision
from records import media
from records.errors import warn
from records.video import probe
from records.visual import frame_crops
from tools.bench.measure import positive, print_table, run_rounds

FFMPEG = "ffmpeg, decoding alone"
NANOSECOND = 1e-9  # added to a time before it is compared, as in media.frames
# Mean difference of the patch means of a frame, in levels of 255, up to which two frames count as
# the same. Neighbouring frames of the video made here differ by more than twice as much.
SAME_FRAME = 0.5


def run_ffmpeg(arguments, failure):
    """Runs ffmpeg; ValueError with its first message if it fails."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-loglevel", "error", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["no message"])[0]
        raise ValueError(f"ffmpeg {failure}: {reason}")


def decode_only(path, times, first):
    """Decodes all of the video to nowhere and yields no frame."""
    output = ["-map", "0:V:0", "-fps_mode", "passthrough", "-f", "null", "-"]
    run_ffmpeg(["-threads", "1", "-i", str(path), *output], f"cannot decode {path}")
    return []


def ours(path, times, first):
    return media.frames(probe(path), times)


def pyav(path, times, first):
    import av  # pip install av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        if times[0] > 0:
            container.seek(int((times[0] + first) / stream.time_base), stream=stream)
        decoded = container.decode(stream)
        displayed = None
        following = next(decoded)
        pixels = None
        for t in times:
            end = t + first + NANOSECOND
            while following is not None and float(following.pts * stream.time_base) <= end:
                displayed = following
                following = next(decoded, None)
                pixels = None
            if pixels is None:
                pixels = displayed.to_ndarray(format="rgb24")
            yield pixels


def torchcodec(path, times, first):
    from torchcodec.decoders import VideoDecoder  # pip install torchcodec

    decoder = VideoDecoder(
        str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
    )
    for t in times:
        yield decoder.get_frame_played_at(t + first + NANOSECOND).data.numpy()


# Functions (path, times, first) -> frames (H,W,3) uint8, one by one: the frame on display at each
# of the ascending times, in seconds from the first frame, which appears at second `first` of the
# file.
DECODERS = {FFMPEG: decode_only, "ours": ours, "PyAV": pyav, "torchcodec": torchcodec}


def explain_failure(name, path, first):
    """Why a decoder cannot decode the file, or None; its package is imported on the way."""
    try:
        next(iter(DECODERS[name](path, [0.0], first)))
    except ModuleNotFoundError as e:
        return f"not installed (pip install {e.name})"
    except Exception as e:  # whatever the package raises: the others are compared all the same
        return f"fails: {(str(e).splitlines() or [type(e).__name__])[0]}"
    return None


def make_video(path, seconds, size):
    """Writes H.264 at 30 frames a second and 4 Mbit/s, a key frame every two seconds: a test
    pattern that moves as a whole and in parts, under noise."""
    pattern = f"testsrc2=s={size}:r=30:d={seconds},scroll=h=0.002:v=0.001,noise=alls=10:allf=t"
    output = ["-c:v", "libx264", "-preset", "veryfast", "-b:v", "4M", "-g", "60"]
    output += ["-pix_fmt", "yuv420p", str(path)]
    run_ffmpeg(["-f", "lavfi", "-i", pattern, *output], f"cannot make a video with --size {size}")


def choose_times(video, frames):
    """{case: seconds at which frames are asked for}: no more frames than the video has, and none
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


class Decoded(NamedTuple):
    seconds: float
    patch_means: np.ndarray  # (n,P): mean of every patch of every frame


def time_decoder(name, path, times, first):
    """Decodes a video to model input -> Decoded."""
    start = time.perf_counter()
    frames = DECODERS[name](path, times, first)
    crops = frame_crops(frames, len(times), data.DataConfig())
    seconds = time.perf_counter() - start
    warn(f"{name}, {len(times)} frames: {seconds:.2f} s")
    return Decoded(seconds, crops.mean(2, dtype=np.float32))


def summarise(seconds, decoding):
    """Seconds of a decoder and of FFMPEG in each round -> median, and ratio within the rounds."""
    ratios = [a / b for a, b in zip(seconds, decoding, strict=True)]
    return {
        "seconds": statistics.median(seconds),
        "times_decode": statistics.median(ratios),
        "times_decode_range": [min(ratios), max(ratios)],
    }


def compare(path, video, frames, rounds):
    """-> {case: {decoder: its row}}, with FFMPEG as a case of its own. A row holds medians over the
    rounds, or {"note": why the decoder could not run}."""
    first = float(video.pts[0] * video.time_base)
    cases = choose_times(video, frames)
    notes = {name: explain_failure(name, path, first) for name in ("PyAV", "torchcodec")}
    usable = ["ours", *(name for name in notes if not notes[name])]
    runs = {FFMPEG: partial(time_decoder, FFMPEG, path, [], first)}
    for case, times in cases.items():
        for name in usable:
            runs[case, name] = partial(time_decoder, name, path, times, first)
    found = run_rounds(runs, rounds)
    decoding = [results[FFMPEG].seconds for results in found]
    table = {FFMPEG: {FFMPEG: summarise(decoding, decoding)}}
    for case, times in cases.items():
        table[case] = {}
        expected = found[0][case, "ours"].patch_means
        for name in usable:
            seconds = [results[case, name].seconds for results in found]
            row = table[case][name] = summarise(seconds, decoding)
            errors = np.abs(found[0][case, name].patch_means - expected).mean(1)
            row["frames"] = len(times)
            row["fps"] = len(times) / row["seconds"]
            row["off"] = float(errors.max())
            if row["off"] > SAME_FRAME:
                row["note"] = f"not the same frame at {times[int(errors.argmax())]:.2f} s"
        table[case] |= {name: {"note": note} for name, note in notes.items() if note}
    return table


def add_arguments(parser):
    add = parser.add_argument
    add("--seconds", type=float, default=180, help="of the video that is made")
    add("--size", default="1280x720", help="of its frames")
    add("--video", metavar="FILE", help="decode this file instead")
    add("--frames", type=positive, nargs="+", default=[384, 128], help="frames of the whole video")
    add("--rounds", type=positive, default=3, help="measurements of each case")


def run(args):
    """Prints the table -> {"video", "results"}. ValueError or Unreadable for flags or a file that
    nothing can be measured with."""
    if not 0 < args.seconds < math.inf or not re.fullmatch(r"\d+x\d+", args.size):
        raise ValueError("--seconds must be above 0, and --size must be WIDTHxHEIGHT.")
    torch.set_num_threads(1)  # as a worker of the training loader has
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.video or Path(folder, "made.mp4")).absolute()
        if not args.video:
            make_video(path, args.seconds, args.size)
        video = probe(path)
        results = compare(path, video, args.frames, args.rounds)
    seconds = round(video.duration, 3)
    print(f"{seconds} s of {video.width} x {video.height}, {len(video.times)} frames")
    for case, rows in results.items():
        print_table(case, rows)
    size = {"path": args.video, "seconds": video.duration, "frames": len(video.times)}
    return {"video": size, "results": results}
