"""The row of the walk on two real processes (gloo), with the project's own parallel.py."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import data
import parallel
from tools.walk import examples

CP = 2                               # processes that share the row
Z_LOSS = 1e-4


@dataclass
class Rank:
    """What one process held and computed."""
    tokens: list                     # (t,) its slice of the row
    n_crops: int                     # that it encodes
    sent: list                       # visual tokens that go to each rank
    before: torch.Tensor             # (T,H) bool: heads of tokens that it held at first,
    heads: torch.Tensor              # that its attention received after the first exchange,
    returned: torch.Tensor           # and that it held after the second
    loss: float                      # its part of the sum of the loss
    weight: float                    # its part of the sum of the weights


def weighted_sums(model, batch):
    """-> the sum of the loss and of the weights, for train.forward_backward's formula."""
    nll, lse = model(batch)
    return (batch.weights * (nll + Z_LOSS * lse**2)).sum(), batch.weights.sum(dtype=torch.float64)


def one_process():
    """-> the sums of loss and weights of the row, as (float, float)."""
    batch = examples.collate([examples.encode()])
    with torch.no_grad():
        return [float(x) for x in weighted_sums(examples.new_model(), batch)]


def two_processes(swap=None):
    """-> [Rank, Rank]. swap: a picklable function that each process calls first."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, swap), nprocs=CP)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(CP)]


def worker(rank, folder, swap):
    torch.set_num_threads(1)
    if swap:
        swap()
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=CP)
    mesh = parallel.make_mesh(CP)
    model = parallel.parallelize(examples.new_model(), mesh)
    row = row_of_rank(rank)
    batch = parallel.shard(examples.collate([row]), rank, CP)
    with torch.no_grad():
        loss, weight = weighted_sums(model, batch)
    held = follow_heads(rank, mesh["cp"].get_group())
    found = Rank(batch.tokens[0].tolist(), int((batch.cp_rank == rank).sum()), batch.dispatch[0],
                 *held, float(loss), float(weight))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()                   # none leaves while another still waits for it
    dist.destroy_process_group()


def row_of_rank(rank):
    """The examples of the row with the crops of one rank, as training/loader.py asks for them."""
    sizes = [data.size(record, examples.TOKENIZER, examples.DATA, examples.SEED, 0)
             for record in examples.RECORDS]
    before = np.cumsum([0, *(crops for _, crops in sizes)]).tolist()
    shards = [data.CropShard(rank, CP, n, before[-1]) for n in before[:-1]]
    return [data.encode(record, examples.TOKENIZER, examples.DATA, examples.SEED, 0, shard)
            for record, shard in zip(examples.RECORDS, shards, strict=True)]


def follow_heads(rank, group):
    """Sends numbers in place of queries through parallel.ulysses: number 4 * place + head. An
    attend that returns its queries shows which of them a rank holds in between."""
    T, H, G = examples.ROW, examples.MODEL.n_head, examples.MODEL.n_kv_head
    numbers = torch.arange(T * H).view(1, T, H, 1).double()
    mine = numbers[:, rank * T // CP : (rank + 1) * T // CP]
    seen = []

    def attend(q, k, v, mask):
        seen.append(q)
        return q

    back = parallel.ulysses(attend, group)(mine, mine[:, :, :G], mine[:, :, :G], None)
    return [torch.isin(numbers, x).view(T, H) for x in (mine, seen[0], back)]


def holder(found, name):
    """[Rank, Rank], a name of theirs -> (T,H): the rank that holds each head of each token."""
    first, second = (getattr(rank, name) for rank in found)
    assert bool((first ^ second).all()), "each head of each token is on one rank"
    return second.int()
