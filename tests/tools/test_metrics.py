"""tools.metrics scores the masks of a segmenter; a mistake costs one sentence."""

import json

import numpy as np
import pytest

from tools import metrics


@pytest.fixture
def call(tmp_path, capsys):
    """call(predicted, true), both {name: array} -> exit status, JSON or None, stderr"""

    def run(predicted, true):
        paths = [str(tmp_path / "predicted.npz"), str(tmp_path / "true.npz")]
        np.savez(paths[0], **predicted)
        np.savez(paths[1], **true)
        status = 0
        try:
            metrics.main(["--predicted", paths[0], "--masks", paths[1]])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, json.loads(captured.out) if captured.out else None, captured.err

    return run


def two_objects():
    masks = np.zeros((2, 3, 20, 20), bool)
    masks[0, :, 2:8, 2:8] = True
    masks[1, :, 12:18, 12:18] = True
    return masks


def test_objects_of_one_expression_count_as_one_region_in_any_order(call):
    """Other arrays of the file with true masks are left out."""
    true = {"video/0": two_objects(), "video/0/times": np.arange(3),
            "image/0": np.zeros((1, 4, 4), bool)}
    status, scores, _ = call({"video/0": two_objects()[::-1]}, true)
    assert status == 0
    assert scores == {"j": 1.0, "f": 1.0, "j_and_f": 1.0, "n": 1}


@pytest.mark.parametrize(("predicted", "true", "message"), [
    ({"other/0": two_objects()}, {"video/0": two_objects()}, "no array (n,t,h,w) 'video/0'"),
    ({"video/0": two_objects()}, {"video/0/times": np.arange(3)}, "no array (n,t,h,w)"),
    ({"video/0": two_objects()[:, :2]}, {"video/0": two_objects()},
     "'video/0': masks of shape (2, 20, 20) are compared with (3, 20, 20)"),
    # would be a mean of nothing, NaN, which is no JSON
    ({"video/0": two_objects()[:, :0]}, {"video/0": two_objects()[:, :0]},
     "'video/0': the masks have no frames"),
])
def test_arrays_that_do_not_fit_cost_one_sentence(call, predicted, true, message):
    status, scores, error = call(predicted, true)
    assert status == 2
    assert scores is None
    assert message in error
    assert len(error.splitlines()) == 1
