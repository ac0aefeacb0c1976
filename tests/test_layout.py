"""Rules about the layout of this repository: which modules there are, who imports whom, how long
files and functions are, and that no text refers to a file that does not exist.

    python -m pytest tests/test_layout.py    # one test per rule; a failure lists all violations
    python tests/test_layout.py [FOLDER]     # the violations by file, and the numbers of a checkout

Files are parsed (ast, tokenize), never imported, so that any checkout can be measured.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from functools import cached_property
from pathlib import Path
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
TOP_LEVEL = ["attention", "vision", "model", "data", "packing", "parallel", "train"]
MAX_TOP_LEVEL_LINES = 2150           # of the seven modules together
MAX_MODULE_LINES = 340               # of one module at top level
MAX_FILE_LINES = 400                 # of any other file but tests: one test file per module
MAX_FUNCTION_LINES = 60              # but for tests
MAX_COLUMNS = 100

# Packages that requirements.txt does not install: functions that need one import it when they are
# called. `resource` belongs to Python, but not on every system.
OPTIONAL = (
    "av", "huggingface_hub", "pyarrow", "resource", "safetensors", "scipy", "tensorboard",
    "tokenizers", "torch.utils.tensorboard", "torchcodec", "torchvision", "transformers",
)

# Notes that the authors had and a reader does not.
FOREIGN_TEXT = re.compile(
    r"\bspecs?\b|_the_spec\b|formats\.md|\bDESIGN\b|\bINTERFACE\.md|\bSTYLE\.md|\.\./shared"
)
PATH_WORD = re.compile(r"(?<![\w./:~$}{*-])((?:\.\./)*[\w.-]+(?:/[\w.*-]+)*/?)(?![\w*{$])")
CODE_SUFFIXES = (".py", ".md", ".sh")
# Files of other repositories, which texts may name: the official code, and transformers.
ELSEWHERE = ("allenai/", "olmo/", "launch_scripts/", "scripts/", "transformers/")
HISTORY = {"docs/log.md"}            # it names files as they were called at the time
SKIPPED_FOLDERS = {".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".ruff_cache"}


class Violation(NamedTuple):
    path: str
    line: int
    what: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.what}"


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

    @cached_property
    def prose(self):
        """[(line, text)] of what a reader reads: all of a page; of Python the comments and strings,
        but of a test's strings the docstrings only, since the others are its inputs."""
        if not self.path.endswith(".py"):
            return list(enumerate(self.lines, 1))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        found = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
        docstrings = set()
        for node in [self.tree, *ast.walk(self.tree)]:
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            if isinstance(node, kinds) and ast.get_docstring(node) is not None:
                docstrings.add(id(node.body[0].value))
        for node in ast.walk(self.tree):
            is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_string and (id(node) in docstrings or not self.is_test):
                found += enumerate(node.value.splitlines(), node.lineno)
        return sorted(found)


class Repository:
    def __init__(self, root):
        self.root = Path(root)
        self.sources = {}
        for path in sorted(self.root.rglob("*")):
            skipped = SKIPPED_FOLDERS & set(path.relative_to(self.root).parts)
            if path.is_file() and path.suffix in CODE_SUFFIXES and not skipped:
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
        """Paths of the project's files that a file imports, without empty __init__.py files."""
        names = {i.name for i in source.imports if with_functions or not i.in_function}
        paths = {self.module(name) for name in names} - {None, source.path}
        return {path for path in paths if self.sources[path].lines}

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
    for path in sorted(found - wanted):
        yield Violation(path, 1, "a module at top level beside the seven")
    for path in sorted(wanted - found):
        yield Violation(path, 1, "one of the seven modules is missing")
    total = count_lines([repository.sources[path] for path in wanted & found])
    if total > MAX_TOP_LEVEL_LINES:
        what = f"the seven modules have {total} lines, more than {MAX_TOP_LEVEL_LINES}"
        yield Violation("*.py", 1, what)


def no_file_is_too_long(repository):
    for source in repository.python:
        limit = MAX_FILE_LINES if "/" in source.path else MAX_MODULE_LINES
        if len(source.lines) > limit and not source.is_test:
            yield Violation(source.path, 1, f"{len(source.lines)} lines, more than {limit}")


def no_function_is_too_long(repository):
    for source in repository.python:
        for function in source.functions:
            length = length_of(function)
            if length > MAX_FUNCTION_LINES and not source.is_test:
                what = f"{function.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
                yield Violation(source.path, function.lineno, what)


def no_line_is_too_wide(repository):
    """One violation per file; `ruff check --select E501 --line-length 100` lists all lines."""
    for source in repository.python:
        wide = [k for k, line in enumerate(source.lines, 1) if len(line) > MAX_COLUMNS]
        if wide:
            what = f"{len(wide)} lines of more than {MAX_COLUMNS} columns, this is the first"
            yield Violation(source.path, wide[0], what)


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
                yield Violation(source.path, line, f"imports {head}, which stands higher")
    for circle in repository.circles():
        what = f"an import circle of {len(circle)} files: {', '.join(circle)}"
        yield Violation(circle[0], 1, what)


def functions_import_optional_packages_only(repository):
    for source in repository.python:
        heads = defaultdict(set)
        for i in source.imports:
            helper = source.path.startswith("tests/") and i.head == "tests"  # it may skip
            if i.in_function and not i.name.startswith(OPTIONAL) and not helper:
                heads[i.line].add(i.head)
        for line, names in sorted(heads.items()):
            own = names & repository.own
            kind = "a module of the project" if own else "a package that is always installed"
            what = f"imports {', '.join(sorted(names))} inside a function: {kind}"
            yield Violation(source.path, line, what)


