"""What tools.ablate takes away is gone, and nothing else; its table says what the runs' logs say."""

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import mixture
import train
import vision
from tools import ablate
from toy import videos as films
from toy import world as tiny

TOKENIZER = data.ByteTokenizer(tiny.WORDS)
CONFIG = train.parse(["--stage", "2", "--tiny"])[1].data


@pytest.fixture
def without(monkeypatch):
    """take_away, undone at the end of the test."""
    for module, name in ((films, "mixture"), (data, "arrange"), (data, "layout"), (vision.Pool, "forward"), (vision, "frame_windows"),
                         (mixture, "share")):
        monkeypatch.setattr(module, name, getattr(module, name))
    return ablate.take_away


def encoded(i=5000, epoch=0):
    return data.encode(films.Films("train")[i], TOKENIZER, CONFIG, 0, epoch)


def test_without_trees_a_draw_shows_one_annotation_and_in_time_all(without):
    with_trees, branches = encoded(), len(films.Films("train")[5000]["annotations"])
    assert with_trees.branch.max() == branches > 3
    without("trees")
    draws = [encoded(epoch=epoch) for epoch in range(60)]
    assert all(e.branch.max() == 0 and (e.weights > 0).any() for e in draws)
    answer = lambda e, branch: tuple(e.targets[(e.weights > 0) & (e.branch == branch)])       # noqa: E731
    assert {answer(e, 0) for e in draws} == {answer(with_trees, j + 1) for j in range(branches)}
    assert data.size(films.Films("train")[5000], TOKENIZER, CONFIG, 0, 3) == (len(draws[3].tokens), len(with_trees.images))


