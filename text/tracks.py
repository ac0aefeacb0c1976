"""The part of a track annotation that is asked for, and times on the clock of a clip.

    file     0        30    30.5    31          seconds of the video file
    clip              0.0   0.5     1.0         seconds from the start of the clip, as in all text
"""

from text.points import unit
from text.styles import TASK_OF_STYLE, TRACK_TASKS, style_of


def since_start(time, record):
    """A time in seconds of the file -> seconds from the start of the clip."""
    video = record["video"]
    return float(time) - (video.get("start", 0) if isinstance(video, dict) else 0)


def seconds(time, record):
    """The same, rounded to a tenth as in all text (docs/molmo2.md 5.1)."""
    return max(0.0, round(since_start(time, record), 1))


def track_mode(annotation, record):
    """per_frame | start_end | from_point: as the annotation says, or its style."""
    if annotation.get("mode"):
        return annotation["mode"]
    task = TASK_OF_STYLE.get(style_of(annotation, record, None))
    return task if task in TRACK_TASKS else "per_frame"


def track_rate(annotation):
    """Frames per second that are asked for: 2 or 1, the first that divides the annotation's rate.

    None if the annotation has no rate or neither divides it.
    """
    for rate in (2, 1):
        if "fps" in annotation and annotation["fps"] % rate == 0:
            return rate
    return None


def visible_points(annotation):
    """The points of a track annotation that can be seen, in the order of time."""
    points = sorted(annotation["points"], key=lambda point: point["t"])
    return [point for point in points if not point.get("occluded")]


def track_frames(annotation, record, size, times, query=None):
    """The part of a track annotation that is asked for.

    -> {seconds of the clip, to a tenth: {id: (x, y) as fractions}}. size: (width, height), the
    scale of pixels. times: of the frames that the model sees (None: all that are annotated). query:
    the point that the track starts from; only later points of the same object are kept.
    """
    points = visible_points(annotation)
    if query:
        points = [p for p in points if p["id"] == query["id"] and p["t"] > query["t"]]
    points = [p for p in points if is_asked_for(since_start(p["t"], record), annotation, times)]
    if track_mode(annotation, record) == "start_end":
        first = {p["id"]: p["t"] for p in reversed(points)}
        last = {p["id"]: p["t"] for p in points}
        points = [p for p in points if p["t"] in (first[p["id"]], last[p["id"]])]
    frames = {}
    for point in points:
        # two frames within a tenth of a second have one time in the text: the first counts
        frame = frames.setdefault(seconds(point["t"], record), {})
        frame.setdefault(point["id"], unit(point, annotation, size))
    return frames


def is_asked_for(time, annotation, times):
    """Is a second of the clip on the grid of the rate, and one of a frame that the model sees?

    With a tolerance of 0.01 s, as in the released code.
    """
    rate = track_rate(annotation)
    if rate and annotation["fps"] != rate and abs(time - round(time * rate) / rate) > 0.01:
        return False
    return times is None or any(abs(time - other) <= 0.01 for other in times)
