"""Low-rank adapters (LoRA, arXiv 2106.09685): two thin matrices are trained per linear layer.

    y = x W^T + alpha / rank * (x A^T) B^T     W (out,in) frozen, A (rank,in), B (out,rank)

B starts as zeros, so the output of the model does not change at first. `add_adapters` replaces
linear layers, and keeps the names of their weights. `merged` adds the scaled product B A to W.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

LAYERS = ("q", "k", "v", "out", "up", "gate", "down")


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0  # rank of the adapters, trained in place of the decoder (--lora R); 0: none
    alpha: float = 16.0  # the output of an adapter is multiplied by alpha / rank
    layers: tuple = LAYERS  # the linear layers of every decoder block that have one


class LoraLinear(nn.Linear):
    def __init__(self, weight, config):
        nn.Module.__init__(self)
        self.weight = weight
        self.bias = None
        self.scale = config.alpha / config.rank
        n_out, n_in = weight.shape
        self.lora_a = nn.Parameter(weight.new_empty(config.rank, n_in))
        self.lora_b = nn.Parameter(weight.new_empty(n_out, config.rank))

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model, config):
    """Freezes the decoder of a Molmo2 and adds adapters to it. init_adapters fills them."""
    for p in model.parameter_groups()["llm"]:
        p.requires_grad_(False)
    for part in [part for block in model.blocks for part in (block.attn, block.mlp)]:
        for name in config.layers:
            if hasattr(part, name):
                setattr(part, name, LoraLinear(getattr(part, name).weight, config))


@torch.no_grad()
def init_adapters(model, seed):
    """Fills the adapters. The numbers do not depend on the number of ranks; each keeps its rows."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith(".lora_a"):
            copy_rows(p, torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5)
        elif name.endswith(".lora_b"):
            p.zero_()


def copy_rows(parameter, tensor):
    """Copies a tensor into a parameter. If it is sharded, this rank copies only its rows."""
    first = 0
    if isinstance(parameter, DTensor):
        numbers = torch.arange(len(parameter), device=parameter.device)
        own = distribute_tensor(numbers, parameter.device_mesh, parameter.placements,
                                src_data_rank=None).to_local()
        first = int(own[0]) if len(own) else 0
        parameter = parameter.to_local()
    parameter.copy_(tensor[first : first + len(parameter)])


def has_adapters(model):
    return any(isinstance(module, LoraLinear) for module in model.modules())


def hold_frozen(model, dtype):
    """Converts frozen matrices to dtype. The embedding of special tokens and the norms stay in
    float32, and so does the residual stream."""
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.embedding:
            for p in module.parameters(recurse=False):
                p.data = p.data if p.requires_grad else p.data.to(dtype)


def merged(model, tensors, dtype):
    """{name: tensor} of a model with adapters -> {name: tensor}, in dtype, of a model without
    adapters that computes the same."""
    scale = next((m.scale for m in model.modules() if isinstance(m, LoraLinear)), 0)
    found = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix("weight")
        if f"{layer}lora_a" in tensors:
            product = tensors[f"{layer}lora_b"].float() @ tensors[f"{layer}lora_a"].float()
            tensor = tensor.float() + scale * product
        if not name.endswith((".lora_a", ".lora_b")):
            found[name] = tensor.to(dtype)
    return found
