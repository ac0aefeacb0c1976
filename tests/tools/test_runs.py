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


def test_scores_stand_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(Path("a/stage1"), {"point_f1": 0.9, "n_point": 12, "nll": {"all": 1.49}})
    write_log(Path("b/stage1"), {"point_f1": 0.8, "long": {"track_f1": 0.7}})
    runs.main(["a/stage1", "b/stage1"])
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [
        ["a/stage1", "b/stage1"],
        ["point_f1", "0.900", "0.800"],
        ["n_point", "12", "-"],
        ["nll.all", "1.490", "-"],
        ["seconds", "61.000", "61.000"],
        ["long.track_f1", "-", "0.700"],
    ]
    expected = {"point_f1": 0.8, "long.track_f1": 0.7, "seconds": 61.0}
    assert json.loads(last)["b/stage1"] == expected


def test_a_truncated_last_line_is_not_the_end_of_a_run(tmp_path):
    folder = write_log(tmp_path / "stage2", {"point_f1": 0.25})
    assert runs.final_scores(folder)
    log = folder / "log.jsonl"
    log.write_text(log.read_text()[:-9])
    assert runs.final_scores(folder) is None


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
    columns = {Path(run).name: scores for run, scores in columns.items()}
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
