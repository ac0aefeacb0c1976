"""page.txt, the one source of the walk, run and written as a page of Markdown and as a notebook.

    ```run NAME What the picture shows.      code that is run; its value may be a picture
    ```exercise                              code that is shown and written to docs/walk/mine.py

The value of the last line of a block is shown: a PIL image, an Animation, or nothing. What it
prints is shown as text. In the page the result comes first and the code can be unfolded below; in
the notebook the code comes first, as everywhere.
"""

import ast
import base64
import contextlib
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from tools.walk import whole
from tools.walk.boxes import Animation

SOURCE = Path(__file__).parent / "page.txt"
EXERCISE = re.compile(r"^```exercise\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
STUBS = "docs/walk/mine.py"
MINE = '''"""The exercises of the walk (README.md in this folder): write the bodies, then run

    python -m tools.walk --check FILE                 # this file or a copy of it
"""

# ruff: noqa: F401    these are for what you write
import torch
import torch.distributed as dist

import parallel
import train
'''
BLOCK = re.compile(r"^```run ?(\S*) ?(.*?)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


@dataclass
class Cell:
    """A piece of the page: text, or code with what it gave."""
    source: str
    is_code: bool = False
    name: str = ""                   # of the picture's file, without its ending
    alt: str = ""                    # what the picture shows
    printed: str = ""
    files: dict = field(default_factory=dict)            # {file name: bytes}, at most one


def parse(text):
    """The text of page.txt -> [Cell, ..]."""
    cells, end = [], 0
    for match in BLOCK.finditer(text):
        cells.append(Cell(text[end : match.start()].strip()))
        cells.append(Cell(match[3], True, match[1], match[2]))
        end = match.end()
    cells.append(Cell(text[end:].strip()))
    for cell in cells:
        cell.source = cell.source.replace("```exercise", "```python")
    return [cell for cell in cells if cell.source]


def run(cells):
    """Runs the code cells in their order, in one namespace, and keeps what they give."""
    names = {}
    for cell in cells:
        if cell.is_code:
            run_cell(cell, names)
    return cells


def run_cell(cell, names, code=None):
    """code: what is run, where it differs from the source that the reader sees."""
    tree = ast.parse(code or cell.source)
    last = None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<walk>", "exec"), names)
        value = eval(compile(last, "<walk>", "eval"), names) if last else None
    cell.printed = printed.getvalue()
    if isinstance(value, Image.Image):
        cell.files[f"{cell.name}.png"] = png(value)
    elif isinstance(value, Animation):
        cell.files[f"{cell.name}.gif"] = value.data()
    assert bool(cell.files) == bool(cell.name), f"a picture has a name, and only a picture: {cell}"


def png(image):
    """A picture of few colours -> the bytes of a small PNG file."""
    file = io.BytesIO()
    image.quantize(128, dither=0).save(file, "PNG", optimize=True)
    return file.getvalue()


def markdown(cells):
    """The page: each result, then its code, which the reader can unfold."""
    parts = ["<!-- Made by `python -m tools.walk` from tools/walk/page.txt; change that file. -->"]
    for cell in cells:
        if not cell.is_code:
            parts.append(cell.source)
            continue
        parts += [f"![{cell.alt}]({name})" for name in cell.files]
        if cell.printed:
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        code = f"```python\n{cell.source}\n```"
        parts.append(f"<details><summary>The code that made this</summary>\n\n{code}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def lines(text):
    return text.splitlines(keepends=True)


def notebook(cells):
    """The same as a notebook of nbformat 4.5 with all outputs, as text."""
    found, n_run = [], 0
    for number, cell in enumerate(cells, 1):
        made = {"cell_type": "code" if cell.is_code else "markdown", "id": f"cell-{number}",
                "metadata": {}, "source": lines(cell.source)}
        if cell.is_code:
            n_run += 1
            made |= {"execution_count": n_run, "outputs": outputs(cell, n_run)}
        found.append(made)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": found, "metadata": {"kernelspec": kernel,
                                         "language_info": {"name": "python"}},
            "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def outputs(cell, number):
    made = []
    if cell.printed:
        made.append({"name": "stdout", "output_type": "stream", "text": lines(cell.printed)})
    for name, content in cell.files.items():
        encoded = base64.b64encode(content).decode()
        data = {"text/plain": [f"<{cell.alt}>"]}
        if name.endswith(".gif"):            # as HTML, since nbconvert shows no image/gif
            data["text/html"] = f'<img src="data:image/gif;base64,{encoded}" alt="{cell.alt}">'
        else:
            data["image/png"] = encoded
        made.append({"data": data, "execution_count": number, "metadata": {},
                     "output_type": "execute_result"})
    return made


def files():
    """-> {path in the repository: bytes} of everything that the walk consists of."""
    text = SOURCE.read_text(encoding="utf-8")
    cells = run(parse(text))
    made = {"docs/images/whole.png": png(whole.picture())}
    for cell in cells:
        made |= {f"docs/walk/{name}": content for name, content in cell.files.items()}
    made["docs/walk/README.md"] = markdown(cells).encode()
    made["docs/walk/walk.ipynb"] = notebook(cells).encode()
    stubs = [f"{stub}\n" for stub in EXERCISE.findall(text)]
    made[STUBS] = "\n\n".join([MINE, *stubs]).encode()
    return made


def write(folder):
    """Writes all files below `folder` -> their paths; the exercises only where there are none."""
    paths = []
    for name, content in files().items():
        path = Path(folder) / name
        if name == STUBS and path.exists():                          # with a reader's solutions
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths.append(path)
    return paths
