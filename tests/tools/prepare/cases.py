"""What the miniatures of the published sets are made of: column types, cells, and the records
expected of them."""

import hashlib
import io
from typing import NamedTuple

from PIL import Image


class Case(NamedTuple):
    """A miniature. Types of columns as published, in one letter each: s string, i int64, f float64,
    g float32, b bool; [x] is a list, {..} a struct. columns None: the set is published as JSON."""

    columns: dict | None
    rows: list
    records: list                    # what comes of the rows, without ids
    skipped: dict = {}               # noqa: RUF012 - nobody changes it
    arguments: tuple = ()            # of the command


U = "https://example.org/u.jpg"
V = "https://example.org/v.jpg?a=1&b=2"
W = "http://example.org/w"
HASH = "ab" * 32
XYS = ["xy"]                         # a list of structs
XSYS = {"x": ["g"], "y": ["g"]}      # a struct of lists
IMAGE_CELL = {"bytes": "binary", "path": "s"}


def image_file(colour, kind="png", size=(6, 4)):
    """Bytes of an image file."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


RED = image_file("red")
BLUE = image_file("blue")
JPEG = image_file("green", "jpeg")


def sha(value):
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()


def image_cell(data=None, path=None):
    return {"bytes": data, "path": path}


def file_name(data, suffix="png"):
    """Of an image that lay inside a file."""
    return f"{sha(data)}.{suffix}"


def url_image(url, **more):
    """The image entry of a record."""
    return {"path": sha(url), "url": url, **more}


def xy(*pairs):
    return [{"x": x, "y": y} for x, y in pairs]


def messages(*texts):
    """Of user and assistant in turn."""
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def question(style, words, **target):
    return {"type": "qa", "style": style, "question": words, **target}


def caption(style, words):
    return {"type": "caption", "style": style, "text": words}


def counted_points(label, points, count, method):
    return {"type": "point", "label": label, "coords": "percent",
            "meta": {"collection_method": method}, "count": count, "points": points}


def arrow_type(kind):
    """A type as in Case -> that of pyarrow."""
    import pyarrow as pa

    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, arrow_type(inner)) for name, inner in kind.items()])
    place = pa.struct([("x", pa.float64()), ("y", pa.float64())])
    return {"s": pa.string(), "i": pa.int64(), "f": pa.float64(), "g": pa.float32(),
            "b": pa.bool_(), "binary": pa.binary(), "xy": place}[kind]
