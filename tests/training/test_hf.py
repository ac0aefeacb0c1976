"""Against transformers' own Molmo2 (an extra): weights in and out, logits, greedy tokens, and the inputs its processor makes.

Random models of three kinds: untied, tied (as the released 4B: the head a copy of the embedding) and OLMo with YaRN on
some layers; crops of the released size behind a narrow ViT. The tokenizer is trained here, on the licence.
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import model as models
import packing
import train
import vision
from evaluation import generate
from text import tokenizer as text
from tools.bench import peers
from training import hf, weights

tokenizers = pytest.importorskip("tokenizers")
for _extra in ("safetensors", "transformers", "torchvision"):
    if importlib.util.find_spec(_extra) is None:
        pytest.skip(f"{_extra} is not installed (pip install -r requirements-extras.txt)", allow_module_level=True)
transformers = peers.peer()

ROOT = Path(__file__).parents[2]
V = 700
SEE = vision.VisionConfig(n_layer=3, n_embd=32, n_head=2, n_hidden=48, feature_layers=(2, 0))
QWEN = models.ModelConfig(n_layer=3, n_embd=64, n_head=4, n_kv_head=2, head_dim=16, n_hidden=96, n_vocab=V, init_std=0.0, vision=SEE)
OLMO = dataclasses.replace(QWEN, n_layer=4, n_kv_head=4, family="olmo", rope_theta=5e5,
                           yarn=models.YarnConfig(layers=(1, 3), attention_factor=1.2, original_max=64))
KINDS = {"untied": QWEN, "tied": dataclasses.replace(QWEN, tied=True), "olmo": OLMO}
ASKED = dataclasses.replace(data.DataConfig(), max_images=20, vision=SEE)
QUESTION = "Where are the cats? (two of them, I think)"


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    """With one thread torch resizes three channels by another kernel, and transformers' pixels differ by a level here and there."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base_tokenizer(tmp_path_factory):
    """The tokenizer of a base model: byte-level BPE with the chat's marks, not yet those of Molmo2."""
    folder = tmp_path_factory.mktemp("base")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                                             special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False)
    bpe.train([str(ROOT / "LICENSE")], trainer)          # a text that never changes
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(base_tokenizer):
    return hf.extended_tokenizer(base_tokenizer, V)


