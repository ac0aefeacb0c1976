"""Checks the records, numbers the records of published sets, and writes all files.

The rows of one image of a published set can be far apart, among millions of others. They wait in a
temporary file until all rows are read. The order of the records is the order in which their images
appear first:

    row 0  u1  mug            u1  [mug, cat]        record 1
    row 1  u2  dog     ->     u2  [dog]             record 2
    row 2  u1  cat
"""

import hashlib
import json
import os
from contextlib import ExitStack
from os.path import isfile
from pathlib import Path
from tempfile import TemporaryFile
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from records.errors import RunError, Unreadable, draft, plural, warn
from records.parse import as_object, parse
from records.reader import media_folder, names_of, read_record
from tools.convert.entries import read_entries
from tools.convert.layout import Job
from tools.convert.make import split
from tools.convert.media import Media
from tools.convert.paths import HoldOut, absolute, move_media
from tools.convert.report import SHAPE_ERRORS
from tools.convert.subtitles import SubtitleFolder
from tools.convert.turn import turn_record


def media_of(head):
    """The head of a record -> the paths of its images, of its video, or of its frames."""
    if "video" in head:
        return names_of({"video": as_object(head["video"])})
    images = head.get("images") or [head[key] for key in ("image",) if key in head]
    return names_of({"images": [as_object(image) for image in images]})


def check(head, annotations):
    """-> the record as a line of JSON, and parsed. An error if training cannot read it."""
    record = {**head, "annotations": annotations}
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    # only a line with an escape can contain a character that must be looked for
    return line, read_record(line) if b"\\u" in line else parse(record)


def usable(where, head, annotations, report):
    """-> the annotations that training can read, and `check` of them or None."""
    try:
        return annotations, check(head, annotations)
    except (Unreadable, *SHAPE_ERRORS):
        good = []
    for annotation in annotations:
        with report.skipping(where):
            check(head, [annotation])
            good.append(annotation)
    return good, check(head, good) if good else None


def checked(args, job, subtitles):
    """Yields (where, head, annotations, layout, line) of the entries that training can read."""
    for where, head, annotations, layout in read_entries(args, job):
        with job.report.skipping(where):
            masks = {key: head.pop(key) for key in ("masks",) if key in head}
            if subtitles and "video" in head:
                subtitles.add_to(head)
            good, found = usable(where, head, annotations, job.report)
            if not found:
                continue
            line, parsed = found
            if args.exif_unturned:
                head = turn_record({**head, "annotations": good}, parsed, job.media.root)
                good = head.pop("annotations")
            yield where, head | masks, good, layout, line


def group(entries, layout):
    """Merges the entries of the same images, or of the same clip of a video."""
    groups = {}  # {hash of the medium: places of its entries in the temporary file}
    end = 0
    with TemporaryFile() as waiting:
        for _, head, _, _, line in entries:
            medium = json.dumps([head.get("video"), media_of(head)])
            key = hashlib.sha256(medium.encode()).digest()
            groups.setdefault(key, []).append(end)
            end += waiting.write(line)
        for places in groups.values():
            heads = []
            merged = []
            for place in places:
                waiting.seek(place)
                head = json.loads(waiting.readline())
                merged += head.pop("annotations")
                heads.append(head)
            yield "a record", heads[0], merged, layout, None


def numbered(args, entries):
    """Yields (where, record, masks or None). Records of published sets get numbers as ids: NAME-1,
    NAME-2, and NAME-2.1 for further points of the same image."""
    for number, (where, head, annotations, layout, _) in enumerate(entries, 1):
        masks = head.pop("masks", None)
        for k, part in enumerate(split(annotations, layout.max_points)):
            name = f"{args.kind}-{number}" + (f".{k}" if k else "")
            own = {"id": name} if layout.published else {}
            yield where, {**own, **head, "annotations": part}, masks


