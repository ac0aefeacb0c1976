"""The rows of a file: an array or COCO's annotations in a .json file, or one row per line of a
.jsonl file."""

import json
import re
from collections import Counter

from records.check import short
from records.errors import DataError, Unreadable, plural, warn
from tools.convert.boxes import is_coco, read_coco

MAX_PRINTED = 20  # rows, without --all
NOTHING = (None, "", [], {}, [""], [None])  # in tables, the fields that other rows have
# a word in the name of a field that may change what is trained
TELLING = re.compile(
    "(?<![a-z])(?i:image|img|picture|photo|pixel|video|vid|frame|media|file|audio|sound|speech|clip"
    "|pdf|depth|point|box|bbox|object|region|mask|annotation|label|weight|loss|train|answer"
    "|response|output|completion|chosen|reject|rejected|target|solution|truth|reasoning|thinking"
    "|tool)(?:e?s)?(?![a-z])")


class Report:
    """Counts the rows that were read, those that were skipped by their kind, and the fields that
    are not read. args: the flags of the command."""

    def __init__(self, args):
        self.n_rows = 0
        self.skipped = Counter()
        self.args = args
        self.not_read = {}  # name of a field of a row: [number of rows, its first value]

    def known_fields(self, fields, names, place=None):
        """The fields of a row, or of an object at a place in it, without those that are empty or
        in --ignore. Unreadable for one that is not in names; fields of a row that can hardly
        change what is trained are only counted, but with --strict."""
        known = {}
        for key, value in fields.items():
            if value in NOTHING or key in self.args.ignore:
                continue
            if key in names:
                known[key] = value
            elif place or self.args.strict or TELLING.search(key):
                raise Unreadable(
                    "unknown field", f"{place or 'the row'}: the field '{key}' is not read: rename "
                    f"it to one that is (docs/chats.md), or leave it out with --ignore {key}")
            else:
                self.not_read.setdefault(key, [0, value])[0] += 1
        return known

    def skip(self, where, kind, sentence):
        self.skipped[kind] += 1
        if self.args.all or self.skipped.total() <= MAX_PRINTED:
            warn(f"{where}: {kind}: {sentence}; skipped")

    def end(self):
        """Says how many skipped rows were not printed, and which fields were not read."""
        rest = self.skipped.total() - MAX_PRINTED
        if rest > 0 and not self.args.all:
            warn(f"{rest} more were skipped; --all prints them")
        for key, (n, value) in self.not_read.items():
            warn(f"the field '{key}' is not read: in {plural(n, 'row')}, such as {short(value)}")


def read_rows(path, report):
    """Yields (where, row): "file:line id 7", or "file[number] id 7" with the number from 0."""
    if path.suffix == ".jsonl":
        yield from read_lines(path, report)
    elif path.suffix == ".json":
        yield from read_json(path, report)
    else:
        raise DataError(f"{path}: the name must end in .jsonl (one row per line) or .json (one "
                        "array of rows)")


def read_lines(path, report):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            report.n_rows += 1
            try:
                row = json.loads(line)  # of bytes: it may begin with a byte order mark
            except (ValueError, RecursionError) as error:
                report.skip(f"{path}:{number}", "not JSON", str(error))
                continue
            yield f"{path}:{number}{id_of(row)}", row


def read_json(path, report):
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the file is not JSON: {error}; a file with one row per line "
                        "ends in .jsonl") from None
    if is_coco(content):
        yield from read_coco(content, path, report)
        return
    if not isinstance(content, list):
        raise DataError(f"{path}: the file must contain an array of rows, or the images, "
                        "annotations and categories of COCO's format; a file with one row per line "
                        "must end in .jsonl")
    for k, row in enumerate(content):
        report.n_rows += 1
        yield f"{path}[{k}]{id_of(row)}", row


def id_of(row):
    """-> " id 7", or "" for a row without an id."""
    return f" id {row['id']!s:.60}" if isinstance(row, dict) and "id" in row else ""
