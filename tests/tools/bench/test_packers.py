"""The packers that ours is compared with do what their descriptions say, and the lower bound
holds."""

import json
from pathlib import Path

import numpy as np
import pytest

from tools.bench import packers
from tools.bench.stream import recipe

CONFORMANCE = Path(__file__).parents[2] / "conformance" / "packing.json"
CASES = json.loads(CONFORMANCE.read_text())["cases"]


def cases(kind):
    return [case for case in CASES if case["kind"] == kind]


def random_pack(rng, limit):
    """Sizes that fit into one pack: most often exactly, with many just below and above a half or a
    third of it."""
    part = rng.choice([2, 3, 4, 7])
    sizes = []
    near_part = (limit // part + rng.integers(-2, 3, part)).tolist()
    if rng.random() < 0.5:
        for x in near_part:
            if 0 < x <= limit - sum(sizes):
                sizes.append(x)
    left = limit - sum(sizes)
    cuts = np.sort(rng.integers(0, left + 1, rng.integers(0, 6)))
    return np.array(sizes + np.diff([0, *cuts, left]).tolist())


# ------------------------------------------------------------------------------------------------
# lower bounds


def test_dual_feasible_by_hand():
    assert packers.dual_feasible(np.array([1, 2, 3, 8, 9]), 2, 10).tolist() == [0, 2, 3, 8, 10]
    assert packers.dual_feasible(np.array([1, 4, 5, 6, 9]), 5, 10).tolist() == [0, 0, 5, 10, 10]


def test_dual_feasible_sizes_of_one_pack_sum_to_one_pack_at_most():
    rng = np.random.default_rng(0)
    for limit in (5, 16, 128, 2536):
        for _ in range(300):
            sizes = random_pack(rng, limit)
            assert sizes.sum() <= limit
            thresholds = {0, 1, limit // 2, *rng.integers(0, limit // 2 + 1, 5).tolist()}
            thresholds |= {x for x in sizes.tolist() if x <= limit // 2}
            for threshold in thresholds:
                total = packers.dual_feasible(sizes, threshold, limit).sum()
                assert total <= limit, (sizes, threshold, limit)


def test_the_bound_is_never_above_packs_that_exist():
    """Full packs are made first and taken apart: the bound of their examples is their number."""
    rng = np.random.default_rng(1)
    for n in (1, 7, 60):
        tokens = [random_pack(rng, 2536) for _ in range(n)]
        crops = [random_pack(rng, 16) for _ in range(n)]
        packs = []
        for a, b in zip(tokens, crops, strict=True):
            pack = np.zeros((max(len(a), len(b)), 2), int)
            pack[: len(a), 0] = a
            pack[: len(b), 1] = b
            packs.append(pack)
        assert max(packers.lower_bounds(np.concatenate(packs), (2536, 16))) == n


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ([(6, 1)] * 10 + [(4, 0)] * 3, (8, 10)),
        ([(6, 0)] * 3 + [(5, 0)], (3, 4)),
        ([(1, 51)] * 10 + [(1, 49)] * 3, (7, 10)),
    ],
)
def test_bounds_by_hand(sizes, bounds):
    assert packers.lower_bounds(np.array(sizes), (10, 100)) == bounds


# ------------------------------------------------------------------------------------------------
# packers


@pytest.mark.parametrize("case", cases("knapsack"), ids=lambda case: case["input"]["name"])
def test_the_knapsack_chooses_what_the_official_one_chooses(case):
    given = case["input"]
    expected = case["expected"]
    assert given["text_weight"] == 1
    sizes = list(zip(given["text_lens"], given["n_images"], strict=True))
    chosen = packers.knapsack(
        sizes,
        given["max_text"],
        given["max_images"],
        given["image_weight"],
        given["text_granularity"],
    )
    tokens = sum(sizes[i][0] for i in chosen)
    crops = sum(sizes[i][1] for i in chosen)
    assert chosen == expected["selected_in_order"]
    assert tokens == expected["total_text"]
    assert crops == expected["total_images"]
    assert tokens + given["image_weight"] * crops == expected["value"]


class EndOfStream(Exception):
    """The official stream has no end, so nothing is emptied after it."""


@pytest.mark.parametrize("case", cases("stream"), ids=lambda case: case["input"]["name"])
def test_the_official_packer_emits_what_the_official_one_emits(case):
    given = case["input"]
    sizes = [tuple(size) for size in given["examples"]]
    n_arrived = 0

    def arriving():
        nonlocal n_arrived
        for size in sizes:
            n_arrived += 1
            yield size
        raise EndOfStream

    limits = given["max_text"], given["max_images"], given["image_weight"], given["pool"]
    emitted = []
    try:
        for pack in packers.official(arriving(), *limits):
            tokens = sum(sizes[i][0] for i in pack)
            crops = sum(sizes[i][1] for i in pack)
            emitted.append((n_arrived - 1, pack, tokens, crops))
    except EndOfStream:
        pass
    except RuntimeError:
        emitted.append((n_arrived - 1, "error"))
    expected = []
    for e in case["expected"]:
        if "error" in e:
            expected.append((e["on_example"], "error"))
        else:
            expected.append((e["on_example"], e["packed_ids"], e["tokens"], e["images"]))
    assert emitted == expected


def test_in_order_by_hand():
    sizes = [(3, 3), (8, 2), (4, 4), (9, 1), (2, 8)]
    assert list(packers.in_order(sizes, 10, 10)) == [[0], [1], [2], [3], [4]]
    assert list(packers.in_order(sizes, 13, 10)) == [[0, 1], [2, 3], [4]]


def test_internvl_buffer_by_hand():
    """1 does not fit beside 0; 2 joins 0; 3 fits nowhere and opens a third pack, so that the one of
    7 crops leaves; 4 fills that of 1."""
    sizes = [(3, 3), (8, 2), (4, 4), (9, 1), (2, 8)]
    assert list(packers.internvl_buffer(sizes, 10, 10, max_open=2)) == [[0, 2], [1, 4], [3]]
    full_in_either = [(10, 3), (1, 1), (5, 10)]
    assert list(packers.internvl_buffer(full_in_either, 10, 10)) == [[0], [2], [1]]


def test_first_fit_by_hand():
    """The oldest, then the largest that fit, by tokens or by crops: not 1, but 2 and 3."""
    sizes = [(2, 1), (9, 1), (3, 2), (5, 5), (8, 1)]
    assert list(packers.first_fit(sizes, 10, 10, pool=4)) == [[0, 3, 2], [1], [4]]
    assert list(packers.first_fit([(1, 1), (5, 1), (2, 9)], 10, 10)) == [[0, 2], [1]]


def test_the_knapsack_rounds_tokens_and_the_limit_up():
    assert packers.knapsack([(33, 0)], 33, 1, 1, granularity=32) == [0]  # two steps in two


def test_the_official_packer_weighs_crops_by_stage():
    weights = [packers.packers(stage)[packers.OFFICIAL].keywords for stage in (1, 2, 3)]
    assert weights == [{"image_weight": 1}, {"image_weight": 30}, {"image_weight": 30}]
    assert recipe(2).limits == (16384, 128)
