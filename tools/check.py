"""What is wrong with a file of records, or with every file that a mixture names, line by line.

    python -m tools.check FILE [--media DIR] [--decode] [--all]

FILE: .jsonl, .json, or a list of them whose name ends in mix.json. Prints lines "file:line: CODE
message", then the counts. Exit status: 0 nothing but warnings, 1 findings, 2 a file is missing.
"""

import argparse
import re
import sys
from array import array
from collections import Counter
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from records.check import check_pixels, find
from records.errors import DataError, Finding, Unreadable, printable, warn
from records.image import EXIF_ORIENTATION, open_image, parser_errors, read_image
from records.index import Options, hash64, repeated, scan
from records.media import declared_size, media_entries, media_paths
from records.reader import check_is_file, digest, media_folder
from records.video import probe
from training.sources import read_mix

MAX_PRINTED = 20                     # lines of a file, without --all
MAX_DURATION_ERROR_S = 0.5           # between the declared and the real duration of a video


# --------------------------------------------------------------------------------------------------
# the media of a record


class Decoded(NamedTuple):
    """What reading an image or a video to its end tells."""
    size: tuple = None               # (width, height)
    seconds: float = None            # of a video
    conversion: str = ""             # what is changed when an image is read, in words
    problem: Finding = None          # why it cannot be read


@lru_cache(maxsize=1000)
def decode(path, is_video):
    try:
        if is_video:
            video = probe(path)
            return Decoded((video.width, video.height), video.duration)
        return Decoded(read_image(path).shape[1::-1], conversion=conversion(path))
    except Unreadable as error:
        return Decoded(problem=finding_of(error))


def finding_of(error):
    """The Finding of a message that begins with its code."""
    code, message = str(error).split(" ", 1)
    return Finding(code, message)


def conversion(path):
    """What is changed when an image is read as 8-bit RGB, in words; "" if nothing."""
    changes = []
    with open_image(path) as image:
        if image.mode not in ("RGB", "L"):
            changes.append(f"its mode is {image.mode}")
        if image.getexif().get(EXIF_ORIENTATION, 1) > 1:
            changes.append("it is turned as its EXIF data say")
        try:
            with parser_errors(path, "count the frames of"):
                n_frames = getattr(image, "n_frames", 1)
        except Unreadable:           # does no harm, since only the first frame is read
            n_frames = "damaged"
    if n_frames != 1:
        changes.append(f"only the first of {n_frames} frames is read")
    return ", ".join(changes)


def check_media(record, folder, decode_all):
    """Findings in the media of a record: files that are missing; decode_all: or damaged."""
    try:
        paths = media_paths(record, folder)
    except Unreadable as error:
        return [finding_of(error)]
    video = record.get("video")
    has_frames = isinstance(video, dict) and "frames" in video
    missing = []
    for path in paths:
        if path.is_dir():
            missing.append(Finding("E10", f"{path} is a folder"))
        elif not path.is_file():
            missing.append(Finding("S24" if has_frames else "S20", f"there is no file {path}"))
    if missing or not decode_all or not paths:
        return missing
    is_video = video is not None and not has_frames
    decoded = [decode(path, is_video) for path in paths]
    problems = [file.problem for file in decoded if file.problem]
    if problems:
        return problems
    findings = check_declared(record, paths, decoded, has_frames)
    for path, file in zip(paths, decoded, strict=True):
        if file.conversion:
            findings.append(Finding("W06", f"{path} is converted: {file.conversion}"))
    if is_video:
        findings += check_duration(record, paths[0], decoded[0].seconds)
    try:
        check_pixels(record, [file.size for file in decoded[: 1 if has_frames else None]])
    except Unreadable as error:
        findings.append(finding_of(error))
    return findings


def check_declared(record, paths, decoded, has_frames):
    """Sizes and hashes that the record declares; of a list of frames the size of the first."""
    findings = []
    for entry, path, file in zip(media_entries(record), paths, decoded, strict=not has_frames):
        declared = declared_size(entry)
        width, height = file.size
        if declared and declared != (width, height):
            message = (f"{path} is {width} x {height} pixels, "
                       f"not {declared[0]} x {declared[1]} as declared")
            findings.append(Finding("W02", message))
        expected = entry.get("sha256") if isinstance(entry, dict) and not has_frames else None
        if expected and digest(path).hexdigest() != expected:
            findings.append(Finding("S21", f"{path} does not have the sha256 that is declared"))
    return findings


def check_duration(record, path, seconds):
    """The declared duration of a video, and times of the record that lie behind the real one."""
    findings = []
    video = record["video"]
    if isinstance(video, str):
        video = {"path": video}
    declared = video.get("duration", seconds)
    if abs(declared - seconds) > MAX_DURATION_ERROR_S:
        message = f"{path} lasts {seconds:g} s, not {declared:g} s as declared"
        findings.append(Finding("W02", message))
    if seconds:
        known = {finding.code for finding in find(record)}
        for finding in find({**record, "video": {**video, "duration": seconds}}):
            if finding.code in ("S10", "S23") and finding.code not in known:
                findings.append(finding)
    return findings


