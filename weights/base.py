"""A base language model and SigLIP 2 -> Molmo2 as stage 1 starts (docs/molmo2.md 1.4, 1.6).

    Qwen3-8B, OLMo-3 or SmolLM2          decoder, head, embedding; the tokenizer, extended
    siglip2-so400m-patch14-384           ViT, up to the third block from the end
    drawn at random                      connector, extra embeddings
"""

import json
import tempfile
from pathlib import Path

import torch

from model import ModelConfig
from text.tokenizer import SPECIAL, load_tokenizer, token_text
from vision import VisionConfig
from weights import files, tensor_files
from weights.released import LM_HEAD, MAX_LAYERS, Unsupported, require, rope_from, with_biases

# ------------------------------------------------------------------------------------------------
# names; a table is explained in weights/released.py

LLM_EMBEDDING = "model.embed_tokens.weight"
LLM_BLOCK = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.out",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_proj": "mlp.gate",
    "mlp.down_proj": "mlp.down",
}
# Qwen normalises the input of a sub-layer, OLMo its output, and the norms are named accordingly.
# Llama (SmolLM2) is Qwen without norms of q and k.
PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
QK_NORMS = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
LLM_NORMS = {
    "qwen": PRE_NORMS | QK_NORMS,
    "llama": PRE_NORMS,
    "olmo": {"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "mlp_norm",
             **QK_NORMS},
}
PATCH_EMBEDDING = "vision_model.embeddings.patch_embedding.weight"
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


def llm_names(config):
    """ModelConfig -> table of the base language model, Qwen3, OLMo-3 or Llama."""
    names = {(LLM_EMBEDDING,): ["embedding.weight"], ("model.norm.weight",): ["norm.weight"]}
    if not config.tied:
        names[(LM_HEAD,)] = ["head.weight"]
    for i in range(config.n_layer):
        for theirs, ours in (LLM_NORMS[config.family] | LLM_BLOCK).items():
            names[(f"model.layers.{i}.{theirs}.weight",)] = [f"blocks.{i}.{ours}.weight"]
    return names


def siglip_names(config):
    """ModelConfig -> table of SigLIP, without what Molmo2 does not use: text tower, head, upper
    blocks."""
    names = {("vision_model.embeddings.position_embedding.weight",): ["vision.vit.pos"]}
    names |= with_biases("vision_model.embeddings", "vision.vit", {"patch_embedding": "patch"})
    for i in range(config.vision.n_layer):
        block = f"vision_model.encoder.layers.{i}"
        names |= with_biases(block, f"vision.vit.blocks.{i}", SIGLIP_BLOCK)
    return names


# ------------------------------------------------------------------------------------------------
# config.json

# transformers' SiglipVisionConfig: published config.json files leave out what equals it
SIGLIP_DEFAULTS = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "patch_size": 16,
    "image_size": 224,
    "layer_norm_eps": 1e-6,
}


def siglip_config(raw, path):
    """config.json of SigLIP or SigLIP 2 -> VisionConfig with the blocks that Molmo2 reads; the
    path is for messages."""
    vit = raw.get("vision_config", raw)
    kinds = {raw.get("model_type"), vit.get("model_type")}
    if kinds & {"siglip2", "siglip2_vision_model"} or "num_patches" in vit:
        raise Unsupported(f"{path}: a NaFlex model of SigLIP 2, which takes images of any shape, "
                          "is not supported; take one with a fixed image size")
    if not kinds <= {None, "siglip", "siglip_vision_model"}:
        raise Unsupported(f"{path}: model_type {raw.get('model_type')!r} is not siglip")
    require(path, vit, hidden_act="gelu_pytorch_tanh")
    vit = SIGLIP_DEFAULTS | vit
    n_layer = vit["num_hidden_layers"]
    grid = vit["image_size"] // vit["patch_size"]
    if n_layer < 9:
        raise Unsupported(f"{path}: of {n_layer} blocks, and Molmo2 reads the third and the ninth "
                          "from the end")
    if grid <= 2 * VisionConfig.overlap_margin:
        raise Unsupported(f"{path}: {grid} x {grid} patches, and crops overlap by "
                          f"{VisionConfig.overlap_margin} on each side; take one with more")
    return VisionConfig(
        n_layer=n_layer - 2,         # nothing reads the last two
        n_embd=vit["hidden_size"],
        n_head=vit["num_attention_heads"],
        n_hidden=vit["intermediate_size"],
        feature_layers=(n_layer - 3, n_layer - 9),
        grid=grid,
        patch=vit["patch_size"],
        eps=vit["layer_norm_eps"],
    )


