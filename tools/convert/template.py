"""A table to fill in, for a folder of images and videos without annotations (--template)."""

import csv
import os

from records.errors import RunError, draft, plural, warn
from records.reader import media_folder
from tools.convert.media import MEDIA_SUFFIXES

HEIC = (".heic", ".heif")


def write_template(folder, out):
    """Writes a table with a line for each image and video in the folder, and an empty caption ->
    the number of lines. The paths are relative to the folder where tools.convert will look for
    them. RunError if there is no image and no video."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    heic = [path for path in files if path.suffix.lower() in HEIC]
    if heic:
        warn(f"{plural(len(heic), 'file')} such as {heic[0]} cannot be read; docs/faq.md has a "
             "command that converts them")
    files = [path for path in files if path.suffix.lower() in MEDIA_SUFFIXES]
    if not files:
        raise RunError(f"{out} is not written: {folder} contains no image and no video")
    with draft(out) as path, open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file_name", "caption"])
        start = media_folder(out, None)
        table.writerows([os.path.relpath(path, start), ""] for path in files)
    warn(f"fill in the captions in {out}, and convert it: python -m tools.convert {out} "
         f"{out.with_suffix('.jsonl')}")
    return len(files)
