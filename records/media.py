"""Files to pixels (spec 2.1, 3.1): images of the common formats by Pillow, videos of the common containers by ffmpeg.

in    a path
out   an image's (width, height) from the header alone; pixels (H,W,3) uint8 as displayed
      a video's size and the second at which each of its frames appears, without decoding; the frames displayed at given seconds

A frame is known by its timestamp, an integer in the stream's own unit, never by counting or by a rate. probe() lists the
timestamps of all packets; frames() looks up which frame is on display and has ffmpeg select exactly that one:

    packets as stored        0  40  10  30  90  60                 B-frames: not in the order of display
    sorted: frames appear    0  10  30  40  60  90                 here in 1/100 s
    asked for               .15  .30  .45  9.0  seconds
    on display               10   30   40   90

Whatever a file holds, it costs its record and never the run: Unreadable, with a code (S20 to S23) and the reason.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import repeat
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image

import vision


class Unreadable(Exception):
    """A media file that cannot be used; costs the record, never the run (codes S20 to S23)."""


# ---------------------------------------------------------------------------------------------------------------
# images

# What Pillow may read: not all that it knows. EPS would start Ghostscript, and parsers that nobody uses are those nobody has tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PICTURE = 89_478_485             # pixels of an image: where Pillow begins to warn; decoding one takes up to 1.3 GB
MAX_SCANS = 100                      # of a JPEG: each passes over all pixels again, and usual are 10
Image.init()


def _there(path):
    try:
        return path.is_file()
    except OSError:                      # a name too long for the system, for one
        return False


@contextmanager
def _parsing(path, what):
    """Whatever a damaged file leads Pillow's parsers to, KeyError and struct.error among it, is Unreadable in one line."""
    try:
        yield
    except Unreadable:
        raise
    except Image.DecompressionBombError as e:
        raise Unreadable(f"S22 {path}: {e}") from None
    except Exception as e:
        raise Unreadable(f"S21 cannot {what} {path}: {' '.join(str(e).split())[:200] or type(e).__name__}") from None


@contextmanager
def _open(path):
    if not _there(path):
        raise Unreadable(f"S20 no file {path}")
    with _parsing(path, "read"), Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]) as picture:
        w, h = picture.size
        if min(w, h) < 2 or max(w, h) > 200 * min(w, h) or w * h > MAX_PICTURE:
            raise Unreadable(f"S22 {path} is {w} x {h} pixels")
        yield picture


def header(path):
    """(width, height) of an image file as displayed, without decoding it."""
    with _open(path) as picture:
        w, h = picture.size
        # of a PNG, Pillow decodes all to look for EXIF data behind the pixels: take what stands in front
        known = picture.format != "PNG" or {"exif", "Raw profile type exif", "XML:com.adobe.xmp"} & set(picture.info)
        return (h, w) if known and picture.getexif().get(0x0112, 1) >= 5 else (w, h)


def converted(path):
    """What is changed when an image is read as 8-bit RGB, in words (W06); "" for one that is as it is."""
    with _open(Path(path)) as picture:
        found = [f"mode {picture.mode}"] if picture.mode not in ("RGB", "L") else []
        found += ["turned as EXIF says"] if picture.getexif().get(0x0112, 1) > 1 else []
        try:
            with _parsing(path, "count"):
                frames = getattr(picture, "n_frames", 1)
        except Unreadable:               # no harm: only the first is read
            frames = "damaged"
        return ", ".join([*found, f"the first of {frames} pictures"] if frames != 1 else found)


def read_image(path):
    """(H,W,3) uint8 as displayed, of any mode that Pillow knows; Unreadable with the reason otherwise."""
    path = Path(path)
    with _open(path) as picture, _parsing(path, "decode"):
        # in the data of a JPEG itself ff is followed by 00 or d0 to d7
        if picture.info.get("progressive") and (scans := path.read_bytes().count(b"\xff\xda")) > MAX_SCANS:
            raise Unreadable(f"S22 {path} has {scans} scans")
        pixels = vision.to_array(picture)
    if pixels.shape[1::-1] != header(path):
        raise Unreadable(f"S21 {path} is not of the size that its header says")
    return pixels