def peers_config(config):
    """The same shape in transformers' own words, not in ours."""
    c, v = config, config.vision
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.yarn.layers:
        rope = {"rope_type": "yarn", "rope_theta": c.rope_theta, "factor": c.yarn.factor, "attention_factor": c.yarn.attention_factor,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": c.yarn.original_max}
    heads = {"num_attention_heads": v.n_head, "num_key_value_heads": v.n_head, "head_dim": v.n_embd // v.n_head}
    ids = {f"{name}_id": V + k for name, k in (("image_start_token", 0), ("image_end_token", 1), ("image_patch", 2),
                                               ("low_res_image_start_token", 4), ("frame_start_token", 7), ("frame_end_token", 8))}
    return transformers.Molmo2Config(
        text_config={"hidden_size": c.n_embd, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim,
                     "vocab_size": V, "num_hidden_layers": c.n_layer, "intermediate_size": c.n_hidden, "rope_parameters": rope,
                     "rope_scaling_layers": list(c.yarn.layers) or None, "norm_after": c.family == "olmo",
                     "qk_norm_type": "olmo" if c.family == "olmo" else "qwen3"},
        vision_config={"hidden_size": v.n_embd, "intermediate_size": v.n_hidden, "num_hidden_layers": v.n_layer, **heads},
        adapter_config={"vision_feature_layer": list(v.feature_layers), "hidden_size": v.n_embd, "intermediate_size": c.n_hidden,
                        "text_hidden_size": c.n_embd, **heads}, **ids)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """kind -> a random model of transformers, the folder that it saved (several shards) with its processor, and ours from there.

    sharp: attention sharp enough that what is generated does not repeat itself; more, and rounding decides (it grows tenfold at 2).
    """

    @cache
    def make(kind, sharp=0):
        torch.manual_seed(1)
        peer = transformers.Molmo2ForConditionalGeneration(peers_config(KINDS[kind])).eval()
        with torch.no_grad():
            for name, p in peer.named_parameters():
                if p.ndim > 1:
                    p.normal_(std=p.shape[-1] ** -0.5)
                elif "norm" in name:
                    p.add_(0.1 * torch.randn_like(p) + sharp * ("q_norm" in name or "k_norm" in name))
            if kind == "tied":
                peer.lm_head.weight.copy_(peer.model.language_model.embed_tokens.weight[:V])
        folder = tmp_path_factory.mktemp(kind)
        hf.write_processors(KINDS[kind], tokenizer, data.DataConfig(), folder)
        peer.save_pretrained(folder, max_shard_size="100KB")
        return peer, folder, weights.load(folder)

    return make


@pytest.fixture(scope="module")
def processor(saved):
    return transformers.AutoProcessor.from_pretrained(saved("untied")[1])


def picture(h, w, seed=0):
    """Noise over a gradient: every resize of it is told from every other."""
    rng = np.random.default_rng([seed, h, w])
    ramp = np.linspace(0, 255, h)[:, None, None] * 0.4 + np.linspace(0, 255, w)[None, :, None] * 0.4
    return (ramp + rng.integers(0, 50, (h, w, 3))).clip(0, 255).astype(np.uint8)


def clip(n, h, w, step=0.5, seed=0):
    """n frames, the last one off the grid as the end of a real video is."""
    times = [*(k * step for k in range(n - 1)), (n - 1) * step - 0.17]
    return data.Clip(times, [picture(h, w, [seed, k]) for k in range(n)])


def theirs(processor, images=(), video=None, turns=((QUESTION, None),)):
    """What transformers' processor makes of a chat; of a video's frames it is told the times, since it samples otherwise (spec 0.8)."""
    content = [{"type": "image"} for _ in images] + ([{"type": "video"}] if video else [])
    messages = []
    for k, (question, answer) in enumerate(turns):
        messages.append({"role": "user", "content": (content if k == 0 else []) + [{"type": "text", "text": question}]})
        messages += [] if answer is None else [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    extra = {}
    if video:
        n = len(video.times)
        metadata = transformers.video_utils.VideoMetadata(total_num_frames=n, fps=1000.0, frames_indices=[t * 1000 for t in video.times])
        extra = {"videos": [np.stack(video.frames)], "video_metadata": [metadata], "do_sample_frames": False}
    return processor(images=list(images) or None, text=prompt, return_tensors="pt", **extra)


def check_inputs(processor, tokenizer, images=(), video=None):
    """Token ids, pixels and pooling indices of both, equal; -> theirs, ours."""
    want, got = theirs(processor, images, video), data.encode_prompt(list(images), [(QUESTION, None)], tokenizer, ASKED, video)
    assert want["input_ids"][0].tolist() == got.tokens.tolist()
    assert (want["mm_token_type_ids"][0] == 1).tolist() == (got.bidir > 0).tolist()
    if images or video:
        kind = ("pixel_values_videos", "video_token_pooling") if video else ("pixel_values", "image_token_pooling")
        pixels = want[kind[0]].flatten(0, -3).numpy()
        assert np.array_equal(np.round((pixels + 1) * 127.5), got.images) and np.abs(pixels - (got.images / 127.5 - 1)).max() < 1e-6
        assert np.array_equal(want[kind[1]].flatten(0, -2).numpy(), got.pool_src)
    return want, got


# ---------------------------------------------------------------------------------------------------------------
# weights in


INPUTS = {"text": {}, "one image": {"images": [picture(480, 640)]}, "several images": {"images": [picture(300, 200), picture(150, 700)]},
          "a video": {"video": clip(5, 60, 90)}}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(saved, processor, tokenizer, kind, inputs):
    peer, _, ours = saved(kind)
    want, got = check_inputs(processor, tokenizer, **INPUTS[inputs])
    with torch.no_grad():
        expected, logits = peer(**want).logits[0], ours.logits(packing.collate([[got]], len(got.tokens), SEE))[0]
    assert expected.shape == logits.shape and float(expected.std()) > 0.5
    assert float((expected - logits).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_greedy_tokens_equal_those_of_transformers(saved, processor, tokenizer, kind):
    peer, _, ours = saved(kind, sharp=1)
    for inputs in ("one image", "a video"):
        want, got = check_inputs(processor, tokenizer, **INPUTS[inputs])
        expected = peer.generate(**want, max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(got.tokens) :]
        (answer,) = generate.generate(ours, [got], -1, 200)
        assert answer == expected.tolist() and len(answer) == 200 and len(set(answer)) > 20


def test_what_is_loaded_has_the_shape_that_was_saved(saved):
    for kind, config in KINDS.items():
        loaded = saved(kind)[2]
        assert dataclasses.replace(loaded.config, init_std=0.0) == config and not loaded.training
        assert (loaded.head is None) == (kind == "tied")


def hubs(folder, out):
    """A folder as it is on the Hub: 27 ViT blocks declared by name of the last ones, older keys, no frame tokens (spec 0.6, 1.6)."""
    shutil.copytree(folder, out)
    raw = json.loads((out / "config.json").read_text())
    t, v, a = raw["text_config"], raw.pop("vision_config"), raw["adapter_config"]
    rope = t.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    t |= {"rope_theta": theta, "rope_scaling": rope if rope["rope_type"] == "yarn" else None, "layer_norm_eps": t.pop("rms_norm_eps"),
          "qkv_bias": t.pop("attention_bias"), "rope_scaling_layers": t["rope_scaling_layers"] if rope["rope_type"] == "yarn" else None}
    n = v["num_hidden_layers"]
    a["vit_layers"] = [i - (n + 2) for i in a.pop("vision_feature_layer")]
    raw["vit_config"] = {**v, "num_hidden_layers": n + 2, "image_default_input_size": v.pop("image_size"),
                         "image_patch_size": v.pop("patch_size"), "image_num_pos": v.pop("num_position_embeddings")}
    (out / "config.json").write_text(json.dumps(raw | {"use_frame_special_tokens": False}))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_hubs_form_of_the_config_gives_the_same_model(saved, tmp_path, kind):
    again = weights.load(hubs(saved(kind)[1], tmp_path / "hub"))
    assert again.config == saved(kind)[2].config
    for (name, a), (_, b) in zip(again.state_dict().items(), saved(kind)[2].state_dict().items(), strict=True):
        assert torch.equal(a, b), name


UNUSUAL = models.ModelConfig(n_layer=2, n_embd=48, n_head=6, n_kv_head=3, head_dim=10, n_hidden=40, n_vocab=333, n_extra=64, rope_theta=12345.0,
                        eps=1e-5, family="olmo", yarn=models.YarnConfig((1,), 4.0, 1.1, 16.0, 2.0, 128), vision=vision.VisionConfig(
                            n_layer=5, n_embd=24, n_head=3, n_hidden=20, feature_layers=(4, 1), grid=7, patch=6, overlap_margin=1, eps=1e-4))


def test_every_field_of_the_config_comes_back(tmp_path):
    hf.export(models.Molmo2(UNUSUAL).init_weights().bfloat16(), data.ByteTokenizer(n_vocab=333), ASKED, tmp_path)
    assert weights.load(tmp_path).config == UNUSUAL
    assert transformers.Molmo2ForConditionalGeneration.from_pretrained(tmp_path).dtype == torch.bfloat16      # as config.json says
    ids = {"image_start_token_id": "<im_start>", "image_end_token_id": "<im_end>", "image_patch_id": "<im_patch>",
           "image_col_id": "<im_col>", "low_res_image_start_token_id": "<low_res_im_start>", "image_low_res_id": "<im_low>",
           "image_high_res_id": "<im_patch>", "frame_start_token_id": "<frame_start>", "frame_end_token_id": "<frame_end>"}
    raw, tokenizer = json.loads((tmp_path / "config.json").read_text()), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {key: raw[key] for key in ids} == {key: tokenizer.token_to_id(token) for key, token in ids.items()}
    read = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("generation_config", "video_preprocessor_config")}
    assert read["generation_config"]["eos_token_id"] == [257] and read["video_preprocessor_config"]["num_frames"] == 128


@pytest.mark.parametrize("given", [{"attention_factor": 1.3}, {}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"factor": 4.0}])
def test_yarn_is_read_as_transformers_reads_it(given):
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 512, **given}
    text_config = transformers.Molmo2Config(text_config={"head_dim": 16, "rope_parameters": dict(rope)}).text_config
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](text_config, "cpu")
    theta, yarn = hf.yarn_of("here", rope, [1], 2)
    got, own = models.rope_frequencies(dataclasses.replace(OLMO, rope_theta=theta, yarn=yarn), yarn=True)
    assert torch.allclose(got, expected, rtol=1e-6, atol=0) and own == pytest.approx(factor, rel=1e-6) and yarn.layers == (1,)


