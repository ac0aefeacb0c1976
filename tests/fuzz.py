"""Rubbish in, a sentence out: mutated records, images and videos through check, size and encode. Run by hand:

    python -m tests.fuzz --records 10000 --images 2000 --videos 300 --seed 0
    python -m tests.fuzz --seed 0 --case image 17          one case again, with its traceback

Made from what lies in tests/media, and from small files that Pillow and ffmpeg make of it. A case is a function of (seed, kind,
number). Each must end as a sound example or with a declared error, Unreadable or DataError, whose message is one line, within
SECONDS; what check refuses, opening refuses. The last line is JSON: how many cases ended with which code, the slowest, the most memory.

    flipped bytes, cut off, spliced        of every kind
    records    values of wrong types, sizes and ends at any depth, keys lost, added, given twice, media swapped, paths of every ugly sort
    images     sizes in headers, checksums mended, EXIF damaged, one format's name on another's bytes
    videos     boxes and tables that claim more than there is, two films in one file, playlists
"""

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

import imageio_ffmpeg
from PIL import Image
from tqdm import tqdm

import data
import model
from records import reader as records

HERE = Path(__file__).parent
SECONDS = 30                         # of one case; a hundred times what a sound one takes
CONFIGS = [data.DataConfig(max_tokens=4096, max_crops=2, max_frames=4, vision=model.TOY_VISION, prefix_all=not later, sqrt_length=later,
                           sqrt_branches=later) for later in (False, True)]
TOKENIZER = data.ByteTokenizer()
TEXT = {"type": "caption", "text": "x"}


class Late(BaseException):
    """A case takes longer than SECONDS: no handler of errors may take it for one of its own."""


# ---------------------------------------------------------------------------------------------------------------
# sound files to begin with


FILMS = {"a.mp4": "-c:v libx264 -bf 2 -g 8 -movflags +faststart", "b.mp4": "-c:v libx264 -g 8", "c.mkv": "-c:v libx264 -bf 2 -g 8",
         "d.ts": "-c:v libx264 -bf 2 -g 8", "e.avi": "-c:v mpeg4 -bf 2 -g 8", "f.mov": "-c:v mpeg4 -g 8",
         "g.webm": "-c:v libvpx-vp9 -cpu-used 8", "h.flv": "-c:v flv1", "i.mpg": "-c:v mpeg2video -bf 2", "j.gif": "-c:v gif",
         "k.mkv": "-c:v mjpeg", "l.ogv": "-c:v libtheora",
         "m.wmv": "-c:v wmv2", "n.mp4": "-c:v libx265 -x265-params log-level=none"}


def pictures():
    """{name: bytes} of the photographs, small, in many formats and modes."""
    cat, cup = (Image.open(HERE / "media" / name).convert("RGB").resize((120, 80)) for name in ("chelsea.png", "coffee.png"))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a cat"
    many = {"save_all": True, "append_images": [cup, cat]}
    kinds = [("a.png", cat, {"exif": exif}), ("b.png", cat.convert("P"), {}), ("d.png", cat.convert("I;16"), {}),
             ("c.png", cat.convert("RGBA"), {"icc_profile": bytes(300)}), ("e.jpg", cat, {"exif": exif}),
             ("f.jpg", cat.convert("CMYK"), {}),
             ("g.jpg", cat, {"progressive": True, "exif": exif}), ("h.gif", cat, many), ("i.webp", cat, {"exif": exif}),
             ("j.webp", cat, {"lossless": True, **many}), ("k.tif", cat, {"compression": "tiff_lzw"}),
             ("l.tif", cat, {"exif": exif, **many}), ("m.tif", cat, {"compression": "jpeg"}), ("n.bmp", cat, {}), ("o.ppm", cat, {}),
             ("p.jp2", cat, {}), ("q.avif", cat, {}),
             ("r.ico", cat, {}), ("s.tga", cat, {"compression": "tga_rle"}), ("t.eps", cat, {}), ("u.pcx", cat, {}), ("v.png", cat, many)]
    files = {}
    for name, picture, options in kinds:
        with io.BytesIO() as file:
            picture.save(file, Image.registered_extensions()[Path(name).suffix], **options)
            files[name] = file.getvalue()
    return files


