"""Validates all records of a file or a mixture and prints each mistake with its line.

    python -m tools.check tests/media/records.jsonl --media tests/media --decode

With --decode it also decodes every image, and of every video the frames that a training run with
these --fps and --max-frames uses.

Exit status: 0 nothing is wrong, 1 something is, 2 a file is missing.
"""

import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from data import DataConfig
from records.errors import DataError, Unreadable, plural, require_file, warn
from records.media import MAX_FRAMES, read_image
from records.parse import THOUSANDTHS, like_thousandths, unlikely_styles, unlikely_units
from records.reader import Records
from records.visual import read_headers
from tools.command import frame_rate, make_parser, report_errors, whole_number
from training.planner import has_loss
from training.sources import OPTIONS, read_mix

MAX_PRINTED = 20  # lines of a file, without --all
MAX_DURATION_ERROR_S = 0.5  # between the declared and the real duration


class Problem(NamedTuple):
    kind: str  # by which problems are counted
    sentence: str


def find_problems(records, i, config, decode_all):
    """-> [Problem, ..] of record i: the first in its text, or those of its files."""
    try:
        record = records[i]
    except Unreadable as error:
        return [Problem(*error.args)]
    problems = [Problem("unlikely unit", sentence) for sentence in unlikely_units(record)]
    problems += [Problem("unlikely style", sentence) for sentence in unlikely_styles(record)]
    if not any(has_loss(annotation, config) for annotation in record["annotations"]):
        problems.append(Problem(
            "nothing to train on", "the weight of every annotation, or of all its turns, is 0; "
            "give one of them another weight"))
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
    """`like_thousandths` of record i, with the headers of images, and of videos if all are read."""
    if b'"pixel"' not in records.text(i):
        return None
    try:
        record = records[i]
        is_read = decode_all or "video" not in record
        return like_thousandths(record, read_headers(record, config).sizes if is_read else ())
    except Unreadable:
        return None  # find_problems names it


def compare_declared(records, record, sizes):
    """What the record declares of its files: size, sha256, and duration of a video."""
    found = []
    entries = [record["video"]] if "video" in record else record.get("images", [])
    for entry, size, path in zip(entries, sizes, records.paths_of(record), strict=False):
        if "frames" in entry:  # they may be smaller
            continue
        if "width" in entry and (entry["width"], entry["height"]) != tuple(size):
            found.append(f"{path} has {size[0]} x {size[1]} pixels, not "
                         f"{entry['width']} x {entry['height']}")
        if "sha256" in entry and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            found.append(f"{path} has another sha256")
        if "duration" in entry:
            seconds = records.video_size(record)[2]
            if abs(entry["duration"] - seconds) > MAX_DURATION_ERROR_S:
                found.append(f"{path} lasts {seconds:g} s, not {entry['duration']:g} s")
    return [Problem("other than declared", sentence) for sentence in found]


def check_file(records, config, decode_all, print_all):
    """Prints what is wrong with a file, then the counts; True if anything is."""
    counts = Counter()
    thousandths = set()
    for i in range(len(records)):
        if False not in thousandths:
            thousandths.add(may_be_thousandths(records, i, config, decode_all))
        for problem in find_problems(records, i, config, decode_all):
            if print_all or counts.total() < MAX_PRINTED:
                print(f"{records.where(i)}: {problem.kind}: {problem.sentence}")
            counts[problem.kind] += 1
    if thousandths - {None} == {True} and not counts["unlikely unit"]:
        print(f"{records.path}: unlikely unit: {THOUSANDTHS}")
        counts["unlikely unit"] += 1
    summary = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
    if counts["missing file"]:
        print(f"Paths start in {records.media}; --media DIR names another folder.")
    print(f"{records.path}: {plural(len(records), 'record')}; {summary or 'nothing is wrong'}")
    return bool(counts)


@report_errors
def main(argv=None):
    parser = make_parser("check", __doc__)
    add = parser.add_argument
    add("file", type=Path, help=(
        "records (.jsonl), or a mixture, whose name ends in mix.json"))
    add("--media", metavar="DIR", help="where the paths in the records start "
        "(default: the folder media/ beside the file, else its own folder)")
    add("--decode", action="store_true",
        help="also decode every image, and the frames of every video that training uses")
    add("--fps", type=frame_rate, default=2.0, help="frames per second at most (default 2)")
    add("--max-frames", type=whole_number(1, MAX_FRAMES), default=128,
        help="of a video at most (default 128: stage 2)")
    add("--all", action="store_true", help=f"print all mistakes, not only {MAX_PRINTED} of a file")
    args = parser.parse_args(argv)
    # how many images a run takes is its own affair
    config = DataConfig(max_images=10**6, fps=args.fps, max_frames=args.max_frames)
    entries = [{"path": args.file}]
    if args.file.name.endswith("mix.json"):
        entries = [member for entry in read_mix(args.file)
                   for member in entry.get("data", [entry])]
    status = 0
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
    return status


if __name__ == "__main__":
    sys.exit(main())
