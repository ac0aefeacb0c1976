"""Published data sets to records (paper: data; what each set is, its size and its licence: DATA.md).

    python -m tools.prepare pixmo-points downloads/pixmo-points data/points
    python -m tools.prepare molmo2-cap downloads/Molmo2-Cap data/cap --videos youtube-cc

in    a set's parquet or json/jsonl files as they are published, or a folder of them; of media only what was fetched before
out   OUT/records.jsonl   a record per visual input, its annotations the branches of a message tree
      OUT/media/          images that were embedded in the files, named by the sha256 of their bytes
      OUT/urls.txt        url TAB path below the media folder, for you to fetch: nothing here opens a connection
      stdout              {"records":, "annotations":, "skipped": {reason: n}, "urls":, "missing_media":}

What cannot become a record is left out and counted by its reason. A record whose file is absent is written all the same.

Rows of one image lie anywhere in millions of them. They meet in a database on disk, OUT/prepare.sqlite: a row's annotations go
under the key of its visual input, and records are written in the order in which keys came up. In memory there are a batch of
rows, 256 MB of the database at most, and the names of the files that were fetched.

    row 0  u1  mug      heads  1 u1   2 u2               records  u1 [mug, cat]
    row 1  u2  dog      notes  u1 mug   u2 dog   u1 cat            u2 [dog]
    row 2  u1  cat

Every batch is a transaction together with the place where it ends: after a kill the same command goes on there, and the result
is the same to the byte. Left out: what a row becomes (tools/layouts.py), fetching, decoding, folders of frames as videos.
"""

import argparse
import difflib
import hashlib
import json
import math
import os
import re
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path

from tools.layouts import SETS, Bad, kept, number, points, text

TYPES = ("chart", "chemical", "circuit", "diagram", "doc", "document", "graphic", "math", "music", "nutrition", "table")
VIDEO = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n": "png", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tiff", b"MM\0*": "tiff"}
BATCH, PICTURES = 2000, 32           # rows in memory at a time; with pictures in them they take a megabyte each, or more


class Usage(Exception):
    """A user's mistake, told in one sentence; exit status 2."""


# ---------------------------------------------------------------------------------------------------------------
# files to rows


def source_files(sources, split):
    """The files to read, in order: those named, or all below a folder (parquet before json), of one split."""
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise Usage(f"{source}: no such file or folder")
        jsons = (p for p in source.rglob("*.json*") if p.suffix in (".json", ".jsonl"))
        files += [source] if source.is_file() else sorted(source.rglob("*.parquet")) or sorted(jsons)
    splits = {path: re.sub(r"-\d{5}-of-\d{5}.*", "", path.stem) for path in files}         # train-00000-of-00002.parquet
    if split:
        files = [path for path in files if splits[path] == split]
    elif len(found := {"train", "validation", "val", "test"} & {*splits.values()}) > 1:
        raise Usage(f"{sources[0]} holds the splits {', '.join(sorted(found))}: choose with --split")
    if not files:
        raise Usage(f"{' '.join(sources)}: no .parquet, .json or .jsonl file" + (f" of the split '{split}'" if split else ""))
    return files


def read_json(path):
    """The rows of a .jsonl, or of a .json that holds an array or (DocVQA, TextVQA) an object around one; of a broken line, None."""
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8-sig", errors="replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None
        return
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise Usage(f"{path}: not JSON: {e}") from None
    if isinstance(rows, dict):
        rows = next((inner for inner in rows.values() if isinstance(inner, list)), None)
    if rows is None:
        raise Usage(f"{path}: not an array of rows")
    yield from rows


def batches(path, columns, size, start):
    """(row number, [row, ..]) from the row `start`, at which a batch begins. columns: "name", or "name?" where it may be absent."""

    def check(found):
        needed = [name for name in columns if not name.endswith("?")]
        if missing := [name for name in needed if name not in found]:
            raise Usage(f"{path} has no column {', '.join(missing)}: expected {', '.join(needed)}; found {', '.join(found) or 'none'}")

    at = 0
    if path.suffix != ".parquet":
        rows = read_json(path)
        while batch := list(islice(rows, size)):
            if at == 0:
                check(next((list(row) for row in batch if isinstance(row, dict)), []))
            if at >= start:
                yield at, batch
            at += len(batch)
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Usage(f"{path} is a parquet file, which needs pyarrow: pip install pyarrow") from None
    try:
        table = parquet.ParquetFile(path)
        check(table.schema_arrow.names)
        names = [name.rstrip("?") for name in columns if name.rstrip("?") in table.schema_arrow.names]
        for group in range(table.num_row_groups):
            n = table.metadata.row_group(group).num_rows
            if at + n <= start:
                at += n
                continue
            for batch in table.iter_batches(size, [group], names):
                if at >= start:
                    yield at, batch.to_pylist()
                at += len(batch)
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise Usage(f"{path}: not a parquet file that can be read: {e}") from None


