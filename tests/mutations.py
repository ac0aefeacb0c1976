"""Damaged records, images and videos, made of sound ones by a seeded generator (tests/fuzz.py).

    flipped bytes, cut off, spliced        of every kind
    records    values of wrong types, sizes and ends at any depth, keys lost, added, given twice,
               media swapped, paths of every ugly sort
    images     sizes in headers, checksums repaired, EXIF damaged, one format's name on another's
               bytes
    videos     boxes and tables that claim more than there is, two videos in one file, playlists
"""

import copy
import io
import json
import math
import re
import struct
import subprocess
import zlib
from pathlib import Path

import imageio_ffmpeg
from PIL import Image

TESTS = Path(__file__).parent


# --------------------------------------------------------------------------------------------------
# sound files to begin with

ENCODERS = {
    "a.mp4": "-c:v libx264 -bf 2 -g 8 -movflags +faststart", "b.mp4": "-c:v libx264 -g 8",
    "c.mkv": "-c:v libx264 -bf 2 -g 8", "d.ts": "-c:v libx264 -bf 2 -g 8",
    "e.avi": "-c:v mpeg4 -bf 2 -g 8", "f.mov": "-c:v mpeg4 -g 8",
    "g.webm": "-c:v libvpx-vp9 -cpu-used 8", "h.flv": "-c:v flv1", "i.mpg": "-c:v mpeg2video -bf 2",
    "j.gif": "-c:v gif", "k.mkv": "-c:v mjpeg", "l.ogv": "-c:v libtheora", "m.wmv": "-c:v wmv2",
    "n.mp4": "-c:v libx265 -x265-params log-level=none"}
PLAYLISTS = {
    "o.mp4": "ffconcat version 1.0\nfile a.mp4\n",
    "p.mp4": "#EXTM3U\n#EXTINF:3,\nd.ts\n#EXT-X-ENDLIST\n",
    "q.mp4": "<MPD></MPD>"}


def sound_images():
    """{name: bytes} of two photographs, small, in many formats and modes."""
    cat = Image.open(TESTS / "media/chelsea.png").convert("RGB").resize((120, 80))
    cup = Image.open(TESTS / "media/coffee.png").convert("RGB").resize((120, 80))
    exif = Image.Exif()
    exif[0x0112] = 6                 # turned
    exif[0x010E] = "a cat"
    several = {"save_all": True, "append_images": [cup, cat]}
    files = {
        "a.png": (cat, {"exif": exif}), "b.png": (cat.convert("P"), {}),
        "d.png": (cat.convert("I;16"), {}), "c.png": (cat.convert("RGBA"),
                                                      {"icc_profile": bytes(300)}),
        "e.jpg": (cat, {"exif": exif}), "f.jpg": (cat.convert("CMYK"), {}),
        "g.jpg": (cat, {"progressive": True, "exif": exif}), "h.gif": (cat, several),
        "i.webp": (cat, {"exif": exif}), "j.webp": (cat, {"lossless": True, **several}),
        "k.tif": (cat, {"compression": "tiff_lzw"}), "l.tif": (cat, {"exif": exif, **several}),
        "m.tif": (cat, {"compression": "jpeg"}), "n.bmp": (cat, {}), "o.ppm": (cat, {}),
        "p.jp2": (cat, {}), "q.avif": (cat, {}), "r.ico": (cat, {}),
        "s.tga": (cat, {"compression": "tga_rle"}), "t.eps": (cat, {}), "u.pcx": (cat, {}),
        "v.png": (cat, several)}
    contents = {}
    for name, (image, options) in files.items():
        kind = Image.registered_extensions()[Path(name).suffix]
        with io.BytesIO() as file:
            image.save(file, kind, **options)
            contents[name] = file.getvalue()
    return contents


def sound_videos(folder):
    """{name: bytes} of a second of video, small, in many containers; and playlists that name it."""
    source = TESTS / "media/bigbuckbunny.mp4"
    for name, encoder in ENCODERS.items():
        options = f"-t 1 -vf scale=96:54 -an -fflags +bitexact -flags:v +bitexact {encoder}"
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", source, *options.split()]
        subprocess.run([*command, folder / name], check=True)
    contents = {name: (folder / name).read_bytes() for name in ENCODERS}
    return contents | {name: text.encode() for name, text in PLAYLISTS.items()}


