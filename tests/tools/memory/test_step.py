"""Counted parts and peaks of a step against real models: parameters, AdamW, masks, living tensors.

FlexAttention has no backward pass on a CPU: small_model.FlexAttentionMemory stands in for it.
Answers attend by SDPA, with kv heads repeated as on a GPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import attention
import data
import model as models
import vision
from evaluation.generate import KVCache, generate
from tests.tools.memory.small_model import (
    ALL_PARTS,
    COMPUTE_BYTES,
    CONNECTOR,
    DECODER,
    DEEP_VISION,
    LARGER_VISION,
    LiveBytes,
    batch_of,
    config_of,
    forward,
    model_of,
    peak_of_step,
    tensors_of,
)
from tests.tools.memory.test_activations import SHAPES
from tools.memory import activations
from tools.memory.shape import largest_shape, parameters
from tools.memory.step import answering, training

# of the released models: docs/molmo2.md 1.1
RELEASED = {"toy": None, "small": None, "4b": 4_461_913_040, "8b": 8_661_703_120,
            "o7b": 7_760_786_896}


@pytest.mark.parametrize(("preset", "total"), RELEASED.items())
def test_parameters_equal_the_presets(preset, total):
    with torch.device("meta"):
        model = models.Molmo2(models.PRESETS[preset])
    counted = parameters(largest_shape(config_of(model.config), 4))
    for part, group in model.parameter_groups().items():
        assert counted[part].total == sum(p.numel() for p in group)
    matrices = 0                             # what autocast makes copies of
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            matrices += sum(p.numel() for p in module.parameters())
    assert sum(numbers.in_matrices for numbers in counted.values()) == matrices
    assert total in (None, sum(numbers.total for numbers in counted.values()))
    assert model.nll_chunk == activations.NLL_CHUNK


@pytest.mark.parametrize("trained", [ALL_PARTS, ("connector", "llm"), ("vit",)])
@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"family": "olmo"},
                                     {"family": "llama"}], ids=str)
def test_weights_gradients_and_optimizer_equal_a_real_step(trained, changes):
    for freeze in (True, False):
        config = config_of(replace(models.PRESETS["toy"], **changes), train=trained,
                           freeze_embedding=freeze, max_tokens=64)
        model = model_of(config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        nll, lse = forward(model, batch_of(config), torch.float32)
        (nll + lse).sum().backward()
        optimizer.step()
        parts = training(largest_shape(config, 4)).parts
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        averages = []
        for state in optimizer.state.values():
            averages += [value for value in state.values() if value.ndim]
        assert parts["weights"] == sum(p.nbytes for p in model.parameters())
        assert parts["gradients"] == sum(g.nbytes for g in gradients)
        assert parts["optimizer"] == sum(a.nbytes for a in averages)


@pytest.mark.parametrize("tokens", [90, 128, 300, 1024])
def test_batch_and_mask_are_counted_exactly(tokens):
    for model, changes in SHAPES.values():
        config = config_of(model, max_tokens=tokens, **changes)
        batch = batch_of(config)
        parts = training(largest_shape(config, 4)).parts
        assert parts["batch"] == sum(t.nbytes for t in tensors_of(batch))
        mask = attention.packed_mask(batch.visible_until, batch.bidir)
        fields = [cell.cell_contents for cell in mask.mask_mod.__closure__]
        tensors = [t for t in (*mask.as_tuple(), *fields) if torch.is_tensor(t)]
        assert parts["mask"] == sum(t.nbytes for t in tensors)


def test_no_image_has_more_visual_tokens_per_crop_than_counted():
    for h in range(50, 3000, 150):
        for w in range(50, 3000, 150):
            low, high, crops = vision.pooled_grids(h, w, 8)
            assert low[0] * low[1] + high[0] * high[1] <= crops * 196
    config = config_of(models.PRESETS["4b"], max_tokens=10_000, micro_batch=1, pack_crops=16)
    assert largest_shape(config, 2).visual_tokens == 16 * 196


# --------------------------------------------------------------------------------------------------
# peaks


def peak_case(moment, model, trained=ALL_PARTS, **changes):
    config = config_of(model, **{"activation_checkpointing": True, **changes})
    return moment, replace(config, train=trained)


LARGE_HEAD = replace(DECODER, n_vocab=3000)
PEAKS = [
    peak_case("backward of an MLP", DECODER, max_tokens=600),
    peak_case("backward of the loss", DECODER, uncheckpointed_blocks=1, max_tokens=600),
    peak_case("backward of the loss", DECODER, uncheckpointed_blocks=3, max_tokens=600),
    peak_case("backward of the loss", DECODER, activation_checkpointing=False, max_tokens=192),
    peak_case("backward of the loss", replace(LARGE_HEAD, tied=True), ("connector", "llm")),
    peak_case("backward of the loss", LARGE_HEAD),
    peak_case("backward of a ViT block", replace(DECODER, vision=LARGER_VISION), pack_crops=12),
    peak_case("forward of the ViT", replace(DECODER, vision=DEEP_VISION), ("connector",),
              pack_crops=24),
    peak_case("backward of the connector", CONNECTOR, pack_crops=16, max_tokens=256, stage=2,
              micro_batch=1)]


@pytest.mark.parametrize("dtype", COMPUTE_BYTES)
@pytest.mark.parametrize(("moment", "config"), PEAKS, ids=range(len(PEAKS)))
def test_the_largest_moment_is_the_peak_of_a_real_step(moment, config, dtype):
    # The loss is counted term by term. In a block the input is counted twice, and of the gradients
    # on their way the largest. A block without a checkpoint comes close to the loss before it.
    exact = moment == "backward of the loss" and not config.uncheckpointed_blocks
    peak = peak_of_step(model_of(config), batch_of(config), dtype)
    count = training(largest_shape(config, COMPUTE_BYTES[dtype]))
    without_optimizer = count.total - count.parts["optimizer"]
    assert without_optimizer == pytest.approx(peak, rel=0.01 if exact else 0.06)
    if dtype == torch.float32:
        assert count.peak == moment


@pytest.mark.parametrize("dtype", COMPUTE_BYTES)
@pytest.mark.parametrize(("heads", "checkpointing"), [(32, False), (32, True), (8, True)])
def test_attention_takes_what_is_counted(heads, dtype, checkpointing):
    """Where attention is the peak: many heads, a small MLP."""
    shape = replace(DECODER, n_layer=1, n_head=heads, n_kv_head=-(-heads // 4), n_hidden=32)
    config = config_of(shape, activation_checkpointing=checkpointing, max_tokens=2500,
                       micro_batch=1)
    model = model_of(config)
    batch = batch_of(config)
    live = LiveBytes(*model.parameters(), *tensors_of(batch))
    with live:
        nll, _ = forward(model, batch, dtype)
        nll.sum().backward()
    count = training(largest_shape(config, COMPUTE_BYTES[dtype]))
    counted = count.total - count.parts["optimizer"] - count.parts["gradients"]
    assert count.peak == "backward of attention"
    assert live.peak == pytest.approx(counted, rel=0.07)


@pytest.mark.parametrize("dtype", COMPUTE_BYTES)
@pytest.mark.parametrize(("moment", "model", "tokens", "crops"), [
    ("decoder", DECODER, 512, 2), ("connector", CONNECTOR, 400, 25),
    ("ViT", replace(DECODER, vision=DEEP_VISION), 200, 40)])
def test_an_answer_takes_what_is_counted(moment, model, tokens, crops, dtype):
    config = config_of(model, max_tokens=tokens, pack_crops=crops, micro_batch=1, stage=3)
    model = models.Molmo2(config.model).init_weights().to(dtype).eval()
    batch = batch_of(config)
    count = answering(config, COMPUTE_BYTES[dtype])
    assert count.parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert count.parts["cache"] == KVCache(model, 1, tokens).kv.nbytes
    n = tokens - 8                           # the last 8 are generated
    in_prompt = batch.pool_dst < n
    fields = ("tokens", "targets", "weights", "pos", "visible_until", "bidir")
    prompt = data.Example(
        *(getattr(batch, name)[0, :n].numpy() for name in fields), images=batch.images.numpy(),
        image_id=np.arange(len(batch.images)), pool_src=batch.pool_src[in_prompt].numpy(),
        pool_dst=batch.pool_dst[in_prompt].numpy())
    live = LiveBytes(*model.parameters())
    with live:
        generate(model, [prompt], -1, 8)
    assert count.total == pytest.approx(live.peak, rel=0.03)
    assert count.peak == f"prefill: {moment}"
