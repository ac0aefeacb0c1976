"""Compares the records of miniatures of published sets with records that are written by hand."""

import json

import pytest

from records.reader import Records
from tests.test_layout import ROOT
from tests.tools.prepare import cases, video_cases
from tests.tools.prepare.cases import RED, U, V, W, image_file, sha, xy
from tests.tools.prepare.command import prepare, write_parquet
from tests.tools.prepare.video_cases import TIMED_ROWS, track_row
from tools.convert.flags import WITH_TEST_IMAGES
from tools.convert.sets import SETS

pytestmark = pytest.mark.extras("pyarrow")

CASES = cases.CASES | video_cases.CASES


def exclude(name, folder, *urls):
    """-> the flag for a test set with these images, if the set needs one."""
    lines = [json.dumps({"image_url": url, "label": " "}) for url in [*urls, "http://x.org/test"]]
    (folder / "eval.jsonl").write_text("\n".join(lines))
    return ["--exclude", folder / "eval.jsonl"] if name in WITH_TEST_IMAGES else []


def prepare_rows(name, folder, rows, *flags):
    source = write_parquet(folder / "p.parquet", rows)
    return prepare(name, source, folder / "out", *flags)


@pytest.mark.parametrize("name", SETS)
def test_the_miniature_becomes_these_records(name, tmp_path):
    case = CASES[name]
    out = tmp_path / "out"
    folder = tmp_path / "in"
    folder.mkdir()
    if case.is_json:
        (folder / "train_oe_qa_processed.json").write_text(json.dumps(case.rows))
    else:
        write_parquet(folder / "train-00000-of-00001.parquet", case.rows)
    records, counts = prepare(name, folder, out, *case.arguments, *exclude(name, tmp_path))
    n = len(case.records)
    assert [record["id"] for record in records] == [f"{name}-{k}" for k in range(1, n + 1)]
    without_ids = [{k: v for k, v in record.items() if k != "id"} for record in records]
    assert without_ids == case.records
    assert counts["skipped"] == case.skipped
    trained_on = list(Records(out / "records.jsonl"))    # training can read all of them
    assert [record["id"] for record in trained_on] == [record["id"] for record in records]
    lines = [line.split("\t") for line in (out / "records.urls.txt").read_text().splitlines()]
    assert all(path == sha(url) for url, path in lines)
    images = [image for record in records
              for image in [record.get("image", {}), *record.get("images", [])]]
    assert {image["url"] for image in images if "url" in image} == {url for url, _ in lines}
    for path in (out / "media").glob("*"):
        assert sha(path.read_bytes()) == path.name


def test_an_image_with_many_points_becomes_several_records_of_sixty_at_most(tmp_path):
    rows = [{"image_url": U, "points": xy(*[(i, k) for i in range(n)]), "label": f"l{k}"}
            for k, n in enumerate([30, 30, 1, 0, 59, 60, 61, 2])]
    flags = exclude("pixmo-points", tmp_path)
    records, counts = prepare_rows("pixmo-points", tmp_path, rows, *flags)
    n_points = [[len(a["points"]) for a in record["annotations"]] for record in records]
    assert n_points == [[30, 30], [1, 0, 59], [60], [2]]
    assert [record["id"] for record in records] == [
        "pixmo-points-1", "pixmo-points-1.1", "pixmo-points-1.2", "pixmo-points-1.3"]
    assert counts["skipped"] == {"more than 60 points": 1}
    assert (tmp_path / "out/records.urls.txt").read_text().count("\n") == 1


def test_fetched_images_are_found_without_extension_and_give_pixels_their_size(tmp_path, capsys):
    fetched = tmp_path / "fetched"
    (fetched / "deep").mkdir(parents=True)
    (fetched / f"deep/{sha(U)}.jpg").write_bytes(image_file("red", "jpeg", (640, 480)))
    (fetched / sha(V)).write_bytes(b"<html>gone</html>")
    (fetched / f"{sha(W)}.part").write_bytes(RED[:20])  # the download was interrupted
    row = CASES["pixmo-count"].rows[0]
    outside = row | {"points": {"x": [700, 1], "y": [1, 1]}}
    rows = [row, outside, row | {"image_url": V}, row | {"image_url": W}]
    records, counts = prepare_rows("pixmo-count", tmp_path, rows, "--media", fetched)
    paths = [record["image"]["path"] for record in records]
    assert paths == [f"deep/{sha(U)}.jpg", sha(V), sha(W)]
    sizes = [[a.get("size") for a in record["annotations"]] for record in records]
    assert sizes == [[[640, 480]], [None], [None]]
    assert counts["skipped"] == {"wrong record": 1}
    assert (tmp_path / "out/records.urls.txt").read_text().count("\n") == 3
    assert "1 of 3 images and videos do not exist" in capsys.readouterr().err
    assert not (tmp_path / "out/media").exists()


