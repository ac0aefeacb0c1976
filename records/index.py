"""The index of a record file: where each record begins, and which ones are skipped.

A record is parsed and checked once, here. The index is kept beside the file, 17 bytes a record, and
is trusted while its stamp fits: the file's size, time of change and ends, the version of the rules,
and the options. Its arrays are mapped into memory, so the processes of a machine share one copy.
"""

import hashlib
import json
import os
import zipfile
from array import array
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from records.boxes import as_points
from records.check import find
from records.dialects import convert, list_key
from records.errors import DataError, Finding, InvalidRecord, warn
from records.media import media_entries
from records.parse import parse_line, rows

VERSION = 4                          # of the rules: an index made under others is made anew
MIN_INDEXED_BYTES = 1 << 20          # smaller files are read at once; their index is not kept
MAX_ERRORS = 20                      # reported at once


@dataclass(frozen=True)
class Options:
    """How a file of records is read."""
    split_turns: bool = False        # of other projects' rows: every question is an annotation
    group_by_media: bool = False     # records of the same media become one, where the first stood
    path_prefix_field: str = None    # of other projects' rows: the field with the folder of media
    style: str = None                # of annotations that name none
    weight: float = 1.0              # times the weight of every record
    lenient: bool = None             # E of a single record skips it; None: in other projects' rows
    strict: bool = False             # S stops like E


# --------------------------------------------------------------------------------------------------
# checking


class Checked(NamedTuple):
    """A record of a file and what was found."""
    offset: int
    length: int                      # bytes
    line: int
    record: dict                     # native; None if it is skipped, or wrong
    findings: list                   # of Finding; if it is skipped, the last says why
    error: str = ""                  # the message that stops the run

    def messages(self):
        """[(finding, message), ..]; a message is what follows the path of the file."""
        found = []
        for finding in self.findings:
            message = f":{self.line}: {finding.code} {finding.message}"
            if self.record is None and finding is self.findings[-1]:
                message += "; skipped"
            found.append((finding, message))
        return found


def scan(path, options):
    """Yields a Checked for every record of a file; DataError if the file itself is wrong."""
    for row in rows(path):
        where = f"{path}:{row.line}"
        record = None
        findings = []
        error = ""
        try:
            record, findings = read_checked(row.data, where, options)
        except DataError as e:
            error = str(e)
        yield Checked(row.offset, len(row.data), row.line, record, findings, error)


def read_checked(data, where, options):
    """A record's text -> (native record, [Finding, ..]); None in its place if it is to be skipped.

    Then the last finding says why. DataError if what is found stops the run.
    """
    value = parse_line(data, where)
    key = "annotations"
    findings = []
    try:
        record = value
        if isinstance(value, dict):
            key = list_key(value)
        if key != "annotations":
            record, findings = convert(value, options.split_turns, options.path_prefix_field)
        if record is not None or key == "annotations":
            findings = findings + find(record)
    except InvalidRecord as error:
        lenient = key != "annotations" if options.lenient is None else options.lenient
        if error.code < "E07" or not lenient:
            raise DataError(f"{where}: {error}") from None
        return None, [Finding(error.code, str(error)[4:])]
    skip = [finding for finding in findings if finding.code[0] == "S"]
    if skip and options.strict:
        raise DataError(f"{where}: {skip[0].code} {skip[0].message}")
    if record is not None:           # only the last question was left out: not a reason to skip
        skip = [finding for finding in skip if finding.code != "S01"]
    if not skip:
        return record, findings
    return None, [finding for finding in findings if finding not in skip] + skip


def skip_reason(data, where, options):
    """Why the index skips a record: "CODE message"."""
    _, findings = read_checked(data, where, options)
    return " ".join(findings[-1])


def read_trusted(data, options):
    """The text of a record that the index has found good -> native record, without checks."""
    record = json.loads(data)
    if list_key(record) != "annotations":
        record, _ = convert(record, options.split_turns, options.path_prefix_field)
    record["annotations"] = [as_points(a) for a in record["annotations"]]
    if isinstance(record.get("subtitles"), list):
        record["subtitles"] = sorted(record["subtitles"], key=lambda line: line["start"])
    if options.style:
        record["annotations"] = [{"style": options.style, **a} for a in record["annotations"]]
    if options.weight != 1:
        record["weight"] = record.get("weight", 1) * options.weight
    return record


def visual_key(record):
    """The visual input of a record as text, the same for the same; "" if it has none."""
    entries = media_entries(record)
    if not entries:
        return ""
    return json.dumps(["video" in record, entries, record.get("subtitles")], sort_keys=True)


