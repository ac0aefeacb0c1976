"""J&F of masks that a segmenter made from predicted tracks.

    python -m tools.metrics --predicted segmenter.npz --masks true.npz
"""

import argparse
import json

import numpy as np

from evaluation.j_and_f import j_and_f
from evaluation.mask_files import read_npz
from records.errors import warn


def parse(argv):
    parser = argparse.ArgumentParser(description="J&F of masks made from predicted tracks.")
    what = 'arrays (n,t,h,w), named "record id/annotation number"'
    parser.add_argument("--predicted", required=True, help=f".npz of predicted masks: {what}")
    parser.add_argument("--masks", required=True, help=f".npz of true masks: {what}")
    return parser.parse_args(argv)


def scores_of(args):
    """-> [{"j", "f", "j_and_f"}, ..], one for each array of true masks."""
    predicted = read_npz(args.predicted, "--predicted")
    true = read_npz(args.masks, "--masks")
    names = [name for name, masks in true.items() if masks.ndim == 4]
    if not names:
        raise ValueError(f"--masks {args.masks}: no array (n,t,h,w)")
    scores = []
    for name in names:
        if name not in predicted or predicted[name].ndim != 4:
            raise ValueError(f"--predicted {args.predicted}: no array (n,t,h,w) '{name}'")
        # an expression may mean several objects, which a segmenter numbers in any order: their
        # union counts, as in MeViS
        union, true_union = (masks[name].astype(bool).any(0) for masks in (predicted, true))
        try:
            scores.append(j_and_f(union, true_union))
        except ValueError as e:
            raise ValueError(f"'{name}': {e}") from None
    return scores


def main(argv=None):
    args = parse(argv)
    try:
        scores = scores_of(args)
    except (OSError, ValueError) as e:
        warn(f"tools.metrics: {e}")
        raise SystemExit(2) from None
    means = {key: round(float(np.mean([s[key] for s in scores])), 4) for key in scores[0]}
    print(json.dumps({**means, "n": len(scores)}))


if __name__ == "__main__":
    main()
