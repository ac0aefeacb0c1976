"""Checks the fields of a record one by one, with tables (docs/records.md).

in    a record as parsed from JSON, or an object in it
out   nothing, or Unreadable: "annotations[0].points[3]: 'x' must be a number, not '4'"

The module parse.py checks the rules between fields.
"""

import difflib
import re

from records.errors import Unreadable

COMMON = {"type": "type!", "style": "text", "weight": "0 or positive", "meta": "object"}
ANSWER = {
    "answer": "text", "answers": "texts", "options": "options", "answer_idx": "any",
    "shuffle_options": "bool", "letters": "bool", "explanation": "text"}
FILE = {"width": "pixels", "height": "pixels", "url": "text", "sha256": "text"}
PROMPT = {"label": "text or texts", "question": "text"}
COORDS = {"coords": "coords!", "size": "size"}
# Name of an object -> its fields and their kinds. "!" marks a required field. A kind is one of
# KINDS, the name of an object, or "list of" and the name of an object.
TABLES = {
    "record": {
        "id": "text", "image": "image", "images": "list of image", "video": "video",
        "subtitles": "subtitles", "annotations": "list!", "weight": "positive",
        "meta": "object"},
    "image": {"path": "path!", **FILE},
    "video": {
        "path": "path", "frames": "paths", "fps": "positive", "start": "from 0",
        "end": "from 0", "first": "from 0", "duration": "from 0", "made_for": "made for", **FILE},
    "made for": {"fps": "positive!", "max_frames": "pixels!"},
    "subtitle": {"start": "from 0!", "end": "from 0!", "text": "string!"},
    "caption": {
        **COMMON, "text": "text!", "object": "text", "start": "from 0",
        "end": "from 0", "at": "from 0"},
    "qa": {
        **COMMON, "system": "text", "turns": "list", "question": "any",
        **ANSWER},
    "turn": {"type": "type", "question": "any!", "weight": "0 or positive", **ANSWER},
    "point": {
        **COMMON, **PROMPT, **COORDS, "points": "list of point entry!", "count": "index",
        "mode": "point mode"},
    "point entry": {"x": "number!", "y": "number!", "image": "index", "t": "from 0"},
    "box": {
        **COMMON, **PROMPT, **COORDS, "form": "box form!",
        "boxes": "list of box entry!", "mode": "point mode"},
    "box entry": {"box": "box!", "image": "index", "t": "from 0"},
    "count": {**COMMON, **PROMPT, "count": "index!"},
    "track": {
        **COMMON, **PROMPT, **COORDS, "label": "text!", "points": "list of track entry!",
        "mode": "track mode", "fps": "positive", "times": "times", "query": "track entry"},
    "track entry": {
        "t": "from 0!", "id": "object id!", "x": "number!", "y": "number!",
        "occluded": "bool"},
    "text": {**COMMON, "prompt": "text", "text": "text!"},
}
HINTS = {  # added to the message if a value is not an object
    "record": "; if the whole file is one array of records, its name must end in .json",
    "box entry": '; write {"box": [..]}',
    "point entry": '; write {"x": .., "y": ..}',
    "video": '; write frames as {"frames": [..], "fps": 2}',
}
URL = re.compile(r"[a-z][a-z0-9+.-]+://|data:", re.I)
WORDS = {
    "type": ("caption", "qa", "point", "box", "count", "track", "text"),
    "coords": ("unit", "percent", "pixel"),
    "box form": ("xyxy", "xywh", "cxcywh"),
    "point mode": ("point", "point_count", "count_point"),
    "track mode": ("per_frame", "start_end", "from_point"),
}


def is_a(*types):
    return lambda value: isinstance(value, types)


def is_number(value):
    """Is it a finite number? A bool is not a number."""
    is_finite = isinstance(value, (int, float)) and abs(value) < 1e300
    return is_finite and not isinstance(value, bool)


def is_from(least, types=(int, float), most=1e300):
    return lambda value: (is_number(value) and isinstance(value, types)
                          and least <= value <= most)


