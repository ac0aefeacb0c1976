"""Counts the collectives for weights, gradients, heads and pooled tokens in a step on four gloo
ranks. Two ranks share rows, and there are two such groups. Weights are sharded over all ranks, or
over pairs."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import attention
import parallel
from tests.ranks import run_group
from tests.test_parallel import CONFIG, forward_backward, new_model, packs_of, shard_of_rank

pytestmark = pytest.mark.slow
COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single")
CASES = [  # ranks per shard group (0: all), frozen embedding, activation checkpointing
    (0, True, False),
    (2, True, False),
    (2, False, True),
]


def worker(rank, world):
    """-> {(case, micro-batches): {collective: number of calls}}"""
    mesh = parallel.make_mesh(2)
    cp_group = mesh.cp.get_group()
    assert cp_group is not dist.group.WORLD
    called = Counter()

    def counted(name, plain):
        def call(*args, **options):
            called[name] += 1
            return plain(*args, **options)
        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    rows = packs_of("mixed")[mesh.dp.get_local_rank()::2]
    batches = {n: [shard_of_rank(rows[k :: n], mesh.cp.get_local_rank(), 2) for k in range(n)]
               for n in (1, 2, 4)}
    found = {}
    for case in CASES:
        shard, frozen, checkpointing = case
        model = new_model()
        model.embedding.requires_grad_(not frozen)
        model.recompute = checkpointing
        parallel.parallelize(model, mesh, shard)
        for n, micro_batches in batches.items():
            called.clear()
            for k, batch in enumerate(micro_batches, 1):
                parallel.set_last_micro_batch(model, k == n)
                forward_backward(model, batch, 1.0)
            found[case, n] = dict(called)
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
            model.zero_grad()
    return found


def test_a_step_exchanges_what_it_must_and_nothing_twice(tmp_path):
    """A unit of weights is gathered once in forward and once in backward, the root unit (head, last
    norm) once per step, and a frozen embedding never in backward. Gradients are summed over copies
    once per step."""
    found = run_group(worker, tmp_path, 4)
    layers = CONFIG.n_layer
    inner = CONFIG.vision.n_layer + 1 + layers  # ViT blocks, rest of vision, decoder
    for (shard, frozen, checkpointing), n in found:
        trained_units = inner + 1 + (not frozen)
        expected = {
            "all_gather_single": n * (2 * inner + 1 + (not frozen)) + 1,
            "reduce_scatter_single": n * trained_units,
            # per layer: q, k, v together and the result, in forward and backward;
            # 2 for the pooled tokens
            "all_to_all_single": n * (4 * layers + 2),
        }
        if shard:
            expected["all_reduce"] = trained_units
        assert found[(shard, frozen, checkpointing), n] == expected, (shard, frozen, n)


def alone_in_a_row(rank, world):
    mesh = parallel.make_mesh(2)
    model = parallel.parallelize(new_model(), mesh)
    (group,) = [cell.cell_contents for cell in model.route.__closure__]
    assert dist.get_world_size(group) == 2
    assert group is not dist.group.WORLD
    assert mesh.cp.get_group() is dist.group.WORLD  # the group of FSDP


def test_ulysses_has_a_communicator_of_its_own_where_all_ranks_share_a_row(tmp_path):
    run_group(alone_in_a_row, tmp_path, 2)


H, G, D, T = 8, 4, 16, 256
EXCHANGED = {  # {cp_heads: how many numbers one of four ranks sends per layer}
    4: 2 * (T // 4) * D * ((H + 2 * G) + H) * 3 // 4,
    1: 2 * (T // 4) * D * 2 * G * 3,
    2: 2 * (T // 4) * D * ((H + 2 * G) + H) // 2 + 2 * (T // 2) * D * 2 * (G // 2),
}


def count_sent(rank, world):
    """-> {cp_heads: how many numbers are sent in forward and backward}"""
    sent = Counter()

    def counted(name, plain, part):
        def call(out, given, *args, **options):
            numbers = sum(map(torch.numel, given if isinstance(given, list) else [given]))
            sent["all"] += int(numbers * part(dist.get_world_size(options["group"])))
            return plain(out, given, *args, **options)
        return call

    for name, part in (("all_to_all_single", lambda n: (n - 1) / n),
                       ("all_gather", lambda n: n - 1),
                       ("reduce_scatter", lambda n: (n - 1) / n)):
        setattr(dist, name, counted(name, getattr(dist, name), part))
    found = {}
    for cp_heads in EXCHANGED:
        model = new_model()
        parallel.share_rows(model, parallel.make_mesh(4, cp_heads=cp_heads))
        q, k, v = (torch.randn(1, T // 4, heads, D, requires_grad=True) for heads in (H, G, G))
        queries = parallel.distribute(T, 4 // cp_heads)[rank // cp_heads]
        mask = attention.allow(*(torch.full((1, T), n) for n in (T, 0)), queries)
        sent.clear()
        model.attend(q, k, v, mask).sum().backward()
        found[cp_heads] = sent["all"]
    return found


def test_what_attention_sends_is_what_the_page_says(tmp_path):
    """Heads, gather, and both, as in docs/cluster.md. Backward sends as much as forward."""
    assert run_group(count_sent, tmp_path, 4) == EXCHANGED
