"""The layouts of multiple-choice questions: their shares, and that every answer can be read off."""

import re
from collections import Counter

import pytest

from tests.text.annotations import (
    IMAGE,
    LATER,
    STAGE1,
    drawn_questions,
    draws,
    one_turn,
    question_of,
    share,
)
from text.choices import INSTRUCTIONS, ONE_OPTION

QUESTION = "Which colour?"
OPTIONS = ["red one", "blue one", "green, dark", "none of these"]
CHOICE = {
    "type": "qa",
    "style": "a_okvqa_mc",
    "question": QUESTION,
    "options": OPTIONS,
    "answer_idx": 2,
}


USUAL = ("A. B. C. D.", "A) B) C) D)", "(A) (B) (C) (D)", "A: B: C: D:",
         "1. 2. 3. 4.", "1) 2) 3) 4)", "(1) (2) (3) (4)", "1: 2: 3: 4:")
UNUSUAL = ("a. b. c. d.", "i) ii) iii) iv)", "[A] [B] [C] [D]", "<1> <2> <3> <4>",
           "Option A: Option B: Option C: Option D:", "a - b - c - d -", "#1 #2 #3 #4")


def read_prompt(question, options):
    """A prompt -> (options as printed, their labels or "", its instruction or "", inline)."""
    rest = question[len(QUESTION) :]
    known = [*INSTRUCTIONS[True], *INSTRUCTIONS[False], ONE_OPTION]
    instruction = "".join(words for words in known if words in rest)
    parts = re.split(r"\n| / |; | \| ", rest.replace(instruction, ""))
    printed = [part.strip() for part in parts if part.strip()]
    assert len(printed) == len(options)
    labels = []
    for line in printed:
        option = next(option for option in options if line.endswith(option))
        labels.append(line.removesuffix(option).strip())
    return printed, labels, instruction, "\n" not in question


def options_of_answer(question, answer, options):
    """The options that an answer names, by their printed lines or by their labels alone."""
    printed, labels, _, _ = read_prompt(question, options)
    lines = answer.split("\n")
    if not all(line in printed for line in lines):
        names = [re.findall(r"\w+", label)[-1] for label in labels]
        assert len(set(names)) == len(options)
        lines = [printed[names.index(name)] for name in answer.split(", ")]
    return {next(option for option in options if line.endswith(option)) for line in lines}


def test_layouts_of_options_have_the_published_shares():
    pairs = draws(CHOICE, n=6000)
    assert abs(share([ONE_OPTION in question for question, _ in pairs]) - 0.1) < 0.015
    in_form_of_evaluation = [pair for pair in pairs if ONE_OPTION in pair[0]]
    assert all(pair == one_turn(CHOICE) for pair in in_form_of_evaluation)

    free = []
    labelled = []
    for question, answer in pairs:
        if ONE_OPTION not in question:
            printed, labels, instruction, inline = read_prompt(question, OPTIONS)
            assert all(labels) == any(labels)
            free.append((any(labels), instruction, inline))
            if any(labels):
                labelled.append((answer in printed, " ".join(labels)))
    # 0.25 have the label alone as answer, and 0.8 of the others have labels, too
    assert abs(share([has_labels for has_labels, _, _ in free]) - 0.85) < 0.02
    assert abs(share([instruction for _, instruction, _ in free]) - 0.5) < 0.02
    assert abs(share([inline for _, _, inline in free]) - 0.1) < 0.015
    assert abs(sum(not in_full for in_full, _ in labelled) / len(free) - 0.25) < 0.02
    assert {labels for _, labels in labelled} == {*USUAL, *UNUSUAL}
    assert abs(share([labels in USUAL for _, labels in labelled]) - 0.8) < 0.02


@pytest.mark.parametrize("extra", [
    {},
    {"shuffle_options": True},
    {"answer_idx": [1, 3]},
    {"letters": False},
    {"answer_idx": [3, 0], "shuffle_options": True},
], ids=str)
def test_the_right_options_can_be_read_off_every_answer(extra):
    choice = {**CHOICE, **extra}
    indices = choice["answer_idx"]
    right = {OPTIONS[i] for i in (indices if isinstance(indices, list) else [indices])}
    letters = choice.get("letters", True)
    orders = Counter()
    for question, answer in draws(choice, n=2000):
        assert options_of_answer(question, answer, OPTIONS) == right
        orders[tuple(sorted(OPTIONS, key=question.index))] += 1
        assert letters or not any(read_prompt(question, OPTIONS)[1])
    if choice.get("shuffle_options"):
        assert len(orders) == 24
        assert min(orders.values()) > 40
    else:
        assert set(orders) == {tuple(OPTIONS)}
    # evaluation asks in the order of the record
    asked = question_of(choice, IMAGE, LATER)
    assert sorted(OPTIONS, key=asked.index) == OPTIONS
    assert ONE_OPTION in asked
    assert ("\nA. red" in asked) == letters


def test_a_blank_right_option_always_has_a_label():
    choice = {**CHOICE, "options": ["red", " ", "blue"], "answer_idx": 1, "letters": False}
    for _, answer in draws(choice, n=500):
        assert re.search(r"\w", answer)
        assert not re.search("red|blue", answer)
    assert one_turn(choice) == (f"{QUESTION}\n{ONE_OPTION}\nA. red\nB.\nC. blue", "B.")


def test_multiple_choice_has_no_style_in_front_later_and_one_form_in_stage_1():
    choice = {**CHOICE, "style": "video_multiple_choice_w_subtitle"}
    assert all(question.startswith(QUESTION) for question in drawn_questions(choice, n=50))
    questions = drawn_questions(CHOICE, config=STAGE1, n=50)
    lines = "A. red one\nB. blue one\nC. green, dark\nD. none of these"
    without_length = {re.sub(r" \d+", "", question) for question in questions}
    assert without_length == {f"a_okvqa_mc: {QUESTION}\n{ONE_OPTION}\n{lines}"}
