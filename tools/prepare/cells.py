"""Cells of published sets: texts, numbers, points.

A row, or one annotation of a row, is left out by a Skip, whose reason is counted.
"""

import math


class Skip(Exception):
    """The reason why a row, or one annotation of a row, is left out."""


def require(condition, reason):
    if not condition:
        raise Skip(reason)


def text_of(value):
    """A string without surrounding white space; None if nothing is left."""
    return value.strip() or None if isinstance(value, str) else None


def text_or_skip(value, what):
    text = text_of(value)
    require(text, f"empty {what}")
    return text


def number_of(value):
    """A finite number, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def meta_of(**values):
    """{"meta": {..}} of the values that are not null, or {}: parquet fills in nulls."""
    meta = {}
    for name, value in values.items():
        if text_of(value) or number_of(value) is not None or isinstance(value, bool):
            meta[name] = value
    return {"meta": meta} if meta else {}


def size_of(width, height):
    """[width, height] in pixels; None if one of them is unknown."""
    is_known = min(number_of(width) or 0, number_of(height) or 0) >= 1
    return [int(width), int(height)] if is_known else None


def xy_points(cell):
    """[{"x":, "y":}, ..] from a list of structs, or from a struct of lists."""
    if isinstance(cell, dict):
        return [{"x": x, "y": y} for x, y in zip(cell["x"], cell["y"], strict=True)]
    return [{"x": point["x"], "y": point["y"]} for point in cell or []]
