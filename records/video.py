"""Video files to frames (docs/molmo2.md 2.1, 3.1), by ffmpeg.

in    a path
out   Video: size, and the second at which each frame appears, without decoding;
      the frames on display at given seconds

A frame is known by its timestamp, an integer in the stream's own time base, never by counting
or by a frame rate. probe() lists the timestamps of all packets. decode() looks up which frame
is on display and has ffmpeg select exactly that one:

    packets as stored        0  40  10  30  90  60       B-frames are not stored in display order
    sorted: frames appear    0  10  30  40  60  90       here in 1/100 s
    asked for               .15  .30  .45  9.0  seconds
    on display               10   30   40   90
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from threading import Timer

import imageio_ffmpeg
import numpy as np

from records.errors import Unreadable, require_file

# Demuxers that read one file. Others, such as hls and concat, follow references.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif"
SEEK_MARGIN_S = 10  # decoded before a clip begins
DEADLINE_S = 300  # for ffmpeg, which may hang at a damaged file
HIDDEN = 4  # packet flag: an edit list hides the frame
HEADER = re.compile(
    r"#tb 0: (\d+/[1-9]\d*)\n.*#dimensions 0: ([1-9]\d*)x([1-9]\d*)\n", re.S)
# stream, dts, pts, duration, size, checksum, and F=flags unless it is a plain key frame (1)
PACKET = re.compile(
    r"^0,[^,]+, *(-?\d+), *(\d+),[^,]+,[^,\n]+(?:, *F=0x([\da-fA-F]+))?", re.M)
# of ffmpeg's log; a line of the file's own metadata has the name of a field in front
ROTATION = re.compile(r"(?im)^\[info\] +display ?matrix: rotation of (-?\d+\.?\d*) degrees")
CUT_OFF = re.compile(r"(?m)^\[\S+ @ \w+\] \[\w+\] File ended prematurely")


@dataclass(frozen=True, eq=False)
class Video:
    path: Path
    width: int  # pixels as displayed: turned as the file says
    height: int
    times: np.ndarray  # (n,) float64: seconds at which frames appear, from 0
    duration: float  # seconds from the first frame to the last one's end
    pts: np.ndarray  # (n,) int64: the file's own times, in time_base seconds
    time_base: Fraction
    seekable: bool  # decoding may start at any key frame


def ffmpeg_command(path, input_options, output_options, log_level):
    """Reads a file's first video stream, writes to the standard output."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats"]
    command += ["-xerror", "-loglevel", f"level+{log_level}"]
    command += ["-protocol_whitelist", "file", "-format_whitelist", CONTAINERS]
    # copyts keeps the file's timestamps. 0:V is a video stream that is no cover image.
    command += ["-copyts", *input_options, "-i", f"file:{path.absolute()}"]
    return [*command, "-map", "0:V:0", *output_options, "pipe:1"]


def fail(path, failure, log=""):
    """Unreadable with the first error in ffmpeg's log."""
    cause = re.search(r"\[(?:error|fatal)\] (.+)", log)
    because = f" ({cause[1]})" if cause else ""
    raise Unreadable("damaged video", f"{path} {failure}{because}")


