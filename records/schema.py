"""The fields of a native record, as tables, and the check of one JSON object against its table.

docs/records.md describes the format; tests/conformance/record.schema.json says the same. What the
tables cannot say is in records/check.py and records/annotations.py.
"""

import difflib
import math
import re
from typing import NamedTuple

from records.boxes import FORMS
from records.errors import InvalidRecord, short_repr
from text.tokenizer import SPECIAL, token_text

# Characters of one text, far more than any row of tokens holds. Encoding a text takes time in every
# draw, and the tokenizer panics at ten million blanks.
MAX_TEXT = 1_000_000

_COMMON = {"type": "string!", "style": "style", "weight": "weight", "meta": "object"}
ANSWER_FIELDS = {
    "answer": "text", "answers": "list", "options": "list", "answer_idx": "any",
    "shuffle_options": "bool", "letters": "bool", "explanation": "text"}
_FILE = {"width": "pixels", "height": "pixels", "url": "string", "sha256": "sha256"}
_PROMPT = {"label": "text", "question": "text"}
_POINTS = {"coords": "coords!", "size": "size", "points": "list!"}

# name of an object -> its fields and their kinds; "!": the field must be there
TABLES = {
    "record": {
        "id": "name", "image": "any", "images": "list", "video": "any", "subtitles": "any",
        "annotations": "list!", "weight": "positive", "meta": "object"},
    "image": {"path": "any!", **_FILE},
    "video": {
        "path": "any", "frames": "list", "fps": "rate", "start": "seconds", "end": "seconds",
        "duration": "positive", **_FILE},
    "subtitle": {"start": "seconds!", "end": "seconds!", "text": "string!"},
    "turn": {"question": "any!", **ANSWER_FIELDS, "weight": "weight"},
    "point of a point": {"x": "number!", "y": "number!", "image": "index", "t": "seconds"},
    "point of a track": {
        "t": "seconds!", "id": "object id!", "x": "number!", "y": "number!", "occluded": "bool"},
    "caption": {
        **_COMMON, "text": "text!", "object": "text", "start": "seconds", "end": "seconds",
        "at": "seconds"},
    "qa": {**_COMMON, "system": "text", "turns": "list", "question": "any", **ANSWER_FIELDS},
    "point": {**_COMMON, **_PROMPT, **_POINTS, "count": "index", "mode": "point mode"},
    "box": {
        **_COMMON, **_PROMPT, "coords": "coords!", "size": "size", "form": "box form!",
        "boxes": "list!", "mode": "point mode"},
    "box of a box": {"box": "four numbers!", "image": "index", "t": "seconds"},
    "count": {**_COMMON, **_PROMPT, "count": "index!"},
    "track": {
        **_COMMON, **_PROMPT, **_POINTS, "label": "text!", "mode": "track mode", "fps": "rate",
        "times": "list", "query": "any"},
    "text": {**_COMMON, "prompt": "text", "text": "text!"},
}
_REQUIRED = {name: [key for key, kind in table.items() if kind.endswith("!")]
             for name, table in TABLES.items()}
ANNOTATION_TYPES = ("caption", "qa", "point", "box", "count", "track", "text")
MODES = {
    "point mode": ("point", "point_count", "count_point"),
    "track mode": ("per_frame", "start_end", "from_point"),
    "coords": ("unit", "percent", "pixel"),
    "box form": tuple(FORMS),
}


# --------------------------------------------------------------------------------------------------
# kinds of values


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value, minimum=-math.inf):
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_text(value):
    return isinstance(value, str) and bool(value.strip())


def is_style(value):
    return isinstance(value, str) and bool(re.fullmatch(r"[A-Za-z0-9_.-]+", value))


def is_sha256(value):
    return isinstance(value, str) and bool(re.fullmatch(r"[0-9a-f]{64}", value))


def is_box(value):
    return isinstance(value, list) and len(value) == 4 and all(map(is_number, value))


def is_size(value):
    return isinstance(value, list) and len(value) == 2 and all(is_whole(side, 1) for side in value)


class Kind(NamedTuple):
    description: str                 # what a value must be, in words
    accepts: object                  # value -> bool


