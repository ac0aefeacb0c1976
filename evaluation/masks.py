"""Do true masks of points and tracks fit their annotation and its media?"""

import numpy as np

from evaluation.scoring import object_ids, true_places
from text.tracks import seconds


def n_masks(annotation):
    """A pointing annotation has a mask per point, a tracking annotation one per object."""
    return len(object_ids(annotation) if annotation["type"] == "track" else annotation["points"])


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
