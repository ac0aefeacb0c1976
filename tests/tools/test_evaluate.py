"""tools.evaluate: metrics in the last line, predictions.jsonl, scores by number of frames, and one
sentence for a mistake."""

import argparse
import json
import subprocess
import sys

import numpy as np
import pytest

from evaluation import evaluate as evaluation
from evaluation.generate import Sampling
from tests.evaluation.answers import clip_with_masks
from tests.evaluation.small_model import DATA, MEDIA, save_run
from tests.full_disk import files_up_to
from tests.records.samples import QA, image, video, write
from tests.test_layout import ROOT
from tests.tools.command import run_main
from tools import evaluate, toy
from toy.images import World


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def call(saved_run, tmp_path):
    """call(*flags) -> exit status, lines on stdout, lines on stderr, predictions"""

    def run(*flags):
        status, out, err = run_main(evaluate.main, "--model", saved_run, "--out", tmp_path / "out",
                                    "--overwrite", *flags)
        path = tmp_path / "out/predictions.jsonl"
        rows = [json.loads(line) for line in path.open()] if path.exists() else []
        return status, out.splitlines(), err.splitlines(), rows

    return run


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """-> flags for a clip and its masks."""
    records, masks = clip_with_masks(tmp_path_factory.mktemp("clip"))
    return ["--data", records.path, "--media", MEDIA, "--masks", masks]


@pytest.mark.slow
def test_scores_by_frames_are_a_table_and_part_of_the_json(call, clip):
    status, out, _, rows = call(*clip, "--frames", 2, "--frames", 3, "--max-new", 3)
    assert status == 0
    *table, last = out
    result = json.loads(last)
    by_frames = result["by_frames"]
    assert list(by_frames) == ["2", "3"]
    assert by_frames["3"]["hota"] == result["hota"]
    assert {(row["frames"], len(row["times"])) for row in rows} == {(2, 2), (3, 3)}
    cells = [line.split() for line in table]
    assert cells[0] == [f"{clip[1].name},", "frames", "2", "3"]
    losses = [by_frames[n]["nll"]["all"] for n in ("2", "3")]
    assert cells[-1] == ["nll", *(f"{loss:.4g}" for loss in losses)]
    assert losses[0] != losses[1]                        # the model received other frames
    *_, rows = call(*clip, "--max-new", 3)
    assert {len(row["times"]) for row in rows} == {15}   # a track uses five frames per second


@pytest.mark.slow
def test_several_files_are_scored_apart(call, clip, tmp_path):
    photos = MEDIA / "records.jsonl"
    flags = ["--media", MEDIA, "--frames", 2, "--max-new", 3]
    apart = []
    for path, frames in ((photos, []), (clip[1], flags[2:4])):
        status, out, *_ = call("--data", path, *flags[:2], *frames, *flags[4:])
        assert status == 0
        apart.append(json.loads(out[-1]))
    status, out, _, rows = call("--data", photos, "--data", clip[1], *flags,
                                "--draw", tmp_path / "drawn")
    assert status == 0
    first = json.loads(out[-1])
    second = first.pop(clip[1].name)
    assert [first, second] == apart
    assert {row["set"] for row in rows} == {photos.name, clip[1].name}
    counts = [n for metrics in apart for key, n in metrics.items() if key.startswith("n_")]
    assert len(rows) == sum(counts)
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "drawn").glob("*.png"))
    assert names == ["astronaut", "chelsea", "coffee", "coins", "coins"]
    assert list((tmp_path / "drawn" / f"2-{clip[1].name}").glob("*.png"))


