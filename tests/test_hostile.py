"""Files made to do harm: each is made here, and each ends as one sentence, in bounded time and memory, with nothing run and nothing read.

Elsewhere: playlists (test_media), decoders that hang or eat memory (test_media, test_loader), links and paths (test_records), shards and
tokenizers of released folders (test_hf), and what chance finds (test_fuzz).
"""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

import data
import model
import plans
from data import DataError, Records, Unreadable
from records import media
from records import reader as records
from tests.records.test_media import film, numbers
from text import tokenizer as text
from training import weights

ROOT = Path(__file__).parent.parent
CAT = Image.open(ROOT / "tests/media/chelsea.png").convert("RGB")
CAPTION = {"annotations": [{"type": "caption", "text": "x"}]}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc, or limited on Linux only")


class Payload:
    """What makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def toy(folder):
    """A folder with a sound model, small."""
    weights.save(model.Molmo2(model.PRESETS["toy"]), folder)
    text.ByteTokenizer().save(folder)
    return folder


def refused(error, *words):
    """It is one line and says all of these."""
    said = str(error.value)
    assert "\n" not in said and len(said) < 1000 and all(word in said for word in words), said


# ---------------------------------------------------------------------------------------------------------------
# models


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle"])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "config.json", "tokenizer.json"])
def test_a_pickle_in_a_models_folder_does_not_run(tmp_path, name, form):
    dump = {"torch": torch.save, "pickle": pickle.dump,
            "old torch": lambda what, file: torch.save(what, file, _use_new_zipfile_serialization=False)}[form]
    with open(toy(tmp_path) / name, "wb") as file:
        dump({"a": Payload(tmp_path / "harm")}, file)
    if name == "model.pt":
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=name) as error:
        (text.load_tokenizer(tmp_path, 384) if name == "tokenizer.json" else weights.load(tmp_path))
    refused(error)
    assert not (tmp_path / "harm").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()                                   # it was loaded, that is: armed


def test_a_pickle_that_lies_beside_records_or_as_a_plan_does_not_run(tmp_path, monkeypatch):
    (tmp_path / "r.jsonl").write_text(json.dumps({"annotations": [{"type": "text", "text": "x"}]}))
    monkeypatch.setattr(records, "WORTH", 0)
    stamp = Records(tmp_path / "r.jsonl").stamp
    arms = np.array([Payload(tmp_path / "harm")], dtype=object)
    np.savez(tmp_path / ".r.jsonl.index.npz", stamp=np.array(stamp), offset=arms, length=arms, line=arms, skip=arms, found=arms)
    assert [r["annotations"][0]["text"] for r in Records(tmp_path / "r.jsonl")] == ["x"]
    np.savez(tmp_path / "plan.npz", made_for=arms, ids=arms, draws=arms)
    with pytest.raises(DataError, match=r"not a plan that packing.py wrote"):
        plans.Plan(tmp_path / "plan.npz", {}, 1, {}, {})
    assert not (tmp_path / "harm").exists()


def test_an_index_that_somebody_else_made_lets_nothing_pass_unchecked(tmp_path, monkeypatch):
    """It has the right stamp and says of a bad record that it is good, or is larger than memory."""
    monkeypatch.setattr(records, "WORTH", 0)
    rows = [{"image": "../secret.png", **CAPTION}, {"annotations": [{"type": "text", "text": "x"}]}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    saved = tmp_path / ".r.jsonl.index.npz"
    assert len(list(Records(tmp_path / "r.jsonl", lenient=True))) == 1
    index = dict(np.load(saved))
    assert index["skip"].tolist() == [1, 0]
    np.savez(saved, **index | {"skip": np.zeros(2, np.uint8)})
    with pytest.raises(Unreadable, match=r"^E10 .*leaves the media folder"):
        Records(tmp_path / "r.jsonl", lenient=True)[0]
    with io.BytesIO() as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (2**50,)})
        head = file.getvalue()
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("rows.npy", head)
    assert len(Records(tmp_path / "r.jsonl", lenient=True)) == 2


def test_a_safetensors_header_of_2_to_the_60_bytes_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    (toy(tmp_path) / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not readable as weights") as error:
        weights.load(tmp_path)
    refused(error, "model.safetensors")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "a/../../model.safetensors", "..", ""])
def test_an_index_names_no_shard_outside_its_folder(tmp_path, shard):
    pytest.importorskip("safetensors")
    folder = toy(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"embedding.weight": shard}}))
    with pytest.raises(FileNotFoundError, match="that the index names is missing") as error:
        weights.load(folder)
    refused(error)


CONFIGS = {
    "unknown keys": (lambda c: c.update(trust_remote_code=True), "trust_remote_code"),
    "keys of the ViT": (lambda c: c["vision"].update(auto_map={"a": "b"}), "auto_map"),
    "10^12 parameters": (lambda c: c.update(n_embd=400_000, n_hidden=1_000_000), "parameters, more than 100,000,000,000"),
    "10^9 layers": (lambda c: c.update(n_layer=10**9), "1,000,000,003 layers, more than 1,000"),
    "10^9 layers of the ViT": (lambda c: c["vision"].update(n_layer=10**9), "layers, more than 1,000"),
    "a vocabulary of 10^30": (lambda c: c.update(n_vocab=10**30), "describes no model"),
    "another vocabulary": (lambda c: c.update(n_vocab=10**6), "has shape"),
    "words for numbers": (lambda c: c.update(eps="x"), "eps = 'x' is not of type float"),
    "no size": (lambda c: c.update(n_embd=-1), "describes no model"),
    "a list for an object": (lambda c: c.update(yarn=[]), "describes no model"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_absurd_config_is_refused_at_once(tmp_path, name):
    change, words = CONFIGS[name]
    raw = json.loads((toy(tmp_path) / "config.json").read_text())
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    began = time.monotonic()
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"config\.json|model\.safetensors") as error:
        weights.load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    refused(error, words)
    assert time.monotonic() - began < 10 and peak < 50 << 20


OURS = {"kind": "bytes", "words": [], "n_vocab": 384}


@pytest.mark.parametrize("content", ["[" * 100_000, {}, None, {"kind": "bytes"}, *({**OURS, "words": words} for words in (
    [""], [3], [[]], ["a", "a"], 5, None, [str(k) for k in range(9999)])), {**OURS, "n_vocab": 10**12}, {**OURS, "code": "x"}])
def test_a_hostile_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer") as error:
        text.load_tokenizer(tmp_path, 384)
    refused(error)


def test_a_tokenizer_at_which_its_package_panics_is_refused(tmp_path):
    """In Rust that is no Exception in Python."""
    pytest.importorskip("tokenizers")
    from training.export import byte_tokenizer_files

    raw = byte_tokenizer_files(text.ByteTokenizer())["tokenizer.json"] | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="not readable as a tokenizer") as error:
        text.load_tokenizer(tmp_path, 384)
    refused(error)


# ---------------------------------------------------------------------------------------------------------------
# images


def saved(picture, kind, **options):
    with io.BytesIO() as file:
        picture.save(file, kind, **options)
        return file.getvalue()


def png(w, h, *chunks, rows=b""):
    """A PNG of grey pixels that says w x h; chunks: (kind, content)."""
    chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))    # noqa: E731
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@lru_cache
def zeros(n):
    """n bytes of 0, compressed."""
    pack = zlib.compressobj(9)
    return b"".join(pack.compress(bytes(min(1 << 20, n - at))) for at in range(0, n, 1 << 20)) + pack.flush()


def patched(content, at, value):
    return content[:at] + value + content[at + len(value) :]


def scans(n):
    """A JPEG whose last scan comes n times more: to decode it is to pass over all pixels each time."""
    content = saved(CAT, "JPEG", progressive=True)
    return content[:-2] + content[content.rindex(b"\xff\xda") : -2] * n + content[-2:]


BOMBS = {                            # content, made when asked for; and the code that it costs
    "pixels.png": (lambda: png(9500, 9500, rows=zeros(9501 * 9500)), "S22"),
    "claims.png": (lambda: png(2**31 - 1, 2**31 - 1), "S22"),
    "words.png": (lambda: png(8, 8, *[(b"zTXt", b"a%d\0\0" % k + zeros(100 << 20)) for k in range(3)], rows=zeros(72)), "S21"),
    "many words.png": (lambda: png(8, 8, *[(b"zTXt", b"a%d\0\0" % k + zeros(1_000_000)) for k in range(200)], rows=zeros(72)), "S21"),
    "profile.png": (lambda: png(8, 8, (b"iCCP", b"a\0\0" + zeros(100 << 20)), rows=zeros(72)), "S21"),
    "exif.png": (lambda: png(8, 8, (b"zTXt", b"Raw profile type exif\0\0" + zeros(100 << 20)), rows=zeros(72)), "S21"),
    "claims.gif": (lambda: patched(saved(CAT, "GIF"), 6, b"\xff" * 4), "S22"),
    "claims.bmp": (lambda: patched(saved(CAT, "BMP"), 18, struct.pack("<ii", 2**31 - 1, 2**31 - 1)), "S22"),
    "claims.tif": (lambda: saved(CAT, "TIFF").replace(*(struct.pack("<HHII", 256, 4, 1, w) for w in (CAT.width, 10**6))), "S22"),
    "claims.jpg": (lambda: (c := saved(CAT, "JPEG")) and patched(c, c.index(b"\xff\xc0") + 5, b"\xff\xdc" * 2), "S22"),
    "scans.jpg": (lambda: scans(1000), "S22"),
    "frames.gif": (lambda: saved(CAT.resize((8, 8)), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), (k, k // 256, 9))
                                                                                           for k in range(2000)]), ""),
}


@LINUX
def test_bombs_cost_neither_memory_nor_time(tmp_path):
    """In a process of their own, since the most that a process ever held does not go down again."""
    for name, (make, _) in BOMBS.items():
        (tmp_path / name).write_bytes(make())
        assert (tmp_path / name).stat().st_size < 8 << 20
    code = """
