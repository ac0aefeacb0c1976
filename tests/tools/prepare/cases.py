"""What the miniatures of the published sets are made of: cells, and the records expected of
them."""

import hashlib
import io
from typing import NamedTuple

from PIL import Image


class Case(NamedTuple):
    """A miniature of a published set."""

    rows: list
    records: list                    # what comes of the rows, without ids
    skipped: dict = {}               # noqa: RUF012 - nobody changes it
    arguments: tuple = ()            # of the command
    is_json: bool = False            # published as JSON, else as parquet


U = "https://example.org/u.jpg"
V = "https://example.org/v.jpg?a=1&b=2"
W = "http://example.org/w"
HASH = "ab" * 32


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


def url_image(url, **more):
    """The image entry of a record."""
    return {"path": sha(url), "url": url, **more}


def xy(*pairs):
    """Points as a list of structs."""
    return [{"x": x, "y": y} for x, y in pairs]


def messages(*texts):
    """Of user and assistant in turn."""
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def record(*annotations, **head):
    """head: the fields image, images or video, and weight."""
    return {**head, "annotations": list(annotations)}


def question(style, words, **target):
    return {"type": "qa", "style": style, "question": words, **target}


def dialogue(style, *texts, **more):
    pairs = zip(texts[::2], texts[1::2], strict=True)
    turns = [{"question": words, "answer": reply} for words, reply in pairs]
    return {"type": "qa", "style": style, "turns": turns, **more}


def caption(style, words):
    return {"type": "caption", "style": style, "text": words}


def point(label, points, coords="percent", **more):
    return {"type": "point", "label": label, "coords": coords, "points": points, **more}
