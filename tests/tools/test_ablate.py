"""tools.ablate: only the chosen design choice is removed, runs have the right order, and the table
agrees with the logs."""

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
from evaluation.prompts import encode_prompt
from model import TOY_VISION
from text.tokenizer import ByteTokenizer
from tools import ablate
from toy import world
from toy.videos import MovingShapes
from training.config import parse

ROOT = Path(__file__).parents[2]
TOKENIZER = ByteTokenizer(world.WORDS)
CONFIG = parse(["--stage", "2", "--tiny"])[1].data
INDEX = 5000
CHOICES = ablate.CHOICES


@pytest.fixture
def remove(monkeypatch):
    """remove(name) removes a design choice until the end of the test."""
    replaced = ((data, "build_tree"), (data, "layout"), (vision.Pool, "forward"),
                (vision, "frame_windows"), (world, "sqrt_size"), (world, "mixture"))
    for place, name in replaced:
        monkeypatch.setattr(place, name, getattr(place, name))       # restored at the end
    return lambda name: CHOICES[name].remove()


def encode(epoch=0):
    return data.encode(MovingShapes("train")[INDEX], TOKENIZER, CONFIG, TOY_VISION, 0, epoch)


def test_without_trees_an_epoch_has_one_annotation_and_all_epochs_have_all(remove):
    with_trees = encode()
    assert with_trees.n_branches > 3
    answers = set()
    for until in np.unique(with_trees.visible_until):        # where a branch ends
        learned = (with_trees.visible_until == until) & (with_trees.weights > 0)
        answers.add(tuple(with_trees.targets[learned]))
    remove("trees")
    alone = [encode(epoch) for epoch in range(60)]
    assert all(example.n_branches == 1 for example in alone)
    assert {tuple(example.targets[example.weights > 0]) for example in alone} == answers
    size = data.size(MovingShapes("train")[INDEX], TOKENIZER, CONFIG, TOY_VISION, 0, 3)
    assert size == (len(alone[3].tokens), len(with_trees.images))


def test_without_bidirectional_attention_everything_else_stays(remove):
    before = encode()
    remove("bidirectional")
    after = encode()
    assert before.bidir.any() and not after.bidir.any()
    for name in ("tokens", "targets", "weights", "pos", "visible_until", "pool_src"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    image = np.zeros((100, 100, 3), np.uint8)
    turns = [("count: any shape", None)]
    prompt = encode_prompt([image], turns, TOKENIZER, CONFIG, TOY_VISION)
    assert not prompt.bidir.any()                            # also in evaluation


def test_windows_of_4x4_pool_more_patches_into_fewer_tokens(remove):
    before = encode()
    remove("3x3-windows")
    after = encode()
    n_frames = len(before.images)
    for example, n_tokens in ((before, 16), (after, 9)):
        is_patch = example.tokens == TOKENIZER.special["im_patch"]
        assert is_patch.sum() == len(example.pool_dst) == n_tokens * n_frames
        # the windows contain every patch of every frame once
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


def test_the_control_of_the_long_stage_sees_videos_as_hard_and_as_many(remove):
    def mixture(stage):
        """-> {name: (source, sampling rate)} of the videos."""
        found = zip(*world.mixture(0, stage), strict=True)
        return {source.name: (source, rate) for source, rate in found
                if isinstance(source, MovingShapes)}

    stage3 = mixture(3)
    remove("long-context")
    control = mixture(2)
    assert sum(rate for _, rate in control.values()) == pytest.approx(
        sum(rate for _, rate in stage3.values()))
    for name, (source, _) in control.items():
        assert source.fingerprint == stage3[name][0].fingerprint
    assert len(control["films-train-all-6"][0].video(5)["objects"]) == 1     # as in its curriculum


def test_the_command_trains_without_the_choice(monkeypatch, remove):
    seen = []
    monkeypatch.setattr(train, "main", lambda flags: seen.append((flags, encode().n_branches)))
    monkeypatch.setattr(ablate, "end_with_parent", lambda: seen.append("ends with the command"))
    ablate.train_without("trees", ["--stage", "1"])
    assert seen == ["ends with the command", (["--stage", "1"], 1)]


def test_only_a_run_is_overwritten(tmp_path, monkeypatch):
    flags = []

    class Process:
        exitcode = 0
        start = join = lambda self: None

        def __init__(self, target, args):
            flags.append(args[1])

    monkeypatch.setattr(ablate, "process_context", lambda: argparse.Namespace(Process=Process))
    run = ablate.plan_runs(options(tmp_path, ["packing"]))[0]
    run.out.mkdir()
    (run.out / "notes").write_text("mine")
    ablate.perform(run)
    assert (run.out / "notes").exists()
    (run.out / "config.json").write_text("{}")           # as an interrupted run leaves it
    ablate.perform(run)
    assert ["--overwrite" in each for each in flags] == [False, True]


def options(out, only=CHOICES, seeds=1):
    return argparse.Namespace(only=only, seeds=seeds, steps=2, images=1, out=out)


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
    assert [run.name for run in runs] == ["all", "trees", "all", "all", "long-context"]
    assert all(config.workers == 0 for _, config in parsed)
    runs = ablate.plan_runs(options(tmp_path, ["long-context"], seeds=2))
    assert [parse(run.flags)[0].init for run in runs if run.out.name.startswith("videos")] == [
        str(tmp_path / f"images-all-2-steps-seed-{seed}") for seed in (0, 1)]


def write_run(args, name, seed, score):
    path = ablate.run_path(args, "images", name, seed)
    path.mkdir()
    line = {"step": 3, "seconds": 1, "eval": {"point_f1": score, "long": {"qa_accuracy": 0.5}}}
    (path / "log.jsonl").write_text(json.dumps(line) + "\n")
    assert ablate.final_scores(path)["long.qa_accuracy"] == 0.5


@pytest.mark.parametrize(("scores", "verdict"), [
    (((0.8, 0.5), (0.9, 0.7), (0.7, 0.45)), "agrees"),
    (((0.5, 0.8), (0.7, 0.9), (0.45, 0.7)), "disagrees"),
    (((0.8, 0.5), (0.9, 1.0), (0.7, 0.45)), "cannot tell"),
    (((0.8, 0.5),), "cannot tell"),
])
def test_the_verdict_needs_a_difference_of_pairs_beyond_its_error(tmp_path, capsys, scores,
                                                                  verdict):
    args = options(tmp_path, seeds=len(scores))
    for seed, (with_it, without) in enumerate(scores):
        write_run(args, "all", seed, with_it)
        write_run(args, "packing", seed, without)
    ablate.print_report(args)
    _, first, last = capsys.readouterr().out.splitlines()
    assert first.endswith(f"  {verdict}")
    (row,) = json.loads(last)["rows"]
    gains = [a - b for a, b in scores]
    assert row["difference"] == pytest.approx(np.mean(gains))
    if len(gains) > 1:
        assert row["error"] == pytest.approx(np.std(gains, ddof=1) / len(gains) ** 0.5)


@pytest.mark.slow
def test_it_trains_compares_and_does_not_repeat_finished_runs(tmp_path):
    command = [sys.executable, "-m", "tools.ablate", "--only", "trees", "--seeds", "1",
               "--steps", "2", "--images", "1", "--out", str(tmp_path / "out")]
    begun = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        begun.append(done.stderr.count("writes to "))            # printed at the start of a run
    assert begun == [2, 0]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert {(row["choice"], row["verdict"]) for row in rows} == {("trees", "cannot tell")}
