"""Records: a file as a sequence, the index that remembers it, and the media of its records."""

import json
import multiprocessing
import os
import pickle
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from records import index, media, reader
from records.reader import DataError, Records, Unreadable
from tests.records.samples import CAPTION, CLIP, GOOD, POINT, QA, image, video, write

TESTS = Path(__file__).parents[1]
MEDIA = TESTS / "media"


def without(record, *keys):
    return {key: value for key, value in record.items() if key not in keys}


# --------------------------------------------------------------------------------------------------
# what is skipped, and what stops


def test_up_to_twenty_mistakes_are_told_at_once(tmp_path):
    path = write(tmp_path / "r.jsonl", *["{}", GOOD] * 30)
    with pytest.raises(DataError) as error:
        Records(path)
    places = [line.split(": ")[0] for line in str(error.value).split("\n")]
    assert places == [f"{path}:{n}" for n in range(1, 41, 2)]


def test_what_is_skipped_keeps_its_number_and_iterating_passes_it_over(tmp_path, capsys):
    bad = image({**POINT, "count": 2})
    reason = "S11 the count is 2, but there are 1 points (annotations[0])"
    path = write(tmp_path / "r.jsonl", GOOD, bad, GOOD, bad, bad)
    records = Records(path)
    assert len(records) == 5
    assert [r["where"] for r in records] == [f"{path}:1", f"{path}:3"]
    with pytest.raises(Unreadable, match=f"^{re.escape(reason)}$"):
        records[3]
    assert records[-3]["where"] == f"{path}:3"
    with pytest.raises(IndexError):
        records[5]
    assert records.found["S11"].count == 3
    assert capsys.readouterr().err == f"{path}:2: {reason}; skipped (3 times in this file)\n"
    with pytest.raises(DataError, match=r"r.jsonl:2: S11 .*\n.*:4: S11"):
        Records(path, strict=True)
    with pytest.raises(DataError, match=r"r.jsonl:1: S11 .* as are all 2 records"):
        Records(write(path, bad, bad))


def test_native_files_are_strict_unless_they_are_a_third_partys(tmp_path):
    wrong = image(CAPTION, image="/a.png")
    path = write(tmp_path / "r.jsonl", GOOD, wrong)
    with pytest.raises(DataError, match=r"r.jsonl:2: E10"):
        Records(path)
    with pytest.raises(Unreadable, match=r"^E10 the path '/a.png' is absolute"):
        Records(path, lenient=True)[1]
    for line in ("{}", "[]", "{", '{"a":1,"a":2}'):              # not even a record
        with pytest.raises(DataError):
            Records(write(path, GOOD, line), lenient=True)


def test_an_id_that_comes_twice_is_told_but_does_no_harm(tmp_path, capsys):
    lines = [{**GOOD, "id": name} for name in ("a", "b", "a", "c", "a")] + [GOOD, GOOD]
    records = Records(write(tmp_path / "r.jsonl", *lines))
    assert len(list(records)) == 7
    printed = capsys.readouterr().err
    assert "r.jsonl:3: E08 another record has the same id before it (2 times" in printed
    assert list(index.repeated(np.array([0, 7, 0, 7, 9, 7], np.uint64))) == [3, 5]


def test_subtitles_come_sorted_and_options_are_added(tmp_path):
    subtitles = [{"start": s, "end": s + 1, "text": str(s)} for s in (3, 1, 2)]
    record = video(QA, {**QA, "style": "own"}, subtitles=subtitles, weight=3)
    path = write(tmp_path / "r.jsonl", record)
    record = Records(path, style="vqa2", weight=0.5)[0]
    assert [line["start"] for line in record["subtitles"]] == [1, 2, 3]
    assert record["weight"] == 1.5
    assert [a["style"] for a in record["annotations"]] == ["vqa2", "own"]
    for wrong in ({"style": "a b"}, {"weight": 0}):
        with pytest.raises(DataError, match=f"the option {next(iter(wrong))} must be"):
            Records(path, **wrong)


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match=str(missing)):
            Records(missing)
    with pytest.raises(DataError, match="--media"):
        Records(MEDIA / "records.jsonl", tmp_path / "none")


def test_the_examples_and_the_real_records_pass_without_a_word(capsys):
    path = TESTS / "conformance/examples.jsonl"
    examples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(examples) == 12
    assert [without(r, "where", "source") for r in Records(path)] == examples
    ids = [r["id"] for r in Records(MEDIA / "records.jsonl")]
    assert ids == ["chelsea", "coffee", "astronaut", "coins", "rocket", "text-only"]
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------------------------
# the index


@pytest.fixture
def indexed(tmp_path, monkeypatch):
    """A file whose index is kept, however small; and the list of the scans of files."""
    monkeypatch.setattr(index, "MIN_INDEXED_BYTES", 0)
    scans = []
    scan = index.scan

    def counted(*args):
        scans.append(args)
        return scan(*args)

    monkeypatch.setattr(index, "scan", counted)
    lines = [{**GOOD, "id": str(i)} for i in range(20)]
    lines += [image({**POINT, "count": 2}), {**GOOD, "id": "3"}]
    return write(tmp_path / "r.jsonl", *lines), scans


