"""Checks that links, names and commands in README.md and docs/ exist, and that docs/records.md is
complete. CI runs the commands (.ci/run)."""

import ast
import contextlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter

import pytest
from PIL import Image

from records.check import TABLES, WORDS
from records.errors import Unreadable
from records.parse import parse
from tests.test_layout import (
    CODE,
    ROOT,
    SKIPPED_FOLDERS,
    TOP_LEVEL,
    TREES,
    count_lines,
    count_tokens,
    module,
    numbers,
    reached,
)
from tests.test_layout import TEXTS as SOURCES
from toy import world
from training import config
from weights.export import export
from weights.files import open_model_folder, save, save_data_config

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
CI = runpy.run_path(str(ROOT / ".ci" / "readme.py"))
MARKDOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS_OF_TRAINING = config.make_parser().format_help()
COMMANDS = [command for page in MARKDOWN for command in CI["commands"](page)]
# Our words for standard terms. docs/molmo2.md may use them, since others named that code.
NOT_ON_PAGES = (
    r"exams?", r"aims?", r"judges?", r"dialects?", r"dealt", r"peers", r"afresh", r"drawn anew",
    r"masked (?:records?|tokens)", r"seeds? reach", r"(?:is|are) asked", r"gives? up", r"shall",
    r"need not", r"in silence", r"rows of other projects", r"may see",
)
FACT = re.compile(r"docs/molmo2\.md (\d+(?:\.\d+)?b?)")      # a section that a comment refers to


def anchors_of(text):
    """The anchors that GitHub gives to the headings of a page. Equal headings are numbered."""
    without_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    seen = Counter()
    anchors = set()
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors_of(linked.read_text(encoding="utf-8")), f"{name}: {target}"


def test_every_section_of_the_facts_that_the_code_names_exists():
    headings = re.findall(r"^#{2,3} (\d+(?:\.\d+b?)?)", TEXTS["docs/molmo2.md"], re.MULTILINE)
    rows = re.findall(r"^\| (0\.\d+) \|", TEXTS["docs/molmo2.md"], re.MULTILINE)
    named = {}
    for path in ROOT.rglob("*.py"):
        if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts):
            named |= dict.fromkeys(FACT.findall(path.read_text(encoding="utf-8")), path.name)
    assert len(named) > 30
    assert {n: path for n, path in named.items() if n not in {*headings, *rows}} == {}


def defined(path):
    """Names of the functions, classes, methods ("Class.method") and constants of a file."""
    names = set()
    for node in TREES[path].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("name", "least"), [("docs/paper.md", 30), ("docs/walk/README.md", 16)])
def test_every_function_of_a_table_is_where_it_says(name, least):
    named = re.findall(r"`([\w/]+\.py)`:\s+((?:`[\w.]+`(?:,\s+)?)+)", TEXTS[name])
    assert len(named) >= least
    missing = []
    for path, names in named:
        there = defined(path) if path in TREES else set()
        missing += [f"{path}: {n}" for n in re.findall(r"`([\w.]+)`", names) if n not in there]
    assert not missing


def test_every_entry_of_the_paper_page_has_a_function_and_a_test():
    entries = TEXTS["docs/paper.md"].split("\n- **")[1:]
    assert len(entries) > 25
    for entry in entries:
        assert re.search(r"`[\w/]+\.py`:\s+`\w", entry), f"{entry}: no function"
        assert re.search(r"`test_\w+`", entry), f"{entry}: no test"


def test_the_lines_that_the_paper_page_quotes_are_in_the_first_file_of_their_entry():
    """The order must be the same, and `[..]` must stand where lines are omitted."""
    quotes = 0
    for entry in TEXTS["docs/paper.md"].split("\n- **")[1:]:
        path = re.search(r"`([\w/]+\.py)`:", entry)[1]
        file = "".join(f"{line.strip()}\n" for line in (ROOT / path).open(encoding="utf-8"))
        for block in re.findall(r"```python\n(.*?)```", entry, re.DOTALL):
            quoted = "".join(f"{line.strip()}\n" for line in block.splitlines() if line.strip())
            for part in quoted.split("[..]\n"):
                _, found, file = file.partition(f"\n{part}")
                assert found, f"{path}: {part}"
                quotes += part.count("\n")
    assert quotes > 40


def test_every_test_that_a_page_names_exists():
    tests = set()
    for path in TREES:
        tests |= {name for name in defined(path) if name.startswith("test_")}
    named = set(re.findall(r"`(test_\w+)`", "".join(TEXTS.values())))
    missing = sorted(named - tests)
    assert len(named) > 35
    assert not missing


