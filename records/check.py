"""Checks a native record against the format (docs/records.md): its fields, and the rules between
them.

in    a record as parsed from JSON
out   nothing, or ValueError: "annotations[0].points[3]: 'x' must be a number, not '4'"

Sizes and times that only the media files know are checked when their headers are read (visual.py).
"""

import difflib

from text.points import scales, unit
from text.styles import medium

BOX_FORMS = {                        # four numbers -> left, top, right, bottom
    "xyxy": lambda left, top, right, bottom: [left, top, right, bottom],
    "xywh": lambda left, top, w, h: [left, top, left + w, top + h],
    "cxcywh": lambda x, y, w, h: [x - w / 2, y - h / 2, x + w / 2, y + h / 2],
}
WORDS = {                            # kinds of fields that hold one of these words
    "coords": ("unit", "percent", "pixel"),
    "box form": tuple(BOX_FORMS),
    "point mode": ("point", "point_count", "count_point"),
    "track mode": ("per_frame", "start_end", "from_point"),
}
ANNOTATION_TYPES = ("caption", "qa", "point", "box", "count", "track", "text")

_COMMON = {"type": "text!", "style": "text", "weight": "weight", "meta": "object"}
_ANSWER = {
    "answer": "text", "answers": "texts", "options": "options", "answer_idx": "any",
    "shuffle_options": "bool", "letters": "bool", "explanation": "text"}
_FILE = {"width": "pixels", "height": "pixels", "url": "text", "sha256": "text"}
_PROMPT = {"label": "text", "question": "text"}
_COORDS = {"coords": "coords!", "size": "size"}
# name of an object -> its fields and their kinds; "!": the field must be there
TABLES = {
    "record": {
        "id": "text", "image": "any", "images": "list", "video": "any", "subtitles": "any",
        "annotations": "list!", "weight": "positive", "meta": "object"},
    "image": {"path": "text!", **_FILE},
    "video": {
        "path": "text", "frames": "texts", "fps": "positive", "start": "seconds",
        "end": "seconds", "duration": "positive", **_FILE},
    "subtitle": {"start": "seconds!", "end": "seconds!", "text": "string!"},
    "caption": {
        **_COMMON, "text": "text!", "object": "text", "start": "seconds", "end": "seconds",
        "at": "seconds"},
    "qa": {**_COMMON, "system": "text", "turns": "list", "question": "any", **_ANSWER},
    "turn": {"question": "any!", "weight": "weight", **_ANSWER},
    "point": {
        **_COMMON, **_PROMPT, **_COORDS, "points": "list!", "count": "index",
        "mode": "point mode"},
    "points": {"x": "number!", "y": "number!", "image": "index", "t": "seconds"},
    "box": {
        **_COMMON, **_PROMPT, **_COORDS, "form": "box form!", "boxes": "list!",
        "mode": "point mode"},
    "boxes": {"box": "box!", "image": "index", "t": "seconds"},
    "count": {**_COMMON, **_PROMPT, "count": "index!"},
    "track": {
        **_COMMON, **_PROMPT, **_COORDS, "label": "text!", "points": "list!",
        "mode": "track mode", "fps": "positive", "times": "times", "query": "any"},
    "track points": {
        "t": "seconds!", "id": "object id!", "x": "number!", "y": "number!", "occluded": "bool"},
    "text": {**_COMMON, "prompt": "text", "text": "text!"},
}


# --------------------------------------------------------------------------------------------------
# one object against its table


def is_number(value):
    """Is it a finite number, and no bool?"""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_whole(value):
    return isinstance(value, int) and is_number(value)


def is_text(value):
    return isinstance(value, str) and bool(value.strip())


def is_list_of(accepts, value, n_least, n_most=None):
    if not isinstance(value, list) or not n_least <= len(value) <= (n_most or len(value)):
        return False
    return all(map(accepts, value))


def is_seconds(value):
    return is_number(value) and value >= 0


