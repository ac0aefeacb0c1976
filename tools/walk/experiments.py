"""What the walk measures with the model of examples.py: outputs, shares of the loss, gradients."""

import dataclasses

import torch

from tools.walk import examples
from tools.walk.ranks import sum_loss


@torch.no_grad()
def find_changed_outputs(example, place):
    """Changes one token of an example -> the places whose output then changes, if by one bit."""
    model = examples.new_model()
    tokens = example.tokens.copy()
    tokens[place] += 1 if tokens[place] < 300 else -1  # any other token will do
    changed = dataclasses.replace(example, tokens=tokens)
    before, after = (model.hidden(examples.collate([x], len(tokens)))[0]
                     for x in (example, changed))
    return (before != after).any(1).nonzero()[:, 0].tolist()


def measure_tokens(batch):
    """-> nll (T,), and the norm of the gradient of each token's nll alone (T,); 0 without loss."""
    model = examples.new_model()
    nll = torch.zeros(batch.tokens.shape[1], dtype=torch.float64)
    norms = nll.clone()
    for place in batch.labelled.tolist():
        weights = torch.zeros_like(batch.weights)
        weights[0, place] = 1
        model.zero_grad()
        nlls, _ = model(dataclasses.replace(batch, weights=weights))
        nlls.sum().backward()
        nll[place] = float(nlls.detach().sum())
        norms[place] = flat_gradient(model).norm()
    return nll, norms


def flat_gradient(model):
    """All gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def share_by_part(values, parts):
    """(T,) numbers -> {name of a part: its share of their sum}, of the parts that have any."""
    total = values.sum()
    shares = {part.name: float(values[part.start : part.stop].sum() / total) for part in parts}
    return {name: share for name, share in shares.items() if share > 0}


def add_gradients(micro_batches, divisors):
    """The gradient of a step, as one vector: the sum over its micro-batches, lists of examples, of
    the gradient of their summed loss, each divided by its own divisor."""
    model = examples.new_model()
    for micro_batch, divisor in zip(micro_batches, divisors, strict=True):
        loss, _ = sum_loss(model, examples.collate(micro_batch))
        (loss / divisor).backward()
    return flat_gradient(model)