# ---------------------------------------------------------------------------------------------------------------
# videos

# Demuxers that read one file and nothing else: not hls, dash, concat or image2, which follow what a file refers to.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif"
MAX_PIXELS = 40_000_000              # of a frame; 8K has 33 million
MAX_PACKETS = 1_000_000              # of a video; nine hours at 30 frames a second
MAX_SECONDS = 1_000_000              # of a video; eleven days
MAX_FRAMES = 2048                    # of one call: their timestamps stand in ffmpeg's command line, of which Linux takes 128 KiB
MAX_MEMORY = 4 << 30                 # bytes of address space for ffmpeg; 8K H.264 takes 1.4 GiB
MAX_LOG = 16 << 20                   # bytes of complaints
RUN_UP = 10                          # seconds decoded ahead of a clip: pictures refreshed bit by bit have no single clean start
DEADLINE = 300                       # seconds
PROBE = 1                            # of the rules of `probe`: what others found out is asked anew


@dataclass(frozen=True, eq=False)
class Video:
    path: Path
    width: int                       # pixels as displayed: turned as the file says
    height: int
    times: np.ndarray                # (n,) float64 seconds at which the frames appear, ascending, the first at 0
    duration: float                  # seconds from the first frame's appearance to the last one's end
    pts: np.ndarray = field(repr=False)      # (n,) int64: the times as they stand in the file, in units of
    unit: Fraction = field(repr=False)       # so many seconds
    indexed: bool = field(repr=False)        # decoding may start at any key frame