def probe(path):
    """Path -> Video, by reading every packet and decoding none; Unreadable.

    The duration is that of the packets, as in torchcodec, and not what the header claims. A
    last frame whose packet has no length adds nothing to it.
    """
    path = Path(path)
    require_file(path)
    # genpts makes the timestamps that AVI and MPEG-PS leave out. setts replaces the decoding
    # timestamps, which do not matter here: ffmpeg refuses packets that they do not order.
    output = ["-c", "copy", "-bsf:v", "setts=pts=PTS:dts=N-1e12", "-f", "framecrc"]
    command = ffmpeg_command(path, ["-fflags", "+genpts"], output, "info")
    try:
        # A session of its own: Ctrl-C must not reach ffmpeg, or a good video looks damaged.
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S,
                              start_new_session=True)
    except subprocess.TimeoutExpired:
        fail(path, f"keeps ffmpeg busy for more than {DEADLINE_S} s")
    log = done.stderr.decode(errors="replace")
    # ffmpeg exits with 0 for a Matroska file that is cut off.
    if done.returncode or CUT_OFF.search(log):
        fail(path, "cannot be read as a video", log)
    listing = done.stdout.decode()
    header = HEADER.search(listing)
    packets = [(int(pts), int(length), int(flags or "1", 16))
               for pts, length, flags in PACKET.findall(listing)]
    # Frames before the first key frame are never displayed: they need what was cut off.
    displayed = [(pts, length) for pts, length, flags in packets
                 if not flags & HIDDEN and pts >= packets[0][0]]
    if not header or not displayed:
        fail(path, "has no frames")
    time_base = Fraction(header[1])
    pts = np.unique([pts for pts, _ in displayed])
    times = (pts - pts[0]) * time_base.numerator / time_base.denominator
    end = max(pts + length for pts, length in displayed)
    duration = float((end - int(pts[0])) * time_base)
    # MPEG streams are searched instead of indexed: decoding would start anywhere.
    seekable = "Input #0, mov" in log or "Input #0, matroska" in log
    width, height = displayed_size(int(header[2]), int(header[3]), log)
    return Video(path, width, height, times, duration, pts, time_base, seekable)


def displayed_size(width, height, log):
    """(width, height) after the rotation that the file asks for."""
    rotation = ROTATION.search(log.partition("Output #0")[2])
    if rotation and abs(abs(float(rotation[1])) - 90) < 1:  # ffmpeg's own tolerance
        return height, width
    return width, height


def displayed_frames(frame_times, times):
    """Index of the frame on display at each of the seconds: the last that appeared by then.

    Before the first frame appears, that is the first; past the end it is the last
    (docs/molmo2.md 3.1). Without the nanosecond 0.7 + 0.1 would miss the frame at 0.8.
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

    Unreadable where a frame does not come out, or ffmpeg takes longer than DEADLINE_S: another
    frame never takes its place.
    """
    # ffmpeg selects the next wanted timestamp, and no other after one that is missing. settb
    # keeps their unit. PPM frames say their size. ffmpeg would scale in another way.
    wanted_pts = nth_expression(video.pts[wanted].tolist())
    select = f"settb={video.time_base},select='eq(pts,{wanted_pts})',format=rgb24"
    input_options = ["-threads", "1"]
    # Decoding begins earlier: streams with intra refresh have no complete key frame.
    start = float(video.pts[wanted[0]] * video.time_base) - SEEK_MARGIN_S
    if video.seekable and start > 0:
        input_options += ["-noaccurate_seek", "-seek_timestamp", "1", "-ss", f"{start:.6f}"]
    # noautoscale: scaling would hide that a video changes its size midway.
    output_options = ["-vf", select, "-noautoscale", "-fps_mode", "passthrough"]
    output_options += ["-c:v", "ppm", "-f", "image2pipe"]
    command = ffmpeg_command(video.path, input_options, output_options, "error")

    ppm_header = f"P6\n{video.width} {video.height}\n255\n".encode()
    with tempfile.TemporaryFile() as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True) as process:
        deadline = Timer(DEADLINE_S, process.kill)
        deadline.start()
        try:
            for k in wanted:
                pixels = np.empty((video.height, video.width, 3), np.uint8)
                complete = (process.stdout.read(len(ppm_header)) == ppm_header
                            and process.stdout.readinto(pixels) == pixels.nbytes)
                if not complete:
                    log.seek(0)
                    size = f"{video.width} x {video.height}"
                    failure = f"gives no frame of {size} pixels at {video.times[k]:.3f} s"
                    fail(video.path, failure, log.read().decode(errors="replace"))
                yield pixels
        finally:
            deadline.cancel()
            process.kill()
