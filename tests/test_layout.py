"""Rules about the layout of this repository: which modules there are, who imports whom, how long
files and functions are, how large the whole is, and that no text names a file that does not exist.

    python -m pytest tests/test_layout.py    # one test per rule; a failure lists all violations
    python tests/test_layout.py [FOLDER]     # the numbers of a checkout beside their ceilings

Files are parsed (ast, tokenize), never imported, so that any checkout can be measured.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# Modules and packages by layer. A file imports from its own layer and from earlier ones only.
LAYERS = [
    {"attention", "vision", "text", "stages"},
    {"model", "records"},
    {"data"},
    {"packing", "parallel", "toy"},
    {"weights"},
    {"training"},
    {"evaluation"},
    {"train"},
    {"tools"},
]
# What main passes in, so that these packages do not import it.
WATCHERS = {"evaluation", "toy"}
UNWATCHED = {"text", "stages", "records", "weights", "training"}
TOP_LEVEL = ["attention", "vision", "model", "data", "packing", "parallel", "train"]
MAX_MODULE_LINES = 340               # of one module at top level
MAX_FILE_LINES = 400                 # of any other file but tests: one test file per module
MAX_FUNCTION_LINES = 60              # but for tests

# What the whole may measure: a change that makes it smaller lowers these numbers. Lines are those
# of Python files, maps (__init__.py) included; `numbers` counts them.
CEILINGS = {
    "lines: the seven modules": 2_163,
    "lines: attention.py": 255,
    "lines: data.py": 336,
    "lines: text/": 1_092,
    "lines: records/": 1_449,
    "lines: training/": 2_184,
    "lines: weights/": 978,
    "lines: evaluation/": 1_832,
    "lines: toy/": 1_085,
    "lines: stages/": 228,
    "lines: tools/": 6_566,
    "lines: all Python but tests": 17_618,
    "lines: html, js, css, txt, sh": 360,
    "lines: tests": 17_398,
    "files imported by train.py": 60,
    "lines imported by train.py": 10_590,
    "files imported by train.py but evaluation/ and toy/": 43,
    "lines imported by train.py but evaluation/ and toy/": 7_673,
    "% of lines over 88 columns": 8.7,
    "mean characters of a non-blank line": 51.3,
    "raise per 1,000 lines": 7.4,
    "tuple-to-tuple assignments per 1,000 lines": 2.4,
}
MIN_PROSE = 15                       # % of lines that are comments or docstrings

# Packages that requirements.txt does not install: functions that need one import it when they are
# called. `resource` belongs to Python, but not on every system.
OPTIONAL = (
    "huggingface_hub", "pyarrow", "resource", "safetensors", "scipy", "selenium", "tensorboard",
    "tokenizers", "torch.utils.tensorboard", "torchvision", "transformers",
)

PATH_WORD = re.compile(r"(?<![\w./:~$}{*-])((?:\.\./)*[\w.-]+(?:/[\w.*-]+)*/?)(?![\w*{$])")
CODE_SUFFIXES = (".py", ".md", ".sh")
OTHER_SUFFIXES = (".html", ".js", ".css", ".txt", ".sh")
# Files of other repositories, which texts may name: the official code, and transformers.
ELSEWHERE = ("allenai/", "olmo/", "launch_scripts/", "scripts/", "transformers/")
SKIPPED_FOLDERS = {".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".ruff_cache"}


class Import(NamedTuple):
    line: int
    name: str                        # "records.media", for `import` and `from .. import` alike
    in_function: bool

    @property
    def head(self):
        return self.name.split(".")[0]


class Source:
    """One Python file, page or shell script of a repository."""

    def __init__(self, root, path):
        self.path = path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.is_test = self.path.startswith("tests/")

    @cached_property
    def tree(self):
        return ast.parse(self.text)

    @cached_property
    def functions(self):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    @cached_property
    def imports(self):
        """Every import. `from a import b` counts as a and as a.b: b may be a module or a name."""
        in_functions = {id(node) for function in self.functions for node in ast.walk(function)}
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [Import(node.lineno, name, id(node) in in_functions) for name in names]
        return found


def list_files(root):
    """The files of a checkout that git knows, not those that its user has put there; of a copy
    without git, all files."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    known = subprocess.run(command, capture_output=True, text=True).stdout.split("\0")
    paths = [root / name for name in known[:-1]] if (root / ".git").exists() else root.rglob("*")
    return sorted(path for path in paths if path.is_file()
                  and not SKIPPED_FOLDERS & set(path.relative_to(root).parts))


