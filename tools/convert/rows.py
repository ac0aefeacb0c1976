"""Reads the entries (in code: rows) of files. Each row is a dict, and has a place.

    a.jsonl, a.csv, a.tsv   a row per line          a.csv:7
    a.json                  a row per entry of the array or of an object of objects, or the object
                            itself    a.json[7]
    a.parquet               a row per row (needs pyarrow)    a.parquet[7]
    a.xml                   one row; inner elements are lists: {"object": [{"name": ["cup"]}]}
    a.txt                   one row: {"lines": [..]}

An Unreadable stands for a row that cannot be read. A file that cannot be read raises an error. A
field that occurs twice and text that is not UTF-8 are mistakes in every format.
"""

import csv
import json
import re
from collections import Counter
from xml.etree import ElementTree

from records.check import short
from records.errors import DataError, Unreadable, explained, import_extra, plural, refuse_pipe

BATCH = 32  # rows of a parquet file in memory at a time
ANSWERS = {  # field of a question: field of its answer
    "query": "response", "instruction": "output", "question": "answer", "prompt": "completion"}
CAPTIONS = ("text", "caption", "captions")
TEXTS = {*ANSWERS, *ANSWERS.values(), *CAPTIONS, "input", "system", "chosen", "rejected"}
SPLITS = {"train", "validation", "val", "test"}
# as in train-00000-of-00002.parquet
FILE_NUMBER = re.compile(r"-\d{5}-of-\d{5}.*")


def split_of(path):
    return FILE_NUMBER.sub("", path.stem)


def published_files(source, split=None):
    """The files of a published set, in order. A folder stands for all its parquet files, or for its
    .json and .jsonl files if it has no parquet file. Without `split`, they must be of one split."""
    files = [source]
    if source.is_dir():
        files = sorted(source.rglob("[!.]*.parquet"))
        # not the hidden draft of OUT
        files = files or sorted([*source.rglob("[!.]*.json"), *source.rglob("[!.]*.jsonl")])
        splits = SPLITS & set(map(split_of, files))
        if len(splits) > 1 and not split:
            raise DataError(f"{source} contains the splits {', '.join(sorted(splits))}: "
                            "choose one with --split")
    files = [path for path in files
             if path.suffix.lower() in READERS and split in (None, split_of(path))]
    if not files:
        of_split = f" of the split '{split}'" if split else ""
        raise DataError(f"{source}: no parquet, json or jsonl file{of_split}")
    return files


def unique(pairs):
    """[(key, value), ..] -> a dict. ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{short(twice)} occurs twice")
    return found


def read_lines(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # json.loads accepts a byte order mark in bytes, but not in a str
                row = json.loads(line, object_pairs_hook=unique)
            except (ValueError, RecursionError) as error:
                row = Unreadable("not JSON", str(error))
            yield f"{path}:{number}", row


def read_json(path):
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the file is not JSON: {error}; if it has one entry per line, "
                        "its name must end in .jsonl") from None
    is_named = isinstance(content, dict) and len(content) > 1 and all(
        isinstance(row, dict) for row in content.values()) and "_via_img_metadata" not in content
    if isinstance(content, list) or is_named:
        rows = content.items() if is_named else enumerate(content)
        yield from ((f"{path}[{k}]", row) for k, row in rows)
    else:
        yield str(path), content


def read_csv(path):
    end = 0  # the last line of the entries that were read
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            names = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=names.count)
            table = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(table, ())]
            end = table.line_num
            for cells in table:
                end = table.line_num
                row = unique([*zip(names, cells, strict=False)])
                # programs write an empty list as []; a text may be [] itself
                row |= {name: [] for name in row.keys() - TEXTS if row[name] == "[]"}
                if len(cells) > len(names):
                    row = Unreadable("wrong record", f"it has {len(cells)} cells, but the first "
                                     f"line has {plural(len(names), 'column')}")
                if cells:
                    yield f"{path}:{end}", row
    except ValueError as error:
        raise DataError(f"{path}: the table cannot be read; save it as CSV UTF-8 ({error})"
                        ) from None
    except csv.Error as error:
        raise DataError(f"{path}:{end + 1}: the entry that begins in this line cannot be read "
                        f'({error}); if a cell begins with ", it must end with ", and each " '
                        "inside it must be doubled; if your program does not write cells in this "
                        "way, make a .jsonl file (docs/convert.md)") from None


def read_parquet(path, layout=None):
    """layout: of a published set. Only its columns are read, because others may be large; the
    others are in the rows as "not read"."""
    parquet = import_extra("pyarrow.parquet")
    with explained(path):
        table = parquet.ParquetFile(path)
        found = table.schema_arrow.names
        wanted = [name for name in found if not layout or name in layout.names]
        others = dict.fromkeys(set(found) - set(wanted), "not read")
        batches = table.iter_batches(layout.batch if layout else BATCH, columns=wanted)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}[{number}]", others | row


def read_xml(path):
    try:
        yield str(path), fields_of(ElementTree.parse(path).getroot())
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        yield str(path), Unreadable("not XML", str(error))


def fields_of(element):
    """An element -> its text, or {attribute: text, tag of inner elements: [each of them]}."""
    inner = {}
    for part in element:
        inner.setdefault(part.tag, []).append(fields_of(part))
    fields = unique([*element.items(), *inner.items()])
    return fields or (element.text or "").strip()


def read_text(path):
    try:
        text = path.read_text(encoding="utf-8-sig")
        yield str(path), {"lines": list(filter(str.strip, text.splitlines()))}
    except UnicodeDecodeError as error:
        yield str(path), Unreadable("wrong record", str(error))


READERS = {".jsonl": read_lines, ".ndjson": read_lines, ".json": read_json, ".csv": read_csv,
           ".tsv": read_csv, ".parquet": read_parquet, ".xml": read_xml, ".txt": read_text}


def read_rows(path, layout=None):
    """Yields (where, row) of a file. layout: of a published set, see read_parquet."""
    refuse_pipe(path)
    reader = READERS[path.suffix.lower()]
    return reader(path, layout) if reader is read_parquet else reader(path)
