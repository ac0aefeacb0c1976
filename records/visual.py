"""The visual input of a record: what headers tell of it, and its crops (docs/molmo2.md 2, 3).

in    a record (docs/records.md) with its reader, a data.DataConfig
out   MediaInfo, from headers alone: sizes, frame times, subtitles; then crops (n,P,F) uint8
"""

from dataclasses import dataclass, field

import numpy as np

import vision
from records.check import require
from records.errors import Unreadable
from records.parse import check_range
from text.styles import parts_of
from text.visual_tokens import shift_subtitles


@dataclass
class MediaInfo:
    """What headers tell of a record's visual input."""
    sizes: list = field(default_factory=list)  # (width, height) of images, or of the video
    times: list = None  # of a video: seconds of the clip, one per frame
    subtitles: object = None  # [(start, end, text), ..] in these seconds, or a text


@dataclass
class VideoClip:
    times: list  # as in MediaInfo
    frames: object  # yields (H,W,3) uint8 for each time
    subtitles: object = None


def clip_times(duration, config, start, end):
    """-> times of the frames shown, in seconds of the clip; its end, in seconds of the file.

    Unreadable where the clip lies outside the video (docs/molmo2.md 3.1).
    """
    end = min(end, duration)
    # one frame lasts no time
    if not 0 <= start < end and (start or duration):
        raise Unreadable("outside the clip",
                         f"the clip {start:g} to {end:g} s is empty, of {duration:g} s")
    return vision.frame_times(end - start, config.max_frames, config.fps), end


def tracking_times(duration, frame_rate, lowest, config):
    """Times of the frames shown with a track, in seconds of the clip (docs/molmo2.md 3.1).

    Their rate is a multiple of `lowest` that divides that of the video, up to 10 a second.
    duration: of the clip in seconds.
    """
    grid = [rate for rate in range(lowest, 11, lowest) if frame_rate % rate == 0]
    return vision.track_times(duration, config.max_frames, grid or [lowest]) or [0.0]


def read_headers(record, config):
    """A record -> MediaInfo, without decoding.

    Unreadable if its media, its times or its points in pixels cannot be used.
    """
    if "video" in record:
        info = read_video_header(record, config)
    else:
        info = MediaInfo(record["source"].image_sizes(record) if "images" in record else [])
    if len(info.sizes) > config.max_images:
        raise Unreadable("too long", f"it has {len(info.sizes)} images, and "
                         f"--data.max_images is {config.max_images}")
    files = record.get("images") or [record.get("video")]
    for place, annotation in parts_of(record):
        for n in {point.get("image", 0) for point in annotation.get("points", ())}:
            declared = annotation.get("size") or [files[n].get("width"), files[n].get("height")]
            width, height = info.sizes[n]
            exif = ("" if "video" in record else "; if they are those before EXIF turns the image, "
                    "convert the file by python -m tools.convert --exif-unturned")
            require(declared != [height, width] or width == height, place,
                    f"its points refer to {height} x {width} pixels, but {width} x {height} are "
                    f"displayed{exif}; else correct the size")
        if annotation.get("coords") == "pixel":  # others are checked already
            check_range(annotation, info.sizes, place)
    return info


def read_video_header(record, config):
    width, height, duration, half_frame = record["source"].video_size(record)
    start = record["video"]["start"]
    times, end = clip_times(duration, config, start, record["video"]["end"])
    rates = [a.get("fps", 2) for _, a in parts_of(record) if a["type"] == "track"]
    if rates:  # where the tracks have points
        lowest = max(int(min(rates)), 1)
        if lowest > 10:  # of every frame: asked for twice a second
            lowest = 2
        video_rate = round(0.5 / half_frame) if half_frame else 0
        times = tracking_times(end - start, video_rate, lowest, config)
    for place, a in parts_of(record):
        points = [*a.get("points", ()), *([a["query"]] if "query" in a else ())]
        times_of_file = [p["t"] for p in points] + a.get("times", [])
        times_of_file += [a[key] for key in ("start", "end", "at") if key in a]
        for t in times_of_file:
            if not start - half_frame <= t <= end + half_frame:
                raise Unreadable("outside the clip", f"{place} is at {t:g} s, and "
                                 f"the clip lasts from {start:g} to {end:g} s")
    subtitles = record.get("subtitles")
    if subtitles and not isinstance(subtitles, str):
        subtitles = sorted(subtitles, key=lambda line: line["start"])
        subtitles = [(line["start"], line["end"], line["text"]) for line in subtitles]
    return MediaInfo([(width, height)], times, shift_subtitles(subtitles, start))


def crops_per_image(info, config):
    """How many crops each image, or each frame, of a MediaInfo has."""
    if info.times is not None:
        return [1] * len(info.times)
    return [vision.pooled_grids(h, w, config.max_crops, config.vision)[2]
            for w, h in info.sizes[: config.max_images]]


def pool_windows(info, config):
    """pool_src (M,4) of images or (M,9) of frames, counted through all crops."""
    if info.times is not None:
        each = [vision.frame_windows(config.vision)] * len(info.times)
    else:
        tilings = [vision.tiling(h, w, config.max_crops, config.vision)
                   for w, h in info.sizes[: config.max_images]]
        each = [vision.image_windows(rows, cols, config.vision) for rows, cols in tilings]
    starts = np.cumsum([0, *crops_per_image(info, config)]) * config.vision.n_patch
    shifted = [np.where(source < 0, -1, source + start)
               for source, start in zip(each, starts[:-1], strict=True)]
    return np.concatenate(shifted)


def image_crops(images, config):
    """[(H,W,3), ..] -> crops (n,P,F) uint8 of all of them."""
    none = np.zeros((0, config.vision.n_patch, config.vision.n_pixel), np.uint8)
    each = [vision.crops(image, config.max_crops, config.vision)[0]
            for image in images[: config.max_images]]
    return np.concatenate([none, *each])


def frame_crops(frames, n, config):
    """n frames (H,W,3), one at a time -> crops (n,P,F) uint8.

    Preallocated: small arrays between frames of 11 MB fragment the heap.
    """
    crops = np.empty((n, config.vision.n_patch, config.vision.n_pixel), np.uint8)
    for k, frame in zip(range(n), frames, strict=True):
        crops[k] = vision.frame(frame, config.vision)[0][0]
    return crops
