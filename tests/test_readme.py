"""What the README names is there: functions, tests, files. (Its commands are run by CI.)"""

import ast
import json
import re
from pathlib import Path

from PIL import Image

from tools import check

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def defined(path):
    """Names of the functions, classes, methods ("Class.method") and constants of a file."""
    names, tree = set(), ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{part.name}" for part in getattr(node, "body", ()) if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_every_function_that_the_tour_names_is_where_it_says():
    named = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", README)
    assert len(named) > 30
    for path, names in named:
        missing = set(re.findall(r"`([\w.]+)`", names)) - defined(ROOT / path)
        assert not missing, f"{path} has no {missing}"


def test_the_five_lines_make_a_training_set_of_a_folder(tmp_path, monkeypatch, capsys):
    (lines,) = re.findall(r"```python\n(import json, pathlib.*?)```", README, re.S)
    (tmp_path / "photos").mkdir()
    for name in ("cat.jpg", "dog.PNG", "notes.pdf"):
        Image.new("RGB", (60, 40)).save(tmp_path / "photos" / name)
        (tmp_path / "photos" / name).with_suffix(".txt").write_text(f"A {name[:3]}.\n")
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert len(lines.splitlines()) == 5 and check.main(["photos/my.jsonl", "--decode"]) == 0, capsys.readouterr().out
    assert [(r["image"], r["annotations"][0]["text"]) for r in map(json.loads, open("photos/my.jsonl"))] == [
        ("cat.jpg", "A cat."), ("dog.PNG", "A dog.")]


def test_every_test_and_file_that_is_named_is_there():
    tests = {name for path in (ROOT / "tests").glob("test_*.py") for name in defined(path) if name.startswith("test_")}
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 35 and not named - tests
    files = set(re.findall(r"`((?:tests|tools|stages)/[\w/]+\.\w+|[a-z_]+\.py)`", README)) | set(re.findall(r"\]\(([\w./-]+)\)", README))
    missing = {name for name in files if not (ROOT / name).exists()}
    assert len(files) > 25 and not missing