def test_without_bidirectional_attention_all_else_stays(without):
    before = encoded()
    without("bidirectional")
    after = encoded()
    assert before.bidir.any() and not after.bidir.any()
    for name in ("tokens", "targets", "weights", "pos", "branch", "pool_src"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
    prompt = data.encode_prompt([np.zeros((100, 100, 3), np.uint8)], [("count: any shape", None)], TOKENIZER, CONFIG)
    assert not prompt.bidir.any()        # nor when it is asked


def test_windows_of_4x4_pool_more_patches_into_fewer_tokens(without):
    before = encoded()
    without("3x3 windows")
    after, frames = encoded(), len(before.images)
    patch = TOKENIZER.special["im_patch"]
    assert [(e.tokens == patch).sum() for e in (before, after)] == [16 * frames, 9 * frames] == [len(e.pool_dst) for e in (before, after)]
    assert after.pool_src.shape[1] == 16
    for e in (before, after):            # every patch of every frame once
        assert sorted(e.pool_src[e.pool_src >= 0]) == list(range(100 * frames))


def test_the_mean_of_a_window_does_not_look_where_it_pools(without):
    torch.manual_seed(0)
    pool = vision.Pool(tiny_vision := train.parse(["--stage", "1", "--tiny"])[1].model.vision)
    features = torch.randn(1, tiny_vision.n_patch, 2 * tiny_vision.n_embd)
    source = torch.tensor([[0, 1, 2, 3], [4, 5, -1, -1]])
    attentional = pool(features, source)
    without("attentional pooling")
    mean = pool(features, source)
    assert torch.allclose(mean[1], pool.out(pool.v(features[0, 4:6].mean(0))), atol=1e-6)
    assert not torch.allclose(mean, attentional, atol=1e-3)


def test_a_linear_mixture_gives_shares_by_size(without):
    before = tiny.mixture(0, 2)[1]
    without("square-root mixture")
    after = tiny.mixture(0, 2)[1]
    assert before[0] / before[1] == pytest.approx(3**0.5) and after[0] / after[1] == pytest.approx(3)
    assert sum(after) == pytest.approx(1) and sum(after[:2]) == pytest.approx(sum(before[:2]))


def test_without_packing_a_row_is_one_example():
    (choice,) = [c for c in ablate.CHOICES if c.name == "packing"]
    for flags, alone in ((choice.flags, True), ((), False)):
        args, config = train.parse(["--stage", "1", "--tiny", *flags])
        sources, rates, _ = train.open_sources(args, config)
        loader = train.Loader(sources, rates, TOKENIZER, config)
        loader.begin()
        _, micro_batches = next(iter(loader))
        assert all(len(row) == 1 for rows in micro_batches for row in rows) == alone


def test_the_control_of_the_long_stage_sees_films_as_hard(without):
    in_stage = lambda stage: {s.name: s for s in tiny.mixture(0, stage)[0]}        # noqa: E731
    three, two = in_stage(3), in_stage(2)
    easy = two["films-train-all-6"].film(5)
    without("long context")
    control = in_stage(2)
    assert {*control} == {*two} and len(easy["objects"]) == 1
    assert all(control[name].fingerprint == three[name].fingerprint for name in control)
    moving = lambda stage: sum(r for s, r in zip(*tiny.mixture(0, stage), strict=True) if s.name.startswith(("films", "tracks", "long")))     # noqa: E731
    assert moving(2) == pytest.approx(moving(3))


def test_the_control_of_the_long_stage_differs_in_the_length_of_rows_and_films_alone():
    (choice,) = [c for c in ablate.CHOICES if c.name == "long context"]
    three, two = (train.plain_config(train.parse(["--stage", "3", "--tiny", "--steps", "200", "--save-every", "0", *flags])[1])
                  for flags in ((), choice.flags))
    assert {key for key in three if three[key] != two[key]} == {
        "stage", "batch", "micro_batch", "pack_crops", "data.max_tokens", "data.max_frames"}
    assert all(int(c["batch"]) * int(c["data.max_tokens"]) == 2048 for c in (two, three))


def test_runs_made_with_other_settings_are_not_taken_for_these(tmp_path, capsys):
    out = tmp_path / "pictures-all-0"
    out.mkdir()
    head = {"command": {"init": "elsewhere"}, "config": {"steps": 3, "eval_images": 100, "lr": {"vit": 5e-5, "connector": 9.0, "llm": 1e-3},
            "data": {"max_tokens": 512, "point_weight": 0.5}}}
    (out / "log.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(SystemExit):
        ablate.main(["--only", "trees", "--seeds", "1", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert "pictures-all-0 was made with other settings (steps 3, not 800, lr {" in said and "point_weight 0.5, not " in said
    assert f"init elsewhere, not {tmp_path / 'sighted-0'}" in said and "max_tokens" not in said and "eval_images" not in said
    # a run as train.py left it is taken for itself
    args = argparse.Namespace(only="long-context", seeds=1, steps=3, images=2, device="cpu", out=tmp_path)
    for name, _, words in ablate.runs_of(args, {}):
        assert words[words.index("--workers") + 1] == "0"
        given, config = train.parse(words[1:])
        config = train.join(config, config.model, torch.device("cpu"))[1]
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "log.jsonl").write_text(json.dumps({"config": dataclasses.asdict(config), "command": vars(given)}) + "\n")
        assert ablate.settings_of(tmp_path / name, words) == ""
        assert "lr {" in ablate.settings_of(tmp_path / name, [*words, "--lr.llm=9"])
    for flag in ("--steps", "--seeds", "--images", "--jobs"):
        with pytest.raises(SystemExit) as e:
            ablate.main([flag, "0", "--out", str(tmp_path)])
        assert e.value.code == 2 and f"{flag}: must be at least 1, not 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ablate.main(["--init", "movies=x", "--out", str(tmp_path)])
    assert "--init movies=x: a family" in capsys.readouterr().err


def test_choices_that_are_flags_are_flags_of_train_and_others_are_taken_away(without):
    for choice in ablate.CHOICES:
        stage, _ = ablate.FAMILIES[choice.family]
        _, config = train.parse(["--stage", stage, "--tiny"])
        _, other = train.parse(["--stage", stage, "--tiny", *choice.flags])
        assert (config != other) == bool(choice.flags)
        without(choice.name)
    with pytest.raises(ValueError, match="there are packing, trees"):
        without("colours")


def test_the_table_is_of_pairs_of_one_seed(tmp_path):
    choice = ablate.CHOICES[0]
    for seed, (everything, less) in enumerate(((0.8, 0.5), (0.9, 0.7), (0.7, 0.45))):
        for c, score in ((None, everything), (choice, less)):
            out = tmp_path / ablate.directory("pictures", c, seed)
            out.mkdir()
            ended = {"step": 3, "seconds": 1, "eval": {"point_f1": score, "unseen": {"point_f1": 0}}}
            steps = [{"step": k, "lr": {}, "examples": 12 if c is None else k, "tokens": 90, "crops": 7, "seconds": k} for k in (1, 2, 9)]
            (out / "log.jsonl").write_text("\n".join(map(json.dumps, [{"commit": f"abc{seed}"}, *steps, ended])) + "\n")
    (row,) = ablate.compare(choice, 3, tmp_path)
    assert row["commits"] == ["abc0", "abc1", "abc2"] and len(row["costs"]) == 3
    assert row["costs"][0] == [{"examples": n, "tokens": 90, "crops": 7, "seconds": 2} for n in (12, 4)]
    assert row["difference"] == pytest.approx(0.25) and row["error"] == pytest.approx(0.05 / 3**0.5) and row["seeds"] == 3
    assert ablate.verdict(row) == "agrees" and ablate.verdict(row | {"difference": -0.25}) == "disagrees"
    assert ablate.verdict(row | {"error": 0.06}) == ablate.verdict(row | {"error": None}) == "cannot tell"
    (row,) = ablate.compare(choice, 1, tmp_path)
    assert row["error"] is None


def test_a_family_starts_from_what_the_one_before_learned_with_all_choices(tmp_path):
    options = lambda only: argparse.Namespace(only=only, seeds=1, steps=2, images=1, device="cpu", out=tmp_path)       # noqa: E731
    runs = ablate.runs_of(options("trees,long-context"), {})
    names = ["pictures-all-0", "pictures-without-trees-0", "films-all-0", "long-all-0", "long-without-long-context-0"]
    assert [name for name, *_ in runs] == names
    starts = ["sighted-0", "sighted-0", "pictures-all-0", "films-all-0", "films-all-0"]
    assert [Path(start).name for _, start, _ in runs] == starts
    stages = [train.parse(words[1:])[1].stage for _, _, words in runs]
    assert stages == [1, 1, 2, 3, 2] and [words[0] for *_, words in runs] == ["", "trees", "", "", "long context"]
    assert [name for name, *_ in ablate.runs_of(options("long-context"), {"films": "x"})] == names[3:]


@pytest.mark.parametrize("jobs", [1, 3])
def test_runs_wait_for_their_start_and_one_that_fails_ends_all(tmp_path, monkeypatch, jobs, capfd):
    begun, ended = [], []

    def pretend(command, **how):
        begun.append(name := Path(command[-1]).name)
        assert how["check"] and (name != "b" or "a" in ended)            # b starts from a
        if name == "c":
            raise subprocess.CalledProcessError(7, command)
        ended.append(name)

    monkeypatch.setattr(subprocess, "run", pretend)
    runs = [("a", tmp_path / "elsewhere", ["", "x"]), ("b", tmp_path / "a", ["", "y"])]
    ablate.perform(runs, argparse.Namespace(out=tmp_path, jobs=jobs))
    assert begun == ended == ["a", "b"]
    begun.clear()
    with pytest.raises(SystemExit, match="c ended with 7"):
        ablate.perform([("c", tmp_path, ["", "x"]), ("d", tmp_path / "c", ["", "y"])], argparse.Namespace(out=tmp_path, jobs=jobs))
    assert begun == ["c"]                # what would have started from it did not


@pytest.mark.parametrize(("wrong", "ends"), [(subprocess.CalledProcessError(7, ["x", "bad"]), SystemExit),
                                             (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_failure_or_ctrl_c_is_noticed_at_once_and_begins_nothing_more(tmp_path, monkeypatch, wrong, ends):
    """One that takes long is ahead of it, others that do not need it behind it."""
    begun, go_on = [], threading.Event()

    def pretend(command, **how):
        begun.append(name := Path(command[-1]).name)
        if name == "bad":
            raise wrong
        assert go_on.wait(60)

    monkeypatch.setattr(subprocess, "run", pretend)
    threading.Timer(1, go_on.set).start()
    with pytest.raises(ends):
        ablate.perform([(name, tmp_path, ["", name]) for name in ("long", "bad", "d", "e")], argparse.Namespace(out=tmp_path, jobs=2))
    assert {"long", "bad"} <= {*begun} <= {"long", "bad", "d"}


@pytest.mark.slow
def test_it_runs_goes_on_where_it_was_stopped_and_tells(tmp_path):
    command = [sys.executable, "-m", "tools.ablate", "--only", "trees", "--seeds", "1", "--steps", "2", "--images", "1",
               "--out", str(tmp_path / "out")]
    done = [subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True) for _ in range(2)]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr
    names = [line for line in done[0].stderr.splitlines() if line.endswith("-0")]
    assert names == ["pictures-all-0", "pictures-without-trees-0"]
    assert not [line for line in done[1].stderr.splitlines() if line.endswith("-0")]
    rows = json.loads(done[1].stdout.splitlines()[-1])["rows"]
    assert {row["choice"] for row in rows} == {"trees"} and all(row["verdict"] == "cannot tell" for row in rows)
