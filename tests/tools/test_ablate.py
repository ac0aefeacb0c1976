"""tools.ablate: its runs and their order, its refusals, and a table that says what the logs say."""

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools import ablate
from tools.ablations import CHOICES
from training.config import parse

ROOT = Path(__file__).parents[2]
PACKING = CHOICES[0]


def options(out, only=None, seeds=1, steps=2):
    return argparse.Namespace(only=only, seeds=seeds, steps=steps, images=1, device="cpu", out=out)


def run_of(out, start=None):
    return ablate.Run(out, start, "all", ["x"])


# ------------------------------------------------------------------------------------------------
# runs


def test_a_family_starts_from_the_run_of_the_one_before_with_all_choices(tmp_path):
    runs = ablate.plan_runs(options(tmp_path, "trees,long-context"), {})
    assert [run.out.name for run in runs] == [
        "images-all-0", "images-without-trees-0", "videos-all-0", "long-all-0",
        "long-without-long-context-0"]
    starts = [run.start and run.start.name for run in runs]
    assert starts == [None, None, "images-all-0", "videos-all-0", "videos-all-0"]
    assert [parse(run.flags)[1].stage for run in runs] == [1, 1, 2, 3, 2]
    assert [run.choice for run in runs] == ["all", "trees", "all", "all", "long-context"]
    assert all(parse(run.flags)[1].workers == 0 for run in runs)


def test_a_given_run_stands_for_its_family_and_those_before(tmp_path):
    runs = ablate.plan_runs(options(tmp_path, "long-context"), {"videos": "x"})
    assert [run.out.name for run in runs] == ["long-all-0", "long-without-long-context-0"]
    assert {run.start for run in runs} == {Path("x")}


def write_head(run, config, init):
    """The log of a run that has begun."""
    run.out.mkdir(exist_ok=True)
    head = {"command": {"init": init}, "config": config}
    (run.out / "log.jsonl").write_text(json.dumps(head) + "\n")


def test_runs_with_other_settings_are_refused(tmp_path, capsys):
    run, _ = ablate.plan_runs(options(tmp_path, "trees"), {})
    write_head(run, {
        "steps": 3,
        "eval_images": 100,
        "lr": {"vit": 5e-5, "connector": 9.0, "llm": 1e-3},
        "data": {"max_tokens": 512, "point_weight": 0.5},
    }, "elsewhere")
    with pytest.raises(SystemExit) as refused:
        ablate.main(["--only", "trees", "--seeds", "1", "--out", str(tmp_path)])
    assert refused.value.code == 2
    changed = ("init elsewhere, not None, steps 3, not 800, lr.connector 9.0, not 0.001, "
               "data.point_weight 0.5, not 1.0")
    message = capsys.readouterr().err
    assert f"images-all-0 was made with other settings ({changed}); name another --out" in message


def test_a_run_as_train_left_it_has_the_same_settings(tmp_path):
    for run in ablate.plan_runs(options(tmp_path), {}):
        args, config = parse(run.flags)
        # train.py fits these to the machine
        config = dataclasses.replace(config, micro_batch=1, workers=3)
        write_head(run, dataclasses.asdict(config), args.init)
        assert ablate.changed_settings(run) == []
        other = run._replace(flags=[*run.flags, "--lr.llm=0.9"])
        (changed,) = ablate.changed_settings(other)
        assert changed.startswith("lr.llm 0.00")


@pytest.mark.parametrize(("flags", "message"), [
    (["--steps", "0"], "--steps: must be at least 1, not 0"),
    (["--seeds", "0"], "--seeds: must be at least 1, not 0"),
    (["--images", "0"], "--images: must be at least 1, not 0"),
    (["--jobs", "0"], "--jobs: must be at least 1, not 0"),
    (["--init", "movies=x"], "--init movies=x: needs images or videos"),
    (["--only", "trees,colours"], "--only colours: choose from packing, trees"),
])
def test_a_mistake_is_one_sentence_with_status_2(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as refused:
        ablate.main([*flags, "--out", str(tmp_path)])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [1, 3])
def test_runs_wait_for_their_start_and_one_that_fails_ends_all(tmp_path, monkeypatch, jobs):
    begun = []
    ended = []

    def pretend(command, stdout, check):
        name = Path(command[-1]).name
        begun.append(name)
        assert check
        assert name != "b" or "a" in ended               # b starts from a
        if name == "c":
            raise subprocess.CalledProcessError(7, command)
        ended.append(name)

    monkeypatch.setattr(subprocess, "run", pretend)
    runs = [run_of(tmp_path / "a", tmp_path / "elsewhere"), run_of(tmp_path / "b", tmp_path / "a")]
    ablate.perform(runs, jobs)
    assert begun == ended == ["a", "b"]
    begun.clear()
    with pytest.raises(SystemExit, match="c ended with 7"):
        ablate.perform([run_of(tmp_path / "c"), run_of(tmp_path / "d", tmp_path / "c")], jobs)
    assert begun == ["c"]                                # d, which starts from c, did not begin


