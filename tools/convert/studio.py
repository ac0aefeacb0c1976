"""The layout of Label Studio's JSON export: rectangles, polygons, points, choices and texts.

    {"id": 1, "data": {"image": "/data/upload/1/9.jpg"}, "annotations": [{"result": [
        {"id": "x", "type": "rectanglelabels", "to_name": "image", "from_name": "label",
         "original_width": 640, "original_height": 480,
         "value": {"x": 10, "y": 20, "width": 5, "height": 5, "rotation": 0,
                   "rectanglelabels": ["cup"]}}]}]}

Coordinates are percent of the image's sides. A region can have several results with one id: its
shape, its labels, and texts or choices about it. Results about the whole image have no region.
"""

import math
from itertools import chain
from os.path import isfile
from urllib.parse import parse_qs, unquote, urlsplit

from records.check import require
from records.errors import Unreadable
from tools.convert.boxes import around, located
from tools.convert.make import UNIT, skip_unless, text_of
from tools.convert.media import MEDIA_SUFFIXES, VIDEO_SUFFIXES
from tools.convert.report import SHAPE_ERRORS

ANSWERS = {"choices": "choices", "textarea": "text", "number": "number", "rating": "rating"}
SHAPES = ("rectangle", "polygon", "keypoint", "")  # kinds of regions; "": any of them
# fields of a task that say nothing about its medium
UNUSED = (
    "file_upload", "drafts", "predictions", "agreement", "meta", "created_at", "updated_at",
    "inner_id", "project", "total_annotations", "cancelled_annotations", "total_predictions",
    "comment_count", "updated_by", "unresolved_comment_count", "last_comment_updated_at",
    "comment_authors")


def read_task(row, job):
    data = row["data"]
    path = find_medium(data, job)
    tasks = [task for task in (*row.get("annotations", ()), *row.get("completions", ()))
             if not task.get("was_cancelled") and not task.get("skipped")]
    tasks = [task for task in tasks if task.get("ground_truth")] or tasks
    skip_unless(tasks, "no annotation", "nobody has annotated it; 'predictions' are not read")
    skip_unless(len(tasks) == 1, "several annotations", f"{len(tasks)} are not cancelled; keep "
                "one, or mark it as ground truth in Label Studio")
    regions = {}  # {id of a region: its results}
    made = []
    for result in tasks[0]["result"]:
        kind = result["type"]
        value = result.get("value", {})
        if kind.endswith("labels") or kind in SHAPES:
            regions.setdefault(result.get("id", len(regions)), []).append(result)
        elif {"x", "points", "rle"} & value.keys() or kind == "relation":
            job.report.count_unused(f"{kind} of a region", value)
        else:
            require(kind in ANSWERS, "a result", f"'{kind}' is not supported "
                    "(docs/boxes.md#label-studio)")
            made += about_image(result, value[ANSWERS[kind]], data)
    found = [place for results in regions.values() for place in read_region(results)]
    if path.lower().endswith(VIDEO_SUFFIXES):
        require(not found, "a region", "regions of a video are not supported")
        return {"video": path}, made
    if made and not found:
        return {"image": path}, made
    head, placed = located(job, path, UNIT, found)
    return head, made + placed


def find_medium(data, job):
    """The one image or video of a task -> its path. The folder --media may begin at any folder of
    the path, since Label Studio renames and moves the files."""
    found = set()
    for text in filter(text_of, data.values()):
        address = urlsplit(text)
        path = parse_qs(address.query).get("d", [unquote(address.path)])[0]
        if path.lower().endswith(MEDIA_SUFFIXES):
            found.add(path)
    skip_unless(len(found) == 1, "not one medium", f"'data' has the paths of {len(found)} images "
                "and videos, but must have one")
    parts = found.pop().strip("/").split("/")
    paths = ["/".join(parts[k:]) for k in range(len(parts))]
    path = next((path for path in paths if isfile(job.media.root / path)), paths[-1])
    known = job.found.setdefault(path, paths[0])
    skip_unless(known == paths[0], "several files with the name of the row",
                f"{path} may be {known} or {paths[0]}; keep the folders of the files in --media")
    return path


def about_image(result, cell, data):
    """A choice, number or text -> annotations. The question is the text of the task to which the
    result belongs. Without it, a text is a caption, and the question of a choice is its name."""
    texts = [str(text) for text in (cell if isinstance(cell, list) else [cell])]
    question = text_of(data.get(result.get("to_name")))
    if question and urlsplit(question).path.lower().endswith(MEDIA_SUFFIXES):
        question = None
    if result["type"] == "textarea" and not question:
        return [{"type": "caption", "text": text} for text in texts]
    question = question or result["from_name"].replace("_", " ")
    return [{"type": "qa", "question": question, "answer": ", ".join(texts)}]


def read_region(results):
    """The results of one region -> [(label, place), ..], one for each of its labels."""
    labels = []
    for result in results:
        value = result["value"]
        labels += value.get(result["type"], value.get("labels", ()))
    try:
        place = place_of(results[0])
    except Unreadable as error:
        place = error
    except SHAPE_ERRORS as error:
        place = Unreadable("a shape", f"it cannot be read: {type(error).__name__}: {error}")
    return [(label, place) for label in dict.fromkeys(labels or [None])]


def place_of(result):
    """-> a point or a box, see make.placed, in fractions of the sides."""
    value = result["value"]
    kind = result["type"].removesuffix("labels")
    skip_unless(kind in SHAPES, "a shape", f"'{kind}' is not supported; use rectangles, polygons "
                "or key points")
    skip_unless(not result.get("image_rotation"), "a shape",
                "its image was turned in Label Studio")
    if "points" in value:
        return [side / 100 for side in around(chain.from_iterable(value["points"]))]
    if kind == "keypoint":
        return [value["x"] / 100, value["y"] / 100]
    sides = [value[side] / 100 for side in ("width", "height")]
    size = UNIT
    angle = math.radians(value.get("rotation") or 0)
    if angle:  # a turn around the corner at the top left, in pixels
        size = [result["original_width"], result["original_height"]]
    corners = [(a * sides[0] * size[0], b * sides[1] * size[1]) for a, b in
               ((0, 0), (1, 0), (0, 1), (1, 1))]
    cos, sin = math.cos(angle), math.sin(angle)
    return around(chain.from_iterable(
        (value["x"] / 100 + (x * cos - y * sin) / size[0],
         value["y"] / 100 + (x * sin + y * cos) / size[1]) for x, y in corners))
