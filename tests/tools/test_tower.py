"""Stage 0 on cut-outs. A vision tower from scratch: resumed exactly, and a SigLIP as transformers
understands it. A connector that learns the words of the decoder's embedding."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vision
from data import DataConfig
from model import PRESETS, Molmo2
from tests.training.hf_models import noise_image, transformers
from text.tokenizer import ByteTokenizer
from tools import connector, tower
from toy.photos import Placed, open_cut_outs
from weights import files
from weights.open_model import open_model_folder


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
    assert "was begun with other cut-outs, backgrounds, steps or seed" in capsys.readouterr().err


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


@pytest.fixture
def base(tmp_path):
    """The toy's model from random numbers, as a folder."""
    torch.manual_seed(1)
    model = Molmo2(PRESETS["toy"])
    model.init_weights()
    files.save(model, tmp_path / "base")
    ByteTokenizer().save(tmp_path / "base")
    files.save_data_config(DataConfig(max_tokens=512), tmp_path / "base")
    return tmp_path / "base"


def test_a_connector_learns_the_words_and_nothing_else_changes(cut_outs, base, tmp_path, capsys):
    """Three colours have three names: guessing one of them and the ground costs 1.4 nats."""
    out = tmp_path / "start"
    connector.main([str(base), str(cut_outs), str(out), "--steps", "60"])
    assert json.loads(capsys.readouterr().out)["nll"]["kind"] < 0.4
    before, *_ = open_model_folder(base)
    model, tokenizer, config = open_model_folder(out)
    assert config.max_tokens == 512 and tokenizer.encode("cup") == ByteTokenizer().encode("cup")
    changed = {name for name, tensor in before.state_dict().items()
               if not torch.equal(tensor, model.state_dict()[name])}
    assert changed == {f"vision.{name}" for name, _ in model.vision.named_parameters()
                       if not name.startswith("vit.")}

    cuts, kinds = tower.open_cut_outs(cut_outs)
    image, placed = tower.Photos(cuts, kinds, [], "train", config.vision.crop, 5).scene(3)
    words = connector.word_vectors(model, tokenizer, ["cup", "hat", "key", "background"])
    patches = connector.patches_of([image], model.vision.vit)
    pool_src = torch.from_numpy(vision.windows(
        np.arange(config.vision.n_patch).reshape(config.vision.grid, -1), 2))
    with torch.no_grad():
        nearest = (model.vision(patches, pool_src) @ words.T).argmax(1)
    labels = tower.labels(placed, cuts, ["cup", "hat", "key"], config.vision,
                          config.vision.grid // 2)[:, 0]
    assert (nearest.numpy() == labels).mean() > 0.8


def test_windows_that_jut_out_of_an_odd_grid_keep_their_places(cut_outs):
    """Three patches of four pixels are two windows of eight, of which the second is half outside.
    An object in the first eight rows is not in the second window."""
    config = vision.VisionConfig(grid=3, patch=4)
    all_of_them, _ = open_cut_outs(cut_outs)
    mask = np.zeros((12, 12), bool)
    mask[:8] = True
    placed = [Placed(all_of_them[0], mask, mask.sum())]
    found = connector.labels_of_windows(placed, all_of_them, ["cup", "hat", "key"], config)
    is_object = found[:, 2].reshape(2, 2) >= 0
    assert is_object.tolist() == [[True, True], [False, False]]


def test_a_connector_without_a_base_is_told(cut_outs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        connector.main([str(tmp_path / "nowhere"), str(cut_outs), str(tmp_path / "out")])
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
