"""The released layout against transformers' own Molmo2 (an extra): logits, gradients, greedy
tokens, and the inputs that its processor makes."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import packing
import vision
from evaluation import answer, generate
from model import PRESETS, Molmo2, rope_frequencies
from records.reader import Records
from tests.records.samples import write
from tests.weights.hf_models import (
    DATA_CONFIG,
    EXTRAS,
    KINDS,
    OLMO,
    QWEN,
    ROOT,
    VISION,
    both_inputs,
    greedy,
    noise_clip,
    noise_image,
    peer_inputs,
    transformers,
)
from tools.bench.step import reference_inputs
from weights import files, released
from weights.export import hub_config

pytestmark = [EXTRAS, pytest.mark.usefixtures("two_threads")]

INPUTS = {
    "text": {},
    "one image": {"images": [noise_image(480, 640)]},
    "several images": {"images": [noise_image(300, 200), noise_image(150, 700)]},
    "a video": {"video": noise_clip(5, 60, 90)},
}

@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(saved, processor, tokenizer, kind, inputs):
    peer, _, ours = saved(kind)
    want, got = both_inputs(processor, tokenizer, **INPUTS[inputs])
    batch = packing.collate([[got]], len(got.tokens), VISION)
    with torch.no_grad():
        expected = peer(**want).logits[0]
        logits = ours.logits(batch)[0]
    assert expected.shape == logits.shape
    assert float(expected.std()) > 0.5
    assert float((expected - logits).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_greedy_tokens_equal_those_of_transformers(saved, processor, tokenizer, kind):
    peer, _, ours = saved(kind, sharp=1)
    for inputs in ("one image", "a video"):
        want, got = both_inputs(processor, tokenizer, **INPUTS[inputs])
        (answer,) = generate.generate(ours, [got], -1, 200)
        assert answer == greedy(peer, want, 200)
        assert len(answer) == 200
        assert len(set(answer)) > 20


def test_one_batch_of_text_images_and_a_video_is_answered_as_by_transformers_one_by_one(
    saved, processor, tokenizer
):
    """transformers refuses images and a video in one batch."""
    peer, _, ours = saved("untied", sharp=1)
    pairs = [both_inputs(processor, tokenizer, **given) for given in INPUTS.values()]
    answers = generate.generate(ours, [got for _, got in pairs], -1, 24)
    assert answers == [greedy(peer, want, 24) for want, _ in pairs]


def test_the_loss_and_every_gradient_of_a_packed_row_equal_those_of_transformers(
    saved, tokenizer, tmp_path
):
    """Of a text, an image, two images and a video, with one annotation each. transformers is given
    a padded batch and, since it refuses images and videos in one, the video by itself."""
    peer, _, ours = copy.deepcopy(saved("untied"))
    config = dataclasses.replace(DATA_CONFIG, max_tokens=9999, max_crops=2, max_frames=4)
    records = {record["id"]: record for name in ("records", "films")
               for record in Records(ROOT / f"tests/media/{name}.jsonl")}
    row = []
    for name in ("text-only", "chelsea", "two pets", "rabbit"):
        record = records[name] | {"annotations": records[name]["annotations"][:1]}
        row.append(data.encode(record, tokenizer, config, VISION, 0, 0))
        row[-1].weights[-1] = 0      # transformers has no label for what follows the last token
    batch = packing.collate([row], sum(len(example.tokens) for example in row), VISION)
    labelled = batch.weights.sum()
    loss = (batch.weights * ours(batch)[0]).sum() / labelled
    loss.backward()
    expected_loss = 0
    for examples in (row[:3], row[3:]):
        inputs = reference_inputs(examples, ours.config, "cpu")
        part = peer(**inputs).loss * (inputs["labels"] >= 0).sum() / labelled
        part.backward()
        expected_loss += part.item()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)

    for parameter in peer.parameters():                  # their gradients under our names
        parameter.data = parameter.grad
    peer.save_pretrained(tmp_path)
    expected = files.load(tmp_path).state_dict()
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - expected[name]).abs().max()
        # softmax ignores the bias of a key: its gradient is 0 but for rounding
        scale = 1e-2 if name.endswith("k.bias") else expected[name].abs().max()
        assert difference < 1e-5 * scale, name


@pytest.mark.parametrize("given", [
    {"attention_factor": 1.3},
    {},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"factor": 4.0},
])
def test_yarn_is_read_as_transformers_reads_it(given):
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
            "original_max_position_embeddings": 512, **given}
    text = {"head_dim": 16, "rope_parameters": dict(rope)}
    peer_text = transformers.Molmo2Config(text_config=text).text_config
    peer_yarn = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    expected, expected_factor = peer_yarn(peer_text, "cpu")
    theta, yarn = released.rope_from({"rope_parameters": rope}, [1])
    config = dataclasses.replace(OLMO, rope_theta=theta, yarn=yarn)
    frequencies, factor = rope_frequencies(config, yarn=True)
    assert torch.allclose(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)
    assert yarn.layers == (1,)


PUBLISHED = {"4b": "qwen3_4b_instruct", "8b": "qwen3_8b", "o7b": "olmo3_7b_instruct"}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_presets_are_what_the_published_configs_say(preset):
    """Names and shapes of every tensor, and the config, of the three released checkpoints
    (tests/conformance/released.json)."""
    path = ROOT / "tests" / "conformance" / "released.json"
    published = json.loads(path.read_text())[PUBLISHED[preset]]
    config = PRESETS[preset]
    with torch.device("meta"):
        parameters = Molmo2(config).state_dict()
    table = released.released_names(config)
    if config.tied:
        table[(released.LM_HEAD,)] = ["embedding.weight"]
    shapes = {}
    for theirs, ours in table.items():
        if len(theirs) == 1:
            rows = sum(parameters[name].shape[0] for name in ours)
            shapes[theirs[0]] = [rows, *parameters[ours[0]].shape[1:]]
        else:
            for name, our_name in zip(theirs, ours, strict=True):
                shapes[name] = list(parameters[our_name].shape)
    expected = {}
    for name, entry in published["hub_remote_code"].items():
        for i in range(entry["count"]):
            expected[name.replace("{i}", str(i))] = entry["shape"]
    assert shapes == expected
    if "hub_config" in published:
        official = published["hub_config"]
        found = released.released_config(Path("none"), official)
        assert dataclasses.replace(found, tied=config.tied) == config
        # what is exported is the same, but for these values (docs/molmo2.md 0.6, 1.1, 1.6)
        exported = hub_config(config, "float32")
        others = {"text_config": {"max_position_embeddings": 36864} if preset == "o7b" else {},
                  "vit_config": {"num_hidden_layers": 27},
                  "adapter_config": {"vit_layers": [-3, -9]}}
        for part, changes in others.items():
            assert (exported.pop(part) | changes).items() <= official[part].items()
        for key in exported.keys() & official.keys() - {"use_frame_special_tokens"}:
            assert exported[key] == official[key]


def test_thirty_images_of_odd_sizes_are_read_as_transformers_reads_them(processor, tokenizer):
    """Exception (docs/molmo2.md 0.7, 2.2): with a side of at most 112 pixels transformers tiles
    otherwise than training did; we follow training."""
    rng = np.random.default_rng(0)
    sizes = [(378, 378), (113, 113), (1, 500), (3000, 100), (100, 900), (64, 64), (113, 1500),
             (266, 532), (491, 491), (2000, 300)]
    for _ in range(23):
        h, w = np.exp(rng.uniform(np.log(113), np.log(1200), 2))
        sizes.append((int(h), int(w)))
    differ = set()
    for h, w in sizes:
        image = noise_image(h, w)
        if min(h, w) <= 112:
            grid = peer_inputs(processor, [image])["image_grids"][0, 2:].tolist()
            if tuple(grid) != vision.pooled_grids(h, w, 8, VISION)[1]:
                differ.add((h, w))
                continue
        both_inputs(processor, tokenizer, [image])
    assert differ == {(1, 500), (3000, 100), (100, 900)}
    assert len(sizes) - len(differ) == 30


@pytest.mark.parametrize("seed", range(10))
def test_ten_videos_are_read_as_transformers_reads_them(processor, tokenizer, seed):
    rng = np.random.default_rng(seed)
    n, h, w = (int(rng.integers(low, high)) for low, high in ((1, 9), (20, 400), (20, 400)))
    both_inputs(processor, tokenizer, video=noise_clip(n, h, w, [0.5, 1.7][seed % 2], seed))


def test_a_conversation_with_a_system_text_has_one_layout(processor, tokenizer, tmp_path,
                                                           monkeypatch):
    """... in training, in tools.generate and in the exported chat template."""
    config = dataclasses.replace(DATA_CONFIG, prefix_all=False)
    turns = [{"question": "One?", "answer": "Yes, one."}, {"question": "Two?", "answer": "Two."}]
    qa = {"type": "qa", "system": "Be brief.", "turns": turns}
    (record,) = Records(write(tmp_path / "r.jsonl", {"annotations": [qa]}))
    trained = data.encode(record, tokenizer, config, VISION, 0, 0).tokens.tolist()
    prompts = []
    monkeypatch.setattr(
        answer, "generate", lambda _, batch, *rest: [prompts.append(batch[0]) or []])
    turns = [("One?", "Yes, one."), ("Two?", None)]
    loaded = answer.Loaded(SimpleNamespace(config=QWEN), tokenizer, config)
    loaded.reply(answer.Shown([], None, []), turns, system="Be brief.")
    asked = prompts[0].tokens.tolist()
    assert trained[: len(asked)] == asked
    assert trained[len(asked) :] == tokenizer.encode("Two.")
    want = peer_inputs(processor, turns=turns, system="Be brief.")["input_ids"]
    assert want[0].tolist() == asked
