"""Layouts of video sets: what a row becomes. The form of a layout is explained in
images.py.

Left out: captions of clips and of frames in Molmo2-Cap, and masks.
"""

import math
import re
from functools import partial

from tools.prepare.annotations import (
    answer,
    caption,
    count_annotation,
    meta_of,
    multiple_choice,
    number_of,
    parse_messages,
    point_annotation,
    require,
    size_of,
    text_of,
    track_annotation,
    xy_points,
)

MAX_POINTS = 60                      # of an annotation
# Molmo2 leaves these videos out, which do not decode.
CORRUPT = {"0OfUqrbRa2Y", "mTXBQzptWAg", "NyuA4FatDQk", "a_", "gsfIHiBB6xE", "bXApJtAf6Qo",
           "N8BlpYSpgg4"}
CAPTION_STYLES = {
    "video_caption": "video_short_caption",
    "merged_caption": "video_merged_caption",
    "video_frame_merged_caption": "video_long_caption",
}
TRACK_MODES = {"track": "per_frame", "ground": "start_end", "single_point_track": "from_point"}
FRAME_TOLERANCE_S = 0.01             # between the time of a track point and its frame
HALF_FRAME_S = 0.25                  # at two frames a second


def video_captions(row, settings, media):
    name = row["video_id"]
    score = row["annotation_score"]
    require(name not in CORRUPT, "video known not to decode")
    require((score or 0) >= settings.min_score, f"annotation_score below {settings.min_score:g}")
    head = media.video(name, f"v_{name}", f"ytb_{name}", start=row.get("video_start"),
                       end=row.get("video_end"))
    builders = [partial(caption, row[column], style)
                for column, style in CAPTION_STYLES.items() if row.get(column)]
    return head | meta_of(annotation_score=score), builders


def video_questions(row, settings, media):
    head = media.video(row["video_id"])
    return head, [partial(answer, row["question"], "user_qa", row["answer"])]


def negative_answers(row, settings, media):
    """The right answer and the wrong ones; the trainer shuffles. All rows of a video
    have the same subtitles."""
    head = media.video(row["video_id"])
    subtitles = []
    for line in row.get("subtitle") or []:
        if text_of(line["text"]) and 0 <= line["start"] <= line["end"]:
            subtitles.append({"start": line["start"], "end": line["end"],
                              "text": text_of(line["text"])})
    if subtitles:
        head["subtitles"] = sorted(subtitles, key=lambda line: line["start"])
    options = []
    if text_of(row["Answer"]):
        options = [row["Answer"], *(row["NegativeAnswers"] or [])]
    builder = partial(multiple_choice, row["Question"], "video_multiple_choice", options, 0,
                      shuffle_options=True, **meta_of(category=row.get("Category")))
    return head, [builder]


def video_points(row, settings, media):
    """points[i] at time i: a list of points, one point (evaluation), or no such column
    (counts). Times are seconds of the whole video, of which the clip is a window."""
    name = row.get("video_id") or row["video_name"]
    start = row.get("clip_start", row.get("clip_start_time"))
    end = row.get("clip_end", row.get("clip_end_time"))
    first = 0
    last = row.get("video_duration") or math.inf
    if start is not None and end is not None:
        first = start
        last = end
    require(last == math.inf or last - first <= settings.max_seconds,
            f"no clip of at most {settings.max_seconds} s")
    head = media.video(f"{media.stem(name)}_2fps", name, start=start, end=end)
    head |= meta_of(video_source=row.get("video_source"))
    label = row["label"] if "label" in row else row["category"].lower()
    question = row.get("question") if settings.ask else None
    if "points" not in row:
        return head, [partial(count_annotation, row["count"], label, question)]

    def annotation():
        times = row["two_fps_timestamps"] if "two_fps_timestamps" in row else row["timestamps"]
        points = []
        for t, cell in zip(times, row["points"], strict=True):
            places = xy_points(cell if isinstance(cell, list) else [cell])
            points += [{"t": t, **place} for place in places]
        low = max(first - HALF_FRAME_S, 0)
        in_clip = all(low <= point["t"] <= last + HALF_FRAME_S for point in points)
        require(in_clip, "point outside the clip")
        size = size_of(row["width"], row["height"]) if settings.coords == "pixel" else None
        meta = meta_of(category=row.get("category"), annotator_unsure=row.get("annotator_unsure"))
        return point_annotation(points, settings.coords, label, question, size, row["count"],
                                max_points=MAX_POINTS, counts=settings.counts,
                                mode=settings.mode, **meta)

    return head, [annotation]


