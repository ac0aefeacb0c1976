"""Builds Molmo2, as it is before stage 1, from two pretrained models (docs/molmo2.md 1.4, 1.6).

    Qwen3-8B, OLMo-3 or SmolLM2     decoder, head, embedding; the tokenizer, extended
    siglip2-so400m-patch14-384      ViT, up to the third block from the end
    random numbers                  connector, extra embeddings
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from model import ModelConfig
from records.errors import explained, import_extra
from text.tokenizer import SPECIAL, load_tokenizer, token_text
from vision import VisionConfig
from weights import files
from weights.released import LLM_SHAPE, LM_HEAD, SHAPE, require, rope_from, with_biases

# tables {name on disk: our name}, see weights/released.py
LLM_BLOCK = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.out",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_proj": "mlp.gate",
    "mlp.down_proj": "mlp.down",
}
FAMILIES = {"qwen3": "qwen", "olmo3": "olmo", "llama": "llama"}  # by model_type
# Qwen normalises the input of a sub-layer and OLMo its output, so their norms have different names.
# Llama (SmolLM2) is Qwen without norms of q and k.
PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
QK_NORMS = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
LLM_NORMS = {
    "qwen": PRE_NORMS | QK_NORMS,
    "llama": PRE_NORMS,
    "olmo": {"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "mlp_norm",
             **QK_NORMS},
}
SIGLIP_BLOCK = {
    "layer_norm1": "attn_norm",
    "layer_norm2": "mlp_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "out",
    "mlp.fc1": "up",
    "mlp.fc2": "down",
}
# defaults of SiglipVisionConfig in transformers; published config.json files omit equal values
SIGLIP_DEFAULTS = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "patch_size": 16,
    "image_size": 224,
    "layer_norm_eps": 1e-6,
}


def llm_names(config):
    """ModelConfig -> table of names of the base language model: Qwen3, OLMo-3 or Llama."""
    names = {("model.embed_tokens.weight",): ["embedding.weight"],
             ("model.norm.weight",): ["norm.weight"]}
    if not config.tied:
        names[(LM_HEAD,)] = ["head.weight"]
    for i in range(config.n_layer):
        for theirs, ours in (LLM_NORMS[config.family] | LLM_BLOCK).items():
            names[(f"model.layers.{i}.{theirs}.weight",)] = [f"blocks.{i}.{ours}.weight"]
    return names


def siglip_names(config, prefix):
    """ModelConfig -> table of names of SigLIP's vision tower. Molmo2 does not use its head and
    last blocks. prefix: "vision_model.", or "" if the tower was saved alone."""
    names = {(f"{prefix}embeddings.position_embedding.weight",): ["vision.vit.pos"]}
    names |= with_biases(f"{prefix}embeddings", "vision.vit", {"patch_embedding": "patch"})
    for i in range(config.vision.n_layer):
        block = f"{prefix}encoder.layers.{i}"
        names |= with_biases(block, f"vision.vit.blocks.{i}", SIGLIP_BLOCK)
    return names


def siglip_config(raw):
    """config.json of SigLIP or SigLIP 2 -> VisionConfig with the blocks that Molmo2 uses."""
    vit = SIGLIP_DEFAULTS | raw.get("vision_config", raw)
    # NaFlex models have num_patches in place of a fixed image size, and are not supported
    require(vit, model_type="siglip_vision_model", num_patches=None)
    require(vit, hidden_act="gelu_pytorch_tanh")
    n_layer = vit["num_hidden_layers"]
    vit["num_hidden_layers"] = n_layer - 2  # Molmo2 does not use the last two
    return VisionConfig(
        **{field: vit[key] for key, field in SHAPE.items()},
        feature_layers=(n_layer - 3, n_layer - 9),
        grid=vit["image_size"] // vit["patch_size"],
        patch=vit["patch_size"],
        eps=vit["layer_norm_eps"],
    )


def llm_config(llm, vision):
    """config.json of a base language model, and VisionConfig of SigLIP -> ModelConfig."""
    require(llm, model_type=tuple(FAMILIES), hidden_act="silu", attention_bias=False,
            mlp_bias=False, use_sliding_window=False)
    if not isinstance(llm["rms_norm_eps"], float):
        raise ValueError(f"rms_norm_eps must be a float, not {llm['rms_norm_eps']}")
    layers = None
    if llm["model_type"] == "olmo3":
        # OLMo-3 has a sliding window on three of four layers. Molmo2 has no windows, and YaRN
        # applies only to layers that had none (docs/molmo2.md 1.1).
        kinds = llm.get("layer_types") or ["sliding_attention"] * 3 + ["full_attention"]
        layers = range(llm["num_hidden_layers"])
        layers = [i for i in layers if kinds[i % len(kinds)] == "full_attention"]
    theta, yarn = rope_from(llm, layers)
    return ModelConfig(
        **{field: llm[key] for key, field in LLM_SHAPE.items()},
        head_dim=llm.get("head_dim") or llm["hidden_size"] // llm["num_attention_heads"],
        family=FAMILIES[llm["model_type"]],
        tied=bool(llm.get("tie_word_embeddings")),
        rope_theta=theta,
        yarn=yarn,
        eps=float(llm["rms_norm_eps"]),
        vision=vision,
    )


def start_from_base(llm_folder, siglip_folder, seed=0):
    """Two folders -> Molmo2 in eval mode. Every tensor has the dtype in which it is stored.
    New weights are N(0, 0.02), and new biases are 0 (docs/molmo2.md 1.4). Raises ValueError if a
    folder does not contain such a model."""
    llm_folder = Path(llm_folder)
    siglip_folder = Path(siglip_folder)
    with explained(siglip_folder):
        vision = siglip_config(json.loads((siglip_folder / "config.json").read_bytes()))
    with explained(llm_folder):
        config = llm_config(json.loads((llm_folder / "config.json").read_bytes()), vision)
    model = files.meta_model(config)
    llm = files.weight_files(llm_folder)
    tensors = read_base(llm_folder, llm, llm_names(config), model)
    siglip = files.weight_files(siglip_folder)
    prefix = "" if "embeddings.patch_embedding.weight" in siglip else "vision_model."
    table = siglip_names(config, prefix)
    siglip = {name: file for name, file in siglip.items() if (name,) in table}
    tensors |= read_base(siglip_folder, siglip, table, model)
    generator = torch.Generator().manual_seed(seed)
    # in the order of the model, so that every number depends on the seed only
    for name, parameter in model.state_dict().items():
        if name not in tensors:
            tensors[name] = torch.zeros(parameter.shape)
            if not name.endswith("bias"):
                tensors[name].normal_(std=0.02, generator=generator)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def read_base(folder, stored, table, model):
    """{name on disk: file}, table -> {our name: tensor as stored}, in the shapes of a meta
    model. Embedding and head are cut, or padded with zeros, to the vocabulary size in
    config.json. SigLIP embeds patches by a convolution over (channel, row, column). Molmo2
    uses a matrix for patches that are flattened as (row, column, channel)."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tensors = {}
    for name, tensor in files.read_table(folder, stored, table, shapes):
        if name in ("embedding.weight", "head.weight"):
            tensor = F.pad(tensor, (0, 0, 0, shapes[name][0] - len(tensor)))  # cut if below 0
        if name == "vision.vit.patch.weight":
            tensor = tensor.permute(0, 2, 3, 1).flatten(1)
        files.check_shape(folder, name, tensor, shapes[name])
        tensors[name] = tensor.clone()
    return tensors


def extended_tokenizer(folder, n_vocab):
    """The tokenizer of a base model with the special tokens of Molmo2, whose ids start at n_vocab.
    Tokens that occur in no text fill the ids before them (docs/molmo2.md 1.2)."""
    tokenizers = import_extra("tokenizers")
    path = Path(folder) / "tokenizer.json"
    with explained(path):
        inner = tokenizers.Tokenizer.from_file(str(path))
    names = [f"|<EXTRA_TOKENS_{i}>|" for i in range(n_vocab - inner.get_vocab_size())]
    names += [token_text(name) for name in SPECIAL]
    inner.add_special_tokens([
        tokenizers.AddedToken(name, normalized=False) for name in names])
    theirs = json.loads((Path(folder) / "tokenizer_config.json").read_bytes())
    settings = {key: theirs.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    with explained(path), tempfile.TemporaryDirectory() as out:
        inner.save(f"{out}/tokenizer.json")
        text = json.dumps(settings, indent=1)
        (Path(out) / "tokenizer_config.json").write_text(text, encoding="utf-8")
        return load_tokenizer(out, n_vocab)
