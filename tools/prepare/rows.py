"""Reads the rows of the files of a published set."""

import json
import re
from pathlib import Path

from records.errors import UserError, explained, import_extra

BATCH = 32  # rows of a parquet file in memory at a time
SPLITS = {"train", "validation", "val", "test"}
# as in train-00000-of-00002.parquet
FILE_NUMBER = re.compile(r"-\d{5}-of-\d{5}.*")


def split_of(path):
    return FILE_NUMBER.sub("", path.stem)


def source_files(sources, split=None):
    """The files to read, in order. A folder stands for all its parquet files, or for its .json and
    .jsonl files if it has no parquet file. Without `split`, its files must be of one split."""
    files = []
    for source in map(Path, sources):
        inside = sorted(source.rglob("*.parquet"))
        inside = inside or sorted([*source.rglob("*.json"), *source.rglob("*.jsonl")])
        splits = SPLITS & set(map(split_of, inside))
        if len(splits) > 1 and not split:
            raise UserError(f"{source} contains the splits {', '.join(sorted(splits))}: "
                            "choose one with --split")
        files += [source] if source.is_file() else inside
    files = [path for path in files if split in (None, split_of(path))]
    if not files:
        of_split = f" of the split '{split}'" if split else ""
        raise UserError(f"{' '.join(sources)}: no parquet, json or jsonl file{of_split}")
    return files


def read_rows(path, columns):
    """Yields the rows of a file as dicts. columns: names separated by white space; a name that ends
    in "?" may be missing."""
    names = columns.split()
    required = [name for name in names if not name.endswith("?")]
    if path.suffix == ".parquet":
        with open_parquet(path) as table:
            found = table.schema_arrow.names
            check_columns(path, required, found)
            wanted = [name.rstrip("?") for name in names if name.rstrip("?") in found]
            with explained(path):
                for batch in table.iter_batches(BATCH, columns=wanted):
                    yield from batch.to_pylist()
        return
    first = None
    for row in read_lines(path) if path.suffix == ".jsonl" else read_array(path):
        if first is None and isinstance(row, dict):
            first = row
            check_columns(path, required, list(first))
        yield row


def check_columns(path, required, found):
    missing = [name for name in required if name not in found]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}: expected "
                        f"{', '.join(required)}; found {', '.join(found) or 'none'}")


def read_lines(path):
    """Yields the rows of a .jsonl file; None for a line that is not JSON."""
    with open(path, encoding="utf-8-sig", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def read_array(path):
    """The rows of a .json file with an array or, in DocVQA and TextVQA, an object with an array."""
    with explained(f"{path}, which should contain an array of rows,"):
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(rows, list):
            return rows
        return next(value for value in rows.values() if isinstance(value, list))


def open_parquet(path):
    """-> pyarrow's ParquetFile. ValueError without pyarrow, or if the file is damaged."""
    parquet = import_extra("pyarrow.parquet")
    with explained(path):
        return parquet.ParquetFile(path)
