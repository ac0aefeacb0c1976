"""Tests that records become the same arrays as when tests/conformance/encoded.json was written.

    python -m pytest tests/test_encoded.py       # compares
    python -m tests.test_encoded --write         # writes the file again: changes the reference

For every record and stage, the file contains one hash per epoch of everything that `data.encode`
returns except the pixels. For the pixels it contains the shape and the mean, because ffmpeg and
torch's interpolation round some pixels differently on other processors. The random choices of an
example depend on the id of its record and on its line in the file.
"""

import hashlib
import json
import sys
import tempfile
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

import data
import model
import parallel
from records.errors import Unreadable
from records.reader import Records
from text.tokenizer import ByteTokenizer
from tools.convert import __main__ as converter
from toy import world

TESTS = Path(__file__).parent
REFERENCE = TESTS / "conformance/encoded.json"
FILES = ("media/records.jsonl", "media/films.jsonl")
# {file: lines of its rows}. The converter reads these files now. The reference was written when
# training still read them, and the random choices of a record depend on its key "id:line". In a
# .json file with an array, the line is where the row starts.
CHATS = {"conformance/chats.jsonl": range(1, 33), "conformance/sharegpt.json": (2, 24, 38, 55)}
COMMON = {"max_tokens": 2048, "max_crops": 4, "max_frames": 6}
CONFIGS = {
    "stage 1": data.DataConfig(**COMMON),
    "stage 2": data.DataConfig(**COMMON, prefix_all=False, separator=";", sqrt_length=True,
                               sqrt_branches=True, point_weight=0.2, video_caption_weight=0.1),
}
N_EPOCHS = 5
TOKENIZER = ByteTokenizer(world.WORDS)
OLD_NAMES = {"unreadable": "mask_reason"}            # names of fields when the file was written
# the shard of a rank without crops
NO_CROPS = parallel.CropShard(cp_rank=1, cp_size=2, before=0, total=10**9)


def encoded(record, config):
    """-> {"epochs": [hash, ..], "pixels": [shape, mean]}, or "cannot be used"."""
    found = {"epochs": []}
    for epoch in range(N_EPOCHS):
        try:
            shard = NO_CROPS if epoch else None      # the pixels are the same in every epoch
            example = data.encode(record, TOKENIZER, config, model.TOY_VISION, 0, epoch, shard)
        except Unreadable:
            return "cannot be used"
        digest = hashlib.sha256()
        for field in fields(example):
            value = getattr(example, field.name)
            if field.name == "images":
                if value is not None and not epoch:
                    found["pixels"] = [list(value.shape), round(float(value.mean()), 1)]
            elif field.name not in ("source", "annotation"):  # annotation was added later
                array = value if isinstance(value, np.ndarray) else np.array(str(value))
                name = OLD_NAMES.get(field.name, field.name)
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(array.tobytes())
        found["epochs"].append(digest.hexdigest()[:16])
    return found


@lru_cache
def records_by_name():
    """{name: record, or None if it cannot be used} of the files and the held-out toy world."""
    records = {}
    for name in FILES:
        source = Records(TESTS / name, TESTS / "media")
        for i in range(len(source)):
            try:
                record = source[i]
            except Unreadable:
                record = None
            records[source.where(i).removeprefix(f"{TESTS}/")] = record
    for name, lines in CHATS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "chats.jsonl")
            converter.main([str(TESTS / name), str(out), "--media", str(TESTS / "media")])
            for line, record in zip(lines, Records(out), strict=True):
                key = f"{record['id']}:{line}"
                records[f"{name}:{line}"] = record | {"key": key}
    for part, drawn in world.held_out(3, 0, 4).items():
        for k, record in enumerate(drawn):
            records[f"toy {part} {k}"] = record
    return records


def write():
    lines = []
    for name, record in records_by_name().items():
        for stage, config in CONFIGS.items():
            value = encoded(record, config) if record else "cannot be used"
            lines.append(f" {json.dumps(f'{name}, {stage}')}: {json.dumps(value)}")
    REFERENCE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("stage", CONFIGS)
def test_every_record_becomes_the_same_arrays(stage):
    expected = json.loads(REFERENCE.read_text())
    assert {name.rpartition(", ")[2] for name in expected} == {*CONFIGS}
    for name, record in records_by_name().items():
        found = encoded(record, CONFIGS[stage]) if record else "cannot be used"
        wanted = expected.pop(f"{name}, {stage}")
        if "pixels" in found:
            shape, mean = wanted.pop("pixels")
            assert found["pixels"][0] == shape, name
            assert found.pop("pixels")[1] == pytest.approx(mean, abs=0.3), name
        assert found == wanted, name
    assert not any(name.endswith(stage) for name in expected)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