@pytest.mark.slow
def test_three_processes_that_share_the_records_print_what_one_prints(call, saved_run, tmp_path):
    sizes = {"rocket.jpg": 9000, "bigbuckbunny.mp4": 300_000, "coffee.png": None, "coins.png": None}
    for name, n_bytes in sizes.items():
        (tmp_path / name).write_bytes((MEDIA / name).read_bytes()[:n_bytes])
    images = [image(QA | {"question": f"What is {k}?"}, image=name) for k, name in enumerate(
        ("rocket.jpg", "coffee.png", "coffee.png", "coins.png", "coins.png"))]
    damaged = video(QA, video="bigbuckbunny.mp4")
    flags = ["--data", write(tmp_path / "r.jsonl", *images, damaged), "--max-new", "3"]
    _, lines, *_ = call(*flags)
    scores = json.loads(lines[-1])
    assert (scores["skipped"], scores["n_qa"]) == (2, 4)
    three = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3",
             "-m", "tools.evaluate", "--model", saved_run, "--out", tmp_path / "three"]
    ended = subprocess.run([*three, *flags], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == lines
    rows = [(tmp_path / out / "predictions.jsonl").read_text() for out in ("three", "out")]
    assert rows[0] == rows[1]


def test_masks_belong_to_their_own_file_and_the_last_files_need_none(call, tmp_path):
    for name in ("a", "b"):                              # two files with equal record ids
        (tmp_path / name).mkdir()
        toy.export(tmp_path / name, World("test"), 2)
        (tmp_path / name / "records.jsonl").rename(tmp_path / name / f"{name}.jsonl")
    masks = [tmp_path / name / "masks.npz" for name in ("a", "b")]
    inverted = {name: ~array if array.dtype == bool else array
                for name, array in np.load(masks[1]).items()}
    np.savez(masks[1], **inverted)
    files = [tmp_path / name / f"{name}.jsonl" for name in ("a", "b")]
    args = argparse.Namespace(data=files, media=tmp_path / "a", masks=masks)
    (_, records, masks_of), (_, same_ids, masks_of_second) = evaluate.open_sets(args)
    assert [record["id"] for record in records] == [record["id"] for record in same_ids]
    for record in records:
        k = [annotation["type"] for annotation in record["annotations"]].index("point")
        assert np.array_equal(masks_of(record, k), ~masks_of_second(record, k))
    status, out, *_ = call("--data", *files, "--media", tmp_path / "a", "--masks", masks[0],
                           "--max-new", 2)
    assert status == 0
    metrics = json.loads(out[-1])
    assert "mask" in metrics["hits"]
    assert "mask" not in metrics["b.jsonl"]["hits"]


def test_a_full_disk_costs_pictures_but_no_scores(call, tmp_path):
    """No half picture is left, which would block the next command."""
    flags = ["--data", MEDIA / "records.jsonl", "--media", MEDIA, "--max-new", 1, "--draw",
             tmp_path / "drawn"]
    with files_up_to(60_000):
        status, out, err, rows = call(*flags)
    assert status == 1
    assert f"{tmp_path / 'out'}/predictions.jsonl and the scores above are complete" in err[-1]
    assert "nll" in json.loads(out[-1])
    assert rows
    assert not [path for path in (tmp_path / "drawn").iterdir() if b"IEND" not in path.read_bytes()]


def test_the_rule_that_reads_answers_is_passed_on_and_named_in_the_last_line(
        monkeypatch, tmp_path, capsys):
    def scores(*args, reading, **options):
        return {"skipped": 0, "rule": reading}, []

    monkeypatch.setattr(evaluate, "evaluate", scores)
    monkeypatch.setattr(evaluate, "open_sets", lambda args: [("x.jsonl", [{}], None)])
    monkeypatch.setattr(evaluate.model_flags, "open_model", lambda args: (None, None, DATA))
    lines = []
    for flags in ([], ["--read-answers", "plain"]):
        evaluate.main(["--model", "none", "--data", "x.jsonl", "--out", str(tmp_path),
                       "--overwrite", *flags])
        lines.append(json.loads(capsys.readouterr().out))
    assert lines == [{"skipped": 0, "rule": None},
                     {"skipped": 0, "rule": "plain", "read_answers": "plain"}]
    args = ["--model", "none", "--data", "x", "--benchmark", "countbench"]
    assert evaluate.parse(args).read_answers == "official"


def test_sampling_follows_the_flags_and_every_question_has_its_own_random_numbers(
        call, monkeypatch):
    ids = []

    def generate(model, prompts, stops, max_new, sampling):
        assert sampling == Sampling(0.7, 0.95, 0.1, 3)
        ids.extend(prompt.id for prompt in prompts)
        return [[]] * len(prompts)

    monkeypatch.setattr(evaluation, "generate", generate)
    *_, rows = call("--data", MEDIA / "records.jsonl", "--media", MEDIA, "--temperature", 0.7,
                    "--top-p", 0.95, "--frequency-penalty", 0.1, "--seed", 3)
    assert len(set(ids)) == len(ids) == len(rows) > 5


@pytest.mark.parametrize(("flags", "message"), [
    (["--masks", "half.npz"], "the masks of clip/0 have shape"),
    (["--masks", "half.npz", "--media", "."], "1 record, but none can be evaluated"),
])
def test_a_mistake_costs_one_sentence(call, clip, tmp_path, monkeypatch, flags, message):
    arrays = np.load(clip[-1])
    half = {name: a[:, :, ::2] if a.ndim == 4 else a for name, a in arrays.items()}
    np.savez(tmp_path / "half.npz", **half)
    monkeypatch.chdir(tmp_path)
    status, out, err, _ = call(*clip[:4], *flags)
    assert status == 2
    assert not out
    assert message in err[-1]
