"""Converts files of other formats to a file of records.

    python -m tools.convert tests/conformance/sharegpt.json runs/chats.jsonl \\
        --media tests/media

in      a .jsonl, .csv or .tsv file with one entry per line, or a .json file with an array:
          chats       ShareGPT, LLaVA, OpenAI, Hugging Face, ms-swift
          questions   question and answer; instruction and output (alpaca); query and response
          captions    image or file_name, with text or caption
          records     entries that are records already
        a .json file in COCO's format (coco), also of Roboflow and LVIS: boxes, polygons, captions
        a folder with
          labelme     .json files of LabelMe: boxes, polygons, points
          yolo        .txt files, with data.yaml (needs PyYAML) or classes.txt
          captions    metadata.jsonl or metadata.csv: an imagefolder
out     OUT, one record per line; its paths are relative to the folder where training finds media
stdout  {"rows":, "records":, "held_out":, "skipped": {kind: n}}; "rows" counts the entries

An entry that cannot become a record is skipped, and the reason is printed. docs/convert.md and
docs/records.md describe the formats.

Exit status: 0 if records were written; 1 if nothing was written, for example because no entry can
become a record or no image was found; 2 after a mistake of the user, such as a missing file.
"""

import json
import os
import sys
from contextlib import ExitStack
from os.path import isfile
from pathlib import Path

from evaluation.pictures import draw_records
from records.errors import RunError, Unreadable, plural, warn
from records.reader import Records, media_folder, names_of, read_record
from tools.command import (
    draft,
    in_range,
    make_parser,
    positive,
    refuse_input,
    report_errors,
)
from tools.convert import boxes, chats
from tools.convert.paths import HoldOut, absolute, move_media
from tools.convert.rows import FORMATS, MAX_PRINTED, Report, kind_of, read_rows
from tools.convert.subtitles import SubtitleFolder
from tools.convert.tables import as_caption, as_chat
from tools.convert.turn import turn_record


def size(text):
    """The type of a flag: "640,480" -> [640, 480]."""
    width, height = map(int, text.split(","))
    return [width, height]


def parse(argv):
    parser = make_parser("convert", __doc__, epilog="\n\n".join(__doc__.split("\n\n")[2:]))
    add = parser.add_argument
    add("file", type=Path, help="the file or folder to convert")
    add("out", type=Path, help="the file of records to write (.jsonl)")
    add("--as", dest="kind", choices=FORMATS, help=(
        "the format of FILE, if it cannot be detected"))
    add("--media", metavar="DIR", help="the paths in FILE are relative to this folder "
        "(default: the folder media/ beside FILE, or else the folder of FILE)")
    add("--subtitles", type=Path, metavar="DIR", help=(
        "add the subtitles in DIR/x/a.srt or DIR/a.srt to the records of the video x/a.mp4; the "
        "name may also be a.vtt, or contain a language, as a.en.vtt"))
    add("--hold-out", type=in_range(float, 0, 1), default=0, metavar="SHARE", help=(
        "write this share to OUT-held-out.jsonl, so that no image or video is in both files"))
    add("--draw", type=positive, metavar="N", help=(
        "draw the first N images or videos, with boxes, points and tracks, in OUT.draw.png"))
    add("--split-turns", action="store_true", help="make a separate annotation of every question "
        "of a chat; right for separate questions about an image, wrong for conversations")
    add("--ignore", metavar="FIELD,..", type=lambda text: text.split(","), default=[],
        action="extend", help="fields of entries and turns to ignore, and tags, such as '<video>', "
        "to keep as ordinary text")
    add("--strict", action="store_true", help="skip entries with an unknown field")
    add("--reasoning", action="store_true", help="put the reasoning text before the answer")
    add("--keep-desired", action="store_true", help=(
        "use the answers of KTO entries that are marked with true"))
    add("--resized", metavar="W,H", type=size, help=(
        "size of the resized images to which bbox_2d refers (1000,1000 for thousandths)"))
    add("--exif-unturned", action="store_true", help="sizes and coordinates in FILE refer to the "
        "stored images; turn them in the same way as EXIF turns the images, which must exist")
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    add("--all", action="store_true", help=(
        f"print all skipped entries, not only the first {MAX_PRINTED}"))
    args = parser.parse_args(argv)
    if not args.file.exists():
        parser.error(f"{args.file}: no such file or folder")
    if args.subtitles and not args.subtitles.is_dir():
        parser.error(f"--subtitles {args.subtitles}: there is no such folder")
    if args.out.suffix != ".jsonl":
        parser.error(f"{args.out}: the name of a file of records must end in .jsonl")
    args.outs = [args.out]
    if args.hold_out:
        args.outs.append(args.out.with_name(f"{args.out.stem}-held-out.jsonl"))
    args.drawing = args.out.with_suffix(".draw.png")
    for path in [*args.outs, *([args.drawing] if args.draw else [])]:
        refuse_input(parser, path, [args.file, args.file / "metadata.jsonl"])
        if path.is_dir() or (os.path.lexists(path) and not args.overwrite):
            parser.error(f"{path} exists; give OUT another name, or --overwrite to replace a file")
    return args


