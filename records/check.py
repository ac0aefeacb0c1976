"""Rules: what a native record may hold (formats.md 7), as tables, and what is checked beyond them (formats.md 9).

in    a record as parsed, a dict
out   findings; or DataError, which names the place. What only pixels tell is in check_pixels
"""

import difflib
import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from records.dialects import UNSUPPORTED, Refused, form_of, shown
from records.media import Unreadable
from text.tokenizer import SPECIAL, token_text


class DataError(ValueError):
    """A user's mistake in a data file, told in a sentence that names the place; of a file with several, one per line."""


# ---------------------------------------------------------------------------------------------------------------
# what a native record may hold: formats.md 7 as tables, ! where a field must be there; record.schema.json says the same

_COMMON = {"type": "string!", "style": "style", "weight": "weight", "meta": "object"}
_ANSWER = {"answer": "text", "answers": "list", "options": "list", "answer_idx": "any", "shuffle_options": "bool", "letters": "bool",
           "explanation": "text"}
_FILE = {"width": "pixels", "height": "pixels", "url": "string", "sha256": "sha256"}
_ASKED = {"label": "text", "question": "text"}
_PLACES = {"coords": "coords!", "size": "size", "points": "list!"}
TABLES = {
    "record": {"id": "name", "image": "any", "images": "list", "video": "any", "subtitles": "any", "annotations": "list!",
               "weight": "positive", "meta": "object"},
    "image": {"path": "any!", **_FILE},
    "video": {"path": "any", "frames": "list", "fps": "rate", "start": "seconds", "end": "seconds", "duration": "positive", **_FILE},
    "subtitle": {"start": "seconds!", "end": "seconds!", "text": "string!"},
    "turn": {"question": "any!", **_ANSWER, "weight": "weight"},
    "point of a point": {"x": "number!", "y": "number!", "image": "index", "t": "seconds"},
    "point of a track": {"t": "seconds!", "id": "object id!", "x": "number!", "y": "number!", "occluded": "bool"},
    "caption": {**_COMMON, "text": "text!", "object": "text", "start": "seconds", "end": "seconds", "at": "seconds"},
    "qa": {**_COMMON, "system": "text", "turns": "list", "question": "any", **_ANSWER},
    "point": {**_COMMON, **_ASKED, **_PLACES, "count": "index", "mode": "point mode"},
    "count": {**_COMMON, **_ASKED, "count": "index!"},
    "track": {**_COMMON, **_ASKED, **_PLACES, "label": "text!", "mode": "track mode", "fps": "rate", "times": "list", "query": "any"},
    "text": {**_COMMON, "prompt": "text", "text": "text!"},
}
TYPES = ("caption", "qa", "point", "count", "track", "text")
MODES = {"point mode": ("point", "point_count", "count_point"), "track mode": ("per_frame", "start_end", "from_point"),
         "coords": ("unit", "percent", "pixel")}


def _is_number(v):
    return isinstance(v, (int, float)) and not isinstance(v, bool)


def _is_whole(v, least):
    return isinstance(v, int) and not isinstance(v, bool) and v >= least


def _is_text(v):
    return isinstance(v, str) and bool(v.strip())


