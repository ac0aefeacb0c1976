"""Writes files as they are published, and runs tools.convert in this process."""

import contextlib
import io
import json

from tests.tools.convert.command import read
from tools.convert import __main__ as command


def write_parquet(path, rows):
    """-> the path. Rows may have different columns."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)
    return path


def prepare(name, source, out, *arguments):
    """-> records; the counts in the last line. source: a path, or a list of paths."""
    sources = source if isinstance(source, list) else [source]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = command.main([*map(str, sources), str(out / "records.jsonl"), "--as", name,
                               "--overwrite", *map(str, arguments)])
    counts = json.loads(printed.getvalue().splitlines()[-1])
    if status:
        return [], counts
    records = read(out / "records.jsonl")
    assert counts["records"] == len(records)
    return records, counts