def test_the_readme_is_short_and_its_rounded_sizes_are_true():
    """They are rounded, so that small changes keep them true."""
    lines = README.splitlines()
    assert len(lines) <= 145
    assert max(map(len, lines)) <= 120
    assert len(README.split()) <= 1300
    stated = re.findall(r"\| `([\w/]+\.py)` \| (\d+) \|", README)
    assert len(stated) == 10
    seven = [path for path, _ in stated if "/" not in path]
    assert seven == [f"{name}.py" for name in TOP_LEVEL]
    tests = [path for path in TREES if path.startswith("tests/")]
    sizes = [count_lines({*CODE} - {*seven}), count_lines(tests)]
    rounded = re.findall(r"(\d+,\d00)\s+lines", README)
    assert [int(n.replace(",", "")) for n in rounded] == pytest.approx(sizes, rel=0.1)
    for path, n in stated:
        assert int(n) == pytest.approx(count_lines([path]), rel=0.1), path
    share = int(re.search(r"about (\d+) % of the code that a run imports", README)[1])
    run = numbers()["imported by train.py, without evaluation/ and toy/"]
    assert share == pytest.approx(100 * count_tokens(seven) / run, abs=3)
    files, tokens = re.search(r"\| (\d+) files, (\d+,\d00) tokens \|", README).groups()
    assert int(files) == pytest.approx(numbers()["the same, in files"], rel=0.1)
    assert int(tokens.replace(",", "")) == pytest.approx(run, rel=0.1)


def test_the_first_screen_of_the_readme_promises_a_number_and_shows_the_page_of_play():
    promise = next(line for line in README.splitlines() if line.startswith("**"))
    assert re.search(r"\d", promise)
    pictures = re.findall(r"\]\(([^)]*images/[^)]*)\)", README)
    assert pictures[0] == "docs/images/play.gif"
    others = [c for c in CI["commands"](ROOT / "README.md") if not c.startswith("pip ")]
    assert others[0] == "python -m tools.play"


def test_pip_and_uv_install_the_same_packages():
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    groups = {"requirements.txt": project["project"]["dependencies"]}
    for name, packages in project["project"]["optional-dependencies"].items():
        groups[f"requirements-{name}.txt"] = packages
    for file, packages in groups.items():
        wider = {"extras": "-r requirements.txt\n", "dev": "-r requirements-extras.txt\n"}
        assert wider.get(file[13:-4], "") in (ROOT / file).read_text()
        lines = [line.partition("#")[0].strip() for line in (ROOT / file).open()]
        assert packages == [line for line in lines if line and not line.startswith("-r ")], file
    assert project["project"]["requires-python"] == ">=3.10"
    assert not project["tool"]["uv"]["package"]


def test_no_page_is_too_long():
    long = {name: n for name, text in TEXTS.items() if (n := text.count("\n")) > 250}
    assert set(long) <= {"docs/log.md", "docs/molmo2.md", "docs/walk/README.md"}, long


@pytest.mark.parametrize("name", TEXTS)
def test_lines_of_a_page_fit_a_screen(name):
    """Code blocks have at most 76 columns, so that a laptop shows them without scrolling. Diffs are
    excepted. Text has at most 120 columns in its source."""
    blocks = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", TEXTS[name], re.MULTILINE)
    lines = [line for _, block in blocks for line in block.splitlines()]
    shown = [line for kind, block in blocks if kind != "diff" for line in block.splitlines()]
    assert not [line for line in shown if len(line) > 76]
    text = [line for line in TEXTS[name].splitlines() if line not in lines and line[:1] != "|"]
    assert not [line for line in text if len(line) > 120 and not line.startswith("![")]


@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"docs/molmo2.md"}))
def test_a_page_uses_standard_terms(name):
    prose = re.sub(r"```.*?```|`[^`]*`", "", TEXTS[name], flags=re.DOTALL)
    found = re.findall(rf"\b(?:{'|'.join(NOT_ON_PAGES)})\b", re.sub(r"\s+", " ", prose))
    assert not found


