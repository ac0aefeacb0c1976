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
from dataclasses import replace

from tools.prepare.annotations import Skip, require
from tools.prepare.rows import read_rows

# what a row of another shape raises: a null, a list for a text, lists of different
# lengths
SHAPE_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)


def to_json(value):
    """One line; ValueError for what no record can hold, such as NaN or half a surrogate
    pair."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    line.encode()
    return line


def attempt(skipped, what, act, *args):
    """What act(*args) returns; None where it raises, which is counted by its reason."""
    try:
        return act(*args)
    except Skip as e:
        skipped[str(e)] += 1
    except SHAPE_ERRORS:
        skipped[f"{what} of another shape"] += 1
    return None


def read_row(row, published, settings, media, excluded):
    """One row -> the head of its record, and the functions that make its
    annotations."""
    urls = [row.get("image_url"), *(row.get("image_urls") or [])]
    require(excluded.isdisjoint(urls), "excluded")
    head, builders = published.layout(row, settings, media)
    require(builders, "nothing to learn")
    to_json(head)                    # a head that no record can hold costs the row
    return head, builders


def make_line(builder):
    return to_json(builder())


def convert_files(files, published, settings, media, excluded, skipped):
    """Yields (head, annotations) of the rows of all files: the visual input, weight and
    meta of a record; and its annotations, each as JSON, which takes less memory than a
    dict.

    excluded: URLs of images to leave out. skipped: a Counter of the reasons for what is
    left out.
    """
    for path in files:
        given = published, replace(settings, file=path), media, excluded
        for row in read_rows(path, published.columns):
            head, builders = attempt(skipped, "row", read_row, row, *given) or ({}, [])
            lines = [attempt(skipped, "annotation", make_line, builder) for builder in builders]
            lines = [line for line in lines if line]
            if lines:
                yield head, lines


def media_files(head):
    """{path: URL or None} of the images or the video of a record."""
    entries = head.get("images") or [head[k] for k in ("image", "video") if k in head]
    files = {}
    for entry in entries:
        if isinstance(entry, str):
            files[entry] = None
        else:
            files[entry["path"]] = entry.get("url")
    return files


def group(rows):
    """(head, annotations) of rows -> those of records, one for each visual input: the
    same images, or the same clip of a video."""
    inputs = {}
    for head, lines in rows:
        key = to_json([head.get("video"), *media_files(head)])
        _, collected = inputs.setdefault(key, (head, []))
        collected += lines
    return inputs.values()


def split_by_points(annotations, max_points):
    """Yields annotations of one input, in order, for records of at most `max_points`
    points."""
    part = []
    total = 0
    for annotation in annotations:
        n_points = len(annotation.get("points", annotation.get("boxes", ())))
        if part and total + n_points > max_points:
            yield part
            part = []
            total = 0
        part.append(annotation)
        total += n_points
    yield part


def make_records(inputs, name, max_points):
    """Yields the records; ids follow the order of visual inputs: name-1, name-1.1,
    name-2."""
    for n, (head, lines) in enumerate(inputs, 1):
        meta = {"meta": head.pop("meta")} if "meta" in head else {}
        parts = split_by_points(map(json.loads, lines), max_points)
        for k, annotations in enumerate(parts):
            record_id = f"{name}-{n}.{k}" if k else f"{name}-{n}"
            yield {"id": record_id, **head, "annotations": annotations, **meta}


def write(records, out, media):
    """records.jsonl and urls.txt, complete or not at all -> the counts of the last
    line."""
    counts = {"records": 0, "annotations": 0}
    urls = {}                        # {path: URL or None}
    draft = out / "records.jsonl.draft"
    with open(draft, "w", encoding="utf-8", newline="\n") as lines:
        for record in records:
            lines.write(to_json(record) + "\n")
            counts["records"] += 1
            counts["annotations"] += len(record["annotations"])
            urls |= media_files(record)
    fetched = [f"{url}\t{path}\n" for path, url in urls.items() if url]
    (out / "urls.txt").write_text("".join(fetched), encoding="utf-8", newline="\n")
    draft.replace(out / "records.jsonl")
    missing = sum(not (media.root / path).exists() for path in urls)
    return counts | {"urls": len(fetched), "missing_media": missing}
