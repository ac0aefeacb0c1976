"""Files as they are published, and the command in this process."""

import contextlib
import io
import json

from tests.tools.prepare.cases import arrow_type
from tools.prepare import __main__ as command


def published(path, columns, rows, **options):
    """A file as it is published: parquet, or JSON where there are no column types."""
    if columns is None:
        path = path.with_name(f"{path.name}_oe_qa_processed.json")
        path.write_text(json.dumps(rows))
        return path
    import pyarrow as pa
    from pyarrow import parquet

    path = path.with_name(f"{path.name}.parquet")
    schema = pa.schema([(name, arrow_type(kind)) for name, kind in columns.items()])
    parquet.write_table(pa.Table.from_pylist(rows, schema), path, **options)
    return path


def prepare(name, source, out, *arguments):
    """-> records, the counts of the last line. source: a path, or a list of paths."""
    sources = source if isinstance(source, list) else [source]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command.main([name, *map(str, sources), str(out), *map(str, arguments)])
    counts = json.loads(printed.getvalue().splitlines()[-1])
    lines = (out / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert counts["records"] == len(records)
    assert counts["annotations"] == sum(len(record["annotations"]) for record in records)
    return records, counts