@contextmanager
def _ffmpeg(path, before, after, level):
    """(child, its log): ffmpeg on a file's first video stream; killed and waited for when the block ends, however it ends."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-loglevel", f"level+{level}", "-xerror"]
    command += ["-protocol_whitelist", "file", "-format_whitelist", CONTAINERS]
    # copyts: timestamps as they stand in the file; V: a video stream that is no cover picture
    command += ["-copyts", *before, "-i", f"file:{path.absolute()}", "-map", "0:V:0", *after, "pipe:1"]
    # a session of its own: a signal to all processes of a run is the trainer's to answer, or a sound film would seem damaged
    with (tempfile.TemporaryFile() as log,
          subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True) as child):
        try:
            # Linux limits a process from outside, with no Python between fork and exec, which is unsafe beside threads;
            # elsewhere there are no limits (macOS would ignore the one on memory)
            if sys.platform == "linux":
                import resource
                for kind, limit in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_FSIZE, MAX_LOG)):
                    hard = resource.getrlimit(kind)[1]
                    resource.prlimit(child.pid, kind, (limit if hard < 0 else min(limit, hard), hard))
            yield child, log
        finally:
            child.kill()


@contextmanager
def _within(seconds, child, path):
    """Kills the child if the block takes longer, and says so after it."""
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
        late = not timer.is_alive()
    finally:
        timer.cancel()
    if late:
        raise Unreadable(f"S23 {path} takes ffmpeg too long")


def _failed(path, what, log):
    log.seek(0)
    cause = re.search(r"\[(?:error|fatal)\] (.+)", log.read().decode(errors="replace"))     # the first: others follow from it
    return Unreadable(f"S23 {path} {what}" + (f" (ffmpeg: {cause[1]})" if cause else ""))


def probe(path, deadline=None):
    """Path -> Video, by reading every packet and decoding none, within `deadline` seconds; Unreadable with the reason otherwise.

    The duration is that of the packets, as in torchcodec: what a header claims does not count, and a last frame whose length
    the file leaves open has none.
    """
    path, deadline = Path(path), deadline or DEADLINE
    if not _there(path):
        raise Unreadable(f"S20 no file {path}")
    # genpts: timestamps that AVI and MPEG-PS leave out, from the order of decoding; setts: ffmpeg balks at, or mends, packets
    # that are not in that order by their decoding timestamps, of no interest here
    after = ["-c", "copy", "-bsf:v", "setts=pts=PTS:dts=N-1e12", "-frames:v", str(MAX_PACKETS + 1), "-f", "framecrc"]
    with _ffmpeg(path, ["-fflags", "+genpts"], after, "info") as (child, log):
        with _within(deadline, child, path):
            listed = child.stdout.read().decode()
            child.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
        # of Matroska that is cut off, ffmpeg says so but fails not
        if child.returncode or "File ended prematurely" in said:
            raise _failed(path, "cannot be read as a video", log)

    # stream, dts, pts, duration, size, checksum, and F=flags unless it is a plain key frame (1)
    packet = re.compile(r"^0,[^,]+, *(-?\d+), *(\d+),[^,]+,[^,\n]+(?:, *F=0x(\w+))?", re.M)
    packets = [(int(pts), int(length), int(flags or "1", 16)) for pts, length, flags in packet.findall(listed)]
    if len(packets) > MAX_PACKETS:
        raise Unreadable(f"S22 {path} has more than {MAX_PACKETS} frames")
    # Never on display: what an edit list hides (flag 4); what stands before the first key frame, since it needs what was cut off
    shown = [(pts, length) for pts, length, flags in packets if not flags & 4 and pts >= packets[0][0]]
    if not shown:
        raise Unreadable(f"S23 {path} has no frames")

    w, h = map(int, re.search(r"#dimensions 0: (\d+)x(\d+)", listed).groups())
    turn = re.search(r"(?i)display ?matrix: rotation of (\S+) degrees", said.partition("Output #0")[2])
    if turn and abs(abs(float(turn[1])) - 90) < 1:                   # ffmpeg's own tolerance
        w, h = h, w
    if min(w, h) < 2 or max(w, h) > 200 * min(w, h) or w * h > MAX_PIXELS:
        raise Unreadable(f"S22 {path} is {w} x {h} pixels")

    unit = Fraction(re.search(r"#tb 0: (\S+)", listed)[1])
    duration = float((max(map(sum, shown)) - min(shown)[0]) * unit)
    if duration > MAX_SECONDS:                                           # before numpy's 64 bits run over
        raise Unreadable(f"S22 {path} claims to last {duration:.0f} s")
    pts = np.unique([pts for pts, _ in shown])
    times = (pts - pts[0]) * unit.numerator / unit.denominator
    # MPEG streams are searched, not indexed: decoding would start anywhere
    return Video(path, w, h, times, duration, pts, unit, indexed="Input #0, mov" in said or "Input #0, matroska" in said)


def _nth(values, first=0):
    """Expression for ffmpeg: values[number of frames selected so far], by halving."""
    half = len(values) // 2
    if not half:
        return str(values[0])
    return f"if(lt(selected_n,{first + half}),{_nth(values[:half], first)},{_nth(values[half:], first + half)})"


@dataclass(frozen=True, eq=False)
class Stills:
    """A video that is given as pictures: frame k appears at k / fps seconds and stays as long (formats.md 7.2)."""
    paths: list
    fps: float
    width: int
    height: int

    @property
    def path(self):                  # for messages
        return self.paths[0].parent

    @property
    def duration(self):
        return len(self.paths) / self.fps

    @property
    def times(self):
        return np.arange(len(self.paths)) / self.fps


def stills(paths, fps):
    """Paths of pictures -> Stills, by the header of the first; Unreadable S24 if one is not there."""
    for path in paths:
        if not _there(Path(path)):
            raise Unreadable(f"S24 no frame {path}")
    return Stills(list(map(Path, paths)), fps, *header(Path(paths[0])))


class Probes:
    """What `probe` said of videos, kept in a file: planning asks for sizes and lengths again and again, and reads every packet for it.

    A line per video, with its size in bytes and its time of change, so that another file of the same name is probed anew. Several
    processes may add to the file; where it cannot be written, memory keeps what was asked.
    """

    def __init__(self, path):
        self.path, self.known = Path(path), None

    def __call__(self, video):
        """Path -> (width, height, seconds, seconds that a frame is shown on average); Unreadable as `probe`."""
        if self.known is None:
            self.known, notes = {}, b""
            if _there(self.path):
                with suppress(OSError):
                    notes = self.path.read_bytes()
            for line in notes.splitlines():
                # cut off by a kill, damaged, or what no film can be: that video is probed again
                with suppress(ValueError, TypeError, RecursionError, OverflowError):
                    (name, size, changed, version), (w, h, seconds, shown) = json.loads(line)
                    if version == PROBE and 0 <= shown <= seconds <= MAX_SECONDS and min(w, h) >= 2 and w * h <= MAX_PIXELS:
                        self.known[name, size, changed] = int(w), int(h), float(seconds), float(shown)
        try:
            status = Path(video).stat()
        except OSError:
            raise Unreadable(f"S20 no file {video}") from None
        key = str(video), status.st_size, status.st_mtime_ns
        if key not in self.known:
            try:
                film = probe(video)
                self.known[key] = film.width, film.height, film.duration, film.duration / len(film.times)
                with suppress(OSError), open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps([[*key, PROBE], self.known[key]]) + "\n")
            except Unreadable as e:
                self.known[key] = str(e)                     # one that hangs costs its deadline once a run, not once a draw
        if isinstance(self.known[key], str):
            raise Unreadable(self.known[key])
        return self.known[key]


def frames(video, times, deadline=None):
    """Yields the frame on display at each of the ascending seconds, (H,W,3) uint8: the last that appeared by then (spec 3.1).

    Before 0 that is the first frame, past the end the last. One frame is held at a time; a repeated one is the same
    array. Where a wanted frame does not come out, or `deadline` seconds of waiting are over: Unreadable, never another frame.
    """
    times, deadline = np.asarray(times, dtype=np.float64), deadline or DEADLINE
    assert (np.diff(times) >= 0).all(), f"times must ascend: {times}"
    # a nanosecond more, or 0.7 + 0.1 misses the frame that appears at 0.8
    shown = np.searchsorted(video.times, times + 1e-9, side="right").clip(1) - 1
    wanted, repeats = np.unique(shown, return_counts=True)
    if isinstance(video, Stills):
        for n, count in zip(wanted, repeats, strict=True):
            yield from repeat(read_image(video.paths[n]), count)
        return
    assert len(wanted) <= MAX_FRAMES, f"{len(wanted)} frames of {video.path} in one call, more than {MAX_FRAMES}"
    if not len(wanted):
        return

    # The next wanted timestamp or nothing: after one that does not come, no other is taken for it.
    # In the unit of the timestamps (settb); unscaled, since ffmpeg's scaling differs from spec 2.1; PPM, since its frames say their size.
    select = f"settb={video.unit},select='eq(pts,{_nth(video.pts[wanted].tolist())})',format=rgb24"
    head = f"P6\n{video.width} {video.height}\n255\n".encode()
    before = ["-threads", "1", "-max_pixels", str(MAX_PIXELS)]
    start = float(video.pts[wanted[0]] * video.unit) - RUN_UP
    if video.indexed and start > 0:
        before += ["-noaccurate_seek", "-seek_timestamp", "1", "-ss", f"{start:.6f}"]
    # autoscale would hide it when a film changes its size midway
    after = ["-vf", select, "-noautoscale", "-fps_mode", "passthrough", "-c:v", "ppm", "-f", "image2pipe"]
    with _ffmpeg(video.path, before, after, "error") as (child, log):
        for n, count in zip(wanted, repeats, strict=True):
            pixels = np.empty((video.height, video.width, 3), np.uint8)
            began = time.monotonic()
            with _within(deadline, child, video.path):
                complete = child.stdout.read(len(head)) == head and child.stdout.readinto(pixels) == pixels.nbytes
            deadline -= time.monotonic() - began
            if not complete:
                raise _failed(video.path, f"gives no frame of {video.width} x {video.height} pixels at {video.times[n]:.3f} s", log)
            for _ in range(count):
                yield pixels
