"""Rows -> records, through a database on disk.

The rows of one image lie anywhere among millions. So the annotations of a row go under the key of
its visual input, and records are written in the order in which keys first came up:

    row 0  u1  mug      heads        1 u1   2 u2                 records  u1 [mug, cat]
    row 1  u2  dog      annotations  1 mug  2 dog  1 cat                  u2 [dog]
    row 2  u1  cat

Every batch of rows is a transaction that also notes where it ends, so that the same command goes on
after a kill, and the result is the same to the byte. Memory holds a batch of rows, and 256 MB of
the database at most.
"""

import hashlib
import json
import re
import sqlite3
from collections import Counter
from typing import NamedTuple

from records.errors import warn
from tools.prepare.annotations import Skip
from tools.prepare.files import batches

BATCH = 2000                         # rows
IMAGE_BATCH = 32                     # rows with images inside, of a megabyte each or more
CACHE_KIB = 262144
TABLES = {
    "heads": "n integer primary key, key blob unique, head text",
    "annotations": "n integer primary key, head integer, list text",
    "media": "n integer primary key, path text unique, url text",
    "skipped": "reason text primary key, n integer",
    "done": "file text primary key, n_rows integer",
}
# what a row of another shape raises: a null, a list for a text, lists of different lengths
SHAPE_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)


class Converted(NamedTuple):
    head: dict
    head_json: str
    annotations_json: str            # of a list


def open_database(path, job):
    """The database of this job as far as it got; that of another job is begun anew. job: a text of
    all that decides on the records."""
    digest = hashlib.sha256(job.encode()).digest()
    job_number = int.from_bytes(digest[:4], "big") >> 1 | 1              # 31 bits, never 0
    db = sqlite3.connect(path, timeout=1, isolation_level=None)
    # With a write-ahead log, a commit appends, and what a kill leaves is complete.
    for setting in ("journal_mode=wal", "synchronous=normal", f"cache_size=-{CACHE_KIB}",
                    "locking_mode=exclusive"):
        db.execute(f"pragma {setting}")
    db.execute("begin immediate")
    found = db.execute("pragma user_version").fetchone()[0]
    if found != job_number:
        if found:
            warn(f"{path} is from another command or another version of the files: begun anew")
        for table, columns in TABLES.items():
            db.execute(f"drop table if exists {table}")
            db.execute(f"create table {table}({columns})")
        db.execute(f"pragma user_version={job_number}")
    db.execute("commit")
    return db


def as_json(value):
    """One line; ValueError for what no record can hold: NaN, half a surrogate pair, NUL."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    line.encode()
    if "\\u0000" in line and re.search(r"(?<!\\)(\\\\)*\\u0000", line):
        raise ValueError("NUL")
    return line


def convert(row, layout, settings, media, excluded, skipped):
    """One row -> Converted, or None. What is left out is counted in `skipped` by its reason."""
    try:
        urls = [row.get("image_url"), *(row.get("image_urls") or [])]
        if excluded and not excluded.isdisjoint(urls):
            raise Skip("excluded")
        head, builders = layout(row, settings, media)
        if not builders:
            raise Skip("nothing to learn")
        head_json = as_json(head)
    except Skip as e:
        skipped[str(e)] += 1
        return None
    except SHAPE_ERRORS:
        skipped["row of another shape"] += 1
        return None
    annotations = []
    for builder in builders:
        try:
            annotations.append(as_json(builder()))
        except Skip as e:
            skipped[str(e)] += 1
        except SHAPE_ERRORS:
            skipped["annotation of another shape"] += 1
    if not annotations:
        return None
    return Converted(head, head_json, f"[{', '.join(annotations)}]")


def visual_input(head):
    """What rows of one record share: the path of an image, the images, or the video."""
    image = head.get("image")
    if isinstance(image, dict):
        return image["path"]
    return image or head.get("images") or head.get("video")


def collect(db, path, published, settings, media, excluded):
    """Every batch of a file into the database, from where the last run ended."""
    has_images = {"image", "images"} & set(published.columns.split())
    size = IMAGE_BATCH if has_images else BATCH
    done = db.execute("select n_rows from done where file = ?", [str(path)]).fetchone()
    start = done[0] if done else 0
    for number, rows in batches(path, published.columns, size, start):
        heads = []
        annotations = []
        named = {}
        skipped = Counter()
        for i, row in enumerate(rows, number):
            media.named = {}
            converted = convert(row, published.layout, settings, media, excluded, skipped)
            if not converted:
                continue             # nothing is to be fetched for it either
            named |= media.named
            key = f"{path}:{i}"
            if settings.group:
                key = json.dumps(visual_input(converted.head))
            key = hashlib.blake2b(key.encode(), digest_size=16).digest()
            heads.append((key, converted.head_json))
            annotations.append((converted.annotations_json, key))
        db.execute("begin")
        db.executemany("insert or ignore into heads(key, head) values (?, ?)", heads)
        db.executemany("insert into annotations(list, head) select ?, n from heads where key = ?",
                       annotations)
        db.executemany("insert or ignore into media(path, url) values (?, ?)", named.items())
        db.executemany("insert into skipped values (?, ?) "
                       "on conflict do update set n = n + excluded.n", skipped.items())
        db.execute("insert or replace into done values (?, ?)", [str(path), number + len(rows)])
        db.execute("commit")


def split_by_points(annotations, max_points):
    """Yields annotations of one input, in order, for records of at most `max_points` points."""
    group = []
    total = 0
    for annotation in annotations:
        n_points = len(annotation.get("points", annotation.get("boxes", ())))
        if group and total + n_points > max_points:
            yield group
            group = []
            total = 0
        group.append(annotation)
        total += n_points
    yield group


def records(db, name, max_points):
    """Yields the records; their ids follow the order of visual inputs: name-1, name-1.1, name-2."""
    for n, head in db.execute("select n, head from heads order by n"):
        head = json.loads(head)
        meta = {"meta": head.pop("meta")} if "meta" in head else {}
        annotations = []
        for (text,) in db.execute("select list from annotations where head = ? order by n", [n]):
            annotations += json.loads(text)
        for k, group in enumerate(split_by_points(annotations, max_points)):
            record_id = f"{name}-{n}.{k}" if k else f"{name}-{n}"
            yield {"id": record_id, **head, "annotations": group, **meta}


def write(db, out, name, max_points, media):
    """records.jsonl and urls.txt, complete or not at all -> the counts of the last line."""
    db.execute("create index if not exists annotations_of on annotations(head)")
    skipped = dict(db.execute("select reason, n from skipped order by reason"))
    counts = {"records": 0, "annotations": 0, "skipped": skipped, "urls": 0, "missing_media": 0}
    with open(out / "records.jsonl.draft", "w", encoding="utf-8", newline="\n") as lines:
        for record in records(db, name, max_points):
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
            counts["records"] += 1
            counts["annotations"] += len(record["annotations"])
    with open(out / "urls.txt.draft", "w", encoding="utf-8", newline="\n") as lines:
        for path, url in db.execute("select path, url from media order by n"):
            if url:
                lines.write(f"{url}\t{path}\n")
                counts["urls"] += 1
            if not (media.root / path).exists():
                counts["missing_media"] += 1
    for file in ("urls.txt", "records.jsonl"):
        (out / f"{file}.draft").replace(out / file)
    return counts
