"""A model -> the folder of a released checkpoint, for transformers, vLLM and the official code."""

import json
from pathlib import Path

import torch

from text.tokenizer import ByteTokenizer, token_text
from weights import files, released, tensor_files
from weights.hub_config import hub_config

# Images and video stand before the first turn; several images are numbered (docs/molmo2.md 4.2).
CHAT_TEMPLATE = """
{%- set seen = namespace(images=0, n=0) -%}
{%- for message in messages if message.content is not string -%}
    {%- for part in message.content if part.type == 'image' -%}
        {%- set seen.images = seen.images + 1 -%}
    {%- endfor -%}
{%- endfor -%}
{%- for message in messages if message.content is not string -%}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}
            {%- set seen.n = seen.n + 1 -%}
            {{- 'Image ' ~ seen.n if seen.images > 1 -}}
            {{- '<|image|>' -}}
        {%- elif part.type == 'video' -%}
            {{- '<|video|>' -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content if part.type == 'text' -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def export(model, tokenizer, data_config, out, file_bytes=5 * 10**9):
    """Molmo2 -> a released folder, every tensor bit for bit in its own dtype.

    data_config: the DataConfig of training, which decides on crops and frames in the processors'
    settings. Memory: the model and one weight file of `file_bytes`.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise ValueError("export needs an extra package: pip install safetensors") from None
    if model.config.family == "llama":
        raise ValueError("the released layout has norms of q and k, which a decoder of the Llama "
                         "kind lacks: transformers has no class for it")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    export_tensors(model, out, file_bytes)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(hub_config(model.config, dtype), indent=1))
    write_processors(model.config, tokenizer, data_config, out)
    files.save_data_config(data_config, out)


def export_tensors(model, out, file_bytes):
    """model.safetensors, or several weight files of `file_bytes` at most and their index."""
    parameters = model.state_dict()
    sources = tensor_sources(model.config)
    assert {ours for names in sources.values() for ours in names} == set(parameters), \
        "the table does not hold every tensor"
    sizes = {name: sum(parameters[ours].nbytes for ours in names)
             for name, names in sources.items()}
    parts = split_by_size(sizes, file_bytes)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {}}
    for k, names in enumerate(parts, 1):
        file = "model.safetensors"
        if len(parts) > 1:
            file = f"model-{k:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: torch.cat([parameters[ours].cpu() for ours in sources[name]])
                   for name in names}
        tensor_files.write_safetensors(tensors, out / file)
        index["weight_map"] |= dict.fromkeys(names, file)
    if len(parts) > 1:
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def tensor_sources(config):
    """{name on disk: our names, whose rows it holds one under the other}. The head of a tied model
    is written as a copy of the embedding, as in the released 4B."""
    sources = {}
    for theirs, ours in released.released_names(config).items():
        if len(theirs) == 1:
            sources[theirs[0]] = ours
        else:                        # embedding and extra embedding: one for one
            for name, our_name in zip(theirs, ours, strict=True):
                sources[name] = [our_name]
    if config.tied:
        sources[released.LM_HEAD] = ["embedding.weight"]
    return sources


def split_by_size(sizes, limit):
    """{name: bytes} -> lists of names in their order, of `limit` bytes at most; a larger tensor has
    a list of its own."""
    groups = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


# ------------------------------------------------------------------------------------------------
# tokenizer and processors


def write_processors(config, tokenizer, data_config, out):
    """The files that transformers reads beside the weights: tokenizer, chat template, settings of
    the image and video processors and of generation."""
    vision = config.vision
    pixels = {
        "size": {"height": vision.crop, "width": vision.crop},
        "patch_size": vision.patch,
        "do_convert_rgb": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,               # bilinear
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
    if isinstance(tokenizer, ByteTokenizer):
        contents |= byte_tokenizer_files(tokenizer)
    else:
        tokenizer.save(out)
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=1))
    template = out / "chat_template.jinja"
    if not template.exists():        # a released tokenizer brings its own
        template.write_text(CHAT_TEMPLATE)


def byte_alphabet():
    """{character: byte} of byte-level BPE: printable bytes are themselves, others start at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    alphabet = {}
    n_others = 0
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + n_others)] = byte
            n_others += 1
    return alphabet


def byte_tokenizer_files(tokenizer):
    """ByteTokenizer -> the same ids in the format of the `tokenizers` package: byte-level BPE
    without merges, and the words as added tokens."""
    added = {"<|im_start|>": tokenizer.chat_start, "<|im_end|>": tokenizer.chat_end}
    added |= tokenizer.ids
    added |= {token_text(name): i for name, i in tokenizer.special.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added_tokens = []
    for content, i in sorted(added.items(), key=lambda item: item[1]):
        special = content not in tokenizer.ids
        added_tokens.append({"id": i, "content": content, "special": special, **plain})
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": byte_alphabet() | added,
        "merges": [],
    }
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": added_tokens,
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 36864,
    }
    return {"tokenizer.json": state, "tokenizer_config.json": settings}


def add_hub_code(hub, out):
    """Adds the Hub's own classes for vLLM and older versions of transformers: the *.py files of a
    downloaded checkpoint, and the entries of its configs that point to them (auto_map)."""
    configs = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json",
               "processor_config.json")
    auto_maps = {}
    for name in configs:
        path = Path(hub) / name
        auto_map = json.loads(path.read_text()).get("auto_map") if path.is_file() else None
        if auto_map:
            auto_maps[name] = auto_map
    if not auto_maps:
        raise ValueError(f"--code {hub}: no config there points to classes of its own (auto_map)")
    for path in sorted(Path(hub).glob("*.py")):
        (out / path.name).write_bytes(path.read_bytes())
    for name, auto_map in auto_maps.items():
        settings = json.loads((out / name).read_text()) | {"auto_map": auto_map}
        (out / name).write_text(json.dumps(settings, indent=1))
