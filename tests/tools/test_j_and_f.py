"""Compares J&F of masks with values that are computed by hand. The command scores files, and a
mistake gives one sentence."""

import json

import numpy as np
import pytest

from tests.evaluation.test_metrics import box
from tests.tools.command import run_main
from tools import j_and_f


def test_a_boundary_is_where_neighbours_differ_and_the_edge_of_the_image_is_none():
    boundary = j_and_f.mask_boundary(box(6, 6, (2, 2, 3, 3)))
    drawn = ["......", ".###..", ".#.#..", ".###..", "......", "......"]
    assert ["".join(".#"[v] for v in row) for row in boundary.astype(int)] == drawn
    assert not j_and_f.mask_boundary(np.ones((5, 5), bool)).any()


@pytest.mark.parametrize(("shift", "found"), [(0, True), (8, True), (9, False)])
def test_a_boundary_is_found_within_its_tolerance(shift, found):
    """In 854 x 480, 0.008 of the diagonal is 7.84, rounded up to 8 pixels. With a larger shift, the
    sides of the box do not match, but its top and bottom do."""
    true = box(480, 854, (200, 100, 399, 299))
    score = j_and_f.boundary_f(np.roll(true, shift, axis=1), true)
    assert score == 1.0 if found else 0.4 < score < 0.6


def test_j_and_f_are_means_over_frames():
    true = box(480, 854, (200, 100, 399, 299))
    empty = np.zeros_like(true)
    assert j_and_f.boundary_f(empty, true) == 0
    assert j_and_f.boundary_f(empty, empty) == 1
    scores = j_and_f.j_and_f(np.array([true, true]), np.array([true, empty]))
    assert scores == {"j": 0.5, "f": 0.5, "j_and_f": 0.5}


def two_objects():
    masks = np.zeros((2, 3, 20, 20), bool)
    masks[0, :, 2:8, 2:8] = True
    masks[1, :, 12:18, 12:18] = True
    return masks


@pytest.mark.parametrize(("predicted", "true", "answer"), [
    # the objects of an expression may have any order; other arrays are ignored
    ({"video/0": two_objects()[::-1]},
     {"video/0": two_objects(), "video/0/times": np.arange(3), "image/0": np.zeros((1, 4, 4))},
     {"j": 1.0, "f": 1.0, "j_and_f": 1.0, "n": 1}),
    ({"video/0": two_objects()[:, :2]}, {"video/0": two_objects()}, "has the shape (2, 2, 20, 20)"),
    ({"video/0": two_objects()}, {"video/0/times": np.arange(3)}, "no array (n,t,h,w)"),
    (None, {"video/0": two_objects()}, "predicted.npz cannot be used"),
])
def test_files_are_scored_and_a_mistake_costs_one_sentence(tmp_path, predicted, true, answer):
    paths = {"--predicted": tmp_path / "predicted.npz", "--masks": tmp_path / "true.npz"}
    for path, arrays in zip(paths.values(), (predicted, true), strict=True):
        if arrays is None:
            path.write_bytes(b"PK damaged")
        else:
            np.savez(path, **arrays)
    status, out, err = run_main(j_and_f.main, *(word for pair in paths.items() for word in pair))
    if isinstance(answer, dict):
        assert (status, json.loads(out)) == (0, answer)
    else:
        (sentence,) = err.splitlines()
        assert (status, out) == (2, "")
        assert answer in sentence


def test_each_object_counts_or_the_union_of_all(tmp_path):
    """Of two objects, the small one is missing. Each object counts the same, but of the union, it
    is only 16 of 352 pixels."""
    true = np.zeros((2, 1, 40, 40), bool)
    true[0, :, 2:30, 2:14] = True
    true[1, :, 35:39, 35:39] = True
    for name, masks in (("true", true), ("found", true[:1])):
        np.savez(tmp_path / f"{name}.npz", **{"video/0": masks})
    words = j_and_f.main, "--predicted", tmp_path / "found.npz", "--masks", tmp_path / "true.npz"
    assert json.loads(run_main(*words)[1]) == {"j": 0.5, "f": 0.5, "j_and_f": 0.5, "n": 1}
    assert json.loads(run_main(*words, "--union")[1])["j"] == round(336 / 352, 4)
    # objects beside true ones are paired with the best of them
    scores = j_and_f.score_objects(true[::-1], true[1:])
    assert scores == {"j": 1.0, "f": 1.0, "j_and_f": 1.0}
