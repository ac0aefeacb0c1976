"""Models, tokenizers and plans made to do harm: each ends as one sentence, in bounded time and
memory, and nothing in it is run.

Elsewhere: images and videos (records/test_hostile_media.py), record files
(records/test_hostile_records.py), what chance finds (test_fuzz.py).
"""

import json
import os
import pickle
import time
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch

import model
from records.reader import DataError
from text import tokenizer as text
from training.planner import PlanFile
from weights import files
from weights.export import byte_tokenizer_files


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
MODEL_FILES = ["model.pt", "model.safetensors", "config.json", "tokenizer.json"]


@pytest.mark.parametrize("form", DUMPS)
@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_pickle_in_a_models_folder_does_not_run(tmp_path, name, form):
    with open(toy(tmp_path) / name, "wb") as file:
        DUMPS[form]({"a": Payload(tmp_path / "harm")}, file)
    if name == "model.pt":
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
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
# weights and configs


def test_a_safetensors_header_of_2_to_the_60_bytes_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    (toy(tmp_path) / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not readable as weights") as error:
        files.load(tmp_path)
    is_one_sentence(error, "model.safetensors")


@pytest.mark.parametrize("shard", [
    "../model.safetensors", "/model.safetensors", "a/../../model.safetensors", "..", ""])
def test_an_index_names_no_shard_outside_its_folder(tmp_path, shard):
    pytest.importorskip("safetensors")
    folder = toy(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    weight_map = {"weight_map": {"embedding.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    with pytest.raises(FileNotFoundError, match="that the index names is missing") as error:
        files.load(folder)
    is_one_sentence(error)


# name -> fields, fields of the ViT, words of the message
CONFIGS = {
    "unknown keys": ({"trust_remote_code": True}, {}, "trust_remote_code"),
    "keys of the ViT": ({}, {"auto_map": {"a": "b"}}, "auto_map"),
    "10^12 parameters": ({"n_embd": 400_000, "n_hidden": 1_000_000}, {},
                         "parameters, more than 100,000,000,000"),
    "10^9 layers": ({"n_layer": 10**9}, {}, "1,000,000,003 layers, more than 1,000"),
    "10^9 layers of the ViT": ({}, {"n_layer": 10**9}, "layers, more than 1,000"),
    "a vocabulary of 10^30": ({"n_vocab": 10**30}, {}, "describes no model"),
    "another vocabulary": ({"n_vocab": 10**6}, {}, "shape"),
    "words for numbers": ({"eps": "x"}, {}, "eps = 'x' is not of type float"),
    "no size": ({"n_embd": -1}, {}, "describes no model"),
    "a list for an object": ({"yarn": []}, {}, "describes no model"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_absurd_config_is_refused_at_once(tmp_path, name):
    fields, vision_fields, words = CONFIGS[name]
    config = json.loads((toy(tmp_path) / "config.json").read_text())
    config |= fields
    config["vision"] |= vision_fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"config\.json|model\.(safetensors|pt)") as error:
        files.load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    is_one_sentence(error, words)
    assert time.monotonic() - began < 10
    assert peak < 50 << 20


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
