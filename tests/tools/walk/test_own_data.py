"""docs/own_data.ipynb: every cell succeeds on a small untrained model, in few steps; the committed
notebook has these cells, all outputs, and no path of the machine that made it."""

import contextlib
import importlib.util
import json
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch

from data import DataConfig
from model import PRESETS, Molmo2
from tests.test_layout import ROOT
from tests.training.runs import wait_for_saves
from text.tokenizer import ByteTokenizer
from tools.walk import own_data, pages
from toy.world import WORDS
from training import config
from weights import files

EXTRAS = ("safetensors", "tokenizers", "transformers", "torchvision")
FEWER = {"steps": 1, "n": 2, "max-new": 4}           # instead of the numbers in the cells
BOOK = json.loads((ROOT / own_data.NOTEBOOK).read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def in_this_process(command):
    """own_data.shell with few steps and without a new process, which would import torch again."""
    for flag, number in FEWER.items():
        command = re.sub(rf"--{flag} \d+", f"--{flag} {number}", command)
    command, _, target = command.replace("\\\n", " ").partition(" > ")
    python, *words = shlex.split(command)
    assert python == "python"
    name = words.pop(0)
    name = words.pop(0) if name == "-m" else name.removesuffix(".py")
    with contextlib.ExitStack() as stack:
        if target:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(target, "w"))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", [name, *words])
            module = importlib.import_module(name)
            status = module.main() if name == "toy.world" else module.main(words)
    wait_for_saves()
    assert not status, command


@pytest.fixture(autouse=True)
def restored_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def untrained(tmp_path):
    """A run directory with a small random model."""
    torch.manual_seed(0)
    toy = Molmo2(PRESETS["toy"]).init_weights()
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    files.save(toy, folder)
    ByteTokenizer(WORDS).save(folder)
    files.save_data_config(DataConfig(max_tokens=512, max_crops=1, prefix_all=True), folder)
    return folder.parent


@pytest.mark.skipif(not all(map(importlib.util.find_spec, EXTRAS)),
                    reason="needs pip install -r requirements-extras.txt")
def test_every_cell_succeeds_and_is_the_committed_one(untrained):
    own_data.import_transformers()
    cells = own_data.run(own_data.read_cells(), untrained, in_this_process)
    made = json.loads(pages.notebook(cells))
    assert [source(cell) for cell in made["cells"]] == [source(cell) for cell in BOOK["cells"]], (
        "python -m tools.walk.own_data makes docs/own_data.ipynb anew")
    kinds = [[sorted(output.get("data", ())) for output in cell.get("outputs", ())]
             for cell in made["cells"]]
    assert kinds == [[sorted(output.get("data", ())) for output in cell.get("outputs", ())]
                     for cell in BOOK["cells"]]
    assert "nothing is wrong" in "".join(cell.printed for cell in cells)


def test_the_text_names_the_numbers_of_the_outputs():
    text = json.dumps(BOOK, ensure_ascii=False)
    for number in ("10 records", "25 annotations", "197 tokens", "3 rows"):
        assert number in text
    for line in ("records            10", "branches           25", "longest            197",
                 "packs              3"):
        assert line in text


def test_the_answer_of_transformers_is_that_of_this_repository():
    printed = ["".join("".join(output.get("text", ())) for output in cell["outputs"])
               for cell in BOOK["cells"] if cell["cell_type"] == "code"]
    ours = next(text for cell, text in zip(code_cells(), printed, strict=True)
                if "runs/own/six.png" in source(cell))
    assert ours.startswith('<points coords="1 1 ')
    assert printed[-1] == ours


def code_cells():
    return [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]


def test_the_committed_notebook_is_small_and_has_no_path_of_a_machine():
    text = (ROOT / own_data.NOTEBOOK).read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert str(Path.home()) not in text
    assert not re.search(r"(?<![\w.])/(tmp|home|root|work|usr|opt)/", text)
    assert [cell["execution_count"] for cell in code_cells()] == [
        k for k, _ in enumerate(code_cells(), 1)]


def test_commands_for_a_released_checkpoint_are_read_by_train():
    text = source(BOOK["cells"][-1])
    (command,) = re.findall(r"```\npython train.py (.*?)\n```", text, re.DOTALL)
    _, settings = config.parse(shlex.split(command.replace("\\\n", " ")))
    assert settings.lora.rank == 16


def test_a_line_with_an_exclamation_mark_is_a_command(capfd):
    assert own_data.as_python("x = 1\n!echo a \\\n    b\ny = '!'") == (
        "x = 1\nshell('echo a \\\\\\n    b')\ny = '!'")
    exec(own_data.as_python("!echo a \\\n  b"), {"shell": own_data.shell})
    assert capfd.readouterr().out == "a b\n"


def test_a_folder_without_a_model_is_refused_in_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        own_data.main(["--model", str(tmp_path)])
    assert ended.value.code == 2
    assert "no run directory" in capsys.readouterr().err
