"""Videos as folders of frames: training reads from them what it would decode."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data
from records.errors import Unreadable
from records.reader import Records
from tests.test_parallel import TOKENIZER, VISION
from tools import check
from tools.prepare.__main__ import main

MEDIA = Path(__file__).parents[3] / "tests" / "media"
CONFIG = data.DataConfig(max_tokens=4096, vision=VISION)
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
            found[record["id"]] = data.encode(record, TOKENIZER, config, 0, 0)
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
    prepared = Records(tmp_path / "out" / "records.jsonl")
    assert counts["skipped"] == {"damaged video": 2, "no video": 2}
    assert counts["records"] == len(prepared) == len(Records(source, MEDIA)) - 4
    theirs = encoded(Records(source, MEDIA), config)
    for name, example in encoded(prepared, config).items():
        for field in ("tokens", "weights", "pos", "pool_src", "pool_dst", "image_id"):
            assert np.array_equal(getattr(example, field), getattr(theirs[name], field)), name
        off = np.abs(example.images.astype(int) - theirs[name].images)
        assert off.max() == 0 if form == "png" else off.mean() < 3
    assert check.main([str(prepared.path), "--decode"]) == 0
    assert not list((tmp_path / "out" / "media").glob("*.part*"))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob(f"*.{form}")}
    main(["frames", *args])                              # what is there is not made again
    assert made == {path: path.stat().st_mtime_ns for path in made}