KINDS = {
    "any": Kind("", lambda v: True),
    "text": Kind("a text that is not blank", is_text),
    "string": Kind("a text", lambda v: isinstance(v, str)),
    "name": Kind("a text that is not empty", lambda v: isinstance(v, str) and v != ""),
    "style": Kind("a name of letters, digits, '_', '.' and '-'", is_style),
    "sha256": Kind("64 hexadecimal digits in lower case", is_sha256),
    "number": Kind("a number", is_number),
    # The limit keeps products of three weights finite in float32, and a video's seconds, which are
    # frames by rate.
    "positive": Kind("a number above 0, at most a million",
                     lambda v: is_number(v) and 0 < v <= 1e6),
    "weight": Kind("a number that is not negative, at most a million",
                   lambda v: is_number(v) and 0 <= v <= 1e6),
    "rate": Kind("a number of frames per second, 0.0001 to 10000",
                 lambda v: is_number(v) and 1e-4 <= v <= 1e4),
    "seconds": Kind("seconds, a number that is not negative", lambda v: is_number(v) and v >= 0),
    "pixels": Kind("a whole number of at least 1 pixel", lambda v: is_whole(v, 1)),
    "size": Kind("[width, height] in pixels", is_size),
    "four numbers": Kind("a list of four numbers", is_box),
    "index": Kind("a whole number that is not negative", lambda v: is_whole(v, 0)),
    "object id": Kind("a whole number or a text", lambda v: isinstance(v, str) or is_whole(v)),
    "bool": Kind("true or false", lambda v: isinstance(v, bool)),
    "list": Kind("a list", lambda v: isinstance(v, list)),
    "object": Kind("an object", lambda v: isinstance(v, dict)),
}
for _kind, _names in MODES.items():
    KINDS[_kind] = Kind(f"one of {', '.join(_names)}", _names.__contains__)


# --------------------------------------------------------------------------------------------------
# checks
#
# place: where in the record, for messages. report(code, message, place): notes a finding, see
# records/check.py. What may not be at all raises InvalidRecord.

_CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_MARKUP = re.compile("(<image>|<video>)|" + "|".join(
    re.escape(token) for token in (*_CHAT_TOKENS, *map(token_text, SPECIAL))))


def check_fields(value, name, place, report):
    """One JSON object against the table of that name."""
    if not isinstance(value, dict):
        message = f"a {name} must be an object, not {short_repr(value)}"
        raise InvalidRecord("E07", message, place)
    table = TABLES[name]
    for key, field in value.items():
        if key not in table:
            message = f"there is an unknown field {short_repr(key)} in a {name}"
            raise InvalidRecord("E07", message, place, did_you_mean(key, table))
        check_value(key, field, table[key].rstrip("!"), place, report)
    for key in _REQUIRED[name]:
        if key not in value:
            raise InvalidRecord("E07", f"the field '{key}' is missing in a {name}", place)


def check_value(key, value, kind, place, report):
    description, accepts = KINDS[kind]
    if not accepts(value):
        code = "E40" if kind == "seconds" and is_number(value) else "E07"
        hint = ""
        if kind in MODES:
            hint = did_you_mean(value, MODES[kind])
        elif is_text(value) and "number" in description:
            hint = "write it without quotes?"
        message = f"'{key}' must be {description}, not {short_repr(value)}"
        raise InvalidRecord(code, message, place, hint)
    if kind == "text":
        check_text(value, place, report)
    elif kind == "string":
        check_length(value, place)


def check_length(text, place):
    if len(text) > MAX_TEXT:
        message = f"a text has {len(text):,} characters, more than {MAX_TEXT:,}"
        raise InvalidRecord("E07", message, place, "split it, or leave the record out")


def check_text(text, place, report):
    """The length of a text, and whether it looks as if it named an image or a special token."""
    check_length(text, place)
    found = _MARKUP.search(text) if "<" in text else None
    if found and found[1]:
        report("W05", f"{found[0]} in a text is read as it stands; images are named by the record",
               place)
    elif found:
        report("W07", f"{found[0]} in a text is read as it stands, never as the token", place)


def check_together(value, place, *keys):
    """Either all of the fields are given or none."""
    given = [key for key in keys if key in value]
    missing = [key for key in keys if key not in value]
    if given and missing:
        raise InvalidRecord("E07", f"'{given[0]}' is given without '{missing[0]}'", place)


def did_you_mean(word, words):
    # short_repr cuts the word short: it may have millions of letters.
    close = difflib.get_close_matches(short_repr(word).strip("'"), words, 1)
    return f"did you mean '{close[0]}'?" if close else ""
