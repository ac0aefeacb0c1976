"""Tests that the right frames of videos are read. Every frame shows its number, see numbered.py."""

import os
import struct
import subprocess
import threading
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from records import media
from records import video as video_module
from records.media import Unreadable
from tests.records import numbered
from tests.records.numbered import FFMPEG, H264, MPEG4, ffmpeg, make_video, number, numbers

REAL = Path(__file__).parents[1] / "media" / "bigbuckbunny.mp4"


# --------------------------------------------------------------------------------------------------
# which frame


@pytest.mark.parametrize("kind", [
    f"{H264} mp4", f"{H264} mkv", f"{H264} ts", f"{H264} flv", f"{MPEG4} mov", f"{H264} avi",
    "-c:v mpeg2video -bf 2 -g 12 mpg", "-c:v libvpx-vp9 -cpu-used 8 -g 12 webm"])
def test_the_frame_on_display_is_the_last_that_appeared(tmp_path, kind):
    encoder, _, suffix = kind.rpartition(" ")
    video = media.probe(make_video(tmp_path / f"a.{suffix}", encoder, rate=25))
    assert (video.width, video.height) == (64, 48)
    assert video.times == pytest.approx(np.arange(30) / 25)
    assert video.duration == pytest.approx(30 / 25)
    times = np.linspace(-0.31, 2.02, 167)  # also before the first frame and after the last
    assert numbers(video, times) == np.floor(times * 25).clip(0, 29).tolist()
    assert 1 / 25 + 6 / 25 < 7 / 25
    assert numbers(video, [1 / 25 + 6 / 25]) == [7]
    assert numbers(video, []) == []


ENCODERS = {
    "h264": "-c:v libx264 -bf 0", "h264 with B": "-c:v libx264 -bf 3",
    "hevc": "-c:v libx265 -bf 0 -x265-params log-level=none",
    "hevc with B": "-c:v libx265 -bf 3 -x265-params log-level=none",
    "mpeg4": "-c:v mpeg4 -q:v 2 -bf 0", "mpeg4 with B": "-c:v mpeg4 -q:v 2 -bf 2",
    "mpeg2": "-c:v mpeg2video -q:v 2 -bf 0", "mpeg2 with B": "-c:v mpeg2video -q:v 2 -bf 2",
    "vp8": "-c:v libvpx -lag-in-frames 10 -b:v 500k",
    "vp9": "-c:v libvpx-vp9 -lag-in-frames 10 -b:v 500k",
    "av1": "-c:v libaom-av1 -cpu-used 8 -lag-in-frames 10 -b:v 500k",
    "vvc": "-c:v libvvenc -preset faster",
}
WRITTEN = {  # codecs that ffmpeg writes
    "avi": "h264 hevc mpeg4 mpeg2 vp8 vp9 av1 vvc", "asf": "h264 mpeg4 mpeg2 vp8 vp9 av1",
    "mp4": "h264 hevc mpeg4 mpeg2 vp9 av1 vvc", "mkv": "h264 hevc mpeg4 mpeg2 vp8 vp9 av1 vvc",
    "webm": "vp8 vp9 av1", "ts": "h264 hevc mpeg4 mpeg2 vp8 vp9 av1 vvc",
    "mpg": "h264 hevc mpeg4 mpeg2 vp8 vp9 av1 vvc",
}
NO_TIMES = "its frames have no reliable timestamps"
REFUSED = {
    "asf mpeg2": f"mpeg2video in asf: {NO_TIMES}", "mpg vvc": f"vvc in mpeg: {NO_TIMES}",
    "mpg mpeg4": f"mpeg4 in mpeg: {NO_TIMES}",
    # ffmpeg cannot read them either
    "avi hevc": "cannot read", "avi vvc": "cannot read", "ts vp8": "cannot read",
    "ts vp9": "cannot read", "ts av1": "cannot read", "mpg vp8": "cannot read",
    "mpg vp9": "cannot read", "mpg av1": "no video frames",
}


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "encoder"), [
    (suffix, encoder) for suffix, codecs in WRITTEN.items() for encoder in ENCODERS
    if encoder.split()[0] in codecs.split()])
