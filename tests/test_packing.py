"""Packing and message trees do not change losses or gradients, the main claim of the project."""

import json
import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

import attention
import data
import model
import packing
from packing import Item
from records.parse import parse
from text.tokenizer import ByteTokenizer
from toy.world import WORDS, World

VISION = replace(model.TOY_VISION, n_layer=2, feature_layers=(1, 0), grid=4)
CONFIG = replace(model.PRESETS["toy"], n_layer=2, vision=VISION)
DATA = data.DataConfig(max_tokens=2048, max_crops=4)
TOKENIZER = ByteTokenizer(WORDS)


class Photos:
    """Records with images of noise in various sizes. Every third record is only text."""

    name = "photos"

    def __getitem__(self, i):
        words = ["a cat", "two dogs on a mat", "rain"]
        turns = [{"question": f"what is {i}?", "answer": words[i % 3]},
                 {"question": "sure?", "answer": "yes"}]
        record = {"annotations": [{"type": "qa", "turns": turns}]}
        if i % 3 != 2:
            points = [{"x": 10, "y": 20 + i}, {"x": 30, "y": 40}]
            record["annotations"] += [
                {"type": "caption", "text": words[(i + 1) % 3]},
                {"type": "point", "label": "cat", "coords": "percent", "points": points}]
            record["image"] = "noise"
        name = f"photo-{i}"
        return parse(record) | {"id": name, "key": name, "where": name, "source": self}

    def image_sizes(self, record):
        i = int(record["id"].split("-")[1])
        return [(20 + 13 * i, 30 + 7 * i)] * ("images" in record)

    def images(self, record, only=None):
        return [np.random.default_rng(w).integers(0, 256, (h, w, 3), dtype=np.uint8)
                for w, h in self.image_sizes(record)]


def examples(n=5, **changes):
    config = replace(DATA, **changes)
    return [data.encode(Photos()[i], TOKENIZER, config, VISION, 0, 0) for i in range(n)]


def alone(example):
    """Yields each conversation of a tree as a plain sequence: the prefix and one branch."""
    place = np.arange(len(example.tokens))
    starts = [len(place)]                                # a single branch has no prefix
    if example.n_branches > 1:
        restarts = np.flatnonzero(np.diff(example.pos) <= 0) + 1
        first = int(example.pos[restarts[0]])            # the prefix's length
        starts = [first, *restarts[restarts > first].tolist()]
    for start, stop in pairwise([*starts, len(place)]):
        keep = (place < starts[0]) | (place >= start) & (place < stop)
        names = ("tokens", "targets", "weights", "pos", "visible_until", "bidir",
                 "annotation")
        cut = {name: getattr(example, name)[keep].copy() for name in names}
        cut["visible_until"][:] = keep.sum()
        if example.images is not None:
            cut["pool_dst"] = np.flatnonzero(cut["tokens"] == TOKENIZER.special["im_patch"])
        yield keep, replace(example, **cut)


def grown(seed=0, **changes):
    torch.manual_seed(seed)
    return model.Molmo2(replace(CONFIG, **changes)).init_weights().double()


def run(m, rows, T):
    return forward_backward(m, packing.collate(rows, T, CONFIG.vision))


def forward_backward(m, batch):
    """-> nll, lse and the gradients."""
    nll, lse = m(batch)
    (batch.weights * (nll + 1e-4 * lse**2)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}
    m.zero_grad()
    return nll.detach(), lse.detach(), gradients


def assert_same_gradients(gradients, expected):
    assert set(gradients) == set(expected)
    for name, g in gradients.items():
        assert (g - expected[name]).abs().max() <= 1e-12 * max(1.0, float(g.abs().max())), name


@pytest.mark.parametrize(("family", "roots"), [("qwen", True), ("olmo", False)])
def test_packing_changes_nothing(family, roots):
    """In float64, nll and all gradients are the same as when each conversation runs alone."""
    m = grown(family=family, n_kv_head=2 if family == "qwen" else 4)
    packed = examples(sqrt_length=roots, sqrt_branches=roots)
    assert any(e.n_branches >= 3 for e in packed)
    assert any(e.images is None for e in packed)
    T = sum(len(e.tokens) for e in packed) + 37
    nll, _, gradients = run(m, [packed], T)
    sums, start = {}, 0
    for e in packed:
        for keep, conversation in alone(e):
            single, _, part = run(m, [[conversation]], len(conversation.tokens))
            at = torch.from_numpy(np.flatnonzero(keep)) + start
            learned = torch.from_numpy(conversation.weights > 0)
            assert learned.any()
            assert (nll[0, at][learned] - single[0][learned]).abs().max() < 1e-12
            for name, g in part.items():
                sums[name] = sums.get(name, 0) + g
        start += len(e.tokens)
    assert set(sums) == {name for name, _ in m.named_parameters()}
    assert_same_gradients(gradients, sums)


