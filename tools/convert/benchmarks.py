"""The layouts of published benchmarks (docs/evaluation.md): each record has one question.

What an answer is compared with is in the record, or a mask for `tools.evaluate --masks`. An entry
without its image, or with a mask that does not fit, is skipped here, because the model needs hours
to generate the answers.
"""

from functools import partial

import numpy as np

from records.media import image_size, open_image
from tools.convert import make
from tools.convert.layout import Layout
from tools.convert.make import skip_unless, xy_points

# of Point-Bench
CATEGORIES = ("affordable", "counting", "reasoning", "spatial", "steerable")


def count_question(question, count):
    return {"type": "count", "style": "point_count", "question": question, "count": count}


def counted_label(row, job):
    """PixMo-Count. The official code has many wordings of the question; this is the first one."""
    question = f"How many {row['label'].lower()} are there?"
    image = job.media.by_url(row["image_url"])
    image_size(job.media.root / image["path"])
    return {"image": image}, [count_question(question, make.whole(row["count"]))]


def counting_question(row, job):
    """CountBench. Images with a single channel are skipped, as in the official code."""
    path = job.media.image(row["image"])
    with open_image(job.media.root / path) as image:
        n_channels = len(image.getbands())
    skip_unless(n_channels > 1, "image with a single channel")
    return {"image": path}, [count_question(row["question"], make.whole(row["number"]))]


def labelled_points(row, job):
    """PixMo-Points. Coordinates are in percent, although the page of the set says pixels. There is
    one mask for each point; a label without points has one mask, which is empty."""
    image = job.media.by_url(row["image_url"])
    width, height = image_size(job.media.root / image["path"])
    points = xy_points(row["points"])
    skip_unless(row["masks"] is not None, "no masks")
    masks = np.array(row["masks"], bool)
    if not points:
        masks = np.zeros((0, height, width), bool)
    skip_unless(masks.shape == (len(points), height, width),
                "masks that do not fit the points and the image")
    annotation = make.point(points, "percent", row["label"], style="pointing")
    return {"image": image, "masks": masks}, [annotation]


def pointing_question(row, job):
    """Point-Bench. It has no true points: an answer is compared with a mask. Entries without one
    are skipped, as in the official code."""
    category = row["category"]
    skip_unless(category in CATEGORIES, f"category {category}")
    skip_unless(row.get("mask_filename"), "no mask")
    path = f"selected_images/{category}/{row['image_filename']}"
    mask = job.media.root / "selected_masks" / category / row["mask_filename"]
    size = image_size(job.media.root / path)
    image_size(mask)
    meta = {"category": category, "mask": str(mask.absolute()), "size": size}
    annotation = make.point([], "percent", None, row["user_input"], style="pointing", meta=meta)
    return {"image": path}, [annotation]


benchmark = partial(Layout, published=True, many=True, split="test")
BENCHMARKS = {
    "benchmark-pixmo-count": benchmark(
        counted_label, "image_url label count -points -image_sha256"),
    # one row at a time, since a pixel of a mask needs 8 bytes
    "benchmark-pixmo-points": benchmark(labelled_points, "image_url label points masks", batch=1),
    "benchmark-countbench": benchmark(counting_question, "image question number"),
    "benchmark-point-bench": benchmark(
        pointing_question, "image_filename mask_filename? category user_input -count", split=None),
}