def test_a_head_is_tied_only_if_all_of_it_is_a_copy(tmp_path):
    wide = models.Molmo2(dataclasses.replace(QWEN, n_vocab=1500)).init_weights()
    wide.head.weight.data.copy_(wide.embedding.weight)
    wide.head.weight.data[1400, 3] += 1                                      # far behind the first rows that are compared
    hf.export(wide, data.ByteTokenizer(n_vocab=1500), ASKED, tmp_path)
    again = weights.load(tmp_path)
    assert not again.config.tied and torch.equal(again.head.weight, wide.head.weight)


@pytest.mark.parametrize("where", ["the whole", "the text"])
def test_a_tied_folder_may_leave_out_the_head(saved, tmp_path, where):
    shutil.copytree(saved("tied")[1], tmp_path / "hf")
    edit(tmp_path / "hf" / "config.json", lambda c: (c if where == "the whole" else c["text_config"]).update(tie_word_embeddings=True))
    edit(tmp_path / "hf" / "model.safetensors.index.json", lambda i: i["weight_map"].pop("lm_head.weight"))
    again = weights.load(tmp_path / "hf")
    assert again.head is None and torch.equal(again.embedding.weight, saved("tied")[2].embedding.weight)


def test_one_file_goes_before_an_index(saved, tmp_path):
    """What is left of an older save in several files does not count."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(saved("untied")[1], tmp_path / "hf")
    weights = {k: v for f in (tmp_path / "hf").glob("*.safetensors") for k, v in load_file(f).items()}
    save_file({**weights, "model.transformer.ln_f.weight": torch.full((64,), 7.0)}, tmp_path / "hf" / "model.safetensors")
    assert (weights.load(tmp_path / "hf").norm.weight == 7).all()


SPEC = {"4b": "qwen3_4b_instruct", "8b": "qwen3_8b", "o7b": "olmo3_7b_instruct"}


@pytest.mark.parametrize("preset", SPEC)
def test_the_presets_are_what_the_published_configs_say(preset):
    """Names and shapes of every tensor, and the config, of the three released checkpoints (tests/conformance/released.json)."""
    published = json.loads((ROOT / "tests" / "conformance" / "released.json").read_text())[SPEC[preset]]
    config = models.PRESETS[preset]
    with torch.device("meta"):
        weights = models.Molmo2(config).state_dict()
    table = hf.released(config) | ({("lm_head.weight",): ["embedding.weight"]} if config.tied else {})
    shapes = {theirs[0]: [sum(weights[x].shape[0] for x in ours), *weights[ours[0]].shape[1:]] for theirs, ours in table.items()}
    shapes |= {theirs[k]: list(weights[x].shape) for theirs, ours in table.items() if len(theirs) > 1 for k, x in enumerate(ours)}
    expected = {name.replace("{i}", str(i)): entry["shape"]
                for name, entry in published["hub_remote_code"].items() for i in range(entry["count"])}
    assert shapes == expected
    if "hub_config" in published:
        assert dataclasses.replace(hf.config_from(Path("none"), published["hub_config"]), tied=config.tied) == config


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_holds_the_model_once(tmp_path):
    """Peak memory of a process that loads half a GiB in shards of 64 MiB, as stored and in another precision."""
    shape = dataclasses.replace(QWEN, n_embd=1024, n_hidden=4096, n_layer=8, n_vocab=2048, n_head=8, head_dim=128)
    big = models.Molmo2(shape).bfloat16()
    hf.export(big, data.ByteTokenizer(n_vocab=2048), ASKED, tmp_path / "big", shard_bytes=2**26)
    size = sum(p.nbytes for p in big.parameters())
    for dtype, factor in (("None", 1), ("torch.float32", 2)):
        script = ("import re, torch, model, safetensors.torch; from tools import hf; torch.zeros(2**20).sum()\n"
                  "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()).group(1))\n"
                  f"before = peak(); m = weights.load({str(tmp_path / 'big')!r}, {dtype}); print(peak() - before)")
        grown = int(subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        assert factor * size * 0.95 < grown < factor * size + 2 * 2**26, (dtype, grown / size)


# ---------------------------------------------------------------------------------------------------------------
# weights out


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_transformers_loads_bit_for_bit(saved, tokenizer, tmp_path, kind):
    peer, _, ours = saved(kind)
    hf.export(ours, tokenizer, ASKED, tmp_path / "out", shard_bytes=200_000)
    again, report = transformers.Molmo2ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    weights = again.state_dict()
    assert set(weights) == set(peer.state_dict())
    for name, value in peer.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["use_frame_special_tokens"] and raw["vit_config"]["num_hidden_layers"] == SEE.n_layer


def test_a_toy_run_is_served_by_transformers(tmp_path):
    """The byte tokenizer as tokenizer.json, small crops, bfloat16: the same ids, the same greedy answer."""
    from toy import world as tiny

    torch.manual_seed(0)
    toy, own = models.Molmo2(models.PRESETS["toy"]).init_weights().eval(), data.ByteTokenizer(tiny.WORDS)
    settings = data.DataConfig(max_crops=3, length_hint=7, vision=toy.config.vision)
    hf.export(toy, own, settings, tmp_path / "toy")
    peer = transformers.Molmo2ForConditionalGeneration.from_pretrained(tmp_path / "toy")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "toy")
    question, image = "pointing: any shape, ünïcode <|im_end|> <im_patch>", tiny.World("test").image(tiny.World("test")[0])
    processor.save_pretrained(tmp_path / "toy2")                         # transformers keeps the margin in another file
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "toy" / name, tmp_path / "toy2")
    for folder in (tmp_path / "toy", tmp_path / "toy2"):
        assert dataclasses.replace(weights.load(folder).config.vision, neighbor_init=True) == toy.config.vision
    assert dataclasses.replace(generate.open_model(tmp_path / "toy")[2], vision=toy.config.vision) == settings
    assert processor.image_processor.max_crops == 3
    safe = question.replace("<", "(")    # transformers reads marks in a user's text as tokens; here they stay text
    want = processor(images=[image], text=f"<|image|><|im_start|>user\n{safe}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    got = data.encode_prompt([image], [(safe, None)], own, settings)
    assert want["input_ids"][0].tolist() == got.tokens.tolist()
    expected = peer.generate(**want, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(got.tokens) :]
    assert generate.generate(toy, [got], -1, 40)[0] == expected.tolist()
    marks = processor.tokenizer("<|im_end|><im_patch>")["input_ids"]
    assert marks == [own.eos, own.special["im_patch"]] and not set(marks) & set(own.encode(question))


def test_a_released_checkpoint_is_fine_tuned_and_served(saved, tokenizer, tmp_path, capsys):
    """train.py --init on the folder of transformers, the ViT at rest; the run exported, loaded there, and asked: the same answer."""
    folder = saved("tied")[1]
    train.main(["--stage", "2", "--init", str(folder), "--data", str(ROOT / "tests/media/records.jsonl"), "--steps", "2", "--batch", "2",
                "--train", "connector,llm", "--data.max_tokens=4096", "--pack_crops=24", "--device", "cpu", "--out", str(tmp_path / "run")])
    hf.main(["export", str(tmp_path / "run"), str(tmp_path / "served")])
    capsys.readouterr()
    ours, own, config = generate.open_model(tmp_path / "run")
    peer = transformers.Molmo2ForConditionalGeneration.from_pretrained(tmp_path / "served").eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "served")
    before, after = saved("tied")[2].state_dict(), ours.state_dict()
    moved = {name.split(".")[1] if "vision" in name else name.split(".")[0] for name in after if not torch.equal(before[name], after[name])}
    assert moved == {"pool", "projector", "extra", "blocks", "norm"}     # not the ViT, nor the frozen embedding and with it the head
    want, got = check_inputs(processor, own, [picture(200, 300)])
    expected = peer.generate(**want, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(got.tokens) :]
    assert generate.generate(ours, [got], -1, 20)[0] == expected.tolist()
    assert config.separator == ";" and not config.prefix_all


# ---------------------------------------------------------------------------------------------------------------
# the processor


def test_thirty_images_of_odd_sizes_are_read_as_transformers_reads_them(processor, tokenizer):
    """Exception (spec 0.7, 2.2): with a side of at most 112 pixels the port tiles otherwise than training did; we follow training."""
    rng = np.random.default_rng(0)
    sizes = [(378, 378), (113, 113), (1, 500), (3000, 100), (100, 900), (64, 64), (113, 1500), (266, 532), (491, 491), (2000, 300)]
    sizes += [tuple(int(x) for x in np.exp(rng.uniform(np.log(113), np.log(1200), 2))) for _ in range(23)]
    differ = set()
    for h, w in sizes:
        grid = theirs(processor, [picture(h, w)])["image_grids"][0, 2:].tolist() if min(h, w) <= 112 else None
        if grid and tuple(grid) != vision.pooled_grids(h, w, 8, SEE)[1]:
            differ.add((h, w))
        else:
            check_inputs(processor, tokenizer, [picture(h, w)])
    assert differ == {(1, 500), (3000, 100), (100, 900)} and len(sizes) - len(differ) == 30


@pytest.mark.parametrize("seed", range(10))
def test_ten_videos_are_read_as_transformers_reads_them(processor, tokenizer, seed):
    rng = np.random.default_rng(seed)
    n, h, w = (int(rng.integers(low, high)) for low, high in ((1, 9), (20, 400), (20, 400)))
    check_inputs(processor, tokenizer, video=clip(n, h, w, [0.5, 1.7][seed % 2], seed))


def test_transformers_samples_frames_otherwise(processor):
    """Exception (spec 0.8): the port spreads indices and leaves out the last frame; training always looks at it."""
    metadata = transformers.video_utils.VideoMetadata(total_num_frames=300, fps=30.0, duration=10.0)
    port = [int(i) / 30 for i in processor.video_processor.sample_frames(metadata, num_frames=384)]
    ours = vision.frame_times(10.0, 384)
    assert port[:20] == pytest.approx(ours[:20]) and len(port) == 20 and len(ours) == 21 and ours[-1] == 10.0


def test_a_conversation_differs_by_one_mark_per_turn(processor, tokenizer):
    """Exception (spec 4.1): between turns training has EOS and <|im_end|>, for Qwen the same id twice; the template has it once."""
    turns = [("One?", "Yes, one."), ("Two?", "Two."), ("Three?", None)]
    ours = data.encode_prompt([], turns, tokenizer, ASKED).tokens.tolist()
    twice = [i for i in range(len(ours)) if ours[i : i + 2] == [tokenizer.eos] * 2]
    once = [token for i, token in enumerate(ours) if i not in twice[-2:]]
    assert theirs(processor, turns=turns)["input_ids"][0].tolist() == once and len(ours) == len(once) + 2


def test_what_a_user_types_is_never_a_mark(tokenizer):
    typed = "<|im_end|>\n<|im_start|>assistant\n<im_patch> <|image|> <|endoftext|> |<EXTRA_TOKENS_3>|"
    ids = tokenizer.encode(typed)
    assert max(ids) < V and not {tokenizer.eos, tokenizer.chat_start} & set(ids) and tokenizer.decode(ids) == typed
    assert tokenizer.bos == tokenizer.eos == tokenizer.chat_end          # as for Qwen, which has no BOS


def test_marks_stay_out_of_a_users_text_even_if_the_file_does_not_call_them_special(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    edit(tmp_path / "tokenizer.json", lambda t: [token.update(special=False) for token in t["added_tokens"]])
    plain = text.load_tokenizer(tmp_path, V)
    typed = "<|im_start|>user <im_patch>"
    assert plain.encode(typed) == tokenizer.encode(typed) and plain.decode([plain.chat_start, *plain.encode("a")]) == "a"


def test_a_tokenizer_adds_nothing_says_no_marks_and_keeps_its_files(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    for name in ("chat_template.jinja", "merges.txt", "vocab.json"):
        (tmp_path / name).write_text(name)
    eager = text.load_tokenizer(tmp_path, V)
    assert eager.encode("a cat") == tokenizer.encode("a cat")
    assert eager.decode([eager.chat_start, *eager.encode("a cat"), eager.special["im_patch"], eager.eos]) == "a cat"
    (tmp_path / "again").mkdir()
    eager.save(tmp_path / "again")
    assert {f.name for f in (tmp_path / "again").iterdir()} == {f.name for f in tmp_path.iterdir() if f.is_file()}
    (tmp_path / "out").mkdir()
    hf.write_processors(QWEN, eager, ASKED, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"               # its own, not ours
    data.ByteTokenizer(n_vocab=384).save(tmp_path)
    with pytest.raises(ValueError, match="no byte tokenizer for a model of 700 ids"):
        text.load_tokenizer(tmp_path, V)


def test_an_own_bos_and_eos_are_used(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}))
    olmo = text.load_tokenizer(tmp_path, V)
    assert olmo.bos == olmo.eos == 0 and olmo.stops == {0, olmo.chat_end}
    ((_, _), (answer, _)) = text.chat([("a", "b")], olmo)
    assert answer[-1] == 0 and data.encode_prompt([], [("a", None)], olmo, ASKED).tokens[0] == 0


# ---------------------------------------------------------------------------------------------------------------
# base models


def siglip(out):
    torch.manual_seed(2)
    config = transformers.SiglipConfig(
        text_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 11, "num_attention_heads": 2, "image_size": 60,
                       "patch_size": 14, "hidden_act": "gelu_pytorch_tanh"})
    peer = transformers.SiglipModel(config).eval()
    peer.save_pretrained(out)
    return peer


def language_model(kind, out, rows=V):
    torch.manual_seed(3)
    common = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": rows, "num_hidden_layers": 4}
    if kind == "olmo3":
        rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 64}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
        config = transformers.Olmo3Config(**common, num_key_value_heads=4, rope_parameters=rope, sliding_window=4096, rms_norm_eps=1e-6,
                                          tie_word_embeddings=False)
        peer = transformers.Olmo3ForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**common, num_key_value_heads=2, head_dim=16, tie_word_embeddings=kind == "qwen3 tied")
        peer = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in peer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
    peer.save_pretrained(out, max_shard_size="100KB")
    return peer.eval()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 tied", "olmo3"])
def test_a_start_from_base_models_is_these_models(tmp_path, base_tokenizer, capsys, kind):
    peer, see = language_model(kind, tmp_path / "llm"), siglip(tmp_path / "vit")
    shutil.copytree(base_tokenizer, tmp_path / "llm", dirs_exist_ok=True)
    hf.main(["base", str(tmp_path / "llm"), str(tmp_path / "vit"), str(tmp_path / "out")])
    assert json.loads(capsys.readouterr().out)["tensors"] > 100
    ours, tokenizer, _ = generate.open_model(tmp_path / "out")
    assert ours.config.tied == (kind == "qwen3 tied") and ours.config.vision.feature_layers == (8, 2) and ours.config.vision.n_layer == 9
    prompt = data.encode_prompt([], [(QUESTION * 4, None)], tokenizer, ASKED)
    with torch.no_grad():
        expected = peer(torch.from_numpy(prompt.tokens)[None]).logits[0]
        logits = ours.logits(packing.collate([[prompt]], len(prompt.tokens), ours.config.vision))[0]
        assert float((expected - logits).abs().max()) < 1e-5
        pixels = np.stack([picture(56, 56, k) for k in range(2)])
        hidden = see.vision_model(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1, output_hidden_states=True).hidden_states
        features = ours.vision.vit(torch.from_numpy(vision.patchify(pixels, ours.config.vision)))
        assert float((torch.cat([hidden[9], hidden[3]], -1) - features).abs().max()) < 1e-5
    other = hf.start(tmp_path / "llm", tmp_path / "vit", seed=1)
    assert torch.equal(other.embedding.weight, ours.embedding.weight)
    assert not torch.equal(other.vision.pool.q.weight, ours.vision.pool.q.weight)
    new = [ours.extra.weight, ours.vision.pool.q.weight, ours.vision.projector.up.weight]
    assert all(0.015 < float(w.std()) < 0.025 for w in map(torch.detach, new)) and not ours.vision.pool.q.bias.any()
    assert tokenizer.special["im_patch"] == V + 2


@pytest.mark.slow
def test_the_seed_of_a_start_says_it_all(tmp_path, base_tokenizer):
    """... whatever order Python's sets are in."""
    language_model("qwen3", tmp_path / "llm")
    siglip(tmp_path / "vit")
    shutil.copytree(base_tokenizer, tmp_path / "llm", dirs_exist_ok=True)
    running = [subprocess.Popen([sys.executable, "-m", "tools.hf", "base", *(str(tmp_path / name) for name in ("llm", "vit", hashes))],
                                cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hashes, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
               for hashes in ("1", "2")]
    assert [child.wait() for child in running] == [0, 0]
    first, again = (weights.load(tmp_path / hashes).state_dict() for hashes in ("1", "2"))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_an_older_config_of_olmo_is_read_too():
    """Without layer_types, and with the older name of the kind of RoPE: every fourth layer has YaRN, as in the published model."""
    t = {"model_type": "olmo3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
         "num_hidden_layers": 8, "vocab_size": V, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
         "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}
    v = {"num_hidden_layers": 11, "patch_size": 14, "image_size": 60, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    config = hf.base_config(t, v, "here")
    assert config.yarn.layers == (3, 7) and config.yarn.factor == 8.0 and config.family == "olmo"


@pytest.mark.parametrize("rows", [V - 10, V + 10])
def test_the_embedding_of_a_base_model_is_cut_or_filled_to_its_vocabulary(tmp_path, rows):
    siglip(tmp_path / "vit")
    peer = language_model("qwen3", tmp_path / "llm", rows)
    edit(tmp_path / "llm" / "config.json", lambda c: c.update(vocab_size=V))
    ours, n = hf.start(tmp_path / "llm", tmp_path / "vit"), min(rows, V)
    for mine, its in ((ours.embedding, peer.model.embed_tokens), (ours.head, peer.lm_head)):
        assert mine.weight.shape == (V, 64) and torch.equal(mine.weight[:n], its.weight[:n]) and not mine.weight[n:].any()


@pytest.mark.parametrize(("change", "words"), [
    (lambda c: c.update(model_type="llama"), "neither qwen3 nor olmo3"), (lambda c: c.update(attention_bias=True), "attention_bias = True"),
    (lambda c: c["rope_parameters"]["sliding_attention"].update(rope_theta=1.0), "rope_theta = 1.0"),
    (lambda c: c.pop("hidden_size"), "hidden_size"), (lambda c: c.update(vocab_size=500), "600 ids, the model rows for 500")])
def test_a_wrong_base_model_is_refused_in_one_sentence(tmp_path, base_tokenizer, capsys, change, words):
    language_model("olmo3", tmp_path / "llm")
    siglip(tmp_path / "vit")
    shutil.copytree(base_tokenizer, tmp_path / "llm", dirs_exist_ok=True)
    edit(tmp_path / "llm" / "config.json", change)
    with pytest.raises(SystemExit) as end:
        hf.main(["base", str(tmp_path / "llm"), str(tmp_path / "vit"), str(tmp_path / "out")])
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out and words in said.err.splitlines()[-1] and "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------
# what is refused


def edit(path, change):
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def rewrite(folder, change):
    """One shard of the folder with its tensors changed."""
    from safetensors.torch import load_file, save_file

    path = sorted(folder.glob("*.safetensors"))[1]
    weights = load_file(path)
    change(weights, sorted(weights)[0])
    save_file(weights, path)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


MISTAKES = {
    "another model": (lambda d: edit(d / "config.json", lambda c: c.update(model_type="llava")), "model_type = 'llava'"),
    "another rope": (lambda d: edit(d / "config.json", lambda c: c["text_config"]["rope_parameters"].update(rope_type="llama3")),
                     "rope_type"),
    "another GELU": (lambda d: edit(d / "config.json", lambda c: c["vision_config"].update(hidden_act="gelu")), "hidden_act = 'gelu'"),
    "no heads": (lambda d: edit(d / "config.json", lambda c: c["text_config"].update(head_dim=None)), "config.json is not the config"),
    "no layers": (lambda d: edit(d / "config.json", lambda c: c["vision_config"].update(num_hidden_layers=0)), "config.json is not"),
    "no size": (lambda d: edit(d / "config.json", lambda c: c["vision_config"].update(image_size=[])), "config.json is not the config"),
    "oblong images": (lambda d: edit(d / "config.json", lambda c: c["vision_config"].update(image_size=[378, 392])), "[378, 392] pixels"),
    "odd heads": (lambda d: edit(d / "config.json", lambda c: c["text_config"].update(num_key_value_heads=3)), "config.json is not"),
    "odd margins": (lambda d: edit(d / "preprocessor_config.json", lambda c: c.update(overlap_margins=[4, 3])), "overlap_margins = [4, 3]"),
    "no margins": (lambda d: edit(d / "preprocessor_config.json", lambda c: c.update(overlap_margins=[])), "config.json is not the config"),
    "another factor": (lambda d: edit(d / "config.json", lambda c: c["text_config"].update(
        rope_parameters={"rope_type": "yarn", "factor": "abc", "rope_theta": 1.0})), "config.json is not the config"),
    "integers": (lambda d: rewrite(d, lambda w, n: w.update({n: w[n].to(torch.int8)})), "is stored as I8"),
    "one tensor more": (lambda d: rewrite(d, lambda w, n: w.update({"weird.tensor": w[n].clone()})), "weird.tensor is not in the index"),
    "settings of a tokenizer": (lambda d: (d / "tokenizer_config.json").write_text("[]"), "not readable as a tokenizer"),
    "a list of a token": (lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": {"x": 1}}'), "not readable as a tokenizer"),
    "odd settings": (lambda d: (d / "data.json").write_text('{"max_crops": "x"}'), "data.json: max_crops = 'x'"),
    "biases": (lambda d: edit(d / "config.json", lambda c: c["text_config"].update(attention_bias=True)), "attention_bias = True"),
    "no config of it": (lambda d: edit(d / "config.json", lambda c: c.pop("text_config")), "config.json is not the config"),
    "a missing shard": (lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), "that the index names is missing"),
    "a shard elsewhere": (lambda d: edit(d / "model.safetensors.index.json", lambda i: i["weight_map"].update(
        {"lm_head.weight": f"../{i['weight_map']['lm_head.weight']}"})), "'../model-00001-of-00011.safetensors' that the index names"),
    "no index": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "not an index"),
    "a truncated shard": (lambda d: cut(sorted(d.glob("*.safetensors"))[1]), "not readable as weights"),
    "a huge header": (lambda d: sorted(d.glob("*.safetensors"))[1].write_bytes((2**60).to_bytes(8, "little") + b"{}"),
                      "not readable as weights"),
    "a tensor less": (lambda d: edit(d / "model.safetensors.index.json", lambda i: i["weight_map"].pop("lm_head.weight")),
                      "1 tensors missing, first lm_head.weight"),
    "an empty promise": (lambda d: rewrite(d, lambda w, n: w.pop(n)), "that the index promises is missing"),
    "an unknown tensor": (lambda d: edit(d / "config.json", lambda c: c["text_config"].update(num_hidden_layers=2)),
                          "unknown to this project, first model.transformer.blocks.2"),
    "another shape": (lambda d: rewrite(d, lambda w, n: w.update({n: w[n][:1].clone()})), "config.json asks for [828, 64]"),
    "a tokenizer without marks": (lambda d: edit(d / "tokenizer.json", lambda t: t.update(
        added_tokens=[a for a in t["added_tokens"] if a["content"] != "<im_col>"])), "lacks the special token <im_col>"),
    "a shifted tokenizer": (lambda d: shift(d), "of the tokenizer and"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "half a tokenizer": (lambda d: cut(d / "tokenizer.json"), "not JSON"),
}


def shift(folder):
    """Two marks change places."""
    content = (folder / "tokenizer.json").read_text()
    content = content.replace('"<im_col>"', '"<x>"').replace('"<im_patch>"', '"<im_col>"').replace('"<x>"', '"<im_patch>"')
    (folder / "tokenizer.json").write_text(content)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_folder_is_refused_in_one_sentence(saved, tmp_path, capsys, name):
    damage, words = MISTAKES[name]
    shutil.copytree(saved("untied")[1], tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(SystemExit) as end:
        hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "out")])
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out and words in said.err and len(said.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_of_ours_and_back_is_the_same_folder(saved, tmp_path, capsys):
    """import, then export: every tensor of every file bit for bit, through the command line."""
    from safetensors.torch import load_file

    folder = saved("olmo")[1]
    hf.main(["import", str(folder), str(tmp_path / "ours")])
    hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "again"), "--shard-gb", "0.0002"])
    first, again = ({k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()} for d in (folder, tmp_path / "again"))
    for stored in (first, again):       # transformers splits the two tables in equal halves, the Hub at V
        stored["both"] = torch.cat([stored.pop(f"model.transformer.wte.{name}") for name in ("embedding", "new_embedding")])
    assert set(first) == set(again) and all(torch.equal(first[k], again[k]) for k in first)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")])
    assert "not empty" in capsys.readouterr().err


def test_the_hubs_own_classes_go_along_where_they_are_asked_for(saved, tmp_path, capsys):
    """For vLLM: its *.py files, and the entries by which configs point to them."""
    hub = tmp_path / "hub"
    shutil.copytree(saved("untied")[1], hub)
    (hub / "modeling_molmo2.py").write_text("x = 1")
    edit(hub / "config.json", lambda c: c.update(auto_map={"AutoConfig": "configuration_molmo2.Molmo2Config"}))
    hf.main(["export", str(hub), str(tmp_path / "out"), "--code", str(hub)])
    assert (tmp_path / "out" / "modeling_molmo2.py").read_text() == "x = 1"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == {"AutoConfig": "configuration_molmo2.Molmo2Config"}
    with pytest.raises(SystemExit):
        hf.main(["export", str(hub), str(tmp_path / "none"), "--code", str(saved("untied")[1])])
    assert "points to classes" in capsys.readouterr().err
