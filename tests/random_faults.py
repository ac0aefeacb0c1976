"""Plants random faults of one line in the code, and counts those that the tests notice.

    python -m tests.random_faults 100 7                # 100 faults, drawn with the seed 7
    python -m tests.random_faults 20 8 text/ data.py   # in files whose path begins like this

A fault is an operator, a comparison, a number or a condition that is replaced, or a call that is
left out. The test files of the changed file run first, then all test files of its folder. Read
each fault that is not noticed: some change nothing, or only what a GPU does. If the tests do not
end, it counts as not noticed. Messages, flags, pictures and benchmarks get no faults.
"""

import ast
import random
import subprocess
import sys
from pathlib import Path

from tests.faults import FAULTS, ROOT, copy_of_repository, run_tests

NO_FAULTS = ("tests/", "docs/", ".ci/", "tools/bench", "tools/ablate", "tools/walk",
             "evaluation/pictures.py", "toy/shapes.py")
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
               ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
               ast.NotIn: "in"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/",
             ast.Mod: "//"}
# {folder: its tests, if they are not only in the folder of the same name}; "" is the top level
FOLDERS = {
    "": "tests/test_*.py tests/training",
    "text": "tests/text tests/weights tests/test_encode.py",
    "records": "tests/records tests/test_encode.py tests/tools/test_check.py",
    "training": "tests/training tests/test_train.py",
    "weights": "tests/weights tests/test_model.py tests/tools/test_hf.py "
               "tests/tools/test_memory.py",
    "evaluation": "tests/evaluation tests/test_train.py tests/tools/test_evaluate.py "
                  "tests/tools/test_generate.py tests/tools/play/test_play.py",
    "toy": "tests/toy tests/test_train.py",
    "stages": "tests/training tests/test_stages.py",
    "tools/convert": "tests/tools/convert tests/tools/prepare tests/tools/test_benchmarks.py "
                     "tests/tools/test_mistakes.py"}


def changes_in(source):
    """The bytes of a file -> [(start, end, new text), ..], all possible faults."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:k])) for k in range(len(lines))]
    tree = ast.parse(source)
    hidden = {id(part) for node in ast.walk(tree) if is_message(node) for part in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) not in hidden:
            for first, last, new in faults_of(node):
                start = starts[first[0] - 1] + first[1]
                end = starts[last[0] - 1] + last[1]
                is_operator = new[:1] in ("", " ")
                # an operator beside a bracket is left: the bracket would lose its partner
                if not is_operator or not {*b"()"} & {*source[start:end]}:
                    found.append((start, end, new))
    return found


def is_message(node):
    """Is it the text of a message, an error, or a flag of a command?"""
    is_flag = (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
               and node.func.attr == "add_argument")
    return is_flag or isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert))


def faults_of(node):
    """Yields (first, last, new) for each fault of one node. first, last: (line, column)."""

    def begin(part):
        return part.lineno, part.col_offset

    def end(part):
        return part.end_lineno, part.end_col_offset

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = COMPARISONS[type(node.ops[0])]
        yield end(node.left), begin(node.comparators[0]), f" {new} "
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        is_text = isinstance(getattr(node.left, "value", None), str)
        if not is_text and not isinstance(node.left, ast.JoinedStr):
            yield end(node.left), begin(node.right), f" {OPERATORS[type(node.op)]} "
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        new = "or" if isinstance(node.op, ast.And) else "and"
        yield end(node.values[0]), begin(node.values[1]), f" {new} "
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield begin(node), end(node), repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        # 0.0 becomes 1.0
        new = node.value + 1 if isinstance(node.value, int) else (node.value * 1.5 or 1.0)
        yield begin(node), end(node), repr(new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield begin(node), begin(node.operand), ""
    elif isinstance(node, ast.If):
        for new in ("False", "True"):
            yield begin(node.test), end(node.test), new
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            and not is_message(node.value)):
        yield begin(node), end(node), "pass"
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("min", "max"):
        yield begin(node.func), end(node.func), "max" if node.func.id == "min" else "min"


def near_tests(file):
    """-> the test files that tests/faults.py names for a file, and test files of its name."""
    named = {test for fault in FAULTS if (fault.file, fault.marks) == (file, "not slow")
             for test in fault.tests.split()}
    folder, _, name = f"tests/{file}".rpartition("/")
    same = [Path(folder, f"test_{name}"), Path(folder, f"test_{Path(folder).name}.py")]
    return " ".join(sorted(named | {str(path) for path in same if (ROOT / path).exists()}))


def folder_tests(file):
    """-> the test files of the folder of a file, except tests of pages and of a GPU."""
    folder = file.rpartition("/")[0]
    patterns = FOLDERS.get(folder, f"tests/{folder}")
    found = [str(path.relative_to(ROOT)) for pattern in patterns.split()
             for path in sorted(ROOT.glob(pattern))]
    of_pages = ("cuda.py", "layout.py", "readme.py", "own_data.py", "cluster.py")
    return " ".join(test for test in found if not test.endswith(of_pages))


def noticed_by(file, repository):
    """-> the first test that fails, or ""."""
    for tests in filter(None, (near_tests(file), folder_tests(file))):
        if test := run_tests(tests, "not slow", repository)[0]:
            return test
    return ""


def main(n_faults, seed, *prefixes):
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split()
    files = [file for file in files
             if file.startswith(prefixes or "") and not file.startswith(NO_FAULTS)]
    possible = [(file, change) for file in files
                for change in changes_in((ROOT / file).read_bytes())]
    drawn = random.Random(int(seed)).sample(possible, int(n_faults))
    noticed = 0
    with copy_of_repository() as repository:
        for file, (start, end, new) in drawn:
            source = (repository / file).read_bytes()
            (repository / file).write_bytes(source[:start] + new.encode() + source[end:])
            test = noticed_by(file, repository)
            (repository / file).write_bytes(source)
            noticed += bool(test)
            number = source.count(b"\n", 0, start) + 1
            line = source.splitlines()[number - 1].decode().strip()
            print(f"{file}:{number}: {source[start:end].decode()!r} -> {new!r} in {line}\n"
                  f"    {test or 'NOT NOTICED'}", flush=True)
    print(f"{noticed} of {len(drawn)} faults are noticed")


if __name__ == "__main__":
    main(*sys.argv[1:])
