"""Tests the visual input of a record: data from headers, frame times, and crops."""

import math
from dataclasses import replace

import numpy as np
import pytest

import data
import vision
from records.errors import Unreadable
from records.visual import (
    MediaInfo,
    clip_times,
    crops_per_image,
    frame_crops,
    image_crops,
    pool_windows,
    read_headers,
)
from tests.records.samples import CAPTION, POINT, QA, image, video
from tests.records.visual_records import (
    CONFIG,
    GREY_FRAMES,
    TOKENIZER,
    VIDEO,
    VISION,
    encoded,
    open_records,
    write_media,
)
from text.points import parse_points
from text.prompts import turns_of

CLIP = {"path": VIDEO, "start": 1.0, "end": 3.0}
TRACK_POINTS = [{"t": float(t), "id": 1, "x": 10 * t + 5, "y": 50} for t in range(6)]
TRACK = {"type": "track", "label": "dot", "coords": "percent", "fps": 1, "points": TRACK_POINTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_media(tmp_path_factory.mktemp("media"))


def first_record(folder, record):
    return open_records(folder, record)[0]


def headers(folder, record, **changes):
    return read_headers(first_record(folder, record), replace(CONFIG, **changes))


# --------------------------------------------------------------------------------------------------
# headers and times


def pixel_point(**point):
    return {**POINT, "coords": "pixel", "points": [point]}


def of_video(*annotations):
    return video(*annotations, video=VIDEO)


def percent_point(**point):
    return {**POINT, "points": [point]}


GREY = {"path": GREY_FRAMES[0]}                                  # 32 x 24 pixels
OUTSIDE = "wrong record: annotations\\[0\\]: point 0 lies outside the image"
UNUSABLE = [
    ({"images": ["0.png", "gone.png"], "annotations": [QA]}, "missing file: .*gone.png$"),
    (image(pixel_point(x=31, y=25), image=GREY), OUTSIDE),
    (video(QA, video="gone.mp4"), "missing file: "),
    (video(QA, video="0.png"), "damaged video: "),
    (video(QA, video={"path": VIDEO, "start": 1000.0, "end": 1001.0}),
     "outside the clip: the clip starts at 1000 s, but the clip or the video ends at 5.28 s"),
    (of_video({**CAPTION, "start": 1.0, "end": 5000.0}), "outside the clip: "),
    (of_video(QA, percent_point(x=1, y=1, t=999.0)),
     r"outside the clip: annotations\[1\] has the time 999 s, but the clip lasts from 0 to 5\.28"),
    (of_video(pixel_point(x=9999, y=1, t=0.0)), OUTSIDE),
    (of_video({**CAPTION, "at": 60}), "outside the clip: "),
    (of_video({"type": "qa", "turns": [
        {"question": "q", "answer": "a"}, {**TRACK, "times": [60]}]}),
     r"outside the clip: annotations\[0\]\.turns\[1\] has the time 60 s"),
    (of_video({**TRACK, "times": [60]}), "outside the clip: "),
    (of_video({**TRACK, "query": {**TRACK_POINTS[0], "t": 60}}), "outside the clip: "),
    ({"images": ["0.png"] * 6, "annotations": [QA]},
     "too long: the record has 6 images, but --data.max_images is 5"),
]


@pytest.mark.parametrize(("record", "message"), UNUSABLE)
def test_unusable_media_and_times_cost_their_record_while_planning(folder, record, message):
    with pytest.raises(Unreadable, match=f"^{message}"):
        data.size(first_record(folder, record), TOKENIZER, CONFIG, VISION, 0, 0)


def test_a_time_may_lie_half_a_frame_outside_the_clip(folder):
    """A frame of this video lasts 0.04 s."""
    times = (0.981, 3.019, 0.979, 3.021)
    records = open_records(
        folder, *(video(percent_point(x=4, y=2, t=t), video=CLIP) for t in times))
    for i in (0, 1):
        assert read_headers(records[i], CONFIG).times == [0, 0.5, 1, 1.5, 2]
    for i in (2, 3):
        with pytest.raises(Unreadable, match=r"^outside the clip: .* from 1 to 3 s"):
            read_headers(records[i], CONFIG)


@pytest.mark.parametrize(("declared", "annotation", "is_refused"), [
    ([24, 32], POINT, True),                             # annotated before EXIF turned it
    ([24, 32], {**pixel_point(x=4, y=2), "mode": "point"}, True),
    (None, {**pixel_point(x=4, y=2), "size": [24, 32]}, True),
    ([24, 32], CAPTION, False),                          # has no coordinates
    ([32, 24], POINT, False), ([640, 480], POINT, False), ([480, 640], POINT, False),
])
def test_points_that_refer_to_an_unturned_image_are_refused(folder, declared, annotation,
                                                            is_refused):
    """Any other declared size is only a scale of the coordinates."""
    size = dict(zip(("width", "height"), declared, strict=True)) if declared else {}
    record = image(CAPTION, annotation, image={**GREY, **size})
    words = (r"^wrong record: annotations\[1\]: the size is given as 24 x 32 pixels, but 32 x 24 "
             "are displayed; .* --exif-unturned")
    if is_refused:
        with pytest.raises(Unreadable, match=words):
            headers(folder, record)
    else:
        assert headers(folder, record).sizes == [(32, 24)]


def test_headers_give_sizes_times_and_subtitles_of_the_clip(folder):
    subtitles = [{"start": 2.0, "end": 2.5, "text": "hm"}]
    info = headers(folder, video(QA, video=CLIP, subtitles=subtitles))
    assert info == MediaInfo([(1280, 720)], [0, 0.5, 1, 1.5, 2], [(1.0, 1.5, "hm")])
    assert headers(folder, video(QA, video=CLIP, subtitles="words")).subtitles == "words"
    assert headers(folder, {"annotations": [QA]}) == MediaInfo([])
    images = {"images": GREY_FRAMES[:2], "annotations": [QA]}
    assert headers(folder, images) == MediaInfo([(32, 24)] * 2)


@pytest.mark.parametrize(("duration", "start", "end", "times", "clip_end"), [
    (3.0, 0.0, math.inf, [0, 0.5, 1, 1.5, 2, 2.5, 3], 3.0),
    (3.0, 1.0, 99.0, [0, 0.5, 1, 1.5, 2], 3.0),
    (3.0, 1.5, 2.0, [0, 0.5], 2.0),
    (70.0, 0.0, math.inf, [0, 10, 20, 30, 40, 50, 60, 70], 70.0),        # spread evenly
    (0.0, 0.0, math.inf, [0], 0.0),                                      # a single frame
])
def test_times_count_from_the_start_of_the_clip(duration, start, end, times, clip_end):
    found, found_end = clip_times(duration, CONFIG, start, end)
    assert found == pytest.approx(times)
    assert found_end == clip_end


def test_videos_with_tracks_are_looked_at_where_the_tracks_have_points(folder):
    """Frame times follow the rate of the tracks, and are not spread over the video. So no point is
    lost that a frame could show (docs/molmo2.md 3.1)."""
    record = first_record(folder, of_video(TRACK))
    for max_frames, n_seen in ((6, 6), (4, 4), (384, 6)):
        config = replace(CONFIG, max_frames=max_frames)
        times = read_headers(record, config).times
        text = TOKENIZER.decode(data.encode(record, TOKENIZER, config, VISION, 0, 0).tokens)
        assert [t for t in times if t == int(t)] == list(range(n_seen))
        assert len(times) <= max_frames
        assert all(f"{100 * t + 50:03d} 500" in text for t in range(n_seen))
        assert f"{100 * n_seen + 50:03d} 500" not in text
    ten_a_second = of_video(TRACK | {"fps": 10})
    assert headers(folder, ten_a_second, max_frames=4).times == pytest.approx([0, 0.1, 0.2, 0.3])
    two_rates = of_video(TRACK | {"fps": 5}, TRACK)              # frames follow the lower rate
    assert headers(folder, two_rates, max_frames=4).times == pytest.approx([0, 1, 2, 3])


@pytest.mark.parametrize("fps", [25, 30, 29.97])
def test_a_track_of_every_frame_is_asked_about_over_the_whole_video(folder, fps):
    """It is not sampled at 25 or 30 fps, because 128 frames would end after 5 seconds."""
    points = [{"t": k / fps, "id": 1, "x": 50, "y": 50} for k in range(int(60 * fps))]
    track = {**TRACK, "fps": fps, "points": points}
    frames = {"frames": [GREY_FRAMES[0]] * int(60 * fps), "fps": fps}
    record = first_record(folder, video(track, CAPTION, video=frames))
    config = replace(CONFIG, max_frames=128)
    info = read_headers(record, config)
    assert len(info.times) == 120
    assert info.times[-1] == pytest.approx(59.5)
    track = record["annotations"][0]
    ((_, answer),) = turns_of(track, record, info.sizes, config, None, info.times)
    assert len(parse_points(answer, 1, 1)) >= 60                 # one per second for 25 fps


# --------------------------------------------------------------------------------------------------
# crops


def test_planned_crops_and_windows_are_those_of_the_images():
    rng = np.random.default_rng(0)
    sizes = [tuple(rng.integers(12, 400, 2).tolist()) for _ in range(6)]
    images = [rng.integers(0, 255, (h, w, 3), np.uint8) for w, h in sizes]
    parts = [vision.crops(pixels, 2, VISION) for pixels in images]
    info = MediaInfo(sizes)
    assert crops_per_image(info, 2, VISION) == [len(crops) for crops, _ in parts]
    assert set(crops_per_image(info, 2, VISION)) == {2, 3}
    found = image_crops(images, 2, VISION)
    assert np.array_equal(found, np.concatenate([part[0] for part in parts]))
    n_before = 0
    expected = []
    for crops, windows in parts:
        expected.append(np.where(windows < 0, -1, windows + n_before * VISION.n_patch))
        n_before += len(crops)
    assert np.array_equal(pool_windows(info, 2, VISION), np.concatenate(expected))
    assert image_crops([], 2, VISION).shape == (0, 100, 300)
    with pytest.raises(ValueError, match="shorter"):             # a frame is missing
        frame_crops(iter(images[:1]), 2, VISION)


def test_a_clip_of_frames_word_by_word_and_pixel_by_pixel(folder):
    """The clip has six grey frames (0, 40, .. 200) at 2.5 per second, used from 0.4 to 2.2 s. Tests
    the times, the frame at each time, a point in pixels of the file, and the subtitles."""
    config = replace(CONFIG, max_frames=5, prefix_all=False, separator=";", point_weight=0.2,
                     video_caption_weight=0.1, sqrt_length=True)
    point = {"type": "point", "label": "Dot", "coords": "pixel", "mode": "point",
             "question": "Where?", "points": [{"t": 1.4, "x": 16, "y": 6}]}      # in 32 x 24
    frames = {"frames": GREY_FRAMES, "fps": 2.5, "start": 0.4, "end": 2.2}
    subtitles = [{"start": 0.1, "end": 0.3, "text": "gone"},
                 {"start": 0.2, "end": 0.9, "text": "here"}]
    example = encoded(folder, video(point, video=frames, subtitles=subtitles), config)
    text = TOKENIZER.decode(example.tokens)
    assert text.startswith("0.0  0.5  1.0  1.5  1.8 ")
    assert "0.0 - 0.5 here" in text
    assert "gone" not in text
    assert '<points coords="1.0 1 500 250">' in text
    levels = [int(crop.astype(int).mean().round()) for crop in example.images]
    assert levels == [40, 80, 120, 160, 200]     # at 0.4, 0.9, 1.4, 1.9, 2.2 s of the file
    learned = example.weights[example.weights > 0]
    assert learned == pytest.approx(np.full(len(learned), 0.2))
