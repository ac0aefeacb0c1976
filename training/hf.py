"""Weights in and out: the released checkpoints' layout, and the base models that stage 1 starts from (spec 1.6).

    python -m tools.hf import Molmo2-4B runs/molmo2-4b                  # a released folder -> a folder of this project
    python -m tools.hf base Qwen3-8B siglip2-so400m-patch14-384 runs/base-8b        # what stage 1 starts from
    python -m tools.hf export runs/mine mine-hf                         # for transformers, vLLM and the official code

`released` is the one table of names, read both ways: {tensors on disk: our tensors}, the same rows one under the other.
A name or a shape that the table does not know is refused before anything is loaded.
`model.load`, `train.py --init` and the tools take a released folder as it is; `import` only makes one of ours of it.

What export corrects (spec 0): config.json asks for frame tokens, and for the 25 ViT blocks that there are weights for.
"""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import torch

import model as models
from data import DataConfig
from text import tokenizer as text
from training import weights
from vision import VisionConfig

# ---------------------------------------------------------------------------------------------------------------
# names


def released(config):
    """{released names: our names} for a model of this shape: the rows of these are the rows of those; a tied head is not read."""
    c, see = config, "model.vision_backbone."
    # one entry, because transformers splits what it saves of the two in equal halves
    names = {("model.transformer.wte.embedding", "model.transformer.wte.new_embedding"): ["embedding.weight", "extra.weight"],
             ("model.transformer.ln_f.weight",): ["norm.weight"], ("lm_head.weight",): [] if c.tied else ["head.weight"]}
    for i in range(c.n_layer):
        block = {"attn_norm": ["attn_norm"], "ff_norm": ["mlp_norm"], "self_attn.att_proj": ["attn.q", "attn.k", "attn.v"],
                 "self_attn.attn_out": ["attn.out"], "self_attn.q_norm": ["attn.q_norm"], "self_attn.k_norm": ["attn.k_norm"],
                 "mlp.ff_proj": ["mlp.up", "mlp.gate"], "mlp.ff_out": ["mlp.down"]}
        names |= {(f"model.transformer.blocks.{i}.{theirs}.weight",): [f"blocks.{i}.{x}.weight" for x in ours]
                  for theirs, ours in block.items()}
    names[(f"{see}image_vit.positional_embedding",)] = ["vision.vit.pos"]
    pairs = {"image_vit.patch_embedding": "vit.patch"}
    for i in range(c.vision.n_layer):
        block = {"attention.wq": "q", "attention.wk": "k", "attention.wv": "v", "attention.wo": "out", "feed_forward.w1": "up",
                 "feed_forward.w2": "down", "attention_norm": "attn_norm", "ffn_norm": "mlp_norm"}
        pairs |= {f"image_vit.transformer.resblocks.{i}.{theirs}": f"vit.blocks.{i}.{ours}" for theirs, ours in block.items()}
    pairs |= {f"image_pooling_2d.w{x}": f"pool.{ours}" for x, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))}
    names |= {(f"{see}{theirs}.{kind}",): [f"vision.{ours}.{kind}"] for theirs, ours in pairs.items() for kind in ("weight", "bias")}
    return names | {(f"{see}image_projector.{theirs}.weight",): [f"vision.projector.{ours}.weight"]
                    for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up"))}


def base_llm(config):
    """{name in a folder of Qwen3 or OLMo-3: our names}: the norms of the two families stand in different places."""
    before = ("input_layernorm", "post_attention_layernorm")
    norms = before if config.family == "qwen" else ("post_attention_layernorm", "post_feedforward_layernorm")
    names = {("model.embed_tokens.weight",): ["embedding.weight"], ("model.norm.weight",): ["norm.weight"]}
    names |= {} if config.tied else {("lm_head.weight",): ["head.weight"]}
    for i in range(config.n_layer):
        block = {norms[0]: "attn_norm", norms[1]: "mlp_norm", "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
                 "self_attn.o_proj": "attn.out", **{f"self_attn.{x}_proj": f"attn.{x}" for x in "qkv"},
                 **{f"mlp.{x}_proj": f"mlp.{x}" for x in ("up", "gate", "down")}}
        names |= {(f"model.layers.{i}.{theirs}.weight",): [f"blocks.{i}.{ours}.weight"] for theirs, ours in block.items()}
    return names


def base_vit(config):
    """{name in a folder of SigLIP 2: our names}; what Molmo2 has no use for (text tower, head, upper blocks) is not in it."""
    names = {("vision_model.embeddings.position_embedding.weight",): ["vision.vit.pos"]}
    pairs = {"embeddings.patch_embedding": "patch"}
    for i in range(config.vision.n_layer):
        block = {"layer_norm1": "attn_norm", "layer_norm2": "mlp_norm", "mlp.fc1": "up", "mlp.fc2": "down", "self_attn.out_proj": "out",
                 **{f"self_attn.{x}_proj": x for x in "qkv"}}
        pairs |= {f"encoder.layers.{i}.{theirs}": f"blocks.{i}.{ours}" for theirs, ours in block.items()}
    return names | {(f"vision_model.{theirs}.{kind}",): [f"vision.vit.{ours}.{kind}"]
                    for theirs, ours in pairs.items() for kind in ("weight", "bias")}


# ---------------------------------------------------------------------------------------------------------------
# shapes


class Refused(ValueError):
    """A checkpoint that is sound, but not one that this project can be."""


def demand(where, d, **wanted):
    """What this project builds in: a config that asks for something else is refused, not approximated."""
    for key, value in wanted.items():
        if d.get(key, value) not in (value, None):
            raise Refused(f"{where}: {key} = {d[key]!r} is not supported, only {value!r}")


def yarn_of(where, rope, layers, n_layer):
    """RoPE settings of a text config -> theta, Yarn; layers None: all of them are scaled."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return float(rope["rope_theta"]), models.YarnConfig()
    demand(where, {**rope, "rope_type": kind}, rope_type="yarn", truncate=True, mscale=None, mscale_all_dim=None)
    yarn = models.YarnConfig(tuple(range(min(n_layer, weights.MAX_LAYERS + 1))) if layers is None else tuple(layers), float(rope["factor"]),
                       original_max=int(rope["original_max_position_embeddings"]))
    given = {key: float(rope[key]) for key in ("attention_factor", "beta_fast", "beta_slow") if rope.get(key) is not None}
    given.setdefault("attention_factor", 0.1 * math.log(yarn.factor) + 1)
    return float(rope["rope_theta"]), replace(yarn, **given)


def margin_of(folder):
    """Patches that crops share on each side: in the file of the image processor, or inside that of the processor; 4 if there is none."""
    for name, inside in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        path = Path(folder) / name
        if path.is_file():
            settings = json.loads(path.read_text())
            settings = settings.get(inside, {}) if inside else settings
            if "overlap_margins" in settings:
                demand(path, {"overlap_margins": settings["overlap_margins"]}, overlap_margins=[settings["overlap_margins"][0]] * 2)
                return settings["overlap_margins"][0]
    return 4


def config_from(folder, raw):
    """config.json of a released folder, as the Hub has it or as transformers writes it -> Config (tied or not: see `load`)."""
    where = f"{folder}/config.json"
    demand(where, raw, model_type="molmo2")
    hub = "vit_config" in raw
    t, v, a = raw["text_config"], raw["vit_config" if hub else "vision_config"], raw["adapter_config"]
    demand(where, t, hidden_act="silu", attention_bias=False, qkv_bias=False, use_qk_norm=True)
    demand(where, v, hidden_act="gelu_pytorch_tanh", attention_bias=True)
    demand(where, a, hidden_act="silu", attention_bias=True, mlp_bias=False, pooling_attention_mask=True, hidden_size=v["hidden_size"],
           num_attention_heads=v["num_attention_heads"], intermediate_size=t["intermediate_size"], text_hidden_size=t["hidden_size"])
    if (t["norm_after"], t["qk_norm_type"]) not in ((False, "qwen3"), (True, "olmo")):
        raise Refused(f"{where}: norm_after {t['norm_after']} with {t['qk_norm_type']} QK-norm is neither Qwen nor OLMo")
    rope = t.get("rope_parameters") or {"rope_theta": t["rope_theta"], **(t.get("rope_scaling") or {})}
    theta, yarn = yarn_of(where, rope, t.get("rope_scaling_layers"), t["num_hidden_layers"])
    features = tuple(i % v["num_hidden_layers"] for i in a.get("vit_layers", a.get("vision_feature_layer", (24, 18))))
    size, patch = v.get("image_default_input_size", v.get("image_size")), v.get("image_patch_size", v.get("patch_size"))
    if size[0] != size[1] or size[0] % patch:
        raise Refused(f"{where}: images of {size} pixels in patches of {patch} are not supported, only squares of whole patches")
    see = VisionConfig(  # the Hub's config says 27 blocks, its weights stop at the last one that is read
        n_layer=max(features) + 1 if hub else v["num_hidden_layers"], n_embd=v["hidden_size"], n_head=v["num_attention_heads"],
        n_hidden=v["intermediate_size"], feature_layers=features, grid=size[0] // patch, patch=patch, overlap_margin=margin_of(folder),
        eps=v["layer_norm_eps"])
    return models.ModelConfig(
        n_layer=t["num_hidden_layers"], n_embd=t["hidden_size"], n_head=t["num_attention_heads"], n_kv_head=t["num_key_value_heads"],
        head_dim=t["head_dim"], n_hidden=t["intermediate_size"], n_vocab=t["vocab_size"], n_extra=t["additional_vocab_size"],
        family="olmo" if t["norm_after"] else "qwen", rope_theta=theta, yarn=yarn,
        eps=t.get("rms_norm_eps", t.get("layer_norm_eps")), vision=see)


def config_to(config, dtype):
    """Config -> config.json in the Hub's form, which transformers, vLLM and the official code all read."""
    c, v, y = config, config.vision, config.yarn
    heads = {"num_attention_heads": v.n_head, "num_key_value_heads": v.n_head, "head_dim": v.n_embd // v.n_head}
    common = {"attention_dropout": 0.0, "attn_implementation": "sdpa", "initializer_range": 0.02, "residual_dropout": 0.0}
    scaling = {"rope_type": "yarn", "factor": y.factor, "attention_factor": y.attention_factor, "beta_fast": y.beta_fast,
               "beta_slow": y.beta_slow, "original_max_position_embeddings": y.original_max}
    special = {"image_start_token_id": "im_start", "image_end_token_id": "im_end", "image_patch_id": "im_patch", "image_col_id": "im_col",
               "low_res_image_start_token_id": "low_res_im_start", "image_high_res_id": "im_patch", "image_low_res_id": "im_low",
               "frame_start_token_id": "frame_start", "frame_end_token_id": "frame_end"}
    return {
        "architectures": ["Molmo2ForConditionalGeneration"], "model_type": "molmo2", "dtype": dtype, "initializer_range": 0.02,
        "tie_word_embeddings": False, "use_cache": True, "use_frame_special_tokens": True,           # the Hub's converter wrote False
        **{key: c.n_vocab + text.SPECIAL.index(name) for key, name in special.items()},
        "text_config": {
            **common, "model_type": "molmo2_text", "hidden_size": c.n_embd, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
            "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim, "intermediate_size": c.n_hidden, "vocab_size": c.n_vocab,
            "additional_vocab_size": c.n_extra, "norm_after": c.family == "olmo", "use_qk_norm": True,
            "qk_norm_type": "olmo" if c.family == "olmo" else "qwen3", "qkv_bias": False, "hidden_act": "silu", "embedding_dropout": 0.0,
            "layer_norm_eps": c.eps, "rope_theta": c.rope_theta, "rope_scaling": scaling if y.layers else None,
            "rope_scaling_layers": list(y.layers) or None, "use_cache": True,
            "max_position_embeddings": 65536 if c.family == "olmo" else 36864},
        "vit_config": {
            **common, **heads, "model_type": "molmo2", "hidden_size": v.n_embd, "num_hidden_layers": v.n_layer,
            "intermediate_size": v.n_hidden, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": v.eps, "float32_attention": True,
            "image_default_input_size": [v.crop, v.crop], "image_patch_size": v.patch, "image_num_pos": v.n_patch},
        "adapter_config": {
            **common, **heads, "model_type": "molmo2", "hidden_size": v.n_embd, "intermediate_size": c.n_hidden,
            "text_hidden_size": c.n_embd, "vit_layers": list(v.feature_layers), "hidden_act": "silu", "float32_attention": True,
            "image_feature_dropout": 0.0, "pooling_attention_mask": True},
    }


# ---------------------------------------------------------------------------------------------------------------
# in


def is_copy(where, head, table):
    """Is the head a copy of the first rows of `table`, as in the released 4B? Compares a thousand rows at a time."""
    with weights.RowConcat([head], where) as a, weights.RowConcat(table, where) as b:
        n = a.shape[0]
        return a.shape[1:] == b.shape[1:] and n <= b.shape[0] and all(torch.equal(a[i : min(i + 1000, n)], b[i : min(i + 1000, n)])
                                                                       for i in range(0, n, 1000))


def describe(folder, raw):
    """A released folder -> Config; raw: its config.json. ValueError in one sentence if it is not one."""
    try:
        config = config_from(folder, raw)
        weights.meta_model(config)
    except Refused:
        raise
    except weights.CONFIG_ERRORS as e:
        raise ValueError(f"{folder}/config.json is not the config of a Molmo2 checkpoint: {e!r:.300}") from None
    return config


def load(folder, config, raw, dtype, device):
    """A released folder -> Molmo2 in eval mode; config and raw: from weights.describe. ValueError in one sentence if weights do not fit."""
    where, head = weights.shards(folder), "lm_head.weight"
    embeddings = next(theirs for theirs, ours in released(config).items() if "embedding.weight" in ours)
    if {head, *embeddings} <= set(where):
        config = replace(config, tied=is_copy(where, head, embeddings))
    else:
        config = replace(config, tied=bool(raw.get("tie_word_embeddings") or raw["text_config"].get("tie_word_embeddings")))
    table = released(config)
    if config.tied and head not in where:
        del table[(head,)]
    model = weights.meta_model(config)
    model.load_state_dict(weights.read(where, table, model.state_dict(), dtype, device), assign=True)
    return model.eval()


def base_config(t, v, where):
    """config.json of a base language model and of SigLIP 2 -> Config."""
    if t.get("model_type") not in ("qwen3", "olmo3"):
        raise Refused(f"{where}: model_type {t.get('model_type')!r} is neither qwen3 nor olmo3")
    demand(where, t, hidden_act="silu", attention_bias=False)
    v = v.get("vision_config", v)
    demand("the config.json of SigLIP", v, hidden_act="gelu_pytorch_tanh")
    n, patch = v["num_hidden_layers"], v["patch_size"]
    see = VisionConfig(n_layer=n - 2, n_embd=v["hidden_size"], n_head=v["num_attention_heads"], n_hidden=v["intermediate_size"],
                       feature_layers=(n - 3, n - 9), grid=v["image_size"] // patch, patch=patch, eps=v.get("layer_norm_eps", 1e-6))
    # OLMo-3 slides its window on all layers but every fourth; Molmo2 does not, and only those have YaRN (spec 1.1)
    kinds = t.get("layer_types") or ["sliding_attention"] * 3 + ["full_attention"]
    whole = [i for i in range(min(t["num_hidden_layers"], weights.MAX_LAYERS + 1)) if kinds[i % len(kinds)] == "full_attention"]
    rope = t.get("rope_parameters") or {"rope_theta": t["rope_theta"], **(t.get("rope_scaling") or {})}
    if "full_attention" in rope:         # transformers writes the two kinds of layers apart
        rope, sliding = rope["full_attention"], rope["sliding_attention"]
        demand(where, sliding, rope_type="default", rope_theta=rope["rope_theta"])
    theta, yarn = yarn_of(where, rope, whole, t["num_hidden_layers"])
    return models.ModelConfig(
        n_layer=t["num_hidden_layers"], n_embd=t["hidden_size"], n_head=t["num_attention_heads"], n_kv_head=t["num_key_value_heads"],
        head_dim=t.get("head_dim") or t["hidden_size"] // t["num_attention_heads"], n_hidden=t["intermediate_size"],
        n_vocab=t["vocab_size"], family="olmo" if t["model_type"] == "olmo3" else "qwen", tied=bool(t.get("tie_word_embeddings")),
        rope_theta=theta, yarn=yarn, eps=t["rms_norm_eps"], vision=see)


def start(llm_folder, vit_folder, seed=0):
    """A base language model and SigLIP 2 -> Molmo2 as stage 1 starts: connector and extra embeddings N(0, 0.02), biases 0 (spec 1.4).

    Blocks of the ViT above its third layer from the end are left out, for nothing reads them; every tensor as stored.
    """
    llm_folder, vit_folder = Path(llm_folder), Path(vit_folder)
    both = f"{llm_folder}/config.json and {vit_folder}/config.json"
    try:
        t, v = (json.loads((folder / "config.json").read_text()) for folder in (llm_folder, vit_folder))
        config = base_config(t, v, f"{llm_folder}/config.json")
        model = weights.meta_model(config)
    except Refused:
        raise
    except weights.CONFIG_ERRORS as e:
        raise ValueError(f"{both}: not those of a base language model and of SigLIP 2: {e!r}") from None
    like, vocab = model.state_dict(), config.n_vocab

    def fit(table):                      # cut, or filled with zeros, to the vocabulary that config.json declares
        return torch.nn.functional.pad(table[:vocab], (0, 0, 0, max(vocab - len(table), 0)))

    names = base_llm(config)
    found = {k: f for k, f in weights.shards(llm_folder).items() if not (config.tied and k == "lm_head.weight")}
    found_weights = weights.read(found, names, like, prepare={"model.embed_tokens.weight": fit} | ({} if config.tied else {"lm_head.weight": fit}))
    names = base_vit(config)
    kept = {name: file for name, file in weights.shards(vit_folder).items() if (name,) in names}
    # a convolution over (channel, row, column) as a matrix over our patches, which lie as (row, column, channel)
    flat = {"vision_model.embeddings.patch_embedding.weight": lambda w: w.permute(0, 2, 3, 1).flatten(1) if w.ndim == 4 else w[:0]}
    found_weights |= weights.read(kept, names, like, prepare=flat)
    rng = torch.Generator().manual_seed(seed)
    for name in (name for name in like if name not in found_weights):           # in the model's order: the seed says it all
        new = torch.zeros(like[name].shape)
        found_weights[name] = new if name.endswith("bias") else new.normal_(std=0.02, generator=rng)
    model.load_state_dict(found_weights, assign=True)
    return model.eval()


def extended_tokenizer(folder, n_vocab):
    """The base model's tokenizer with Molmo2's special tokens behind V ids; the gap is filled with tokens nobody writes (spec 1.2)."""
    try:
        from tokenizers import AddedToken, Tokenizer
    except ImportError:
        raise ValueError("the tokenizer of a base model needs an extra package: pip install tokenizers") from None
    path = Path(folder) / "tokenizer.json"
    try:
        inner = Tokenizer.from_file(str(path))
        settings = Path(folder) / "tokenizer_config.json"
        settings = json.loads(settings.read_text()) if settings.is_file() else {}
        settings = {key: settings[key] for key in ("bos_token", "eos_token", "pad_token") if settings.get(key)}
    except Exception as e:               # the package raises bare Exceptions
        raise ValueError(f"{path}: not readable as a tokenizer: {str(e).splitlines()[0]}") from None
    for token in ("<|im_start|>", "<|im_end|>"):
        if inner.token_to_id(token) is None:
            raise ValueError(f"{path}: the tokenizer lacks the special token {token}: not one of a model that chats so")
    size = inner.get_vocab_size()
    if size > n_vocab:
        raise ValueError(f"{folder}: the tokenizer has {size} ids, the model rows for {n_vocab}")
    names = [f"|<EXTRA_TOKENS_{i}>|" for i in range(n_vocab - size)] + [text.marked(name) for name in text.SPECIAL]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    with tempfile.TemporaryDirectory() as out:
        inner.save(f"{out}/tokenizer.json")
        (Path(out) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}, indent=1))
        return text.load(out, n_vocab)


# ---------------------------------------------------------------------------------------------------------------
# out

# images and video stand before the first turn, several images with their number (spec 4.2, 14)
CHAT = """{%- set seen = namespace(images=0, n=0) -%}
{%- for message in messages if message.content is not string -%}
{%- for part in message.content if part.type == 'image' -%}{%- set seen.images = seen.images + 1 -%}{%- endfor -%}
{%- endfor -%}
{%- for message in messages if message.content is not string -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{%- set seen.n = seen.n + 1 -%}
{{- 'Image ' ~ seen.n if seen.images > 1 -}}{{- '<|image|>' -}}
{%- elif part.type == 'video' -%}{{- '<|video|>' -}}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def byte_tokenizer(tokenizer):
    """ByteTokenizer -> the same ids as a tokenizer.json of the `tokenizers` format: no merges, and the words as added tokens."""
    # the byte level's alphabet: printable bytes stand for themselves, the others for characters from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    added = {"<|im_start|>": 256, "<|im_end|>": 257, **tokenizer.ids, **{text.marked(k): i for k, i in tokenizer.special.items()}}
    vocab = {hidden.get(b, chr(b)): b for b in range(256)} | added
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": i, "content": word, "special": word not in tokenizer.ids, **plain}
                             for word, i in sorted(added.items(), key=lambda item: item[1])],
            "pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}}


def write_processors(config, tokenizer, settings, out):
    """What transformers reads beside the weights: tokenizer, chat template, image and video processors, generation."""
    v, norm = config.vision, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "do_normalize": True, "resample": 2}
    size = {"size": {"height": v.crop, "width": v.crop}, "patch_size": v.patch, "do_convert_rgb": True, **norm}
    files = {
        "preprocessor_config.json": {"image_processor_type": "Molmo2ImageProcessor", "max_crops": settings.max_crops,
                                     "overlap_margins": [v.overlap_margin] * 2, "pooling_size": [2, 2], **size},
        "video_preprocessor_config.json": {"video_processor_type": "Molmo2VideoProcessor", "pooling_size": [3, 3],
                                           "num_frames": settings.max_frames, "max_fps": settings.fps, "do_sample_frames": True, **size},
        "processor_config.json": {"processor_class": "Molmo2Processor", "image_use_col_tokens": True, "use_single_crop_col_tokens": False,
                                  "use_single_crop_start_token": True, "video_use_col_tokens": False, "use_frame_special_tokens": True},
        "generation_config.json": {"bos_token_id": tokenizer.bos, "eos_token_id": sorted(tokenizer.stops), "pad_token_id": tokenizer.eos}}
    if isinstance(tokenizer, text.ByteTokenizer):
        files["tokenizer.json"] = byte_tokenizer(tokenizer)
        files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                                          "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "model_max_length": 36864}
    else:
        tokenizer.save(out)
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1))
    if not (out / "chat_template.jinja").exists():
        (out / "chat_template.jinja").write_text(CHAT)


def export(model, tokenizer, settings, out, shard_bytes=5 * 10**9):
    """Molmo2 -> a released folder; memory: the model and one shard. Every tensor in its own precision, bit for bit.

    settings: the data.DataConfig it was trained with; crops and frames of the processors, and data.json, which this project reads.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError("export needs an extra package: pip install safetensors") from None
    out, weights = Path(out), model.state_dict()
    out.mkdir(parents=True, exist_ok=True)
    table = released(model.config) | ({("lm_head.weight",): ["embedding.weight"]} if model.config.tied else {})
    files = {name: [x] for theirs, ours in table.items() if len(theirs) > 1 for name, x in zip(theirs, ours, strict=True)}
    files |= {theirs[0]: ours for theirs, ours in table.items() if len(theirs) == 1}
    assert {x for ours in files.values() for x in ours} == set(weights), "the table does not hold every tensor"
    size = {name: sum(weights[x].nbytes for x in ours) for name, ours in files.items()}
    parts, room = [], 0
    for name in files:
        if size[name] > room:
            parts.append([])
            room = shard_bytes
        parts[-1].append(name)
        room -= size[name]
    index = {"metadata": {"total_size": sum(size.values())}, "weight_map": {}}
    for k, names in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{k:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: torch.cat([weights[x].cpu() for x in files[name]]) for name in names}, out / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(names, file)
    if len(parts) > 1:
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    dtype = str(model.embedding.weight.dtype).split(".")[-1]
    (out / "config.json").write_text(json.dumps(config_to(model.config, dtype), indent=1))
    write_processors(model.config, tokenizer, settings, out)
    write_settings(settings, out)


def add_code(hub, out):
    """The Hub's own classes for who needs them (vLLM, older transformers): its *.py files, and where its configs point to them."""
    for path in sorted(Path(hub).glob("*.py")):
        (out / path.name).write_bytes(path.read_bytes())
    pointed = 0
    for name in ("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        theirs = json.loads((Path(hub) / name).read_text()).get("auto_map") if (Path(hub) / name).is_file() else None
        if theirs:
            (out / name).write_text(json.dumps(json.loads((out / name).read_text()) | {"auto_map": theirs}, indent=1))
            pointed += 1
    if not pointed:
        raise ValueError(f"--code {hub}: no config there points to classes of its own (auto_map)")


# ---------------------------------------------------------------------------------------------------------------
# the command

def write_settings(settings, out):
    state = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "vision"}
    (Path(out) / "data.json").write_text(json.dumps(state))


def keep(model, tokenizer, settings, out):
    """A folder of this project: weights, tokenizer, and how it is asked."""
    weights.save(model, out)
    tokenizer.save(out)
    write_settings(settings, out)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("import", help="a released folder -> a folder of this project")
    add.add_argument("source", metavar="HF_DIR")
    add.add_argument("out", metavar="OUT")
    add = commands.add_parser("base", help="Qwen3 or OLMo-3, and SigLIP 2 -> what stage 1 starts from")
    add.add_argument("source", metavar="LLM_DIR")
    add.add_argument("vit", metavar="SIGLIP_DIR")
    add.add_argument("out", metavar="OUT")
    add.add_argument("--seed", type=int, default=0, help="of the connector and the extra embeddings (default 0)")
    add = commands.add_parser("export", help="a run directory or a folder of this project -> a released folder")
    add.add_argument("source", metavar="MODEL")
    add.add_argument("out", metavar="HF_DIR")
    add.add_argument("--shard-gb", type=float, default=5, help="size of a file of weights at most (default 5)")
    add.add_argument("--code", metavar="HUB_DIR", help="also the Hub's own classes from a downloaded checkpoint, for vLLM")
    args = parser.parse_args(argv)
    from evaluation.generate import RELEASED, open_model  # not at the top: weights.load comes here too, and needs none of it

    try:
        out = Path(args.out)
        if args.command == "export" and not 0 < args.shard_gb < 1e6:
            raise ValueError("--shard-gb must be above 0")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out}: not empty; name another folder")
        if args.command == "base":
            model = start(args.source, args.vit, args.seed)
            keep(model, extended_tokenizer(args.source, model.config.n_vocab), DataConfig(**RELEASED), out)
        else:
            model, tokenizer, settings = open_model(args.source, dtype=None)
            if args.command == "import":
                keep(model, tokenizer, settings, out)
            else:
                export(model, tokenizer, settings, out, int(args.shard_gb * 1e9))
                if args.code:
                    add_code(args.code, out)
    except (OSError, ValueError) as e:
        print(f"tools.hf: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    parts = {part: sum(p.numel() for p in ps) for part, ps in model.parameter_groups().items()}
    print(json.dumps({"out": str(out), "tensors": len(model.state_dict()), "params": sum(parts.values()), **parts}))


if __name__ == "__main__":
    main()
