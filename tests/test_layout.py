"""Rules about the layout of this repository: which modules there are, who imports whom, how long
files and functions are, how large each part is, and that no text names a file that does not exist.

    python -m pytest tests/test_layout.py    # a failure lists all violations
    python -m tests.test_layout              # the numbers beside their ceilings

Files are parsed, never imported.
"""

import ast
import io
import re
import subprocess
import tokenize
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.faults import FAULTS

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
    {"tools", "examples"},
]
# What train.main passes in, so that these packages do not import it.
WATCHERS = {"evaluation", "toy"}
UNWATCHED = {"text", "stages", "records", "weights", "training"}
TOP_LEVEL = ["attention", "vision", "model", "data", "packing", "parallel", "train"]
MAX_FILE_LINES = 420                 # but for tests
MAX_FUNCTION_LINES = 50              # but for tests; 57: attention.block_mask, all others 50

# What parts of the repository may measure at most, in tokens: names, operators, numbers and strings
# of Python's tokenizer. So comments, docstrings, blank lines and broken lines cost nothing, and a
# dense line costs as much as a plain one. A change that makes a part smaller lowers its number.
CEILINGS = {
    "the seven modules": 16_670,
    "the seven modules, tokens per statement": 12.2,
    "imported by train.py, without evaluation/ and toy/": 53_700,
    "the same, in files": 42,
    "all Python but tests": 157_120,
    "tools/": 64_640,
    "tools/bench/": 11_720,
    "tools/convert/, tools/prepare/ and tools/benchmarks.py": 31_620,
    "tests/": 203_358,
}

# Packages that requirements.txt does not install: functions that need one import it when they are
# called. `resource` belongs to Python, but not on every system.
OPTIONAL = (
    "huggingface_hub", "pyarrow", "resource", "safetensors", "scipy", "selenium", "tensorboard",
    "tokenizers", "torch.utils.tensorboard", "torchvision", "transformers", "yaml",
)

PATH_WORD = re.compile(r"(?<![\w./:~$}{*-])((?:\.\./)*[\w.-]+(?:/[\w.*-]+)*/?)(?![\w*{$])")
CODE_SUFFIXES = (".py", ".md", ".sh")
# Files of other repositories, which texts may name: the official code, and transformers.
ELSEWHERE = ("allenai/", "olmo/", "launch_scripts/", "scripts/", "transformers/")
SKIPPED_FOLDERS = {".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".ruff_cache"}


def list_files(root):
    """Paths of the files that git knows, not those that a user has put there; without git, all."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    if (root / ".git").exists():
        names = subprocess.run(command, capture_output=True, text=True).stdout.split("\0")[:-1]
    else:
        names = [path.relative_to(root).as_posix() for path in root.rglob("*")
                 if not SKIPPED_FOLDERS & {*path.relative_to(root).parts}]
    return sorted(name for name in names if (root / name).is_file())


FILES = list_files(ROOT)
TEXTS = {path: (ROOT / path).read_text(encoding="utf-8") for path in FILES
         if path.endswith(CODE_SUFFIXES)}
TREES = {path: ast.parse(text) for path, text in TEXTS.items() if path.endswith(".py")}
CODE = [path for path in TREES if not path.startswith(("tests/", "."))]


def head(path_or_name):
    return re.split(r"[./]", path_or_name)[0]


def count_lines(paths):
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths)


def functions(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(TREES[path]) if isinstance(node, kinds)]


@cache
def imports(path):
    """[(line, name, is it inside a function), ..]; `from a import b` counts as a and as a.b, since
    b may be a module or a name."""
    inside = {id(node) for function in functions(path) for node in ast.walk(function)}
    found = []
    for node in ast.walk(TREES[path]):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [(node.lineno, name, id(node) in inside) for name in names]
    return found


def module(name):
    """Path of the file that an import names; None where it is none of ours."""
    base = name.replace(".", "/")
    return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in TREES), None)


def imported(path, with_functions=True):
    """Paths of our files that a file imports; a.b runs a/__init__.py too."""
    names = {name for _, name, inside in imports(path) if with_functions or not inside}
    return {module(name) for name in names | set(map(head, names))} - {None, path}


def reached(start, with_functions=True):
    """Paths of `start` and of all files that are imported when it is imported."""
    seen = {start}
    waiting = [start]
    while waiting:
        new = imported(waiting.pop(), with_functions) - seen
        seen |= new
        waiting += new
    return seen


# --------------------------------------------------------------------------------------------------
# the rules


def test_the_modules_at_top_level_are_the_seven():
    assert {path for path in TREES if "/" not in path} == {f"{name}.py" for name in TOP_LEVEL}


def test_no_file_and_no_function_is_too_long():
    long = []
    for path in [path for path in TREES if not path.startswith("tests/")]:
        if count_lines([path]) > MAX_FILE_LINES:
            long.append(path)
        long += [f"{path}:{function.lineno}" for function in functions(path)
                 if function.end_lineno - function.lineno >= MAX_FUNCTION_LINES]
    assert not long


def layer_of(name):
    """Number of the layer of a module or file; -1 for others, such as torch."""
    return next((k for k, layer in enumerate(LAYERS) if head(name) in layer), -1)


def test_imports_go_downwards_and_in_no_circle():
    upwards = [f"{path}:{line}: imports {name}" for path in CODE if layer_of(path) >= 0
               for line, name, _ in imports(path) if layer_of(name) > layer_of(path)]
    assert not upwards
    try:
        TopologicalSorter({path: imported(path) for path in CODE}).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {error.args[1]}") from None


def test_what_main_passes_in_is_not_imported_below_it():
    wrong = [f"{path}:{line}: imports {name}" for path in CODE if head(path) in UNWATCHED
             for line, name, _ in imports(path) if head(name) in WATCHERS]
    assert not wrong


def test_functions_import_optional_packages_only():
    wrong = [f"{path}:{line}: imports {name}" for path in TREES
             for line, name, inside in imports(path) if inside and not name.startswith(OPTIONAL)
             and not (path.startswith("tests/") and head(name) == "tests")]      # it may skip
    assert not wrong


def test_every_file_that_a_text_names_exists():
    """Words that end in .py, .md or .sh, and paths below a folder of this repository."""
    folders = {head(path) for path in TREES if "/" in path}
    missing = []
    for path in [path for path in TEXTS if not path.startswith("tests/")]:
        for line, text in enumerate(TEXTS[path].splitlines(), 1):
            for word in (word.rstrip(".") for word in PATH_WORD.findall(text)):
                below = word.split("/")[0] in folders and re.search(r"/.*\.\w+$", word)
                is_file = below or word.endswith(CODE_SUFFIXES)
                if is_file and not word.startswith(ELSEWHERE) and not any(
                        list(folder.glob(word)) for folder in (ROOT, (ROOT / path).parent)):
                    missing.append(f"{path}:{line}: {word}")
    assert not missing


def test_no_line_of_python_has_more_than_100_columns():
    assert not [f"{path}:{line}" for path in TREES
                for line, text in enumerate(TEXTS[path].splitlines(), 1) if len(text) > 100]


def test_text_is_utf_8_under_every_locale():
    """open, read_text, write_text and subprocess name the encoding, or use bytes."""
    wrong = []
    for path in CODE:
        for call in (node for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func)
            is_text = function.endswith((".read_text", ".write_text"))
            if function == "open":
                is_text = not any("b" in ast.unparse(mode) for mode in call.args[1:2])
            is_text = is_text or "text" in [word.arg for word in call.keywords
                                            if function.startswith("subprocess.")]
            if is_text and "encoding" not in [word.arg for word in call.keywords]:
                wrong.append(f"{path}:{call.lineno}: {function} depends on the locale")
    assert not wrong


def test_every_planted_fault_has_its_line():
    assert not [fault for fault in FAULTS if TEXTS[fault.file].count(fault.old) != 1]


@cache
def tokens_of(path):
    """Tokens of a file. A docstring is one of them, a comment none."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    return sum(token.type in kinds
               for token in tokenize.generate_tokens(io.StringIO(TEXTS[path]).readline))


