"""Which packs form a step: a function of seed and number, resumed exactly, from a plan too."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import train
from records.errors import DataError
from records.mixture import Mixture
from records.reader import Records
from tests.training.stream import (
    CONFIG,
    TOKENIZER,
    planner_of,
    write_files,
)
from tools import plan as plan_tool
from training.config import parse
from training.planner import PlanFile, StepPlanner, measure
from training.setup import open_tokenizer
from training.sources import fingerprint, open_sources

ROOT = Path(__file__).parents[2]
FLAGS = ["--stage", "2", "--tiny", "--batch", "4", "--pool_size=9", "--data.max_tokens=700",
         "--vit_steps=0", "--deterministic", "--device", "cpu", "--model.n_layer=1", "--steps", "3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


def mixed(files):
    return ["--data", f"{files[0]}=0.7", f"{files[1]}=0.3"]


# --------------------------------------------------------------------------------------------------
# planning


def test_resuming_at_step_1000000_costs_what_it_costs_at_step_10(files):
    """Counted in records measured: those of the next step, and not one of those before."""
    asked = []

    def resumed(state):
        def counted(index):
            asked.append(index)
            return measure(mixture, TOKENIZER, CONFIG, index)

        mixture = Mixture([Records(f) for f in files], [0.7, 0.3], 0)
        planner = StepPlanner(mixture, TOKENIZER, CONFIG, counted)
        asked.clear()
        planner.restore(state)
        next(planner)
        return list(asked)

    planner = planner_of(files)
    plans = [next(planner) for _ in range(10)]
    state = json.loads(json.dumps(plans[-1].state))
    early = resumed(state)
    far = 20_000_000 - 20_000_000 % 1000             # the same place in its block
    for item in state["planner"]["pool"]:
        item[0] += far
        item[3] += 8_000_000
    state["ids"] = [[index + far, name] for index, name in state["ids"]]
    state["planner"]["next"] += far
    state["planner"]["packs"] += 8_000_000
    late = resumed(state)
    assert min(late) >= far
    assert abs(len(late) - len(early)) <= 20
    assert len(early) < 100


def text_files(folder, **texts):
    """Files of text records; texts: of each file."""
    for name, of_file in texts.items():
        records = [json.dumps({"annotations": [{"type": "text", "text": t}]}) for t in of_file]
        (folder / f"{name}.jsonl").write_text("\n".join(records))
    return [folder / f"{name}.jsonl" for name in texts]


def test_a_source_of_which_too_much_is_skipped_stops_the_run(tmp_path):
    """A hundred records that are more than --max_skip, and not because of another source."""
    bad = "b" * 5000
    few, many = text_files(tmp_path, few=[bad] * 4 + ["a"] * 996, many=[bad] * 400 + ["a"] * 600)

    def planned(path, **changes):
        planner = planner_of([path, few], replace(CONFIG, **changes), [1, 1])
        while planner.planner.next_index < 600:
            next(planner)
        return planner.skipped

    assert planned(few).tried["few.jsonl"] >= 600
    message = (r"100 of \d+ records of many.jsonl could not be used, the last \d+ in a row; the "
               r"last: .*many.jsonl:\d+: too long: ")
    with pytest.raises(DataError, match=message):
        planned(many)
    assert planned(many, max_skip=0.8).counts["many.jsonl"]["too long"] > 100


def test_a_hundred_unusable_records_in_a_row_stop_planning_after_a_resume_too(tmp_path):
    files = text_files(tmp_path, r=["a" * 650] * 4 + ["b" * 5000] * 396)

    class Ordered(Records):
        ordered = True                       # as they stand in the file: first the four that fit

    def make():
        planner = planner_of(files, replace(CONFIG, batch=1, max_skip=1.0), [1], reader=Ordered)
        planner.mixture.block = 1
        return planner

    first = make()
    with pytest.raises(DataError, match=r"100 of 104 records of r.jsonl .* the last 100 in a row"):
        next(first)
    again = make()
    state = again.state()
    state["planner"]["next"] = 64
    state["skipped"]["in_a_row"] = {"r.jsonl": 60}
    again.restore(state)
    with pytest.raises(DataError, match="the last 100 in a row"):
        next(again)
    assert again.planner.next_index == 103


def test_a_source_that_is_all_unusable_stops_the_run_whatever_the_others_are(tmp_path):
    """Such as a file of a mixture whose images lie elsewhere."""
    files = text_files(tmp_path, good=["a"] * 50, bad=["b" * 5000] * 50)
    planner = planner_of(files, replace(CONFIG, max_skip=1.0), rates=[0.7, 0.3])
    with pytest.raises(DataError, match=r"records of bad\.jsonl .* the last 100 in a row"):
        list(planner)
    assert planner.skipped.tried["good.jsonl"] > 200


def test_the_longest_wait_is_that_of_the_planner(files):
    arrived, longest = {}, []

    def noted(index):
        arrived[index] = planner.planner.n_packs
        return measure(planner.mixture, TOKENIZER, CONFIG, index)

    planner = planner_of(files, measure=noted)
    for _ in range(5):
        first = planner.planner.n_packs
        plan = next(planner)
        waits = [first + n - arrived[e.index] for n, pack in enumerate(plan.packs) for e in pack]
        longest.append(max(waits))
        assert plan.longest_wait == longest[-1]
    assert max(longest) > 0
    assert len(set(longest)) > 1


@pytest.mark.parametrize(("annotation", "kind"), [
    ({"type": "text", "text": "x" * 5000}, "too long: "),
    ({"type": "qa", "weight": 0, "question": "?", "answer": "x"}, "nothing to learn: "),
    ({"type": "qa", "turns": [{"question": "?", "answer": "x", "weight": 0}]},
     "nothing to learn: "),
    ({"type": "caption", "style": "transcript", "text": "so um"},
     "nothing to learn: "),          # not in stage 2
    ({"type": "point", "label": "dots", "coords": "percent",
      "points": [{"x": k, "y": k} for k in range(61)]}, "too many points: "),
])
def test_what_is_skipped_is_skipped_for_the_right_reason(files, annotation, kind):
    visual = {} if annotation["type"] in ("text", "qa") else {"image": "0.png"}
    path = Path(files[0]).parent / "why.jsonl"
    path.write_text(json.dumps({**visual, "annotations": [annotation]}))
    found = measure(Mixture([Records(path)], [1], 0), TOKENIZER, CONFIG, 0)
    assert found.reason.startswith(kind)


def test_warnings_name_a_skipped_record_once(files, capsys):
    planner = planner_of(files)
    for _ in range(8):
        next(planner)
    lines = [line for line in capsys.readouterr().err.splitlines() if "missing file" in line]
    assert lines
    assert len(lines) == len(set(lines))


# --------------------------------------------------------------------------------------------------
# plans made ahead


def run_tool(*flags):
    command = [sys.executable, "-m", "tools.plan", *FLAGS, *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def made(files, tmp_path_factory):
    """A plan file of 14 packs, and what the tool printed."""
    path = tmp_path_factory.mktemp("plan") / "plan.npz"
    args = plan_tool_args(path, 14)
    found = plan_tool.plan(args, *parse([*FLAGS, *mixed(files)]))
    return path, found


def plan_tool_args(path, packs):
    return type("Args", (), {"out": str(path), "packs": packs})


def open_plan(path, *flags):
    run, config = parse([*FLAGS, *flags])
    sources, rates, _ = open_sources(run, config)
    tokenizer, config = open_tokenizer(run, config)
    return PlanFile(path, fingerprint(sources, rates, tokenizer, config), config)


def log_of(out, *flags):
    train.main([*FLAGS, *map(str, flags), "--out", str(out)])
    train.torch.use_deterministic_algorithms(False)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_from_a_plan_is_the_run_without(files, tmp_path):
    """Bit for bit: loss, norms, ids, what was skipped and when, the report of what was masked."""
    plain = log_of(tmp_path / "a", *mixed(files))
    assert run_tool(*mixed(files), "--out", tmp_path / "exact.npz").returncode == 0
    with_plan = ["--plan", tmp_path / "exact.npz", "--workers", "2"]
    planned = log_of(tmp_path / "b", *mixed(files), *with_plan)
    assert plain == planned
    skips = {(tmp_path / name / "skips.jsonl").read_text() for name in "ab"}
    assert len(skips) == 1
    assert plain[-1]["dropped"]


@pytest.mark.slow
def test_a_plan_made_by_three_processes_is_the_one_made_by_one(files, made, tmp_path):
    path, found = made
    done = run_tool(*mixed(files), "--packs", 14, "--workers", 3, "--out", tmp_path / "plan.npz")
    assert done.returncode == 0, done.stderr
    assert {**json.loads(done.stdout.splitlines()[-1]), "out": ""} == {**found, "out": ""}
    one, three = np.load(path), np.load(tmp_path / "plan.npz")
    assert one.files == three.files
    assert all(np.array_equal(one[name], three[name]) for name in one.files)


def test_a_plan_holds_record_ids_and_no_pixels(files, made):
    path, found = made
    file = np.load(path)
    ids = bytes(file["ids"]).decode().split("\0")
    mixture = Mixture([Records(f) for f in files], [0.7, 0.3], 0)
    for index, name in zip(file["index"], ids, strict=True):
        source, i, _ = mixture[int(index)]
        assert mixture.sources[source][i]["id"] == name
    assert found["packs"] == 14 == len(file["ends"])
    assert found["examples"] == len(ids)
    assert path.stat().st_size < 200 * len(ids) + 3000
    assert 0.5 < found["fill_tokens"] <= 1


@pytest.mark.parametrize(("flags", "message"), [
    (["--seed", "1"], "seed was 0 and is 1"),
    (["--pool_size=10"], "pool_size was 9 and is 10"),
    (["--data.max_crops=2"], "data.max_crops"),
    (["--pack_crops=9"], "pack_crops was 32 and is 9"),
    (["--model.vision.patch=9"], "data.vision"),
    (["--model.n_vocab=512"], "tokenizer"),
    (["--steps", "5"], "14 packs"),
])
def test_a_plan_of_another_run_is_refused(files, made, flags, message):
    with pytest.raises(DataError, match=message):
        open_plan(made[0], *mixed(files), *flags)


def test_a_plan_of_other_data_is_refused(files, made):
    with pytest.raises(DataError, match="data"):
        open_plan(made[0], "--data", f"{files[0]}=0.5", f"{files[1]}=0.5")
    before = Path(files[1]).read_text()
    try:
        Path(files[1]).write_text(before.replace("!", "?", 1))
        with pytest.raises(DataError, match="data"):
            open_plan(made[0], *mixed(files))
    finally:
        Path(files[1]).write_text(before)


def test_what_is_no_plan_is_refused(files, made, tmp_path):
    whole = made[0].read_bytes()
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 no")
    np.savez(tmp_path / "y.npz", a=np.array([{}], object))
    np.save(tmp_path / "z.npy", np.zeros(3))
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("x.npz", "y.npz", "z.npy", "none.npz", "short.npz"):
        with pytest.raises(DataError, match=f"{name}: not a plan that tools.plan wrote"):
            open_plan(tmp_path / name, *mixed(files))


def test_a_resume_with_a_plan_is_not_one_without(files, made):
    plan_file, planner = open_plan(made[0], *mixed(files)), planner_of(files)
    with pytest.raises(DataError, match="--plan"):
        plan_file.restore(next(planner).state)
    with pytest.raises(DataError, match="--plan"):
        planner.restore(next(plan_file).state)


def test_a_planned_run_is_resumed_exactly(files, made):
    whole = [next(plan) for plan in [open_plan(made[0], *mixed(files))] for _ in range(3)]
    again = open_plan(made[0], *mixed(files))
    again.restore(json.loads(json.dumps(whole[0].state)))
    assert [next(again) for _ in range(2)] == whole[1:]


def test_a_plan_file_gives_the_steps_of_the_planner(files, made):
    run, config = parse([*FLAGS, *mixed(files)])
    sources, rates, _ = open_sources(run, config)
    tokenizer, config = open_tokenizer(run, config)
    planner = StepPlanner(Mixture(sources, rates, config.seed), tokenizer, config)
    plan_file = open_plan(made[0], *mixed(files))
    for _ in range(3):
        live, read = next(planner), next(plan_file)
        assert (live.packs, live.ids) == (read.packs, read.ids)
        assert live.longest_wait == read.longest_wait
        assert read.skipped == live.skipped


@pytest.mark.parametrize(("flags", "message"), [
    (["--out", "nowhere/plan.npz"], "name a file in a folder"),
    (["--out", "."], "name a file in a folder"),
    (["--packs", "0"], "at least 1"),
])
def test_a_mistake_is_told_before_anything_is_planned(files, tmp_path, capsys, flags, message):
    out = [] if "--out" in flags else ["--out", str(tmp_path / "p.npz")]
    with pytest.raises(SystemExit) as ended:
        plan_tool.main([*FLAGS, *mixed(files), *out, *flags])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in err
    assert "pack/s" not in err


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("s1", "s2"):
        (tmp_path / folder).mkdir()
        lines = [json.dumps({"annotations": [{"type": "text", "text": f"{folder} {i}"}]})
                 for i in range(20)]
        (tmp_path / folder / "r.jsonl").write_text("\n".join(lines))
    paths = [str(tmp_path / folder / "r.jsonl") for folder in ("s1", "s2")]
    args, config = parse(["--stage", "1", "--tiny", "--data", *paths])
    sources, rates, _ = open_sources(args, config)
    assert [s.name for s in sources] == ["s1/r.jsonl", "s2/r.jsonl"]
    assert sources[1][3]["id"] == "s2/r.jsonl:4"
    mixture = Mixture(sources, rates, 0)
    drawn = [mixture[i] for i in range(1000)]
    orders = [[i for source, i, _ in drawn if source == k] for k in (0, 1)]
    assert orders[0][:20] != orders[1][:20]
