"""Several processes give the same loss and gradients as one, for all layouts of ranks and all kinds
of rows."""

import functools
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attention
import data
import model as models
import packing
import parallel
from records import visual
from records.visual import MediaInfo
from tests.ranks import first_of_two_ranks, run_group
from tests.test_attention import put_visual_tokens_first
from text.tokenizer import ByteTokenizer
from text.visual_tokens import images_tokens, video_tokens
from tools.bench.train import GatherCopies
from training.loader import select_crops
from training.ranks import all_reduce_sums

TOY = models.PRESETS["toy"]
VISION = replace(TOY.vision, n_layer=3, feature_layers=(2, 1))
CONFIG = replace(TOY, n_layer=2, n_head=8, n_kv_head=2, vision=VISION)
DATA = data.DataConfig(max_tokens=512, max_crops=2)
TOKENIZER = ByteTokenizer()
T = 512
PACKS = 8

# --------------------------------------------------------------------------------------------------
# packs

KINDS = {                            # kinds of the examples in each of eight packs
    "text only": [["text"] * 3] * PACKS,
    "images": [["image", "image"]] * PACKS,
    "video": [["video"]] * PACKS,
    "mixed": [["image", "text"], ["video"], ["images"], ["text"] * 4, ["video", "image"],
              ["text", "images"], ["image"], ["video"]],
    "some ranks without images": [["image"], ["text"], ["text"], ["text"]] * 2,
    "a rank without loss": [["image", "text"]] * PACKS,
}
PATTERNS = {}                        # which of four ranks have an image
for bits in range(16):
    names = [["image" if bits >> k % 4 & 1 else "text"] for k in range(PACKS)]
    PATTERNS[f"pattern {bits:04b}"] = names
KINDS |= PATTERNS


def random_ids(rng, low, high):
    return rng.integers(0, 250, int(rng.integers(low, high))).tolist()


def random_image(rng):
    return rng.integers(0, 256, (*rng.integers(20, 60, 2), 3), np.uint8)


def random_branch(rng):
    segments = [(random_ids(rng, 3, 15), 0), (random_ids(rng, 2, 12), 1)]
    return data.Branch(segments, weight=float(rng.choice([0.2, 1])))


def random_example(rng, kind):
    """kind: text, image, images or video."""
    branches = [random_branch(rng) for _ in range(int(rng.integers(1, 4)))]
    if kind == "text":
        return data.layout([TOKENIZER.bos], [False], branches, DATA)
    if kind == "video":
        times = [0.5 * k for k in range(int(rng.integers(2, 6)))]
        info = MediaInfo([(9, 9)], times)
        crops = visual.frame_crops((random_image(rng) for _ in times), len(times), VISION)
        ids, is_visual = video_tokens(times, None, TOKENIZER, DATA, VISION)
    else:
        images = [random_image(rng) for _ in range(1 if kind == "image" else 3)]
        info = MediaInfo([image.shape[1::-1] for image in images])
        crops = visual.image_crops(images, DATA.max_crops, VISION)
        ids, is_visual = images_tokens(info.sizes, TOKENIZER, DATA.max_crops, VISION)
    example = data.layout([TOKENIZER.bos, *ids], [False, *is_visual], branches, DATA)
    example.images = crops
    data.place_visual_tokens(example, info, TOKENIZER, DATA.max_crops, VISION)
    return example


def packs_of(kind):
    rng = np.random.default_rng(list(KINDS).index(kind))
    rows = [[random_example(rng, name) for name in names] for names in KINDS[kind]]
    if kind == "a rank without loss":
        for example in itertools.chain(*rows[::2]):
            example.weights[:] = 0
    return rows


def weight_of(rows):
    return sum(float(x.weights.sum()) for x in itertools.chain(*rows))


def crops_of_rank(row, rank, cp):
    """The row of one rank of a context-parallel group, with its share of the crops."""
    if cp == 1:
        return row
    crops = [0 if x.image_id is None else len(x.image_id) for x in row]
    before = np.cumsum([0, *crops]).tolist()
    return [select_crops(x, parallel.CropShard(rank, cp, before[k], before[-1]))
            for k, x in enumerate(row)]


