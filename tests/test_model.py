"""Compares the whole model with tiny random models that were run by the official code, and tests
RoPE.

The tests compare logits, loss, every gradient and greedy tokens. tiny.npz contains the weights of
two models (with the names of the transformers port), one packed row of 963 tokens, and the results:

    row       example 0: image, two branches 411 + 35 + 39 | example 1: image, text 444
              | example 2: text 27 | 7 padding
    images    of examples 0 and 1. The crop and the low-resolution view of an image have the same
              pixels, which are stored once
"""

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import model as models
import packing
import vision
from evaluation.generate import generate
from tests.test_attention import VISUAL, official_fields
from training.loader import text_example

HERE = Path(__file__).parent / "conformance"
EXPECTED = json.loads((HERE / "tiny_model.json").read_text())
ROPE = json.loads((HERE / "rope.json").read_text())["values"]
each_family = pytest.mark.parametrize("family", ["qwen", "olmo"])
MASKS = {"bidir": "{}.response_logits", "causal": "{}_causal.response_logits"}
each_mask = pytest.mark.parametrize("mask", MASKS)
PATCH, EOS = 514, 501                # ids of docs/molmo2.md 6.3 in the tiny models

# Part of a name -> our name. The weights have the names of the transformers port, and the gradients
# have the names of the official training code.
PORT = {
    r"^model\.language_model\.layers": "blocks",
    r"^model\.language_model\.norm": "norm",
    r"^lm_head": "head",
    r"^model\.vision_tower": "vision.vit",
    r"vit\.layers": "vit.blocks",
    r"vit\.positional_embedding": "vit.pos",
    r"vit\.patch_embedding": "vit.patch",
    r"^model\.multi_modal_projector\.image_pooling_2d": "vision.pool",
    r"^model\.multi_modal_projector\.image_projector": "vision.projector",
    r"\.self_attn\.([qkv])_proj": r".attn.\1",
    r"\.self_attn\.o_proj": ".attn.out",
    r"\.self_attn\.([qk]_norm)": r".attn.\1",
    r"\.o_proj": ".out",
    r"\.(q|k|v|up|gate|down)_proj": r".\1",
    r"input_layernorm|layer_norm1": "attn_norm",
    r"post_attention_layernorm|layer_norm2": "mlp_norm",
    r"mlp\.fc1": "up",
    r"mlp\.fc2": "down",
    r"(vit.*)\.attn\.": r"\1.",
}
TRAINING = {
    r"^transformer\.blocks": "blocks",
    r"^transformer\.ln_f": "norm",
    r"^transformer\.ff_out": "head",
    r"^transformer\.wte\.embedding": "embedding.weight",
    r"^transformer\.wte\.new_embedding": "extra.weight",
    r"^vision_backbone\.image_vit": "vision.vit",
    r"vit\.transformer\.resblocks": "vit.blocks",
    r"vit\.positional_embedding": "vit.pos",
    r"vit\.patch_embedding": "vit.patch",
    r"^vision_backbone\.image_pooling_2d": "vision.pool",
    r"^vision_backbone\.image_projector": "vision.projector",
    r"projector\.w1": "projector.gate",
    r"projector\.w2": "projector.down",
    r"projector\.w3": "projector.up",
    r"\.attention\.w": ".w",
    r"\.w([qkv])\.": r".\1.",
    r"\.wo\.": ".out.",
    r"\.feed_forward\.w1": ".up",
    r"\.feed_forward\.w2": ".down",
    r"attention_norm": "attn_norm",
    r"\bff_norm|ffn_norm": "mlp_norm",
    r"(\d)\.([qk]_norm)": r"\1.attn.\2",
    r"attn_out": "attn.out",
    r"(\d)\.ff_out": r"\1.mlp.down",
}
# one matrix in the official training code, several matrices here
FUSED = {"att_proj": ("attn.q", "attn.k", "attn.v"), "ff_proj": ("mlp.up", "mlp.gate")}


def rename(name, table):
    for pattern, ours in table.items():
        name = re.sub(pattern, ours, name)
    return name


