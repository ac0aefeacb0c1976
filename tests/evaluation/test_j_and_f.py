"""J&F of masks, by hand and as by scipy."""

import numpy as np
import pytest

from evaluation import j_and_f
from tests.evaluation.test_metrics import box


def test_regions_are_compared_by_their_union():
    a, b = box(10, 10, (0, 0, 4, 9)), box(10, 10, (3, 0, 7, 9))
    empty = box(10, 10, None)
    assert j_and_f.jaccard(a, b) == pytest.approx(20 / 80)
    assert j_and_f.jaccard(a, a) == 1
    assert j_and_f.jaccard(empty, empty) == 1
    assert j_and_f.jaccard(a, empty) == 0


def test_a_boundary_is_where_neighbours_differ_and_the_edge_of_the_image_is_none():
    boundary = j_and_f.mask_boundary(box(6, 6, (2, 2, 3, 3)))
    drawn = ["......", ".###..", ".#.#..", ".###..", "......", "......"]
    assert ["".join(".#"[v] for v in row) for row in boundary.astype(int)] == drawn
    assert not j_and_f.mask_boundary(np.ones((5, 5), bool)).any()


@pytest.mark.parametrize(("shift", "found"), [(0, True), (8, True), (9, False)])
def test_a_boundary_is_found_within_its_tolerance(shift, found):
    """854 x 480: 0.008 of the diagonal is 7.84, so 8 pixels. Farther off, the sides of the box are
    lost, and its top and bottom are found."""
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
    with pytest.raises(ValueError, match=r"\(1, 4, 4\) are compared with \(2, 4, 4\)"):
        j_and_f.j_and_f(np.zeros((1, 4, 4), bool), np.zeros((2, 4, 4), bool))


def test_masks_without_frames_have_no_score():
    with pytest.raises(ValueError, match="the masks have no frames"):
        j_and_f.j_and_f(np.zeros((0, 4, 4), bool), np.zeros((0, 4, 4), bool))


def test_a_dilated_mask_equals_that_of_scipy_with_a_disk():
    ndimage = pytest.importorskip("scipy.ndimage")
    rng = np.random.default_rng(2)
    for radius in (1, 2, 5):
        mask = rng.random((40, 30)) < 0.02
        y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
        wanted = ndimage.binary_dilation(mask, x * x + y * y <= radius * radius)
        assert np.array_equal(j_and_f.dilate(mask, radius), wanted)
