"""The layouts of Pascal VOC, and of tables with a line for each box or point (CSV)."""

import os

from records.check import is_number, require
from records.errors import Unreadable
from tools.convert.boxes import located
from tools.convert.make import UNIT, size_of, skip_unless
from tools.convert.media import IMAGE_SUFFIXES

VOC_FIELDS = {"name", "bndbox", "pose", "truncated", "difficult", "occluded"}  # of an object
VOC_FOLDERS = ("", "JPEGImages", "../JPEGImages", "images", "../images")  # with the images
SIDES = ("left", "top", "right", "bottom")
NAMES = {  # what a column contains: the names that it may have
    "image": ("image", "filename", "file_name"), "label": ("label", "class", "class_name"),
    "left": ("left", "xmin", "x_min", "x1"), "top": ("top", "ymin", "y_min", "y1"),
    "right": ("right", "xmax", "x_max", "x2"), "bottom": ("bottom", "ymax", "y_max", "y2"),
    "x": ("x",), "y": ("y",), "width": ("width",), "height": ("height",)}
SIGN = " | ".join(f"{image} {label} {first}" for image in NAMES["image"]
                  for label in NAMES["label"] for first in (*NAMES["left"], *NAMES["x"]))


def read_voc(row, job):
    """An .xml file. Pixels count from 1, and a box includes its last pixel."""
    found = []
    for entry in row.get("object", ()):
        entry = job.report.known_fields(entry, VOC_FIELDS, "an object")
        box = entry["bndbox"][0]
        place = [as_number(box[side][0]) for side in ("xmin", "ymin", "xmax", "ymax")]
        if all(map(is_number, place)):
            place = [place[0] - 1, place[1] - 1, *place[2:]]
        found.append((entry["name"][0], place))
    name = row["filename"][0]
    # labelImg has written names without an extension
    names = [name] if os.path.splitext(name)[1] else [name + suffix for suffix in IMAGE_SUFFIXES]
    paths = [os.path.join(folder, name) for folder in VOC_FOLDERS for name in names]
    path = next((path for path in paths if os.path.isfile(job.media.root / path)), name)
    size = [as_number(row["size"][0][side][0]) for side in ("width", "height")]
    return located(job, path, size_of(*size), found)


def as_number(cell):
    """A cell -> its number. Others are returned unchanged, and make.placed raises the error."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def by_image(rows, job):
    """A table with a line for each box or point -> a row for each image, with all of them."""
    images = {}
    known = {name for names in NAMES.values() for name in names}
    for where, row in rows:
        with job.report.skipping(where):
            row = job.report.known_fields(row, known)
            box = {key: cell_of(row, names) for key, names in NAMES.items()}
            require(box["image"], "the entry", "it does not name its image")
            images.setdefault(box["image"], (where, []))[1].append(box)
    yield from ((where, {"boxes": boxes}) for where, boxes in images.values())


def cell_of(row, names):
    """The value of the column with one of these names, or None."""
    given = [name for name in names if name in row]
    require(len(given) < 2, "the entry", f"it has both {' and '.join(given)}")
    return row[given[0]] if given else None


def read_boxes(row, job):
    boxes = row["boxes"]
    found = []
    for box in boxes:
        if all(box[key] is None for key in ("label", "x", "y", *SIDES)):
            continue  # a line for an image without objects
        skip_unless(not str(box["label"]).isdecimal(), "no label",
                    f"the label is the number {box['label']}; write the name of the class")
        found.append((box["label"], place_of(box)))
    places = [place for _, place in found if isinstance(place, list)]
    furthest = max((side for place in places for side in place if is_number(side)), default=2)
    skip_unless(job.args.unit or furthest > 1, "no unit", "no number is above 1; say with --unit "
                "unit that they are fractions of the image's sides, or with --unit pixel")
    path = boxes[0]["image"].replace("\\", "/")
    size = [boxes[0][side] for side in ("width", "height")]
    if job.args.unit == "unit":
        size = UNIT
    else:
        size = size_of(*map(as_number, size))
    return located(job, path, size, found)


def place_of(box):
    """-> a point or a box, see make.placed."""
    if box["x"] is None and box["y"] is None:
        return [as_number(box[side]) for side in SIDES]
    given = [key for key in (*SIDES, "width", "height") if box[key] is not None]
    if given:  # width and height may be the size of a box whose corner is x, y
        return Unreadable("point or box", f"it has x and y, and also {', '.join(given)}; a point "
                          "has only x and y, and a box has left, top, right and bottom")
    return [as_number(box["x"]), as_number(box["y"])]
