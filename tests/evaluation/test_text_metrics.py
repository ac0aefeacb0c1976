"""Answers in words are scored as by the official code and by hand."""

import json
from pathlib import Path

import pytest

from evaluation import metrics, official, text_metrics

FILE = Path(__file__).parents[1] / "conformance" / "eval_metrics.json"
CASES = json.loads(FILE.read_text())["text_metrics"]


def score(kind, first, second):
    if kind == "select_mc_option":
        return official.select_option(first, second, letters=False)
    if kind == "relaxed_correctness":
        return official.relaxed_accuracy(second, [first])
    if kind == "anls":
        return official.anls(second, [first])
    assert kind == "vqa_score", kind
    return official.vqa_score(second, first)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']} {c['input']}"[:60])
def test_scores_equal_the_official_ones(case):
    assert score(case["kind"], *case["input"]) == pytest.approx(case["expected"])


@pytest.mark.parametrize(("text", "cleaned"), {
    " 12 ": "12", "Since 3 x 4. Answer: 12": "12", "Answer: 1 Answer: 2": "1",
    "12\n7\n 12": "12", "7\n12": "7", "red   car": "red car", "answer: 7": "answer: 7",
}.items())
def test_the_official_code_scores_a_part_of_the_answer(text, cleaned):
    assert official.clean(text) == cleaned


@pytest.mark.parametrize(("text", "chosen"), {
    "B. a red car": 1, "b": 1, "(C)": 2, "D) dog": 3, "Cat.": 2, "dog": 3,
    "a red car": 0, "blue": 1, "The answer is D": 0, "It is a dog.": 0, "": 0,
}.items())
def test_official_options_are_read_by_their_letters_alone(text, chosen):
    """The values are those of the official code for the options blue, a red car, cat and dog."""
    assert official.select_option(text, ["blue", "a red car", "cat", "dog"]) == chosen


@pytest.mark.parametrize(("rule", "text", "answers", "expected", "plain"), [
    ("exact_match", "Yes", ["yes"], 1, 0),
    ("vqa_score", "red", ["red", "blue"], 1 / 3, 1 / 2),
    ("vqa_score", "red", ["red"] * 4 + ["blue"] * 6, 1, 1),
    ("anls", "12", ["12 "], 2 / 3, 1),
    ("relaxed_accuracy", "0", ["0.0"], 0, 1),
    ("relaxed_accuracy", "1_000", ["1000"], 1, 0),
    ("relaxed_accuracy", "4.76%", ["0.05"], 1, 1),
    ("relaxed_accuracy", "nan", ["nan"], 0, 1),
])
def test_official_and_plain_scores_differ_in_known_cases(rule, text, answers, expected, plain):
    assert getattr(official, rule)(text, answers) == pytest.approx(expected)
    assert getattr(text_metrics, rule)(text, answers) == pytest.approx(plain)


def test_anls_follows_the_formula_at_the_threshold_and_the_script_in_blanks():
    """docs/molmo2.md 13: half of the letters wrong is 0; a blank more or less is an edit, but
    two blanks are one."""
    anls = text_metrics.anls
    assert anls("ax", ["ab"]) == anls("Cola", ["Coca Cola"]) == 0
    assert anls("ab c", ["abcd"]) == 0  # two edits in four letters
    assert anls("Coca  cola ", ["Coca Cola", "Pepsi"]) == 1
    assert anls("CocaCola", ["Coca Cola"]) == pytest.approx(8 / 9)


def test_an_exact_match_is_one_of_the_answers_letter_by_letter():
    exact = text_metrics.exact_match
    assert exact(" Drawn.\n", ["Filmed.", "Drawn."]) == 1
    assert exact("drawn.", ["Drawn."]) == exact("Drawn", ["Drawn."]) == exact("", ["x"]) == 0


@pytest.mark.parametrize(("text", "same"), {
    "A red-brown  dog.": "red brown dog", "Dont know": "don't know", "1,000": "1000",
    "3.5 m": "the 3.5 m", "yes!": "yes", "none": "0", "an   hour": "hour", "Ten": "10",
    "couldntve": "couldn't've", "y'allll": "yall'll", "well/known": "well known",
    "a, b": "b,",
}.items())
def test_vqa_answers_are_compared_without_what_does_not_matter(text, same):
    normal = text_metrics.normalize_vqa_answer
    assert normal(text) == normal(same)


@pytest.mark.parametrize(("text", "letters", "chosen"), [
    ("C. a leaf", True, 2), ("a leaf", True, 2), ("A leaf.", True, 2), ("c", True, 2),
    ("(C)", True, 2), ("C: whatever", True, 2), ("it must be a leaf, I think", True, 2),
    ("a leef", True, 2), ("b)", True, 1), ("D.", True, 0), ("", True, None), ("  ", False, None),
    ("a root", False, 1), ("b", False, 0), ("B. a leaf", True, 1),
    ("not a stem but a leaf", False, 0),
])
def test_an_option_is_found_by_its_words_its_label_or_the_fewest_edits(text, letters, chosen):
    """By edits, the first of equals, where no option is named or several are."""
    assert text_metrics.select_option(text, ["a stem", "a root", "a leaf"], letters) == chosen


@pytest.mark.parametrize(("text", "chosen"), {
    "Answer: D": 3, "**B**": 1, "The correct answer is d.": 3, "**Answer:** a": 0,
    "Not a. The answer is C.": 2, "(C)": 2,
    # no letter is stated
    "The answer is a red point": 0, "A red point": 0, "Answer: Z": 2, "": None,
}.items())
def test_a_letter_that_is_stated_is_read_by_the_plain_rule(text, chosen):
    options = ["red point", "the blue point", "green", "none of them"]
    select = text_metrics.select_option
    assert select(text, options) == chosen
    assert select("A. Smith", ["B. Jones", "A. Smith"]) == 1


@pytest.mark.parametrize(("text", "unread", "plain"), [
    ("three", None, 3), ("1,234", None, 1234), ("No cats.", None, 0), ("There are none.", 0, 0),
    ("There are 1,234,567 of them.", 1, 1_234_567), ("I count Ten cats", None, 10), ("7", 7, 7),
    ("2 or 3", None, None), ("many", None, None),
    ('<points coords="1 1 350 750 2 800 200">no cats</points>', 2, 2),
])
def test_a_count_in_words_is_read_by_the_plain_rule_alone(text, unread, plain):
    assert metrics.count_from_text(text) == unread
    assert metrics.count_from_text(text_metrics.plain_number(text)) == plain


def test_statements_of_a_caption_count_as_often_as_they_are_made():
    score = text_metrics.score_statements
    assert score("red circle, blue square", "blue square, red circle") == (1, 1)
    found = score("red circle, red circle, blue cross", "red circle, blue square")
    assert found == (0.5, pytest.approx(1 / 3))
    assert score("", "red circle") == (0, 0)
    assert score("Red circle.", "red circle") == (1, 1)
