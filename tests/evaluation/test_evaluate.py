"""Questions are asked in batches that fit, answered as if asked alone, and averaged; the nll is
that of training."""

import dataclasses

import numpy as np
import pytest
import torch

import data
import packing
from evaluation import evaluate as evaluation
from evaluation.generate import generate
from evaluation.prompts import VideoClip, encode_prompt
from records.reader import Records
from records.visual import read_headers
from tests.evaluation.answers import all_records, evaluate_answers, true_answer
from tests.evaluation.small_model import DATA, MEDIA, TOKENIZER, VISION, random_model
from tests.records.samples import CAPTION, GOOD, image, video, write
from text.prompts import turns_of


def test_a_later_turn_is_asked_after_the_true_answers_to_earlier_ones(monkeypatch):
    (record,) = [r for r in Records(MEDIA / "records.jsonl") if r["id"] == "astronaut"]
    record["annotations"] = record["annotations"][2:]
    asked = {}

    def noted(images, turns, *rest):
        asked[len(turns)] = turns
        return encode_prompt(images, turns, *rest)

    monkeypatch.setattr(evaluation, "encode_prompt", noted)
    answers = ("no idea", "A flag.")
    metrics, (first, second) = evaluate_answers([record], lambda q: answers[q.turn])
    assert asked[2][0][1] == "A model of a space shuttle with its boosters."
    assert asked[2][1] == ("And on the left?", None)
    assert (first["turn"], first["qa_accuracy"]) == (0, 0)
    assert (second["turn"], second["qa_accuracy"]) == (1, 1)
    assert metrics["qa_accuracy"] == 0.5
    record["annotations"][0]["turns"][0]["weight"] = 0           # context only
    assert evaluate_answers([record], true_answer)[0]["n_qa"] == 1


def test_a_text_is_not_scored_and_what_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "media").mkdir()
    for name, source in (("cut.jpg", "rocket.jpg"), ("cut.mp4", "bigbuckbunny.mp4")):
        (tmp_path / "media" / name).write_bytes((MEDIA / source).read_bytes()[:9000])
    path = write(
        tmp_path / "records.jsonl", GOOD, image(CAPTION, CAPTION, image="cut.jpg"),
        image(CAPTION, image="gone.png"), video(CAPTION, video="cut.mp4"))
    metrics, predictions = evaluate_answers(Records(path), lambda q: "x")
    lines = capsys.readouterr().err.splitlines()
    assert (metrics["skipped"], predictions) == (3, [])
    assert len(lines) == 3
    for number in (2, 3, 4):
        assert any(f"records.jsonl:{number}:" in line for line in lines)
    assert all(line.endswith("; skipped") for line in lines)


def test_questions_asked_together_are_answered_as_alone_from_one_decoding(monkeypatch):
    """Five questions about a video: one decoding, one encoding, the answers of five single
    prompts."""
    small_model = random_model()
    record = Records(MEDIA / "films.jsonl")[0]
    info = read_headers(record, DATA)
    source, vision = record["source"], small_model.vision
    frames, forward = source.frames, vision.forward
    n_decoded, encoded = [], []
    monkeypatch.setattr(source, "frames", lambda *a: n_decoded.append(1) or frames(*a))
    monkeypatch.setattr(vision, "forward", lambda x, *a: encoded.append(len(x)) or forward(x, *a))
    metrics, predictions = evaluation.evaluate(small_model, TOKENIZER, DATA, [record], max_new=8)
    assert len(predictions) == 5
    assert metrics["cut"] == sum(p.get("cut", False) for p in predictions) > 0
    assert encoded[0] == len(info.times) == 6
    assert len(n_decoded) == len(encoded) == 2           # once more for the nll
    clip = VideoClip(info.times, list(frames(record, info.times)), info.subtitles)
    for p in predictions:
        annotation = record["annotations"][p["annotation"]]
        turns = turns_of(annotation, record, info.sizes, DATA, None, info.times)
        prompt = encode_prompt([], [(turns[0][0], None)], TOKENIZER, DATA, VISION, clip)
        (ids,) = generate(small_model, [prompt], TOKENIZER.stops, 8)
        assert p["text"] == TOKENIZER.decode(ids), p["prompt"]
        assert ("cut" in p) == (len(ids) == 8)


