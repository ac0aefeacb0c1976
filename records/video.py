"""Video files to frames (docs/molmo2.md 2.1, 3.1), by ffmpeg.

in    a path
out   Video: size, and the second at which each frame appears, without decoding; the frames that are
      on display at given seconds

A frame is known by its timestamp, an integer in the stream's own time base, never by counting or by
a frame rate. probe() lists the timestamps of all packets. decode() looks up which frame is on
display and has ffmpeg select exactly that one:

    packets as stored        0  40  10  30  90  60       B-frames are not stored in display order
    sorted: frames appear    0  10  30  40  60  90       here in 1/100 s
    asked for               .15  .30  .45  9.0  seconds
    on display               10   30   40   90

A file that cannot be used raises Unreadable: S20 is missing, S22 has an absurd size, S23 fails.
"""

import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np

from records.errors import Unreadable
from records.image import absurd_size, file_exists

# Demuxers that read one file and nothing else. hls, dash, concat and image2 follow references.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif"
MAX_FRAME_PIXELS = 40_000_000        # 8K has 33 million
MAX_PACKETS = 1_000_000              # nine hours at 30 frames a second
MAX_SECONDS = 1_000_000              # eleven days
MAX_FRAMES = 2048                    # of one call: named in a command line of at most 128 KiB
MAX_MEMORY_BYTES = 4 << 30           # address space of ffmpeg; 8K H.264 takes 1.4 GiB
MAX_LOG_BYTES = 16 << 20             # of ffmpeg's messages
SEEK_MARGIN_S = 10                   # decoded ahead of a clip: with intra refresh no frame is whole
DEADLINE_S = 300                     # for ffmpeg; the caller's work between frames does not count
HIDDEN = 4                           # packet flag: an edit list hides the frame


@dataclass(frozen=True, eq=False)
class Video:
    path: Path
    width: int                       # pixels as displayed: turned as the file says
    height: int
    times: np.ndarray                # (n,) float64 seconds at which frames appear; ascending from 0
    duration: float                  # seconds from the first frame's start to the last one's end
    # (n,) int64: the same times as the file has them, in units of time_base seconds
    pts: np.ndarray = field(repr=False)
    time_base: Fraction = field(repr=False)
    seekable: bool = field(repr=False)   # decoding may start at any key frame


# --------------------------------------------------------------------------------------------------
# ffmpeg


