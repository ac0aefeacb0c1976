"""Decoding with a KV cache gives the logits of a full forward pass, also in a conversation."""

import dataclasses

import numpy as np
import pytest
import torch

import data
import model
import packing
from evaluation.generate import evaluation_config, generate
from tests.evaluation.small_model import CONFIG, DATA, TOKENIZER, VISION, random_model
from toy import world
from weights.files import RELEASED_SETTINGS


@pytest.fixture(scope="module")
def exact_model():
    """In float64, to compare logits closely."""
    return random_model().double()


def toy_prompt(question, i=0, image=True):
    """A question about image i of the toy world, or about nothing."""
    images = world.World("test")
    shown = images.images(images[i]) if image else []
    return data.encode_prompt(shown, [(question, None)], TOKENIZER, DATA)


@pytest.fixture(scope="module")
def prompts():
    """Of different lengths, the third without an image."""
    return [
        toy_prompt("long_caption:", 0),
        toy_prompt("pointing: red circle", 1),
        toy_prompt("a much longer question about what there is to see?", image=False),
        toy_prompt("count: any shape", 3),
    ]


def continued(prompt, ids):
    """A prompt with more tokens behind it."""
    tokens = np.array([*prompt.tokens.tolist(), *ids])
    n = len(tokens)
    return dataclasses.replace(
        prompt, tokens=tokens, targets=tokens, weights=np.zeros(n, np.float32), pos=np.arange(n),
        visible_until=np.full(n, n, np.int32), bidir=np.pad(prompt.bidir, (0, len(ids))))


@pytest.mark.parametrize("family", ["qwen", "olmo"])
def test_the_cache_gives_the_logits_of_a_full_pass_for_prompts_of_different_lengths(
    exact_model, prompts, family, monkeypatch
):
    """With images and without, 24 tokens, compared at every step."""
    if family == "olmo":
        yarn = model.YarnConfig(layers=(1,), original_max=64)
        config = dataclasses.replace(CONFIG, family="olmo", n_kv_head=4, yarn=yarn)
        exact_model = random_model(config).double()
    steps, lm_head = [], exact_model.lm_head

    def noted(x):
        steps.append(lm_head(x))
        return steps[-1]

    with monkeypatch.context() as patch:
        patch.setattr(exact_model, "lm_head", noted)
        answers = generate(exact_model, prompts, stops=-1, max_new=24)
    for row, (prompt, ids) in enumerate(zip(prompts, answers, strict=True)):
        whole = continued(prompt, ids[:-1])
        batch = packing.collate([[whole]], len(whole.tokens), VISION)
        expected = exact_model.logits(batch)[0, len(prompt.tokens) - 1 :]
        for step, logits in enumerate(steps):
            assert (logits[row] - expected[step]).abs().max() < 1e-10
            assert ids[step] == int(expected[step].argmax())


def test_generation_stops_at_a_stop_token(exact_model, prompts):
    answers = generate(exact_model, prompts, TOKENIZER.eos, 40, temperature=1.5, seed=3)
    assert all(TOKENIZER.eos not in ids for ids in answers)
    (first,) = generate(exact_model, prompts[:1], -1, max_new=5)
    (stopped,) = generate(exact_model, prompts[:1], first[3], max_new=5)
    assert stopped == first[: first.index(first[3])]


def test_sampling_follows_its_seed_and_becomes_greedy_as_it_cools(exact_model, prompts):
    def sampled(seed):
        return generate(exact_model, prompts, TOKENIZER.eos, 40, temperature=1.5, seed=seed)

    first = sampled(3)
    assert first == sampled(3)
    assert first != sampled(4)
    cool = generate(exact_model, prompts, -1, max_new=12, temperature=1e-4, seed=5)
    assert cool == generate(exact_model, prompts, -1, max_new=12)


def test_a_released_model_is_asked_with_the_released_settings():
    trained = data.DataConfig(**RELEASED_SETTINGS)
    asked = evaluation_config(trained)
    assert trained.max_crops == 8
    assert (asked.max_crops, asked.max_images, asked.max_frames) == (24, 20, 384)
    assert evaluation_config(DATA).max_crops == 1
    assert evaluation_config(trained, 12, 64).max_frames == 64


@pytest.mark.parametrize(("residual", "response"), [(0.0, 0.25), (0.25, 0.0)])
def test_dropout_applies_to_the_positions_of_its_stage(residual, response):
    """Stage 1: only positions whose target has loss; stages 2 and 3: all. The mean is kept."""
    torch.manual_seed(0)
    has_loss = torch.arange(64) % 2 == 0
    x = model.dropout(residual, response, has_loss[None])(torch.ones(1, 64, 4096))[0]
    assert torch.equal(x[~has_loss] == 1, torch.full((32, 4096), residual == 0))
    assert abs(float((x[has_loss] == 0).float().mean()) - 0.25) < 0.01
    assert abs(float(x.mean()) - 1) < 0.01
    assert float(x.max()) == pytest.approx(1 / 0.75)
