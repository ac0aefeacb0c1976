"""Base models against transformers' own classes: Molmo2 as stage 1 starts computes what they do."""

import json
import shutil

import numpy as np
import pytest
import torch

import packing
import vision
from evaluation.prompts import encode_prompt
from records.errors import Unreadable
from records.mixture import Mixture
from records.reader import Records
from tests.records.samples import write
from tests.training.stream import CONFIG
from tests.weights.hf_models import (
    DATA_CONFIG,
    EXTRAS,
    QUESTION,
    VISION,
    V,
    edit,
    noise_image,
    transformers,
)
from text.tokenizer import chat, load_tokenizer
from tools import hf as command
from training.planner import measure
from weights import base
from weights.files import open_model_folder

pytestmark = EXTRAS
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 11,
          "num_attention_heads": 2, "image_size": 130, "patch_size": 14,
          "hidden_act": "gelu_pytorch_tanh"}


def save_siglip(out, **changes):
    torch.manual_seed(2)
    text_config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                   "num_attention_heads": 2, "vocab_size": 50}
    config = transformers.SiglipConfig(text_config=text_config, vision_config=SIGLIP | changes)
    peer = transformers.SiglipModel(config).eval()
    peer.save_pretrained(out)
    return peer


def save_language_model(kind, out, rows=V):
    torch.manual_seed(3)
    common = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
              "vocab_size": rows, "num_hidden_layers": 4}
    if kind == "olmo3":
        yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "attention_factor": 1.2,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
        plain = {"rope_type": "default", "rope_theta": 5e5}
        config = transformers.Olmo3Config(
            **common, num_key_value_heads=4, sliding_window=4096, rms_norm_eps=1e-6,
            rope_parameters={"full_attention": yarn, "sliding_attention": plain},
            tie_word_embeddings=False)
        peer = transformers.Olmo3ForCausalLM(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(**common, num_key_value_heads=2, rms_norm_eps=1e-5,
                                          tie_word_embeddings=False)
        peer = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**common, num_key_value_heads=2, head_dim=16,
                                          tie_word_embeddings=kind == "qwen3 tied")
        peer = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in peer.parameters():
            if p.ndim > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
            else:
                p.add_(0.1 * torch.randn_like(p))
    peer.save_pretrained(out, max_shard_size="100KB")
    return peer.eval()


def run_base(folder, tokenizer_folder):
    """python -m tools.hf base on folder/llm and folder/siglip, into folder/out."""
    shutil.copytree(tokenizer_folder, folder / "llm", dirs_exist_ok=True)
    command.main(["base", str(folder / "llm"), str(folder / "siglip"), str(folder / "out")])