def read(args, report):
    """Yields (where, record) for every entry, or for every image of COCO and YOLO. The records are
    not validated yet."""
    if args.kind in ("yolo", "yolo-polygons") or (args.kind is None and boxes.is_yolo(args.file)):
        yield from boxes.read_yolo(args.file, args.media, report)
        return
    for where, row in read_rows(args.file):
        if isinstance(row, dict):
            row = {key: value for key, value in row.items() if key not in args.ignore}
        kind = args.kind or kind_of(row)
        with report.skipping(where):
            if isinstance(row, Unreadable):
                report.read["broken lines"] += 1
                raise row
            if kind == "coco":
                yield from boxes.read_coco(row, where, report)
                continue
            report.read[kind.partition(";")[0]] += 1
            if kind == "labelme":
                yield from boxes.read_labelme(row, where, report)
            elif kind == "records":
                yield where, row
            elif kind in FORMATS:
                chat = row if kind == "chats" else as_chat(row, kind)
                record = chats.convert(chat, args, report)
                yield where, as_caption(record) if kind == "captions" else record
            else:
                raise Unreadable("unknown format", f"this is {kind}")


def finish(record, args, start, subtitles):
    """Validates a record -> the record, and the paths of its media. With --subtitles it gets
    subtitles, with --exif-unturned its coordinates are turned. Unreadable or one of FORM_ERRORS
    if it is invalid."""
    if subtitles and "video" in record:
        subtitles.add_to(record)
    parsed = read_record(json.dumps(record, ensure_ascii=False).encode())
    paths = [start / name for name in names_of(parsed)]
    return turn_record(record, parsed, start) if args.exif_unturned else record, paths


def write(args, report):
    """Writes all files of args.outs, or none of them -> the number of records in each file.
    RunError if there is nothing to write."""
    beside = args.file / "FILE" if args.file.is_dir() else args.file
    start = absolute(media_folder(beside, args.media))
    target = absolute(media_folder(args.out, None))
    is_held_out = HoldOut(args.hold_out)
    subtitles = SubtitleFolder(args.subtitles, start) if args.subtitles else None
    counts = [0] * len(args.outs)
    n_paths = 0
    missing = []
    with ExitStack() as stack:  # closes all files before the first of them replaces its target
        drafts = [stack.enter_context(draft(path)) for path in args.outs]
        files = [stack.enter_context(open(path, "wb")) for path in drafts]
        for where, record in read(args, report):
            with report.skipping(where):
                record, paths = finish(record, args, start, subtitles)
                line = json.dumps(move_media(record, start, target), ensure_ascii=False)
                names = [os.path.relpath(path, start) for path in paths]
                text = json.dumps(record["annotations"], sort_keys=True)
                part = is_held_out(names or [text]) if args.hold_out else 0
                files[part].write(f"{line}\n".encode())
                counts[part] += 1
                n_paths += len(paths)
                missing += [path for path in paths if not isfile(path)]
        report.end(args.file)
        if subtitles:
            warn(f"found {plural(len(subtitles.paths), 'subtitle file')} in {args.subtitles}, and "
                 f"{len(subtitles.used)} of them have the name of a video")
        if missing:
            warn(f"{len(missing):,} of {n_paths:,} images and videos do not exist, such as "
                 f"{missing[0]}; set --media DIR to the folder where the paths in FILE start")
        reason = None
        if not any(counts):
            reason = f"{args.file} contains nothing that can become a record"
        elif missing and len(missing) == n_paths:
            reason = "none of its images and videos exists"
        elif not all(counts):
            reason = f"--hold-out {args.hold_out} leaves one file without a record"
        if subtitles:
            reason = subtitles.find_mistake() or reason
        if reason:
            raise RunError(f"{args.out} is not written: {reason}")
    return counts


@report_errors
def main(argv=None):
    args = parse(argv)
    report = Report(args)
    try:
        counts = write(args, report)
    except RunError as error:  # the last line is printed, too
        warn(str(error))
        counts = [0] * len(args.outs)
    records = [Records(path) for path in args.outs if any(counts)]  # prints warnings of training
    if args.draw and records:
        picture = draw_records(records[0], args.draw)
        if picture:
            with draft(args.drawing) as path:
                picture.save(path)
            warn(f"{args.drawing} shows the first images or videos")
        else:
            warn(f"{args.drawing} is not written: {args.out} has no image and no video to draw")
    held_out = {"held_out": counts[1]} if args.hold_out else {}
    print(json.dumps({"rows": report.read.total(), "records": counts[0], **held_out,
                      "skipped": dict(sorted(report.skipped.items()))}))
    return int(not any(counts))


if __name__ == "__main__":
    sys.exit(main())
