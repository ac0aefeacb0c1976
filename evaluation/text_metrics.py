"""Scores of answers in words, between 0 and 1: exact match, VQA, ANLS, relaxed accuracy,
options, captions (docs/molmo2.md 13)."""

import re
import string
from collections import Counter

from evaluation.metrics import precision_recall_f1


def exact_match(text, answers):
    """1 if the text is one of the answers, letter by letter, without outer blanks."""
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
    wouldn't've y'all y'all'd've you'd you'd've you'll you're you've"""
# {a contraction without its first, its first two, or its last apostrophe: the contraction}
FULL_FORM = {word.replace("'", "", n): word for word in CONTRACTIONS.split() for n in (1, 2)}
FULL_FORM |= {"".join(word.rsplit("'", 1)): word for word in CONTRACTIONS.split()}


def normalize_vqa_answer(text):
    """An answer as VQA compares it: lower case, no articles, numbers as digits, contractions
    with their apostrophes. A punctuation mark next to a blank is removed, one inside a word
    becomes a blank; all are removed where the text has a comma between digits."""
    text = re.sub(r"\s+", " ", text).strip()
    comma_in_number = re.search(r"\d,\d", text)
    plain = text
    for mark in ';/[]"{}()=+\\_-><@`,?!':
        remove = comma_in_number or f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if remove else " ")
    words = re.sub(r"\.(?!\d)", "", plain).lower().split()
    words = [DIGITS.get(word, word) for word in words if word not in ("a", "an", "the")]
    return " ".join(FULL_FORM.get(word, word) for word in words)


def vqa_score(text, answers):
    """A third for each person who gave this answer, at most 1; of fewer than three, the
    share who gave it."""
    normal = normalize_vqa_answer(text)
    agreed = sum(normalize_vqa_answer(answer) == normal for answer in answers)
    return min(agreed / min(3, len(answers)), 1.0)


def levenshtein(a, b):
    """Number of letters to change, insert or delete to turn a into b."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        above = row
        row = [i]
        for j, other in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != other)))
    return row[-1]


def normalize_blanks(text):
    """Lower case, one blank between words."""
    return " ".join(text.lower().split())


def anls(text, answers, threshold=0.5):
    """Average normalised Levenshtein similarity of one question: 1 - edits / length of
    the longer text, the best over the answers, in lower case; 0 where that many edits reach
    the threshold (docs/molmo2.md 13)."""
    said = normalize_blanks(text)
    edits = min(levenshtein(true, said) / max(len(true), len(said), 1)
                for true in map(normalize_blanks, answers))
    return 1 - edits if edits < threshold else 0.0


def parse_number(text):
    """The number that the text is, per cent as a fraction, or None."""
    number = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%?)"
    found = re.fullmatch(number, text.strip().lower())
    return float(found.group(1)) / (100 if found.group(2) else 1) if found else None


def relaxed_accuracy(text, answers, tolerance=0.05):
    """ChartQA: 1 for a number within 5 % of the true one, else for the same words. So 2008
    passes for the year 2009, as in the official score."""

    def right(answer):
        said = parse_number(text)
        true = parse_number(answer)
        if said is None or true is None:
            return text.strip().lower() == answer.strip().lower()
        return abs(said - true) <= tolerance * abs(true)

    return float(any(right(answer) for answer in answers))


# the label of an option: as the official code reads it, and as people write it
LABEL = re.compile(r"^\(?([a-z])(?:[).:]|$)")
STATED_LABEL = re.compile(r"(?:^|\banswer\W*(?:is\b)?)\W*([a-z])(?=[).:,*]|\W*$)")


def select_option(text, options, letters=True, plain=False):
    """The number of the option that a text means, or None for an empty text.

    In this order: "B. blue" or "blue" in full; the label in front ("b", "(B)", "B: ..")
    if options have letters; the only option that the text names; the option with the
    fewest edits, the first of equals (as in the official code, which rejects no answer).
    plain: the label may also be stated, as in "Answer: B", "**B**" and "The answer is b."
    """
    said = normalize_blanks(text)
    names = [normalize_blanks(option) for option in options]
    if not said:
        return None
    for k, name in enumerate(names):
        labelled = f"{string.ascii_lowercase[k]}. {name}".rstrip(". ")
        if said.rstrip(".") in (name.rstrip("."), labelled):
            return k
    labels = (STATED_LABEL if plain else LABEL).findall(said) if letters else []
    if labels and ord(labels[-1]) - ord("a") < len(options):
        return ord(labels[-1]) - ord("a")
    named = [k for k, name in enumerate(names)
             if name and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said)]
    if len(named) == 1:
        return named[0]
    return min(range(len(names)), key=lambda k: levenshtein(names[k], said))


def plain_number(text):
    """The only number of a text, as digits: "3" of "Three cats.", "1234" of "1,234", "0" of
    "No cats."; of none or several the text with digits, which metrics.count_from_text reads."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    digits = DIGITS | {"no": "0"}
    text = re.sub("[A-Za-z]+", lambda word: digits.get(word[0].lower(), word[0]), text)
    numbers = re.findall(r"\d+", text)
    return numbers[0] if len(numbers) == 1 else text


def statements(caption):
    """The parts of a caption between commas -> Counter."""
    parts = (part.strip(" .\n").lower() for part in caption.split(","))
    return Counter(part for part in parts if part)


def score_statements(text, caption):
    """-> recall, precision of the statements of a caption, counted as often as they occur.
    Right for captions of the toy world, which are lists; of prose it compares clauses, where
    the paper asks a language model which statements agree."""
    said = statements(text)
    true = statements(caption)
    scores = precision_recall_f1((said & true).total(), said.total(), true.total())
    return scores.recall, scores.precision
