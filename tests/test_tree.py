"""Message trees against the official preprocessor (conformance/message_tree.json): tokens, targets, weights, positions."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest

import data

CASES = json.loads((Path(__file__).parent / "conformance" / "message_tree.json").read_text())["cases"]
# Left out on purpose: text before the visual tokens of a tree. Ours keep them right behind BOS, and a record has no way to ask otherwise.
CASES = [case for case in CASES if case["input"]["name"] != "explicit image placeholder tree"]
BOS = EOS = 151645
CHAT = {"<|im_start|>": [151644], "<|im_end|>": [151645]}


def toy(text):
    """The tokenizer of the cases: a character is its own id."""
    return [i for part in re.split(r"(<\|im_\w+\|>)", text) for i in CHAT.get(part, [ord(c) for c in part])]


def segments_of(messages, c):
    """User, assistant, .. -> [(ids, learn), ..]; every answer ends in EOS."""
    segments = []
    for i, message in enumerate(messages):
        answer, ids = i % 2 == 1, toy(message)
        learn = answer and (i == len(messages) - 1 or not c.get("last_message_loss_only"))
        cut = answer and len(ids) > c.get("max_answer_len", len(ids))     # then the answer has no end to be learned
        segments.append((ids[: c["max_answer_len"]] if cut else ids + [EOS] * answer, learn))
    return segments + [([0], False)] * (len(messages) % 2)               # a prompt: the last token has nothing to aim at


def branch_of(segments, weight, weighting):
    """A weight is None, a number, or one that may switch off a root; a flag of null takes what the weighting says."""
    w = weight if isinstance(weight, dict) else {"weight": 1.0 if weight is None else weight}
    roots = [w.get(flag) is not False and name in (weighting or "") for flag, name in
             (("sqrt_length", "root_tokens"), ("root_subsegments", "root_subsegments"))]
    return data.Branch(segments, w["weight"], *roots)


def layout_of(c):
    """A case -> data.Example, and which of its trunk's tokens are visual."""
    messages, text = c["messages"], ""
    if not isinstance(messages[0], list):
        messages = [messages]
    if "<|image|>" in messages[0][0]:                                    # the image stands where the text says, not right behind BOS
        text, _, rest = messages[0][0].partition("<|image|>")
        messages = [[rest, *messages[0][1:]]]
    vision = [i for image in c["vision_tokens"] for i in image]
    visual = [False] * (1 + len(text)) + [True] * len(vision)
    weights = c["message_weight"] if isinstance(c["message_weight"], list) else [c["message_weight"]] * len(messages)
    branches = [branch_of(segments_of(m, c), w, c["loss_token_weighting"]) for m, w in zip(messages, weights, strict=True)]
    return data.layout([BOS, *toy(text), *vision], visual, branches, c["max_seq_len"]), visual


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["input"]["name"])
def test_tree_equals_the_official_code(case):
    c, e = case["input"], case["expected"]
    ours, visual = layout_of(c)
    assert ours.tokens.tolist() == e["input_tokens"]
    assert ours.targets.tolist() == e["target_tokens"]
    assert ours.weights.tolist() == pytest.approx(e["loss_masks"], abs=1e-6)
    sub = e.get("subsegment_ids", [10000] * len(ours.tokens))            # no tree: all of it is one trunk
    assert ours.branch.tolist() == [0 if s == 10000 else s + 1 for s in sub]
    assert ours.bidir.tolist() == [int(v) for v in visual] + [0] * (len(sub) - len(visual))
    n = len(c["messages"]) if isinstance(c["messages"][0], list) else 1
    assert ours.dropped == n - max(max(ours.branch.tolist()), 1)
    if "quirk" not in c["name"]:
        assert ours.pos.tolist() == e["position_ids"]


def test_branches_of_a_text_tree_start_behind_bos():
    # a deviation: the official code starts them at 0 as well, on top of BOS
    (case,) = [case for case in CASES if "quirk" in case["input"]["name"]]
    ours, _ = layout_of(case["input"])
    assert case["expected"]["position_ids"] == [0, 0, 1, 2, 3, 0, 1, 2]
    assert ours.pos.tolist() == [0, 1, 2, 3, 4, 1, 2, 3]


def branch(first, n):
    """n input tokens from id `first` on; the last of its n + 1 ids is a target only."""
    return data.Branch([([first], False), ([*range(first + 1, first + n), EOS], True)])


@pytest.mark.parametrize(("max_tokens", "kept"), [(6, 0), (8, 1), (11, 1), (12, 2), (21, 2), (22, 3), (None, 3)])
def test_branches_past_max_tokens_are_dropped_and_counted_never_cut(max_tokens, kept):
    # a trunk of 3 and branches of 5, 4 and 10 inputs; sums 8, 12, 22
    branches = [branch(100, 5), branch(200, 4), branch(300, 10)]
    ours = data.layout([BOS, 7, 7], [False, True, True], branches, max_tokens)
    whole = [[100, 101, 102, 103, 104], [200, 201, 202, 203], list(range(300, 310))]
    assert ours.tokens.tolist() == [BOS, 7, 7, *chain(*whole[:kept])]
    assert ours.dropped == 3 - kept
    assert (ours.weights > 0).sum() == sum(len(ids) for ids in whole[:kept])
    assert (ours.targets == EOS).sum() == kept


def test_a_dropped_branch_takes_those_behind_it_along():
    # as in the official code, though a later and shorter one would fit
    ours = data.layout([BOS], [False], [branch(100, 5), branch(200, 50), branch(300, 2)], 20)
    assert ours.tokens.tolist() == [BOS, 100, 101, 102, 103, 104]
    assert ours.dropped == 2
    assert set(ours.branch.tolist()) == {0}                              # one branch is left: no tree any more


def test_weight_by_branches_counts_those_kept():
    trees = [data.layout([BOS], [False], [data.Branch(b.segments, sqrt_branches=True) for b in branches], 20)
             for branches in ([branch(100, 5), branch(200, 4)], [branch(100, 5), branch(200, 4), branch(300, 50)])]
    assert trees[0].weights.tolist() == trees[1].weights.tolist()
    assert trees[0].weights.max() == pytest.approx(0.5**0.5)


def test_a_branch_too_long_by_itself_does_not_take_the_others_with_it():
    """Whether an example can be used does not hang on the order that its branches were drawn in."""
    short, long = data.Branch([([5] * 3, False), ([6] * 3, True)]), data.Branch([([7] * 90, True)])
    for branches in ([long, short], [short, long]):
        x = data.layout([1, 2], [False, True], branches, 40)
        assert x.dropped == 1 and x.dropped_tokens == 89 and x.weights.sum() == 3 and len(x.tokens) == 7
    x = data.layout([1, 2], [False, True], [short, long, short], 40)     # after one that fits, the first that does not ends the tree
    assert x.dropped == 2 and len(x.tokens) == 7
