"""Text to token ids and back (spec 1.2, 4.1): two tokenizers behind the same few methods, and the chat on top of them.

    encode(text) -> ids        always literal: "<|im_start|>" typed by a user is text, never the token
    decode(ids) -> text        special tokens leave nothing
    bos eos chat_start chat_end special        ids; special: name -> id, V + its place in SPECIAL; stops: what ends an answer
    save(folder)               the files that `load` reads
"""

import json
import re
from pathlib import Path

# id = V + index: input embeddings that the head can never predict; what follows in the table of spec 1.2 is MolmoPoint's
SPECIAL = ("im_start", "im_end", "im_patch", "im_col", "low_res_im_start", "image", "im_low", "frame_start", "frame_end", "video")
VISUAL = {"im_start", "im_end", "im_patch", "im_col", "low_res_im_start", "im_low", "frame_start", "frame_end"}  # spec 6.3


class ByteTokenizer:
    """Bytes, plus one id for each of a few strings that occur all the time, as any trained tokenizer has.

    ids   0-255 bytes | 256 <|im_start|> | 257 <|im_end|> = EOS = BOS | 258.. words | .. V-1 unused | V.. spec 1.2
    Text is always literal: "<|im_start|>" typed by a user is twelve bytes.
    """

    def __init__(self, words=(), n_vocab=384):
        self.words, self.n_vocab = tuple(words), n_vocab
        assert all(self.words) and len(set(self.words)) == len(self.words), "a word is empty or given twice"
        assert 258 + len(self.words) <= n_vocab, f"{len(self.words)} words do not fit {n_vocab} ids"
        self.chat_start, self.chat_end = 256, 257
        self.bos = self.eos = self.chat_end                               # as for Qwen, which has no BOS
        self.stops = {self.eos}
        self.special = {name: n_vocab + i for i, name in enumerate(SPECIAL)}
        self.ids = {word: 258 + i for i, word in enumerate(self.words)}
        longest_first = sorted(self.words, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if self.words else None

    def encode(self, text):
        ids, start = [], 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            ids += text[start : match.start()].encode()
            ids.append(self.ids[match.group()])
            start = match.end()
        return ids + list(text[start:].encode())

    def decode(self, ids):
        parts = (bytes([i]) if i < 256 else self.words[i - 258].encode() if 258 <= i < 258 + len(self.words) else b"" for i in ids)
        return b"".join(parts).decode(errors="replace")

    def save(self, folder):
        state = {"kind": "bytes", "words": self.words, "n_vocab": self.n_vocab}
        (Path(folder) / "tokenizer.json").write_text(json.dumps(state))


def marked(name):
    """The text of a special token: "<im_patch>", but "<|image|>" and "<|video|>" (spec 1.2)."""
    return f"<|{name}|>" if name in ("image", "video") else f"<{name}>"


class Lacking(ValueError):
    """A tokenizer without a token that the model needs."""


class PretrainedTokenizer:
    """The tokenizer.json of a released checkpoint, through the `tokenizers` package.

    BOS is the tokenizer's own, or EOS where it has none (Qwen). ValueError names the first special token that is not
    where the model expects it. The other files that came with it (chat template, vocabulary) are kept for `save`.
    """

    FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
             "vocab.json", "merges.txt")

    def __init__(self, folder, n_vocab):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(f"{folder}/tokenizer.json needs an extra package: pip install tokenizers") from None
        self.n_vocab, folder = n_vocab, Path(folder)
        self.files = {name: (folder / name).read_bytes() for name in self.FILES if (folder / name).is_file()}
        marks = {"<|im_start|>", "<|im_end|>", *map(marked, SPECIAL)}
        try:
            state = json.loads(self.files["tokenizer.json"])
            for token in state["added_tokens"]:          # a mark that is not declared special would be read out of a user's text
                token["special"] = token["special"] or token["content"] in marks
            self.inner = Tokenizer.from_str(json.dumps(state))
            settings = json.loads(self.files.get("tokenizer_config.json", b"{}"))
            names = {key: settings.get(key) for key in ("bos_token", "eos_token")}
            names = {key: name["content"] if isinstance(name, dict) else name for key, name in names.items() if name}
            self.inner.encode_special_tokens = True                       # what a user types stays text
            self.eos = self._id(names.get("eos_token", "<|im_end|>"), folder)
            self.bos = self._id(names["bos_token"], folder) if "bos_token" in names else self.eos
        except Lacking:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:       # the package raises bare Exceptions, and its panics are not even those
            raise ValueError(f"{folder}: not readable as a tokenizer: {(str(e).splitlines() or [type(e).__name__])[0]}") from None
        self.chat_start, self.chat_end = self._id("<|im_start|>", folder), self._id("<|im_end|>", folder)
        self.stops = {self.eos, self.chat_end}
        self.special = {name: n_vocab + i for i, name in enumerate(SPECIAL)}
        for name, wanted in self.special.items():
            found = self._id(marked(name), folder)
            if found != wanted:
                raise ValueError(f"{folder}: {marked(name)} is id {found} of the tokenizer and {wanted} of the model")

    def _id(self, token, folder):
        found = self.inner.token_to_id(token)
        if found is None:
            raise Lacking(f"{folder}: the tokenizer lacks the special token {token}: not a tokenizer of Molmo2")
        return found

    def encode(self, text):
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def save(self, folder):
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def load(folder, n_vocab):
    """The tokenizer in a model's folder; n_vocab: V of the model. OSError or ValueError in one sentence."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so nothing to read text with")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON: {e}") from None
    if not isinstance(state, dict) or state.get("kind") != "bytes":
        return PretrainedTokenizer(folder, n_vocab)
    if set(state) != {"kind", "words", "n_vocab"} or state["n_vocab"] != n_vocab:
        raise ValueError(f"{path} is no byte tokenizer for a model of {n_vocab} ids")
    try:
        return ByteTokenizer(state["words"], state["n_vocab"])
    except (TypeError, AssertionError) as e:
        raise ValueError(f"{path}: {e}") from None


def chat(turns, tokenizer):
    """[(question, answer), ..] -> [(ids, learn), ..]: loss on the answers and the EOS that ends each (spec 4.1).

    An answer of None ends the list: the prompt of a generation. In later turns EOS (with loss) is followed by
    <|im_end|> (without), two equal tokens in Qwen's vocabulary: a quirk of the released models.
    """
    start, end, encode = tokenizer.chat_start, tokenizer.chat_end, tokenizer.encode
    segments = []
    for i, (question, answer) in enumerate(turns):
        again = [end, *encode("\n")] if i else []
        user = [start, *encode("user\n" + question), end, *encode("\n"), start, *encode("assistant\n")]
        segments.append((again + user, False))
        if answer is not None:
            segments.append((encode(answer) + [tokenizer.eos], True))
    return segments
