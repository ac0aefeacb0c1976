"""Checks the fields of a native record, and the rules between them (docs/records.md).

in    a record as parsed from JSON
out   nothing, or Unreadable: "annotations[0].points[3]: 'x' must be a number, not '4'"

Sizes and times that only the files know are checked with their headers (visual.py).
"""

import difflib

from records.errors import Unreadable
from text.points import scales, unit
from text.styles import TASK_OF_STYLE, caption_part, medium
from text.tracks import track_mode

BOX_FORMS = {  # four numbers -> left, top, right, bottom
    "xyxy": lambda left, top, right, bottom: [left, top, right, bottom],
    "xywh": lambda left, top, w, h: [left, top, left + w, top + h],
    "cxcywh": lambda x, y, w, h: [x - w / 2, y - h / 2, x + w / 2, y + h / 2],
}

_COMMON = {"type": "type!", "style": "text", "weight": "weight", "meta": "object"}
_ANSWER = {
    "answer": "text", "answers": "texts", "options": "options", "answer_idx": "any",
    "shuffle_options": "bool", "letters": "bool", "explanation": "text"}
_FILE = {"width": "pixels", "height": "pixels", "url": "text", "sha256": "text"}
_PROMPT = {"label": "text", "question": "text"}
_COORDS = {"coords": "coords!", "size": "size"}
# Name of an object -> its fields and their kinds; "!": the field must be there. A kind is
# one of KINDS, or the name of an object, or "list of" and that name.
TABLES = {
    "record": {
        "id": "text", "image": "image", "images": "list of image", "video": "video",
        "subtitles": "subtitles", "annotations": "list!", "weight": "positive",
        "meta": "object"},
    "image": {"path": "text!", **_FILE},
    "video": {
        "path": "text", "frames": "texts", "fps": "positive", "start": "from 0",
        "end": "from 0", "first": "from 0", "duration": "positive", **_FILE},
    "subtitle": {"start": "from 0!", "end": "from 0!", "text": "string!"},
    "caption": {
        **_COMMON, "text": "text!", "object": "text", "start": "from 0",
        "end": "from 0", "at": "from 0"},
    "qa": {
        **_COMMON, "system": "text", "turns": "list of turn", "question": "any",
        **_ANSWER},
    "turn": {"question": "any!", "weight": "weight", **_ANSWER},
    "point": {
        **_COMMON, **_PROMPT, **_COORDS, "points": "list of point entry!", "count": "index",
        "mode": "point mode"},
    "point entry": {"x": "number!", "y": "number!", "image": "index", "t": "from 0"},
    "box": {
        **_COMMON, **_PROMPT, **_COORDS, "form": "box form!",
        "boxes": "list of box entry!", "mode": "point mode"},
    "box entry": {"box": "box!", "image": "index", "t": "from 0"},
    "count": {**_COMMON, **_PROMPT, "count": "index!"},
    "track": {
        **_COMMON, **_PROMPT, **_COORDS, "label": "text!", "points": "list of track entry!",
        "mode": "track mode", "fps": "positive", "times": "times", "query": "track entry"},
    "track entry": {
        "t": "from 0!", "id": "object id!", "x": "number!", "y": "number!",
        "occluded": "bool"},
    "text": {**_COMMON, "prompt": "text", "text": "text!"},
    "preference": {
        **_COMMON, "question": "any!", "chosen": "text!", "rejected": "text!"},
}
HINTS = {  # for what stands in the place of an object
    "record": "; a file with an array of records ends in .json",
    "box entry": '; write {"box": [..]}',
    "video": '; frames are given as {"frames": [..], "fps": 2}',
}
WORDS = {
    "type": ("caption", "qa", "point", "box", "count", "track", "text", "preference"),
    "coords": ("unit", "percent", "pixel"),
    "box form": tuple(BOX_FORMS),
    "point mode": ("point", "point_count", "count_point"),
    "track mode": ("per_frame", "start_end", "from_point"),
}


def is_a(*types):
    return lambda value: isinstance(value, types)


