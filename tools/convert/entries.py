"""Reads the entries of all files: rows, their layouts, and what the layouts make of them."""

import json
from contextlib import suppress
from itertools import groupby

from records.check import short
from records.errors import DataError, Unreadable, UserError
from records.parse import parse
from records.reader import read_record
from tools.convert.layout import Layout
from tools.convert.layouts import LAYOUTS, files_of, layout_of
from tools.convert.make import skip_unless, text_of
from tools.convert.negatives import with_negatives
from tools.convert.report import SHAPE_ERRORS
from tools.convert.rows import published_files, read_rows

to_json = json.JSONEncoder(ensure_ascii=False).encode


def read_sources(args, job):
    """Yields (name of a layout, where, row) of all files."""
    for source in args.sources:
        files, of_text = files_of(source, args.kind, args.split)
        for path in files:
            job.path = path
            for where, row in read_rows(path, args.layout if of_text == args.kind else None):
                if isinstance(row, Unreadable):
                    with job.report.skipping(where):
                        job.report.read["broken lines"] += 1
                        raise row
                    continue
                if args.ignore and isinstance(row, dict):
                    row = {key: value for key, value in row.items() if key not in args.ignore}
                name = args.kind or (layout_of(row) if path.suffix != ".txt" else of_text)
                if len(files) > 1 and name in LAYOUTS and not LAYOUTS[name].many:
                    raise DataError(f"{where}: a folder with several files of this kind must "
                                    "contain files of LabelMe; give one file instead of the folder")
                job.source = source
                yield name, where, row


def rows_of_media(args, job):
    """Yields (name of a layout, where, row), after `regroup` of the layouts."""
    runs = groupby(read_sources(args, job), key=lambda found: (found[0], job.source))
    for (name, source), run in runs:
        rows = ((where, row) for _, where, row in run)
        regroup = LAYOUTS[name].regroup if name in LAYOUTS else None
        if regroup:
            rows = regroup(rows, job)
        for where, row in rows:
            job.source = source  # groupby and regroup may have read further
            yield name, where, row


def line_of(head, annotations):
    """-> a record as a line of JSON. annotations: the JSON of each of them."""
    return (to_json({**head, "annotations": []})[:-2] + ", ".join(annotations) + "]}\n").encode()


def check(head, annotations):
    """-> [(number of points or boxes, JSON), ..] of annotations. An error if training cannot read
    them in one record."""
    parse({**head, "annotations": annotations})
    to_json(head).encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
    found = []
    for annotation in annotations:
        text = to_json(annotation)
        text.encode()
        if "\\u" in text:  # only such a text can contain a character that must be looked for
            read_record(line_of(head, [text]))
        found.append((len(annotation.get("points", annotation.get("boxes", ()))), text))
    return found


def usable(where, head, annotations, report):
    """The result of `check` for the annotations that training can read."""
    with suppress(Unreadable, *SHAPE_ERRORS):
        return check(head, annotations)
    found = []
    for annotation in annotations:
        with report.skipping(where):
            found += check(head, [annotation])
    return found


def read_entries(args, job, subtitles):
    """Yields (where, head, annotations, layout, masks) of what training can read.

    subtitles: a SubtitleFolder, or None. annotations: the result of `check`. masks: of a
    benchmark, or None.
    """
    entries = make_entries(args, job)
    if args.negatives:
        entries = with_negatives(entries, args.negatives, job)
    for where, head, made, layout in entries:
        labels, _ = head.pop("labels", (True, None))
        masks = head.pop("masks", None)
        with job.report.skipping(where):
            skip_unless(made or labels, "no annotation", "it has no object, and the file has no "
                        "label that is absent")
            if subtitles and "video" in head:
                subtitles.add_to(head)
            if found := made and usable(where, head, made, job.report):
                yield where, head, found, layout, masks


def make_entries(args, job):
    """Yields (where, head, annotations, layout), which are not checked yet, before negatives are
    added. The annotations may be [] if none of them can be used."""
    excluded = read_urls(args.exclude) if args.exclude else set()
    for name, where, row in rows_of_media(args, job):
        if isinstance(row, dict) and "id" in row:
            where += f" id {short(row['id'])}"
        with job.report.skipping(where):
            job.report.read[name.partition(";")[0]] += 1
            if not isinstance(row, dict):
                raise Unreadable("wrong record", f"an entry must be an object, not {short(row)}")
            skip_unless(name in LAYOUTS, "unknown format", f"this is {name}")
            if excluded:
                urls = [row.get("image_url"), *(row.get("image_urls") or [])]
                skip_unless(excluded.isdisjoint(urls), "excluded")
            for head, annotations in LAYOUTS[name].read(row, job):
                skip_unless(annotations or "labels" in head, "nothing to train on")
                made = []
                for annotation in annotations:
                    with job.report.skipping(where):
                        found = annotation() if callable(annotation) else annotation
                        made += found if isinstance(found, list) else [found]
                yield where, head, made, LAYOUTS[name]


def read_urls(path):
    """The URLs of the images of a published set."""
    layout = Layout(None, "image_url")
    rows = (row for file in published_files(path) for _, row in read_rows(file, layout))
    urls = {row.get("image_url") if isinstance(row, dict) else None for row in rows}
    if not urls or not all(map(text_of, urls)):
        raise UserError(f"--exclude {path}: each row must have the URL of an image")
    return urls
