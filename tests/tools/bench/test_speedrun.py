"""tools.bench speedrun: who runs when, and when an entry holds."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tools.bench import speedrun
from tools.bench.measure import REPOSITORY

ARGS = SimpleNamespace(reference="older", seeds=[0, 1, 2], steps=None, eval_images=None)
GOOD = {"point_f1": 0.91, "count_accuracy": 0.92, "caption_exact": 0.81}


@pytest.mark.parametrize("worst_caption", [0.81, 0.79])
def test_an_entry_holds_if_every_seed_reaches_every_aim(worst_caption, monkeypatch, capsys):
    order = []

    def train_once(tree, seed, args):
        is_ours = tree == REPOSITORY
        order.append(("ours" if is_ours else tree, seed))
        scores = {**GOOD, "caption_exact": worst_caption} if is_ours and seed == 1 else GOOD
        return {"seconds": (30 + 6 * seed) if is_ours else 60, **scores}

    monkeypatch.setattr(speedrun, "train_once", train_once)
    monkeypatch.setattr(speedrun, "checkout", nullcontext)
    results = speedrun.run(ARGS)
    # whoever ran last in a pair begins the next
    assert order == [("older", 0), ("ours", 0), ("ours", 1), ("older", 1), ("older", 2),
                     ("ours", 2)]
    assert results["share_of_time"] == {"median": 0.6, "min": 0.5, "max": 0.7}
    assert results["holds"] == (worst_caption > 0.8)
    printed = capsys.readouterr().out
    assert ("not reached" in printed) == (worst_caption < 0.8)
    assert "0.60 (0.50-0.70)" in printed


def test_an_unknown_commit_is_one_sentence():
    with (pytest.raises(ValueError, match="git worktree add"),
          speedrun.checkout("0000000000000000000000000000000000000000")):
        pass


@pytest.mark.slow
def test_both_trees_are_trained_and_the_checkout_is_removed():
    found = speedrun.run(SimpleNamespace(reference="HEAD", seeds=[3], steps=1, eval_images=1))
    for (scores,) in (found["ours"], found["reference"]):
        assert scores.keys() == {"seconds", *speedrun.AIMS}
        assert scores["seconds"] > 0
    assert "reference" not in speedrun.git("worktree", "list")
