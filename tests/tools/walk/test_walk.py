"""The walk: its blocks print what the page shows, right solutions pass, and wrong ones fail."""

import contextlib
import io
import re
import subprocess

import pytest

import data
from docs import draw
from tests.ranks import run_ranks
from tests.test_layout import ROOT
from tools.walk import __main__ as command
from tools.walk import examples, experiments

PAGE = (ROOT / "docs/walk/README.md").read_text(encoding="utf-8")
MINE = ROOT / "docs/walk/mine.py"
SOLUTIONS = ROOT / "tests/tools/walk/solutions.py"
# a block of Python, and its output if the page shows it
BLOCK = re.compile(r"^```python\n(.*?)\n```$(?:\n\n```text\n(.*?\n)```$)?", re.M | re.DOTALL)
EXERCISES = [code for code, _ in BLOCK.findall(PAGE) if "NotImplementedError" in code]


@pytest.mark.slow
def test_the_blocks_of_the_page_run_in_order_and_print_what_it_shows():
    names = {}
    for code, shown in BLOCK.findall(PAGE):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "docs/walk/README.md", "exec"), names)
        assert printed.getvalue() == shown, code
    sizes = [data.size(record, examples.TOKENIZER, examples.DATA, examples.VISION, examples.SEED, 0)
             for record in examples.RECORDS]
    assert sizes == names["stream"][:3]          # examples A, B and C are the three records
    assert (names["stream"], names["changes"]) == (draw.STREAM, draw.CHANGES)
    assert len(BLOCK.findall(PAGE)) == PAGE.count("```python") > 15


@pytest.mark.parametrize("path", draw.DIAGRAMS)
def test_the_diagrams_are_those_that_the_functions_of_today_draw(path, monkeypatch):
    monkeypatch.setattr(experiments.mp, "spawn", run_ranks)
    shown = (ROOT / "docs" / path).read_text(encoding="utf-8")
    drawn = draw.DIAGRAMS[path]()
    # another version of Pillow may compress the photographs differently
    shown, drawn = (re.sub('href="data:[^"]*"', "", text) for text in (shown, drawn))
    assert shown == drawn, "python -m docs.draw writes it again"


def test_the_readers_file_holds_the_exercises_of_the_page():
    assert MINE.read_text(encoding="utf-8").endswith("\n\n\n".join(["", *EXERCISES]) + "\n")
    assert re.findall(r"def (\w+)", "\n".join(EXERCISES)) == list(command.TESTS)


def test_the_tests_of_every_exercise_exist():
    for node in (node for tests in command.TESTS.values() for node in tests):
        path, name = node.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")


def check(folder, text):
    """--check of a file with this text -> exit status."""
    (folder / "mine.py").write_text(text)
    return command.main(["--check", str(folder / "mine.py")])


def test_functions_without_a_body_are_left_out(capsys):
    assert command.main(["--check", str(MINE)]) == 0
    assert capsys.readouterr().out.count("not written yet") == 7


def test_a_solution_may_be_a_partial_object(tmp_path, capsys, monkeypatch):
    stub = "def f(a, b):\n    raise NotImplementedError\npool = functools.partial(f)\n"
    assert check(tmp_path, f"import functools\n{stub}") == 0
    assert capsys.readouterr().out == "pool: not written yet\n"
    monkeypatch.setattr(command, "run_tests", lambda name, path: None)
    assert check(tmp_path, "import functools\npool = functools.partial(max)") == 0
    assert capsys.readouterr().out == "pool: right, all of its tests pass\n"


def test_the_name_of_a_failed_test_is_printed_whole(monkeypatch):
    """The case in brackets may contain blanks. A message may follow, or not."""
    name = "tests/test_attention.py::test_mask_equals_the_official_code[one image]"
    for message in ("", " - AssertionError: a - b"):
        done = subprocess.CompletedProcess([], 1, f"FAILED {name}{message}\n1 failed\n", "")
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **options: done)
        assert command.run_tests("allow", MINE).startswith(f"{name} fails.\n")


@pytest.mark.slow
def test_right_solutions_pass_the_tests_of_the_project(capsys):
    assert command.main(["--check", str(SOLUTIONS)]) == 0
    assert capsys.readouterr().out.count("right, all of its tests pass") == 7


WRONG = {
    "pool": "def pool(self, features, pool_src):\n"  # missing patches count as zeros
            "    window = features.flatten(0, 1)[pool_src] * (pool_src >= 0)[..., None]\n"
            "    return self.out(self.v(window.mean(1)))",
    "allow": "import attention\ndef allow(until, bidir):\n"
             "    return attention.allow(until, bidir * 0)",
    "best_subset": "def best_subset(items, *limits):\n    return items[:1]",
    "token_weight": "def token_weight(*branch):\n    return 1.0",
    "ulysses": "def ulysses(attend, group):\n    return attend",
    "forward_backward": """
def forward_backward(run, model, batch):
    nll, lse = model(batch)
    ((batch.weights * nll).sum() / batch.weights.sum()).backward()
    return nll""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_the_tests_of_the_project_see_a_wrong_function(name, tmp_path, capsys):
    assert check(tmp_path, WRONG[name]) == 1
    printed = capsys.readouterr().out
    assert f"{name}: not yet right" in printed
    assert " fails." in printed
    assert any(meaning in printed for meaning in command.TESTS[name].values()), printed
