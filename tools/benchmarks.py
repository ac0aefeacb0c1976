"""Published benchmarks: their files as published to records, and a table of the scores beside the
published ones (docs/training.md, "Published benchmarks").

    name          set on the Hub              what is read
    pixmo-count   allenai/pixmo-count         parquet of the split test; images by URL
    pixmo-points  allenai/pixmo-points-eval   the same, with a mask for each point
    countbench    vikhyatk/CountBenchQA       parquet of the split test, images inside
    point-bench   PointArena/pointarena-data  data.json, selected_images/, selected_masks/

A row becomes a record with one question:

    row       {"image_url": u, "label": "Sheep", "count": 3}
    record    {"id": "pixmo-count-1", "image": {"path": sha256 of u, "url": u}, "annotations": [
                  {"type": "count", "style": "point_count",
                   "question": "How many sheep are there?", "count": 3}]}
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation import point_bench
from records.errors import Unreadable, short_repr, warn
from records.image import header, open_image
from records.reader import Records, check
from tools.prepare.annotations import Skip, xy_points
from tools.prepare.files import check_columns, parquet_file, source_files
from tools.prepare.media import Media
from training.config import UserError

MODELS = ("Molmo2-4B", "Molmo2-8B", "Molmo2-O-7B")
NOT_FOUND = ("-", "-", "-")          # published scores
# what a parquet column holds -> its type, in the words of type_name()
COLUMN_TYPES = {
    "text": r"string",
    "whole numbers": r"u?int\d+",
    "images": r"struct<bytes: binary, path: string>",
    "points": r"list<struct<x: (float|double), y: (float|double)>>",
    "masks": r"list<list<list<bool>>>",          # masks, rows of pixels, pixels
}
COUNT_SCORES = ("count_accuracy", "count_close")
POINT_SCORES = ("point_f1", "point_precision", "point_recall")


class Benchmark(NamedTuple):
    layout: Callable                 # (row, Media) -> image and annotation of a record, or Skip
    columns: dict                    # {name: key of COLUMN_TYPES}
    scores: tuple                    # the first is the main one
    published: tuple = NOT_FOUND     # in percent, of MODELS
    source: str = "not found"        # of the published scores
    max_new: int | None = None       # tokens of an answer at most; None: answer_limit()


@dataclass
class Loaded:
    """The rows of a benchmark that can be asked about."""
    name: str
    n_rows: int = 0
    records: list = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)     # {reason: number of rows}
    masks: dict = field(default_factory=dict)    # {record id: arrow cell, or point_bench.Target}
    missing: list = field(default_factory=list)  # image files, with the row that names each

    @property
    def masks_of(self):
        """The function that evaluate() asks for masks; None where points are not matched."""
        return self.point_masks if self.name == "pixmo-points" else None

    def point_masks(self, record, index):
        # a label without points has one mask, which is empty
        n_points = len(record["annotations"][index]["points"])
        return to_masks(self.masks[record["id"]])[:n_points]


# -------------------------------------------------------------------------------------------------
# a row -> image and annotation


def count_annotation(question, count):
    return {"type": "count", "style": "point_count", "question": question, "count": count}


def counted_label(row, media):
    """PixMo-Count. The official code draws one of many wordings, of which this is the first."""
    question = f"How many {row['label'].lower()} are there?"
    return media.image_by_url(row["image_url"]), count_annotation(question, row["count"])


def counting_question(row, media):
    """CountBench. As in the official code, images with a single channel are left out."""
    path = media.image_of_cell(row["image"])
    with open_image(media.root / path) as image:
        n_channels = len(image.getbands())
    if n_channels == 1:
        raise Skip("image with a single channel")
    return {"path": path}, count_annotation(row["question"], row["number"])


def labelled_points(row, media):
    """PixMo-Points: percent of the image, although the page of the set says pixels."""
    annotation = {"type": "point", "style": "pointing", "label": row["label"],
                  "coords": "percent", "points": xy_points(row["points"])}
    return media.image_by_url(row["image_url"]), annotation


def pointing_question(row, media):
    """Point-Bench. It has masks and no true points."""
    path = media.use(f"selected_images/{row['category']}/{row['image_filename']}")
    annotation = {"type": "point", "style": "pointing", "question": row["user_input"],
                  "coords": "percent", "points": []}
    return {"path": path}, annotation


BENCHMARKS = {
    "pixmo-count": Benchmark(
        counted_label, {"image_url": "text", "label": "text", "count": "whole numbers"},
        COUNT_SCORES),
    "pixmo-points": Benchmark(
        labelled_points,
        {"image_url": "text", "label": "text", "points": "points", "masks": "masks"},
        POINT_SCORES),
    "countbench": Benchmark(
        counting_question, {"image": "images", "question": "text", "number": "whole numbers"},
        COUNT_SCORES),
    "point-bench": Benchmark(
        pointing_question,
        dict.fromkeys(("image_filename", "mask_filename", "category", "user_input"), "text"),
        ("average", *point_bench.CATEGORIES), (67.7, 68.7, 66.5),
        "allenai/molmo2, issue 18, as corrected in April 2026", point_bench.MAX_NEW),
}


# -------------------------------------------------------------------------------------------------
# rows -> records


def load(name, source, media_folder, work):
    """The published files at `source`, a folder -> Loaded. UserError, ValueError or OSError in one
    sentence.

    media_folder: where images lie that were fetched by URL, or None. work: an empty folder for the
    records, and for images from inside the files.
    """
    by_url = "image_url" in BENCHMARKS[name].columns
    if by_url and not media_folder:
        raise UserError(f"--benchmark {name} has its images by URL: name their folder with --media")
    media = Media(media_folder if by_url else source if name == "point-bench" else work)
    loaded = Loaded(name)
    lines = []
    for path, row in rows_of(name, source):
        loaded.n_rows += 1
        try:
            record = to_record(row, loaded, media, f"{path}: row {loaded.n_rows}")
        except Skip as e:
            loaded.left_out[str(e)] += 1
        except Unreadable:
            loaded.left_out["damaged image"] += 1
        else:
            lines.append(json.dumps(record) + "\n")
    if loaded.missing:
        warn(f"{len(loaded.missing)} of {loaded.n_rows} images are missing; the first is "
             f"{loaded.missing[0]}")
    if not lines:
        raise UserError(f"{source}: none of its {loaded.n_rows} rows could be used: "
                        f"{short_repr(dict(loaded.left_out))}")
    records = Path(work) / f"{name}.jsonl"
    records.write_text("".join(lines), encoding="utf-8")
    loaded.records = list(Records(records, media.root))
    return loaded


def to_record(row, loaded, media, where):
    """One row -> its record; its masks go to loaded.masks. Skip or Unreadable if it is left out."""
    for column, value in row.items():
        if value is None:
            raise Skip(f"no {column}")
    image, annotation = BENCHMARKS[loaded.name].layout(row, media)
    record = {"id": f"{loaded.name}-{loaded.n_rows}", "image": image, "annotations": [annotation]}
    check(record, where)                         # DataError, such as points that are not percent
    file = media.root / image["path"]
    if not file.is_file():
        url = f", to be fetched from {image['url']}" if "url" in image else ""
        loaded.missing.append(f"{file} ({where}{url})")
        raise Skip("missing image")
    if "masks" in row:
        check_point_masks(row, header(file), where)
        loaded.masks[record["id"]] = row["masks"]
    if "mask_filename" in row:
        loaded.masks[record["id"]] = point_bench_target(row, header(file), media.root, where)
    return record


def check_point_masks(row, size, where):
    """One mask for each point, of the image's (width, height). Masks are checked here, before the
    hours of answers."""
    try:
        masks = to_masks(row["masks"])
    except ValueError:                           # NumPy's sentence does not name the column
        raise UserError(f"{where}: column masks: its rows differ in length") from None
    n_points = len(row["points"])
    if n_points and len(masks) != n_points:
        raise UserError(f"{where}: column masks: {len(masks)} masks, but the number of points is "
                        f"{n_points}")
    if n_points and masks.shape[1:] != size[::-1]:
        raise Skip("image of another size than its masks")


def point_bench_target(row, size, root, where):
    category = row["category"]
    if category not in point_bench.CATEGORIES:
        raise UserError(f"{where}: column category is {short_repr(category)}, which is none of "
                        f"{', '.join(point_bench.CATEGORIES)}")
    mask = root / "selected_masks" / category / row["mask_filename"]
    if not mask.is_file():
        raise UserError(f"{where}: column mask_filename: there is no file {mask}")
    point_bench.read_mask(mask)                  # ValueError if it is damaged
    return point_bench.Target(category, mask, size)


# -------------------------------------------------------------------------------------------------
# files -> rows


def rows_of(name, source):
    """Yields (path, row) of the split test; a row holds the columns of the benchmark alone."""
    columns = BENCHMARKS[name].columns
    if name == "point-bench":
        yield from point_bench_rows(Path(source) / "data.json", columns)
        return
    for path in source_files([source], "test"):
        if path.suffix != ".parquet":
            raise UserError(f"{path}: {name} is published as parquet files")
        yield from parquet_rows(path, columns)


def parquet_rows(path, columns):
    with parquet_file(path) as file:
        schema = file.schema_arrow
        check_columns(path, list(columns), schema.names)
        for column, kind in columns.items():
            found = type_name(schema.field(column).type)
            if not re.fullmatch(COLUMN_TYPES[kind], found):
                raise UserError(f"{path}: column {column} has the type {found}, not {kind}")
        table = file.read(columns=list(columns))
    # masks stay arrow cells, a bit for each pixel: Python lists would take 8 bytes
    masks = table["masks"] if "masks" in columns else None
    others = table if masks is None else table.drop_columns(["masks"])
    for number, row in enumerate(others.to_pylist()):
        if masks is not None:
            row["masks"] = masks[number] if masks[number].is_valid else None
        yield path, row


def type_name(arrow_type):
    """"list<string>" for what pyarrow may call "large_list<element: large_string not null>"."""
    return re.sub(r"\b(element|item): |\blarge_| not null", "", str(arrow_type))


def to_masks(cell):
    """An arrow cell of masks -> (n,h,w) bool."""
    masks = []
    for mask in cell.values:
        pixels = mask.values.flatten().to_numpy(zero_copy_only=False)
        masks.append(pixels.reshape(len(mask.values), -1))
    return np.array(masks, bool)


def point_bench_rows(path, columns):
    """The entries of data.json. As in the official code, those without a mask are left out."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: not JSON: {e}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: not an array of objects")
    for entry in entries:
        if "mask_filename" in entry:
            check_columns(path, list(columns), list(entry))
            row = {column: entry[column] for column in columns}
            for column, value in row.items():
                if not isinstance(value, str):
                    raise UserError(f"{path}: column {column} holds {short_repr(value)}, not text")
            yield path, row