@contextmanager
def run_ffmpeg(path, input_options, output_options, log_level):
    """Runs ffmpeg on a file's first video stream: (process, its log).

    The process is killed when the block ends, however that happens.
    """
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-xerror"]
    command += ["-loglevel", f"level+{log_level}"]
    command += ["-protocol_whitelist", "file", "-format_whitelist", CONTAINERS]
    # copyts keeps timestamps as the file has them. 0:V is a video stream that is no cover image.
    command += ["-copyts", *input_options, "-i", f"file:{path.absolute()}"]
    command += ["-map", "0:V:0", *output_options, "pipe:1"]
    with tempfile.TemporaryFile() as log:
        # A session of its own: a signal to the whole process group is the trainer's to answer.
        # If it ended ffmpeg, a sound video would seem to be damaged.
        process = subprocess.Popen(with_limits(command), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        with process:
            try:
                yield process, log
            finally:
                process.kill()


def with_limits(command):
    """The command under limits of memory and log size, on Linux only.

    A shell sets them before it becomes ffmpeg: from outside they could come too late, and Python
    between fork and exec is unsafe beside threads.
    """
    if sys.platform != "linux":
        return command
    kilobytes, blocks = MAX_MEMORY_BYTES >> 10, MAX_LOG_BYTES >> 9
    limits = f'ulimit -S -v {kilobytes}; ulimit -S -f {blocks}; exec "$@"'
    return ["/bin/sh", "-c", limits, "sh", *command]


@contextmanager
def kill_after(seconds, process, path):
    """Kills the process if the block takes longer; then raises Unreadable at its end."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
        too_late = not timer.is_alive()
    finally:
        timer.cancel()
    if too_late:
        raise Unreadable(f"S23 ffmpeg takes too long for {path}")


def read_log(log):
    log.seek(0)
    return log.read().decode(errors="replace")


def ffmpeg_error(path, failure, log):
    """Unreadable with the first error in ffmpeg's log: the others follow from it."""
    cause = re.search(r"\[(?:error|fatal)\] (.+)", read_log(log))
    return Unreadable(f"S23 {path} {failure}" + (f" (ffmpeg: {cause[1]})" if cause else ""))


# --------------------------------------------------------------------------------------------------
# timestamps


class Packet(NamedTuple):
    pts: int                         # presentation timestamp
    length: int
    flags: int


def probe(path):
    """Path -> Video, by reading every packet and decoding none; Unreadable with the reason.

    The duration is that of the packets, as in torchcodec. What the file's header claims does not
    count, and a last frame whose length the file leaves open has none.
    """
    path = Path(path)
    if not file_exists(path):
        raise Unreadable(f"S20 there is no file {path}")
    listing, log = list_packets(path)
    packets = parse_packets(listing)
    if len(packets) > MAX_PACKETS:
        raise Unreadable(f"S22 {path} has more than {MAX_PACKETS} frames")
    # Frames before the first key frame are never displayed: they need what was cut off.
    displayed = [p for p in packets if not p.flags & HIDDEN and p.pts >= packets[0].pts]
    if not displayed:
        raise Unreadable(f"S23 {path} has no frames")
    width, height = displayed_size(listing, log)
    if absurd_size(width, height, MAX_FRAME_PIXELS):
        raise Unreadable(f"S22 {path} is {width} x {height} pixels")

    time_base = Fraction(re.search(r"#tb 0: (\S+)", listing)[1])
    end = max(p.pts + p.length for p in displayed)
    duration = float((end - min(p.pts for p in displayed)) * time_base)
    if duration > MAX_SECONDS:       # checked before the 64 bits of NumPy overflow
        raise Unreadable(f"S22 {path} claims to last {duration:.0f} s")
    pts = np.unique([p.pts for p in displayed])
    times = (pts - pts[0]) * time_base.numerator / time_base.denominator
    # MPEG streams are searched instead of indexed: decoding would start anywhere.
    seekable = "Input #0, mov" in log or "Input #0, matroska" in log
    return Video(path, width, height, times, duration, pts, time_base, seekable)


def list_packets(path):
    """What ffmpeg prints of all packets in its framecrc format, and its log."""
    # genpts makes the timestamps that AVI and MPEG-PS leave out. setts replaces the decoding
    # timestamps: they do not matter here, and ffmpeg refuses packets that are out of order by them.
    options = ["-c", "copy", "-bsf:v", "setts=pts=PTS:dts=N-1e12"]
    options += ["-frames:v", str(MAX_PACKETS + 1), "-f", "framecrc"]
    with run_ffmpeg(path, ["-fflags", "+genpts"], options, "info") as (process, log_file):
        with kill_after(DEADLINE_S, process, path):
            listing = process.stdout.read().decode()
            process.wait()
        log = read_log(log_file)
        # ffmpeg exits with 0 for a Matroska file that is cut off.
        if process.returncode or "File ended prematurely" in log:
            raise ffmpeg_error(path, "cannot be read as a video", log_file)
    return listing, log


def parse_packets(listing):
    # stream, dts, pts, duration, size, checksum, and F=flags unless it is a plain key frame (1)
    line = re.compile(r"^0,[^,]+, *(-?\d+), *(\d+),[^,]+,[^,\n]+(?:, *F=0x(\w+))?", re.M)
    return [Packet(int(pts), int(length), int(flags or "1", 16))
            for pts, length, flags in line.findall(listing)]


def displayed_size(listing, log):
    """(width, height) after the rotation that the file asks for."""
    width, height = map(int, re.search(r"#dimensions 0: (\d+)x(\d+)", listing).groups())
    input_log = log.partition("Output #0")[2]
    rotation = re.search(r"(?i)display ?matrix: rotation of (\S+) degrees", input_log)
    if rotation and abs(abs(float(rotation[1])) - 90) < 1:       # the tolerance of ffmpeg itself
        return height, width
    return width, height


# --------------------------------------------------------------------------------------------------
# frames


def displayed_frames(frame_times, times):
    """Index of the frame on display at each of the seconds: the last that appeared by then.

    Before the first frame appears, that is the first; past the end it is the last (docs/molmo2.md
    3.1). A nanosecond is added, or 0.7 + 0.1 would miss the frame that appears at 0.8.
    """
    return np.searchsorted(frame_times, times + 1e-9, side="right").clip(1) - 1


def nth_expression(values, first=0):
    """ffmpeg expression for values[number of frames selected so far], by halving."""
    half = len(values) // 2
    if not half:
        return str(values[0])
    low = nth_expression(values[:half], first)
    high = nth_expression(values[half:], first + half)
    return f"if(lt(selected_n,{first + half}),{low},{high})"


def decode(video, wanted):
    """Yields the frames with these ascending indices, (H,W,3) uint8, one at a time.

    Where a frame does not come out, or ffmpeg takes longer than DEADLINE_S: Unreadable. Another
    frame is never returned in its place.
    """
    # ffmpeg selects the next wanted timestamp or nothing: after one that is missing it takes no
    # other. settb keeps the unit of the timestamps. PPM frames say their size. Nothing is scaled,
    # since ffmpeg's scaling differs from docs/molmo2.md 2.1.
    wanted_pts = nth_expression(video.pts[wanted].tolist())
    select = f"settb={video.time_base},select='eq(pts,{wanted_pts})',format=rgb24"
    input_options = ["-threads", "1", "-max_pixels", str(MAX_FRAME_PIXELS)]
    start = float(video.pts[wanted[0]] * video.time_base) - SEEK_MARGIN_S
    if video.seekable and start > 0:
        input_options += ["-noaccurate_seek", "-seek_timestamp", "1", "-ss", f"{start:.6f}"]
    # noautoscale: scaling would hide that a video changes its size midway.
    output_options = ["-vf", select, "-noautoscale", "-fps_mode", "passthrough"]
    output_options += ["-c:v", "ppm", "-f", "image2pipe"]

    ppm_header = f"P6\n{video.width} {video.height}\n255\n".encode()
    seconds_left = DEADLINE_S
    with run_ffmpeg(video.path, input_options, output_options, "error") as (process, log):
        for k in wanted:
            pixels = np.empty((video.height, video.width, 3), np.uint8)
            began = time.monotonic()
            with kill_after(seconds_left, process, video.path):
                complete = (process.stdout.read(len(ppm_header)) == ppm_header
                            and process.stdout.readinto(pixels) == pixels.nbytes)
            seconds_left -= time.monotonic() - began
            if not complete:
                size = f"{video.width} x {video.height}"
                failure = f"gives no frame of {size} pixels at {video.times[k]:.3f} s"
                raise ffmpeg_error(video.path, failure, log)
            yield pixels
