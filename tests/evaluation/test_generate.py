"""Decoding with a KV cache gives the logits of a full forward pass, also in a conversation."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import model
import packing
from evaluation.generate import Sampling, evaluation_config, generate, sample
from evaluation.prompts import encode_prompt
from tests.evaluation.small_model import CONFIG, DATA, TOKENIZER, VISION, random_model
from tests.test_attention import put_visual_tokens_first
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
    return encode_prompt(shown, [(question, None)], TOKENIZER, DATA, VISION)


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
        visible_until=np.full(n, n, np.int32), bidir=np.pad(prompt.bidir, (0, len(ids))),
        annotation=np.pad(prompt.annotation, (0, len(ids))))


def logits_of_full_pass(model, prompt, ids):
    """-> (n,V): the logits from which a full forward pass takes each of the n tokens."""
    whole = continued(prompt, ids[:-1])
    batch = packing.collate([[whole]], len(whole.tokens), VISION)
    return model.logits(batch)[0, len(prompt.tokens) - 1 :]


@pytest.mark.parametrize("family", ["qwen", "olmo"])
def test_the_cache_gives_the_logits_of_a_full_pass_for_prompts_of_different_lengths(
    exact_model, prompts, family, monkeypatch
):
    """With images and without, 24 tokens, compared at every step. In the full pass, visual tokens
    come first, as in long rows on a GPU."""
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
    put_visual_tokens_first(monkeypatch)
    for row, (prompt, ids) in enumerate(zip(prompts, answers, strict=True)):
        expected = logits_of_full_pass(exact_model, prompt, ids)
        for step, logits in enumerate(steps):
            assert (logits[row] - expected[step]).abs().max() < 1e-10
            assert ids[step] == int(expected[step].argmax())


def test_generation_stops_at_a_stop_token(exact_model, prompts):
    answers = generate(exact_model, prompts, TOKENIZER.eos, 40, Sampling(1.5, seed=3))
    assert all(TOKENIZER.eos not in ids for ids in answers)
    (first,) = generate(exact_model, prompts[:1], -1, max_new=5)
    (stopped,) = generate(exact_model, prompts[:1], first[3], max_new=5)
    assert stopped == first[: first.index(first[3])]


def test_a_sampled_answer_depends_on_the_seed_and_the_id_of_its_prompt_and_not_on_its_batch(
    exact_model, prompts
):
    named = [dataclasses.replace(prompt, id=str(k)) for k, prompt in enumerate(prompts)]
    named.append(dataclasses.replace(prompts[0], id="4"))

    def sampled(some, seed=3):
        return generate(exact_model, some, -1, 12, Sampling(1.5, 0.9, 0.2, seed))

    answers = sampled(named)
    assert answers[0] != answers[4]
    assert sampled(named, seed=4) != answers
    assert sampled(named[::-1]) == answers[::-1]
    assert [sampled([prompt])[0] for prompt in named] == answers


@pytest.mark.parametrize("sampling", [
    Sampling(0.7, 0.95, 0.1), Sampling(1.3, 0.5, -2), Sampling(2, 1, 0.5), Sampling(0.7, 0)])
def test_tokens_are_drawn_by_the_definitions_of_temperature_top_p_and_frequency_penalty(sampling):
    """2000 draws, spread evenly from 0 to 1, take each token as often as its probability says,
    which is computed here token by token."""
    logits = np.random.default_rng(0).normal(0, 2, 30)
    counts = np.arange(30) % 4
    scores = np.exp((logits - sampling.frequency_penalty * counts) / sampling.temperature)
    expected = np.zeros(30)
    for token in np.argsort(-scores):
        expected[token] = scores[token]
        if expected.sum() >= sampling.top_p * scores.sum():
            break
    expected *= 2000 / expected.sum()
    rngs = [SimpleNamespace(random=lambda dtype, k=k: k / 1999) for k in range(2000)]
    rows = torch.tensor(np.stack([logits, counts])).float()[:, None].expand(2, 2000, 30)
    drawn = np.bincount(sample(*rows, rngs, sampling), minlength=30)
    assert np.abs(drawn - expected).max() <= 1
    assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(expected))


def test_the_frequency_penalty_counts_the_tokens_of_the_answer_and_not_of_the_prompt(
    exact_model, prompts
):
    """With temperature 0, against the logits of full forward passes."""
    answers = generate(exact_model, prompts, -1, 12, Sampling(frequency_penalty=0.5))
    for prompt, ids in zip(prompts, answers, strict=True):
        steps = logits_of_full_pass(exact_model, prompt, ids).detach()
        for step, logits in enumerate(steps):
            for token in ids[:step]:
                logits[token] -= 0.5
            assert ids[step] == int(logits.argmax())
    assert answers != generate(exact_model, prompts, -1, 12)


def test_a_released_model_is_asked_with_the_released_settings():
    trained = data.DataConfig(**RELEASED_SETTINGS)
    asked = evaluation_config(trained)
    assert trained.max_crops == 8
    assert (asked.max_crops, asked.max_images, asked.max_frames) == (24, 20, 384)
    assert evaluation_config(DATA).max_crops == 1
    assert evaluation_config(trained, 64).max_frames == 64
