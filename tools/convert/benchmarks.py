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
from tools.convert.videos import belongs, has_position, tracked_video

# of Point-Bench
CATEGORIES = ("affordable", "counting", "reasoning", "spatial", "steerable")
MASKS_PER_SECOND = 2  # of Molmo2-VideoPoint


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


def video_file(row, job, **clip):
    name = row["video_id"]
    head = job.media.video(f"{job.media.stem(name)}_2fps", name, **clip)
    path = job.media.root / head["video"]["path"]
    skip_unless(path.is_file(), "missing file", str(path))
    return head


def run_lengths(n_objects, masks):
    """masks: [(object, seconds, run lengths in the form of COCO), ..] -> the masks of a record."""
    return {"objects": n_objects,
            "masks": [[k, t, {"size": rle["size"], "counts": text_of_counts(rle["counts"])}]
                      for k, t, rle in masks]}


def text_of_counts(counts):
    return counts.decode() if isinstance(counts, bytes) else counts


def timed_points(row, job):
    """Molmo2-VideoPoint. Every point has masks at several times. The wording of the question is the
    official one."""
    points = [{"t": t, "x": point["x"], "y": point["y"]}
              for t, point in zip(row["two_fps_timestamps"], row["points"], strict=True)]
    skip_unless(len(row["masks"]) == len(points), "masks that do not fit the points")
    masks = [(k, mask["frame_id"] / MASKS_PER_SECOND, mask["rle"])
             for k, of_point in enumerate(row["masks"]) for mask in of_point]
    label = row["label"]
    annotation = make.point(
        points, "pixel", label, f'How many "{label}" are there in the video?',
        [row["width"], row["height"]], style="video_point_count")
    return video_file(row, job) | {"masks": run_lengths(len(points), masks)}, [annotation]


def counted_objects(row, job):
    """Molmo2-VideoCount: a question with a number, about a clip."""
    annotation = make.count(row["count"], row["label"], row["question"])
    head = video_file(row, job, start=row["clip_start"], end=row["clip_end"])
    return head, [annotation | {"style": "video_count", "meta": {"category": row["category"]}}]


def tracked_objects(row, job):
    """Molmo2-VideoTrack. Points and masks are given for every frame of the clip, and one frame per
    second is scored, as in the official code."""
    step = int(row["fps"])
    paths = {path["object_id"]: path["points"] for path in row["points"]
             if belongs(path["object_id"], row)}
    points = []
    for k, object_id in enumerate(row["mask_id"]):
        for frame, place in enumerate(paths[object_id]):
            if frame % step == 0 and has_position(place):
                points.append({"t": frame / row["fps"], "id": k, "x": place[0], "y": place[1]})
    annotation = {"type": "track", "label": row["exp"], "coords": "pixel", "fps": 1,
                  "size": [row["w"], row["h"]], "points": points}
    objects = {k: n for n, k in enumerate(sorted({point["id"] for point in points}))}
    of_object = {found["object_id"]: found["masks"] for found in row["masks"]}
    masks = [(n, frame / row["fps"], mask) for k, n in objects.items()
             for frame, mask in enumerate(of_object[row["mask_id"][k]])
             if frame % step == 0 and mask]
    head = tracked_video(row, job)
    path = job.media.root / head["video"]["path"]
    skip_unless(path.is_file(), "missing file", str(path))
    return head | {"masks": run_lengths(len(objects), masks)}, [annotation]


benchmark = partial(Layout, published=True, many=True, split="test")
BENCHMARKS = {
    "benchmark-pixmo-count": benchmark(
        counted_label, "image_url label count -points -image_sha256"),
    # one row at a time, since a pixel of a mask needs 8 bytes
    "benchmark-pixmo-points": benchmark(labelled_points, "image_url label points masks", batch=1),
    "benchmark-countbench": benchmark(counting_question, "image question number"),
    "benchmark-point-bench": benchmark(
        pointing_question, "image_filename mask_filename? category user_input -count", split=None),
    "benchmark-molmo2-videopoint": benchmark(
        timed_points, "video_id two_fps_timestamps points masks label width height", split="val"),
    "benchmark-molmo2-videocount": benchmark(
        counted_objects, "video_id question label count clip_start clip_end category", split="val"),
    "benchmark-molmo2-videotrack": benchmark(
        tracked_objects, "video clip exp fps points masks mask_id w h video_dataset"),
}
