"""--exif-unturned converts coordinates in stored images to coordinates in displayed images."""

import json

import numpy as np
import pytest
from PIL import Image

from records.media import EXIF_ORIENTATION, read_image
from records.reader import Records
from records.visual import read_headers
from tests.records.samples import CAPTION, image, video, write
from tests.records.visual_records import CONFIG
from tests.tools.convert.command import read, run
from text.styles import parts_of

POINT = {"type": "point", "label": "l"}
BOX = {"type": "box", "label": "l"}
DECLARED = {"path": "a.tif", "width": 40, "height": 30}
# a stored image of 40 x 30 pixels has a white box (20, 6, 28, 12) with the centre (24, 9)
ROWS = [
    image({**POINT, "coords": "pixel", "points": [{"x": 24, "y": 9}]}, image="a.tif"),
    image({**POINT, "coords": "percent", "points": [{"x": 60, "y": 30}]}, image=DECLARED),
    image({**BOX, "coords": "pixel", "form": "xywh", "boxes": [{"box": [20, 6, 8, 6]}]}, CAPTION,
          image=DECLARED),
    image({**BOX, "coords": "pixel", "size": [40, 30], "form": "cxcywh",
           "boxes": [{"box": [24, 9, 8, 6]}]}, image="a.tif"),
    {"images": [DECLARED, "b.tif"], "annotations": [
        {**POINT, "coords": "pixel", "size": [400, 300], "points": [
            {"x": 240, "y": 90, "image": 1}, {"x": 240, "y": 90, "image": 0}]}]},
    image({"type": "qa", "turns": [{"question": "?", "answer": "a"}, {
        **POINT, "coords": "unit", "points": [{"x": 0.6, "y": 0.3}]}]}, image="a.tif"),
    {"image": "a.tif", "conversations": [
        {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "<ref>l</ref><box>(500,200),(700,400)</box>"}]},
]
COCO = {"images": [{"id": 1, "file_name": "a.tif", "width": 40, "height": 30}],
        "categories": [{"id": 1, "name": "l"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [20, 6, 8, 6]}]}


def save(path, orientation):
    pixels = np.zeros((30, 40), np.uint8)
    pixels[6:12, 20:28] = 255
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    options = {"compression": "tiff_lzw"} if path.suffix == ".tif" else {}
    Image.fromarray(pixels).save(path, exif=exif, **options)


def white_box(path):
    """-> left, top, right and bottom of the white box in the displayed image, as fractions."""
    pixels = read_image(path)[..., 0]
    rows, columns = np.nonzero(pixels)
    h, w = pixels.shape
    return [columns.min() / w, rows.min() / h, (columns.max() + 1) / w, (rows.max() + 1) / h]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_points_and_boxes_are_where_the_turned_image_shows_them(tmp_path, orientation):
    for name, turn in (("a.tif", orientation), ("b.tif", 1)):
        save(tmp_path / name, turn)
    write(tmp_path / "rows.jsonl", *ROWS)
    (tmp_path / "coco.json").write_text(json.dumps(COCO))
    records = []
    for name in ("rows.jsonl", "coco.json"):
        out = tmp_path / f"{name}.out.jsonl"
        assert run(tmp_path / name, out, "--exif-unturned")[0] == 0
        records += Records(out)
    assert len(records) == len(ROWS) + 1
    for record in records:
        sizes = read_headers(record, CONFIG).sizes
        (points,) = [part["points"] for _, part in parts_of(record) if "points" in part]
        for point in points:
            k = point.get("image", 0)
            w, h = point["scale"] or sizes[k]
            left, top, right, bottom = white_box(record["source"].paths_of(record)[k])
            centre = [(left + right) / 2, (top + bottom) / 2]
            assert [point["x"] / w, point["y"] / h] == pytest.approx(centre)
            if "box" in point:
                expected = [left * w, top * h, right * w, bottom * h]
                assert point["box"] == pytest.approx(expected)
        declared = [(image["width"], image["height"]) for image in record["images"]
                    if "width" in image]
        assert declared in ([], sizes[:1])


def test_an_entry_without_a_size_gets_the_size_of_the_displayed_image(tmp_path):
    save(tmp_path / "a.png", 6)
    (tmp_path / "coco.json").write_text(json.dumps(COCO | {"images": [
        {"id": 1, "file_name": "a.png"}]}))
    run(tmp_path / "coco.json", tmp_path / "out.jsonl")
    (record,) = read(tmp_path / "out.jsonl")
    assert record["image"] == {"path": "a.png", "width": 30, "height": 40}


@pytest.mark.parametrize("orientation", [1, 9])
def test_a_record_without_a_turned_image_stays_as_it_is(tmp_path, orientation):
    save(tmp_path / "a.png", orientation)
    rows = [image({**BOX, "coords": "pixel", "form": "xywh", "boxes": [{"box": [20, 6, 8, 6]}]}),
            video(CAPTION)]
    write(tmp_path / "rows.jsonl", *rows)
    run(tmp_path / "rows.jsonl", tmp_path / "out.jsonl", "--exif-unturned")
    assert read(tmp_path / "out.jsonl") == rows


def test_a_size_that_is_already_turned_is_refused(tmp_path):
    save(tmp_path / "a.png", 6)
    with Image.open(tmp_path / "a.png") as picture:
        width, height = picture.size
    rows = [image(CAPTION, image={"path": "a.png", "width": w, "height": h})
            for w, h in ((width, height), (height, width))]
    write(tmp_path / "rows.jsonl", *rows)
    _, counts, err = run(tmp_path / "rows.jsonl", tmp_path / "out.jsonl", "--exif-unturned")
    assert counts == {"rows": 2, "records": 1, "skipped": {"wrong record": 1}}
    assert "rows.jsonl:2: wrong record: an image: its width and height are already turned" in err
