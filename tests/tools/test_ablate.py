"""tools.ablate: what it removes is gone and everything else stays; its runs in their order, and a
table that says what the logs say."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import train
import vision
from records.mixture import Mixture
from text.tokenizer import ByteTokenizer
from tools import ablate
from toy import world
from toy.videos import MovingShapes
from training.config import field_values, parse
from training.loader import Loader
from training.planner import StepPlanner
from training.sources import open_sources

ROOT = Path(__file__).parents[2]
TOKENIZER = ByteTokenizer(world.WORDS)
CONFIG = parse(["--stage", "2", "--tiny"])[1].data
INDEX = 5000
CHOICES = {choice.name: choice for choice in ablate.CHOICES}


@pytest.fixture
def remove(monkeypatch):
    """Removes a choice by its name, until the end of the test."""
    replaced = ((data, "build_tree"), (data, "layout"), (vision.Pool, "forward"),
                (vision, "frame_windows"), (world, "sqrt_size"), (world, "mixture"))
    for place, name in replaced:
        monkeypatch.setattr(place, name, getattr(place, name))       # restored at the end
    return lambda name: ablate.REMOVALS[name]()


def encode(epoch=0):
    return data.encode(MovingShapes("train")[INDEX], TOKENIZER, CONFIG, 0, epoch)


def test_without_trees_an_epoch_has_one_annotation_and_all_epochs_have_all(remove):
    with_trees = encode()
    record = MovingShapes("train")[INDEX]
    n = len(record["annotations"])
    assert with_trees.n_branches == n > 3
    answers = set()
    for until in np.unique(with_trees.visible_until):        # the end of a branch
        learned = (with_trees.visible_until == until) & (with_trees.weights > 0)
        answers.add(tuple(with_trees.targets[learned]))
    remove("trees")
    alone = [encode(epoch) for epoch in range(60)]
    assert all(example.n_branches == 1 for example in alone)
    assert all((example.weights > 0).any() for example in alone)
    assert {tuple(example.targets[example.weights > 0]) for example in alone} == answers
    size = data.size(record, TOKENIZER, CONFIG, 0, 3)
    assert size == (len(alone[3].tokens), len(with_trees.images))


def test_without_bidirectional_attention_everything_else_stays(remove):
    before = encode()
    remove("bidirectional")
    after = encode()
    assert before.bidir.any()
    assert not after.bidir.any()
    for name in ("tokens", "targets", "weights", "pos", "visible_until", "pool_src"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    image = np.zeros((100, 100, 3), np.uint8)
    prompt = data.encode_prompt([image], [("count: any shape", None)], TOKENIZER, CONFIG)
    assert not prompt.bidir.any()                            # nor in evaluation


def test_windows_of_4x4_pool_more_patches_into_fewer_tokens(remove):
    before = encode()
    remove("3x3-windows")
    after = encode()
    n_frames = len(before.images)
    for example, n_tokens in ((before, 16), (after, 9)):
        is_patch = example.tokens == TOKENIZER.special["im_patch"]
        assert is_patch.sum() == len(example.pool_dst) == n_tokens * n_frames
        # every patch of every frame once
        patches = example.pool_src[example.pool_src >= 0]
        assert sorted(patches) == list(range(100 * n_frames))
    assert after.pool_src.shape[1] == 16


def test_the_mean_of_a_window_replaces_attentional_pooling(remove):
    torch.manual_seed(0)
    shape = parse(["--stage", "1", "--tiny"])[1].model.vision
    pool = vision.Pool(shape)
    features = torch.randn(1, shape.n_patch, 2 * shape.n_embd)
    pool_src = torch.tensor([[0, 1, 2, 3], [4, 5, -1, -1]])
    attentional = pool(features, pool_src)
    remove("attentional-pooling")
    mean = pool(features, pool_src)
    assert torch.allclose(mean[1], pool.out(pool.v(features[0, 4:6].mean(0))), atol=1e-6)
    assert not torch.allclose(mean, attentional, atol=1e-3)


def test_without_the_square_root_shares_go_by_size(remove):
    _, before = world.mixture(0, 2)
    remove("square-root-mixture")
    _, after = world.mixture(0, 2)
    assert before[0] / before[1] == pytest.approx(3**0.5)
    assert after[0] / after[1] == pytest.approx(3)
    assert sum(after) == pytest.approx(1)
    assert sum(after[:2]) == pytest.approx(sum(before[:2]))


@pytest.mark.parametrize("flags", [CHOICES["packing"].flags, ()], ids=["without", "with"])
def test_without_packing_a_row_is_one_example(flags):
    args, config = parse(["--stage", "1", "--tiny", *flags])
    sources, rates, _ = open_sources(args, config)
    mixture = Mixture(sources, rates, config.seed)
    loader = Loader(mixture, TOKENIZER, config, StepPlanner(mixture, TOKENIZER, config))
    loader.begin()
    _, micro_batches = next(iter(loader))
    is_alone = [len(row) == 1 for rows in micro_batches for row in rows]
    assert all(is_alone) == bool(flags)


def test_the_control_of_the_long_stage_sees_videos_as_hard_and_as_many(remove):
    def sources(stage):
        return {source.name: source for source in world.mixture(0, stage)[0]}

    def share_of_videos(stage):
        found, rates = world.mixture(0, stage)
        return sum(rate for source, rate in zip(found, rates, strict=True)
                   if isinstance(source, MovingShapes))

    stage2 = sources(2)
    stage3 = sources(3)
    remove("long-context")
    control = sources(2)
    assert set(control) == set(stage2)
    assert len(stage2["films-train-all-6"].video(5)["objects"]) == 1     # of its curriculum
    for name, source in control.items():
        assert source.fingerprint == stage3[name].fingerprint
    assert share_of_videos(2) == pytest.approx(share_of_videos(3))


def test_the_control_of_the_long_stage_differs_in_the_length_of_rows_and_videos_only():
    flags = ["--stage", "3", "--tiny", "--steps", "200", "--save-every", "0"]
    long = field_values(parse(flags)[1])
    control = field_values(parse([*flags, *CHOICES["long-context"].flags])[1])
    assert {name for name in long if long[name] != control[name]} == {
        "stage", "batch", "micro_batch", "pack_crops", "data.max_tokens", "data.max_frames"}
    for values in (long, control):
        assert values["batch"] * values["data.max_tokens"] == 2048


def test_every_choice_is_removed_by_flags_of_train_or_by_a_replacement():
    for choice in ablate.CHOICES:
        flags = ["--stage", str(ablate.STAGES[choice.family]), "--tiny"]
        assert (parse(flags)[1] != parse([*flags, *choice.flags])[1]) == bool(choice.flags)
        assert choice.flags or choice.name in ablate.REMOVALS


def test_the_command_trains_without_the_choice(monkeypatch, remove):
    seen = []
    monkeypatch.setattr(train, "main", lambda flags: seen.append((flags, encode().n_branches)))
    ablate.main(["run", "trees", "--stage", "1"])
    assert seen == [(["--stage", "1"], 1)]


# ------------------------------------------------------------------------------------------------
# runs and their comparison


def options(out, only=None, seeds=1, **baselines):
    return argparse.Namespace(only=only, seeds=seeds, steps=2, images=1, device="cpu", out=out,
                              baselines=baselines)


def test_a_family_starts_from_the_run_of_the_one_before_with_all_choices(tmp_path):
    runs = ablate.plan_runs(options(tmp_path, ["trees", "long-context"]))
    assert [run.out.name for run in runs] == [
        "images-all-2-steps-seed-0", "images-without-trees-2-steps-seed-0",
        "videos-all-2-steps-seed-0", "long-all-2-steps-seed-0",
        "long-without-long-context-2-steps-seed-0"]
    images, _, videos, *_ = [str(run.out) for run in runs]
    parsed = [parse(run.flags) for run in runs]
    assert [args.init for args, _ in parsed] == [None, None, images, videos, videos]
    assert [config.stage for _, config in parsed] == [1, 1, 2, 3, 2]
    assert [run.choice for run in runs] == ["all", "trees", "all", "all", "long-context"]
    assert all(config.workers == 0 for _, config in parsed)
    runs = ablate.plan_runs(options(tmp_path, ["long-context"], videos="x"))
    assert [parse(run.flags)[0].init for run in runs] == ["x", "x"]      # and none before


def test_a_finished_run_is_not_repeated_and_one_that_fails_ends_all(tmp_path, monkeypatch, capsys):
    begun = []

    def pretend(command, stdout):
        begun.append(Path(command[-1]).name)
        return argparse.Namespace(returncode=7 if "trees" in command else 0)

    monkeypatch.setattr(subprocess, "run", pretend)
    write_run(options(tmp_path), None, 0, 0.8, 12)
    flags = ["--only", "packing,trees", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        ablate.main([*flags, "--images", "1"])
    assert end.value.code == 1
    assert begun == ["images-without-packing-2-steps-seed-0", "images-without-trees-2-steps-seed-0"]
    assert "without-trees-2-steps-seed-0 ended with status 7" in capsys.readouterr().err


def write_run(args, choice, seed, score, n_examples):
    lines = [{"config": {}}]
    for step, seconds in zip(range(1, 4), (1, 2, 9), strict=True):
        lines.append({"step": step, "loss": 1.0, "lr": {}, "examples": n_examples, "tokens": 90,
                      "crops": 7, "seconds": seconds})
    lines.append({"step": 3, "seconds": 1, "eval": {"point_f1": score}})
    path = ablate.run_path(args, "images", choice, seed)
    path.mkdir()
    (path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.mark.parametrize(("scores", "verdict"), [
    (((0.8, 0.5), (0.9, 0.7), (0.7, 0.45)), "agrees"),
    (((0.5, 0.8), (0.7, 0.9), (0.45, 0.7)), "disagrees"),
    (((0.8, 0.5), (0.9, 1.0), (0.7, 0.45)), "cannot tell"),
    (((0.8, 0.5),), "cannot tell"),
])
def test_the_verdict_needs_a_difference_of_pairs_beyond_its_error(tmp_path, capsys, scores,
                                                                  verdict):
    packing = CHOICES["packing"]
    args = options(tmp_path, seeds=len(scores))
    for seed, (with_it, without) in enumerate(scores):
        write_run(args, None, seed, with_it, 12)
        write_run(args, packing, seed, without, 4)
    row = ablate.compare(packing, "point_f1", args)
    gains = [a - b for a, b in scores]
    assert row["difference"] == pytest.approx(np.mean(gains))
    if len(gains) > 1:
        assert row["error"] == pytest.approx(np.std(gains, ddof=1) / len(gains) ** 0.5)
    assert row["verdict"] == verdict
    ablate.print_report(args)
    first, with_it, without, last = capsys.readouterr().out.splitlines()
    assert first.endswith(f"({len(scores)} seeds)  {verdict}")
    assert with_it.split()[2:6] == ["with", "packing", "12.0", "examples,"]
    assert without.split()[2:6] == ["without", "packing", "4.0", "examples,"]
    assert with_it.endswith("2.000 s")                   # the median
    assert json.loads(last)["rows"] == [row]


@pytest.mark.slow
def test_it_trains_compares_and_does_not_repeat_finished_runs(tmp_path):
    command = [sys.executable, "-m", "tools.ablate", "--only", "trees", "--seeds", "1",
               "--steps", "2", "--images", "1", "--out", str(tmp_path / "out")]
    begun = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        begun.append(done.stderr.count("writes to "))            # in the head of a run
    assert begun == [2, 0]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert {row["choice"] for row in rows} == {"trees"}
    assert {row["verdict"] for row in rows} == {"cannot tell"}