def count_tokens(paths):
    return sum(map(tokens_of, paths))


def count_statements(paths):
    """Statements of the syntax tree of files, without imports and docstrings."""
    nodes = [node for path in paths for node in ast.walk(TREES[path])]
    return sum(isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom)
               and not is_docstring(node) for node in nodes)


def is_docstring(node):
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def numbers():
    """{what: number} with the keys of CEILINGS."""
    seven = [path for path in CODE if "/" not in path]
    path_of_training = [path for path in reached("train.py", with_functions=False)
                        if head(path) not in WATCHERS]
    rows = ("tools/convert/", "tools/prepare/", "tools/benchmarks.py")
    return {
        "the seven modules": count_tokens(seven),
        "the seven modules, tokens per statement": count_tokens(seven) / count_statements(seven),
        "imported by train.py, without evaluation/ and toy/": count_tokens(path_of_training),
        "the same, in files": len(path_of_training),
        "all Python but tests": count_tokens(
            path for path in TREES if not path.startswith("tests/")),
        "tools/": count_tokens(path for path in CODE if path.startswith("tools/")),
        "tools/bench/": count_tokens(path for path in CODE if path.startswith("tools/bench/")),
        "tools/convert/, tools/prepare/ and tools/benchmarks.py": count_tokens(
            path for path in CODE if path.startswith(rows)),
        "tests/": count_tokens(path for path in TREES if path.startswith("tests/")),
    }


def test_no_part_is_larger_than_its_ceiling():
    found = numbers()
    assert {what: n for what, n in found.items() if n > CEILINGS[what]} == {}


def test_comments_docstrings_and_broken_lines_are_not_counted(monkeypatch):
    text = ("def f(a,\n"
            "      b):\n"
            '    """Adds."""\n'
            "    # two numbers\n"
            "\n"
            "    return a + b\n")
    monkeypatch.setitem(TEXTS, "f.py", text)
    monkeypatch.setitem(TREES, "f.py", ast.parse(text))
    # def f ( a , b ) : | the docstring | return a + b
    assert count_tokens(["f.py"]) == 8 + 1 + 4
    assert count_statements(["f.py"]) == 2  # def and return


def test_files_of_a_user_are_no_part_of_the_repository(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("own.py", "cat.txt"):
        (tmp_path / name).write_text("")
    subprocess.run(["git", "-C", tmp_path, "add", "own.py"], check=True)
    assert list_files(tmp_path) == ["own.py"]


if __name__ == "__main__":
    for what, number in numbers().items():
        print(f"{what:56} {number:9,.1f} {CEILINGS[what]:9,}")
