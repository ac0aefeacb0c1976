"""Decodes videos once to image files, and writes records that refer to these files.

    python -m tools.prepare frames tests/media/films.jsonl runs/frames \\
        --media tests/media --max-frames 8

out   OUT/records.jsonl   the same records, with frames instead of each video
      OUT/media/          one folder per clip, with images of SIZE x SIZE pixels
      stdout              {"records":, "bytes":, "skipped": {reason: n}}

If --max-frames and --fps are the same as in training, training uses the same frames with and
without this command. Existing frames are not decoded again unless their video has changed. A
record is skipped and counted if it has no video, or if its video cannot be decoded. OUT is a new
folder, or one that this command made.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

from PIL import Image
from tqdm import tqdm

import vision
from data import DataConfig
from records.errors import RunError, draft, require_file
from records.media import MAX_FRAMES
from records.reader import Records, stamp_of
from records.visual import read_headers
from tools import command
from tools.convert.make import skip_unless
from tools.convert.report import Report
from training.processes import process_context, start_child


def prepare(source, config, args, index):
    """Converts record number `index` of a source -> its line in OUT/records.jsonl, or "" if it is
    skipped; a Counter with the reason; {folder of its images: size in bytes}."""
    report = Report(SimpleNamespace(all=False))
    with report.skipping(source.where(index)):
        record = source[index]
        skip_unless("video" in record, "no video")
        info = read_headers(record, config)
        start, end = record["video"]["start"], record["video"]["end"]
        _, _, duration, half = source.video_size(record)
        files = []
        for path in source.paths_of(record):
            require_file(path)
            files.append([str(path.absolute()), *stamp_of(path)])
        # the images depend on all of this, so the name of their folder does, too
        clip = [files, record["video"], info.times, args.size, args.format]
        key = hashlib.sha256(json.dumps(clip, sort_keys=True).encode()).hexdigest()
        folder = Path(args.out, "media", key[:24])
        names = [f"{k:05d}.{args.format}" for k in range(len(info.times))]
        there = [path.name for path in sorted(folder.glob("*")) if path.stat().st_size]
        if there != names:
            if there:  # incomplete; without files, another process may create it now
                shutil.rmtree(folder, ignore_errors=True)
            save(source.frames(record, info.times), folder, args.size, args.format)
        size = {folder.name: sum((folder / name).stat().st_size for name in names)}
        width, height = info.sizes[0]
        fps = 0.5 / half if half else config.fps  # a single frame may have no duration
        line = json.loads(source.text(index))
        given = line["video"] if isinstance(line["video"], dict) else {}
        line["video"] = {"width": width, "height": height} | given | {
            "frames": [f"{folder.name}/{name}" for name in names],
            "fps": 1 / info.times[1] if len(names) > 1 else fps,
            "first": start,
            "duration": min(end, duration),
            "made_for": {"fps": config.fps, "max_frames": config.max_frames}}
        line["video"].pop("path", None)
        line.setdefault("id", record["id"])  # random choices in training depend on it
        return json.dumps(line, ensure_ascii=False), report.skipped, size
    return "", report.skipped, {}


def save(frames, folder, size, suffix):
    """Writes frames to a draft, and renames it to `folder` when it is complete."""
    part = folder.with_suffix(f".part{os.getpid()}")
    part.mkdir(parents=True)
    try:
        with closing(frames):  # stops ffmpeg if the disk is full
            for k, pixels in enumerate(frames):
                image = Image.fromarray(vision.resize(pixels, size, size))
                image.save(part / f"{k:05d}.{suffix}", quality=95, subsampling=0)
        with suppress(OSError):  # another process has made the folder
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def open_pool(n):
    """-> an executor with n processes. After an error or Ctrl-C, they are killed in the middle of
    their records, because a long video takes minutes. RunError if a process was killed."""
    with ProcessPoolExecutor(n, process_context(), start_child) as workers:
        try:
            yield workers
        except BrokenProcessPool:
            raise RunError("a process of --workers has ended; if the machine lacks memory, use "
                           "fewer --workers") from None
        except BaseException:
            for process in active_children():
                process.kill()
            raise


def write(source, args, out):
    """Writes OUT/records.jsonl and its images -> the counts that are printed."""
    for rest in (out / "media").glob("[0-9a-f]" * 24 + ".part*"):  # from a killed command
        shutil.rmtree(rest)
    n_records = 0
    sizes = {}
    skipped = Counter()
    work = partial(prepare, source, DataConfig(max_frames=args.max_frames, fps=args.fps), args)
    with (draft(out / "records.jsonl") as path, open_pool(args.workers) as workers,
          open(path, "w", encoding="utf-8") as file):
        done = workers.map(work, range(len(source)), chunksize=4)
        bar = tqdm(done, total=len(source), unit="record")
        free = 1  # the number of the next line
        for number, (line, reasons, size) in zip(source.lines, bar, strict=True):
            skipped += reasons
            if line:
                # keep the line number, since random choices in training depend on it
                print("\n" * (number - free) + line, file=file)
                free = number + 1
                n_records += 1
                sizes |= size
    return {"records": n_records, "bytes": sum(sizes.values()), "skipped": dict(skipped)}


@command.report_errors
def main(argv=None):
    parser = command.make_parser("prepare frames", __doc__)
    add = parser.add_argument
    add("records", help="a file of records with videos (.jsonl)")
    add("out", help="new folder for records.jsonl and media/")
    add("--media", metavar="DIR", help="folder of media; paths in the records are relative to it")
    add("--fps", type=command.frame_rate, default=2.0, help="maximum frames per second (default 2)")
    add("--max-frames", type=command.whole_number(1, MAX_FRAMES), default=384,
        help="maximum frames per clip (default 384, as in stage 3)")
    add("--size", type=command.positive, default=378,
        help="width and height of the images in pixels (default 378, one crop)")
    add("--format", choices=("jpg", "png"), default="jpg", help="jpg (default, quality 95) or png")
    add("--workers", type=command.positive, default=1, help="processes that decode (default 1)")
    args = parser.parse_args(argv)
    source = Records(args.records, args.media)
    with command.own_folder(args.out, "tools.prepare frames", [source.path, source.media]) as out:
        command.print_line(write(source, args, out))