def shard_of_rank(rows, rank, cp, crop_bucket=1, cp_heads=0):
    rows = [crops_of_rank(row, rank, cp) for row in rows]
    batch = packing.collate(rows, T, VISION, crop_bucket)
    return parallel.cut_for_rank(batch, rank, cp, cp_heads)


# --------------------------------------------------------------------------------------------------
# one process, and many


def new_model(n_head=8, n_kv_head=2):
    torch.manual_seed(3)
    config = replace(CONFIG, n_head=n_head, n_kv_head=n_kv_head)
    model = models.Molmo2(config).init_weights().train()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))        # so that biases and norms matter
    return model


def forward_backward(model, batch, weight):
    nll, lse = model(batch)
    (((nll + 1e-4 * lse**2) * batch.weights).sum() / weight).backward()
    return float((nll.detach() * batch.weights).sum()) / weight


@functools.cache
def loss_by_pairs():
    """-> a model in float64 with the gradients of two rows by the rule for every query-key pair,
    and the loss."""
    rows = packs_of("mixed")[:3:2]
    model = new_model().double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "packed_mask", lambda *row: attention.allow(*row[:2]))
        return model, forward_backward(model, packing.collate(rows, T, VISION), weight_of(rows))


@functools.cache
def reference(kind, *heads):
    """Loss and gradients of one process that runs one row at a time."""
    model = new_model(*heads)
    rows = packs_of(kind)
    weight = weight_of(rows)
    loss = 0.0
    for row in rows:
        loss += forward_backward(model, packing.collate([row], T, VISION), weight)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def worker(rank, world, cp, accumulation, kinds, shard=0, dtype=torch.float32, compiled=False,
           cp_heads=0, heads=()):
    """-> {kind: (loss, gradients)}. With `compiled`, compiling is an error from the third pack on.
    """
    mesh = parallel.make_mesh(cp, cp_heads=cp_heads)
    cp_rank = mesh.cp.get_local_rank()
    dp = world // cp
    size = PACKS // dp // accumulation
    n_done = 0
    found = {}
    model = None
    for kind in kinds:
        if model is None or not compiled:
            model = parallel.parallelize(new_model(*heads), mesh, shard, dtype)
            if compiled:
                model.recompute = 1
                model.compile_blocks()
        model.zero_grad()
        rows = packs_of(kind)[mesh.dp.get_local_rank()::dp]
        weight = all_reduce_sums({"weight": weight_of(rows)})["weight"] / cp
        loss = 0.0
        for start in range(0, len(rows), size):
            batch = shard_of_rank(rows[start : start + size], cp_rank, cp, 1 + compiled, cp_heads)
            stance = "fail_on_recompile" if compiled and n_done >= 2 else "default"
            torch.compiler.set_stance(stance)
            enabled = dtype != torch.float32
            parallel.set_last_micro_batch(model, start + size >= len(rows))
            with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=False):
                loss += forward_backward(model, batch, weight)
            n_done += 1
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()
                     if p.grad is not None}
        found[kind] = all_reduce_sums({"loss": loss})["loss"], gradients
    return found


def assert_as_one_process(found, kind, *heads):
    """The loss must agree within 1e-6, and every gradient within 1e-5 of its norm -> {part of the
    model: largest difference}."""
    loss, gradients = found[kind]
    expected_loss, expected_gradients = reference(kind, *heads)
    assert loss == pytest.approx(expected_loss, rel=1e-6), kind
    worst = {}
    for name, expected in expected_gradients.items():
        gradient = gradients.get(name, torch.zeros_like(expected))
        off = float((gradient - expected).norm() / expected.norm().clamp(min=1e-3))
        assert off < 1e-5, (kind, name, off)
        names = name.split(".")
        part = ".".join(names[:2]) if names[0] == "vision" else names[0]
        worst[part] = max(worst.get(part, 0), off)
    return worst


