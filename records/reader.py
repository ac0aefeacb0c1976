"""A file of records (docs/records.md) as a sequence, with the media of its records.

in    a .jsonl file, one record per line; python -m tools.convert converts other files to it
out   records[i] -> a dict with id, key (of its random choices), where ("file:line") and source

A record is checked when it is read. If it is wrong, reading raises Unreadable. A file is also
checked when it is opened, before a run starts. Then mistakes raise DataError.
"""

import hashlib
import json
import os
import shlex
from array import array
from contextlib import suppress
from pathlib import Path

import numpy as np

from records import media
from records.errors import DataError, Unreadable, refuse_pipe, skipping, warn
from records.media import Probes
from records.parse import THOUSANDTHS, like_thousandths, parse, unlikely_styles, unlikely_units

MAX_CHECKED_BYTES = 64 << 20  # files up to this size are checked completely when opened
N_CHECKED = 1000  # records of a larger file that are checked when it is opened
MAX_MISTAKES = 20  # shown at once
CHAT_KEYS = ("conversations", "messages")  # fields with the turns in ShareGPT, LLaVA, OpenAI, ..
OTHER_KEYS = (*CHAT_KEYS, "query", "instruction", "question", "prompt", "chosen", "text",
              "caption")
# A number in place of a list, for example, raises AttributeError, KeyError or TypeError, and an
# integer of 400 digits raises OverflowError.
FORM_ERRORS = (ValueError, RecursionError, AttributeError, KeyError, TypeError, OverflowError)


class Records:
    """The records of a file, and the folder that their media paths are relative to.

    media: this folder. The default is the folder media/ beside the file if it exists, else the
    folder of the file. style: for annotations without a style. weight: multiplies the weight of
    every record. Iterating skips records that cannot be used, with a warning.
    A copy in another process opens the file again. The file must not have changed.
    """

    def __init__(self, path, media=None, style=None, weight=1.0, stop_on_mistakes=True):
        self.path = Path(path)
        self.name = self.path.name
        self.options = {"style": style, "weight": weight}
        self.media = media_folder(self.path, media)
        self.probes = Probes(self.path.parent / f".{self.name}.videos.jsonl")
        refuse_pipe(path)
        if self.path.suffix != ".jsonl" and os.path.exists(path):
            stop(path, conversion(self.path, media))
        self.open_file()
        self.stamp = stamp_of(self._file.fileno())
        # offsets: (n+1,) int64, where records start and the last one ends; lines: from 1
        self.offsets, self.lines, digest = find_lines(self._file)
        if len(self) and self.starts_with_other():
            stop(path, conversion(self.path, media))
        if not len(self):
            stop(path, "the file contains no records")
        digest.update(json.dumps(self.options).encode())
        # plans and resumed runs are only valid for this content and these options
        self.fingerprint = digest.hexdigest()
        self.made_for = set()  # (fps, max_frames) of prepared frames
        if stop_on_mistakes:
            self.check_first()

    def starts_with_other(self):
        """Is the first line in another data format? A line that is not JSON counts as a record."""
        with suppress(ValueError, RecursionError):
            return is_other(json.loads(self.text(0)))
        return False

    def check_first(self):
        """Raises DataError with the first mistakes, or warns once of unlikely units or styles."""
        n = len(self) if self.offsets[-1] <= MAX_CHECKED_BYTES else N_CHECKED
        mistakes = []
        unlikely = []
        thousandths = set()
        for i in range(min(len(self), n)):
            try:
                record = self[i]
                found = [*unlikely_units(record), *unlikely_styles(record)]
                unlikely += [f"{record['where']}: {sentence}" for sentence in found]
                thousandths.add(like_thousandths(record))
                if made_for := record.get("video", {}).get("made_for"):
                    self.made_for.add((made_for["fps"], made_for["max_frames"]))
            except Unreadable as error:
                mistakes.append(f"{self.where(i)}: {error}")
            if len(mistakes) == MAX_MISTAKES:
                break
        if mistakes:
            raise DataError("\n".join(mistakes))
        if thousandths - {None} == {True}:  # if it is true of all records with points in pixels
            unlikely.append(f"{self.path}: {THOUSANDTHS}")
        for sentence in unlikely[:1]:
            warn(sentence)

    def open_file(self):
        """DataError if the file cannot be opened, in this process or in another one."""
        try:
            self._file = open(self.path, "rb")
        except OSError as error:
            stop(self.path, f"the file cannot be read: {error.strerror}")

    def __getstate__(self):
        return self.__dict__ | {"_file": None}

    def __len__(self):
        return len(self.offsets) - 1

    def __iter__(self):
        for i in range(len(self)):
            with skipping({}, self.where(i)):
                yield self[i]

    def where(self, i):
        return f"{self.path}:{self.lines[i]}"

    def text(self, i):
        """The bytes of record i. Raises DataError if the file has changed."""
        if self._file is None:
            self.open_file()
        if stamp_of(self._file.fileno()) != self.stamp:
            stop(self.path, "the file has changed since it was opened")
        i = range(len(self))[i]  # negative numbers count from the end
        self._file.seek(self.offsets[i])
        return self._file.read(int(self.offsets[i + 1] - self.offsets[i]))

    def __getitem__(self, i):
        text = self.text(i)
        try:
            record = read_record(text, self.options["style"])
        except FORM_ERRORS as error:
            raise Unreadable("wrong record", "this line cannot be read as a record: "
                             f"{type(error).__name__}: {error}") from None
        record["weight"] *= self.options["weight"]
        # several records of a file may have the same id, and their random choices must differ
        line = self.lines[i]
        name = record.get("id", self.name)
        # the id of a prepared record may already end with its line
        key = name if name.endswith(f":{line}") else f"{name}:{line}"
        return {"id": key, **record, "key": key, "where": self.where(i), "source": self}

    def paths_of(self, record):
        return [self.media / name for name in names_of(record)]

    def image_sizes(self, record):
        """[(width, height), ..] of a record's images, from headers. Raises Unreadable."""
        return [media.image_size(path) for path in self.paths_of(record)]

    def images(self, record, only=None):
        """[(H,W,3) uint8, ..] of a record's images. only: their numbers. Raises Unreadable."""
        return [media.read_image(path) for k, path in enumerate(self.paths_of(record))
                if only is None or k in only]

    def video_size(self, record):
        """(width, height, seconds, half a frame in seconds) of the video. Raises Unreadable."""
        video = self.video(record)
        if isinstance(video, media.FrameFolder):
            return *media.image_size(video.paths[0]), video.duration, 0.5 / video.fps
        return self.probes(video)

    def frames(self, record, times):
        """Yields frames (H,W,3) uint8. times: ascending seconds from the start of the clip."""
        start = record["video"]["start"]
        video = self.video(record)
        if not isinstance(video, media.FrameFolder):
            video = media.probe(video)
        return media.frames(video, [start + t for t in times])

    def video(self, record):
        """The path of a record's video, or a media.FrameFolder."""
        paths = self.paths_of(record)
        entry = record["video"]
        if "frames" in entry:
            duration = entry.get("duration", len(paths) / entry["fps"])
            return media.FrameFolder(paths, entry["fps"], duration, entry.get("first", 0.0))
        return paths[0]


