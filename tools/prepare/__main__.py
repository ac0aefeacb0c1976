"""Converts a published data set to records and lists the URLs of its media.

    python -m tools.prepare pixmo-count raw/pixmo-count data/pixmo-count --split train

out   OUT/records.jsonl   one record per visual input, or per row in some sets
      OUT/media/          images that the files contain, named by the sha256 of their bytes
      OUT/urls.txt        "URL TAB path in the media folder" per line, for you to download,
                          since this command opens no network connection
      stdout              {"records":, "annotations":, "urls":, "missing_media":,
                          "skipped": {reason: n}}

Rows that cannot be converted are skipped, and counted by reason. A record is also written
if its media file is missing; training skips it. A killed command starts again from the
beginning. OUT is a new folder, a folder that contains only media/, or one that this command
made for the same set. docs/data_sets.md lists the sets, their licences and the commands.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path

from records.errors import UserError, plural, warn
from tools.command import make_parser, own_folder, print_line, report_errors
from tools.prepare import frames
from tools.prepare.annotations import text_of
from tools.prepare.collect import convert_files, group, make_records, write
from tools.prepare.media import Media
from tools.prepare.rows import read_rows, source_files
from tools.prepare.sets import SETS, WITH_TEST_IMAGES

TYPES = ("chart", "chemical", "circuit", "diagram", "doc", "document", "graphic", "math",
         "music", "nutrition", "table")


def parse(argv):
    parser = make_parser("prepare", __doc__)
    add = parser.add_argument
    add("name", choices=SETS, metavar="NAME", help=(
        f"one of {', '.join(SETS)}; or frames, which has its own --help"))
    add("source", nargs="+", help="published files (.parquet, .json, .jsonl), or a folder of them")
    add("out", help="folder for records.jsonl and urls.txt, new or only with media/")
    add("--media", "--videos", metavar="DIR",
        help="folder of downloaded images, named by the sha256 of their URL, and videos, named "
        "by their id; images in the published files are written to it (default OUT/media)")
    add("--split", help="read only the files of this split: train, validation, ..")
    add("--exclude", metavar="SET",
        help="skip the images of another set: its published files, a folder of them, or its "
        "urls.txt; pixmo-points needs it, for the test set allenai/pixmo-points-eval")
    add("--counts", nargs=2, type=int, metavar=("MIN", "MAX"),
        help="pointing: skip annotations with fewer or more points")
    add("--min-score", type=float, default=3,
        help="molmo2-cap: skip videos with a lower annotation_score (default 3)")
    add("--first-tokens", type=int, default=4096,
        help="tulu: maximum tokens of the first message (default 4096; Molmo2 stage 1: 2304)")
    add("--type", dest="kind", choices=TYPES, help=(
        "cosyn-400k, syn-multi-image-qa: type of the images"))
    args = parser.parse_args(argv)
    if "kind" in SETS[args.name].flags and not args.kind:
        parser.error(f"{args.name} needs --type with one of {', '.join(TYPES)}")
    if args.name in WITH_TEST_IMAGES and not args.exclude:
        parser.error(f"{args.name} can contain images of a test set: download it with 'hf "
                     "download allenai/pixmo-points-eval --repo-type dataset --local-dir "
                     "raw/pixmo-points-eval', and add --exclude raw/pixmo-points-eval")
    if args.media and not Path(args.media).is_dir():
        parser.error(f"{args.media}: no such folder")
    return args


def image_urls(path):
    """The URLs of the images of a set: published files, or the urls.txt that this command wrote."""
    if path.endswith(".txt"):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        urls = {line.split("\t")[0].strip() for line in lines} - {""}
    else:
        rows = (row for file in source_files([path]) for row in read_rows(file, "image_url"))
        urls = {row["image_url"] if isinstance(row, dict) else None for row in rows}
    if not urls or not all(map(text_of, urls)):
        raise UserError(f"--exclude {path}: each row must have the URL of an image")
    return urls


@report_errors
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["frames"]:
        return frames.main(argv[1:])
    args = parse(argv)
    published = SETS[args.name]
    files = source_files(args.source, args.split)
    excluded = image_urls(args.exclude) if args.exclude else set()
    layout = partial(published.layout, **{name: getattr(args, name) for name in published.flags})
    inputs = [*files, *filter(None, [args.exclude])]
    with own_folder(args.out, f"tools.prepare {args.name}", inputs, besides=["media"]) as out:
        media = Media(args.media or out / "media")
        skipped = Counter()
        found = convert_files(files, published.columns, layout, media, excluded, skipped)
        if published.group:
            found = group(found)
        counts = write(make_records(found, args.name, published.max_points), out, media)
    if args.media:
        warn(f"paths in the records are relative to {media.root}; train with --media {media.root}")
    if media.unclear:
        name, paths = next(iter(media.unclear.items()))
        warn(f"{media.root} has several files for {plural(len(media.unclear), 'name')}: the row "
             f"'{name}' can mean {' or '.join(paths)}. Keep one file for each name, or give each "
             "set its own --media; the rows are skipped until then")
    counts["skipped"] = dict(sorted(skipped.items()))
    print_line(counts)


if __name__ == "__main__":
    main()
