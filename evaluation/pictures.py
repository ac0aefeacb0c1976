"""Predictions drawn on images and frames: rings where the model points, crosses at the true points
(paper: pointing, tracking).

in    predictions as in evaluate.py, with points as [frame, id, x, y] in pixels; frame is 1 for an
      image, the number of one of several, or seconds of a clip
out   PNG files: the image; several images side by side; rows of frames of a video with their times.
      Tracks also get the path of every object up to each frame, and charts of x and y over time

A point at a time that was not shown is drawn on the nearest frame, with a dashed ring and its
time.
"""

import re
from pathlib import Path
from typing import NamedTuple

from evaluation import charts
from evaluation.marks import (
    Mark,
    Trail,
    colour_of,
    draw_marks,
    image_grid,
    numbered,
    side_by_side,
    stacked,
    with_text,
)
from records import media
from records.errors import warn
from records.media import Unreadable

MAX_SIDE = 1024                          # pixels of the longer side of a drawn image
MAX_FRAMES = 12                          # of a video, in the picture of a prediction
SAME_TIME = 0.05                         # seconds: answers have one decimal


def draw_images(images, predicted, true):
    """Points on an image, or on several side by side -> PIL image, notes on what cannot be
    drawn."""

    def points_on(number, points):
        return [(x, y) for frame, _, x, y in points if int(frame) == number]

    drawn = []
    for number, image in enumerate(images, 1):
        marks = numbered(points_on(number, predicted))
        drawn.append(draw_marks(image, marks, points_on(number, true)))
    missing = sorted({int(frame) for frame, *_ in predicted if not 1 <= frame <= len(images)})
    notes = []
    if missing:
        names = ", ".join(str(number) for number in missing)
        notes.append(f"also points on image {names}, which does not exist")
    if len(drawn) > 1:
        return image_grid(drawn, [f"image {k}" for k in range(1, len(drawn) + 1)]), notes
    drawn[0].thumbnail((MAX_SIDE, MAX_SIDE))
    return drawn[0], notes


# -------------------------------------------------------------------------------------------------
# frames and tracks


def nearest(times, t):
    """The index of the time that is nearest to t."""
    return min(range(len(times)), key=lambda k: abs(times[k] - t))


