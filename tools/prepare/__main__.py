"""Published data sets to records (paper: data; docs/datasets.md: size and licence of
each set).

    python -m tools.prepare pixmo-points downloads/pixmo-points data/points
    python -m tools.prepare molmo2-cap downloads/Molmo2-Cap data/cap --videos youtube-cc

in    a set's parquet, json or jsonl files as they are published, or a folder of them
out   OUT/records.jsonl   a record per visual input, its annotations the branches of a message tree
      OUT/media/          images that lay inside the files, named by the sha256 of their bytes
      OUT/urls.txt        url TAB path below the media folder, for you to fetch: no connection is
                          opened here
      stdout              {"records":, "annotations":, "urls":, "missing_media":,
                          "skipped": {reason: n}}

What cannot become a record is skipped and counted by its reason; a record whose media
file is absent is written all the same. A set takes minutes: a command that was killed
begins anew, and images that it wrote are not written again.
"""

import argparse
import dataclasses
import json
from collections import Counter
from pathlib import Path

from records.errors import warn
from tools.prepare.collect import convert_files, group, make_records, write
from tools.prepare.media import Media
from tools.prepare.rows import source_files
from tools.prepare.sets import SETS
from training.config import Parser, UserError

TYPES = ("chart", "chemical", "circuit", "diagram", "doc", "document", "graphic", "math", "music",
         "nutrition", "table")


def parse(argv):
    parser = Parser(
        prog="python -m tools.prepare", description=__doc__, allow_abbrev=False,
        epilog=f"names: {', '.join(SETS)}", formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name", help="which published set: see below")
    add("source", nargs="+", help="its files, or a folder of them")
    add("out", help="folder for records.jsonl, urls.txt and media/")
    add("--media", metavar="DIR",
        help="fetched images, named by the sha256 of their URL, and where images from inside the "
        "files go (default OUT/media)")
    add("--videos", metavar="DIR",
        help="the same for videos, which are found by their id wherever they lie in it")
    add("--split", help="only the files of this split: train, validation, ..")
    add("--exclude", metavar="FILE",
        help="leave out images by URL, a line each, as in the urls.txt of another set")
    add("--counts", nargs=2, type=int, metavar=("MIN", "MAX"),
        help="pointing: only annotations with this number of points")
    add("--min-score", type=float, default=3,
        help="molmo2-cap: lowest annotation_score (default 3)")
    add("--first-tokens", type=int, default=4096,
        help="tulu: longest first message (default 4096; stage 1 of Molmo2: 2304)")
    add("--type", choices=TYPES,
        help="cosyn-400k, syn-multi-image-qa: type of the files (default: the name of their "
        "folder)")
    add("--full-video", action="store_true",
        help="molmo2-videotrack: on the source videos, not on clips cut from them")
    return parser.parse_args(argv)


def prepare(args):
    """-> (counts, Media). UserError or OSError in one sentence."""
    if args.name not in SETS:
        raise UserError(f"no set is called '{args.name}'; --help lists them")
    for path in (args.media, args.videos, args.exclude):
        if path and not Path(path).exists():
            raise UserError(f"{path}: no such file or folder")
    files = source_files(args.source, args.split)
    published = SETS[args.name]
    for path in files if "{type}" in published.settings.style and not args.type else ():
        if path.absolute().parent.name not in TYPES:
            raise UserError(f"{path} does not lie in a folder named for its type: say --type")
    settings = dataclasses.replace(
        published.settings, counts=args.counts, min_score=args.min_score,
        first_tokens=args.first_tokens, type=args.type, full_video=args.full_video)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    media = Media(args.videos or args.media or out / "media")
    excluded = set()
    if args.exclude:
        lines = Path(args.exclude).read_text(encoding="utf-8").splitlines()
        excluded = {line.split("\t")[0].strip() for line in lines}
    skipped = Counter()
    rows = convert_files(files, published, settings, media, excluded, skipped)
    inputs = group(rows) if settings.group else rows
    counts = write(make_records(inputs, args.name, settings.points_per_record), out, media)
    return counts | {"skipped": dict(sorted(skipped.items()))}, media


def main(argv=None):
    try:
        args = parse(argv)
        counts, media = prepare(args)
    except (UserError, OSError) as e:
        warn(str(e))
        raise SystemExit(2 if isinstance(e, UserError) else 1) from None
    if media.root != Path(args.out) / "media":
        warn(f"paths in the records start at {media.root}: train with --media "
             f"{media.root}")
    if counts["missing_media"]:
        warn(f"{counts['missing_media']} media files are not in {media.root}; the "
             "trainer leaves their records out")
    print(json.dumps(counts, ensure_ascii=False))


if __name__ == "__main__":
    main()