# -------------------------------------------------------------------------------------------------
# scores


def summary(loaded, metrics, predictions):
    """Loaded and what evaluate() returned -> the last line of tools.evaluate, as a dict."""
    benchmark = BENCHMARKS[loaded.name]
    if loaded.name == "point-bench":
        scores = point_bench.score(predictions, loaded.masks)
    else:
        scores = {name: metrics[name] for name in benchmark.scores}
    left_out = Counter(loaded.left_out)
    if metrics["skipped"]:
        left_out["damaged image"] += metrics["skipped"]
    published = {}
    if benchmark.published != NOT_FOUND:
        published = dict(zip(MODELS, benchmark.published, strict=True))
    return {"benchmark": loaded.name, **scores, "questions": len(predictions),
            "rows": loaded.n_rows, "left_out": dict(left_out),
            "published": published, "source": benchmark.source}


def table(found):
    """What summary() returns -> text: a line for each score, ours and the published ones."""
    benchmark = BENCHMARKS[found["benchmark"]]
    rows = [("percent", "ours", *MODELS)]
    for name in benchmark.scores:
        ours = f"{100 * found[name]:.1f}" if name in found else "-"
        published = benchmark.published if name == benchmark.scores[0] else NOT_FOUND
        rows.append((name, ours, *published))
    lines = [f"{name:<16}{ours:>8}" + "".join(f"{score:>13}" for score in others)
             for name, ours, *others in rows]
    lines.append(f"{found['questions']} of {found['rows']} rows were asked; published scores: "
                 f"{found['source']}")
    return "\n".join(lines)
