"""Scores of answers as text, between 0 and 1: exact match, VQA, ANLS, relaxed accuracy,
multiple-choice options, captions (docs/molmo2.md 13). The rules are plain: they also read answers
that a person understands and the official rules (official.py) do not."""

import re
import string
from collections import Counter

from evaluation.metrics import precision_recall_f1


def exact_match(text, answers):
    """1 if the text equals one of the answers. White space at both ends is ignored."""
    return float(text.strip() in {answer.strip() for answer in answers})


NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
DIGITS = {word: str(number) for number, word in enumerate(NUMBER_WORDS.split())} | {"none": "0"}
CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've
    hasn't haven't he'd he'd've he's how'd how'll how's i'd've i'm i've isn't it'd it'd've
    it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock oughtn't
    shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll
    that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas
    wasn't we'd've we've weren't what'll what're what's what've when's where'd where's
    where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
    wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've 'ow's'at"""
# Keys: contractions without the first, the first two or the last apostrophe. Values: contractions.
FULL_FORM = {word.replace("'", "", n): word for word in CONTRACTIONS.split() for n in (1, 2)}
FULL_FORM |= {"".join(word.rsplit("'", 1)): word for word in CONTRACTIONS.split()}


def normalize_vqa_answer(text):
    """Normalizes an answer for the comparison of VQA: lower case, no articles, numbers as digits,
    contractions with their apostrophes. A punctuation mark is removed if the text has it next to a
    blank, otherwise it becomes a blank. If a comma is between digits, all marks are removed."""
    text = re.sub(r"\s+", " ", text).strip()
    comma_in_number = re.search(r"\d,\d", text)
    plain = text
    for mark in ';/[]"{}()=+\\_-><@`,?!':
        remove = comma_in_number or f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if remove else " ")
    words = re.sub(r"\.(?!\d)", "", plain).lower().split()
    words = [DIGITS.get(word, word) for word in words if word not in ("a", "an", "the")]
    return " ".join(FULL_FORM.get(word, word) for word in words)


def count_agreed(text, answers, normalize):
    """How many of the answers equal the text after `normalize`?"""
    return [*map(normalize, answers)].count(normalize(text))


def vqa_score(text, answers):
    """min(n / 3, 1) if n of the annotators gave this answer. With fewer than three annotators, the
    fraction who gave this answer."""
    agreed = count_agreed(text, answers, normalize_vqa_answer)
    return min(agreed / min(3, len(answers)), 1.0)


def levenshtein(a, b):
    """The edit distance: how many letters must be changed, inserted or deleted to turn a into b."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        above = row
        row = [i]
        for j, other in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != other)))
    return row[-1]


def normalize_blanks(text):
    """-> the text in lower case, with one blank between words."""
    return " ".join(text.lower().split())


def anls(text, answers, threshold=0.5):
    """Average normalised Levenshtein similarity (ANLS) of one question, in lower case. The score
    is 1 - edits / length of the longer text, for the most similar answer. If the quotient is not
    below the threshold, the score is 0 (docs/molmo2.md 13)."""
    said = normalize_blanks(text)
    edits = min(levenshtein(true, said) / max(len(true), len(said), 1)
                for true in map(normalize_blanks, answers))
    return 1 - edits if edits < threshold else 0.0


def parse_number(text):
    """The text as a number, or None if it is not a number. "5%" is 0.05."""
    number = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*(%?)"
    found = re.fullmatch(number, text.strip().lower())
    return float(found.group(1)) / (100 if found.group(2) else 1) if found else None


def relaxed_accuracy(text, answers, tolerance=0.05):
    """The score of ChartQA. A number is correct if its error is at most 5 %. Other text must be
    equal, in lower case. 2008 is therefore correct for the year 2009, as in the official code."""

    def right(answer):
        said = parse_number(text)
        true = parse_number(answer)
        if said is None or true is None:
            return text.strip().lower() == answer.strip().lower()
        return abs(said - true) <= tolerance * abs(true)

    return float(any(right(answer) for answer in answers))


# the label of an option, in the forms that people write
STATED_LABEL = re.compile(r"(?:^|\banswer(?:\W*is\b)?)\W*([a-z])(?=[).:,*]|\W*$)")


def select_option(text, options, letters=True):
    """The number of the option that a text selects, or None if the text is empty.

    The first rule that applies is used:
    1. The text is an option in full, with or without its label: "B. blue" or "blue".
    2. The options have letters, and the text states one: "b", "(B)", "B: ..", "Answer: B",
       "**B**", "The answer is b."
    3. The text contains exactly one of the options.
    4. The option with the smallest edit distance, the first of equals.
    """
    said = normalize_blanks(text)
    names = [normalize_blanks(option) for option in options]
    if not said:
        return None
    for k, name in enumerate(names):
        labelled = f"{string.ascii_lowercase[k]}. {name}".rstrip(". ")
        if said.rstrip(".") in (name.rstrip("."), labelled):
            return k
    labels = STATED_LABEL.findall(said) if letters else []
    if labels and ord(labels[-1]) - ord("a") < len(options):
        return ord(labels[-1]) - ord("a")
    named = [k for k, name in enumerate(names)
             if name and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said)]
    if len(named) == 1:
        return named[0]
    return min(range(len(names)), key=lambda k: levenshtein(names[k], said))


def plain_number(text):
    """If a text has exactly one number -> this number as digits: "Three cats." -> "3", "1,234" ->
    "1234", "No cats." -> "0". Otherwise -> the text with number words as digits, which
    metrics.count_from_text reads."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    digits = DIGITS | {"no": "0"}
    text = re.sub("[A-Za-z]+", lambda word: digits.get(word[0].lower(), word[0]), text)
    numbers = re.findall(r"\d+", text)
    return numbers[0] if len(numbers) == 1 else text


def statements(caption):
    """Splits a caption at commas -> Counter of its parts."""
    parts = (part.strip(" .\n").lower() for part in caption.split(","))
    return Counter(part for part in parts if part)


def score_statements(text, caption):
    """-> recall and precision of the parts of a caption. This fits captions of the toy world, which
    are lists. In prose it compares clauses. The paper uses an LLM judge to compare statements
    instead."""
    said = statements(text)
    true = statements(caption)
    scores = precision_recall_f1((said & true).total(), said.total(), true.total())
    return scores.recall, scores.precision
