"""No training step waits for a number that the GPU is still computing."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model as models
from tests.tools.memory.small_model import (
    attend_as_on_a_gpu,
    batch_of,
    config_of,
    forward,
    model_of,
)

# operations whose result, or whose result's shape, the host has to know. tolist, numpy and cpu are
# missing: on a CPU they are no operations
SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
                 "equal")


class Waits(TorchDispatchMode):
    """Names of the operations for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put") else []
        by_mask = any(i is not None and i.dtype == torch.bool for i in indices)
        if by_mask or name in SYNCHRONIZING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_step_waits_for_its_own_numbers(checkpointing, monkeypatch):
    attend_as_on_a_gpu(monkeypatch.setattr)
    config = config_of(models.PRESETS["toy"], activation_checkpointing=checkpointing)
    config = replace(config, residual_dropout=0.1)
    model = model_of(config).train()
    batch = batch_of(config)
    with Waits() as waits:
        nll, lse = forward(model, batch, torch.bfloat16)
        (batch.weights * (nll + 1e-4 * lse**2)).sum().backward()
    assert waits.found == []
    with Waits() as waits:
        batch.weights[batch.weights > 0].sum().item()
    assert waits.found == ["index", "_local_scalar_dense"]
