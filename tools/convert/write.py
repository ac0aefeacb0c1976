"""Merges and numbers the records of published sets, and writes all files.

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
import pickle
from contextlib import ExitStack
from os.path import isfile
from pathlib import Path
from tempfile import TemporaryFile
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from records.errors import RunError, draft, plural, warn
from records.parse import as_object
from records.reader import media_folder, names_of, read_record
from tools.convert.entries import line_of, read_entries, to_json
from tools.convert.layout import Job
from tools.convert.make import split
from tools.convert.media import Media
from tools.convert.paths import HoldOut, absolute, move_media
from tools.convert.subtitles import SubtitleFolder
from tools.convert.turn import turned


def media_of(head):
    """The head of a record -> the paths of its images, of its video, or of its frames."""
    if "video" in head:
        return names_of({"video": as_object(head["video"])})
    images = head.get("images") or [head[key] for key in ("image",) if key in head]
    return names_of({"images": [as_object(image) for image in images]})


def group(entries, layout):
    """Merges the entries of the same images, or of the same clip of a video."""
    groups = {}  # {hash of the medium: places of its entries in the temporary file}
    end = 0
    with TemporaryFile() as waiting:
        for _, head, annotations, *_ in entries:
            medium = to_json([head.get("video"), media_of(head)])
            key = hashlib.sha256(medium.encode()).digest()
            groups.setdefault(key, []).append(end)
            end += waiting.write(pickle.dumps((head, annotations)))
        groups = list(groups.values())  # frees the hashes, since a set has millions of rows
        for places in groups:
            heads = []
            merged = []
            for place in places:
                waiting.seek(place)
                head, annotations = pickle.load(waiting)
                heads.append(head)
                merged += annotations
            yield "a record", heads[0], merged, layout, None


def numbered(args, entries):
    """Yields (where, head, annotations, masks or None) of each record. Records of published sets
    get numbers as ids: NAME-1, NAME-2, and NAME-2.1 for further points of the same image."""
    for number, (where, head, annotations, layout, masks) in enumerate(entries, 1):
        for k, part in enumerate(split(annotations, layout.max_points)):
            name = f"{args.kind}-{number}" + (f".{k}" if k else "")
            own = {"id": name} if layout.published else {}
            yield where, {**own, **head}, part, masks


class Output:
    """The files that the command writes, and what it found. They replace their targets when all are
    complete. start, target: the folders that the paths in the input and in the output are relative
    to."""

    def __init__(self, args, start, target, stack):
        paths = [stack.enter_context(draft(path)) for path in args.outs]
        self.files = [stack.enter_context(open(path, "wb")) for path in paths]
        self.counts = [0] * len(paths)
        self.is_held_out = HoldOut(args.hold_out) if args.hold_out else None
        self.start = start
        self.target = target
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

    def add(self, head, moved, annotations, masks):
        """moved: the head with the paths for its file. annotations: the JSON of each of them."""
        names = media_of(head)
        line = line_of(moved, annotations)
        if b"\\u" in line:  # also in the head
            read_record(line)
        part = 0
        if self.is_held_out:
            part = self.is_held_out([os.path.relpath(os.path.join(self.target, name), self.target)
                                     for name in media_of(moved)] or [", ".join(annotations)])
        self.files[part].write(line)
        self.counts[part] += 1
        for name in names:
            path = os.path.join(self.start, name)
            self.n_paths += 1
            if not isfile(path):
                self.n_missing += 1
                self.missing = self.missing or path
        if self.urls:
            self.add_urls(head)
        if masks is not None:
            name = f"{head['id']}/0.npy"
            if isinstance(masks, dict):  # run lengths, which are stored as the bytes of their JSON
                name = f"{head['id']}/0/runs.npy"
                masks = np.frombuffer(json.dumps(masks).encode(), np.uint8)
            with self.masks.open(name, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, masks)

    def add_urls(self, head):
        for image in head.get("images") or [head.get("image")]:
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
        output = Output(args, start, target, stack)
        entries = read_entries(args, job, subtitles)
        if args.exif_unturned:
            entries = turned(entries, job)
        if args.layout and args.layout.group:
            entries = group(entries, args.layout)
        for where, head, annotations, masks in numbered(args, entries):
            with report.skipping(where):
                output.add(head, move_media(head, start, target), annotations, masks)
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
