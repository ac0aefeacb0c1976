"""Compiled blocks give the same gradients, and are compiled once for all packs."""

import copy
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch

import attention
import model as models
import packing
from tests.small_model import SMALL, batch_of, config_of, model_of
from tests.test_attention import put_visual_tokens_first
from tests.test_train import opened


@pytest.mark.slow
def test_compiled_blocks_that_run_again_take_a_new_block_mask_every_step(monkeypatch):
    """As on CUDA, but SDPA with the mask of the BlockMask replaces the FlexAttention kernel."""
    config = config_of(SMALL, recompute=1.0, response_dropout=0.0)
    found = []
    for blocks in (False, True):
        torch.manual_seed(0)
        model, batch = model_of(config).train(), batch_of(config)
        if blocks:
            put_visual_tokens_first(monkeypatch)
            model.compile_blocks()
        for t in (48, 32, 96):                       # tokens per document
            until = (torch.arange(96) // t * t + t).int().repeat(2, 1)
            bidir = batch.bidir * (until // t)
            model.zero_grad()
            model(replace(batch, visible_until=until, bidir=bidir))[0].sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, compiled in zip(found[:3], found[3:], strict=True):
        for a, b in zip(plain, compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(a.abs().max() + 1))


def test_attention_runs_once_in_a_step_and_a_block_is_two_graphs(monkeypatch):
    """All blocks are computed again. With -s this prints the numbers of docs/gpu.md."""
    graphs = []
    attended = []
    compiled = torch.compile

    def as_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compiled, backend=as_is))
    config = config_of(SMALL, recompute=1.0)
    model = model_of(config).train()
    model.attend = lambda *given: attended.append(given) or attention.attend(*given)
    for block in model.blocks:
        for part in ("before", "after"):
            models.compile_for_training(block, part, dynamic=None)
    model(batch_of(config))[0].sum().backward()
    print(f"{len(model.blocks)} blocks: {len(attended)} attention calls, {len(graphs)} graphs")
    assert len(attended) == len(model.blocks) == 2
    assert len(graphs) == 2  # both blocks use the same graphs


@pytest.mark.slow
def test_fifty_different_packs_of_videos_and_images_are_compiled_once():
    """Forward and backward with activation checkpointing. After the second pack, compiling is an
    error. The losses equal the losses of blocks that are not compiled."""
    plain, config, packs = opened(
        "--stage=2", "--tiny", "--batch=1", "--data.max_tokens=512", "--pack_crops=16",
        "--crop_bucket=2", "--steps=50")
    compiled = copy.deepcopy(plain)
    compiled.compile_blocks()
    plain.recompute, compiled.recompute = 1, 0.75
    shapes = set()
    try:
        for number, rows in enumerate(islice(packs, 50)):
            batch = packing.collate(rows, 512, config.model.vision, config.crop_bucket)
            stance = "fail_on_recompile" if number > 1 else "default"
            torch.compiler.set_stance(stance)
            found = compiled(batch)[0]
            (batch.weights * found).sum().backward()
            shapes.add((len(batch.images), tuple(batch.pool_src.shape), len(batch.labelled),
                        len(batch.ids)))
            if number % 10 == 9:
                assert torch.allclose(found, plain(batch)[0], atol=1e-4)
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
    assert len(shapes) > 40
