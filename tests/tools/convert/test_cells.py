"""Cells that are empty, damaged or written in another way. Each changed the training silently, or
ended the command."""

import json

import pytest

from tests.tools.convert.command import run
from tests.tools.convert.test_formats import boxed, caption, image, qa
from tests.tools.convert.test_layouts import (
    AB,
    MOT,
    MOT_LABELS,
    QUESTION,
    absent,
    coco_images,
    convert,
    options,
)


@pytest.mark.parametrize(("row", "records"), [
    # an empty option before another one would shift the index
    (QUESTION | {"a0": "x", "a1": "", "a2": "y", "a3": "z", "answer_idx": 2}, []),
    (QUESTION | {"a0": "x", "a1": "y", "a2": "", "answer_idx": 1}, [image(options("q", 1, *"xy"))]),
    # the numbers of a table that was saved by pandas
    (AB | {"options": [1.0, 2.0], "answer": 2.0}, [image(options("q", 1, "1", "2"))]),
    (QUESTION | {"answer": 3.0}, [image(qa(("q", "3")))]),
    # empty entries of a list, and columns of sound without sound
    ({"image": "a.png", "captions": ["A cup.", ""]}, [image(caption("A cup."))]),
    (QUESTION | {"answer": "a", "audio": "", "audios": []}, [image(qa("qa"))]),
])
def test_a_row_with_empty_cells_or_numbers(tmp_path, row, records):
    assert convert(tmp_path, {"a.jsonl": [row]})[0] == records


@pytest.mark.parametrize(("changed", "labels"), [
    ({"f/gt/gt.txt": "1,1,1,1,2,2,0.9,2,1\n", **MOT_LABELS}, {"dog"}),
    ({"f/gt/gt.txt": "1,1,1,1,2,2,1,-1,1\n", **MOT_LABELS}, {"cat"}),
    ({"f/gt/gt.txt": "1,1,1,1,2,2,1,1,0,5\n2,1,1,1,2,2,1,1,1,5\n"}, {"pedestrian"}),
])
def test_classes_and_used_lines_of_mot(tmp_path, changed, labels):
    (record,), _, _ = convert(tmp_path, MOT | changed)
    assert {a["label"] for a in record["annotations"]} == labels
    hidden = [p for a in record["annotations"] for p in a["points"] if p.get("occluded")]
    assert len(hidden) == ("0,5" in changed["f/gt/gt.txt"])


def test_two_spellings_of_a_path_are_one_image(tmp_path):
    head = "image,label,x1,y1,x2,y2,width,height\n"
    lines = "./a.png,cup,1,2,3,4,64,48\na.png,dog,1,2,3,4,64,48\nb.png,cat,1,2,3,4,64,48\n"
    records, _, _ = convert(tmp_path, {"a.csv": head + lines}, "--negatives", "5")
    found = set().union(*(labels for path, labels in absent(records).items() if "a.png" in path))
    assert found == {"cat"}


def test_half_a_surrogate_pair_and_a_name_of_300_letters_cost_one_entry(tmp_path):
    row = {"question": "q", "answers": [{"answer": "a"}] * 3, "image": "a.jpg"}
    rows = [row, row | {"image": "\ud83d.jpg"}]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    _, counts, _ = run(tmp_path / "r.json", tmp_path / "r.jsonl", "--as", "vqa2")
    assert (counts["rows"], counts["records"]) == (2, 1)
    files = coco_images(boxed(1, 1), boxed(2, 1), boxed(2, 2), names=("cup", "d\ud83d"),
                        file_name="x" * 300 + ".jpg", width=None, height=None)
    records, _, _ = convert(tmp_path, files, "--negatives", "1")
    assert [record["image"]["path"] for record in records] == ["2.jpg", "3.jpg"]
