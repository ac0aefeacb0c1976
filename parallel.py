"""One step over many GPUs (paper: long-context training; spec 11).

in    a Molmo2; on every rank of a context-parallel group a Batch with the tokens of the whole row and its own crops (data.CropShard)
out   the same model put together anew: Ulysses attention, vision shared out, weights sharded; the rank's part of the Batch

World of dp x cp ranks. The cp ranks of a group hold the same rows, cut along the tokens; dp groups hold different rows.

    rank      0           1           2           3           cp = 4, a row of 16 tokens, 8 heads
    tokens    0..3        4..7        8..11       12..15      everywhere but inside attention, each token with all heads
    heads     all         all         all         all
              ------------- all-to-all of q, k, v -------------
    tokens    0..15       0..15       0..15       0..15       inside attention, each head with all tokens: the plain
    heads     0 1         2 3         4 5         6 7         `attend` and the plain mask, from doc, branch, bidir

Nothing in model.py, vision.py or attention.py knows of it: `parallelize` puts it on from outside, at two seams, `attend` and
`route`. Losses are sums divided by the weight of the whole step, so no rank's mean is ever taken.
"""

import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import Block

# ---------------------------------------------------------------------------------------------------------------
# the mesh


def legal(n_head, n_kv_head):
    """Context-parallel degrees that these heads allow: query heads go evenly, and kv heads, or as many copies of each as ranks need."""
    return [cp for cp in range(1, n_head + 1) if n_head % cp == 0 and (n_kv_head % cp == 0 or cp % n_kv_head == 0)]


def misfit(world, cp, n_head, n_kv_head, batch, micro_batch, tokens, shard=0):
    """Why `world` ranks cannot train so, in one sentence; "" if they can. Asked before any model is built."""
    if cp not in legal(n_head, n_kv_head):
        return f"--cp {cp}: {n_head} query and {n_kv_head} kv heads allow {', '.join(map(str, legal(n_head, n_kv_head)))}"
    if world % cp:
        fit = [c for c in legal(n_head, n_kv_head) if world % c == 0]
        return f"--cp {cp}: {world} processes are no multiple of it; {', '.join(map(str, fit))} would do"
    if batch % (size := world // cp * micro_batch):
        near = ", ".join(str(n) for n in (batch // size * size, -(-batch // size) * size) if n)
        return (f"--batch {batch}: no multiple of {world // cp} data-parallel ranks times --micro-batch {micro_batch}; "
                f"{near} would do")
    if shard and world % shard:
        fit = [n for n in range(1, world + 1) if world % n == 0]
        return f"--shard {shard}: {world} processes are no multiple of it; {', '.join(map(str, fit))} would do"
    if tokens % cp:
        return f"--data.max_tokens={tokens}: no multiple of --cp {cp}; {tokens // cp * cp} would do"
    return ""


def join(cp, device, patience=600):
    """-> the mesh, a group to wait in for whatever one rank does alone (evaluate), and one for the threads that write checkpoints.

    In all other exchanges a rank that does not answer for `patience` seconds ends the run. Numbers that steer the run travel over
    gloo: they keep no GPU waiting.
    """
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=patience))
    return mesh(cp, device.type), *(dist.new_group(backend="gloo", timeout=timedelta(days=7)) for _ in range(2))


def is_first():
    """Is this the first process of a launch, whether or not it has joined the others yet?"""
    return int(os.environ.get("RANK", 0)) == 0


def mesh(cp, device="cpu"):
    """The ranks of this world as (dp, cp), cp varying fastest, so that a group lies within a node."""
    return init_device_mesh(device, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))


# ---------------------------------------------------------------------------------------------------------------
# Ulysses: heads for tokens


