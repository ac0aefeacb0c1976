"""Scores of answers, without a model: points, counts, tracks, masks, words (paper: evaluation; spec 13, without the defects listed there).

in    what was said and what is true, as plain numbers, words and masks (numpy)
out   scores between 0 and 1

points      predicted and true ones are matched one to one by distance (Hungarian); a hit is a matched prediction inside the matched
            object's mask. Nothing to find: 1 if nothing was predicted, else 0. Points of several images are matched image by image;
            those of a video all at once, by distance in time, x and y, each on a scale of 0 to 100.
count       the number the text states; a text without one counts as the number of its points.
tracks      every frame scored as points are, then HOTA over all of them.
words       exact, VQA, ANLS, relaxed accuracy, the chosen option, the statements of a caption.

    python -m tools.metrics --predicted sam.npz --masks true.npz         # J&F of masks that a segmenter made from predicted tracks
"""

import argparse
import json
import math
import re
import string
import sys
import zipfile
from collections import Counter

import numpy as np

from text.points import parse_points

# ---------------------------------------------------------------------------------------------------------------
# points


def assign(cost):
    """(n,m) costs -> [(row, column), ..], min(n, m) pairs of the smallest total (Hungarian, shortest augmenting paths)."""
    cost = np.asarray(cost, dtype=np.float64)
    if cost.size == 0:
        return []
    if cost.shape[0] > cost.shape[1]:
        return sorted((r, c) for c, r in assign(cost.T))
    n, m = cost.shape
    u, v = np.zeros(n + 1), np.zeros(m + 1)              # potentials; row and column 0 are the artificial root
    match = np.zeros(m + 1, dtype=int)                   # row of each column
    for row in range(1, n + 1):
        match[0], column = row, 0
        shortest, came = np.full(m + 1, np.inf), np.zeros(m + 1, dtype=int)
        used = np.zeros(m + 1, dtype=bool)
        while match[column]:
            used[column] = True
            reduced = cost[match[column] - 1] - u[match[column]] - v[1:]
            better = ~used[1:] & (reduced < shortest[1:])
            shortest[1:][better], came[1:][better] = reduced[better], column
            nearest = int(np.where(used[1:], np.inf, shortest[1:]).argmin()) + 1
            step = shortest[nearest]
            u[match[used]] += step
            v[used] -= step
            shortest[~used] -= step
            column = nearest
        while column:                                    # turn the augmenting path around
            match[column], column = match[came[column]], came[column]
    return sorted((int(match[j]) - 1, j - 1) for j in range(1, m + 1) if match[j])


def nearest(predicted, truth):
    """Points of any number of coordinates -> [(predicted, true), ..], matched by Euclidean distance."""
    if not predicted or not truth:
        return []
    return assign(np.linalg.norm(np.array(predicted, float)[:, None] - np.array(truth, float)[None], axis=-1))


def rates(hits, n_predicted, n_true):
    """-> precision, recall, F1; all 1 where nothing was to be found and nothing was."""
    if not n_predicted or not n_true:
        return (float(n_predicted == n_true),) * 3
    precision, recall = hits / n_predicted, hits / n_true
    return precision, recall, 2 * precision * recall / (precision + recall + 1e-10)


def score_points(predicted, truth, hit):
    """predicted and truth: [(x, y), ..] in pixels; hit(k, point): does the point hit true object k? -> precision, recall, F1."""
    return rates(sum(hit(k, predicted[i]) for i, k in nearest(predicted, truth)), len(predicted), len(truth))


def score_images(predicted, truth, hit):
    """Of several images: [(image, x, y), ..], hit(k, (image, x, y)) -> precision, recall, F1 over all of them; matched within an image."""
    hits = 0
    for image in {p[0] for p in truth}:
        mine, true = ([i for i, p in enumerate(points) if p[0] == image] for points in (predicted, truth))
        pairs = nearest([predicted[i][1:] for i in mine], [truth[k][1:] for k in true])
        hits += sum(hit(true[k], predicted[mine[i]]) for i, k in pairs)
    return rates(hits, len(predicted), len(truth))


def score_video(predicted, truth, hit, size):
    """Of a video: [(seconds, x, y), ..], hit(k, (seconds, x, y)), size (seconds, width, height) -> precision, recall, F1."""
    scale = 100 / np.maximum(np.array(size, float), 1e-9)                # a film of one picture lasts no time
    percent = lambda points: [np.round(p * scale, 1) for p in np.array(points, float)]         # noqa: E731
    return rates(sum(hit(k, predicted[i]) for i, k in nearest(percent(predicted), percent(truth))), len(predicted), len(truth))