# world, context-parallel degree, accumulation, cp_heads, query heads and kv heads. With cp_heads 1,
# keys and values are gathered, because four ranks cannot exchange three kv heads. With cp_heads 2,
# four ranks gather them and exchange heads.
LAYOUTS = [
    (1, 1, 1, 0, 8, 2), (2, 1, 1, 0, 8, 2), (2, 2, 1, 0, 8, 2), (4, 2, 1, 0, 8, 2),
    (4, 4, 1, 0, 8, 2), (2, 1, 2, 0, 8, 2), (8, 8, 1, 0, 8, 2), (2, 2, 1, 1, 8, 2),
    (4, 2, 1, 1, 8, 2), (4, 4, 1, 1, 6, 3), (4, 4, 1, 2, 8, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cp", "accumulation", "cp_heads", "n_head", "n_kv_head"), LAYOUTS)
def test_any_layout_gives_loss_and_gradients_of_one_process(
        tmp_path, world, cp, accumulation, cp_heads, n_head, n_kv_head):
    """The largest difference of every part of the model is printed."""
    kinds = [kind for kind in KINDS if kind not in PATTERNS]
    heads = n_head, n_kv_head
    found = run_group(worker, tmp_path, world, cp, accumulation, kinds, cp_heads=cp_heads,
                      heads=heads)
    worst = {}
    for kind in kinds:
        for part, off in assert_as_one_process(found, kind, *heads).items():
            worst[part] = max(worst.get(part, 0), off)
    print(world, cp, accumulation, cp_heads, {part: f"{off:.1e}" for part, off in worst.items()})


@pytest.mark.slow
def test_weights_sharded_within_groups_of_two_give_the_same(tmp_path):
    """Hybrid sharding: each pair of the four ranks has a complete copy of the weights."""
    assert_as_one_process(run_group(worker, tmp_path, 4, 2, 2, ["mixed"], shard=2), "mixed")


@pytest.mark.slow
def test_compiled_blocks_with_shared_rows_equal_one_process_and_are_compiled_once(tmp_path):
    """cp is 2, with activation checkpointing. There are 24 packs of three kinds. Compiling is an
    error from the third pack on."""
    kinds = ["mixed", "video", "text only"]
    found = run_group(worker, tmp_path, 2, 2, PACKS, kinds, compiled=True)
    for kind in kinds:
        assert_as_one_process(found, kind)


@pytest.mark.slow
def test_blocks_gathered_in_bfloat16_are_one_process_under_autocast(tmp_path):
    """Only the rounding of norms and biases differs. The loss agrees within 1e-3. The error of each
    gradient against float32 is less than twice the error of one process."""
    found = run_group(worker, tmp_path, 2, 2, 1, ["mixed"], dtype=torch.bfloat16)
    loss, gradients = found["mixed"]
    exact_loss, exact = reference("mixed")
    model = new_model()
    rows = packs_of("mixed")
    weight = weight_of(rows)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        alone = sum(forward_backward(model, packing.collate([row], T, VISION), weight)
                    for row in rows)
    assert loss == pytest.approx(alone, rel=1e-3)
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    differences = []
    for name, p in model.named_parameters():
        norm = exact[name].norm()
        if norm > 1e-3:
            assert gradients[name].dtype == torch.float32
            of_many = float((gradients[name] - exact[name]).norm() / norm)
            of_one = float((p.grad - exact[name]).norm() / norm)
            assert of_many < 2 * of_one + 0.01, name
            differences.append(of_many)
    assert len(differences) > 40
    assert max(differences) > 1e-4                       # bfloat16 was used


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_whichever_of_four_ranks_have_images_none_waits_for_another(tmp_path, cp):
    """All 16 patterns give the loss and the gradients of one process."""
    found = run_group(worker, tmp_path, 4, cp, 1, list(PATTERNS))
    for kind in PATTERNS:
        assert_as_one_process(found, kind)


# --------------------------------------------------------------------------------------------------
# without processes


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_images_are_shared_out_within_one_image_of_even(cp):
    rng = np.random.default_rng(cp)
    for _ in range(200):
        n_crops = rng.integers(1, 9, int(rng.integers(1, 20)))
        total = int(n_crops.sum())
        cut = int(rng.integers(0, len(n_crops)))         # a row of two examples
        first, second = n_crops[:cut], n_crops[cut:]
        whole = parallel.CropShard(0, cp, 0, total)
        ranks = np.concatenate([whole.ranks(first),
                                replace(whole, before=int(first.sum())).ranks(second)])
        assert np.array_equal(ranks, whole.ranks(n_crops))
        assert (np.diff(ranks) >= 0).all()
        loads = np.bincount(ranks, n_crops, minlength=cp)
        assert loads.sum() == total
        assert abs(loads - total / cp).max() <= n_crops.max()


def test_the_rank_of_an_image_is_that_of_its_middle():
    assert parallel.CropShard(0, 2, 0, 10).ranks([6, 4]).tolist() == [0, 1]
    assert parallel.CropShard(0, 2, 0, 1).ranks([1]).tolist() == [1]


def n_crops_in(batch):
    """The number of crops without blank ones. No crop of a random image is all zeros."""
    return int(batch.images.flatten(1).any(1).sum())


def mean_pixels(batch, windows):
    """For some windows of a Batch, the sum of the mean pixels of their patches."""
    pixels = batch.images.flatten(0, 1).float().mean(-1)
    source = batch.pool_src[windows]
    return (pixels[source.clamp(min=0)] * (source >= 0)).sum(1)


@pytest.mark.parametrize("n", range(1, 9))
def test_blocks_are_distributed_round_robin(n):
    positions = parallel.distribute(128 * 5 * n, n)
    assert torch.equal(positions.flatten().sort().values, torch.arange(128 * 5 * n))
    assert torch.equal(positions[-1].view(5, 128)[:, 0], 128 * (torch.arange(5) * n + n - 1))
    assert parallel.distribute(12 * n, n).shape == (n, 12)     # a short row has smaller blocks


@pytest.mark.parametrize(("cp", "cp_heads"), [(2, 2), (4, 4), (8, 8), (2, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("kind", ["mixed", "text only", "video"])
def test_the_shards_of_a_batch_are_the_batch(kind, cp, cp_heads):
    """The tokens of the ranks form the row, every crop is encoded once, and every visual token
    arrives at its position."""
    rows = packs_of(kind)[:2]
    whole = packing.collate(rows, T, VISION, crop_bucket=4)
    shards = [shard_of_rank(rows, rank, cp, 4, cp_heads) for rank in range(cp)]
    places = parallel.distribute(T, cp // cp_heads).flatten()
    for name in ("tokens", "targets", "weights", "pos", "example"):
        side_by_side = torch.cat([getattr(shard, name) for shard in shards], 1)
        assert torch.equal(side_by_side, getattr(whole, name)[:, places])
    for rank, shard in enumerate(shards):
        assert torch.equal(shard.visible_until, whole.visible_until)
        assert torch.equal(shard.bidir, whole.bidir)
        assert torch.equal(shard.cp_rank, shards[0].cp_rank)
        assert n_crops_in(shard) == int((shard.cp_rank == rank).sum())
        assert len(shard.pool_src) > 0
        assert len(shard.images) == 2 or len(shard.images) % 4 == 0
    assert len(shards[0].cp_rank) == n_crops_in(whole)
    # the pixels of each window: at their positions in the row, and as the ranks receive them
    expected = torch.zeros(whole.tokens.numel())
    expected.index_add_(0, whole.pool_dst, mean_pixels(whole, slice(None)))
    found = torch.zeros(len(rows), cp, T // cp)
    for rank, shard in enumerate(shards):
        arriving = []
        for sender in shards:
            sent, _ = sender.dispatch
            arriving.append(mean_pixels(sender, slice(sum(sent))).split(sent)[rank])
        _, received = shard.dispatch
        assert [len(pixels) for pixels in arriving] == received
        of_rank = torch.zeros(len(rows) * (T // cp))
        of_rank.index_add_(0, shard.pool_dst, torch.cat(arriving))
        found[:, rank] = of_rank.view(len(rows), T // cp)
    assert torch.equal(found.view(len(rows), T), expected.view(len(rows), T)[:, places])


class Group:
    """n threads as ranks, instead of a group of torch.distributed."""

    def __init__(self, n):
        self.n = n
        self.barrier = threading.Barrier(n, timeout=60)
        self.given = [()] * n
        self.own = threading.local()         # its .rank differs by thread

    def exchange(self, parts):
        """The parts of this rank for every rank -> the parts of every rank for this rank."""
        self.given[self.own.rank] = list(parts)
        self.barrier.wait()
        found = [of_rank[self.own.rank] for of_rank in self.given]
        self.barrier.wait()
        return found


def exchange_heads(out, x, received=None, sent=None, group=None):
    out.copy_(torch.cat(group.exchange(x.split(sent or len(x) // group.n))))


def gather(outs, x, group):
    for out, part in zip(outs, group.exchange([x] * group.n), strict=True):
        out.copy_(part)


def reduce_scatter(out, parts, group):
    out.copy_(sum(group.exchange(parts)))


THREADS = SimpleNamespace(all_to_all_single=exchange_heads, all_gather=gather,
                          reduce_scatter=reduce_scatter, get_world_size=lambda group: group.n)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("cp", "cp_heads"), [(4, 4), (2, 1), (4, 2)])
def test_ranks_that_share_rows_give_loss_and_gradients_of_one(monkeypatch, cp, cp_heads, ordered):
    """In float64, against the rule for every query-key pair. Ranks are threads. Heads are
    exchanged, keys are gathered, or both. The first case has more ranks than kv heads. With
    `ordered`, the masks are those of a GPU, where visual tokens come first."""
    monkeypatch.setattr(parallel, "dist", THREADS)
    rows = packs_of("mixed")[:3:2]
    weight = weight_of(rows)
    alone, expected_loss = loss_by_pairs()
    if ordered:
        put_visual_tokens_first(monkeypatch)
    of_row = Group(cp)
    of_heads = [Group(cp_heads) for _ in range(cp // cp_heads)]
    of_keys = [Group(cp // cp_heads) for _ in range(cp_heads)]

    def work(rank):
        model = models_of_ranks[rank]
        row_number, number = divmod(rank, cp_heads)
        of_row.own.rank, of_heads[row_number].own.rank = rank, number
        of_keys[number].own.rank = row_number
        model.route = parallel.dispatch_route(of_row)
        if cp > cp_heads:
            model.attend = parallel.gathered(model.attend, of_keys[number])
        if cp_heads > 1:
            model.attend = parallel.ulysses(model.attend, of_heads[row_number])
        return forward_backward(model, shard_of_rank(rows, rank, cp, cp_heads=cp_heads), weight)

    models_of_ranks = [new_model().double() for _ in range(cp)]
    with ThreadPoolExecutor(cp) as pool:
        losses = list(pool.map(work, range(cp)))
    assert sum(losses) == pytest.approx(expected_loss, rel=1e-11)
    for p, *of_ranks in zip(alone.parameters(), *(m.parameters() for m in models_of_ranks),
                            strict=True):
        gradient = sum(q.grad for q in of_ranks if q.grad is not None)
        assert float((gradient - p.grad).norm()) < 1e-10 * float(p.grad.norm()) + 1e-12


def test_weights_of_decoder_blocks_are_sent_in_bfloat16_and_others_in_float32():
    """Forward of the first of two ranks, of which the second does not exist."""
    sent = Counter()

    class Count(GatherCopies):
        def __call__(self, output_tensor, **others):
            sent[output_tensor.dtype] += output_tensor.numel()
            super().__call__(output_tensor, **others)

    with first_of_two_ranks():
        model = new_model()
        in_blocks = sum(p.numel() for p in model.blocks.parameters())
        others = sum(p.numel() for p in model.parameters()) - in_blocks
        parallel.parallelize(model, parallel.make_mesh(1), dtype=torch.bfloat16)
        for unit in model.modules():
            if isinstance(unit, parallel.FSDPModule):
                unit.set_custom_all_gather(Count())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(packing.collate(packs_of("mixed")[:1], T, VISION))
    assert sent == {torch.bfloat16: in_blocks, torch.float32: others}


def test_one_process_needs_no_exchange():
    batch = packing.collate(packs_of("mixed")[:1], T, VISION)
    assert parallel.cut_for_rank(batch, 0, 1) is batch
    assert new_model().attend is attention.attend