def is_number(value):
    """Is it a finite number, and no bool?"""
    is_finite = isinstance(value, (int, float)) and abs(value) < 1e300
    return is_finite and not isinstance(value, bool)


def is_from(least, types=(int, float), most=1e300):
    return lambda value: (is_number(value) and isinstance(value, types)
                          and least <= value <= most)


def is_text(value):
    return isinstance(value, str) and bool(value.strip())


def is_list_of(accepts, n_least=0, n_most=1e300):
    return lambda value: (isinstance(value, list) and n_least <= len(value) <= n_most
                          and all(map(accepts, value)))


KINDS = {  # what a value must be, in words, and the test
    "any": ("", is_a(object)),
    "text": ("a text that is not blank", is_text),
    "string": ("a text", is_a(str)),
    "texts": ("a list of texts that are not blank", is_list_of(is_text, 1)),
    "options": ("2 to 26 texts", is_list_of(is_a(str), 2, 26)),
    "number": ("a number", is_number),
    "positive": ("a number from 1e-9 to 1e12", is_from(1e-9, most=1e12)),
    "weight": ("0, or a number from 1e-9 to 1e12",
               lambda value: is_from(0, most=0)(value) or is_from(1e-9, most=1e12)(value)),
    "from 0": ("a number from 0 on", is_from(0)),
    "times": ("a list of seconds", is_list_of(is_from(0))),
    "pixels": ("a whole number from 1 on", is_from(1, int)),
    "index": ("a whole number from 0 on", is_from(0, int)),
    "object id": ("a whole number or a text",
                  lambda value: isinstance(value, (int, str)) and not isinstance(value, bool)),
    "size": ("[width, height] in pixels", is_list_of(is_from(1, int), 2, 2)),
    "box": ("a list of four numbers", is_list_of(is_number, 4, 4)),
    "subtitles": ("a text or a list of {start, end, text}", is_a(str, list)),
    "bool": ("true or false", is_a(bool)),
    "list": ("a list", is_a(list)),
    "object": ("an object", is_a(dict)),
}
KINDS |= {kind: (f"one of {', '.join(words)}", words.__contains__)
          for kind, words in WORDS.items()}


def fail(place, message):
    raise Unreadable("wrong record", f"{place}: {message}")


def require(condition, place, message):
    """Fails unless the condition holds. The message is made anyway: it must be cheap."""
    if not condition:
        fail(place, message)