class Repository:
    def __init__(self, root):
        self.root = Path(root)
        self.files = list_files(self.root)
        self.sources = {}
        for path in self.files:
            if path.suffix in CODE_SUFFIXES:
                source = Source(self.root, path)
                self.sources[source.path] = source
        self.python = [s for s in self.sources.values() if s.path.endswith(".py")]
        self.own = {re.split(r"[./]", source.path)[0] for source in self.python}

    def module(self, name):
        """Path of the project's file that an import names; None where it names none."""
        base = name.replace(".", "/")
        paths = (f"{base}.py", f"{base}/__init__.py")
        return next((path for path in paths if path in self.sources), None)

    def imported(self, source, with_functions):
        """Paths of the project's files that a file imports; a.b runs a/__init__.py too."""
        names = {i.name for i in source.imports if with_functions or not i.in_function}
        names |= {i.head for i in source.imports if i.name in names}
        return {self.module(name) for name in names} - {None, source.path}

    def reached(self, start, with_functions):
        """Paths of `start` and of all files that are imported when it is imported."""
        seen = set()
        waiting = [start]
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += self.imported(self.sources[path], with_functions)
        return seen

    def circles(self):
        """Groups of files that import each other, directly or through others."""
        paths = [source.path for source in self.python if not source.is_test]
        reach = {path: self.reached(path, with_functions=True) for path in paths}
        groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach}
        return [sorted(group) for group in groups if len(group) > 1]


# --------------------------------------------------------------------------------------------------
# the rules: each yields its violations


def the_modules_at_top_level_are_the_seven(repository):
    found = {source.path for source in repository.python if "/" not in source.path}
    wanted = {f"{name}.py" for name in TOP_LEVEL}
    for path in sorted(found ^ wanted):
        yield f"{path}: " + ("not one of the seven" if path in found else "missing")


def no_file_and_no_function_is_too_long(repository):
    for source in repository.python:
        if source.is_test:
            continue
        most = MAX_FILE_LINES if "/" in source.path else MAX_MODULE_LINES
        if len(source.lines) > most:
            yield f"{source.path}: {len(source.lines)} lines, more than {most}"
        for function in source.functions:
            n = function.end_lineno - function.lineno + 1
            if n > MAX_FUNCTION_LINES:
                yield f"{source.path}:{function.lineno}: {n} lines, more than {MAX_FUNCTION_LINES}"


def layer_of(name):
    """Number of the layer of a module or file; None for tests, which may import anything."""
    head = re.split(r"[./]", name)[0]
    return next((k for k, layer in enumerate(LAYERS) if head in layer), None)


def imports_go_downwards(repository):
    for source in repository.python:
        layer = layer_of(source.path)
        for line, head in sorted({(i.line, i.head) for i in source.imports}):
            imported = layer_of(head)
            if layer is not None and imported is not None and imported > layer:
                yield f"{source.path}:{line}: imports {head}, which stands higher"
            if head in WATCHERS and source.path.split("/")[0] in UNWATCHED:
                yield f"{source.path}:{line}: imports {head}, which train.main passes in"
    for circle in repository.circles():
        yield f"{circle[0]}: a circle of imports: {', '.join(circle)}"


def functions_import_optional_packages_only(repository):
    for source in repository.python:
        for i in source.imports:
            helper = source.is_test and i.head == "tests"                    # it may skip
            if i.in_function and not i.name.startswith(OPTIONAL) and not helper:
                yield f"{source.path}:{i.line}: imports {i.name} inside a function"


def every_file_that_a_text_names_exists(repository):
    """Words that end in .py, .md or .sh, and paths below a folder of this repository."""
    folders = {s.path.split("/")[0] for s in repository.python if "/" in s.path}
    for source in repository.sources.values():
        if source.is_test:
            continue
        for line, text in enumerate(source.lines, 1):
            for word in PATH_WORD.findall(text):
                word = word.rstrip(".")
                below = word.split("/")[0] in folders and re.search(r"/.*\.\w+$", word)
                is_file = below or word.endswith(CODE_SUFFIXES)
                beside = (repository.root / source.path).parent
                if is_file and not word.startswith(ELSEWHERE) and not any(
                        list(folder.glob(word)) for folder in (repository.root, beside)):
                    yield f"{source.path}:{line}: names {word}, which does not exist"


