"""Converts boxes, points and captions of COCO, LVIS, LabelMe and YOLO to records.

    {"image": {"path": "a.jpg", "width": 64, "height": 48}, "annotations": [
        {"type": "box", "label": "cup", "coords": "pixel", "form": "xyxy",
         "boxes": [{"box": [1, 2, 4, 6]}]}]}

A record has one annotation for each label. A label is skipped in an image if one of its boxes or
points there cannot be used. Boxes are clipped to the image. docs/convert.md has the rules.
"""

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from records.check import is_kind, is_number, is_text, require, short
from records.errors import DataError, Unreadable, explained, import_extra, plural
from records.parse import BOX_FORMS
from tools.convert.rows import READERS, unique
from tools.prepare.annotations import MAX_POINTS, size_of, split
from tools.prepare.media import IMAGE_SUFFIXES

COCO_FIELDS = {  # of an annotation
    "id", "image_id", "category_id", "bbox", "area", "segmentation", "iscrowd", "keypoints",
    "num_keypoints", "caption", "ignore", "score"}
LABELME_FIELDS = {"label", "points", "shape_type", "group_id", "mask", "description"}
UNIT = (1, 1)  # the size of an image if coordinates are fractions of its sides
BOXED = ("rectangle", "polygon", "rotation", "mask")  # shapes of LabelMe that become boxes
CLASSES = ("classes.txt", "obj.names", "data.yaml", "dataset.yaml")  # files with class names (YOLO)


def to_records(where, path, size, found, report):
    """Yields (where, record) for an image, or several of them if it has many boxes or points.
    Unreadable if it has no annotation.

    size: (width, height), UNIT, or None if unknown. found: [(label, place), ..], where a place is
    a point [x, y], a box [left, top, right, bottom], or an Unreadable (the reason).
    """
    if not found:
        raise Unreadable("no annotation", "this image has no annotation")
    groups = {}
    for label, place in found:
        groups.setdefault(label, []).append(place)
    annotations = []
    for label, places in groups.items():
        with report.skipping(f"{where}, label {short(label)}"):
            annotations += to_annotations(label, places, size)
    image = path if size in (UNIT, None) else {"path": path, "width": size[0], "height": size[1]}
    for part in split(annotations, MAX_POINTS):
        yield where, {"image": image, "annotations": part}


def to_annotations(label, places, size):
    """All places of one label -> a box annotation, a point annotation, or both. Unreadable if one
    of the places cannot be used."""
    for place in places:
        if isinstance(place, Unreadable):
            raise place
        if not all(map(is_number, place)) or len(place) not in (2, 4):
            raise Unreadable("wrong numbers", f"not a point, box or polygon: {short(place)}")
    if not is_text(label):
        raise Unreadable("no label", "the file has no name for this label")
    if label in ("__ignore__", "_background_"):
        raise Unreadable("no object", "LabelMe uses this label for pixels without an object")
    if not size:
        raise Unreadable("no size", "the file does not contain the width and height of the image")
    if len(places) > MAX_POINTS:
        raise Unreadable(f"more than {MAX_POINTS} points", "training skips such annotations")
    fields = {"label": label.strip(), "coords": "unit" if size == UNIT else "pixel"}
    points = [{"x": place[0], "y": place[1]} for place in places if len(place) == 2]
    boxes = []
    for left, top, right, bottom in (place for place in places if len(place) == 4):
        box = [max(left, 0), max(top, 0), min(right, size[0]), min(bottom, size[1])]
        if box[0] >= box[2] or box[1] >= box[3]:
            raise Unreadable("a box without an area", "no part of it is inside the image")
        boxes.append({"box": [round(side, 6) for side in box]})
    found = [{"type": "box", **fields, "form": "xyxy", "boxes": boxes}] if boxes else []
    return found + ([{"type": "point", **fields, "points": points}] if points else [])


def around(corners):
    """x, y, x, y, .. -> the box around these corners. Other input is returned unchanged."""
    numbers = list(corners)
    if not numbers or len(numbers) % 2 or not all(map(is_number, numbers)):
        return numbers  # `to_annotations` raises the error
    return [min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])]


