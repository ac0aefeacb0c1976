"""Negatives (--negatives N): points without a point, which train the answer "There are none.".

An image gets up to N labels that other images of the same source show and this image does not. It
never gets a label that one of its own entries has, even if this entry was skipped. If the file says
which labels an image lacks (LVIS), only these are used. docs/boxes.md has the rules.
"""

import hashlib
import os

from records.check import is_text
from records.errors import plural, warn


def with_negatives(entries, n, job):
    """entries: (where, head, annotations, layout) -> the same entries with negatives.

    head["labels"], only of images with boxes or points: the labels of all entries of the image, and
    the labels that the image lacks, or None if the file does not say so.
    """
    waiting = []
    shown = {}  # {image: labels of its entries}
    known = {}  # {source: labels that an image of it shows}
    for where, head, made, layout in entries:
        waiting.append((known.setdefault(job.source, set()), where, head, made, layout))
        if "labels" in head:
            known[job.source].update(annotation.get("label") for annotation in made)
            shown.setdefault(image_of(head), set()).update(head["labels"][0])
    n_images = 0
    is_stated = False  # by the user, and not by the file
    for candidates, where, head, made, layout in waiting:
        image = image_of(head) if "labels" in head else None
        if image in shown:  # only once for each image
            absent = head["labels"][1]
            is_stated |= absent is None
            found = choose(candidates if absent is None else absent, shown.pop(image), image, n)
            made = made + [{"type": "point", "label": label, "coords": "unit", "points": []}
                           for label in found]
            n_images += bool(found)
        yield where, head, made, layout
    warn(f"--negatives {n}: added absent labels to {plural(n_images, 'image')}" + (
        "; with this flag you say that every object of these labels is annotated in every image"
        if is_stated else ""))


def image_of(head):
    """The path of the image of a record; ./a.jpg is a.jpg."""
    image = head["image"]
    return os.path.normpath(image if isinstance(image, str) else image["path"])


def choose(candidates, labels, image, n):
    """-> n of the candidates that are no labels of this image. A hash of image and label decides,
    so that the choice does not depend on the other images."""
    if not all(map(is_text, labels)):  # a label that has no name may be any of the candidates
        return []
    shown = {label.strip().casefold() for label in labels}
    absent = {label.strip() for label in filter(is_text, candidates)}
    absent = [label for label in absent if label.casefold() not in shown]
    return sorted(absent, key=lambda label: hashlib.sha256(
        f"{image}\n{label}".encode("utf-8", "surrogatepass")).digest())[:n]
