"""Annotations in COCO's format: a record per image, and what is skipped."""

import json

import pytest

from records.reader import Records
from tests.tools.convert.command import run

IMAGES = [{"id": 3, "file_name": "val/1.jpg", "width": 640, "height": 480},
          {"id": 1, "file_name": "val/2.jpg", "width": 64, "height": 48}]
CATEGORIES = [{"id": 1, "name": "cup"}, {"id": 2, "name": "person"}]


def coco(*boxes, images=IMAGES):
    """boxes: (image, category, bbox) and, of a crowd, True."""
    names = ("image_id", "category_id", "bbox", "iscrowd")
    annotations = [dict(zip(names, box, strict=False)) for box in boxes]
    return {"images": images, "categories": CATEGORIES, "annotations": annotations}


@pytest.fixture
def convert(tmp_path):
    """A file in COCO's format -> records, the counts of the last line, stderr."""
    def command(content):
        (tmp_path / "instances.json").write_text(json.dumps(content))
        out = tmp_path / "out.jsonl"
        status, counts, err = run(tmp_path / "instances.json", out, "--overwrite")
        records = [json.loads(line) for line in out.open()] if status == 0 else []
        assert status or len(Records(out)) == len(records)   # training takes them
        return records, counts, err.replace(f"{tmp_path}/", "")

    return command


def box(label, *corners):
    return {"type": "box", "label": label, "coords": "pixel", "form": "xyxy",
            "boxes": [{"box": list(corner)} for corner in corners]}


def test_every_image_becomes_a_record_with_an_annotation_per_category(convert):
    """... in the order of the file; the border of the image cuts boxes off."""
    records, counts, err = convert(coco(
        (3, 1, [10.5, 20, 100, 50]), (1, 2, [1, 2, 3, 4]), (3, 2, [1, 2, 3, 4], 0),
        (3, 1, [630, 400, 20, 90]), (3, 1, [5, 5, 0, 9])))
    assert records == [
        {"id": "coco-1", "image": {"path": "val/1.jpg", "width": 640, "height": 480},
         "annotations": [box("cup", (10.5, 20, 110.5, 70), (630, 400, 640, 480)),
                         box("person", (1, 2, 4, 6))]},
        {"id": "coco-2", "image": {"path": "val/2.jpg", "width": 64, "height": 48},
         "annotations": [box("person", (1, 2, 4, 6))]}]
    assert (counts, err) == ({"rows": 3, "records": 2, "skipped": {}}, "")


def test_a_category_without_all_of_its_places_is_skipped_and_counted(convert):
    images = [*IMAGES, {**IMAGES[0], "id": 8, "file_name": "../2.jpg"},
              {"id": 9, "file_name": "b.jpg", "width": 0, "height": 4}]
    records, counts, err = convert(coco(
        (3, 1, [1, 2, 3, 4]), (3, 2, [1, 2, 3, 4], 1), (3, 2, [5, 6, 7, 8]),
        (1, 1, [700, 1, 2, 2]), (1, 2, None), (8, 1, [1, 2, 3, 4]), (9, 1, [1, 2, 3, 4]),
        images=images))
    assert [len(record["annotations"]) for record in records] == [1]
    assert counts["skipped"] == {
        "a crowd in one box": 1, "no box with an area": 1, "no size": 1,
        "path that leaves the media folder": 1, "wrong boxes": 1}
    assert counts["rows"] == 6
    assert err.splitlines()[0] == (
        "tools.boxes: instances.json image 3: a crowd in one box: the boxes of 'person'; skipped")


def test_an_image_with_many_boxes_becomes_several_records_of_sixty_at_most(convert):
    sizes = [(3, 1, 30), (3, 2, 31), (1, 1, 60), (1, 2, 61)]
    records, counts, _ = convert(coco(*(
        (image, category, [k, k, 2, 2]) for image, category, n in sizes for k in range(n // 2)
        for _ in range(2)), *((3, 2, [1, 1, 2, 2]), (1, 2, [1, 1, 2, 2]))))
    assert [(record["id"], len(record["annotations"][0]["boxes"])) for record in records] == [
        ("coco-1", 30), ("coco-1.1", 31), ("coco-2", 60)]
    assert counts["skipped"] == {"more than 60 points": 1}


@pytest.mark.parametrize("change", [{"images": [{}]}, {"annotations": 3}, {"categories": []}])
def test_a_file_of_another_shape_is_refused_in_a_sentence(convert, change):
    records, counts, err = convert(coco((3, 1, [1, 2, 3, 4])) | change)
    assert (records, counts) == ([], None)
    assert err.startswith("tools.boxes: instances.json: its images, annotations and categories")
    assert err.count("\n") == 1