FAMILIES = {"qwen3": "qwen", "olmo3": "olmo", "llama": "llama"}


def base_config(llm, siglip, llm_path, siglip_path):
    """config.json of a base language model and of SigLIP -> ModelConfig; the paths are for
    messages."""
    if llm.get("model_type") not in FAMILIES:
        raise Unsupported(f"{llm_path}: model_type {llm.get('model_type')!r} is neither qwen3 nor "
                          "olmo3 nor llama")
    require(llm_path, llm, hidden_act="silu", attention_bias=False, mlp_bias=False)
    vision = siglip_config(siglip, siglip_path)
    # OLMo-3 has a sliding window on all layers but every fourth. Molmo2 has none, and YaRN applies
    # to the layers without a window only (docs/molmo2.md 1.1).
    kinds = llm.get("layer_types") or ["sliding_attention"] * 3 + ["full_attention"]
    if llm["model_type"] == "llama":
        kinds = ["full_attention"]
    layers = range(min(llm["num_hidden_layers"], MAX_LAYERS))
    full_layers = [i for i in layers if kinds[i % len(kinds)] == "full_attention"]
    theta, yarn = rope_from(llm_path, llm, full_layers)
    return ModelConfig(
        n_layer=llm["num_hidden_layers"],
        n_embd=llm["hidden_size"],
        n_head=llm["num_attention_heads"],
        n_kv_head=llm["num_key_value_heads"],
        head_dim=llm.get("head_dim") or llm["hidden_size"] // llm["num_attention_heads"],
        n_hidden=llm["intermediate_size"],
        n_vocab=llm["vocab_size"],
        family=FAMILIES[llm["model_type"]],
        tied=bool(llm.get("tie_word_embeddings")),
        rope_theta=theta,
        yarn=yarn,
        eps=llm["rms_norm_eps"],
        vision=vision,
    )


# ------------------------------------------------------------------------------------------------
# weights and tokenizer


def start_from_base(llm_folder, siglip_folder, seed=0):
    """Two folders -> Molmo2 in eval mode, every tensor in the dtype in which it is stored.

    New weights are N(0, 0.02), new biases 0 (docs/molmo2.md 1.4). ValueError in one sentence if a
    folder does not hold such a model.
    """
    llm_folder = Path(llm_folder)
    siglip_folder = Path(siglip_folder)
    config = read_configs(llm_folder, siglip_folder)
    model = files.meta_model(config)
    llm_table = llm_names(config)
    siglip_table = siglip_names(config)
    llm = tensor_files.stored_tensors(llm_folder)
    if config.tied:
        llm.pop(LM_HEAD, None)       # some tied checkpoints store the copy too
    siglip = tensor_files.stored_tensors(siglip_folder)
    siglip = {name: stored for name, stored in siglip.items() if (name,) in siglip_table}
    tensor_files.check_names(llm, llm_table, llm_folder)
    tensor_files.check_names(siglip, siglip_table, siglip_folder)

    loaded = tensor_files.stored_dtypes(llm, llm_table)
    loaded |= tensor_files.stored_dtypes(siglip, siglip_table)
    new = [name for name in model.state_dict() if name not in loaded]
    tensor_files.allocate(model, dict.fromkeys(new, torch.float32) | loaded)
    parameters = model.state_dict()
    copy_llm(llm, llm_table, parameters)
    copy_siglip(siglip, siglip_table, parameters, config.vision.patch)
    generator = torch.Generator().manual_seed(seed)
    for name in new:                 # in the model's order, so that the seed decides every number
        if name.endswith("bias"):
            parameters[name].zero_()
        else:
            parameters[name].normal_(std=0.02, generator=generator)
    return model.eval()