def test_images_of_clocks_are_found_by_the_id_of_their_row(tmp_path, capsys):
    faces = tmp_path / "faces"
    (faces / "deep/face").mkdir(parents=True)
    (faces / "deep/face/003_08:15:30.8_name.png").touch()
    rows = CASES["pixmo-clocks"].rows
    records, _ = prepare_rows("pixmo-clocks", tmp_path, rows, "--media", faces)
    paths = [record["image"] for record in records]
    assert paths == ["deep/face/003_08:15:30.8_name.png", "face/004"]
    assert "1 of 2 images and videos do not exist" in capsys.readouterr().err


FILES = """kw/abc/any name.webm, a/v_act.mkv, a/ytb_you.mp4, d/flat.MOV, d/flat.txt,
           g/sora2-2fps/x_2fps.mp4, g/veo/x_2fps.mp4, kw/abc/any name.json, kw/own/own.mp4,
           g/bft/p3.mp4, g/sav/p3.mp4, g/p3.mp4, long.mp4"""
CAPTIONED = {"merged_caption": "c", "annotation_score": 5}
CLIP = track_row("ducks", "track") | {"video": "long", "clip": "p3"}


@pytest.mark.parametrize(("name", "row", "found"), [
    ("molmo2-cap", CAPTIONED, {
        "abc": "kw/abc/any name.webm", "act": "a/v_act.mkv", "you": "a/ytb_you.mp4",
        "flat": "d/flat.MOV", "own": "kw/own/own.mp4",
        "none": "none.mp4"}),
    ("track-instruction", CLIP, {
        "sav/p3": "g/sav/p3.mp4", "bft/p3": "g/bft/p3.mp4", "mose/p3": "mose/p3.mp4"}),
    ("molmo2-videopoint", TIMED_ROWS[1], {
        "sora2/x": "g/sora2-2fps/x_2fps.mp4", "veo/x": "g/veo/x_2fps.mp4",
        "kling/x": "kling/x_2fps.mp4"}),
])
def test_videos_are_found_by_their_id_wherever_they_lie(tmp_path, name, row, found, capsys):
    videos = tmp_path / "videos"
    for path in FILES.split(","):
        (videos / path.strip()).parent.mkdir(parents=True, exist_ok=True)
        (videos / path.strip()).touch()
    rows = [row | {"video_id": i, "video_dataset": i.split("/")[0]} for i in found]
    records, _ = prepare_rows(name, tmp_path, rows, "--videos", videos)
    assert [record["video"]["path"] for record in records] == list(found.values())
    assert f": 1 of {len(found)} images and videos do not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "row", "files"), [
    ("molmo2-cap", CAPTIONED | {"video_id": "x"}, ["a/x.mp4", "b/x/y.mkv"]),
    ("pixmo-clocks", {"example_id": "x", "text": "1:00"}, ["a/x.png", "b/x.jpg"]),
    ("pixmo-cap", {"image_url": U, "caption": "A boat."}, [f"a/{sha(U)}.png", f"b/{sha(U)}.jpg"]),
])
def test_no_guess_is_made_between_files_of_one_name(name, row, files, tmp_path, capsys):
    for file in files:
        (tmp_path / "media" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "media" / file).touch()
    records, counts = prepare_rows(name, tmp_path, [row], "--media", tmp_path / "media")
    assert not records
    assert counts["skipped"] == {"several files with the name of the row": 1}
    said = f"' can mean {' or '.join(files)}; keep one file for each name"
    assert said in capsys.readouterr().err


def test_of_a_folder_the_files_of_one_split_are_read(tmp_path):
    for name in ("a/train", "a/validation", "b/train", "b/validation"):
        path = tmp_path / "set" / f"{name}-00000-of-00001.parquet"
        write_parquet(path, CASES["cosyn-400k"].rows)
    flags = "--split", "train", "--type", "document"
    records, _ = prepare("cosyn-400k", tmp_path / "set", tmp_path / "out", *flags)
    styles = [a["style"] for record in records for a in record["annotations"]]
    assert styles == ["cosyn_document"] * 4
    assert len(list((tmp_path / "out/media").iterdir())) == 1


def test_images_of_another_set_can_be_held_out_and_points_chosen_by_their_number(tmp_path):
    case = "pixmo-points", tmp_path, CASES["pixmo-points"].rows
    records, counts = prepare_rows(*case, *exclude("pixmo-points", tmp_path, U))
    assert [record["image"]["url"] for record in records] == [V]
    assert counts["skipped"]["excluded"] == 6
    flags = [*exclude("pixmo-points", tmp_path), "--counts", 1, 1]
    records, _ = prepare_rows(*case, *flags)
    assert [[a["label"] for a in record["annotations"]] for record in records] == [["Cat"]]


def test_the_table_of_columns_is_that_of_the_code():
    page = (ROOT / "docs/columns.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    named = {name: set(read.split()) for names, _, read, *_ in rows
             for name in names.removeprefix("| ").split(", ")}
    assert named == {name: {word for word in layout.columns.split() if word[0] != "-"}
                     for name, layout in SETS.items()}
    for names, official, read, reason in rows:
        read = read.replace("?", "")
        assert ({*official.split()} == {*read.split()}) or reason != "same |", names
