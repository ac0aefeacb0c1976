"""Compares the arrays of message trees with the official ones (conformance/message_tree.json), and
tests token weights. Tests of sizes, prompts and pixels are in test_encode.py."""

import json
import math
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import data
from tests.records.visual_records import CONFIG, TOKENIZER, encoded, write_media

TESTS = Path(__file__).parent
CASES = json.loads((TESTS / "conformance/message_tree.json").read_text())["cases"]
# One case is skipped on purpose, because it has text before the visual tokens of a tree. In this
# project they always follow BOS, and no record can change this.
CASES = [case for case in CASES if case["input"]["name"] != "explicit image placeholder tree"]
BOS = EOS = 151645
CHAT = {"<|im_start|>": [151644], "<|im_end|>": [151645]}
PREFIX = 10000                        # the official id of tokens in a prefix
FLAT = replace(CONFIG, sqrt_length=True, sqrt_branches=True, point_weight=0.2,
               video_caption_weight=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_media(tmp_path_factory.mktemp("media"))


# --------------------------------------------------------------------------------------------------
# layout


def encode_characters(text):
    """The tokenizer of the cases: the id of a character is its code point."""
    parts = re.split(r"(<\|im_\w+\|>)", text)
    return list(chain.from_iterable(CHAT.get(part, map(ord, part)) for part in parts))


def segments_of(messages, case):
    """[user, assistant, ..] -> [(ids, factor of the weight), ..]. Complete answers end in EOS."""
    segments = []
    for i, message in enumerate(messages):
        ids = encode_characters(message)
        if i % 2 == 0:
            segments.append((ids, 0))
            continue
        max_length = case.get("max_answer_len", math.inf)
        # an answer that is cut off has no EOS
        ids = ids[:max_length] if len(ids) > max_length else [*ids, EOS]
        learn = i == len(messages) - 1 or not case.get("last_message_loss_only")
        segments.append((ids, int(learn)))
    if len(messages) % 2:                        # a prompt: its last token has no target
        segments.append(([0], 0))
    return segments


def config_of(case):
    weighting = case["loss_token_weighting"] or ""
    return data.DataConfig(sqrt_length="root_tokens" in weighting, point_weight=0.2,
                           sqrt_branches="root_subsegments" in weighting)


def branch_of(messages, weight, case):
    """weight: None, a number, or a dict whose flags may turn off the square roots."""
    if not isinstance(weight, dict):
        return data.Branch(segments_of(messages, case), weight=1.0 if weight is None else weight)
    if weight["root_subsegments"] is not False:
        return data.Branch(segments_of(messages, case), weight=weight["weight"])
    assert weight["root_length"] is False
    assert weight["weight"] == config_of(case).point_weight
    return data.Branch(segments_of(messages, case), "point")


def layout_of(case):
    """The input of a case -> Example, and a bool per token of its prefix: is it visual?"""
    messages = case["messages"]
    if not isinstance(messages[0], list):
        messages = [messages]
    text = ""
    if "<|image|>" in messages[0][0]:            # the text gives the position of the image
        text, _, rest = messages[0][0].partition("<|image|>")
        messages = [[rest, *messages[0][1:]]]
    visual = list(chain.from_iterable(case["vision_tokens"]))
    prefix = [BOS, *encode_characters(text), *visual]
    is_visual = [False] * (1 + len(text)) + [True] * len(visual)
    weights = case["message_weight"]
    if not isinstance(weights, list):
        weights = [weights] * len(messages)
    branches = [branch_of(m, w, case) for m, w in zip(messages, weights, strict=True)]
    max_tokens = case["max_seq_len"] or math.inf
    return data.layout(prefix, is_visual, branches, config_of(case), max_tokens), is_visual


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["input"]["name"])
def test_tree_equals_the_official_code(case):
    given = case["input"]
    expected = case["expected"]
    ours, is_visual = layout_of(given)
    assert ours.tokens.tolist() == expected["input_tokens"]
    assert ours.targets.tolist() == expected["target_tokens"]
    assert ours.weights.tolist() == pytest.approx(expected["loss_masks"], abs=1e-6)
    n = len(ours.tokens)
    branch = np.array(expected.get("subsegment_ids", [PREFIX] * n))       # no tree: only a prefix
    last = {b: np.flatnonzero(branch == b)[-1] for b in set(branch.tolist())}
    ends = [n if b == PREFIX else last[b] + 1 for b in branch.tolist()]
    assert ours.visible_until.tolist() == ends
    assert ours.bidir.tolist() == [int(v) for v in is_visual] + [0] * (n - len(is_visual))
    n_branches = len(given["messages"]) if isinstance(given["messages"][0], list) else 1
    assert ours.n_branches == max(len(last) - 1, 1)
    assert ours.dropped_branches == n_branches - ours.n_branches
    if "quirk" not in given["name"]:
        assert ours.pos.tolist() == expected["position_ids"]


def test_branches_of_a_text_tree_start_behind_bos():
    # deviation: the official code gives the first token of a branch position 0, like BOS
    (case,) = [case for case in CASES if "quirk" in case["input"]["name"]]
    ours, _ = layout_of(case["input"])
    assert case["expected"]["position_ids"] == [0, 0, 1, 2, 3, 0, 1, 2]
    assert ours.pos.tolist() == [0, 1, 2, 3, 4, 1, 2, 3]


