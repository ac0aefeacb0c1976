"""Rows -> records.jsonl and urls.txt.

The rows of one image lie anywhere among millions. So annotations are collected in
memory under their visual input, and records keep the order of first appearance of their
input:

    row 0  u1  mug            u1  [mug, cat]        record 1
    row 1  u2  dog     ->     u2  [dog]             record 2
    row 2  u1  cat

Of a set with group=False every row is a record of its own, written as it comes.
"""

import json
from contextlib import contextmanager

from records.errors import Unreadable
from tools.prepare.annotations import Skip, require, split
from tools.prepare.rows import read_rows

# what a row of another shape raises: a null, a list for a text, lists of different lengths
SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, OverflowError)


def to_json(value):
    """One line; ValueError for what no record can hold, such as NaN or half a surrogate pair."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    line.encode()
    return line


@contextmanager
def count_skips(skipped, what):
    """Ends the block at a Skip, an Unreadable or an error of shape, and counts the reason."""
    try:
        yield
    except Skip as e:
        skipped[str(e)] += 1
    except Unreadable as e:
        skipped[e.args[0]] += 1
    except SHAPE_ERRORS:
        skipped[f"{what} of another shape"] += 1


def convert_files(files, columns, layout, media, excluded, skipped):
    """Yields (head, annotations) of the rows of all files: the visual input and weight of a record;
    and its annotations, each as JSON, which takes less memory than a dict.

    layout: a function (row, media), see images.py. excluded: URLs of images to leave out. skipped:
    a Counter of the reasons for what is left out.
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
                # a head that no record can hold costs the row
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
    """(head, annotations) of rows -> those of records, one for each visual input: the same images,
    or the same clip of a video."""
    inputs = {}
    for head, lines in rows:
        key = to_json([head.get("video"), *media_files(head)])
        _, collected = inputs.setdefault(key, (head, []))
        collected += lines
    return inputs.values()


def make_records(inputs, name, max_points):
    """Yields the records; ids follow the order of visual inputs: name-1, name-1.1, name-2. An input
    with more than `max_points` points becomes several records."""
    for n, (head, lines) in enumerate(inputs, 1):
        for k, annotations in enumerate(split(map(json.loads, lines), max_points)):
            record_id = f"{name}-{n}.{k}" if k else f"{name}-{n}"
            yield {"id": record_id, **head, "annotations": annotations}


def write(records, out, media):
    """records.jsonl and urls.txt, complete or not at all -> the counts of the last line."""
    n_records = 0
    n_annotations = 0
    urls = {}  # {path: URL or None}
    draft = out / "records.jsonl.draft"
    with open(draft, "w", encoding="utf-8", newline="\n") as lines:
        for record in records:
            lines.write(to_json(record) + "\n")
            n_records += 1
            n_annotations += len(record["annotations"])
            urls |= media_files(record)
    fetched = [f"{url}\t{path}\n" for path, url in urls.items() if url]
    (out / "urls.txt").write_text("".join(fetched), encoding="utf-8", newline="\n")
    draft.replace(out / "records.jsonl")
    missing = sum(not (media.root / path).exists() for path in urls)
    return {"records": n_records, "annotations": n_annotations, "urls": len(fetched),
            "missing_media": missing}
