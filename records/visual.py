"""The visual input of a record: sizes and times from headers, and crops (docs/molmo2.md 2, 3).

in    a record (docs/records.md) with its reader, a data.DataConfig, the VisionConfig of the model
out   MediaInfo, from headers alone: sizes, frame times, subtitles; then crops (n,P,F) uint8
"""

from dataclasses import dataclass

import numpy as np

import vision
from records.check import require
from records.errors import Unreadable
from records.parse import check_range
from text.styles import parts_of
from text.visual_tokens import shift_subtitles


@dataclass
class MediaInfo:
    """A record's visual input, as described by the headers of its files."""
    sizes: list  # (width, height) of images, or of the video
    times: list = None  # of the frames of a video, in seconds from the start of the clip
    subtitles: object = None  # [(start, end, text), ..] in the same seconds, or one text


def clip_times(duration, config, start, end):
    """-> (times of the input frames in seconds of the clip, its end in seconds of the file).

    Raises Unreadable if the clip lies outside the video (docs/molmo2.md 3.1).
    """
    end = min(end, duration)
    # the duration of a video with one frame may be 0
    if not 0 <= start < end and (start or duration):
        raise Unreadable("outside the clip", f"the clip starts at {start:g} s, but the clip or "
                         f"the video ends at {end:g} s")
    return vision.frame_times(end - start, config.max_frames, config.fps), end


def tracking_times(duration, frame_rate, lowest, config):
    """Times of the input frames of a clip with tracks, in seconds of the clip (docs/molmo2.md 3.1).

    Their frame rate is a multiple of `lowest`, at most 10, that divides the frame rate of the
    video. If there is none, it is `lowest`. duration: length of the clip in seconds.
    """
    grid = [rate for rate in range(lowest, 11, lowest) if frame_rate % rate == 0]
    return vision.track_times(duration, config.max_frames, grid or [lowest]) or [0.0]


def read_headers(record, config):
    """A record -> MediaInfo, from headers. Raises Unreadable if the media cannot be read, or if
    times or points in pixels do not fit the media."""
    if "video" in record:
        info = read_video_header(record, config)
    else:
        info = MediaInfo(record["source"].image_sizes(record) if "images" in record else [])
    if len(info.sizes) > config.max_images:
        raise Unreadable("too long", f"the record has {len(info.sizes)} images, but "
                         f"--data.max_images is {config.max_images}")
    files = record.get("images") or [record.get("video")]
    for place, annotation in parts_of(record):
        for n in {point.get("image", 0) for point in annotation.get("points", ())}:
            declared = annotation.get("size") or [files[n].get("width"), files[n].get("height")]
            width, height = info.sizes[n]
            exif = ("" if "video" in record else "; if the points refer to the image before the "
                    "EXIF rotation, convert the file with python -m tools.convert --exif-unturned")
            require(declared != [height, width] or width == height, place,
                    f"the size is given as {height} x {width} pixels, but {width} x {height} are "
                    f"displayed; correct the size{exif}")
        if annotation.get("coords") == "pixel":  # parse.py has checked other coordinates
            check_range(annotation, info.sizes, place)
    return info


def read_video_header(record, config):
    width, height, duration, half_frame = record["source"].video_size(record)
    start = record["video"]["start"]
    times, end = clip_times(duration, config, start, record["video"]["end"])
    rates = [a.get("fps", 2) for _, a in parts_of(record) if a["type"] == "track"]
    if rates:  # choose frames at which the tracks have points
        lowest = max(int(min(rates)), 1)
        if lowest > 10:  # every frame is annotated: the answer gives points twice a second
            lowest = 2
        video_rate = round(0.5 / half_frame) if half_frame else 0
        times = tracking_times(end - start, video_rate, lowest, config)
    for place, a in parts_of(record):
        points = [*a.get("points", ()), *([a["query"]] if "query" in a else ())]
        times_of_file = [p["t"] for p in points] + a.get("times", [])
        times_of_file += [a[key] for key in ("start", "end", "at") if key in a]
        for t in times_of_file:
            if not start - half_frame <= t <= end + half_frame:
                raise Unreadable("outside the clip", f"{place} has the time {t:g} s, but "
                                 f"the clip lasts from {start:g} to {end:g} s")
    subtitles = record.get("subtitles")
    if subtitles and not isinstance(subtitles, str):
        subtitles = sorted(subtitles, key=lambda line: line["start"])
        subtitles = [(line["start"], line["end"], line["text"]) for line in subtitles]
    return MediaInfo([(width, height)], times, shift_subtitles(subtitles, start))


def crops_per_image(info, max_crops, vision_config):
    """The number of crops of each image or frame of a MediaInfo."""
    if info.times is not None:
        return [1] * len(info.times)
    return [vision.pooled_grids(h, w, max_crops, vision_config)[2] for w, h in info.sizes]


def pool_windows(info, max_crops, vision_config):
    """pool_src: the patches of each pooling window, (M,4) of images or (M,9) of frames. Patches
    are numbered through all crops; -1 marks a patch that is missing."""
    if info.times is not None:
        each = [vision.frame_windows(vision_config)] * len(info.times)
    else:
        tilings = [vision.tiling(h, w, max_crops, vision_config) for w, h in info.sizes]
        each = [vision.image_windows(rows, cols, vision_config) for rows, cols in tilings]
    n_crops = crops_per_image(info, max_crops, vision_config)
    starts = np.cumsum([0, *n_crops]) * vision_config.n_patch
    shifted = [np.where(source < 0, -1, source + start)
               for source, start in zip(each, starts[:-1], strict=True)]
    return np.concatenate(shifted)


def image_crops(images, max_crops, vision_config):
    """[(H,W,3), ..] -> crops (n,P,F) uint8 of all of them."""
    none = np.zeros((0, vision_config.n_patch, vision_config.n_pixel), np.uint8)
    each = [vision.crops(image, max_crops, vision_config)[0] for image in images]
    return np.concatenate([none, *each])


def frame_crops(frames, n, vision_config):
    """n frames (H,W,3), one at a time -> crops (n,P,F) uint8.

    The result is allocated first, since small arrays between frames of 11 MB fragment the heap.
    """
    crops = np.empty((n, vision_config.n_patch, vision_config.n_pixel), np.uint8)
    for k, frame in zip(range(n), frames, strict=True):
        crops[k] = vision.frame(frame, vision_config)[0]
    return crops
