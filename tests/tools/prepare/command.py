"""Writes files as they are published, and runs tools.prepare in this process."""

import contextlib
import io
import json

from tools.prepare import __main__ as command


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
        command.main([name, *map(str, sources), str(out), *map(str, arguments)])
    counts = json.loads(printed.getvalue().splitlines()[-1])
    records = list(map(json.loads, (out / "records.jsonl").read_text().splitlines()))
    assert counts["records"] == len(records)
    assert counts["annotations"] == sum(len(record["annotations"]) for record in records)
    return records, counts
