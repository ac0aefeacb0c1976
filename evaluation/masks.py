"""Reads and validates ground-truth masks, an .npz file with these arrays:

    "record id/annotation number"          images (n,h,w) bool, video (n,t,h,w)
    "record id/annotation number/times"    video: (t,) seconds of the file

A point has a mask of its own image, an object of a track one by sorted ids.
"""

import numpy as np

from evaluation.scoring import has_boxes, object_ids, true_places
from text.tracks import seconds
from weights.files import explained


def open_masks(path):
    """The .npz file with the masks of one file of records -> masks_of(record, annotation
    index): an array, of videos {"times", "masks"}, or None where the file has none."""
    with explained(f"--masks {path}"):
        arrays = np.load(path)  # which reads each in its turn: those of 100 videos take 9 GB

    def masks_of(record, index):
        name = f"{record['id']}/{index}"
        with explained(f"--masks {path}"):
            masks = arrays.get(name)
            if masks is None or "video" not in record:
                return masks
            return {"times": arrays.get(f"{name}/times", ()), "masks": masks}

    return masks_of


def find_misfit(question, masks):
    """-> what is wrong with the masks of a pointing or tracking annotation, or None."""
    annotation = question.annotation
    sizes = question.info.sizes
    places = true_places(question)
    n = len(object_ids(annotation) if annotation["type"] == "track" else places)
    if masks is None:
        return None if has_boxes(annotation) else "are missing: an array of that name"
    if question.info.times is not None:
        found = np.shape(masks["masks"])
        wanted = (n, len(masks["times"]), *sizes[0][::-1])
        if found != wanted:
            return f"are {found}, but (objects, times, height, width) are {wanted}"
        known = {seconds(t, question.record) for t in masks["times"]}
        missing = [place.frame for place in places if place.frame not in known]
        return f"have none at {missing[0]} s of the clip, as a point" if missing else None
    if len(masks) != n:
        return f"are {len(masks)}, but the number of points is {n}"
    for mask, place in zip(masks, places, strict=True):
        width, height = sizes[place.frame - 1]
        # masks of several images are padded to the largest
        padded = len(sizes) > 1 and mask.shape[0] >= height and mask.shape[1] >= width
        if mask.shape != (height, width) and not padded:
            return f"have the shape {mask.shape} for an image of {(height, width)}"
    return None
