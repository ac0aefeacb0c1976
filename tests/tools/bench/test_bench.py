"""tools.bench without packers and FLOPs: the JSON line, mistakes in the flags, the stream of sizes,
and implementations that compute the same."""

import os
from datetime import date
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attention
import data
import vision
from text.tokenizer import ByteTokenizer
from text.visual_tokens import image_tokens, video_tokens
from tools.bench import attend, load, measure, pack, step, stream, train
from tools.bench.rows import draw_rows, n_crops
from tools.bench.stream import Recipe
from tools.command import print_table
from training import log
from training.config import parse

pytestmark = pytest.mark.slow


def test_the_json_line_holds_flags_machine_and_four_digits_of_every_float(bench, monkeypatch):
    results = {"a": [1234567, 0.123456, {"b": 2.23456e11}], "c": "0.123456", "d": None, "e": True}
    monkeypatch.setattr(pack, "run", lambda args: results)
    line, _ = bench("pack", "--n", 7)
    expected = {"a": [1234567, 0.1235, {"b": 2.235e11}], "c": "0.123456", "d": None, "e": True}
    assert line["cases"] == expected
    assert (line["bench"], line["n"], line["seeds"]) == ("pack", 7, 3)
    assert str(os.cpu_count()) in line["hardware"]
    assert (line["commit"], line["date"]) == (log.commit(), str(date.today()))


def test_implementations_alternate_in_every_round():
    called = []
    runs = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    results = measure.run_rounds(runs, 3)
    assert "".join(called) == "abccbaabc"
    assert results[1] == {"c": 4, "b": 5, "a": 6}


def test_a_table_shows_four_digits_and_the_range_of_ratios(capsys):
    ratio = measure.spread([3.0, 1.0, 2.0])
    print_table("unit", {"ours": {"s": 0.123456, "x": ratio}, "b": {"s": 12345, "x": None}})
    assert capsys.readouterr().out.splitlines() == [
        "unit       s        x",
        "ours  0.1235  2 (1-3)",
        "b      12345        -",
    ]


def test_sizes_are_those_of_training():
    """Images and videos have the same numbers of tokens and crops as in data.py."""
    tokenizer = ByteTokenizer()
    rng = np.random.default_rng(0)
    for height, width in [stream.draw_image_size(rng) for _ in range(50)]:
        ids = image_tokens(width, height, tokenizer, 8, vision.RELEASED)
        assert stream.image_size(height, width)[0] == len(ids), (height, width)
    assert stream.image_size(378, 378) == (14 * 14 + 2 + 14 * 15 + 2, 2)
    for seconds, frames in (2.0, 5), (7.3, 16), (130.0, 128), (9.96, 21):
        times = vision.frame_times(seconds, 128)
        ids, _ = video_tokens(times, None, tokenizer, data.DataConfig(), vision.RELEASED)
        assert stream.video_size(seconds, 128) == (len(ids), frames)


def test_implementations_agree_and_one_that_does_not_ends_the_run(bench, monkeypatch):
    flags = ["attend", "--tokens=1024", "--rows=2", "--rounds=2"]
    line, table = bench(*flags)
    case = line["cases"]["1024"]
    rows = attend.rows(1024, 2)
    assert [row.starts for row in rows] == [[0, 796, 1010], [0, 916]]
    assert [bool(row.bidir.any()) for row in rows] == [False, True]      # text, then images
    masks = [attention.allow(row.visible_until, row.bidir) for row in rows]
    area = sum(float(mask.float().mean()) for mask in masks) / 2
    assert case["area"] == pytest.approx(area, rel=1e-3)
    assert list(case["ways"]) == ["dense", "loop", "ours", "causal"]
    assert case["ways"]["loop"]["difference"] < 1e-5
    assert case["compilations"] == 0  # nothing is compiled on a CPU
    assert case["ways"]["dense"]["dense_over"]["median"] == 1
    assert all(f"\n{name} " in table for name in case["ways"])

    def wrong(row):
        return lambda q, k, v: attend.dense(row)(q, k, 2 * v)

    monkeypatch.setitem(attend.WAYS, "ours", wrong)
    with pytest.raises(RuntimeError, match="ours differs from dense"):
        bench(*flags)


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_times_asked_for():
    """At most all frames are chosen, spread evenly up to the last one."""
    video = SimpleNamespace(duration=2.0, times=np.arange(60) / 30)
    cases = load.choose_times(video, [384, 9])
    assert list(cases) == ["60 frames", "9 frames"]
    evenly = [*np.arange(8) / 4, 59 / 30]
    np.testing.assert_allclose(cases["9 frames"], evenly, atol=0.002)


