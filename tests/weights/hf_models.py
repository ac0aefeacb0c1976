"""Random models in the classes of transformers, and the inputs that its processor makes.

Three kinds: untied, tied (as the released 4B: the head is a copy of the embedding), and OLMo with
YaRN on some layers; crops of the released size behind a narrow ViT.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

import data
import vision
from evaluation.prompts import VideoClip, encode_prompt
from model import ModelConfig, Molmo2, YarnConfig
from tests.extras import require
from tools.bench.step import import_transformers

EXTRAS = require("safetensors", "tokenizers", "transformers", "torchvision")
transformers = import_transformers()

ROOT = Path(__file__).parents[2]
V = 700
VISION = vision.VisionConfig(n_layer=3, n_embd=32, n_head=2, n_hidden=48, feature_layers=(2, 0))
QWEN = ModelConfig(n_layer=3, n_embd=64, n_head=4, n_kv_head=2, head_dim=16, n_hidden=96,
                   n_vocab=V, init_std=0.0, vision=VISION)
OLMO = dataclasses.replace(
    QWEN, n_layer=4, n_kv_head=4, family="olmo", rope_theta=5e5,
    yarn=YarnConfig(layers=(1, 3), attention_factor=1.2, original_max=64))
KINDS = {"untied": QWEN, "tied": dataclasses.replace(QWEN, tied=True), "olmo": OLMO}
DATA_CONFIG = data.DataConfig(max_images=20)
QUESTION = "Where are the cats? (two of them, I think)"


class SavedModel(NamedTuple):
    peer: transformers.PreTrainedModel
    folder: Path                     # what `peer` saved, with its processor
    ours: Molmo2                     # loaded from the folder


def peer_config(config):
    """The same shape in transformers' own words, not through weights/released.py."""
    c = config
    v = config.vision
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.yarn.layers:
        rope = {"rope_type": "yarn", "rope_theta": c.rope_theta, "factor": c.yarn.factor,
                "attention_factor": c.yarn.attention_factor, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": c.yarn.original_max}
    heads = {"num_attention_heads": v.n_head, "num_key_value_heads": v.n_head,
             "head_dim": v.n_embd // v.n_head}
    text_config = {
        "hidden_size": c.n_embd, "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim, "vocab_size": V,
        "num_hidden_layers": c.n_layer, "intermediate_size": c.n_hidden, "rope_parameters": rope,
        "rope_scaling_layers": list(c.yarn.layers) or None, "norm_after": c.family == "olmo",
        "qk_norm_type": "olmo" if c.family == "olmo" else "qwen3"}
    vision_config = {
        "hidden_size": v.n_embd, "intermediate_size": v.n_hidden, "num_hidden_layers": v.n_layer,
        **heads}
    adapter_config = {
        "vision_feature_layer": list(v.feature_layers), "hidden_size": v.n_embd,
        "intermediate_size": c.n_hidden, "text_hidden_size": c.n_embd, **heads}
    return transformers.Molmo2Config(
        text_config=text_config, vision_config=vision_config, adapter_config=adapter_config,
        image_start_token_id=V, image_end_token_id=V + 1, image_patch_id=V + 2,
        low_res_image_start_token_id=V + 4, frame_start_token_id=V + 7, frame_end_token_id=V + 8)


def noise_image(h, w, seed=0):
    """Noise over a gradient: every resize of it differs from every other."""
    rng = np.random.default_rng([seed, h, w])
    rows = np.linspace(0, 255, h)[:, None, None] * 0.4
    columns = np.linspace(0, 255, w)[None, :, None] * 0.4
    return (rows + columns + rng.integers(0, 50, (h, w, 3))).clip(0, 255).astype(np.uint8)


def noise_clip(n, h, w, step=0.5, seed=0):
    """n frames, the last one off the grid as the end of a real video is."""
    times = [*(k * step for k in range(n - 1)), (n - 1) * step - 0.17]
    return VideoClip(times, [noise_image(h, w, [seed, k]) for k in range(n)])


def peer_inputs(processor, images=(), video=None, turns=((QUESTION, None),), system=None):
    """What transformers' processor makes of a chat. It is told the times of a video's frames,
    since it samples otherwise (docs/molmo2.md 0.8)."""
    visual = [{"type": "image"} for _ in images]
    if video:
        visual.append({"type": "video"})
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        text = {"type": "text", "text": question}
        messages.append({"role": "user", "content": [*visual, text]})
        visual = []                  # in the first turn only
        if answer is not None:
            text = {"type": "text", "text": answer}
            messages.append({"role": "assistant", "content": [text]})
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    extra = {}
    if video:
        metadata = transformers.video_utils.VideoMetadata(
            total_num_frames=len(video.times), fps=1000.0,
            frames_indices=[t * 1000 for t in video.times])
        extra = {"videos": [np.stack(video.frames)], "video_metadata": [metadata],
                 "do_sample_frames": False}
    return processor(images=list(images) or None, text=prompt, return_tensors="pt", **extra)


def both_inputs(processor, tokenizer, images=(), video=None):
    """-> inputs of transformers, data.Example of ours; token ids, pixels and pooling indices are
    asserted to be equal."""
    want = peer_inputs(processor, images, video)
    turns = [(QUESTION, None)]
    got = encode_prompt(list(images), turns, tokenizer, DATA_CONFIG, VISION, video)
    assert want["input_ids"][0].tolist() == got.tokens.tolist()
    assert (want["mm_token_type_ids"][0] == 1).tolist() == (got.bidir > 0).tolist()
    if images or video:
        names = ("pixel_values", "image_token_pooling")
        if video:
            names = ("pixel_values_videos", "video_token_pooling")
        pixels = want[names[0]].flatten(0, -3).numpy()
        assert np.array_equal(np.round((pixels + 1) * 127.5), got.images)
        assert np.abs(pixels - (got.images / 127.5 - 1)).max() < 1e-6
        assert np.array_equal(want[names[1]].flatten(0, -2).numpy(), got.pool_src)
    return want, got


def greedy(peer, inputs, n):
    """n greedy tokens of transformers' model."""
    ids = peer.generate(**inputs, max_new_tokens=n, do_sample=False, eos_token_id=None,
                        pad_token_id=0)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def edit(path, change):
    """change: a function of the JSON value in a file, which alters it in place."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