class Output:
    """The files that the command writes, and what it found. They replace their targets when all are
    complete. start: the folder that the paths in the input are relative to."""

    def __init__(self, args, start, stack):
        paths = [stack.enter_context(draft(path)) for path in args.outs]
        self.files = [stack.enter_context(open(path, "wb")) for path in paths]
        self.counts = [0] * len(paths)
        self.is_held_out = HoldOut(args.hold_out) if args.hold_out else None
        self.start = start
        self.urls = self.masks = None
        if args.urls:
            self.urls = stack.enter_context(
                open(stack.enter_context(draft(args.urls)), "w", encoding="utf-8", newline="\n"))
        if args.masks:
            self.masks = stack.enter_context(
                ZipFile(stack.enter_context(draft(args.masks)), "w", ZIP_DEFLATED))
        self.seen = set()  # images whose URLs are written
        self.n_paths = 0
        self.n_missing = 0
        self.missing = None  # the first path that does not exist

    def add(self, record, moved, masks):
        """moved: the record with the paths for its file."""
        names = media_of(record)
        line = json.dumps(moved, ensure_ascii=False).encode()
        part = 0
        if self.is_held_out:
            text = json.dumps(record["annotations"], sort_keys=True)
            part = self.is_held_out([os.path.relpath(os.path.join(self.start, name), self.start)
                                     for name in names] or [text])
        self.files[part].write(line + b"\n")
        self.counts[part] += 1
        for name in names:
            path = os.path.join(self.start, name)
            self.n_paths += 1
            if not isfile(path):
                self.n_missing += 1
                self.missing = self.missing or path
        if self.urls:
            self.add_urls(record)
        if masks is not None:
            name = f"{record['id']}/0.npy"
            if isinstance(masks, dict):  # run lengths, which are stored as the bytes of their JSON
                name = f"{record['id']}/0/runs.npy"
                masks = np.frombuffer(json.dumps(masks).encode(), np.uint8)
            with self.masks.open(name, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, masks)

    def add_urls(self, record):
        for image in record.get("images") or [record.get("image")]:
            if isinstance(image, dict) and "url" in image and image["path"] not in self.seen:
                self.seen.add(image["path"])
                self.urls.write(f"{image['url']}\t{image['path']}\n")


def write(args, report):
    """Writes all files, or none of them -> the number of records in each file of args.outs.
    RunError if there is nothing to write."""
    source = args.sources[0]
    published = args.layout.published if args.layout else False
    if published:
        start = target = store = Path(args.media or args.out.parent / "media")
    else:
        beside = source / "FILE" if source.is_dir() else source
        start = absolute(media_folder(beside, args.media))
        target = absolute(media_folder(args.out, None))
        store = target / f"{args.out.stem}.images"
    job = Job(args, report, Media(start, store))
    subtitles = SubtitleFolder(args.subtitles, start) if args.subtitles else None
    with ExitStack() as stack:  # closes all files before the first of them replaces its target
        output = Output(args, start, stack)
        entries = checked(args, job, subtitles)
        if args.layout and args.layout.group:
            entries = group(entries, args.layout)
        for where, record, masks in numbered(args, entries):
            with report.skipping(where):
                output.add(record, move_media(record, start, target), masks)
        report.end(source)
        reason = find_mistake(args, output, subtitles, published)
        if reason:
            raise RunError(f"{args.out} is not written: {reason}")
    return output.counts


def find_mistake(args, output, subtitles, published):
    """Prints what is missing -> why nothing is written, or None."""
    if subtitles:
        warn(f"found {plural(len(subtitles.paths), 'subtitle file')} in {args.subtitles}, and "
             f"{len(subtitles.used)} of them have the name of a video")
    if output.n_missing:
        what = ("OUT.urls.txt lists the images to download" if published else
                "set --media DIR to the folder where the paths in FILE start")
        warn(f"{output.n_missing:,} of {output.n_paths:,} images and videos do not exist, such as "
             f"{output.missing}; {what}")
    if mistake := subtitles and subtitles.find_mistake():
        return mistake
    if not any(output.counts):
        return f"{args.sources[0]} contains nothing that can become a record"
    if output.n_missing == output.n_paths > 0 and not published:
        return "none of its images and videos exists"
    if not all(output.counts):
        return f"--hold-out {args.hold_out} leaves one file without a record"
    return None