@pytest.mark.parametrize(("max_rows", "max_crops", "max_tokens"), [
    (9, 1000, 1 << 20), (30, 4, 1 << 20), (30, 1000, 1500),
])
def test_a_batch_is_as_large_as_rows_crops_and_tokens_allow(monkeypatch, max_rows, max_crops,
                                                            max_tokens):
    """Each limit alone. Prompts about the same media share their crops, which count once."""
    monkeypatch.setattr(evaluation, "MAX_ROWS", max_rows)
    monkeypatch.setattr(evaluation, "MAX_CROPS", max_crops)
    monkeypatch.setattr(evaluation, "MAX_CACHED_TOKENS", max_tokens)
    records = list(Records(MEDIA / "records.jsonl"))
    questions, _ = evaluation.collect_questions(records, DATA, max_new=20)
    batches = list(evaluation.prompt_batches(questions, TOKENIZER, DATA, VISION, {}))
    assert [question for batch in batches for question, _ in batch] == questions
    assert len(batches) > 1

    def fits(batch):
        crops = {q.record["id"]: len(p.images) for q, p in batch if p.images is not None}
        longest = max(len(p.tokens) + 20 for _, p in batch)
        return (sum(crops.values()) <= max_crops and len(batch) <= max_rows
                and len(batch) * longest <= max_tokens)

    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert fits(batch)
        assert len({id(p.images) for _, p in batch}) == len({q.record["id"] for q, _ in batch})
        assert following is None or not fits([*batch, following[0]])


def test_frames_resized_once_are_the_frames_of_training():
    """data.encode makes its crops from the full frames."""
    record = Records(MEDIA / "films.jsonl")[1]
    questions, _ = evaluation.collect_questions([record], DATA, max_new=9)
    (batch,) = evaluation.prompt_batches(questions, TOKENIZER, DATA, VISION, {})
    _, prompt = batch[0]
    assert np.array_equal(prompt.images, data.encode(record, TOKENIZER, DATA, VISION, 0, 0).images)
    # subtitles are shown, in seconds of the clip
    assert "0.5 - 2.0 (yawns)" in TOKENIZER.decode(prompt.tokens.tolist())


def test_the_nll_is_the_weighted_mean_of_training_by_source():
    """Against the formula, record by record, with the weights of stage 2, as far as the text fills
    a row: that of "rabbit" has 594 tokens behind the visual ones, and a row 512."""
    config = dataclasses.replace(
        DATA, sqrt_length=True, sqrt_branches=True, point_weight=0.2, video_caption_weight=0.1,
        prefix_all=False)
    whole = dataclasses.replace(config, max_tokens=5000)
    records = all_records()
    small_model = random_model()
    losses = {"records.jsonl": [], "films.jsonl": []}
    weights = {"records.jsonl": [], "films.jsonl": []}
    for record in records:
        example = data.encode(record, TOKENIZER, whole, VISION, 0, 0)
        batch = packing.collate([[example]], len(example.tokens), VISION)
        with torch.no_grad():
            log_p = small_model.logits(batch)[0].log_softmax(-1)
        n = example.bidir.nonzero()[0].max(initial=-1) + 1 + config.max_tokens
        batch.weights[:, n:] = 0
        has_loss = batch.weights[0] > 0
        targets, weight = batch.targets[0][has_loss], batch.weights[0][has_loss]
        log_p = log_p[has_loss].gather(1, targets[:, None])[:, 0]
        name = record["source"].name
        losses[name].append(-float((log_p * weight).sum()))
        weights[name].append(float(batch.weights.sum()))
    for sums in (losses, weights):
        sums["all"] = [*sums["records.jsonl"], *sums["films.jsonl"]]
    expected = {name: sum(losses[name]) / sum(weights[name]) for name in losses}
    assert expected["records.jsonl"] != pytest.approx(expected["films.jsonl"], abs=1e-3)
    found = evaluation.losses_of(small_model, TOKENIZER, config, records, {})
    assert evaluation.mean_nll(found) == pytest.approx(expected, abs=1e-4)
    assert evaluation.mean_nll([("a", 0.0, 0.0), ("b", 2.0, 4.0)]) == {"all": 0.5, "b": 0.5}
