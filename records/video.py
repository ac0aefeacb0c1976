"""Reads frames from video files with ffmpeg (docs/molmo2.md 2.1, 3.1).

in    a path
out   Video: its size, and the second at which each frame appears;
      the frames that are displayed at given seconds

A frame is identified by its timestamp, an integer in the stream's own time base, and never by
counting or by a frame rate. probe() lists the timestamps of all frames. decode() looks up which
frame is displayed and lets ffmpeg select exactly this frame:

    packets as stored        0  40  10  30  90  60       B-frames are not stored in display order
    sorted: frames appear    0  10  30  40  60  90       here in 1/100 s
    requested times         .15  .30  .45  9.0  seconds
    displayed frames         10   30   40   90

MP4 and Matroska store one timestamp for each frame of H.264, HEVC, AV1 and VP9. In other formats,
timestamps may be missing (H.264 in AVI), or a packet may contain no frame that is displayed
(MPEG-4, GIF). Then probe() decodes the video and lists the timestamps that ffmpeg gives to its
frames. These are the same in decode().
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np

from records.errors import Unreadable, require_file

# Demuxers that read one file. Others, such as hls and concat, open further files.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif"
SEEK_MARGIN_S = 10  # decoding starts so many seconds before the first frame that is needed
DEADLINE_S = 300  # time limit, since ffmpeg may hang on a damaged file
ONE_FRAME_PER_PACKET = ("h264", "hevc", "av1", "vp9")  # in MP4 and Matroska
NO_TIMES = ("mpeg2video in asf", "mpeg4 in mpeg", "vvc in mpeg")  # ffmpeg guesses wrong times
NO_TIMESTAMP = -10**11  # if a packet has no timestamp, ffmpeg prints a number below this
HIDDEN = 4  # packet flag: an edit list hides the frame
# Options that let ffmpeg list the stored packets, or the frames that it decodes.
PACKETS = ("-c", "copy")
FRAMES = ("-fps_mode", "passthrough", "-enc_time_base", "demux", "-c:v", "wrapped_avframe")
# Replaces the decoding timestamps. We do not use them, but ffmpeg fails if they do not ascend.
SETTS = "setts=pts=PTS:dts=N-1e12"
HEADER = re.compile(r"#tb 0: (\d+/[1-9]\d*)\n.*#codec_id 0: (\w+)\n"
                    r"#dimensions 0: ([1-9]\d*)x([1-9]\d*)\n", re.S)
# stream, dts, pts, duration, size, checksum, and F=flags unless it is a plain key frame (1)
ENTRY = re.compile(
    r"^0,[^,]+, *(-?\d+), *(\d+),[^,]+,[^,\n]+(?:, *F=0x([\da-fA-F]+))?", re.M)
# in ffmpeg's log; a line with metadata of the file starts with the name of a field instead
ROTATION = re.compile(r"(?im)^\[info\] +display ?matrix: rotation of (-?\d+(?:\.\d*)?) degrees")
CUT_OFF = re.compile(r"(?m)^\[\S+ @ \w+\] \[\w+\] File ended prematurely")


@dataclass(frozen=True, eq=False)
class Video:
    path: Path
    width: int  # pixels as displayed, after the rotation that the file declares
    height: int
    times: np.ndarray  # (n,) float64: seconds at which frames appear, from 0
    duration: float  # seconds from the first frame to the end of the last one
    pts: np.ndarray  # (n,) int64: the timestamps in the file, in units of time_base
    time_base: Fraction  # seconds
    has_index: bool  # decoding may start at any key frame


def ffmpeg_command(path, input_options, output_options, log_level):
    """A command that reads the first video stream of a file and writes to standard output."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats"]
    command += ["-xerror", "-loglevel", f"level+{log_level}"]
    command += ["-protocol_whitelist", "file", "-format_whitelist", CONTAINERS]
    # copyts keeps the file's timestamps. 0:V are the video streams that are not cover images.
    command += ["-copyts", *input_options, "-i", f"file:{path.absolute()}"]
    return [*command, "-map", "0:V:0", *output_options, "pipe:1"]


def fail(path, failure, log=""):
    """Raises Unreadable with the first error in ffmpeg's log."""
    cause = re.search(r"\[(?:error|fatal)\] (.+)", log)
    because = f" ({cause[1]})" if cause else ""
    raise Unreadable("damaged video", f"{path}: {failure}{because}")


def probe(path):
    """Path -> Video. Raises Unreadable.

    If the file has an index and one frame per packet, the packets are listed and not decoded.
    Otherwise the whole file is decoded. The duration is computed from the frames, as in
    torchcodec, and not read from the header. A last frame without a length adds nothing to it.
    """
    path = Path(path)
    require_file(path)
    listing = list_times(path, PACKETS)
    if listing.codec == "vp9":  # the filter joins each hidden frame with the displayed one
        listing = list_times(path, PACKETS, f"vp9_superframe,{SETTS}")
    kind = f"{listing.codec} in {listing.container}"
    is_reliable = kind not in NO_TIMES
    has_index = listing.has_index()
    if not (has_index and listing.codec in ONE_FRAME_PER_PACKET):
        listing = list_times(path, FRAMES)
        times = [pts for pts, _, _ in listing.entries]
        is_reliable = is_reliable and len(set(times)) == len(times)
    if not is_reliable:
        raise Unreadable("unknown format", f"{path} is {kind}: its frames have no reliable "
                         "timestamps; convert it to MP4 and check the frame rate")
    displayed = [(pts, length) for pts, length, flags in listing.entries if not flags & HIDDEN]
    pts = np.unique([pts for pts, _ in displayed])
    time_base = listing.time_base
    times = (pts - pts[0]) * time_base.numerator / time_base.denominator
    end = max(pts + length for pts, length in displayed)
    duration = float((end - int(pts[0])) * time_base)
    return Video(path, *listing.size, times, duration, pts, time_base, has_index)


