"""The flags of tools.convert."""

import os
from pathlib import Path

from tools.command import in_range, make_parser, positive, refuse_input
from tools.convert.layouts import LAYOUTS, PEOPLE, files_of
from tools.convert.report import MAX_PRINTED

TYPES = ("chart", "chemical", "circuit", "diagram", "doc", "document", "graphic", "math",
         "music", "nutrition", "table")
# sets that can contain images of allenai/pixmo-points-eval; the official code skips these rows
WITH_TEST_IMAGES = ("pixmo-points", "pixmo-points-basic", "pixmo-points-high-frequency")


def size(text):
    """The type of a flag: "640,480" -> [640, 480]."""
    width, height = map(int, text.split(","))
    return [width, height]


def add_flags(add):
    add("sources", nargs="+", type=Path, metavar="FILE", help="the files or the folder to convert")
    add("out", type=Path, metavar="OUT", help="the file of records to write (.jsonl)")
    add("--as", dest="kind", choices=LAYOUTS, metavar="NAME", help=(
        f"the format of FILE, if it cannot be detected: {', '.join(PEOPLE)}; or the name of a "
        "published set (docs/data_sets.md) or benchmark (docs/evaluation.md)"))
    add("--media", "--videos", metavar="DIR", help="the paths in FILE are relative to this folder "
        "(default: the folder media/ beside FILE, or else the folder of FILE; for a published set "
        "the folder media/ beside OUT)")
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
    add("--unit", choices=("unit", "pixel"), help=(
        "csv-boxes: what its numbers are, if none is above 1; unit: fractions of the sides"))
    add("--negatives", type=positive, default=0, metavar="N", help=(
        "boxes and points: add up to N labels of the file that an image does not show, with the "
        "answer 'There are none.'; right only if every object is annotated (docs/boxes.md)"))
    add("--template", action="store_true", help="write no records, but a table to fill in: OUT.csv "
        "with a line for each image and video of the folder FILE, and an empty caption")
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    add("--all", action="store_true", help=(
        f"print every skipped entry, and not only the first {MAX_PRINTED} reasons"))


def add_published_flags(add):
    add("--split", help="published sets: read only the files of this split: train, test, ..")
    add("--exclude", type=Path, metavar="SET", help="skip the images of another set, whose files "
        "have a column image_url: a file or a folder; pixmo-points needs it, for the test set "
        "allenai/pixmo-points-eval")
    add("--counts", nargs=2, type=int, metavar=("MIN", "MAX"),
        help="published points: skip annotations with fewer or more points")
    add("--min-score", type=float, default=3,
        help="molmo2-cap: skip videos with a lower annotation_score (default 3)")
    add("--first-tokens", type=int, default=4096,
        help="tulu: maximum tokens of the first message (default 4096; Molmo2 stage 1: 2304)")
    add("--type", dest="image_type", choices=TYPES, help=(
        "cosyn-400k, syn-multi-image-qa: type of the images"))


def parse(argv, text):
    """-> the flags. text: the docstring of the command. UserError after a mistake."""
    parser = make_parser("convert", text, epilog="\n\n".join(text.split("\n\n")[2:]))
    add_flags(parser.add_argument)
    add_published_flags(parser.add_argument)
    args = parser.parse_args(argv)
    args.layout = LAYOUTS.get(args.kind)
    for source in [*args.sources, *filter(None, [args.exclude])]:
        if not source.exists():
            parser.error(f"{source}: no such file or folder")
    if args.subtitles and not args.subtitles.is_dir():
        parser.error(f"--subtitles {args.subtitles}: there is no such folder")
    if args.layout and "image_type" in args.layout.flags and not args.image_type:
        parser.error(f"{args.kind} needs --type with one of {', '.join(TYPES)}")
    if args.kind in WITH_TEST_IMAGES and not args.exclude:
        parser.error(f"{args.kind} can contain images of a test set: download it with 'hf "
                     "download allenai/pixmo-points-eval --repo-type dataset --local-dir "
                     "raw/pixmo-points-eval', and add --exclude raw/pixmo-points-eval")
    is_folder = len(args.sources) == 1 and args.sources[0].is_dir()
    if args.template and not (is_folder and args.out.suffix == ".csv"):
        parser.error("--template needs one folder of images, and a name that ends in .csv")
    if args.out.suffix != ".jsonl" and not args.template:
        parser.error(f"{args.out}: the name of a file of records must end in .jsonl")
    add_outputs(args)
    inputs = [*filter(None, [args.exclude])]
    for source in args.sources if args.overwrite and not args.template else ():
        inputs += files_of(source, args.kind, args.split)[0]
    for path in filter(None, [*args.outs, args.drawing, args.urls, args.masks]):
        refuse_input(parser, path, inputs)
        if path.is_dir() or (os.path.lexists(path) and not args.overwrite):
            parser.error(f"{path} exists; give OUT another name, or --overwrite to replace a file")
    return args


def add_outputs(args):
    """Adds the paths of the files that are written to the flags; None for a file that is not."""
    args.outs = [args.out]
    if args.hold_out:
        args.outs.append(args.out.with_name(f"{args.out.stem}-held-out.jsonl"))
    args.drawing = args.out.with_suffix(".draw.png") if args.draw else None
    published = args.layout.published if args.layout else False
    args.urls = args.out.with_suffix(".urls.txt") if published else None
    has_masks = published and "masks" in args.layout.names
    args.masks = args.out.with_suffix(".masks.npz") if has_masks else None
