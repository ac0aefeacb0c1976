"""Small models with the largest batch they can get, for tests of memory and of attention."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention
import model as models
import packing
import parallel
import vision
from tools.memory.shape import largest_shape
from training.config import Config
from training.resume import Checkpoint
from training.setup import open_model

ALL_PARTS = ("vit", "connector", "llm")
COMPUTE_BYTES = {torch.float32: 4, torch.bfloat16: 2}

VISION = vision.VisionConfig(n_layer=2, n_embd=64, n_head=4, n_hidden=160, feature_layers=(1, 0),
                             grid=6, patch=4, overlap_margin=1)
SMALL = models.ModelConfig(n_layer=2, n_embd=96, n_head=4, n_kv_head=2, head_dim=24, n_hidden=256,
                           n_vocab=400, init_std=0.0, vision=VISION)
LARGER_VISION = replace(VISION, n_layer=3, n_embd=96, n_hidden=256, feature_layers=(2, 1), grid=8)
DECODER = replace(SMALL, n_layer=3, n_embd=128, head_dim=32, n_hidden=384)
CONNECTOR = replace(DECODER, vision=replace(LARGER_VISION, n_layer=1, feature_layers=(0, 0)))
DEEP_VISION = replace(LARGER_VISION, n_layer=8, feature_layers=(7, 5))


def config_of(model, max_tokens=96, **changes):
    """A train config with this ModelConfig, small rows, and the given fields changed."""
    small = {"micro_batch": 2, "pack_crops": 3, "crop_bucket": 1, "activation_checkpointing": False}
    config = replace(Config(), model=model, **{**small, **changes})
    return replace(config, data=replace(config.data, max_tokens=max_tokens))


def model_of(config):
    return open_model(SimpleNamespace(init=None), config, Checkpoint())[0]


def batch_of(config):
    """The largest micro-batch: each row one example, all crops, loss at every token, and as many
    visual tokens as are counted."""
    shape = largest_shape(replace(config, cp=1), 4)
    B = shape.rows
    T = shape.row_tokens
    tokens = torch.randint(0, config.model.n_vocab, (B, T))
    crops = shape.patches // shape.vision.n_patch
    zeros = torch.zeros(B, T, dtype=torch.int32)
    return packing.Batch(
        tokens=tokens, targets=tokens.roll(-1, 1), weights=torch.ones(B, T),
        pos=torch.arange(T).repeat(B, 1), visible_until=torch.full_like(zeros, T), bidir=zeros,
        example=torch.arange(B, dtype=torch.int32)[:, None].repeat(1, T),
        images=torch.randint(0, 256, (crops, shape.vision.n_patch, shape.vision.n_pixel),
                             dtype=torch.uint8),
        pool_src=torch.randint(0, shape.patches, (shape.visual_tokens, shape.window)),
        pool_dst=torch.randperm(B * T)[: shape.visual_tokens], ids=[])


def tensors_of(batch):
    return [value for value in vars(batch).values() if torch.is_tensor(value)]


def forward(model, batch, dtype):
    """As train.py calls the model."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32,
                        cache_enabled=not model.activation_checkpointing):
        return model(batch)


# --------------------------------------------------------------------------------------------------
# attention with the memory of a GPU's kernels


class FlexAttentionMemory(torch.autograd.Function):
    """What FlexAttention's compiled kernels keep and make, and zeros in place of its results, since
    it has no backward pass on a CPU.

    Kept: q, k, v (B,heads,T,D), the output laid out as q, logsumexp. The backward pass makes the
    product of the output and its gradient, one number per head and token, and three gradients.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        output = torch.zeros_like(q)
        logsumexp = q.new_zeros(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, logsumexp = ctx.saved_tensors
        product = torch.zeros_like(logsumexp)            # held until the end, as by the kernel
        gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
        del product
        return gradients


plain_attend = attention.attend


def attend_on_a_gpu(q, k, v, mask):
    """attention.attend, with kv heads repeated for a dense mask, as its CUDA branch does."""
    if torch.is_tensor(mask):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return plain_attend(q, k, v, mask)


def attend_as_on_a_gpu(put=setattr):
    """Replaces attention by the memory of what runs on a GPU; put(module, name, value)."""
    put(attention, "attend", attend_on_a_gpu)
    put(attention, "packed_mask", attention.block_mask)
    put(attention, "compiled_flex_attention",
        lambda: lambda q, k, v, **options: FlexAttentionMemory.apply(q, k, v))


# --------------------------------------------------------------------------------------------------
# measuring


class Saved:
    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(model, batch, dtype, then=lambda loss: None):
    """Bytes of the storages that autograd keeps after a forward pass, without parameters and the
    batch. then(loss) is called afterwards, while the graph is alive."""
    # weak references: a checkpoint that nobody needs has let go of its input
    alive = weakref.WeakSet()

    def pack(tensor):
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        nll, _lse = forward(model, batch, dtype)
    storages = {}
    for saved in alive:
        storage = saved.tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    assert nll.requires_grad
    given = {parallel.local(tensor).untyped_storage().data_ptr()
             for tensor in (*model.parameters(), *tensors_of(batch))}
    then(nll.sum())
    return sum(n for address, n in storages.items() if address not in given)


class LiveBytes(TorchDispatchMode):
    """Bytes of all living storages that operations have returned: now, and the most so far."""

    def __init__(self, *tensors):
        super().__init__()
        self.now = 0
        self.peak = 0
        self.known = set()
        self.add(tensors)

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self.remove, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self.now)

    def remove(self, address, n):
        self.known.discard(address)
        self.now -= n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(out)
        self.add([leaf for leaf in leaves
                  if torch.is_tensor(leaf) and leaf.untyped_storage().nbytes()])
        return out


def peak_of_step(model, batch, dtype):
    """The most bytes that are alive at once in forward and backward of a second micro-batch, which
    finds the gradients of the first."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    live = LiveBytes(*model.parameters(), *gradients, *tensors_of(batch))
    with live:
        nll, lse = forward(model, batch, dtype)
        loss = (batch.weights * (nll + 1e-4 * lse**2)).sum()
        del nll, lse
        loss.backward()
    return live.peak
