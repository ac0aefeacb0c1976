"""Annotations in COCO's format as records: one per image, with a `box` annotation per category.

    {"images": [{"id": 3, "file_name": "a.jpg", "width": 64, "height": 48}],
     "categories": [{"id": 1, "name": "cup"}],
     "annotations": [{"image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4]}]}

    {"id": "coco-1", "image": {"path": "a.jpg", "width": 64, "height": 48}, "annotations": [
        {"type": "box", "label": "cup", "coords": "pixel", "form": "xyxy",
         "boxes": [{"box": [1, 2, 4, 6]}]}]}

The border of the image cuts boxes off. A category with a crowd in one box is skipped, since the
places of the others are not known.
"""

from records.errors import DataError
from records.reader import FORM_ERRORS
from tools.prepare.annotations import MAX_POINTS, Skip, labels, require, size_of
from tools.prepare.media import check_path


def is_coco(content):
    return isinstance(content, dict) and content.keys() >= {"images", "annotations", "categories"}


def read_coco(coco, path, report):
    """Yields (where, record). A category of an image counts as a row, which may be skipped."""
    try:
        rows = group_boxes(coco)
    except FORM_ERRORS as error:
        raise DataError(f"{path}: its images, annotations and categories are not as in COCO: "
                        f"{type(error).__name__}: {error}") from None
    images = {}  # path: ({"path":, "width":, "height":}, annotations)
    for image, label, boxes in rows:
        report.n_rows += 1
        where = f"{path} image {image.get('id')}"
        try:
            size = size_of(image["width"], image["height"])
            require(size, "no size")
            entry = {"path": check_path(image["file_name"]), "width": size[0], "height": size[1]}
            annotation = to_annotation(label, boxes, size)
            images.setdefault(entry["path"], (entry, []))[1].append(annotation)
        except Skip as reason:
            report.skip(where, str(reason), f"the boxes of '{label}'")
        except FORM_ERRORS as error:
            report.skip(where, "wrong boxes", f"of '{label}': {type(error).__name__}: {error}")
    for n, (entry, annotations) in enumerate(images.values(), 1):
        for k, part in enumerate(split(annotations)):
            name = f"coco-{n}.{k}" if k else f"coco-{n}"
            yield f"{path} {name}", {"id": name, "image": entry, "annotations": part}


def group_boxes(coco):
    """-> [(image, label, its annotations in COCO's format), ..] in the order of the file."""
    images = {image["id"]: image for image in coco["images"]}
    names = {category["id"]: category["name"] for category in coco["categories"]}
    rows = {}
    for annotation in coco["annotations"]:
        key = annotation["image_id"], annotation["category_id"]
        row = rows.setdefault(key, (images[key[0]], names[key[1]], []))
        row[2].append(annotation)
    return list(rows.values())


def to_annotation(label, boxes, size):
    """Annotations in COCO's format with one label -> a box annotation; Skip."""
    require(not any(box.get("iscrowd") for box in boxes), "a crowd in one box")
    kept = []
    for box in boxes:
        left, top, width, height = box["bbox"]
        right = min(left + width, size[0])
        bottom = min(top + height, size[1])
        if right > max(left, 0) and bottom > max(top, 0):
            kept.append({"box": [max(left, 0), max(top, 0), right, bottom]})
    require(kept, "no box with an area")
    require(len(kept) <= MAX_POINTS, f"more than {MAX_POINTS} points")
    return {"type": "box", **labels(label), "coords": "pixel", "form": "xyxy", "boxes": kept}


def split(annotations):
    """-> lists of annotations with at most MAX_POINTS boxes each, for one record each."""
    parts = [[]]
    for annotation in annotations:
        n_boxes = sum(len(other["boxes"]) for other in parts[-1]) + len(annotation["boxes"])
        if parts[-1] and n_boxes > MAX_POINTS:
            parts.append([])
        parts[-1].append(annotation)
    return parts