def inside(mask, x, y):
    """Does the rounded point lie in a mask (h,w)?"""
    x, y = round(x), round(y)
    return 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and bool(mask[y, x])


def in_mask(masks):
    """masks (n,h,w) bool, or a list of n -> hit(k, point): it lies in mask k; a point's last two numbers are x and y."""
    return lambda k, point: inside(masks[k], *point[-2:])


def in_film(times, masks):
    """times (t,) and masks (n,t,h,w) bool -> hit(k, (seconds, x, y)): it lies in object k, at one of the times, to a tenth of a second."""
    at = {round(float(t), 1): i for i, t in enumerate(times)}
    return lambda k, point: round(point[0], 1) in at and inside(masks[k][at[round(point[0], 1)]], *point[1:])


def near(truth, sizes):
    """Where there are no masks: hit(k, point) within 5 % of the diagonal of true point k, at its time or on its image where they have
    one (to a tenth). sizes: (width, height) of the image of every true point."""

    def hit(k, point):
        there = all(round(a, 1) == round(b, 1) for a, b in zip(point[:-2], truth[k][:-2], strict=True))
        return there and math.dist(point[-2:], truth[k][-2:]) <= 0.05 * math.hypot(*sizes[k])

    return hit


# ---------------------------------------------------------------------------------------------------------------
# counts


def count_in(text):
    """The number a text states, else how many points it has, else None."""
    if "there are none" in text.lower():
        return 0
    stated = (re.fullmatch(r"\s*(\d+)\s*\.?\s*", text) or re.search(r"total of (\d+)", text)
              or re.match(r"\s*There (?:are|is) (\d+)\b", text))
    if stated:
        return int(stated.group(1))
    return len(parse_points(text, 1, 1)) or None