def test_a_ratio_is_the_median_over_the_rounds(bench):
    line, table = bench("load", "--seconds", 1, "--frames", 5, "--rounds", 2)
    results = line["cases"]["results"]
    assert list(results) == [load.FFMPEG, "5 frames", "5 frames, prepared"]
    assert results[load.FFMPEG]["times_decode"]["median"] == 1
    ours = results["5 frames"]
    assert ours["frames"] == 5
    prepared = results["5 frames, prepared"]
    assert prepared["frames"] == 5
    assert 0 < prepared["MB"] < ours["MB"]
    assert line["threads"] == 1  # like a worker of the training loader
    assert "5 frames" in table
    rounds = [{load.FFMPEG: a, "x": b} for a, b in ((2, 2), (4, 5), (1, 3))]
    row = load.summarise(rounds, "x", 6, [])
    assert row == {"seconds": 3, "times_decode": {"median": 1.25, "min": 1, "max": 3},
                   "frames": 6, "MB": 0}


@pytest.mark.extras("transformers", "safetensors")
def test_both_implementations_learn_the_same_in_every_case(tiny, bench, monkeypatch):
    """The command raises an error if losses or gradients differ. Cases: one image, and packed trees
    against single annotations."""
    monkeypatch.setattr(step, "STREAM_ROW", Recipe(1024, 32, 4))
    line, table = bench("step", "--rounds", 1, "--n", 2)
    found = line["cases"]
    assert list(found) == ["image", "stream"]
    for name, case in found.items():
        ours, reference = case["ours"], case["reference"]
        ratio = reference["seconds"] / ours["seconds"]
        assert case["ratio"]["median"] == pytest.approx(ratio, rel=2e-3)
        assert ours["tokens"] == pytest.approx(
            ours["tokens_per_second"] * ours["seconds"], rel=2e-3)
        assert f"\n{name} " in f"\n{table}"
    image, packed = found["image"], found["stream"]
    assert image["ours"]["tokens"] == image["reference"]["tokens"] > 300
    assert packed["ours"]["tokens"] < packed["reference"]["tokens"]


@pytest.mark.extras("transformers", "safetensors")
def test_a_difference_between_the_implementations_is_noticed(tiny):
    """One implementation has a wrong weight in the decoder or in the ViT, another loss, or no loss
    at one token."""
    device = torch.device("cpu")
    case = step.image_case(tiny, 1)
    model, peer = step.model_pair(tiny, device)

    def run_ours():
        losses = step.our_losses(model, case, device)
        return step.training_step(model, step.WATCHED.keys(), losses, device)

    ours = run_ours()
    reference = step.training_step(peer, step.WATCHED.values(),
                                   step.reference_losses(peer, tiny, case, device), device)
    step.check_agreement("image", ours, reference)
    weights = dict(model.named_parameters())
    for name in "blocks.1.mlp.down.weight", "vision.vit.blocks.1.out.weight":
        weights[name].data *= 1.5
        with pytest.raises(RuntimeError, match="image: the "):
            step.check_agreement("image", run_ours(), reference)
        weights[name].data /= 1.5
    with pytest.raises(RuntimeError, match="image: the loss differs"):
        step.check_agreement("image", ours._replace(loss=ours.loss * 1.001), reference)
    case.rows[0][0].weights[-5] = 0
    with pytest.raises(RuntimeError, match="image: the "):
        step.check_agreement("image", run_ours(), reference)


