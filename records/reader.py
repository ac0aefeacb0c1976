"""Records: what a user's file may hold, read and checked (formats.md 7 and 9).

in    a .jsonl file, a record per line, or a .json file with one array of them; native records or a dialect (dialects.py)
out   source[i] -> a native record as a dict, with its id, its place "file:line" and its source, which knows where the media lie

    python data.py check FILE [--media DIR] [--decode]

Opening reads the text once, checks every record and keeps where each begins, 17 bytes a record; they are parsed when asked for.
What is found has a code: E stops, unless the file is a third party's (lenient): then the record is skipped. S skips the record,
always the same one, which is counted. W, and what is mended on the way (E08, E41 unsorted), is told once per file.
Left out: what only pixels tell (media.py), what only a tokenizer tells (S03, S04), the limit of points (S12), mixing.
"""

import argparse
import hashlib
import json
import math
import os
import re
import sys
import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from records import media
from records.check import _KINDS, MODES, TABLES, TYPES, DataError, _check, _declared, check, check_pixels  # noqa: F401 - readers look for them here
from records.dialects import Refused, convert, form_of, shown
from records.media import Probes, Unreadable

VERSION = 2                          # of the rules below: an index made under others is made anew
LONGEST = 16 << 20                   # bytes of one record; parsed, they may take 30 times as much
DEEPEST = 100                        # lists and objects inside one another: where Python itself gives up hangs on who calls
CHUNK = 1 << 20                      # bytes of a .json file looked at together
WORTH = 1 << 20                      # bytes of a file whose index is worth keeping on disk; smaller ones are read in no time


@dataclass(frozen=True)
class Options:
    split_turns: bool = False        # of dialects: every question and answer an annotation of its own
    group_by_media: bool = False     # records of the same image, images or clip become one, where the first stood
    path_prefix_field: str = None    # of dialects: the field that names the folder of a row's media
    style: str = None                # of annotations that name none
    weight: float = 1.0              # times the weight of every record
    lenient: bool = None             # E of a single record skips it; None: in dialects only
    strict: bool = False             # S stops like E


# ---------------------------------------------------------------------------------------------------------------
# text -> record

def _pairs(items):
    d = dict(items)
    if len(d) < len(items):
        twice = next(key for key, n in Counter(key for key, _ in items).items() if n > 1)
        raise Refused("E04", f"the key {shown(twice)} is given twice")
    return d


def _number(text):
    if not math.isfinite(float(text)):
        raise Refused("E03", f"{text[:20]} is no finite number")
    return float(text)


def _integer(text):
    if len(text) > 18:
        raise Refused("E01", f"an integer of {len(text)} digits")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_number, parse_float=_number, parse_int=_integer)


def _sound(value):
    """No text in a JSON value holds what no file can: half of a surrogate pair, or a NUL."""
    if isinstance(value, dict):
        return all(_sound(k) and _sound(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_sound, value))
    return not isinstance(value, str) or not re.search("[\ud800-\udfff\\0]", value)


def _deep(value):
    """Is a JSON value nested deeper than DEEPEST? Level by level, so that no depth is too much for this."""
    level = [value]
    for _ in range(DEEPEST):
        level = [part for v in level if isinstance(v, (dict, list)) for part in (v.values() if isinstance(v, dict) else v)]
    return any(isinstance(v, (dict, list)) for v in level)


