"""A hundred damaged files: each is read, or its record is skipped with one sentence."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from records import media
from records.errors import Unreadable
from records.reader import Records
from tests.records.numbered import H264, make_video
from tests.records.samples import GOOD, POINT, QA, image, write


def intact_files(folder):
    """-> {name: bytes} of images in five formats, a video, and records."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    for suffix in ("png", "jpg", "webp", "gif", "tif"):
        Image.fromarray(pixels).save(folder / f"a.{suffix}")
    make_video(folder / "a.mp4", H264)
    write(folder / "a.jsonl", GOOD, image(POINT, QA), *[GOOD] * 3)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(content, rng):
    """Truncates the bytes, or overwrites up to twenty of them."""
    content = bytearray(content)
    if rng.random() < 0.3:
        return bytes(content[: rng.integers(len(content))])
    start = int(rng.integers(len(content)))
    noise = rng.bytes(int(rng.integers(1, 20)))
    content[start : start + len(noise)] = noise
    return bytes(content)


def test_a_hundred_damaged_files_cost_their_records_only(tmp_path):
    intact = intact_files(tmp_path)
    rng = np.random.default_rng(1)
    lost = []
    for k in range(100):
        name = sorted(intact)[k % len(intact)]
        path = tmp_path / f"{k}{Path(name).suffix}"
        path.write_bytes(damage(intact[name], rng))
        try:
            if path.suffix == ".jsonl":
                records = Records(path, stop_on_mistakes=False)
                for i in range(len(records)):
                    json.dumps(records[i]["annotations"])
            elif path.suffix == ".mp4":
                video = media.probe(path)
                assert all(frame.ndim == 3 for frame in media.frames(video, video.times))
            else:
                media.image_size(path)
                assert media.read_image(path).ndim == 3
        except Unreadable as error:
            lost.append(str(error))
    assert 20 < len(lost) < 95
    assert not [sentence for sentence in lost if "\n" in sentence]
