"""Videos that are broken, absurd or hostile, and the ffmpeg process that reads them."""


import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from records import media
from records import video as video_module
from records.media import Unreadable
from tests.records.numbered import H264, MPEG4, ffmpeg, make_video, number, numbers

REAL = Path(__file__).parents[1] / "media" / "bigbuckbunny.mp4"


@pytest.fixture
def children(monkeypatch):
    """Every process that a test starts; all must be gone at its end."""
    started = []
    popen = subprocess.Popen

    def recorded(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(video_module.subprocess, "Popen", recorded)
    yield started
    assert started
    for child in started:
        assert child.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


# --------------------------------------------------------------------------------------------------
# broken, absurd and hostile files


@pytest.mark.parametrize("kept", [0.35, 0.6, 0.9])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_file_that_was_cut_off_is_unreadable(tmp_path, suffix, kept):
    encoder = H264 + " -movflags +faststart" * (suffix == "mp4")
    path = make_video(tmp_path / f"a.{suffix}", encoder, n=100)
    content = path.read_bytes()
    video = media.probe(path)
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(Unreadable, match=f"S23 .*a.{suffix} cannot be read as a video .ffmpeg: "):
        media.probe(path)
    seen = []
    with pytest.raises(Unreadable, match=f"S23 .*a.{suffix} gives no frame of 64 x 48 pixels at "):
        seen.extend(number(frame) for frame in media.frames(video, video.times))
    assert seen == list(range(len(seen)))


@pytest.mark.parametrize("kind", [
    f"{H264} ts", f"{H264} flv", f"{MPEG4} avi", "-c:v mpeg2video -bf 2 -g 12 -r 25 mpg"])
def test_a_stream_that_was_cut_off_is_shorter_or_unreadable(tmp_path, kind):
    # These containers have no end that could be missing: what is left is a video.
    encoder, _, suffix = kind.rpartition(" ")
    path = make_video(tmp_path / f"a.{suffix}", encoder, n=100, rate=25)
    content = path.read_bytes()
    for kept in (0.5, 0.62, 0.77, 0.93):
        path.write_bytes(content[: int(len(content) * kept)])
        seen = []
        expected = []
        with suppress(Unreadable):
            video = media.probe(path)
            # a B-frame may be missing where a frame displayed after it came first in the file
            expected = (video.times * 25).round().tolist()
            seen.extend(number(frame) for frame in media.frames(video, video.times))
        assert seen == expected[: len(seen)]


def test_no_other_frame_comes_out_of_a_damaged_file(tmp_path):
    path = make_video(tmp_path / "a.mp4", n=100)
    video = media.probe(path)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    first = content.find(b"mdat") + 900
    last = content.find(b"moov") - 200
    lengths = set()
    for at in np.linspace(first, last, 6).astype(int):
        path.write_bytes(content[:at] + rng.bytes(150) + content[at + 150 :])
        seen = []
        message = r"S23 .*a.mp4 gives no frame of 64 x 48 pixels at \d\.\d00 s"
        with pytest.raises(Unreadable, match=message):
            seen.extend(number(frame) for frame in media.frames(video, video.times))
        assert seen == list(range(len(seen)))
        lengths.add(len(seen))
    assert len(lengths) > 3                      # all that stands before the damage is there


def test_a_video_that_changes_its_size_breaks_off(tmp_path):
    path = make_video(tmp_path / "a.ts")
    ffmpeg("-i", path, "-vf scale=48:64 -output_ts_offset 3", H264, tmp_path / "b.ts")
    (tmp_path / "list").write_text("file a.ts\nfile b.ts\n")
    ffmpeg("-f concat -i", tmp_path / "list", "-c copy", tmp_path / "c.ts")
    video = media.probe(tmp_path / "c.ts")
    assert len(video.times) == 60
    seen = []
    with pytest.raises(Unreadable, match=r"no frame of 64 x 48 pixels at 3\.000 s"):
        seen.extend(number(frame) for frame in media.frames(video, video.times))
    assert seen == list(range(30))
    with pytest.raises(Unreadable, match=r"no frame of 64 x 48 pixels at 4\.000 s"):
        numbers(video, [4])


@pytest.mark.parametrize("name", ["a.m3u8", "a.mp4", "a.ts"])
@pytest.mark.parametrize("kind", ["hls", "concat", "http"])
def test_no_file_makes_us_read_another(tmp_path, name, kind):
    make_video(tmp_path / "other.ts")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        other = f"{address}other.ts" if kind == "http" else "other.ts"
        text = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:3,\n{other}\n#EXT-X-ENDLIST\n"
        if kind == "concat":
            text = "ffconcat version 1.0\nfile other.ts\n"
        (tmp_path / name).write_text(text)
        if kind != "http":           # without our limits, ffmpeg would follow
            loose = "-f hls -extension_picky 0 -allowed_extensions ALL"
            if kind == "concat":
                loose = "-f concat"
            packets = ffmpeg(loose, "-i", tmp_path / name, "-c copy -f framecrc -")
            assert packets.count(b"\n") > 30
        with pytest.raises(Unreadable, match=f"S23 .*{name} cannot be read"):
            media.probe(tmp_path / name)
        with pytest.raises(BlockingIOError):     # nobody has called
            server.accept()


@pytest.mark.parametrize("path", [
    "nothing.mp4", ".", "http://127.0.0.1/a.mp4", "file:a.mp4", "concat:a.mp4", "-i", "pipe:0"])
def test_what_is_no_file_is_missing(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "a.mp4")
    with pytest.raises(Unreadable, match=r"^S20 there is no file "):
        media.probe(path)


def test_any_name_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "a.mp4")
    for name in ("-i", "concat:a b%03d.mp4", "pipe:0", "a'b\\|.mkv", "[*].mp4"):
        Path("a.mp4").rename(name)
        assert numbers(media.probe(name), [1.2]) == [12]
        Path(name).rename("a.mp4")