def films(folder):
    """{name: bytes} of a second of the film, small, in many containers, and playlists that name it."""
    for name, how in FILMS.items():
        words = f"-t 1 -vf scale=96:54 -an -fflags +bitexact -flags:v +bitexact {how}".split()
        film = HERE / "media/bigbuckbunny.mp4"
        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", film, *words, folder / name], check=True)
    lists = {"o.mp4": "ffconcat version 1.0\nfile a.mp4\n", "p.mp4": "#EXTM3U\n#EXTINF:3,\nd.ts\n#EXT-X-ENDLIST\n", "q.mp4": "<MPD></MPD>"}
    return {name: (folder / name).read_bytes() for name in FILMS} | {name: text.encode() for name, text in lists.items()}


def rows():
    """Sound records, native and of every dialect, of the media that `stage` lays out."""
    names = {"chelsea.png": "a.png", "coffee.png": "e.jpg", "astronaut.png": "i.webp", "coins.png": "n.bmp", "rocket.jpg": "k.tif",
             "bigbuckbunny.mp4": "a.mp4"}
    lines = [(HERE / "media" / name).read_text() for name in ("records.jsonl", "films.jsonl")]
    lines.append("\n".join(map(json.dumps, json.loads((HERE / "conformance/sharegpt.json").read_text()))))
    found = [json.loads(re.sub("|".join(names), lambda name: names[name[0]], line)) for line in "\n".join(lines).splitlines() if line]
    track = {"type": "track", "label": "it", "coords": "percent", "fps": 2, "mode": "from_point",
             "query": {"t": 0, "id": 1, "x": 4, "y": 2}, "points": [{"t": t / 2, "id": 1, "x": 4 + t, "y": 2} for t in range(4)]}
    stills = {"frames": ["a.png"] * 4, "fps": 2, "start": 0, "end": 1.5, "width": 120, "height": 80}
    asked = [{"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": "What?"}]},
             {"role": "assistant", "content": "A cat.", "loss_weight": 0.5}]
    said = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"}]
    pairs = [{"user": "q", "assistant": "a"}, {"user": "r", "assistant": "b"}]
    return [*found, {"video": stills, "subtitles": "hm", "weight": 2, "annotations": [track, {"type": "count", "label": "c", "count": 0}]},
            {"messages": asked}, {"texts": pairs, "images": ["a.png", "b.png"]},
            {"video": "c.mkv", "clip": [0.1, 0.9], "conversation": said}]


# ---------------------------------------------------------------------------------------------------------------
# mutations


KEYS = ("image", "images", "video", "points", "query", "weight", "conversations", "messages", "t", "fps", "start", "size", "answer_idx")
NUMBERS = (0, -1, 1, 0.5, -0.0, 1e-320, 1e308, -1e308, 1e12, 2**31, 2**53 + 1, 10**17, -(10**17), math.nan, math.inf, -math.inf, True)
TEXTS = ("", " ", "\0", "\ud800", "\u202e\u2028\x07\x1b[31m", "<image>", "<video>" * 99, "<|im_end|>", "<im_patch>", "%s%n{}{0}",
         "é" * 300, "how many " * 2000, "\n" * 3000, "x" * 200_000, "unit", "track", "0", "NaN")
PATHS = ("../a.png", "/etc/passwd", "C:\\a.png", "\\\\host\\a.png", "http://127.0.0.1/a.png", "file:///etc/passwd",
         "data:image/png;base64,AA", "concat:a.mp4|b.mp4", "subfile,,start,0,end,9,,:a.mp4", "pipe:0", "-i",
         "a.png/", "a.png/../b.png", "./././b.png", "x/../../b.png", ".",
         "..", "~/a.png", "a\0.png", "\ud800.png", "a" * 300, "a/" * 400 + "b", "é" * 200, "out.png", "up/a.png", "in.png",
         "round", "folder", "pipe", "zero", "gone.png", "%d.png", "[a]*.png", "o.mp4", "p.mp4", "t.eps", "a.mp4", "h.gif",
         "NUL", "a.png\n", " a.png ")
