"""What goes wrong with data, and what it costs."""

import sys

from tqdm import tqdm


class DataError(ValueError):
    """A mistake in a user's data file that stops the run: "file:line: what is wrong"."""


class Unreadable(Exception):
    """A record or a media file that cannot be used: it costs that record and never the run.

    kind: a few words by which the log counts, such as "missing file". sentence: what is wrong.
    """

    def __init__(self, kind, sentence):
        super().__init__(kind, sentence)
        self.kind = kind

    def __str__(self):
        return ": ".join(self.args)


def warn(sentence):
    """Prints a sentence on stderr, above the progress bar of a run."""
    tqdm.write(sentence, file=sys.stderr)
