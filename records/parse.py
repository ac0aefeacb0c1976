"""Files of records to JSON values: the rows of a .jsonl file, the elements of a .json array.

in    a path; then the bytes of one record
out   where each record begins, its bytes and its line; then its JSON value

parse_line refuses what Python's json lets pass: NaN, a key given twice, half of a surrogate pair.
Codes: E01 not JSON, E02 not UTF-8, E03 not a finite number, E04 a key twice, E05 not a file of
records. They stop the run in every file, since they tell that the file is not what it should be.
"""

import json
import math
import re
from collections import Counter
from itertools import chain
from typing import NamedTuple

from records.dialects import COCO_HINT
from records.errors import DataError, InvalidRecord, short_repr

MAX_RECORD_BYTES = 16 << 20          # parsed, they may take 30 times as much memory
MAX_DEPTH = 100                      # of lists and objects; Python's limit depends on the caller
CHUNK_BYTES = 1 << 20                # read at once of a .json file
_MIB = MAX_RECORD_BYTES >> 20


# --------------------------------------------------------------------------------------------------
# bytes -> JSON value


def parse_line(line, where):
    """A record's text, str or bytes -> its JSON value; DataError with `where`, a "file:line"."""
    try:
        if isinstance(line, bytes):
            if b"\0" in line:
                message = "the text holds a NUL character"
                raise InvalidRecord("E02", message, "", "is it UTF-16? Save the file as UTF-8")
            line = line.decode()
        value = _STRICT.decode(line)
        # too_deep and valid_unicode are slow. Most lines cannot hold what they look for.
        if line.count("[") + line.count("{") > MAX_DEPTH and too_deep(value):
            raise InvalidRecord("E01", f"the record is nested deeper than {MAX_DEPTH} levels")
        if re.search(r"\\u([dD][89a-fA-F]|0000)", line) and not valid_unicode(value):
            raise InvalidRecord("E02", "a text holds half of a surrogate pair, or a NUL")
        return value
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: E02 byte {error.start} of the record is not UTF-8") from None
    except json.JSONDecodeError as error:
        message = f"the text is not JSON: {error.msg} at column {error.pos + 1}"
        invalid = InvalidRecord("E01", message, "", json_hint(line, error))
        raise DataError(f"{where}: {invalid}") from None
    except RecursionError:
        raise DataError(f"{where}: E01 the record is nested too deeply") from None
    except InvalidRecord as error:
        raise DataError(f"{where}: {error}") from None


def json_hint(line, error):
    """What may have gone wrong where a line is not JSON."""
    end = line.rstrip()
    if error.msg == "Extra data":
        return "one record per line, nothing after it"
    if end.endswith(("{", "[", ",")):
        return "is it a record over several lines? Put it on one"
    if re.search(r",\s*[}\]]", line[max(error.pos - 2, 0) : error.pos + 3]):
        return "is there a comma too many?"
    if error.pos >= len(end) or not end.endswith("}"):
        return "is it truncated?"
    return ""


def _unique_keys(items):
    value = dict(items)
    if len(value) < len(items):
        counts = Counter(key for key, _ in items)
        key = next(key for key, n in counts.items() if n > 1)
        raise InvalidRecord("E04", f"the key {short_repr(key)} is given twice")
    return value


def _finite_float(text):
    if not math.isfinite(float(text)):
        raise InvalidRecord("E03", f"{text[:20]} is not a finite number")
    return float(text)


def _short_int(text):
    if len(text) > 18:
        raise InvalidRecord("E01", f"an integer has {len(text)} digits, more than 18")
    return int(text)


_STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_finite_float,
                           parse_float=_finite_float, parse_int=_short_int)


