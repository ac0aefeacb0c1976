"""python -m tools.vit: its folder contains a trained ViT. And which ViT train.py refuses."""

import json

import pytest
import torch

from tests.training.runs import run, sentence
from tools import vit
from weights import files


def test_the_command_trains_the_vit_of_a_seed_and_nothing_else(tmp_path, capsys):
    trained = []
    for name, steps, seed in (("a", 1, 0), ("b", 1, 0), ("c", 1, 1), ("two", 2, 0)):
        vit.main([str(tmp_path / name), "--steps", str(steps), "--seed", str(seed)])
        printed = json.loads(capsys.readouterr().out)
        assert (printed["out"], printed["step"]) == (str(tmp_path / name), steps)
        assert printed["nll"].keys() == {"colour", "shape", "column", "row"}
        trained.append(files.open_model_folder(tmp_path / name)[0])
    a, b, c, two = (model.state_dict() for model in trained)
    for name in a:
        assert torch.equal(a[name], b[name])
        if name.startswith("vision.vit."):
            assert not torch.equal(a[name], c[name]) or "bias" in name
            assert not torch.equal(a[name], two[name]), name
        else:
            assert torch.equal(a[name], two[name]), name


@pytest.mark.parametrize(("flags", "words"), [
    (["--vit", "none"], "--vit none: none: no such folder; to download"),
    (["--model.vision.n_head=2"], "--vit toy: its ViT has n_head 4, but the new model has 2; give "
     "the folder of a ViT with the same --model.vision, or --vit= to start with random weights"),
    (["--preset", "4b"], "--vit toy: its ViT has n_layer 3, but the new model has 25; give"),
    (["--init", "toy", "--vit", "toy"], "--vit toy: --init toy has all weights, and --vit is for "
     "a new model; remove one of the two flags"),
    (["--model.n_vocab=300"], "--model: 111 words do not fit 300 ids"),
])
def test_a_vit_that_cannot_be_used_is_a_sentence(tmp_path, capsys, flags, words):
    small = ("--stage", "1", "--tiny", "--steps", "1", "--eval-images", "0", "--device", "cpu")
    assert run(tmp_path, *small, *flags) == 2
    assert words in sentence(capsys)
