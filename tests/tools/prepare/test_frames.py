"""Videos as folders of frames: training reads the same frames that it would decode."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

import data
import vision
from evaluation import pictures
from evaluation.prompts import resized
from records.errors import Unreadable
from records.reader import Records
from records.visual import read_headers
from tests.test_parallel import TOKENIZER, VISION
from tests.training.processes import ROOT, all_end, runs_until, workers_of
from tools import check
from tools.prepare import frames
from tools.prepare.__main__ import main

MEDIA = Path(__file__).parents[3] / "tests/media"
CONFIG = data.DataConfig(max_tokens=4096)
POINTS = [{"t": 2.5, "id": 1, "x": 256, "y": 72}, {"t": 4.0, "id": 1, "x": 640, "y": 432}]
CLIP = {
    "id": "clip", "video": {"path": "bigbuckbunny.mp4", "start": 2.0, "end": 5.0},
    "subtitles": [{"start": 0, "end": 1, "text": "a"}, {"start": 1.5, "end": 3, "text": "b"}],
    "annotations": [
        {"type": "caption", "text": "It moves.", "start": 3.0, "end": 4.5},
        {"type": "point", "label": "it", "coords": "unit",
         "points": [{"t": 4.0, "x": 0.5, "y": 0.6}]}]}
CHOICE = {
    "video": "bigbuckbunny.mp4",
    "annotations": [{"type": "qa", "question": "Who?", "options": list("abcdefgh"),
                     "answer_idx": 3, "shuffle_options": True}]}
BOX = {"id": "box", "video": "bigbuckbunny.mp4",
       "annotations": [{"type": "box", "label": "it", "coords": "pixel", "size": [1280, 720],
                        "form": "xyxy", "boxes": [{"t": 2.0, "box": [10, 20, 300, 400]}]}]}
TRACK = {
    "id": "track", "video": "bigbuckbunny.mp4",
    "annotations": [{"type": "track", "label": "it", "coords": "pixel", "size": [1280, 720],
                     "fps": 5, "mode": "from_point", "points": POINTS, "query": POINTS[0]}]}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "cut.mp4").write_bytes((MEDIA / "bigbuckbunny.mp4").read_bytes()[:3000])
    damaged = {"video": str(tmp_path / "cut.mp4"), "annotations": CLIP["annotations"]}
    films = (MEDIA / "films.jsonl").read_text().splitlines()
    image = {"image": "coins.png", "annotations": [{"type": "caption", "text": "Coins."}]}
    records = [*map(json.loads, films), CLIP, TRACK, BOX, damaged, damaged, image, CHOICE]
    for record in records:
        for k, annotation in enumerate(record["annotations"]):
            record["annotations"][k] = annotation | {"weight": 1}
    path = tmp_path / "films.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def encoded(source, config):
    found = {}
    for i in range(len(source)):
        with suppress(Unreadable):
            record = source[i]
            found[record["id"]] = data.encode(record, TOKENIZER, config, VISION, 0, 0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("max_frames", "form"), [(6, "png"), (500, "png"), (6, "jpg")])
def test_training_reads_from_frames_what_it_would_decode(source, tmp_path, capsys, max_frames,
                                                         form):
    config = replace(CONFIG, max_frames=max_frames)
    args = [str(source), str(tmp_path / "out"), "--media", str(MEDIA), "--format", form,
            "--max-frames", str(max_frames), "--size", str(VISION.crop), "--workers", "2"]
    main(["frames", *args])
    counts = json.loads(capsys.readouterr().out)
    prepared = Records(tmp_path / "out/records.jsonl")
    assert counts["skipped"] == {"damaged video": 2, "no video": 2}
    assert counts["records"] == len(prepared) == len(Records(source, MEDIA)) - 4
    theirs = encoded(Records(source, MEDIA), config)
    for name, example in encoded(prepared, config).items():
        for field in ("tokens", "weights", "pos", "pool_src", "pool_dst", "image_id"):
            assert np.array_equal(getattr(example, field), getattr(theirs[name], field)), name
        off = np.abs(example.images.astype(int) - theirs[name].images)
        assert off.max() == 0 if form == "png" else off.mean() < 3
    assert check.main([str(prepared.path), "--decode"]) == 0
    assert not list((tmp_path / "out/media").glob("*.part*"))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob(f"*.{form}")}
    main(["frames", *args])                              # existing files are not made again
    assert made == {path: path.stat().st_mtime_ns for path in made}


def painted(folder, colour):
    """-> a file with one record, whose video is two frames in this colour."""
    folder.mkdir(exist_ok=True)
    for k in range(2):
        Image.new("RGB", (30, 20), colour).save(folder / f"{k}.bmp")
        os.utime(folder / f"{k}.bmp", (1, 1))
    video = {"frames": ["0.bmp", "1.bmp"], "fps": 1}
    (folder / "r.jsonl").write_text(json.dumps(CHOICE | {"video": video}))
    return folder / "r.jsonl"


def prepared(path, out):
    """-> the video of the first record after tools.prepare frames."""
    args = Namespace(out=out, size=8, format="png")
    line, skipped, _ = frames.prepare(Records(path), CONFIG, args, 0)
    assert not skipped
    return json.loads(line)["video"]


def colour_of(video, out):
    return Image.open(out / "media" / video["frames"][-1]).getpixel((4, 4))


def test_frames_of_a_video_that_has_changed_are_made_again(tmp_path):
    out = tmp_path / "out"
    path = painted(tmp_path / "a", "red")
    assert colour_of(prepared(path, out), out) == (255, 0, 0)
    painted(tmp_path / "a", "blue")
    os.utime(tmp_path / "a/1.bmp", (2, 2))
    assert colour_of(prepared(path, out), out) == (0, 0, 255)


def test_the_same_relative_path_in_another_folder_is_another_video(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for name, colour in (("a", (255, 0, 0)), ("b", (0, 0, 255))):
        painted(tmp_path / name, colour)
        monkeypatch.chdir(tmp_path / name)
        assert colour_of(prepared("r.jsonl", out), out) == colour
    sizes = {(tmp_path / name / "0.bmp").stat().st_size for name in "ab"}
    assert len(sizes) == 1                               # only the path is different


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "00001.png").unlink(),
    lambda folder: (folder / "00001.png").write_bytes(b""),
    lambda folder: (folder / "Thumbs.db").write_text("x"),
])
def test_a_folder_that_is_not_complete_is_made_again(tmp_path, damage):
    path = painted(tmp_path / "a", "red")
    video = prepared(path, tmp_path)
    folder = (tmp_path / "media" / video["frames"][0]).parent
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == len(video["frames"])
    damage(folder)
    assert prepared(path, tmp_path) == video
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_film_that_lasts_no_time_is_one_frame(tmp_path, monkeypatch):
    path = painted(tmp_path / "a", "red")
    with monkeypatch.context() as patch:
        patch.setattr(Records, "video_size", lambda *_: (30, 20, 0.0, 0.0))
        video = prepared(path, tmp_path)
    (tmp_path / "new.jsonl").write_text(json.dumps(CHOICE | {"video": video}))
    record = Records(tmp_path / "new.jsonl", tmp_path / "media")[0]
    assert read_headers(record, CONFIG).times == [0.0]


def test_the_command_writes_only_what_it_has_made(tmp_path, monkeypatch, capsys):
    """Also when it is run again. It only deletes drafts of a killed command. A record keeps the
    number of its line."""
    monkeypatch.setattr(frames, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))
    path = painted(tmp_path / "a", "red")
    image = json.dumps({"image": "a.png", "annotations": CHOICE["annotations"]})
    path.write_text("\n".join(["", image, path.read_text(), "", path.read_text()]))
    command = ["frames", str(path), str(tmp_path / "out"), "--size", "8", "--max-frames", "9"]
    main(command)
    first = (tmp_path / "out/records.jsonl").read_bytes()
    lines = first.splitlines()
    assert list(map(bool, lines)) == [False, False, True, False, True]  # as in the input
    video = json.loads(lines[2])["video"]
    files = [tmp_path / "out/media" / name for name in video.pop("frames")]
    assert video == {"width": 30, "height": 20, "fps": 2, "first": 0, "duration": 2,
                     "made_for": {"fps": 2.0, "max_frames": 9}}
    assert json.loads(capsys.readouterr().out) == {
        "records": 2, "bytes": sum(file.stat().st_size for file in files),
        "skipped": {"no video": 1}}
    with Image.open(files[1]) as frame:
        frame.save(tmp_path / "95.jpg", quality=95)
        assert frame.quantization == Image.open(tmp_path / "95.jpg").quantization
        assert JpegImagePlugin.get_sampling(frame) == 0
    media = tmp_path / "out/media"
    for name in ("lecture.part1", "0123456789abcdef01234567.part77"):
        (media / name).mkdir()
    main(command)
    assert (tmp_path / "out/records.jsonl").read_bytes() == first
    assert [path.name for path in media.glob("*.part*")] == ["lecture.part1"]
    for records, out in ((path, path.parent), (tmp_path / "out/records.jsonl", command[2])):
        before = records.read_bytes()
        with pytest.raises(SystemExit, match="2"):
            main(["frames", str(records), str(out), "--media", str(path.parent)])
        assert "lies in this folder" in capsys.readouterr().err
        assert records.read_bytes() == before


@pytest.mark.parametrize("read", [
    lambda decode, folder: resized(decode(), 8),
    lambda decode, folder: frames.save(decode(), folder / "a", 8, "png"),
    lambda decode, folder: pictures.draw_frames(lambda _: decode(), [0], [], [], False),
])
def test_a_full_disk_ends_the_decoder_even_if_its_error_is_kept(tmp_path, monkeypatch, read):
    ended = []

    def decode():
        try:
            yield np.zeros((8, 8, 3), np.uint8)
        finally:
            ended.append(True)

    def full(*args):
        next(args[0])                                    # of pictures.image_grid
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vision, "resize", lambda *_: full(iter([0])))
    monkeypatch.setattr(pictures, "image_grid", full)
    with pytest.raises(OSError, match="No space left") as kept:
        read(decode, tmp_path)
    assert kept and ended and not list(tmp_path.iterdir())


class Broken(ThreadPoolExecutor):
    def map(self, *_, **options):
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")


def test_a_killed_worker_ends_the_command_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frames, "ProcessPoolExecutor", lambda n, *_: Broken(n))
    with pytest.raises(SystemExit, match="1"):
        main(["frames", str(painted(tmp_path / "a", "red")), str(tmp_path / "out")])
    assert "a process of --workers has ended; if the machine lacks" in capsys.readouterr().err
    assert not (tmp_path / "out/records.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_workers_end_with_a_command_that_is_killed(tmp_path, sent, status):
    """They do not finish the records that they have received, because this can take minutes."""
    clips = [{"path": "bigbuckbunny.mp4", "start": 0, "end": 5 - k / 10} for k in range(8)]
    (tmp_path / "r.jsonl").write_text(
        "".join(json.dumps(CHOICE | {"video": clip}) + "\n" for clip in clips))
    command = [sys.executable, "-m", "tools.prepare", "frames", str(tmp_path / "r.jsonl"),
               str(tmp_path / "out"), "--media", str(MEDIA), "--fps", "50", "--workers", "2"]
    process = subprocess.Popen(command, cwd=ROOT)
    assert runs_until(process, lambda: list((tmp_path / "out").glob("media/*.part*")))
    workers = workers_of(process.pid)
    process.send_signal(sent)
    assert process.wait() == status
    assert len(workers) >= 2 and all_end(workers)
    done = [path for path in (tmp_path / "out/media").iterdir() if not path.suffix]
    assert len(done) < len(clips)