def score_count(n, truth, video=False):
    """-> exact, close. Close is off by one at most; of a video, by one and a twentieth of the truth (rounded down). n None: neither."""
    off = math.inf if n is None else abs(n - truth)
    return float(off == 0), float(off <= 1 + (truth // 20 if video else 0))


# ---------------------------------------------------------------------------------------------------------------
# tracks


def score_tracks(predicted, truth, hit):
    """predicted and truth: {frame: {id: (x, y)}}; hit(frame, true id, point) -> {precision, recall, f1, hota, det_a, ass_a}.

    The first three: every frame that has a prediction or a truth is scored as an image, with the objects that are in it and no others
    (the official code sets the masks of all objects against them), and the mean taken.

    HOTA as TrackEval defines it, with similarity 1 if the point lies in the object's mask, else 0, so that its 19 thresholds agree.
    1. Over all frames, true track i and predicted track j collect an alignment: in each frame their similarity over that of i or j with
       anything (an IoU), summed, then over frames of i + frames of j - that sum.
    2. In every frame, true and predicted points are matched one to one so that the sum of alignment x similarity is largest, and
       pairs that are not similar are dropped. The rest are true positives; c(i,j) of them fall to tracks i and j.
    3. DetA = TP / (TP + FN + FP). AssA = the mean over true positives of c(i,j) / (frames of i + frames of j - c(i,j)): a track that
       keeps its identity is worth more than pieces of it. HOTA = sqrt(DetA AssA).
    """
    frames = sorted({frame for side in (predicted, truth) for frame, objects in side.items() if objects})
    if not frames:
        return dict.fromkeys(("precision", "recall", "f1", "hota", "det_a", "ass_a"), 1.0)
    scores, seen, alignment, of_true, of_predicted = [], [], Counter(), Counter(), Counter()
    for frame in frames:
        mine, true = predicted.get(frame, {}), truth.get(frame, {})
        js, ids = list(mine), list(true)
        similar = np.array([[hit(frame, i, mine[j]) for j in js] for i in ids], float).reshape(len(ids), len(js))
        pairs = nearest([mine[j] for j in js], [true[i] for i in ids])
        scores.append(rates(sum(similar[k, j] for j, k in pairs), len(js), len(ids)))
        seen.append((ids, js, similar))
        either = similar.sum(0)[None] + similar.sum(1)[:, None] - similar
        for k, j in zip(*similar.nonzero(), strict=True):
            alignment[ids[k], js[j]] += similar[k, j] / either[k, j]
        of_true.update(ids)
        of_predicted.update(js)

    c = Counter()
    for ids, js, similar in seen:
        worth = [[alignment[i, j] / (of_true[i] + of_predicted[j] - alignment[i, j]) for j in js] for i in ids]
        gain = np.array(worth).reshape(similar.shape) * similar
        c.update((ids[k], js[j]) for k, j in assign(-gain) if similar[k, j])
    hits = sum(c.values())
    det_a = hits / (of_true.total() + of_predicted.total() - hits)
    ass_a = sum(n * n / (of_true[i] + of_predicted[j] - n) for (i, j), n in c.items()) / max(hits, 1)
    precision, recall, f1 = np.mean(scores, axis=0).tolist()
    return {"precision": precision, "recall": recall, "f1": f1, "hota": (det_a * ass_a) ** 0.5, "det_a": det_a, "ass_a": ass_a}


# ---------------------------------------------------------------------------------------------------------------
# masks: J&F (DAVIS). Molmo2 itself says points; a segmenter that takes them as prompts makes the masks


def jaccard(a, b):
    """Masks (h,w) bool -> intersection over union; 1 where both are empty."""
    union = (a | b).sum()
    return float((a & b).sum() / union) if union else 1.0


def boundary(mask):
    """(h,w) bool -> (h,w) bool: pixels that differ from their neighbour to the right, below, or right below; the image's edge is none."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    return (mask != padded[:-1, 1:]) | (mask != padded[1:, :-1]) | (mask != padded[1:, 1:])


def widened(mask, radius):
    """(h,w) bool -> all pixels within `radius` of it: a dilation with a disk, as the union of the mask moved to every place of it."""
    (h, w), padded = mask.shape, np.pad(mask, radius)
    moves = [(y, x) for y in range(-radius, radius + 1) for x in range(-radius, radius + 1) if x * x + y * y <= radius * radius]
    return np.any([padded[radius + y : radius + y + h, radius + x : radius + x + w] for y, x in moves], axis=0)


def boundary_f(predicted, true, tolerance=0.008):
    """Masks (h,w) bool -> F1 of their boundaries: precision is the share of the predicted one that lies within `tolerance` of the
    image's diagonal (in whole pixels, rounded up) of the true one, recall the reverse. 1 where neither has a boundary."""
    mine, real = boundary(predicted), boundary(true)
    if not mine.any() or not real.any():
        return float(mine.any() == real.any())
    radius = math.ceil(tolerance * math.hypot(*true.shape))
    precision, recall = (mine & widened(real, radius)).sum() / mine.sum(), (real & widened(mine, radius)).sum() / real.sum()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def j_and_f(predicted, true):
    """Masks (t,h,w) bool of all that an expression means, in the same frames -> {"j", "f", "j_and_f"}, means over frames."""
    if predicted.shape != true.shape:
        raise ValueError(f"masks {predicted.shape} set against masks {true.shape}")
    j, f = (float(np.mean([score(a, b) for a, b in zip(predicted, true, strict=True)])) for score in (jaccard, boundary_f))
    return {"j": j, "f": f, "j_and_f": (j + f) / 2}


# ---------------------------------------------------------------------------------------------------------------
# words


def exact(text, answers):
    """1 if the text is one of the answers, letter for letter, blanks around it aside."""
    return float(text.strip() in {answer.strip() for answer in answers})


_NUMBERS = "zero one two three four five six seven eight nine ten"
NUMBERS = {word: str(n) for n, word in enumerate(_NUMBERS.split())} | {"none": "0"}
_CONTRACTIONS = """ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
    how'd how'll how's i'd've i'm i've isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've
    someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've they'll
    they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've
    who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'd've you'd you'd've you'll you're you've"""
# without one of their apostrophes, or without any -> as they should be
CONTRACTIONS = {word.replace("'", "", n): word for word in _CONTRACTIONS.split() for n in (1, 2)}
CONTRACTIONS |= {"".join(word.rsplit("'", 1)): word for word in _CONTRACTIONS.split()}


def normal(text):
    """An answer as VQA compares it: lower case, no articles, few signs, numbers as digits, contractions with their apostrophes.

    A sign next to a blank goes without a trace, one inside a word leaves a blank; all go without one where a comma stands between digits.
    """
    text = re.sub(r"\s+", " ", text).strip()
    glued = re.search(r"\d,\d", text)
    plain = text
    for sign in ';/[]"{}()=+\\_-><@`,?!':
        plain = plain.replace(sign, "" if glued or f"{sign} " in text or f" {sign}" in text else " ")
    words = re.sub(r"\.(?!\d)", "", plain).lower().split()
    words = [NUMBERS.get(word, word) for word in words if word not in ("a", "an", "the")]
    return " ".join(CONTRACTIONS.get(word, word) for word in words)


def vqa_score(text, answers):
    """A third for every one of the people who answered so, at most 1; of fewer than three people, all of them make 1."""
    agreed = sum(normal(answer) == normal(text) for answer in answers)
    return min(agreed / min(3, len(answers)), 1.0)


def edits(a, b):
    """Letters to change, add or take away to make b of a (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def anls(text, answers, threshold=0.5):
    """Average normalised Levenshtein similarity of one question: 1 - edits / letters of the longer, the best over the answers, in lower
    case; below the threshold 0."""
    said, best = " ".join(text.lower().split()), 0.0
    for answer in answers:
        true = " ".join(answer.lower().split())
        best = max(best, 1 - edits(true, said) / max(len(true), len(said), 1))
    return best if best >= threshold else 0.0


def _value(text):
    """A number, or None; per cent as a fraction."""
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%?)", text.strip().lower())
    return float(found.group(1)) / (100 if found.group(2) else 1) if found else None


def relaxed(text, answers, tolerance=0.05):
    """ChartQA: a number within 5 % of the true one, or else the same words, in lower case. (So 2008 passes for the year 2009.)"""
    def right(answer):
        said, true = _value(text), _value(answer)
        if said is None or true is None:
            return text.strip().lower() == answer.strip().lower()
        return abs(said - true) <= tolerance * abs(true)

    return float(any(map(right, answers)))


def select_option(text, options, letters=True):
    """Which option a text means, its number, or None if it says nothing.

    In this order: "B. blue" or "blue" in full; the label in front ("b", "(B)", "B: ..") if options have letters; the only one that the
    text names; that of the fewest edits, the first of equals (as in the official code, where no answer is beyond the pale).
    """
    said, names = " ".join(text.lower().split()), [" ".join(option.lower().split()) for option in options]
    for k, name in enumerate(names):
        if said.rstrip(".") in {name.rstrip("."), f"{string.ascii_lowercase[k]}. {name}".rstrip(". ")} and said:
            return k
    label = re.match(r"\(?([a-z])(?:[).:]|$)", said) if letters else None
    if label and ord(label.group(1)) - ord("a") < len(options):
        return ord(label.group(1)) - ord("a")
    named = [k for k, name in enumerate(names) if name and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said)]
    if len(named) == 1:
        return named[0]
    return min(range(len(names)), key=lambda k: edits(names[k], said)) if said else None


def score_statements(text, caption):
    """-> recall, precision of what a caption states: its parts between commas, each as often as it is said.

    Right for the toy world, whose captions are lists. Of prose, where the paper asks a language model which statements agree, it tells
    no more than which clauses are the same.
    """
    said, true = (Counter(filter(None, (part.strip(" .\n").lower() for part in words.split(",")))) for words in (text, caption))
    precision, recall, _ = rates((said & true).total(), said.total(), true.total())
    return recall, precision


# ---------------------------------------------------------------------------------------------------------------
# the command


def open_npz(path, flag):
    """An .npz -> {name: array}; ValueError in one sentence if it is none."""
    try:
        return dict(np.load(path))
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as e:
        raise ValueError(f"{flag} {path}: no .npz file: {e}") from None


def main():
    parser = argparse.ArgumentParser(description="J&F of masks made from predicted tracks.")
    for flag, whose in (("--predicted", "predicted"), ("--masks", "true")):
        parser.add_argument(flag, required=True, help=f'.npz of {whose} masks: arrays (n,t,h,w), named "record id/annotation number"')
    args = parser.parse_args()
    try:
        predicted, true = open_npz(args.predicted, "--predicted"), open_npz(args.masks, "--masks")
        names = [name for name, masks in true.items() if masks.ndim == 4]
        missing = [name for name in names if name not in predicted or predicted[name].ndim != 4]
        if not names or missing:
            raise ValueError(f"--predicted {args.predicted}: no array (n,t,h,w) '{missing[0]}'" if names else
                             f"--masks {args.masks}: no array (n,t,h,w)")
        # an expression may mean several objects, which a segmenter numbers as it likes: they count together, as in MeViS
        scores = [j_and_f(predicted[name].astype(bool).any(0), true[name].astype(bool).any(0)) for name in names]
    except (OSError, ValueError) as e:
        print(f"tools.metrics: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps({key: round(float(np.mean([s[key] for s in scores])), 4) for key in scores[0]} | {"n": len(scores)}))


if __name__ == "__main__":
    main()
