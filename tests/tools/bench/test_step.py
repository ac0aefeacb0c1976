"""tools.bench step: both sides learn the same, a difference is noticed, and what is reported is
what was measured."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import attention
import model as models
import packing
from tools.bench import __main__ as command
from tools.bench import peers, step_cases
from tools.bench import step as bench
from tools.bench.growth import no_attention
from tools.bench.measure import REPOSITORY
from tools.bench.training_step import (
    added_memory_in_child,
    build_models,
    check_agreement,
    training_step,
)


def parse(*words):
    """Arguments of the command, completed as it does; --peak makes it measure nothing."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["--rounds", "1", "--no-memory", "--peak", "1", "1", *words])
    bench.complete(args)
    return args


def n_crops(example):
    return 0 if example.images is None else len(example.images)


# ------------------------------------------------------------------------------------------------
# beside transformers


def test_both_sides_learn_the_same_in_every_case(tiny, with_transformers, capsys):
    """Losses and gradients agree (run raises if not): one image, one video, padding, packing, trees
    against single annotations."""
    args = parse("--tokens", "1024", "--n", "2", "--frames", "4")
    found = json.loads(json.dumps(bench.run(args)))
    peak = found.pop("peak")
    assert peak == {"float32": 1e12, "bfloat16": 1e12}
    assert list(found) == ["image", "video", "padded", "single", "stream"]
    sides = ["ours float32", "theirs float32", "ours bfloat16", "theirs bfloat16"]
    for name, r in found.items():
        assert list(r["sides"]) == sides, name
        seconds = {side: r["sides"][side]["seconds"] for side in sides}
        ratio = r["ratios"]["theirs float32 / ours bfloat16"]["median"]
        one_round = seconds["theirs float32"] / seconds["ours bfloat16"]
        assert ratio == pytest.approx(one_round)
        mfu = r["flops"] / seconds["ours float32"] / 1e12
        assert r["sides"]["ours float32"]["mfu"] == pytest.approx(mfu)
    image = found["image"]
    assert image["ours"] == image["theirs"]
    assert image["ours"]["crops"] == 9
    video = found["video"]
    assert video["ours"] == video["theirs"]
    assert video["labelled"] > 300
    padded = found["padded"]
    single = found["single"]
    assert padded["ours"] == single["ours"]
    assert padded["flops"] == single["flops"]
    assert padded["theirs"]["padded"] > single["theirs"]["padded"]
    assert single["theirs"]["padded"] == single["theirs"]["tokens"] == single["ours"]["tokens"]
    # a mosaic of one crop repeats the low-resolution view, which ours encodes once
    assert (padded["ours"]["crops"], padded["theirs"]["crops"]) == (15, 16)
    stream = found["stream"]
    assert stream["ours"]["padded"] == 2048
    assert stream["annotations"] > stream["examples"]
    printed = capsys.readouterr().out
    assert all(f"\n{name}: " in printed for name in found)


def test_a_difference_between_the_sides_is_noticed(tiny, with_transformers):
    """A weight that is a little off in the decoder, or in the ViT alone, and a token that only one
    side learns."""
    args = parse("--cases", "image")
    case = step_cases.make_case("image", tiny, args)
    sides = build_models(tiny, args, ("ours", "theirs"))

    def step(side):
        return training_step(side, sides[side], tiny, case, "float32", args)

    ours = step("ours")
    theirs = step("theirs")
    check_agreement("image", ours, theirs)
    weights = dict(sides["ours"].named_parameters())
    for name in "blocks.1.mlp.down.weight", "vision.vit.blocks.1.out.weight":
        weights[name].data *= 1.5
        with pytest.raises(RuntimeError, match="image: not the same"):
            check_agreement("image", step("ours"), theirs)
        weights[name].data /= 1.5
    with pytest.raises(RuntimeError, match="image: not the same loss"):
        check_agreement("image", ours._replace(loss=ours.loss * 1.001), theirs)
    of_decoder, of_vit = ours.gradients
    with pytest.raises(RuntimeError, match=r"image: not the same gradient of vision\.vit"):
        check_agreement("image", ours._replace(gradients=[of_decoder, of_vit * 1.01]), theirs)
    case.rows[0][0].weights[-5] = 0
    with pytest.raises(RuntimeError, match="not the same"):
        check_agreement("image", step("ours"), theirs)


def test_ours_alone_needs_no_transformers(tiny, monkeypatch):
    monkeypatch.setattr(peers, "import_transformers", lambda: pytest.fail("it was imported"))
    args = parse("--cases", "padded", "--dtypes", "bfloat16", "--peak", "1", "--no-theirs")
    row = bench.run(args)["padded"]
    assert list(row["sides"]) == ["ours bfloat16"]
    assert row["ratios"] == {}


# ------------------------------------------------------------------------------------------------
# the stream


