"""Rules for the annotations of a native record, beyond the tables of records/schema.py.

in    an annotation, its place in the record, the record's VisualInput
out   nothing; InvalidRecord for what may not be. report(code, message, place) is called with what
      skips the record or only warns
"""

import math
from collections import Counter
from typing import NamedTuple

from records.boxes import as_points
from records.errors import InvalidRecord, short_repr
from records.schema import (
    ANNOTATION_TYPES,
    ANSWER_FIELDS,
    check_fields,
    check_length,
    check_text,
    check_together,
    did_you_mean,
    is_number,
    is_text,
    is_whole,
)
from text.tracks import count_between_frames, visible_points


class VisualInput(NamedTuple):
    """What a record shows, as far as its text tells."""
    medium: str                      # text, image, images (two or more) or video
    sizes: list                      # (width, height) declared of each image, or of the video; None
    start: float = 0.0               # the clip, in seconds of the file
    end: float = math.inf
    duration: float = math.inf       # seconds of the whole video
    tolerance: float = 0.25          # half a frame, of 2 a second unless the video says otherwise

    @property
    def last(self):
        """The last second that is shown."""
        return min(self.end, self.duration)


def check_annotation(annotation, place, visual, report):
    kind = annotation.get("type") if isinstance(annotation, dict) else None
    if kind not in ANNOTATION_TYPES:
        known = ", ".join(ANNOTATION_TYPES)
        message = f"the type of an annotation is one of {known}, not {short_repr(kind)}"
        raise InvalidRecord("E07", message, place, did_you_mean(kind, ANNOTATION_TYPES))
    if kind == "track" and visual.medium != "video":
        raise InvalidRecord("E50", "a track needs a video", place)
    if kind in ("caption", "point", "box", "count") and visual.medium == "text":
        message = f"a {kind} needs an image or a video, and the record has none"
        raise InvalidRecord("E50", message, place)
    if kind == "qa":
        check_qa(annotation, place, visual, report)
        return
    check_fields(annotation, kind, place, report)
    if kind == "caption":
        check_caption(annotation, place, visual, report)
    elif kind in ("point", "box", "count") and not {"label", "question"} & set(annotation):
        raise InvalidRecord("E07", f"a {kind} needs a label or a question", place)
    if kind == "box":
        for k, entry in enumerate(annotation["boxes"]):
            check_fields(entry, "box of a box", f"{place}.boxes[{k}]", report)
        annotation = as_points(annotation, place)
    if kind in ("point", "box"):
        check_point(annotation, kind, place, visual, report)
    elif kind == "track":
        check_track(annotation, place, visual, report)
    if kind in ("point", "box", "track"):
        check_range(annotation, place, visual.sizes, report)
        times = [point["t"] for point in points_of(annotation) if "t" in point]
        check_times([*times, *annotation.get("times", [])], place, visual, report)


def check_caption(caption, place, visual, report):
    check_together(caption, place, "start", "end")
    times = [caption[key] for key in ("start", "end", "at") if key in caption]
    if not times:
        return
    if len(times) > 2:
        message = "a caption is of a part (start, end) or of a frame (at), not of both"
        raise InvalidRecord("E07", message, place)
    if visual.medium != "video":
        raise InvalidRecord("E50", "a caption with times needs a video", place)
    first, last = times[0], times[-1]
    if len(times) == 2 and first >= last:
        message = f"a caption starts at {first:g} s and ends at {last:g} s"
        raise InvalidRecord("E40", message, place)
    if first < visual.start - visual.tolerance or last > visual.end + visual.tolerance:
        message = (f"a caption of {first:g} to {last:g} s lies outside the clip, "
                   f"{visual.start:g} to {visual.end:g} s")
        raise InvalidRecord("E40", message, place)
    check_times(times, place, visual, report)


# --------------------------------------------------------------------------------------------------
# points and tracks


def points_of(annotation):
    """The points of a point, box or track annotation; a query is the last."""
    annotation = as_points(annotation)
    if "query" in annotation:
        return [*annotation["points"], annotation["query"]]
    return annotation["points"]


