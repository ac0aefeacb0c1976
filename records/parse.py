"""Brings records into one form: fills in optional fields, and checks the rules between fields.

in    a record as parsed from JSON
out   the same record in one form, or Unreadable with the position in the record

Later code does not need to check which of several forms a record has. Sizes and times that only
the media files contain are checked when their headers are read (visual.py).
"""

import difflib
import math

from records.check import (
    ANSWER,
    check_fields,
    check_kind,
    fail,
    is_from,
    is_list_of,
    require,
    short,
)
from text.styles import (
    POINT_TASKS,
    TASK_OF_STYLE,
    TRACK_TASKS,
    TRAINING_STYLE,
    UNNAMED_STYLE,
    default_style,
    medium,
    parts_of,
)

PLACED = ("point", "box", "count", "track")  # types that a turn of a conversation may have, too
BOX_FORMS = {  # four numbers -> left, top, right, bottom
    "xyxy": lambda left, top, right, bottom: [left, top, right, bottom],
    "xywh": lambda left, top, w, h: [left, top, left + w, top + h],
    "cxcywh": lambda x, y, w, h: [x - w / 2, y - h / 2, x + w / 2, y + h / 2],
}


def parse(record):
    """A record as read from its file -> the same record in one form (docs/records.md). Raises
    Unreadable with the position of the mistake.

    The visual input is `images`, a list of objects, or `video`, an object with start and end. A
    record of text has neither. All weights are filled in. For the fields of annotations, see
    `parse_annotation`.
    """
    check_fields(record, "record", "the record")
    given = [key for key in ("image", "images", "video") if key in record]
    require(len(given) < 2, "the record", f"use only one of {' and '.join(given)}")
    for key in ("images", "annotations"):
        require(record.get(key) != [], "the record", f"'{key}' must not be empty")
    parsed = {"weight": 1, **record}
    if "image" in record:
        parsed["images"] = [parsed.pop("image")]
    if "images" in parsed:
        parsed["images"] = [as_object(image) for image in parsed["images"]]
    if "video" in record:
        parsed["video"] = parse_video(as_object(record["video"]))
    subtitles = record.get("subtitles")
    require(not subtitles or "video" in record, "the record", "'subtitles' need a 'video'")
    for k, line in enumerate(subtitles if isinstance(subtitles, list) else ()):
        check_fields(line, "subtitle", f"subtitles[{k}]")
        require(line["start"] <= line["end"], f"subtitles[{k}]", "'end' is before 'start'")
    parsed["annotations"] = [parse_annotation(annotation, parsed, f"annotations[{k}]")
                             for k, annotation in enumerate(record["annotations"])]
    return parsed


def as_object(file):
    return {"path": file} if isinstance(file, str) else file


def as_list(texts):
    return [texts] if isinstance(texts, str) else texts


def parse_video(video):
    require(("path" in video) != ("frames" in video), "video", "give either 'path' or 'frames'")
    require("fps" in video or "path" in video, "video", "'frames' need their frame rate, 'fps'")
    video = {"start": 0, "end": math.inf, **video}
    require(video["start"] < video["end"], "video", "'end' must be later than 'start'")
    return video


def parse_annotation(annotation, record, place):
    """An annotation -> the same annotation in one form. record: its visual input is parsed already.

    A qa has turns with types and weights, and answer_idx is a list. Boxes become points. Every
    point, also a query, has a scale by which x and y are divided. None means the size of the image
    or video. A track has a mode. Points and counts have a list of modes and, if there is a label,
    a list of labels. Training picks one mode and one label at random. A missing style is filled
    in, but not for points and counts, where it depends on the mode, and not for texts.
    """
    kind = annotation.get("type") if isinstance(annotation, dict) else None
    check_kind("type", kind, "type", place)
    check_fields(annotation, kind, place)
    shown = medium(record)
    require(kind in ("qa", "text") or shown != "text", place,
            f"an annotation of type {kind} needs an image or a video; without them, the type must "
            "be text or qa (docs/records.md)")
    parsed = {"weight": 1, **annotation}
    if "style" in annotation:
        parsed["style"] = TRAINING_STYLE.get(annotation["style"], annotation["style"])
    if kind == "qa":
        parsed = parse_qa(parsed, record, place)
    elif kind == "caption":
        check_caption(parsed, shown, place)
    elif kind == "track":
        task = TASK_OF_STYLE.get(parsed.get("style"))
        parsed.setdefault("mode", task if task in TRACK_TASKS else "per_frame")
        check_track(parsed, shown, place)
    elif kind in PLACED:
        check_points(parsed, record, place)
        parsed["mode"] = point_modes(parsed, place)
        if "label" in parsed:
            parsed["labels"] = as_list(parsed["label"])
            parsed["label"] = parsed["labels"][0]
    if kind in ("point", "box", "track"):
        parsed = parse_points(parsed, record, place)
    style = parsed.get("style") or default_style(parsed, shown)
    return parsed | ({"style": style} if style else {})


