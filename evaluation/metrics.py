"""Scores of points, counts and tracks, computed from plain numbers (paper: evaluation).

Scores are between 0 and 1. If there is no true object, the score is 1 without predictions and 0
with predictions. Predicted and true points are matched one to one by distance. A matched
prediction is a hit (true positive) if it lies on its object (docs/molmo2.md 13).
"""

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from text.points import parse_points


class PointScores(NamedTuple):
    precision: float
    recall: float
    f1: float


def linear_sum_assignment(cost):
    """(n,m) finite costs -> [(row, column), ..], the min(n,m) pairs with the smallest total cost.

    The algorithm uses shortest augmenting paths with potentials (Crouse 2016). Among assignments
    with equal totals it chooses the same one as scipy, on which the official HOTA depends.
    """
    cost = np.asarray(cost, dtype=np.float64)
    n_rows, n_columns = cost.shape
    if n_rows > n_columns:
        return sorted((row, column) for column, row in linear_sum_assignment(cost.T))
    row_potential = np.zeros(n_rows)
    column_potential = np.zeros(n_columns)
    column_of = np.full(n_rows, -1)  # -1: not assigned yet
    row_of = np.full(n_columns, -1)
    for new_row in range(n_rows):
        shortest = np.full(n_columns, np.inf)  # length of the shortest path to each column
        previous_row = np.full(n_columns, -1)  # the row before the column on this path
        remaining = np.arange(n_columns)[::-1].copy()  # columns that are not visited yet
        rows = []  # visited rows
        columns = []
        row = new_row
        length = 0.0  # length of the path to `row`
        while row != -1:
            rows.append(row)
            path = length + cost[row, remaining]
            path = path - row_potential[row] - column_potential[remaining]
            shorter = path < shortest[remaining]
            shortest[remaining[shorter]] = path[shorter]
            previous_row[remaining[shorter]] = row
            # As in scipy: take the last unassigned of the nearest columns. If all are assigned,
            # take the first.
            nearest = np.flatnonzero(shortest[remaining] == shortest[remaining].min())
            unassigned = nearest[row_of[remaining[nearest]] == -1]
            chosen = unassigned[-1] if len(unassigned) else nearest[0]
            column = remaining[chosen]
            remaining[chosen] = remaining[-1]
            remaining = remaining[:-1]
            columns.append(column)
            length = shortest[column]
            row = row_of[column]
        row_potential[new_row] += length
        for row in rows[1:]:
            row_potential[row] += length - shortest[column_of[row]]
        column_potential[columns] -= length - shortest[columns]
        assign_path(column, previous_row, row_of, column_of)
    return [(row, int(column)) for row, column in enumerate(column_of)]


def assign_path(column, previous_row, row_of, column_of):
    """Follows a path from its last column to its start. Each of its rows takes the next column.
    Changes row_of and column_of."""
    while column != -1:
        row = previous_row[column]
        row_of[column] = row
        next_column = column_of[row]
        column_of[row] = column
        column = next_column


def match_by_distance(predicted, truth):
    """Points with any number of coordinates -> [(predicted index, true index), ..]. The sum of
    the Euclidean distances of the pairs is as small as possible."""
    if not predicted or not truth:
        return []
    difference = np.array(predicted, float)[:, None] - np.array(truth, float)[None]
    return linear_sum_assignment(np.linalg.norm(difference, axis=-1))


def precision_recall_f1(hits, n_predicted, n_true):
    """The number of hits, predictions and true objects -> PointScores."""
    if not n_predicted or not n_true:
        return PointScores(*[float(n_predicted == n_true)] * 3)
    precision = hits / n_predicted
    recall = hits / n_true
    f1 = 2 * precision * recall / (precision + recall + 1e-10)
    return PointScores(precision, recall, f1)


def score_images(predicted, truth, hit):
    """Points [(image, x, y), ..] -> PointScores of all images together. Points are matched only
    within an image. hit(k, point): does the point lie on true object k?"""
    hits = 0
    for image in {image for image, _, _ in truth}:
        here = [i for i, point in enumerate(predicted) if point[0] == image]
        true_here = [k for k, point in enumerate(truth) if point[0] == image]
        points = [predicted[i][1:] for i in here]
        pairs = match_by_distance(points, [truth[k][1:] for k in true_here])
        hits += sum(hit(true_here[k], predicted[here[i]]) for i, k in pairs)
    return precision_recall_f1(hits, len(predicted), len(truth))


def score_video(predicted, truth, hit, size):
    """Points [(seconds, x, y), ..] -> PointScores. Time, x and y are scaled to 0..100, then points
    are matched by distance. size: (seconds, width, height) of the video. hit: see score_images."""
    # the duration of a single frame is 0
    scale = 100 / np.maximum(np.array(size, float), 1e-9)

    def percent(points):
        return [np.round(point * scale, 1) for point in np.array(points, float)]

    pairs = match_by_distance(percent(predicted), percent(truth))
    hits = sum(hit(k, predicted[i]) for i, k in pairs)
    return precision_recall_f1(hits, len(predicted), len(truth))


def mask_contains(mask, x, y):
    """Does the point, rounded to pixels, lie in the mask (h,w)?"""
    x = round(x)
    y = round(y)
    return 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and bool(mask[y, x])


def hit_in_mask(masks):
    """Masks (n,h,w) bool, or a list of n masks -> the function hit(k, (image, x, y))."""
    return lambda k, point: mask_contains(masks[k], *point[1:])


