"""What can be wrong with a record, and how it is said: "file:line: CODE message (place) - hint".

The first letter of a code is what happens (docs/records.md lists the codes):

    E   stops the run; in lenient files, and in those of other projects, it skips the record
    S   skips the record, the same one in every run; they are counted
    W   warns once per file
"""

import sys
from typing import NamedTuple

from tqdm import tqdm


class DataError(ValueError):
    """A mistake in a user's data file. The message names the place; of several, one per line."""


class Unreadable(Exception):
    """A record or a media file that cannot be used: costs that record and never the run.

    The message begins with a code.
    """


class InvalidRecord(ValueError):
    """A rule that a record breaks: code, message, place inside the record, what to do about it."""

    def __init__(self, code, message, place="", hint=""):
        super().__init__(code, message, place, hint)
        self.code = code

    def __str__(self):
        code, message, place, hint = self.args
        text = f"{code} {message}"
        if place:
            text += f" ({place})"
        if hint:
            text += f" - {hint}"
        return text


class Finding(NamedTuple):
    """What does not stop the run: a code that begins with S skips the record, others warn."""
    code: str
    message: str


def short_repr(value):
    """A value as it may stand in a message: printable ASCII, at most 60 characters."""
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text):
    """The text with control characters as escapes ("\\x1b"), since a terminal would obey them.

    For whatever comes from a user's files: ids, file names, texts. Line ends stay.
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def warn(sentence):
    """Prints a sentence, which may hold ids and names from a user's files, on stderr; the progress
    bar of a run stays below it."""
    tqdm.write(printable(sentence), file=sys.stderr)
