"""What goes wrong with data, and what it costs."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from text.tokenizer import Unencodable


class DataError(ValueError):
    """A mistake in a user's data file that stops the run: "file:line: what is wrong"."""


class Unreadable(Exception):
    """A record or a media file that cannot be used. It costs the record and never the run.

    Unreadable(kind, sentence): the log counts by the kind, such as "missing file".
    """

    def __str__(self):
        return ": ".join(self.args)


@contextmanager
def encodable():
    """A text that cannot be encoded costs its record."""
    try:
        yield
    except Unencodable as e:
        raise Unreadable("wrong text", str(e)) from None


def plural(n, noun):
    """-> "1 record", "2 records"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def require_file(path):
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        name = str(path)[:300]
        if not name.isascii() and sys.getfilesystemencoding() != "utf-8":
            name = f"{name!a}: this locale lacks letters of its name; set PYTHONUTF8=1"
        raise Unreadable("missing file", name)


def command_name():
    """-> "train.py", "tools.generate" or another: what runs in this process."""
    path = Path(sys.argv[0])
    if path.stem == "__main__":  # of a package of tools/
        path = path.parent
    return f"tools.{path.stem}" if path.parent.name == "tools" else path.name


def warn(text):
    """Prints sentences, one a line, on stderr, above the progress bar of a run."""
    for sentence in text.splitlines():
        tqdm.write(f"{command_name()}: {sentence}", file=sys.stderr)
