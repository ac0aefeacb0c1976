"""The toy's byte tokenizer in the format of the package `tokenizers`, so that transformers' own
processor can ask an exported toy."""

import json

from text.tokenizer import token_text


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


def save_byte_tokenizer(tokenizer, folder):
    """Adds the tokenizer's files to an exported toy."""
    for name, content in byte_tokenizer_files(tokenizer).items():
        (folder / name).write_text(json.dumps(content))