def read_configs(llm_folder, siglip_folder):
    """-> ModelConfig; ValueError in one sentence if the two config.json describe no such models."""
    llm_path = llm_folder / "config.json"
    siglip_path = siglip_folder / "config.json"
    try:
        llm = json.loads(llm_path.read_text())
        siglip = json.loads(siglip_path.read_text())
        config = base_config(llm, siglip, llm_path, siglip_path)
        files.meta_model(config)
    except Unsupported:
        raise
    except files.CONFIG_ERRORS as e:
        raise ValueError(f"{llm_path} and {siglip_path} do not describe a base language model and "
                         f"SigLIP: {e!r:.300}") from None
    return config


def copy_llm(stored, table, parameters):
    """Embedding and head are cut, or filled with zeros, to the vocabulary of config.json."""
    vocabulary = {(name,): table[(name,)] for name in (LLM_EMBEDDING, LM_HEAD) if name in stored}
    same_shape = {names: ours for names, ours in table.items() if names not in vocabulary}
    tensor_files.check_shapes(stored, same_shape, parameters)
    tensor_files.copy_tensors(stored, same_shape, parameters)
    for (name,), (ours,) in vocabulary.items():
        parameter = parameters[ours]
        rows = tensor_files.read_tensor(stored[name])[: len(parameter)]
        if rows.shape[1:] != parameter.shape[1:]:
            raise ValueError(f"{stored[name].file}: {name} has rows of shape "
                             f"{list(rows.shape[1:])}, config.json asks for "
                             f"{list(parameter.shape[1:])}")
        parameter[: len(rows)] = rows
        parameter[len(rows) :] = 0


def copy_siglip(stored, table, parameters, patch):
    """SigLIP embeds patches by a convolution over (channel, row, column), Molmo2 by a matrix over
    patches flattened as (row, column, channel)."""
    convolution = (PATCH_EMBEDDING,)
    same_shape = {names: ours for names, ours in table.items() if names != convolution}
    tensor_files.check_shapes(stored, same_shape, parameters)
    tensor_files.copy_tensors(stored, same_shape, parameters)
    (ours,) = table[convolution]
    parameter = parameters[ours]
    kernel = tensor_files.read_tensor(stored[PATCH_EMBEDDING])
    expected = [len(parameter), 3, patch, patch]
    if list(kernel.shape) != expected:
        raise ValueError(f"{stored[PATCH_EMBEDDING].file}: {PATCH_EMBEDDING} has shape "
                         f"{list(kernel.shape)}, config.json asks for {expected}")
    parameter.copy_(kernel.permute(0, 2, 3, 1).flatten(1))


def extended_tokenizer(folder, n_vocab):
    """The tokenizer of a base model, with Molmo2's special tokens at the ids from n_vocab on; the
    gap is filled with tokens that no text contains (docs/molmo2.md 1.2)."""
    try:
        from tokenizers import AddedToken, Tokenizer
    except ImportError:
        raise ValueError("the tokenizer of a base model needs an extra package: pip install "
                         "tokenizers") from None
    folder = Path(folder)
    path = folder / "tokenizer.json"
    try:
        inner = Tokenizer.from_file(str(path))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **token_settings(folder)}
    except Exception as e:               # the package raises bare Exceptions
        reason = str(e).splitlines()[0]
        raise ValueError(f"{path}: not readable as a tokenizer: {reason}") from None
    for token in ("<|im_start|>", "<|im_end|>"):
        if inner.token_to_id(token) is None:
            raise ValueError(f"{path}: the tokenizer lacks the special token {token}, which marks "
                             "the turns of a chat")
    size = inner.get_vocab_size()
    if size > n_vocab:
        raise ValueError(f"{folder}: the tokenizer has {size} ids, the model rows for {n_vocab}")
    fillers = [f"|<EXTRA_TOKENS_{i}>|" for i in range(n_vocab - size)]
    special = [token_text(name) for name in SPECIAL]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False)
                              for name in fillers + special])
    with tempfile.TemporaryDirectory() as out:
        inner.save(f"{out}/tokenizer.json")
        (Path(out) / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
        return load_tokenizer(out, n_vocab)


def token_settings(folder):
    """Which tokens a base model's tokenizer_config.json names as BOS, EOS and padding."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    keys = ("bos_token", "eos_token", "pad_token")
    return {key: settings[key] for key in keys if settings.get(key)}
