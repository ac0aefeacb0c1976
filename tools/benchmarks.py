"""Published benchmarks: their files as published to records, and a table of the scores
beside the published ones (docs/evaluation.md). A row becomes a
record with one question.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from records.errors import plural
from records.media import image_size, open_image
from records.reader import Records
from tools.command import print_table
from tools.prepare.annotations import require, xy_points
from tools.prepare.collect import count_skips
from tools.prepare.media import Media
from tools.prepare.rows import check_columns, open_parquet, read_rows, source_files
from training.config import UserError
from weights.files import explained

COUNT_SCORES = ("count_accuracy", "count_close")
POINT_SCORES = ("point_f1", "point_precision", "point_recall")
# of Point-Bench
CATEGORIES = ("affordable", "counting", "reasoning", "spatial", "steerable")
TABLE_6 = "paper, version 4, Table 6"


class Benchmark(NamedTuple):
    layout: Callable  # (row, Media) -> image and annotation, or Skip
    columns: str
    scores: tuple  # the first is the main one
    published: dict  # {model: main score in percent}
    source: str  # of the published scores
    max_new: int | None = None  # tokens of an answer at most; None: answer_limit()


class Target(NamedTuple):
    """What an answer of Point-Bench is compared with."""
    category: str
    mask: Path
    size: tuple  # (width, height) of the image


@dataclass
class Loaded:
    """The rows of a benchmark that can be asked about."""
    name: str
    n_rows: int = 0
    records: list = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)  # {reason: rows}
    masks: dict = field(default_factory=dict)  # {id: arrow cell, or Target}

    @property
    def masks_of(self):
        """What evaluate() asks for masks; None where points are not matched."""
        return self.point_masks if self.name == "pixmo-points" else None

    def point_masks(self, record, index):
        # a label without points has one mask, which is empty
        n_points = len(record["annotations"][index]["points"])
        return to_masks(self.masks[record["id"]])[:n_points]


def count_question(question, count):
    annotation = {"type": "count", "style": "point_count", "question": question}
    return annotation | {"count": count}


def counted_label(row, media):
    """PixMo-Count, with the first of the official code's many wordings."""
    question = f"How many {row['label'].lower()} are there?"
    return media.by_url(row["image_url"]), count_question(question, row["count"])


def counting_question(row, media):
    """CountBench. The official code leaves out images with a single channel too."""
    path = media.image(row["image"])
    with open_image(media.root / path) as image:
        n_channels = len(image.getbands())
    require(n_channels > 1, "image with a single channel")
    return {"path": path}, count_question(row["question"], row["number"])


def labelled_points(row, media):
    """PixMo-Points: percent of the image, although the page of the set says pixels."""
    annotation = {"type": "point", "style": "pointing", "label": row["label"],
                  "coords": "percent", "points": xy_points(row["points"])}
    return media.by_url(row["image_url"]), annotation


def pointing_question(row, media):
    """Point-Bench. It has masks and no true points."""
    require(row["category"] in CATEGORIES, f"category {row['category']}")
    annotation = {"type": "point", "style": "pointing", "question": row["user_input"],
                  "coords": "percent", "points": []}
    path = f"selected_images/{row['category']}/{row['image_filename']}"
    return {"path": path}, annotation


BENCHMARKS = {
    "pixmo-count": Benchmark(
        counted_label, "image_url label count", COUNT_SCORES,
        {"Molmo2-4B": 88.1, "Molmo2-8B": 88.5, "Molmo2-O-7B": 88.9}, TABLE_6),
    "pixmo-points": Benchmark(
        labelled_points, "image_url label points", POINT_SCORES,
        {"Molmo2-8B": 85.2}, "release page of MolmoPoint, March 2026"),
    "countbench": Benchmark(
        counting_question, "image question number", COUNT_SCORES,
        {"Molmo2-4B": 93.9, "Molmo2-8B": 93.7, "Molmo2-O-7B": 95.1}, TABLE_6),
    "point-bench": Benchmark(
        pointing_question, "image_filename mask_filename? category user_input",
        ("average", *CATEGORIES),
        {"Molmo2-4B": 67.7, "Molmo2-8B": 68.7, "Molmo2-O-7B": 66.5},
        "allenai/molmo2, issue 18, as corrected in April 2026", max_new=256),
}


def load(name, source, media_folder, work):
    """The published files at `source`, a folder -> Loaded. UserError, ValueError or
    OSError in one sentence.

    media_folder: where images lie that were fetched by URL, or None. work: an empty
    folder for the records, and for images from inside the files.
    """
    by_url = "image_url" in BENCHMARKS[name].columns
    if by_url and not media_folder:
        raise UserError(f"--benchmark {name} needs --media, the folder of the fetched images")
    media = Media(media_folder if by_url else source if name == "point-bench" else work)
    loaded = Loaded(name)
    lines = []
    for row in read_files(name, source):
        loaded.n_rows += 1
        with count_skips(loaded.left_out, "row"):
            lines.append(json.dumps(to_record(row, loaded, media)) + "\n")
    if not lines:
        raise UserError(f"{source}: {plural(loaded.n_rows, 'row')}, and none could be used: "
                        f"{dict(loaded.left_out)}")
    records = Path(work) / f"{name}.jsonl"
    records.write_text("".join(lines), encoding="utf-8")
    loaded.records = list(Records(records, media.root))
    return loaded


