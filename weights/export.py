"""Writes a model as a released folder, which transformers, vLLM and the official code load.

    model.safetensors  config.json                          `export_tensors`, `hub_config`
    tokenizer, chat template, settings of processors        `write_processors`
"""

import json
import shutil
from pathlib import Path

import torch

from records.errors import import_extra
from text.tokenizer import SPECIAL, ByteTokenizer
from weights import files, released

# As in training, media come before the first turn, and several images are numbered. A system text
# starts the first question. EOS ends an answer before <|im_end|> (docs/molmo2.md 4.1, 4.2).
CHAT_TEMPLATE = """
{%- macro text(message) -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {{- message.content | selectattr('type', 'equalto', 'text') | join('', 'text') -}}
    {%- endif -%}
{%- endmacro -%}
{%- set chat = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set media = namespace(parts=[]) -%}
{%- for message in messages if message.content is not string -%}
    {%- set media.parts = media.parts + message.content -%}
{%- endfor -%}
{%- set images = media.parts | selectattr('type', 'equalto', 'image') | list -%}
{%- for image in images -%}
    {{- 'Image ' ~ loop.index if images | length > 1 -}}
    {{- '<|image|>' -}}
{%- endfor -%}
{%- for part in media.parts if part.type == 'video' -%}
    {{- '<|video|>' -}}
{%- endfor -%}
{%- for message in chat -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {{- 'System: ' ~ text(messages[0]) ~ '\\n' if loop.first and chat != messages -}}
    {{- text(message) -}}
    {{- eos_token if message.role == 'assistant' -}}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""


def export(model, tokenizer, data_config, out):
    """Writes Molmo2 as a released folder. Every tensor stays bit for bit equal, in its dtype.

    data_config: of training. Its crops and frames become settings of the processors. The toy's
    ByteTokenizer is not written, since transformers cannot read it. Raises the errors of
    `require_exportable`.
    """
    require_exportable(model.config)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    text = json.dumps(hub_config(model.config, dtype), indent=1)
    (out / "config.json").write_text(text, encoding="utf-8")
    export_tensors(model, out)
    # safetensors writes a file that only its owner can read
    shutil.copymode(out / "config.json", out / "model.safetensors")
    files.save_data_config(data_config, out)
    write_processors(model.config, tokenizer, data_config, out)


def require_exportable(config):
    """Raises ValueError if safetensors is not installed, or if the decoder is a Llama: it has no
    norms of q and k, which the released layout requires."""
    import_extra("safetensors.torch")
    released.require(vars(config), family=("qwen", "olmo"))


def export_tensors(model, out):
    """Writes model.safetensors. This needs memory for a second copy of the weights. The head of a
    tied model is written as a copy of the embedding, as in the released 4B."""
    ours = model.state_dict()
    tensors = {}
    for theirs, names in released.released_names(model.config).items():
        stored = [ours[name].cpu() for name in names]
        # the two embeddings stay two tensors, all other entries are one tensor on disk
        if len(theirs) == 1:
            stored = [torch.cat(stored)]
        tensors |= zip(theirs, stored, strict=True)
    if model.config.tied:
        tensors[released.LM_HEAD] = tensors[released.EMBEDDINGS[0]].clone()
    save_file = import_extra("safetensors.torch").save_file
    with files.writing(out / "model.safetensors"):
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_processors(config, tokenizer, data_config, out):
    """Writes the tokenizer, the chat template, and settings of the processors and of generation."""
    vision = config.vision
    pixels = {
        "size": {"height": vision.crop, "width": vision.crop},
        "patch_size": vision.patch,
        "do_convert_rgb": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,  # bilinear
    }
    contents = {
        "preprocessor_config.json": {
            "image_processor_type": "Molmo2ImageProcessor",
            "max_crops": data_config.max_crops,
            "overlap_margins": [vision.overlap_margin] * 2,
            "pooling_size": [2, 2],
            **pixels,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Molmo2VideoProcessor",
            "pooling_size": [3, 3],
            "num_frames": data_config.max_frames,
            "max_fps": data_config.fps,
            "do_sample_frames": True,
            **pixels,
        },
        "processor_config.json": {
            "processor_class": "Molmo2Processor",
            "image_use_col_tokens": True,
            "use_single_crop_col_tokens": False,
            "use_single_crop_start_token": True,
            "video_use_col_tokens": False,
            "use_frame_special_tokens": True,
        },
        "generation_config.json": {
            "bos_token_id": tokenizer.bos,
            "eos_token_id": sorted(tokenizer.stops),
            "pad_token_id": tokenizer.eos,
        },
    }
    if not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save(out)
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    template = out / "chat_template.jinja"
    if not template.exists():  # a released tokenizer has written its own
        template.write_text(CHAT_TEMPLATE, encoding="utf-8")


SPECIAL_IDS = {
    "image_start_token_id": "im_start",
    "image_end_token_id": "im_end",
    "image_patch_id": "im_patch",
    "image_col_id": "im_col",
    "low_res_image_start_token_id": "low_res_im_start",
    "image_high_res_id": "im_patch",
    "image_low_res_id": "im_low",
    "frame_start_token_id": "frame_start",
    "frame_end_token_id": "frame_end",
}


def hub_config(config, dtype):
    """ModelConfig -> config.json as it was released. The defaults of omitted fields are right.
    dtype: as a word, "bfloat16".

    Two values are right here, but wrong in the published files (docs/molmo2.md 0.6, 1.6): frame
    tokens are on, and the ViT has exactly the blocks that have weights.
    """
    return {
        "architectures": ["Molmo2ForConditionalGeneration"],
        "model_type": "molmo2",
        "dtype": dtype,
        "tie_word_embeddings": False,
        "use_frame_special_tokens": True,
        **{key: config.n_vocab + SPECIAL.index(name) for key, name in SPECIAL_IDS.items()},
        "text_config": hub_text_config(config),
        **hub_vision_configs(config),
    }


def hub_text_config(config):
    yarn = config.yarn
    scaling = {
        "rope_type": "yarn",
        **{key: getattr(yarn, key) for key in ("factor", *released.YARN_KEYS)},
        "original_max_position_embeddings": yarn.original_max,
    }
    olmo = config.family == "olmo"
    return {
        "attn_implementation": "sdpa",
        "model_type": "molmo2_text",
        **{key: getattr(config, field) for key, field in released.LLM_SHAPE.items()},
        "head_dim": config.head_dim,
        "additional_vocab_size": config.n_extra,
        "norm_after": olmo,
        "use_qk_norm": True,
        "qk_norm_type": "olmo" if olmo else "qwen3",
        "qkv_bias": False,
        "hidden_act": "silu",
        "layer_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if yarn.layers else None,
        "rope_scaling_layers": list(yarn.layers) or None,
        "max_position_embeddings": 65536 if olmo else 36864,
    }


def hub_vision_configs(config):
    """-> vit_config and adapter_config."""
    vision = config.vision
    shared = {
        "model_type": "molmo2",
        "attn_implementation": "sdpa",
        "float32_attention": True,
        "hidden_size": vision.n_embd,
        "num_attention_heads": vision.n_head,
        "num_key_value_heads": vision.n_head,
        "head_dim": vision.n_embd // vision.n_head,
    }
    vit = {
        **shared,
        **{key: getattr(vision, field) for key, field in released.SHAPE.items()},
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": vision.eps,
        "image_default_input_size": [vision.crop, vision.crop],
        "image_patch_size": vision.patch,
        "image_num_pos": vision.n_patch,
    }
    adapter = {
        **shared,
        "intermediate_size": config.n_hidden,
        "text_hidden_size": config.n_embd,
        "vit_layers": list(vision.feature_layers),
        "hidden_act": "silu",
        "pooling_attention_mask": True,
    }
    return {"vit_config": vit, "adapter_config": adapter}