@pytest.mark.parametrize(("error", "ends"), [
    (subprocess.CalledProcessError(7, ["x", "bad"]), SystemExit),
    (KeyboardInterrupt(), KeyboardInterrupt),
])
def test_after_a_failure_or_ctrl_c_nothing_more_begins(tmp_path, monkeypatch, error, ends):
    """With a long run before it, and others behind it that do not need it."""
    begun = []
    release = threading.Event()

    def pretend(command, **options):
        name = Path(command[-1]).name
        begun.append(name)
        if name == "bad":
            raise error
        assert release.wait(60)

    monkeypatch.setattr(subprocess, "run", pretend)
    threading.Timer(1, release.set).start()
    with pytest.raises(ends):
        ablate.perform([run_of(tmp_path / name) for name in ("long", "bad", "d", "e")], 2)
    assert {"long", "bad"} <= set(begun) <= {"long", "bad", "d"}


# ------------------------------------------------------------------------------------------------
# comparisons


def write_run(out, choice, seed, score, n_examples):
    lines = [{"commit": f"abc{seed}"}]
    for step, seconds in zip(range(1, 4), (1, 2, 9), strict=True):
        lines.append({"step": step, "loss": 1.0, "lr": {}, "examples": n_examples, "tokens": 90,
                      "crops": 7, "seconds": seconds})
    scores = {"point_f1": score, "unseen": {"point_f1": 0}}
    lines.append({"step": 3, "seconds": 1, "eval": scores})
    path = ablate.run_path(out, "images", choice, seed)
    path.mkdir()
    (path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.fixture
def finished(tmp_path):
    """Three pairs of runs, with and without packing."""
    for seed, (with_it, without) in enumerate(((0.8, 0.5), (0.9, 0.7), (0.7, 0.45))):
        write_run(tmp_path, None, seed, with_it, 12)
        write_run(tmp_path, PACKING, seed, without, 4)
    return tmp_path


def test_comparisons_are_of_pairs_with_the_same_seed(finished):
    (row,) = ablate.compare(PACKING, 3, finished)
    assert row.seeds == 3
    assert (row.with_it, row.without) == pytest.approx((0.8, 0.55))
    assert row.difference == pytest.approx(0.25)
    assert row.error == pytest.approx(0.05 / 3**0.5)
    (row,) = ablate.compare(PACKING, 1, finished)
    assert row.error is None


def test_the_verdict_needs_a_difference_beyond_its_error(finished):
    (row,) = ablate.compare(PACKING, 3, finished)
    assert row.verdict == "agrees"
    assert ablate.verdict(dataclasses.replace(row, difference=-0.25)) == "disagrees"
    assert ablate.verdict(dataclasses.replace(row, error=0.06)) == "cannot tell"
    assert ablate.verdict(dataclasses.replace(row, error=None)) == "cannot tell"


def test_the_cost_of_a_step_and_other_programs_are_told(finished, capsys):
    path = ablate.run_path(finished, "images", None, 0)
    assert ablate.cost(path) == {"examples": 12, "tokens": 90, "crops": 7, "seconds": 2}
    ablate.print_costs(PACKING, 3, finished)
    printed = capsys.readouterr()
    with_it, without = printed.out.splitlines()
    assert with_it.split()[2:6] == ["with", "packing", "12.0", "examples,"]
    assert without.split()[2:6] == ["without", "packing", "4.0", "examples,"]
    assert "different programs, abc0, abc1, abc2" in printed.err


@pytest.mark.slow
def test_it_trains_compares_and_does_not_repeat_finished_runs(tmp_path):
    command = [sys.executable, "-m", "tools.ablate", "--only", "trees", "--seeds", "1",
               "--steps", "2", "--images", "1", "--out", str(tmp_path / "out")]
    begun = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        begun.append([line for line in done.stderr.splitlines()
                      if line.endswith("-0") and " " not in line])
    assert begun == [["images-all-0", "images-without-trees-0"], []]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert {row["choice"] for row in rows} == {"trees"}
    assert {row["verdict"] for row in rows} == {"cannot tell"}
