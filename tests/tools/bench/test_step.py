"""The bench of a training step: both sides learn the same, what is different is noticed, and what is counted can be counted by hand."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attention
import model as models
import packing
from tools.bench import __main__ as command
from tools.bench import peers, step_cases
from tools.bench import step as bench
from vision import VisionConfig

TINY = models.ModelConfig(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, n_hidden=48, n_vocab=400,
                     vision=VisionConfig(n_layer=2, n_embd=32, n_head=2, n_hidden=64, feature_layers=(1, 0), grid=7, patch=4, overlap_margin=1))


def parsed(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["--rounds", "1", "--no-memory", "--peak", "1", "1", *words])


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(peers, "SMALL", TINY)


@pytest.fixture
def both(tiny):
    """Skips where there is no transformers."""
    for name in ("transformers", "safetensors"):
        pytest.importorskip(name)


def ours():
    return peers.random_model(TINY, "cpu", torch.float32)


def test_both_sides_learn_the_same_in_every_case(both, capsys):
    """Losses and gradients agree (run raises if not): one image, one film, padding, packing, trees against single annotations."""
    args = parsed("--tokens", "1024", "--n", "2", "--frames", "4")
    found = json.loads(json.dumps(bench.run(args)))
    assert list(found) == ["peak", "image", "video", "padded", "single", "stream"]
    for name, r in found.items():
        if name != "peak":
            assert list(r["sides"]) == ["ours float32", "theirs float32", "ours bfloat16", "theirs bfloat16"], name
            one = r["ratios"]["theirs float32 / ours bfloat16"]["median"]
            assert one == pytest.approx(r["sides"]["theirs float32"]["seconds"] / r["sides"]["ours bfloat16"]["seconds"])      # one round
            mfu = r["sides"]["ours float32"]["mfu"]
            assert mfu == pytest.approx(r["flops"] / r["sides"]["ours float32"]["seconds"] / 1e12)
    assert found["image"]["ours"] == found["image"]["theirs"] and found["image"]["ours"]["crops"] == 9
    assert found["video"]["ours"] == found["video"]["theirs"] and found["video"]["labelled"] > 300
    padded, single = found["padded"], found["single"]
    assert padded["ours"] == single["ours"] and padded["flops"] == single["flops"]
    assert padded["theirs"]["padded"] > single["theirs"]["padded"] == single["theirs"]["tokens"] == single["ours"]["tokens"]
    assert (padded["ours"]["crops"], padded["theirs"]["crops"]) == (15, 16)      # a mosaic of one crop: the view again
    assert found["stream"]["ours"]["padded"] == 2048 and found["stream"]["annotations"] > found["stream"]["examples"]
    printed = capsys.readouterr().out
    assert all(f"\n{name}: " in printed for name in found if name != "peak")


def test_another_step_is_noticed(both):
    """A weight that is a little off in the decoder, or in the ViT alone, and a token that only one side learns."""
    args = parsed("--cases", "image")
    args.tokens, args.crops, args.frames = 2048, 16, 4
    case = step_cases.case_of("image", TINY, args)
    contestants = bench.contenders(TINY, args, ("ours", "theirs"))
    first = {side: bench.step(side, model, TINY, case, "float32", args) for side, model in contestants.items()}
    bench.agree("image", **first)
    weights = dict(contestants["ours"].named_parameters())
    for name in "blocks.1.mlp.down.weight", "vision.vit.blocks.1.out.weight":
        weights[name].data *= 1.5
        with pytest.raises(RuntimeError, match="image: not the same"):
            bench.agree("image", bench.step("ours", contestants["ours"], TINY, case, "float32", args), first["theirs"])
        weights[name].data /= 1.5
    seconds, loss, grads = first["ours"]
    with pytest.raises(RuntimeError, match="image: not the same loss"):
        bench.agree("image", (seconds, loss * 1.001, grads), first["theirs"])
    with pytest.raises(RuntimeError, match=r"image: not the same gradient of vision\.vit"):
        bench.agree("image", (seconds, loss, [grads[0], grads[1] * 1.01]), first["theirs"])
    case.rows[0][0].weights[-5] = 0
    with pytest.raises(RuntimeError, match="not the same"):
        bench.agree("image", bench.step("ours", contestants["ours"], TINY, case, "float32", args), first["theirs"])


def test_a_stream_is_whole_packs_and_every_annotation_once(monkeypatch):
    args = parsed("--tokens", "1024", "--crops", "16", "--n", "3", "--frames", "4", "--batch", "2")
    case, again = step_cases.stream(TINY, args), step_cases.stream(TINY, args)
    trees, singles = [e for row in case.rows for e in row], [e for batch in case.batches for e in batch]
    for a, b in zip(trees, [e for row in again.rows for e in row], strict=True):
        assert (a.tokens == b.tokens).all() and ((a.images is None and b.images is None) or (a.images == b.images).all())
    assert len(case.rows) == 3 and all(sum(len(e.tokens) for e in row) <= 1024 for row in case.rows)
    assert all(sum(0 if e.images is None else len(e.images) for e in row) <= 16 for row in case.rows)
    assert len(singles) == sum(max(e.branch.max(), 1) for e in trees)
    assert case.labelled == sum((e.weights > 0).sum() for e in singles)
    assert all(len(batch) <= 2 and len({e.pool_src.shape[1] == 9 for e in batch}) == 1 for batch in case.batches)
    fill = np.mean([sum(len(e.tokens) for e in row) / 1024 for row in case.rows])
    assert fill > 0.8 or np.mean([sum(len(e.images) for e in row if e.images is not None) for row in case.rows]) > 13
    monkeypatch.setattr(packing, "AGE", 1)
    with pytest.raises(ValueError, match="hardly an example fits"):
        step_cases.stream(TINY, parsed("--tokens", "20", "--crops", "1", "--frames", "4"))


def test_useful_flops_are_those_of_the_matrices_and_of_what_attends():
    """Against torch's counter. It counts the head's second forward, which activation_checkpointing costs, and no gradient of pixels; grids are even
    here, so no window has an empty place."""
    config = replace(TINY, vision=replace(TINY.vision, grid=6))
    model = peers.random_model(config, "cpu", torch.float32).train()
    rng = np.random.default_rng(0)
    row = [step_cases.plain(config, rng, 20, (2, 1)), step_cases.plain(config, rng, 7)]
    batch = packing.collate([row], sum(len(e.tokens) for e in row), config.vision)
    with FlopCounterMode(display=False) as counter:
        model(batch)[0].sum().backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    v, patches, labelled = config.vision, 3 * 36, int((batch.weights > 0).sum())
    counted += 2 * v.n_pixel * v.n_embd * patches - 2 * config.n_vocab * config.n_embd * labelled
    pairs = sum(n * (n + 1) // 2 for n in map(len, (e.tokens for e in row))) + sum(range(row[0].bidir.sum()))    # both ways
    windows = (batch.pool_src >= 0).sum().item()
    attend = 2 * 4 * 8 * pairs + 2 * 32 * patches * 36 + 32 * windows
    assert bench.useful(model, batch) == counted + 12 * attend


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("learn", [("connector",), ("llm",), ("connector", "llm"), ("vit", "connector", "llm")])
def test_parts_that_do_not_learn_cost_less(learn, tied):
    """By torch's counter: of a whole step, within the first matrices of parts below which nothing learns; of the decoder's, exactly."""
    config = replace(TINY, vision=replace(TINY.vision, grid=6), tied=tied)
    model = peers.random_model(config, "cpu", torch.float32).train()
    for part, parameters in model.parameter_groups().items():
        for p in parameters:
            p.requires_grad_(part in learn)
    model.embedding.requires_grad_(False)
    batch = packing.collate([[step_cases.plain(config, np.random.default_rng(0), 20, (2, 1))]], 256, config.vision)
    with FlopCounterMode(display=False) as counter:
        model(batch)[0].sum().backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    counted -= 2 * config.n_vocab * config.n_embd * len(batch.labelled)                  # the head's second forward
    pooled = int((batch.pool_src >= 0).sum())
    size = sum(m.weight.numel() for m in model.vision.vit.modules() if isinstance(m, torch.nn.Linear))
    vit = (6 if "vit" in learn else 2) * 3 * 36 * size                   # what attends, here and in the pooling, is not among torch's "mm"
    attending = 4 * (3 if {"vit", "connector"} & {*learn} else 1) * pooled * config.vision.n_embd
    above = bench.flops(model, 0, pooled, len(batch.pool_dst), 256, len(batch.labelled), 0, learn, True) - attending
    assert vit + above == pytest.approx(counted, rel=0.05)
    x = torch.randn(1, 256, config.n_embd, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model.transformer(x, batch.pos, attention.packed_mask(batch.doc, batch.branch, batch.bidir)).sum().backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    assert bench.flops(model, 0, 0, 0, 256, 0, 0, learn) == counted
    alone = bench.flops(model, 36, 0, 0, 0, 0, 0, learn) / bench.flops(model, 36, 0, 0, 0, 0, 0)
    assert alone == pytest.approx(1 if "vit" in learn else 1 / 3)


def test_the_area_of_a_mask_by_hand():
    """Five tokens with two branches of one, of which three of the trunk see each other; padding counts for nothing."""
    doc, branch, bidir = (torch.tensor([x]) for x in ([0] * 5 + [-1] * 2, [0, 0, 0, 1, 2, 0, 0], [1, 1, 1, 0, 0, 0, 0]))
    assert bench.area(doc, branch, bidir) == 9 + 4 + 4
    assert attention.allow(doc, branch, bidir).sum() == 17 + 3


def test_rows_that_grow_have_the_length_asked_for(tiny, capsys):
    args = parsed("--cases", "growth", "--dtypes", "float32", "--peak", "1", "--lengths", "700", "320")
    rows = list(bench.run(args)["growth"].values())
    assert [r["documents"] for r in rows] == [1, 1, 1] and rows[0]["crops"] == 16 < rows[1]["crops"]
    assert all(0.9 * asked < r["tokens"] <= asked for asked, r in zip((700, 700, 320), rows, strict=True) if r["crops"] != 16)
    assert all(r["rest_seconds"] > 0 and r["seconds"] > 0 for r in rows)
    assert rows[0]["pairs"] == pytest.approx(rows[0]["mask_share"] * rows[0]["tokens"] ** 2)
    first = {"median": 1, "min": 1, "max": 1}            # each of its own kind: of films of 16 frames, or of one longer film
    assert [r["rest_over_first"] == first for r in rows] == [True, True, False]
    assert "us a token" in capsys.readouterr().out
    for films, crops in (("several", 16), ("one", rows[1]["crops"])):
        args.lengths, args.films = [700], [films]
        assert [r["crops"] for r in bench.run(args)["growth"].values()] == [crops]


def test_denormal_numbers_are_zero_as_in_training(tiny):
    torch.set_flush_denormal(False)
    bench.contenders(TINY, parsed(), ("ours",))
    assert not (torch.full((4,), 1e-40) * 1).any()


def test_without_attention_all_else_of_a_step_stays(tiny):
    """No token tells another anything, no mask is made, every matrix has a gradient; and then it attends again."""
    args = parsed("--dtypes", "float32")
    model, case = bench.contenders(TINY, args, ("ours",))["ours"], step_cases.case_of("single", TINY, args)
    before = bench.step("ours", model, TINY, case, "float32", args)
    batch = packing.collate(case.rows, case.length, TINY.vision)
    at = int(batch.labelled[0])
    other = replace(batch, tokens=torch.where(torch.arange(case.length) == at, batch.tokens, 11))            # all but one
    with bench.no_attention(model):
        assert attention.packed_mask(batch.doc, batch.branch, batch.bidir) is None
        nll = model(batch)[0]
        assert torch.equal(nll[0, at], model(other)[0][0, at]) and nll[0, at] > 0
        alone = bench.step("ours", model, TINY, case, "float32", args)[1]
        model(batch)[0].sum().backward()
        assert all(getattr(b.attn, name).weight.grad.abs().sum() > 0 for b in model.blocks for name in "qkv")
    model.zero_grad()
    assert bench.step("ours", model, TINY, case, "float32", args)[1] == before[1] != alone


def test_ours_alone_needs_no_transformers(tiny, monkeypatch):
    monkeypatch.setattr(peers, "peer", lambda: pytest.fail("transformers was asked for"))
    r = bench.run(parsed("--cases", "padded", "--dtypes", "bfloat16", "--peak", "1", "--no-theirs"))["padded"]
    assert list(r["sides"]) == ["ours bfloat16"] and r["ratios"] == {}


@pytest.mark.slow
def test_memory_is_what_a_step_adds_and_holds_at_once():
    """A run that makes 64 MB twice, one after the other, adds 64 MB: what was there before and what was freed do not count."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells")
    code = """
import torch
from tools.bench import step as step_bench
torch.ones(2**27)                        # 512 MB, gone
held = torch.ones(2**23)
step_bench.added(lambda: None, torch.device("cpu"))
print(step_bench.added(lambda: [torch.ones(2**24).sum() for _ in range(2)], torch.device("cpu")))
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=Path(bench.__file__).parents[2], capture_output=True, text=True, check=True,
                          env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}).stdout
    assert 63 < float(said) < 80


@pytest.mark.slow
def test_memory_in_a_process_of_its_own():
    """At least the gradients; the preset, since a process does not know what this test has put in its place."""
    args = parsed("--preset", "toy")
    args.tokens, args.crops, args.frames = 1024, 16, 4
    weights = sum(p.numel() for p in models.Molmo2(models.PRESETS["toy"]).parameters()) * 4 / 2**20
    assert weights < bench.added_alone("image", "ours", "float32", args) < 1000
    args.preset = "8.5b"
    with pytest.raises(RuntimeError, match=r"image, memory of ours float32: KeyError: '8\.5b'"):
        bench.added_alone("image", "ours", "float32", args)


@pytest.mark.parametrize(("words", "said"), [
    (["--rounds", "0"], "must be at least 1"), (["--peak", "1", "2", "3"], "--peak wants a number for each of --dtypes float32 bfloat16"),
    (["--device", "cuda:99"], "--device cuda:99: "), (["--cases", "image"], "pip install transformers")])
def test_what_cannot_be_measured_is_one_sentence(tiny, monkeypatch, capsys, words, said):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["bench", "step", *words])
    with pytest.raises(SystemExit) as e:
        command.main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("tools.bench: ") and said in err and err.count("\n") == 1