def test_blocks_and_cells_of_tables_are_commands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| a | `python b c` |\n| `x` | y |\n```bash\npython d \\\n  e   # f\n```\n")
    assert CI["commands"](page) == ["python b c", "python d e"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    """Checks the shell syntax. train.py parses its flags; other commands must have these flags."""
    subprocess.run(["bash", "-n", "-c", command], check=True)
    words = shlex.split(command)
    program = next((word for word in words if word.endswith((".py", ".sh"))), None)
    if program:
        assert (ROOT / program).exists()
        if "--stage" in words:
            config.parse(words[words.index("--stage") :])
    elif words[:2] == ["python", "-m"] and words[2] != "pytest":
        start = module(f"{words[2]}.__main__") or module(words[2])
        assert start, f"no module {words[2]}"
        source = "\n".join(SOURCES[path] for path in reached(start))
        for flag in (word.split("=")[0] for word in words if word.startswith("--")):
            in_config = f"--{config.spell_flag(flag[2:])}" in FLAGS_OF_TRAINING
            in_source = f'"{flag}"' in source or f'"{flag.replace("--no-", "--")}"' in source
            assert in_config or in_source, f"{words[2]} has no flag {flag}"


@pytest.mark.parametrize(("page", "command", "printed"), [
    ("README.md",
     "python -m tools.generate --model toy --prompt \"pointing: any shape\" --draw points.png",
     '<points coords="1 1 350 750 2 800 200 3 800 850">any shape</points>'),
    ("docs/convert.md",
     "python -m tools.convert tests/conformance/sharegpt.json runs/chats.jsonl --media tests/media",
     '{"rows": 4, "records": 4, "skipped": {}}'),
])
def test_a_command_prints_what_its_page_shows(page, command, printed, tmp_path, monkeypatch,
                                              capsys):
    assert command in CI["commands"](ROOT / page)
    assert printed in TEXTS[page]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    _, _, module, *words = shlex.split(command)
    words = [word.replace("tests/", f"{ROOT}/tests/") for word in words]
    monkeypatch.setattr(sys, "argv", [module, *words])
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(("page", "kind"), [
    ("README.md", "toy"), ("docs/own_data.md", "run"),
    pytest.param("README.md", "released", marks=pytest.mark.extras("safetensors"))])
def test_the_three_lines_of_python_answer_with_every_kind_of_model(
        page, kind, tmp_path, monkeypatch, capsys):
    """The model is the toy, which a run directory and a folder in the released form contain, too.
    The image is the one of README's first command."""
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)
    assert len(block.splitlines()) == 3
    model, tokenizer, config = open_model_folder("toy")
    names = {"toy": "toy", "run": tmp_path, "released": tmp_path / "released"}
    folder = {"toy": tmp_path / "unused", "run": tmp_path / "model"}.get(kind, names[kind])
    folder.mkdir()
    if kind == "run":
        save(model, folder)
    elif kind == "released":
        export(model, tokenizer, config, folder)
    tokenizer.save(folder)
    save_data_config(config, folder)
    (record,) = world.held_out_images("test", 0, 1, (2, 3, 4))
    (image,) = record["source"].images(record)
    Image.fromarray(image).save(tmp_path / "scene.png")
    monkeypatch.chdir(tmp_path)
    block = re.sub(r'load\(".*?"\)', f'load("{names[kind]}")', block)
    block = re.sub(r'answer\(".*?", image=".*?"', 'answer("pointing: any shape", image="scene.png"',
                   block)
    exec(block, {})
    assert capsys.readouterr().out == (
        '<points coords="1 1 350 750 2 800 200 3 800 850">any shape</points> '
        "[Place(frame=1.0, id='1', x=35.0, y=75.0), Place(frame=1.0, id='2', x=80.0, y=20.0), "
        "Place(frame=1.0, id='3', x=80.0, y=85.0)]\n")
    with pytest.raises(Unreadable, match=r"missing file: none\.png"):
        exec(re.sub(r'image=".*?"', 'image="none.png"', block), {})


# modules that would only cost time in the process of the first answer
NOT_NEEDED = ("train", "tools.bench", "evaluation.evaluate", "evaluation.report", "training.loader",
              "training.setup", "transformers", "scipy", "safetensors", "tokenizers", "pyarrow")


@pytest.mark.slow
def test_the_process_of_the_first_answer_imports_what_it_needs():
    program = ("import sys; from tools import generate\n"
               "generate.main(['--model', 'toy', '--prompt', 'pointing: any shape'])\n"
               "print(*sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert not modules & {*NOT_NEEDED}
    assert len(modules) < 2150, len(modules)             # more than half of them belong to torch


def test_training_commands_take_minutes_as_they_are_written():
    """Except for the recipes of the toy, they have at most 700 steps. CI lowers the steps, and
    rejects a command without --steps."""
    for command in COMMANDS:
        steps = re.search(r"--steps (\d+)", command)
        trains = "train.py" in command or "stages/" in command
        assert not trains or steps or command in CI["RECIPES"], command
        assert not steps or int(steps[1]) <= 700, command
        CI["shortened"](command)
    assert "--steps 4 " in CI["shortened"]("python train.py --stage 1 --steps 400 --out x")
    with pytest.raises(AssertionError, match="without --steps"):
        CI["shortened"]("python train.py --stage 1 --tiny --data my.jsonl")


def test_the_records_page_has_an_example_of_every_annotation():
    (block,) = re.findall(r"```json\n(.*?)```", TEXTS["docs/records.md"], re.DOTALL)
    records = [json.loads(text) for text in re.split(r"\n(?=\{)", block)]
    for record in records:
        parse(record)
    types = {annotation["type"] for record in records for annotation in record["annotations"]}
    assert types == set(WORDS["type"])


def test_the_records_page_names_every_field():
    names = {key for table in TABLES.values() for key in table}
    code = " ".join(re.findall(r"`([^`\n]+)`", TEXTS["docs/records.md"]))
    missing = {name for name in names if not re.search(rf"\b{name}\b", code)}
    assert not missing