def contents(records):
    return len(records), records.found, [without(r, "source") for r in records]


def test_an_index_spares_the_scan_and_changes_nothing(indexed, capsys):
    path, scans = indexed
    first = Records(path)
    printed = capsys.readouterr().err
    again = Records(path)
    assert (path.parent / ".r.jsonl.index.npz").is_file()
    assert len(scans) == 1
    assert contents(first) == contents(again)
    assert set(first.found) == {"S11", "E08"}
    assert capsys.readouterr().err == printed
    assert printed.count("\n") == 2
    assert not list(path.parent.glob("*.part"))


def test_a_kept_index_is_mapped_and_holds_the_fingerprint(indexed, monkeypatch):
    """Processes of one machine share its pages, and none of them reads the file for its digest."""
    path, _ = indexed
    made = Records(path, weight=2)
    monkeypatch.setattr(reader, "digest", None)
    opened = Records(path, weight=2)
    assert isinstance(opened._index.offset, np.memmap)
    assert not opened._index.offset.flags.writeable
    assert opened.fingerprint == made.fingerprint
    monkeypatch.undo()
    assert Records(path).fingerprint != made.fingerprint         # of other options


def test_a_record_is_checked_once_when_its_file_is_indexed(indexed, monkeypatch):
    records = Records(indexed[0])
    monkeypatch.setattr(index, "find", None)
    monkeypatch.setattr(index, "parse_line", None)
    assert len(list(records)) == 21


def test_an_index_is_made_anew_when_file_options_or_rules_change(indexed, monkeypatch):
    path, scans = indexed
    Records(path)
    text = path.read_text()
    status = path.stat()
    path.write_text(text.replace('"text": "x"', '"text": "y"'))  # as long as before, and as old
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Records(path)[0]["annotations"][0]["text"] == "y"
    assert len(scans) == 2
    path.write_text(path.read_text() + json.dumps(GOOD) + "\n")
    assert len(Records(path)) == 23
    assert len(scans) == 3
    Records(path, lenient=True)
    assert len(scans) == 4
    # style and weight decide about no line
    assert Records(path, lenient=True, style="a", weight=2)[0]["weight"] == 2
    assert len(scans) == 4
    monkeypatch.setattr(index, "VERSION", 0)
    Records(path, lenient=True)
    assert len(scans) == 5
    (path.parent / ".r.jsonl.index.npz").write_bytes(b"PK\3\4 no index")
    assert len(Records(path)) == 23
    assert len(scans) == 6


def test_a_folder_that_cannot_be_written_costs_the_time_only(indexed, capsys, monkeypatch):
    path, scans = indexed

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index.os, "replace", refuse)
    assert len(Records(path)) == 22
    assert "the index cannot be written" in capsys.readouterr().err
    assert len(Records(path)) == 22
    assert len(scans) == 2
    assert os.listdir(path.parent) == ["r.jsonl"]


def test_a_file_that_changes_while_it_is_open_is_noticed(indexed):
    path, _ = indexed
    records = Records(path)
    path.write_text(path.read_text().replace('"text": "x"', '"text": "longer"'))
    with pytest.raises(DataError, match="has changed since it was opened"):
        records[0]


def test_a_file_that_changes_between_two_records_is_noticed(indexed):
    path, _ = indexed
    records = Records(path)
    assert records[0]["id"] == "0"               # from here on the file is open
    path.write_text(path.read_text().replace('"text": "x"', '"text": "longer"'))
    with pytest.raises(DataError, match="has changed since it was opened"):
        records[1]


def test_an_index_that_does_not_fit_is_said_to_be_deleted(indexed):
    path, _ = indexed
    records = Records(path)
    saved = index.index_path(path)
    arrays = dict(np.load(saved))
    np.savez(saved, **arrays | {"offset": arrays["offset"] + np.uint64(1)})
    with pytest.raises(DataError, match=r"r.jsonl:1: the index does not fit .*; delete .*npz"):
        Records(path)[0]
    assert records[0]["id"] == "0"


@pytest.mark.parametrize("saved", [True, False])
def test_records_that_were_pickled_read_the_same(indexed, monkeypatch, saved):
    path, scans = indexed
    monkeypatch.setattr(index, "MIN_INDEXED_BYTES", 0 if saved else 1 << 30)
    records = Records(path)
    records[0]                       # holds the file open
    sent = pickle.dumps(records)
    assert len(sent) < 1000 or not saved                         # the index itself is not sent
    assert contents(pickle.loads(sent)) == contents(records)
    assert len(scans) == 1


def ids_of(records, numbers):
    return [records[i]["id"] for i in numbers]


def test_another_process_reads_the_same(tmp_path):
    lines = [{**GOOD, "id": str(i)} for i in range(50)]
    records = Records(write(tmp_path / "r.jsonl", *lines))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(ids_of, records, [49, 0, 7]).result() == ["49", "0", "7"]


