"""The rows of a file: an array or COCO's annotations in a .json file, or one row per line of a
.jsonl file."""

import json
from collections import Counter

from records.errors import DataError, warn
from tools.convert.boxes import is_coco, read_coco

MAX_PRINTED = 20  # rows, without --all


class Report:
    """Counts the rows that were read, and those that were skipped by their kind."""

    def __init__(self, print_all):
        self.n_rows = 0
        self.skipped = Counter()
        self.print_all = print_all

    def skip(self, where, kind, sentence):
        self.skipped[kind] += 1
        if self.print_all or self.skipped.total() <= MAX_PRINTED:
            warn(f"{where}: {kind}: {sentence}; skipped")

    def end(self):
        """Says how many skipped rows were not printed."""
        rest = self.skipped.total() - MAX_PRINTED
        if rest > 0 and not self.print_all:
            warn(f"{rest} more were skipped; --all prints them")


def read_rows(path, report):
    """Yields (where, row): "file:line", or "file[number] id 7" with the number from 0."""
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
            yield f"{path}:{number}", row


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
        has_id = isinstance(row, dict) and "id" in row
        yield f"{path}[{k}]" + (f" id {row['id']!s:.60}" if has_id else ""), row