import json, resource, sys, time
from pathlib import Path
from records import media
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
found = {}
for name in sys.argv[2:]:
    before, began, code = peak(), time.monotonic(), ""
    try:
        media.converted(Path(sys.argv[1]) / name)
        media.read_image(Path(sys.argv[1]) / name)
    except media.Unreadable as e:
        code = str(e)[:3]
    found[name] = code, peak() - before, time.monotonic() - began
print(json.dumps(found))"""
    child = subprocess.run([sys.executable, "-c", code, tmp_path, *BOMBS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    found = json.loads(child.stdout)
    assert {name: code for name, (code, *_) in found.items()} == {name: code for name, (_, code) in BOMBS.items()}
    assert max(grown for _, grown, _ in found.values()) < 80 and max(seconds for *_, seconds in found.values()) < 5, found


def test_a_drawing_is_no_photograph_and_starts_no_program(tmp_path, monkeypatch):
    """SVG could name files and addresses; for EPS Pillow would start Ghostscript."""
    (tmp_path / "a.png").write_text('<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>')
    CAT.save(tmp_path / "eps.png", "EPS")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for name in ("a.png", "eps.png"):
        for read in (media.header, media.read_image, media.converted):
            with pytest.raises(Unreadable, match=r"^S21 cannot read .* cannot identify"):
                read(tmp_path / name)
    assert not (tmp_path / "started").exists()
    with pytest.raises(OSError), Image.open(tmp_path / "eps.png") as picture:                # noqa: PT011 - whatever it says
        picture.load()
    assert (tmp_path / "started").exists()                                # so it would have been


@pytest.mark.parametrize("error", [KeyError("x"), struct.error("x"), TypeError("x"), IndexError(), zlib.error("x"), MemoryError(),
                                   AttributeError("a\nb"), ZeroDivisionError(), RuntimeError("x"), EOFError("x"),
                                   Image.DecompressionBombError("x")])
def test_whatever_a_parser_raises_costs_the_image_only(tmp_path, monkeypatch, error):
    CAT.save(tmp_path / "a.png")

    def fails(*_):
        raise error

    for where, what in ((media.vision, "to_array"), (Image.Image, "getexif")):
        with monkeypatch.context() as patch:
            patch.setattr(where, what, fails)
            with pytest.raises(Unreadable, match=r"^S2[12] [^\n]+$"):
                media.read_image(tmp_path / "a.png") if what == "to_array" else media.converted(tmp_path / "a.png")


def test_damage_behind_the_first_of_several_pictures_costs_nothing(tmp_path):
    """Only the first is trained on; so check, which counts them, may not refuse the file."""
    content = saved(CAT, "GIF", save_all=True, duration=40, append_images=[CAT.rotate(90), CAT.rotate(180)])
    at = content.rindex(b"\x21\xf9\x04") + 2                              # how long the head of the last one is
    (tmp_path / "a.gif").write_bytes(patched(content, at, b"\1"))
    assert media.read_image(tmp_path / "a.gif").shape == (CAT.height, CAT.width, 3)
    assert media.converted(tmp_path / "a.gif").endswith("the first of damaged pictures")
    (tmp_path / "r.jsonl").write_text(json.dumps({"image": "a.gif", **CAPTION}))
    assert records.check_command([str(tmp_path / "r.jsonl"), "--decode"]) == 0


@pytest.mark.parametrize("read", [media.header, media.read_image, media.probe])
@pytest.mark.parametrize("path", ["http://127.0.0.1/a.png", "file://{}/a.png", "file:{}/a.png", "data:image/png;base64,iVBORw0KGgo=",
                                  "concat:{}/a.png", "subfile,,start,0,end,99,,:{}/a.png", "{}/%d.png", "{}/*.png", "{}/a.png?x", "-",
                                  "a" * 5000])
def test_what_only_looks_like_a_path_is_no_file(tmp_path, read, path):
    CAT.save(tmp_path / "a.png")
    CAT.save(tmp_path / "1.png")
    with pytest.raises(Unreadable, match=r"^S20 no file "):
        read(Path(path.format(tmp_path)))


@pytest.mark.skipif(os.name != "posix", reason="needs pipes in folders")
@pytest.mark.parametrize("read", [media.header, media.read_image, media.probe, media.converted, lambda path: media.stills([path], 1)])
def test_a_stream_without_an_end_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name in ("pipe", "zero", "round"):
        with pytest.raises(Unreadable, match=r"^S2[04] no f"):
            read(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------------
# videos


@pytest.mark.parametrize("content", [
    '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011">'
    "<Period><AdaptationSet><Representation><BaseURL>file:secret.mp4</BaseURL></Representation></AdaptationSet></Period></MPD>",
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n", "file 'secret.mp4'\n",
    "ffconcat version 1.0\nfile secret.mp4\n", "# timestamp format v2\n0\n", ";FFMETADATA1\n", "%d.png", "secret.mp4",
    "[playlist]\nFile1=secret.mp4\n", "#!AMR\n", "RIFF", "<ASX><ENTRY><REF HREF='secret.mp4'/></ENTRY></ASX>"])
@pytest.mark.parametrize("name", ["film.mp4", "film.mpd", "film%d.png"])
def test_a_text_that_names_a_film_is_no_film(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    film(tmp_path / "secret.mp4", n=3)
    CAT.save("film1.png")
    Path(name).write_text(content)
    with pytest.raises(Unreadable, match=r"^S23 .* cannot be read as a video"):
        media.probe(tmp_path / name)


def test_a_film_that_claims_a_thousand_million_frames_is_read_as_what_it_holds_or_not_at_all(tmp_path):
    content = film(tmp_path / "a.mp4").read_bytes()
    claims, ends = {b"stts": 8, b"stts ": 12, b"stsz": 12, b"ctts": 8, b"stco": 8, b"stsc": 8, b"mdhd": 16, b"mvhd": 16}, set()
    for kind, after in claims.items():                                    # a number of entries, of frames in the first, a duration
        (tmp_path / "b.mp4").write_bytes(patched(content, content.index(kind.strip()) + after, struct.pack(">I", 10**9)))
        began = time.monotonic()
        try:
            video = media.probe(tmp_path / "b.mp4")
            assert len(video.times) <= 30 and numbers(video, [1e9]) == [len(video.times) - 1], kind
            ends.add("read")
        except Unreadable as e:
            ends.add(str(e)[:3])
        assert time.monotonic() - began < 5, kind
    assert ends == {"read", "S23"}


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_a_film_of_years_is_refused_and_one_of_days_costs_its_frames_only(tmp_path, suffix):
    still = "-vf settb=1/1000,setpts=N*{}000 -fps_mode passthrough -enc_time_base 1:1000 -c:v mjpeg -q:v 2 -pix_fmt yuvj420p"
    still += " -video_track_timescale 1000" * (suffix == "mp4")
    days = media.probe(film(tmp_path / f"days.{suffix}", still.format(90_000), n=4))
    assert days.times.tolist() == [0, 90_000, 180_000, 270_000] and numbers(days, [1e5, 2e9]) == [1, 3]
    with pytest.raises(Unreadable, match=r"^S22 .* claims to last \d{7,} s"):
        media.probe(film(tmp_path / f"years.{suffix}", still.format(900_000), n=4))


@LINUX
def test_ffmpeg_decodes_the_largest_frames_in_bounded_memory(tmp_path, monkeypatch):
    """6912 x 5760 pixels, 120 MB a frame: measured in the child while it waits to be read."""
    path = tmp_path / "a.mkv"
    how = "-f lavfi -i testsrc=s=6912x5760:r=1:d=3 -c:v mjpeg -q:v 9 -pix_fmt yuvj420p"
    subprocess.run([media.imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *how.split(), path], check=True)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(media.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    video = media.probe(path)
    shown = media.frames(video, [0, 1, 2])
    assert next(shown).shape == (5760, 6912, 3)
    status, limits = (Path(f"/proc/{started[-1].pid}/{name}").read_text() for name in ("status", "limits"))
    assert int(status.split("VmHWM:")[1].split()[0]) < 1 << 20            # KiB
    assert limits.split("Max address space")[1].split()[0] == str(media.MAX_MEMORY)
    shown.close()


@pytest.mark.parametrize("told", [[64, 48, 1e300, 0.1], [64, 48, float("nan"), 0.1], [64, 48, float("inf"), 0.1],
                                  [float("inf"), 48, 3, 0.1], [10**9, 10**9, 3, 0.1], [0, 0, 3, 0.1], [64, 48, 3, 9], [64, 48, -1, -1],
                                  ["64", 48, 3, 0.1], [64, 48]],
                         ids=str)
def test_what_others_note_of_a_film_is_believed_only_if_it_can_be(tmp_path, told):
    path = film(tmp_path / "a.mp4")
    status = path.stat()
    key = [str(path), status.st_size, status.st_mtime_ns, media.PROBE]
    for noted, expected in ((told, (64, 48, 3.0, 0.1)), ([60, 40, 2, 0.5], (60, 40, 2.0, 0.5))):
        (tmp_path / "notes").write_text(json.dumps([key, noted]) + "\n")
        assert media.Probes(tmp_path / "notes")(path) == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------------
# records


def test_links_are_followed_inside_the_folder_and_not_out_of_it(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "media"
    for folder in (outside / "deep", inside / "deep"):
        folder.mkdir(parents=True)
        CAT.save(folder / "a.png")
    links = {"in.png": "deep/a.png", "chain.png": "in.png", "by parents.png": "deep/../deep/a.png", "folder": "deep",
             "whole": inside / "deep/a.png", "out.png": outside / "deep/a.png", "chained.png": "out.png", "elsewhere": "../outside/deep",
             "up": "..", "deep/up": "../..", "root": "/"}
    for name, target in links.items():
        (inside / name).symlink_to(target)
    good = ["in.png", "chain.png", "by parents.png", "folder/a.png", "whole", "folder/../deep/a.png"]
    bad = ["out.png", "chained.png", "elsewhere/a.png", "up/outside/deep/a.png", "deep/up/outside/deep/a.png",
           "folder/up/outside/deep/a.png", f"root{outside}/deep/a.png", "up/media/../outside/deep/a.png"]
    rows = [{**kind, **CAPTION} for name in (*good, *bad) for kind in ({"image": name}, {"video": {"frames": ["in.png", name], "fps": 1}})]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Records(tmp_path / "r.jsonl", inside)
    for record in list(source)[: 2 * len(good)]:
        assert len(source.paths_of(record)) in (1, 2)
    for record in list(source)[2 * len(good) :]:
        with pytest.raises(Unreadable, match=r"^S20 .* leaves the media folder"):
            data.size(record, data.ByteTokenizer(), data.DataConfig(), 0, 0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_record_of_hundreds_of_megabytes_is_refused_unread(tmp_path, suffix):
    path = tmp_path / f"r{suffix}"
    with open(path, "wb") as file:
        first, array = json.dumps({"annotations": [{"type": "text", "text": "x"}]}).encode(), suffix == ".json"
        file.write(b"[" * array + first + b"," * array + b'\n{"annotations": "')
        for _ in range(300):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"r{suffix}:2: E01 ") as error:
        Records(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    refused(error)
    assert peak < 8 * records.LONGEST


def test_a_key_or_a_type_of_millions_of_letters_costs_no_time(tmp_path):
    for line in ({"x" * 8_000_000: 1, "annotations": [{"type": "text", "text": "x"}]}, {"annotations": [{"type": "x" * 8_000_000}]},
                 {"annotations": [{"type": "point", "label": "l", "coords": "x" * 8_000_000, "points": []}], "image": "a"}):
        began = time.monotonic()
        with pytest.raises(DataError) as error:
            data.check(line, "f:1")
        refused(error, "E07")
        assert time.monotonic() - began < 1


def test_nesting_is_limited_whoever_calls(tmp_path):
    """Python's own limit hangs on how deep the caller stands: what check lets pass could stop a run."""
    line = lambda n: '{"annotations": [{"type": "text", "text": "x"}], "meta": {"a": ' + "[" * n + "]" * n + "}}"              # noqa: E731
    assert data.parse_line(line(records.DEEPEST - 2), "f:1")
    for n in (records.DEEPEST - 1, 500, *range(900, 1000, 7), 100_000):
        with pytest.raises(DataError, match=r"^f:1: E01 nested ") as error:
            data.parse_line(line(n), "f:1")
        refused(error)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes in folders")
