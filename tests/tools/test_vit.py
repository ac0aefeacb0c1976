"""python -m tools.vit: its folder contains a trained ViT, with which train.py starts."""

import json

import pytest
import torch

from tests.training.runs import run, sentence
from tools import vit
from weights import files

NEW = ["--stage", "1", "--tiny", "--device", "cpu", "--steps", "1", "--eval_images=0",
       "--model.n_layer=1"]


def test_the_command_writes_a_trained_vit_for_the_flag_vit(tmp_path, capsys):
    """Each seed gives other images and weights. The rest of the model stays as it was."""
    trained = []
    for name, steps, seed in (("a", 3, 0), ("b", 3, 0), ("c", 3, 1), ("one", 1, 0)):
        vit.main([str(tmp_path / name), "--steps", str(steps), "--seed", str(seed)])
        printed = json.loads(capsys.readouterr().out)
        assert (printed["out"], printed["step"]) == (str(tmp_path / name), steps)
        assert printed["nll"].keys() == {"colour", "shape", "column", "row"}
        trained.append(files.open_model_folder(tmp_path / name)[0])
    a, b, c, one = (model.state_dict() for model in trained)
    for name in a:
        assert torch.equal(a[name], b[name])
        if name.startswith("vision.vit."):
            assert not torch.equal(a[name], c[name]) or "bias" in name
            assert not torch.equal(a[name], one[name]), name
        else:
            assert torch.equal(a[name], one[name]), name
    assert run(tmp_path / "run", *NEW, "--vit", str(tmp_path / "a")) == 0
    started = files.load(tmp_path / "run").state_dict()
    assert all(torch.equal(started[name], a[name]) for name in a if name.startswith("vision.vit."))


@pytest.mark.parametrize(("flags", "words"), [
    (["--vit", "none"], "--vit none: none: no such folder, or it contains no model"),
    (["--model.vision.n_head=2"], "--vit toy: its ViT has n_head 4, but the new model has 2; give "
     "the folder of a ViT with the same --model.vision, or --vit= to start with random weights"),
    (["--preset", "4b"], "--vit toy: its ViT has n_layer 3, but the new model has 25; give"),
    (["--init", "toy", "--vit", "toy"], "--vit toy: --init toy has all weights, and --vit is for "
     "a new model; remove one of the two flags"),
    (["--model.n_vocab=300"], "--model: 111 words do not fit 300 ids"),
])
def test_a_vit_that_cannot_be_used_is_a_sentence(tmp_path, capsys, flags, words):
    assert run(tmp_path, *flags, *(NEW[:-1] if flags[0] != "--vit" else NEW)) == 2
    assert words in sentence(capsys)
