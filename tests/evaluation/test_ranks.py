"""Each rank gathers the whole of a sharded model before the evaluation."""

import pytest
import torch
import torch.distributed as dist

import parallel
from evaluation.report import gather_on_each
from tests.evaluation.small_model import random_model
from tests.ranks import run_group
from training.ranks import Ranks
from weights import lora
from weights.files import whole_copy

pytestmark = pytest.mark.slow


def adapted_model():
    model = random_model()
    lora.add_adapters(model, lora.LoraConfig(rank=4))
    lora.init_adapters(model, 0)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.data = torch.randn(p.shape, generator=generator)
    return model


def gather_and_compare(rank, world):
    """gather_on_each, for the evaluation, and whole_copy, for saving, return the whole model with
    merged adapters."""
    ranks = Ranks(rank, world, parallel.make_mesh(1), of_all=dist.group.WORLD)
    half = gather_on_each(parallel.parallelize(random_model(), ranks.mesh), ranks,
                          torch.device("cpu"), torch.bfloat16)
    for p, whole in zip(half.parameters(), random_model().parameters(), strict=True):
        assert torch.equal(p, whole.to(torch.bfloat16))
    whole = adapted_model()
    wanted = lora.merged(whole, whole.state_dict(), torch.float32)
    model = parallel.parallelize(adapted_model(), ranks.mesh)
    copies = [gather_on_each(model, ranks, torch.device("cpu"), torch.float32),
              whole_copy(model, "cpu", torch.float32, keep=ranks.first)]
    assert (copies[1] is not None) == ranks.first
    for copy in copies[: 1 + ranks.first]:
        found = copy.state_dict()
        assert found.keys() == wanted.keys() == random_model().state_dict().keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_each_of_two_ranks_gathers_the_whole_model(tmp_path):
    run_group(gather_and_compare, tmp_path, 2)
