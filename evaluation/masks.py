"""Reads and checks ground-truth segmentation masks. The .npz file contains these arrays:

    "record id/annotation number"          images: (n,h,w) bool; video: (n,t,h,w) bool
    "record id/annotation number/times"    video: (t,) seconds of the video file
    "record id/annotation number/runs"     video, in place of both: the bytes of a JSON object,
                                           {"objects": n, "masks": [[object, seconds, {"size":
                                           [h, w], "counts": run lengths of COCO}], ..]}

n is the number of points, and each mask has the size of the image of its point. For a track, n is
the number of objects, and the masks are in the order of the sorted ids.
"""

import json

import numpy as np

from evaluation.scoring import has_boxes, index_of_masks, object_ids, true_places
from records.errors import explained


def open_masks(path):
    """Opens the .npz file with the masks for one file of records -> a function
    masks_of(record, annotation index). It returns an array for images, {"times", "masks"} for a
    video, and None if the file has no masks for this annotation."""
    with explained(f"--masks {path}"):
        arrays = np.load(path)  # loads an array only when it is used: 100 videos have 9 GB

    def masks_of(record, index):
        name = f"{record['id']}/{index}"
        with explained(f"--masks {path}"):
            runs = arrays.get(f"{name}/runs")
            if runs is not None:
                masks = RunLengths(json.loads(runs.tobytes()))
                return {"times": masks.times, "masks": masks}
            masks = arrays.get(name)
            if masks is None or "video" not in record:
                return masks
            return {"times": arrays.get(f"{name}/times", ()), "masks": masks}

    return masks_of


class RunLengths:
    """True masks of a video as run lengths, in the form of COCO. They need little memory, because
    masks[k, i] decodes one mask. They are scaled to the size of the video."""

    def __init__(self, runs):
        """runs: the JSON object "record id/annotation number/runs"."""
        self.rles = {(k, time): rle for k, time, rle in runs["masks"]}
        self.times = sorted({time for _, time in self.rles})
        self.shape = runs["objects"], len(self.times)

    def __getitem__(self, key):
        k, i = key
        rle = self.rles.get((k, self.times[i]))
        return decode_mask(rle) if rle else np.zeros((1, 1), bool)


def decode_mask(rle):
    """{"size": [h, w], "counts": the lengths of runs of zeros and ones in turn, down the columns}
    -> (h,w) bool. The lengths are a list or compressed text."""
    h, w = rle["size"]
    counts = rle["counts"]
    if isinstance(counts, str | bytes):
        counts = decompress(counts)
    ones = np.arange(len(counts)) % 2 == 1
    return np.repeat(ones, counts).reshape(w, h).T


def decompress(text):
    """The text of run lengths in the COCO format -> a list of numbers. A character has five bits of
    a number, the lowest first, and a bit that says whether the number goes on. From the fourth
    number on, the difference to the last but one is stored."""
    numbers = []
    value = 0
    n_bits = 0
    for code in text if isinstance(text, bytes) else text.encode():
        bits = code - 48
        value |= (bits & 31) << n_bits
        n_bits += 5
        if bits & 32:
            continue
        if bits & 16:  # a negative number
            value -= 1 << n_bits
        if len(numbers) > 2:
            value += numbers[-2]
        numbers.append(value)
        value = 0
        n_bits = 0
    return numbers


def find_misfit(question, masks):
    """-> what is wrong with the masks of a point or track annotation, or None if they fit."""
    annotation = question.annotation
    sizes = question.info.sizes
    places = true_places(question)
    n = len(object_ids(annotation) if annotation["type"] == "track" else places)
    if masks is None:
        return None if has_boxes(annotation) else "are missing: no array has this name"
    if question.info.times is not None:
        found = np.shape(masks["masks"])
        wanted = (n, len(masks["times"]), *sizes[0][::-1])
        n_fixed = 4
        if isinstance(masks["masks"], RunLengths):  # the size of its masks is free
            n_fixed = 2
        if found != wanted[:n_fixed]:
            return f"have shape {found}, but (objects, times, height, width) must be {wanted}"
        known = index_of_masks(question, masks["times"])
        missing = [place.frame for place in places if place.frame not in known]
        return f"have no entry for a point at {missing[0]} s of the clip" if missing else None
    if len(masks) != n:
        return f"have {len(masks)} entries, but the annotation has {n} points"
    for mask, place in zip(masks, places, strict=True):
        width, height = sizes[place.frame - 1]
        # masks of several images are padded to the largest image
        padded = len(sizes) > 1 and mask.shape[0] >= height and mask.shape[1] >= width
        if mask.shape != (height, width) and not padded:
            return f"have shape {mask.shape}, but the image has (height, width) {(height, width)}"
    return None