def as_id(value):
    """An id of COCO. Some tools write the number 12 as the text "12", but not in all fields."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def read_coco(content, where, report):
    """Yields (where, record) of each image."""
    # ValueError if an id occurs twice
    images = unique((as_id(image.get("id")), image) for image in content["images"])
    names = unique((as_id(category.get("id")), category.get("name"))
                   for category in content.get("categories") or ())
    by_image = {number: [] for number in images}
    for annotation in content["annotations"]:
        by_image.setdefault(as_id(annotation.get("image_id")), []).append(annotation)
    for number, annotations in by_image.items():
        report.read["coco"] += 1
        place = f"{where} image {short(number)}"
        with report.skipping(place):
            image = images.get(number, {})
            # LVIS: http://images.cocodataset.org/val2017/000000397133.jpg
            path = image.get("file_name") or urlsplit(image.get("coco_url", "")).path.lstrip("/")
            require(path, "the image", "the file does not contain its name")
            path = path.replace("\\", "/")
            captions = []
            found = []
            for annotation in annotations:
                annotation = report.known_fields(annotation, COCO_FIELDS, owner="an annotation")
                if "caption" not in annotation:
                    found.append(coco_place(annotation, image, names))
                    continue
                require(not {"bbox", "segmentation"} & annotation.keys(), "an annotation",
                        "a caption of a box is not supported; add --ignore caption or "
                        "--ignore bbox,segmentation")
                captions.append({"type": "caption", "text": annotation["caption"]})
            if captions:
                yield place, {"image": path, "annotations": captions}
            if found or not captions:
                size = size_of(image.get("width"), image.get("height"))
                yield from to_records(place, path, size, found, report)


def coco_place(annotation, image, names):
    """-> (label, place) of an annotation, see `to_records`. names: {category id: name}."""
    require("score" not in annotation, "an annotation", "'score' means that a model has predicted "
            "this box; to train on predictions, add --ignore score")
    category = as_id(annotation.get("category_id"))
    label = names.get(category)
    if label is None:
        return category, Unreadable("no label", "'categories' does not contain this id")
    # in LVIS, the image may show more objects of these categories
    partial = map(as_id, image.get("not_exhaustive_category_ids", ()))
    if annotation.get("iscrowd") or annotation.get("ignore") or category in partial:
        return label, Unreadable("a crowd", "not every object has its own box; if each has one, as "
                                 "in masks of CVAT, add --ignore iscrowd,ignore")
    if any(annotation.get("keypoints", ())):
        return label, Unreadable("key points", "'keypoints' are not supported; remove them")
    if box := annotation.get("bbox"):
        return label, BOX_FORMS["xywh"](*box) if is_kind(box, "box") else [box]
    if isinstance(annotation.get("segmentation"), list):
        return label, around(chain.from_iterable(annotation["segmentation"]))
    return label, Unreadable("no box", "an annotation has neither 'bbox' nor polygons")


def read_labelme(content, where, report):
    found = []
    corners = {}
    for k, shape in enumerate(content["shapes"]):
        shape = report.known_fields(shape, LABELME_FIELDS, owner="a shape")
        label = shape.get("label")
        kind = shape.get("shape_type", "polygon")
        if kind == "point":
            found.append((label, shape["points"][0]))
        elif kind in BOXED:
            # the polygons of one object have the same group_id
            key = label, shape.get("group_id", f"shape {k}")
            corners.setdefault(key, []).extend(chain.from_iterable(shape["points"]))
        else:
            found.append((label, Unreadable("a shape", f"{short(kind)} is not supported; use one "
                                            f"of {', '.join(BOXED)}")))
    found += [(label, around(numbers)) for (label, _), numbers in corners.items()]
    path = content["imagePath"].replace("\\", "/")
    require(path.lower().endswith(IMAGE_SUFFIXES), "'imagePath'",
            "it must be the name of an image; open the image in LabelMe, and save the file again")
    size = size_of(content.get("imageWidth"), content.get("imageHeight"))
    yield from to_records(where, path, size, found, report)


def is_yolo(path):
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    ends = {Path(name).suffix for name in names if not name.startswith("README")}
    return bool(names & {"labels", *CLASSES}) or (".txt" in ends and not ends & set(READERS))


def read_yolo(folder, media, report):
    """Yields (where, record) for each label file. media: the folder of the images, or None."""
    labels = folder / "labels" if (folder / "labels").is_dir() else folder
    # labels/train/a.txt belongs to images/train/a.jpg
    image_folder = Path(media or re.sub("(.*/)labels(?=/|$)", r"\1images", str(labels.absolute())))
    images = {}
    for path in image_folder.glob("*"):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            images.setdefault(path.stem, []).append(str(path.absolute()))
    texts = [path for path in sorted(labels.glob("*.txt")) if path.name not in CLASSES]
    above = [labels, *labels.absolute().parents[:3]]
    classes = [path / name for path in above for name in CLASSES if (path / name).is_file()]
    if not classes or not any(path.stem in images for path in texts):
        others = sorted({str(path.parent) for path in labels.rglob("*.txt")} - {str(labels)})
        raise DataError(f"{folder}: YOLO needs .txt files in this folder, one of the files "
                        f"{', '.join(CLASSES)} there or above, and images with the same names in "
                        f"{image_folder} (or set --media DIR); folders below it with .txt files: "
                        f"{others[:4] or 'none'}")
    names = read_classes(classes[0])
    longer = Counter()  # {(length, may it begin with a box?): number of longer lines}
    for path in texts:
        report.read["yolo"] += 1
        with report.skipping(path):
            same_name = images.get(path.stem, ())
            if len(same_name) != 1:
                raise Unreadable("missing file", f"{image_folder} has "
                                 f"{plural(len(same_name), 'image')} with the name {path.stem}, "
                                 "but must have exactly one")
            found = []
            for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
                number, numbers = yolo_numbers(line)
                place = BOX_FORMS["cxcywh"](*numbers[:4])
                if len(numbers) > 4:
                    longer[len(numbers), may_begin_with(place, numbers[4:])] += 1
                    place = around(numbers)
                found.append((names.get(number, number), place))
            yield from to_records(path, same_name[0], UNIT, found, report)
    for (length, is_doubtful), n in longer.most_common(1):
        if is_doubtful and 2 * n > longer.total() and report.args.kind != "yolo-polygons":
            raise DataError(f"{folder}: {plural(n, 'line')} with {length} numbers after the class "
                            "may be polygons, or boxes with key points or with a score and an id; "
                            "if they are polygons, add --as yolo-polygons; if not, keep only the "
                            "class and the first four numbers of each line")


def yolo_numbers(line):
    """-> number of the class, [x, y, width, height] or the corners x, y, x, y, .. of a polygon."""
    require(re.fullmatch(r"\s*\d+\s[-+.\deE\s]+", line), short(line),
            "a line must contain only numbers, and the first must be the number of a class")
    number, *numbers = map(float, line.split())
    is_whole = len(numbers) >= 4 and len(numbers) % 2 == 0
    require(is_whole and min(numbers) >= -0.01 and max(numbers) <= 1.01, short(line),
            "after the class, a line must contain x, y, width and height, or a polygon, as "
            "fractions of the image's sides from 0 to 1; scores, key points and ids are not read")
    return int(number), numbers


def may_begin_with(box, rest):
    """May a line contain this box, and then key points, or a score and the id of a track?

    Such a box is inside the image. It overlaps the area of its key points, or the last number is a
    whole number, the id. This is also true of some polygons.
    """
    left, top, right, bottom = around(rest)
    is_near = left <= box[2] and top <= box[3] and right >= box[0] and bottom >= box[1]
    is_track = len(rest) == 2 and bottom.is_integer()
    return min(box) >= -0.01 and max(box) <= 1.01 and (is_near or is_track)


def read_classes(path):
    """A file with one name per line, or a data.yaml with `names` -> {number: name}."""
    with explained(path):
        text = path.read_text(encoding="utf-8-sig")
        return read_yaml(text) if path.suffix == ".yaml" else dict(enumerate(text.split("\n")))


def read_yaml(text):
    """The text of a data.yaml -> {number: name}. ValueError if it cannot be used."""
    yaml = import_extra("yaml")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or "kpt_shape" in content:
        raise ValueError("it must contain 'names', and no key points ('kpt_shape')")
    for number, name in names.items():
        if not isinstance(name, str) or not str(number).isdecimal():
            raise ValueError(f"class {short(number)} in 'names' must be a number with a text; put "
                             "quotes around a name that YAML does not read as text, such as 7, yes "
                             "or null")
    return {int(number): name for number, name in names.items()}
