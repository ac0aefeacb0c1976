"""Weights out: what is exported, transformers loads bit for bit and answers the same."""

import dataclasses
import json

import pytest
import torch

import data
import train
import vision
from evaluation import generate
from model import ModelConfig, Molmo2, YarnConfig
from tests.weights.byte_tokenizer import save_byte_tokenizer
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


@pytest.mark.slow
def test_a_trained_toy_answers_six_questions_through_transformers(tmp_path, capsys):
    """Exported by the command, which leaves the byte tokenizer out and says so; with its tokenizer
    added, transformers' own processor makes the same ids and its generate the same answers."""
    run = tmp_path / "run"
    train.main(["--stage", "1", "--tiny", "--steps", "40", "--vit_steps=40", "--device", "cpu",
                "--eval_images=2", "--out", str(run)])
    capsys.readouterr()
    out = tmp_path / "hf"
    command.main(["export", str(run), str(out)])
    assert "the byte tokenizer of the toy is not exported" in capsys.readouterr().err
    assert not (out / "tokenizer.json").exists()
    toy, own, config = open_model_folder(run)
    save_byte_tokenizer(own, out)
    peer = transformers.Molmo2ForConditionalGeneration.from_pretrained(out)
    processor = transformers.AutoProcessor.from_pretrained(out)
    loaded = files.load(out).config.vision
    assert dataclasses.replace(loaded, neighbor_init=True) == toy.config.vision
    world = World("test")
    answers = set()
    for k, question in enumerate(("pointing: any shape", "pointing: red circle", "caption:",
                                  "How many shapes?", "pointing: ünïcode", "What is this?")):
        image = world.images(world[k])[0]
        prompt = f"<|image|><|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        want = processor(images=[image], text=prompt, return_tensors="pt")
        got = data.encode_prompt([image], [(question, None)], own, config)
        assert want["input_ids"][0].tolist() == got.tokens.tolist()
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
    capsys.readouterr()
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
    command.main(["export", str(ours), str(out)])
    first = files.load(folder, dtype=None).state_dict()
    again = files.load(out, dtype=None).state_dict()
    assert set(first) == set(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        command.main(["export", str(ours), str(out)])
    assert "not empty" in capsys.readouterr().err
