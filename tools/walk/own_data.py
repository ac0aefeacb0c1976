"""Makes docs/own_data.ipynb: from ten photographs to an answer, with all outputs.

    python -m tools.walk.own_data --model runs/stage1-tiny

Runs all cells of tools/walk/own_data.txt on the CPU, in a few minutes, in a temporary folder
that looks like the root of the repository, and writes the notebook. Nothing else in the repository
changes. --model is the run directory of a trained toy. The last code cell needs the packages of
requirements-extras.txt (transformers). A line that begins with `!` is a shell command, as in
Jupyter.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from records.errors import warn
from tools.bench.peers import import_transformers
from tools.walk import pages

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "own_data.txt"
NOTEBOOK = "docs/own_data.ipynb"
MODEL = "runs/stage1-tiny"           # where the cells find the trained toy
COMMAND = re.compile(r"^!((?:.*\\\n)*.*)$", re.MULTILINE)


def read_cells():
    return pages.parse(SOURCE.read_text(encoding="utf-8"))


def as_python(source):
    """Python with Jupyter's `!command` lines -> Python that calls shell("command")."""
    return COMMAND.sub(lambda match: f"shell({match[1]!r})", source)


def shell(command):
    """Runs a command of bash and prints its stdout; CalledProcessError if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, check=True,
                          env=os.environ | {"PATH": path})
    print(done.stdout, end="")


@contextmanager
def working_folder(model):
    """A temporary working directory with links to the repository's files and to the trained toy;
    what the cells write under runs/ stays in it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.iterdir():
            if path.name not in (".git", "docs", "runs"):
                Path(folder, path.name).symlink_to(path)
        Path(folder, MODEL).parent.mkdir()
        Path(folder, MODEL).symlink_to(Path(model).resolve())
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def run(cells, model, shell=shell):
    """Runs the cells in a folder of their own, commands by shell(command) -> the cells, with what
    they give."""
    names = {"shell": shell}
    with working_folder(model):
        for cell in cells:
            if cell.is_code:
                pages.run_cell(cell, names, as_python(cell.source))
    return cells


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.walk.own_data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help=f"default {MODEL}")
    parser.add_argument("--out", type=Path, default=ROOT / NOTEBOOK,
                        help=f"the notebook to write (default {NOTEBOOK})")
    args = parser.parse_args(argv)
    try:
        if not (args.model / "model").is_dir():
            raise ValueError(f"--model {args.model}: no run directory; python train.py --stage 1 "
                             "--tiny makes one")
        import_transformers()        # also beside a torchvision that was built for another torch
        cells = run(read_cells(), args.model)
        args.out.write_text(pages.notebook(cells), encoding="utf-8")
    except (OSError, ValueError, subprocess.CalledProcessError) as e:
        warn(f"tools.walk.own_data: {e}")
        raise SystemExit(2) from None
    print(args.out)


if __name__ == "__main__":
    main()
