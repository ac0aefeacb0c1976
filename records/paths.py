"""Paths of media, written so that training finds them beside the new file.

The paths of a file of records start in the folder media/ beside it, or else in its own folder. A
path to a file below that folder is written relative to it, any other path is written absolute:

    rows.json, 9.jpg             OUT records.jsonl         9.jpg
    set/rows.json, 9.jpg         OUT records.jsonl         set/9.jpg
    set/rows.json, 9.jpg         OUT runs/records.jsonl    /home/me/set/9.jpg
"""

from pathlib import Path


def absolute(folder):
    """The absolute path of a folder. Links are followed only where a ".." needs it."""
    folder = Path.cwd() / folder
    return folder.resolve() if ".." in folder.parts else folder


def move_path(path, start, target):
    """A path that starts in the folder `start` -> the same file from the folder `target`."""
    if start == target:
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
        if "frames" in entry:
            return entry | {"frames": [move_path(f, start, target) for f in entry["frames"]]}
        return entry | {"path": move_path(entry["path"], start, target)}

    moved = {key: move(record[key]) for key in ("image", "video") if key in record}
    if "images" in record:
        moved["images"] = [move(entry) for entry in record["images"]]
    return record | moved