def read_record(text, style=None):
    """Bytes -> a record in one form. Raises Unreadable or one of FORM_ERRORS. style: of Records."""
    record = json.loads(text)
    for value in texts_in(record) if b"\\u" in text else ():
        if "\0" in value:  # text/prompts.py and tools.plan use it as a mark
            raise ValueError("a text contains a NUL character")
        value.encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
    if is_other(record):
        raise Unreadable("wrong record", "this line is in another data format; python -m "
                         "tools.convert converts a file of such lines")
    if style:
        for annotation in record["annotations"]:
            annotation.setdefault("style", style)
    return parse(record)


def names_of(record):
    """The paths of a record's images, of its video, or of the frames of its video."""
    if "video" in record:
        return record["video"].get("frames") or [record["video"]["path"]]
    return [image["path"] for image in record.get("images", ())]


def texts_in(value):
    """Yields every text in a JSON value, also the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for part in parts:
            yield from texts_in(part)


def stop(path, sentence):
    raise DataError(f"{path}: {sentence}")


def conversion(path, media):
    """A message with the command that converts this file or folder to a file of records."""
    words = ["python", "-m", "tools.convert", path,
             path.parent / f"{path.stem}.records.jsonl"]
    words += ["--media", media] if media else []
    return f"this is not a .jsonl file of records; convert it with: {shlex.join(map(str, words))}"


def media_folder(path, given):
    """The folder that the paths in a file of records are relative to."""
    if given is None:
        beside = path.parent / "media"
        return beside if os.path.isdir(beside) else path.parent
    if not os.path.isdir(given):  # Path.is_dir raises for a name that is too long
        stop(f"--media {given}", "there is no such folder")
    return Path(given)


def stamp_of(file):
    """A path or a file descriptor -> the size of the file, and the time of its last change."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def is_other(row):
    """Is this line in another data format? It is if it has one of the keys of such formats."""
    # in lines that come from a table, unused fields are None
    return (isinstance(row, dict) and row.get("annotations") is None
            and any(row.get(key) is not None for key in OTHER_KEYS))


def find_lines(file):
    """An open .jsonl file -> the byte offsets and line numbers of its records, and its sha256."""
    offsets = array("q")
    lines = array("q")
    digest = hashlib.sha256()
    offset = 0
    for number, line in enumerate(file, 1):
        digest.update(line)
        if line.strip():
            offsets.append(offset)
            lines.append(number)
        offset += len(line)
    offsets.append(offset)
    # if no line is blank, a range needs no memory
    if lines and lines[-1] == len(lines):
        lines = range(1, len(lines) + 1)
    return np.array(offsets), lines, digest
