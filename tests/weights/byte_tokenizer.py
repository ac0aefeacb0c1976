"""The toy's byte tokenizer in the format of the package `tokenizers`, so that transformers' own
processor can ask an exported toy."""

import json

from text.tokenizer import token_text


def byte_alphabet():
    """{character: byte} of byte-level BPE: printable bytes are themselves, others start at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + k): byte for k, byte in enumerate(others)}


def save_byte_tokenizer(tokenizer, folder):
    """Adds the tokenizer's files to an exported toy: byte-level BPE without merges, and the words
    as added tokens, all with the ids of ByteTokenizer."""
    import tokenizers

    added = {"<|im_start|>": tokenizer.chat_start, "<|im_end|>": tokenizer.chat_end}
    added |= tokenizer.ids
    added |= {token_text(name): i for name, i in tokenizer.special.items()}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet() | added, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_tokens([
        tokenizers.AddedToken(word, special=word not in tokenizer.ids, normalized=False)
        for word in sorted(added, key=added.get)])
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                "clean_up_tokenization_spaces": False, "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