def point_modes(annotation, place):
    """The modes of points or of a count; training picks one at random. They are given by `mode` or
    by the style. If both are missing, half of the answers with points also state the count."""
    task = "count" if annotation["type"] == "count" else TASK_OF_STYLE.get(annotation.get("style"))
    if "mode" in annotation:
        modes = as_list(annotation["mode"])
        require(task not in POINT_TASKS or len(modes) == 1, place,
                f"the style {annotation.get('style')} has one mode, but 'mode' has {len(modes)}")
        return modes
    if task in POINT_TASKS:
        return [task]
    # we do not know whether the user's own question asks for a count: answer with points only
    return ["point"] if {"style", "question"} & set(annotation) else ["point", "point_count"]


def check_caption(caption, shown, place):
    require(caption.get("start", 0) < caption.get("end", 1), place,
            "'end' must be later than 'start'")
    times = {"start", "at"} & set(caption)
    require(not times or shown == "video", place, "a caption with times needs a video")
    needs_part = TASK_OF_STYLE.get(caption.get("style")) in ("clip", "frame")
    require(len(times) < 2 and (times or not needs_part), place,
            "the caption of a clip needs 'start' and 'end', and the caption of a single frame "
            "needs 'at'; give only one of the two")


def check_points(annotation, record, place):
    require({"label", "question"} & set(annotation), place, "it needs 'label' or 'question'")
    if annotation["type"] == "count":
        return
    shown = medium(record)
    needed = {"video": {"t"}, "images": {"image"}}.get(shown, set())
    name = "points" if annotation["type"] == "point" else "boxes"
    points = annotation[name]
    for k, point in enumerate(points):
        if {"t", "image"} & point.keys() != needed:
            fail(f"{place}.{name}[{k}]", "'t' is needed in a video, 'image' is needed with "
                 "several images, and neither is allowed with a single image")
        if shown == "images" and point["image"] >= len(record["images"]):
            fail(f"{place}.{name}[{k}]",
                 f"there is no image {point['image']}; images are counted from 0")
    n = len(points)
    count = annotation.get("count", n)
    require(count == n, place, f"'count' is {count}, but the number of points is {n}")


def check_track(track, shown, place):
    require(shown == "video", place, "a track needs a video")
    points = track["points"]
    moments = {(point["t"], point["id"]) for point in points}
    require(len(moments) == len(points), place, "an object has two points at the same time")
    if "query" in track:
        ids = [point["id"] for point in points]
        require(track["query"]["id"] in ids, place, "no point has the id of 'query'")
    elif track["mode"] == "from_point":
        fail(place, "a track with mode from_point needs 'query', the point where it starts")


def parse_points(annotation, record, place):
    """Points, boxes or a track -> the same as points with a scale. Checks the range, if known."""
    if annotation["type"] == "box":
        annotation = as_points(annotation, place)
    files = record["images"] if "images" in record else [record["video"]]

    def scale_of(file):
        declared = (file["width"], file["height"]) if "width" in file else None
        scales = {"unit": (1, 1), "percent": (100, 100),
                  "pixel": annotation.get("size", declared)}
        return scales[annotation["coords"]]

    found = [scale_of(file) for file in files]

    def with_scale(point):
        return point | {"scale": found[point.get("image", 0)]}

    scaled = annotation | {"points": [with_scale(point) for point in annotation["points"]]}
    if "query" in annotation:
        scaled["query"] = with_scale(annotation["query"])
    check_range(scaled, [None] * len(files), place)
    return scaled


def check_range(annotation, sizes, place):
    """Checks that points lie inside the image, with a tolerance of 1 % of its sides.

    sizes: (width, height) of each image, or of the video, from its header. If it is None, points
    without a scale are not checked.
    """
    points = annotation["points"] + ([annotation["query"]] if "query" in annotation else [])
    for k, point in enumerate(points):
        size = point["scale"] or sizes[point.get("image", 0)]
        if size:
            left, top, right, bottom = point.get("box", [point["x"], point["y"]] * 2)
            sides = left / size[0], top / size[1], right / size[0], bottom / size[1]
            if not (min(sides) >= -0.01 and max(sides) <= 1.01):
                name = f"point {k}" if k < len(annotation["points"]) else "the query"
                fail(place, f"{name} lies outside the image with coords={annotation['coords']}; "
                     "check the unit and the size")


