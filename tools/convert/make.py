"""Makes annotations (docs/records.md) from the cells of rows.

The functions choose fields and units. What records/ checks is not checked here: the command checks
every record before it is written.
"""

import math

from records.check import is_number, is_text, short
from records.errors import Unreadable

MAX_OPTIONS = 26  # every option has a letter
MAX_POINTS = 60  # per annotation, and in some sets per record
UNKNOWN_SIZE = (math.inf, math.inf)  # of an image that is not downloaded yet
UNIT = (1, 1)  # the size of an image if coordinates are fractions of its sides
ROLES = {"human": "user", "gpt": "assistant"}


def skip_unless(condition, kind, reason=""):
    """Skips the row, or the annotation that is made, if the condition is false."""
    if not condition:
        raise Unreadable(kind, reason)


def text_of(value):
    """The string without surrounding white space; None if it is empty, or not a string."""
    return value.strip() or None if isinstance(value, str) else None


def number_of(value):
    """The value if it is a finite number, else None."""
    return value if is_number(value) else None


def whole(number):
    """3.0, which a table may contain -> 3. Other values are unchanged."""
    return int(number) if is_number(number) and number == int(number) else number


def size_of(width, height):
    """[width, height] in pixels; None if both are missing or 0. Unreadable if they are no size."""
    if not width and not height:
        return None
    skip_unless(min(number_of(width) or 0, number_of(height) or 0) >= 1, "wrong size",
                f"{short(width)} x {short(height)} is not the size of an image")
    return [int(width), int(height)]


def xy_points(cell):
    """[{"x":, "y":}, ..] from a list of structs, or from a struct of lists."""
    if isinstance(cell, dict):
        return [{"x": x, "y": y} for x, y in zip(cell["x"], cell["y"], strict=True)]
    return [{"x": p["x"], "y": p["y"]} for p in cell or []]


def labels(label, question=None):
    cells = {"label": text_of(label), "question": text_of(question)}
    return {name: text for name, text in cells.items() if text}


def point(points, coords, label, question=None, size=None, count=None, clip=False,
          max_points=math.inf, counts=None, **fields):
    """points: [{"x":, "y":, "t" or "image":}, ..]. size: [width, height], or None if unknown.
    clip: move points that are outside the image to its border. count: the published count.
    counts: (min, max); annotations with fewer or more points are skipped."""
    width, height = (100, 100) if coords == "percent" else size or UNKNOWN_SIZE
    if clip:
        points = [p | {"x": min(max(p["x"], 0), width), "y": min(max(p["y"], 0), height)}
                  for p in points]
    skip_unless(len(points) <= max_points, f"more than {max_points} points")
    least, most = counts or (0, math.inf)
    skip_unless(least <= len(points) <= most, f"not {least} to {most} points")
    if count is not None:
        fields["count"] = whole(count)
    if size:
        fields = {"size": size, **fields}
    return {"type": "point", **labels(label, question), "coords": coords, **fields,
            "points": points}


def count(number, label, question=None):
    return {"type": "count", **labels(label, question), "count": whole(number)}


def track(label, points, times, rate, mode, size):
    """points: [{"t":, "id":, "x":, "y":, "occluded":}, ..] in pixels. times: the times of the
    frames in seconds. rate: frames per second."""
    fields = {"size": size} if size else {}
    fields |= {"mode": mode, "fps": rate, "times": times}
    if mode == "from_point":  # the prompt contains the first visible point
        query = next((p for p in points if "occluded" not in p), None)
        points = [p for p in points if query and p["id"] == query["id"] and p["t"] > query["t"]]
        fields["query"] = query
    skip_unless(any("occluded" not in p for p in points), "track without a visible point")
    return {"type": "track", **labels(label), "coords": "pixel", **fields, "points": points}


def caption(value, style):
    return {"type": "caption", "style": style, "text": text_of(value)}


def answer(question, style, value, **fields):
    return {"type": "qa", "style": style, "question": text_of(question),
            "answer": text_of(value), **fields}


