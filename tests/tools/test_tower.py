"""A vision tower from scratch: resumed exactly, and a SigLIP as transformers understands it."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vision
from tests.training.hf_models import noise_image, transformers
from tools import tower


@pytest.fixture
def cut_outs(tmp_path, monkeypatch):
    """Three kinds of two cut-outs; a tower that is small and is saved after every second step."""
    for k, kind in enumerate(("cup", "key", "hat")):
        (tmp_path / "cut-outs" / kind).mkdir(parents=True)
        for n in range(2):
            image = Image.new("RGBA", (30, 20 + 10 * n), (90 * k, 120 * n, 50, 255))
            image.save(tmp_path / "cut-outs" / kind / f"{n}.png")
    monkeypatch.setattr(tower, "SAVE_EVERY", 2)
    monkeypatch.setattr(tower, "SHAPE", tower.SHAPE | {"hidden_size": 32, "intermediate_size": 48})
    return tmp_path / "cut-outs"


def run(cut_outs, out, steps="4"):
    tower.main([str(cut_outs), str(out), "--steps", steps])
    return torch.load(out / "state.pt", weights_only=True)["vit"]


def nll(out):
    return [json.loads(line)["nll"] for line in (out / "stage0.jsonl").open()]


def test_a_killed_tower_goes_on_as_if_it_had_not_been(cut_outs, tmp_path, monkeypatch, capsys):
    whole = run(cut_outs, tmp_path / "whole")
    step = tower.Pretraining.step

    def killed(self, number, *scenes):
        if number == 4:                  # step 3 is logged and not saved
            raise KeyboardInterrupt
        return step(self, number, *scenes)

    monkeypatch.setattr(tower.Pretraining, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(cut_outs, tmp_path / "killed")
    monkeypatch.setattr(tower.Pretraining, "step", step)
    resumed = run(cut_outs, tmp_path / "killed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert nll(tmp_path / "killed") == nll(tmp_path / "whole")
    assert set(nll(tmp_path / "whole")[0]) == {"kind", "cut_out", "column", "row"}


def test_a_tower_does_not_go_on_with_other_settings(cut_outs, tmp_path, capsys):
    run(cut_outs, tmp_path / "tower", "2")
    with pytest.raises(SystemExit, match="2"):
        run(cut_outs, tmp_path / "tower", "4")
    assert "was begun with other cut-outs, steps or seed" in capsys.readouterr().err


def test_transformers_reads_the_tower_as_a_siglip(cut_outs, tmp_path):
    """The features of our ViT are the hidden states of its third and ninth block from the end."""
    run(cut_outs, tmp_path / "tower", "2")
    config = tower.siglip_config(tower.SHAPE, "")
    vit = vision.ViT(config).double()
    vit.load_state_dict(torch.load(tmp_path / "tower" / "state.pt", weights_only=True)["vit"])
    peer = transformers.SiglipVisionModel.from_pretrained(tmp_path / "tower").double().eval()
    images = np.stack([noise_image(config.crop, config.crop, k) for k in range(2)])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 127.5 - 1
    with torch.no_grad():
        hidden = peer(pixels, output_hidden_states=True).hidden_states
        features = vit(torch.from_numpy(vision.patchify(images, config)))
    n = len(hidden) - 1
    expected = torch.cat([hidden[n - 2], hidden[n - 8]], -1)
    assert float((expected - features).abs().max()) < 1e-9


def test_a_folder_without_cut_outs_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        tower.main([str(tmp_path), str(tmp_path / "out")])
    assert "no PNG files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