def no_text_refers_to_notes_that_a_reader_lacks(repository):
    for source in repository.sources.values():
        for line, text in enumerate(source.lines, 1):
            found = FOREIGN_TEXT.search(text)
            if found and source.path != "tests/test_layout.py":
                yield Violation(source.path, line, f"refers to {found[0]!r}: {text.strip()[:60]}")


def every_file_that_a_text_names_exists(repository):
    """Words that end in .py, .md or .sh, and paths below a folder of this repository."""
    folders = {s.path.split("/")[0] for s in repository.python if "/" in s.path}
    for source in repository.sources.values():
        if source.path in HISTORY or source.path == "tests/test_layout.py":
            continue
        for line, text in source.prose:
            for word in PATH_WORD.findall(text):
                word = word.rstrip(".")
                named = is_file_name(word, folders | {"docs", "conformance"})
                if named and not exists(repository, source, word):
                    yield Violation(source.path, line, f"names {word}, which does not exist")


def is_file_name(word, folders):
    """Does a word of a text name a file of this repository?"""
    if word.startswith(ELSEWHERE) or FOREIGN_TEXT.search(word):
        return False
    below = word.split("/")[0] in folders and re.search(r"/.*\.\w+$", word)
    return bool(below) or word.endswith(CODE_SUFFIXES) or word.startswith("tests/")


def exists(repository, source, word):
    """Is there a file or folder of this name, from the root or beside the file that names it?"""
    folders = (repository.root, (repository.root / source.path).parent)
    if "*" in word:
        return any(list(folder.glob(word)) for folder in folders)
    return any((folder / word).exists() for folder in folders)


RULES = [
    the_modules_at_top_level_are_the_seven,
    no_file_is_too_long,
    no_function_is_too_long,
    no_line_is_too_wide,
    imports_go_downwards,
    functions_import_optional_packages_only,
    no_text_refers_to_notes_that_a_reader_lacks,
    every_file_that_a_text_names_exists,
]


@pytest.fixture(scope="module")
def repository():
    return Repository(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_layout(rule, repository):
    found = list(rule(repository))
    assert not found, f"{len(found)} violations:\n" + "\n".join(map(str, found))


# --------------------------------------------------------------------------------------------------
# the numbers of a checkout


def count_lines(sources):
    return sum(len(source.lines) for source in sources)


def length_of(function):
    return function.end_lineno - function.lineno + 1


def comment_lines(source):
    return sum(line.lstrip().startswith("#") for line in source.lines)


def wide_lines(source):
    return sum(len(line) > MAX_COLUMNS for line in source.lines)


def tuple_assignments(source):
    """`a, b = c, d`; a swap counts too."""
    assigned = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)]
    values = [node for node in assigned if isinstance(node.value, ast.Tuple)]
    return sum(isinstance(node.targets[0], ast.Tuple) for node in values)


def raises(source):
    return sum(isinstance(node, ast.Raise) for node in ast.walk(source.tree))


def numbers(repository):
    """{what: number}. The training path is train.py with all that it imports when it starts."""
    path = [repository.sources[name] for name in repository.reached("train.py", False)]
    longer = [repository.sources[name] for name in repository.reached("train.py", True)]
    code = [s for s in repository.python if not s.is_test and not s.path.startswith(".")]
    top_level = [source for source in code if "/" not in source.path]
    functions = [(length_of(f), f.name, source.path) for source in path for f in source.functions]
    circles = repository.circles()
    sizes = ", ".join(str(len(circle)) for circle in circles)
    readme = repository.sources.get("README.md")
    found = {
        "modules at top level": len(top_level),
        "lines of these modules": count_lines(top_level),
        "files on the training path": len(path),
        "lines on the training path": count_lines(path),
        "files, imports in functions included": len(longer),
        "lines, imports in functions included": count_lines(longer),
        "lines of all code without tests": count_lines(code),
        "longest function on the training path": "{}: {} in {}".format(*max(functions)),
        "import circles": f"{len(circles)}, of {sizes} files" if circles else 0,
        "README words": len(readme.text.split()) if readme else 0,
    }
    for counter in (comment_lines, wide_lines, tuple_assignments, raises):
        name = f"{counter.__name__.replace('_', ' ')} per 1,000 lines: training path, all code"
        shares = [1000 * sum(map(counter, part)) / count_lines(part) for part in (path, code)]
        found[name] = ", ".join(f"{share:.1f}" for share in shares)
    return found


def print_violations(repository):
    by_file = defaultdict(list)
    counts = Counter()
    for rule in RULES:
        for violation in rule(repository):
            by_file[violation.path].append(violation)
            counts[rule] += 1
    for path, violations in sorted(by_file.items()):
        print(f"{path}: {len(violations)}")
        for violation in sorted(violations, key=lambda v: v.line):
            print(f"  {violation.line:5} {violation.what}")
    print("\nviolations by rule")
    for rule in RULES:
        print(f"  {counts[rule]:5} {rule.__name__.replace('_', ' ')}")


def print_lengths(repository):
    print("\nlines of the modules at top level, of the longest other files, of the longest tests")
    ordered = sorted(repository.python, key=lambda source: -len(source.lines))
    top_level = [source for source in ordered if "/" not in source.path]
    tests = [source for source in ordered if source.is_test]
    others = [source for source in ordered if "/" in source.path and not source.is_test]
    for source in [*top_level, *others[:12], *tests[:5]]:
        print(f"  {len(source.lines):5} {source.path}")


def main(folder=ROOT):
    repository = Repository(folder)
    print_violations(repository)
    print_lengths(repository)
    print()
    for what, number in numbers(repository).items():
        print(f"{what:70} {number}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
