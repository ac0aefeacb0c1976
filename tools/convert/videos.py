"""Layouts of video sets: functions that convert one row, as images.py explains.

Two things are not converted: captions of clips and frames in Molmo2-Cap, and segmentation masks.
"""

import math
import re
from functools import partial

from tools.convert import make
from tools.convert.make import number_of, size_of, skip_unless, text_of, xy_points

# Molmo2 skips these videos, since they cannot be decoded.
CORRUPT = {"0OfUqrbRa2Y", "mTXBQzptWAg", "NyuA4FatDQk", "a_", "gsfIHiBB6xE", "bXApJtAf6Qo",
           "N8BlpYSpgg4"}
CAPTION_STYLES = {
    "video_caption": "video_short_caption",
    "merged_caption": "video_merged_caption",
    "video_frame_merged_caption": "video_long_caption",
}
CONVERSATION_STYLES = {  # by the kind in the name of the JSON file
    "oe": "video_short_answer",
    "mc": "video_multiple_choice",
    "cap": "video_long_caption",
}
TRACK_MODES = {
    "track": "per_frame",
    "ground": "start_end",
    "single_point_track": "from_point",
}
FRAME_TOLERANCE_S = 0.01  # between the time of a track point and its frame
HALF_FRAME_S = 0.25  # at two frames per second


def video_captions(row, job, min_score):
    name = row["video_id"]
    score = row["annotation_score"]
    skip_unless(name not in CORRUPT, "video known not to decode")
    skip_unless((score or 0) >= min_score, f"annotation_score below {min_score:g}")
    start = row.get("video_start")
    end = row.get("video_end")
    head = job.media.video(name, f"v_{name}", f"ytb_{name}", start=start, end=end)
    builders = [partial(make.caption, row[column], style)
                for column, style in CAPTION_STYLES.items() if row.get(column)]
    return head, builders


def negative_answers(row, job):
    """A multiple-choice question. The right answer comes first here; training shuffles the options.
    All rows of a video have the same subtitles."""
    head = job.media.visual(row)
    subtitles = [(line["start"], line["end"], text_of(line["text"]))
                 for line in row.get("subtitle") or []]
    lines = [{"start": start, "end": end, "text": text}
             for start, end, text in subtitles if text and 0 <= start <= end]
    if lines:
        head["subtitles"] = sorted(lines, key=lambda line: line["start"])
    wrong = row["NegativeAnswers"] or []
    texts = [row["Answer"], *wrong] if text_of(row["Answer"]) else []
    builder = partial(make.choice, row["Question"], "video_multiple_choice",
                      texts, 0, shuffle_options=True)
    return head, [builder]


def video_points(row, job, mode, max_seconds, counts):
    """The cell points[i] is a list of points, in percent, at time i. Times are seconds of the whole
    video, not of the clip. max_seconds: longer clips are skipped. In Molmo2-VideoPoint, a video
    that is not longer is used as a whole, as in the official code. A set of several sources, which
    may contain the same names, has one folder per source (columns subset, dataset)."""
    name = row.get("video_id") or row["video_name"]
    start = row.get("clip_start", row.get("clip_start_time"))
    end = row.get("clip_end", row.get("clip_end_time"))
    duration = row.get("video_duration") or math.inf
    if "clip_start" in row and duration <= max_seconds:
        start = end = None
    is_clip = None not in (start, end)
    first = start if is_clip else 0
    last = end if is_clip else duration
    skip_unless(last == math.inf or last - first <= max_seconds,
            f"no clip of at most {max_seconds} s")
    folder = "/".join(filter(None, [row.get("subset"), row.get("dataset")]))
    names = (f"{job.media.stem(name)}_2fps", name)
    head = job.media.video(*names, folder=folder, start=start, end=end)
    label = row["label"] if "label" in row else row["category"].lower()
    question = row.get("question")

    def build():
        times = row.get("two_fps_timestamps", row.get("timestamps"))
        points = []
        for t, cell in zip(times, row["points"], strict=True):
            points += [{"t": t, **point} for point in xy_points(cell)]
        low = max(first - HALF_FRAME_S, 0)
        in_clip = all(low <= point["t"] <= last + HALF_FRAME_S for point in points)
        skip_unless(in_clip, "point outside the clip")
        return make.point(points, "percent", label, question, count=row["count"],
                          max_points=make.MAX_POINTS, counts=counts, mode=mode)

    return head, [build]