def parse_line(line, where):
    """A record's text, str or bytes -> its JSON value; DataError E01 to E04. Refuses what Python's json lets pass: NaN, a key twice."""
    try:
        if isinstance(line, bytes):
            if b"\0" in line:
                raise Refused("E02", "a NUL in the text - UTF-16? Save the file as UTF-8")
            line = line.decode()
        record = _DECODER.decode(line)
        if "\\u" in line and re.search(r"\\u(d[89a-f]|0000)", line, re.IGNORECASE) and not _sound(record):
            raise Refused("E02", "half of a surrogate pair, or a NUL, in a text")
        if line.count("[") + line.count("{") > DEEPEST and _deep(record):
            raise Refused("E01", f"nested deeper than {DEEPEST} levels")
        return record
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: E02 not UTF-8 at byte {e.start} of the record") from None
    except json.JSONDecodeError as e:
        end = line.rstrip()
        hint = ("one record per line, nothing after it" if e.msg == "Extra data"
                else "a record over several lines? Put it on one" if end.endswith(("{", "[", ","))
                else "a comma too many?" if re.search(r",\s*[}\]]", line[max(e.pos - 2, 0) : e.pos + 3])
                else "truncated?" if e.pos >= len(end) or not end.endswith("}") else "")
        raise DataError(f"{where}: E01 not JSON: {e.msg} at column {e.pos + 1}" + (f" - {hint}" if hint else "")) from None
    except RecursionError:
        raise DataError(f"{where}: E01 nested too deeply") from None
    except Refused as e:
        raise DataError(f"{where}: {e}") from None


def rows(path):
    """Yields (offset, bytes, line) of every record in a file, without parsing any; DataError if the file is not what it should be."""
    kind = {".jsonl": _lines, ".json": _elements}.get(path.suffix)
    if kind is None:
        raise DataError(f"{path}: E05 a file of records is named .jsonl (one per line) or .json (one array)")
    empty = True
    try:
        with open(path, "rb") as file:
            head = file.read(3)
            if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{path}:1: E02 not UTF-8 but UTF-16")
            start = 3 * (head == b"\xef\xbb\xbf")                         # a byte order mark may stand there
            file.seek(start)
            for row in kind(file, path, start):
                empty = False
                yield row
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None
    if empty:
        raise DataError(f"{path}: E05 the file holds no record")


def _lines(file, path, offset):
    number, first = 0, True
    while data := file.readline(LONGEST + 1):
        number += 1
        if len(data) > LONGEST:
            raise DataError(f"{path}:{number}: E01 a line of more than {LONGEST >> 20} MiB")
        if data.strip():
            if first and re.fullmatch(rb"\[\s*(\{.*)?", data.strip()):
                raise DataError(f"{path}:{number}: E05 a JSON array, not one record per line - name it .json")
            first = False
            yield offset, data, number
        offset += len(data)


def _elements(file, path, offset):
    """Walks an array by its brackets. Read as Latin-1, a byte is a character, and what is not ASCII can only stand inside strings:
    so a plain parser finds where an element ends without knowing what it says."""
    plain, blank = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str), re.compile("[ \t\r\n]*")
    text, at, line, awaited, left = "", 0, 1, "[", True

    def more(n):
        nonlocal text, at, offset, left
        data = file.read(n)
        text, offset, at, left = text[at:] + data.decode("latin-1"), offset + at, 0, bool(data)
        return left

    while True:
        end = blank.match(text, at).end()
        line, at = line + text.count("\n", at, end), end
        if at == len(text):
            if more(CHUNK):
                continue
            if awaited == "nothing":
                return
            raise DataError(f"{path}: E05 the file holds no record" if awaited == "[" else
                            f"{path}:{line}: E01 the array is not ended by ] - truncated?")
        c = text[at]
        if awaited == "[" and c != "[":
            raise DataError(f"{path}:{line}: E05 not an array of records" + (" - one record per line? Name it .jsonl" if c == "{" else ""))
        if awaited == "nothing":
            raise DataError(f"{path}:{line}: E01 {shown(text[at : at + 20])} after the end of the array")
        if awaited == "," and c not in ",]":
            raise DataError(f"{path}:{line}: E01 not JSON: {shown(text[at : at + 20])} where , or ] should stand")
        if awaited == "[" or (c == "," and awaited == ",") or (c == "]" and awaited in (",", "first")):
            awaited, at = {"[": "first", ",": "element", "]": "nothing"}[c], at + 1
            continue
        try:
            end, wrong = plain.raw_decode(text, at)[1], ""
        except (json.JSONDecodeError, RecursionError) as e:
            end, wrong = len(text), getattr(e, "msg", "nested too deeply")
        if end == len(text) and left and end - at <= LONGEST and more(max(CHUNK, end - at)):
            continue                                                      # it may go on in what was not read yet
        if wrong:
            raise DataError(f"{path}:{line}: E01 the record that begins here is not JSON: {wrong}" + ("" if left else " - truncated?"))
        yield offset + at, text[at:end].encode("latin-1"), line
        line, at, awaited = line + text.count("\n", at, end), end, ","