def short(value):
    """A value as it may stand in a message: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word, words):
    close = difflib.get_close_matches(str(word), words, 1)
    return f" - did you mean '{close[0]}'?" if close else ""


def check_kind(key, value, kind, place):
    words, accepts = KINDS[kind]
    if not accepts(value):
        hint = did_you_mean(value, WORDS.get(kind, ()))
        fail(place, f"'{key}' must be {words}, not {short(value)}{hint}")


def check_fields(value, name, place):
    """An object, and those in it, against their tables. place: its place in the record."""
    if name in ("image", "video") and is_text(value):
        return  # a path
    if not isinstance(value, dict):
        fail(place, f"it must be an object, not {short(value)}{HINTS.get(name, '')}")
    table = TABLES[name]
    for key, field in value.items():
        if key not in table:
            missing = [f"; '{other}' is missing" for other, kind in table.items()
                       if kind[-1] == "!" and other not in value]
            hint = did_you_mean(key, table) or "".join(missing[:1])
            fail(place, f"unknown field '{key}'{hint}")
        kind = table[key].rstrip("!")
        if kind in KINDS:
            check_kind(key, field, kind, place)
            continue
        inner = kind.removeprefix("list of ")
        path = key if name == "record" else f"{place}.{key}"
        if inner == kind:
            check_fields(field, inner, path)
            continue
        check_kind(key, field, "list", place)
        for k, entry in enumerate(field):
            check_fields(entry, inner, f"{path}[{k}]")
    for key, kind in table.items():
        if kind[-1] == "!" and key not in value:
            fail(place, f"the field '{key}' is missing")
    for one, other in (("width", "height"), ("start", "end")):
        if (one in value) != (other in value):
            fail(place, f"{one} and {other} must be given together")


def check(record):
    """Unreadable if a native record is wrong, with the place in it."""
    check_fields(record, "record", "the record")
    given = [key for key in ("image", "images", "video") if key in record]
    require(len(given) < 2, "the record", f"it has both {' and '.join(given)}")
    for key in ("images", "annotations"):
        require(record.get(key) != [], "the record", f"'{key}' is empty")
    video = record.get("video")
    if isinstance(video, dict):
        require(("path" in video) != ("frames" in video), "video",
                "it has either 'path' or 'frames'")
        require("fps" in video or "path" in video, "video", "'frames' need 'fps'")
        require(video.get("start", 0) < video.get("end", 1), "video",
                "it ends before it starts")
    subtitles = record.get("subtitles")
    require(not subtitles or "video" in record, "the record", "subtitles need a video")
    for k, line in enumerate(subtitles if isinstance(subtitles, list) else ()):
        check_fields(line, "subtitle", f"subtitles[{k}]")
    for k, annotation in enumerate(record["annotations"]):
        check_annotation(annotation, record, f"annotations[{k}]")


def check_annotation(annotation, record, place):
    kind = annotation.get("type") if isinstance(annotation, dict) else None
    check_kind("type", kind, "type", place)
    check_fields(annotation, kind, place)
    shown = medium(record)
    require(kind in ("qa", "text", "preference") or shown != "text", place,
            f"a {kind} needs an image or a video")
    if kind == "qa":
        check_qa(annotation, record, place)
    elif kind == "preference":
        check_question(annotation["question"], record, place)
    elif kind == "caption":
        check_caption(annotation, shown, place)
    elif kind == "track":
        check_track(annotation, record, place)
    elif kind in ("point", "box", "count"):
        check_points(annotation, record, place)
    if kind in ("point", "box", "track"):
        check_range(annotation, scales(record), place)


def check_caption(caption, shown, place):
    require(caption.get("start", 0) < caption.get("end", 1), place, "it ends before it starts")
    times = {"start", "at"} & set(caption)
    require(not times or shown == "video", place, "a caption with times needs a video")
    needs_part = TASK_OF_STYLE.get(caption.get("style")) in ("clip", "frame")
    require(len(times) < 2 and (caption_part(caption) or not needs_part), place,
            "by its times or its style, a caption of a part needs 'start' and 'end', "
            "and one of a frame needs 'at'")


def check_points(annotation, record, place):
    """Of points, boxes or a count."""
    require({"label", "question"} & set(annotation), place, "it needs a label or a question")
    if annotation["type"] == "count":
        return
    shown = medium(record)
    needed = {"video": {"t"}, "images": {"image"}}.get(shown, set())
    name = "points" if annotation["type"] == "point" else "boxes"
    points = annotation[name]
    for k, point in enumerate(points):
        at = f"{place}.{name}[{k}]"
        require({"t", "image"} & set(point) == needed, at,
                "'t' is given in a video, 'image' in one of several images, else neither")
        require(shown != "images" or point["image"] < len(record["images"]), at,
                f"there is no image {point.get('image')}")
    n = len(points)
    count = annotation.get("count", n)
    require(count == n, place, f"the count is {count}, but the number of points is {n}")


def check_track(track, record, place):
    require(medium(record) == "video", place, "a track needs a video")
    points = track["points"]
    moments = {(point["t"], point["id"]) for point in points}
    require(len(moments) == len(points), place, "an object is twice at the same time")
    if "query" in track:
        ids = [point["id"] for point in points]
        require(track["query"]["id"] in ids, place, "no point is of the query's object")
    elif track_mode(track, record) == "from_point":
        fail(place, "a track from_point needs a query, the point to start from")


def check_range(annotation, scales, place):
    """Points lie inside the image, to 1 % of its sides, where its scale is known.

    scales: see text.points.scales.
    """
    points = list(as_points(annotation, place)["points"])
    if "query" in annotation:
        points.append(annotation["query"])
    for k, point in enumerate(points):
        scale = scales[point.get("image", 0)]
        if annotation["coords"] == "pixel" and not annotation.get("size", scale):
            continue
        left, top, right, bottom = point.get("box", [point["x"], point["y"]] * 2)
        sides = [*unit({"x": left, "y": top}, annotation, scale),
                 *unit({"x": right, "y": bottom}, annotation, scale)]
        require(min(sides) >= -0.01 and max(sides) <= 1.01, place,
                f"point {k} lies outside the image with coords={annotation['coords']} - "
                "is the unit or the size wrong?")


def as_points(annotation, place="boxes"):
    """A box annotation -> the points that it is trained as; others as they are."""
    if annotation["type"] != "box":
        return annotation
    points = []
    for k, entry in enumerate(annotation["boxes"]):
        box = BOX_FORMS[annotation["form"]](*entry["box"])
        left, top, right, bottom = box
        require(left < right and top < bottom, f"{place}.boxes[{k}]",
                f"{entry['box']} has no width or no height - is the form wrong?")
        centre = {"x": (left + right) / 2, "y": (top + bottom) / 2}
        points.append(entry | centre | {"box": box})
    kept = {key: annotation[key] for key in annotation if key not in ("boxes", "form")}
    return kept | {"type": "point", "points": points}


def unlikely_units(record):
    """-> [sentence, ..] of points in percent or pixels that look like fractions."""
    found = []
    for k, a in enumerate(record["annotations"]):
        sides = [side for p in a.get("points", ()) for side in (p["x"], p["y"])]
        if sides and max(sides) <= 1 and a["coords"] != "unit":
            found.append(f"annotations[{k}]: every coordinate is at most 1 with "
                         f"coords={a['coords']}; is it 'unit'?")
    return found


THOUSANDTHS = ("every coordinate is at most 1,000 with coords=pixel, and every image is larger; "
               'are they thousandths? Then each annotation needs "size": [1000, 1000]')


def like_thousandths(record, sizes=()):
    """May the points in pixels of a record be thousandths: is no coordinate over 1,000, and is
    every image larger? None without such points. sizes: of the files (text.points.scales)."""
    found = None
    for a in record["annotations"]:
        for point in a.get("points", ()) if a.get("coords") == "pixel" else ():
            size = a.get("size") or scales(record, sizes)[point.get("image", 0)]
            furthest = max(point.get("box", (point["x"], point["y"])))
            if not size or min(size) <= 1000 or furthest > 1000:
                return False
            found = True
    return found


def check_qa(qa, record, place):
    require(("turns" in qa) != bool({"question", *_ANSWER} & set(qa)), place,
            "a qa has either 'turns', or a question with its answer")
    require(qa.get("turns") != [], place, "'turns' is empty")
    for k, turn in enumerate(qa.get("turns", [qa])):
        at = f"{place}.turns[{k}]" if "turns" in qa else place
        check_question(turn.get("question"), record, at)
        answered = {"answer", "answers", "options"} & set(turn)
        require(len(answered) == 1, at, "it needs one of answer, answers and options")
        right = turn.get("answer_idx")
        numbers = right if isinstance(right, list) else [right]
        are_indices = is_list_of(is_from(0, int), 1)(numbers)
        n = len(turn.get("options", ()))
        require(not n or (are_indices and max(numbers) < n), at, "'answer_idx' must be the "
                "number of the right option, from 0, or a list of them")


def check_question(question, record, place):
    """A text, or a list of texts and references {"image": k} or {"video": 0}."""
    n_images = len(record.get("images", ["image"] if "image" in record else []))
    known = [{"image": k} for k in range(n_images)]
    known += [{"video": 0}] if "video" in record else []
    parts = question if isinstance(question, list) else [question]
    is_part = [isinstance(part, str) or part in known for part in parts]
    blank = all(isinstance(part, str) and not part.strip() for part in parts)
    require(all(is_part) and not blank, place, "'question' must be a text, or a list of texts "
            'and {"image": k} or {"video": 0}, counted from 0')
