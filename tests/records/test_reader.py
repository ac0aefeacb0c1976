"""Tests Records: a file as a sequence, mistakes that stop it, skipped records, and media."""

import pickle
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import DataConfig
from records import media, reader
from records.errors import DataError, Unreadable
from records.reader import Records
from records.visual import read_headers
from tests.records.samples import CAPTION, GOOD, POINT, QA, image, video, write

MEDIA = Path(__file__).parents[1] / "media"
ROW = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


# --------------------------------------------------------------------------------------------------
# mistakes that stop, and records that are skipped


def test_of_a_file_twenty_mistakes_are_told_at_once_and_a_large_one_is_checked_in_part(
        tmp_path, monkeypatch):
    path = write(tmp_path / "r.jsonl", *["{", GOOD] * 30)       # the first line is not JSON
    with pytest.raises(DataError) as error:
        Records(path)
    places = [line.split(": ")[0] for line in str(error.value).split("\n")]
    assert places == [f"{path}:{n}" for n in range(1, 41, 2)]
    write(path, *[GOOD] * 1000, "{}")
    with pytest.raises(DataError, match=r"r\.jsonl:1001: wrong record: "):
        Records(path)
    monkeypatch.setattr(reader, "MAX_CHECKED_BYTES", 1000)
    assert len(Records(path)) == 1001


def test_what_is_left_out_keeps_its_number_and_is_named_when_iterating(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", GOOD, "", {"annotations": []}, GOOD)
    records = Records(path, stop_on_mistakes=False)
    assert len(records) == 3
    assert [record["where"] for record in records] == [f"{path}:1", f"{path}:4"]
    assert [record["id"] for record in records] == ["r.jsonl:1", "r.jsonl:4"]
    assert f"{path}:3: wrong record: " in capsys.readouterr().err
    assert records[-1]["where"] == f"{path}:4"
    with pytest.raises(IndexError):
        records[3]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("none.jsonl", None, "No such file"), ("none.json", None, "No such file"),
    ("r.txt", "", r"this is not a \.jsonl file"), ("r.txt", None, "No such file"),
    ("r.jsonl", "\n\n", "contains no record")])
def test_what_is_no_file_of_records_is_refused(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path / name))}.*{words}"):
        Records(tmp_path / name)


def test_a_file_of_another_format_is_refused_with_the_command_that_converts_it(tmp_path):
    """The keys of a row decide, not words in its texts."""
    (tmp_path / "my rows.json").write_text("[]")
    chats = write(tmp_path / "chats.jsonl", {**ROW, "note": "annotations"}, GOOD)
    table = write(tmp_path / "table.jsonl", {"image": "a.png", "question": "q", "answer": "a"})
    (tmp_path / "labels").mkdir()
    for path in (tmp_path / "my rows.json", chats, table, tmp_path / "labels"):
        out = path.with_suffix(".records.jsonl")
        for given, flags in ((None, []), (tmp_path, ["--media", str(tmp_path)])):
            words = ["python", "-m", "tools.convert", str(path), str(out), *flags]
            with pytest.raises(DataError) as error:
                Records(path, given, stop_on_mistakes=False)
            sentence = f"{path}: this is not a .jsonl file of records; convert it with: "
            assert str(error.value) == sentence + shlex.join(words)
    path = write(tmp_path / "r.jsonl", {"annotations": [{**QA, "answer": '"messages"'}]}, ROW)
    with pytest.raises(DataError, match=r"r\.jsonl:2: wrong record: this line is in another data"):
        Records(path)


# --------------------------------------------------------------------------------------------------
# a file


def test_options_are_added_to_every_record(tmp_path):
    path = write(tmp_path / "r.jsonl", video(QA, {**QA, "style": "own"}, weight=3))
    records = Records(path, style="vqa2", weight=0.5)
    assert records[0]["weight"] == 1.5
    assert [a["style"] for a in records[0]["annotations"]] == ["vqa2", "own"]
    # a style that an annotation cannot have is a mistake, as if it was in the file
    write(path, video(CAPTION))
    with pytest.raises(DataError, match="the caption of a clip needs"):
        Records(path, style="video_clip_caption_start_end")


def test_a_file_can_be_sent_and_a_change_of_it_is_noticed(tmp_path):
    path = write(tmp_path / "r.jsonl", *[{**GOOD, "id": str(i)} for i in range(500)])
    records = Records(path)
    sent = pickle.dumps(records)
    assert len(sent) < 8 * 500 + 1000            # eight bytes per record
    assert [pickle.loads(sent)[i]["id"] for i in (49, 0)] == ["49", "0"]
    assert records.fingerprint != Records(path, style="a").fingerprint
    write(path, {**GOOD, "id": "longer"})
    assert Records(path).fingerprint != records.fingerprint
    with pytest.raises(DataError, match="has changed since it was opened"):
        pickle.loads(sent)[0]
    path.unlink()
    with pytest.raises(DataError, match=r"r\.jsonl: the file cannot be read: No such file"):
        pickle.loads(sent)[0]


# --------------------------------------------------------------------------------------------------
# media


