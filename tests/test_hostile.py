"""Models, tokenizers and plans made to do harm: each ends as one sentence, in bounded time and
memory, and nothing in it is run.

Elsewhere: images and videos (records/test_hostile_media.py), record files
(records/test_hostile_records.py), what chance finds (test_fuzz.py).
"""

import json
import os
import pickle
from functools import partial

import numpy as np
import pytest
import torch

import model
from records.reader import DataError
from tests.weights.byte_tokenizer import byte_tokenizer_files
from text import tokenizer as text
from training.planner import PlanFile
from weights import files


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def toy(folder):
    """A folder with a sound model, small."""
    files.save(model.Molmo2(model.PRESETS["toy"]), folder)
    text.ByteTokenizer().save(folder)
    return folder


def is_one_sentence(error, *words):
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert all(word in message for word in words), message


# --------------------------------------------------------------------------------------------------
# pickles


def save_old_torch(content, file):
    torch.save(content, file, _use_new_zipfile_serialization=False)


DUMPS = {"torch": torch.save, "old torch": save_old_torch, "pickle": pickle.dump}
MODEL_FILES = ["model.pt", "config.json", "tokenizer.json"]


@pytest.mark.parametrize("form", DUMPS)
@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_pickle_in_a_models_folder_does_not_run(tmp_path, name, form):
    with open(toy(tmp_path) / name, "wb") as file:
        DUMPS[form]({"a": Payload(tmp_path / "harm")}, file)
    load = files.load
    if name == "tokenizer.json":
        load = partial(text.load_tokenizer, n_vocab=384)
    with pytest.raises(ValueError, match=name) as error:
        load(tmp_path)
    is_one_sentence(error)
    assert not (tmp_path / "harm").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()          # so it would have been


def test_a_pickle_in_place_of_a_plan_does_not_run(tmp_path):
    armed = np.array([Payload(tmp_path / "harm")], dtype=object)
    names = (*PlanFile.COLUMNS, "ends", "skipped_in", "skipped_why", "made_for", "ids")
    np.savez(tmp_path / "plan.npz", **dict.fromkeys(names, armed))
    with pytest.raises(DataError, match=r"not a plan that tools\.plan wrote"):
        PlanFile(tmp_path / "plan.npz", {}, None)
    assert not (tmp_path / "harm").exists()


# --------------------------------------------------------------------------------------------------
# tokenizers

OURS = {"kind": "bytes", "words": [], "n_vocab": 384}
WORDS = ([""], [3], [[]], ["a", "a"], 5, None, [str(k) for k in range(9999)])


@pytest.mark.parametrize("content", [
    "[" * 100_000, {}, None, {"kind": "bytes"}, *({**OURS, "words": words} for words in WORDS),
    {**OURS, "n_vocab": 10**12}, {**OURS, "code": "x"}])
def test_a_hostile_tokenizer_is_refused(tmp_path, content):
    if not isinstance(content, str):
        content = json.dumps(content)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer") as error:
        text.load_tokenizer(tmp_path, 384)
    is_one_sentence(error)


def test_a_tokenizer_at_which_its_package_panics_is_refused(tmp_path):
    """A panic in Rust is not an Exception in Python."""
    pytest.importorskip("tokenizers")
    content = byte_tokenizer_files(text.ByteTokenizer())["tokenizer.json"]
    content |= {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not readable as a tokenizer") as error:
        text.load_tokenizer(tmp_path, 384)
    is_one_sentence(error)
