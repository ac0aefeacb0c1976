"""tools.gpu on a CPU: every check passes, every measurement has its numbers, a part that fails is a
line of the table."""

import json

import pytest

from tools import gpu


@pytest.mark.slow
def test_all_of_it_runs_on_the_toy(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        gpu.main(["--device", "cpu", "--small", "--out", str(tmp_path / "gpu")])
    assert end.value.code == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert len(found["checks"]) == 4
    assert all(check["ok"] for check in found["checks"].values())
    steps = [found["measurements"][name] for name in gpu.SMALL_STEPS]
    assert all(step["MFU"] > 0 and step["seconds"] > 0 for step in steps)
    assert not any("error" in result for result in found["measurements"].values())
    table = (tmp_path / "gpu.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n| ") == 2 + 4 + len(found["measurements"]) - 1


def test_a_part_that_fails_is_reported_and_the_next_one_runs():
    results = {}
    for name in ("first", "second"):
        with gpu.reported(results, name):
            if name == "first":
                raise RuntimeError("out of memory\nmore")
            results[name] = {"ok": True}
    assert results == {"first": {"error": "RuntimeError: out of memory", "ok": False},
                       "second": {"ok": True}}


def test_a_machine_without_a_gpu_costs_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cuda:99"])
    assert capsys.readouterr().err.startswith("tools.gpu: --device cuda:99: ")
    assert not list(tmp_path.iterdir())


def test_the_flags_of_the_steps_are_those_of_train():
    for flags in {**gpu.STEPS, **gpu.SMALL_STEPS}.values():
        gpu.parse(flags.split())