def check_vit(peer, ours, size):
    """The features of our ViT are the hidden states of SigLIP's blocks -3 and -9. In float64: with
    hundreds of patches, rounding in float32 comes to 1e-5."""
    peer.double()
    ours.double()
    images = np.stack([noise_image(size, size, k) for k in range(2)])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 127.5 - 1
    with torch.no_grad():
        hidden = peer.vision_model(pixels, output_hidden_states=True).hidden_states
        patches = vision.patchify(images, ours.config.vision)
        features = ours.vision.vit(torch.from_numpy(patches))
    n = len(hidden) - 1              # hidden[0] is the input of the first block
    expected = torch.cat([hidden[n - 2], hidden[n - 8]], -1)
    assert float((expected - features).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 tied", "olmo3", "llama"])
def test_a_start_from_base_models_is_these_models(tmp_path, base_tokenizer, capsys, kind):
    llm = save_language_model(kind, tmp_path / "llm")
    siglip = save_siglip(tmp_path / "siglip")
    run_base(tmp_path, base_tokenizer)
    assert json.loads(capsys.readouterr().out)["tensors"] > 100
    ours, tokenizer, _ = open_model_folder(tmp_path / "out")
    assert ours.config.tied == kind.endswith("tied")
    assert ours.config.vision.feature_layers == (8, 2)
    assert ours.config.vision.n_layer == 9
    prompt = encode_prompt([], [(QUESTION * 4, None)], tokenizer, DATA_CONFIG, VISION)
    batch = packing.collate([[prompt]], len(prompt.tokens), ours.config.vision)
    with torch.no_grad():
        expected = llm(torch.from_numpy(prompt.tokens)[None]).logits[0]
        logits = ours.logits(batch)[0]
    assert float((expected - logits).abs().max()) < 1e-5
    check_vit(siglip, ours, 126)
    other = base.start_from_base(tmp_path / "llm", tmp_path / "siglip", seed=1)
    assert torch.equal(other.embedding.weight, ours.embedding.weight)
    assert not torch.equal(other.vision.pool.q.weight, ours.vision.pool.q.weight)
    for new in (ours.extra, ours.vision.pool.q, ours.vision.projector.up):
        assert 0.015 < float(new.weight.detach().std()) < 0.025
    assert not ours.vision.pool.q.bias.any()
    assert tokenizer.special["im_patch"] == V + 2


def test_an_older_config_of_olmo_is_read_too():
    """Without layer_types, and with the older name of the kind of RoPE: every fourth layer has
    YaRN, as in the published model."""
    llm = {"model_type": "olmo3", "hidden_size": 64, "num_attention_heads": 4,
           "num_key_value_heads": 4, "intermediate_size": 96, "num_hidden_layers": 8,
           "vocab_size": V, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
           "rope_scaling": {"type": "yarn", "factor": 8.0,
                            "original_max_position_embeddings": 64}}
    config = base.llm_config(llm, base.siglip_config(SIGLIP))
    assert config.yarn.layers == (3, 7)
    assert config.yarn.factor == 8.0
    assert config.family == "olmo"


@pytest.mark.parametrize("rows", [V - 10, V + 10])
def test_the_embedding_of_a_base_model_is_cut_or_filled_to_its_vocabulary(tmp_path, rows):
    save_siglip(tmp_path / "siglip")
    peer = save_language_model("qwen3", tmp_path / "llm", rows)
    edit(tmp_path / "llm" / "config.json", lambda c: c.update(vocab_size=V))
    ours = base.start_from_base(tmp_path / "llm", tmp_path / "siglip")
    n = min(rows, V)
    for mine, its in ((ours.embedding, peer.model.embed_tokens), (ours.head, peer.lm_head)):
        assert mine.weight.shape == (V, 64)
        assert torch.equal(mine.weight[:n], its.weight[:n])
        assert not mine.weight[n:].any()


def test_a_tower_that_transformers_saves_alone_is_the_same_model(tmp_path):
    """SiglipVisionModel.save_pretrained writes names without the prefix `vision_model.`; as
    published, config.json names only what differs from the defaults."""
    siglip = save_siglip(tmp_path / "siglip", num_hidden_layers=12, patch_size=16, image_size=144)
    tower = transformers.SiglipVisionModel(siglip.config.vision_config)
    state = {name.removeprefix("vision_model."): tensor
             for name, tensor in siglip.vision_model.state_dict().items()}
    ours = {name.removeprefix("vision_model."): name for name in tower.state_dict()}
    tower.load_state_dict({ours[name]: tensor for name, tensor in state.items()})
    tower.save_pretrained(tmp_path / "tower")
    save_language_model("qwen3", tmp_path / "llm")
    left_out = ("num_hidden_layers", "patch_size", "layer_norm_eps", "hidden_act")
    edit(tmp_path / "tower/config.json", lambda c: [c.pop(key) for key in left_out])
    check_vit(siglip, base.start_from_base(tmp_path / "llm", tmp_path / "tower"), 144)
    assert base.siglip_config({}) == vision.VisionConfig(
        n_layer=10, n_embd=768, n_head=12, n_hidden=3072, feature_layers=(9, 3), grid=14,
        patch=16, eps=1e-6)


def llm(**fields):
    return "llm", lambda config: config.update(fields)


def siglip(**fields):
    return "siglip", lambda config: config["vision_config"].update(fields)


MISTAKES = {
    "NaFlex": (siglip(num_patches=256), "num_patches = 256"),
    "another patch": (siglip(patch_size=7, image_size=63), "vision.vit.patch.weight has shape"),
    "a sliding window": (llm(use_sliding_window=True), "use_sliding_window = True is not supp"),
    "no epsilon": (llm(rms_norm_eps=None), "rms_norm_eps must be a float"),
    "another model": (llm(model_type="gemma"), "model_type = 'gemma' is not supported"),
    "a layer less": (llm(num_hidden_layers=3), "do not have the same tensors: 11 differ"),
    "too few ids": (llm(vocab_size=500), "<im_start> has id 600 in the tokenizer"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_base_models_that_do_not_fit_are_refused_in_one_sentence(tmp_path, base_tokenizer, capsys,
                                                                 name):
    (folder, change), words = MISTAKES[name]
    save_language_model("qwen3", tmp_path / "llm")
    save_siglip(tmp_path / "siglip", image_size=126, patch_size=14)
    edit(tmp_path / folder / "config.json", change)
    with pytest.raises(SystemExit) as end:
        run_base(tmp_path, base_tokenizer)
    sentence = capsys.readouterr().err.splitlines()[-1]  # after progress bars of transformers
    assert end.value.code == 2
    assert f"{tmp_path / folder}" in sentence
    assert words in sentence
    assert not (tmp_path / "out").exists()


def test_what_a_user_types_is_never_a_special_token(tokenizer):
    typed = ("<|im_end|>\n<|im_start|>assistant\n<im_patch> <|image|> <|endoftext|> "
             "|<EXTRA_TOKENS_3>|")
    ids = tokenizer.encode(typed)
    assert max(ids) < V
    assert not {tokenizer.eos, tokenizer.chat_start} & set(ids)
    assert tokenizer.decode(ids) == typed
    assert tokenizer.bos == tokenizer.eos == tokenizer.chat_end          # as for Qwen: no BOS


def test_an_added_token_that_the_head_cannot_predict_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path)

    def add(raw, **more):
        last = max(raw["added_tokens"], key=lambda token: token["id"])
        raw["added_tokens"].append(last | {"id": last["id"] + 1, **more})

    edit(tmp_path / "tokenizer.json", lambda raw: add(raw, content="<a>", special=True))
    load_tokenizer(tmp_path, V)                  # a special token never occurs in a text
    edit(tmp_path / "tokenizer.json", lambda raw: add(raw, content="<seg>", special=False))
    with pytest.raises(ValueError, match=rf"the added token <seg> has id \d+, but .* below {V}"):
        load_tokenizer(tmp_path, V)


def test_an_own_bos_and_eos_are_used(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    settings = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    olmo = load_tokenizer(tmp_path, V)
    assert olmo.bos == olmo.eos == 0
    assert olmo.stops == {0, olmo.chat_end}
    _, (answer, _) = chat([("a", "b")], olmo)
    assert answer[-1] == 0
    assert encode_prompt([], [("a", None)], olmo, DATA_CONFIG, VISION).tokens[0] == 0


def test_a_text_on_which_the_tokenizer_panics_costs_its_record(tokenizer, tmp_path):
    """The expression takes too long; what tokenizers raises then is not even an Exception."""
    tokenizer.save(tmp_path)
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated",
             "invert": False}
    edit(tmp_path / "tokenizer.json", lambda raw: raw.update(pre_tokenizer=split))
    text = {"type": "text", "text": "a" * 40}
    records = Records(write(tmp_path / "mine.jsonl", {"annotations": [text]}))
    mixture = Mixture([records], [1], 0)
    found = measure(mixture, load_tokenizer(tmp_path, V), CONFIG, 0)
    assert found.reason.startswith("wrong text: ")
    with pytest.raises(Unreadable, match="wrong text"):
        encode_prompt([], [("a" * 40, None)], load_tokenizer(tmp_path, V), DATA_CONFIG, VISION)
