"""A file of records (docs/records.md) as a sequence of native records, with their media.

in    a .jsonl file, one record per line, or a .json file with one array of them; native records or
      rows of other projects (dialects.py)
out   records[i] -> a dict with id, where ("file:line") and source, the Records that it came from

A record is read and checked when it is asked for, and one that is wrong raises Unreadable, which
costs the record. A native file is checked when it is opened, before a run begins: then mistakes
stop with DataError. `python -m tools.check FILE` checks every record of any file.
"""

import hashlib
import json
import os
import re
from array import array
from pathlib import Path

import numpy as np

from records import media
from records.check import as_points, check, unlikely_units
from records.dialects import CHAT_KEYS, convert
from records.errors import DataError, Unreadable, warn
from records.media import Probes

MAX_CHECKED_BYTES = 64 << 20         # a native file up to this size is checked when it is opened,
N_CHECKED = 1000                     # and of a larger one so many records
MAX_MISTAKES = 20                    # shown at once
# Python's answer to a row that is nothing like a record, such as a number in the place of a list
SHAPE_ERRORS = (AttributeError, KeyError, TypeError, RecursionError)


class Records:
    """A file of records and the folder where the paths of their media start.

    media: if not given, the folder media/ beside the file, else the folder of the file. Options:
    split_turns, see dialects.convert; style, of annotations that name none; weight, times that of
    every record. Iterating leaves out, with a warning, the records that cannot be used. Can be
    pickled: the file is opened again where it arrives, and must be the same one.
    """

    def __init__(self, path, media=None, split_turns=False, style=None, weight=1.0,
                 stop_on_mistakes=True):
        self.path = Path(path)
        self.name = self.path.name
        self.options = {"split_turns": split_turns, "style": style, "weight": weight}
        self.media = media_folder(self.path, media)
        self.probes = Probes(self.path.with_name(f".{self.name}.videos.jsonl"))
        try:
            find_records = {".jsonl": find_lines, ".json": find_elements}[self.path.suffix]
            self._file = open(self.path, "rb")
            self.stamp = stamp_of(self._file)
            # (n+1,) int64: where each record begins, and where the last one ends; lines from 1
            self.offsets, self.lines, digest = find_records(self.path)
        except KeyError:
            raise DataError(f"{path}: the name of a file of records ends in .jsonl (one per line) "
                            "or .json (one array)") from None
        except OSError as error:
            raise DataError(f"{path}: the file cannot be read: {error.strerror}") from None
        if not len(self):
            raise DataError(f"{path}: the file holds no record")
        digest.update(json.dumps(self.options).encode())
        self.fingerprint = digest.hexdigest()        # what plans and resumed runs depend on
        if stop_on_mistakes:
            self.check_native()

    def check_native(self):
        """DataError with the first mistakes of a native file; other rows are checked one by one.

        Warns once if points seem to have another unit than they say.
        """
        n = len(self) if self.offsets[-1] <= MAX_CHECKED_BYTES else min(len(self), N_CHECKED)
        mistakes, unlikely = [], []
        for i in range(0 if is_chat(self.text(0)) else n):
            try:
                unlikely += [f"{self.where(i)}: {what}" for what in unlikely_units(self[i])]
            except Unreadable as error:
                mistakes.append(f"{self.where(i)}: {error}")
            if len(mistakes) == MAX_MISTAKES:
                break
        if mistakes:
            raise DataError("\n".join(mistakes))
        for sentence in unlikely[:1]:
            warn(sentence)

    def __getstate__(self):
        return self.__dict__ | {"_file": None}

    def __len__(self):
        return len(self.offsets) - 1

    def __iter__(self):
        for i in range(len(self)):
            try:
                yield self[i]
            except Unreadable as error:
                warn(f"{self.where(i)}: {error}; left out")

    def where(self, i):
        """The place of record i, "file:line"."""
        return f"{self.path}:{self.lines[i]}"

    def text(self, i):
        """The bytes of record i; DataError if the file is another one than when it was opened."""
        if self._file is None:
            self._file = open(self.path, "rb")
        if stamp_of(self._file) != self.stamp:
            raise DataError(f"{self.path}: the file has changed since it was opened")
        i = range(len(self))[i]                      # negative numbers count from the end
        self._file.seek(self.offsets[i])
        text = self._file.read(int(self.offsets[i + 1] - self.offsets[i]))
        if self.path.suffix == ".json":
            return text.rstrip(b" \t\r\n,]")         # what follows an element of an array
        return text

    def __getitem__(self, i):
        text = self.text(i)
        try:
            record = parse(text)
            if is_chat(text):
                record = convert(record, self.options["split_turns"])
            check(record)
        except ValueError as error:
            raise Unreadable("wrong record", str(error)) from None
        except SHAPE_ERRORS as error:
            raise Unreadable("wrong record", f"this is not the form of a record: {error}") from None
        line = self.lines[i]
        annotations = [as_points(annotation) for annotation in record["annotations"]]
        if self.options["style"]:
            annotations = [{"style": self.options["style"], **a} for a in annotations]
        if self.options["weight"] != 1:
            record["weight"] = record.get("weight", 1) * self.options["weight"]
        return {"id": f"{self.name}:{line}", **record, "annotations": annotations,
                "where": f"{self.path}:{line}", "source": self}

    # ----------------------------------------------------------------------------------------------
    # their media

    def paths_of(self, record):
        """The paths of its images, its video, or the frames of its video."""
        return [self.media / name for name in media.names_of(record)]

    def image_sizes(self, record):
        """[(width, height), ..] of its images as displayed, from headers; Unreadable."""
        if "video" in record:
            return []
        return [media.image_size(path) for path in self.paths_of(record)]

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
        video = self.video(record)
        if isinstance(video, media.FrameFolder):
            return *media.image_size(video.paths[0]), video.duration, 0.5 / video.fps
        return self.probes(video)

    def frames(self, record, times):
        """Yields the frames (H,W,3) uint8 of its video on display at `times`; Unreadable.

        times: ascending seconds of the clip.
        """
        entry = record["video"]
        start = entry.get("start", 0) if isinstance(entry, dict) else 0
        video = self.video(record)
        if not isinstance(video, media.FrameFolder):
            video = media.probe(video)
        return media.frames(video, [start + t for t in times])

    def video(self, record):
        """The path of its video, or a media.FrameFolder."""
        paths = self.paths_of(record)
        entry = record["video"]
        if isinstance(entry, dict) and "frames" in entry:
            return media.FrameFolder(paths, entry["fps"])
        return paths[0]