def sound_records():
    """Native records and rows of every dialect, of the media that tests/fuzz.py lays out."""
    names = {"chelsea.png": "a.png", "coffee.png": "e.jpg", "astronaut.png": "i.webp",
             "coins.png": "n.bmp", "rocket.jpg": "k.tif", "bigbuckbunny.mp4": "a.mp4"}
    text = ""
    for name in ("records.jsonl", "films.jsonl"):
        text += (TESTS / "media" / name).read_text() + "\n"
    rows = json.loads((TESTS / "conformance/sharegpt.json").read_text())
    text += "\n".join(map(json.dumps, rows))
    text = re.sub("|".join(names), lambda name: names[name[0]], text)
    found = [json.loads(line) for line in text.splitlines() if line]

    points = [{"t": t / 2, "id": 1, "x": 4 + t, "y": 2} for t in range(4)]
    track = {"type": "track", "label": "it", "coords": "percent", "fps": 2, "mode": "from_point",
             "query": {"t": 0, "id": 1, "x": 4, "y": 2}, "points": points}
    count = {"type": "count", "label": "c", "count": 0}
    frames = {"frames": ["a.png"] * 4, "fps": 2, "start": 0, "end": 1.5, "width": 120,
              "height": 80}
    parts = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "What?"}]
    answered = [{"role": "user", "content": parts},
                {"role": "assistant", "content": "A cat.", "loss_weight": 0.5}]
    chat = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"}]
    pairs = [{"user": "q", "assistant": "a"}, {"user": "r", "assistant": "b"}]
    return [*found,
            {"video": frames, "subtitles": "hm", "weight": 2, "annotations": [track, count]},
            {"messages": answered}, {"texts": pairs, "images": ["a.png", "b.png"]},
            {"video": "c.mkv", "clip": [0.1, 0.9], "conversation": chat}]


# --------------------------------------------------------------------------------------------------
# bytes


def damaged(content, rng, span):
    """The bytes with some inside a span flipped, overwritten, cut off, doubled or set to zero."""
    content = bytearray(content)
    first, last = span
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


# --------------------------------------------------------------------------------------------------
# records

KEYS = ("image", "images", "video", "points", "query", "weight", "conversations", "messages", "t",
        "fps", "start", "size", "answer_idx")
NUMBERS = (0, -1, 1, 0.5, -0.0, 1e-320, 1e308, -1e308, 1e12, 2**31, 2**53 + 1, 10**17, -(10**17),
           math.nan, math.inf, -math.inf, True)
TEXTS = ("", " ", "\0", "\ud800", "\u202e\u2028\x07\x1b[31m", "<image>", "<video>" * 99,
         "<|im_end|>", "<im_patch>", "%s%n{}{0}", "é" * 300, "how many " * 2000, "\n" * 3000,
         "x" * 200_000, "unit", "track", "0", "NaN")
PATHS = ("../a.png", "/etc/passwd", "C:\\a.png", "\\\\host\\a.png", "http://127.0.0.1/a.png",
         "file:///etc/passwd", "data:image/png;base64,AA", "concat:a.mp4|b.mp4",
         "subfile,,start,0,end,9,,:a.mp4", "pipe:0", "-i", "a.png/", "a.png/../b.png",
         "./././b.png", "x/../../b.png", ".", "..", "~/a.png", "a\0.png", "\ud800.png", "a" * 300,
         "a/" * 400 + "b", "é" * 200, "out.png", "up/a.png", "in.png", "round", "folder", "pipe",
         "zero", "gone.png", "%d.png", "[a]*.png", "o.mp4", "p.mp4", "t.eps", "a.mp4", "h.gif",
         "NUL", "a.png\n", " a.png ")
RAW = ("[" * 400 + "]" * 400, "[" * 990 + "]" * 990, "[" * 100_000 + "]" * 100_000,
       '{"a":' * 950 + "1" + "}" * 950, "[" * 3000, "1" * 50_000, "1e999999", "-", "0x10",
       "1" + "0" * 18, "[" + "0," * 50_000 + "0]", '{"id":1,"id":2}')


def places(value, path=()):
    """Every place in a JSON value, as a tuple of keys; the whole is ()."""
    yield path
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, part in items:
        yield from places(part, (*path, key))


def value_at(value, path):
    for key in path:
        value = value[key]
    return value


def mutated_record(rng, sound):
    """Bytes of a line."""
    record = copy.deepcopy(rng.choice(sound))
    raw = {}                         # {placeholder: text that Python's json would not write}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        spots = [path for path in places(record) if path]
        if not spots:
            break
        record = mutate_value(rng, record, rng.choice(spots), rng.choice(sound), raw)
    line = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    for name, text in raw.items():
        line = line.replace(f'"{name}"', text)
    if rng.random() < 0.1:                                       # a key twice
        line = re.sub(r'("\w+": )', r"\1 0, \1", line, count=rng.randrange(1, 3))
    line = line.encode(errors="surrogatepass")
    if rng.random() < 0.12:
        return damaged(line, rng, (0, len(line)))
    return line