# ---------------------------------------------------------------------------------------------------------------
# media: found, written, or listed to be fetched


def stem(name):
    """The name of a video without its extension: "a.b" has none."""
    return os.path.splitext(name)[0] if name.lower().endswith(VIDEO) else name


class Media:
    """The folder that the paths of records start from, and what the batch in hand names in it."""

    def __init__(self, root):
        self.root, self.files, self.named = Path(root), None, {}          # named: path -> its URL, or None

    def find(self, name, video=False):
        """Path of the file called `name`, whatever its extension, or else of a video in a folder of that name; None if there is
        none. "sora2/clip" must lie in a folder sora2, or sora2-2fps. The disk is searched once."""
        if self.files is None:
            self.files, self.folders = {}, {}
            for folder, inside, files in os.walk(self.root, followlinks=True):
                inside.sort()
                for file in sorted(files):
                    path = Path(folder, file).relative_to(self.root).as_posix()
                    self.files.setdefault(os.path.splitext(file)[0], []).append(path)
                    if file.lower().endswith(VIDEO):
                        self.folders.setdefault(os.path.basename(folder), []).append(path)
        above, _, last = f"/{name}".rpartition("/")
        for path in self.files.get(last, []) + (self.folders.get(last, []) if video else []):
            beside = f"/{os.path.dirname(path)}"
            if (not video or path.lower().endswith(VIDEO)) and beside.endswith((above, above + "-2fps")):
                return path
        return None

    def path(self, path, url=None):
        """Notes down that a record names this path, which must stay below the folder."""
        if not text(path) or len(path) > 1000 or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|[/\\]|.*/$", path) or ".." in Path(path).parts:
            raise Bad("path that leaves the media folder")
        self.named[path] = url
        return path

    def url(self, url, sha256=None):
        """An image known by its URL. Its file is called by the sha256 of the URL; the argument is that of its bytes."""
        if not text(url) or re.search(r"[\t\r\n]", url):
            raise Bad("no image")
        name = hashlib.sha256(url.encode()).hexdigest()
        entry = {"path": self.path(self.find(name) or name, url), "url": url}
        return entry | ({"sha256": sha256} if re.fullmatch("[0-9a-f]{64}", sha256 or "") else {})

    def cell(self, cell):
        """An image cell: {bytes, path}, bytes, a path or a URL. Bytes become a file, once."""
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, cell)
        if data and isinstance(data, bytes):
            kind = "webp" if data[8:12] == b"WEBP" else next((k for magic, k in MAGIC.items() if data.startswith(magic)), None)
            if kind is None:
                raise Bad("bytes that are no image")
            name = f"{hashlib.sha256(data).hexdigest()}.{kind}"
            if not (self.root / name).exists():
                self.root.mkdir(parents=True, exist_ok=True)
                (self.root / f"{name}.draft").write_bytes(data)
                (self.root / f"{name}.draft").replace(self.root / name)
            return self.path(name)
        if not path:
            raise Bad("no image")
        return self.url(path) if path.startswith(("http:", "https:")) else self.path(path)

    def video(self, *names, suffix=None, start=None, end=None, **meta):
        """The head of a record on the video that goes by one of these names, first of all with the suffix; if none is found, by the
        name looked for first, with .mp4."""
        if suffix:
            names = (stem(names[0]) + suffix, *names)
        if not all(names):
            raise Bad("no video")
        found = (self.find(stem(name), video=True) for name in names)
        path = next(filter(None, found), names[0] if stem(names[0]) != names[0] else names[0] + ".mp4")
        video = {"path": self.path(path)}
        if number(start) is not None and number(end) is not None:
            if not 0 <= start < end:
                raise Bad("clip that ends before it starts")
            video |= {"start": start, "end": end}
        return {"video": video, **kept(**meta)}


# ---------------------------------------------------------------------------------------------------------------
# rows into the database, the database into records