def test_every_codec_in_every_container_is_read_right_or_refused(tmp_path, suffix, encoder):
    codec = encoder.split()[0]
    options = f"{ENCODERS[encoder]} -pix_fmt yuv420p -g 8"
    path = make_video(tmp_path / f"a.{suffix}", options, n=20)
    if reason := REFUSED.get(f"{suffix} {codec}"):
        with pytest.raises(Unreadable, match=reason):
            media.probe(path)
        return
    video = media.probe(path)
    assert video.times == pytest.approx(np.arange(20) / 10, abs=1e-3)
    assert video.duration == pytest.approx(2, abs=1e-3)
    assert numbers(video, video.times) == list(range(20))
    assert numbers(video, [0.75, 1.95]) == [7, 19]


def test_frames_with_the_same_timestamp_are_refused_and_none_is_lost(tmp_path):
    """ffmpeg guesses timestamps of MPEG-PS. In this file it gives some of them twice."""
    path = make_video(tmp_path / "a.mpg", "-c:v mpeg2video -q:v 2 -bf 4 -g 5", n=90, rate=25)
    words = r"^unknown format: .*a\.mpg is mpeg2video in mpeg: its frames have no reliable"
    with pytest.raises(Unreadable, match=words):
        media.probe(path)


def hidden_vp9(path):
    """VP9: packets with their own times contain frames that are never displayed."""
    encoder = f"-c:v libvpx-vp9 -lag-in-frames 25 -cpu-used 4 -passlogfile {path}"
    make_video("-", f"{encoder} -pass 1 -f null")
    whole, split = path.with_suffix(".whole.webm"), path.with_suffix(".split.webm")
    make_video(whole, f"{encoder} -pass 2")
    ffmpeg("-i", whole, "-fflags -autobsf -c copy -bsf:v vp9_superframe_split", split)
    earlier = "setts=pts='if(eq(PTS,NEXT_PTS),PTS-50,PTS)'"
    ffmpeg("-i", split, f"-fflags -autobsf -c copy -bsf:v {earlier}", path)
    return range(30)


def comment_in_gif(path):
    """GIF: a comment after the last frame is a separate packet."""
    first, *others = [Image.fromarray(numbered.numbered_frame(n)) for n in range(30)]
    first.save(path, save_all=True, append_images=others, duration=100)
    path.write_bytes(path.read_bytes()[:-1] + b"\x21\xfe\x05hello\0;")
    return range(30)