def media_folder(path, given):
    """The folder where the paths in a file of records start."""
    if given is None:
        beside = path.parent / "media"
        return beside if beside.is_dir() else path.parent
    if not Path(given).is_dir():
        raise DataError(f"--media {given}: there is no such folder")
    return Path(given)


def stamp_of(file):
    """By which a file is known to be the same: its size and the time of its last change."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


# --------------------------------------------------------------------------------------------------
# where the records of a file are, and their JSON


def find_lines(path):
    """A .jsonl file -> offsets, lines and sha256 of Records."""
    offsets, lines, digest, offset = array("q"), array("q"), hashlib.sha256(), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if line.strip():
                offsets.append(offset)
                lines.append(number)
            offset += len(line)
    offsets.append(offset)
    if lines and lines[-1] == len(lines):            # no line is blank: nothing to keep
        lines = range(1, len(lines) + 1)
    return np.array(offsets), lines, digest


def find_elements(path):
    """The same of a .json file with one array; DataError if it is none.

    The text is read as Latin-1: a character is a byte, and what is not ASCII stands inside of
    strings, so that a JSON parser finds where an element ends.
    """
    content = path.read_bytes()
    text = content.decode("latin-1")
    start = re.compile("(\xef\xbb\xbf)?\\s*\\[").match(text)
    if not start:
        raise DataError(f"{path}:1: the file is not an array of records; one record per line is a "
                        ".jsonl file, and COCO annotations are converted by "
                        "python -m tools.prepare coco")
    parser, gap = json.JSONDecoder(), re.compile(r"[\s,]*")
    offsets, lines, at, line = [], [], start.end(), 1
    line += text.count("\n", 0, at)
    while True:
        begin = gap.match(text, at).end()
        line += text.count("\n", at, begin)
        if text[begin : begin + 1] == "]":
            break
        try:
            end = parser.raw_decode(text, begin)[1]
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{line}: the record that begins here is not JSON, or the "
                            f"array does not end: {error}") from None
        offsets.append(begin)
        lines.append(line)
        line += text.count("\n", begin, end)
        at = end
    return np.array([*offsets, begin]), lines, hashlib.sha256(content)


def parse(text):
    """The bytes of a JSON value -> the value; ValueError, also for what Python's json lets pass:
    NaN and half of a surrogate pair."""
    def refuse_constant(name):
        raise ValueError(f"{name} is not a number")

    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}; a record stands on one "
                         "line, alone") from None
    if b"\\u0000" in text:
        raise ValueError("a text holds a NUL character")
    if b"\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def is_chat(text):
    """Is this the text of a row of another project?"""
    if b'"annotations"' in text:
        return False
    return any(f'"{key}"'.encode() in text for key in CHAT_KEYS)
