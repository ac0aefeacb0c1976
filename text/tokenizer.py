"""Text to token ids and back, and the chat on top (docs/molmo2.md 1.2, 4.1).

Two tokenizers have the same methods and fields:

    encode(text) -> ids        "<|im_start|>" typed by a user is encoded as text, never as the token
    decode(ids) -> text        special tokens decode to nothing
    save(folder)               writes the files that load_tokenizer reads
    bos eos chat_start chat_end    ids
    stops                      set of ids that end an answer
    special                    {name: id} of the tokens in SPECIAL
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

# Input embeddings that the head cannot predict: the id is V + the place in this list. Others that
# follow in the released table are for MolmoPoint.
SPECIAL = (
    "im_start", "im_end", "im_patch", "im_col", "low_res_im_start",
    "image", "im_low", "frame_start", "frame_end", "video",
)


def token_text(name):
    """The text of a special token: "<im_patch>", but "<|image|>" and "<|video|>"."""
    return f"<|{name}|>" if name in ("image", "video") else f"<{name}>"


def special_ids(n_vocab):
    return {name: n_vocab + i for i, name in enumerate(SPECIAL)}


class ByteTokenizer:
    """UTF-8 bytes, plus one id for each of a few frequent words. For the toy.

    ids   0-255 bytes | 256 <|im_start|> | 257 <|im_end|> = EOS = BOS | 258.. words | .. V-1 unused
          V.. the tokens of SPECIAL
    """

    def __init__(self, words=(), n_vocab=384):
        self.words = tuple(words)
        self.n_vocab = n_vocab
        assert 258 + len(self.words) <= n_vocab, f"{len(self.words)} words do not fit {n_vocab} ids"
        self.chat_start = 256
        self.chat_end = 257
        self.eos = self.chat_end
        self.bos = self.eos  # as for Qwen, which has no BOS
        self.stops = {self.eos}
        self.special = special_ids(n_vocab)
        self.ids = {word: 258 + i for i, word in enumerate(self.words)}
        longest_first = sorted(self.words, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if self.words else None

    def encode(self, text):
        ids = []
        start = 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            ids += text[start : match.start()].encode()
            ids.append(self.ids[match.group()])
            start = match.end()
        return ids + list(text[start:].encode())

    def decode(self, ids):
        parts = []
        for i in ids:
            if i < 256:
                parts.append(bytes([i]))
            elif 258 <= i < 258 + len(self.words):
                parts.append(self.words[i - 258].encode())
        return b"".join(parts).decode(errors="replace")

    def save(self, folder):
        state = {"kind": "bytes", "words": self.words, "n_vocab": self.n_vocab}
        (Path(folder) / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")


class Unencodable(ValueError):
    """A text that a tokenizer gives up on."""


class PretrainedTokenizer:
    """The tokenizer.json of a released checkpoint, read by the `tokenizers` package.

    BOS is the tokenizer's own, or EOS where it has none (Qwen). ValueError names the first special
    token that is missing or has another id than the model expects.
    """

    FILES = (
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "merges.txt",
    )

    def __init__(self, folder, n_vocab):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("it needs an extra package: "
                             "pip install -r requirements-extras.txt") from None
        paths = [Path(folder) / name for name in self.FILES]
        self.files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        state = json.loads(self.files["tokenizer.json"])
        # a special token that is not declared special would be recognised in a user's text
        ours = {"<|im_start|>", "<|im_end|>", *map(token_text, SPECIAL)}
        for token in state["added_tokens"]:
            token["special"] = token["special"] or token["content"] in ours
        self.inner = Tokenizer.from_str(json.dumps(state))
        # what a user types stays text
        self.inner.encode_special_tokens = True

        settings = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        self.eos = self.id_of(settings.get("eos_token") or "<|im_end|>")
        self.bos = self.id_of(settings["bos_token"]) if settings.get("bos_token") else self.eos
        self.chat_start = self.id_of("<|im_start|>")
        self.chat_end = self.id_of("<|im_end|>")
        self.stops = {self.eos, self.chat_end}
        self.special = special_ids(n_vocab)
        for name, wanted in self.special.items():
            found = self.id_of(token_text(name))
            if found != wanted:
                raise ValueError(f"{token_text(name)} is id {found} of the tokenizer "
                                 f"and {wanted} of the model")
        for token in state["added_tokens"]:
            if token["id"] >= n_vocab and not token["special"]:
                raise ValueError(
                    f"the added token {token['content']} has id {token['id']}, but the model "
                    f"predicts only ids below {n_vocab}; rename an unused token, such as "
                    "|<EXTRA_TOKENS_0>|, instead of adding one")

    def id_of(self, token):
        token = token["content"] if isinstance(token, dict) else token
        found = self.inner.token_to_id(token)
        if found is None:
            raise ValueError(f"it lacks the special token {token} of Molmo2")
        return found

    def encode(self, text):
        try:
            return self.inner.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # its PanicException is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise Unencodable(f"its tokenizer cannot encode it: {error}") from None

    def decode(self, ids):
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def save(self, folder):
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def load_tokenizer(folder, n_vocab):
    """The tokenizer in a model's folder; n_vocab: V of the model. OSError or ValueError."""
    path = Path(folder) / "tokenizer.json"
    content = path.read_bytes()
    try:
        state = json.loads(content)
        if state.get("kind") != "bytes":
            return PretrainedTokenizer(folder, n_vocab)
        tokenizer = ByteTokenizer(state["words"], state["n_vocab"])
    except Exception as error:  # the package raises none but Exception itself
        raise ValueError(f"{path} cannot be used as a tokenizer: {error}") from None
    if tokenizer.n_vocab != n_vocab:
        raise ValueError(f"{path} is no byte tokenizer for a model of {n_vocab} ids")
    return tokenizer


class Segment(NamedTuple):
    """Consecutive tokens of a chat that have the same loss."""
    ids: list
    learn: bool  # False: read only. data.py turns this into a weight


def chat(turns, tokenizer):
    """[(question, answer), ..] -> [Segment, ..]: loss on every answer and the EOS that ends it.

    An answer of None must be the last: then the segments are a prompt. After the first turn, EOS
    (with loss) is followed by <|im_end|> (without), as the released models are trained
    (docs/molmo2.md 4.1); for Qwen both are the same token.
    """
    encode = tokenizer.encode
    newline = encode("\n")
    segments = []
    for i, (question, answer) in enumerate(turns):
        prompt = [tokenizer.chat_end, *newline] if i else []
        prompt += [tokenizer.chat_start, *encode("user\n" + question), tokenizer.chat_end, *newline]
        prompt += [tokenizer.chat_start, *encode("assistant\n")]
        segments.append(Segment(prompt, False))
        if answer is not None:
            segments.append(Segment(encode(answer) + [tokenizer.eos], True))
    return segments
