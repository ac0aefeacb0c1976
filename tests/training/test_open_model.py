"""A run is opened with the weights, the tokenizer and the settings that it was saved with."""

import dataclasses
import json
import shutil

import pytest
import torch

import data
from tests.evaluation.small_model import CONFIG, TOKENIZER, VISION, random_model, save_run
from weights import files
from weights.open_model import RELEASED_SETTINGS, open_model_folder


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def run(saved_run, tmp_path):
    """A copy that a test may change."""
    shutil.copytree(saved_run, tmp_path / "run" / "model")
    return tmp_path / "run"


@pytest.mark.parametrize("inner", ["", "model"])
def test_a_run_is_opened_by_its_directory_or_its_model_folder(run, inner):
    model, tokenizer, config = open_model_folder(run / inner, dtype=torch.bfloat16)
    assert model.config == CONFIG
    assert model.norm.weight.dtype == torch.bfloat16
    assert tokenizer.encode("red circle") == TOKENIZER.encode("red circle")
    assert config == data.DataConfig(max_tokens=512, max_crops=1, length_hint=0, vision=VISION)


def test_without_settings_those_of_released_models_count(run):
    (run / "model" / "data.json").unlink()
    config = open_model_folder(run)[2]
    assert config == data.DataConfig(**RELEASED_SETTINGS, vision=VISION)


@pytest.mark.parametrize("settings", [
    "{", "[]", '{"max_crops": "8"}', '{"fps": null}', '{"odd": 1}',
])
def test_settings_of_another_kind_are_refused(run, settings):
    (run / "model" / "data.json").write_text(settings)
    with pytest.raises(ValueError, match=r"data\.json: "):
        open_model_folder(run)


def test_a_device_that_does_not_exist_is_refused(run):
    with pytest.raises(ValueError, match="--device meta: "):
        open_model_folder(run, "meta")


def test_weights_come_back_bit_for_bit(tmp_path):
    saved = random_model().double()
    files.save(saved, tmp_path)
    loaded = files.load(tmp_path, dtype=torch.float64)
    assert loaded.config == saved.config
    assert not loaded.training
    tensors = zip(saved.state_dict().items(), loaded.state_dict().items(), strict=True)
    for (name, a), (other, b) in tensors:
        assert name == other
        assert torch.equal(a, b)
    (tmp_path / "config.json").write_text(json.dumps({**dataclasses.asdict(CONFIG), "n_embd": 64}))
    with pytest.raises(ValueError, match=r"config.json asks for|do not fit"):
        files.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model here; released ones come by hf download"):
        files.load(tmp_path / "none")


def test_a_tied_head_is_saved_once_and_stays_tied(tmp_path):
    tied = random_model(dataclasses.replace(CONFIG, tied=True))
    files.save(tied, tmp_path)
    loaded = files.load(tmp_path)
    assert loaded.head is None
    assert torch.equal(loaded.lm_head(torch.eye(CONFIG.n_embd)), tied.embedding.weight.T)