def read_files(name, source):
    """Yields the rows. Those of pixmo-points hold their masks as an arrow cell, a
    bit for each pixel, for which Python lists would take 8 bytes."""
    columns = BENCHMARKS[name].columns
    if name == "point-bench":
        path = Path(source) / "data.json"
        for row in read_rows(path, columns):
            if "mask_filename" in row:  # as in the official code
                yield row
        return
    for path in source_files([source], "test"):
        cells = repeat(None)
        if name == "pixmo-points":
            with open_parquet(path) as file:
                check_columns(path, ["masks"], file.schema_arrow.names)
                with explained(path):
                    cells = file.read(columns=["masks"])["masks"]
        for row, masks in zip(read_rows(path, columns), cells, strict=False):
            yield row | {"masks": masks}


def to_masks(cell):
    """An arrow cell of masks, a list of rows of pixels -> (n,h,w) bool."""
    masks = []
    for mask in cell.values:
        pixels = mask.values.flatten().to_numpy(zero_copy_only=False)
        masks.append(pixels.reshape(len(mask.values), -1))
    return np.array(masks, bool)


def to_record(row, loaded, media):
    """One row -> its record; its masks go to loaded.masks. Skip or Unreadable if it is
    left out."""
    benchmark = BENCHMARKS[loaded.name]
    for column in benchmark.columns.replace("?", "").split():
        require(row.get(column) is not None, f"no {column}")
    image, annotation = benchmark.layout(row, media)
    record_id = f"{loaded.name}-{loaded.n_rows}"
    # Image and masks are checked here, before the hours of answers.
    width, height = image_size(media.root / image["path"])
    if loaded.name == "pixmo-points":
        require(row["masks"].is_valid, "no masks")
        n_points = len(annotation["points"])
        shape = to_masks(row["masks"]).shape
        require(not n_points or shape == (n_points, height, width),
                "masks that do not fit the points and the image")
        loaded.masks[record_id] = row["masks"]
    if loaded.name == "point-bench":
        mask = media.root / "selected_masks" / row["category"] / row["mask_filename"]
        read_mask(mask)
        loaded.masks[record_id] = Target(row["category"], mask, (width, height))
    return {"id": record_id, "image": image, "annotations": [annotation]}


def read_mask(path):
    """An image file -> (h,w) bool, true where a channel is above 127."""
    with Image.open(path) as image:
        pixels = np.array(image)
    return pixels > 127 if pixels.ndim == 2 else (pixels > 127).any(axis=2)


def all_in_mask(points, mask, size):
    """Is there a point (x, y), and does every point, cut to whole pixels, lie in the
    mask? Some masks are smaller than their image, whose size is (width, height)."""
    width = min(size[0], mask.shape[1])
    height = min(size[1], mask.shape[0])
    hits = [0 <= int(x) < width and 0 <= int(y) < height and mask[int(y), int(x)]
            for x, y in points]
    return bool(hits) and all(hits)


def score_point_bench(predictions, targets):
    """Predictions of evaluate() and {record id: Target} -> {"average" or category: score}.

    As in the official code of Molmo2 (docs/molmo2.md 13): the share of successes, answers
    with a point and all points in the mask, and the mean of the categories asked about.
    """
    successes = {category: [] for category in CATEGORIES}
    for prediction in predictions:
        target = targets[prediction["id"]]
        points = [(x, y) for _, _, x, y in prediction["predicted"]]
        success = all_in_mask(points, read_mask(target.mask), target.size)
        successes[target.category].append(success)
    means = {name: float(np.mean(found)) for name, found in successes.items() if found}
    means = {"average": float(np.mean(list(means.values()))), **means}
    return {name: round(value, 4) for name, value in means.items()}


def summary(loaded, metrics, predictions):
    """Loaded and what evaluate() returned -> the last line of tools.evaluate, a dict."""
    benchmark = BENCHMARKS[loaded.name]
    if loaded.name == "point-bench":
        scores = score_point_bench(predictions, loaded.masks)
    else:
        scores = {name: metrics[name] for name in benchmark.scores}
    left_out = loaded.left_out + Counter({"damaged image": metrics["skipped"]})
    return {"benchmark": loaded.name, **scores, "questions": len(predictions),
            "rows": loaded.n_rows, "left_out": dict(left_out),
            "published": benchmark.published, "source": benchmark.source}


def print_scores(found):
    """Prints what summary() returns: a row for each score, ours and the published ones."""
    main, *others = BENCHMARKS[found["benchmark"]].scores
    rows = {main: {"ours": 100 * found[main], **found["published"]}}
    for name in others:
        if name in found:
            rows[name] = dict.fromkeys(rows[main]) | {"ours": 100 * found[name]}
    print_table("percent", rows)
    print(f"{found['questions']} of {found['rows']} rows were evaluated; "
          f"published scores: {found['source']}")
