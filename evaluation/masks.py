"""Reads and validates ground-truth masks of points and tracks (the format is in evaluate.py)."""

import numpy as np

from evaluation.scoring import has_boxes, object_ids, true_places
from text.tracks import seconds


def read_npz(path, flag):
    """An .npz file -> {name: array}; OSError or ValueError in one
    sentence, with the flag that named it."""
    try:
        return dict(np.load(path))
    except OSError:
        raise                            # no such file, or not readable: its own sentence names it
    except Exception as e:               # NumPy and zipfile raise many kinds for a damaged file
        raise ValueError(f"{flag} {path}: not an .npz file: {e}") from None


def open_masks(path):
    """The .npz file with the masks of one file of records -> masks_of(record,
    annotation index), which gives None where the file has no array of that name."""
    arrays = read_npz(path, "--masks")

    def masks_of(record, index):
        name = f"{record['id']}/{index}"
        if "video" in record and name in arrays:
            return {"times": arrays.get(f"{name}/times", ()), "masks": arrays[name]}
        return arrays.get(name)

    return masks_of


def check_masks(question, masks):
    """ValueError if the masks of a pointing or tracking annotation do not
    fit its media and times; or if there are none, and no boxes either."""
    annotation, sizes = question.annotation, question.info.sizes
    name = f"the masks of {question.record['id']}/{question.index}"
    n = len(object_ids(annotation) if annotation["type"] == "track" else annotation["points"])
    true = true_places(question)
    if masks is None:
        if not has_boxes(annotation):
            raise ValueError(f"{name} are missing: {n} of them, in an array of that name")
    elif question.info.times is not None:
        width, height = sizes[0]
        found, wanted = np.shape(masks["masks"]), (n, len(masks["times"]), height, width)
        if found != wanted:
            raise ValueError(f"{name} are of shape {found}, but (points or objects, times, height, "
                             f"width) are {wanted}")
        known = {seconds(t, question.record) for t in masks["times"]}
        missing = [place.frame for place in true if place.frame not in known]
        if missing:
            raise ValueError(f"{name} have none at {missing[0]} s of the clip, the time of a point")
    elif np.shape(masks)[:1] != (n,):
        raise ValueError(f"{name} are an array of shape {np.shape(masks)}, for {n} points")
    else:
        for mask, place in zip(masks, true, strict=True):
            width, height = sizes[place.frame - 1]
            # masks of several images are padded to the largest
            padded = len(sizes) > 1 and mask.shape[0] >= height and mask.shape[1] >= width
            if mask.shape != (height, width) and not padded:
                raise ValueError(f"{name}: one is {mask.shape}, the image {(height, width)} "
                                 "(height, width)")