def branch(first, n):
    """n input tokens with ids from `first` on. The last of n + 1 ids is only a target."""
    return data.Branch([([first], 0), ([*range(first + 1, first + n), EOS], 1)])


@pytest.mark.parametrize(("max_tokens", "kept"), [
    (6, 0), (8, 1), (11, 1), (12, 2), (21, 2), (22, 3), (math.inf, 3)])
def test_branches_past_max_tokens_are_dropped_and_counted_never_cut(max_tokens, kept):
    # a prefix of 3 and branches of 5, 4 and 10 tokens; the sums are 8, 12, 22
    branches = [branch(100, 5), branch(200, 4), branch(300, 10)]
    ours = data.layout([BOS, 7, 7], [False, True, True], branches, CONFIG, max_tokens)
    whole = [[100, 101, 102, 103, 104], [200, 201, 202, 203], list(range(300, 310))]
    assert ours.tokens.tolist() == [BOS, 7, 7, *chain(*whole[:kept])]
    assert ours.dropped_branches == 3 - kept
    assert (ours.weights > 0).sum() == sum(len(ids) for ids in whole[:kept])
    assert (ours.targets == EOS).sum() == kept


def test_a_branch_too_long_by_itself_does_not_take_the_others_with_it():
    """Whether an example can be used does not depend on the order of its branches."""
    short = data.Branch([([5] * 3, 0), ([6] * 3, 1)])
    long = data.Branch([([7] * 90, 1)])
    for branches in ([long, short], [short, long]):
        ours = data.layout([1, 2], [False, True], branches, CONFIG, 40)
        assert (ours.dropped_branches, ours.dropped_tokens) == (1, 89)
        assert (len(ours.tokens), ours.weights.sum()) == (7, 3)
    # after a branch that fits, the first that does not fit ends the tree
    ours = data.layout([1, 2], [False, True], [short, long, short], CONFIG, 40)
    assert (ours.dropped_branches, len(ours.tokens)) == (2, 7)


# --------------------------------------------------------------------------------------------------
# token weights


@pytest.mark.parametrize(("kind", "of_video", "weight"), [
    ("point", False, 0.2), ("count", False, 0.2), ("point", True, 0.2), ("count", True, 0.2),
    ("track", True, 0.2), ("caption", True, 0.1),
    ("caption", False, 2 / 9**0.5 / 4**0.5), ("qa", False, 2 / 9**0.5 / 4**0.5),
    ("qa", True, 2 / 9**0.5 / 4**0.5), ("text", False, 2 / 9**0.5 / 4**0.5)])
def test_points_and_captions_of_videos_have_flat_weights_and_all_else_square_roots(
        kind, of_video, weight):
    of_branch = data.Branch([], kind, 3.0, of_video)
    assert data.token_weight(of_branch, 9, 4, FLAT) == pytest.approx(3 * weight)
    assert data.token_weight(of_branch, 9, 4, CONFIG) == 3


def test_every_turn_of_a_conversation_has_the_weight_of_its_kind(folder):
    """Points and counts have 0.2 per token, questions 2 / sqrt(number of their loss tokens)."""
    point = {"type": "point", "label": "cat", "coords": "unit", "points": [{"x": 0.5, "y": 0.5}]}
    count = {"type": "count", "label": "cat", "count": 3, "weight": 0.5}
    turns = [{"question": "?", "answer": "abc"}, point, {"question": "!", "answer": "d"}, count]
    record = {"image": "0.png", "annotations": [{"type": "qa", "weight": 2, "turns": turns}]}
    example = encoded(folder, record, replace(FLAT, prefix_all=False, sqrt_branches=False))
    learned = example.weights > 0
    text = TOKENIZER.decode(example.targets[learned])
    points = '<points coords="1 1 500 500">cat</points>'
    assert text == f"abc{points}d3"
    n_question = len("abc") + len("d") + 2                          # each with its EOS
    question, pointing = 2 * 2 / n_question**0.5, 2 * 0.2
    weights = [question] * 4 + [pointing] * (len(points) + 1) + [question] * 2
    assert example.weights[learned] == pytest.approx([*weights, pointing / 2, pointing / 2])


def test_weights_of_record_annotation_and_turn_multiply_and_0_is_context(folder):
    """The square root counts tokens, not weights (docs/molmo2.md 7.1)."""
    turns = [{"question": "?", "answer": "abc", "weight": 0.5}, {"question": "?", "answer": "d"}]
    record = {"weight": 2.0, "annotations": [{"type": "qa", "weight": 3.0, "turns": turns}]}
    weights = encoded(folder, record, replace(CONFIG, sqrt_length=True, prefix_all=False)).weights
    n_loss = 3 + 1 + 1 + 1                                       # two answers, each with its EOS
    full = 2 * 3 * 2 / n_loss**0.5
    assert weights[weights > 0] == pytest.approx([0.5 * full] * 4 + [full] * 2)
    turns[0]["weight"] = 0
    muted = encoded(folder, record)
    assert TOKENIZER.decode(muted.targets[muted.weights > 0]) == "d"
    assert "abc" in TOKENIZER.decode(muted.tokens)
