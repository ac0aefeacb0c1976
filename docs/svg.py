"""Makes elements of an SVG file as text. They are inserted into the template docs/diagram.svg."""

import html
import re
from itertools import groupby
from pathlib import Path

TEMPLATE = Path(__file__).parent / "diagram.svg"


def box(x, y, width, height, kind):
    return (f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" '
            f'class="{kind}"/>')


def line(kind, *points):
    path = "L".join(f"{x:.5g} {y:.5g}" for x, y in points)
    return f'<path d="M{path}" class="{kind}"/>'


def write(x, y, text, kind="", anchor="start"):
    """Lines of text, 14 units apart. y: the baseline of the first line."""
    return "".join(f'<text x="{x:.5g}" y="{y + 14 * k:.5g}" text-anchor="{anchor}" class="{kind}">'
                   f"{html.escape(words)}</text>" for k, words in enumerate(text.split("\n")))


def cells(x, y, width, height, kinds):
    """Yields a box for each run of equal kinds. None gets no box. width: the width of one cell."""
    start = 0
    for kind, run in groupby(kinds):
        n = len(list(run))
        if kind:
            yield box(x + start * width, y, n * width - 0.5, height, kind)
        start += n


def page(height, title, elements):
    """-> the text of the SVG file."""
    values = {"HEIGHT": str(height), "TITLE": title, "BODY": "\n".join(elements)}
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("{{([A-Z]+)}}", lambda match: values[match[1]], template)
