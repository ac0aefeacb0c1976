"""Points and tracks as text, in both directions (paper: pointing, tracking; docs/molmo2.md 5).

    points    <points coords="1 1 100 900 2 500 200">cat</points>
    video     <points coords="0.5 1 900 400;3.0 2 050 050">ball</points>
    track     <tracks coords="0.0 1 200 100 2 200 800;0.5 1 240 110">dog</tracks>

Inside coords, every group is a frame followed by triples `id x y`. The frame is 1 for a single
image, the number of the image, or the time in seconds. x and y are thousandths of the image's
sides. Ids count the points through all groups; in tracks an object keeps its id in all frames.
"""

import json
import re
from typing import NamedTuple


def thousandths(fraction):
    """A fraction of the image's side -> 0..1000, rounded half to even, clipped to the image."""
    return min(max(round(fraction * 1000), 0), 1000)


def _tag(name, groups, label, separator, alt):
    """groups: [(frame as text, [(id, x, y), ..]), ..] with x and y in thousandths."""
    texts = []
    for frame, points in groups:
        triples = " ".join(f"{number} {x:03d} {y:03d}" for number, x, y in points)
        texts.append(f"{frame} {triples}")
    alt_text = f" alt={json.dumps(alt)}" if alt else ""
    return f'<{name}{alt_text} coords="{separator.join(texts)}">{label}</{name}>'


def format_points(groups, label, mode="point", separator=";", alt=None):
    """Points -> the text that the model learns to write (docs/molmo2.md 5.1, 5.2).

    groups: [(frame, [(x, y), ..]), ..] with x and y as fractions of the image's sides. mode: point,
    point_count, count_point or count. Within a group, points are sorted by the rounded (x, y).
    """
    total = sum(len(points) for _, points in groups)
    if total == 0:
        return "There are none."
    if mode == "count":
        return str(total)
    numbered = []
    next_id = 1
    for frame, points in groups:
        if points:
            ordered = sorted((thousandths(x), thousandths(y)) for x, y in points)
            triples = [(next_id + k, x, y) for k, (x, y) in enumerate(ordered)]
            numbered.append((str(round(frame, 1)), triples))
            next_id += len(points)
    tag = _tag("points", numbered, label, separator, alt)
    if mode == "point":
        return tag
    if mode == "point_count":
        return f"Counting the {tag} shows a total of {total}."
    assert mode == "count_point", mode
    return f"There are {total} {tag}."


def format_tracks(frames, label, separator=";", alt=None):
    """Tracks -> the text that the model learns to write (docs/molmo2.md 5.3).

    frames: [(seconds, {object: (x, y)}), ..] with the visible objects only, x and y as fractions;
    "" if no frame has one. Objects are numbered in the order of their first appearance, those of
    one frame by (x, y).
    """
    ids = {}
    groups = []
    for time, objects in sorted(frames, key=lambda frame: frame[0]):
        rounded = {name: (thousandths(x), thousandths(y)) for name, (x, y) in objects.items()}
        for name in sorted(rounded, key=rounded.get):
            ids.setdefault(name, len(ids) + 1)
        if rounded:
            triples = sorted((ids[name], x, y) for name, (x, y) in rounded.items())
            groups.append((str(round(float(time), 1)), triples))
    return _tag("tracks", groups, label, separator, alt) if groups else ""


def unit(point, annotation, size):
    """A point of an annotation -> (x, y) as fractions of the image's sides.

    size: (width, height) in pixels of the image or video. It is the scale of coords "pixel" unless
    the annotation has a size of its own (docs/records.md).
    """
    coords = annotation["coords"]
    known = coords != "pixel" or "size" in annotation or size
    assert known, f"points in pixels, but of which size? {annotation}"
    scales = {"unit": (1, 1), "percent": (100, 100), "pixel": annotation.get("size", size)}
    width, height = scales[coords]
    return point["x"] / width, point["y"] / height


def unit_points(annotation, size):
    """All points of an annotation of one image as fractions of its sides; see unit."""
    return [unit(point, annotation, size) for point in annotation["points"]]


class ParsedPoint(NamedTuple):
    frame: float                     # number of the image, or seconds
    id: str
    x: float                         # pixels
    y: float


_POINT = re.compile(r"([0-9]+)\s+([0-9]{3,4})\s+([0-9]{3,4})")
_TRIPLES = r"((?:\s+[0-9]+\s+[0-9]{3,4}\s+[0-9]{3,4})+)"
_GROUP = re.compile(r"(?:^|[\t:;,])\s*([0-9]+(?:\.[0-9]+)?)" + _TRIPLES)
_COORDS = re.compile(r'<(?:points|tracks)[^>]*? coords="([0-9\t:;,. ]*)"')


def parse_points(text, width, height):
    """Text of the model -> [ParsedPoint, ..] in pixels of a width x height image.

    Points outside the image and incomplete triples are left out. If a tag has an id twice on one
    frame, the first point counts (docs/molmo2.md 5.4).
    """
    points = []
    for coords in _COORDS.findall(text):
        of_tag = {}
        for frame, triples in _GROUP.findall(coords):
            for number, x, y in _POINT.findall(triples):
                if int(x) <= 1000 and int(y) <= 1000:
                    point = (int(x) / 1000 * width, int(y) / 1000 * height)
                    of_tag.setdefault((float(frame), number), point)
        points += [ParsedPoint(*key, *point) for key, point in of_tag.items()]
    return points