def choice(question, style, options, correct, **fields):
    """A multiple-choice question. options[correct] is the right answer."""
    options = [option.strip() for option in options]
    # an option that is given twice gets one letter
    distinct = list(dict.fromkeys(options))
    skip_unless(2 <= len(distinct) <= MAX_OPTIONS and correct in range(len(options)),
                "no right option among 2 to 26")
    return {"type": "qa", "style": style, "question": text_of(question), "options": distinct,
            "answer_idx": distinct.index(options[correct]), **fields}


def dialogue(pairs, style, system=None):
    """pairs: [(question, answer), ..]."""
    head = {"type": "qa", "style": style} | ({"system": system} if system else {})
    return head | {"turns": [{"question": question, "answer": reply} for question, reply in pairs]}


def split_turns(messages):
    """Messages with "role" and "content", or with "from" and "value" -> (system or None,
    [(question, answer), ..]). A last question without an answer is skipped."""
    parsed = []
    for message in messages:
        role = message.get("role") or message.get("from")
        text = message.get("content") or message.get("value")
        parsed.append((ROLES.get(role, role), text))
    system = None
    if parsed and parsed[0][0] == "system":
        system = text_of(parsed.pop(0)[1])
    found = []
    pairs = zip(parsed[::2], parsed[1::2], strict=False)
    for (role, question), (next_role, reply) in pairs:
        skip_unless((role, next_role) == ("user", "assistant"), "turns that do not alternate")
        skip_unless(text_of(question) and text_of(reply), "empty turn")
        found.append((question, reply))
    skip_unless(found, "turns that do not alternate")
    return system, found


def placed(label, places, size):
    """All places of one label in an image -> a box annotation, or a point annotation if one of them
    is a point. They are skipped if one of the places cannot be used.

    places: points [x, y] or boxes [left, top, right, bottom], which are clipped to the image, or
    the reason as an Unreadable. size: (width, height) or UNIT.
    """

    def need(condition, kind, reason):
        skip_unless(condition, kind, f"label {short(label)}: {reason}")

    for place in places:
        need(not isinstance(place, Unreadable), *getattr(place, "args", ("", "")))
        need(all(map(is_number, place)) and len(place) in (2, 4), "wrong numbers",
             f"not a point, box or polygon: {short(place)}")
    need(is_text(label), "no label", "the file has no name for this label")
    need(label not in ("__ignore__", "_background_"), "no object",
         "LabelMe uses this label for pixels without an object")
    need(len(places) <= MAX_POINTS, f"more than {MAX_POINTS} points",
         "training skips such annotations")
    fields = {"label": label.strip(), "coords": "unit" if size == UNIT else "pixel"}
    points = [{"x": place[0], "y": place[1]} for place in places if len(place) == 2]
    boxes = []
    for left, top, right, bottom in (place for place in places if len(place) == 4):
        box = [max(left, 0), max(top, 0), min(right, size[0]), min(bottom, size[1])]
        need(box[0] < box[2] and box[1] < box[3], "a box without an area",
             "no part of it is inside the image")
        boxes.append({"box": [round(side, 6) for side in box]})
    if points and boxes:  # all objects of a label must be in one annotation
        centres = [(left + right, top + bottom) for left, top, right, bottom in
                   (entry["box"] for entry in boxes)]
        points += [{"x": x / 2, "y": y / 2} for x, y in centres]
        boxes = []
    if boxes:
        return {"type": "box", **fields, "form": "xyxy", "boxes": boxes}
    return {"type": "point", **fields, "points": points}


def split(annotations, max_points):
    """annotations: [(number of points or boxes, annotation), ..]. Yields lists of annotations, one
    list per record. A list has at most max_points points or boxes (docs/molmo2.md 9.3)."""
    part = []
    total = 0
    for n_points, annotation in annotations:
        if part and total + n_points > max_points:
            yield part
            part = []
            total = 0
        part.append(annotation)
        total += n_points
    if part:
        yield part
