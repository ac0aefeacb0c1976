"""Whole training steps on fake tensors: shapes, dtypes and lifetimes of all tensors, no memory. The
4B in stage 2 on one GPU, and one of eight ranks of the 8B in stage 3, which share a row.

FlexAttention's kernel is a stand-in (small_model.FlexAttentionMemory). Fake tensors are on the CPU:
autograd of torch's CPU build refuses a fake tensor on "cuda".
"""

import copy
import weakref
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import model as models
import parallel
from tests.tools.memory.small_model import LiveBytes, batch_of, forward, tensors_of
from tests.tools.memory.test_ranks import CountedCollectives, check_sent
from tools.memory.shape import largest_shape
from tools.memory.step import sent, training
from training.config import parse
from training.setup import apply_recipe

READS = {"cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"}


class NoReads(TorchFunctionMode):
    """Any method that brings a tensor's values to the host is an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in READS, f"the host reads a tensor: {name}"
        return func(*args, **(kwargs or {}))


class LiveFakes(LiveBytes):
    """LiveBytes of storages without an address, which FSDP resizes to free and to fill them; and
    the largest square in any tensor."""

    largest_square = 0

    def __init__(self, put, *tensors):
        self.sizes = {}
        super().__init__(*tensors)
        plain_resize = torch.UntypedStorage.resize_

        def resize(storage, size):                       # no operation: the mode does not see it
            plain_resize(storage, size)
            if storage._cdata in self.sizes:
                self.set_size(storage)

        put(torch.UntypedStorage, "resize_", resize)

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                weakref.finalize(storage, self.remove, storage._cdata)
                self.set_size(storage)
            if tensor.ndim > 1:
                self.largest_square = max(self.largest_square, min(tensor.shape[-2:]))

    def set_size(self, storage):
        self.now += storage.nbytes() - self.sizes.get(storage._cdata, 0)
        self.sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def remove(self, address):
        self.now -= self.sizes.pop(address)


@pytest.fixture
def mode():
    models.rope_frequencies.cache_clear()
    yield FakeTensorMode(allow_non_fake_inputs=True)
    models.rope_frequencies.cache_clear()                # of fake tensors


def fake_batch(batch, mode):
    fake = copy.copy(batch)
    for name, value in vars(batch).items():
        if torch.is_tensor(value):
            object.__setattr__(fake, name, mode.from_tensor(value))
    return fake


def run_step(model, batch, put, before_backward=lambda: None):
    """The second micro-batch of a step in bfloat16, which finds gradients -> LiveFakes."""
    for p in model.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    held = [parallel.local(tensor) for tensor in (*model.parameters(), *gradients)]
    live = LiveFakes(put, *held, *tensors_of(batch))
    with NoReads(), live:
        nll, lse = forward(model, batch, torch.bfloat16)
        loss = (batch.weights * (nll + 1e-4 * lse**2)).sum()
        del nll, lse
        before_backward()
        loss.backward()
    return live


def check_peak(live, shape, not_in_step):
    """Within 5 %; no tensor is tokens x tokens. not_in_step: parts that are not tensors of it."""
    count = training(shape)
    counted = count.total - sum(count.parts[part] for part in not_in_step)
    print(f"{live.peak / 2**30:.2f} GiB, counted {counted / 2**30:.2f}: {count.peak}")
    assert live.peak == pytest.approx(counted, rel=0.05)
    assert live.largest_square < shape.row_tokens


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--train", "connector,llm"], ["--uncheckpointed_blocks=12"],
], ids=str)
def test_a_step_of_the_4b_peaks_where_it_is_counted_and_waits_for_nothing(flags, mode, monkeypatch):
    """An operation whose result the host must read is an error on fake tensors."""
    _, config = parse(["--stage", "2", "--preset", "4b", "--micro-batch", "1", *flags])
    batch = batch_of(config)
    with mode:
        model = apply_recipe(models.Molmo2(config.model), config).train()
        live = run_step(model, fake_batch(batch, mode), monkeypatch.setattr)
    check_peak(live, largest_shape(config, 2), ["optimizer"])


# --------------------------------------------------------------------------------------------------
# one rank of eight, in a process group that sends nothing


@pytest.fixture
def mesh_of_eight(monkeypatch):
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    monkeypatch.setattr(parallel, "with_timeout", lambda mesh: mesh)     # it has none
    monkeypatch.setattr(parallel, "process_group_timeout", lambda: timedelta(minutes=10))
    mesh = parallel.make_mesh(8)
    mesh._flatten("dp_cp")                               # reads numbers: not on fake tensors
    yield mesh
    dist.destroy_process_group()


def largest_batch_of_rank(config, shape):
    """A rank's slice of the row, with the most crops; all that it pools belongs to other ranks."""
    batch = batch_of(config)
    fields = {name: getattr(batch, name)[:, : shape.tokens].clone()
              for name in ("tokens", "targets", "weights", "pos", "example")}
    n_crops = shape.patches // shape.vision.n_patch
    rows_sent = split_among_others(shape.visual_tokens, shape.cp)
    rows_received = split_among_others(shape.received_tokens, shape.cp)
    return replace(
        batch, **fields, images=batch.images[:n_crops].clone(),
        pool_src=torch.randint(0, shape.patches, (shape.visual_tokens, shape.window)),
        pool_dst=torch.arange(shape.received_tokens), dispatch=(rows_sent, rows_received))


