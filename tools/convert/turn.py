"""Sizes and coordinates of images as stored -> those of the images as EXIF turns them.

    {"path": "a.jpg", "width": 640, "height": 480}, {"x": 160, "y": 120}      stored, in pixels
    {"path": "a.jpg", "width": 480, "height": 640}, {"x": 0.75, "y": 0.25}    turned clockwise
"""

from records.media import EXIF_ORIENTATION, image_size, open_image

TURNS = {  # EXIF orientation -> where a point as stored is displayed, in fractions of the sides
    1: lambda x, y: (x, y),
    2: lambda x, y: (1 - x, y),
    3: lambda x, y: (1 - x, 1 - y),
    4: lambda x, y: (x, 1 - y),
    5: lambda x, y: (y, x),
    6: lambda x, y: (1 - y, x),
    7: lambda x, y: (1 - y, 1 - x),
    8: lambda x, y: (y, 1 - x),
}


def turn_record(record, parsed, folder):
    """A record, the same parsed, and the folder of its media -> the record turned, with its
    coordinates as fractions; itself if EXIF turns none of its images. Unreadable."""
    images = []
    headers = []  # of each image: EXIF orientation, (width, height) as stored
    for image in parsed.get("images", ()):
        size = image_size(folder / image["path"])
        with open_image(folder / image["path"]) as opened:
            orientation = opened.getexif().get(EXIF_ORIENTATION)
        if orientation in (5, 6, 7, 8):
            size = size[::-1]
            if "width" in image:
                image = image | {"width": image["height"], "height": image["width"]}
        images.append(image)
        headers.append((orientation if orientation in TURNS else 1, size))
    if all(orientation == 1 for orientation, _ in headers):
        return record
    annotations = turn_annotations(record["annotations"], parsed["annotations"], headers)
    kept = {key: record[key] for key in record if key != "image"}
    return kept | {"images": images, "annotations": annotations}


def turn_annotations(annotations, parsed, headers):
    """parsed: the same annotations, or turns, with points that have a scale and boxes xyxy."""
    turned = []
    for given, found in zip(annotations, parsed, strict=True):
        if "turns" in given:
            given = given | {"turns": turn_annotations(given["turns"], found["turns"], headers)}
        elif "coords" in given:
            given = turn_annotation(given, found["points"], headers)
        turned.append(given)
    return turned


def turn_annotation(annotation, points, headers):
    name = "boxes" if annotation["type"] == "box" else "points"
    turned = []
    for entry, point in zip(annotation[name], points, strict=True):
        orientation, size = headers[point.get("image", 0)]
        width, height = point["scale"] or size
        left, top, right, bottom = point.get("box") or [point["x"], point["y"]] * 2
        corners = [TURNS[orientation](left / width, top / height),
                   TURNS[orientation](right / width, bottom / height)]
        (left, right), (top, bottom) = map(sorted, zip(*corners, strict=True))
        place = {"box": [left, top, right, bottom]} if "box" in entry else {"x": left, "y": top}
        turned.append(entry | place)
    kept = {key: annotation[key] for key in annotation if key != "size"}
    return kept | {"coords": "unit", name: turned} | ({"form": "xyxy"} if name == "boxes" else {})
