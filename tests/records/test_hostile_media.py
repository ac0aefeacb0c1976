"""Images and videos made to do harm: each ends as one sentence, in bounded time and memory, and
nothing is run and no other file is read.

Elsewhere: playlists and decoders that hang or eat memory (test_damaged_video.py), links and paths
(test_hostile_records.py), what chance finds (tests/test_fuzz.py).
"""

import io
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from functools import lru_cache
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from records import image as image_module
from records import media
from records import video as video_module
from records.media import Unreadable
from tests.records.numbered import FFMPEG, make_video, numbers
from tools.check import conversion
from tools.check import main as check_command

ROOT = Path(__file__).parents[2]
CAT = Image.open(ROOT / "tests/media/chelsea.png").convert("RGB")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc, or limited on Linux")


# --------------------------------------------------------------------------------------------------
# images


def encoded(image, kind, **options):
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def png(width, height, *chunks, rows=b""):
    """A PNG of grey pixels that claims this size; chunks: (kind, content)."""
    def chunk(kind, body):
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = b"".join(chunk(*c) for c in chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body


@lru_cache
def zeros(n):
    """n bytes of 0, compressed."""
    pack = zlib.compressobj(9)
    parts = [pack.compress(bytes(min(1 << 20, n - at))) for at in range(0, n, 1 << 20)]
    return b"".join(parts) + pack.flush()


def patched(content, at, value):
    return content[:at] + value + content[at + len(value) :]


def png_text(n_chunks, n_bytes):
    chunks = [(b"zTXt", b"a%d\0\0" % k + zeros(n_bytes)) for k in range(n_chunks)]
    return png(8, 8, *chunks, rows=zeros(72))


def png_chunk(kind, content):
    return png(8, 8, (kind, content + zeros(100 << 20)), rows=zeros(72))


def gif_of_huge_size():
    return patched(encoded(CAT, "GIF"), 6, b"\xff" * 4)


def bmp_of_huge_size():
    return patched(encoded(CAT, "BMP"), 18, struct.pack("<ii", 2**31 - 1, 2**31 - 1))


def tiff_of_huge_width():
    width, huge = (struct.pack("<HHII", 256, 4, 1, n) for n in (CAT.width, 10**6))
    return encoded(CAT, "TIFF").replace(width, huge)


def jpeg_of_huge_size():
    content = encoded(CAT, "JPEG")
    return patched(content, content.index(b"\xff\xc0") + 5, b"\xff\xdc" * 2)


def jpeg_of_many_scans(n=1000):
    """A JPEG whose last scan comes n times more: each makes the decoder pass over all pixels."""
    content = encoded(CAT, "JPEG", progressive=True)
    return content[:-2] + content[content.rindex(b"\xff\xda") : -2] * n + content[-2:]


def gif_of_many_frames(n=2000):
    others = [Image.new("RGB", (8, 8), (k, k // 256, 9)) for k in range(n)]
    return encoded(CAT.resize((8, 8)), "GIF", save_all=True, append_images=others)


BOMBS = {                            # file -> what makes its content, and the code that it costs
    "pixels.png": (lambda: png(9500, 9500, rows=zeros(9501 * 9500)), "S22"),
    "claims.png": (lambda: png(2**31 - 1, 2**31 - 1), "S22"),
    "words.png": (lambda: png_text(3, 100 << 20), "S21"),
    "many words.png": (lambda: png_text(200, 1_000_000), "S21"),
    "profile.png": (lambda: png_chunk(b"iCCP", b"a\0\0"), "S21"),
    "exif.png": (lambda: png_chunk(b"zTXt", b"Raw profile type exif\0\0"), "S21"),
    "claims.gif": (gif_of_huge_size, "S22"),
    "claims.bmp": (bmp_of_huge_size, "S22"),
    "claims.tif": (tiff_of_huge_width, "S22"),
    "claims.jpg": (jpeg_of_huge_size, "S22"),
    "scans.jpg": (jpeg_of_many_scans, "S22"),
    "frames.gif": (gif_of_many_frames, ""),
}
READ_ALL = """
import json, resource, sys, time
from pathlib import Path
from records import media
from tools.check import conversion

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

found = {}
for name in sys.argv[2:]:
    before = peak()
    began = time.monotonic()
    code = ""
    try:
        conversion(Path(sys.argv[1]) / name)
        media.read_image(Path(sys.argv[1]) / name)
    except media.Unreadable as error:
        code = str(error)[:3]
    found[name] = code, peak() - before, time.monotonic() - began
print(json.dumps(found))
"""


@LINUX
def test_bombs_cost_neither_memory_nor_time(tmp_path):
    """In a process of their own: the most memory that a process ever held does not go down."""
    for name, (make, _) in BOMBS.items():
        (tmp_path / name).write_bytes(make())
        assert (tmp_path / name).stat().st_size < 8 << 20
    child = subprocess.run([sys.executable, "-c", READ_ALL, tmp_path, *BOMBS], cwd=ROOT,
                           capture_output=True, text=True, timeout=60)
    found = json.loads(child.stdout)
    codes = {name: code for name, (code, *_) in found.items()}
    assert codes == {name: code for name, (_, code) in BOMBS.items()}
    assert max(mebibytes for _, mebibytes, _ in found.values()) < 80, found
    assert max(seconds for *_, seconds in found.values()) < 5, found


def test_a_drawing_is_not_an_image_and_starts_no_program(tmp_path, monkeypatch):
    """SVG could name files and addresses; for EPS Pillow would start Ghostscript."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    (tmp_path / "a.png").write_text(svg)
    CAT.save(tmp_path / "eps.png", "EPS")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for name in ("a.png", "eps.png"):
        for read in (media.header, media.read_image, conversion):
            with pytest.raises(Unreadable, match=r"^S21 cannot read .* cannot identify"):
                read(tmp_path / name)
    assert not (tmp_path / "started").exists()
    with (pytest.raises(OSError),                                # noqa: PT011 - whatever it says
          Image.open(tmp_path / "eps.png") as image):
        image.load()
    assert (tmp_path / "started").exists()                       # so it would have been


ERRORS = [KeyError("x"), struct.error("x"), TypeError("x"), IndexError(), zlib.error("x"),
          MemoryError(), AttributeError("a\nb"), ZeroDivisionError(), RuntimeError("x"),
          EOFError("x"), Image.DecompressionBombError("x")]


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_a_parser_raises_costs_the_image_only(tmp_path, monkeypatch, error):
    CAT.save(tmp_path / "a.png")

    def fail(*_):
        raise error

    cases = [(image_module.vision, "to_array", media.read_image),
             (Image.Image, "getexif", conversion)]
    for owner, name, read in cases:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(Unreadable, match=r"^S2[12] [^\n]+$"):
                read(tmp_path / "a.png")


def test_damage_behind_the_first_of_several_frames_costs_nothing(tmp_path):
    """Only the first is trained on; so check, which counts them, may not refuse the file."""
    others = [CAT.rotate(90), CAT.rotate(180)]
    content = encoded(CAT, "GIF", save_all=True, duration=40, append_images=others)
    at = content.rindex(b"\x21\xf9\x04") + 2     # how long the head of the last frame is
    (tmp_path / "a.gif").write_bytes(patched(content, at, b"\1"))
    assert media.read_image(tmp_path / "a.gif").shape == (CAT.height, CAT.width, 3)
    assert conversion(tmp_path / "a.gif").endswith("only the first of damaged frames is read")
    record = {"image": "a.gif", "annotations": [{"type": "caption", "text": "x"}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    assert check_command([str(tmp_path / "r.jsonl"), "--decode"]) == 0


@pytest.mark.parametrize("read", [media.header, media.read_image, media.probe])
@pytest.mark.parametrize("path", [
    "http://127.0.0.1/a.png", "file://{}/a.png", "file:{}/a.png",
    "data:image/png;base64,iVBORw0KGgo=", "concat:{}/a.png", "subfile,,start,0,end,99,,:{}/a.png",
    "{}/%d.png", "{}/*.png", "{}/a.png?x", "-", "a" * 5000])
def test_what_only_looks_like_a_path_is_no_file(tmp_path, read, path):
    CAT.save(tmp_path / "a.png")
    CAT.save(tmp_path / "1.png")
    with pytest.raises(Unreadable, match=r"^S20 there is no file "):
        read(Path(path.format(tmp_path)))


def open_one_frame(path):
    return media.open_frames([path], 1)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes in folders")
@pytest.mark.parametrize("read", [media.header, media.read_image, media.probe, conversion,
                                  open_one_frame])
def test_a_stream_without_an_end_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name in ("pipe", "zero", "round"):
        with pytest.raises(Unreadable, match=r"^S2[04] there is no f"):
            read(tmp_path / name)


# --------------------------------------------------------------------------------------------------
# videos

DASH = ('<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period><AdaptationSet>'
        "<Representation><BaseURL>file:secret.mp4</BaseURL></Representation></AdaptationSet>"
        "</Period></MPD>")
SDP = ("v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n"
       "a=rtpmap:96 H264/90000\n")


@pytest.mark.parametrize("content", [
    DASH, SDP, "file 'secret.mp4'\n", "ffconcat version 1.0\nfile secret.mp4\n",
    "# timestamp format v2\n0\n", ";FFMETADATA1\n", "%d.png", "secret.mp4",
    "[playlist]\nFile1=secret.mp4\n", "#!AMR\n", "RIFF",
    "<ASX><ENTRY><REF HREF='secret.mp4'/></ENTRY></ASX>"])
@pytest.mark.parametrize("name", ["video.mp4", "video.mpd", "video%d.png"])
def test_a_text_that_names_a_video_is_no_video(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "secret.mp4", n=3)
    CAT.save("video1.png")
    Path(name).write_text(content)
    with pytest.raises(Unreadable, match=r"^S23 .* cannot be read as a video"):
        media.probe(tmp_path / name)


# box of an MP4 file -> where behind its name a count or a duration stands
CLAIMS = {b"stts": 8, b"stts ": 12, b"stsz": 12, b"ctts": 8, b"stco": 8, b"stsc": 8, b"mdhd": 16,
          b"mvhd": 16}


def test_a_video_that_claims_a_billion_frames_is_read_as_what_it_holds_or_not_at_all(tmp_path):
    content = make_video(tmp_path / "a.mp4").read_bytes()
    ends = set()
    for box, behind in CLAIMS.items():
        at = content.index(box.strip()) + behind
        (tmp_path / "b.mp4").write_bytes(patched(content, at, struct.pack(">I", 10**9)))
        began = time.monotonic()
        try:
            video = media.probe(tmp_path / "b.mp4")
            assert len(video.times) <= 30
            assert numbers(video, [1e9]) == [len(video.times) - 1], box
            ends.add("read")
        except Unreadable as error:
            ends.add(str(error)[:3])
        assert time.monotonic() - began < 5, box
    assert ends == {"read", "S23"}


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_a_video_of_years_is_refused_and_one_of_days_costs_its_frames_only(tmp_path, suffix):
    def encoder(seconds_a_frame):
        options = (f"-vf settb=1/1000,setpts=N*{seconds_a_frame}000 -fps_mode passthrough "
                   "-enc_time_base 1:1000 -c:v mjpeg -q:v 2 -pix_fmt yuvj420p")
        return options + " -video_track_timescale 1000" * (suffix == "mp4")

    days = media.probe(make_video(tmp_path / f"days.{suffix}", encoder(90_000), n=4))
    assert days.times.tolist() == [0, 90_000, 180_000, 270_000]
    assert numbers(days, [1e5, 2e9]) == [1, 3]
    with pytest.raises(Unreadable, match=r"^S22 .* claims to last \d{7,} s"):
        media.probe(make_video(tmp_path / f"years.{suffix}", encoder(900_000), n=4))


@LINUX
def test_ffmpeg_decodes_the_largest_frames_in_bounded_memory(tmp_path, monkeypatch):
    """6912 x 5760 pixels, 120 MB a frame: measured in the child while it waits to be read."""
    path = tmp_path / "a.mkv"
    options = "-f lavfi -i testsrc=s=6912x5760:r=1:d=3 -c:v mjpeg -q:v 9 -pix_fmt yuvj420p"
    subprocess.run([FFMPEG, "-v", "error", *options.split(), path], check=True)
    started = []
    popen = subprocess.Popen

    def recorded(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(video_module.subprocess, "Popen", recorded)
    video = media.probe(path)
    frames = media.frames(video, [0, 1, 2])
    assert next(frames).shape == (5760, 6912, 3)
    folder = Path(f"/proc/{started[-1].pid}")
    peak_kib = (folder / "status").read_text().split("VmHWM:")[1].split()[0]
    assert int(peak_kib) < 1 << 20
    limit = (folder / "limits").read_text().split("Max address space")[1].split()[0]
    assert limit == str(video_module.MAX_MEMORY_BYTES)
    frames.close()


NOTES = [[64, 48, 1e300, 0.1], [64, 48, float("nan"), 0.1], [64, 48, float("inf"), 0.1],
         [float("inf"), 48, 3, 0.1], [10**9, 10**9, 3, 0.1], [0, 0, 3, 0.1], [64, 48, 3, 9],
         [64, 48, -1, -1], ["64", 48, 3, 0.1], [64, 48]]


@pytest.mark.parametrize("noted", NOTES, ids=str)
def test_a_note_about_a_video_is_believed_only_if_it_can_be(tmp_path, noted):
    path = make_video(tmp_path / "a.mp4")
    status = path.stat()
    key = [str(path), status.st_size, status.st_mtime_ns, media.PROBE_VERSION]
    possible = [60, 40, 2, 0.5]
    for note, expected in ((noted, (64, 48, 3.0, 0.1)), (possible, (60, 40, 2.0, 0.5))):
        (tmp_path / "notes").write_text(json.dumps([key, note]) + "\n")
        assert media.Probes(tmp_path / "notes")(path) == pytest.approx(expected)