def test_recomputing_changes_no_bit_and_keeps_less():
    """Compares nll, all gradients, and the bytes that are stored for backward: of all blocks, of
    the last block, of none, and without the result of attention. Dropout repeats its choices."""
    m, packed, kept, seen = grown().train(), examples(3), [], []
    m.residual_dropout = 0.1
    for m.recompute in (0, 0.8, 1, 2):
        kept.append(0)

        def keep(x):
            kept[-1] += x.nbytes
            return x

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            seen.append(run(m, [packed], 1024))
    every, last, none, least = kept
    assert 1.05 * least < none < 0.3 * every, kept
    assert none < last < 0.8 * every, kept
    for again in seen[1:]:
        torch.testing.assert_close(again, seen[0], rtol=0, atol=0)


def test_a_row_of_padding_without_any_image_is_never_nan():
    nll, lse, gradients = run(grown(), [[]], 8)
    assert (nll == 0).all() and (lse == 0).all()
    assert all(torch.isfinite(g).all() for g in gradients.values())


def test_the_dense_mask_of_a_row_never_crosses_examples():
    """Images of different examples have different bidir numbers. On a CPU, equal numbers would not
    be noticed, because attention runs on one example at a time."""
    batch = packing.collate([examples(3)], 1024, CONFIG.vision)
    allowed = attention.allow(batch.visible_until, batch.bidir)
    same = batch.example[:, :, None] == batch.example[:, None]
    assert len(batch.bidir.unique()) == 3            # text, and the images of two examples
    assert not (allowed & ~same).any()


def test_nll_equals_the_full_logits_and_is_zero_without_loss():
    m = grown()
    m.nll_chunk = 7  # several chunks, of which the last is shorter
    batch = packing.collate([examples(3)], 1024, CONFIG.vision)
    nll, lse = m(batch)
    logits = m.logits(batch)
    at = batch.weights > 0
    assert torch.allclose(lse[at], logits.logsumexp(-1)[at], atol=1e-12, rtol=0)
    expected = torch.nn.functional.cross_entropy(logits[at], batch.targets[at], reduction="none")
    assert torch.allclose(nll[at], expected, atol=1e-12, rtol=0)
    assert (nll[~at] == 0).all() and (lse[~at] == 0).all()


def test_a_view_that_the_mosaic_repeats_is_encoded_once_with_the_same_result():
    """An image of one tile gives two equal crops. Batch only contains one of them."""
    m = grown()
    config = replace(DATA, max_crops=1)
    example = data.encode(World("train")[3], TOKENIZER, config, VISION, 0, 0)
    assert np.array_equal(*example.images)
    once = packing.collate([[example]], 512, CONFIG.vision)
    assert len(once.images) == 1
    P = CONFIG.vision.n_patch
    lower = torch.from_numpy(example.pool_src)
    twice = replace(once, images=torch.from_numpy(example.images), pool_src=lower)
    assert int(lower.max()) >= P > int(once.pool_src.max())
    nll, _, gradients = forward_backward(m, once)
    expected, _, expected_gradients = forward_backward(m, twice)
    assert (nll - expected).abs().max() < 1e-12
    assert_same_gradients(gradients, expected_gradients)


