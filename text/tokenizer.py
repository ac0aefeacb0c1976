"""Converts text to token ids and back, and builds the chat (docs/molmo2.md 1.2, 4.1).

Two tokenizers have the same methods and fields:

    encode(text) -> ids        "<|im_start|>" typed by a user is encoded as text, never as the token
    decode(ids) -> text        special tokens are skipped
    save(folder)               writes the files that load_tokenizer reads
    bos eos chat_start chat_end    ids
    stops                      set of ids that end an answer
    special                    {name: id} of the tokens in SPECIAL
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

# Input tokens that the head cannot predict. The id is V + the position in this list. The released
# embedding has more such tokens after these, for MolmoPoint.
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
    """UTF-8 bytes, plus one id for each of a few frequent words. The toy uses it.

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
        self.bos = self.eos  # as in Qwen, which has no BOS
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
    """A text that a tokenizer cannot encode."""


class PretrainedTokenizer:
    """The tokenizer.json of a released checkpoint, read by the `tokenizers` package.

    BOS is the BOS of the tokenizer, or EOS if it has none (Qwen). Raises ValueError if a special
    token is missing, or has another id than in the model.
    """

    FILES = (
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "merges.txt",
    )

    def __init__(self, folder, n_vocab):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("the package tokenizers is not installed: "
                             "pip install -r requirements-extras.txt") from None
        paths = [Path(folder) / name for name in self.FILES]
        self.files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        state = json.loads(self.files["tokenizer.json"])
        # if such a token were not special, its text, typed by a user, would become the token
        ours = {"<|im_start|>", "<|im_end|>", *map(token_text, SPECIAL)}
        for token in state["added_tokens"]:
            token["special"] = token["special"] or token["content"] in ours
        self.inner = Tokenizer.from_str(json.dumps(state))
        # a special token that a user types is encoded as text
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
                raise ValueError(f"{token_text(name)} has id {found} in the tokenizer, "
                                 f"but id {wanted} in the model")
        for token in state["added_tokens"]:
            if token["id"] >= n_vocab and not token["special"]:
                raise ValueError(
                    f"the added token {token['content']} has id {token['id']}, but the model "
                    f"predicts only ids below {n_vocab}; do not add a token, but rename an unused "
                    "one, such as |<EXTRA_TOKENS_0>|")

    def id_of(self, token):
        token = token["content"] if isinstance(token, dict) else token
        found = self.inner.token_to_id(token)
        if found is None:
            raise ValueError(f"the special token {token} of Molmo2 is missing")
        return found

    def encode(self, text):
        try:
            return self.inner.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # PanicException of tokenizers is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise Unencodable(f"the tokenizer cannot encode this text: {error}") from None

    def decode(self, ids):
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def save(self, folder):
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def load_tokenizer(folder, n_vocab):
    """The tokenizer of a model folder. n_vocab: V of the model. Raises OSError or ValueError."""
    path = Path(folder) / "tokenizer.json"
    content = path.read_bytes()
    try:
        state = json.loads(content)
        if state.get("kind") != "bytes":
            return PretrainedTokenizer(folder, n_vocab)
        tokenizer = ByteTokenizer(state["words"], state["n_vocab"])
    except Exception as error:  # the package tokenizers raises no narrower type
        raise ValueError(f"{path} cannot be used as a tokenizer: {error}") from None
    if tokenizer.n_vocab != n_vocab:
        raise ValueError(f"{path}: this byte tokenizer is not for a model of {n_vocab} ids")
    return tokenizer


class Segment(NamedTuple):
    """Consecutive tokens of a chat with the same loss weight."""
    ids: list
    factor: float  # of the loss weight (data.token_weight); 0: no loss, such as a question


def chat(turns, tokenizer):
    """[(question, answer), ..] -> [Segment, ..]. Every answer has loss, and the EOS after it, too.

    If the last answer is None, the segments are a prompt. Before every further question, EOS (with
    loss) is followed by <|im_end|> (without loss), as in the training of the released models
    (docs/molmo2.md 4.1). In Qwen both are the same token.
    """
    encode = tokenizer.encode
    newline = encode("\n")
    segments = []
    for i, (question, answer) in enumerate(turns):
        prompt = [tokenizer.chat_end, *newline] if i else []
        prompt += [tokenizer.chat_start, *encode("user\n" + question), tokenizer.chat_end, *newline]
        prompt += [tokenizer.chat_start, *encode("assistant\n")]
        segments.append(Segment(prompt, 0))
        if answer is not None:
            segments.append(Segment(encode(answer) + [tokenizer.eos], 1))
    return segments