DEEP = ("[" * 400 + "]" * 400, "[" * 990 + "]" * 990, "[" * 100_000 + "]" * 100_000, '{"a":' * 950 + "1" + "}" * 950, "[" * 3000,
        "1" * 50_000, "1e999999", "-", "0x10", "1" + "0" * 18, "[" + "0," * 50_000 + "0]", '{"id":1,"id":2}')


def places(value, path=()):
    """Every place in a JSON value, as a tuple of keys; the whole is ()."""
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def mutated_record(rng, sound):
    """Bytes of a line."""
    record, raw = copy.deepcopy(rng.choice(sound)), {}
    at = lambda value, path: at(value[path[0]], path[1:]) if path else value                                        # noqa: E731
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        spots = [path for path in places(record) if path]
        if not spots:
            break
        *above, key = rng.choice(spots)
        holder, other = at(record, above), rng.choice(sound)
        kind = rng.randrange(10)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice((*TEXTS, *KEYS, key + "s"))] = holder[key]
        elif kind == 2:
            holder[key] = copy.deepcopy(at(other, rng.choice(list(places(other)))))
        elif kind == 3:
            holder[key] = rng.choice((None, [], {}, [[]], [None], [holder[key]], [holder[key]] * 9, {"a": holder[key]}))
        elif kind == 4:
            raw[name := f"@{len(raw)}@"] = rng.choice(DEEP)
            holder[key] = name
        elif kind == 5:
            record |= {k: other[k] for k in ("image", "images", "video", "subtitles") if k in other} if isinstance(record, dict) else {}
        else:
            old = holder[key]
            number, like_path = isinstance(old, (int, float)), isinstance(old, str) and re.search(r"\.\w{3,4}$", old)
            pool = NUMBERS if number and rng.random() < 0.7 else PATHS if like_path and rng.random() < 0.8 else (*TEXTS, *NUMBERS, *PATHS)
            holder[key] = old * rng.choice((-1, 1e-9, 3, 1000, 1e200)) if number and rng.random() < 0.3 else rng.choice(pool)
    line = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    for name, text in raw.items():
        line = line.replace(f'"{name}"', text)
    if rng.random() < 0.1:                                                # a key twice
        line = re.sub(r'("\w+": )', r"\1 0, \1", line, count=rng.randrange(1, 3))
    line = line.encode(errors="surrogatepass")
    return damaged(line, rng, (0, len(line))) if rng.random() < 0.12 else line


def damaged(content, rng, span):
    """Bytes with some inside a span flipped, overwritten, cut off, doubled or filled with zeros."""
    content, (first, last) = bytearray(content), span
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(first, max(min(last, len(content)), first + 1))
        n = min(rng.choice((1, 2, 4, 40, 400)), len(content) - at)
        kind = rng.randrange(7)
        if kind < 2 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            content[at : at + n] = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * n
        elif kind == 3:
            content[at : at + n] = rng.randbytes(n)
        elif kind == 4:
            content[at:at] = content[at : at + n]
        elif kind == 5:
            del content[at : at + n]
        elif rng.random() < 0.3:
            del content[at:]
    return bytes(content)


def mended(content):
    """A PNG with the checksums that its chunks should have."""
    out, at = bytearray(content[:8]), 8
    while at + 12 <= len(content):
        n = min(int.from_bytes(content[at : at + 4], "big"), len(content) - at - 12)
        out += content[at : at + 8 + n] + struct.pack(">I", zlib.crc32(content[at + 4 : at + 8 + n]))
        at += 12 + n
    return bytes(out) + content[at:]


