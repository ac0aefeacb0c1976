"""What goes wrong with data, and what it costs."""

import sys
from pathlib import Path

from tqdm import tqdm


class DataError(ValueError):
    """A mistake in a user's data file that stops the run: "file:line: what is wrong"."""


class Unreadable(Exception):
    """A record or a media file that cannot be used: it costs that record and never the run.

    Unreadable(kind, sentence): a few words by which the log counts, such as "missing
    file", and what is wrong.
    """

    def __str__(self):
        return ": ".join(self.args)


def command_name():
    """-> "train.py", "tools.generate" and so on: the command that runs in this process."""
    path = Path(sys.argv[0])
    if path.parent.name in ("tools", "toy", "evaluation"):
        return f"{path.parent.name}.{path.stem}"
    if path.stem == "__main__":      # of a package of tools/
        return f"tools.{path.parent.name}"
    return path.name


def warn(text):
    """Prints sentences, one on a line, on stderr: each after the name of the command, above the
    progress bar of a run."""
    for sentence in text.splitlines():
        tqdm.write(f"{command_name()}: {sentence}", file=sys.stderr)
