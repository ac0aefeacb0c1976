"""Changes the paths of media for the new file, and selects held-out records.

The paths in a file of records are relative to the folder media/ beside it, or else to the folder of
the file. If an image or video is below this folder, its path becomes relative, otherwise absolute:

    rows.json, 9.jpg             OUT records.jsonl         9.jpg
    set/rows.json, 9.jpg         OUT records.jsonl         set/9.jpg
    set/rows.json, 9.jpg         OUT runs/records.jsonl    /home/me/set/9.jpg
"""

import hashlib
from os.path import isabs
from pathlib import Path

from records.errors import Unreadable


def absolute(folder):
    """The absolute path of a folder. Links are resolved only if the path contains ".."."""
    folder = Path.cwd() / folder
    return folder.resolve() if ".." in folder.parts else folder


def move_path(path, start, target):
    """A path relative to `start` -> a path to the same file, relative to `target` or absolute."""
    if start == target and not isabs(path):
        return path
    folder = absolute(start / Path(path).parent)
    whole = folder / Path(path).name
    moved = whole.relative_to(target).as_posix() if target in whole.parents else str(whole)
    # if the locale is not UTF-8, the name of a folder may contain surrogates
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
    """Selects held-out records by a hash, so that no image or video is in both files."""

    def __init__(self, share):
        self.share = share
        self.chosen = {}  # {path of an image or video: is it held out?}

    def __call__(self, names):
        """Is a record held out? names: the paths of its images or video; without any, its
        annotations. Unreadable if one of them is already held out and another one is not."""
        known = {self.chosen[name] for name in names if name in self.chosen}
        if len(known) == 2:
            raise Unreadable("pictures of both parts", "one is held out, and another is not")
        digest = hashlib.sha256(names[0].encode("utf-8", "surrogateescape")).digest()
        is_low = int.from_bytes(digest[:8], "big") < self.share * 2**64
        self.chosen |= dict.fromkeys(names, known.pop() if known else is_low)
        return self.chosen[names[0]]
