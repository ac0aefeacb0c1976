"""Converts sizes and coordinates in the stored image to the image as EXIF turns it.

    {"path": "a.jpg", "width": 640, "height": 480}, {"x": 160, "y": 120}      stored, in pixels
    {"path": "a.jpg", "width": 480, "height": 640}, {"x": 0.75, "y": 0.25}    turned clockwise
"""

import json

from records.check import require
from records.media import EXIF_ORIENTATION, image_size, open_image
from records.parse import parse
from text.styles import parts_of
from tools.convert.entries import line_of, to_json

TURNS = {  # EXIF orientation: a stored point -> the displayed point, in fractions of the sides
    1: lambda x, y: (x, y),
    2: lambda x, y: (1 - x, y),
    3: lambda x, y: (1 - x, 1 - y),
    4: lambda x, y: (x, 1 - y),
    5: lambda x, y: (y, x),
    6: lambda x, y: (1 - y, x),
    7: lambda x, y: (1 - y, 1 - x),
    8: lambda x, y: (y, 1 - x),
}


def turned(entries, job):
    """The entries of entries.py, with turned sizes and coordinates."""
    for where, head, annotations, *rest in entries:
        with job.report.skipping(where):
            record = json.loads(line_of(head, [text for _, text in annotations]))
            head = turn_record(record, parse(record), job.media.root)
            texts = map(to_json, head.pop("annotations"))
            pairs = zip(annotations, texts, strict=True)
            yield where, head, [(n, text) for (n, _), text in pairs], *rest


def turn_record(record, parsed, folder):
    """A record, the parsed record, and the folder of its media -> the record with turned sizes and
    coordinates, which are fractions. The record does not change if EXIF turns none of its images.
    Unreadable if an image is missing or its size is already turned."""
    headers = [read_header(folder / image["path"]) for image in parsed.get("images", ())]
    if all(orientation == 1 for orientation, _ in headers):
        return record
    turned = {key: record[key] for key in record if key != "image"}
    turned["images"] = parsed["images"]
    for image, (orientation, stored) in zip(turned["images"], headers, strict=True):
        if orientation >= 5 and "width" in image:
            is_turned = (image["width"] - image["height"]) * (stored[0] - stored[1]) < 0
            require(not is_turned, "an image", "its width and height are already turned")
            image["width"], image["height"] = image["height"], image["width"]
    for (_, given), (_, found) in zip(parts_of(turned), parts_of(parsed), strict=True):
        if "coords" in given:
            turn_annotation(given, found["points"], headers)
    return turned


def read_header(path):
    """-> the EXIF orientation of an image, and its (width, height) as stored."""
    size = image_size(path)
    with open_image(path) as image:
        orientation = image.getexif().get(EXIF_ORIENTATION)
    if orientation not in TURNS:
        return 1, size
    return orientation, size[::-1] if orientation >= 5 else size


def turn_annotation(annotation, points, headers):
    """Turns the coordinates of an annotation in place. points: its parsed points or boxes.
    headers: the result of `read_header` for each image."""
    name = "boxes" if annotation["type"] == "box" else "points"
    for entry, point in zip(annotation[name], points, strict=True):
        orientation, size = headers[point.get("image", 0)]
        width, height = point["scale"] or size
        left, top, right, bottom = point.get("box") or [point["x"], point["y"]] * 2
        corners = [TURNS[orientation](left / width, top / height),
                   TURNS[orientation](right / width, bottom / height)]
        (left, right), (top, bottom) = map(sorted, zip(*corners, strict=True))
        entry |= {"box": [left, top, right, bottom]} if "box" in entry else {"x": left, "y": top}
    annotation.pop("size", None)
    annotation |= {"coords": "unit"} | ({"form": "xyxy"} if name == "boxes" else {})
