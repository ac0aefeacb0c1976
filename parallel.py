"""One step over many GPUs (paper: long-context training; docs/molmo2.md 11).

in    a Molmo2; on each rank of a context-parallel group a Batch with the tokens of the whole row
      and the crops of this rank (data.CropShard)
out   the model with Ulysses attention, shared vision, sharded weights; the rank's part of the Batch

A world of dp x cp ranks: the cp ranks of a group hold the same rows, cut along the tokens; dp
groups hold different rows.

    rank      0           1           2           3           cp = 4, a row of 16 tokens, 8 heads
    tokens    0..3        4..7        8..11       12..15      everywhere but inside attention:
    heads     all         all         all         all         each token with all heads
              ------------- all-to-all of q, k, v -------------
    tokens    0..15       0..15       0..15       0..15       inside attention: each head with all
    heads     0 1         2 3         4 5         6 7         tokens, the plain attend and mask

vision.py and attention.py do not know of it; model.py has two hooks, `attend` and `route`, which
`parallelize` replaces. Losses are sums, divided by the weight of the whole step.
"""

import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model import Block

# --------------------------------------------------------------------------------------------------
# ranks


@dataclass
class Ranks:
    """This process among those that train the model; alone, it is the first of one."""
    rank: int = 0
    world: int = 1
    mesh: object = None
    dp: int = 1
    dp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    long_waits: object = None  # a gloo group with a long timeout: ranks evaluate for hours

    @property
    def first(self):
        return self.rank == 0

    def barrier(self):
        """Waits, for any time, until all ranks are here."""
        if self.long_waits:
            dist.barrier(self.long_waits)


def join(cp, device):
    """Under torchrun: the process group and the mesh -> Ranks.

    A rank that does not answer an exchange for ten minutes ends the run (stages/cluster.sh switches
    on torch's flight recorder, which names the exchange). Numbers that steer the run travel over
    gloo, for which no GPU waits.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return Ranks()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    mesh = make_mesh(cp, device.type)
    long_waits = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    return Ranks(dist.get_rank(), world, mesh, world // cp, mesh["dp"].get_local_rank(),
                 cp, mesh["cp"].get_local_rank(), long_waits)


def is_first_process():
    """Is this the first process of a launch, whether or not it has joined the others?"""
    return int(os.environ.get("RANK", 0)) == 0


def make_mesh(cp, device="cpu"):
    """The ranks of this world as (dp, cp), cp varying fastest: neighbours are a group."""
    shape = (dist.get_world_size() // cp, cp)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))


# --------------------------------------------------------------------------------------------------
# Ulysses: exchange heads for tokens


class AllToAll(torch.autograd.Function):
    """x (cp, ..): part j goes to rank j, and part j of the result came from rank j. It is its own
    inverse, so backward is the same exchange."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


