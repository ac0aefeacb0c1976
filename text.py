"""Text to token ids and back: tokenizers, and the chat they are arranged in (spec 1.2, 4.1)."""

import json
import re
from pathlib import Path

SPECIAL = ("im_start", "im_end", "im_patch", "im_col", "low_res_im_start", "image", "im_low", "frame_start", "frame_end", "video")
VISUAL = {"im_start", "im_end", "im_patch", "im_col", "low_res_im_start", "im_low", "frame_start", "frame_end"}  # spec 6.3


class ByteTokenizer:
    """Bytes, plus one id for each of a few strings that occur all the time, as any trained tokenizer has.

    ids   0-255 bytes | 256 <|im_start|> | 257 <|im_end|> = EOS = BOS | 258.. words | .. V-1 unused | V.. spec 1.2
    Text is always literal: "<|im_start|>" typed by a user is twelve bytes.
    """

    def __init__(self, words=(), n_vocab=384):
        self.words, self.n_vocab = tuple(words), n_vocab
        assert 258 + len(self.words) <= n_vocab, f"{len(self.words)} words do not fit {n_vocab} ids"
        self.chat_start, self.eos = 256, 257
        self.bos = self.eos                                               # as for Qwen, which has no BOS
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

    @classmethod
    def load(cls, folder):
        state = json.loads((Path(folder) / "tokenizer.json").read_text())
        if set(state) != {"kind", "words", "n_vocab"} or state["kind"] != "bytes":
            raise ValueError(f"{folder}/tokenizer.json is no byte tokenizer of this project")
        return cls(state["words"], state["n_vocab"])


def chat(turns, tokenizer):
    """[(question, answer), ..] -> [(ids, learn), ..]: loss on the answers and the EOS that ends each (spec 4.1).

    An answer of None ends the list: the prompt of a generation. In later turns EOS (with loss) is followed by
    <|im_end|> (without), two equal tokens in Qwen's vocabulary: a quirk of the released models.
    """
    start, end, encode = tokenizer.chat_start, tokenizer.eos, tokenizer.encode
    segments = []
    for i, (question, answer) in enumerate(turns):
        again = [end, *encode("\n")] if i else []
        user = [start, *encode("user\n" + question), end, *encode("\n"), start, *encode("assistant\n")]
        segments.append((again + user, False))
        if answer is not None:
            segments.append((encode(answer) + [end], True))
    return segments
