"""Exceptions for mistakes in data, and warnings."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from text.tokenizer import Unencodable


class DataError(ValueError):
    """A mistake in a user's data file. It stops the run. Text: "file:line: what is wrong"."""


class Unreadable(Exception):
    """A record or a media file that cannot be used. Only this record is skipped.

    Unreadable(kind, sentence): skipped records are counted by kind, such as "missing file".
    """

    def __str__(self):
        return ": ".join(self.args)


@contextmanager
def encodable():
    """Turns Unencodable into Unreadable, so that only the record of this text is skipped."""
    try:
        yield
    except Unencodable as e:
        raise Unreadable("wrong text", str(e)) from None


def plural(n, noun):
    """(1, "record") -> "1 record"; (2, "record") -> "2 records"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def require_file(path):
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        name = str(path)[:300]
        if not name.isascii() and sys.getfilesystemencoding() != "utf-8":
            name = f"{name!a} has letters that your locale cannot encode; set PYTHONUTF8=1"
        raise Unreadable("missing file", name)


def command_name():
    """The name of the command that runs in this process: "train.py", "tools.generate", .."""
    path = Path(sys.argv[0])
    if path.stem == "__main__":  # a package in tools/
        path = path.parent
    return f"tools.{path.stem}" if path.parent.name == "tools" else path.name


def warn(text):
    """Prints one sentence per line on stderr, above the progress bar of a run. Other control
    characters are printed as escapes, since a terminal would obey them."""
    for sentence in text.splitlines():
        visible = "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)
        tqdm.write(f"{command_name()}: {visible}", file=sys.stderr)
