"""Report counts what was read and what was skipped, and prints where and why. Equal reasons are one
sentence with their number and the first place; with --all, each place has its sentence."""

import re
from collections import Counter
from contextlib import contextmanager

from records.check import short
from records.errors import DataError, Unreadable, plural, warn
from records.reader import FORM_ERRORS

MAX_PRINTED = 20  # reasons for skipped entries, without --all
NOTHING = (None, "", [], {}, [""], [None])  # values of fields that count as absent
# Names of fields that may change what the model is trained on. They contain one of these words, or
# are one of the names at the end: columns of options (A, B, .. or a0, a1, ..), and predictions.
TELLING = re.compile(
    "(?<![a-z])(?i:(?:image|img|picture|photo|video|audio|file|keypoint)[a-z]*|path|pixel|vid|frame"
    "|media|sound|speech|clip|pdf|depth|point|box|bbox|object|region|mask|segmentation|polygon"
    "|annotation|label|weight|loss|train|answer|response|output|completion|chosen|reject|rejected"
    "|target|solution|(?:ground)?truth|reasoning|thinking|tool|function|option|choice|correct"
    "|preferred|caption|prompt|context|input|history|hint|lecture|passage|table|candidate"
    "|distractor|subtitle|(?:question|query|instruction)(?!_?id|_?type))(?:e?s)?(?![a-z])"
    r"|^(?:[A-Z]|[a-e]|[aA]\d|scores?|confidence|ignored?|attributes)$")
# words in names of fields that may select a part of a video
TIMES = re.compile("(?<![a-z])(?i:time|timestamp|ts|start|end|begin|moment|span|segment|interval"
                   "|second|sec)s?(?![a-z])")
# an entry of another form: a null, a list instead of a text, lists of different lengths
SHAPE_ERRORS = (*FORM_ERRORS, LookupError)


class Report:
    """args: the flags of the command."""

    def __init__(self, args):
        self.args = args
        self.read = Counter()  # {format: number of entries}
        self.skipped = Counter()  # {kind of mistake: number}
        self.reasons = {}  # {kind and sentence: [number, first place]}
        self.not_read = {}  # name of an unknown field: [how often it occurs, its first value]

    def known_fields(self, fields, names, place=None, owner="the entry"):
        """-> the fields that are in `names`. Fields that are empty or in --ignore are ignored.

        place: None for the fields of an entry, or the object in it, such as "turn 1". An unknown
        field is an error in such an object, with --strict, and if `is_telling`. Else it is only
        counted. owner: what messages name if `place` is None.
        """
        known = {}
        for key, value in fields.items():
            if value in NOTHING or key in self.args.ignore:
                continue
            if key in names:
                known[key] = value
            elif place or self.args.strict or is_telling(key, fields):
                raise Unreadable(
                    "unknown field", f"{place or owner}: the field {short(key)} is not "
                    "supported; rename it (docs/convert.md), or ignore it with --ignore "
                    f"{short(key)}")
            else:
                self.count_unused(key, value)
        return known

    def count_unused(self, key, value):
        self.not_read.setdefault(key, [0, value])[0] += 1

    @contextmanager
    def skipping(self, where):
        """If an error ends the block, counts and prints the reason. The caller continues."""
        try:
            yield
            return
        except DataError:  # a mistake in the whole file
            raise
        except Unreadable as error:
            kind, *sentence = error.args
        except SHAPE_ERRORS as error:
            kind = "wrong record"
            sentence = [f"it cannot be read as a record: {type(error).__name__}: {error}"]
        self.skipped[kind] += 1
        reason = ": ".join([kind, *filter(None, sentence)])
        self.reasons.setdefault(reason, [0, where])[0] += 1
        if self.args.all:
            warn(f"{where}: {reason}; skipped")

    def end(self, path):
        """Prints the reasons, the fields that were not used, and what was read."""
        reasons = [] if self.args.all else [*self.reasons.items()]
        for reason, (n, where) in reasons[:MAX_PRINTED]:
            others = f", and {n - 1:,} more for this reason" if n > 1 else ""
            warn(f"{where}: {reason}; skipped{others}")
        if len(reasons) > MAX_PRINTED:
            warn(f"{len(reasons) - MAX_PRINTED} more reasons; --all prints them")
        for key, (n, value) in self.not_read.items():
            warn(f"the field '{key}' is not used; it occurs {plural(n, 'time')}, for example with "
                 f"the value {short(value)}")
        kinds = ", ".join(f"{kind} ({n:,})" for kind, n in self.read.items())
        warn(f"{path}: read as {kinds or 'an empty file'}")


def is_telling(key, fields):
    """May this field of an entry change what the model is trained on?"""
    if key == "attributes" and isinstance(fields[key], dict):
        return any(fields[key].values())  # CVAT writes {"occluded": false} for every box
    # without a video, a time may be the time of a chat; the video may be inside a turn
    return TELLING.search(key) or (TIMES.search(key) and "video" in str(fields))
