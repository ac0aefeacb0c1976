"""Pictures of predictions: marks lie where the numbers say, on the frame that was shown then, and names cannot leave the folder."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
from evaluation import pictures

GREY = 90


class Film:
    """A source: images, or frames whose brightness is their time."""

    def __init__(self, images=(), broken=False):
        self.pictures, self.broken, self.asked = images, broken, []

    def images(self, record):
        if self.broken:
            raise data.Unreadable("S21 cannot decode")
        return self.pictures

    def frames(self, record, times):
        self.asked.append(list(times))
        yield from (np.full((90, 160, 3), 60 + round(10 * t), np.uint8) for t in times)


def grey(w=320, h=240):
    return np.full((h, w, 3), GREY, np.uint8)


def middle(picture, colour, slack=3):
    """(x, y) in the middle of the pixels that have the colour, and how many they are."""
    rows, columns = np.nonzero((np.abs(np.asarray(picture).astype(int) - colour) <= slack).all(-1))
    return ((columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2, len(rows)) if len(rows) else (None, None, 0)


def prediction(**more):
    return {"id": "film", "annotation": 0, "type": "point", "medium": "video", "prompt": "pointing: ball", "text": "<points>",
            "predicted": [], "true": [], "times": [0.0, 1.0, 2.0, 3.0], **more}


def record_of(source, name="film"):
    return {"id": name, "where": f"file:{name}", "source": source}


@pytest.mark.parametrize("size", [(320, 240), (60, 60), (1600, 900)])
def test_rings_and_crosses_lie_where_the_points_are(size):
    w, h = size
    picture = pictures.draw_points(grey(w, h), [(0.25 * w, 0.7 * h)], truth=[(0.75 * w, 0.3 * h)])
    x, y, n = middle(picture, pictures.COLOURS[0])
    assert picture.width >= 288 and (x / picture.width, y / picture.height) == pytest.approx((0.25, 0.7), abs=1.5 / 288) and n > 40
    quarter = picture.crop((picture.width // 2, 0, picture.width, picture.height // 2))          # without the outline of the number
    x, y, n = middle(quarter, (0, 0, 0))
    assert (0.5 + x / picture.width, y / picture.height) == pytest.approx((0.75, 0.3), abs=1.5 / 288) and n > 40
    assert middle(quarter, (255, 255, 255), 60)[2] > 20      # a cross can be seen on black


def test_marks_at_the_rim_stay_and_the_rest_of_the_picture_is_untouched():
    image = np.random.default_rng(0).integers(0, 255, (240, 320, 3), np.uint8)
    plain = np.asarray(pictures.draw_points(image, []))
    marked = np.asarray(pictures.draw_points(image, [(0, 0), (319.9, 239.9)], truth=[(160, 120)]))
    assert np.array_equal(plain, image)
    changed = (marked != plain).any(-1)
    assert changed[:8, :8].any() and changed[-8:, -8:].any()
    changed[:40, :60] = changed[-40:, -60:] = changed[100:140, 140:180] = False
    assert not changed.any()


def test_a_dashed_ring_has_gaps():
    full = pictures.draw_points(grey(), [(160, 120)])
    dashed = pictures.draw_points(grey(), [(160, 120)], dashed=[0])
    whole, part = (middle(p, pictures.COLOURS[0])[2] for p in (full, dashed))
    assert 0.4 * whole < part < 0.75 * whole
    assert middle(dashed, pictures.COLOURS[0])[:2] == pytest.approx((160, 120), abs=1.5)


def test_the_frames_with_points_are_chosen_and_others_fill_up():
    times = [k / 2 for k in range(100)]
    assert pictures.chosen(times[:5], []) == [0, 1, 2, 3, 4]
    assert pictures.chosen(times, [], 4) == [0, 33, 66, 99]
    found = pictures.chosen(times, [[7.0], [7.1], [30.3]], 6)
    assert {14, 61} <= set(found) and len(found) == 6 and found == sorted(found)
    found = pictures.chosen(times, [[t] for t in times[10:60]], 5)
    assert found == [10, 22, 34, 47, 59]                 # more than there is room for: evenly, first and last among them
    assert pictures.chosen([3.0], [[0.0], [9.0]]) == [0] and pictures.chosen(times, [[1.0]], 1) == [2]


def test_a_point_lies_on_the_frame_of_its_time_and_else_on_the_nearest_dashed(monkeypatch):
    drawn, draw_points = [], pictures.draw_points
    monkeypatch.setattr(pictures, "draw_points", lambda image, points, **how: drawn.append((image[0, 0, 0], points, how))
                        or draw_points(image, points, **how))
    film = Film()
    picture, told = pictures.draw_frames(lambda times: film.frames(None, times), [0.0, 1.0, 2.0, 3.0],
                                         [[1.0, "1", 40, 50], [1.7, "2", 80, 20], [99.0, "3", 10, 10]], [[2.0, 1, 41, 51]], tracks=False)
    assert film.asked == [[0.0, 1.0, 2.0, 3.0]] and [shade for shade, *_ in drawn] == [60, 70, 80, 90]
    assert [points for _, points, _ in drawn] == [[], [(40, 50)], [(80, 20)], [(10, 10)]]
    assert [how["dashed"] for *_, how in drawn] == [[], [], [0], [0]] and [how["truth"] for *_, how in drawn] == [[], [], [(41, 51)], []]
    assert [how["numbers"] for *_, how in drawn] == [None, ["1"], ["2  1.7 s"], ["3  99.0 s"]]
    assert told == ["dashed: at a time that was not shown"]
    w = round(160 * 240 / 90)
    assert picture.size == (4 * w + 12, 264)             # four in a row, the times below
    shades = [np.asarray(picture)[200, k * (w + 4) + w - 9] for k in range(4)]
    assert [round(int(s[0])) for s in shades] == [60, 70, 80, 90]
    assert all((np.asarray(picture)[242:, k * (w + 4) : k * (w + 4) + w] < 100).any() for k in range(4))
    x, y, n = middle(picture.crop((w + 4, 0, 2 * w + 4, 240)), pictures.COLOURS[0], 30)
    assert (x / w, y / 240) == pytest.approx((40 / 160, 50 / 90), abs=0.02) and n > 20


def test_tracks_keep_their_colour_and_leave_a_trail_up_to_each_frame(monkeypatch):
    drawn, draw_points = [], pictures.draw_points
    monkeypatch.setattr(pictures, "draw_points", lambda image, points, **how: drawn.append(how) or draw_points(image, points, **how))
    tracks = [[t, i, 50 * t + 10, y] for t in (2.0, 0.0, 1.0) for i, y in ((1, 20), ("2", 70))]
    first, second = pictures.COLOURS[:2]
    grown = [[], [(first, [(10, 20), (60, 20)]), (second, [(10, 70), (60, 70)])],
             [(first, [(10, 20), (60, 20), (110, 20)]), (second, [(10, 70), (60, 70), (110, 70)])]]
    for wanted, kind in ((grown, True), ([[], [], []], False)):
        drawn.clear()
        picture, _ = pictures.draw_frames(lambda times: Film().frames(None, times), [0.0, 1.0, 2.0], tracks, [], tracks=kind)
        assert [how["trails"] for how in drawn] == wanted
    assert [how["numbers"] for how in drawn] == [["1", "2"]] * 3
    _, y, n = middle(picture.crop((0, 0, 200, 120)), first, 30)
    assert n > 20 and y / 240 == pytest.approx(20 / 90, abs=0.02) and middle(picture.crop((0, 0, 200, 120)), second, 30)[2] == 0


def test_a_tracks_path_over_time_is_drawn_in_its_colour(monkeypatch):
    asked, chart = [], pictures.charts.chart
    monkeypatch.setattr(pictures.charts, "chart", lambda series, *more, **how: asked.append((series, how)) or chart(series, *more, **how))
    picture = pictures.draw_tracks([[1.0, "2", 30, 40], [0.0, "2", 10, 20]], [[0.0, 2, 11, 21], [0.0, 3, 5, 6]], 1000)
    assert [series for series, _ in asked] == [{"2": [(0.0, 10), (1.0, 30)], "2 (true)": [(0.0, 11)], "3 (true)": [(0.0, 5)]},
                                               {"2": [(0.0, 20), (1.0, 40)], "2 (true)": [(0.0, 21)], "3 (true)": [(0.0, 6)]}]
    assert asked[0][1]["faint"] == ("2 (true)", "3 (true)") and asked[0][1]["colours"]["2"] == pictures.COLOURS[1]
    assert picture.size == (1000, 400) and middle(picture, pictures.COLOURS[1])[2] > 100
    assert pictures.draw_tracks([], [], 1000) is None


def test_points_lie_on_the_image_they_name_and_others_are_told():
    images = [grey(320, 240), grey(240, 240)]
    picture, told = pictures.draw_images(images, [[1, 1, 80, 60], [2, 1, 120, 200], [5, 1, 9, 9]], [[2, 1, 60, 40]])
    left, right = picture.crop((0, 0, 320, 240)), picture.crop((324, 0, 644, 240))
    assert picture.size == (644, 264) and told == ["also points on image 5, which there is not"]
    assert middle(left, pictures.COLOURS[0], 30)[:2] == pytest.approx((80, 60), abs=1.5)
    assert middle(right, pictures.COLOURS[0], 30)[:2] == pytest.approx((120, 200), abs=1.5)
    assert middle(left.crop((100, 0, 320, 240)), (0, 0, 0))[2] == 0 and middle(right.crop((0, 0, 110, 100)), (0, 0, 0), 60)[2] > 20


def test_a_picture_is_drawn_for_every_kind_in_turn(tmp_path):
    film, photo, pair = record_of(Film()), record_of(Film([grey()]), "photo"), record_of(Film([grey(), grey()]), "pair")
    points = [prediction(id="photo", medium="image", annotation=k, predicted=[[1, 1, 20, 20]]) for k in range(9)]
    others = [prediction(), prediction(type="track", annotation=1, predicted=[[0.0, 1, 9, 9], [1.0, 1, 40, 40]]),
              prediction(id="pair", medium="images", prompt="pointing: cat")]
    asked = [{"id": "photo", "annotation": 9, "type": "caption", "medium": "image", "prompt": "", "text": ""}]
    pictures.draw([*points, *others, *asked], [film, photo, pair], tmp_path, n=5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["film-0-ball.png", "film-1-ball.png", "pair-0-cat.png", "photo-0-ball.png",
                                                          "photo-1-ball.png"]
    track, plain = (Image.open(tmp_path / f"film-{k}-ball.png") for k in (1, 0))
    assert track.height == plain.height + 408            # the path over time below the frames
    pictures.draw([*points, *asked], [photo], tmp_path / "all", n=24)
    assert len(list((tmp_path / "all").iterdir())) == 9


def test_a_large_photograph_makes_a_picture_of_bounded_size(tmp_path):
    record = record_of(Film([grey(3000, 2000)]), "photo")
    pictures.draw([prediction(id="photo", medium="image", predicted=[[1, 1, 1500, 1000]], text="word " * 5000)], [record], tmp_path)
    picture = Image.open(tmp_path / "photo-0-ball.png")
    assert picture.width == 1024 and 682 < picture.height < 760
    assert middle(picture, pictures.COLOURS[0], 30)[:2] == pytest.approx((512, 341), abs=2)


def test_what_cannot_be_drawn_is_named_and_nothing_leaves_the_folder(tmp_path, capsys):
    wild = ["../../up", "/etc/passwd", "a b", "a?b", ".hidden", "x" * 400]
    predictions = [prediction(id=name, medium="image", prompt="pointing: ../" + "y" * 300) for name in [*wild, "cut", "twice"]]
    records = [*(record_of(Film([grey()]), name) for name in [*wild, "twice", "twice"]), record_of(Film(broken=True), "cut")]
    pictures.draw(predictions, records, tmp_path / "in" / "here")
    files = [p.relative_to(tmp_path).as_posix() for p in Path(tmp_path).rglob("*") if p.is_file()]
    assert len(files) == len(wild) and all(name.startswith("in/here/") and name.count("/") == 2 for name in files)
    assert all(not Path(name).name.startswith(".") for name in files)
    said = capsys.readouterr().err.splitlines()
    assert said == ["file:cut: S21 cannot decode; no picture", "twice: 2 records have this id; no picture"]


def test_ids_choose_colours_whatever_a_model_writes():
    assert pictures.colour_of(1) == pictures.colour_of("1") == pictures.colour_of("9") == pictures.COLOURS[0]
    assert pictures.colour_of("ball") in pictures.COLOURS and pictures.colour_of("0") in pictures.COLOURS
    assert pictures.paths([[1.0, "a", 5, 6], [0.0, "a", 3, 4], [0.0, 1, 7, 8]]) == {"a": [(0.0, 3, 4), (1.0, 5, 6)], "1": [(0.0, 7, 8)]}