def evenly(items, n):
    """n of the items, or all: the first, the last, and others at equal distances."""
    n = min(n, len(items))
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def select_frames(times, points, n=MAX_FRAMES):
    """Which frames of `times` to draw, at most n -> their indices, ascending: those that points
    [frame, ..] are on, and others evenly while there is room."""
    with_points = sorted({nearest(times, t) for t, *_ in points})
    if len(with_points) >= n:
        return sorted(set(evenly(with_points, n)))
    others = [k for k in evenly(range(len(times)), n) if k not in with_points]
    room = n - len(with_points)
    if len(others) > room:
        others = [others[k * len(others) // room] for k in range(room)]
    return sorted({*with_points, *others})


class Position(NamedTuple):
    t: float
    x: float
    y: float


def tracks_of(points):
    """[[t, id, x, y], ..] -> {id: [Position, ..] in order of time}, in order of ids as text, since
    1 and "1" are one object."""
    tracks = {}
    for t, object_id, x, y in sorted(points, key=lambda point: (str(point[1]), point[0])):
        tracks.setdefault(str(object_id), []).append(Position(t, x, y))
    return tracks


def trails_until(tracks, t):
    """The part of every track up to a time -> [Trail, ..]."""
    trails = []
    for object_id, positions in tracks.items():
        path = [(p.x, p.y) for p in positions if p.t <= t + SAME_TIME]
        if len(path) > 1:
            trails.append(Trail(colour_of(object_id), path))
    return trails


def draw_frames(frames_at, times, predicted, true, with_trails):
    """Frames of a video with points, and the tracks up to each if with_trails -> PIL image, notes.

    frames_at(times) yields the frames at these times.
    """
    selected = select_frames(times, [*predicted, *true])
    tracks = tracks_of(predicted) if with_trails else {}
    drawn = []
    any_dashed = False
    for k, frame in zip(selected, frames_at([times[k] for k in selected]), strict=True):
        marks = []
        for t, object_id, x, y in predicted:
            if nearest(times, t) == k:
                dashed = abs(t - times[k]) > SAME_TIME
                label = f"{object_id}  {t:.1f} s" if dashed else str(object_id)
                marks.append(Mark(x, y, label, colour_of(object_id), dashed))
                any_dashed = any_dashed or dashed
        truth = [(x, y) for t, _, x, y in true if nearest(times, t) == k]
        drawn.append(draw_marks(frame, marks, truth, trails_until(tracks, times[k])))
    notes = []
    if len(selected) < len(times):
        notes.append(f"{len(selected)} of {len(times)} frames")
    if any_dashed:
        notes.append("dashed: at a time that was not shown")
    return image_grid(drawn, [f"{times[k]:.1f} s" for k in selected]), notes


def draw_track_charts(predicted, true, width):
    """x and y of every object over time, side by side -> PIL image, 400 high; None without points.

    Predicted tracks have dots, true ones are pale.
    """
    tracks, true_tracks = tracks_of(predicted), tracks_of(true)
    colours = {i: colour_of(i) for i in tracks} | {f"{i} (true)": colour_of(i) for i in true_tracks}
    size = max(width // 4, 240), 200
    drawn = []
    for axis, ylabel in (("x", "x, in pixels from the left"), ("y", "y, in pixels from the top")):
        series = {}
        for i, positions in tracks.items():
            series[i] = [(p.t, getattr(p, axis)) for p in positions]
        for i, positions in true_tracks.items():
            series[f"{i} (true)"] = [(p.t, getattr(p, axis)) for p in positions]
        faint = tuple(f"{i} (true)" for i in true_tracks)
        drawn.append(charts.line_chart(
            series, "seconds", size, ylabel=ylabel, dots=True, faint=faint, colours=colours
        ))
    return side_by_side(drawn) if drawn[0] else None


# -------------------------------------------------------------------------------------------------
# predictions and answers


def draw_prediction(prediction, record):
    """A prediction and its record -> PIL image: what was seen, marked; below it question and
    answer."""
    source = record["source"]
    predicted, true = prediction["predicted"], prediction["true"]
    track = prediction["type"] == "track"
    legend = "rings: predicted; crosses: true"
    if prediction["medium"] == "video":

        def frames_at(times):
            return source.frames(record, times)

        image, notes = draw_frames(frames_at, prediction["times"], predicted, true, track)
    else:
        image, notes = draw_images(source.images(record), predicted, true)
    if track:
        legend += "; charts: dark predicted, pale true"
        below = draw_track_charts(predicted, true, image.width)
        image = stacked(image, below) if below else image
    text = [prediction["prompt"], f"-> {prediction['text']}", ". ".join([legend, *notes])]
    return with_text(image, text)


def in_turns(predictions):
    """Predictions that have points, by id within each medium and type; media and types take
    turns."""
    groups = {}
    for p in sorted(predictions, key=lambda p: (p["id"], p["annotation"])):
        if "true" in p:
            groups.setdefault((p["medium"], p["type"]), []).append(p)
    turns = []
    for key, group in groups.items():
        turns += [(k, key) for k in range(len(group))]
    return [groups[key][k] for k, key in sorted(turns)]


def draw(predictions, records, folder, n=24):
    """A PNG file for each of the first n questions that ask for points, named
    id-annotation-label.png; media and types of questions take turns.

    A record that cannot be read, or whose id is not unique, is named on stderr instead.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    by_id, names = {}, set()
    for record in records:
        by_id.setdefault(record["id"], []).append(record)
    for prediction in in_turns(predictions)[:n]:
        record, *others = by_id[prediction["id"]]
        if others:
            warn(f"{prediction['id']}: {len(others) + 1} records have this id; no picture")
            continue
        try:
            image = draw_prediction(prediction, record)
        except Unreadable as e:
            warn(f"{record['where']}: {e}; no picture")
            continue
        label = prediction["prompt"].split(": ")[-1][:80]
        name = f"{prediction['id'][-80:]}-{prediction['annotation']}-{label}"
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".")
        while name in names:             # ids that differ only in what a file name cannot hold
            name += "~"
        names.add(name)
        image.save(folder / f"{name}.png")


def draw_answer(points, images, video=None, start=0.0, n=24):
    """The points [(frame, id, x, y), ..] of an answer on its images, or on the frames of a video
    that they name, at most n -> PIL image. video: from media.probe; start: second of it where the
    clip begins."""
    if video is None:
        drawn = []
        for number, image in enumerate(images, 1):
            here = [(x, y) for frame, _, x, y in points if frame == number or len(images) == 1]
            drawn.append(draw_marks(image, numbered(here)))
        if len(drawn) == 1:
            return drawn[0]
        return image_grid(drawn, [f"image {k}" for k in range(1, len(drawn) + 1)], 360)
    times = sorted({frame for frame, *_ in points})[:n] or [0.0]
    frames = media.frames(video, [start + t for t in times])
    drawn = []
    for time, frame in zip(times, frames, strict=True):
        marks = [Mark(x, y, str(i), colour_of(i)) for t, i, x, y in points if t == time]
        drawn.append(draw_marks(frame, marks))
    return image_grid(drawn, [f"{t:.1f} s" for t in times], 360)
