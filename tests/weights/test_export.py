"""Weights out: what is exported, transformers loads bit for bit and answers the same."""

import dataclasses
import errno
import json
import sys

import pytest
import torch

import train
import vision
from evaluation import generate
from evaluation.prompts import encode_prompt
from model import ModelConfig, Molmo2, YarnConfig
from tests.full_disk import files_up_to
from tests.weights.hf_models import (
    DATA_CONFIG,
    EXTRAS,
    KINDS,
    ROOT,
    VISION,
    both_inputs,
    greedy,
    noise_image,
    transformers,
)
from text.tokenizer import SPECIAL, ByteTokenizer
from tools import hf as command
from tools.bench.step import reference_inputs
from toy.images import World
from weights import files
from weights.export import export
from weights.files import open_model_folder

pytestmark = [EXTRAS, pytest.mark.usefixtures("two_threads")]

UNUSUAL_VISION = vision.VisionConfig(
    n_layer=5, n_embd=24, n_head=3, n_hidden=20, feature_layers=(4, 1), grid=7, patch=6,
    overlap_margin=1, eps=1e-4)
UNUSUAL = ModelConfig(
    n_layer=2, n_embd=48, n_head=6, n_kv_head=3, head_dim=10, n_hidden=40, n_vocab=333, n_extra=64,
    rope_theta=12345.0, eps=1e-5, family="olmo", yarn=YarnConfig((1,), 4.0, 1.1, 16.0, 2.0, 128),
    vision=UNUSUAL_VISION)


def read_json(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_transformers_loads_bit_for_bit(saved, tokenizer, tmp_path, kind):
    peer, _, ours = saved(kind)
    out = tmp_path / "out"
    export(ours, tokenizer, DATA_CONFIG, out)
    again, report = transformers.Molmo2ForConditionalGeneration.from_pretrained(
        out, output_loading_info=True)
    assert not any(report.values()), report
    tensors = again.state_dict()
    assert set(tensors) == set(peer.state_dict())
    for name, value in peer.state_dict().items():
        assert torch.equal(value, tensors[name]), name
    raw = read_json(out / "config.json")
    assert raw["use_frame_special_tokens"]
    assert raw["vit_config"]["num_hidden_layers"] == VISION.n_layer


def test_every_field_of_the_config_comes_back(tmp_path):
    model = Molmo2(UNUSUAL).init_weights().bfloat16()
    export(model, ByteTokenizer(n_vocab=333), DATA_CONFIG, tmp_path)
    assert files.load(tmp_path).config == UNUSUAL
    peer = transformers.Molmo2ForConditionalGeneration.from_pretrained(tmp_path)
    assert peer.dtype == torch.bfloat16                                  # as config.json says
    assert read_json(tmp_path / "config.json")["image_patch_id"] == 333 + SPECIAL.index("im_patch")
    assert read_json(tmp_path / "generation_config.json")["eos_token_id"] == [257]
    assert read_json(tmp_path / "video_preprocessor_config.json")["num_frames"] == 128
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.slow
def test_a_trained_toy_answers_six_questions_through_transformers(tmp_path, capsys):
    """Exported by the command, which leaves the byte tokenizer out and says so: transformers' own
    processor makes the same pixels, and its generate the same answers."""
    run = tmp_path / "run"
    train.main(["--stage", "1", "--tiny", "--steps", "40", "--device", "cpu",
                "--eval_images=2", "--out", str(run)])
    capsys.readouterr()
    out = tmp_path / "hf"
    command.main(["export", str(run), str(out)])
    assert "the byte tokenizer of the toy is not exported" in capsys.readouterr().err
    toy, own, config = open_model_folder(run)
    peer = transformers.Molmo2ForConditionalGeneration.from_pretrained(out)
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    assert files.load(out).config.vision == toy.config.vision
    world = World("test")
    answers = set()
    for k, question in enumerate(("pointing: any shape", "pointing: red circle", "caption:",
                                  "How many shapes?", "pointing: ünïcode", "What is this?")):
        image = world.images(world[k])[0]
        got = encode_prompt([image], [(question, None)], own, config, toy.config.vision)
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"]
        assert torch.equal(((pixels + 1) * 127.5).round().flatten(0, -3).byte(),
                           torch.from_numpy(got.images))
        want = reference_inputs([got], toy.config, "cpu")
        del want["labels"]
        (answer,) = generate.generate(toy, [got], -1, 30)
        assert answer == greedy(peer, want, 30)
        answers.add(tuple(answer))
    assert len(answers) > 2


def test_a_released_checkpoint_is_fine_tuned_and_served(saved, tokenizer, tmp_path, capsys):
    """train.py --init on the folder of transformers, with the ViT frozen; the run exported, loaded
    there, and asked: the same answer."""
    run = tmp_path / "run"
    train.main(["--stage", "2", "--init", str(saved("tied").folder),
                "--data", str(ROOT / "tests/media/records.jsonl"), "--steps", "2", "--batch", "2",
                "--train", "connector,llm", "--data.max_tokens=4096", "--pack_crops=24",
                "--device", "cpu", "--out", str(run)])
    command.main(["export", str(run), str(tmp_path / "served")])
    assert f"vllm serve {tmp_path / 'served'}\n" in capsys.readouterr().err
    ours, own, config = open_model_folder(run)
    peer = transformers.Molmo2ForConditionalGeneration.from_pretrained(tmp_path / "served").eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "served")
    before = saved("tied").ours.state_dict()
    changed = set()
    for name, tensor in ours.state_dict().items():
        if not torch.equal(before[name], tensor):
            parts = name.split(".")
            changed.add(parts[1] if parts[0] == "vision" else parts[0])
    # neither the ViT, nor the frozen embedding and with it the head
    assert changed == {"pool", "projector", "extra", "blocks", "norm"}
    want, got = both_inputs(processor, own, [noise_image(200, 300)])
    assert generate.generate(ours, [got], -1, 20)[0] == greedy(peer, want, 20)
    assert config.separator == ";"
    assert not config.prefix_all