def check_point(annotation, kind, place, visual, report):
    """The points of a point annotation, or of a box annotation, whose boxes are checked before."""
    for k, point in enumerate(annotation["points"]):
        at = f"{place}.{'boxes' if kind == 'box' else 'points'}[{k}]"
        if isinstance(point, dict):
            check_which_image_or_time(point, at, visual)
        if kind == "point":
            check_fields(point, "point of a point", at, report)
        if point.get("image", 0) >= len(visual.sizes):
            hint = f"the last is {len(visual.sizes) - 1}"
            raise InvalidRecord("E32", f"there is no image {point['image']}", at, hint)
    n_points = len(annotation["points"])
    if annotation.get("count", n_points) != n_points:
        report("S11", f"the count is {annotation['count']}, but there are {n_points} points", place)


def check_which_image_or_time(point, at, visual):
    """'t' stands in a point of a video, 'image' in one of several images, and nowhere else."""
    if "t" in point and visual.medium != "video":
        raise InvalidRecord("E60", "a point of an image has no t", at)
    if "t" not in point and visual.medium == "video":
        raise InvalidRecord("E60", "a point of a video needs t", at)
    if "image" in point and visual.medium != "images":
        message = "a point has 'image' only where the record has several images"
        raise InvalidRecord("E61", message, at)
    if "image" not in point and visual.medium == "images":
        message = "a point needs 'image', from 0, where the record has several images"
        raise InvalidRecord("E61", message, at)


def check_track(track, place, visual, report):
    places = [f"{place}.points[{k}]" for k in range(len(track["points"]))]
    places.append(f"{place}.query")
    for point, at in zip(points_of(track), places, strict=False):
        if isinstance(point, dict) and "t" not in point:
            raise InvalidRecord("E60", "a point of a track needs t", at)
        check_fields(point, "point of a track", at, report)
    for t in track.get("times", []):
        if not is_number(t) or t < 0:
            code = "E40" if is_number(t) else "E07"
            raise InvalidRecord(code, f"times must be seconds, not {short_repr(t)}", place)
    counts = Counter((point["t"], point["id"]) for point in track["points"])
    for (t, name), n in counts.items():
        if n > 1:
            message = f"the object {short_repr(name)} stands twice at {t:g} s"
            raise InvalidRecord("E63", message, place)
    if "query" in track:
        query_id = track["query"]["id"]
        if query_id not in [point["id"] for point in track["points"]]:
            message = f"no point has the object of the query, {short_repr(query_id)}"
            raise InvalidRecord("E64", message, place)
    elif track.get("mode") == "from_point":
        message = "a track from_point needs a query, the point to start from"
        raise InvalidRecord("E64", message, place)
    if track["points"] and all(point.get("occluded") for point in track["points"]):
        report("S13", "every point of the track is occluded", place)
    if track.get("fps", 1) % 1:
        report("S13", f"the track is annotated at {track['fps']:g} fps, which is not a multiple of "
               "a rate that tracks are asked for (1 or 2)", place)
    n_visible = len(visible_points(track))
    n_between = count_between_frames(track, {"video": {"start": visual.start}})
    if n_between and ("fps" not in track or n_between == n_visible):
        report("W08", f"{n_between} of {n_visible} visible points of the track lie between the "
               "frames that are asked for; where no point is left on one, the track is left out",
               place)


def check_times(times, place, visual, report):
    """Times lie inside the clip, to half a frame."""
    first = visual.start - visual.tolerance
    last = visual.last + visual.tolerance
    outside = [t for t in times if not first <= t <= last]
    if outside:
        report("S10", f"{outside[0]:g} s is outside the clip, "
               f"{visual.start:g} to {visual.last:g} s", place)


def check_range(annotation, place, sizes, report):
    """The range of x and y, where the scale is known: up to 1 % outside is clipped later, more has
    a wrong unit.

    sizes: (width, height) of each image, or of the video; None where not known.
    """
    points = points_of(annotation)
    coords = annotation["coords"]
    for k, point in enumerate(points):
        at = f"{place}.{'boxes' if 'box' in point else 'points'}[{k}]"
        scale = (1, 1) if coords == "unit" else (100, 100)
        if coords == "pixel":
            scale = annotation.get("size", sizes[point.get("image", 0)])
        if scale is None:
            continue
        numbers = point.get("box", [point["x"], point["y"]])
        for axis, size, value in zip("xyxy", (*scale, *scale), numbers, strict=False):
            if 0 <= value <= size:
                continue
            if not -0.01 * size <= value <= 1.01 * size:
                hint = "is the unit or the size wrong?"
                if coords != "pixel" and value > size:
                    hint = "it looks like pixels"
                what = "box" if "box" in point else "point"
                message = f"{what} {axis}={value} lies outside 0..{size:g} with coords={coords}"
                raise InvalidRecord("E62", message, at, hint)
            report("W01", f"point {axis}={value} lies outside 0..{size:g} by up to 1 % "
                   "and is clipped", at)
    if points and coords != "unit" and all(max(p["x"], p["y"]) <= 1 for p in points):
        report("W03", f"every coordinate is at most 1 with coords={coords} - is it 'unit'?", place)