# ------------------------------------------------------------------------------------------------
# tracks


def has_position(place):
    """A hidden object has none: null, or a pair of nulls or NaN."""
    return bool(place) and all(number_of(value) is not None for value in place)


def objects_of(row):
    """A test of whether an object belongs to the row's expression: mask_id lists them,
    or is empty for all."""
    ids = {str(i) for i in row.get("mask_id") or []}
    return lambda object_id: not ids or str(object_id) in ids


def trajectories(row, settings, media):
    """Instruction form: the points of objects per frame, in seconds of the clip's own
    file."""
    fps = row["fps"]
    rate = number_of(row["sampling_fps"])
    mode = TRACK_MODES.get(row["task"])
    belongs = objects_of(row)
    require(mode, "another task")
    require(rate and fps % rate == 0, "fps is no multiple of the sampling rate")
    frames = {}                      # time -> points; yt-vis has every native frame
    for frame in row["frame_trajectories"]:
        nearest = round(frame["time"] * rate) / rate
        if abs(frame["time"] - nearest) <= FRAME_TOLERANCE_S:
            frames[frame["time"]] = frame["points"] or []
    times = sorted(frames)
    points = {}
    for t in times:
        for p in frames[t]:
            if has_position(p["point"]) and belongs(p["id"]):
                x, y = p["point"][:2]
                hidden = {"occluded": True} if p.get("occluded") else {}
                points.setdefault((t, p["id"]), {"t": t, "id": p["id"], "x": x, "y": y, **hidden})
    head = media.video(row["video"])
    head |= meta_of(video_source=row.get("video_source"), id=row.get("id"))
    size = size_of(row.get("width"), row.get("height"))
    return head, [partial(track_annotation, row["expression"], list(points.values()), times, rate,
                          mode, size)]


def positions(row, settings, media):
    """Raw form: of every object a position, or null, per frame of the clip.
    --full-video shifts the times into the source video."""
    fps = row["fps"]
    belongs = objects_of(row)
    rate = next((rate for rate in (2, 1) if fps % rate == 0), None)
    require(rate, "fps is no multiple of the sampling rate")
    begin = 0
    if settings.full_video:
        begin = row["start_frame"] / fps
        head = media.video(row["video"], start=begin, end=(row["end_frame"] + 1) / fps)
    else:
        head = media.video(row.get("clip") or row["video"])
    paths = {}                       # object -> its place in every frame
    for track in row["points"]:
        if belongs(track["object_id"]):
            paths[track["object_id"]] = track["points"]
    n_frames = max(map(len, paths.values()), default=0)
    frames = range(0, n_frames, int(fps) // rate)
    points = []
    for frame in frames:
        for object_id, path in paths.items():
            if frame < len(path) and has_position(path[frame]):
                x, y = path[frame][:2]
                points.append({"t": begin + frame / fps, "id": object_id, "x": x, "y": y})
    times = [begin + frame / fps for frame in frames]
    size = size_of(row.get("w"), row.get("h"))
    builder = partial(track_annotation, row["exp"], points, times, rate, "per_frame", size)
    return head | meta_of(id=row.get("id")), [builder]


# ------------------------------------------------------------------------------------------------
# conversations


def video_conversations(row, settings, media):
    """LLaVA-Video: the video is marked <image> and lies in data_source/video; the name
    of the file tells the style. Every question with its answer is an annotation."""
    kind = re.search(r"_(oe|mc|cap)(?=[_.-])", settings.file.name)
    kind = kind[1] if kind else None
    styles = {"oe": "video_short_answer", "mc": "video_multiple_choice"}
    style = styles.get(kind, "user_qa")
    source = row.get("data_source") or ""
    require(re.search(settings.source, source), "another source")

    def annotation(question, reply):
        question, n_placeholders = re.subn(r"\s*<(image|video)>\s*", "", question)
        require(n_placeholders <= 1, "placeholders that do not fit the video")
        if kind == "cap":
            return caption(reply, "video_long_caption")
        return answer(question, style, reply)

    head = media.video(f"{source}/{row['video']}".lstrip("/"), row["video"])
    _, turns = parse_messages(row["conversations"])
    return head, [partial(annotation, *turn) for turn in turns]
