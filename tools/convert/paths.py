"""The paths of the media of a record: moved to where a new file looks for them, and held out.

The paths of a file of records start in the folder media/ beside it, or else in its own folder. A
path to a file below that folder is written relative to it, any other path is written absolute:

    rows.json, 9.jpg             OUT records.jsonl         9.jpg
    set/rows.json, 9.jpg         OUT records.jsonl         set/9.jpg
    set/rows.json, 9.jpg         OUT runs/records.jsonl    /home/me/set/9.jpg
"""

import hashlib
from pathlib import Path

from records.errors import Unreadable


def absolute(folder):
    """The absolute path of a folder. Links are followed only where a ".." needs it."""
    folder = Path.cwd() / folder
    return folder.resolve() if ".." in folder.parts else folder


def move_path(path, start, target):
    """A path that starts in the folder `start` -> the same file from the folder `target`."""
    if start == target and not Path(path).is_absolute():
        return path
    folder = absolute(start / Path(path).parent)
    whole = folder / Path(path).name
    moved = whole.relative_to(target).as_posix() if target in whole.parents else str(whole)
    # under a locale that is not UTF-8 the letters of a folder may be surrogates
    return moved.encode("utf-8", "surrogateescape").decode("utf-8")


def move_media(record, start, target):
    """A record with the paths of all its media moved; start, target: from `absolute`."""

    def move(entry):
        if isinstance(entry, str):
            return move_path(entry, start, target)
        if isinstance(entry, list):
            return [move(part) for part in entry]
        return entry | {key: move(entry[key]) for key in ("path", "frames") if key in entry}

    return record | {key: move(record[key]) for key in ("image", "images", "video")
                     if key in record}


class HoldOut:
    """Chooses by a hash which records are held out, so that no picture is in both parts."""

    def __init__(self, share):
        self.share = share
        self.chosen = {}  # {name of a picture: is it held out?}

    def __call__(self, names):
        """Is the record with these pictures held out? names: also the text of a record without
        any. Unreadable if one picture is already held out and another is already in training."""
        known = {self.chosen[name] for name in names if name in self.chosen}
        if len(known) == 2:
            raise Unreadable("pictures of both parts", "one is held out, and another is not")
        digest = hashlib.sha256(names[0].encode("utf-8", "surrogateescape")).digest()
        is_low = int.from_bytes(digest[:8], "big") < self.share * 2**64
        self.chosen |= dict.fromkeys(names, known.pop() if known else is_low)
        return self.chosen[names[0]]