def test_a_stream_is_whole_packs_and_every_annotation_once(tiny, monkeypatch):
    limits = Recipe(1024, 16, 4)
    rows, annotations = draw_rows(tiny, 3, 2, limits)
    assert len(rows) == 3
    tokens = [sum(len(e.tokens) for e in row) for row in rows]
    crops = [sum(n_crops(e) for e in row) for row in rows]
    assert max(tokens) <= 1024
    assert max(crops) <= 16
    assert np.mean(tokens) > 0.8 * 1024 or np.mean(crops) > 13
    assert len(annotations) == sum(e.n_branches for row in rows for e in row)
    assert sum(map(step.count_labels, rows)) == step.count_labels(annotations)

    monkeypatch.setattr(step, "STREAM_ROW", limits)
    case = step.stream_case(tiny, 3)
    assert sorted(len(e.tokens) for batch in case.batches for e in batch) == sorted(
        len(e.tokens) for e in annotations)
    for batch in case.batches:
        assert len(batch) <= step.REFERENCE_BATCH
        assert len({e.pool_src.shape[1] == 9 for e in batch}) == 1, "videos apart"


@pytest.fixture
def batches(monkeypatch):
    """-> a list to which every batch of a training step is added."""
    found = []
    batch_of = train.train.batch_of
    monkeypatch.setattr(train.train, "batch_of",
                        lambda run, rows: found.append(batch_of(run, rows)) or found[-1])
    return found


def tokens_of(rows):
    return sum(len(example.tokens) for row in rows for example in row)


def test_all_packs_are_timed_equally_often_and_rates_are_sums_over_sums(bench, batches):
    """Eight packs are two steps of four. Two steps are a warm-up, four are timed, one is profiled,
    and one times copies."""
    flags = "--stage 1 --tiny --batch 4 --micro-batch 2"
    line, table = bench("train", flags, "--rounds", 2, "--kernels", 3, "--peak", 2)
    found = line["cases"]
    config = parse(flags.split())[1]
    rows = train.rows_of(config, 8)
    seconds = 4 * found["seconds"]
    assert found["tokens_per_second"] * seconds == pytest.approx(2 * tokens_of(rows), rel=2e-3)
    assert found["mfu"] == pytest.approx(found["flops_per_second"] / 2e12, rel=2e-3)
    assert found["mfu_all_pairs"] > found["mfu"]
    assert found["copies"] == 0
    ids = [batch.tokens for batch in batches]
    assert len(ids) >= 16
    assert [torch.equal(ids[k], ids[4 + k]) for k in range(4)] == [True] * 4
    assert not torch.equal(ids[0], ids[2])
    shares = [kernel["share"] for kernel in found["kernels"].values()]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1
    assert table.startswith(flags)


def test_the_first_of_two_ranks_has_half_of_each_row(bench, batches):
    flags = "--stage 2 --tiny --batch 1 --cp 2"
    line, _ = bench("train", flags, "--gpus", 2, "--rounds", 1)
    (first, *_), *_ = rows = train.rows_of(parse(flags.split())[1], 8)
    crops = sum(n_crops(example) for example in rows[0])
    batch = batches[0]
    assert batch.tokens.shape == (1, 512)
    assert batch.tokens[0, : min(len(first.tokens), 512)].tolist() == first.tokens[:512].tolist()
    assert 0 < len(batch.images) < crops
    found = line["cases"]
    assert found["tokens_per_second"] * found["seconds"] * 8 == pytest.approx(
        tokens_of(rows) / 2, rel=2e-3)
    assert 0 < found["copies"] < 8 * found["seconds"]


def test_other_ranks_are_copies_of_the_first():
    gathered = torch.tensor([1.0, 2, 0, 0, 0, 0])
    train.GatherCopies()(gathered, gathered[:2], None)
    assert gathered.tolist() == [1, 2, 1, 2, 1, 2]
    kept = torch.zeros(2)
    train.KeepOwnPart()(kept, torch.arange(6.0), None, None)
    assert kept.tolist() == [0, 1]
    received = torch.zeros(5)
    train.exchange_with_copies(received, torch.tensor([7.0, 8]), [5], [2])
    assert received.tolist() == [7, 8, 7, 8, 7]