TABLES = ("heads(n integer primary key, key blob unique, head text)", "notes(n integer primary key, head integer, annotations text)",
          "media(n integer primary key, path text unique, url text)", "skipped(reason text primary key, n integer)",
          "done(file text primary key, rows integer)")


def open_database(path, job):
    """The database of this very job, as far as it got; that of another job is begun anew. job: what the records follow from."""
    mark = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") >> 1 | 1
    db = sqlite3.connect(path, timeout=1, isolation_level=None)
    for setting in ("journal_mode=wal", "synchronous=normal", "cache_size=-262144", "locking_mode=exclusive"):
        db.execute(f"pragma {setting}")                                   # wal: a commit appends, what a kill leaves is whole
    db.execute("begin immediate")
    before = db.execute("pragma user_version").fetchone()[0]
    if before != mark:
        if before:
            print(f"{path} is from another command or another version of the files: begun anew", file=sys.stderr)
        for table in TABLES:
            db.execute(f"drop table if exists {table.partition('(')[0]}")
            db.execute(f"create table {table}")
        db.execute(f"pragma user_version={mark}")
    db.execute("commit")
    return db


SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError)      # a null, a list for a text, lists of different lengths


def as_json(value):
    """One line; ValueError for what no record may hold: NaN, half a surrogate pair, NUL."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    line.encode()
    if "\\u0000" in line and re.search(r"(?<!\\)(\\\\)*\\u0000", line):
        raise ValueError("NUL")
    return line


def convert(row, layout, s, media, exclude, skipped):
    """One row -> (head, the same as JSON, annotations as JSON), or None; what is left out is counted in `skipped`."""
    lines = []
    try:
        if exclude and not exclude.isdisjoint([row.get("image_url"), *(row.get("image_urls") or [])]):
            raise Bad("excluded")
        head, made = layout(row, s, media)
        if not made:
            raise Bad("nothing to learn")
        known = as_json(head)
    except Bad as e:
        skipped[str(e)] += 1
        return None
    except SHAPE:
        skipped["row of another shape"] += 1
        return None
    for function, *arguments in made:
        try:
            lines.append(as_json(function(*arguments)))
        except Bad as e:
            skipped[str(e)] += 1
        except SHAPE:
            skipped["annotation of another shape"] += 1
    return (head, known, f"[{', '.join(lines)}]") if lines else None


def collect(path, layout, columns, s, media, exclude, db):
    """Every batch of a file into the database, a transaction each, from where the last run ended."""
    size = PICTURES if {"image", "images"} & {*columns} else BATCH
    start = (db.execute("select rows from done where file = ?", [str(path)]).fetchone() or [0])[0]
    for at, rows in batches(path, columns, size, start):
        heads, notes, skipped, named = [], [], Counter(), {}
        for i, row in enumerate(rows, at):
            media.named = {}
            if made := convert(row, layout, s, media, exclude, skipped):
                head, known, lines = made
                named |= media.named                         # of a row that is left out, nothing is to be fetched
                image = head.get("image")
                visual = image["path"] if isinstance(image, dict) else image or head.get("images") or head.get("video")
                key = json.dumps(visual) if s.get("group", True) else f"{path}:{i}"
                key = hashlib.blake2b(key.encode(), digest_size=16).digest()
                heads.append((key, known))
                notes.append((lines, key))
        db.execute("begin")
        db.executemany("insert or ignore into heads(key, head) values (?, ?)", heads)
        db.executemany("insert into notes(annotations, head) select ?, n from heads where key = ?", notes)
        db.executemany("insert or ignore into media(path, url) values (?, ?)", named.items())
        db.executemany("insert into skipped values (?, ?) on conflict do update set n = n + excluded.n", skipped.items())
        db.execute("insert or replace into done values (?, ?)", [str(path), at + len(rows)])
        db.execute("commit")


def shares(annotations, most):
    """Annotations of one input, in order, for records of at most `most` points each."""
    share, total = [], 0
    for a in annotations:
        n = len(a.get("points", ()))
        if share and total + n > most:
            yield share
            share, total = [], 0
        share.append(a)
        total += n
    yield share


def write(db, out, name, most, media):
    """records.jsonl and urls.txt, whole or not at all -> the counts of the last line."""
    db.execute("create index if not exists notes_of on notes(head)")
    counts = {"records": 0, "annotations": 0, "skipped": dict(db.execute("select reason, n from skipped order by reason")),
              "urls": 0, "missing_media": 0}
    with open(out / "records.jsonl.draft", "w", encoding="utf-8", newline="\n") as lines:
        for n, head in db.execute("select n, head from heads order by n"):
            rows = db.execute("select annotations from notes where head = ? order by n", [n])
            head = json.loads(head)
            tail = {"meta": head.pop("meta")} if "meta" in head else {}
            for k, share in enumerate(shares([a for row in rows for a in json.loads(row[0])], most)):
                record = {"id": f"{name}-{n}" + (f".{k}" if k else ""), **head, "annotations": share, **tail}
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                counts["records"] += 1
                counts["annotations"] += len(share)
    with open(out / "urls.txt.draft", "w", encoding="utf-8", newline="\n") as lines:
        for path, url in db.execute("select path, url from media order by n"):
            lines.write(f"{url}\t{path}\n" if url else "")
            counts["urls"] += bool(url)
            counts["missing_media"] += not (media.root / path).exists()
    for file in ("urls.txt", "records.jsonl"):
        (out / f"{file}.draft").replace(out / file)
    return counts


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.prepare", description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     epilog="names: " + ", ".join(SETS))
    add = parser.add_argument
    add("name", help="which published set: see below")
    add("source", nargs="+", help="its files, or a folder of them")
    add("out", help="folder for records.jsonl, urls.txt and media/")
    add("--media", metavar="DIR", help="fetched images, named by the sha256 of their URL, and where those inside go (default OUT/media)")
    add("--videos", metavar="DIR", help="the same for videos, which are found by their id wherever they lie in it")
    add("--split", help="only the files of this split: train, validation, ..")
    add("--exclude", metavar="FILE", help="leave out images by URL, a line each, as in the urls.txt of another set")
    add("--counts", nargs=2, type=int, metavar=("MIN", "MAX"), help="pointing: only annotations with so many points")
    add("--min-score", type=float, default=3, help="molmo2-cap: annotation_score at least (default 3)")
    add("--first-tokens", type=int, default=4096, help="tulu: longest first message (default 4096; stage 1 of Molmo2: 2304)")
    add("--type", choices=TYPES, help="cosyn-400k, syn-multi-image-qa: type of the files (default: the name of their folder)")
    add("--full-video", action="store_true", help="molmo2-videotrack: on the source videos, not on clips cut from them")
    args = parser.parse_args(argv)
    try:
        if args.name not in SETS:
            near = difflib.get_close_matches(args.name, SETS, 1)
            raise Usage(f"no set is called '{args.name}'" + (f" - did you mean '{near[0]}'?" if near else "; --help lists them"))
        layout, columns, settings = SETS[args.name]
        for path in filter(None, (args.media, args.videos, args.exclude)):
            if not Path(path).exists():
                raise Usage(f"{path}: no such file or folder")
        files, out = source_files(args.source, args.split), Path(args.out)
        nameless = [path for path in files if path.absolute().parent.name not in TYPES]
        if "{type}" in settings.get("style", "") and not args.type and nameless:
            raise Usage(f"{nameless[0]} does not lie in a folder named for its type ({', '.join(TYPES)}): say --type")
        media = Media(args.videos or args.media or out / "media")
        s = settings | {k: getattr(args, k) for k in ("counts", "min_score", "first_tokens", "type", "full_video")}
        exclude = {line.split("\t")[0].strip() for line in open(args.exclude, encoding="utf-8")} if args.exclude else set()
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        out.mkdir(parents=True, exist_ok=True)
        with closing(open_database(out / "prepare.sqlite", repr((args.name, str(media.root), s, sorted(exclude), states)))) as db:
            for path in files:
                collect(path, layout, columns.split(), s | {"file": path}, media, exclude, db)
            counts = write(db, out, args.name, 60 if layout is points else math.inf, media)
        (out / "prepare.sqlite").unlink()
    except Usage as e:
        print(f"tools.prepare: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except (OSError, sqlite3.Error) as e:
        print(f"tools.prepare: {e}; what is done is kept, the same command goes on from there", file=sys.stderr)
        raise SystemExit(1) from None
    if media.root != out / "media":
        print(f"paths in the records start at {media.root}: train with --media {media.root}", file=sys.stderr)
    if counts["missing_media"]:
        print(f"{counts['missing_media']} media files are not in {media.root}; the trainer leaves their records out", file=sys.stderr)
    print(json.dumps(counts, ensure_ascii=False))


if __name__ == "__main__":
    main()
