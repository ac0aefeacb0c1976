"""Evaluation with the answers of a function in place of a model."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
from tqdm import tqdm

from evaluation import evaluate as evaluation
from records.reader import Records
from records.visual import read_headers
from tests.evaluation.small_model import CONFIG, DATA, MEDIA, TOKENIZER
from tests.records.samples import write
from text.prompts import turns_of


def all_records():
    return [*Records(MEDIA / "records.jsonl"), *Records(MEDIA / "films.jsonl")]


def source(folder, *records):
    """Records with their media in tests/media."""
    path = folder / f"records-{len(list(folder.iterdir()))}.jsonl"
    return Records(write(path, *records), MEDIA)


def true_answer(question):
    record = question.record
    info = read_headers(record, DATA)
    turns = turns_of(question.annotation, record, info.sizes, DATA, None, info.times)
    return turns[question.turn][1]


def evaluate_answers(records, answer, masks_of=None, **options):
    """evaluate() with answer(question) -> text, asked in batches all the same."""
    batch = []
    prompt_batches = evaluation.prompt_batches

    def noted_batches(*args):
        for group in prompt_batches(*args):
            batch[:] = [question for question, _ in group]
            yield group

    def answers(model, prompts, stops, max_new, sampling):
        assert len(prompts) == len(batch)
        assert max_new == max(question.max_new for question in batch)
        return [TOKENIZER.encode(answer(question)) for question in batch]

    options = {"max_new": 10_000, **options}
    model = SimpleNamespace(config=CONFIG)
    with mock.patch.multiple(evaluation, prompt_batches=noted_batches, generate=answers,
                             tqdm=lambda **options: tqdm(disable=True),
                             losses_of=lambda *args: []):
        return evaluation.evaluate(model, TOKENIZER, DATA, records, masks_of, **options)


def clip_with_masks(folder):
    """A clip from 2 to 5 s of a video with two points and two tracks in pixels of 1280 x 720
    -> records, and an .npz file of masks on the clock of the file."""
    tracks = []
    for t in (2.0, 3.0, 4.0):
        tracks.append({"t": t, "id": "b", "x": 100, "y": 100})
        if t != 3.0:
            tracks.append({"t": t, "id": "a", "x": 900, "y": 100})
    points = [{"t": 2.5, "x": 100, "y": 100}, {"t": 4.0, "x": 900, "y": 600}]
    scale = {"coords": "pixel", "size": [1280, 720]}
    record = {
        "id": "clip",
        "video": {"path": "bigbuckbunny.mp4", "start": 2.0, "end": 5.0},
        "annotations": [
            {"type": "point", "label": "x", **scale, "points": points},
            {"type": "track", "label": "y", **scale, "fps": 1, "points": tracks},
        ],
    }
    of_points = np.zeros((2, 3, 720, 1280), bool)
    of_points[0, :2, :, :640] = True                     # the first at 2.5 and 3 s
    of_points[1, 1:, 400:, 640:] = True                  # the second at 3 and 4 s
    of_objects = np.zeros((2, 3, 720, 1280), bool)
    of_objects[0, [0, 2], :, 640:] = True                # "a" comes first; it is absent at 3 s
    of_objects[1, :, :, :640] = True
    np.savez(folder / "masks.npz", **{
        "clip/0": of_points, "clip/0/times": [2.5, 3.0, 4.0],
        "clip/1": of_objects, "clip/1/times": [2.0, 3.0, 4.0],
    })
    return source(folder, record), folder / "masks.npz"
