"""Published data sets to records (paper: data; docs/datasets.md: size and licence of each set).

    python -m tools.prepare pixmo-points downloads/pixmo-points data/points
    python -m tools.prepare molmo2-cap downloads/Molmo2-Cap data/cap --videos youtube-cc

in    a set's parquet, json or jsonl files as they are published, or a folder of them
out   OUT/records.jsonl   a record per visual input, its annotations the branches of a message tree
      OUT/media/          images that lay inside the files, named by the sha256 of their bytes
      OUT/urls.txt        url TAB path below the media folder, for you to fetch: no connection is
                          opened here
      stdout              {"records":, "annotations":, "skipped": {reason: n}, "urls":,
                          "missing_media":}

What cannot become a record is skipped and counted by its reason; a record whose media file is
absent is written all the same. A killed command goes on where it was when it is given again.
"""

import argparse
import dataclasses
import difflib
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from records.errors import warn
from tools.prepare.files import source_files
from tools.prepare.media import Media
from tools.prepare.sets import SETS
from tools.prepare.store import collect, open_database, write
from training.config import UserError

TYPES = ("chart", "chemical", "circuit", "diagram", "doc", "document", "graphic", "math", "music",
         "nutrition", "table")


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m tools.prepare", description=__doc__.split("\n\n")[0], allow_abbrev=False,
        epilog=f"names: {', '.join(SETS)}")
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


def published_set(name):
    if name in SETS:
        return SETS[name]
    near = difflib.get_close_matches(name, SETS, 1)
    hint = f" - did you mean '{near[0]}'?" if near else "; --help lists them"
    raise UserError(f"no set is called '{name}'{hint}")


def check_types(files, settings):
    """Sets with a style per type need --type, or files in folders named for their type."""
    if "{type}" not in settings.style or settings.type:
        return
    for path in files:
        if path.absolute().parent.name not in TYPES:
            raise UserError(f"{path} does not lie in a folder named for its type "
                            f"({', '.join(TYPES)}): say --type")


def read_excluded(path):
    """The URLs of a file with url TAB path, or a URL, in every line."""
    if not path:
        return set()
    with open(path, encoding="utf-8") as lines:
        return {line.split("\t")[0].strip() for line in lines}


def prepare(args):
    """-> (counts, Media). UserError, OSError or sqlite3.Error in one sentence."""
    published = published_set(args.name)
    for path in (args.media, args.videos, args.exclude):
        if path and not Path(path).exists():
            raise UserError(f"{path}: no such file or folder")
    files = source_files(args.source, args.split)
    settings = dataclasses.replace(
        published.settings, counts=args.counts, min_score=args.min_score,
        first_tokens=args.first_tokens, type=args.type, full_video=args.full_video)
    check_types(files, settings)
    out = Path(args.out)
    media = Media(args.videos or args.media or out / "media")
    excluded = read_excluded(args.exclude)
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    job = repr((args.name, str(media.root), settings, sorted(excluded), states))
    out.mkdir(parents=True, exist_ok=True)
    with closing(open_database(out / "prepare.sqlite", job)) as db:
        for path in files:
            of_file = dataclasses.replace(settings, file=path)
            collect(db, path, published, of_file, media, excluded)
        counts = write(db, out, args.name, settings.points_per_record, media)
    (out / "prepare.sqlite").unlink()
    return counts, media


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        counts, media = prepare(args)
    except UserError as e:
        warn(f"tools.prepare: {e}")
        raise SystemExit(2) from None
    except (OSError, sqlite3.Error) as e:
        warn(f"tools.prepare: {e}; what is done is kept, the same command goes on from there")
        raise SystemExit(1) from None
    if media.root != Path(args.out) / "media":
        warn(f"paths in the records start at {media.root}: train with --media {media.root}")
    if counts["missing_media"]:
        warn(f"{counts['missing_media']} media files are not in {media.root}; the trainer leaves "
             "their records out")
    print(json.dumps(counts, ensure_ascii=False))


if __name__ == "__main__":
    main()