@cache
def tiny():
    with np.load(HERE / "tiny.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def config_of(family):
    c, vit = EXPECTED[family], EXPECTED["vit"]
    yarn = dict(c.get("yarn", {}))
    if yarn:
        yarn["layers"] = tuple(yarn["layers"])
    see = vision.VisionConfig(
        n_layer=vit["layers_kept"], n_embd=vit["width"], n_head=vit["heads"], n_hidden=vit["mlp"],
        feature_layers=tuple(vit["feature_layers_0based_in_order"]))
    return models.ModelConfig(
        n_layer=c["layers"], n_embd=c["hidden"], n_head=c["heads"], n_kv_head=c["kv_heads"],
        head_dim=c["head_dim"], n_hidden=c["mlp"], n_vocab=c["vocab"], n_extra=c["extra"],
        family=family, tied=c["tied"], rope_theta=c["rope_theta"], yarn=models.YarnConfig(**yarn),
        eps=c["eps"], vision=see)


@cache
def model_of(family):
    weights = {}
    for name, w in tiny().items():
        if name.startswith(f"{family}.model.language_model.embed_tokens"):
            sizes = [EXPECTED[family]["vocab"], EXPECTED[family]["extra"]]
            weights["embedding.weight"], weights["extra.weight"] = w.split(sizes)
        elif name.startswith((f"{family}.model.", f"{family}.lm_head")):
            weights[rename(name.removeprefix(f"{family}."), PORT)] = w
    model = models.Molmo2(config_of(family))
    model.load_state_dict(weights)  # strict: the names are exactly ours
    return model.eval()


@cache
def batch(mask="bidir"):
    t = tiny()                       # padding is -1 in all its arrays
    tokens, pool_src = t["input_ids"].long(), t["token_pooling"].long()
    both_ways = "image_tokens" if mask == "bidir" else None
    until, bidir, doc, branch = official_fields(tokens, t["subsegment_ids"].numpy(), both_ways)
    # three rows of pool_src are padding: they add zeros, so their positions do not matter
    pool_dst = torch.zeros(len(pool_src), dtype=torch.long)
    pool_dst[(pool_src >= 0).any(1)] = (tokens == PATCH).nonzero()[:, 0]
    images = t["images"].repeat_interleave(2, dim=0)
    row = [tokens, t["labels"].long(), t["loss_weights"], t["position_ids"].long()]
    row = [x.clamp(min=0)[None] for x in row]
    doc[doc < 0] = 3
    ids = ["tree", "image", "text"]
    return packing.Batch(*row, until, bidir, doc, branch, images, pool_src, pool_dst, ids)


@cache
def run(family, mask):
    """-> the two terms of the loss, and the gradient of every parameter."""
    model, b = model_of(family), batch(mask)
    nll, lse = model(b)
    total = b.weights.sum()
    ce, z = (b.weights * nll).sum() / total, 1e-4 * (b.weights * lse**2).sum() / total
    grads = torch.autograd.grad(ce + z, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return ce.item(), z.item(), dict(zip(names, grads, strict=True))


def expected_of(family, mask="bidir"):
    """mask: "bidir", as released, or "causal", where image tokens only attend backwards."""
    return EXPECTED["results"][f"{family}_{mask}"]


@each_family
def test_visual_features_equal_the_official_code(family):
    b = batch()
    with torch.no_grad():
        seen = model_of(family).vision(b.images, b.pool_src)
    real = (b.pool_src >= 0).any(1)
    assert (~real).sum() == 3
    assert (seen[~real] == 0).all()
    assert_close(
        seen[real], tiny()[f"{family}.image_features"], rtol=0, atol=1e-8
    )  # features are about 1e-4


@each_mask
@each_family
def test_logits_equal_the_official_code(family, mask):
    with torch.no_grad():
        logits = model_of(family).logits(batch(mask))
    ours = logits[batch(mask).weights > 0]
    assert_close(ours, tiny()[MASKS[mask].format(family)], rtol=0, atol=1e-5)


@each_mask
@each_family
def test_loss_equals_the_official_code(family, mask):
    ce, z, _ = run(family, mask)
    assert ce == pytest.approx(expected_of(family, mask)["ce"], abs=1e-5)
    assert z == pytest.approx(expected_of(family, mask)["z"], abs=1e-7)  # z is only 0.004


@each_mask
@each_family
def test_every_gradient_norm_equals_the_official_code(family, mask):
    e, (_, _, grads) = expected_of(family, mask)["grad_norms"], run(family, mask)
    places = {}
    for name in e:
        *path, last, _ = name.split(".") if "." in name else [name]
        places[name] = (
            [f"{path[1]}.{path[2]}.{part}.weight" for part in FUSED[last]]
            if last in FUSED
            else [rename(name, TRAINING)]
        )
    assert sorted(p for parts in places.values() for p in parts) == sorted(
        grads
    )  # each parameter once
    ours = {
        name: math.hypot(*(grads[p].norm().item() for p in parts)) for name, parts in places.items()
    }
    # a bias of keys does not change a softmax, so its gradient is only rounding, about 1e-13
    assert_close(ours, e, rtol=1e-4, atol=1e-11)


# --------------------------------------------------------------------------------------------------
# greedy decoding


def ask():
    """The prompt for greedy decoding: the second question of example 0."""
    b = batch()
    tokens = np.array([*b.tokens[0, :411].tolist(), *b.tokens[0, 446:470].tolist()])
    prompt = text_example(tokens, 0, id="greedy")
    prompt.bidir = np.isin(tokens, VISUAL).astype(np.int32)
    prompt.image_id = np.arange(2, dtype=np.int32)
    prompt.pool_dst = np.flatnonzero(tokens == PATCH)
    prompt.images = b.images[:2].numpy()
    prompt.pool_src = b.pool_src[: len(prompt.pool_dst)].numpy()
    return prompt


@each_family
def test_greedy_tokens_equal_the_official_code(family):
    (new,) = generate(model_of(family), [ask()], EOS, max_new=8)
    assert new == expected_of(family)["greedy8_full_recompute"]


@each_family
def test_under_autocast_attention_is_given_bfloat16(family, monkeypatch):
    """q and k come from norms in float32. In float32, Ulysses would exchange twice the bytes."""
    model, given = model_of(family), []

    def attend(q, k, v, mask):
        given.extend([q.dtype, k.dtype, v.dtype])
        return q

    monkeypatch.setattr(model, "attend", attend)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.hidden(batch())
    assert set(given) == {torch.bfloat16}


# --------------------------------------------------------------------------------------------------
# training


@pytest.mark.parametrize(("residual", "response"), [(0.0, 0.25), (0.25, 0.0)])
def test_dropout_applies_to_the_positions_of_its_stage(residual, response):
    """Stage 1: only positions whose target has loss. Stages 2 and 3: all positions."""
    torch.manual_seed(0)
    has_loss = torch.arange(64) % 2 == 0
    x = models.dropout(residual, response, has_loss[None])(torch.ones(1, 64, 4096))[0]
    assert torch.equal(x[~has_loss] == 1, torch.full((32, 4096), residual == 0))
    assert abs(float((x[has_loss] == 0).float().mean()) - 0.25) < 0.01
    assert abs(float(x.mean()) - 1) < 0.01
    assert float(x.max()) == pytest.approx(1 / 0.75)


def test_dropout_has_the_rates_of_training_where_a_batch_has_loss(monkeypatch):
    given = []
    model = models.Molmo2(config_of("qwen"))
    model.residual_dropout, model.response_dropout = 0.1, 0.2
    monkeypatch.setattr(models, "dropout", lambda *rates: given.append(rates) or (lambda x: x))
    with torch.no_grad():
        model.train().hidden(batch())
        model.eval().hidden(batch())
    (residual, response, has_loss), (*in_evaluation, _) = given
    assert (residual, response) == (0.1, 0.2)
    assert torch.equal(has_loss, batch().weights > 0)
    assert not has_loss.all()
    assert in_evaluation == [0, 0]


@pytest.mark.parametrize("init_std", [0.0, 0.02])
def test_new_weights_have_the_standard_deviation_of_the_config_or_of_their_inputs(init_std):
    torch.manual_seed(0)
    model = models.Molmo2(replace(models.PRESETS["toy"], init_std=init_std))
    for name, p in model.init_weights().named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, "norm.weight" in name)), name
        else:
            of_inputs = 1.0 if name in ("embedding.weight", "extra.weight") else p.shape[1] ** -0.5
            expected = 0.02 if name == "vision.vit.pos" else init_std or of_inputs
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.1), name


