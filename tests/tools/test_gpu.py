"""tools.gpu on a CPU: every check passes, every measurement has its numbers, a part that fails is a
line of the table."""

import json

import pytest

from tools import gpu


@pytest.mark.slow
def test_all_of_it_runs_on_the_toy(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        gpu.main(["--device", "cpu", "--small", "--out", str(tmp_path / "gpu.json")])
    assert end.value.code == 0
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert sum(result.get("ok", False) for result in results.values()) == 2
    assert not any("error" in result for result in results.values())
    steps = [results[name] for name in gpu.SMALL_STEPS]
    assert all(step["MFU"] > 0 and step["seconds"] > 0 for step in steps)
    with pytest.raises(SystemExit, match="2"):           # because of the device, not of the file
        gpu.main(["--device", "none", "--out", str(tmp_path / "gpu.json")])
    table, error = capsys.readouterr()
    assert "--device none" in error
    assert table.count("\n| ") == 1 + len(results)


def test_a_part_that_fails_is_reported():
    def fail():
        raise RuntimeError("out of memory\nmore")

    failed = {"error": "RuntimeError: out of memory", "ok": False}
    assert gpu.run_part("first", fail) == failed


def test_the_flags_of_the_steps_are_those_of_train():
    for flags in {**gpu.STEPS, **gpu.SMALL_STEPS}.values():
        gpu.parse(flags.split())
