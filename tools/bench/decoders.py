"""Video decoders to compare with records.video, and one run of a decoder in a process of its own.

A decoder is a function (path, times, first) -> frames (H,W,3) uint8, one by one: the frame on
display at each of the ascending times, in seconds from the first frame, which appears at second
`first` of the file. Each decodes with one thread. PyAV and torchcodec are optional packages. The
entry FFMPEG only decodes the file and yields no frames.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import data
import vision
from records import media, video
from records.visual import frame_crops
from tools.bench.measure import REPOSITORY, child_command, last_line, process_memory

FFMPEG = "ffmpeg, decoding alone"
NANOSECOND = 1e-9  # added to a time before it is compared, as in media.frames

# ------------------------------------------------------------------------------------------------
# decoders


def decode_only(path, times, first):
    """No frames: the ffmpeg command of records.video, writing to nowhere."""
    output = ["-fps_mode", "passthrough", "-f", "null"]
    with video.run_ffmpeg(path, ["-threads", "1"], output, "error") as (process, log):
        process.stdout.read()
        if process.wait():
            raise video.ffmpeg_error(path, "cannot be decoded", log)
    return []


def ours(path, times, first):
    return media.frames(video.probe(path), times)


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


class Decoder(NamedTuple):
    decode: Callable
    package: str = None  # an optional package, by its name for pip
    module: str = None  # the module to import from it


DECODERS = {
    FFMPEG: Decoder(decode_only),
    "ours": Decoder(ours),
    "PyAV": Decoder(pyav, "av", "av"),
    "torchcodec": Decoder(torchcodec, "torchcodec", "torchcodec.decoders"),
}


def unavailable(decoder):
    """Why a decoder's package cannot be used, or None. Imports the package."""
    if decoder.package is None:
        return None
    if not importlib.util.find_spec(decoder.package):
        return f"not installed (pip install {decoder.package})"
    try:
        importlib.import_module(decoder.module)
    except (ImportError, OSError, RuntimeError) as e:
        # torchcodec's message lists every FFmpeg that it looked for; the first cause is enough
        cause = re.search(r"\w+Error: (.+)", str(e))
        first_line = (str(e).splitlines() or [type(e).__name__])[0]
        return f"does not load: {cause[1] if cause else first_line}"
    return None


# ------------------------------------------------------------------------------------------------
# one run, in a process of its own


def decode_in_child(name, path, times, first, output):
    """Decodes a video to model input -> {"seconds", "cpu", "frames", ..}, or {"note": reason}.

    Writes the mean of every patch of every frame to `output`, for comparison. One thread, as a
    worker of the training loader has.
    """
    decoder = DECODERS[name]
    if reason := unavailable(decoder):  # also imports the package before the clock starts
        return {"note": reason}
    torch.set_num_threads(1)
    config = data.DataConfig()
    vision.frame(np.zeros((9, 9, 3), np.uint8))  # warms up
    on_linux = sys.platform == "linux"
    memory_before = process_memory("self", "VmRSS") if on_linux else None
    cpu_start = os.times()
    start = time.perf_counter()
    frames = decoder.decode(Path(path), times, first)
    crops = None
    if name != FFMPEG:
        crops = frame_crops(frames, len(times), config)
    seconds = time.perf_counter() - start
    cpu_end = os.times()
    result = {
        "seconds": seconds,
        "cpu": sum(cpu_end[:4]) - sum(cpu_start[:4]),  # of this process and its children
        "mib_before": memory_before,
        "mib_own": process_memory("self", "VmHWM") if on_linux else None,
    }
    if crops is not None:
        result["frames"] = len(crops)
        np.save(output, np.stack([frame.mean(1, dtype=np.float32) for frame in crops]))
    return result


def child_peaks(pid):
    """{pid: highest MiB so far} of a process's children. A child that still runs its parent's
    program is left out: between fork and exec it has its parent's memory."""
    peaks = {}
    with suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in listed.read_text().split():
                with suppress(OSError):
                    if os.readlink(f"/proc/{child}/exe") != os.readlink(f"/proc/{pid}/exe"):
                        peaks[child] = process_memory(child, "VmHWM")
    return peaks


def measure(name, path, times, first, output):
    """decode_in_child in a process of its own -> its result with "mib" and "mib_child" in place of
    "mib_own"; {"note": reason} where it fails.

    getrusage would not do: a child inherits the peak of its parent from before exec. Our decoder
    has one child at a time, so the sum of both peaks bounds what they had at once.
    """
    arguments = [name, str(path), times, first, str(output)]
    command = child_command("tools.bench.decoders", "decode_in_child", arguments)
    peaks = {}
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=errors
    ) as child:
        while child.poll() is None:
            peaks |= child_peaks(child.pid)
            time.sleep(0.01)
        printed = child.stdout.read()
        errors.seek(0)
        if child.returncode:
            return {"note": f"fails: {last_line(errors.read(), 'without a message')}"}
    result = json.loads(printed.splitlines()[-1])
    if "note" in result:
        return result
    own = result.pop("mib_own")
    result["mib_child"] = max(peaks.values(), default=0.0)
    if own is None:
        result["mib"] = None
    elif name == FFMPEG:  # without the Python process around it
        result["mib"] = result["mib_child"]
    else:
        result["mib"] = result["mib_child"] + own
    return result
