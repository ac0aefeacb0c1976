"""What a layout is: its columns, and a function that makes records of a row.

    "pixmo-count": Layout(label_points, "image_url label count points?", published=True)
    "voc": Layout(boxes.read_voc, "filename size object? -folder", "filename size")

The function gets a row and the job. It returns (head, annotations), or yields several of them.
The head has the medium and other fields of the record. An annotation is a dict, or a function
without arguments that makes one or a list of them: if it cannot be used, the others are.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from records.errors import Unreadable
from tools.convert.media import Media
from tools.convert.report import Report
from tools.convert.rows import BATCH


@dataclass
class Layout:
    convert: Callable
    columns: str  # names; "a?" may be missing, "-a" is known and not used; "*": any
    sign: str = ""  # columns by which it is recognised; "|" separates alternatives
    regroup: Callable | None = None  # (rows of the files, job) -> rows, one per medium
    group: bool = False  # the rows of one medium become one record
    max_points: float = math.inf  # of a record
    flags: tuple = ()  # flags of the command that are arguments of `convert`
    many: bool = False  # a folder may have several of its files
    # A published set or a benchmark: its media lie in media/ beside OUT and are found by id, sha256
    # or URL, records get numbers as ids, empty cells have a meaning, and unknown columns are named
    # but skip no row, since the official code defines what they mean.
    published: bool = False
    split: str | None = None  # of the files of a folder, without --split
    batch: int = BATCH  # rows of a parquet file in memory at a time

    def __post_init__(self):
        words = self.columns.split()
        self.names = {word.rstrip("?") for word in words if word[0] != "-"}
        self.unused = {word[1:] for word in words if word[0] == "-"}
        self.needed = [word for word in words if word[0] not in "-*" and word[-1] != "?"]

    def read(self, row, job):
        """A row -> [(head, annotations), ..]. Unreadable if a column is missing or not known."""
        job.columns = row.keys()
        if self.published and not row.keys() <= self.names:
            for name in row.keys() - self.names - self.unused:
                job.report.count_unused(name, row[name])
            row = {name: value for name, value in row.items() if name in self.names}
        elif not self.published and self.columns != "*":
            row = {name: value for name, value in row.items() if name not in self.unused}
            row = job.report.known_fields(row, self.names)
        missing = [name for name in self.needed if name not in row]
        if missing:
            raise Unreadable("missing column", f"it has no {', '.join(missing)}; its columns are "
                             f"{', '.join(row) or 'empty'}")
        found = self.convert(row, job, **{name: getattr(job.args, name) for name in self.flags})
        return [found] if isinstance(found, tuple) else found


@dataclass
class Job:
    """What the functions of layouts may use."""
    args: Namespace
    report: Report
    media: Media
    source: Path = None  # the file or folder of the command line that is read
    path: Path = None  # the file in it
    found: dict = field(default_factory=dict)  # {path of a medium: its path in a row}
    columns: tuple = ()  # of the row, also those that are not used


def rows_in(field, rows, job):
    """The rows of a file, which may be an object with an array in this field."""
    for where, row in rows:
        if isinstance(row, dict) and isinstance(row.get(field), list):
            yield from ((f"{where} {field}[{k}]", each) for k, each in enumerate(row[field]))
        else:
            yield where, row
