"""True masks of points and tracks, from an .npz file (the format is described in evaluate.py)."""

import zipfile

import numpy as np

from evaluation.scoring import object_ids, true_places
from text.tracks import seconds


def read_npz(path, flag):
    """An .npz file -> {name: array}; OSError or ValueError in one sentence, with the flag that
    named it."""
    try:
        return dict(np.load(path))
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as e:
        raise ValueError(f"{flag} {path}: not an .npz file: {e}") from None


def n_masks(annotation):
    """A pointing annotation has a mask per point, a tracking annotation one per object."""
    return len(object_ids(annotation) if annotation["type"] == "track" else annotation["points"])


def open_masks(path, records):
    """An .npz file with masks for every pointing and tracking annotation of the records
    -> masks_of(record, annotation index). ValueError if one is missing."""
    arrays = read_npz(path, "--masks")
    for record in records:
        video = "video" in record
        for index, annotation in enumerate(record["annotations"]):
            if annotation["type"] not in ("point", "track"):
                continue
            name = f"{record['id']}/{index}"
            n = n_masks(annotation)
            shape = arrays[name].shape if name in arrays else ()
            if len(shape) != (4 if video else 3) or shape[0] != n:
                wanted = f"({n}, t, h, w)" if video else f"({n}, h, w)"
                found = f"one of shape {shape}" if name in arrays else "none"
                raise ValueError(f"--masks {path}: '{name}' needs an array {wanted}; found {found}")
            if video and f"{name}/times" not in arrays:
                raise ValueError(f"--masks {path}: '{name}/times' is missing, the seconds of it")

    def masks_of(record, index):
        name = f"{record['id']}/{index}"
        if "video" in record:
            return {"times": arrays[f"{name}/times"], "masks": arrays[name]}
        return arrays.get(name)

    return masks_of


def check_masks(question, masks):
    """ValueError if the masks of a pointing or tracking annotation do not fit its media and
    times."""
    name = f"the masks of {question.record['id']}/{question.index}"
    sizes = question.info.sizes
    n = n_masks(question.annotation)
    true = true_places(question)
    if question.info.times is not None:
        w, h = sizes[0]
        shape = np.shape(masks["masks"])
        expected = n, len(masks["times"]), h, w
        if shape != expected:
            raise ValueError(f"{name} are of shape {shape}, but (points or objects, times, height, "
                             f"width) are {expected}")
        known = {seconds(t, question.record) for t in masks["times"]}
        missing = [place.frame for place in true if place.frame not in known]
        if missing:
            raise ValueError(f"{name} have none at {missing[0]} s of the clip, the time of a point")
        return
    if len(masks) != n:
        raise ValueError(f"{name} are {len(masks)} for {n} points")
    for mask, place in zip(masks, true, strict=True):
        w, h = sizes[place.frame - 1]
        # masks of several images are padded to the largest
        padded = len(sizes) > 1 and mask.shape[0] >= h and mask.shape[1] >= w
        if mask.shape != (h, w) and not padded:
            raise ValueError(f"{name}: one is {mask.shape}, the image {(h, w)} (height, width)")
