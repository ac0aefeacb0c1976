"""What the walk measures with the model of examples.py: outputs, shares of the loss, gradients."""

import dataclasses

import torch

import packing
from tools.walk import examples
from tools.walk.ranks import weighted_sums


@torch.no_grad()
def outputs_that_differ(example, place):
    """(T,) bool: the tokens whose output is not the same, bit for bit, after one was changed."""
    model = examples.new_model()
    tokens = example.tokens.copy()
    tokens[place] += 1 if tokens[place] < 300 else -1            # any other token will do
    changed = dataclasses.replace(example, tokens=tokens)
    before, after = (model.hidden(examples.collate([[x]], len(tokens)))[0]
                     for x in (example, changed))
    return (before != after).any(1).tolist()


def token_costs(batch):
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
        square = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
        norms[place] = square**0.5
    return nll, norms


def share(x):
    return x / x.sum()


def by_part(values, parts):
    """(T,) numbers -> {name of the part: sum}, of the parts that have any."""
    sums = {part.name: float(values[part.start : part.stop].sum()) for part in parts}
    return {name: value for name, value in sums.items() if value > 0}


def gradient(micro_batches, divide):
    """The gradient of a step, as one vector, of micro-batches, each a list of examples.

    divide "once": sums of all micro-batches over the weight of the whole step (train.py). divide
    "each": every micro-batch by its own weight, then the mean. That is another objective.
    """
    model = examples.new_model()
    total = 0.0
    for row in micro_batches:
        loss, weight = weighted_sums(model, examples.collate([row]))
        if divide == "each":
            loss = loss / weight / len(micro_batches)
        loss.backward()
        total += float(weight)
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return flat if divide == "each" else flat / total


def weight_shares(micro_batches, divide):
    """{name of a part: its share of the weight of the step}, with the same two ways to divide."""
    weights = [sum(float(x.weights.sum()) for x in row) for row in micro_batches]
    total = sum(weights)
    shares = {}
    for row, weight in zip(micro_batches, weights, strict=True):
        each = torch.cat([torch.from_numpy(x.weights) for x in row])
        factor = 1 / total if divide == "once" else 1 / weight / len(micro_batches)
        shares |= by_part(each.double() * factor, examples.parts_of(row))
    return shares


def lower_bound(sizes, tokens, crops):
    """Rows that any packing needs: all tokens and all crops have to be somewhere."""
    by_tokens = sum(t for t, _ in sizes) / tokens
    by_crops = sum(c for _, c in sizes) / crops
    return by_tokens, by_crops, max(-(-sum(t for t, _ in sizes) // tokens),
                                    -(-sum(c for _, c in sizes) // crops))


def rows_in_order(sizes, tokens, crops):
    """Rows that are needed when examples go into rows in the order in which they come."""
    rows, used_tokens, used_crops = 1, 0, 0
    for t, c in sizes:
        if used_tokens + t > tokens or used_crops + c > crops:
            rows += 1
            used_tokens = used_crops = 0
        used_tokens += t
        used_crops += c
    return rows


def waits(sizes, tokens, crops, pool_size):
    """{index: rows that were made while the example waited}, of packing.Planner."""
    planner = packing.Planner(sizes, tokens, crops, pool_size)
    found = {}
    for n, _ in enumerate(planner):
        found |= {item.index: n - item.arrived for item in planner.last}
    return found