def read(text, where, options=Options()):
    """A record's text, native or a dialect's -> (native record, findings); the record is None if it is to be skipped, and the last
    finding says why. DataError if that is to stop the run."""
    record, form, findings = parse_line(text, where), "annotations", []
    try:
        if isinstance(record, dict):
            form = form_of(record)
        if form != "annotations":
            record, findings = convert(record, options.split_turns, options.path_prefix_field)
        if record is not None or form == "annotations":
            findings = findings + _check(record)
    except Refused as e:
        lenient = form != "annotations" if options.lenient is None else options.lenient
        if e.code < "E07" or not lenient:
            raise DataError(f"{where}: {e}") from None
        return None, [(e.code, str(e)[4:])]
    bad = [finding for finding in findings if finding[0][0] == "S"]
    if bad and options.strict:
        raise DataError(f"{where}: {bad[0][0]} {bad[0][1]}")
    skip = [finding for finding in bad if record is None or finding[0] != "S01"]
    return (None if skip else finished(record, options)), [f for f in findings if f not in skip] + skip


def finished(record, options):
    """A sound native record with what the source's options add."""
    if isinstance(record.get("subtitles"), list):
        record["subtitles"] = sorted(record["subtitles"], key=lambda line: line["start"])
    if options.style:
        record["annotations"] = [{"style": options.style, **a} for a in record["annotations"]]
    if options.weight != 1:
        record["weight"] = record.get("weight", 1) * options.weight
    return record


# ---------------------------------------------------------------------------------------------------------------
# file -> source


def scan(path, options):
    """Yields (offset, length, line, record or None, [(level, code, message), ..]) for every record of a file; level is E, S or W, and
    the message names the place. What is wrong with the file itself comes last, without a record."""
    try:
        for offset, data, line in rows(path):
            where, record = f"{path}:{line}", None
            try:
                record, findings = read(data, where, options)
                found = [("W", code, f"{where}: {code} {what}") for code, what in findings]
                if record is None:
                    found[-1] = ("S", findings[-1][0], found[-1][2] + "; skipped")
            except DataError as e:
                found = [("E", str(e)[len(where) + 2 :][:3], str(e))]
            yield offset, len(data), line, record, found
    except DataError as e:
        yield 0, 0, 0, None, [("E", (re.findall(r": (E\d\d) ", str(e)) or ["E05"])[0], str(e))]


def _key(value):
    """8 bytes of a hash: among ten million values, two share theirs once in 400,000 files."""
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")


def digest(path, first=b""):
    """sha256 of `first` and the bytes of a file, a chunk at a time: it may be a film of many GB."""
    sha = hashlib.sha256(first)
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            sha.update(data)
    return sha


def repeated(keys):
    """Places of values that stood before, ascending; 0 does not count."""
    keys = np.asarray(keys, np.uint64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    return np.sort(order[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)])


def _seen_by(record):
    """What makes the visual input of a record, as text; "" if it has none."""
    images = record["images"] if "images" in record else [record["image"]] if "image" in record else None
    return json.dumps([images, record.get("video"), record.get("subtitles")], sort_keys=True) if images or "video" in record else ""


