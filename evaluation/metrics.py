"""Scores of points, counts and tracks, from plain numbers (paper: evaluation).

Scores are between 0 and 1; where there is nothing to find, 1 if nothing was predicted,
else 0. Predicted and true points are matched one to one by distance, and a matched
prediction that lies on its object is a hit (docs/molmo2.md 13).
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
    """(n,m) finite costs -> [(row, column), ..]: min(n,m) pairs of smallest total cost.

    Shortest augmenting paths with potentials (Crouse 2016). Of several assignments with
    the same total, it returns that of scipy, on which the official HOTA depends.
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
        shortest = np.full(n_columns, np.inf)  # lengths of the shortest paths
        previous_row = np.full(n_columns, -1)  # on that path
        # columns not visited yet
        remaining = np.arange(n_columns)[::-1].copy()
        rows = []  # visited ones
        columns = []
        row = new_row
        length = 0.0  # of the path to `row`
        while row != -1:
            rows.append(row)
            path = length + cost[row, remaining]
            path = path - row_potential[row] - column_potential[remaining]
            shorter = path < shortest[remaining]
            shortest[remaining[shorter]] = path[shorter]
            previous_row[remaining[shorter]] = row
            # of the nearest columns the last unassigned one, else the first, as scipy
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
        while column != -1:  # every row of the path takes the next column
            row = previous_row[column]
            row_of[column] = row
            next_column = column_of[row]
            column_of[row] = column
            column = next_column
    return [(row, int(column)) for row, column in enumerate(column_of)]


def match_by_distance(predicted, truth):
    """Points with any number of coordinates -> [(predicted index, true index), ..],
    matched so that the sum of Euclidean distances is smallest."""
    if not predicted or not truth:
        return []
    difference = np.array(predicted, float)[:, None] - np.array(truth, float)[None]
    return linear_sum_assignment(np.linalg.norm(difference, axis=-1))


def precision_recall_f1(hits, n_predicted, n_true):
    """Numbers of hits, predictions and true objects -> PointScores."""
    if not n_predicted or not n_true:
        return PointScores(*[float(n_predicted == n_true)] * 3)
    precision = hits / n_predicted
    recall = hits / n_true
    f1 = 2 * precision * recall / (precision + recall + 1e-10)
    return PointScores(precision, recall, f1)


def score_images(predicted, truth, hit):
    """Points [(image, x, y), ..], matched within an image only -> PointScores over all.
    hit(k, point): does it lie on true object k?"""
    hits = 0
    for image in {image for image, _, _ in truth}:
        here = [i for i, point in enumerate(predicted) if point[0] == image]
        true_here = [k for k, point in enumerate(truth) if point[0] == image]
        points = [predicted[i][1:] for i in here]
        pairs = match_by_distance(points, [truth[k][1:] for k in true_here])
        hits += sum(hit(true_here[k], predicted[here[i]]) for i, k in pairs)
    return precision_recall_f1(hits, len(predicted), len(truth))


def score_video(predicted, truth, hit, size):
    """Points [(seconds, x, y), ..], matched by distance in time, x and y, each on a scale of
    0 to 100 -> PointScores. size: (seconds, width, height) of the video; hit as above."""
    # a single frame lasts no time
    scale = 100 / np.maximum(np.array(size, float), 1e-9)

    def percent(points):
        return [np.round(point * scale, 1) for point in np.array(points, float)]

    pairs = match_by_distance(percent(predicted), percent(truth))
    hits = sum(hit(k, predicted[i]) for i, k in pairs)
    return precision_recall_f1(hits, len(predicted), len(truth))


def mask_contains(mask, x, y):
    """Does the rounded point lie in the mask (h,w)?"""
    x = round(x)
    y = round(y)
    return 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and bool(mask[y, x])


def hit_in_mask(masks):
    """Masks (n,h,w) bool, or a list of n -> hit(k, (image, x, y))."""
    return lambda k, point: mask_contains(masks[k], *point[1:])


def hit_in_video_mask(times, masks):
    """Times (t,) in seconds and masks (n,t,h,w) bool -> hit(k, (seconds, x, y)):
    the point lies in object k, at one of the times to a tenth of a second."""
    index_of = {round(float(t), 1): i for i, t in enumerate(times)}

    def hit(k, point):
        index = index_of.get(round(point[0], 1))
        return index is not None and mask_contains(masks[k][index], *point[1:])

    return hit


def same_frame(point, true):
    """Are two points on the same image, or at the same time to a tenth of a second?"""
    return round(point[0], 1) == round(true[0], 1)


def hit_nearby(truth, sizes):
    """-> hit(k, point): within 5 % of the diagonal of true point k, on the same frame.
    sizes: (width, height) of the image of every true point."""

    def hit(k, point):
        distance = math.dist(point[1:], truth[k][1:])
        return same_frame(point, truth[k]) and distance <= 0.05 * math.hypot(*sizes[k])

    return hit


def hit_in_box(truth, boxes):
    """Boxes (left, top, right, bottom) of every true point -> hit(k, point)."""

    def hit(k, point):
        _, x, y = point
        left, top, right, bottom = boxes[k]
        return same_frame(point, truth[k]) and left <= x <= right and top <= y <= bottom

    return hit


def count_from_text(text):
    """The number that a text states, else the number of its points, else None."""
    if "there are none" in text.lower():
        return 0
    stated = (
        re.fullmatch(r"\s*(\d+)\s*\.?\s*", text)
        or re.search(r"total of (\d+)", text)
        or re.match(r"\s*There (?:are|is) (\d+)\b", text)
    )
    if stated:
        return int(stated.group(1)[:4300])  # int() reads no more digits
    return len(parse_points(text, 1, 1)) or None


def score_count(count, truth, video=False):
    """-> (exact, close), each 0 or 1; both 0 for a count of None. Close is off by at most
    1, in a video by 1 plus a twentieth of the truth, rounded down."""
    off = math.inf if count is None else abs(count - truth)
    tolerance = 1 + (truth // 20 if video else 0)
    return float(off == 0), float(off <= tolerance)


def score_tracks(predicted, truth, hit):
    """Tracks {frame: {id: (x, y)}} -> {precision, recall, f1, hota, det_a, ass_a}.

    hit(frame, true id, point): does the point lie on the object? Precision, recall and
    f1: every frame with a prediction or a true object is scored as an image, with the
    objects that are in it (officially, of all frames); then the mean over frames.
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
    """[(true ids, predicted ids, similarity), ..] of every frame -> {hota, det_a, ass_a}
    as TrackEval defines them. similarity (true, predicted): 1 where a point lies on an
    object, else 0; so HOTA is the same at all 19 localisation thresholds.

    1. Over all frames, true track i and predicted track j collect an alignment: in each
       frame, their similarity over that of i or j with anything (an IoU), summed; then
       over frames of i + frames of j - that sum.
    2. In every frame, points are matched one to one so that the sum of alignment x
       similarity is largest. The pairs that have similarity are the true positives;
       c(i,j) of them belong to tracks i and j.
    3. DetA = TP / (TP + FN + FP). AssA = the mean over true positives of
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
