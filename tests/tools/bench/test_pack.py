"""The bench of packers: its stream is the one that was measured, its bound holds, its baselines do what their descriptions say."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

import data
from tools.bench import pack as bench

CASES = json.loads((Path(__file__).parents[2] / "conformance" / "packing.json").read_text())["cases"]
# of the stream that the packers' published measurements were made on, 20 seeds of 4,000 examples: means of tokens, crops and annotations;
# 5 seeds: the tenth, half and nine tenths of the tokens, and the shares of examples without crops and with as many as a film can have
MEASURED = {1: (1266.2, 5.693, 2.501, 858, 1306, 1652, 0.0984, 0),
            2: (3520.9, 32.033, 3.778, 871, 2012, 9977, 0.0905, 0.0642),
            3: (4192.6, 39.555, 3.778, 871, 2012, 9977, 0.0905, 0.0099)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stream_is_the_one_that_was_measured(stage):
    """Means within 3 %, quantiles within 4 %, shares within one in a hundred: three standard deviations are less than each."""
    examples = [e for seed in range(2) for e in bench.stream(stage, 4000, seed)]
    tokens, crops = np.array([e[:2] for e in examples]).T
    measured = np.array(MEASURED[stage])
    means = [tokens.mean(), crops.mean(), np.mean([len(e.branches) for e in examples])]
    np.testing.assert_allclose(means, measured[:3], rtol=0.03)
    np.testing.assert_allclose(np.percentile(tokens, [10, 50, 90]), measured[3:6], rtol=0.04)
    shares = (crops == 0).mean(), (crops == bench.recipe(stage)[1]).mean() * (stage > 1)
    np.testing.assert_allclose(shares, measured[6:], atol=0.01)

    limits = bench.recipe(stage)[0]
    assert (tokens <= limits[0]).all() and (crops <= limits[1]).all()
    assert all(e.tokens == e.trunk + sum(e.branches) and min(e.branches) >= 0 and e.trunk >= 1 for e in examples)
    assert bench.stream(stage, 50, 0) == examples[:50] != bench.stream(stage, 50, 2)


def test_the_official_packer_puts_three_point_eight_examples_in_a_pack():
    sizes = [e[:2] for e in bench.stream(2, 4000, 0)]
    row = bench.measure(bench.packers(2)["official knapsack, 48"], sizes, (16384, 128), fewest=1)
    assert 3.7 < row["examples"] < 3.9, row["examples"]


def test_sizes_are_those_of_training():
    """Every image and video has the tokens that data.py lays out, and the crops that it cuts."""
    tokenizer, config = data.ByteTokenizer(), data.DataConfig()
    rng = np.random.default_rng(0)
    for h, w in [bench.picture(rng) for _ in range(50)]:
        assert bench.image_size(h, w)[0] == len(data.image_ids(w, h, tokenizer, config)), (h, w)
    assert bench.image_size(378, 378) == (14 * 14 + 2 + 14 * 15 + 2, 2)
    for seconds, frames in (2.0, 5), (7.3, 16), (130.0, 128), (9.96, 21):
        times = data.vision.frame_times(seconds, 128)
        assert bench.video_size(seconds, 128) == (len(data.video_ids(times, None, tokenizer, config)[0]), frames)


def test_examples_by_hand():
    """Three images are named; what a row has no room for is cut off the end, subtitles before the last token of text."""
    kind = bench.Kind(1, ("images", 3, 3), (2, 2, 2), (10, 0, 10, 10))
    rng = np.random.default_rng(5)
    assert rng.integers(3, 4) == 3
    tokens, crops = np.sum([bench.image_size(*bench.picture(rng)) for _ in range(3)], axis=0)
    given = bench.example(np.random.default_rng(5), kind, 16384, 128)
    assert given == (1 + tokens + 3 * len(["Image", " ", "1"]) + 20, crops, given.tokens - 20, [10, 10])
    film = bench.Kind(1, ("video", 100, 0, 100), (3, 3, 3), (50, 0, 50, 50))
    whole = bench.example(np.random.default_rng(0), film, 16384, 128)
    assert whole == (1 + bench.video_size(90, 128)[0] + 150, 128, whole.tokens - 150, [50] * 3)
    assert bench.example(np.random.default_rng(0), film, whole.tokens - 60, 128).branches == [50, 40, 0]
    cut = bench.example(np.random.default_rng(0), film._replace(subtitles=1), whole.tokens - 149, 128)
    assert cut == (whole.tokens - 149, 128, whole.tokens - 150, [1, 0, 0])


def random_pack(rng, limit):
    """Sizes that fit one pack: most often exactly, with many just below and above half of it or a third."""
    part, sizes = rng.choice([2, 3, 4, 7]), []
    for x in (limit // part + rng.integers(-2, 3, part)).tolist() * (rng.random() < 0.5):
        sizes += [x] * (0 < x <= limit - sum(sizes))
    left = limit - sum(sizes)
    cuts = np.sort(rng.integers(0, left + 1, rng.integers(0, 6)))
    return np.array(sizes + np.diff([0, *cuts, left]).tolist())


def test_lifted_by_hand():
    assert bench.lifted(np.array([1, 2, 3, 8, 9]), 2, 10).tolist() == [0, 2, 3, 8, 10]
    assert bench.lifted(np.array([1, 4, 5, 6, 9]), 5, 10).tolist() == [0, 0, 5, 10, 10]


def test_what_fits_one_pack_sums_to_one_pack_at_most_when_lifted():
    rng = np.random.default_rng(0)
    for limit in (5, 16, 128, 2536):
        for _ in range(300):
            sizes = random_pack(rng, limit)
            assert sizes.sum() <= limit
            for least in {0, 1, limit // 2, *rng.integers(0, limit // 2 + 1, 5).tolist(), *(x for x in sizes.tolist() if x <= limit // 2)}:
                assert bench.lifted(sizes, least, limit).sum() <= limit, (sizes, least, limit)


def test_the_bound_is_never_above_packs_that_exist():
    """Packs are made first and taken apart; the bound of what was in them may reach their number, and does where each holds a large one."""
    rng = np.random.default_rng(1)
    for n in (1, 7, 60):
        columns = [[random_pack(rng, limit) for _ in range(n)] for limit in (2536, 16)]
        pairs = [np.pad(x, (0, max(len(x), len(y)) - len(x))) for a, b in zip(*columns, strict=True) for x, y in ((a, b), (b, a))]
        sizes = np.stack([np.concatenate(pairs[0::2]), np.concatenate(pairs[1::2])], axis=1)
        assert max(bench.bound(sizes, (2536, 16))) == n               # they were all full
    assert bench.bound(np.array([(6, 1)] * 10 + [(4, 0)] * 3), (10, 100)) == (8, 10)
    assert bench.bound(np.array([(6, 0)] * 3 + [(5, 0)]), (10, 100)) == (3, 4)
    assert bench.bound(np.array([(1, 51)] * 10 + [(1, 49)] * 3), (10, 100)) == (7, 10)


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "knapsack"], ids=lambda c: c["input"]["name"])
def test_the_knapsack_chooses_what_the_official_one_chooses(case):
    given, expected = case["input"], case["expected"]
    assert given["text_weight"] == 1
    sizes = list(zip(given["text_lens"], given["n_images"], strict=True))
    chosen = bench.knapsack(sizes, given["max_text"], given["max_images"], given["image_weight"], given["text_granularity"])
    tokens, crops = (sum(sizes[i][k] for i in chosen) for k in (0, 1))
    assert chosen == expected["selected_in_order"]
    assert (tokens, crops, tokens + given["image_weight"] * crops) == (expected["total_text"], expected["total_images"], expected["value"])


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "stream"], ids=lambda c: c["input"]["name"])
def test_the_official_packer_emits_what_the_official_one_emits(case):
    given, out, gone = case["input"], [], set()

    def arriving():
        for size in given["examples"]:
            arrived.append(size)
            yield tuple(size)
        raise EOFError               # the official stream has no end, so nothing is emptied after it

    arrived = []
    packs = bench.official(arriving(), given["max_text"], given["max_images"], given["image_weight"], given["pool"])
    try:
        for pack in packs:
            gone |= set(pack)
            tokens, crops = (sum(given["examples"][i][k] for i in pack) for k in (0, 1))
            out.append((len(arrived) - 1, pack, tokens, crops))
    except EOFError:
        out.append(("end", sorted(set(range(len(arrived))) - gone)))
    except RuntimeError:
        out.append((len(arrived) - 1, "error"))
    expected = [(e["on_example"], "error") if "error" in e else (e["on_example"], e["packed_ids"], e["tokens"], e["images"])
                for e in case["expected"]]
    assert [e for e in out if e[0] != "end"] == expected


def test_packers_by_hand():
    sizes = [(3, 3), (8, 2), (4, 4), (9, 1), (2, 8)]
    assert list(bench.in_order(sizes, 10, 10)) == [[0], [1], [2], [3], [4]]
    assert list(bench.in_order(sizes, 13, 10)) == [[0, 1], [2, 3], [4]]
    # 0; 1 does not fit with it; 2 joins 0; 3 fits nowhere and opens a third: the one of 7 crops leaves; 4 fills that of 1
    assert list(bench.internvl(sizes, 10, 10, room=2)) == [[0, 2], [1, 4], [3]]
    assert list(bench.internvl([(10, 3), (1, 1), (5, 10)], 10, 10)) == [[0], [2], [1]]           # full in either
    # the oldest, then the largest that fit: not 1, but 2 and 3; large by tokens or by crops
    assert list(bench.first_fit([(2, 1), (9, 1), (3, 2), (5, 5), (8, 1)], 10, 10, pool=4)) == [[0, 3, 2], [1], [4]]
    assert list(bench.first_fit([(1, 1), (5, 1), (2, 9)], 10, 10)) == [[0, 2], [1]]
    assert bench.knapsack([(33, 0)], 33, 1, 1, grain=32) == [0]     # both rounded up: two steps in two
    assert [bench.packers(stage)["official knapsack, 48"].keywords for stage in (1, 2, 3)] == [{"image_weight": w} for w in (1, 30, 30)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_packer_keeps_the_limits_and_every_example_and_none_beats_the_bound(stage):
    """measure checks the first two for every row of every table."""
    sizes, limits = [e[:2] for e in bench.stream(stage, 400, 3)], bench.recipe(stage)[0]
    fewest = max(bench.bound(np.array(sizes), limits))
    for name, packer in bench.packers(stage).items():
        row = bench.measure(packer, sizes, limits, fewest)
        assert row["over"] >= 1 and row["packs"] == round(400 / row["examples"]), name


def test_waits_by_hand():
    """Example 1 arrives before the first pack and leaves in the third: a wait of two packs, and of what came after it by then."""
    def packer(sizes, *_):
        for last, pack in (1, [0]), (3, [2, 3]), (4, [4, 1]):
            sizes[last]              # up to here it was read
            yield pack

    row = bench.measure(packer, [(2, 1)] * 5, (8, 2), fewest=3)
    assert (row["packs"], row["over"], row["wait_max"], row["wait"], row["arrivals_max"], row["late"]) == (3, 1, 2, 2 / 5, 3, 0)
    assert (row["tokens"], row["crops"]) == (10 / 24, 5 / 6)

    def starving(sizes, *_):
        for i in range(1, 1500):
            sizes[i]
            yield [i]
        yield [0]

    row = bench.measure(starving, [(1, 1)] * 1500, (1, 1), fewest=1500)
    assert (row["late"], row["wait_max"], row["arrivals_max"]) == (1, 1499, 1499)


@pytest.mark.parametrize(("packs", "wrong"), [([[0], [1]], "once"), ([[0, 1], [1, 2]], "once"), ([[0], [1], [2], [3]], "once"),
                                              ([[0, 1, 2]], "6 .*, where"), ([[2], [1, 0]], "before")])
def test_lost_doubled_and_invented_examples_too_full_packs_and_blind_ones_are_noticed(packs, wrong):
    def packer(sizes, *_):
        for pack in packs:
            sizes[0 if wrong == "before" else 2]
            yield pack

    with pytest.raises(AssertionError, match=wrong):
        bench.measure(packer, [(2, 1)] * 3, (5, 9), fewest=1)


def test_savings_by_hand():
    """Two films with trunks of 80 and 60, one with three annotations of 5: 4 sequences become 2, then 1."""
    examples = [bench.Example(95, 8, 80, [5, 5, 5]), bench.Example(70, 4, 60, [10])]
    rows = bench.savings(examples, (200, 20))
    assert rows["one annotation per sequence"] == {"sequences": 4, "batches": 4 * 85, "tokens": 3 * 85 + 70, "crops": 3 * 8 + 4}
    assert rows["message trees"] == {"sequences": 2, "batches": 2 * 95, "tokens": 165, "crops": 12}
    assert rows["packing"]["sequences"] == 2 and rows["packing"]["tokens"] == 3 * 85 + 70
    assert rows["both"] == {"sequences": 1, "batches": 165, "tokens": 165, "crops": 12}
    lengths = [20, 3, 5, 7, 9, 11, 13, 15, 2, 30]
    rows = bench.savings([bench.Example(t, 0, t - 1, [1]) for t in lengths], (40, 1))
    assert rows["message trees"]["batches"] == 8 * 20 + 2 * 30
    assert rows["one annotation per sequence"]["tokens"] == sum(lengths) == rows["packing"]["tokens"]


def test_the_command_prints_tables_and_returns_what_json_can_hold(capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["--n", "150", "--seeds", "2", "--stages", "2", "1"])
    result = json.loads(json.dumps(bench.run(args)))
    assert list(result) == ["stage 2", "stage 1"] and list(result["stage 2"]["packers"]) == list(bench.packers(2))
    sizes = [[e[:2] for e in bench.stream(2, 150, seed)] for seed in range(2)]
    bounds = [max(bench.bound(np.array(s), (16384, 128))) for s in sizes]
    one, other = (bench.measure(bench.internvl, s, (16384, 128), least) for s, least in zip(sizes, bounds, strict=True))
    row = result["stage 2"]["packers"]["InternVL's buffer, 20"]
    assert row["packs"] == (one["packs"] + other["packs"]) / 2 and row["over_range"] == sorted([one["over"], other["over"]])
    assert row["wait_max"] == max(one["wait_max"], other["wait_max"]) and row["wait"] == (one["wait"] + other["wait"]) / 2
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{name} ") == 2 for name in [*bench.packers(2), "one annotation per sequence", "both"])
    assert parser.parse_args([]) == argparse.Namespace(n=20_000, seeds=3, stages=[1, 2, 3])
    with pytest.raises(ValueError, match="at least 1"):
        bench.run(parser.parse_args(["--n", "0"]))