def test_special_tokens_learn_with_the_connector():
    model = models.Molmo2(config_of("qwen"))
    name_of = {id(p): name for name, p in model.named_parameters()}
    starts = {part: {".".join(name_of[id(p)].split(".")[:2]) for p in parameters}
              for part, parameters in model.parameter_groups().items()}
    assert starts["vit"] == {"vision.vit"}
    assert starts["connector"] == {"vision.pool", "vision.projector", "extra.weight"}
    assert not starts["llm"] & (starts["vit"] | starts["connector"])
    assert sum(map(len, model.parameter_groups().values())) == len(name_of)


# --------------------------------------------------------------------------------------------------
# RoPE


FREQUENCIES = [("olmo3_7b_instruct.default", "o7b", False), ("olmo3_7b_instruct.yarn", "o7b", True),
               ("qwen3_8b.default", "8b", False), ("qwen3_4b_instruct.default", "4b", False)]
COSINES = [("olmo3_7b_instruct.cos_pos63_first8", "o7b", True),
           ("qwen3_8b.cos_pos63_first8", "8b", False),
           ("qwen3_4b_instruct.cos_pos63_first8", "4b", False)]


@pytest.mark.parametrize(("name", "preset", "yarn"), FREQUENCIES)
def test_rope_frequencies_equal_the_official_code(name, preset, yarn):
    e, config = ROPE[name], models.PRESETS[preset]
    freq, factor = models.rope_frequencies(config, yarn)
    assert config.head_dim == e["dim"]
    assert config.rope_theta == e["theta"]
    assert factor == e["attention_factor"]
    assert_close(freq, torch.tensor(e["inv_freq"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "preset", "yarn"), COSINES)
def test_rope_table_equals_the_official_code(name, preset, yarn):
    config = models.PRESETS[preset]
    freq, factor = models.rope_frequencies(config, yarn)
    cos, sin = models.rope_table(torch.tensor([[0, 63]]), freq, factor)
    assert cos[0, 1, 0, :8].tolist() == pytest.approx(ROPE[name], abs=1e-5)
    assert_close(cos**2 + sin**2, torch.full_like(cos, factor**2), rtol=1e-5, atol=0)
    assert len(ROPE) == len(FREQUENCIES) + len(COSINES)


@pytest.mark.parametrize("layers", [(3,), (0, 2), ()])
def test_yarn_is_used_on_its_layers_only(layers):
    config = config_of("olmo")
    config = replace(config, yarn=replace(config.yarn, layers=layers))
    model = models.Molmo2(config).eval()
    used = []
    for block in model.blocks:       # called as (x, rope, mask, ...)
        block.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1]))
    pos = torch.arange(20)[None]
    with torch.no_grad():
        model.transformer(torch.zeros(1, 20, config.n_embd), pos,
                          torch.ones(1, 20, 20, dtype=torch.bool))
    plain, yarn = (models.rope_table(pos, *models.rope_frequencies(config, yarn))
                   for yarn in (False, True))
    assert not torch.equal(plain[0], yarn[0])
    expected = [yarn if i in layers else plain for i in range(config.n_layer)]
    assert_close(used, expected, rtol=0, atol=0)


def test_the_7b_model_has_yarn_on_every_fourth_layer():
    assert models.PRESETS["o7b"].yarn.layers == (3, 7, 11, 15, 19, 23, 27, 31)
    assert models.PRESETS["4b"].yarn.layers == models.PRESETS["8b"].yarn.layers == ()


def test_the_decoder_of_the_small_preset_has_as_many_weights_as_qwen3_0_6b():
    with torch.device("meta"):
        model = models.Molmo2(models.PRESETS["small"])
    assert sum(p.numel() for p in model.parameter_groups()["llm"]) == 596_049_920