def mutated_image(rng, sound):
    """(name, bytes)"""
    name = rng.choice(sorted(sound))
    content = sound[name]
    exif = max(content.find(b"Exif"), content.find(b"eXIf"), content.find(b"EXIF"))
    kind = rng.randrange(8)
    if kind == 0:
        content = content[: rng.randrange(len(content))]
    elif kind == 1:                                                       # a size, or whatever else stands there
        at, n = rng.randrange(4, min(90, len(content) - 4)), rng.choice((2, 4))
        big = rng.choice((0xFFFFFFFF, 0x7FFFFFFF, 0x10000, 0x4000, 0x2000, 0, rng.getrandbits(32)))
        big = big.to_bytes(4, rng.choice(("big", "little")))
        content = content[:at] + big[:n] + content[at + n :]
    elif kind == 2 and exif >= 0:
        content = damaged(content, rng, (exif, exif + 200))
    elif kind == 3:
        other = sound[rng.choice(sorted(sound))]
        at = rng.randrange(len(content))
        content = content[:at] + other[rng.randrange(len(other)) :]
    else:
        content = damaged(content, rng, (0, rng.choice((40, 300, len(content)))))
    if content[:4] == b"\x89PNG" and rng.random() < 0.8:
        content = mended(content)
    return (rng.choice(sorted(sound)) if rng.random() < 0.2 else name), content


def mutated_video(rng, sound):
    """(name, bytes)"""
    name = rng.choice(sorted(sound))
    content, other = sound[name], sound[rng.choice(sorted(sound))]
    boxes = [m.start() for m in re.finditer(rb"moov|mdat|trak|mdia|stbl|stsd|stts|ctts|stsz|stco|stsc|stss|elst|mvhd|mdhd|avcC", content)]
    kind = rng.randrange(8)
    if kind == 0:
        content = content[: rng.randrange(len(content))]
    elif kind == 1 and boxes:                                             # its size, or a count or a time in it
        at = rng.choice(boxes) + rng.choice((-4, -4, 8, 12, 16, 20, 24))
        big = rng.choice((0xFFFFFFFF, 0x7FFFFFFF, 1_000_000_000, 0, 1, rng.getrandbits(32), rng.getrandbits(16)))
        content = content[:at] + struct.pack(">I", big) + content[at + 4 :]
    elif kind == 2:
        content = content + other
    elif kind == 3:
        at = rng.randrange(len(content))
        content = content[:at] + other[rng.randrange(len(other)) :]
    elif kind < 6:
        content = damaged(content, rng, (0, len(content)))
    else:
        content = damaged(content, rng, rng.choice(((0, 300), (max(len(content) - 1500, 0), len(content)))))
    return (rng.choice(sorted(sound)) if rng.random() < 0.1 else name), content


# ---------------------------------------------------------------------------------------------------------------
# one case, all cases


class Stage:
    """A folder with sound media and odd ones beside the file of records that a case writes."""

    def __init__(self, folder, kinds):
        self.folder, self.file = folder / "media", folder / "r.jsonl"
        self.folder.mkdir()
        for name, content in (images := pictures()).items():
            (self.folder / name).write_bytes(content)
        self.sound = {"record": rows(), "image": images, "video": films(self.folder) if set(kinds) & {"record", "video"} else {}}
        links = {"out.png": HERE / "media/coins.png", "up": "..", "in.png": "a.png", "round": "round", "zero": "/dev/zero"}
        for name, target in links.items():
            (self.folder / name).symlink_to(target)
        for name in ("o.mp4", "p.mp4", "q.mp4"):
            (self.folder / name).write_bytes(self.sound["video"].get(name, b""))
        (self.folder / "folder").mkdir()
        os.mkfifo(self.folder / "pipe")

    def write(self, seed, kind, number):
        """Lays out a case; returns the file that it made besides r.jsonl, if any."""
        rng = random.Random(f"{seed} {kind} {number}")
        if kind == "record":
            self.file.write_bytes(mutated_record(rng, self.sound[kind]))
            return None
        name, content = {"image": mutated_image, "video": mutated_video}[kind](rng, self.sound[kind])
        path = self.folder / f"case{number}-{name}"           # a name of its own: what was read is remembered by name
        path.write_bytes(content)
        self.file.write_text(json.dumps({kind: path.name, "annotations": [TEXT]}))
        return path


