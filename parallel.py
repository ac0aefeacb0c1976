"""One step over many GPUs (paper: long-context training; docs/molmo2.md 11).

in    a Molmo2; on each rank of a context-parallel group a Batch with the tokens of the whole row
      and the crops of this rank (CropShard)
out   the model with attention and vision over ranks, sharded weights; the rank's part of the Batch

A world of dp x cp ranks: the cp ranks of a group hold the same rows, cut along the tokens; dp
groups hold different rows. For attention, ranks exchange heads for tokens (Ulysses), or gather keys
and values, or both: neighbours exchange heads, and their groups gather.

    rank      0           1           2           3           cp = 4, a row of 16 tokens, 8 heads
    tokens    0..3        4..7        8..11       12..15      everywhere but inside attention:
    heads     all         all         all         all         each token with all heads
              ------------- all-to-all of q, k, v -------------
    tokens    0..15       0..15       0..15       0..15       inside attention: each head with all
    heads     0 1         2 3         4 5         6 7         tokens, the plain attend and mask

              ------------- or: all-gather of k, v -------------
    queries   0 1 8 9     2 3 10 11   4 5 12 13   6 7 14 15   all heads; blocks go round-robin
    keys      0..15       0..15       0..15       0..15       to groups; these rows of the mask

vision.py and attention.py do not know of it; model.py has two hooks, `attend` and `route`, which
`parallelize` replaces. Losses are sums, divided by the weight of the whole step.
"""

import dataclasses
import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model import Block


def make_mesh(cp, device="cpu", cp_heads=0):
    """The ranks of this world as (dp, gather, heads), the last varying fastest. cp_heads neighbours
    (0: all cp) exchange heads; mesh.cp, of (gather, heads) together, are those that share a row."""
    cp_heads = cp_heads or cp
    shape = (dist.get_world_size() // cp, cp // cp_heads, cp_heads)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "gather", "heads"))
    mesh.cp = mesh["gather", "heads"]._flatten("cp")  # torch warns of mesh["cp"]
    return mesh


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
# gather keys and values: any number of ranks (Llama 3, arXiv 2407.21783)


class Gather(torch.autograd.Function):
    """x of each of n ranks -> (n,*x.shape) of all; backward sums what all send back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather(list(out), x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(own, list(grad.contiguous()), group=ctx.group)
        return own, None


def distribute(T, n):
    """The positions of a row -> (n,T/n) int64, the positions of each of n groups. Blocks of 128 go
    round-robin, so that each group has early queries, which attend to few keys, and late ones."""
    block = math.gcd(T // n, 128)
    return torch.arange(T).view(-1, n, block).transpose(0, 1).reshape(n, -1)


def gathered(attend, group):
    """attend on whole rows -> the same for the queries that `distribute` gives a rank (B,T/n,H,D),
    with all keys and values. mask: of these queries only."""
    n = dist.get_world_size(group)

    def exchanged(q, k, v, mask):
        B, t, G, D = k.shape
        received = Gather.apply(torch.cat([k, v], 2), group)  # (n,B,t,2G,D)
        blocks = received.view(n, B, -1, math.gcd(t, 128), 2 * G, D)
        row = blocks.permute(1, 2, 0, 3, 4, 5).reshape(B, n * t, 2 * G, D)
        return attend(q, *row.chunk(2, 2), mask)

    return exchanged


# --------------------------------------------------------------------------------------------------
# vision shared over ranks: each pools its own crops, and sends tokens to where they are needed


@dataclasses.dataclass(frozen=True)
class CropShard:
    """Assigns each image or frame of an example to one of the `cp_size` ranks that share its row:
    the rank whose slice of the row's crops contains its midpoint."""
    cp_rank: int
    cp_size: int
    before: int                      # crops in the row before this example
    total: int                       # crops in the row

    def ranks(self, n_crops):
        """Crops of each image -> (n,) the rank that has it."""
        n_crops = np.asarray(n_crops, np.int64)
        midpoint = self.before + n_crops.cumsum() - n_crops / 2
        rank = (midpoint * self.cp_size / max(self.total, 1)).astype(np.int32)
        return rank.clip(0, self.cp_size - 1)


def select_crops(example, shard):
    """An Example with all of its crops -> with those of one rank only."""
    if shard is None or example.image_id is None:
        return example
    images, of_crop = np.unique(example.image_id, return_inverse=True)
    cp_rank = shard.ranks(np.bincount(of_crop, minlength=len(images)))[of_crop]
    images = example.images[cp_rank == shard.cp_rank]
    return dataclasses.replace(example, images=images, cp_rank=cp_rank)


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


def cut_for_rank(batch, rank, cp, cp_heads=0):
    """The Batch of a row, with the crops of one rank -> what this rank of the group works on.

    Tokens are cut, the mask's integers stay whole, windows are those of its own crops. A rank
    without crops has one blank crop and one empty window, so that all run the same collectives.
    """
    if cp == 1:
        return batch
    T = batch.tokens.shape[1]
    assert T % cp == 0, f"{T} tokens do not go evenly to {cp} ranks"
    t, P = T // cp, batch.images.shape[1]
    cp_heads = cp_heads or cp
    of_groups = distribute(T, cp // cp_heads)
    positions = of_groups.view(cp, t)  # of each rank: neighbours cut what their group has
    position_of = positions.flatten().argsort().numpy()  # of a token: rank * t + where it is there
    rank_of_crop = np.append(batch.cp_rank.numpy(), -1)  # the last: no crop
    source = batch.pool_src.numpy()
    empty = (source < 0).all(1)
    pooled_by = rank_of_crop[np.where(empty, -1, source.max(1) // P)]  # of each visual token
    row, position = np.divmod(batch.pool_dst.numpy(), T)
    position = position_of[position]
    needed_by = np.where(empty, -1, position // t)
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
    fields = {name: getattr(batch, name)[:, positions[rank]]
              for name in ("tokens", "targets", "weights", "pos", "example")}
    if batch.pairs:
        fields["answer"] = batch.answer[:, positions[rank]]
    return dataclasses.replace(
        batch, **fields, pool_src=torch.from_numpy(source), dispatch=dispatch,
        pool_dst=torch.from_numpy(row[arriving] * t + position[arriving] - rank * t),
        queries=of_groups[rank // cp_heads] if cp > cp_heads else None)


# --------------------------------------------------------------------------------------------------
# the model on a mesh


def parallelize(model, mesh, shard=0, dtype=torch.float32):
    """Puts the model on this mesh: attention, vision, then weights, sharded over all ranks (FSDP2),
    or over groups of `shard` neighbours, within a node, that each hold all of them (HSDP).

    Weights that learn, gradients and their sums are float32, as in one process. The decoder's
    blocks are gathered in dtype, in which autocast computes them. Gradients are sums, not means.
    """
    if mesh.cp.size() > 1:
        share_rows(model, mesh)
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


def share_rows(model, mesh):
    """Attention and vision of a model whose ranks share rows."""
    group = own_group(mesh.cp)
    model.route = dispatch_route(group)
    exchanges = [name for name in ("gather", "heads") if mesh[name].size() > 1]
    for name in exchanges:
        wrap = {"gather": gathered, "heads": ulysses}[name]
        model.attend = wrap(model.attend, group if len(exchanges) == 1 else own_group(mesh[name]))


def own_group(mesh):
    """The process group of a mesh, but never WORLD, in whose NCCL stream FSDP gathers."""
    group = mesh.get_group()
    return dist.new_group() if group is dist.group.WORLD else group


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
