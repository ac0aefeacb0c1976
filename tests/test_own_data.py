"""docs/own_data.ipynb: its cells run in order, and its text quotes the numbers of the outputs."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layout import ROOT
from tools.bench.step import import_transformers
from training import config

NOTEBOOK = ROOT / "docs" / "own_data.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
COMMAND = re.compile(r"^!((?:.*\\\n)*.*)$", re.MULTILINE)
FEWER = {"steps": 1, "n": 2, "max-new": 4}           # replaces the numbers in the cells
# cells whose output does not depend on training: the last record, check, stats, parameters
SAME_OUTPUT = (2, 4, 5, len(CODE) - 1)


def shell(command):
    """Runs a command of a cell with few steps, and prints its stdout."""
    for flag, number in FEWER.items():
        command = re.sub(rf"--{flag} \d+", f"--{flag} {number}", command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True,
                          env=os.environ | {"PATH": path})
    assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    print(done.stdout, end="")


@pytest.mark.slow
@pytest.mark.extras("transformers", "safetensors", "tokenizers")
def test_every_cell_runs_with_few_steps(tmp_path, monkeypatch):
    """The working directory looks like the root of the repository."""
    for path in ROOT.iterdir():
        if path.name not in (".git", "docs", "runs"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    import_transformers()            # also works if torchvision was built for another torch
    names = {"shell": shell}
    for number, cell in enumerate(CODE):
        code = COMMAND.sub(lambda match: f"shell({match[1]!r})", "".join(cell["source"]))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"own_data.ipynb, cell {number}", "exec"), names)
        if number in SAME_OUTPUT:
            assert printed.getvalue() == output(cell)


def output(cell):
    return "".join("".join(part.get("text", ())) for part in cell["outputs"])


def test_the_first_cell_stops_when_a_package_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "imageio_ffmpeg")
    with pytest.raises(ModuleNotFoundError, match=r"^imageio_ffmpeg: run pip install -r req"):
        exec("".join(CODE[0]["source"]), {})


def test_the_text_names_the_numbers_of_the_outputs():
    text = " ".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    stats = dict(line.split() for line in output(CODE[5]).splitlines()[:10])
    assert f"{stats['records']} records have {stats['branches']} annotations" in text
    assert f"longest record has {stats['longest']} tokens" in " ".join(text.split())
    assert f"into {stats['packs']} rows" in text


def test_the_committed_notebook_has_all_outputs_and_no_path_of_a_machine():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"(?<![\w.])/(tmp|home|root|work|usr|opt)/", text)


def test_the_command_for_a_released_checkpoint_is_read_by_train():
    (command,) = re.findall(r"```\npython train.py (.*?)\n```", "".join(CELLS[-1]["source"]), re.S)
    _, settings = config.parse(shlex.split(command.replace("\\\n", " ")))
    assert settings.lora.rank == 16