def hit_in_video_mask(index_of, masks, size):
    """{seconds to a tenth: number of a mask}, masks (n,t,h,w) bool, and the size (width, height) of
    the video -> the function hit(k, (seconds, x, y)): does the point lie in object k at its time?
    Masks of another size are scaled."""

    def hit(k, point):
        index = index_of.get(round(point[0], 1))
        if index is None:
            return False
        mask = masks[k, index]
        scale_x = mask.shape[1] / size[0]
        scale_y = mask.shape[0] / size[1]
        return mask_contains(mask, point[1] * scale_x, point[2] * scale_y)

    return hit


def same_frame(point, true):
    """Are two points on the same image, or at the same time (rounded to 0.1 s)?"""
    return round(point[0], 1) == round(true[0], 1)


def hit_nearby(truth, sizes):
    """-> the function hit(k, point): is the point on the same frame as true point k, at a distance
    of at most 5 % of the image diagonal? sizes: (width, height) of the image of each true point."""

    def hit(k, point):
        distance = math.dist(point[1:], truth[k][1:])
        return same_frame(point, truth[k]) and distance <= 0.05 * math.hypot(*sizes[k])

    return hit


def hit_in_box(truth, boxes):
    """Boxes (left, top, right, bottom), one per true point -> the function hit(k, point)."""

    def hit(k, point):
        _, x, y = point
        left, top, right, bottom = boxes[k]
        return same_frame(point, truth[k]) and left <= x <= right and top <= y <= bottom

    return hit


def count_from_text(text):
    """The number that a text states, or the number of its points, or None if it has neither."""
    if "there are none" in text.lower():
        return 0
    stated = (
        re.fullmatch(r"(\d+)\s*\.?", text.strip())
        or re.search(r"total of (\d+)", text)
        or re.match(r"\s*There (?:are|is) (\d+)\b", text)
    )
    if stated:
        return int(stated.group(1)[:4300])  # int() accepts no more digits
    return len(parse_points(text, 1, 1)) or None


def score_count(count, truth, video=False):
    """-> (exact, close), each 0 or 1. Both are 0 if count is None. `close` allows an error of 1.
    In a video it allows 1 + truth // 20."""
    off = math.inf if count is None else abs(count - truth)
    tolerance = 1 + (truth // 20 if video else 0)
    return float(off == 0), float(off <= tolerance)


def score_tracks(predicted, truth, hit):
    """Tracks {frame: {id: (x, y)}} -> {precision, recall, f1, hota, det_a, ass_a}.

    hit(frame, true id, point): does the point lie on the object? Precision, recall and f1 are
    computed for every frame that has a predicted point or a true object, and then averaged over
    these frames. A frame is scored with the objects that are present in it. The official code uses
    the masks of all objects instead (docs/molmo2.md 16).
    """
    frames = sorted(t for t in {*predicted, *truth} if predicted.get(t) or truth.get(t))
    if not frames:
        return dict.fromkeys(("precision", "recall", "f1", "hota", "det_a", "ass_a"), 1.0)
    scores = []
    matches = []
    for frame in frames:
        points = predicted.get(frame, {})
        true_points = truth.get(frame, {})
        ids = list(points)
        true_ids = list(true_points)
        rows = [[hit(frame, true_id, points[i]) for i in ids] for true_id in true_ids]
        similarity = np.array(rows, float).reshape(len(true_ids), len(ids))
        pairs = match_by_distance([*points.values()], [*true_points.values()])
        hits = sum(similarity[k, i] for i, k in pairs)
        scores.append(precision_recall_f1(hits, len(ids), len(true_ids)))
        matches.append((true_ids, ids, similarity))
    mean = PointScores(*np.mean(scores, axis=0).tolist())
    return {**mean._asdict(), **hota(matches)}


def hota(matches):
    """[(true ids, predicted ids, similarity), ..], one entry per frame -> {hota, det_a, ass_a} as
    defined by TrackEval. similarity (true, predicted) is 1 if the point lies on the object, else 0.
    Therefore HOTA is the same at all 19 localisation thresholds.

    1. Compute the alignment of each true track i and predicted track j. In each frame, divide
       similarity[i,j] by the sum of row i and column j (counting [i,j] once), as in an IoU. Let s
       be the sum over frames. The alignment is s / (frames of i + frames of j - s).
    2. In each frame, match points one to one so that the sum of alignment x similarity is
       largest. Matched pairs with similarity 1 are true positives (TP). c(i,j) is the number of
       true positives of tracks i and j.
    3. DetA = TP / (TP + FN + FP). AssA is the mean over true positives of
       c(i,j) / (frames of i + frames of j - c(i,j)). HOTA = sqrt(DetA AssA).
    """
    overlap = Counter()
    true_frames = Counter()
    predicted_frames = Counter()
    for true_ids, ids, similarity in matches:
        union = similarity.sum(0)[None] + similarity.sum(1)[:, None] - similarity
        for k, i in zip(*similarity.nonzero(), strict=True):
            overlap[true_ids[k], ids[i]] += similarity[k, i] / union[k, i]
        true_frames.update(true_ids)
        predicted_frames.update(ids)

    def alignment(true_id, i):
        shared = overlap[true_id, i]
        return shared / (true_frames[true_id] + predicted_frames[i] - shared)

    matched = Counter()
    for true_ids, ids, similarity in matches:
        rows = [[alignment(true_id, i) for i in ids] for true_id in true_ids]
        gain = np.array(rows).reshape(similarity.shape) * similarity
        pairs = linear_sum_assignment(-gain)
        matched.update((true_ids[k], ids[i]) for k, i in pairs if similarity[k, i])
    hits = sum(matched.values())
    det_a = hits / (true_frames.total() + predicted_frames.total() - hits)
    ass_a = 0.0
    for (true_id, i), n in matched.items():
        ass_a += n * n / (true_frames[true_id] + predicted_frames[i] - n)
    ass_a /= max(hits, 1)
    return {"hota": (det_a * ass_a) ** 0.5, "det_a": det_a, "ass_a": ass_a}