_KINDS = {                           # kind of value: what it must be in words, and as a test
    "any": ("", lambda v: True),
    "text": ("a text that is not blank", _is_text),
    "string": ("a text", lambda v: isinstance(v, str)),
    "name": ("a text that is not empty", lambda v: isinstance(v, str) and v != ""),
    "style": ("a name of letters, digits, '_', '.' and '-'", lambda v: isinstance(v, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", v)),
    "sha256": ("64 hexadecimal digits in lower case", lambda v: isinstance(v, str) and re.fullmatch(r"[0-9a-f]{64}", v)),
    "number": ("a number", _is_number),
    # so that products of three weights are finite in float32, and a film's seconds, which are frames by rate
    "positive": ("a number above 0, at most a million", lambda v: _is_number(v) and 0 < v <= 1e6),
    "weight": ("a number that is not negative, at most a million", lambda v: _is_number(v) and 0 <= v <= 1e6),
    "rate": ("a number of frames per second, 0.0001 to 10000", lambda v: _is_number(v) and 1e-4 <= v <= 1e4),
    "seconds": ("seconds, a number that is not negative", lambda v: _is_number(v) and v >= 0),
    "pixels": ("a whole number of at least 1 pixel", lambda v: _is_whole(v, 1)),
    "size": ("[width, height] in pixels", lambda v: isinstance(v, list) and len(v) == 2 and all(_is_whole(s, 1) for s in v)),
    "index": ("a whole number that is not negative", lambda v: _is_whole(v, 0)),
    "object id": ("a whole number or a text", lambda v: isinstance(v, str) or _is_whole(v, -math.inf)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "object": ("an object", lambda v: isinstance(v, dict)),
    **{kind: (f"one of {', '.join(names)}", lambda v, names=names: v in names) for kind, names in MODES.items()},
}
_RULES = {name: {key: (kind.rstrip("!"), *_KINDS[kind.rstrip("!")]) for key, kind in table.items()} for name, table in TABLES.items()}
_NEEDED = {name: [key for key, kind in table.items() if kind.endswith("!")] for name, table in TABLES.items()}
_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", *map(token_text, SPECIAL))
_MARKUP = re.compile("(<image>|<video>)|" + "|".join(map(re.escape, _TOKENS)))


class _Seen(NamedTuple):
    """The visual input of a record, as far as its text tells."""
    medium: str                      # text | image | images (two or more) | video
    scales: list                     # (width, height) declared for each image, or for the video; None where it is not
    start: float = 0.0               # the clip, in seconds of the file
    end: float = math.inf
    last: float = math.inf           # seconds at which the video ends
    slack: float = 0.25              # half a frame: of 2 per second unless the video says otherwise


def _near(word, words):
    near = difflib.get_close_matches(shown(word).strip("'"), words, 1)     # cut short: it may have millions of letters
    return f"did you mean '{near[0]}'?" if near else ""


def _fields(d, name, place, note):
    """The keys and values of one JSON object against its table; Refused if one is wrong."""
    if not isinstance(d, dict):
        raise Refused("E07", f"a {name} must be an object, not {shown(d)}", place)
    rules = _RULES[name]
    for key, value in d.items():
        if key not in rules:
            raise Refused("E07", f"unknown field {shown(key)} in a {name}", place, _near(key, rules))
        kind, words, fits = rules[key]
        if not fits(value):
            code, hint = "E40" if kind == "seconds" and _is_number(value) else "E07", ""
            if kind in MODES:
                hint = _near(value, MODES[kind])
            elif isinstance(value, str) and value.strip() and not _KINDS["number"][1](value) and "number" in words:
                hint = "without quotes?"
            raise Refused(code, f"'{key}' must be {words}, not {shown(value)}", place, hint)
        if kind == "text":
            _markup(value, place, note)
    for key in _NEEDED[name]:
        if key not in d:
            raise Refused("E07", f"'{key}' is missing in a {name}", place)


def _markup(text, place, note):
    if "<" in text and (found := _MARKUP.search(text)):
        note(*("W05", f"{found[0]} in a text is read as it stands; images are named by the record") if found[1] else
             ("W07", f"{found[0]} in a text is read as it stands, never as the token"), place)


def _together(d, place, *keys):
    given = [key for key in keys if key in d]
    if given and len(given) < len(keys):
        raise Refused("E07", f"'{given[0]}' without '{next(k for k in keys if k not in d)}'", place)


def _path(path, place):
    if not isinstance(path, str) or not path:
        raise Refused("E07", f"a path must be a text, not {shown(path)}", place)
    depth = np.cumsum([-1 if part == ".." else part not in ("", ".") for part in path.split("/")]) if ".." in path else [0]
    wrong = ("holds a URL" if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path) else "is absolute" if re.match(r"/|\\|[A-Za-z]:[/\\]", path) else
             "leaves the media folder by '..'" if min(depth) < 0 else
             "holds a control character" if re.search(r"[\0-\x1f\x7f-\x9f]", path) else
             "is a folder" if re.search(r"(^|/)\.{0,2}$", path) else
             "is longer than file systems take" if len(path) > 1000 or any(len(part.encode()) > 255 for part in path.split("/")) else "")
    if wrong:
        raise Refused("E10", f"the path {shown(path)} {wrong}", place, "a path is that of a file below the media folder")


def _see(record, note):
    """The record's image, images or video, checked -> _Seen."""
    given = [key for key in ("image", "images", "video") if key in record]
    if len(given) > 1:
        raise Refused("E14" if "video" in given else "E13", f"both '{given[0]}' and '{given[1]}': a record has one of them or none")
    if not given:
        return _Seen("text", [])
    if given == ["video"]:
        return _see_video(record["video"], note)
    images = [record["image"]] if given == ["image"] else record["images"]
    if not images:
        raise Refused("E07", "'images' is empty")
    for k, image in enumerate(images):
        place = "image" if given == ["image"] else f"images[{k}]"
        if isinstance(image, dict):
            _fields(image, "image", place, note)
            _together(image, place, "width", "height")
        _path(image["path"] if isinstance(image, dict) else image, place)
    return _Seen("images" if len(images) > 1 else "image", [_declared(image) for image in images])


def _declared(entry):
    return (entry["width"], entry["height"]) if isinstance(entry, dict) and "width" in entry else None


def _see_video(video, note):
    if not isinstance(video, dict):
        if isinstance(video, list) and len(video) > 1:
            raise Refused("E15", f"{len(video)} videos in one record", "video", 'frames of one video are {"frames": [..], "fps": ..}')
        _path(video, "video")
        return _Seen("video", [None])
    _fields(video, "video", "video", note)
    if ("path" in video) == ("frames" in video):
        raise Refused("E07", "a video has either 'path' or 'frames'", "video")
    if "frames" in video and not (video["frames"] and "fps" in video):
        raise Refused("E07", "'frames' needs at least one path, and 'fps'", "video")
    for k, path in enumerate(video.get("frames", [])):
        _path(path, f"video.frames[{k}]")
    if "path" in video:
        _path(video["path"], "video.path")
    _together(video, "video", "start", "end")
    _together(video, "video", "width", "height")
    start, end = video.get("start", 0), video.get("end", math.inf)
    last = len(video["frames"]) / video["fps"] if "frames" in video else video.get("duration", math.inf)
    if start >= end:
        raise Refused("E40", f"the clip starts at {start:g} s and ends at {end:g} s", "video")
    if start >= last:
        note("S23", f"the clip starts at {start:g} s, the video ends at {last:g} s", "video")
    return _Seen("video", [_declared(video)], start, end, last, 0.5 / video.get("fps", 2))


def _annotation(a, place, see, note):
    kind = a.get("type") if isinstance(a, dict) else None
    if kind not in TYPES:
        raise Refused("E07", f"an annotation has the type {shown(kind)}, not one of {', '.join(TYPES)}", place, _near(kind, TYPES))
    if kind == "track" and see.medium != "video":
        raise Refused("E50", "a track needs a video", place)
    if kind in ("caption", "point", "count") and see.medium == "text":
        raise Refused("E50", f"a {kind}, but the record has no image and no video", place)
    if kind == "qa":
        _qa(a, place, see, note)
        return
    _fields(a, kind, place, note)
    if kind == "caption":
        times = [a[key] for key in ("start", "end", "at") if key in a]
        _together(a, place, "start", "end")
        if len(times) > 2:
            raise Refused("E07", "a caption is of a part (start, end) or of a frame (at), not of both", place)
        if times and see.medium != "video":
            raise Refused("E50", "a caption with times needs a video", place)
        if len(times) == 2 and times[0] >= times[1]:
            raise Refused("E40", f"a caption starts at {times[0]:g} s and ends at {times[1]:g} s", place)
        if times and not see.start - see.slack <= min(times) <= max(times) <= see.end + see.slack:
            raise Refused("E40", f"a caption of {times[0]:g} to {times[-1]:g} s, outside the clip, {see.start:g} to {see.end:g} s", place)
        _within(times, place, see, note)
    elif kind in ("point", "count") and not {"label", "question"} & set(a):
        raise Refused("E07", f"a {kind} needs a label or a question", place)
    if kind == "point":
        for k, p in enumerate(a["points"]):
            if isinstance(p, dict) and ("t" in p) != (see.medium == "video"):
                raise Refused("E60", "a point of an image has no t" if "t" in p else "a point of a video needs t", f"{place}.points[{k}]")
            if isinstance(p, dict) and ("image" in p) != (see.medium == "images"):
                raise Refused("E61", "a point has 'image' only where the record has several" if "image" in p else
                              "with several images a point needs 'image', from 0", f"{place}.points[{k}]")
            _fields(p, "point of a point", f"{place}.points[{k}]", note)
            if p.get("image", 0) >= len(see.scales):
                raise Refused("E32", f"there is no image {p['image']}", f"{place}.points[{k}]", f"the last is {len(see.scales) - 1}")
        if a.get("count", len(a["points"])) != len(a["points"]):
            note("S11", f"count {a['count']}, but {len(a['points'])} points", place)
    elif kind == "track":
        _track(a, place, note)
    if kind in ("point", "track"):
        points = [*a["points"], a["query"]] if "query" in a else a["points"]
        _inside(a, points, place, see.scales, note)
        _within([*(p["t"] for p in points if "t" in p), *a.get("times", [])], place, see, note)


def _track(a, place, note):
    for k, p in enumerate([*a["points"], a["query"]] if "query" in a else a["points"]):
        at = f"{place}.points[{k}]" if k < len(a["points"]) else f"{place}.query"
        if isinstance(p, dict) and "t" not in p:
            raise Refused("E60", "a point of a track needs t", at)
        _fields(p, "point of a track", at, note)
    for t in a.get("times", []):
        if not _is_number(t) or t < 0:
            raise Refused("E40" if _is_number(t) else "E07", f"times must be seconds, not {shown(t)}", place)
    repeated = [key for key, n in Counter((p["t"], p["id"]) for p in a["points"]).items() if n > 1]
    if repeated:
        raise Refused("E63", f"the object {shown(repeated[0][1])} stands twice at {repeated[0][0]:g} s", place)
    if a.get("mode") == "from_point" and "query" not in a:
        raise Refused("E64", "a track from_point needs a query, the point to start from", place)
    if "query" in a and a["query"]["id"] not in [p["id"] for p in a["points"]]:
        raise Refused("E64", f"the object of the query, {shown(a['query']['id'])}, is none of the points", place)
    if a["points"] and all(p.get("occluded") for p in a["points"]):
        note("S13", "a track of occluded points only", place)
    if a.get("fps", 1) % 1:
        note("S13", f"annotated at {a['fps']:g} fps, which is no multiple of a rate that tracks are asked for (1 or 2)", place)


def _qa(a, place, see, note):
    if isinstance(a.get("turns"), list) and not a["turns"]:
        raise Refused("E25", "turns is empty", place)
    _fields(a, "qa", place, note)
    if ("turns" in a) == ("question" in a) or ("turns" in a and set(_ANSWER) & set(a)):
        raise Refused("E07", "a qa has either turns, or a question with what answers it", place)
    for j, turn in enumerate(a.get("turns", [a])):
        at = f"{place}.turns[{j}]" if "turns" in a else place
        if "turns" in a:
            _fields(turn, "turn", at, note)
        _question(turn["question"], at, see, note)
        kinds = [key for key in ("answer", "answers", "options") if key in turn]
        if len(kinds) != 1:
            raise Refused("E07", f"exactly one of answer, answers, options is needed, not {' and '.join(kinds) or 'none'}", at)
        if kinds == ["answers"] and not (turn["answers"] and all(map(_is_text, turn["answers"]))):
            raise Refused("E07", "'answers' must be texts that are not blank, at least one", at)
        for key in ("answer_idx", "shuffle_options", "letters"):
            if key in turn and "options" not in turn:
                raise Refused("E07", f"'{key}' without 'options'", at)
        if kinds == ["options"]:
            _options(turn, at)


def _options(turn, place):
    options, right = turn["options"], turn.get("answer_idx")
    if "answer_idx" not in turn:
        raise Refused("E07", "'options' without 'answer_idx', the number of the right one from 0", place)
    if not 2 <= len(options) <= 26 or not all(isinstance(o, str) for o in options):
        raise Refused("E07" if options else "E33", f"'options' must be 2 to 26 texts, not {shown(options)}", place)
    right = right if isinstance(right, list) else [right]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in right):
        raise Refused("E07", f"'answer_idx' must be a whole number or several in a list, not {shown(turn['answer_idx'])}", place)
    if not right or len(set(right)) < len(right) or not all(0 <= i < len(options) for i in right):
        raise Refused("E33", f"answer_idx must be 0 to {len(options) - 1}, each once, not {shown(turn['answer_idx'])}", place)


def _question(question, place, see, note):
    if isinstance(question, str):
        question = [question]
    elif not (isinstance(question, list) and question):
        raise Refused("E07", f"'question' must be a text or a list of parts, not {shown(question)}", place)
    for part in question:
        if isinstance(part, str):
            _markup(part, place, note)
        elif not (isinstance(part, dict) and list(part) in (["image"], ["video"]) and _is_whole(next(iter(part.values())), -math.inf)):
            raise Refused("E07", f'a part of a question is a text, {{"image": k}} or {{"video": 0}}, not {shown(part)}', place)
        elif not 0 <= next(iter(part.values())) < (len(see.scales) if ("video" in part) == (see.medium == "video") else 0):
            raise Refused("E32", f"the record has nothing like {shown(part)}", place, f"it has {len(see.scales)}, counted from 0")
    if not all(part for part in question) or not any(isinstance(part, dict) or part.strip() for part in question):
        raise Refused("E07", "'question' is blank", place)


def _within(times, place, see, note):
    late = [t for t in times if not see.start - see.slack <= t <= min(see.end, see.last) + see.slack]
    if late:
        note("S10", f"{late[0]:g} s is outside the clip, {see.start:g} to {min(see.end, see.last):g} s", place)


def _inside(a, points, place, scales, note):
    """The range of x and y, wherever the text tells the scale; up to 1 % outside is clipped in the end, more is a wrong unit."""
    for k, p in enumerate(points):
        span = {"unit": (1, 1), "percent": (100, 100), "pixel": a.get("size", scales[p.get("image", 0)])}[a["coords"]]
        for axis, size in zip("xy", span or (), strict=False):
            if 0 <= p[axis] <= size:
                continue
            if not -0.01 * size <= p[axis] <= 1.01 * size:
                hint = "looks like pixels" if a["coords"] != "pixel" and p[axis] > size else "wrong units or size?"
                what = f"point {axis}={p[axis]} lies outside 0..{size:g} with coords={a['coords']}"
                raise Refused("E62", what, f"{place}.points[{k}]", hint)
            note("W01", f"point {axis}={p[axis]} lies outside 0..{size:g} by up to 1 % and is clipped", f"{place}.points[{k}]")
    if len(points) > (a["coords"] == "percent") and a["coords"] != "unit" and all(max(p["x"], p["y"]) <= 1 for p in points):
        note("W03", f"every coordinate is at most 1, with coords={a['coords']} - is it 'unit'?", place)


def _check(record):
    found = {}

    def note(code, what, place=""):
        found.setdefault(code, f"{what} ({place})")

    if not isinstance(record, dict):
        raise Refused("E05", f"a record must be an object, not {'a list' if isinstance(record, list) else shown(record)}")
    form = form_of(record)
    if form != "annotations":
        raise Refused("E06", f"'{form}' where a native record has 'annotations'")
    for key in UNSUPPORTED:
        if record.get(key):
            raise Refused("E16", f"'{key}' is no input of Molmo2")
    if isinstance(record.get("videos"), list) and len(record["videos"]) > 1:
        raise Refused("E15", f"{len(record['videos'])} videos in one record")
    _fields(record, "record", "the record", note)
    if not record["annotations"]:
        raise Refused("E07", "'annotations' is empty")
    see = _see(record, note)
    subtitles = record.get("subtitles", [])
    if "subtitles" in record and (see.medium != "video" or not (_is_text(subtitles) or isinstance(subtitles, list))):
        raise Refused("E07", "subtitles are a text or a list of {start, end, text}, and need a video", "subtitles")
    for k, line in enumerate([] if isinstance(subtitles, str) else subtitles):
        _fields(line, "subtitle", f"subtitles[{k}]", note)
        if line["start"] > line["end"]:
            raise Refused("E41", f"a subtitle starts at {line['start']:g} s and ends at {line['end']:g} s", f"subtitles[{k}]")
        if k and line["start"] < subtitles[k - 1]["start"]:
            note("E41", "not in the order of their starts; they are sorted", f"subtitles[{k}]")
    for k, a in enumerate(record["annotations"]):
        _annotation(a, f"annotations[{k}]", see, note)
    return list(found.items())


def check(record, where):
    """A native record -> findings [(code, message), ..]: what starts with S skips the record, all else warns. DataError, with the
    place in the file and in the record, for what no record may hold."""
    try:
        return _check(record)
    except Refused as e:
        raise DataError(f"{where}: {e}") from None


def check_pixels(record, sizes):
    """Points in pixels on the scale of the file itself, sizes [(width, height), ..] of its images or video; Unreadable E62 if outside."""
    see = _see(record, lambda *_: None)
    for k, a in enumerate(record["annotations"]):
        if a.get("coords") == "pixel":
            points = [*a["points"], a["query"]] if "query" in a else a["points"]
            scales = [declared or size for declared, size in zip(see.scales, sizes, strict=True)]
            try:
                _inside(a, points, f"annotations[{k}]", scales, lambda *_: None)
            except Refused as e:
                raise Unreadable(str(e)) from None