def test_the_fingerprint_is_of_the_bytes_and_the_options(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    other = write(tmp_path / "b.jsonl", GOOD)
    one = Records(path).fingerprint
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert one == Records(other).fingerprint
    assert one != Records(path, style="a").fingerprint
    write(path, {**GOOD, "id": "a"})
    assert Records(path).fingerprint != one


def test_records_of_one_image_become_one_where_the_first_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "MIN_INDEXED_BYTES", 0)

    def caption(text, **more):
        return {**image({"type": "caption", "text": text}), **more}

    path = write(
        tmp_path / "r.jsonl",
        caption("a", id="first", weight=2), GOOD, caption("b", image="b.png"), caption("c"), GOOD,
        {"images": ["a.png"], "annotations": [{**CAPTION, "text": "d", "weight": 3}],
         "weight": 0.5},
        image({**POINT, "count": 9}),
        video(QA, video=CLIP), video(QA), video(CAPTION, video=CLIP))
    for _ in range(2):               # by the scan, then from the index
        records = Records(path, group_by_media=True)
        assert len(records) == 7
        assert len(list(records)) == 6
        lines = [int(records.where(i).split(":")[1]) for i in range(7)]
        assert lines == [1, 2, 3, 5, 7, 8, 9]
        assert records[0]["id"] == "first"
        assert "weight" not in records[0]
        captions = [(a["text"], a.get("weight")) for a in records[0]["annotations"]]
        assert captions == [("a", 2), ("c", None), ("d", 1.5)]
        assert [a["type"] for a in records[5]["annotations"]] == ["qa", "caption"]
        assert len(records[6]["annotations"]) == 1


# --------------------------------------------------------------------------------------------------
# media


def test_the_folder_of_media_is_beside_the_file_unless_named(tmp_path):
    path = write(tmp_path / "r.jsonl", image(CAPTION, image="sub/a.png"))
    records = Records(path)
    assert records.paths_of(records[0]) == [tmp_path / "sub/a.png"]
    (tmp_path / "media").mkdir()
    assert Records(path).media == tmp_path / "media"
    assert Records(path, tmp_path).media == tmp_path


def test_images_of_a_record_are_measured_and_read_in_order(tmp_path):
    several = {"images": ["coffee.png", {"path": "coins.png"}], "annotations": [CAPTION]}
    path = write(tmp_path / "r.jsonl", several, GOOD, image(CAPTION, image="gone.png"))
    records = Records(path, MEDIA)
    assert records.image_sizes(records[0]) == [(600, 400), (384, 303)]
    assert records.image_sizes(records[1]) == records.images(records[1]) == []
    images = records.images(records[0])
    for pixels, name in zip(images, ("coffee", "coins"), strict=True):
        assert np.array_equal(pixels, media.read_image(MEDIA / f"{name}.png"))
    (only,) = records.images(records[0], only=[1])
    assert np.array_equal(only, images[1])
    with pytest.raises(Unreadable, match="S20"):
        records.image_sizes(records[2])


def test_a_video_is_known_by_its_file_or_its_frames_and_its_clip(tmp_path):
    frames = {"frames": ["a.png", "b.png"], "fps": 2}
    path = write(tmp_path / "r.jsonl", video(QA), video(QA, video=CLIP), video(QA, video=frames))
    records = Records(path, tmp_path)
    assert records.video_of(records[0]) == (tmp_path / "a.mp4", 0, np.inf)
    assert records.video_of(records[1]) == (tmp_path / "a.mp4", 2, 8)
    with pytest.raises(Unreadable, match="S24 there is no frame"):
        records.video_of(records[2])
    for name in ("a.png", "b.png"):
        shutil.copy(MEDIA / "coins.png", tmp_path / name)
    folder, start, end = records.video_of(records[2])
    assert folder.paths == [tmp_path / "a.png", tmp_path / "b.png"]
    assert (folder.fps, start, end) == (2, 0, np.inf)
    assert records.video_size(records[2]) == (384, 303, 1.0, 0.25)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media/own").mkdir()
    shutil.copy(MEDIA / "coins.png", tmp_path / "secret.png")
    shutil.copy(MEDIA / "coins.png", tmp_path / "media/own/a.png")
    (tmp_path / "media/out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "media/in.png").symlink_to(tmp_path / "media/own/a.png")
    (tmp_path / "media/up").symlink_to(tmp_path)
    names = ("in.png", "out.png", "up/secret.png")
    path = write(tmp_path / "r.jsonl", *(image(CAPTION, image=name) for name in names))
    records = Records(path)
    assert records.image_sizes(records[0]) == [(384, 303)]
    for i in (1, 2):
        with pytest.raises(Unreadable, match=r"S20 .* leaves the media folder"):
            records.images(records[i])


def test_points_in_pixels_are_checked_against_the_file_when_its_header_is_read(tmp_path):
    """... unless the record declares the size of what was annotated."""
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
    assert len(list(records)) == 6
    assert [records.image_sizes(records[i])[0] for i in (1, 2, 3, 4)] == [(40, 30)] * 4
    with pytest.raises(Unreadable, match=r"^E62 point y=31 lies outside 0\.\.30 "):
        records.image_sizes(records[0])
    with pytest.raises(Unreadable, match=r"^E62 point x=39 lies outside 0\.\.10 "):
        records.image_sizes(records[5])