def test_paths_are_absolute_or_start_in_the_folder_of_media(tmp_path):
    """Paths may contain '..' and a colon."""
    (tmp_path / "media").mkdir()
    for name in ("media/frame:001.jpg", "a.png"):
        shutil.copy(MEDIA / "coins.png", tmp_path / name)
    names = ["frame:001.jpg", str(tmp_path / "a.png"), "../a.png", "A" * 400]
    path = write(tmp_path / "r.jsonl", *[image(CAPTION, image=name) for name in names])
    records = Records(path)
    assert [records.image_sizes(records[i]) for i in range(3)] == [[(384, 303)]] * 3
    with pytest.raises(Unreadable, match=r"^missing file: "):
        records.image_sizes(records[3])
    records = Records(path, tmp_path)
    assert records.paths_of(records[0]) == [tmp_path / "frame:001.jpg"]
    with pytest.raises(DataError, match=r"--media .*none: there is no such folder"):
        Records(path, tmp_path / "none")


def test_images_of_a_record_are_measured_and_read_in_order(tmp_path):
    several = {"images": ["coffee.png", {"path": "coins.png"}], "annotations": [CAPTION]}
    path = write(tmp_path / "r.jsonl", several, GOOD, image(CAPTION, image="gone.png"))
    records = Records(path, MEDIA)
    assert records.image_sizes(records[0]) == [(600, 400), (384, 303)]
    assert records.image_sizes(records[1]) == []
    images = records.images(records[0])
    for pixels, name in zip(images, ("coffee", "coins"), strict=True):
        assert np.array_equal(pixels, media.read_image(MEDIA / f"{name}.png"))
    (only,) = records.images(records[0], only=[1])
    assert np.array_equal(only, images[1])
    with pytest.raises(Unreadable, match=r"^missing file: .*gone.png$"):
        records.image_sizes(records[2])
    names = {r"C:\photos\a.png": "this is a path of Windows", "~/a.png": "~ is not replaced here",
             "": "this is a folder"}
    for name, words in names.items():
        with pytest.raises(Unreadable, match=f"^missing file: .*; {words}"):
            media.image_size(MEDIA / name)


def test_a_video_is_probed_once_until_its_file_changes(tmp_path, monkeypatch):
    probed = []
    probe = media.probe
    monkeypatch.setattr(media, "probe", lambda path: (probed.append(path.name), probe(path))[1])
    shutil.copy(MEDIA / "bigbuckbunny.mp4", tmp_path / "a.mp4")
    (tmp_path / "b.mp4").write_bytes(b"no video")
    path = write(tmp_path / "r.jsonl", video(QA), video(QA, video="b.mp4"))
    sizes = []
    for _ in range(2):
        records = Records(path)
        sizes += [records.video_size(records[0]) for _ in range(2)]
    assert sizes == [(1280, 720, pytest.approx(5.28), pytest.approx(0.02))] * 4
    assert probed == ["a.mp4"]
    with pytest.raises(Unreadable, match=r"^damaged video: "):
        records.video_size(records[1])
    (notes,) = tmp_path.glob(".*")
    notes.write_text(notes.read_text().replace("1280", "1290"))  # a disk may change bits
    assert Records(path).video_size(records[0]) == sizes[0]
    notes.write_text(notes.read_text() + '["cut')                # as after a kill
    (tmp_path / "a.mp4").touch()
    assert Records(path).video_size(records[0]) == sizes[0]
    assert probed == ["a.mp4", "b.mp4", "a.mp4", "a.mp4"]


def test_points_in_pixels_are_checked_against_the_file_when_its_header_is_read(tmp_path):
    """They are not checked if the record contains the size of the image that was annotated."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    Image.new("RGB", (10, 90)).save(tmp_path / "b.png")

    def pixels(*points, **more):
        points = [{"x": x, "y": y} for x, y in points]
        return {**POINT, "coords": "pixel", "points": points, **more}

    declared = {"path": "a.png", "width": 400, "height": 300}
    several = {**POINT, "coords": "pixel",
               "points": [{"image": 0, "x": 39, "y": 2}, {"image": 1, "x": 4, "y": 88}]}
    records = Records(write(
        tmp_path / "r.jsonl", image(pixels((39, 31))), image(pixels((39, 30.2))),
        image(pixels((390, 2)), image=declared), image(pixels((390, 2), size=[400, 300])),
        {"images": ["a.png", "b.png"], "annotations": [several]},
        {"images": ["b.png", "a.png"], "annotations": [several]}))
    for i in (1, 2, 3, 4):
        assert read_headers(records[i], DataConfig()).sizes[0] == (40, 30)
    for i in (0, 5):
        with pytest.raises(Unreadable, match=r"^wrong record: annotations\[0\]: point 0 lies"):
            read_headers(records[i], DataConfig())


def test_prepared_frames_appear_from_their_first_second_on_and_the_last_at_the_end():
    folder = media.FrameFolder(["a", "b", "c"], 2.0, 11.2, first=10.5)
    assert folder.times.tolist() == [10.5, 11.0, 11.2]