def said(text):
    """The code of a declared error; AssertionError if it is no sentence."""
    assert len(text) < 3000 and not re.search("[\0-\x1f\x7f-\x9f]", text), f"no sentence: {text!r}"
    code = re.search(r"\b([ES]\d\d)\b", text)
    assert code, f"no code: {text}"
    return code[1]


def end(source, i, config, epoch):
    """The code that a record ends with, or "sound"."""
    try:
        tokens, crops = data.size(record := source[i], TOKENIZER, config, 0, epoch)
        example = data.encode(record, TOKENIZER, config, 0, epoch)
    except data.Unreadable as e:
        return said(str(e))
    assert all(map(math.isfinite, example.weights)), "a weight that is not finite"
    shown = 0 if example.images is None else len(example.images)
    assert (tokens, crops) in ((0, 0), (len(example.tokens), shown)), f"size {tokens, crops}, encode {len(example.tokens), shown}"
    return "sound" if tokens else "too long"


def through(stage, config, epoch):
    """The code that the case ends with, or "sound"; any exception is a find."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = records.check_command([str(stage.file), "--decode", "--all"])
    assert status in (0, 1), f"check left with {status}"
    try:
        source = data.Records(stage.file, stage.folder)
        codes = [end(source, i, config, epoch) for i in range(len(source))]
    except data.DataError as e:
        codes = [said(line) for line in str(e).split("\n")]
    # check knows neither the settings of a run (S03, S12) nor what only shows when a film is decoded (S23)
    assert status == 1 or set(codes) <= {"sound", "too long", "S03", "S12", "S23"}, f"{codes}, but check said: {out.getvalue()}"
    return next((code for code in codes if code != "sound"), "sound")


def peak():
    """MiB of resident memory at most so far: of this process, of its children (no less than of this one when they began)."""
    unit = 1 << (20 if sys.platform == "darwin" else 10)
    return [resource.getrusage(who).ru_maxrss // unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def run(counts, seed=0, only=None):
    """{kind: how many} -> what the last line says, and [(kind, number, traceback), ..] of what should not be."""
    def late(*_):
        raise Late(f"more than {SECONDS} s")

    outcomes, slowest, finds, largest = {kind: Counter() for kind in counts}, (0, ""), [], ""
    before_us = signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        stage = Stage(Path(folder), counts)
        before = began = peak()[0]
        for kind, number in [only] if only else tqdm([(k, n) for k in counts for n in range(counts[k])], disable=None):
            made, start = stage.write(seed, kind, number), time.monotonic()
            faulthandler.dump_traceback_later(3 * SECONDS, exit=True)     # for what does not even come back to Python
            signal.alarm(SECONDS)
            try:
                with contextlib.redirect_stderr(nowhere):
                    code = through(stage, CONFIGS[number % 2], number)
            except (Exception, Late):
                code = "find"
                finds.append((kind, number, traceback.format_exc()))
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            outcomes[kind][code] += 1
            slowest = max(slowest, (round(time.monotonic() - start, 2), f"{kind} {number}"))
            if peak()[0] > before:
                before, largest = peak()[0], f"{kind} {number}"
            if made:
                made.unlink()
    signal.signal(signal.SIGALRM, before_us)
    return {"seed": seed, **{kind: dict(sorted(n.items())) for kind, n in outcomes.items()}, "slowest": slowest,
            "MiB": dict(zip(("at first", "at most", "children at most"), (began, *peak()), strict=True)), "largest": largest,
            "finds": len(finds)}, finds


def main(argv=None):
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="Mutated records, images and videos through check, size and encode.")
    for kind in ("record", "image", "video"):
        parser.add_argument(f"--{kind}s", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", nargs=2, metavar=("KIND", "NUMBER"), help="this one alone: record, image or video, and its number")
    args = parser.parse_args(argv)
    only = (args.case[0], int(args.case[1])) if args.case else None
    counts = {only[0]: 1} if only else {kind: getattr(args, f"{kind}s") for kind in ("record", "image", "video")}
    result, finds = run(counts, args.seed, only)
    for kind, number, what in finds[:20]:
        print(f"--case {kind} {number} --seed {args.seed}\n{what}", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(finds))


if __name__ == "__main__":
    sys.exit(main())