class Records:
    """A file of records and the folder of their media: `source[i]` -> native record with id, where and source.

    A record to be skipped raises media.Unreadable with the code and the reason; iterating passes it over. Options: see Options.
    Can be pickled; the file is opened again where it arrives.
    """

    def __init__(self, path, media=None, **options):
        self.path, self.options, self._file = Path(path), Options(**options), None
        for key, kind in (("style", "style"), ("weight", "positive")):
            value = getattr(self.options, key)
            if value is not None and not _KINDS[kind][1](value):
                raise DataError(f"{path}: the option {key} must be {_KINDS[kind][0]}, not {shown(value)}")
        if not self.path.exists():
            raise DataError(f"{path}: no such file")
        if not self.path.is_file():                                       # to open a pipe would wait for ever
            raise DataError(f"{path}: a folder; name the .jsonl file in it" if self.path.is_dir() else f"{path}: no plain file")
        beside = self.path.parent / "media"
        self.media = Path(media) if media else beside if beside.is_dir() else self.path.parent
        if not self.media.is_dir():
            raise DataError(f"--media {media}: no such folder")
        self.name, self._fingerprint, self._saved = self.path.name, None, self.path.with_name(f".{self.path.name}.index.npz")
        self.probes = Probes(self.path.with_name(f".{self.path.name}.probes.jsonl"))
        self.stamp, self._on_disk = self._stamp(), False
        self._index = self._load() or self._scan()
        for n, first in self.found.values():
            print(first if n == 1 else f"{first} ({n} times in this file)", file=sys.stderr)

    @property
    def found(self):
        """{code: [how often, the first message]} of all that was found without stopping."""
        return {code: [n, f"{self.path}{first}"] for code, (n, first) in sorted(json.loads(str(self._index["found"])).items())}

    def _stamp(self):
        """What an index, or a record's place, holds for: the file by its size, time and ends, these rules, the options that matter."""
        try:
            with open(self.path, "rb") as file:
                status, ends = os.fstat(file.fileno()), hashlib.sha256(file.read(1 << 16))
                file.seek(max(status.st_size - (1 << 16), 0))
                ends.update(file.read())
        except OSError as e:
            raise DataError(f"{self.path}: cannot be read: {e.strerror}") from None
        options = {key: value for key, value in asdict(self.options).items() if key not in ("style", "weight")}
        return json.dumps([VERSION, status.st_size, status.st_mtime_ns, ends.hexdigest(), options])

    def _load(self):
        try:
            with np.load(self._saved, allow_pickle=False) as saved:
                self._on_disk = str(saved["stamp"]) == self.stamp
                return dict(saved) if self._on_disk else None
        except Exception:                # none there, or of no use, of which numpy and zipfile say it in many ways: it is made anew
            return None

    def _scan(self):
        began, columns = time.monotonic(), {name: array(kind) for name, kind in
                                            (("offset", "Q"), ("length", "I"), ("line", "I"), ("skip", "B"))}
        ids, groups, errors, found, first_skip = array("Q"), array("Q"), [], {}, ""
        for offset, length, line, record, findings in scan(self.path, self.options):
            for column, value in zip(columns.values(), (offset, length, line, record is None), strict=True):
                column.append(value)
            ids.append(_key(record["id"]) if record and "id" in record else 0)
            if self.options.group_by_media:
                groups.append(_key((record and _seen_by(record)) or f"row {len(ids)}"))
            for level, code, message in findings:
                found.setdefault(code, [0, message.removeprefix(str(self.path))])[0] += 1
                first_skip = first_skip or (message if level == "S" else "")
                errors += [message] if level == "E" else []
            if len(errors) >= 20:
                break
        if errors:
            raise DataError("\n".join(errors))
        index = {name: np.array(column) for name, column in columns.items()} | {"stamp": np.array(self.stamp)}
        if index["skip"].all():
            raise DataError(f"{first_skip}: as are all {len(ids)} records of {self.path}")
        if len(again := repeated(ids)):
            self._index, line = index, index["line"][again[0]]
            found["E08"] = [len(again), f":{line}: E08 the id {shown(self._read(again[0])['id'])} was given before"]
            self._file = None                                             # what was read in passing is not yet being read
        if self.options.group_by_media:
            _, first, group = np.unique(np.array(groups), return_index=True, return_inverse=True)
            place = np.argsort(np.argsort(first))[group]                  # groups in the order of their first records
            index["rows"] = np.argsort(place, kind="stable").astype(np.uint32)
            index["starts"] = np.searchsorted(np.sort(place), np.arange(len(first) + 1))
        index["found"] = np.array(json.dumps(found))
        if self.path.stat().st_size >= WORTH:
            self._save(index, time.monotonic() - began)
        return index

    def _save(self, index, seconds):
        part = self._saved.with_name(f"{self._saved.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as file:
                np.savez(file, **index)
            os.replace(part, self._saved)
            self._on_disk = True
        except OSError as e:
            part.unlink(missing_ok=True)
            print(f"{self.path}: its index cannot be written beside it ({e.strerror}), so that opening it takes {seconds:.0f} s again",
                  file=sys.stderr)

    def __getstate__(self):
        return {**self.__dict__, "_file": None} | ({"_index": None} if self._on_disk else {})

    def __setstate__(self, state):
        self.__dict__ = state
        if self._index is None:
            self._index = self._load() or self._scan()

    def __len__(self):
        return len(self._index["starts"]) - 1 if "starts" in self._index else len(self._index["offset"])

    def _rows(self, i):
        i = range(len(self))[i]
        return self._index["rows"][self._index["starts"][i] : self._index["starts"][i + 1]] if "starts" in self._index else [i]

    def where(self, i):
        """The place of record i, "file:line"."""
        return f"{self.path}:{self._index['line'][self._rows(i)[0]]}"

    def __getitem__(self, i):
        first, *others = [self._read(row) for row in self._rows(i)]
        if others:
            assert all(_seen_by(other) == _seen_by(first) for other in others), f"{first['where']}: two media of one hash"
            weighed = [({"weight": a.get("weight", 1) * record["weight"]} if "weight" in record else {}, a)
                       for record in (first, *others) for a in record["annotations"]]
            first["annotations"] = [a | weight for weight, a in weighed]
            first.pop("weight", None)
        return first

    def __iter__(self):
        for i in range(len(self)):
            if not self._index["skip"][self._rows(i)[0]]:
                yield self[i]

    def _read(self, row):
        if self._file is None:
            if self._stamp() != self.stamp:
                raise DataError(f"{self.path}: has changed since it was opened")
            self._file = open(self.path, "rb", buffering=0)
        offset, length, line = (int(self._index[column][row]) for column in ("offset", "length", "line"))
        self._file.seek(offset)
        where, data, status = f"{self.path}:{line}", self._file.read(length), os.fstat(self._file.fileno())
        if json.loads(self.stamp)[1:3] != [status.st_size, status.st_mtime_ns]:
            raise DataError(f"{self.path}: has changed since it was opened")
        record, findings = read(data, where, self.options)                # checked again: the index may be somebody else's
        if record is None:
            raise Unreadable(" ".join(findings[-1]))
        return {**record, "id": record.get("id", f"{self.name}:{line}"), "where": where, "source": self}

    @property
    def fingerprint(self):
        """Hex sha256 of the file's bytes and the options: what a plan made ahead, or a resumed run, depends on."""
        if self._fingerprint is None:
            self._fingerprint = digest(self.path, json.dumps([VERSION, asdict(self.options)]).encode()).hexdigest()
        return self._fingerprint

    def paths_of(self, record):
        """The paths of its images, or of its video, or of the frames of that, in their order; Unreadable for one outside the folder."""
        return paths_of(record, self.media)

    def image_sizes(self, record):
        """[(width, height), ..] of its images as displayed, from the files' headers; Unreadable if one is bad, or a point outside."""
        sizes = [media.header(path) for path in self.paths_of(record)] if "video" not in record else []
        if sizes:
            check_pixels(record, sizes)
        return sizes

    def images(self, record, only=None):
        """[(H,W,3) uint8, ..] of its images as displayed, or of those whose numbers are in `only`; Unreadable if one is damaged."""
        paths = self.paths_of(record) if "video" not in record else []
        return [media.read_image(path) for k, path in enumerate(paths) if only is None or k in only]

    def video_size(self, record):
        """(width, height, seconds, half of the seconds that a frame is shown) of its video as displayed; Unreadable if it is bad."""
        path, *_ = self.video_of(record)
        if isinstance(path, media.Stills):
            w, h, seconds, shown = path.width, path.height, path.duration, 1 / path.fps
        else:
            w, h, seconds, shown = self.probes(path)
        check_pixels(record, [(w, h)])
        return w, h, seconds, shown / 2

    def frames(self, record, times):
        """The frames (H,W,3) uint8 of its video shown at `times`, in seconds of the clip, decoded one after the other; Unreadable."""
        path, start, _ = self.video_of(record)
        return media.frames(path if isinstance(path, media.Stills) else media.probe(path), [start + t for t in times])

    def video_of(self, record):
        """Its video, (path or media.Stills, start, end) in seconds of the file; end is inf where no clip is named."""
        video, paths = record["video"], self.paths_of(record)
        clip = (video.get("start", 0.0), video.get("end", math.inf)) if isinstance(video, dict) else (0.0, math.inf)
        return (media.stills(paths, video["fps"]) if isinstance(video, dict) and "frames" in video else paths[0], *clip)


def entries_of(record):
    """Its images, or its video, as the record names them: [path or object, ..]"""
    return record["images"] if "images" in record else [record[key] for key in ("image", "video") if key in record]


def paths_of(record, folder):
    """See Records.paths_of. Links are followed: what they lead to must lie in the folder too."""
    names = [entry if isinstance(entry, str) else entry.get("path") for entry in entries_of(record)]
    if names == [None]:
        names = record["video"]["frames"]
    root, paths = os.path.realpath(folder), [folder / name for name in names]
    for path in paths:
        if not Path(os.path.realpath(path)).is_relative_to(root):
            raise Unreadable(f"S20 {path} leaves the media folder")
    return paths


# ---------------------------------------------------------------------------------------------------------------
# python data.py check


@lru_cache(maxsize=1000)
def _decoded(path, film):
    """-> (width, height), seconds, what is converted of an image or a film that was read to see whether it can be; or the reason, a str."""
    try:
        if film:
            video = media.probe(path)
            return (video.width, video.height), video.duration, ""
        return media.read_image(path).shape[1::-1], None, media.converted(path)
    except Unreadable as e:
        return str(e)


def look(record, folder, decode):
    """What the files of a record say of it: [message with its code in front, ..]; whether they are there, or (decode) all."""
    try:
        paths = paths_of(record, folder)
    except Unreadable as e:
        return [str(e)]
    video = record.get("video")
    frames = isinstance(video, dict) and "frames" in video
    gone = [f"E10 {p} is a folder" if p.is_dir() else f"{'S24' if frames else 'S20'} no file {p}" for p in paths if not p.is_file()]
    if gone or not decode or not paths:
        return gone
    seen = [_decoded(path, video is not None and not frames) for path in paths]
    if bad := [why for why in seen if isinstance(why, str)]:
        return bad
    found, sizes = [], [size for size, *_ in seen][: 1 if frames else None]
    for entry, path, (w, h) in zip(entries_of(record), paths, sizes, strict=not frames):
        declared = _declared(entry)
        if declared and declared != (w, h):
            found.append(f"W02 {path} is {w} x {h} pixels, not {declared[0]} x {declared[1]} as declared")
        if isinstance(entry, dict) and "sha256" in entry and not frames and digest(path).hexdigest() != entry["sha256"]:
            found.append(f"S21 {path} has not the sha256 that is declared")
    found += [f"W06 {path} is converted: {how}" for path, (*_, how) in zip(paths, seen, strict=True) if how]
    if video is not None and not frames:
        declared, seconds = video if isinstance(video, dict) else {"path": video}, seen[0][1]
        if abs(declared.get("duration", seconds) - seconds) > 0.5:
            found.append(f"W02 {paths[0]} lasts {seconds:g} s, not {declared['duration']:g} s as declared")
        known = dict(_check(record))
        again = _check({**record, "video": {**declared, "duration": seconds}}) if seconds else []
        found += [f"{code} {what}" for code, what in again if code in ("S10", "S23") and code not in known]
    try:
        check_pixels(record, sizes)
    except Unreadable as e:
        found.append(str(e))
    return found


def check_command(argv):
    """`check FILE ..`: prints what is wrong with a file of records and returns the exit status: 0 nothing but W, 1 E or S, 2 no file."""
    parser = argparse.ArgumentParser(prog="data.py check", description="What is wrong with a file of records, line by line.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--media", type=Path, help="where the paths in it start; default: media/ beside the file, else its folder")
    parser.add_argument("--decode", action="store_true", help="read every image and every video's packets, not only whether they exist")
    parser.add_argument("--all", action="store_true", help="print everything, not only 20 lines and the first of each warning")
    for name, what in (("split_turns", "each question of a conversation becomes a branch of its own"),
                       ("group_by_media", "rows about the same image or video become one record"),
                       ("lenient", "a wrong record is left out and named, as in files of other forms"),
                       ("strict", "a wrong record ends a run, in files of other forms too")):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=getattr(Options, name), help=what)
    parser.add_argument("--path-prefix-field", metavar="FIELD", help="of a row of another form: what its paths start with")
    args = parser.parse_args(argv)
    beside = args.file.parent / "media"
    folder = args.media or (beside if beside.is_dir() else args.file.parent)
    for wrong, why in ((args.file.is_dir(), f"{args.file}: is a folder; name the file of records in it"),
                       (not args.file.is_file(), f"{args.file}: no such file"), (not folder.is_dir(), f"--media {folder}: no such folder")):
        if wrong:
            print(why, file=sys.stderr)
            return 2

    options = Options(args.split_turns, args.group_by_media, args.path_prefix_field, lenient=args.lenient, strict=args.strict)
    counts, printed, ids, lines, failed, records, files, missing = Counter(), 0, array("Q"), array("I"), False, 0, 0, 0

    def tell(level, code, message):
        nonlocal printed, failed
        counts[code] += 1
        failed = failed or level != "W"
        if args.all or (printed < 20 and (level != "W" or counts[code] == 1)):
            print(message)
            printed += 1

    for _, _, line, record, findings in scan(args.file, options):
        if record is not None:
            ids.append(_key(record["id"]) if "id" in record else 0)
            lines.append(line)
            looked, where = look(record, folder, args.decode), f"{args.file}:{line}"
            findings += [("W" if text[0] == "W" else "S", text[:3], f"{where}: {text}") for text in looked]
            files += sum(len(e["frames"]) if isinstance(e, dict) and "frames" in e else 1 for e in entries_of(record))
            missing += sum(text[:3] in ("S20", "S24") for text in looked)
        records += line > 0
        for level, code, message in findings:
            tell("S" if code[0] == "S" else level, code, message)
    for again in repeated(ids):
        tell("W", "E08", f"{args.file}:{lines[again]}: E08 its id was given before")
    told = ", ".join(f"{code} {n}" for code, n in sorted(counts.items()))
    absent = f"; {missing} of {files} media files are missing" if missing else ""
    print(f"{args.file}: {records} records; {told or 'nothing wrong'}{absent}")
    return int(failed)
