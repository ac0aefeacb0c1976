"""What runs ended with, side by side (tools.runs), and what the toy is scored on at the end of its later stages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import runs
from toy import world as tiny

ROOT = Path(__file__).parents[2]


def ended(folder, eval, seconds=61.0):
    folder.mkdir(parents=True)
    lines = [{"config": {}}, {"step": 1, "loss": 2.0, "seconds": 1.0}, {"step": 1, "eval": {"point_f1": 0.1}}]
    lines += [{"step": 2, "eval": eval, "seconds": seconds}] if eval else []
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_scores_stand_side_by_side(tmp_path, capsys, monkeypatch):
    one = ended(tmp_path / "stage1", {"point_f1": 0.9, "n_point": 12, "nll": {"all": 1.49}})
    two = ended(tmp_path / "stage2", {"point_f1": 0.8, "long": {"track_f1": 0.7}})
    monkeypatch.setattr(sys, "argv", ["runs", str(one), str(two)])
    runs.main()
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [["stage1", "stage2"], ["point_f1", "0.900", "0.800"], ["n_point", "12", "-"],
                                                ["nll.all", "1.490", "-"], ["seconds", "61", "61"], ["long.track_f1", "-", "0.700"]]
    assert json.loads(last)["stage2"] == {"point_f1": 0.8, "long.track_f1": 0.7, "seconds": 61.0}


def test_runs_of_one_name_are_told_apart_and_a_line_cut_short_is_no_end(tmp_path, capsys, monkeypatch):
    runs_ = [ended(tmp_path / where / "stage2", {"point_f1": score}) for where, score in (("a", 0.25), ("b", 0.75))]
    monkeypatch.setattr(sys, "argv", ["runs", *map(str, runs_)])
    runs.main()
    assert [c["point_f1"] for c in json.loads(capsys.readouterr().out.splitlines()[-1]).values()] == [0.25, 0.75]
    log = runs_[0] / "log.jsonl"
    log.write_text(log.read_text()[:-9])
    assert runs.result(runs_[0]) is None


def test_a_run_that_has_not_ended_is_named(tmp_path, monkeypatch, capsys):
    for out in (tmp_path / "none", ended(tmp_path / "going", None)):
        monkeypatch.setattr(sys, "argv", ["runs", str(out)])
        with pytest.raises(SystemExit, match="2"):
            runs.main()
        assert f"{out.name}: no log of a run that has ended" in capsys.readouterr().err


def test_later_stages_are_asked_about_films_and_long_ones_apart():
    one, three = tiny.held_out(1, 0, 8), tiny.held_out(3, 0, 8)
    kinds = lambda records: {r["source"].name for r in records}           # noqa: E731
    assert {part: kinds(records) for part, records in one.items()} == {"test": {"tiny-test-all"}, "unseen": {"tiny-unseen-all"}}
    assert kinds(three["test"]) == {"tiny-test-all", "series-test", "films-test-all-6", "films-test-tracks-6"}
    assert kinds(three["long"]) == {"films-test-all-18", "films-test-tracks-18"} and [len(p) for p in three.values()] == [18, 8, 8]
    assert len({r["id"] for records in three.values() for r in records}) == 34


@pytest.mark.slow
def test_three_stages_from_one_command(tmp_path):
    """stages/tiny.sh: each stage from the weights of the one before, each scored, a table at the end."""
    flags = ["--steps", "2", "--eval_images=2", "--device", "cpu"]
    done = subprocess.run(["bash", "stages/tiny.sh", *flags], cwd=ROOT, capture_output=True, text=True,
                          env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    columns = json.loads(done.stdout.splitlines()[-1])
    assert list(columns) == ["stage1", "stage2", "stage3"]
    assert {"caption_exact", "point_f1", "count_accuracy"} <= set(columns["stage1"])
    wanted = {"video_point_f1", "track_f1", "qa_accuracy", "images_point_f1", "long.qa_accuracy", "long.track_f1"}
    assert all(wanted <= set(columns[name]) for name in ("stage2", "stage3"))
    for stage, before in (("2", "stage1"), ("3", "stage2")):
        first = json.loads((tmp_path / f"stage{stage}" / "log.jsonl").read_text().splitlines()[0])
        assert first["command"]["init"] == str(tmp_path / before) and first["config"]["stage"] == int(stage)
