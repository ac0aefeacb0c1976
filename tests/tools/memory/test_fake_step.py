"""A whole training step of the 4B in stage 2, on fake tensors: shapes, dtypes and lifetimes of all
tensors, without memory. FlexAttention's kernel is a stand-in (small_model.FlexAttentionMemory)."""

import copy
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import model as models
from tests.tools.memory.small_model import LiveBytes, batch_of, forward, tensors_of
from tools.memory.shape import largest_shape
from tools.memory.step import training
from training.config import parse
from training.setup import apply_recipe


class LiveFakes(LiveBytes):
    """LiveBytes of storages without an address, and the largest square in any tensor."""

    largest_square = 0

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())
            if tensor.ndim > 1:
                self.largest_square = max(self.largest_square, min(tensor.shape[-2:]))
        self.peak = max(self.peak, self.now)


def fake_batch(batch, mode):
    fake = copy.copy(batch)
    for name, value in vars(batch).items():
        if torch.is_tensor(value):
            object.__setattr__(fake, name, mode.from_tensor(value))
    return fake


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--train", "connector,llm"], ["--uncheckpointed_blocks=12"],
], ids=str)
def test_a_step_of_the_4b_peaks_where_it_is_counted_and_waits_for_nothing(flags):
    """Within 5 %. An operation whose result the host must read is an error on fake tensors; no
    tensor is tokens x tokens."""
    _, config = parse(["--stage", "2", "--preset", "4b", "--micro-batch", "1", *flags])
    batch = batch_of(config)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    models.rope_frequencies.cache_clear()
    try:
        with mode:
            model = apply_recipe(models.Molmo2(config.model), config).train()
            for p in model.parameters():                 # as in the second micro-batch
                p.grad = torch.empty_like(p) if p.requires_grad else None
            batch = fake_batch(batch, mode)
            gradients = [p.grad for p in model.parameters() if p.requires_grad]
            live = LiveFakes(*model.parameters(), *gradients, *tensors_of(batch))
            with live:
                nll, lse = forward(model, batch, torch.bfloat16)
                (batch.weights * (nll + 1e-4 * lse**2)).sum().backward()
    finally:
        models.rope_frequencies.cache_clear()            # of fake tensors
    count = training(largest_shape(config, 2))
    without_optimizer = count.total - count.parts["optimizer"]
    print(f"{live.peak / 2**30:.2f} GiB, counted {without_optimizer / 2**30:.2f}: {count.peak}")
    assert live.peak == pytest.approx(without_optimizer, rel=0.05)
    assert live.largest_square < config.data.max_tokens
