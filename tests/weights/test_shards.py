"""--init on several ranks: each reads its shard and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import model as models
import parallel
from tests.ranks import run_ranks
from tests.weights.test_weights import status
from weights import files

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of a process")]

# the 4B's proportions on an eighth of its width: an embedding of a sixth, 36 layers
SHAPE = replace(models.PRESETS["4b"], n_embd=320, n_head=4, n_kv_head=1, head_dim=80, n_hidden=1216,
                n_vocab=37984, vision=replace(models.TOY_VISION, n_embd=144, n_hidden=538))
MIB = 2**20


def read_shard(rank, world, folder):
    """Notes MiB that this rank adds at its highest, and that its shard and the largest tensor
    have."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = parallel.make_mesh(1)
    # what the first collective and the first file import is no memory of weights
    dist.all_gather_object([None] * world, files.describe(folder))
    small = models.Molmo2(replace(SHAPE, n_layer=1, n_vocab=64))
    parallel.parallelize(small, mesh)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    model = files.meta_model(files.describe(folder).config)
    largest = max(p.nbytes for p in model.parameters()) / MIB
    parallel.parallelize(model, mesh)
    model.to_empty(device="cpu")
    files.read_weights(model, folder)
    added = status("VmHWM") - before
    shard = sum(parallel.local(p).nbytes for p in model.parameters()) / MIB
    saved = files.load(folder)
    for (name, p), whole in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), whole), name
    torch.save((added, shard, largest), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_each_of_two_ranks_holds_its_shard_and_one_tensor_at_most(tmp_path):
    model = files.meta_model(SHAPE).to_empty(device="cpu")
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) % 1000 + k)    # each row is another
    files.save(model, tmp_path)
    total = sum(p.nbytes for p in model.parameters()) / MIB
    del model
    run_ranks(read_shard, (2, str(tmp_path)), 2)
    for rank in range(2):
        added, shard, largest = torch.load(tmp_path / f"{rank}.pt")
        print(f"two ranks of {total:.0f} MiB: {added:.0f} added, the shard {shard:.0f}")
        assert shard == pytest.approx(total / 2, rel=0.02)
        assert added < shard + largest + 10