def split_among_others(n, cp):
    """n rows for the ranks 1 .. cp-1, none for rank 0."""
    return [0] + [n // (cp - 1) + (k < n % (cp - 1)) for k in range(cp - 1)]


@pytest.mark.slow
def test_a_rank_of_the_8b_in_stage_3_peaks_and_sends_as_counted(mesh_of_eight, mode, monkeypatch):
    """With FSDP over the eight ranks. FSDP's flat buffer counts throughout the step because a GPU
    keeps it in a pool of its own; as a tensor it is freed."""
    _, config = parse(["--stage", "3", "--preset", "8b", "--cp", "8"])
    shape = largest_shape(config, 2, 8)
    batch = largest_batch_of_rank(config, shape)
    collectives = CountedCollectives(monkeypatch.setattr)
    with mode:
        model = apply_recipe(models.Molmo2(config.model), config).train()
        parallel.parallelize(model, mesh_of_eight, config.shard, torch.bfloat16)
        parallel.accumulate(model, last=True)
        live = run_step(model, fake_batch(batch, mode), monkeypatch.setattr,
                        collectives.begin_backward)
    check_peak(live, shape, ["optimizer", "FSDP's flat buffer", "NCCL's buffers"])

    # FSDP pads the ViT's 729 positions to 736 for eight ranks, whenever it gathers or sums them
    check_sent(collectives.sent, shape, padding=7 * shape.vision.n_embd * 4 * 7 // 8)
    for direction in ("forward", "backward"):
        rows = collectives.sent[f"all_to_all_single of rows, {direction}"]
        assert rows == sent(shape)[f"pooled tokens, {direction}"]
    # of a layer q, k and v of 4 query heads and a key head for each rank, then the result; forward,
    # again in the backward pass, and their gradients
    m = config.model
    tokens_of_rank = (8, 1, config.data.max_tokens // 8)
    qkv = (torch.bfloat16, (*tokens_of_rank, 4 + 2 * 1, m.head_dim))
    result = (torch.bfloat16, (*tokens_of_rank, 4, m.head_dim))
    assert collectives.exchanged == {qkv: 3 * m.n_layer, result: 3 * m.n_layer}
    elements = sum(torch.Size(given).numel() for _, given in (qkv, result))
    counted = parallel.bytes_sent(m, config.data.max_tokens, 8)
    assert counted == elements * torch.bfloat16.itemsize * 7 // 8
