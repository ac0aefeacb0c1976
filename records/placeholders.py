"""Placeholders for images and videos in the chats of other projects: which media they stand for.

A placeholder is an `<image>` or `<video>` in a text of the user, or a part without text in typed
content:

    P1  as many image placeholders as images: the k-th stands for image k
    P2  no placeholder: the media come first
    P3  one video and one placeholder of either name: it is the video
    P4  anything else is refused; nothing is repeated and nothing is dropped
    P5  placeholders that lead the first turn, or a single one in it, are taken out, since the media
        come first anyway; otherwise they keep their places
    P6  blanks around a placeholder that is taken out go with it; a prompt of nothing but
        placeholders stays a list of them
    P7  a placeholder in an answer or a system text is refused (records/dialects.py)
    P8  "", [] and null are no media
"""

import re
from typing import NamedTuple

from records.errors import InvalidRecord, short_repr

PLACEHOLDER = re.compile("(<image>|<video>|<audio>)")
ENTRY_FIELDS = ("path", "width", "height", "url", "sha256")      # as in native records


class Placeholder(NamedTuple):
    kind: str                        # image, video or audio
    entry: object = None             # a number, path or object; None: the next image of the row


def whole_number(value):
    return isinstance(value, int) and not isinstance(value, bool)


def listed(value):
    """A path, an object or a list of them -> list; "", [] and null are no media (P8)."""
    entries = value if isinstance(value, list) else [value]
    return entries if any(entries) else []


def collect_media(row, placeholders, prefix_field=None):
    """The media of a row -> (images, video or None, targets), as native records have them.

    targets: what each placeholder stands for, {"image": k} or {"video": 0}. InvalidRecord unless
    each stands for one of the media and nothing is left over (P1 to P4).
    """
    images = given_media(row, "image", "E13")
    videos = given_media(row, "video", "E15")
    targets = []
    if videos and not images and [p.entry for p in placeholders] == [None]:
        targets.append({"video": 0})
    else:
        next_image = iter(range(len(images)))
        for kind, entry in placeholders:
            number = entry
            if entry is None and kind == "image":
                number = next(next_image, None)
            elif entry is not None and not whole_number(entry):
                media = images if kind == "image" else videos
                media.append(entry)
                number = len(images) - 1
            targets.append({"video": 0} if kind == "video" else {"image": number})
    if images and videos:
        raise InvalidRecord("E14", "a record cannot have images and a video")
    if placeholders and not (images or videos):
        message = f"the text has {len(placeholders)} placeholders, the row no image and no video"
        raise InvalidRecord("E30", message)

    folder = media_folder(row, prefix_field)
    video = read_video(videos, row, folder)
    check_targets(placeholders, targets, len(images), len(videos))
    return [read_entry(entry, folder, "image") for entry in images], video, targets


def given_media(row, kind, code):
    keys = [key for key in (kind, f"{kind}s") if listed(row.get(key))]
    if len(keys) > 1:
        raise InvalidRecord(code, f"the row has both '{keys[0]}' and '{keys[1]}'")
    return list(listed(row[keys[0]])) if keys else []


def check_targets(placeholders, targets, n_images, n_videos):
    """Every image, or the video, has one placeholder, or there is none at all."""
    media = [{"image": k} for k in range(n_images)]
    if n_videos:
        media = [{"video": 0}] * n_videos
    for target, placeholder in zip(targets, placeholders, strict=True):
        if whole_number(placeholder.entry) and target not in media:
            raise InvalidRecord("E32", f"there is no image {target['image']}", "",
                                f"the record has {n_images}, counted from 0")
    if targets and (len(targets) != len(media) or any(target not in targets for target in media)):
        what = "video" if n_videos else "images"
        message = f"the text has {len(targets)} placeholders for {len(media)} {what}"
        raise InvalidRecord("E31", message, "", "one placeholder for each, or none at all")


def place_media(prompts, images, video, targets):
    """The users' turns as questions of native records (P5, P6).

    A question is a text where the media come first anyway, else a list of texts and targets.
    """
    media = [{"video": 0}] if video else [{"image": k} for k in range(len(images))]
    next_target = iter(targets)
    questions = []
    for parts in prompts:
        parts = [next(next_target) if isinstance(part, Placeholder) else part for part in parts]
        if not questions:
            parts = without_leading_media(parts, media)
        texts = all(isinstance(part, str) for part in parts)
        questions.append("".join(parts) if texts else parts)
    if media and isinstance(questions[0], str) and not questions[0].strip():
        questions[0] = media
    return questions


def without_leading_media(parts, media):
    """The parts of the first turn without placeholders that only say that the media come first."""
    places = [k for k, part in enumerate(parts) if not isinstance(part, str)]
    if not places or len(places) != len(media):
        return parts
    first, last = places[0], places[-1]
    in_order = [parts[k] for k in places] == media
    texts_before_last = [part for part in parts[:last] if isinstance(part, str)]
    leading = in_order and not "".join(texts_before_last).strip()
    if len(media) > 1 and not leading:
        return parts
    before = "".join(parts[:first])
    after = "".join(parts[last + 1 :])
    left = before.rstrip()
    right = after.lstrip()
    blanks = before[len(left) :] + after[: len(after) - len(right)]
    gap = ""
    if left and right:
        gap = "\n" if "\n" in blanks else " "
    return [left + gap + right]


# --------------------------------------------------------------------------------------------------
# entries: images and videos in the forms that rows have


def media_folder(row, field):
    folder = row.get(field, "") if field else ""
    if not isinstance(folder, str):
        message = f"'{field}' must be the name of a folder, not {short_repr(folder)}"
        raise InvalidRecord("E07", message, field)
    return f"{folder.rstrip('/')}/" if folder else ""


def read_video(videos, row, folder):
    if not videos:
        return None
    if len(videos) > 1:
        raise InvalidRecord("E15", f"the record has {len(videos)} videos", "",
                            "the frames of one video are [[path, ..]], with fps")
    video = read_entry(videos[0], folder, "video")
    clip = row.get("clip")
    if clip is not None:
        if not isinstance(clip, list) or len(clip) != 2:
            message = f"clip must be [start, end] in seconds, not {short_repr(clip)}"
            raise InvalidRecord("E07", message)
        video |= {"start": clip[0], "end": clip[1]}
    video |= {key: row[key] for key in ("start", "end") if key in row}
    if "frames" in video and "fps" in row:
        video["fps"] = row["fps"]
    return video


def read_entry(value, folder, kind):
    """One image or video: a path, an object, or (video) a list of frames, below the folder."""
    if isinstance(value, dict):
        if value.get("bytes"):
            raise InvalidRecord("E10", f"the bytes of the {kind} stand in the row", "",
                                "write them to a file and name its path")
        fields = (*ENTRY_FIELDS, "frames", "fps", "start", "end", "duration")
        entry = {key: value[key] for key in fields if value.get(key) is not None}
    else:
        entry = {"frames" if kind == "video" and isinstance(value, list) else "path": value}
    paths = entry["frames"] if "frames" in entry else [entry.get("path")]
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        what = "an image" if kind == "image" else "a video"
        raise InvalidRecord("E07", f"{short_repr(value)} is not a path of {what}")
    if "frames" in entry:
        entry["frames"] = [folder + path for path in paths]
    else:
        entry["path"] = folder + paths[0]
    return entry["path"] if kind == "image" and list(entry) == ["path"] else entry
