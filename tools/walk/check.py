"""Judges a reader's functions: a first look on the row of the walk, then tests of the project.

The tests run in a process of their own, in which swap.py puts the reader's function in the place of
the project's. If one fails, the reader is told what it protects.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tools.walk import swap
from tools.walk.first_looks import FIRST_LOOKS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600                      # of the tests of one exercise
N_LINES = 6                          # of a failed test's own words

# {exercise: {test: what it protects}}
TESTS = {
    "allow": {
        "tests/test_attention.py::test_mask_equals_the_official_code":
            "The mask must be that of the released training code, for trees, images and padding.",
        "tests/test_attention.py::test_mask_of_a_packed_row_equals_the_official_code":
            "A real packed row, compared with the mask of the released training code.",
        "tests/test_attention.py::test_draw_gives_the_picture_in_the_docstring":
            "The worked example at the top of attention.py, cell by cell.",
        "tests/test_attention.py::test_no_row_is_empty_and_padding_sees_padding_only":
            "Padding must see padding: softmax over no key at all is NaN on some devices.",
        "tests/test_packing.py::test_branches_cannot_see_each_other":
            "Changing one branch must not change one bit of the loss of another branch.",
        "tests/test_packing.py::test_examples_cannot_see_each_other":
            "Changing one example must not change one bit of the loss of its neighbours.",
    },
    "best_subset": {
        "tests/test_packing.py::test_the_search_finds_the_fullest_row":
            "All 1,024 subsets of ten examples are tried: none may be worth more than yours.",
        "tests/test_packing.py::test_what_rounding_loses_is_looked_for_once_more":
            "If you count in bins, look once more for what the rounding left free.",
        "tests/test_packing.py::"
        "test_every_fitting_example_is_packed_once_and_no_pack_is_over_a_limit[2]":
            "In a stream of 300 examples none may be lost, doubled, or put into a full row.",
    },
    "token_weight": {
        "tests/test_data.py::test_tree_equals_the_official_code":
            "Trees of the released training code, with the weight of every token.",
        "tests/test_data.py::"
        "test_points_and_captions_of_videos_have_flat_weights_and_all_else_square_roots":
            "The table of stop 3, for every kind of annotation.",
        "tests/test_data.py::test_the_weight_by_branches_counts_those_that_were_kept":
            "n_branches is the number of branches that fitted the row; use it as it is given.",
        "tests/test_data.py::test_weights_of_record_annotation_and_turn_multiply":
            "The weights that a user writes into a record multiply; they replace nothing.",
    },
    "ulysses": {
        "tests/test_parallel.py::"
        "test_any_layout_gives_loss_and_gradients_of_one_process[2-2-1]":
            "Two processes must give the loss and all gradients of one process; so backward has "
            "to travel through the exchange as well (parallel.AllToAll does this).",
    },
    "forward_backward": {
        "tests/test_train.py::test_the_loss_is_a_weighted_mean_over_the_whole_step":
            "The logged loss is the mean over the step, whatever the micro-batches weigh.",
        "tests/test_train.py::test_three_steps_equal_three_written_by_hand":
            "Three steps in micro-batches, compared with three in one batch and plain AdamW: the "
            "gradients must be sums, and the z-loss belongs to them.",
    },
}
assert set(TESTS) == set(FIRST_LOOKS)


def main(path):
    """Checks all functions of a file -> exit status: 0 if none is wrong."""
    if not path.is_file():
        print(f"{path}: no such file; docs/walk/mine.py is where to begin")
        return 1
    try:
        module = swap.load(path)
    except Exception as e:           # whatever a reader's file raises
        print(f"{path} cannot be loaded: {type(e).__name__}: {e}")
        return 1
    results = [check(name, module, path) for name in TESTS if hasattr(module, name)]
    if not results:
        print(f"{path} has none of the functions {', '.join(TESTS)}")
    return 0 if results and all(results) else 1


def check(name, module, path):
    """Checks one function and prints the verdict -> bool: it is right, or not written yet."""
    print(f"{name}: ", end="", flush=True)
    os.environ[swap.FILE] = str(path.resolve())
    os.environ[swap.NAME] = name
    try:
        problem = FIRST_LOOKS[name](getattr(module, name))
    except Exception as e:           # of a reader's function, also in another process
        if "NotImplementedError" in f"{type(e).__name__} {e}":
            print("not written yet")
            return True
        problem = f"it raises {type(e).__name__}: {str(e).strip().splitlines()[-1:]}"
    if problem:
        print(f"not yet right.\n    {problem}\n    The first look, on the row of the walk, "
              "found this; no test of the project was run.")
        return False
    print(f"right on the row of the walk; {len(TESTS[name])} tests of the project run ..",
          flush=True)
    problem = run_tests(name)
    print(f"    {problem}" if problem else "    all of them pass")
    return not problem


def run_tests(name):
    """Runs the project's tests with the reader's function -> what is wrong, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider",
               "-p", "tools.walk.swap", *TESTS[name]]
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return (f"the tests did not end within {TIMEOUT_S} s: the function is too slow for real "
                "sizes")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    own_words = re.findall(r"^E +(.*)$", done.stdout, re.MULTILINE)[:N_LINES]
    if not failed:
        return "the tests did not run:\n" + (done.stdout + done.stderr)[-2000:]
    meaning = next((text for test, text in TESTS[name].items() if failed[1].startswith(test)), "")
    return "\n    ".join([f"{failed[1]} fails.", meaning, *own_words])
