"""What a native record may hold, beyond the tables of its fields (records/schema.py).

in    a record as parsed, a dict
out   findings that skip the record or only warn; or an error, for what no record may hold

A record is checked once, when its file is indexed. What only the pixels of its media tell is
checked when their headers are read: check_pixels.
"""

import math
import re

from records.annotations import VisualInput, check_annotation, check_range
from records.dialects import UNSUPPORTED, list_key
from records.errors import DataError, Finding, InvalidRecord, Unreadable, short_repr
from records.media import declared_size, media_entries
from records.schema import check_fields, check_length, check_together, is_text

MAX_PATH = 1000                      # characters; file systems take at most 255 bytes of one name


def check(record, where):
    """A native record -> [Finding, ..]; DataError, with the place in the file and in the record.

    where: "file:line".
    """
    try:
        return find(record)
    except InvalidRecord as error:
        raise DataError(f"{where}: {error}") from None


def find(record):
    """A native record -> [Finding, ..], each code once; InvalidRecord for what may not be."""
    findings = {}

    def report(code, message, place=""):
        findings.setdefault(code, Finding(code, f"{message} ({place})"))

    if not isinstance(record, dict):
        what = "a list" if isinstance(record, list) else short_repr(record)
        raise InvalidRecord("E05", f"a record must be an object, not {what}")
    key = list_key(record)
    if key != "annotations":
        raise InvalidRecord("E06", f"'{key}' stands where a native record has 'annotations'")
    for key in UNSUPPORTED:
        if record.get(key):
            raise InvalidRecord("E16", f"'{key}' is not an input of Molmo2")
    if isinstance(record.get("videos"), list) and len(record["videos"]) > 1:
        raise InvalidRecord("E15", f"the record has {len(record['videos'])} videos")
    check_fields(record, "record", "the record", report)
    if not record["annotations"]:
        raise InvalidRecord("E07", "'annotations' is empty")
    visual = visual_input(record, report)
    check_subtitles(record, visual, report)
    for k, annotation in enumerate(record["annotations"]):
        check_annotation(annotation, f"annotations[{k}]", visual, report)
    return list(findings.values())


def check_subtitles(record, visual, report):
    subtitles = record.get("subtitles", [])
    if "subtitles" in record:
        right_type = is_text(subtitles) or isinstance(subtitles, list)
        if visual.medium != "video" or not right_type:
            message = "subtitles are a text or a list of {start, end, text}, and need a video"
            raise InvalidRecord("E07", message, "subtitles")
    if isinstance(subtitles, str):
        check_length(subtitles, "subtitles")
        return
    for k, line in enumerate(subtitles):
        place = f"subtitles[{k}]"
        check_fields(line, "subtitle", place, report)
        if line["start"] > line["end"]:
            message = f"a subtitle starts at {line['start']:g} s and ends at {line['end']:g} s"
            raise InvalidRecord("E41", message, place)
        if k and line["start"] < subtitles[k - 1]["start"]:
            report("E41", "subtitles are not in the order of their starts; they are sorted", place)
    check_length("".join(line["text"] for line in subtitles), "subtitles")


def check_pixels(record, sizes):
    """Points in pixels against the size of the file itself; Unreadable E62 if one lies outside.

    sizes: [(width, height), ..] of the images or of the video, as their headers tell. What the
    record declares counts instead: points are on the scale of what was annotated.
    """
    scales = [declared_size(entry) or size
              for entry, size in zip(media_entries(record), sizes, strict=True)]
    for k, annotation in enumerate(record["annotations"]):
        if annotation.get("coords") != "pixel":
            continue                 # checked when the file was indexed
        try:
            check_range(annotation, f"annotations[{k}]", scales, lambda *_: None)
        except InvalidRecord as error:
            raise Unreadable(str(error)) from None


# --------------------------------------------------------------------------------------------------
# images and videos


def visual_input(record, report):
    """The record's image, images or video, checked -> VisualInput."""
    given = [key for key in ("image", "images", "video") if key in record]
    if len(given) > 1:
        code = "E14" if "video" in given else "E13"
        message = f"a record has one of '{given[0]}' and '{given[1]}', or none, not both"
        raise InvalidRecord(code, message)
    if not given:
        return VisualInput("text", [])
    if given == ["video"]:
        return video_input(record["video"], report)
    images = media_entries(record)
    if not images:
        raise InvalidRecord("E07", "'images' is empty")
    for k, image in enumerate(images):
        place = "image" if given == ["image"] else f"images[{k}]"
        path = image
        if isinstance(image, dict):
            check_fields(image, "image", place, report)
            check_together(image, place, "width", "height")
            path = image["path"]
        check_path(path, place)
    medium = "images" if len(images) > 1 else "image"
    return VisualInput(medium, [declared_size(image) for image in images])


def video_input(video, report):
    if isinstance(video, list) and len(video) > 1:
        raise InvalidRecord("E15", f"the record has {len(video)} videos", "video",
                            'frames of one video are {"frames": [..], "fps": ..}')
    if not isinstance(video, dict):
        check_path(video, "video")
        return VisualInput("video", [None])
    check_fields(video, "video", "video", report)
    if ("path" in video) == ("frames" in video):
        raise InvalidRecord("E07", "a video has either 'path' or 'frames'", "video")
    if "path" in video:
        check_path(video["path"], "video.path")
        duration = video.get("duration", math.inf)
    else:
        if not video["frames"] or "fps" not in video:
            raise InvalidRecord("E07", "'frames' needs at least one path, and 'fps'", "video")
        for k, path in enumerate(video["frames"]):
            check_path(path, f"video.frames[{k}]")
        duration = len(video["frames"]) / video["fps"]
    check_together(video, "video", "start", "end")
    check_together(video, "video", "width", "height")
    start = video.get("start", 0)
    end = video.get("end", math.inf)
    if start >= end:
        message = f"the clip starts at {start:g} s and ends at {end:g} s"
        raise InvalidRecord("E40", message, "video")
    if start >= duration:
        report("S23", f"the clip starts at {start:g} s, but the video ends at {duration:g} s",
               "video")
    half_frame = 0.5 / video.get("fps", 2)
    return VisualInput("video", [declared_size(video)], start, end, duration, half_frame)


def check_path(path, place):
    if not isinstance(path, str) or not path:
        raise InvalidRecord("E07", f"a path must be a text, not {short_repr(path)}", place)
    problem = path_problem(path)
    if problem:
        raise InvalidRecord("E10", f"the path {short_repr(path)} {problem}", place,
                            "a path is that of a file below the media folder")


def path_problem(path):
    """Why a path cannot be that of a file below the media folder; "" if it can."""
    parts = path.split("/")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path):
        return "holds a URL"
    if re.match(r"/|\\|[A-Za-z]:[/\\]", path):
        return "is absolute"
    if leaves_folder(parts):
        return "leaves the media folder by '..'"
    if re.search(r"[\0-\x1f\x7f-\x9f]", path):
        return "holds a control character"
    if parts[-1] in ("", ".", ".."):
        return "is a folder"
    if len(path) > MAX_PATH or any(len(part.encode()) > 255 for part in parts):
        return "is longer than file systems take"
    return ""


def leaves_folder(parts):
    depth = 0
    for part in parts:
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            return True
    return False
