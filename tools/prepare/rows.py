"""Files of a published set -> rows."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

from training.config import UserError

BATCH = 32                           # rows of a parquet file in memory; images may lie inside
SPLITS = {"train", "validation", "val", "test"}
FILE_NUMBER = re.compile(r"-\d{5}-of-\d{5}.*")          # train-00000-of-00002.parquet


def source_files(sources, split=None):
    """The files to read, in order: those named, or all below a folder (parquet before
    json), of one split."""
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise UserError(f"{source}: no such file or folder")
        if source.is_file():
            files.append(source)
        else:
            tables = sorted(source.rglob("*.parquet"))
            files += tables or sorted([*source.rglob("*.json"), *source.rglob("*.jsonl")])
    splits = {path: FILE_NUMBER.sub("", path.stem) for path in files}
    found = SPLITS & set(splits.values())
    if split:
        files = [path for path in files if splits[path] == split]
    elif len(found) > 1:
        raise UserError(f"{sources[0]} holds the splits {', '.join(sorted(found))}: choose with "
                        "--split")
    if not files:
        of_split = f" of the split '{split}'" if split else ""
        raise UserError(f"{' '.join(sources)}: no .parquet, .json or .jsonl file{of_split}")
    return files


def read_rows(path, columns):
    """Yields the rows of a file, dicts. columns: names with white space between; a
    column with a ? behind its name may be absent."""
    names = columns.split()
    required = [name for name in names if not name.endswith("?")]
    if path.suffix == ".parquet":
        with parquet_file(path) as table:
            found = table.schema_arrow.names
            check_columns(path, required, found)
            wanted = [name.rstrip("?") for name in names if name.rstrip("?") in found]
            for batch in table.iter_batches(BATCH, columns=wanted):
                yield from batch.to_pylist()
        return
    first = None
    for row in read_json(path):
        if first is None and isinstance(row, dict):
            first = row
            check_columns(path, required, list(first))
        yield row


def check_columns(path, required, found):
    missing = [name for name in required if name not in found]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}: expected "
                        f"{', '.join(required)}; found {', '.join(found) or 'none'}")


def read_json(path):
    """The rows of a .jsonl, or of a .json that holds an array, or (DocVQA, TextVQA) an
    object around an array. A .jsonl line that is not JSON gives None."""
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8-sig", errors="replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None
        return
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise UserError(f"{path}: not JSON: {e}") from None
    if isinstance(rows, dict) and {"images", "annotations", "categories"} <= rows.keys():
        rows = coco_rows(path, rows)
    elif isinstance(rows, dict):
        rows = next((value for value in rows.values() if isinstance(value, list)), None)
    if not isinstance(rows, list):
        raise UserError(f"{path}: not an array of rows")
    yield from rows


def coco_rows(path, coco):
    """Annotations in COCO's format -> a row per image and category, with all of its
    boxes, in the order of the annotations; boxes None where one of them is of a
    crowd."""
    rows = {}
    try:
        images = {image["id"]: image for image in coco["images"]}
        names = {category["id"]: category["name"] for category in coco["categories"]}
        for annotation in coco["annotations"]:
            key = annotation["image_id"], annotation["category_id"]
            boxes = rows.setdefault(key, [])
            boxes.append(None if annotation.get("iscrowd") else annotation["bbox"])
        return [{"image": images[image]["file_name"], "width": images[image]["width"],
                 "height": images[image]["height"], "label": names[category],
                 "boxes": None if None in boxes else boxes}
                for (image, category), boxes in rows.items()]
    except (KeyError, TypeError) as e:
        raise UserError(f"{path}: not COCO annotations, {type(e).__name__}: {e}") from None


@contextmanager
def parquet_file(path):
    """The opened pyarrow ParquetFile; UserError without pyarrow, or where the file is
    damaged."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} is a parquet file, which needs pyarrow: pip install -r "
                        "requirements-extras.txt") from None
    try:
        yield parquet.ParquetFile(path)
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not a parquet file that can be read: {e}") from None
