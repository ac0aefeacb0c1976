"""The media of a record: which files it names, and their sizes and frames, whatever the format.

in    a record, and the folder where its paths start
out   paths; (width, height, seconds) of a video from a cache; frames at given seconds

A video is a file (records/video.py) or a list of images with a frame rate (FrameFolder).
"""

import json
import os
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from records.errors import Unreadable
from records.image import absurd_size, file_exists, header, read_image
from records.video import (
    MAX_FRAME_PIXELS,
    MAX_FRAMES,
    MAX_SECONDS,
    decode,
    displayed_frames,
    probe,
)

PROBE_VERSION = 1                    # of the rules of `probe`: notes made under others do not count


# --------------------------------------------------------------------------------------------------
# what a record names


def media_entries(record):
    """Its images, or its video, as the record names them: a list of paths or objects."""
    if "images" in record:
        return record["images"]
    return [record[key] for key in ("image", "video") if key in record]


def declared_size(entry):
    """(width, height) that an image or video of a record declares, or None."""
    if isinstance(entry, dict) and "width" in entry:
        return entry["width"], entry["height"]
    return None


def media_paths(record, folder):
    """Paths of its images, its video, or the frames of its video.

    Unreadable if one lies outside the folder. Links are followed: what they lead to must lie in
    the folder, too.
    """
    names = []
    for entry in media_entries(record):
        if isinstance(entry, str):
            names.append(entry)
        else:
            names += entry.get("frames") or [entry["path"]]
    root = os.path.realpath(folder)
    paths = [Path(folder) / name for name in names]
    for path in paths:
        if not Path(os.path.realpath(path)).is_relative_to(root):
            raise Unreadable(f"S20 {path} leaves the media folder")
    return paths


# --------------------------------------------------------------------------------------------------
# videos


@dataclass(frozen=True, eq=False)
class FrameFolder:
    """A video that is given as images: frame k appears at k / fps and stays 1 / fps seconds."""
    paths: list
    fps: float
    width: int                       # of the first frame
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


def open_frames(paths, fps):
    """Paths of images -> FrameFolder, by the header of the first; Unreadable S24 if one is gone."""
    paths = [Path(path) for path in paths]
    for path in paths:
        if not file_exists(path):
            raise Unreadable(f"S24 there is no frame {path}")
    return FrameFolder(paths, fps, *header(paths[0]))


def frames(video, times):
    """Yields the frame on display at each of the ascending seconds, (H,W,3) uint8; Unreadable.

    video: a Video or a FrameFolder. One frame is held at a time; a repeated one is the same array.
    """
    times = np.asarray(times, dtype=np.float64)
    assert (np.diff(times) >= 0).all(), f"times must ascend: {times}"
    wanted, counts = np.unique(displayed_frames(video.times, times), return_counts=True)
    assert len(wanted) <= MAX_FRAMES, f"{len(wanted)} frames of {video.path} in one call"
    if not len(wanted):
        return
    if isinstance(video, FrameFolder):
        decoded = (read_image(video.paths[k]) for k in wanted)
    else:
        decoded = decode(video, wanted)
    with closing(decoded):           # ends ffmpeg when the caller takes no more frames
        for pixels, count in zip(decoded, counts, strict=True):
            yield from repeat(pixels, count)


class VideoSize(NamedTuple):
    """What planning needs to know of a video."""
    width: int
    height: int
    seconds: float
    frame_seconds: float             # how long a frame is displayed, on average


class Probes:
    """Cache of what `probe` found, in a file: planning asks for sizes again and again, and `probe`
    reads every packet.

    The file has a line per video, with its size in bytes and time of change, so that a changed file
    is probed anew. Several processes may append to it. Where it cannot be written, memory serves.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.known = None            # {(path, bytes, time of change): VideoSize, or a reason, str}

    def __call__(self, video):
        """Path -> VideoSize; Unreadable as `probe`."""
        if self.known is None:
            self.known = self._read()
        try:
            status = Path(video).stat()
        except OSError:
            raise Unreadable(f"S20 there is no file {video}") from None
        key = (str(video), status.st_size, status.st_mtime_ns)
        if key not in self.known:
            try:
                self.known[key] = self._probe(video, key)
            except Unreadable as error:
                # Kept in memory: a file at which ffmpeg hangs costs its deadline once a run.
                self.known[key] = str(error)
        if isinstance(self.known[key], str):
            raise Unreadable(self.known[key])
        return self.known[key]

    def _probe(self, video, key):
        found = probe(video)
        size = VideoSize(found.width, found.height, found.duration,
                         found.duration / len(found.times))
        with suppress(OSError), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([[*key, PROBE_VERSION], size]) + "\n")
        return size

    def _read(self):
        known = {}
        lines = []
        if file_exists(self.path):
            with suppress(OSError):
                lines = self.path.read_bytes().splitlines()
        for line in lines:
            # A line may be cut off by a kill, damaged or absurd: then the video is probed again.
            with suppress(ValueError, TypeError, RecursionError, OverflowError):
                (name, n_bytes, changed, version), values = json.loads(line)
                width, height, seconds, frame_seconds = values
                size = VideoSize(int(width), int(height), float(seconds), float(frame_seconds))
                possible = (0 <= frame_seconds <= seconds <= MAX_SECONDS
                            and not absurd_size(width, height, MAX_FRAME_PIXELS))
                if version == PROBE_VERSION and possible:
                    known[name, n_bytes, changed] = size
        return known