def empty_theora(path):
    """Theora: an empty packet means the same frame again."""
    frames = b"".join(numbered.numbered_frame(n // 3).tobytes() for n in range(30))
    ffmpeg("-f rawvideo -pix_fmt gray -s 64x48 -r 10 -i - -c:v libtheora -q:v 7", path,
           stdin=frames)
    return [n // 3 for n in range(30)]


def not_coded_mpeg4(path):
    """MPEG-4: a frame marked as "not coded" means the same frame again."""
    content = make_video(path, "-c:v mpeg4 -q:v 2 -g 1").read_bytes()
    pictures = content.split(b"\0\0\1\xb6")
    for picture in range(4, 31, 5):
        bits = pictures[picture]
        pictures[picture] = bits[:1] + bytes([bits[1] & ~0x40]) + bits[2:]
    path.write_bytes(b"\0\0\1\xb6".join(pictures))
    ffmpeg("-i", path, "-c copy", path.with_suffix(".mkv"))
    return [n - (n % 5 == 3) for n in range(30)]


@pytest.mark.parametrize(("name", "make"), [
    ("a.webm", hidden_vp9), ("a.gif", comment_in_gif), ("a.ogv", empty_theora),
    ("a.avi", not_coded_mpeg4), ("a.mkv", not_coded_mpeg4)])
def test_where_a_packet_shows_no_picture_the_one_before_stays(tmp_path, name, make):
    made = name.replace("mkv", "avi")
    expected = list(make(tmp_path / made))
    video = media.probe(tmp_path / name)
    assert numbers(video, np.arange(30) / 10) == expected
    assert len(video.times) == len(set(expected))


@pytest.mark.parametrize(("container", "pts", "expected"), [
    ("matroska", [0, 2, 1], True), ("avi", [0, 1, 2], False),
    ("matroska", [-10**12, 1 - 10**12, 2 - 10**12], False),          # no timestamps
    ("mov", [2, 0, 1], False)])                                      # frames before the first one
def test_timestamps_are_trusted_only_where_the_file_stores_them(container, pts, expected):
    entries = [(t, 1, 1) for t in pts]
    listing = video_module.Listing(container, "h264", Fraction(1), (64, 48), entries)
    assert listing.has_index() == expected


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_of_unequal_length_appear_to_the_millisecond(tmp_path, suffix):
    uneven = ("-vf settb=1/1000,setpts=N*40+N*N -fps_mode passthrough -enc_time_base 1:1000 "
              + H264)
    video = media.probe(make_video(tmp_path / f"a.{suffix}", uneven))
    begin = [(40 * n + n * n) / 1000 for n in range(30)]
    assert video.times.tolist() == begin         # exactly the same floats
    assert numbers(video, video.times) == list(range(30))
    assert numbers(video, np.array(begin[1:]) - 0.0005) == list(range(29))
    assert numbers(video, [(a + b) / 2 for a, b in pairwise(begin)]) == list(range(29))


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_time_starts_at_the_first_frame(tmp_path, suffix):
    path = make_video(tmp_path / "a.mp4")
    ffmpeg("-i", path, "-c copy -output_ts_offset 5", tmp_path / f"b.{suffix}")
    video = media.probe(tmp_path / f"b.{suffix}")
    assert video.pts[0] * video.time_base >= 5   # its timestamp in the file
    assert video.times == pytest.approx(np.arange(30) / 10)
    assert video.duration == pytest.approx(3)
    assert numbers(video, [0, 0.1, 1.55, 3]) == [0, 1, 15, 29]


def test_an_edit_list_hides_frames(tmp_path):
    path = make_video(tmp_path / "a.mp4")
    # the stream still starts at the key frame 12
    ffmpeg("-ss 1.7 -i", path, "-c copy", tmp_path / "b.mp4")
    video = media.probe(tmp_path / "b.mp4")
    assert numbers(video, video.times) == list(range(17, 30))
    assert video.duration == pytest.approx(1.3)


def test_frames_that_need_what_was_cut_off_do_not_count(tmp_path):
    # An open group of pictures stores frames after its key frame that are displayed before it.
    open_gop = H264.replace("-x264-params ", "-x264-params open-gop=1:scenecut=0:")
    content = make_video(tmp_path / "a.ts", open_gop).read_bytes()
    whole = media.probe(tmp_path / "a.ts")
    for part in (2, 3):
        cut = len(content) * part // 10 // 188 * 188             # a packet has 188 bytes
        (tmp_path / "b.ts").write_bytes(content[cut:])
        video = media.probe(tmp_path / "b.ts")
        missing = len(whole.times) - len(video.times)
        assert missing > 0
        assert numbers(video, video.times) == list(range(missing, 30))


def test_timestamps_in_disorder_do_not_cost_the_file(tmp_path):
    path = make_video(tmp_path / "a.mkv", "-c:v mjpeg")
    disorder = "-c copy -bsf:v setts=pts='if(eq(N,5),350,PTS)':dts=N"
    ffmpeg("-i", path, disorder, tmp_path / "b.mkv")
    video = media.probe(tmp_path / "b.mkv")
    assert video.times.tolist() == [0, 0.1, 0.2, 0.3, 0.35, 0.4, *(n / 10 for n in range(6, 30))]
    assert numbers(video, [0.3, 0.36, 0.61]) == [3, 5, 6]
    # in the file, frame 4 is before frame 5, so it cannot be read after frame 5
    with pytest.raises(Unreadable, match=r"no frame of 64 x 48 pixels at 0\.400 s"):
        numbers(video, [0.36, 0.4])


def test_the_packets_count_not_the_header(tmp_path):
    path = make_video(tmp_path / "a.mkv")
    content = path.read_bytes()
    at = content.find(b"\x44\x89\x88") + 3       # the duration in Matroska: a double, in ms
    path.write_bytes(content[:at] + struct.pack(">d", 400.0) + content[at + 8 :])
    printed = subprocess.run([FFMPEG, "-i", path], capture_output=True).stderr
    assert b"Duration: 00:00:00.40" in printed
    video = media.probe(path)
    assert video.duration == pytest.approx(3)
    assert numbers(video, [0, 1.5, 2.9]) == [0, 15, 29]


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_turned_video_is_turned_back(tmp_path, degrees):
    path = make_video(tmp_path / "a.mp4")
    ffmpeg(f"-display_rotation {degrees} -i", path, "-c copy", tmp_path / "b.mp4")
    video = media.probe(tmp_path / "b.mp4")
    assert (video.width, video.height) == ((64, 48) if degrees == 180 else (48, 64))
    shown = list(media.frames(video, video.times))
    assert {frame.shape for frame in shown} == {(video.height, video.width, 3)}
    turned_back = [np.rot90(frame, -degrees // 90) for frame in shown]  # both turn counterclockwise
    assert [number(frame) for frame in turned_back] == list(range(30))


def test_the_title_of_a_video_decides_nothing(tmp_path):
    path = make_video(tmp_path / "a.mp4")
    title = "displaymatrix: rotation of 90 degrees\nFile ended prematurely"
    subprocess.run([FFMPEG, "-v", "error", "-i", path, "-c", "copy", "-metadata", f"title={title}",
                    tmp_path / "b.mp4"], check=True)
    assert media.probe(tmp_path / "b.mp4").width == 64


def test_real_frames_are_those_that_ffmpeg_decodes_in_turn():
    video = media.probe(REAL)
    assert (video.width, video.height, len(video.times)) == (1280, 720, 132)
    wanted = [0, 1, 12, 13, 25, 66, 131]
    ours = dict(zip(wanted, media.frames(video, np.array(wanted) / 25), strict=True))
    command = [FFMPEG, "-v", "error", "-i", REAL, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        for n in range(132):
            decoded = child.stdout.read(1280 * 720 * 3)
            assert n not in ours or ours[n].tobytes() == decoded
        assert child.stdout.read() == b""


# --------------------------------------------------------------------------------------------------
# clips


@pytest.mark.parametrize("kind", [
    "mp4 keyint=50", "mkv keyint=50 -output_ts_offset 100", "ts keyint=300",
    "mp4 keyint=50:open-gop=1", "mp4 keyint=50:intra-refresh=1"])
def test_a_clip_has_the_frames_of_the_whole(tmp_path, kind):
    suffix, _, params = kind.partition(" ")
    path = tmp_path / f"a.{suffix}"
    source = "-f lavfi -i testsrc2=s=64x48:r=10:d=40"
    ffmpeg(source, H264.replace("keyint=12", params), path)
    video = media.probe(path)
    whole = [frame.copy() for frame in media.frames(video, video.times)]
    for first in (101, 149, 150, 222, 303, 395):
        clip = list(media.frames(video, video.times[first : first + 5]))
        expected = whole[first : first + 5]
        assert all((a == b).all() for a, b in zip(clip, expected, strict=True))


# --------------------------------------------------------------------------------------------------
# damaged files, and the ffmpeg process


@pytest.fixture
def children(monkeypatch):
    """Collects the processes that a test starts. All of them must have ended at its end."""
    started = []
    popen = subprocess.Popen

    def recorded(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(video_module.subprocess, "Popen", recorded)
    yield started
    assert started
    for child in started:
        assert child.returncode is not None      # the process has been waited for


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_file_that_was_cut_off_is_unreadable(tmp_path, suffix):
    encoder = H264 + " -movflags +faststart" * (suffix == "mp4")
    path = make_video(tmp_path / f"a.{suffix}", encoder, n=100)
    content = path.read_bytes()
    video = media.probe(path)
    path.write_bytes(content[: int(len(content) * 0.6)])
    with pytest.raises(Unreadable, match=f"^damaged video: .*a.{suffix}: ffmpeg cannot read"):
        media.probe(path)
    seen = []
    with pytest.raises(Unreadable, match=f"^damaged video: .*a.{suffix}: ffmpeg gives no frame of"):
        seen.extend(number(frame) for frame in media.frames(video, video.times))
    assert seen == list(range(len(seen)))


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
        with pytest.raises(Unreadable, match=r"gives no frame of 64 x 48 pixels at \d\.\d00 s"):
            seen.extend(number(frame) for frame in media.frames(video, video.times))
        assert seen == list(range(len(seen)))
        lengths.add(len(seen))
    assert len(lengths) > 3                      # all frames before the damage are read


def test_what_is_no_video_is_unreadable_and_no_other_file_is_read(tmp_path):
    make_video(tmp_path / "other.ts")
    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:3,\nother.ts\n#EXT-X-ENDLIST\n"
    path = tmp_path / "a.mp4"
    list_of_files = b"ffconcat version 1.0\nfile other.ts"
    for content in (b"", b"hello", playlist.encode(), list_of_files):
        path.write_bytes(content)
        with pytest.raises(Unreadable, match=r"^damaged video: .*a.mp4: ffmpeg cannot read"):
            media.probe(path)
    for path in (tmp_path / "gone.mp4", tmp_path, "http://127.0.0.1/a.mp4"):
        with pytest.raises(Unreadable, match=r"^missing file: "):
            media.probe(path)


@pytest.mark.parametrize("listing", [b"", b"#tb 0: x\n#dimensions 0: 64x48\n0, 0, 0, 1, 5, 0x1\n",
                                     b"#tb 0: 1/9\n0, 0, 0, 1, 5, 0x1, F=0xz\n"])
def test_what_ffmpeg_prints_costs_the_video_and_not_the_run(tmp_path, monkeypatch, listing):
    path = make_video(tmp_path / "a.mp4")
    done = subprocess.CompletedProcess([], 0, listing, b"")
    monkeypatch.setattr(video_module.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(Unreadable, match=r"^damaged video: .*a.mp4: ffmpeg finds no video frames"):
        media.probe(path)


@pytest.mark.skipif(os.name != "posix", reason="needs a script in ffmpeg's place")
def test_a_decoder_that_hangs_is_killed_at_the_deadline(tmp_path, monkeypatch, children):
    video = media.probe(make_video(tmp_path / "a.mp4"))
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\nexec sleep 600\n")
    stub.chmod(0o755)
    monkeypatch.setattr(video_module.imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(stub))
    monkeypatch.setattr(video_module, "DEADLINE_S", 0.2)
    with pytest.raises(Unreadable, match=r"a.mp4: ffmpeg did not finish within 0.2 s"):
        media.probe(video.path)
    with pytest.raises(Unreadable, match=r"a.mp4: ffmpeg gives no frame"):
        list(media.frames(video, [0]))


def test_an_abandoned_clip_leaves_no_child(tmp_path, children):
    video = media.probe(make_video(tmp_path / "a.mp4", n=600))
    clip = media.frames(video, video.times)
    assert number(next(clip)) == 0
    assert children[-1].poll() is None           # still running: the pipe is full
    # Python would wait for the others at its end, if an exception kept the clip
    assert {t.daemon for t in threading.enumerate() if isinstance(t, threading.Timer)} == {True}
    del clip                         # the fixture checks that the process ends
