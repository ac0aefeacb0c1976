"""Tests your solutions of the exercises of docs/walk/README.md.

    python -m tools.walk --check docs/walk/mine.py

Each function of your file replaces the function of the project while tests of the project run. If
a test fails, the command says what the test protects. Functions that still raise
NotImplementedError are skipped.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from records.errors import explained
from tools.command import make_parser, report_errors

ROOT = Path(__file__).parents[2]
N_LINES = 6  # number of printed lines of the message of a failed test

# {exercise: {test: what it protects}}
TESTS = {
    "allow": {
        "tests/test_attention.py::test_mask_equals_the_official_code":
            "The mask must equal the mask of the released training code, for trees, images and "
            "padding.",
        "tests/test_attention.py::test_mask_of_a_packed_row_equals_the_official_code":
            "The mask of a real packed row must equal the mask of the released training code.",
        "tests/test_attention.py::test_two_integers_give_the_rule_of_three_on_20000_random_rows":
            "Padding must attend to padding: softmax over no key at all is NaN on some devices.",
        "tests/test_packing.py::test_packing_changes_nothing":
            "Every branch of a packed row must have the loss and the gradients that it has alone.",
    },
    "best_subset": {
        "tests/test_packing.py::test_the_search_finds_the_fullest_row":
            "The test tries all 1,024 subsets of ten examples. None may be worth more than yours. "
            "It is not enough to choose the largest examples first.",
        "tests/test_packing.py::"
        "test_every_fitting_example_is_packed_once_and_no_pack_is_over_a_limit[2]":
            "In a stream of 300 examples, none may be lost, used twice, or put into a full row.",
    },
    "token_weight": {
        "tests/test_data.py::test_tree_equals_the_official_code":
            "The weight of every token must equal its weight in the released training code.",
        "tests/test_data.py::"
        "test_points_and_captions_of_videos_have_flat_weights_and_all_else_square_roots":
            "Every kind of annotation must have the weight in the table of section 3 of the walk.",
        "tests/test_data.py::"
        "test_weights_of_record_annotation_and_turn_multiply_and_0_is_context":
            "The weights in a record are factors. They must not replace the weights of the rule.",
    },
    "windows": {
        "tests/test_vision.py::test_pooling_windows_and_tokens_equal_the_official_code":
            "The windows of an image, and the missing patches at its edges, must equal the windows "
            "of the released code.",
        "tests/test_vision.py::test_frames_pool_as_in_the_official_code":
            "The 3 x 3 windows of a frame must equal the windows of the released code.",
    },
    "pool": {
        "tests/test_vision.py::test_pooling_equals_a_loop_over_valid_patches":
            "Windows of 4 and of 9 patches, with missing patches, must give the same result as a "
            "loop over the patches that exist.",
        "tests/test_vision.py::test_a_row_without_patches_is_zero_and_leaves_gradients_alone":
            "A window without any patch must not give NaN, neither forward nor backward.",
        "tests/test_model.py::test_visual_features_equal_the_official_code":
            "The visual tokens of two tiny models must equal those of the released training code.",
    },
    "ulysses": {
        "tests/test_parallel.py::"
        "test_any_layout_gives_loss_and_gradients_of_one_process[2-2-1-0-8-2]":
            "Two processes must give the loss and all gradients of one process. So gradients must "
            "also pass through the exchange (parallel.AllToAll does this).",
    },
    "forward_backward": {
        "tests/test_train.py::test_the_loss_is_a_weighted_mean_over_the_whole_step":
            "The logged loss must be the mean over the step, for any weights of the micro-batches.",
        "tests/test_train.py::test_three_steps_equal_three_written_by_hand":
            "Three steps with micro-batches must equal three steps with one batch and AdamW. "
            "Gradients must be sums, and they must include the z-loss.",
    },
}


@report_errors
def main(argv=None):
    parser = make_parser("walk", __doc__)
    parser.add_argument("--check", type=Path, metavar="FILE", required=True,
                        help="docs/walk/mine.py, or a copy of it")
    path = parser.parse_args(argv).check
    with explained(f"--check {path}"):
        found = runpy.run_path(str(path))  # a Path as __file__ breaks imports of torch
    mine = {name: found[name] for name in TESTS if name in found}
    if not mine:
        parser.error(f"--check {path}: the file has none of the functions {', '.join(TESTS)}")
    results = [check(name, function, path) for name, function in mine.items()]
    return 0 if all(results) else 1


def check(name, mine, path):
    """Checks one function and prints the result -> bool: is it right, or not written yet?"""
    print(f"{name}: ", end="", flush=True)
    # a functools.partial has the code of its function; other callables may have no code
    code = getattr(getattr(mine, "func", mine), "__code__", None)
    if code and "NotImplementedError" in code.co_names:
        print("not written yet")
        return True
    problem = run_tests(name, path)
    print(f"not yet right\n    {problem}" if problem else "right, all of its tests pass")
    return not problem


def run_tests(name, path):
    """Runs the project's tests with the reader's function -> what is wrong, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider",
               "-p", "tools.walk.swap", *TESTS[name]]
    variables = {"WALK_FILE": str(path.resolve()), "WALK_EXERCISE": name}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8",
                          errors="replace", env=os.environ | variables)
    if done.returncode == 0:
        return None
    # "FAILED file::test[its case] - message"; a case may contain blanks
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not failed:
        return "the tests did not run:\n" + (done.stdout + done.stderr)[-2000:]
    meanings = (text for test, text in TESTS[name].items() if failed[1].startswith(test))
    meaning = next(meanings, "")
    message = re.findall(r"^E +(.*)$", done.stdout, re.MULTILINE)[:N_LINES]
    return "\n    ".join([f"{failed[1]} fails.", meaning, *message])


if __name__ == "__main__":
    sys.exit(main())