def _children(value):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def too_deep(value):
    """Is a JSON value nested deeper than MAX_DEPTH? Level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = list(chain.from_iterable(map(_children, level)))
    return any(isinstance(part, (dict, list)) for part in level)


def valid_unicode(value):
    """Is no text in a JSON value one that no file can hold: half of a surrogate pair, or a NUL?"""
    if isinstance(value, str):
        return not re.search("[\ud800-\udfff\\0]", value)
    keys = value if isinstance(value, dict) else ()
    return all(map(valid_unicode, chain(keys, _children(value))))


# --------------------------------------------------------------------------------------------------
# file -> the bytes of its records


class Row(NamedTuple):
    offset: int                      # in bytes
    data: bytes
    line: int                        # from 1


def rows(path):
    """Yields the Row of every record in a file, without parsing; DataError for other files."""
    readers = {".jsonl": _lines, ".json": _elements}
    if path.suffix not in readers:
        raise DataError(f"{path}: E05 the name of a file of records ends in .jsonl (one per line) "
                        "or .json (one array)")
    empty = True
    try:
        with open(path, "rb") as file:
            head = file.read(3)
            if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{path}:1: E02 the file is not UTF-8 but UTF-16")
            start = 3 if head == b"\xef\xbb\xbf" else 0          # a byte order mark
            file.seek(start)
            for row in readers[path.suffix](file, path, start):
                empty = False
                yield row
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error.strerror}") from None
    if empty:
        raise DataError(f"{path}: E05 the file holds no record")


def _lines(file, path, offset):
    line = 0
    first = True
    while data := file.readline(MAX_RECORD_BYTES + 1):
        line += 1
        if len(data) > MAX_RECORD_BYTES:
            raise DataError(f"{path}:{line}: E01 the line is longer than {_MIB} MiB")
        text = data.strip()
        if text:
            if first and re.fullmatch(rb"\[\s*(\{.*)?", text):
                raise DataError(f"{path}:{line}: E05 this is a JSON array, not one record per line "
                                "- name the file .json")
            first = False
            yield Row(offset, data, line)
        offset += len(data)


class _ArrayText:
    """A window on a file with one array, and a position in it.

    The text is read as Latin-1: a byte is a character, so a position is an offset in bytes. What is
    not ASCII can only stand inside strings, so a JSON parser finds where an element ends.
    """
    PARSER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
    BLANKS = re.compile("[ \t\r\n]*")

    def __init__(self, file, offset):
        self.file = file
        self.offset = offset         # of the window, in the file
        self.text = ""
        self.at = 0                  # position in the window
        self.line = 1                # of the position
        self.at_end = False          # is the rest of the file in the window?

    def read_more(self, n):
        data = self.file.read(n)
        self.text = self.text[self.at :] + data.decode("latin-1")
        self.offset += self.at
        self.at = 0
        self.at_end = not data

    def move_to(self, at):
        self.line += self.text.count("\n", self.at, at)
        self.at = at

    def next_character(self):
        """Moves to the next character that is not blank; "" at the end of the file."""
        while True:
            self.move_to(self.BLANKS.match(self.text, self.at).end())
            if self.at < len(self.text):
                return self.text[self.at]
            if self.at_end:
                return ""
            self.read_more(CHUNK_BYTES)

    def find_end(self, where):
        """The position behind the JSON value that begins here; reads on until it is complete."""
        while True:
            try:
                end = self.PARSER.raw_decode(self.text, self.at)[1]
                problem = ""
            except (json.JSONDecodeError, RecursionError) as error:
                end = len(self.text)
                problem = getattr(error, "msg", "it is nested too deeply")
            # A number that ends where the window ends may go on in the file.
            if end < len(self.text) or (self.at_end and not problem):
                return end
            if self.at_end:
                raise DataError(f"{where}: E01 the record that begins here is not JSON: {problem} "
                                "- is it truncated?")
            if end - self.at > MAX_RECORD_BYTES:
                raise DataError(f"{where}: E01 the record that begins here is longer than {_MIB} "
                                f"MiB or not JSON: {problem or 'it does not end'}")
            self.read_more(max(CHUNK_BYTES, end - self.at))


def _elements(file, path, offset):
    """Walks an array, "[" element "," element "]"."""
    text = _ArrayText(file, offset)
    character = text.next_character()
    if not character:
        return
    if character != "[":
        raise DataError(f"{path}:{text.line}: {_not_an_array(file, character)}")
    while True:
        text.move_to(text.at + 1)    # behind [ or ,
        if text.next_character() == "]" and character == "[":
            break                    # an empty array
        end = text.find_end(f"{path}:{text.line}")
        yield Row(text.offset + text.at, text.text[text.at : end].encode("latin-1"), text.line)
        text.move_to(end)
        character = text.next_character()
        if character == "]":
            break
        if character != ",":
            message = "the array does not end with ] - is it truncated?"
            if character:
                found = short_repr(text.text[text.at : text.at + 20])
                message = f"the text is not JSON: {found} stands where , or ] should stand"
            raise DataError(f"{path}:{text.line}: E01 {message}")
    text.move_to(text.at + 1)
    if text.next_character():
        found = short_repr(text.text[text.at : text.at + 20])
        raise DataError(f"{path}:{text.line}: E01 {found} stands after the end of the array")


def _not_an_array(file, character):
    """Why a .json file does not begin with "[", judged by its ends."""
    if character != "{":
        return "E05 the file is not an array of records"
    file.seek(0)
    ends = file.read(CHUNK_BYTES)
    file.seek(-min(CHUNK_BYTES, file.seek(0, 2)), 2)
    ends += file.read()
    if b'"categories"' in ends and (b'"images"' in ends or b'"image_id"' in ends):
        return f"E05 the file is one object, not an array of records - {COCO_HINT}"
    return ("E05 the file is one object, not an array of records "
            "- one record per line? Name the file .jsonl")