def hash64(text):
    """64 bits of a hash: of ten million texts, two share theirs in one of 400,000 files."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def repeated(hashes):
    """Places, ascending, of hashes that stood before; 0 does not count."""
    hashes = np.asarray(hashes, np.uint64)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    again = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    return np.sort(order[1:][again])


# --------------------------------------------------------------------------------------------------
# the index


@dataclass
class Index:
    """offset, length, line and skip have an entry per row of the file, (n,)."""
    offset: np.ndarray               # uint64: where a record begins in the file
    length: np.ndarray               # uint32, bytes
    line: np.ndarray                 # uint32, from 1
    skip: np.ndarray                 # uint8, 1: skipped
    found: dict                      # {code: (how often, the first message, from ":line" on)}
    fingerprints: dict = field(default_factory=dict)     # {rules: Records.fingerprint}
    # of group_by_media: record i is made of the rows order[starts[i] : starts[i + 1]]
    order: np.ndarray = None         # (n,) uint32
    starts: np.ndarray = None        # (groups + 1,) int64

    def __len__(self):
        return len(self.offset if self.starts is None else self.starts[:-1])

    def rows(self, i):
        """The rows of the file that record i is made of; IndexError if there is no record i."""
        i = range(len(self))[i]      # negative numbers count from the end
        if self.starts is None:
            return [i]
        return self.order[self.starts[i] : self.starts[i + 1]]


def stamp(path, options):
    """What an index holds for, as text: the file by size, time and ends, the rules, the options."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            ends = hashlib.sha256(file.read(1 << 16))
            file.seek(max(status.st_size - (1 << 16), 0))
            ends.update(file.read())
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}") from None
    # style and weight change records and not which are skipped
    kept = {key: value for key, value in asdict(options).items() if key not in ("style", "weight")}
    return json.dumps([VERSION, status.st_size, status.st_mtime_ns, ends.hexdigest(), kept])


def index_path(path):
    return path.with_name(f".{path.name}.index.npz")


def load(path, expected_stamp):
    """The index beside a file, or None: there is none, it is damaged, or its stamp does not fit."""
    target = index_path(path)
    try:
        with np.load(target, allow_pickle=False) as saved:
            if str(saved["stamp"]) != expected_stamp:
                return None
            texts = {key: json.loads(str(saved[key])) for key in ("found", "fingerprints")}
            names = [name for name in saved.files if name not in ("stamp", *texts)]
        return Index(**{name: mapped(target, f"{name}.npy") for name in names}, **texts)
    except Exception:                # NumPy and zipfile raise many kinds for a damaged file
        return None


def mapped(path, name):
    """An array of an .npz, which stores arrays uncompressed, as a read-only memory map."""
    with zipfile.ZipFile(path) as archive, archive.open(name) as member:
        np.lib.format.read_magic(member)
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        header_bytes = member.tell()
        info = archive.getinfo(name)
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)               # the lengths of the name and of the extras
        lengths = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
    start = info.header_offset + 30 + lengths + header_bytes
    return np.memmap(path, dtype, "r", start, shape)


def save(index, path, made_for):
    """Writes the index beside its file; True if it could be written. made_for: the stamp."""
    arrays = {name: value for name, value in vars(index).items() if isinstance(value, np.ndarray)}
    texts = {"found": json.dumps(index.found), "fingerprints": json.dumps(index.fingerprints)}
    target = index_path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.savez(file, **arrays, **texts, stamp=made_for)
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        warn(f"{path}: the index cannot be written beside the file ({error.strerror}), so the "
             "file is checked again whenever it is opened")
        return False
    return True


def build(path, options):
    """Parses and checks every record of a file -> Index; DataError with the first MAX_ERRORS."""
    columns = {"offset": array("Q"), "length": array("I"), "line": array("I"), "skip": array("B")}
    ids = array("Q")                 # hashes
    visuals = array("Q")             # hashes of the visual inputs, to group by
    errors = []
    found = {}
    skipped = ""                     # the message of the first record that is skipped
    try:
        for row in scan(path, options):
            columns["offset"].append(row.offset)
            columns["length"].append(row.length)
            columns["line"].append(row.line)
            columns["skip"].append(row.record is None)
            record = row.record or {}
            ids.append(hash64(record["id"]) if "id" in record else 0)
            if options.group_by_media:
                visuals.append(hash64(visual_key(record) or f"row {len(ids)}"))
            for finding, message in row.messages():
                count, first = found.get(finding.code, (0, message))
                found[finding.code] = (count + 1, first)
            if row.record is None and row.findings:
                skipped = skipped or message
            if row.error:
                errors.append(row.error)
            if len(errors) == MAX_ERRORS:
                break
    except DataError as error:       # of the file itself
        errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    if all(columns["skip"]):
        raise DataError(f"{path}{skipped}, as are all {len(ids)} records of the file")
    again = repeated(ids)
    if len(again):
        line = columns["line"][again[0]]
        found["E08"] = (len(again), f":{line}: E08 another record has the same id before it")
    index = Index(**{name: np.array(column) for name, column in columns.items()}, found=found)
    if options.group_by_media:
        index.order, index.starts = group(np.array(visuals))
    return index


def group(hashes):
    """Puts rows of equal hashes side by side, groups in the order of their first rows.

    -> order, starts, as in Index.
    """
    _, first, group_of = np.unique(hashes, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[group_of]
    order = np.argsort(place, kind="stable").astype(np.uint32)
    return order, np.searchsorted(np.sort(place), np.arange(len(first) + 1))
