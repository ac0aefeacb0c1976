"""Measurements of the walk with the model of examples.py: outputs, shares of the loss, gradients,
and the row on two processes (gloo) with parallel.py of the project."""

import dataclasses
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import data
import parallel
from tools.walk import examples

CP = 2  # processes that share the row
Z_LOSS = 1e-4


@torch.no_grad()
def find_changed_outputs(example, place):
    """Changes the token at `place` -> the positions whose output changes by at least one bit."""
    model = examples.new_model()
    tokens = example.tokens.copy()
    # any other token can be used
    tokens[place] += 1 if tokens[place] < 300 else -1
    changed = dataclasses.replace(example, tokens=tokens)
    before, after = (model.hidden(examples.collate([x], len(tokens)))[0]
                     for x in (example, changed))
    return (before != after).any(1).nonzero()[:, 0].tolist()


def measure_tokens(batch):
    """-> the nll of each token (T,), and the norm of the gradient of this nll (T,). Both are 0 for
    tokens without loss."""
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
    """(T,) numbers -> {name of a part: its share of their sum}, for parts with a share above 0."""
    total = values.sum()
    shares = {part.name: float(values[part.start : part.stop].sum() / total) for part in parts}
    return {name: share for name, share in shares.items() if share > 0}


def add_gradients(micro_batches, divisors):
    """-> the gradient of a step, as one vector. It is the sum over the micro-batches (lists of
    examples) of the gradient of their summed loss, divided by the divisor of the micro-batch."""
    model = examples.new_model()
    for micro_batch, divisor in zip(micro_batches, divisors, strict=True):
        loss, _ = sum_loss(model, examples.collate(micro_batch))
        (loss / divisor).backward()
    return flat_gradient(model)


@dataclasses.dataclass
class Rank:
    """The part of the row that one process had, and its results."""
    n_tokens: int  # tokens in its slice of the row
    n_crops: int  # crops that it encodes
    sent: list  # number of visual tokens that it sends to each rank
    outside: torch.Tensor  # (T,H) bool: the tokens and heads that it has before attention
    inside: torch.Tensor  # the same after the first exchange, inside attention
    returned: torch.Tensor  # the same after the second exchange
    loss: float  # its part of the sum of the loss
    weight: float  # its part of the sum of the weights


def sum_loss(model, batch):
    """-> the sum of the loss and the sum of the weights, as in train.forward_backward."""
    nll, lse = model(batch)
    loss = (batch.weights * (nll + Z_LOSS * lse**2)).sum()
    return loss, batch.weights.sum(dtype=torch.float64)


@cache  # the walk and its picture show the same run
def run_two():
    """Starts two processes that share the row -> [Rank, Rank]."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=CP)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(CP)]


@torch.no_grad()
def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=CP)
    mesh = parallel.make_mesh(CP)
    model = parallel.parallelize(examples.new_model(), mesh)
    row = examples.encode(share_crops(rank))
    batch = parallel.cut_for_rank(examples.collate(row), rank, CP)
    loss, weight = sum_loss(model, batch)
    held = follow_heads(rank, mesh.cp.get_group())
    n_crops = int((batch.cp_rank == rank).sum())
    found = Rank(batch.tokens.shape[1], n_crops, batch.dispatch[0], *held, float(loss),
                 float(weight))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # no process may end while the other one still waits for it
    dist.destroy_process_group()
    os._exit(0)  # skips the end of Python, as Ranks.leave does (training/ranks.py)


def share_crops(rank):
    """-> the parallel.CropShard of each record, as in the loader of training."""
    crops = [data.size(record, examples.TOKENIZER, examples.DATA, examples.VISION,
                       examples.SEED, 0)[1]
             for record in examples.RECORDS]
    before = np.cumsum([0, *crops]).tolist()
    return [parallel.CropShard(rank, CP, n, before[-1]) for n in before[:-1]]


def follow_heads(rank, group):
    """Sends numbers through parallel.ulysses in place of queries -> three tensors (T,H) bool:
    which numbers this rank has before attention, inside attention, and after it.

    The number t * H + h stands for head h of the token at position t. The function `attend` returns
    its queries, so they show which numbers arrived.
    """
    T = examples.ROW
    H = examples.MODEL.n_head
    G = examples.MODEL.n_kv_head
    numbers = torch.arange(T * H).view(1, T, H, 1).double()
    mine = numbers[:, rank * T // CP : (rank + 1) * T // CP]
    arrived = []

    def attend(q, k, v, mask):
        arrived.append(q)
        return q

    back = parallel.ulysses(attend, group)(mine, mine[:, :, :G], mine[:, :, :G], None)
    return [torch.isin(numbers, x).view(T, H) for x in (mine, arrived[0], back)]
