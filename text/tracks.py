"""The part of a track annotation that is asked for, and times on the clock of a clip.

    file     0        30    30.5    31          seconds of the video file
    clip              0.0   0.5     1.0         seconds from the start of the clip, as in all text
"""

from bisect import bisect
from itertools import pairwise
from operator import itemgetter
from statistics import median

from text.points import unit
from text.styles import TASK_OF_STYLE, TRACK_TASKS, style_of

MIN_TOLERANCE_S = 0.01               # of the released code, between a point and its frame
ROUNDING = 1e-6                      # seconds


def since_start(time, record):
    """A time in seconds of the file -> seconds from the start of the clip."""
    video = record["video"]
    return float(time) - (video.get("start", 0) if isinstance(video, dict) else 0)


def seconds(time, record):
    """The same, rounded to a tenth as in all text (docs/molmo2.md 5.1)."""
    return to_tenth(since_start(time, record))


def to_tenth(time):
    return max(0.0, round(time, 1))


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


def half_interval(annotation):
    """Half the seconds between two annotated frames, but at least 0.01, the released tolerance.

    By the annotation's rate; without one by the median distance of its times, 0.5 s at most.
    """
    if "fps" in annotation:
        return max(0.5 / annotation["fps"], MIN_TOLERANCE_S)
    times = sorted({*(point["t"] for point in annotation["points"]), *annotation.get("times", [])})
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return max(min(median(gaps or [0.5]), 0.5) / 2, MIN_TOLERANCE_S)


class AskedFrames:
    """The frames on which a track is asked for. times: as in track_frames.

        points of an object annotated twice a second, in a clip that starts at 0.3 s
            file    0.5     1.0     1.5
            clip    0.2     0.7     1.2
            frame   0.0     0.5     1.0
    """

    def __init__(self, annotation, record, times):
        rate = track_rate(annotation)
        # an annotation of more frames than are asked for lies on a grid
        self.grid = rate if rate and annotation["fps"] != rate else None
        if self.grid and times is not None:
            times = [time for time in times if abs(time - self.on_grid(time)) <= MIN_TOLERANCE_S]
        self.record, self.times = record, times
        self.tolerance = half_interval(annotation) + ROUNDING

    def on_grid(self, time):
        return round(time * self.grid) / self.grid

    def nearest(self, time):
        """A second of the clip -> that of a frame; None where there is no frame."""
        if self.times is None:
            return self.on_grid(time) if self.grid else time
        k = bisect(self.times, time)
        beside = self.times[max(k - 1, 0) : k + 1]
        return min(beside, key=lambda frame: abs(frame - time), default=None)

    def match(self, time):
        """A second of the file -> second of the clip of its frame, and how far that is; or None."""
        time = since_start(time, self.record)
        frame = self.nearest(time)
        if frame is None or abs(frame - time) > self.tolerance:
            return None
        return frame, abs(frame - time)

    def text_time(self, time):
        """A second of the file as the text names it: of its frame, or its own if it has none."""
        matched = self.match(time)
        return to_tenth(matched[0]) if matched else seconds(time, self.record)


def points_on_frames(annotation, record, times):
    """-> [(seconds of the clip, visible point), ..] in the order of time: of every object on every
    frame that is asked for the nearest of its points, unless that is occluded."""
    asked = AskedFrames(annotation, record, times)
    nearest = {}                                     # {(frame, id): (distance, point)}
    for point in sorted(annotation["points"], key=lambda point: point["t"]):
        matched = asked.match(point["t"])
        if matched:
            frame, distance = matched
            found = nearest.get((frame, point["id"]))
            if found is None or distance < found[0]:
                nearest[frame, point["id"]] = (distance, point)
    pairs = [(frame, point) for (frame, _), (_, point) in nearest.items()]
    return [pair for pair in sorted(pairs, key=itemgetter(0)) if not pair[1].get("occluded")]


def track_frames(annotation, record, size, times, query=None):
    """The part of a track annotation that is asked for.

    -> {seconds of the clip, to a tenth: {id: (x, y) as fractions}}. size: (width, height), the
    scale of pixels. times: of the frames that the model sees (None: all that are annotated). query:
    the point that the track starts from; only later points of the same object are kept.
    """
    matched = points_on_frames(annotation, record, times)
    if query:
        matched = [(time, point) for time, point in matched
                   if point["id"] == query["id"] and point["t"] > query["t"]]
    if track_mode(annotation, record) == "start_end":
        first = {point["id"]: time for time, point in reversed(matched)}
        last = {point["id"]: time for time, point in matched}
        matched = [(time, point) for time, point in matched
                   if time in (first[point["id"]], last[point["id"]])]
    frames = {}
    for time, point in matched:
        # two frames within a tenth of a second have one time in the text: the first counts
        frame = frames.setdefault(to_tenth(time), {})
        frame.setdefault(point["id"], unit(point, annotation, size))
    return frames


def count_between_frames(annotation, record):
    """How many visible points lie on no frame of a grid of the rate that is asked for, 2 a second
    without one; a clip that is short enough is shown more frames."""
    rate = track_rate(annotation) or 2
    times = [since_start(point["t"], record) for point in visible_points(annotation)]
    tolerance = half_interval(annotation) + ROUNDING
    return sum(abs(time - round(time * rate) / rate) > tolerance for time in times)
