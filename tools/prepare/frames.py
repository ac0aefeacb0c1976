"""Decodes videos once and writes records that name their frames as image files.

    python -m tools.prepare frames tests/media/films.jsonl runs/frames \\
        --media tests/media --max-frames 8

out   OUT/records.jsonl   the same with frames in place of the video
      OUT/media/          a folder of images for each clip, as large as the ViT takes them
      stdout              {"records":, "bytes":, "skipped": {reason: n}}

With the --max-frames and --fps of training, the frames are those that it would decode.
Folders that are there are not made again. A record without a video, or with one that
cannot be decoded, is left out and counted.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from PIL import Image
from tqdm import tqdm

import vision
from data import DataConfig
from records.reader import Records
from records.visual import read_headers
from tools.command import make_parser, positive, report_errors
from tools.prepare.annotations import require
from tools.prepare.collect import count_skips, to_json


def prepare(source, config, args, index):
    """Record number `index` of a source -> its line in OUT/records.jsonl, "" if it is
    skipped; a Counter of the reason; {folder of its images: bytes}."""
    skipped = Counter()
    size = {}
    with count_skips(skipped, "record"):
        record = source[index]
        require("video" in record, "no video")
        info = read_headers(record, config)
        start, end = record["video"]["start"], record["video"]["end"]
        _, _, duration, half = source.video_size(record)
        files = [str(path) for path in source.paths_of(record)]
        clip = [files, start, end, info.times, args.size, args.format]
        name = hashlib.sha256(json.dumps(clip).encode()).hexdigest()[:24]
        folder = Path(args.out, "media", name)
        if not folder.exists():
            save(source.frames(record, info.times), folder, args)
        paths = sorted(folder.iterdir())
        size = {name: sum(path.stat().st_size for path in paths)}
        width, height = info.sizes[0]
        line = json.loads(source.text(index))
        given = line["video"] if isinstance(line["video"], dict) else {}
        line["video"] = {"width": width, "height": height} | given | {
            "frames": [f"{name}/{path.name}" for path in paths],
            "fps": 1 / info.times[1] if len(paths) > 1 else 0.5 / half,
            "first": start,
            "duration": min(end, duration)}
        line["video"].pop("path", None)
        line.setdefault("id", record["id"])  # its random choices depend on it
        return to_json(line), skipped, size
    return "", skipped, size


def save(frames, folder, args):
    """Writes frames into a folder that is there only when it is complete."""
    draft = folder.with_suffix(f".part{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        for k, pixels in enumerate(frames):
            image = Image.fromarray(vision.resize(pixels, args.size, args.size))
            image.save(draft / f"{k:05d}.{args.format}", quality=95, subsampling=0)
        with suppress(OSError):  # another process has made it
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@report_errors
def main(argv=None):
    parser = make_parser("prepare frames", __doc__)
    add = parser.add_argument
    add("records", help="a file of records with videos (.jsonl)")
    add("out", help="folder for records.jsonl and media/")
    add("--media", metavar="DIR", help="where the paths in the records start")
    add("--fps", type=float, default=2.0, help="frames per second at most (default 2)")
    add("--max-frames", type=positive, default=384, help="per clip at most (default 384: stage 3)")
    add("--size", type=positive, default=378, help="of a frame in pixels (default 378, a crop)")
    add("--format", choices=("jpg", "png"), default="jpg", help="jpg (default, quality 95) or png")
    add("--workers", type=positive, default=1, help="processes that decode (default 1)")
    args = parser.parse_args(argv)
    if args.fps <= 0:
        parser.error(f"--fps {args.fps}: frames a second are above 0")
    source = Records(args.records, args.media)
    config = DataConfig(max_frames=args.max_frames, fps=args.fps)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for rest in Path(args.out, "media").glob("*.part*"):  # of a command that was killed
        shutil.rmtree(rest)
    n_records = 0
    sizes = {}
    skipped = Counter()
    draft = Path(args.out, "records.part")
    work = partial(prepare, source, config, args)
    workers = ProcessPoolExecutor(args.workers, get_context("spawn"))
    with workers, open(draft, "w", encoding="utf-8") as file:
        done = workers.map(work, range(len(source)), chunksize=4)
        bar = tqdm(done, total=len(source), unit="record")
        free = 1  # the number of the next line
        for number, (line, reasons, size) in zip(source.lines, bar, strict=True):
            skipped += reasons
            if line:
                # on the line that it had, since its random choices depend on that
                print("\n" * (number - free) + line, file=file)
                free = number + 1
                n_records += 1
                sizes |= size
    draft.replace(Path(args.out, "records.jsonl"))
    found = {"records": n_records, "bytes": sum(sizes.values()), "skipped": dict(skipped)}
    print(json.dumps(found))
