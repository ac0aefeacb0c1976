"""One step over many GPUs (paper: 3.2, long-context SFT; docs/molmo2.md 11; docs/cluster.md).

in    a Molmo2; on each rank of a context-parallel group a Batch with the tokens of the whole row
      and the crops of this rank (CropShard)
out   the model with sharded weights, which distributes attention and vision over ranks; this
      rank's part of the Batch

A rank is a process, with one GPU if there are any. There are dp x cp ranks. The cp ranks of a group
share the same rows, and each takes a part of their tokens (context parallelism). Different groups
have different rows (data parallelism). Only attention needs all tokens of a row. For it, ranks
exchange heads for tokens (Ulysses, arXiv 2309.14509), or gather keys and values, or both:
neighbours exchange heads, and groups of neighbours gather.

    rank      0           1           2           3           cp = 4, a row of 16 tokens, 8 heads

    Ulysses: all-to-all of q, k, v
    tokens    0..3        4..7        8..11       12..15      everywhere except in attention:
    heads     all         all         all         all         some tokens, all heads
    tokens    0..15       0..15       0..15       0..15       in attention: all tokens, some heads;
    heads     0 1         2 3         4 5         6 7         `attend` and the mask do not change

    or all-gather of k, v
    tokens    0 1 8 9     2 3 10 11   4 5 12 13   6 7 14 15   everywhere; blocks of tokens are given
    keys      0..15       0..15       0..15       0..15       round-robin (drawn: 2 tokens, not 128)

With 8 ranks, the 4B and a row of stage 3, a rank receives 79 MiB in the forward pass of a layer
with Ulysses, and 126 MiB with gather (docs/cluster.md). But in Ulysses the number of ranks must
divide the number of query heads, and divide or be divided by the number of kv heads.

vision.py and attention.py do not depend on this file. `parallelize` replaces two functions of the
model, `attend` and `route`. Losses are sums over tokens, so each rank adds its own part.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model import Block


@dataclass(frozen=True)
class Mesh:
    """Groups of ranks, each as a DeviceMesh of one dimension."""
    dp: DeviceMesh                   # ranks with different rows
    gather: DeviceMesh               # ranks that gather keys and values
    heads: DeviceMesh                # ranks that exchange heads
    cp: DeviceMesh                   # ranks that share their rows: gather and heads together
    world: DeviceMesh                # all ranks


def make_mesh(cp, device="cpu", cp_heads=0):
    """All ranks as a grid (dp, gather, heads) -> Mesh. Neighbours exchange heads, since
    they are usually in one node, where the all-to-all is fast. cp_heads: how many exchange
    heads; 0: all cp."""
    cp_heads = cp_heads or cp
    dp = dist.get_world_size() // cp
    shape = (dp, cp // cp_heads, cp_heads)
    grid = init_device_mesh(device, shape, mesh_dim_names=("dp", "gather", "heads"))
    cp_mesh = grid["gather", "heads"]._flatten("cp")
    world = grid._flatten("world")
    return Mesh(grid["dp"], grid["gather"], grid["heads"], cp_mesh, world)


# --------------------------------------------------------------------------------------------------
# Ulysses: exchange heads for tokens (docs/walk/README.md, section 5)


class AllToAll(torch.autograd.Function):
    """x (n, ..): part j is sent to rank j, and part j of the result comes from rank j. Applied
    twice it changes nothing, so backward is the same exchange of gradients."""

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
    """attend for T tokens -> the same for a rank's slice (B,T/n,H,D), with the mask of all T. n
    ranks exchange heads. T is the row, or a group's part of it if groups gather keys.

    One exchange sends q, k and v together, where the official code has three, and a second one
    returns the result. kv heads are repeated only if there are fewer of them than ranks.
    """
    n = dist.get_world_size(group)

    def exchanged(q, k, v, mask):
        B, t, H, D = q.shape  # t = T / n
        G = k.shape[2]
        if n > G:  # every rank needs at least one kv head
            k, v = (x.repeat_interleave(n // G, dim=2) for x in (k, v))
        # Rank j gets the j-th run of query heads and of kv heads. In grouped attention, adjacent
        # query heads share a kv head, so each rank has the kv heads of its query heads.
        q, k, v = (x.view(B, t, n, -1, D) for x in (q, k, v))
        h = q.shape[3]
        g = k.shape[3]
        sent = torch.cat([q, k, v], 3).permute(2, 0, 1, 3, 4)  # (n,B,t,h+2g,D)
        # the first dimension was the rank of the heads; now it is the rank of the tokens
        received = AllToAll.apply(sent, group)
        row = received.permute(1, 0, 2, 3, 4).reshape(B, n * t, h + 2 * g, D)  # (B,T,h+2g,D)
        q, k, v = row.split((h, g, g), 2)
        out = attend(q, k, v, mask)  # (B,T,h,D)
        # back: the first dimension is the rank that gets the tokens; after the exchange it is
        # again the rank of the heads
        sent = out.reshape(B, n, t, h, D).permute(1, 0, 2, 3, 4)  # (n,B,t,h,D)
        received = AllToAll.apply(sent, group)
        return received.permute(1, 2, 0, 3, 4).reshape(B, t, H, D)

    return exchanged


# --------------------------------------------------------------------------------------------------
# gather keys and values: any number of ranks (Llama 3, arXiv 2407.21783)


class Gather(torch.autograd.Function):
    """x of each of n ranks -> (n,*x.shape), the same on all. Every rank used x, so in backward the
    gradients of all ranks are added, and each rank keeps the sum for its own x."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(dist.get_world_size(group), *x.shape)
        # list(out) are views, so the results are written into out without a copy
        dist.all_gather(list(out), x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(own, list(grad.contiguous()), group=ctx.group)
        return own, None


def distribute(T, n):
    """T positions of a row -> (n,T/n) int64, the positions of each of n groups.

    Blocks of 128 are assigned round-robin. So every group has early queries, which attend to few
    keys, and late ones: the slowest has 1.00 to 1.04 times the mean work (docs/cluster.md).
    128 is the size of the blocks of FlexAttention (attention.block_mask).
    """
    # a smaller power of two if 128 does not divide the T/n tokens of a group
    block = math.gcd(T // n, 128)
    # block number r * n + j belongs to group j: (r,n,block) -> (n,r,block) -> (n,T/n)
    return torch.arange(T).view(-1, n, block).transpose(0, 1).reshape(n, -1)


def gathered(attend, group):
    """attend for whole rows -> the same for the queries (B,T/n,H,D) that `distribute` gives a rank,
    with all keys and values. mask: its lines (first dimension after B) are these queries only."""
    n = dist.get_world_size(group)

    def exchanged(q, k, v, mask):
        B, t, G, D = k.shape
        own = torch.cat([k, v], 2)
        received = Gather.apply(own, group)  # (n,B,t,2G,D)
        # the inverse of `distribute`: (n,B,r,block,..) -> (B,r,n,block,..) is the order of the row
        block = math.gcd(t, 128)
        blocks = received.view(n, B, -1, block, 2 * G, D)
        row = blocks.permute(1, 2, 0, 3, 4, 5).reshape(B, n * t, 2 * G, D)
        k, v = row.chunk(2, 2)
        return attend(q, k, v, mask)

    return exchanged


# --------------------------------------------------------------------------------------------------
# vision shared over ranks: each pools its own crops, and sends the visual tokens to their positions
#
# The official code encodes all images on every rank by default (docs/molmo2.md 11).
# With 8 ranks the ViT would then do 8 times the work.


@dataclass(frozen=True)
class CropShard:
    """Assigns each image or frame of an example to one of the `cp_size` ranks that share its row:
    the rank whose slice of the row's crops contains its midpoint. Frames are assigned one by one,
    so a long video is spread over all ranks. The crops of an image stay together, because an image
    is decoded as a whole."""
    cp_rank: int
    cp_size: int
    before: int                      # crops in the row before this example (training/loader.py)
    total: int                       # crops in the row

    def ranks(self, n_crops):
        """The number of crops of each image -> (n,) the rank of each image."""
        n_crops = np.asarray(n_crops, np.int64)
        end = self.before + n_crops.cumsum()  # of each image, among the crops of the row
        midpoint = end - n_crops / 2
        total = max(self.total, 1)
        rank = (midpoint * self.cp_size / total).astype(np.int32)
        return rank.clip(0, self.cp_size - 1)


class Dispatch(torch.autograd.Function):
    """Sends visual tokens (M',C), sorted by destination, to their ranks. Gradients are sent back.

    sent[r] tokens go to rank r of the group, received[r] tokens come from it.
    """

    @staticmethod
    def forward(ctx, tokens, sent, received, group):
        ctx.back = received, sent, group  # backward receives what forward sent
        out = tokens.new_empty(sum(received), tokens.shape[1])
        dist.all_to_all_single(out, tokens.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Dispatch.apply(grad, *ctx.back), None, None, None


def dispatch_route(group):
    """-> `model.route`: visual tokens of the rank's crops -> visual tokens at its positions."""
    def route(image_features, batch):
        sent, received = batch.dispatch
        # empty windows of a rank are not sent
        tokens = image_features[: sum(sent)]
        return Dispatch.apply(tokens, sent, received, group)

    return route


def cut_for_rank(batch, rank, cp, cp_heads=0):
    """The Batch of whole rows, with the crops of one rank -> the part of this rank of the group.

    It has the rank's tokens, and the windows of the rank's crops. visible_until and bidir stay
    whole, since attention has all keys. A rank without crops has blank crops and two empty
    windows: all ranks must run the same collectives, or the others would wait for ever. One window
    would not do, because torch.compile makes a size of 1 a constant.
    """
    if cp == 1:
        return batch
    T = batch.tokens.shape[1]
    assert T % cp == 0, f"{T} tokens cannot be divided evenly among {cp} ranks"
    cp_heads = cp_heads or cp
    n_groups = cp // cp_heads
    group_positions = distribute(T, n_groups)
    # (cp,t), the positions of each rank; a group is the neighbours that exchange heads
    positions = group_positions.view(cp, -1)
    sends, destination = route_visual_tokens(batch, positions)
    # Both ranks of an exchange compute the same lists, so no message has to say which visual token
    # it contains. This rank sends in the order of destinations, and receives in order of senders.
    sent = sends[rank]
    received = [tokens[rank] for tokens in sends]
    crops = np.flatnonzero(batch.cp_rank.numpy() == rank)
    source = batch.pool_src.numpy()[np.concatenate(sent)]
    source = renumber_crops(source, crops, batch.images.shape[1])
    n_empty = max(2 - len(source), 0)
    source = np.pad(source, ((0, n_empty), (0, 0)), constant_values=-1)
    target = destination[np.concatenate(received)]
    n_sent = [len(tokens) for tokens in sent]
    n_received = [len(tokens) for tokens in received]
    queries = None
    if n_groups > 1:
        queries = group_positions[rank // cp_heads]
    # `labelled` is not listed: `replace` below calls __post_init__, which finds it from weights
    fields = {name: getattr(batch, name)[:, positions[rank]]
              for name in ("tokens", "targets", "weights", "pos", "example", "annotation")}
    return dataclasses.replace(
        batch, **fields, pool_src=torch.from_numpy(source), pool_dst=torch.from_numpy(target),
        dispatch=(n_sent, n_received), queries=queries)


def route_visual_tokens(batch, positions):
    """The Batch of whole rows, and the positions (cp,t) whose tokens each rank has -> sends,
    destination.

    sends[a][b]: indices of the visual tokens that rank a pools and rank b needs. destination: (M,)
    flat index of each visual token in the (B,t) tokens of the rank that needs it.
    """
    cp, t = positions.shape
    # The crop of each visual token. If its patches lie in two crops of an image, both crops are on
    # one rank, and any patch will do. An empty window has crop -1, whose rank is the added -1.
    crop = batch.pool_src.numpy().max(1) // batch.images.shape[1]
    pooled_by = np.append(batch.cp_rank.numpy(), -1)[crop]
    row, position = np.divmod(batch.pool_dst.numpy(), cp * t)
    # the inverse of `positions`: position in the row -> rank * t + index on this rank
    order = positions.flatten().argsort().numpy()
    needed_by, index = np.divmod(order[position], t)
    sends = []
    for a in range(cp):
        pooled = pooled_by == a
        sends.append([np.flatnonzero(pooled & (needed_by == b)) for b in range(cp)])
    destination = row * t + index
    return sends, destination


def renumber_crops(source, crops, n_patch):
    """Lines of pool_src, and the increasing numbers of the crops whose patches they pool -> the
    same lines for a batch that has these crops only."""
    # an entry is crop * n_patch + patch; only the crop gets another number
    crop, patch = np.divmod(source, n_patch)
    number = np.searchsorted(crops, crop)
    return np.where(source >= 0, number * n_patch + patch, -1)


# --------------------------------------------------------------------------------------------------
# the model on a mesh


def parallelize(model, mesh, shard=0, dtype=torch.float32):
    """Distributes attention and vision over this mesh, then shards the weights over all ranks
    (FSDP2). With `shard`, each group of so many neighbours has all weights, a part on each rank
    (HSDP). If a group is a node, weights are gathered inside the node only.

    Weights, gradients and sums of gradients are float32, as in one process. The blocks of the
    decoder are gathered in dtype, since autocast computes in it anyway: half the bytes are sent.
    """
    if mesh.cp.size() > 1:
        share_rows(model, mesh)
    over = mesh.world
    world = over.size()
    if shard not in (0, world):
        over = init_device_mesh(over.device_type, (world // shard, shard),
                                mesh_dim_names=("replicate", "shard"))
    vit_blocks = model.vision.vit.blocks
    # An untied embedding is needed at the start only, so as a unit of its own it is freed after
    # the look-up. A tied one is also the head, and stays in the unit of the whole model.
    embedding = () if model.head is None else (model.embedding,)
    # inner modules first: each unit is gathered before it runs and freed after it
    for module in (*embedding, *vit_blocks, model.vision, *model.blocks, model):
        gather_dtype = None  # the dtype in which weights are gathered; None: as stored
        if isinstance(module, Block) and dtype != torch.float32:
            gather_dtype = dtype
        policy = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=torch.float32,
                                      cast_forward_inputs=False)
        fully_shard(module, mesh=over, mp_policy=policy)
        # FSDP would divide by the number of ranks, but train.py divides by the weight of the step
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also scales
    if embedding and not model.embedding.weight.requires_grad:
        # In the backward pass of the first ViT block, FSDP would gather the next unit, the frozen
        # embedding, which backward does not need. A block that is told to prefetch itself
        # prefetches nothing, since it is gathered already.
        vit_blocks[0].set_modules_to_backward_prefetch([vit_blocks[0]])
    return model


def share_rows(model, mesh):
    """Replaces `attend` and `route` of a model whose ranks share rows."""
    group = own_group(mesh.cp)
    model.route = dispatch_route(group)
    if mesh.gather.size() == 1:
        model.attend = ulysses(model.attend, group)
    elif mesh.heads.size() == 1:
        model.attend = gathered(model.attend, group)
    else:
        # heads wraps gather: a rank first gets some heads of its group's tokens, then the keys
        # and values of these heads from the other groups
        model.attend = gathered(model.attend, own_group(mesh.gather))
        model.attend = ulysses(model.attend, own_group(mesh.heads))


def own_group(mesh):
    """The process group of a mesh, but never WORLD. FSDP gathers weights in the NCCL stream of
    WORLD, and an exchange in the same stream would wait for them."""
    group = mesh.get_group()
    return dist.new_group() if group is dist.group.WORLD else group


def set_last_micro_batch(model, is_last):
    """Must be called before each micro-batch; does nothing without FSDP. Gradients are summed over
    the HSDP groups in the last micro-batch only. Until then, the unit of the whole model (the head)
    stays gathered, because the next micro-batch needs it again."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)
        model.set_reshard_after_backward(is_last, recurse=False)


def local(tensor):
    """This rank's shard of a parameter or gradient, or all of it if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