def text_is_utf_8_under_every_locale(repository):
    """open, read_text and write_text name the encoding, or open reads or writes bytes."""
    for source in repository.python:
        calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
        for call in () if source.is_test else calls:
            function = ast.unparse(call.func)
            is_text = function.endswith((".read_text", ".write_text"))
            if function == "open":
                is_text = not any("b" in ast.unparse(mode) for mode in call.args[1:2])
            if is_text and "encoding" not in [word.arg for word in call.keywords]:
                yield f"{source.path}:{call.lineno}: {function} depends on the locale"


RULES = [
    the_modules_at_top_level_are_the_seven,
    no_file_and_no_function_is_too_long,
    imports_go_downwards,
    functions_import_optional_packages_only,
    every_file_that_a_text_names_exists,
    text_is_utf_8_under_every_locale,
]


@pytest.fixture(scope="module")
def repository():
    return Repository(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_layout(rule, repository):
    found = list(rule(repository))
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


# --------------------------------------------------------------------------------------------------
# the numbers of a checkout


def count_lines(sources):
    return sum(len(source.lines) for source in sources)


def prose_lines(source):
    """How many lines hold a comment or belong to a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    lines = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(source.tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def is_tuple_assignment(node):
    """`a, b = c, d`; a swap counts too."""
    tuples = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    return tuples and isinstance(node.targets[0], ast.Tuple)


def numbers(repository):
    """{what: number} with the keys of CEILINGS, and the share of prose."""
    code = [s for s in repository.python if not s.is_test and not s.path.startswith(".")]
    lines = [line for source in code for line in source.lines]
    nodes = [node for source in code for node in ast.walk(source.tree)]
    path = [repository.sources[name] for name in repository.reached("train.py", False)]
    unwatched = [source for source in path if source.path.split("/")[0] not in WATCHERS]
    others = [path for path in repository.files if path.suffix in OTHER_SUFFIXES
              and re.match("[a-z].*/", path.relative_to(repository.root).as_posix())]
    found = {
        "lines: the seven modules": count_lines(s for s in code if "/" not in s.path),
        "lines: attention.py": len(repository.sources["attention.py"].lines),
        "lines: data.py": len(repository.sources["data.py"].lines),
    }
    for package in ("text", "records", "training", "weights", "evaluation", "toy", "stages",
                    "tools"):
        inside = [source for source in code if source.path.startswith(f"{package}/")]
        found[f"lines: {package}/"] = count_lines(inside)
    per_thousand = 1000 / len(lines)
    return found | {
        "lines: all Python but tests": len(lines),
        "lines: html, js, css, txt, sh": sum(len(p.read_text().splitlines()) for p in others),
        "lines: tests": count_lines(s for s in repository.python if s.is_test),
        "files imported by train.py": len(path),
        "lines imported by train.py": count_lines(path),
        "files imported by train.py but evaluation/ and toy/": len(unwatched),
        "lines imported by train.py but evaluation/ and toy/": count_lines(unwatched),
        "% of lines over 88 columns": 100 * sum(len(x) > 88 for x in lines) / len(lines),
        "mean characters of a non-blank line": mean(len(x) for x in lines if x.strip()),
        "raise per 1,000 lines": per_thousand * sum(isinstance(n, ast.Raise) for n in nodes),
        "tuple-to-tuple assignments per 1,000 lines": per_thousand * sum(
            map(is_tuple_assignment, nodes)),
        "% of lines that are comments or docstrings": (
            100 * sum(map(prose_lines, code)) / len(lines)),
    }


def test_the_whole_is_no_larger_than_its_ceilings(repository):
    found = numbers(repository)
    above = {what: f"{found[what]:.1f} > {most}" for what, most in CEILINGS.items()
             if round(found[what], 1) > most}
    assert not above
    assert found["% of lines that are comments or docstrings"] >= MIN_PROSE


def test_every_planted_fault_has_its_line(repository):
    from tests.faults import FAULTS

    for fault in FAULTS:
        assert repository.sources[fault.file].text.count(fault.old) == 1, fault


def test_files_of_a_user_are_no_part_of_the_repository(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("own.py", "cat.txt"):
        (tmp_path / name).write_text("")
    subprocess.run(["git", "-C", tmp_path, "add", "own.py"], check=True)
    assert list_files(tmp_path) == [tmp_path / "own.py"]


def main(folder=ROOT):
    for what, number in numbers(Repository(folder)).items():
        print(f"{what:44} {number:9,.1f} {CEILINGS.get(what, MIN_PROSE):9,}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