def test_crops_are_padded_to_a_multiple_with_two_at_least_for_a_compiler():
    packed = examples(4)
    n_crops = len(packing.collate([packed], 2048, VISION).images)
    assert n_crops % 4
    padded = packing.collate([packed], 2048, VISION, crop_bucket=4).images
    assert len(padded) == -(-n_crops // 4) * 4
    assert not padded[n_crops:].any()
    nothing = [packing.collate([[]], 8, VISION, bucket).images for bucket in (1, 2, 4)]
    assert list(map(len, nothing)) == [1, 2, 2]


def test_questions_about_the_same_pixels_share_one_copy_with_the_same_result():
    m = grown()
    first = examples(1)[0]
    rows = [[first], [replace(first, tokens=first.tokens.copy())]]
    apart = packing.collate(rows, 512, VISION)
    shared = packing.collate(rows, 512, VISION, share_images=True)
    assert 2 * len(shared.images) == len(apart.images)
    assert (m(shared)[0] - m(apart)[0]).abs().max() < 1e-12


# --------------------------------------------------------------------------------------------------
# the planner


def sizes_of(seed, n):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 130, n).tolist()
    return list(zip(tokens, rng.integers(0, 12, n).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_every_fitting_example_is_packed_once_and_no_pack_is_over_a_limit(seed):
    sizes = sizes_of(seed, 300)
    planner = packing.Planner(sizes, 100, 10, pool_size=1 + seed * 3)
    packs = list(planner)
    for pack in packs:
        assert [(e.tokens, e.crops) for e in pack] == [sizes[e.index] for e in pack]
        assert sum(e.tokens for e in pack) <= 100 and sum(e.crops for e in pack) <= 10
    fits = [i for i, (t, c) in enumerate(sizes) if t <= 100 and c <= 10]
    assert sorted(e.index for pack in packs for e in pack) == fits


def test_nothing_waits_much_longer_than_its_age_allows():
    """Two examples of 60 tokens fill a row, so one of 50 would wait until no other is left."""
    def endless(i):
        return (50, 1) if i % 50 == 7 else (60, 1)

    planner, waits = packing.Planner(endless, 120, 10, pool_size=16), []
    for n in range(4000):
        waits += [n - e.arrived for e in next(planner)]
    # several may reach the limit together, and each pack takes one of them
    assert packing.MAX_WAIT <= max(waits) < packing.MAX_WAIT + 16
    assert min(e.index for e in planner.pool) > 8000 - 2 * (packing.MAX_WAIT + 16) - 16


@pytest.mark.parametrize("seed", range(2))
def test_a_planner_restored_after_any_pack_goes_on_exactly(seed):
    """The state is JSON, so that it can be saved in a file."""
    sizes = sizes_of(seed, 400)
    planner, states, packs = packing.Planner(sizes, 100, 10), [], []
    while True:
        states.append(json.dumps(planner.state()))
        pack = next(planner, None)
        if pack is None:
            break
        packs.append(pack)
    for n in range(0, len(states), 7):
        again = packing.Planner(sizes, 100, 10)
        again.restore(json.loads(states[n]))
        assert list(again) == packs[n:]


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_fullest_row(seed):
    """All subsets of ten examples are tried, with bins of one token and random prices."""
    rng = np.random.default_rng(seed)
    sizes = zip(rng.integers(1, 60, 10).tolist(), rng.integers(0, 8, 10).tolist(), strict=True)
    examples = [Item(i, t, c, 0) for i, (t, c) in enumerate(sizes)]
    tokens, crops, per_token, per_crop = 100, 12, *rng.random(2)
    found = packing.best_subset(examples, tokens, crops, 1, per_token, per_crop)

    def fits(items):
        return sum(e.tokens for e in items) <= tokens and sum(e.crops for e in items) <= crops

    def worth(items):
        return sum(e.tokens * per_token + e.crops * per_crop for e in items)

    best = 0
    for bits in range(1 << 10):
        items = [e for k, e in enumerate(examples) if bits >> k & 1]
        if fits(items):
            best = max(best, worth(items))
    assert len({e.index for e in found}) == len(found)
    assert fits(found)
    assert worth(found) == pytest.approx(best)


def test_what_rounding_loses_is_looked_for_once_more():
    """In steps of 10, 41 + 41 + 18 need 12 steps and do not fit. Exactly, they fill the row."""
    def filled(*tokens):
        items = [Item(i, n, 0, 0) for i, n in enumerate(tokens)]
        return sum(e.tokens for e in packing.best_subset(items, 100, 0, 10, 1.0, 1.0))

    assert filled(41, 41, 18, 55) == 100
    assert filled(51, 45, 42, 40) == 96              # 51 + 40, then 45 in place of 40


def test_rows_are_few_where_tokens_are_scarcer_than_crops():
    """Half of the examples have crops. Crops never fill a row, so the tokens set the lowest number
    of rows. Without weighing crops against tokens there are 2 % more rows."""
    fewest = 0
    n_packs = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        sizes = [(int(rng.integers(10, 60)), int(rng.integers(10, 70))) if rng.random() < 0.5
                 else (int(rng.integers(5, 70)), 0) for _ in range(600)]
        fewest += math.ceil(sum(tokens for tokens, _ in sizes) / 100)
        n_packs += len(list(packing.Planner(sizes, 100, 100)))
    assert fewest <= n_packs <= 1.01 * fewest


# --------------------------------------------------------------------------------------------------
# packs distributed over ranks


def packs_of(work):
    """[(crops, attention), ..] -> packs of one Item with this work."""
    return [[Item(k, int(attention) ** 0.5, crops, 0)] for k, (crops, attention) in enumerate(work)]


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_pack_goes_to_one_rank_and_all_get_as_many(ranks):
    packs = packs_of(np.random.default_rng(ranks).integers(0, 100, (32, 2)).tolist())
    shares = packing.balance_packs(packs, ranks)
    assert sorted(k for share in shares for k in share) == list(range(32))
    assert {len(share) for share in shares} == {32 // ranks}
    load = np.array([(e.crops, e.tokens**2) for (e,) in packs])
    load = (load / load.sum(0)).sum(1)
    assert all((np.diff(load[share]) <= 0).all() for share in shares)       # heaviest first


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_rank_is_nearly_the_best_that_any_dealing_allows(seed):
    """All ways to distribute 8 packs over 2 ranks are tried. Work is crops plus attention."""
    work = np.random.default_rng(seed).integers(1, 100, (8, 2)).astype(float)

    def slowest(groups):
        loads = [work[list(group)].sum(0) / work.sum(0) * 2 for group in groups]
        return sum(max(load[k] for load in loads) for k in (0, 1))

    halves = [(set(g), set(range(8)) - set(g)) for g in combinations(range(8), 4)]
    best = min(map(slowest, halves))
    in_order = slowest((range(0, 8, 2), range(1, 8, 2)))
    ours = slowest(packing.balance_packs(packs_of(work.tolist()), 2))
    assert ours <= best * 1.08
    assert ours <= in_order or in_order < best * 1.08


def test_packs_without_crops_are_dealt_by_their_attention():
    attention = (9, 1, 8, 2)
    shares = packing.balance_packs(packs_of([(0, n) for n in attention]), 2)
    assert [sum(attention[k] for k in share) for share in shares] == [10, 10]
