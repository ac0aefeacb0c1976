"""Published benchmarks (docs/evaluation.md): prints our scores beside the published scores. The
records come from `python -m tools.convert FILE OUT.jsonl --as benchmark-NAME`."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from tools.command import print_table
from tools.convert.benchmarks import CATEGORIES

COUNT_SCORES = ("count_accuracy", "count_close", "count_valid")
POINT_SCORES = ("point_f1", "point_precision", "point_recall", "point_valid")
VIDEO_POINT_SCORES = tuple(f"video_{name}" for name in POINT_SCORES)
TRACK_SCORES = ("track_f1", "track_precision", "track_recall", "hota", "det_a", "ass_a")
TABLE_3 = "paper, version 4, Table 3"
TABLE_6 = "paper, version 4, Table 6"


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


def score_by_category(predictions, records):
    """Predictions of evaluate() -> {category: score}, and the mean over the categories as
    "average". The field meta of a record's annotation has its category, its mask and the size of
    its image.

    As in the official code of Molmo2 (docs/molmo2.md 13), an answer is correct if it has a point
    and all its points are in the mask. The score of a category is the share of correct answers.
    """
    metas = {record["id"]: record["annotations"][0]["meta"] for record in records}
    successes = {category: [] for category in CATEGORIES}
    for prediction in predictions:
        meta = metas[prediction["id"]]
        points = [(x, y) for _, _, x, y in prediction["predicted"]]
        is_right = all_in_mask(points, read_mask(meta["mask"]), meta["size"])
        successes[meta["category"]].append(is_right)
    means = {name: float(np.mean(found)) for name, found in successes.items() if found}
    means = {"average": float(np.mean(list(means.values()))), **means}
    return {name: round(value, 4) for name, value in means.items()}


class Benchmark(NamedTuple):
    scores: tuple  # the first is the main score
    published: dict  # {model: main score in percent}
    source: str  # of the published scores
    score: Callable | None = None  # (predictions, records) -> scores; None: scores of evaluate()
    max_new: int | None = None  # maximum number of tokens in an answer; None: answer_limit()


BENCHMARKS = {
    "pixmo-count": Benchmark(
        COUNT_SCORES, {"Molmo2-4B": 88.1, "Molmo2-8B": 88.5, "Molmo2-O-7B": 88.9}, TABLE_6),
    "pixmo-points": Benchmark(
        POINT_SCORES, {"Molmo2-8B": 85.2}, "release page of MolmoPoint, March 2026"),
    "countbench": Benchmark(
        COUNT_SCORES, {"Molmo2-4B": 93.9, "Molmo2-8B": 93.7, "Molmo2-O-7B": 95.1}, TABLE_6),
    "point-bench": Benchmark(
        ("average", *CATEGORIES), {"Molmo2-4B": 67.7, "Molmo2-8B": 68.7, "Molmo2-O-7B": 66.5},
        "allenai/molmo2, issue 18, as corrected in April 2026", score_by_category, max_new=256),
    "molmo2-videopoint": Benchmark(
        VIDEO_POINT_SCORES, {"Molmo2-4B": 39.9, "Molmo2-8B": 38.4, "Molmo2-O-7B": 35.8}, TABLE_3),
    "molmo2-videocount": Benchmark(
        COUNT_SCORES, {"Molmo2-4B": 34.3, "Molmo2-8B": 35.5, "Molmo2-O-7B": 33.2}, TABLE_3),
    "molmo2-videotrack": Benchmark(
        TRACK_SCORES, {"Molmo2-4B": 57.5}, "paper, version 4, Tables 4 and 5"),
}


def summary(name, records, metrics, predictions):
    """The result of evaluate() -> the last line of tools.evaluate, a dict."""
    benchmark = BENCHMARKS[name]
    if benchmark.score:
        scores = benchmark.score(predictions, records)
    else:
        scores = {score: metrics[score] for score in benchmark.scores}
    return {"benchmark": name, **scores, "questions": len(predictions), "cut": metrics["cut"],
            "records": len(records), "skipped": metrics["skipped"],
            "published": benchmark.published, "source": benchmark.source}


def print_scores(found):
    """Prints the result of summary() as a table: our scores beside the published scores."""
    main, *others = BENCHMARKS[found["benchmark"]].scores
    rows = {main: {"ours": 100 * found[main], **found["published"]}}
    for name in others:
        if name in found:
            rows[name] = dict.fromkeys(rows[main]) | {"ours": 100 * found[name]}
    print_table("percent", rows)
    print(f"{found['questions']} of {found['records']} records were evaluated; "
          f"published scores: {found['source']}")