class Listing(NamedTuple):
    """What ffmpeg prints about the packets of a file, or about its decoded frames."""
    container: str  # the first name that ffmpeg gives to the format
    codec: str
    time_base: Fraction
    size: tuple  # (width, height) as displayed
    entries: list  # [(pts, length, flags), ..]

    def has_index(self):
        """Does the file store its timestamps, so that decoding may start at any key frame?

        No packet may be displayed before the first one: it may need frames that were cut off.
        """
        stores_times = self.container in ("mov", "matroska")
        first = self.entries[0][0]
        is_earliest = NO_TIMESTAMP < first <= min(pts for pts, _, _ in self.entries)
        return stores_times and is_earliest


def list_times(path, what, bitstream_filter=SETTS):
    """-> Listing of PACKETS or FRAMES. Raises Unreadable if it fails, or if all are HIDDEN."""
    output_options = [*what, "-bsf:v", bitstream_filter, "-f", "framecrc"]
    command = ffmpeg_command(path, ["-threads", "1"], output_options, "info")
    try:
        # ffmpeg gets its own session. If Ctrl-C stopped it, a good video would look damaged.
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S,
                              start_new_session=True)
    except subprocess.TimeoutExpired:
        fail(path, f"ffmpeg did not finish within {DEADLINE_S} s")
    log = done.stderr.decode(errors="replace")
    # ffmpeg exits with 0 for a Matroska file that is cut off.
    if done.returncode or CUT_OFF.search(log):
        fail(path, "ffmpeg cannot read this file as a video", log)
    listing = done.stdout.decode()
    header = HEADER.search(listing)
    entries = [(int(pts), int(length), int(flags or "1", 16))
               for pts, length, flags in ENTRY.findall(listing)]
    if not header or all(flags & HIDDEN for _, _, flags in entries):
        fail(path, "ffmpeg finds no video frames in this file")
    time_base, codec, width, height = header.groups()
    size = displayed_size(int(width), int(height), log)
    container = re.search(r"Input #0, (\w+)", log)[1]
    return Listing(container, codec, Fraction(time_base), size, entries)


def displayed_size(width, height, log):
    """(width, height) after the rotation that the file declares."""
    rotation = ROTATION.search(log.partition("Output #0")[2])
    if rotation and abs(abs(float(rotation[1])) - 90) < 1:  # ffmpeg's own tolerance
        return height, width
    return width, height


def displayed_frames(frame_times, times):
    """-> the index of the frame that is displayed at each time, in seconds (docs/molmo2.md 3.1).

    This is the last frame that has appeared. Before the first frame it is the first one. Without
    the added nanosecond, 0.7 + 0.1 would miss the frame at 0.8.
    """
    return np.searchsorted(frame_times, times + 1e-9, side="right").clip(1) - 1


def nth_expression(values, first=0):
    """An ffmpeg expression for values[number of frames selected so far], by binary search."""
    half = len(values) // 2
    if not half:
        return str(values[0])
    low = nth_expression(values[:half], first)
    high = nth_expression(values[half:], first + half)
    return f"if(lt(selected_n,{first + half}),{low},{high})"


def decode(video, wanted):
    """Yields the frames with these ascending indices, (H,W,3) uint8, one at a time.

    Raises Unreadable if a frame is missing, or if ffmpeg takes longer than DEADLINE_S. It never
    yields another frame in place of a missing one.
    """
    # ffmpeg selects the next wanted timestamp. If it is missing, ffmpeg selects no frame after
    # it. settb keeps the unit of timestamps. A PPM frame starts with its size. Resizing is not
    # left to ffmpeg, which has another method.
    wanted_pts = nth_expression(video.pts[wanted].tolist())
    select = f"settb={video.time_base},select='eq(pts,{wanted_pts})',format=rgb24"
    input_options = ["-threads", "1"]
    # Decoding starts earlier, since streams with intra refresh have no complete key frames.
    start = float(video.pts[wanted[0]] * video.time_base) - SEEK_MARGIN_S
    if video.has_index and start > 0:
        input_options += ["-noaccurate_seek", "-seek_timestamp", "1", "-ss", f"{start:.6f}"]
    # noautoscale: scaling would hide that a video changes its size in the middle.
    output_options = ["-vf", select, "-noautoscale", "-fps_mode", "passthrough"]
    output_options += ["-c:v", "ppm", "-f", "image2pipe"]
    command = ffmpeg_command(video.path, input_options, output_options, "error")

    ppm_header = f"P6\n{video.width} {video.height}\n255\n".encode()
    with tempfile.TemporaryFile() as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True) as process:
        deadline = Timer(DEADLINE_S, process.kill)
        deadline.daemon = True  # if an exception keeps this generator, Python need not wait
        deadline.start()
        try:
            for k in wanted:
                pixels = np.empty((video.height, video.width, 3), np.uint8)
                complete = (process.stdout.read(len(ppm_header)) == ppm_header
                            and process.stdout.readinto(pixels) == pixels.nbytes)
                if not complete:
                    log.seek(0)
                    size = f"{video.width} x {video.height}"
                    failure = f"ffmpeg gives no frame of {size} pixels at {video.times[k]:.3f} s"
                    fail(video.path, failure, log.read().decode(errors="replace"))
                yield pixels
        finally:
            deadline.cancel()
            process.kill()
