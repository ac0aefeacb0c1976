"""Collects the rows of a set into records, and writes records.jsonl and urls.txt.

The rows of one image can be far apart, among millions of others. Therefore the annotations
of every visual input are collected in memory. The order of the records is the order in which
their inputs appear first:

    row 0  u1  mug            u1  [mug, cat]        record 1
    row 1  u2  dog     ->     u2  [dog]             record 2
    row 2  u1  cat

In a set with group=False, every row becomes a record, which is written immediately.
"""

import json
from contextlib import contextmanager

from records.errors import Unreadable
from tools.command import draft
from tools.prepare.annotations import Skip, require, split
from tools.prepare.rows import read_rows

# errors of an unexpected row: a null, a list instead of a text, lists of different lengths
SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, OverflowError)


def to_json(value):
    """One line of JSON. ValueError if it contains NaN, or half of a surrogate pair."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    line.encode()
    return line


@contextmanager
def count_skips(skipped, what):
    """Ends the block at a Skip, an Unreadable or one of SHAPE_ERRORS, and counts the reason."""
    try:
        yield
    except Skip as e:
        skipped[str(e)] += 1
    except Unreadable as e:
        skipped[e.args[0]] += 1
    except SHAPE_ERRORS:
        skipped[f"{what} of another shape"] += 1


def convert_files(files, columns, layout, media, excluded, skipped):
    """Yields (head, annotations) for every row of the files. The head is a dict with the visual
    input and the weight of the record. Annotations are JSON texts, which need less memory than
    dicts.

    layout: a function (row, media), see images.py. excluded: URLs of images; their rows are
    skipped. skipped: a Counter of the reasons.
    """
    for path in files:
        for row in read_rows(path, columns):
            lines = []
            builders = []
            with count_skips(skipped, "row"):
                urls = [row.get("image_url"), *(row.get("image_urls") or [])]
                require(excluded.isdisjoint(urls), "excluded")
                head, found = layout(row | {"file_name": path.name}, media)
                require(found, "nothing to train on")
                # skip the row if its head cannot be written as JSON
                to_json(head)
                builders = found
            for build in builders:
                with count_skips(skipped, "annotation"):
                    lines.append(to_json(build()))
            if lines:
                yield head, lines


def media_files(head):
    """{path: URL or None} of the images or the video of a record."""
    files = {}
    for entry in head.get("images") or [head.get("image", head.get("video"))]:
        if isinstance(entry, str):
            files[entry] = None
        elif entry:
            files[entry["path"]] = entry.get("url")
    return files


def group(rows):
    """Merges the (head, annotations) of rows that have the same images, or the same clip of a
    video."""
    inputs = {}
    for head, lines in rows:
        key = to_json([head.get("video"), *media_files(head)])
        _, collected = inputs.setdefault(key, (head, []))
        collected += lines
    return inputs.values()


def make_records(inputs, name, max_points):
    """Yields the records. Their ids number the visual inputs: name-1, name-2. An input with more
    than `max_points` points becomes several records: name-1, name-1.1."""
    for n, (head, lines) in enumerate(inputs, 1):
        for k, annotations in enumerate(split(map(json.loads, lines), max_points)):
            record_id = f"{name}-{n}.{k}" if k else f"{name}-{n}"
            yield {"id": record_id, **head, "annotations": annotations}


def write(records, out, media):
    """Writes urls.txt, and records.jsonl when it is complete -> the counts that are printed."""
    n_records = 0
    n_annotations = 0
    urls = {}  # {path: URL or None}
    with draft(out / "records.jsonl") as part, draft(out / "urls.txt") as list_part:
        with open(part, "w", encoding="utf-8", newline="\n") as lines:
            for record in records:
                lines.write(to_json(record) + "\n")
                n_records += 1
                n_annotations += len(record["annotations"])
                urls |= media_files(record)
        fetched = [f"{url}\t{path}\n" for path, url in urls.items() if url]
        list_part.write_text("".join(fetched), encoding="utf-8", newline="\n")
    missing = sum(not (media.root / path).exists() for path in urls)
    return {"records": n_records, "annotations": n_annotations, "urls": len(fetched),
            "missing_media": missing}