def test_a_stream_is_whole_packs_and_every_annotation_once(tiny):
    args = parse("--tokens", "1024", "--crops", "16", "--n", "3", "--frames", "4")
    case = step_cases.stream_case(tiny, args)
    again = step_cases.stream_case(tiny, args)
    trees = [e for row in case.rows for e in row]
    for a, b in zip(trees, [e for row in again.rows for e in row], strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert n_crops(a) == n_crops(b)
        assert np.array_equal(a.images, b.images)
    assert len(case.rows) == 3
    tokens = [sum(len(e.tokens) for e in row) for row in case.rows]
    crops = [sum(n_crops(e) for e in row) for row in case.rows]
    assert max(tokens) <= 1024
    assert max(crops) <= 16
    assert np.mean(tokens) > 0.8 * 1024 or np.mean(crops) > 13

    singles = [e for batch in case.batches for e in batch]
    assert len(singles) == sum(e.n_branches for e in trees)
    assert case.labelled == sum((e.weights > 0).sum() for e in singles)
    for batch in case.batches:
        assert len(batch) <= step_cases.PEER_BATCH
        assert len({e.pool_src.shape[1] == 9 for e in batch}) == 1, "videos apart"


def test_a_row_that_hardly_an_example_fits_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(packing, "MAX_WAIT", 1)
    args = parse("--tokens", "20", "--crops", "1", "--frames", "4")
    with pytest.raises(ValueError, match="Hardly an example fits"):
        step_cases.stream_case(tiny, args)


# ------------------------------------------------------------------------------------------------
# one step


def test_denormal_numbers_are_zero_as_in_training(tiny):
    torch.set_flush_denormal(False)
    build_models(tiny, parse(), ("ours",))
    assert not (torch.full((4,), 1e-40) * 1).any()


def test_rows_that_grow_have_the_length_asked_for(tiny, capsys):
    flags = "--cases growth --dtypes float32 --peak 1 --lengths 700 320"
    args = parse(*flags.split())
    rows = list(bench.run(args)["growth"].values())
    assert [r["documents"] for r in rows] == [1, 1, 1]
    assert rows[0]["crops"] == 16 < rows[1]["crops"]
    for length, r in zip((700, 700, 320), rows, strict=True):
        assert r["tokens"] <= length
        assert r["tokens"] > 0.9 * length or r["crops"] == 16
        assert r["rest_seconds"] > 0
        assert r["seconds"] > 0
    assert rows[0]["pairs"] == pytest.approx(rows[0]["mask_share"] * rows[0]["tokens"] ** 2)
    # each is the first of its kind, of videos of 16 frames or of one longer video, but the last
    first = {"median": 1, "min": 1, "max": 1}
    assert [r["rest_over_first"] == first for r in rows] == [True, True, False]
    assert "us a token" in capsys.readouterr().out
    for kind, crops in (("several", 16), ("one", rows[1]["crops"])):
        args.lengths = [700]
        args.videos = [kind]
        assert [r["crops"] for r in bench.run(args)["growth"].values()] == [crops]


def test_without_attention_everything_else_of_a_step_stays(tiny):
    """No token depends on another, no mask is made, every matrix has a gradient; afterwards tokens
    attend again."""
    args = parse("--dtypes", "float32", "--peak", "1")
    model = build_models(tiny, args, ("ours",))["ours"]
    case = step_cases.make_case("single", tiny, args)

    def loss():
        return training_step("ours", model, tiny, case, "float32", args).loss

    before = loss()
    batch = packing.collate(case.rows, case.length, tiny.vision)
    at = int(batch.labelled[0])
    others_changed = torch.where(torch.arange(case.length) == at, batch.tokens, 11)
    with no_attention(model):
        assert attention.packed_mask(batch.visible_until, batch.bidir) is None
        nll = model(batch)[0]
        other_nll = model(replace(batch, tokens=others_changed))[0]
        assert torch.equal(nll[0, at], other_nll[0, at])
        assert nll[0, at] > 0
        alone = loss()
        nll.sum().backward()
        for block in model.blocks:
            for layer in (block.attn.q, block.attn.k, block.attn.v):
                assert layer.weight.grad.abs().sum() > 0
    model.zero_grad()
    assert loss() == before != alone


# ------------------------------------------------------------------------------------------------
# memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_memory_is_the_most_that_a_step_holds_at_once():
    """A run that makes 64 MB twice, one after the other, adds 64 MB: what was there before, or was
    freed, does not count."""
    code = """
import torch
from tools.bench.training_step import added_memory
torch.ones(2**27)  # 512 MB, freed at once
held = torch.ones(2**23)
cpu = torch.device("cpu")
added_memory(lambda: None, cpu)
print(added_memory(lambda: [torch.ones(2**24).sum() for _ in range(2)], cpu))
"""
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 63 < float(printed) < 80


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    """At least the gradients. Of a preset, since the child does not know what a test replaces."""
    args = parse("--preset", "toy", "--tokens", "1024", "--crops", "16", "--frames", "4")
    weights = sum(p.numel() for p in models.Molmo2(models.PRESETS["toy"]).parameters())
    mib = added_memory_in_child("image", "ours", "float32", args)
    assert weights * 4 / 2**20 < mib < 1000
    args.preset = "8.5b"
    with pytest.raises(RuntimeError, match=r"image, memory of ours float32: KeyError: '8\.5b'"):
        added_memory_in_child("image", "ours", "float32", args)


# ------------------------------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rounds 0", "must be at least 1"),
        ("--peak 1 2 3", "--peak needs a number for each of --dtypes float32 bfloat16"),
        ("--device cuda:99", "--device cuda:99: "),
        ("--keep-blocks 2", "needs --activation-checkpointing"),
        ("--cases image", "pip install transformers"),
    ],
)
def test_a_mistake_ends_in_one_sentence(tiny, monkeypatch, capsys, flags, message):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["bench", "step", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    error = capsys.readouterr().err
    assert error.startswith("tools.bench: ")
    assert message in error
    assert error.count("\n") == 1