def has_position(place):
    """A hidden object has no position: the cell is null, or a pair of nulls or NaN."""
    return bool(place) and all(number_of(value) is not None for value in place)


def belongs(object_id, row):
    """Does the expression of the row mean this object? An empty mask_id means all objects."""
    return not row.get("mask_id") or str(object_id) in map(str, row["mask_id"])


def tracked_video(row, job):
    """The file in which the objects are tracked. If the row has a clip, `video` is only the source
    that the clip was cut from. Clips of different sources may have the same name, so the clip is
    in the folder video_dataset."""
    return job.media.video(row.get("clip") or row["video"], folder=row.get("video_dataset"))


def trajectories(row, job):
    """Every frame has the points of all objects. Times are seconds of the clip's own file."""
    fps = row["fps"]
    rate = number_of(row["sampling_fps"])
    mode = TRACK_MODES.get(row["task"])
    skip_unless(mode, "another task")
    skip_unless(rate and fps % rate == 0, "fps is no multiple of the sampling rate")
    frames = {}  # {time: points}; yt-vis has all frames, of which some are skipped
    for frame in row["frame_trajectories"]:
        nearest = round(frame["time"] * rate) / rate
        if abs(frame["time"] - nearest) <= FRAME_TOLERANCE_S:
            frames[frame["time"]] = frame["points"] or []
    times = sorted(frames)
    points = {}
    for t in times:
        for p in frames[t]:
            if has_position(p["point"]) and belongs(p["id"], row):
                x, y = p["point"][:2]
                place = {"t": t, "id": p["id"], "x": x, "y": y}
                hidden = {"occluded": True} if p.get("occluded") else {}
                points.setdefault((t, p["id"]), place | hidden)
    head = tracked_video(row, job)
    size = size_of(row.get("width"), row.get("height"))
    points = list(points.values())
    return head, [partial(make.track, row["expression"], points, times, rate, mode, size)]


def positions(row, job):
    """Every object has one position, or null, per frame of the clip."""
    fps = row["fps"]
    rate = next((rate for rate in (2, 1) if fps % rate == 0), None)
    skip_unless(rate, "fps is no multiple of the sampling rate")
    head = tracked_video(row, job)
    paths = {track["object_id"]: track["points"] for track in row["points"]
             if belongs(track["object_id"], row)}
    n_frames = max(map(len, paths.values()), default=0)
    frames = range(0, n_frames, int(fps) // rate)
    points = []
    for frame in frames:
        for object_id, path in paths.items():
            if frame < len(path) and has_position(path[frame]):
                x, y = path[frame][:2]
                points.append({"t": frame / fps, "id": object_id, "x": x, "y": y})
    times = [frame / fps for frame in frames]
    size = size_of(row.get("w"), row.get("h"))
    builder = partial(make.track, row["exp"], points, times, rate, "per_frame", size)
    return head, [builder]


def conversations(row, job, source=""):
    """LLaVA-Video. The placeholder of the video is <image>, and the video file is
    data_source/video. The name of the JSON file contains the kind, which gives the style. Every
    question with its answer becomes an annotation.

    source: a regular expression that data_source must match."""
    folder = row.get("data_source") or ""
    skip_unless(re.search(source, folder), "another source")
    kind = re.search(r"_(oe|mc|cap)(?=[_.-])", job.path.name)
    style = CONVERSATION_STYLES[kind[1]] if kind else "user_qa"

    def build(question, reply):
        question, n_placeholders = re.subn(r"((?<!\s)\s+)?<(image|video)>\s*", "", question)
        skip_unless(n_placeholders <= 1, "placeholders that do not fit the video")
        if style == "video_long_caption":
            return make.caption(reply, style)
        return make.answer(question, style, reply)

    head = job.media.video(f"{folder}/{row['video']}".lstrip("/"), row["video"])
    _, turns = make.split_turns(row["conversations"])
    return head, [partial(build, *turn) for turn in turns]
