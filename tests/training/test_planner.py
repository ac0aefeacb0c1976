"""The packs of a step only depend on the seed and the step number. Planning is resumed exactly,
also from a plan file."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from records.errors import DataError
from records.mixture import Mixture
from records.reader import Records
from tests.records.samples import write
from tests.training.runs import assert_same_run, logged, run
from tests.training.stream import CONFIG, TOKENIZER, planner_of, write_texts
from tools import plan as plan_tool
from toy import world
from training.config import parse
from training.planner import BadRecords, PlanFile, StepPlanner, measure
from training.setup import find_start
from training.sources import fingerprint, open_sources

FLAGS = ["--stage=2", "--tiny", "--batch=4", "--pool_size=9", "--data.max_tokens=700",
         "--deterministic", "--device=cpu", "--model.n_layer=1", "--steps=3"]


class FakeFile(list):
    name = "a.jsonl"


def mixed(files):
    return ["--data", f"{files[0]}=0.7", f"{files[1]}=0.3"]


def test_a_source_of_which_too_much_is_skipped_stops_the_run(tmp_path):
    """It stops after 100 skipped records of one source if their share is above --max-skip."""
    bad = "b" * 5000
    few = write_texts(tmp_path / "few.jsonl", [bad] * 4 + ["a"] * 996)
    many = write_texts(tmp_path / "many.jsonl", [bad] * 400 + ["a"] * 600)

    def planned(path, **changes):
        planner = planner_of([path, few], replace(CONFIG, **changes), [1, 1])
        while planner.planner.next_index < 600:
            next(planner)
        return planner.skipped

    assert planned(few).tried["few.jsonl"] >= 600
    message = (r"100 of \d+ draws from many.jsonl gave a record that could not be used, the last "
               r"\d+ of them in a row. The last one is .*many.jsonl:\d+: too long: .*--resume. "
               r"--max-skip ")
    with pytest.raises(DataError, match=message):
        planned(many)
    assert planned(many, max_skip=0.8).counts["many.jsonl"]["too long"] > 100


def test_a_hundred_unusable_records_in_a_row_stop_planning_after_a_resume_too(tmp_path):
    """For example, the images of one file of a mixture are in another folder."""
    files = [write_texts(tmp_path / "good.jsonl", ["a"] * 50),
             write_texts(tmp_path / "bad.jsonl", ["b" * 5000] * 50)]
    config = replace(CONFIG, batch=1, max_skip=1.0)
    first = planner_of(files, config)
    state = next(first).state
    n_bad = state["skipped"]["in_a_row"]["bad.jsonl"]
    with pytest.raises(DataError, match=r"100 of 100 draws from bad\.jsonl .* last 100 of them"):
        list(first)
    again = planner_of(files, config)
    again.restore(state)
    with pytest.raises(DataError, match="the last 100 of them in a row"):
        list(again)
    assert 0 < n_bad < 100
    assert again.planner.next_index == first.planner.next_index
    # with other data the position stays, and the pool does not
    again.restore(state, same_data=False)
    assert again.planner.state() == state["planner"] | {"pool": []}


@pytest.mark.parametrize(("annotation", "kind"), [
    ({"type": "text", "text": "x" * 5000}, "too long: "),
    ({"type": "qa", "weight": 0, "question": "?", "answer": "x"}, "nothing to train on: "),
    ({"type": "qa", "turns": [{"question": "?", "answer": "x", "weight": 0}]},
     "nothing to train on: "),
    ({"type": "caption", "style": "transcript", "text": "so um"},
     "nothing to train on: "),  # stage 2 uses no transcripts
    ({"type": "point", "label": "dots", "coords": "percent",
      "points": [{"x": k, "y": k} for k in range(61)]}, "too many points: "),
])
def test_what_is_skipped_is_skipped_for_the_right_reason(files, annotation, kind):
    visual = {} if annotation["type"] in ("text", "qa") else {"image": "0.png"}
    path = write(Path(files[0]).parent / "why.jsonl", {**visual, "annotations": [annotation]})
    found = measure(Mixture([Records(path)], [1], 0), TOKENIZER, CONFIG, 0)
    assert found.reason.startswith(kind)


@pytest.fixture(scope="module")
def made(files, tmp_path_factory):
    """A plan file of 14 packs."""
    path = tmp_path_factory.mktemp("plan") / "plan.npz"
    for n in ("1", "14"):                                # the second plan replaces the first
        plan_tool.main(["--packs", n, f"--out={path}", *FLAGS, *mixed(files)])
    return path


def opened(*flags):
    """-> sources, rates, tokenizer and config of a run with these flags."""
    args, config = parse([*FLAGS, *flags])
    start, config = find_start(args, config)
    generated = world.mixture(config.seed, config.stage)
    return *open_sources(args, config, generated)[:2], start.tokenizer, config


def open_plan(path, *flags):
    run = opened(*flags)
    return PlanFile(path, fingerprint(*run), run[-1])


@pytest.mark.slow
def test_a_run_from_a_plan_is_the_run_without(files, tmp_path):
    """Loss, norms, ids, skipped records and unreadable records are bit-identical. Three processes
    make the plan."""
    assert run(tmp_path / "a", *FLAGS, *mixed(files)) == 0
    plan = tmp_path / "exact.npz"
    plan_tool.main([*FLAGS, *mixed(files), "--workers=3", f"--out={plan}"])
    flags = [*FLAGS, *mixed(files), f"--plan={plan}", "--workers=2"]
    assert run(tmp_path / "b", *flags) == 0
    torch.use_deterministic_algorithms(False)
    assert_same_run(tmp_path / "b", tmp_path / "a")
    assert logged(tmp_path / "a")[3]["skipped"]


@pytest.mark.parametrize(("flags", "message"), [
    (["--seed=1"], "seed was 0 and is 1"),
    (["--model.vision.patch=9"], "data.vision"),
    (["--model.n_vocab=512"], "tokenizer"),
    (["--steps=5"], "14 packs"),
])
def test_a_plan_of_another_run_is_refused(files, made, flags, message):
    with pytest.raises(DataError, match=message):
        open_plan(made, *mixed(files), *flags)


def test_what_is_no_plan_is_refused(files, made, tmp_path):
    (tmp_path / "short.npz").write_bytes(made.read_bytes()[:300])
    for name in ("short.npz", "none.npz"):
        with pytest.raises(DataError, match=f"{name}: not a plan that tools.plan wrote"):
            open_plan(tmp_path / name, *mixed(files))


def test_a_plan_file_gives_the_steps_of_the_planner_and_is_resumed_exactly(files, made):
    sources, rates, tokenizer, config = opened(*mixed(files))
    planner = StepPlanner(Mixture(sources, rates, config.seed), tokenizer, config)
    plan_file = open_plan(made, *mixed(files))
    steps = []
    for _ in range(3):
        live = next(planner)
        steps.append(next(plan_file))
        assert replace(live, state={}) == replace(steps[-1], state={})
    again = open_plan(made, *mixed(files))
    again.restore(json.loads(json.dumps(steps[0].state)))
    assert [next(again) for _ in range(2)] == steps[1:]


def test_a_record_is_named_once_and_counted_whenever_it_is_drawn(capsys):
    bad = BadRecords("skipped", DataError, 0.5)
    for _ in range(3):
        bad.count(FakeFile([1]), "a.jsonl:1", "too long: 9 tokens")
    assert capsys.readouterr().err == "train.py: a.jsonl:1: too long: 9 tokens; skipped\n"
    assert bad.counts == {"a.jsonl": {"too long": 3}}


@pytest.mark.parametrize(("n_bad", "n_records", "stops"), [
    (1, 20, False), (99, 2000, False), (100, 2000, True), (100, 10_200, False), (2, 2, True)])
def test_a_few_damaged_images_end_no_run_and_a_hundred_do(n_bad, n_records, stops):
    """In 60 epochs, whose bad records are evenly spaced. The last row has bad records only."""
    bad = BadRecords("skipped", DataError, 0.01)
    file = FakeFile(range(n_records))
    with pytest.raises(DataError, match=r"^100 of ") if stops else nullcontext():
        for k in range(60 * n_records):
            is_bad = k * n_bad % n_records < n_bad
            bad.count(file, f"a.jsonl:{k % n_records}", "damaged: x" if is_bad else "")
