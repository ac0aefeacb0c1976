"""Published benchmarks (docs/evaluation.md): converts their files to records with one question
each, and prints our scores beside the published scores. BENCHMARKS lists the differences."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from records.errors import UserError, explained, plural
from records.media import image_size, open_image
from records.reader import Records
from tools import video_benchmarks
from tools.command import print_table
from tools.prepare.annotations import require, xy_points
from tools.prepare.collect import count_skips
from tools.prepare.media import Media
from tools.prepare.rows import check_columns, open_parquet, read_rows, source_files

COUNT_SCORES = ("count_accuracy", "count_close", "count_valid")
POINT_SCORES = ("point_f1", "point_precision", "point_recall", "point_valid")
# of Point-Bench
CATEGORIES = ("affordable", "counting", "reasoning", "spatial", "steerable")
VIDEO_POINT_SCORES = tuple(f"video_{name}" for name in POINT_SCORES)
TRACK_SCORES = ("track_f1", "track_precision", "track_recall", "hota", "det_a", "ass_a")
TABLE_3 = "paper, version 4, Table 3"
TABLE_6 = "paper, version 4, Table 6"


def read_tables(source, columns, split="test"):
    for path in source_files([source], split):
        yield from read_rows(path, columns)


def read_tables_with_masks(source, columns):
    """As read_tables, but the masks stay in an Arrow cell, which needs one bit per pixel. Python
    lists would need 8 bytes."""
    for path in source_files([source], "test"):
        with open_parquet(path) as file:
            check_columns(path, ["masks"], file.schema_arrow.names)
            with explained(path):
                cells = file.read(columns=["masks"])["masks"]
        for row, masks in zip(read_rows(path, columns), cells, strict=False):
            yield row | {"masks": masks}


def read_rows_with_a_mask(source, columns):
    """The entries of data.json. Entries without a mask are skipped, as in the official code."""
    for row in read_rows(Path(source) / "data.json", columns):
        if "mask_filename" in row:
            yield row


# Layouts: an entry (row) and the Media folder -> its image, or {"video": ..}, its annotation, and
# what else answers are compared with. An entry without an image, or with a mask that does not fit,
# is skipped here, because the model needs hours to generate the answers.


def count_question(question, count):
    return {"type": "count", "style": "point_count", "question": question, "count": count}


def counted_label(row, media):
    """PixMo-Count. The official code has many wordings of the question; this is the first one."""
    question = f"How many {row['label'].lower()} are there?"
    return media.by_url(row["image_url"]), count_question(question, row["count"]), None


def counting_question(row, media):
    """CountBench. Images with a single channel are skipped, as in the official code."""
    path = media.image(row["image"])
    with open_image(media.root / path) as image:
        n_channels = len(image.getbands())
    require(n_channels > 1, "image with a single channel")
    return {"path": path}, count_question(row["question"], row["number"]), None


def labelled_points(row, media):
    """PixMo-Points. Coordinates are in percent, although the page of the set says pixels. The
    masks, one for each point, are an Arrow cell."""
    points = xy_points(row["points"])
    annotation = {"type": "point", "style": "pointing", "label": row["label"],
                  "coords": "percent", "points": points}
    image = media.by_url(row["image_url"])
    width, height = image_size(media.root / image["path"])
    require(row["masks"].is_valid, "no masks")
    fit = not points or to_masks(row["masks"]).shape == (len(points), height, width)
    require(fit, "masks that do not fit the points and the image")
    return image, annotation, row["masks"]


def pointing_question(row, media):
    """Point-Bench. It has no true points. Answers are compared with (category, mask file, size)."""
    category = row["category"]
    require(category in CATEGORIES, f"category {category}")
    annotation = {"type": "point", "style": "pointing", "question": row["user_input"],
                  "coords": "percent", "points": []}
    path = f"selected_images/{category}/{row['image_filename']}"
    mask = media.root / "selected_masks" / category / row["mask_filename"]
    size = image_size(media.root / path)
    read_mask(mask)
    return {"path": path}, annotation, (category, mask, size)


def to_masks(cell):
    """An Arrow cell with a list of masks, each a list of pixel rows -> (n,h,w) bool."""
    masks = []
    for mask in cell.values:
        pixels = mask.values.flatten().to_numpy(zero_copy_only=False)
        masks.append(pixels.reshape(len(mask.values), -1))
    return np.array(masks, bool)


def read_mask(path):
    """An image file -> (h,w) bool, true if any channel of the pixel is above 127."""
    with Image.open(path) as image:
        pixels = np.array(image)
    return pixels > 127 if pixels.ndim == 2 else (pixels > 127).any(axis=2)


def all_in_mask(points, mask, size):
    """Is there at least one point (x, y), and is every point, cut to whole pixels, in the mask?
    size: (width, height) of the image. Some masks are smaller than their image."""
    width = min(size[0], mask.shape[1])
    height = min(size[1], mask.shape[0])
    hits = [0 <= int(x) < width and 0 <= int(y) < height and mask[int(y), int(x)]
            for x, y in points]
    return bool(hits) and all(hits)


def score_by_category(predictions, targets):
    """Predictions of evaluate() and {record id: (category, mask file, image size)} -> {category:
    score}, and the mean over the categories as "average".

    As in the official code of Molmo2 (docs/molmo2.md 13), an answer is correct if it has a point
    and all its points are in the mask. The score of a category is the share of correct answers.
    """
    successes = {category: [] for category in CATEGORIES}
    for prediction in predictions:
        category, mask, size = targets[prediction["id"]]
        points = [(x, y) for _, _, x, y in prediction["predicted"]]
        successes[category].append(all_in_mask(points, read_mask(mask), size))
    means = {name: float(np.mean(found)) for name, found in successes.items() if found}
    means = {"average": float(np.mean(list(means.values()))), **means}
    return {name: round(value, 4) for name, value in means.items()}


class Benchmark(NamedTuple):
    layout: Callable
    columns: str
    scores: tuple  # the first is the main score
    published: dict  # {model: main score in percent}
    source: str  # of the published scores
    read: Callable = read_tables
    media: str = "inside"  # images are inside the files; "source": beside them; "url": fetched
    has_masks: bool = False  # evaluate() matches points with masks
    score: Callable | None = None  # (predictions, truths) -> scores; None: scores of evaluate()
    max_new: int | None = None  # maximum number of tokens in an answer; None: answer_limit()


BENCHMARKS = {
    "pixmo-count": Benchmark(
        counted_label, "image_url label count", COUNT_SCORES,
        {"Molmo2-4B": 88.1, "Molmo2-8B": 88.5, "Molmo2-O-7B": 88.9}, TABLE_6, media="url"),
    "pixmo-points": Benchmark(
        labelled_points, "image_url label points", POINT_SCORES,
        {"Molmo2-8B": 85.2}, "release page of MolmoPoint, March 2026",
        read=read_tables_with_masks, media="url", has_masks=True),
    "countbench": Benchmark(
        counting_question, "image question number", COUNT_SCORES,
        {"Molmo2-4B": 93.9, "Molmo2-8B": 93.7, "Molmo2-O-7B": 95.1}, TABLE_6),
    "point-bench": Benchmark(
        pointing_question, "image_filename mask_filename? category user_input",
        ("average", *CATEGORIES),
        {"Molmo2-4B": 67.7, "Molmo2-8B": 68.7, "Molmo2-O-7B": 66.5},
        "allenai/molmo2, issue 18, as corrected in April 2026",
        read=read_rows_with_a_mask, media="source", score=score_by_category, max_new=256),
    "molmo2-videopoint": Benchmark(
        video_benchmarks.timed_points, video_benchmarks.POINTS_COLUMNS, VIDEO_POINT_SCORES,
        {"Molmo2-4B": 39.9, "Molmo2-8B": 38.4, "Molmo2-O-7B": 35.8}, TABLE_3,
        read=partial(read_tables, split="val"), media="url", has_masks=True),
    "molmo2-videocount": Benchmark(
        video_benchmarks.counted_objects, video_benchmarks.COUNT_COLUMNS, COUNT_SCORES,
        {"Molmo2-4B": 34.3, "Molmo2-8B": 35.5, "Molmo2-O-7B": 33.2}, TABLE_3,
        read=partial(read_tables, split="val"), media="url"),
    "molmo2-videotrack": Benchmark(
        video_benchmarks.tracked_objects, video_benchmarks.TRACK_COLUMNS, TRACK_SCORES,
        {"Molmo2-4B": 57.5}, "paper, version 4, Tables 4 and 5", media="url", has_masks=True),
}


@dataclass
class Loaded:
    """The entries of a benchmark that can be evaluated, as records."""
    name: str
    n_rows: int = 0
    records: list = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)  # {reason: number of skipped entries}
    truths: dict = field(default_factory=dict)  # {record id: what answers are compared with}

    @property
    def masks_of(self):
        """The function that evaluate() calls for masks; None if points are not matched."""
        return self.point_masks if BENCHMARKS[self.name].has_masks else None

    def point_masks(self, record, index):
        truth = self.truths[record["id"]]
        if "video" in record:
            return {"times": truth.times, "masks": truth}
        # a label without points has one mask, which is empty
        n_points = len(record["annotations"][index]["points"])
        return to_masks(truth)[:n_points]


def load(name, source, media_folder, work):
    """The published files in the folder `source` -> Loaded. UserError, ValueError or OSError with
    one sentence.

    media_folder: the folder of images that were fetched by URL, or None. work: an empty folder
    for the records, and for images that the published files contain.
    """
    benchmark = BENCHMARKS[name]
    root = {"inside": work, "source": source, "url": media_folder}[benchmark.media]
    if not root:
        raise UserError(f"--benchmark {name} needs --media, the folder of the fetched files")
    loaded = Loaded(name)
    media = Media(root)
    lines = []
    for row in benchmark.read(source, benchmark.columns):
        loaded.n_rows += 1
        with count_skips(loaded.left_out, "row"):
            lines.append(json.dumps(to_record(row, loaded, media)) + "\n")
    if not lines:
        raise UserError(f"{source}: {plural(loaded.n_rows, 'question')}, but none can be used: "
                        f"{dict(loaded.left_out)}")
    records = Path(work) / f"{name}.jsonl"
    records.write_text("".join(lines), encoding="utf-8")
    loaded.records = list(Records(records, media.root))
    return loaded


def to_record(row, loaded, media):
    """One entry -> its record. Stores in `loaded` what answers are compared with. Skip or
    Unreadable if the entry cannot be used."""
    benchmark = BENCHMARKS[loaded.name]
    for column in benchmark.columns.replace("?", "").split():
        require(row.get(column) is not None, f"no {column}")
    visual, annotation, truth = benchmark.layout(row, media)
    if "video" in visual:
        require((media.root / visual["video"]["path"]).is_file(), "missing file")
    else:
        image_size(media.root / visual["path"])  # Unreadable if it cannot be opened
        visual = {"image": visual}
    record_id = f"{loaded.name}-{loaded.n_rows}"
    loaded.truths[record_id] = truth
    return {"id": record_id, **visual, "annotations": [annotation]}


def summary(loaded, metrics, predictions):
    """Loaded and the result of evaluate() -> the last line of tools.evaluate, a dict."""
    benchmark = BENCHMARKS[loaded.name]
    if benchmark.score:
        scores = benchmark.score(predictions, loaded.truths)
    else:
        scores = {name: metrics[name] for name in benchmark.scores}
    left_out = loaded.left_out + Counter({"damaged image": metrics["skipped"]})
    return {"benchmark": loaded.name, **scores, "questions": len(predictions),
            "cut": metrics["cut"], "rows": loaded.n_rows, "left_out": dict(left_out),
            "published": benchmark.published, "source": benchmark.source}


def print_scores(found):
    """Prints the result of summary() as a table: our scores beside the published scores."""
    main, *others = BENCHMARKS[found["benchmark"]].scores
    rows = {main: {"ours": 100 * found[main], **found["published"]}}
    for name in others:
        if name in found:
            rows[name] = dict.fromkeys(rows[main]) | {"ours": 100 * found[name]}
    print_table("percent", rows)
    print(f"{found['questions']} of {found['rows']} entries were evaluated; "
          f"published scores: {found['source']}")