def test_a_file_without_frames_is_unreadable(tmp_path):
    path = tmp_path / "a.mp4"
    cover = REAL.parent / "coins.png"
    attach = "-map 0 -map 1 -c:v copy -disposition:v attached_pic"
    ffmpeg("-f lavfi -i sine=d=1 -i", cover, attach, path)
    song = path.read_bytes()                     # its cover image is not a video
    noise = np.random.default_rng(0).bytes(5000)
    for content in (b"", b"hello", song, cover.read_bytes(), noise):
        path.write_bytes(content)
        with pytest.raises(Unreadable, match=r"S23 .*a.mp4 cannot be read as a video"):
            media.probe(path)


def test_absurd_sizes_are_refused(tmp_path, monkeypatch):
    ffmpeg("-f lavfi -i testsrc2=s=2x512:d=0.2", MPEG4, tmp_path / "a.mp4")
    with pytest.raises(Unreadable, match=r"^S22 .* is 2 x 512 pixels"):
        media.probe(tmp_path / "a.mp4")
    path = make_video(tmp_path / "b.mp4")
    video = media.probe(path)
    monkeypatch.setattr(video_module, "MAX_FRAME_PIXELS", 64 * 48 - 1)
    with pytest.raises(Unreadable, match=r"^S22 .* is 64 x 48 pixels"):
        media.probe(path)
    with pytest.raises(Unreadable, match=r"^S23 .* gives no frame"):
        numbers(video, [0])
    monkeypatch.setattr(video_module, "MAX_FRAME_PIXELS", 64 * 48)
    monkeypatch.setattr(video_module, "MAX_PACKETS", 30)
    assert numbers(media.probe(path), [2.9]) == [29]
    monkeypatch.setattr(video_module, "MAX_PACKETS", 29)
    with pytest.raises(Unreadable, match=r"^S22 .* has more than 29 frames"):
        media.probe(path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no limit on memory")
def test_ffmpeg_gets_no_more_memory_than_allowed(tmp_path, monkeypatch):
    path = make_video(tmp_path / "a.mp4")
    video = media.probe(path)
    monkeypatch.setattr(video_module, "MAX_MEMORY_BYTES", 100 << 20)
    with pytest.raises(Unreadable, match="S23"):
        media.probe(path)
    with pytest.raises(Unreadable, match="S23"):
        numbers(video, [0])


# --------------------------------------------------------------------------------------------------
# the process


@pytest.mark.skipif(os.name != "posix", reason="needs a script in ffmpeg's place")
def test_a_decoder_that_hangs_is_killed_at_the_deadline(tmp_path, monkeypatch, children):
    video = media.probe(make_video(tmp_path / "a.mp4"))
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\nexec sleep 60\n")
    stub.chmod(0o755)
    monkeypatch.setattr(video_module.imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(stub))
    monkeypatch.setattr(video_module, "DEADLINE_S", 0.2)
    began = time.monotonic()
    with pytest.raises(Unreadable, match=r"S23 ffmpeg takes too long for .*a.mp4"):
        media.probe(video.path)
    with pytest.raises(Unreadable, match=r"S23 ffmpeg takes too long for .*a.mp4"):
        list(media.frames(video, [0]))
    assert 0.4 <= time.monotonic() - began < 5


def test_the_deadline_is_not_for_the_caller(tmp_path, monkeypatch):
    video = media.probe(make_video(tmp_path / "a.mp4"))
    left = []
    timer = threading.Timer

    def recorded(seconds, kill):
        left.append(seconds)
        return timer(seconds, kill)

    monkeypatch.setattr(video_module.threading, "Timer", recorded)
    monkeypatch.setattr(video_module, "DEADLINE_S", 100)
    for _ in media.frames(video, [0, 1, 2]):
        time.sleep(0.4)
    assert 100 == left[0] > left[1] > left[2] > 99.4


def test_an_abandoned_clip_leaves_no_child(tmp_path, children):
    video = media.probe(make_video(tmp_path / "a.mp4", n=600))
    clip = media.frames(video, video.times)
    assert number(next(clip)) == 0
    assert children[-1].poll() is None           # far from done: a pipe holds few of its frames
    clip.close()
    assert children[-1].returncode is not None
    clip = media.frames(video, video.times)
    next(clip)
    assert children[-1].returncode is None
    del clip                         # the fixture looks for what is left
