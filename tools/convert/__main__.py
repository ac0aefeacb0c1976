"""Converts a file of another format to a file of records.

    python -m tools.convert tests/conformance/sharegpt.json runs/chats.jsonl \\
        --media tests/media

in      a .json file with one array, or a .jsonl file with one row per line: chats of ShareGPT,
        LLaVA, OpenAI and Hugging Face, or records; or a .json file in COCO's format
out     OUT, a record per line, whose paths start where training looks for media
stdout  {"rows":, "records":, "skipped": {kind: n}}

A row that cannot become a record is named and skipped. docs/chats.md and docs/records.md have the
formats.

Exit status: 0 a record was written, 1 no row became a record (then OUT is not written), 2 a
mistake of the user, such as a missing file.
"""

import json
import os
import sys
from pathlib import Path

from records.errors import Unreadable, warn
from records.reader import CHAT_KEYS, FORM_ERRORS, media_folder, read_record
from tools.command import make_parser, report_errors
from tools.convert import chats
from tools.convert.media import absolute, move_media
from tools.convert.rows import MAX_PRINTED, Report, read_rows
from tools.convert.turn import turn_record


def size(text):
    """The type of a flag: "640,480" -> [640, 480]."""
    width, height = map(int, text.split(","))
    return [width, height]


def parse(argv):
    parser = make_parser("convert", __doc__)
    add = parser.add_argument
    add("file", type=Path, help="the file to convert (.json, .jsonl)")
    add("out", type=Path, help="the file of records to write (.jsonl)")
    add("--media", metavar="DIR", help="where the paths in FILE start "
        "(default: the folder media/ beside it, else its own folder)")
    add("--split-turns", action="store_true", help="every question of a chat becomes an annotation "
        "of its own: right for visual questions, wrong for conversations")
    add("--ignore", metavar="FIELD,..", type=lambda text: text.split(","), default=[],
        action="extend", help="fields, of rows and of turns, that change nothing of what is "
        "trained, and tags in texts, such as '<video>', that are meant as letters")
    add("--strict", action="store_true", help="skip the rows with any field that is not read")
    add("--reasoning", action="store_true", help="put the reasoning before the answer")
    add("--keep-desired", action="store_true", help="of rows for KTO take the good answers")
    add("--resized", metavar="W,H", type=size, help=(
        "size of the resized images to which bbox_2d refers (1000,1000: thousandths)"))
    add("--exif-unturned", action="store_true", help="sizes and coordinates in FILE are those of "
        "the images as stored: turn them as EXIF turns the images, which must be there")
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    add("--all", action="store_true", help=f"print all skipped rows, not only {MAX_PRINTED}")
    args = parser.parse_args(argv)
    if not args.file.is_file():
        parser.error(f"{args.file}: no such file")
    if args.out.suffix != ".jsonl":
        parser.error(f"{args.out}: the name of a file of records must end in .jsonl")
    if args.out.exists() and args.out.samefile(args.file):
        parser.error(f"{args.out}: this is the file to convert; give OUT another name")
    if args.out.is_dir() or (os.path.lexists(args.out) and not args.overwrite):
        parser.error(f"{args.out} exists; give OUT another name, or --overwrite to replace a file")
    return args


def to_record(row, args, start, report):
    """A row -> a record that training can read; Unreadable or one of FORM_ERRORS."""
    record = row
    if isinstance(row, dict):
        record = {key: value for key, value in row.items() if key not in args.ignore}
        if set(CHAT_KEYS) & record.keys():
            record = chats.convert(record, args, report)
    parsed = read_record(json.dumps(record, ensure_ascii=False).encode())
    return turn_record(record, parsed, start) if args.exif_unturned else record


def write(args, start, target, report):
    """Writes the records of a file, all or nothing -> how many there are."""
    n_records = 0
    draft = args.out.with_name(f".{args.out.name}.{os.getpid()}.part")
    try:
        with open(draft, "xb") as lines:
            for where, row in read_rows(args.file, report):
                try:
                    record = move_media(to_record(row, args, start, report), start, target)
                    lines.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    n_records += 1
                except Unreadable as error:
                    report.skip(where, *error.args)
                except FORM_ERRORS as error:
                    report.skip(where, "wrong record", "it cannot be read as one: "
                                f"{type(error).__name__}: {error}")
        if n_records:
            draft.replace(args.out)
    finally:
        draft.unlink(missing_ok=True)
    return n_records


@report_errors
def main(argv=None):
    args = parse(argv)
    start = absolute(media_folder(args.file, args.media))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    target = absolute(media_folder(args.out, None))
    report = Report(args)
    n_records = write(args, start, target, report)
    report.end()
    if not n_records:
        warn(f"{args.out} is not written: {args.file} contains no row that can become a record")
    print(json.dumps({"rows": report.n_rows, "records": n_records,
                      "skipped": dict(sorted(report.skipped.items()))}))
    return int(not n_records)


if __name__ == "__main__":
    sys.exit(main())