def as_points(annotation, place):
    """A box annotation -> a point annotation with the centre of each box. Points keep their box."""
    points = []
    for k, entry in enumerate(annotation["boxes"]):
        box = BOX_FORMS[annotation["form"]](*entry["box"])
        left, top, right, bottom = box
        require(left < right and top < bottom, f"{place}.boxes[{k}]",
                f"{entry['box']} has no positive width and height; check 'form'")
        centre = {"x": (left + right) / 2, "y": (top + bottom) / 2}
        points.append(entry | centre | {"box": box})
    kept = {key: annotation[key] for key in annotation if key not in ("boxes", "form")}
    return kept | {"type": "point", "points": points}


def parse_qa(qa, record, place):
    require(("turns" in qa) != bool({"question", *ANSWER} & set(qa)), place,
            "a qa needs either 'turns', or 'question' with an answer")
    require(qa.get("turns") != [], place, "'turns' must not be empty")
    if "turns" in qa:
        turns = [parse_turn(turn, record, f"{place}.turns[{k}]")
                 for k, turn in enumerate(qa["turns"])]
        return qa | {"turns": turns}
    turn = {key: qa[key] for key in ("question", *ANSWER) if key in qa}
    kept = {key: value for key, value in qa.items() if key not in turn}
    return kept | {"turns": [parse_turn(turn, record, place)]}


def parse_turn(turn, record, place):
    if isinstance(turn, dict) and turn.get("type", "qa") != "qa":
        require(turn["type"] in PLACED, f"{place}.type", "the type of a turn must be one of qa "
                f"(the default), {', '.join(PLACED)}")
        return parse_annotation(turn, record, place)
    check_fields(turn, "turn", place)
    check_question(turn.get("question"), record, place)
    answered = {"answer", "answers", "options"} & set(turn)
    require(len(answered) == 1, place, "give exactly one of 'answer', 'answers' and 'options'")
    turn = {"type": "qa", "weight": 1, **turn}
    if "options" in turn:
        right = turn.get("answer_idx")
        numbers = right if isinstance(right, list) else [right]
        are_indices = is_list_of(is_from(0, int), 1)(numbers)
        require(are_indices and max(numbers) < len(turn["options"]), place, "'answer_idx' must be "
                "the index of the right option, counted from 0, or a list of such indices")
        turn["answer_idx"] = numbers
    return turn


def check_question(question, record, place):
    """Checks that it is a text, or a list of texts and references to images or the video."""
    known = [{"image": k} for k in range(len(record.get("images", ())))]
    known += [{"video": 0}] if "video" in record else []
    parts = question if isinstance(question, list) else [question]
    is_part = [isinstance(part, str) or part in known for part in parts]
    blank = all(isinstance(part, str) and not part.strip() for part in parts)
    require(all(is_part) and not blank, place, "'question' must be a text, or a list of texts "
            'and {"image": k} or {"video": 0}, where k is counted from 0')


def unlikely_units(record):
    """-> [warning, ..] about points in percent or pixels that look like fractions."""
    found = []
    for place, a in parts_of(record):
        sides = [side for p in a.get("points", ()) for side in (p["x"], p["y"])]
        if sides and max(sides) <= 1 and a["coords"] != "unit":
            found.append(f"{place}: every coordinate is at most 1 with "
                         f"coords={a['coords']}; should it be coords=unit?")
    return found


def meant_style(style):
    """-> the style of which this one looks like a misspelling, or None. A benchmark may have a
    style of any name."""
    if style in TASK_OF_STYLE or UNNAMED_STYLE.fullmatch(style):
        return None
    return next(iter(difflib.get_close_matches(style, TASK_OF_STYLE, 1, 0.8)), None)


def unlikely_styles(record):
    """-> [warning, ..] about styles that look misspelled."""
    found = []
    parts = {f"annotations[{k}]": a for k, a in enumerate(record["annotations"])}
    for place, part in (parts | dict(parts_of(record))).items():  # turns have styles, too
        style = part.get("style", "")
        if meant := meant_style(style):
            found.append(f"{place}: unknown style {short(style)} - did you mean '{meant}'?")
    return found


THOUSANDTHS = ("every coordinate is at most 1,000 with coords=pixel, but every image is larger; if "
               'coordinates are from 0 to 1,000, each annotation needs "size": [1000, 1000]')


def like_thousandths(record, sizes=()):
    """True if a record's points in pixels may be thousandths: no coordinate is over 1,000, but
    every image is larger. None if it has no points in pixels. sizes: of the files, if known."""
    found = None
    for _, a in parts_of(record):
        for point in a.get("points", ()) if a.get("coords") == "pixel" else ():
            size = point["scale"] or (sizes and sizes[point.get("image", 0)])
            furthest = max(point.get("box", (point["x"], point["y"])))
            if not size or min(size) <= 1000 or furthest > 1000:
                return False
            found = True
    return found
