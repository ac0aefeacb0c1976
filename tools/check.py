"""What is wrong with a file of records, or with every file that a mixture names, line by line.

    python -m tools.check FILE [--media DIR] [--decode] [--all]

FILE: .jsonl, .json, or a list of them whose name ends in mix.json. Every record is checked, and the
files of its media must exist; with --decode they are also read. Prints lines "file:line: what is
wrong", then the counts. Exit status: 0 nothing is wrong, 1 something is, 2 a file is missing.
"""

import argparse
import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from data import DataConfig
from records.check import unlikely_units
from records.errors import DataError, Unreadable, warn
from records.media import FrameFolder, image_size, names_of, read_image
from records.reader import Records
from records.visual import read_headers
from training.sources import OPTIONS, read_mix

MAX_PRINTED = 20                     # lines of a file, without --all
MAX_DURATION_ERROR_S = 0.5           # between the declared and the real duration of a video
ANY_SIZE = DataConfig(max_images=10**6)      # how many images a run takes is its own affair


class Problem(NamedTuple):
    kind: str                        # by which problems are counted, as in records.errors
    sentence: str


# --------------------------------------------------------------------------------------------------
# a record


def find_problems(records, i, decode_all):
    """-> [Problem, ..] of record i: the first in its text, or those of its files."""
    try:
        record = records[i]
    except Unreadable as error:
        return [Problem(*error.args)]
    problems = [Problem("unlikely unit", sentence) for sentence in unlikely_units(record)]
    missing = [Problem("missing file", str(records.media / name)) for name in names_of(record)
               if not (records.media / name).is_file()]
    if missing or not decode_all:
        return problems + missing
    try:
        sizes = read_headers(record, ANY_SIZE).sizes
        return problems + read_images(records, record) + compare_declared(records, record, sizes)
    except Unreadable as error:
        return [*problems, Problem(*error.args)]


def read_images(records, record):
    """Decodes every image, or every frame of a list of frames; Unreadable if one is damaged."""
    if "video" in record and not isinstance(records.video(record), FrameFolder):
        return []                    # its packets were read with its header
    return [Problem("size differs", f"{path} is not as large as its header says")
            for path in records.paths_of(record)
            if read_image(path).shape[1::-1] != tuple(image_size(path))]


def compare_declared(records, record, sizes):
    """What the record declares of its files: size, sha256, and duration of a video."""
    found = []
    entries = record.get("images") or [record.get("image", record.get("video"))]
    for entry, size, path in zip(entries, sizes, records.paths_of(record), strict=False):
        if not isinstance(entry, dict):
            continue
        if "width" in entry and (entry["width"], entry["height"]) != tuple(size):
            found.append(f"{path} is {size[0]} x {size[1]} pixels, not {entry['width']} x "
                         f"{entry['height']}")
        if "sha256" in entry and "frames" not in entry and hash_file(path) != entry["sha256"]:
            found.append(f"{path} has another sha256")
        if "duration" in entry:
            seconds = records.video_size(record)[2]
            if abs(entry["duration"] - seconds) > MAX_DURATION_ERROR_S:
                found.append(f"{path} lasts {seconds:g} s, not {entry['duration']:g} s")
    return [Problem("other than declared", sentence) for sentence in found]


def hash_file(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# files


def check_file(records, decode_all, print_all):
    """Prints what is wrong with a file of records, then the counts; True if anything is."""
    counts = Counter()
    for i in range(len(records)):
        for problem in find_problems(records, i, decode_all):
            if print_all or counts.total() < MAX_PRINTED:
                print(f"{records.where(i)}: {problem.kind}: {problem.sentence}")
            counts[problem.kind] += 1
    summary = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
    print(f"{records.path}: {len(records)} records; {summary or 'nothing is wrong'}")
    return bool(counts)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="tools.check", description="What is wrong with a file of records, line by line.")
    parser.add_argument("file", type=Path, help="records (.jsonl, .json), or a mixture (mix.json)")
    parser.add_argument("--media", help="where the paths in it start; default: the folder media/ "
                        "beside the file, else the file's own")
    parser.add_argument("--decode", action="store_true", help="read every image and the packets of "
                        "every video, instead of looking whether the files exist")
    parser.add_argument("--all", action="store_true", help="print everything, not only "
                        f"{MAX_PRINTED} lines")
    parser.add_argument("--split-turns", action="store_true", help="each question of a "
                        "conversation becomes a branch of its own")
    return parser.parse_args(argv)


def named_entries(args):
    """The file of the command line, or those that a mix.json names, as entries of a mix.json."""
    if not args.file.name.endswith("mix.json"):
        return [{"path": args.file, "split_turns": args.split_turns}]
    return [member for entry in read_mix(args.file) for member in entry.get("data", [entry])]


def main(argv=None):
    args = parse_arguments(argv)
    try:
        entries = named_entries(args)
    except (OSError, ValueError) as error:
        warn(str(error))
        return 2
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
        status = max(status, int(check_file(records, args.decode, args.all)))
    return status


if __name__ == "__main__":
    sys.exit(main())
