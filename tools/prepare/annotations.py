"""Cells of published sets -> annotations of records (docs/records.md).

Every function returns a part of a record, or raises Skip with a reason, which is
counted. What a record may hold is checked by tools.check; here, an annotation is left
out where it would cost the other annotations of its record.
"""

import math

MAX_OPTIONS = 26                     # one letter each
UNKNOWN_SIZE = (math.inf, math.inf)  # of an image that is not there yet
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


class Skip(Exception):
    """The reason why a row, or one annotation of a row, is left out."""


def require(condition, reason):
    if not condition:
        raise Skip(reason)


# ------------------------------------------------------------------------------------------------
# single cells


def text_of(value):
    """A string without surrounding white space; None if nothing is left."""
    return value.strip() or None if isinstance(value, str) else None


def text_or_skip(value, what):
    text = text_of(value)
    require(text, f"empty {what}")
    return text


def number_of(value):
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def meta_of(**values):
    """{"meta": {..}} of the values that are not null; {} if none is. Parquet fills in
    nulls wherever rows differ."""
    meta = {}
    for name, value in values.items():
        if text_of(value) or number_of(value) is not None or isinstance(value, bool):
            meta[name] = value
    return {"meta": meta} if meta else {}


def size_of(width, height):
    """[width, height] in pixels; None if one of them is unknown."""
    if min(number_of(width) or 0, number_of(height) or 0) < 1:
        return None
    return [int(width), int(height)]


def xy_points(cell):
    """[{"x":, "y":}, ..] from a list of structs, or from a struct of lists."""
    if isinstance(cell, dict):
        pairs = zip(cell["x"], cell["y"], strict=True)
    else:
        pairs = [(point["x"], point["y"]) for point in cell or []]
    return [{"x": x, "y": y} for x, y in pairs]


def check_image_count(images):
    """The images of a multi-image record, of which Molmo2 takes two to five."""
    require(2 <= len(images) <= 5, "not 2 to 5 images")
    return images


# ------------------------------------------------------------------------------------------------
# points, counts, tracks


def label_fields(label, question=None):
    cells = {"label": text_of(label), "question": text_of(question)}
    fields = {name: text for name, text in cells.items() if text}
    require(fields, "no label")
    return fields


def check_inside(points, width, height):
    """Skip if a point is NaN, or more than 1 % outside, which no record may have."""
    for point in points:
        inside_x = -width / 100 <= point["x"] <= 1.01 * width
        inside_y = -height / 100 <= point["y"] <= 1.01 * height
        require(inside_x and inside_y, "point outside the image")


def point_annotation(points, coords, label, question=None, size=None, count=None, clip=False,
                     max_points=math.inf, counts=None, **fields):
    """points: [{"x":, "y":, "t" or "image"}, ..]; size: [width, height] or None; count:
    as published, which must be the number of points; clip: points outside are moved to
    the border; counts: (lowest, highest) number of points to take."""
    names = label_fields(label, question)
    width, height = (100, 100) if coords == "percent" else size or UNKNOWN_SIZE
    if clip:
        points = [{**p, "x": min(max(p["x"], 0), width), "y": min(max(p["y"], 0), height)}
                  for p in points]
    check_inside(points, width, height)
    require(len(points) <= max_points, f"more than {max_points} points")
    if counts:
        least, most = counts
        require(least <= len(points) <= most, f"not {least} to {most} points")
    if count is not None:
        require(count == len(points), "count is not the number of points")
        fields["count"] = len(points)
    if size:
        fields = {"size": size, **fields}
    return {"type": "point", **names, "coords": coords, **fields, "points": points}


def box_annotation(boxes, label, width, height, max_points):
    """boxes: [[left, top, width, height], ..] in pixels of the image, whose border cuts
    them off; those without an area are left out."""
    kept = []
    for left, top, w, h in boxes:
        right, bottom = min(left + w, width), min(top + h, height)
        left, top = max(left, 0), max(top, 0)
        if right > left and bottom > top:
            kept.append({"box": [left, top, right, bottom]})
    require(kept, "no box with an area")
    require(len(kept) <= max_points, f"more than {max_points} points")
    return {"type": "box", **label_fields(label), "coords": "pixel", "form": "xyxy", "boxes": kept}


def count_annotation(count, label, question=None):
    require(number_of(count) is not None and count >= 0, "no count")
    return {"type": "count", **label_fields(label, question), "count": int(count)}


def track_annotation(label, points, times, rate, mode, size):
    """points: [{"t":, "id":, "x":, "y":, "occluded"}, ..] in pixels; times: of the
    frames, in seconds; rate: frames a second."""
    check_inside(points, *(size or UNKNOWN_SIZE))
    visible = [p for p in points if "occluded" not in p]
    query = {}
    if mode == "from_point" and visible:                 # the first visible point is the question
        first = visible[0]
        query = {"query": first}
        points = [p for p in points if p["id"] == first["id"] and p["t"] > first["t"]]
        visible = [p for p in points if "occluded" not in p]
    require(visible, "track without a visible point")
    fields = {"size": size} if size else {}
    fields |= {"mode": mode, "fps": rate, "times": times, **query}
    names = label_fields(label)
    return {"type": "track", **names, "coords": "pixel", **fields, "points": points}


# ------------------------------------------------------------------------------------------------
# text


def caption(value, style):
    return {"type": "caption", "style": style, "text": text_or_skip(value, "caption")}


def question_fields(question, style):
    return {"type": "qa", "style": style, "question": text_or_skip(question, "question")}


def answer(question, style, value, **fields):
    """A question with one answer."""
    start = question_fields(question, style)
    return {**start, "answer": text_or_skip(value, "answer"), **fields}


def crowd_answers(question, style, values):
    """A question with the answers of several people."""
    start = question_fields(question, style)
    values = [text_of(value) for value in values if text_of(value)]
    require(values, "empty answer")
    return {**start, "answers": values}


def multiple_choice(question, style, options, correct, **fields):
    """A question with options, of which options[correct] is the right one."""
    start = question_fields(question, style)
    options = [option.strip() for option in options]
    distinct = list(dict.fromkeys(options))              # one letter for an option given twice
    is_complete = 2 <= len(distinct) <= MAX_OPTIONS and correct in range(len(options))
    require(is_complete, "no right option among 2 to 26")
    answer_idx = distinct.index(options[correct])
    return {**start, "options": distinct, "answer_idx": answer_idx, **fields}


def dialogue(turns, style, system=None):
    """turns: [(question, answer), ..]."""
    annotation = {"type": "qa", "style": style}
    if system:
        annotation["system"] = system
    turns = [{"question": question, "answer": reply} for question, reply in turns]
    return {**annotation, "turns": turns}


def parse_messages(messages):
    """Messages with role and content, or with from and value -> (system or None,
    [(question, answer), ..]). A last question without an answer is dropped."""
    parsed = []
    for message in messages:
        role = str(message.get("role") or message.get("from")).lower()
        parsed.append((ROLES.get(role, role), message.get("content") or message.get("value")))
    system = None
    if parsed and parsed[0][0] == "system":
        system = text_of(parsed.pop(0)[1])
    turns = []
    for (role, question), (next_role, reply) in zip(parsed[::2], parsed[1::2], strict=False):
        require((role, next_role) == ("user", "assistant"), "turns that do not alternate")
        require(text_of(question) and text_of(reply), "empty turn")
        turns.append((question, reply))
    require(turns, "turns that do not alternate")
    return system, turns