def ulysses(attend, group):
    """attend on whole rows -> the same on a rank's slice (B,T/cp,H,D), with the mask of the row.

    One exchange carries q, k and v together, one brings the result back. kv heads are repeated only
    where there are fewer of them than ranks.
    """
    cp = dist.get_world_size(group)

    def exchanged(q, k, v, mask):
        B, t, H, D = q.shape
        G = k.shape[2]
        if cp > G:
            k, v = (x.repeat_interleave(cp // G, dim=2) for x in (k, v))
        q, k, v = (x.view(B, t, cp, -1, D) for x in (q, k, v))  # heads by their rank
        h, g = q.shape[3], k.shape[3]
        sent = torch.cat([q, k, v], 3).permute(2, 0, 1, 3, 4)  # (cp,B,t,h+2g,D)
        received = AllToAll.apply(sent, group)  # now by slice of tokens
        row = received.permute(1, 0, 2, 3, 4).reshape(B, cp * t, h + 2 * g, D)
        out = attend(*row.split((h, g, g), 2), mask)  # (B,T,h,D)
        out = AllToAll.apply(out.reshape(B, cp, t, h, D).permute(1, 0, 2, 3, 4), group)
        return out.permute(1, 2, 0, 3, 4).reshape(B, t, H, D)

    return exchanged


# --------------------------------------------------------------------------------------------------
# vision shared over ranks: each pools its own crops, and sends tokens to where they are needed


class Dispatch(torch.autograd.Function):
    """Rows (M',C), sorted by destination, to their ranks; gradients take the same way back.

    sent[r] rows go to rank r of the group, received[r] come from it.
    """

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Dispatch.apply(grad, *ctx.back), None, None, None


def dispatch_route(group):
    """-> `model.route`: pooled tokens of the rank's own crops -> those of its slice of the row."""
    def route(image_features, batch):
        sent, received = batch.dispatch
        return Dispatch.apply(image_features[: sum(sent)], sent, received, group)

    return route


def cut_for_rank(batch, rank, cp):
    """The Batch of a row, with the crops of one rank -> what this rank of the group works on.

    Tokens are cut, the mask's integers stay whole, windows are those of its own crops. A rank
    without crops has one blank crop and one empty window, so that all run the same collectives.
    """
    if cp == 1:
        return batch
    T = batch.tokens.shape[1]
    assert T % cp == 0, f"{T} tokens do not go evenly to {cp} ranks"
    t, P = T // cp, batch.images.shape[1]
    rank_of_crop = np.append(batch.cp_rank.numpy(), -1)  # the last: no crop
    source = batch.pool_src.numpy()
    empty = (source < 0).all(1)
    pooled_by = rank_of_crop[np.where(empty, -1, source.max(1) // P)]  # of each visual token
    row, place = np.divmod(batch.pool_dst.numpy(), T)
    needed_by = np.where(empty, -1, place // t)
    tokens_of = [[np.flatnonzero((pooled_by == a) & (needed_by == b)) for b in range(cp)]
                 for a in range(cp)]  # [from][to]
    own = np.concatenate(tokens_of[rank])  # by destination
    arriving = np.concatenate([tokens_of[a][rank] for a in range(cp)])
    dispatch = ([len(tokens_of[rank][b]) for b in range(cp)],
                [len(tokens_of[a][rank]) for a in range(cp)])

    crops = np.flatnonzero(rank_of_crop == rank)
    number = np.full(len(rank_of_crop), -1)  # among this rank's crops
    number[crops] = np.arange(len(crops))
    source = source[own]
    source = np.where(source >= 0, number[source // P] * P + source % P, -1)
    if not len(own):
        source = np.full((1, source.shape[1]), -1)
    cut = slice(rank * t, (rank + 1) * t)
    fields = {name: getattr(batch, name)[:, cut].contiguous()
              for name in ("tokens", "targets", "weights", "pos", "example")}
    return dataclasses.replace(
        batch, **fields, pool_src=torch.from_numpy(source), dispatch=dispatch,
        pool_dst=torch.from_numpy(row[arriving] * t + place[arriving] - rank * t))


# --------------------------------------------------------------------------------------------------
# the model on a mesh


def parallelize(model, mesh, shard=0, dtype=torch.float32):
    """Puts the model on this mesh: attention, vision, then weights, sharded over all ranks (FSDP2),
    or over groups of `shard` neighbours, within a node, that each hold all of them (HSDP).

    Weights that learn, gradients and their sums are float32, as in one process. The decoder's
    blocks are gathered in dtype, in which autocast computes them. Gradients are sums, not means.
    """
    if mesh["cp"].size() > 1:
        group = mesh["cp"].get_group()
        if group is dist.group.WORLD:  # its NCCL stream would queue behind FSDP's gathers
            group = dist.new_group()
        model.attend = ulysses(model.attend, group)
        model.route = dispatch_route(group)
    world = mesh.size()
    over = mesh._flatten("dp_cp")
    if shard not in (0, world):
        over = init_device_mesh(mesh.device_type, (world // shard, shard),
                                mesh_dim_names=("replicate", "shard"))
    vit_blocks = model.vision.vit.blocks
    # an embedding that is not the head too is whole only while it is looked up
    embedding = () if model.head is None else (model.embedding,)
    for module in (*embedding, *vit_blocks, model.vision, *model.blocks, model):
        gathered = dtype if isinstance(module, Block) and dtype != torch.float32 else None
        fully_shard(module, mesh=over, mp_policy=MixedPrecisionPolicy(
            param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
    if embedding and not model.embedding.weight.requires_grad:
        # else FSDP would prefetch the frozen embedding here, which backward does not need
        vit_blocks[0].set_modules_to_backward_prefetch([vit_blocks[0]])
    return model


def set_last_micro_batch(model, is_last):
    """To be called before each micro-batch; does nothing without FSDP. Only the last one of a step
    sums gradients over the groups that hold copies (HSDP) and frees what the model's own unit has
    gathered."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)
        model.set_reshard_after_backward(is_last, recurse=False)


def local(tensor):
    """This rank's shard of a parameter or gradient; of one that is not sharded, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --------------------------------------------------------------------------------------------------
# collectives for numbers and objects; one process gets its own back


def all_reduce_sums(numbers):
    """{name: number} of this rank -> {name: sum over all ranks}, each of the type it had."""
    if not dist.is_initialized():
        return dict(numbers)
    values = torch.tensor([float(v) for v in numbers.values()], dtype=torch.float64)
    dist.all_reduce(values)
    sums = zip(numbers, values.tolist(), strict=True)
    return {name: type(numbers[name])(value) for name, value in sums}


def all_gather(value, group=None):
    """An object of each rank, in their order, for all of them."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def broadcast(value):
    """The object of the first rank, for all of them."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
