"""Scores of answers in words by the rules of the official code (docs/molmo2.md 13).

text_metrics.py has functions with the same names and plainer rules, which read more answers as
people understand them. Use these to compare a score with a published one.
"""

import string
from collections import Counter

from evaluation.text_metrics import count_agreed, levenshtein, normalize_vqa_answer


def clean(text):
    """The part of an answer that is scored: the text after the first "Answer:", or the most
    frequent of several lines, with one blank between words."""
    text = text.strip()
    if "Answer:" in text:
        return text.split("Answer:")[1].strip()
    lines = Counter(" ".join(line.split()) for line in text.split("\n"))
    return max(lines, key=lines.get)  # the first of equally frequent ones


def exact_match(text, answers):
    """1 if the text equals one of the answers, in lower case."""
    return float(text.lower() in {answer.lower() for answer in answers})


def vqa_score(text, answers):
    """min(n / 3, 1) if n of the annotators gave this answer."""
    return min(count_agreed(text, answers, normalize_vqa_answer) / 3, 1.0)


def a_okvqa_score(text, answers):
    """As vqa_score, but the answers are only compared in lower case."""
    return min(count_agreed(text, answers, lambda answer: answer.lower().strip()) / 3, 1.0)


def anls(text, answers):
    """As text_metrics.anls, but every blank counts."""
    edits = min(levenshtein(answer.lower(), text.lower()) / max(len(answer), len(text), 1)
                for answer in answers)
    return 1 - edits if edits < 0.5 else 0.0


def parse_number(text):
    """The text as a number if Python reads it as one ("1_000", "inf"), or None. "5%" is 0.05."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def relaxed_accuracy(text, answers):
    """As text_metrics.relaxed_accuracy, but a true 0 is compared as text."""

    def right(answer):
        said = parse_number(text)
        true = parse_number(answer)
        if said is None or not true:
            return text.lower() == answer.lower()
        return abs(said - true) / abs(true) <= 0.05

    return float(any(right(answer) for answer in answers))


def select_option(text, options, letters=True):
    """The number of the option that a text selects. If the options have letters, only these are
    compared with the text: "a red car" selects A. The first rule that holds for exactly one option
    is used, and otherwise the smallest edit distance. So every text selects an option."""
    text = text.lower().strip()
    names = string.ascii_lowercase[: len(options)]
    if not letters:
        names = [option.lower().strip() for option in options]
    rules = (
        lambda name: name == text,
        lambda name: text.startswith(name),
        lambda name: name.startswith(text),
        lambda name: text in name,
    )
    for rule in rules:
        found = [k for k, name in enumerate(names) if rule(name)]
        if len(found) == 1:
            return found[0]
    return min(range(len(names)), key=lambda k: levenshtein(names[k], text))
