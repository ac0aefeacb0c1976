"""Files with true masks of points and tracks (the format is described in evaluate.py)."""

import numpy as np

from evaluation.masks import n_masks
from evaluation.scoring import has_boxes


def read_npz(path, flag):
    """An .npz file -> {name: array}; OSError or ValueError in one sentence, with the flag that
    named it."""
    try:
        return dict(np.load(path))
    except OSError:
        raise                            # no such file, or not readable: its own sentence names it
    except Exception as e:               # NumPy and zipfile raise many kinds for a damaged file
        raise ValueError(f"{flag} {path}: not an .npz file: {e}") from None


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
            if name not in arrays and has_boxes(annotation):
                continue
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
        if "video" in record and name in arrays:
            return {"times": arrays[f"{name}/times"], "masks": arrays[name]}
        return arrays.get(name)

    return masks_of