KINDS = {                            # kind -> what a value must be, in words, and the test
    "any": ("", lambda v: True),
    "text": ("a text that is not blank", is_text),
    "string": ("a text", lambda v: isinstance(v, str)),
    "texts": ("a list of texts that are not blank", lambda v: is_list_of(is_text, v, 1)),
    "options": ("2 to 26 texts",
                lambda v: is_list_of(lambda option: isinstance(option, str), v, 2, 26)),
    "number": ("a number", is_number),
    "positive": ("a number above 0", lambda v: is_number(v) and v > 0),
    "weight": ("a number from 0 on", is_seconds),
    "seconds": ("seconds, a number from 0 on", is_seconds),
    "times": ("a list of seconds from 0 on", lambda v: is_list_of(is_seconds, v, 0)),
    "pixels": ("a whole number from 1 on", lambda v: is_whole(v) and v >= 1),
    "index": ("a whole number from 0 on", lambda v: is_whole(v) and v >= 0),
    "object id": ("a whole number or a text", lambda v: is_whole(v) or isinstance(v, str)),
    "size": ("[width, height] in pixels",
             lambda v: is_list_of(lambda side: is_whole(side) and side > 0, v, 2, 2)),
    "box": ("a list of four numbers", lambda v: is_list_of(is_number, v, 4, 4)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "object": ("an object", lambda v: isinstance(v, dict)),
}


def fail(place, message):
    raise ValueError(f"{place}: {message}")


def require(condition, place, message):
    """For messages that cost no time: they are made where nothing is wrong, too."""
    if not condition:
        fail(place, message)


def short(value):
    """A value as it may stand in a message: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word, words):
    close = difflib.get_close_matches(str(word), words, 1)
    return f" - did you mean '{close[0]}'?" if close else ""


def check_fields(value, name, place):
    """One JSON object against the table of that name; place: where it stands in the record."""
    if not isinstance(value, dict):
        fail(place, f"it must be an object, not {short(value)}")
    table = TABLES[name]
    for key, field in value.items():
        if key not in table:
            fail(place, f"unknown field '{key}'{did_you_mean(key, table)}")
        kind = table[key].rstrip("!")
        if kind in WORDS:
            check_word(key, field, WORDS[kind], place)
            continue
        words, accepts = KINDS[kind]
        if not accepts(field):
            fail(place, f"'{key}' must be {words}, not {short(field)}")
    for key, kind in table.items():
        require(key in value or not kind.endswith("!"), place, f"the field '{key}' is missing")


def check_word(key, value, words, place):
    if value not in words:
        fail(place, f"'{key}' must be one of {', '.join(words)}, not {short(value)}"
             f"{did_you_mean(value, words)}")


def check_together(value, place, *keys):
    given = [key for key in keys if key in value]
    require(len(given) in (0, len(keys)), place, f"{' and '.join(keys)} must be given together")


# --------------------------------------------------------------------------------------------------
# a record and its media


def check(record):
    """ValueError if a native record is wrong, with the place in it."""
    require(not isinstance(record, list), "the record",
            "it must be an object, not a list; a file with an array of records ends in .json")
    check_fields(record, "record", "the record")
    require(record["annotations"], "the record", "'annotations' is empty")
    check_media(record)
    for k, annotation in enumerate(record["annotations"]):
        check_annotation(annotation, record, f"annotations[{k}]")


def check_media(record):
    given = [key for key in ("image", "images", "video") if key in record]
    require(len(given) < 2, "the record", f"it has {' and '.join(given)}, which exclude each other")
    require(record.get("images") != [], "the record", "'images' is empty")
    images = [record["image"]] if "image" in record else record.get("images", [])
    for k, image in enumerate(images):
        if not is_text(image):
            check_fields(image, "image", f"images[{k}]")
            check_together(image, f"images[{k}]", "width", "height")
    if "video" in record and not is_text(record["video"]):
        check_video(record["video"])
    subtitles = record.get("subtitles", "")
    require(isinstance(subtitles, (str, list)) and (not subtitles or "video" in record),
            "subtitles", "they are a text or a list of {start, end, text}, and need a video")
    for k, line in enumerate([] if isinstance(subtitles, str) else subtitles):
        check_fields(line, "subtitle", f"subtitles[{k}]")


def check_video(video):
    check_fields(video, "video", "video")
    require(("path" in video) != ("frames" in video), "video", "it has either 'path' or 'frames'")
    require("fps" in video or "path" in video, "video", "'frames' are given without 'fps'")
    check_together(video, "video", "width", "height")
    check_together(video, "video", "start", "end")
    require(video.get("start", 0) < video.get("end", 1), "video", "the clip ends before it starts")


# --------------------------------------------------------------------------------------------------
# captions, points and tracks


def check_annotation(annotation, record, place):
    kind = annotation.get("type") if isinstance(annotation, dict) else None
    check_word("type", kind, ANNOTATION_TYPES, place)
    check_fields(annotation, kind, place)
    shown = medium(record)
    require(kind != "track" or shown == "video", place, "a track needs a video")
    require(kind in ("qa", "text") or shown != "text", place, f"a {kind} needs an image or a video")
    if kind == "qa":
        check_qa(annotation, record, place)
    elif kind == "caption":
        check_caption(annotation, shown, place)
    elif kind == "track":
        check_track(annotation, place)
    elif kind in ("point", "box", "count"):
        require({"label", "question"} & set(annotation), place, "it needs a label or a question")
    if kind in ("point", "box"):
        check_points(annotation, record, place)
    if kind in ("point", "box", "track"):
        check_range(annotation, scales(record), place)


def check_caption(caption, shown, place):
    times = [key for key in ("start", "end", "at") if key in caption]
    require(not times or shown == "video", place, "a caption with times needs a video")
    require(times in ([], ["at"], ["start", "end"]), place,
            "a caption of a part has 'start' and 'end', and one of a frame has 'at'")
    require(caption.get("start", 0) < caption.get("end", 1), place, "it ends before it starts")


def check_points(annotation, record, place):
    """'t' stands in a point of a video, 'image' in one of several images, and nowhere else."""
    shown = medium(record)
    name = "points" if annotation["type"] == "point" else "boxes"
    points = annotation[name]
    for k, point in enumerate(points):
        at = f"{place}.{name}[{k}]"
        check_fields(point, name, at)
        require(("t" in point) == (shown == "video"), at,
                "'t' must be given if the record has a video, and only then")
        require(("image" in point) == (shown == "images"), at,
                "'image', from 0, must be given if the record has several images, and only then")
        require(shown != "images" or point["image"] < len(record["images"]), at,
                f"there is no image {point.get('image')}")
    n = annotation.get("count", len(points))
    require(n == len(points), place, f"the count is {n}, but there are {len(points)} points")


def check_track(track, place):
    for k, point in enumerate(track["points"]):
        check_fields(point, "track points", f"{place}.points[{k}]")
    found = {(point["t"], point["id"]) for point in track["points"]}
    require(len(found) == len(track["points"]), place, "an object stands twice at the same time")
    if "query" in track:
        check_fields(track["query"], "track points", f"{place}.query")
        ids = [point["id"] for point in track["points"]]
        require(track["query"]["id"] in ids, place, "no point has the object of the query")
    require("query" in track or track.get("mode") != "from_point", place,
            "a track from_point needs a query, the point to start from")


def check_range(annotation, scales, place):
    """Points lie inside the image, to 1 % of its sides.

    scales: see text.points.scales. Where one is not known yet, its points are not checked.
    """
    points = as_points(annotation, place)["points"]
    points = [*points, annotation["query"]] if "query" in annotation else points
    for k, point in enumerate(points):
        scale = scales[point.get("image", 0)]
        if annotation["coords"] == "pixel" and not annotation.get("size", scale):
            continue
        left, top, right, bottom = point.get("box", [point["x"], point["y"]] * 2)
        sides = [*unit({"x": left, "y": top}, annotation, scale),
                 *unit({"x": right, "y": bottom}, annotation, scale)]
        if min(sides) < -0.01 or max(sides) > 1.01:
            fail(place, f"point {k} lies outside the image with coords={annotation['coords']} - "
                 "is the unit or the size wrong?")


def as_points(annotation, place="boxes"):
    """A box annotation -> the point annotation that it is trained as; others as they are."""
    if annotation["type"] != "box":
        return annotation
    points = []
    for k, entry in enumerate(annotation["boxes"]):
        box = BOX_FORMS[annotation["form"]](*entry["box"])
        left, top, right, bottom = box
        if left >= right or top >= bottom:
            fail(f"{place}.boxes[{k}]",
                 f"{entry['box']} is no box with a width and a height - is the form wrong?")
        points.append(entry | {"x": (left + right) / 2, "y": (top + bottom) / 2, "box": box})
    kept = {key: value for key, value in annotation.items() if key not in ("boxes", "form")}
    return kept | {"type": "point", "points": points}


def unlikely_units(record):
    """-> [sentence, ..] about annotations whose points look like fractions of the image's sides,
    but are said to be in percent or pixels."""
    found = []
    for k, annotation in enumerate(record["annotations"]):
        sides = [side for p in annotation.get("points", ()) for side in (p["x"], p["y"])]
        if sides and max(sides) <= 1 and annotation["coords"] != "unit":
            found.append(f"annotations[{k}]: every coordinate is at most 1 with coords="
                         f"{annotation['coords']}; is it 'unit'?")
    return found


# --------------------------------------------------------------------------------------------------
# questions and answers


def check_qa(qa, record, place):
    require(("turns" in qa) != bool({"question", *_ANSWER} & set(qa)), place,
            "a qa has either 'turns', or a question with its answer")
    require(qa.get("turns") != [], place, "'turns' is empty")
    for k, turn in enumerate(qa.get("turns", [qa])):
        at = place
        if "turns" in qa:
            at = f"{place}.turns[{k}]"
            check_fields(turn, "turn", at)
        check_question(turn.get("question"), record, at)
        answered = [key for key in ("answer", "answers", "options") if key in turn]
        require(len(answered) == 1, at, "a question has one of answer, answers and options")
        if "options" in turn:
            check_right_options(turn, at)


def check_right_options(turn, place):
    right = turn.get("answer_idx")
    numbers = right if isinstance(right, list) else [right]
    is_option = [is_whole(k) and 0 <= k < len(turn["options"]) for k in numbers]
    if not numbers or not all(is_option):
        fail(place, "'answer_idx' must be the number of the right option, from 0, or a list of "
             f"them, not {short(right)}")


def check_question(question, record, place):
    """A text, or a list of texts and references {"image": k} or {"video": 0}."""
    n_images = len(record.get("images", ["image"] if "image" in record else []))
    known = [{"video": 0}] if "video" in record else [{"image": k} for k in range(n_images)]
    parts = question if isinstance(question, list) else [question]
    is_part = [isinstance(part, str) or part in known for part in parts]
    blank = all(isinstance(part, str) and not part.strip() for part in parts)
    if not all(is_part) or blank:
        fail(place, "'question' must be a text, or a list of texts and "
             f'{{"image": k}} or {{"video": 0}}, counted from 0, not {short(question)}')
