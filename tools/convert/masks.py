"""Segmentation masks of COCO as run lengths -> the box around a mask, or a point inside it."""

import numpy as np

from evaluation.masks import decode_mask, decompress
from records.errors import Unreadable
from records.media import MAX_PIXELS
from tools.convert.make import skip_unless
from tools.convert.report import SHAPE_ERRORS


def place_of_mask(rle, size):
    """{"size": [height, width], "counts": a list or compressed text} -> the place of the object in
    pixels, see make.placed; the reason as an Unreadable if the mask cannot be used.

    The place is the box around the mask. Molmo2 is trained on the centre of a box, so if the centre
    is not in the mask, the place is a point in the mask. size: of the image, or None if unknown.
    """
    try:
        mask = mask_of(rle, size)
    except Unreadable as error:
        return error
    except SHAPE_ERRORS as error:
        return Unreadable("wrong mask", f"it cannot be decoded: {type(error).__name__}: {error}")
    rows, columns = np.nonzero(mask)
    left, right = int(columns.min()), int(columns.max()) + 1
    top, bottom = int(rows.min()), int(rows.max()) + 1
    if mask[(top + bottom) // 2, (left + right) // 2]:
        return [left, top, right, bottom]
    return point_inside(mask)


def mask_of(rle, size):
    """-> (height, width) bool, with at least one pixel."""
    height, width = rle["size"]
    counts = rle["counts"]
    if isinstance(counts, str):
        counts = decompress(counts)
    skip_unless(sum(counts) == height * width <= MAX_PIXELS, "wrong mask",
                "its run lengths do not give its size")
    skip_unless(size in (None, [width, height]), "wrong mask",
                f"it has {width} x {height} pixels, but the image has another size")
    mask = decode_mask({"size": [height, width], "counts": counts})
    skip_unless(mask.any(), "no box", "its mask is empty")
    return mask


def point_inside(mask):
    """The middle of the longest horizontal run of pixels in a mask -> [x, y]."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts = np.argwhere(edges == 1)  # (n,2): row, first column; in the same order as the ends
    lengths = np.argwhere(edges == -1)[:, 1] - starts[:, 1]
    longest = np.flatnonzero(lengths == lengths.max())
    k = longest[len(longest) // 2]
    return [float(starts[k, 1] + lengths[k] / 2), float(starts[k, 0] + 0.5)]
