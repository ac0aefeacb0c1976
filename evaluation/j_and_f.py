"""J&F of masks, as in DAVIS (docs/molmo2.md 13).

Molmo2 writes points. A segmenter that takes them as prompts makes the
masks, and this command scores them:

    python -m evaluation.j_and_f --predicted segmenter.npz --masks true.npz
"""

import argparse
import json
import math

import numpy as np

from evaluation.masks import read_npz
from records.errors import warn


def jaccard(a, b):
    """Masks (h,w) bool -> intersection over union; 1 where both are empty."""
    union = (a | b).sum()
    return float((a & b).sum() / union) if union else 1.0


def mask_boundary(mask):
    """(h,w) bool -> (h,w) bool: pixels that differ from their neighbour to the
    right, below, or to the lower right. The edge of the image is no boundary."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    right, below, diagonal = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    return (mask != right) | (mask != below) | (mask != diagonal)


def dilate(mask, radius):
    """(h,w) bool -> the pixels within `radius` of the mask: the union of its shifts over a disk."""
    h, w = mask.shape
    padded = np.pad(mask, radius)
    result = np.zeros_like(mask)
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if dx * dx + dy * dy <= radius * radius:
                top, left = radius + dy, radius + dx
                result |= padded[top : top + h, left : left + w]
    return result


def boundary_f(predicted, true, tolerance=0.008):
    """Masks (h,w) bool -> F1 of their boundaries; 1 where neither has a boundary.

    Precision is the share of the predicted boundary within `tolerance` of the image's
    diagonal (in whole pixels, rounded up) of the true one; recall is the reverse.
    """
    edge, true_edge = mask_boundary(predicted), mask_boundary(true)
    if not edge.any() or not true_edge.any():
        return float(edge.any() == true_edge.any())
    radius = math.ceil(tolerance * math.hypot(*true.shape))
    precision = (edge & dilate(true_edge, radius)).sum() / edge.sum()
    recall = (true_edge & dilate(edge, radius)).sum() / true_edge.sum()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def j_and_f(predicted, true):
    """Masks (t,h,w) bool of everything that an expression means, in the same frames
    -> {"j", "f", "j_and_f"}: means over frames."""
    pairs = list(zip(predicted, true, strict=True))
    j = float(np.mean([jaccard(a, b) for a, b in pairs]))
    f = float(np.mean([boundary_f(a, b) for a, b in pairs]))
    return {"j": j, "f": f, "j_and_f": (j + f) / 2}


def score_files(predicted_path, true_path):
    """Two .npz files with an array (n,t,h,w) for each expression -> means over the expressions."""
    predicted, true = read_npz(predicted_path, "--predicted"), read_npz(true_path, "--masks")
    true = {name: masks for name, masks in true.items() if masks.ndim == 4 and masks.shape[1]}
    if not true:
        raise ValueError(f"--masks {true_path}: no array (n,t,h,w) with a frame")
    scores = []
    for name, masks in true.items():
        found = predicted.get(name, np.empty(0))
        if found.ndim != 4 or found.shape[1:] != masks.shape[1:]:
            wanted = ("n", *masks.shape[1:])
            raise ValueError(f"--predicted {predicted_path}: '{name}' needs an array {wanted}, but "
                             f"its shape is {found.shape}")
        # an expression may mean several objects, which a segmenter
        # numbers in any order: their union counts, as in MeViS
        scores.append(j_and_f(found.astype(bool).any(0), masks.astype(bool).any(0)))
    means = {key: round(float(np.mean([s[key] for s in scores])), 4) for key in scores[0]}
    return {**means, "n": len(scores)}


def main(argv=None):
    parser = argparse.ArgumentParser(description="J&F of masks made from predicted tracks.")
    what = 'arrays (n,t,h,w), named "record id/annotation number"'
    parser.add_argument("--predicted", required=True, help=f".npz of predicted masks: {what}")
    parser.add_argument("--masks", required=True, help=f".npz of true masks: {what}")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(score_files(args.predicted, args.masks)))
    except (OSError, ValueError) as e:
        warn(str(e))
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
