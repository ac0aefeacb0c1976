"""The final scores of runs, side by side (tools.runs), and the three stages of the toy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import runs

ROOT = Path(__file__).parents[2]


def write_log(folder, scores, seconds=61.0):
    """The log of a run; scores None: of one that has not finished."""
    lines = [
        {"config": {}},
        {"step": 1, "loss": 2.0, "seconds": 1.0},
        {"step": 1, "eval": {"point_f1": 0.1}},
    ]
    if scores:
        lines.append({"step": 2, "eval": scores, "seconds": seconds})
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def call(monkeypatch, *folders):
    monkeypatch.setattr(sys, "argv", ["runs", *map(str, folders)])
    runs.main()


def test_scores_stand_side_by_side(tmp_path, capsys, monkeypatch):
    first = {"point_f1": 0.9, "n_point": 12, "nll": {"all": 1.49}}
    second = {"point_f1": 0.8, "long": {"track_f1": 0.7}}
    folders = [write_log(tmp_path / "stage1", first), write_log(tmp_path / "stage2", second)]
    call(monkeypatch, *folders)
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [
        ["stage1", "stage2"],
        ["point_f1", "0.900", "0.800"],
        ["n_point", "12", "-"],
        ["nll.all", "1.490", "-"],
        ["seconds", "61", "61"],
        ["long.track_f1", "-", "0.700"],
    ]
    expected = {"point_f1": 0.8, "long.track_f1": 0.7, "seconds": 61.0}
    assert json.loads(last)["stage2"] == expected


def test_runs_of_the_same_name_are_named_by_their_paths(tmp_path, capsys, monkeypatch):
    a = write_log(tmp_path / "a" / "stage2", {"point_f1": 0.25})
    b = write_log(tmp_path / "b" / "stage2", {"point_f1": 0.75})
    call(monkeypatch, a, b)
    columns = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {run: scores["point_f1"] for run, scores in columns.items()} == {
        str(a): 0.25, str(b): 0.75}


def test_a_truncated_last_line_is_not_the_end_of_a_run(tmp_path):
    folder = write_log(tmp_path / "stage2", {"point_f1": 0.25})
    log = folder / "log.jsonl"
    log.write_text(log.read_text()[:-9])
    assert runs.final_scores(folder) is None


def test_an_unfinished_run_is_named(tmp_path, monkeypatch, capsys):
    for folder in (tmp_path / "none", write_log(tmp_path / "unfinished", None)):
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, folder)
        assert f"{folder.name} has no log of a finished run" in capsys.readouterr().err


@pytest.mark.slow
def test_three_stages_from_one_command(tmp_path):
    """stages/tiny.sh: each stage from the weights of the one before, and a table of the scores."""
    flags = ["--steps", "2", "--eval_images=2", "--device", "cpu"]
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "OUT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", "stages/tiny.sh", *flags], cwd=ROOT, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    columns = json.loads(done.stdout.splitlines()[-1])
    assert list(columns) == ["stage1", "stage2", "stage3"]
    assert {"caption_exact", "point_f1", "count_accuracy"} <= set(columns["stage1"])
    later = {"video_point_f1", "track_f1", "qa_accuracy", "images_point_f1", "long.qa_accuracy",
             "long.track_f1"}
    assert later <= set(columns["stage2"])
    assert later <= set(columns["stage3"])
    for stage, before in ((2, "stage1"), (3, "stage2")):
        log = (tmp_path / f"stage{stage}" / "log.jsonl").read_text()
        head = json.loads(log.splitlines()[0])
        assert head["command"]["init"] == str(tmp_path / before)
        assert head["config"]["stage"] == stage
