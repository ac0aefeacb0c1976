"""Points and tracks as text, both ways (paper: pointing, tracking; spec 5).

in    points as fractions of the image's sides, by image number or time
out   the text that the model learns to write; and back, from what it wrote

    points    <points coords="1 1 100 900 2 500 200">cat</points>              one image: frame 1; points sorted by (x, y)
    video     <points coords="0.5 1 900 400;3.0 2 050 050">ball</points>       frame = seconds; ids run on
    track     <tracks coords="0.0 1 200 100 2 200 800;0.5 1 240 110">dog</tracks>      ids are the objects'
"""

import json
import re


def thousandth(unit):
    """A coordinate as text: thousandths of the side, Python's rounding, three digits or more; clipped to the image."""
    return f"{min(max(round(unit * 1000), 0), 1000):03d}"


def _tag(name, groups, label, separator, alt=None):
    coords = separator.join(f"{frame} " + " ".join(f"{i} {x} {y}" for i, x, y in points) for frame, points in groups)
    return f"<{name}{f' alt={json.dumps(alt)}' if alt else ''} coords=\"{coords}\">{label}</{name}>"


def format_points(groups, label, mode="point", separator=";", alt=None):
    """Points as the model writes them. groups: [(frame, [(x, y), ..]), ..] with x, y in 0..1 of the image's sides; frame is
    1 for a single image, the number of the image, or the time in seconds (spec 5.1, 5.2).

    mode: point | point_count | count_point | count. Sorted by the rounded (x, y); ids run on across groups.
    """
    groups = [(str(round(frame, 1)), sorted((int(thousandth(x)), int(thousandth(y))) for x, y in points)) for frame, points in groups]
    total = sum(len(points) for _, points in groups)
    if total == 0:
        return "There are none."
    if mode == "count":
        return str(total)
    ids = iter(range(1, total + 1))
    numbered = [(frame, [(next(ids), f"{x:03d}", f"{y:03d}") for x, y in points]) for frame, points in groups if points]
    tag = _tag("points", numbered, label, separator, alt)
    if mode == "point":
        return tag
    if mode == "point_count":
        return f"Counting the {tag} shows a total of {total}."
    assert mode == "count_point", mode
    return f"There are {total} {tag}."


def format_tracks(frames, label, separator=";", alt=None):
    """frames: [(seconds, {object: (x, y)}), ..], only visible objects, x, y in 0..1 -> text (spec 5.3).

    Objects are numbered in order of first appearance, those of one frame by (x, y); nothing visible gives "".
    """
    ids, groups = {}, []
    for time, objects in sorted(frames, key=lambda f: f[0]):
        for name in sorted(objects, key=lambda name: [int(thousandth(v)) for v in objects[name]]):
            ids.setdefault(name, len(ids) + 1)
        if objects:
            points = sorted((ids[name], thousandth(x), thousandth(y)) for name, (x, y) in objects.items())
            groups.append((str(round(float(time), 1)), points))
    return _tag("tracks", groups, label, separator, alt) if groups else ""


def unit(p, a, size):
    """A point of an annotation as fractions of the image's sides. size: (width, height) in pixels of the image or the video, the scale
    of coords "pixel" unless the annotation has a size of its own (formats.md 7.3)."""
    assert a["coords"] != "pixel" or "size" in a or size, f"points in pixels, but of which size? {a}"
    sx, sy = {"unit": (1, 1), "percent": (100, 100), "pixel": a.get("size", size)}[a["coords"]]
    return p["x"] / sx, p["y"] / sy


def unit_points(a, size):
    """All points of an annotation of one image, see unit."""
    return [unit(p, a, size) for p in a["points"]]


_COORDS = re.compile(r'<(?:points|tracks)[^>]*? coords="([0-9\t:;,. ]*)"')
_GROUP = re.compile(r"(?:^|[\t:;,])\s*([0-9]+(?:\.[0-9]+)?)((?:\s+[0-9]+\s+[0-9]{3,4}\s+[0-9]{3,4})+)")
_POINT = re.compile(r"([0-9]+)\s+([0-9]{3,4})\s+([0-9]{3,4})")


def parse_points(text, w, h):
    """Text -> [(frame, id, x, y), ..]: frame a float (image number or seconds), x and y in pixels of a w x h image.

    Points outside the image and triples cut short are left out; of an id that comes twice in a frame, the first
    counts (spec 5.4).
    """
    points = {}
    for coords in _COORDS.findall(text):
        for frame, triples in _GROUP.findall(coords):
            for number, x, y in _POINT.findall(triples):
                if int(x) <= 1000 and int(y) <= 1000:
                    points.setdefault((float(frame), number), (int(x) / 1000 * w, int(y) / 1000 * h))
    return [(frame, number, x, y) for (frame, number), (x, y) in points.items()]
