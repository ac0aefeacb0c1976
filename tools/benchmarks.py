"""Published benchmarks (docs/evaluation.md): prints our scores beside the published scores. The
records come from `python -m tools.convert FILE OUT.jsonl --as benchmark-NAME`."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from records.errors import UserError
from tools.command import print_table

MODELS = ("Molmo2-4B", "Molmo2-8B", "Molmo2-O-7B")
PAPER = "paper, version 4"
COUNT_BINS = ("0_5", "5_10", "10_15", "15_20", "20_25", "25_60")  # true counts, of VideoCount
NOT_PUBLISHED = (None, None, None)
NEEDS = "make its records with python -m tools.convert FILE OUT.jsonl --as benchmark-"


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


def annotations_of(records):
    """-> {record id: its annotation}. A record of a benchmark has one."""
    return {record["id"]: record["annotations"][0] for record in records}


def mean_of_groups(scores):
    """[(group, score), ..] -> {group: mean score}"""
    groups = defaultdict(list)
    for group, score in scores:
        groups[group].append(score)
    return {group: round(float(np.mean(found)), 4) for group, found in groups.items()}


def score_point_bench(predictions, records):
    """Predictions of evaluate() -> {category: score}, and the mean over the categories as
    "average". The field meta of a record's annotation has its category, its mask and the size of
    its image.

    As in the official code of Molmo2 (docs/molmo2.md 13), an answer is correct if it has a point
    and all its points are in the mask. The score of a category is the share of correct answers.
    """
    annotations = annotations_of(records)
    scores = []
    for prediction in predictions:
        meta = annotations[prediction["id"]]["meta"]
        points = [(x, y) for _, _, x, y in prediction["predicted"]]
        is_right = all_in_mask(points, read_mask(meta["mask"]), meta["size"])
        scores.append((meta["category"], is_right))
    means = mean_of_groups(scores)
    return {"average": round(float(np.mean(list(means.values()))), 4), **means}


def score_video_counts(predictions, records):
    """Predictions of evaluate() -> {"accuracy_animal": the share of right counts in this category,
    "accuracy_0_5": their share where the true count is at least 0 and below 5, ..}"""
    annotations = annotations_of(records)
    scores = []
    for prediction in predictions:
        annotation = annotations[prediction["id"]]
        in_bin = COUNT_BINS[min(annotation["count"] // 5, 5)]
        for group in (annotation["meta"]["category"], in_bin):
            scores.append((f"accuracy_{group}", prediction["count_accuracy"]))
    return mean_of_groups(scores)


class Benchmark(NamedTuple):
    # {score: published values of MODELS in percent}; the first is the main score
    scores: dict
    source: str  # of the published values
    score: Callable | None = None  # (predictions, records) -> scores beside those of evaluate()
    max_new: int | None = None  # maximum number of tokens in an answer; None: answer_limit()


BENCHMARKS = {
    "pixmo-count": Benchmark({
        "count_accuracy": (88.1, 88.5, 88.9),
        "count_close": NOT_PUBLISHED,
        "count_valid": NOT_PUBLISHED,
    }, f"{PAPER}, Table 6"),
    "pixmo-points": Benchmark({
        "point_f1": (None, 85.2, None),
        "point_precision": NOT_PUBLISHED,
        "point_recall": NOT_PUBLISHED,
        "point_valid": NOT_PUBLISHED,
    }, "release page of MolmoPoint, March 2026"),
    "countbench": Benchmark({
        "count_accuracy": (93.9, 93.7, 95.1),
        "count_close": NOT_PUBLISHED,
        "count_valid": NOT_PUBLISHED,
    }, f"{PAPER}, Table 6"),
    "point-bench": Benchmark({
        "average": (67.7, 68.7, 66.5),
        "affordable": (82.3, 84.8, 81.8),
        "counting": (71.4, 71.4, 72.4),
        "reasoning": (72.0, 71.5, 69.4),
        "spatial": (71.8, 71.3, 69.7),
        "steerable": (41.0, 44.5, 39.0),
    }, f"{PAPER}, Table 7", score_point_bench, max_new=256),
    "molmo2-videopoint": Benchmark({
        "video_point_f1": (39.9, 38.4, 35.8),
        "video_point_precision": (39.4, 38.7, 37.9),
        "video_point_recall": (42.7, 39.3, 35.8),
        "video_point_valid": NOT_PUBLISHED,
    }, f"{PAPER}, Table 3"),
    "molmo2-videocount": Benchmark({
        "count_accuracy": (34.3, 35.5, 33.2),
        "count_close": (56.1, 53.3, 50.5),
        "count_valid": NOT_PUBLISHED,
        "accuracy_action/event": (51.7, 50.0, 50.0),
        "accuracy_animal": (59.2, 69.4, 63.3),
        "accuracy_object": (29.1, 29.6, 27.5),
        "accuracy_0_5": (58.0, 64.4, 60.9),
        "accuracy_5_10": (31.8, 32.9, 32.9),
        "accuracy_10_15": (30.0, 26.3, 27.5),
        "accuracy_15_20": (24.3, 25.7, 16.2),
        "accuracy_20_25": (9.5, 7.9, 6.3),
        "accuracy_25_60": (12.3, 7.0, 8.8),
    }, f"{PAPER}, Tables 3, 16 and 17", score_video_counts),
    "molmo2-videotrack": Benchmark({
        "track_f1": (57.5, 57.1, 54.2),
        "track_precision": NOT_PUBLISHED,
        "track_recall": NOT_PUBLISHED,
        "hota": (57.6, 57.5, 54.2),
        "det_a": NOT_PUBLISHED,
        "ass_a": NOT_PUBLISHED,
    }, f"{PAPER}, Table 5"),
}


def summary(name, records, metrics, predictions):
    """The result of evaluate() -> the last line of tools.evaluate, a dict. `published` has the
    values of the main score."""
    benchmark = BENCHMARKS[name]
    found = metrics
    if benchmark.score:
        found = metrics | benchmark.score(predictions, records)
    main = next(iter(benchmark.scores.values()))
    published = {model: value for model, value in zip(MODELS, main, strict=True) if value}
    scores = {score: found[score] for score in benchmark.scores if score in found}
    if not scores:
        raise UserError(f"{name} has none of the scores of these records: {NEEDS}{name}")
    return {"benchmark": name, **scores, "questions": len(predictions), "cut": metrics["cut"],
            "records": len(records), "skipped": metrics["skipped"],
            "published": published, "source": benchmark.source}


def check_records(name, records):
    """UserError if records lack what the score of a benchmark needs."""
    annotations = [a for record in records for a in record["annotations"]]
    if BENCHMARKS[name].score and not all("meta" in annotation for annotation in annotations):
        raise UserError(f"the annotations of {name} need 'meta': {NEEDS}{name}")


def print_scores(found):
    """Prints the result of summary() as a table: our scores beside the published scores."""
    rows = {}
    for name, published in BENCHMARKS[found["benchmark"]].scores.items():
        if name in found:
            rows[name] = {"ours": 100 * found[name], **dict(zip(MODELS, published, strict=True))}
    print_table("percent", rows)
    print(f"{found['questions']} of {found['records']} records were evaluated; "
          f"published scores: {found['source']}")
