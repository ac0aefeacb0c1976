"""Validates all records of files or mixtures and prints each mistake with its line.

    python -m tools.check tests/media/records.jsonl --media tests/media --decode

With --decode it also decodes every image, and the frames of every video that a training run with
the same --fps and --max-frames uses. For several files it counts the images and videos that two of
them share, because none should be used both in training and in evaluation.

Exit status: 0 if nothing is wrong, 1 if there is a mistake, 2 if a file is missing or is not a
file of records.
"""

import hashlib
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from data import DataConfig
from records.errors import DataError, Unreadable, plural, print_visible, require_file, warn
from records.media import MAX_FRAMES, read_image
from records.parse import THOUSANDTHS, like_thousandths, unlikely_styles, unlikely_units
from records.reader import Records
from records.visual import read_headers
from tools.command import frame_rate, make_parser, report_errors, whole_number
from training.planner import has_loss
from training.sources import OPTIONS, media_of, read_mix

MAX_PRINTED = 20  # mistakes per file, without --all
MAX_DURATION_ERROR_S = 0.5  # between the declared and the real duration


class Problem(NamedTuple):
    kind: str  # problems of the same kind are counted together
    sentence: str


def find_problems(records, i, config, decode_all):
    """-> [Problem, ..] of record i; only one Problem if the record itself is invalid."""
    try:
        record = records[i]
    except Unreadable as error:
        return [Problem(*error.args)]
    problems = [Problem("unlikely unit", sentence) for sentence in unlikely_units(record)]
    problems += [Problem("unlikely style", sentence) for sentence in unlikely_styles(record)]
    if not any(has_loss(annotation, config) for annotation in record["annotations"]):
        problems.append(Problem(
            "nothing to train on", "every annotation, or each of its turns, has weight 0; "
            "give at least one of them another weight"))
    paths = records.paths_of(record)
    missing = []
    for path in paths:
        try:
            require_file(path)
        except Unreadable as error:
            missing.append(Problem(*error.args))
    if missing or not decode_all:
        return problems + missing
    try:
        info = read_headers(record, config)
        for _ in records.frames(record, info.times) if info.times else map(read_image, paths):
            pass  # decoding finds damage
        return problems + compare_declared(records, record, info.sizes)
    except Unreadable as error:
        return [*problems, Problem(*error.args)]


def may_be_thousandths(records, i, config, decode_all):
    """`like_thousandths` of record i. The size of a video is only read with `decode_all`."""
    if b'"pixel"' not in records.text(i):
        return None
    try:
        record = records[i]
        is_read = decode_all or "video" not in record
        return like_thousandths(record, read_headers(record, config).sizes if is_read else ())
    except Unreadable:
        return None  # find_problems reports this error


def compare_declared(records, record, sizes):
    """-> a Problem for each size, sha256 or duration in the record that differs from the file."""
    found = []
    entries = [record["video"]] if "video" in record else record.get("images", [])
    for entry, size, path in zip(entries, sizes, records.paths_of(record), strict=False):
        if "frames" in entry:  # the frames may be smaller than the video
            continue
        if "width" in entry and (entry["width"], entry["height"]) != tuple(size):
            found.append(f"{path} has {size[0]} x {size[1]} pixels, not "
                         f"{entry['width']} x {entry['height']}")
        if "sha256" in entry and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            found.append(f"{path} does not have the sha256 of the record")
        if "duration" in entry:
            seconds = records.video_size(record)[2]
            if abs(entry["duration"] - seconds) > MAX_DURATION_ERROR_S:
                found.append(f"{path} lasts {seconds:g} s, not {entry['duration']:g} s")
    return [Problem("other than declared", sentence) for sentence in found]


def check_file(records, config, decode_all, print_all):
    """Prints the mistakes in a file, then their counts -> bool: is there any mistake?"""
    counts = Counter()
    thousandths = set()
    for i in range(len(records)):
        if False not in thousandths:
            thousandths.add(may_be_thousandths(records, i, config, decode_all))
        for problem in find_problems(records, i, config, decode_all):
            if print_all or counts.total() < MAX_PRINTED:
                print_visible(f"{records.where(i)}: {problem.kind}: {problem.sentence}")
            counts[problem.kind] += 1
    if thousandths - {None} == {True} and not counts["unlikely unit"]:
        print_visible(f"{records.path}: unlikely unit: {THOUSANDTHS}")
        counts["unlikely unit"] += 1
    summary = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
    if counts["missing file"]:
        print_visible(f"Paths are relative to {records.media}; use --media DIR for another "
                      "folder.")
    n = plural(len(records), "record")
    print_visible(f"{records.path}: {n}; {summary or 'nothing is wrong'}")
    return bool(counts)


@report_errors
def main(argv=None):
    parser = make_parser("check", __doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=(
        "a file of records (.jsonl), or a mixture, whose name ends in mix.json"))
    add("--media", metavar="DIR", help="the paths in the records are relative to this folder "
        "(default: the folder media/ beside the file, or else the folder of the file)")
    add("--decode", action="store_true",
        help="also decode every image, and the frames of every video that training uses")
    add("--fps", type=frame_rate, default=2.0, help=(
        "maximum number of frames per second (default 2)"))
    add("--max-frames", type=whole_number(1, MAX_FRAMES), default=128,
        help="maximum number of frames of a video (default 128, as in stage 2)")
    add("--all", action="store_true", help=(
        f"print all mistakes, not only the first {MAX_PRINTED} of each file"))
    args = parser.parse_args(argv)
    # the limit for the number of images depends on the run, so it is not checked
    config = DataConfig(max_images=10**6, fps=args.fps, max_frames=args.max_frames)
    entries = []
    for path in args.files:
        if path.name.endswith("mix.json"):
            entries += chain.from_iterable(entry.get("data", [entry]) for entry in read_mix(path))
        else:
            entries.append({"path": path})
    status = 0
    media = {}  # {file: its images and videos}
    for entry in entries:
        options = {key: entry[key] for key in OPTIONS if key in entry}
        try:
            records = Records(entry["path"], entry.get("media", args.media), **options,
                              stop_on_mistakes=False)
        except DataError as error:
            warn(str(error))
            status = 2
            continue
        status = max(status, int(check_file(records, config, args.decode, args.all)))
        if len(args.files) > 1:
            own = media_of(records)
            for path, others in media.items():
                if n := len(own & others):
                    print_visible(f"{records.path}: {n:,} of its images and videos are also in "
                                  f"{path}")
            media[records.path] = own
    return status


if __name__ == "__main__":
    sys.exit(main())
