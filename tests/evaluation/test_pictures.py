"""Marks lie where the numbers say, on the frame that was shown then; files stay in their
folder."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from evaluation import pictures
from evaluation.pictures import Mark
from records import media
from records.errors import Unreadable
from tests.records.numbered import make_video

GREY = 90
FIRST, SECOND = pictures.COLOURS[:2]


class FakeSource:
    """Images, or a video of 160 x 90 whose brightness is its time."""

    def __init__(self, images=(), broken=False):
        self.given, self.broken = images, broken
        self.times_asked = []

    def paths_of(self, record):
        return [Path(f"{k}.png") for k in range(len(self.given))]

    def images(self, record):
        if self.broken:
            raise Unreadable("damaged image", "cut")
        return self.given

    def frames(self, record, times):
        self.times_asked.append(list(times))
        for t in times:
            yield np.full((90, 160, 3), 60 + round(10 * t), np.uint8)


def grey(w=320, h=240):
    return np.full((h, w, 3), GREY, np.uint8)


def middle(image, colour, tolerance=3):
    """(x, y) in the middle of the pixels that have the colour, and their number."""
    difference = np.abs(np.asarray(image).astype(int) - colour)
    rows, columns = np.nonzero((difference <= tolerance).all(-1))
    if not len(rows):
        return None, None, 0
    x = (columns.min() + columns.max() + 1) / 2
    return x, (rows.min() + rows.max() + 1) / 2, len(rows)


def prediction(**fields):
    usual = {"id": "video", "annotation": 0, "type": "point", "medium": "video",
             "prompt": "pointing: ball", "text": "<points>", "predicted": [], "true": [],
             "times": [0.0, 1.0, 2.0, 3.0]}
    return {**usual, **fields}


def record_of(source, name="video"):
    return {"id": name, "where": f"file:{name}", "source": source}


@pytest.mark.parametrize("size", [(320, 240), (60, 60), (1600, 900)])
def test_rings_and_crosses_lie_where_the_points_are(size):
    w, h = size
    ring = [Mark(0.25 * w, 0.7 * h, "1")]
    image = pictures.draw_marks(grey(w, h), ring, true=[(0.75 * w, 0.3 * h)])
    x, y, n = middle(image, FIRST)
    assert image.width >= 288
    assert (x / image.width, y / image.height) == pytest.approx((0.25, 0.7), abs=1.5 / 288)
    assert n > 40
    # this quarter does not hold the black outline of the label
    quarter = image.crop((image.width // 2, 0, image.width, image.height // 2))
    x, y, n = middle(quarter, pictures.BLACK)
    place = 0.5 + x / image.width, y / image.height
    assert place == pytest.approx((0.75, 0.3), abs=1.5 / 288)
    assert n > 40
    # a cross can be seen on black
    assert middle(quarter, pictures.WHITE, 60)[2] > 20


def test_a_narrow_strip_stays_small():
    assert pictures.draw_marks(grey(2, 400), [Mark(1, 200, "1")]).size == (4, 800)


def test_points_lie_on_the_image_they_name():
    images = [grey(320, 240), grey(240, 240)]
    predicted = [[1, 1, 80, 60], [2, 1, 120, 200], [5, 1, 9, 9], [1.5, 1, 200, 200]]
    image = pictures.draw_images(images, predicted, [[2, 1, 60, 40]])
    left, right = image.crop((0, 0, 320, 240)), image.crop((324, 0, 644, 240))
    assert image.size == (644, 264)
    assert middle(left, FIRST, 30)[:2] == pytest.approx((80, 60), abs=1.5)
    assert middle(right, FIRST, 30)[:2] == pytest.approx((120, 200), abs=1.5)
    assert middle(left.crop((100, 0, 320, 240)), pictures.BLACK)[2] == 0
    assert middle(right.crop((0, 0, 110, 100)), pictures.BLACK, 60)[2] > 10


def test_a_point_lies_on_the_frame_of_its_time_or_with_its_time_on_the_nearest():
    source = FakeSource()
    predicted = [[1.0, "1", 40, 50], [1.7, "2", 80, 20], [99.0, "3", 10, 10]]
    with mock.patch.object(pictures, "draw_marks", wraps=pictures.draw_marks) as spy:
        image = pictures.draw_frames(
            lambda times: source.frames(None, times), [0.0, 1.0, 2.0, 3.0], predicted,
            [[2.0, 1, 41, 51]], with_trails=False)
    drawn = [call.args for call in spy.call_args_list]
    assert source.times_asked == [[0.0, 1.0, 2.0, 3.0]]
    assert [frame[0, 0, 0] for frame, *_ in drawn] == [60, 70, 80, 90]
    tracks = [[0.0, 1, 10, 20], [1.0, 1, 60, 20], [3.0, 1, 90, 20]]
    assert pictures.trails_until(tracks, 0.0) == []
    assert pictures.trails_until(tracks, 2.0) == [(FIRST, [(10, 20), (60, 20)])]
    assert [given for _, given, *_ in drawn] == [
        [],
        [Mark(40, 50, "1", FIRST)],
        [Mark(80, 20, "2  1.7 s", SECOND)],
        [Mark(10, 10, "3  99.0 s", pictures.COLOURS[2])],
    ]
    assert [true for _, _, true, _ in drawn] == [[], [], [(41, 51)], []]
    # four in a row, the times below
    assert image.size == (4 * round(160 * 240 / 90) + 12, 264)


def test_media_and_types_of_questions_alternate():
    images = [prediction(medium="image", annotation=k) for k in range(3)]
    points = [prediction(annotation=k) for k in range(2)]
    track = prediction(type="track")
    caption = {"id": "video", "type": "caption", "medium": "video"}
    wanted = [images[0], points[0], track, images[1], points[1], images[2]]
    assert pictures.round_robin([*images, caption, track, *points]) == wanted


def test_what_cannot_be_drawn_is_named_and_no_file_leaves_the_folder(tmp_path, capsys):
    wild = ["../../up", "/etc/passwd", "a b", ".hidden", "x" * 400]
    predictions, records = [], [record_of(FakeSource(broken=True), "cut")]
    for name in [*wild, "cut", "twice"]:
        prompt = "pointing: ../" + "y" * 300
        predictions.append(prediction(id=name, medium="image", prompt=prompt))
    records += [record_of(FakeSource([grey()]), name) for name in [*wild, "twice", "twice"]]
    pictures.draw(predictions, records, tmp_path / "in" / "here")
    files = [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == len(wild)
    for path in files:
        assert path.parent.as_posix() == "in/here"
        assert not path.name.startswith(".")
    assert capsys.readouterr().err.splitlines() == [
        "train.py: file:cut: damaged image: cut; no picture is drawn",
        "train.py: twice: 2 records have this id, so no picture is drawn"]


def test_every_set_has_a_folder_of_its_own_inside_the_folder(tmp_path):
    names = ["../ev.jsonl", "../ev.jsonl", "../ev.jsonl#2", "x" * 300]
    folders = [pictures.folder_of_set(tmp_path, k, name) for k, name in enumerate(names)]
    assert folders[0] == tmp_path
    assert len({*folders}) == 4
    for folder in folders[1:]:
        folder.mkdir()
        assert folder.resolve().parent == tmp_path.resolve()


def test_points_of_an_answer_are_drawn_on_the_frames_that_were_shown_then(tmp_path):
    video = media.probe(make_video(tmp_path / "a.mp4", n=60))
    points = [(0.5, "1", 10, 10), (0.5, "2", 30, 20), (1.0, "2", 32, 20)]

    def drawn(points):
        path = str(tmp_path / "frames.png")
        pictures.draw_answer(
            path, points, [], [0.0], lambda times: media.frames(video, [2 + t for t in times]),
            with_trails=False)
        return Image.open(path)

    image = drawn(points)
    frames = list(media.frames(video, [2.5, 3.0]))
    on_first = [Mark(10, 10, "1", FIRST), Mark(30, 20, "2", SECOND)]
    first = pictures.draw_marks(frames[0], on_first)
    second = pictures.draw_marks(frames[1], [Mark(32, 20, "2", SECOND)])   # it keeps its colour
    w = image.width // 2 - 2
    for k, wanted in enumerate((first, second)):
        found = np.array(image)[:360, k * (w + 4) :][:, :w]
        assert np.array_equal(found, np.array(wanted.resize((w, 360), Image.LANCZOS)))
    many = [(k / 10, "1", 5, 5) for k in range(30)]
    assert drawn(many).height == 3 * 396                       # 12 frames, four in a row


def test_annotations_of_records_are_drawn_in_pixels_of_each_image_and_by_times_of_the_clip(capsys):
    """The boxes of an image: see tests/tools/convert/test_formats.py."""
    source = FakeSource([grey(320, 240), grey(240, 240)])
    source.video_size = lambda record: (160, 90, 9.0, 0.1)
    point = {"type": "point", "label": "eye", "points": [
        {"x": 0.5, "y": 0.25, "image": 1, "scale": (1, 1)},
        {"x": 32, "y": 24, "image": 0, "scale": None}]}
    track = {"type": "track", "points": [
        {"t": t, "id": name, "x": 50, "y": y, "scale": (100, 100)}
        for t, name, y in ((3, "a", 10), (3, "b", 20), (5, "a", 30))]}
    records = [record_of(source) | fields for fields in (
        {"annotations": []}, {"images": [{}, {}], "annotations": [point]},
        {"video": {"start": 2}, "annotations": [track]},
        {"images": [{}], "annotations": [], "source": FakeSource(broken=True)})]
    with mock.patch.object(pictures, "draw_marks", wraps=pictures.draw_marks) as spy:
        assert pictures.draw_records(records, 3).size == (3 * 1171 - 4, 396)
        assert pictures.draw_records(records[:1], 3) is None
    assert [marks for _, marks, *_ in (call.args for call in spy.call_args_list)] == [
        [Mark(32, 24, "eye", FIRST)], [Mark(120, 60, "eye", FIRST)],
        [Mark(80, 9, "1", FIRST), Mark(80, 18, "2", SECOND)], [Mark(80, 27, "1", FIRST)]]
    assert source.times_asked == [[1, 3]]
    assert "damaged image: cut; no picture is drawn" in capsys.readouterr().err


def test_an_animation_shows_every_point_and_the_colours_of_all_frames(tmp_path):
    times = [k / 2 for k in range(384)]

    def frames_at(times):
        for t in times:
            # the last is black
            yield np.full((300, 300, 3), (t, 100, 255 - t) if t < times[-1] else 0, np.uint8)

    path = str(tmp_path / "a.gif")
    pictures.draw_answer(path, [(1.5, "1", 50, 50)], [], times, frames_at, with_trails=False)
    gif = Image.open(path)
    assert gif.n_frames > 50  # of 60: neighbours of one colour of the palette are one
    marked = []
    for k in range(gif.n_frames):
        gif.seek(k)
        frame = np.array(gif.convert("RGB"), int)
        if (frame == FIRST).all(2).any():
            marked.append(tuple(frame[250, 250]))
    assert marked == [pytest.approx((1.5, 100, 253.5), abs=4)]