def mutate_value(rng, record, place, other, raw):
    """Changes the value at a place of the record, for some kinds with parts of another record."""
    *above, key = place
    holder = value_at(record, above)
    kind = rng.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice((*TEXTS, *KEYS, key + "s"))] = holder[key]
    elif kind == 2:
        holder[key] = copy.deepcopy(value_at(other, rng.choice(list(places(other)))))
    elif kind == 3:
        value = holder[key]
        wrong = (None, [], {}, [[]], [None], [value], [value] * 9, {"a": value})
        holder[key] = rng.choice(wrong)
    elif kind == 4:
        name = f"@{len(raw)}@"
        raw[name] = rng.choice(RAW)
        holder[key] = name
    elif kind == 5:
        if isinstance(record, dict):
            media = ("image", "images", "video", "subtitles")
            record |= {name: other[name] for name in media if name in other}
    else:
        holder[key] = mutated_scalar(rng, holder[key])
    return record


def mutated_scalar(rng, old):
    number = isinstance(old, (int, float))
    path = isinstance(old, str) and re.search(r"\.\w{3,4}$", old)
    pool = (*TEXTS, *NUMBERS, *PATHS)
    if number and rng.random() < 0.7:
        pool = NUMBERS
    elif path and rng.random() < 0.8:
        pool = PATHS
    if number and rng.random() < 0.3:
        return old * rng.choice((-1, 1e-9, 3, 1000, 1e200))
    return rng.choice(pool)


# --------------------------------------------------------------------------------------------------
# images and videos


def with_checksums(content):
    """A PNG with the checksums that its chunks should have."""
    out = bytearray(content[:8])
    at = 8
    while at + 12 <= len(content):
        n = int.from_bytes(content[at : at + 4], "big")
        n = min(n, len(content) - at - 12)
        checksum = zlib.crc32(content[at + 4 : at + 8 + n])
        out += content[at : at + 8 + n] + struct.pack(">I", checksum)
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
    elif kind == 1:                  # a size, or whatever else stands there
        at = rng.randrange(4, min(90, len(content) - 4))
        n = rng.choice((2, 4))
        sizes = (0xFFFFFFFF, 0x7FFFFFFF, 0x10000, 0x4000, 0x2000, 0, rng.getrandbits(32))
        size = rng.choice(sizes).to_bytes(4, rng.choice(("big", "little")))
        content = content[:at] + size[:n] + content[at + n :]
    elif kind == 2 and exif >= 0:
        content = damaged(content, rng, (exif, exif + 200))
    elif kind == 3:
        content = spliced(content, rng, sound[rng.choice(sorted(sound))])
    else:
        content = damaged(content, rng, (0, rng.choice((40, 300, len(content)))))
    if content[:4] == b"\x89PNG" and rng.random() < 0.8:
        content = with_checksums(content)
    return (rng.choice(sorted(sound)) if rng.random() < 0.2 else name), content


def spliced(content, rng, other):
    """The start of one file and the end of another."""
    at = rng.randrange(len(content))
    return content[:at] + other[rng.randrange(len(other)) :]


BOXES = rb"moov|mdat|trak|mdia|stbl|stsd|stts|ctts|stsz|stco|stsc|stss|elst|mvhd|mdhd|avcC"


def mutated_video(rng, sound):
    """(name, bytes)"""
    name = rng.choice(sorted(sound))
    content = sound[name]
    other = sound[rng.choice(sorted(sound))]
    boxes = [match.start() for match in re.finditer(BOXES, content)]
    kind = rng.randrange(8)
    if kind == 0:
        content = content[: rng.randrange(len(content))]
    elif kind == 1 and boxes:        # the size of a box, or a count or a time in it
        at = rng.choice(boxes) + rng.choice((-4, -4, 8, 12, 16, 20, 24))
        sizes = (0xFFFFFFFF, 0x7FFFFFFF, 1_000_000_000, 0, 1, rng.getrandbits(32),
                 rng.getrandbits(16))
        size = struct.pack(">I", rng.choice(sizes))
        content = content[:at] + size + content[at + 4 :]
    elif kind == 2:
        content = content + other
    elif kind == 3:
        content = spliced(content, rng, other)
    elif kind < 6:
        content = damaged(content, rng, (0, len(content)))
    else:
        ends = ((0, 300), (max(len(content) - 1500, 0), len(content)))
        content = damaged(content, rng, rng.choice(ends))
    return (rng.choice(sorted(sound)) if rng.random() < 0.1 else name), content
