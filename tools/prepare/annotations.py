"""Reads the cells of published sets and makes annotations from them (docs/records.md).

A function raises Skip if a row or an annotation cannot be used, and the command counts the
reasons. The finished records are checked by tools.check, not here.
"""

import math

MAX_OPTIONS = 26  # every option has a letter
MAX_POINTS = 60  # per annotation, and in some sets per record
UNKNOWN_SIZE = (math.inf, math.inf)  # of an image that is not downloaded yet
ROLES = {"human": "user", "gpt": "assistant"}


class Skip(Exception):
    """A row, or one annotation of a row, is skipped for this reason."""


def require(condition, reason):
    if not condition:
        raise Skip(reason)


def text_of(value):
    """The string without surrounding white space; None if it is empty, or not a string."""
    return value.strip() or None if isinstance(value, str) else None


def text_or_skip(value, what):
    text = text_of(value)
    require(text, f"empty {what}")
    return text


def number_of(value):
    """The value if it is a finite number, else None."""
    return value if type(value) in (int, float) and abs(value) < 1e300 else None


def size_of(width, height):
    """[width, height] in pixels; None if one of them is unknown."""
    is_known = min(number_of(width) or 0, number_of(height) or 0) >= 1
    return [int(width), int(height)] if is_known else None


def xy_points(cell):
    """[{"x":, "y":}, ..] from a list of structs, or from a struct of lists."""
    if isinstance(cell, dict):
        return [{"x": x, "y": y} for x, y in zip(cell["x"], cell["y"], strict=True)]
    return [{"x": p["x"], "y": p["y"]} for p in cell or []]


def labels(label, question=None):
    cells = {"label": text_of(label), "question": text_of(question)}
    fields = {name: text for name, text in cells.items() if text}
    require(fields, "no label")
    return fields


def check_inside(points, width, height):
    """Skip if a point is NaN or over 1 % outside the image. A record must not contain it."""
    for p in points:
        inside_x = -width / 100 <= p["x"] <= 1.01 * width
        inside_y = -height / 100 <= p["y"] <= 1.01 * height
        require(inside_x and inside_y, "point outside the image")


def point(points, coords, label, question=None, size=None, count=None, clip=False,
          max_points=math.inf, counts=None, **fields):
    """points: [{"x":, "y":, "t" or "image":}, ..]. size: [width, height], or None if unknown.
    clip: move points that are outside the image to its border. count: the published count; Skip
    if it is not the number of points. counts: (min, max); Skip for fewer or more points."""
    names = labels(label, question)
    width, height = (100, 100) if coords == "percent" else size or UNKNOWN_SIZE
    if clip:
        points = [p | {"x": min(max(p["x"], 0), width), "y": min(max(p["y"], 0), height)}
                  for p in points]
    check_inside(points, width, height)
    require(len(points) <= max_points, f"more than {max_points} points")
    least, most = counts or (0, math.inf)
    require(least <= len(points) <= most, f"not {least} to {most} points")
    if count is not None:
        require(count == len(points), "count is not the number of points")
        fields["count"] = len(points)
    if size:
        fields = {"size": size, **fields}
    return {"type": "point", **names, "coords": coords, **fields, "points": points}


def count(number, label, question=None):
    require(number_of(number) is not None and number >= 0, "no count")
    return {"type": "count", **labels(label, question), "count": int(number)}


def track(label, points, times, rate, mode, size):
    """points: [{"t":, "id":, "x":, "y":, "occluded":}, ..] in pixels. times: the times of the
    frames in seconds. rate: frames per second."""
    check_inside(points, *(size or UNKNOWN_SIZE))
    fields = {"size": size} if size else {}
    fields |= {"mode": mode, "fps": rate, "times": times}
    if mode == "from_point":  # the prompt contains the first visible point
        query = next((p for p in points if "occluded" not in p), None)
        points = [p for p in points if query and p["id"] == query["id"] and p["t"] > query["t"]]
        fields["query"] = query
    require(any("occluded" not in p for p in points), "track without a visible point")
    return {"type": "track", **labels(label), "coords": "pixel", **fields, "points": points}


def caption(value, style):
    return {"type": "caption", "style": style, "text": text_or_skip(value, "caption")}


def question_fields(question, style):
    return {"type": "qa", "style": style, "question": text_or_skip(question, "question")}


def answer(question, style, value, **fields):
    start = question_fields(question, style)
    return {**start, "answer": text_or_skip(value, "answer"), **fields}


def choice(question, style, options, correct, **fields):
    """A multiple-choice question. options[correct] is the right answer."""
    start = question_fields(question, style)
    options = [option.strip() for option in options]
    # an option that is given twice gets one letter
    distinct = list(dict.fromkeys(options))
    require(2 <= len(distinct) <= MAX_OPTIONS and correct in range(len(options)),
            "no right option among 2 to 26")
    answer_idx = distinct.index(options[correct])
    return {**start, "options": distinct, "answer_idx": answer_idx, **fields}


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
        require((role, next_role) == ("user", "assistant"), "turns that do not alternate")
        require(text_of(question) and text_of(reply), "empty turn")
        found.append((question, reply))
    require(found, "turns that do not alternate")
    return system, found


def split(annotations, max_points):
    """Yields lists of annotations, one list per record. A list has at most max_points points or
    boxes (docs/molmo2.md 9.3)."""
    part = []
    total = 0
    for annotation in annotations:
        n_points = len(annotation.get("points", annotation.get("boxes", ())))
        if part and total + n_points > max_points:
            yield part
            part = []
            total = 0
        part.append(annotation)
        total += n_points
    if part:
        yield part
