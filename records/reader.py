"""A file of records (docs/records.md) as a sequence of native records, with their media.

in    a .jsonl file, one record per line, or a .json file with one array of them; native records or
      rows of other projects (records/dialects.py)
out   records[i] -> a dict with id, where ("file:line") and source, the Records that it came from

A file is checked when its index is made (records/index.py): then a mistake stops with a sentence,
and some records are skipped. After that the index is trusted. `python -m tools.check FILE` prints
all that is found.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from records import index, media
from records.check import check, check_pixels
from records.errors import DataError, Unreadable, short_repr, warn
from records.index import Options
from records.media import Probes
from records.parse import parse_line
from records.schema import KINDS

__all__ = ["DataError", "Options", "Records", "Unreadable", "check", "check_pixels", "digest",
           "parse_line"]


def digest(path, first=b""):
    """The sha256 of `first` and the bytes of a file, read in chunks: a video may have many GB."""
    sha = hashlib.sha256(first)
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            sha.update(data)
    return sha


class Found(NamedTuple):
    """What was found in a file under one code."""
    count: int
    first: str                       # message


class VideoInput(NamedTuple):
    """The video of a record."""
    video: object                    # a path, or a media.FrameFolder
    start: float                     # of the clip, in seconds of the file
    end: float                       # inf where no clip is named


class Records:
    """A file of records and the folder of their media.

    A record to be skipped raises Unreadable with its code and the reason; iterating passes it over.
    Options: see index.Options. Can be pickled: the file is opened again where it arrives.
    """

    def __init__(self, path, media=None, **options):
        self.path = Path(path)
        self.name = self.path.name
        self.options = checked_options(path, options)
        check_is_file(self.path)
        self.media = media_folder(self.path, media)
        self.probes = Probes(self.path.with_name(f".{self.name}.probes.jsonl"))
        self.stamp = index.stamp(self.path, self.options)
        self._file = None
        self._fingerprint = None
        self._open_index()
        for found in self.found.values():
            times = f" ({found.count} times in this file)" if found.count > 1 else ""
            warn(f"{found.first}{times}")

    def _open_index(self):
        """Loads the index, or makes it, and keeps it beside a file that takes long to check."""
        self._index = index.load(self.path, self.stamp)
        self._index_saved = self._index is not None
        if self._index is None:
            self._index = index.build(self.path, self.options)
            if self.path.stat().st_size >= index.MIN_INDEXED_BYTES:
                self._index.fingerprints = {self._rules: self.fingerprint}
                self._index_saved = index.save(self._index, self.path, self.stamp)

    def __getstate__(self):
        """An index that is on disk is not sent to another process."""
        return self.__dict__ | {"_file": None} | ({"_index": None} if self._index_saved else {})

    def __setstate__(self, state):
        self.__dict__ = state
        if self._index is None:
            self._open_index()

    @property
    def found(self):
        """{code: Found} of all that was found without stopping."""
        return {code: Found(count, f"{self.path}{first}")
                for code, (count, first) in sorted(self._index.found.items())}

    @property
    def fingerprint(self):
        """Hex sha256 of the file's bytes and the options: what plans and resumed runs depend on.
        Kept in the index, so that not every process reads the whole file."""
        if self._fingerprint is None:
            self._fingerprint = self._index.fingerprints.get(self._rules)
        if self._fingerprint is None:
            self._fingerprint = digest(self.path, self._rules.encode()).hexdigest()
        return self._fingerprint

    @property
    def _rules(self):
        return json.dumps([index.VERSION, asdict(self.options)])

    # ----------------------------------------------------------------------------------------------
    # records

    def __len__(self):
        return len(self._index)

    def __iter__(self):
        for i in range(len(self)):
            if not self._index.skip[self._index.rows(i)[0]]:
                yield self[i]

    def where(self, i):
        """The place of record i, "file:line"."""
        return self._where(self._index.rows(i)[0])

    def _where(self, row):
        return f"{self.path}:{self._index.line[row]}"

    def __getitem__(self, i):
        first, *others = [self._read(row) for row in self._index.rows(i)]
        if others:
            merge(first, others)
        return first

    def _read(self, row):
        if self._file is None:
            if index.stamp(self.path, self.options) != self.stamp:
                raise DataError(f"{self.path}: the file has changed since it was opened")
            self._file = open(self.path, "rb", buffering=0)
        self._file.seek(int(self._index.offset[row]))
        data = self._file.read(int(self._index.length[row]))
        status = os.fstat(self._file.fileno())
        if json.loads(self.stamp)[1:3] != [status.st_size, status.st_mtime_ns]:
            raise DataError(f"{self.path}: the file has changed since it was opened")
        where = self._where(row)
        if self._index.skip[row]:
            raise Unreadable(index.skip_reason(data, where, self.options))
        try:
            record = index.read_trusted(data, self.options)
        except ValueError:
            raise DataError(f"{where}: the index does not fit the file; delete "
                            f"{index.index_path(self.path)}") from None
        record.setdefault("id", f"{self.name}:{self._index.line[row]}")
        return {**record, "where": where, "source": self}

    # ----------------------------------------------------------------------------------------------
    # their media

    def paths_of(self, record):
        """The paths of its images, its video, or the frames of its video; Unreadable."""
        return media.media_paths(record, self.media)

    def image_sizes(self, record):
        """[(width, height), ..] of its images as displayed, from headers.

        Unreadable if a file is bad, or a point in pixels lies outside.
        """
        if "video" in record:
            return []
        sizes = [media.header(path) for path in self.paths_of(record)]
        check_pixels(record, sizes)
        return sizes

    def images(self, record, only=None):
        """[(H,W,3) uint8, ..] of its images as displayed; Unreadable if one is damaged.

        only: the numbers of the images that are wanted; None: all.
        """
        if "video" in record:
            return []
        return [media.read_image(path) for k, path in enumerate(self.paths_of(record))
                if only is None or k in only]

    def video_size(self, record):
        """(width, height, seconds, half a frame in seconds) of its video as shown; Unreadable."""
        video = self.video_of(record).video
        if isinstance(video, media.FrameFolder):
            size = media.VideoSize(video.width, video.height, video.duration, 1 / video.fps)
        else:
            size = self.probes(video)
        check_pixels(record, [(size.width, size.height)])
        return size.width, size.height, size.seconds, size.frame_seconds / 2

    def frames(self, record, times):
        """Yields the frames (H,W,3) uint8 of its video on display at `times`; Unreadable.

        times: ascending seconds of the clip.
        """
        video, start, _ = self.video_of(record)
        if not isinstance(video, media.FrameFolder):
            video = media.probe(video)
        return media.frames(video, [start + t for t in times])

    def video_of(self, record):
        """Its VideoInput; Unreadable if a frame of a list of frames is missing."""
        entry = record["video"]
        paths = self.paths_of(record)
        if isinstance(entry, str):
            return VideoInput(paths[0], 0.0, math.inf)
        video = media.open_frames(paths, entry["fps"]) if "frames" in entry else paths[0]
        return VideoInput(video, entry.get("start", 0.0), entry.get("end", math.inf))


def checked_options(path, options):
    options = Options(**options)
    for name, kind in (("style", "style"), ("weight", "positive")):
        value = getattr(options, name)
        description, accepts = KINDS[kind]
        if value is not None and not accepts(value):
            message = f"the option {name} must be {description}, not {short_repr(value)}"
            raise DataError(f"{path}: {message}")
    return options


def check_is_file(path):
    if not path.exists():
        raise DataError(f"{path}: there is no such file")
    if path.is_dir():
        raise DataError(f"{path}: this is a folder; name the .jsonl file in it")
    if not path.is_file():           # to open a pipe would wait for ever
        raise DataError(f"{path}: this is not a plain file")


def media_folder(path, given):
    """The folder where the paths in a file of records start: given, else beside the file."""
    if given is None:
        beside = path.parent / "media"
        return beside if beside.is_dir() else path.parent
    if not Path(given).is_dir():
        raise DataError(f"--media {given}: there is no such folder")
    return Path(given)


def merge(first, others):
    """Adds the annotations of records of the same media to the first record, with their weights."""
    key = index.visual_key(first)
    assert all(index.visual_key(other) == key for other in others), "two media have the same hash"
    annotations = []
    for record in (first, *others):
        for annotation in record["annotations"]:
            if "weight" in record:
                weight = annotation.get("weight", 1) * record["weight"]
                annotation = annotation | {"weight": weight}
            annotations.append(annotation)
    first["annotations"] = annotations
    first.pop("weight", None)
