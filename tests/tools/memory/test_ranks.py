"""What is counted for many GPUs: shares of weights, tokens and crops, and bytes that are sent."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import data
import model as models
import parallel
from tests.ranks import run_ranks
from tests.tools.memory.small_model import (
    COMPUTE_BYTES,
    SMALL,
    attend_as_on_a_gpu,
    batch_of,
    config_of,
    model_of,
    saved_bytes,
)
from tests.tools.memory.test_activations import counted_bytes
from tools.memory.shape import largest_shape
from tools.memory.step import sent, training
from training.config import parse


def test_gpus_share_weights_and_cp_shares_tokens():
    config = config_of(models.PRESETS["4b"], max_tokens=4096, micro_batch=1, pack_crops=64,
                       activation_checkpointing=True)

    def parts(gpus, cp, shard):
        return training(largest_shape(replace(config, cp=cp, shard=shard), 2, gpus)).parts

    one = parts(gpus=1, cp=1, shard=0)
    eight = parts(gpus=8, cp=1, shard=0)
    sliced = parts(gpus=8, cp=8, shard=0)
    in_pairs = parts(gpus=8, cp=8, shard=2)
    for part in ("weights", "gradients", "optimizer"):
        assert eight[part] == sliced[part] == one[part] // 8 == in_pairs[part] // 4
    assert eight["saved: decoder"] == one["saved: decoder"] == 8 * sliced["saved: decoder"]
    # 8 of 64 crops, and 8 more of an image that belongs to two ranks' shares
    assert eight["saved: ViT"] == one["saved: ViT"] == 4 * sliced["saved: ViT"]
    assert sliced["mask"] == one["mask"]     # whole on every rank


def test_no_rank_has_more_crops_than_counted():
    """Images of any number of crops, dealt out as data.CropShard does; some rank gets the most that
    is counted."""
    rng = np.random.default_rng(0)
    config = config_of(models.PRESETS["4b"], micro_batch=1, cp=4)
    spare = []
    for _ in range(3000):
        images = rng.choice([1, 2, 5, 9], 40)
        images = images[images.cumsum() <= 72]
        total = int(images.sum())
        ranks = data.CropShard(0, 4, 0, total).ranks(images)
        held = np.bincount(ranks, images, minlength=4).max()
        shape = largest_shape(replace(config, pack_crops=total), 2, 4)
        spare.append(shape.patches / shape.vision.n_patch - held)
    assert min(spare) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("gpus", "cp"), [(1, 1), (8, 8), (8, 2)])
def test_nothing_but_the_mask_grows_with_the_square_of_a_row(gpus, cp, checkpointing):
    """Stage 3 with rows twice as long. The mask's lists of blocks take a byte for 1024 pairs."""
    config = parse(["--stage", "3", "--preset", "8b", f"--cp={cp}",
                    f"--activation_checkpointing={checkpointing}"])[1]
    twice = replace(config, data=replace(config.data, max_tokens=2 * config.data.max_tokens))
    short = largest_shape(config, 2, gpus)
    long = largest_shape(twice, 2, gpus)
    for some, more in zip(training(short), training(long), strict=True):
        assert {name for name in some if more[name] > 2 * some[name]} <= {"mask"}
    assert training(long).parts["mask"] > 2 * training(short).parts["mask"]
    assert all(n <= 2 * sent(short)[name] for name, n in sent(long).items())
    T = long.row_tokens
    assert training(long).parts["mask"] <= long.rows * (T**2 // 1024 + 20 * T)


# --------------------------------------------------------------------------------------------------
# two processes

RANK_OF_CROP = torch.tensor([0, 1, 1, 1], dtype=torch.int32)     # which rank encodes each crop


def slice_of_rank(config, rank):
    """The Batch of one of two ranks, of a row with four crops: the second rank encodes three of
    them, and all visual tokens stand in the first rank's slice."""
    batch = batch_of(config)
    n_patch = config.model.vision.n_patch
    n_windows, window = batch.pool_src.shape
    crop = torch.arange(4).repeat_interleave(n_windows // 4)[:, None]
    pool_src = crop * n_patch + torch.randint(0, n_patch, (n_windows, window))
    batch = replace(batch, pool_src=pool_src, pool_dst=torch.arange(n_windows),
                    images=batch.images[rank == RANK_OF_CROP], cp_rank=RANK_OF_CROP)
    return parallel.shard(batch, rank, 2)


COLLECTIVES = ("all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce")


class CountedCollectives:
    """Counts the bytes that leave this rank, by collective and pass; and of Ulysses' exchanges how
    often which dtype and shape is sent. put(module, name, value) replaces the collectives."""

    def __init__(self, put=setattr):
        self.sent = Counter()
        self.exchanged = Counter()
        self.direction = "forward"
        for name in COLLECTIVES:
            put(dist, name, self.counting(name, getattr(dist, name)))

    def begin_backward(self):
        self.direction = "backward"

    def counting(self, name, plain):
        def call(*args, **options):
            # tensors come by position or by name, the result first; with pooled tokens come the
            # numbers of rows that are received from each rank and sent to each
            is_rows = name == "all_to_all_single" and len(args) > 2
            tensors = [a for a in (*args, *options.values()) if torch.is_tensor(a)]
            out = tensors[0]
            given = tensors[-1]
            world = dist.get_world_size(options.get("group"))
            if is_rows:
                rows_to = args[3]
                n_rows = sum(rows_to) - rows_to[dist.get_rank(options["group"])]
                n = given.nbytes // max(len(given), 1) * n_rows
            else:
                n = {"all_to_all_single": given.nbytes * (world - 1) // world,
                     "all_gather_single": out.nbytes - given.nbytes,
                     "reduce_scatter_single": given.nbytes - out.nbytes,
                     "all_reduce": 2 * out.nbytes * (world - 1) // world}[name]
                if name == "all_to_all_single":
                    self.exchanged[given.dtype, tuple(given.shape)] += 1
            self.sent[f"{name}{' of rows' if is_rows else ''}, {self.direction}"] += n
            return plain(*args, **options)
        return call


def check_sent(rank, shape, padding=0):
    """rank: CountedCollectives.sent of a micro-batch, but for pooled tokens. padding: bytes of rows
    that FSDP adds where the number of ranks does not divide a parameter's first dimension."""
    counted = sent(shape)
    layers = shape.model.n_layer * counted["Ulysses, forward of a layer"]
    assert rank["all_to_all_single, forward"] == layers
    assert rank["all_to_all_single, backward"] == counted["Ulysses, all layers"] - layers
    assert rank["all_gather_single, forward"] == counted["weights, forward"] + padding
    assert rank["all_gather_single, backward"] == counted["weights, backward"] + padding
    assert rank["reduce_scatter_single, backward"] == counted["gradients, reduce-scatter"] + padding
    assert rank["all_reduce, backward"] == counted["gradients, all-reduce"]


def local_bytes(tensors):
    return sum(parallel.local(tensor).nbytes for tensor in tensors)


@dataclass
class Case:
    config: object
    dtype: torch.dtype


def worker(rank, folder, cases):
    """Writes, for each case, what this rank holds, keeps and sends: {name: bytes}."""
    torch.set_num_threads(1)
    attend_as_on_a_gpu()
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    collectives = CountedCollectives()

    def backward(loss):
        collectives.begin_backward()
        loss.backward()

    for number, case in enumerate(cases):
        config = case.config
        torch.manual_seed(0)
        mesh = parallel.make_mesh(config.cp)
        model = parallel.parallelize(model_of(config), mesh, config.shard, case.dtype)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        batch = slice_of_rank(config, rank) if config.cp > 1 else batch_of(config)
        collectives.sent.clear()
        collectives.direction = "forward"
        found = {"saved": saved_bytes(model, batch, case.dtype, backward)}
        optimizer.step()
        averages = []
        for state in optimizer.state.values():
            averages += [value for value in state.values() if value.ndim]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found["weights"] = local_bytes(model.parameters())
        found["gradients"] = local_bytes(gradients)
        found["optimizer"] = local_bytes(averages)
        torch.save({**found, **collectives.sent}, f"{folder}/{number}-{rank}.pt")
    dist.destroy_process_group()


def two_process_cases():
    """Ulysses with enough kv heads and with copies, vision shared out, FSDP with one and with two
    copies of the weights, checkpointed blocks, frozen parts, weights gathered in bfloat16."""
    base = config_of(replace(SMALL, n_layer=3), max_tokens=96, micro_batch=1, pack_crops=4, stage=3,
                     activation_checkpointing=True)
    base = replace(base, data=replace(base.data, max_crops=1))
    one_kv_head = replace(base, model=replace(base.model, n_kv_head=1))
    plain = replace(base, activation_checkpointing=False)
    plain_one_kv_head = replace(one_kv_head, activation_checkpointing=False)
    half = torch.bfloat16
    full = torch.float32
    return [
        Case(replace(base, cp=2), half),
        Case(replace(base, cp=2, uncheckpointed_blocks=2), half),
        Case(replace(plain, cp=2), half),
        Case(replace(plain_one_kv_head, cp=2), full),
        Case(replace(plain_one_kv_head, cp=2), half),
        Case(replace(base, cp=2, train=("connector", "llm")), full),
        Case(replace(base, cp=1, train=("llm",)), half),
        Case(replace(plain, cp=1), half),
        Case(replace(one_kv_head, cp=2, shard=1, train=("vit",)), full)]


def check_case(case, first, last):
    """first, last: Counter of what the two ranks hold, keep and send."""
    shape = largest_shape(case.config, COMPUTE_BYTES[case.dtype], 2)
    parts = training(shape).parts
    sends = sent(shape)
    for part in ("weights", "gradients", "optimizer"):
        assert first[part] == last[part] == parts[part]
    # the second rank encodes most crops, and uses none of their tokens itself
    saved = counted_bytes(case.config, case.dtype, gpus=2)
    if shape.cp > 1:
        saved -= parts["saved: pooled tokens"]
    assert last["saved"] == pytest.approx(saved, rel=0.03 if shape.checkpointing else 0.005)
    for rank in (first, last):
        check_sent(rank, shape)
    assert last["all_to_all_single of rows, forward"] == sends["pooled tokens, forward"]
    # the first rank pooled a quarter of the tokens that it uses, and sends gradients of the others
    sent_back = first["all_to_all_single of rows, backward"]
    assert sent_back == 0.75 * sends["pooled tokens, backward"]


@pytest.mark.slow
def test_two_processes_hold_keep_and_send_what_is_counted(tmp_path):
    """Exact, but for integers and what hooks cannot see (test_activations)."""
    cases = two_process_cases()
    run_ranks(worker, (str(tmp_path), cases), 2)
    for number, case in enumerate(cases):
        ranks = (Counter(torch.load(tmp_path / f"{number}-{rank}.pt")) for rank in (0, 1))
        check_case(case, *ranks)
