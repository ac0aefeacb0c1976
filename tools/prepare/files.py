"""Files of a published set -> rows, a batch at a time."""

import json
import re
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from training.config import UserError

SPLITS = {"train", "validation", "val", "test"}
FILE_NUMBER = re.compile(r"-\d{5}-of-\d{5}.*")          # train-00000-of-00002.parquet


def source_files(sources, split=None):
    """The files to read, in order: those named, or all below a folder (parquet before json), of one
    split."""
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise UserError(f"{source}: no such file or folder")
        files += [source] if source.is_file() else files_in(source)
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


def files_in(folder):
    parquet = sorted(folder.rglob("*.parquet"))
    return parquet or sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")])


def batches(path, columns, size, start):
    """Yields (row number, [row, ..]) from row `start` on, at which a batch begins. columns: names
    with white space between; with a ? behind it, a column may be absent."""
    required = [name for name in columns.split() if not name.endswith("?")]
    if path.suffix == ".parquet":
        optional = [name.rstrip("?") for name in columns.split() if name.endswith("?")]
        yield from parquet_batches(path, required, optional, size, start)
    else:
        yield from json_batches(path, required, size, start)


def check_columns(path, required, found):
    missing = [name for name in required if name not in found]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}: expected "
                        f"{', '.join(required)}; found {', '.join(found) or 'none'}")


def json_batches(path, required, size, start):
    rows = read_json(path)
    number = 0
    while batch := list(islice(rows, size)):
        if number == 0:
            first = next((row for row in batch if isinstance(row, dict)), {})
            check_columns(path, required, list(first))
        if number >= start:
            yield number, batch
        number += len(batch)


def read_json(path):
    """The rows of a .jsonl, or of a .json that holds an array, or (DocVQA, TextVQA) an object
    around an array. A .jsonl line that is not JSON gives None."""
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
    if rows is None:
        raise UserError(f"{path}: not an array of rows")
    yield from rows


def coco_rows(path, coco):
    """Annotations in COCO's format -> a row per image and category, with all of its boxes, in the
    order of the annotations; boxes None where one of them is of a crowd."""
    rows = {}
    try:
        images = {image["id"]: image for image in coco["images"]}
        names = {category["id"]: category["name"] for category in coco["categories"]}
        for annotation in coco["annotations"]:
            key = annotation["image_id"], annotation["category_id"]
            image = images[key[0]]
            row = rows.setdefault(key, {"image": image["file_name"], "width": image["width"],
                                        "height": image["height"], "label": names[key[1]],
                                        "boxes": []})
            if annotation.get("iscrowd"):
                row["boxes"] = None
            elif row["boxes"] is not None:
                row["boxes"].append(annotation["bbox"])
    except (KeyError, TypeError) as e:
        raise UserError(f"{path}: not COCO annotations, {type(e).__name__}: {e}") from None
    return list(rows.values())


@contextmanager
def parquet_file(path):
    """The opened pyarrow ParquetFile; UserError without pyarrow, or where the file is damaged."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} is a parquet file, which needs pyarrow: pip install "
                        "pyarrow") from None
    try:
        yield parquet.ParquetFile(path)
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not a parquet file that can be read: {e}") from None


def parquet_batches(path, required, optional, size, start):
    with parquet_file(path) as table:
        found = table.schema_arrow.names
        check_columns(path, required, found)
        names = [name for name in (*required, *optional) if name in found]
        number = 0
        for group in range(table.num_row_groups):
            n_rows = table.metadata.row_group(group).num_rows
            if number + n_rows <= start:
                number += n_rows
                continue
            for batch in table.iter_batches(size, [group], names):
                if number >= start:
                    yield number, batch.to_pylist()
                number += len(batch)
