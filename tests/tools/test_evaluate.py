"""tools.evaluate: metrics as the last line, predictions.jsonl, scores by frames, one sentence for
a mistake."""

import json

import numpy as np
import pytest

from evaluation import charts
from evaluation.scoring import STYLE_SCORE
from tests.evaluation.answers import clip_with_masks
from tests.evaluation.small_model import MEDIA, save_run
from tools import evaluate
from toy import world


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def call(saved_run, tmp_path, capsys):
    """call(*flags) -> exit status, lines on stdout, lines on stderr, predictions"""

    def run(*flags):
        status = 0
        try:
            evaluate.main(["--model", str(saved_run), "--out", str(tmp_path / "out"),
                           *map(str, flags)])
        except SystemExit as end:
            status = end.code
        path = tmp_path / "out" / "predictions.jsonl"
        rows = [json.loads(line) for line in path.open()] if path.exists() else []
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines(), rows

    return run


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The flags that name a clip and its masks."""
    records, masks = clip_with_masks(tmp_path_factory.mktemp("clip"))
    return ["--data", records.path, "--media", MEDIA, "--masks", masks]


def test_scores_by_frames_are_a_table_a_curve_and_part_of_the_json(
    call, clip, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(charts, "save_line_chart", lambda *args, **options: drawn.append(args))
    status, out, _, rows = call(
        *clip, "--frames", 2, 3, "--max-new", 3, "--draw", tmp_path / "drawn")
    assert status == 0
    *table, last = out
    result = json.loads(last)
    by_frames = result["by_frames"]
    assert list(by_frames) == ["2", "3"]
    assert by_frames["3"]["hota"] == result["hota"]
    assert {(row["frames"], len(row["times"])) for row in rows} == {(2, 2), (3, 3)}
    cells = [line.split() for line in table]
    assert cells[0] == ["frames", "2", "3"]
    assert ["video_point_f1", "0.0000", "0.0000"] in cells
    losses = [by_frames[n]["nll"]["all"] for n in ("2", "3")]
    assert cells[-1] == ["nll", *(f"{loss:.4f}" for loss in losses)]
    assert losses[0] != losses[1]                        # the model was shown other frames
    ((series, path, xlabel),) = drawn
    assert series == {name: [(2, 0.0), (3, 0.0)] for name in ("video_point_f1", "track_f1", "hota")}
    assert (path, xlabel) == (tmp_path / "drawn" / "frames.png", "frames")


def test_one_number_of_frames_replaces_the_default(call, clip):
    status, out, _, rows = call(*clip, "--max-new", 3, "--frames", 2)
    assert status == 0
    assert len(out) == 1
    assert "by_frames" not in json.loads(out[0])
    assert {len(row["times"]) for row in rows} == {2}
    *_, rows = call(*clip, "--max-new", 3)
    assert {len(row["times"]) for row in rows} == {15}   # for a track, five a second


def test_points_of_single_images_are_drawn(call, tmp_path):
    flags = ["--data", MEDIA / "records.jsonl", "--draw", tmp_path / "drawn", "--max-new", 2]
    status, *_ = call(*flags)
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "drawn").glob("*.png"))
    assert status == 0
    assert names == ["astronaut", "chelsea", "coffee", "coins", "coins"]


def test_several_files_are_scored_apart(call, clip, tmp_path):
    photos = MEDIA / "records.jsonl"
    flags = ["--media", MEDIA, "--frames", 2, "--max-new", 3]
    apart = []
    for path, frames in ((photos, []), (clip[1], flags[2:4])):
        status, out, *_ = call("--data", path, *flags[:2], *frames, *flags[4:])
        assert status == 0
        apart.append(json.loads(out[-1]))
    status, out, _, rows = call("--data", photos, clip[1], *flags, "--draw", tmp_path / "drawn")
    assert status == 0
    first = json.loads(out[-1])
    second = first.pop(clip[1].name)
    assert [first, second] == apart
    assert {row["set"] for row in rows} == {photos.name, clip[1].name}
    counts = [n for metrics in apart for key, n in metrics.items() if key.startswith("n_")]
    assert len(rows) == sum(counts)
    assert list((tmp_path / "drawn").glob("*.png"))


def test_curves_are_of_scores_that_exist():
    assert set(evaluate.CURVES) <= set(evaluate.SCORES)
    assert set(STYLE_SCORE.values()) <= set(evaluate.SCORES)


# -------------------------------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize(("flags", "message"), [
    (["--frames", "0"], "--frames must be from 1 to"),
    (["--frames", "8", "4096"], "--frames must be from 1 to"),
    (["--frames", "8", "--data", MEDIA / "records.jsonl"], "--frames: no video in"),
    (["--max-new", "0"], "--max-new"),
    (["--masks", "half.npz"], "the masks of clip/0 are"),
    (["--media", "."], "none of its 1 records could be used"),
    (["--model", "none"], "none: no such folder"),
])
def test_a_mistake_costs_one_sentence(call, clip, tmp_path, monkeypatch, flags, message):
    arrays = np.load(clip[-1])
    half = {name: a[:, :, ::2] if a.ndim == 4 else a for name, a in arrays.items()}
    np.savez(tmp_path / "half.npz", **half)
    monkeypatch.chdir(tmp_path)
    status, out, err, _ = call(*clip, *flags)
    assert status == 2
    assert not out
    assert message in err[-1]
    skipped = 1 if "none of its" in message else 0       # which is named before
    assert len(err) == 1 + skipped


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_last(path):
    """Masks that lack those of the last pointing annotation."""
    masks = dict(np.load(path))
    masks.popitem()
    np.savez(path, **masks)


@pytest.mark.parametrize(("damage", "message"), [
    (cut_in_half, "--masks toy/masks.npz"), (without_last, "needs an array"),
])
def test_a_damaged_file_of_masks_costs_one_sentence(call, tmp_path, monkeypatch, damage, message):
    monkeypatch.chdir(tmp_path)
    world.export(tmp_path / "toy", world.World("test"), 2)
    damage(tmp_path / "toy" / "masks.npz")
    status, out, err, _ = call("--data", "toy/records.jsonl", "--masks", "toy/masks.npz")
    assert status == 2
    assert not out
    assert len(err) == 1
    assert message in err[0]