def test_a_folder_of_ours_and_back_is_the_same_folder(saved, tmp_path, capsys):
    """import, then export: every tensor bit for bit, through the command line."""
    folder = saved("olmo").folder
    ours = tmp_path / "ours"
    out = tmp_path / "again"
    command.main(["import", str(folder), str(ours)])
    out.mkdir()
    for name in (".made-by", "half"):  # of a command that was killed
        (out / name).write_text("tools.hf")
    command.main(["export", str(ours), str(out)])
    assert not {".made-by", "half"} & {path.name for path in out.iterdir()}
    first = files.load(folder, dtype=None).state_dict()
    again = files.load(out, dtype=None).state_dict()
    assert set(first) == set(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        command.main(["export", str(ours), str(out)])
    assert "tools.hf has not made this folder" in capsys.readouterr().err


def test_export_converts_to_the_dtype_that_is_named(saved, tmp_path):
    """The file of the tensors may be read by whom any other file may be read."""
    folder = saved("olmo").folder
    command.main(["export", str(folder), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert read_json(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"
    before = files.load(folder, dtype=None).state_dict()
    after = files.load(tmp_path / "out", dtype=None).state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == torch.float32
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(tensor.bfloat16(), after[name]), name
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "any", *(tmp_path / "out").iterdir())}
    assert len(modes) == 1


@pytest.mark.parametrize(("name", "message"), [
    ("toy", "safetensors is needed: pip install"), ("llama", "family = 'llama' is not supported")])
def test_what_cannot_be_exported_is_refused_before_its_weights_are_read(
        tmp_path, monkeypatch, capsys, name, message):
    if name == "llama":
        small = dataclasses.replace(UNUSUAL, family="llama", yarn=YarnConfig())
        files.save(Molmo2(small).init_weights(), tmp_path / "llama")
        ByteTokenizer(n_vocab=333).save(tmp_path / "llama")
        name = str(tmp_path / "llama")
    else:
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setattr(files, "read", lambda folder: pytest.fail("the weights were read"))
    with pytest.raises(SystemExit, match="2"):
        command.main(["export", name, str(tmp_path / "out")])
    (sentence,) = capsys.readouterr().err.splitlines()
    assert message in sentence
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_the_weights_are_read(
        tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(files, "read", lambda folder: pytest.fail("the weights were read"))
    with pytest.raises(SystemExit, match="2"):
        command.main(["import", "toy", str(tmp_path / "file" / "out")])
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["import", "export"])
def test_a_conversion_that_fails_leaves_nothing_behind(saved, tmp_path, monkeypatch, capsys, name):
    def save_data_config(config, folder):
        assert any(folder.iterdir())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "save_data_config", save_data_config)
    (tmp_path / "mine").mkdir()
    for out in ("new/folder", "mine"):
        with pytest.raises(SystemExit, match="1"):
            command.main([name, str(saved("olmo").folder), str(tmp_path / out)])
        assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


@pytest.mark.parametrize(("name", "file"), [
    ("import", "model.pt"), ("export", "model.safetensors")])
def test_weights_that_do_not_fit_on_the_disk_are_one_sentence(saved, tmp_path, capsys, name, file):
    folder = str(saved("olmo").folder)
    with files_up_to(50_000), pytest.raises(SystemExit, match="1"):
        command.main([name, folder, str(tmp_path / "out")])
    *_, sentence = capsys.readouterr().err.splitlines()
    assert "the file cannot be written; is the disk full? " in sentence and file in sentence
