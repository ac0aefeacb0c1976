"""Computes J&F of the masks that a segmenter predicted from points.

    python -m tools.j_and_f --predicted segmenter.npz --masks true.npz

J is the intersection over union, and F is the F1 of the boundaries, as DAVIS computes it. Both are
computed for every true object of an expression, and averaged over frames, objects and expressions
(paper: appendix C). Predicted and true objects are paired one to one so that the sum of J&F is
largest. A true object without a pair is compared with an empty mask. With --union, the union of all
objects of an expression is compared instead, as in MeViS.
"""

import json
import math

import numpy as np

from evaluation.metrics import linear_sum_assignment
from records.errors import UserError, explained
from tools.command import make_parser, report_errors


def jaccard(a, b):
    """Two masks (h,w) bool -> intersection over union; 1 if both are empty."""
    union = (a | b).sum()
    return float((a & b).sum() / union) if union else 1.0


def mask_boundary(mask):
    """(h,w) bool -> (h,w) bool: pixels that differ from their right, lower or lower right
    neighbour. The edge of the image is not a boundary."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    neighbours = (padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:])
    return np.any([mask != other for other in neighbours], axis=0)


def dilate(mask, radius):
    """(h,w) bool -> (h,w) bool: the pixels within `radius` pixels of the mask."""
    h, w = mask.shape
    padded = np.pad(mask, radius)
    result = np.zeros_like(mask)
    for top in range(2 * radius + 1):
        for left in range(2 * radius + 1):
            if math.hypot(top - radius, left - radius) <= radius:
                result |= padded[top : top + h, left : left + w]
    return result


def boundary_f(predicted, true, tolerance=0.008):
    """Two masks (h,w) bool -> F1 of their boundaries; 1 if neither has a boundary.

    Precision is the share of predicted boundary pixels that are near the true boundary. Recall is
    the reverse. "Near" is `tolerance` times the diagonal of the image, rounded up to whole pixels.
    """
    edge = mask_boundary(predicted)
    true_edge = mask_boundary(true)
    if not edge.any() or not true_edge.any():
        return float(edge.any() == true_edge.any())
    radius = math.ceil(tolerance * math.hypot(*true.shape))
    precision = (edge & dilate(true_edge, radius)).sum() / edge.sum()
    recall = (true_edge & dilate(edge, radius)).sum() / true_edge.sum()
    return float(2 * precision * recall / max(precision + recall, 1e-10))


def j_and_f(predicted, true):
    """Two masks (t,h,w) bool of an object, in the same frames -> {"j", "f", "j_and_f"}, which are
    means over the frames."""
    pairs = list(zip(predicted, true, strict=True))
    j = float(np.mean([jaccard(a, b) for a, b in pairs]))
    f = float(np.mean([boundary_f(a, b) for a, b in pairs]))
    return {"j": j, "f": f, "j_and_f": (j + f) / 2}


def score_objects(predicted, true):
    """Masks (n,t,h,w) bool of predicted and of true objects -> the scores of j_and_f, as means over
    the true objects."""
    absent = np.zeros((len(true), *true.shape[1:]), bool)  # if objects are missing, these are used
    table = [[j_and_f(mask, other) for other in [*predicted, *absent]] for mask in true]
    values = np.array([[scores["j_and_f"] for scores in row] for row in table])
    best = [table[k][i] for k, i in linear_sum_assignment(-values)]
    return {key: float(np.mean([scores[key] for scores in best])) for key in best[0]}


def score_files(predicted_path, true_path, union):
    """Two .npz files with an array (n,t,h,w) for each expression -> means over the expressions.
    union: see above. UserError if a predicted array is missing or has another shape than the true
    masks."""
    with explained(f"--predicted {predicted_path}"):
        predicted = dict(np.load(predicted_path))
    with explained(f"--masks {true_path}"):
        true = {name: masks for name, masks in np.load(true_path).items()
                if masks.ndim == 4 and len(masks)}
    scores = []
    for name, masks in true.items():
        found = predicted.get(name, np.empty(0))
        if found.shape[1:] != masks.shape[1:]:
            raise UserError(f"--predicted {predicted_path}: '{name}' has the shape "
                            f"{found.shape}, but the true masks have {masks.shape}")
        found = found.astype(bool)
        masks = masks.astype(bool)
        if union:
            found = found.any(0, keepdims=True)
            masks = masks.any(0, keepdims=True)
        scores.append(score_objects(found, masks))
    if not scores:
        raise UserError(f"--masks {true_path}: the file has no array (n,t,h,w)")
    means = {key: float(np.mean([s[key] for s in scores])) for key in scores[0]}
    return {**{key: round(mean, 4) for key, mean in means.items()}, "n": len(scores)}


@report_errors
def main(argv=None):
    parser = make_parser("j_and_f", __doc__)
    what = 'arrays (n,t,h,w), named "record id/annotation number"'
    parser.add_argument("--predicted", required=True, help=f".npz of predicted masks: {what}")
    parser.add_argument("--masks", required=True, help=f".npz of true masks: {what}")
    parser.add_argument("--union", action="store_true",
                        help="compare the union of all objects of an expression, as in MeViS")
    args = parser.parse_args(argv)
    print(json.dumps(score_files(args.predicted, args.masks, args.union)))


if __name__ == "__main__":
    main()
