"""Two record files and their loader, for the tests of the planner and the loader."""

import itertools

import numpy as np
from PIL import Image

from records.mixture import Mixture
from records.reader import Records
from tests.records.samples import write
from text.tokenizer import ByteTokenizer
from training.config import parse
from training.loader import Loader
from training.planner import StepPlanner

TOKENIZER = ByteTokenizer()
CONFIG = parse(["--stage=2", "--tiny", "--batch=8", "--micro-batch=2", "--steps=6",
                "--pool_size=9", "--data.max_tokens=700"])[1]


def write_files(folder):
    """Writes a file with images and one with text. 4 images are truncated, 3 are missing."""
    rng = np.random.default_rng(0)
    for name, n in (("a", 30), ("b", 17)):
        records = []
        for i in range(n):
            record = {"annotations": [
                {"type": "qa", "question": "?" * int(rng.integers(1, 60)),
                 "answer": "!" * int(rng.integers(1, 90))} for _ in range(int(rng.integers(1, 4)))]}
            if name == "a":
                record["image"] = f"{i}.png"
                pixels = rng.integers(0, 255, (40, 60, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
            records.append(record)
        write(folder / f"{name}.jsonl", *records)
    for n in (3, 8, 17, 26):
        (folder / f"{n}.png").write_bytes((folder / f"{n}.png").read_bytes()[:3000])
    for n in (5, 14, 23):
        (folder / f"{n}.png").unlink()
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def write_texts(path, texts):
    """Writes a file with one record for each text -> path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, *[{"annotations": [{"type": "text", "text": text}]} for text in texts])


def planner_of(files, config=CONFIG, rates=(0.7, 0.3), reader=Records):
    mixture = Mixture([reader(f) for f in files], list(rates), config.seed)
    return StepPlanner(mixture, TOKENIZER, config, config.workers // 2)


def loader_of(files, config=CONFIG, ranks=None, rates=(0.7, 0.3), planner=None, start=0):
    planner = planner or planner_of(files, config, rates)
    mixture = Mixture([Records(f) for f in files], list(rates), config.seed)
    return Loader(mixture, TOKENIZER, config, planner, ranks, start)


def taken(loader, n):
    """The first n steps -> [(StepPlan, rows of this rank)]."""
    steps = []
    for plan, micro_batches in itertools.islice(loader, n):
        steps.append((plan, [row for rows in micro_batches for row in rows]))
    return steps


def examples_of(rows):
    return [example for row in rows for example in row]