# --------------------------------------------------------------------------------------------------
# questions and answers


def check_qa(qa, place, visual, report):
    if isinstance(qa.get("turns"), list) and not qa["turns"]:
        raise InvalidRecord("E25", "turns is empty", place)
    check_fields(qa, "qa", place, report)
    turns_and_answer = "turns" in qa and set(ANSWER_FIELDS) & set(qa)
    if ("turns" in qa) == ("question" in qa) or turns_and_answer:
        message = "a qa has either turns, or a question with what answers it"
        raise InvalidRecord("E07", message, place)
    if "turns" not in qa:
        check_turn(qa, place, visual, report)
        return
    for k, turn in enumerate(qa["turns"]):
        at = f"{place}.turns[{k}]"
        check_fields(turn, "turn", at, report)
        check_turn(turn, at, visual, report)


def check_turn(turn, place, visual, report):
    """A question with one of answer, answers and options."""
    check_question(turn["question"], place, visual, report)
    given = [key for key in ("answer", "answers", "options") if key in turn]
    if len(given) != 1:
        message = ("a question has exactly one of answer, answers and options, "
                   f"not {' and '.join(given) or 'none'}")
        raise InvalidRecord("E07", message, place)
    if "answers" in turn:
        if not turn["answers"] or not all(map(is_text, turn["answers"])):
            message = "'answers' must be texts that are not blank, at least one"
            raise InvalidRecord("E07", message, place)
        for answer in turn["answers"]:
            check_length(answer, place)
    for key in ("answer_idx", "shuffle_options", "letters"):
        if key in turn and "options" not in turn:
            raise InvalidRecord("E07", f"'{key}' is given without 'options'", place)
    if "options" in turn:
        check_options(turn, place)


def check_options(turn, place):
    options = turn["options"]
    if "answer_idx" not in turn:
        message = "'options' is given without 'answer_idx', the number of the right one from 0"
        raise InvalidRecord("E07", message, place)
    if not 2 <= len(options) <= 26 or not all(isinstance(option, str) for option in options):
        code = "E07" if options else "E33"
        message = f"'options' must be 2 to 26 texts, not {short_repr(options)}"
        raise InvalidRecord(code, message, place)
    for option in options:
        check_length(option, place)
    right = turn["answer_idx"]
    numbers = right if isinstance(right, list) else [right]
    if not all(map(is_whole, numbers)):
        message = f"'answer_idx' must be a whole number or a list of them, not {short_repr(right)}"
        raise InvalidRecord("E07", message, place)
    repeated = len(set(numbers)) < len(numbers)
    if not numbers or repeated or not all(0 <= number < len(options) for number in numbers):
        message = f"answer_idx must be 0 to {len(options) - 1}, each once, not {short_repr(right)}"
        raise InvalidRecord("E33", message, place)


def check_question(question, place, visual, report):
    """A text, or a list of texts and references {"image": k} or {"video": 0}."""
    parts = [question] if isinstance(question, str) else question
    if not isinstance(parts, list) or not parts:
        message = f"'question' must be a text or a list of parts, not {short_repr(question)}"
        raise InvalidRecord("E07", message, place)
    for part in parts:
        if isinstance(part, str):
            check_text(part, place, report)
        else:
            check_reference(part, place, visual)
    check_length("".join(part for part in parts if isinstance(part, str)), place)
    blank = not any(isinstance(part, dict) or part.strip() for part in parts)
    if blank or not all(parts):
        raise InvalidRecord("E07", "'question' is blank", place)


def check_reference(part, place, visual):
    number = None
    if isinstance(part, dict) and list(part) in (["image"], ["video"]):
        (number,) = part.values()
    if not is_whole(number):
        message = ('a part of a question is a text, {"image": k} or {"video": 0}, '
                   f"not {short_repr(part)}")
        raise InvalidRecord("E07", message, place)
    same_medium = ("video" in part) == (visual.medium == "video")
    if not same_medium or not 0 <= number < len(visual.sizes):
        message = f"the record has nothing like {short_repr(part)}"
        raise InvalidRecord("E32", message, place, f"it has {len(visual.sizes)}, counted from 0")
