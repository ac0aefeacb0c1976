"""Low-rank adapters (LoRA, arXiv 2106.09685): the decoder learns in two thin matrices per layer.

    y = x W^T + alpha / rank * (x A^T) B^T         W (out,in) frozen, A (rank,in), B (out,rank)

B begins as zeros, so the model begins as its base. `add_adapters` replaces linear layers of a
Molmo2, which does not know of it, and keeps the names of their weights; `merged` adds A and B to W.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = ("q", "k", "v", "out", "up", "gate", "down")


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0  # of the adapters, which learn in place of the decoder (short: --lora R); 0: none
    alpha: float = 16.0  # the output of an adapter is multiplied by alpha / rank
    layers: tuple = LAYERS  # the linear layers of every decoder block that have one


class LoraLinear(nn.Linear):
    def __init__(self, weight, config, generator):
        nn.Module.__init__(self)
        self.weight, self.bias = weight, None
        self.scale = config.alpha / config.rank
        n_out, n_in = weight.shape
        a = torch.randn(config.rank, n_in, generator=generator) * n_in**-0.5
        self.lora_a = nn.Parameter(a)
        self.lora_b = nn.Parameter(torch.zeros(n_out, config.rank))

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model, config, seed):
    """Freezes the decoder of a Molmo2 and puts adapters on it, the same on every rank."""
    for p in model.parameter_groups()["llm"]:
        p.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for part in [part for block in model.blocks for part in (block.attn, block.mlp)]:
        for name in config.layers:
            if hasattr(part, name):
                setattr(part, name, LoraLinear(getattr(part, name).weight, config, generator))


def has_adapters(model):
    return any(isinstance(module, LoraLinear) for module in model.modules())


def hold_frozen(model, dtype):
    """Keeps matrices that do not learn in dtype. The embedding of special tokens and norms stay
    float32, and so does the residual stream."""
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.embedding:
            for p in module.parameters(recurse=False):
                p.data = p.data if p.requires_grad else p.data.to(dtype)


def autocast(model, device, dtype):
    """That of training, for answers of a model whose frozen matrices are in dtype."""
    low = dtype != torch.float32 and has_adapters(model)
    return torch.autocast(device.type, dtype, enabled=low)


def merged(tensors, config):
    """{name: tensor} of a model -> of one without adapters that computes the same, in float32."""
    found = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix("weight")
        if f"{layer}lora_a" in tensors:
            product = tensors[f"{layer}lora_b"].float() @ tensors[f"{layer}lora_a"].float()
            tensor = tensor.float() + config.alpha / config.rank * product
        if not name.endswith((".lora_a", ".lora_b")):
            found[name] = tensor.float().cpu()
    return found
