"""tools.bench pack: packers work as described, rows are counted, and no packer needs fewer packs
than the lower bound."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tools.bench import pack as packers
from tools.bench.stream import ExampleSize, recipe, stream

pytestmark = pytest.mark.slow

CONFORMANCE = Path(__file__).parents[2] / "conformance/packing.json"
CASES = json.loads(CONFORMANCE.read_text())["cases"]


def cases(kind):
    return [case for case in CASES if case["kind"] == kind]


def sizes_of(stage, n, seed):
    return [(e.tokens, e.crops) for e in stream(stage, n, seed)]


@pytest.mark.parametrize(("sizes", "bound"), [
    ([(6, 1)] * 10 + [(4, 0)] * 3, 10),  # the volume alone gives 8
    ([(1, 51)] * 10 + [(1, 49)] * 3, 10),  # the volume alone gives 7
    ([(5, 3)] * 6, 3),  # given by the volume
])
def test_bounds_by_hand(sizes, bound):
    assert packers.lower_bound(np.array(sizes), (10, 100)) == bound


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_packer_keeps_limits_and_examples_and_none_beats_the_bound(stage):
    sizes = sizes_of(stage, 400, 3)
    limits = recipe(stage)[:2]
    bound = packers.lower_bound(np.array(sizes), limits)
    for name, packer in packers.packers(stage).items():
        packs = list(packer(sizes, *limits))
        assert sorted(i for pack in packs for i in pack) == list(range(400)), name
        fill = np.array([np.sum([sizes[i] for i in pack], axis=0) for pack in packs])
        assert (fill <= limits).all(), name
        assert len(packs) >= bound, name
        assert len(packs) <= 1.03 * bound or name != "ours"


@pytest.mark.parametrize("case", cases("knapsack"), ids=lambda case: case["input"]["name"])
def test_the_knapsack_chooses_what_the_official_one_chooses(case):
    given = case["input"]
    assert given["text_weight"] == 1
    sizes = list(zip(given["text_lens"], given["n_images"], strict=True))
    limits = [given[key] for key in ("max_text", "max_images", "image_weight", "text_granularity")]
    assert packers.knapsack(sizes, *limits) == case["expected"]["selected_in_order"]


class EndOfStream(Exception):
    """The official stream never ends, so the pool is never emptied."""


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
            emitted.append((n_arrived - 1, pack))
    except EndOfStream:
        pass
    except RuntimeError:
        emitted.append((n_arrived - 1, "error"))
    expected = [(e["on_example"], e.get("packed_ids", "error")) for e in case["expected"]]
    assert emitted == expected


@pytest.mark.parametrize(
    ("stage", "n", "limits", "fewest", "most"),
    [(2, 4000, (16384, 128), 3.7, 3.9), (1, 2000, (2560, 16), 1.49, 1.55)],
)
def test_the_official_packer_packs_as_many_examples_as_its_authors_report(
    stage, n, limits, fewest, most
):
    """The paper reports 3.8 in stage 2. Ai2 reports 1.51 to 1.53 in stage 1, for rows of 2,560
    tokens (docs/released.md). The stream here is shorter than the stream that was fitted."""
    packer = packers.packers(stage)[packers.OFFICIAL]
    row = packers.measure(packer, sizes_of(stage, n, 0), 1, limits)
    assert fewest < row["examples"] < most, row["examples"]


def test_rows_by_hand():
    """Two videos have prefixes of 80 and 60 tokens, and the first has three annotations of 5. Trees
    alone or packing alone need two rows instead of four, and both together need one."""
    examples = [ExampleSize(95, 8, 80, [5, 5, 5]), ExampleSize(70, 4, 60, [10])]
    assert packers.count_rows(examples, (200, 20)) == {
        "one annotation per row": 4, "message trees": 2, "packing": 2, "both": 1}


def test_readme_and_results_have_the_numbers_of_20000_examples():
    found = packers.count_rows(stream(2, 20_000, 0), recipe(2)[:2])
    alone = found.pop("one annotation per row")
    root = Path(__file__).parents[3]
    readme = " ".join((root / "README.md").read_text().split())
    trees, packing, both = (f"{alone / found[name]:.1f}" for name in
                            ("message trees", "packing", "both"))
    assert trees == packing
    assert (f"trees or packing alone divide the number of rows by {trees}. Both together divide it "
            f"by {both}." in readme)
    names = {"message trees": "trees alone", "packing": "packing alone", "both": "both"}
    table = (root / "RESULTS.md").read_text()
    for name, n in found.items():
        (of_stages,) = re.findall(rf"\| fewer rows by {names[name]} \|(.*)\|", table)
        assert float(of_stages.split("|")[1].strip(" x")) == pytest.approx(alone / n, rel=0.01)