class Exchange(torch.autograd.Function):
    """x (cp, ...): part j goes to rank j, and part j of the result came from rank j. Its own mirror image, so backward is the same."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


def ulysses(attend, group):
    """attend(q, k, v, mask) on whole rows -> the same on a rank's slice (B,T/cp,H,D), with the mask of the whole row.

    One exchange carries q, k and v together, one brings the result back. Grouped kv heads are repeated only where there are fewer
    of them than ranks.
    """
    cp = dist.get_world_size(group)

    def exchanged(q, k, v, mask):
        (B, t, H, D), G = q.shape, k.shape[2]
        if cp > G:
            k, v = (x.repeat_interleave(cp // G, dim=2) for x in (k, v))
        parts = [x.view(B, t, cp, -1, D) for x in (q, k, v)]                         # heads by the rank that will hold them
        h, g = (x.shape[3] for x in parts[:2])
        whole = Exchange.apply(torch.cat(parts, 3).permute(2, 0, 1, 3, 4), group)    # (cp,B,t,h+2g,D), now by slice of tokens
        whole = whole.permute(1, 0, 2, 3, 4).reshape(B, cp * t, h + 2 * g, D)
        out = attend(*whole.split((h, g, g), 2), mask)                               # (B,T,h,D)
        out = Exchange.apply(out.reshape(B, cp, t, h, D).permute(1, 0, 2, 3, 4), group)
        return out.permute(1, 2, 0, 3, 4).reshape(B, t, H, D)

    return exchanged


def bytes_sent(config, tokens, cp, width=2):
    """By one rank in one layer, forward: of q, k, v and of the result, all but the part that stays. width: bytes of a number."""
    h, g = config.n_head, max(config.n_kv_head, cp)
    return tokens // cp * (2 * h + 2 * g) * config.head_dim * width * (cp - 1) // cp


# ---------------------------------------------------------------------------------------------------------------
# vision shared out by units


@dataclass(frozen=True)
class Route:
    """How many of its pooled tokens a rank sends, in the order of the ranks that need them: known from the row, so that none has to ask."""
    sent: list                       # how many go to each rank
    received: list                   # how many come from each


class Deliver(torch.autograd.Function):
    """Rows (M',C), sorted by destination, to their ranks; gradients the same way back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Deliver.apply(grad, *ctx.back), None, None, None


def routed(group):
    """-> the seam `model.route`: pooled tokens of the rank's own units -> those of its slice of the row."""
    def route(seen, batch):
        return Deliver.apply(seen[: sum(batch.route.sent)], batch.route.sent, batch.route.received, group)

    return route


def shard(batch, rank, cp):
    """The Batch of a row, with the crops of one rank -> what rank `rank` of its context-parallel group works on (DESIGN 3): tokens
    cut, mask fields whole, windows of its own crops (data.CropShard).

    A rank without units has one blank crop and one window of nothing, so that every rank runs the same collectives.
    """
    if cp == 1:
        return batch
    T = batch.tokens.shape[1]
    assert T % cp == 0, f"{T} tokens do not go evenly to {cp} ranks"
    t, P = T // cp, batch.images.shape[1]
    owner = np.append(batch.owner.numpy(), -1)                                       # of crops; the last for windows of nothing
    real = (batch.pool_src >= 0).any(1).numpy()
    seen_by = owner[np.where(real, batch.pool_src.max(1).values.numpy() // P, -1)]   # of visual tokens
    row, place = np.divmod(batch.pool_dst.numpy(), T)
    needed_by = np.where(real, place // t, -1)
    from_to = [[np.flatnonzero((seen_by == a) & (needed_by == b)) for b in range(cp)] for a in range(cp)]

    mine, number = np.flatnonzero(owner == rank), np.full(len(owner), -1)
    number[mine] = np.arange(len(mine))
    own = np.concatenate(from_to[rank])                                              # its windows, by destination
    source = batch.pool_src.numpy()[own]
    source = np.where(source >= 0, number[source // P] * P + source % P, -1)
    if not len(own):
        source = np.full((1, batch.pool_src.shape[1]), -1)
    route = Route([len(from_to[rank][b]) for b in range(cp)], [len(from_to[a][rank]) for a in range(cp)])
    arriving = np.concatenate([from_to[a][rank] for a in range(cp)])
    cut = slice(rank * t, (rank + 1) * t)
    return dataclasses.replace(
        batch, **{name: getattr(batch, name)[:, cut].contiguous() for name in ("tokens", "targets", "weights", "pos")},
        pool_src=torch.from_numpy(source), pool_dst=torch.from_numpy(row[arriving] * t + place[arriving] - rank * t),
        unit=batch.unit[torch.from_numpy(mine)], route=route)


# ---------------------------------------------------------------------------------------------------------------
# put on from outside


def parallelize(model, mesh, shard=0, dtype=torch.float32):
    """The model on this mesh, in the order in which it is read: attention, vision, then the weights in shards over all ranks (FSDP2),
    or over groups of `shard` neighbours that each hold all of them (HSDP): within a node, where it is fast, instead of across nodes.

    Weights, gradients and their sums are float32, as in one process. The decoder's blocks are gathered in dtype, in which autocast
    computes them anyway; of them only norms are rounded by that. Gradients are sums: nothing is divided by the number of ranks.
    """
    if mesh["cp"].size() > 1:
        model.attend = ulysses(model.attend, mesh["cp"].get_group())
        model.route = routed(mesh["cp"].get_group())
    world = mesh.size()
    over = mesh._flatten("dp_cp")
    if shard not in (0, world):
        over = init_device_mesh(mesh.device_type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))
    for module in (*model.vision.vit.blocks, model.vision, *model.blocks, model):
        as_they_are = dtype == torch.float32 or not isinstance(module, Block)
        fully_shard(module, mesh=over, mp_policy=MixedPrecisionPolicy(None if as_they_are else dtype, torch.float32, None, False))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)   # gloo knows no reduction that scales
    return model


def whole(model):
    """A sharded model -> {name: tensor on the CPU} on the first rank, {} on the others; all ranks must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


# ---------------------------------------------------------------------------------------------------------------
# sums over ranks; of one process, they are its own


def total(numbers):
    """{name: number} of this rank -> {name: sum over all ranks}, each of the type it had."""
    if not dist.is_initialized():
        return dict(numbers)
    values = torch.tensor([float(v) for v in numbers.values()], dtype=torch.float64)
    dist.all_reduce(values)
    return {name: type(old)(v) for (name, old), v in zip(numbers.items(), values.tolist(), strict=True)}


def gathered(mine):
    """What each rank brought, in their order, for all of them."""
    if not dist.is_initialized():
        return [mine]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def agreed(reasons, mesh):
    """[reason or "", ..] of this rank -> those of its context-parallel group: the first that any of them has."""
    if mesh is None or mesh["cp"].size() == 1 or not reasons:
        return reasons
    found = [None] * mesh["cp"].size()
    dist.all_gather_object(found, reasons, mesh["cp"].get_group())
    return [next(filter(None, each), "") for each in zip(*found, strict=True)]


def local(tensor):
    """This rank's shard of a gradient; of one that is not sharded, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
