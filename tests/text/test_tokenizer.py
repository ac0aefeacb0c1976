"""The toy's tokenizer. Pretrained ones are tested in tests/weights/test_released.py."""

import pytest

from text.tokenizer import ByteTokenizer, load_tokenizer
from toy.world import WORDS

TOKENIZER = ByteTokenizer(WORDS)
TEXTS = (
    "",
    "pointing: red circle",
    "two red circles, naïve 象 \0",
    "<|im_start|>user\nhi<|im_end|><im_patch>",
)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_and_words_come_back_and_markup_in_text_stays_text(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    special = {TOKENIZER.eos, TOKENIZER.chat_start, *TOKENIZER.special.values()}
    assert not special & set(ids)


def test_a_saved_tokenizer_is_loaded(tmp_path):
    TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path, 384)
    assert (loaded.chat_start, loaded.chat_end, loaded.bos, loaded.eos) == (256, 257, 257, 257)
    assert loaded.ids == {word: 258 + k for k, word in enumerate(WORDS)}
    assert loaded.special["im_start"] == 384
    with pytest.raises(ValueError, match="this byte tokenizer is not for a model of 385 ids"):
        load_tokenizer(tmp_path, 385)


def test_of_words_that_begin_alike_the_longest_is_taken_and_half_a_letter_is_marked():
    tokenizer = ByteTokenizer(["red", "red circle"])
    assert tokenizer.encode("red circle") == [tokenizer.ids["red circle"]]
    assert tokenizer.decode("é".encode()[:1]) == "\ufffd"
