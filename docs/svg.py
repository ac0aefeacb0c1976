"""Makes elements of an SVG file as text. They are inserted into the template docs/diagram.svg."""

import html
import re
from itertools import groupby
from pathlib import Path

TEMPLATE = Path(__file__).parent / "diagram.svg"


def short(number):
    """A number -> its text with two decimals at most, and never "-0". The later digits of a
    computed number depend on the CPU."""
    return f"{round(number, 2) + 0.0:g}"


def box(x, y, width, height, kind):
    return (f'<rect x="{short(x)}" y="{short(y)}" width="{short(width)}" '
            f'height="{short(height)}" class="{kind}"/>')


def line(kind, *points):
    path = "L".join(f"{short(x)} {short(y)}" for x, y in points)
    return f'<path d="M{path}" class="{kind}"/>'


def write(x, y, text, kind="", anchor="start"):
    """Lines of text, 14 units apart. y: the baseline of the first line."""
    return "".join(
        f'<text x="{short(x)}" y="{short(y + 14 * k)}" text-anchor="{anchor}" class="{kind}">'
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
