"""Layouts of images with boxes, polygons, points and captions: COCO, LVIS, LabelMe.

    {"image": {"path": "a.jpg", "width": 64, "height": 48}, "annotations": [
        {"type": "box", "label": "cup", "coords": "pixel", "form": "xyxy",
         "boxes": [{"box": [1, 2, 4, 6]}]}]}

A record has one annotation for each label. A label is skipped in an image if one of its boxes or
points there cannot be used. Boxes are clipped to the image. docs/boxes.md has the rules.
"""

from functools import partial
from itertools import chain
from os.path import isfile
from urllib.parse import urlsplit

from records.check import is_kind, is_number, require, short
from records.errors import Unreadable
from records.media import image_size, open_image
from records.parse import BOX_FORMS
from tools.convert import make
from tools.convert.make import UNIT, size_of, skip_unless
from tools.convert.masks import place_of_mask
from tools.convert.media import IMAGE_SUFFIXES
from tools.convert.rows import unique

COCO_FIELDS = {  # of an annotation
    "id", "image_id", "category_id", "bbox", "area", "segmentation", "iscrowd", "keypoints",
    "num_keypoints", "caption", "ignore", "score"}
LABELME_FIELDS = {"label", "points", "shape_type", "group_id", "mask", "description"}
BOXED = ("rectangle", "polygon", "rotation", "mask")  # shapes of LabelMe that become boxes


def located(job, path, size, found, absent=None):
    """-> (head, annotations) of an image. Unreadable if it has no object, but for --negatives.

    size: (width, height), UNIT, or None if only the image file has it. found: [(label, place), ..],
    see make.placed. absent: labels that the image does not show, if the file says so.
    """
    skip_unless(found or job.args.negatives, "no annotation", "this image has no object; it can "
                "train that an object is absent, see --negatives")
    groups = {}
    for label, place in found:
        groups.setdefault(label, []).append(place)
    file = job.media.root / path
    size = size or size_of_file(file, job.args.exif_unturned)
    skip_unless(size or not found, "no size", "the file does not contain the width and height of "
                f"the image, and {file} does not exist; --media DIR sets the folder")
    image = path if size in (UNIT, None) else {"path": path, "width": size[0], "height": size[1]}
    head = {"image": image, "labels": ({*groups}, absent)}  # for negatives.py
    return head, [partial(make.placed, label, places, size) for label, places in groups.items()]


def size_of_file(file, is_unturned):
    """(width, height) of an image, before EXIF turns it if is_unturned; None if it is missing."""
    if not isfile(file):  # False for a name that is too long, too
        return None
    if not is_unturned:
        return image_size(file)
    with open_image(file) as image:
        return image.size


def around(corners):
    """x, y, x, y, .. -> the box around these corners. Other input is returned unchanged."""
    numbers = list(corners)
    if not numbers or len(numbers) % 2 or not all(map(is_number, numbers)):
        return numbers  # make.placed raises the error
    return [min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])]


def as_id(value):
    """An id of COCO. Some tools write the number 12 as the text "12", but not in all fields."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def coco_images(rows, job):
    """A file -> a row for each image, with its annotations and the names of all categories."""
    for where, content in rows:
        with job.report.skipping(where):
            # ValueError if an id occurs twice
            images = unique([(as_id(image.get("id")), image) for image in content["images"]])
            names = unique([(as_id(category.get("id")), category.get("name"))
                            for category in content.get("categories") or ()])
            is_lvis = any("neg_category_ids" in image for image in images.values())
            by_image = {number: [] for number in images}
            for annotation in content["annotations"]:
                by_image.setdefault(as_id(annotation.get("image_id")), []).append(annotation)
            for number, annotations in by_image.items():
                yield f"{where} image {short(number)}", {
                    "image": images.get(number), "annotations": annotations, "names": names,
                    "is_lvis": is_lvis}


def read_coco(row, job):
    image = row.get("image", {})
    # LVIS: http://images.cocodataset.org/val2017/000000397133.jpg
    path = image.get("file_name") or urlsplit(image.get("coco_url", "")).path.lstrip("/")
    require(path, "the image", "the file does not contain its name")
    path = path.replace("\\", "/")
    names = row.get("names", {})
    captions = []
    found = []
    for annotation in row.get("annotations", ()):
        annotation = job.report.known_fields(annotation, COCO_FIELDS, owner="an annotation")
        if "caption" not in annotation:
            found.append(coco_place(annotation, image, names))
            continue
        require(not {"bbox", "segmentation"} & annotation.keys(), "an annotation",
                "a caption of a box is not supported; add --ignore caption or "
                "--ignore bbox,segmentation")
        captions.append({"type": "caption", "text": annotation["caption"]})
    if captions:
        yield {"image": path}, captions
    absent = {names.get(as_id(number)) for number in image.get("neg_category_ids", ())}
    absent -= {names.get(as_id(number)) for number in image.get("not_exhaustive_category_ids", ())}
    if found or not captions:
        size = size_of(image.get("width"), image.get("height"))
        yield located(job, path, size, found, absent if row["is_lvis"] else None)


def coco_place(annotation, image, names):
    """-> (label, place) of an annotation, see make.placed. names: {category id: name}."""
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
        return label, Unreadable("key points", "they are not supported; export boxes without them, "
                                 "or add --ignore keypoints to use the boxes")
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        return label, place_of_mask(segmentation, size_of(image.get("width"), image.get("height")))
    if box := annotation.get("bbox"):
        return label, BOX_FORMS["xywh"](*box) if is_kind(box, "box") else [box]
    if isinstance(segmentation, list):
        return label, around(chain.from_iterable(segmentation))
    return label, Unreadable("no box", "an annotation has neither 'bbox' nor a segmentation")


def read_labelme(row, job):
    found = []
    corners = {}
    for k, shape in enumerate(row.get("shapes", ())):
        shape = job.report.known_fields(shape, LABELME_FIELDS, owner="a shape")
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
    path = row["imagePath"].replace("\\", "/")
    require(path.lower().endswith(IMAGE_SUFFIXES), "'imagePath'",
            "it must be the name of an image; open the image in LabelMe, and save the file again")
    return located(job, path, size_of(row.get("imageWidth"), row.get("imageHeight")), found)
