"""The score of Point-Bench, as the official code of Molmo2 defines it (docs/molmo2.md 13).

An answer is a success if it has a point and all of its points lie in the mask of the question. The
score is the mean of the five categories, each the share of its successes.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

CATEGORIES = ("affordable", "counting", "reasoning", "spatial", "steerable")
MAX_NEW = 256                        # tokens of an answer at most


class Target(NamedTuple):
    """What the answer to a question is compared with."""
    category: str
    mask: Path
    size: tuple                      # (width, height) of the image


def read_mask(path):
    """An image file -> (h,w) bool, true where a channel is above 127. ValueError if damaged."""
    try:
        with Image.open(path) as image:
            pixels = np.array(image)
    except Exception as e:               # Pillow raises many kinds for a damaged file
        raise ValueError(f"{path}: not a mask that can be read: {e}") from None
    return pixels > 127 if pixels.ndim == 2 else (pixels > 127).any(axis=2)


def all_in_mask(points, mask, size):
    """Is there a point (x, y), and does every point, cut to whole pixels, lie in the mask?

    Some masks do not have the size (width, height) of their image. A point beside the mask misses.
    """
    width = min(size[0], mask.shape[1])
    height = min(size[1], mask.shape[0])
    for x, y in points:
        column = int(x)
        row = int(y)
        if not (0 <= column < width and 0 <= row < height and mask[row, column]):
            return False
    return len(points) > 0


def score(predictions, targets):
    """Predictions of evaluate() and {record id: Target} -> {"average": mean over the categories,
    category: share of successes}. Categories without a question are left out."""
    successes = {category: [] for category in CATEGORIES}
    for prediction in predictions:
        target = targets[prediction["id"]]
        points = [(x, y) for _, _, x, y in prediction["predicted"]]
        success = all_in_mask(points, read_mask(target.mask), target.size)
        successes[target.category].append(success)
    means = {name: float(np.mean(found)) for name, found in successes.items() if found}
    average = float(np.mean(list(means.values())))
    return {name: round(value, 4) for name, value in {"average": average, **means}.items()}
