"""Layout of released checkpoints: tensor names, config.json -> ModelConfig (docs/molmo2.md 1.6).

A table of names is {names on disk: our names}. In each entry, the tensors on disk, concatenated
along their rows, are equal to our tensors, concatenated in the same way.

    on disk                                         here
    ("model.transformer.blocks.0                    ["blocks.0.attn.q.weight",
       .self_attn.att_proj.weight",):                "blocks.0.attn.k.weight",
                                                     "blocks.0.attn.v.weight"]

The same table is used to load (weights/files.py) and to export (weights/export.py).
"""

import json
import math
from pathlib import Path

from model import ModelConfig, YarnConfig
from vision import VisionConfig

LM_HEAD = "lm_head.weight"
EMBEDDINGS = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")
RELEASED_BLOCK = {
    "attn_norm": ["attn_norm"],
    "ff_norm": ["mlp_norm"],
    "self_attn.att_proj": ["attn.q", "attn.k", "attn.v"],
    "self_attn.attn_out": ["attn.out"],
    "self_attn.q_norm": ["attn.q_norm"],
    "self_attn.k_norm": ["attn.k_norm"],
    "mlp.ff_proj": ["mlp.up", "mlp.gate"],
    "mlp.ff_out": ["mlp.down"],
}
RELEASED_VIT_BLOCK = {
    "feed_forward.w1": "up",
    "feed_forward.w2": "down",
    "attention_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
}
RELEASED_ATTENTION = {"wq": "q", "wk": "k", "wv": "v", "wo": "out"}  # in ViT and pooling
RELEASED_PROJECTOR = {"w1": "gate", "w2": "down", "w3": "up"}

# {key in every config.json, for a ViT or a language model: field of our config}
SHAPE = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_hidden",
}
YARN_KEYS = ("attention_factor", "beta_fast", "beta_slow")
LLM_SHAPE = SHAPE | {"num_key_value_heads": "n_kv_head", "vocab_size": "n_vocab"}


def with_biases(prefix, our_prefix, modules):
    """{module on disk: our module} -> table of names of their weights and biases."""
    names = {}
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            names[(f"{prefix}.{theirs}.{kind}",)] = [f"{our_prefix}.{ours}.{kind}"]
    return names


def released_names(config):
    """ModelConfig -> table of names of a released checkpoint, without a tied head."""
    text = "model.transformer"
    vision = "model.vision_backbone"
    names = {
        # One entry for both: the Hub splits the rows at V, and transformers in two equal halves.
        EMBEDDINGS: ["embedding.weight", "extra.weight"],
        (f"{text}.ln_f.weight",): ["norm.weight"],
    }
    if not config.tied:
        names[(LM_HEAD,)] = ["head.weight"]
    for i in range(config.n_layer):
        for theirs, ours in RELEASED_BLOCK.items():
            our_names = [f"blocks.{i}.{name}.weight" for name in ours]
            names[(f"{text}.blocks.{i}.{theirs}.weight",)] = our_names
    vit = f"{vision}.image_vit"
    names[(f"{vit}.positional_embedding",)] = ["vision.vit.pos"]
    names |= with_biases(vit, "vision.vit", {"patch_embedding": "patch"})
    for i in range(config.vision.n_layer):
        block = f"{vit}.transformer.resblocks.{i}"
        ours = f"vision.vit.blocks.{i}"
        names |= with_biases(block, ours, RELEASED_VIT_BLOCK)
        names |= with_biases(f"{block}.attention", ours, RELEASED_ATTENTION)
    names |= with_biases(f"{vision}.image_pooling_2d", "vision.pool", RELEASED_ATTENTION)
    for theirs, ours in RELEASED_PROJECTOR.items():
        name = f"{vision}.image_projector.{theirs}.weight"
        names[(name,)] = [f"vision.projector.{ours}.weight"]
    return names


def require(values, **expected):
    """Raises ValueError if a config has another value than expected. A tuple allows several."""
    for key, value in expected.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if values.get(key) not in (*allowed, None):
            raise ValueError(f"{key} = {values[key]!r} is not supported, only {value!r}")


def rope_from(text, layers):
    """Text part of a config.json -> theta, YarnConfig. layers: the layers that have YaRN, if the
    model uses it; None: all of them."""
    rope = text.get("rope_parameters")
    if not rope:  # the older form: theta beside rope_scaling
        rope = {"rope_theta": text["rope_theta"], **(text.get("rope_scaling") or {})}
    if "full_attention" in rope:  # OLMo-3: parameters by kind of layer
        rope = rope["full_attention"]
    theta = float(rope["rope_theta"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, YarnConfig()
    require({"rope_type": kind}, rope_type="yarn")
    require(rope, truncate=True, mscale=None, mscale_all_dim=None)
    layers = layers or range(text["num_hidden_layers"])
    factor = float(rope["factor"])
    optional = {"attention_factor": 0.1 * math.log(factor) + 1}
    optional |= {key: float(rope[key]) for key in YARN_KEYS if rope.get(key) is not None}
    original_max = int(rope["original_max_position_embeddings"])
    return theta, YarnConfig(tuple(layers), factor, original_max=original_max, **optional)


def released_config(folder, raw):
    """config.json of a released folder, in the Hub's form or in the form of transformers
    -> ModelConfig. `tied` stays False: it is found from the weights (weights/files.py)."""
    require(raw, model_type="molmo2")
    text = raw["text_config"]
    adapter = raw["adapter_config"]
    vit = raw["vit_config"] if "vit_config" in raw else raw["vision_config"]
    require(text, hidden_act="silu", attention_bias=False, qkv_bias=False, use_qk_norm=True)
    require(adapter, hidden_act="silu", attention_bias=True, mlp_bias=False,
            pooling_attention_mask=True, num_attention_heads=vit["num_attention_heads"])
    require(text, qk_norm_type="olmo" if text["norm_after"] else "qwen3")
    theta, yarn = rope_from(text, text.get("rope_scaling_layers"))
    return ModelConfig(
        **{field: text[key] for key, field in LLM_SHAPE.items()},
        head_dim=text["head_dim"],
        n_extra=text["additional_vocab_size"],
        family="olmo" if text["norm_after"] else "qwen",
        rope_theta=theta,
        yarn=yarn,
        eps=text.get("rms_norm_eps", text.get("layer_norm_eps")),
        vision=released_vision(folder, raw, vit, adapter),
    )


def released_vision(folder, raw, vit, adapter):
    """The vision part of a released config.json -> VisionConfig."""
    require(vit, hidden_act="gelu_pytorch_tanh", attention_bias=True)
    layers = adapter.get("vit_layers", adapter.get("vision_feature_layer", (24, 18)))
    layers = tuple(i % vit["num_hidden_layers"] for i in layers)  # -3 of 27 is 24
    height, _ = vit.get("image_default_input_size", vit.get("image_size"))
    patch = vit.get("image_patch_size", vit.get("patch_size"))
    path = Path(folder) / "preprocessor_config.json"  # settings of the image processor
    processor = json.loads(path.read_bytes()) if path.is_file() else {}
    # the Hub's form declares 27 blocks, but only 25 have weights
    if "vit_config" in raw:
        vit = vit | {"num_hidden_layers": max(layers) + 1}
    return VisionConfig(
        **{field: vit[key] for key, field in SHAPE.items()},
        feature_layers=layers,
        grid=height // patch,
        patch=patch,
        overlap_margin=processor.get("overlap_margins", [VisionConfig.overlap_margin])[0],
        eps=vit["layer_norm_eps"],
    )
