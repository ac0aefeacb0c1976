"""The final scores of runs, side by side (tools.runs)."""

import json
from pathlib import Path

from tools import runs


def write_log(folder, scores):
    """The log of a run that has ended."""
    lines = [
        {"config": {}},
        {"step": 1, "loss": 2.0, "seconds": 1.0},
        {"step": 1, "eval": {"point_f1": 0.1}},
        {"step": 2, "eval": scores, "seconds": 61.0},
    ]
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
        ["point_f1", "0.9", "0.8"],
        ["n_point", "12", "-"],
        ["nll.all", "1.49", "-"],
        ["seconds", "61", "61"],
        ["long.track_f1", "-", "0.7"],
    ]
    expected = {"point_f1": 0.8, "long.track_f1": 0.7, "seconds": 61.0}
    assert json.loads(last)["b/stage1"] == expected