def is_text(value):
    return isinstance(value, str) and bool(value.strip())


def is_path(value):
    return is_text(value) and not URL.match(value) and len(value) <= 4096  # as on Linux


def is_list_of(accepts, n_least=0, n_most=1e300):
    return lambda value: (isinstance(value, list) and n_least <= len(value) <= n_most
                          and all(map(accepts, value)))


KINDS = {  # {kind: (what a value must be, as a message says it, the test)}
    "any": ("", is_a(object)),
    "text": ("a text that is not blank", is_text),
    "string": ("a text", is_a(str)),
    "texts": ("a list of texts that are not blank", is_list_of(is_text, 1)),
    "path": ("the path of a downloaded file (URLs and base64 are not supported)", is_path),
    "paths": ("a list of paths of downloaded files (URLs and base64 are not supported)",
              is_list_of(is_path, 1)),
    "text or texts": ("a text that is not blank, or a list of such texts",
                      lambda value: is_text(value) or is_list_of(is_text, 1)(value)),
    "options": ("a list of 2 to 26 texts", is_list_of(is_a(str), 2, 26)),
    "number": ("a number", is_number),
    "positive": ("a number from 1e-9 to 1e12", is_from(1e-9, most=1e12)),
    "0 or positive": ("0, or a number from 1e-9 to 1e12",
                      lambda value: is_from(0, most=0)(value) or is_from(1e-9, most=1e12)(value)),
    "from 0": ("a number, 0 or larger", is_from(0)),
    "times": ("a list of times in seconds, each 0 or larger", is_list_of(is_from(0))),
    "pixels": ("a whole number, 1 or larger", is_from(1, int)),
    "index": ("a whole number, 0 or larger", is_from(0, int)),
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
one_mode, is_point_mode = KINDS["point mode"]
KINDS["point mode"] = (
    f"{one_mode}, or a list of them",
    lambda value: is_point_mode(value) or is_list_of(is_point_mode, 1)(value))
TESTS = {name: {key: KINDS[kind.rstrip("!")][1] for key, kind in table.items()
                if kind.rstrip("!") in KINDS} for name, table in TABLES.items()}
NEEDED = {name: [key for key, kind in table.items() if kind[-1] == "!"]
          for name, table in TABLES.items()}


def fail(place, message):
    raise Unreadable("wrong record", f"{place}: {message}")


def require(condition, place, message):
    """Fails if the condition is false. The message is always built, so it must be cheap."""
    if not condition:
        fail(place, message)


def short(value):
    """A value as text for a message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word, words):
    close = difflib.get_close_matches(str(word), words, 1)
    return f" - did you mean '{close[0]}'?" if close else ""


def is_kind(value, kind):
    return KINDS[kind][1](value)


def check_kind(key, value, kind, place):
    if not is_kind(value, kind):
        hint = did_you_mean(value, WORDS.get(kind, ()))
        fail(place, f"'{key}' must be {KINDS[kind][0]}, not {short(value)}{hint}")


def check_fields(value, name, place):
    """Checks an object and the objects inside it. place: its path in the record, for messages."""
    if name in ("image", "video") and isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, dict):
        fail(place, f"this must be an object, not {short(value)}{HINTS.get(name, '')}")
    table = TABLES[name]
    tests = TESTS[name]
    for key, field in value.items():
        if key in tests and tests[key](field):
            continue  # most fields; this is fast, because a record may have many points
        if key not in table:
            missing = [f"; '{other}' is missing" for other in NEEDED[name] if other not in value]
            hint = did_you_mean(key, table) or "".join(missing[:1])
            fail(place, f"unknown field {short(key)}{hint}")
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
    for key in NEEDED[name]:
        if key not in value:
            words = ", ".join(WORDS.get(table[key][:-1], ()))
            choice = f"; it is one of {words}" if words else ""
            fail(place, f"the field '{key}' is missing{choice}")
    for one, other in (("width", "height"), ("start", "end")):
        if (one in value) != (other in value):
            fail(place, f"'{one}' and '{other}' must be given together")