# --------------------------------------------------------------------------------------------------
# a file


class Report:
    """Prints the findings of a file, and counts them."""

    def __init__(self, print_all):
        self.print_all = print_all
        self.counts = Counter()      # by code
        self.n_printed = 0
        self.failed = False          # more than warnings

    def add(self, code, message, fails):
        self.counts[code] += 1
        self.failed = self.failed or fails
        first_or_error = fails or self.counts[code] == 1
        if self.print_all or (self.n_printed < MAX_PRINTED and first_or_error):
            print(printable(message))
            self.n_printed += 1

    def add_error(self, message):
        """A DataError of a record or of the file."""
        code = re.search(r": (E\d\d) ", message)
        self.add(code[1] if code else "E05", message, True)

    def add_row(self, path, row, media_findings):
        """What was found in the text of a record, and in its media."""
        for finding, message in row.messages():
            fails = finding.code[0] == "S" or message.endswith("; skipped")
            self.add(finding.code, f"{path}{message}", fails)
        for finding in media_findings:
            message = f"{path}:{row.line}: {finding.code} {finding.message}"
            self.add(finding.code, message, finding.code[0] != "W")


def check_file(path, folder, options, decode_all, print_all):
    """Prints what is wrong with a file of records; True if it is more than warnings."""
    report = Report(print_all)
    ids = array("Q")
    lines = array("I")
    n_records = n_files = n_missing = 0
    try:
        for row in scan(path, options):
            n_records += 1
            if row.error:
                report.add_error(row.error)
                continue
            media_findings = []
            if row.record is not None:
                ids.append(hash64(row.record["id"]) if "id" in row.record else 0)
                lines.append(row.line)
                media_findings = check_media(row.record, folder, decode_all)
                n_files += count_files(row.record)
                n_missing += sum(finding.code in ("S20", "S24") for finding in media_findings)
            report.add_row(path, row, media_findings)
    except DataError as error:
        report.add_error(str(error))
    for k in repeated(ids):
        report.add("E08", f"{path}:{lines[k]}: E08 another record has the same id before it", False)
    summary = ", ".join(f"{code} {n}" for code, n in sorted(report.counts.items()))
    if n_missing:
        summary += f"; {n_missing} of {n_files} media files are missing"
    print(printable(f"{path}: {n_records} records; {summary or 'nothing is wrong'}"))
    return report.failed


def count_files(record):
    return sum(len(entry["frames"]) if isinstance(entry, dict) and "frames" in entry else 1
               for entry in media_entries(record))


# --------------------------------------------------------------------------------------------------
# the command


class Source(NamedTuple):
    """A file to check."""
    path: Path
    media: str                       # where its paths start; None: see reader.media_folder
    options: Options


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="tools.check", description="What is wrong with a file of records, line by line.")
    parser.add_argument("file", type=Path, help="records (.jsonl, .json), or a mixture (mix.json)")
    parser.add_argument("--media", help="where the paths in it start; default: the folder media/ "
                        "beside the file, else the file's own")
    parser.add_argument("--decode", action="store_true", help="read every image and the packets of "
                        "every video, instead of looking whether the files exist")
    parser.add_argument("--all", action="store_true", help="print everything, not only "
                        f"{MAX_PRINTED} lines and the first of each warning")
    flags = {
        "split_turns": "each question of a conversation becomes a branch of its own",
        "group_by_media": "records of the same image or video become one record",
        "lenient": "a wrong record is skipped and named, as in files of other projects",
        "strict": "a wrong record ends a run, in files of other projects, too"}
    for name, text in flags.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action="store_true", default=getattr(Options, name), help=text)
    parser.add_argument("--path-prefix-field", metavar="FIELD", help="of other projects' rows: the "
                        "field with what their paths start with")
    return parser.parse_args(argv)


def named_sources(args):
    """The file of the command line, or those that a mix.json names; ValueError, OSError."""
    names = [field.name for field in fields(Options)]
    options = Options(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    check_is_file(args.file)
    if not args.file.name.endswith("mix.json"):
        return [Source(args.file, args.media, options)]
    entries = []
    for entry in read_mix(args.file):
        entries += entry.get("data", [entry])        # a group has its entries in "data"
    sources = []
    for entry in entries:
        given = {name: entry[name] for name in names if name in entry}
        media = entry.get("media", args.media)
        sources.append(Source(Path(entry["path"]), media, replace(options, **given)))
    return sources


def main(argv=None):
    args = parse_arguments(argv)
    try:
        sources = named_sources(args)
    except (OSError, ValueError) as error:
        warn(str(error))
        return 2
    status = 0
    for path, media, options in sources:
        try:
            check_is_file(path)
            folder = media_folder(path, media)
        except DataError as error:
            warn(str(error))
            status = 2
            continue
        failed = check_file(path, folder, options, args.decode, args.all)
        status = max(status, int(failed))
    return status


if __name__ == "__main__":
    sys.exit(main())