def test_a_pipe_in_place_of_records_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "r.jsonl")
    with pytest.raises(DataError, match=r"r.jsonl: no plain file"):
        Records(tmp_path / "r.jsonl")
    assert records.check_command([str(tmp_path / "r.jsonl")]) == 2


NUMBERS = [("weight", 1e308, "at most a million"), ("annotations.0.weight", 1e308, "at most a million"),
           ("video.fps", 1e-300, "0.0001 to 10000"), ("video.fps", 1e308, "0.0001 to 10000"),
           ("annotations.0.fps", 1e308, "0.0001 to 10000"), ("video.duration", 1e300, "at most a million")]


@pytest.mark.parametrize(("place", "value", "words"), NUMBERS)
def test_numbers_that_would_overflow_later_are_refused_at_once(place, value, words):
    """Of 1e308 a product of weights is infinite and so is the loss; a rate of 1e-300 makes a film of 1e300 seconds."""
    track = {"type": "track", "label": "l", "coords": "unit", "fps": 1, "weight": 1, "points": [{"t": 0, "id": 1, "x": 0, "y": 0}]}
    record = {"video": {"frames": ["a.png"] * 4, "fps": 1, "start": 0, "end": 4}, "weight": 1, "annotations": [track],
              "subtitles": [{"start": 0, "end": 1, "text": "x"}]}
    assert not data.check(record, "f:1")
    holder, (*above, key) = record, place.split(".")
    for part in above:
        holder = holder[int(part) if part.isdecimal() else part]
    holder[key] = value
    with pytest.raises(DataError, match=words) as error:
        data.check(record, "f:1")
    refused(error)


@pytest.mark.parametrize("name", ["a\n.png", "\x1b[31m.png", "a\x7f.png", "\x9b31m.png"])
def test_a_path_that_would_write_to_the_terminal_is_refused(name):
    with pytest.raises(DataError, match=r"E10 the path .* holds a control character") as error:
        data.check({"image": name, **CAPTION}, "f:1")
    refused(error)
    assert str(error.value).isprintable()
