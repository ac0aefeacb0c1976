"""The layouts of tools.convert: a minimal file and its record for each layout, every column of
every layout, and the rules of Label Studio, choices, masks, MOT and negatives."""

import copy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from records.errors import DataError, Unreadable
from tests.records.samples import CAPTION
from tests.tools.convert.command import read, run
from tests.tools.convert.test_formats import (
    BOX,
    CORNERS,
    CUP,
    box,
    boxed,
    caption,
    coco,
    image,
    labelme,
    point,
    qa,
    shape,
    sized,
    voc,
    write,
    yolo,
)
from tests.tools.prepare import cases, video_cases
from tools.convert import choices
from tools.convert.entries import rows_of_media
from tools.convert.flags import parse
from tools.convert.layout import Job
from tools.convert.layouts import PEOPLE
from tools.convert.masks import place_of_mask
from tools.convert.media import Media
from tools.convert.report import Report
from tools.convert.sets import SETS

CASES = cases.CASES | video_cases.CASES


def region(kind, number=1, result="rectanglelabels", labels=("cup",), **value):
    value = {**value, result: list(labels)} if labels else value
    return {"id": f"r{number}", "type": kind, "from_name": "label", "to_name": "image",
            "original_width": 64, "original_height": 48, "image_rotation": 0, "value": value}


def task(*results, data=None, **fields):
    """A task of Label Studio, as its JSON export has it."""
    data = data or {"image": "/data/upload/1/ab-1.jpg"}
    return {"id": 5, "data": data, "annotations": [
        {"id": 9, "completed_by": 1, "was_cancelled": False, "ground_truth": False,
         "result": list(results)}], "drafts": [], "predictions": [], "total_annotations": 1,
        **fields}


def about(kind, to="image", name="the_colour", **value):
    return {"id": "x", "type": kind, "from_name": name, "to_name": to, "value": value}


RECTANGLE = region("rectanglelabels", x=25, y=50, width=50, height=25, rotation=0)
MOT = {
    "f/seqinfo.ini": "[Sequence]\nname=MOT17-02\nimDir=img1\nframeRate=2\nseqLength=2\nimWidth=64\n"
                     "imHeight=48\nimExt=.jpg\n",
    "f/gt/gt.txt": "1,1,10,10,4,6,1,1,1\n2,1,12,10,4,6,1,1,0.5\n2,7,60,20,10,10,1,3,1\n"
                   "2,8,1,1,2,2,0,1,1\n1,9,1,1,9,9,1,12,1\n",
    "f/img1/000001.jpg": "", "f/img1/000002.jpg": ""}
MOT_LABELS = {"f/gt/labels.txt": "cat\ndog\n"}
CLIP = {"frames": ["img1/000001.jpg", "img1/000002.jpg"], "fps": 2, "width": 64, "height": 48}


def track(label, *points, mode="per_frame", **fields):
    return {"type": "track", "label": label, "coords": "pixel", "size": [64, 48], "mode": mode,
            "fps": 2, "times": [0, 0.5], **fields,
            "points": [dict(zip(("t", "id", "x", "y"), entry, strict=True)) for entry in points]}


def options(question, answer_idx, *texts):
    return {"type": "qa", "turns": [{"question": question, "options": list(texts),
                                     "answer_idx": answer_idx}]}


AB = {"image": "a.png", "question": "q", "options": ["cup", "bowl"], "answer": "B"}
MINIMAL = {  # {layout: its smallest file, the record}
    "coco": (coco(boxed(3, 1)), CUP),
    "label-studio": ({"a.json": [task(RECTANGLE)]},
                     image(box("cup", (0.25, 0.5, 0.75, 0.75), coords="unit"), path="ab-1.jpg")),
    "records": ({"a.jsonl": [image(CAPTION)]}, image(CAPTION)),
    "chats": ({"a.jsonl": [{"image": "a.png", "conversations": [
        {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]}, image(qa("qa"))),
    "choices": ({"a.jsonl": [AB]}, image(options("q", 1, "cup", "bowl"))),
    "questions": ({"a.jsonl": [{"image": "a.png", "question": "q", "answer": 3}]},
                  image(qa("q3"))),
    "captions": ({"a.jsonl": [{"image": "a.png", "captions": ["A.", "B."]}]},
                 image(caption("A."), caption("B."))),
    "labelme": (labelme(shape("rectangle", "cup", [1, 2], [3, 4]), path="1.jpg"),
                image(box("cup", (1, 2, 3, 4)), path=sized("1.jpg"))),
    "voc": (voc(("cup", 2, 3, 30, 40)),
            image(box("cup", (1, 2, 30, 40)), path=sized("JPEGImages/1.jpg"))),
    "csv-boxes": (
        {"a.csv": "image,label,x1,y1,x2,y2,width,height\na.png,cup,1,2,3,4,64,48\n"},
        image(box("cup", (1, 2, 3, 4)), path=sized("a.png"))),
    "mot": (MOT, {"video": CLIP, "annotations": [
        track("pedestrian", (0, 1, 12, 13), (0.5, 1, 14, 13)), track("car", (0.5, 7, 62, 25))]}),
    "yolo": (yolo("cup", "0 .5 .5 .2 .2"),
             image(box("cup", (0.4, 0.4, 0.6, 0.6), coords="unit"), path="images/1.jpg")),
    "yolo-polygons": (yolo("cup", "0 .4 .4 .6 .4 .6 .6"),
                      image(box("cup", (0.4, 0.4, 0.6, 0.6), coords="unit"), path="images/1.jpg")),
}


def convert(folder, files, *flags):
    """-> records, the counts of skipped entries, and stderr."""
    path = write(folder, files)
    out = (path if path.is_dir() else folder) / "out.jsonl"
    _, counts, err = run(path, out, "--overwrite", *flags)
    records = read(out) if out.exists() else []
    return records, counts["skipped"], err


def test_every_layout_has_a_minimal_file():
    assert MINIMAL.keys() == PEOPLE.keys()
    assert CASES.keys() >= SETS.keys()  # miniatures of published sets


@pytest.mark.parametrize("name", PEOPLE)
def test_the_minimal_file_of_a_layout_becomes_this_record(tmp_path, name):
    files, record = MINIMAL[name]
    flags = ["--as", name] if name == "yolo-polygons" else []
    assert convert(tmp_path, files, *flags)[:2] == ([record], {})


# columns of rows that can have any of them: a value for each. A row of a video has no image.
TURN = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
VALUES = {
    "conversations": TURN, "messages": TURN, "image": "b.png", "images": ["b.png", "c.png"],
    "video": "v.mp4", "videos": ["v.mp4"], "file_name": "b.png", "id": 7, "system": "s",
    "style": "vqa2", "weight": 2, "objects": {"ref": ["cup"]}, "chosen": "c", "rejected": "r",
    "rejected_response": "r", "rejected_messages": TURN[1:], "label": True, "kto_tag": True,
    "desirable": True, "history": [["o", "p"]], "input": "i", "answers": ["x", "y"], "hint": "h",
    "answer_idx": 0, "answer_index": 0, "correct_answer": "cup", "correct_choice_idx": 0,
    "answerKey": "A", "options": ["x", "y"], "choices": ["x", "y"], "question": "other",
    "query": "other", "instruction": "other", "prompt": "other", "answer": "other",
    "response": "other", "output": "other", "completion": "other", "text": "other",
    "caption": "other", "captions": ["other"], "completions": [{"result": []}],
    **dict.fromkeys(choices.FIELDS[len(choices.OPTIONS) + len(choices.RIGHT):], "x"),
    "candidates": ["x", "y"]}
WITH = {  # columns that need other columns
    "start": {"video": "v.mp4", "end": 3}, "end": {"video": "v.mp4", "start": 1},
    "fps": {"video": [["f.png"]]}, "subtitles": {"video": "v.mp4"},
    "resized_width": {"resized_height": 48}, "resized_height": {"resized_width": 64}}
OTHER_VALUES = {"start": 1, "end": 3, "fps": 2, "subtitles": "s", "resized_width": 32,
                "resized_height": 24}


LONG = {"video_duration": 99}  # seconds; too long for some sets


def outcome(layout, row, job):
    """What a layout makes of a row: its records, and what it prints about it."""
    report = Report(job.args)
    job = Job(job.args, report, job.media, path=job.path)
    try:
        found = [(head, [make() if callable(make) else make for make in annotations])
                 for head, annotations in layout.read(copy.deepcopy(row), job)]
    except (Unreadable, DataError, LookupError, ValueError, AttributeError, TypeError) as error:
        found = repr(error)
    return repr(found), repr(report.not_read)


def first_row(folder, name, files):
    """-> the first row of files, after regroup, and the job that reads it."""
    path = write(folder, files)
    args = parse([str(path), str(folder / "o.jsonl"), "--as", name, "--overwrite"], "a\n\nb\n\nc")
    job = Job(args, Report(args), Media(path if path.is_dir() else folder))
    return next(row for _, _, row in rows_of_media(args, job)), job


@pytest.mark.parametrize("name", [name for name in PEOPLE if PEOPLE[name].columns != "*"])
def test_every_column_of_a_layout_changes_the_record_or_stops_the_entry(tmp_path, name):
    base, job = first_row(tmp_path, name, MINIMAL[name][0])
    layout = PEOPLE[name]
    for column in layout.names:
        row = {**base, **WITH.get(column, {})}
        if {"video", "videos", "images", "file_name"} & {column, *WITH.get(column, {})}:
            row.pop("image", None)
        full = {**row, column: row[column] if column in base else
                OTHER_VALUES.get(column, VALUES.get(column))}
        if column.startswith("resized"):
            text = '{"bbox_2d": [1, 2, 3, 4], "label": "cup"}'
            full |= {"answer": text} if name == "questions" else {
                "conversations": [base["conversations"][0], {"from": "gpt", "value": text}]}
        without = {key: value for key, value in full.items() if key != column}
        assert outcome(layout, full, job) != outcome(layout, without, job), column
    for column in layout.unused:
        assert outcome(layout, {**base, column: "x"}, job) == outcome(layout, base, job), column
    named = outcome(layout, {**base, "colour": "x"}, job)
    assert named != outcome(layout, base, job)
    assert "colour" in named[1]


@pytest.mark.extras("pyarrow")
@pytest.mark.parametrize("name", SETS)
def test_every_column_of_a_published_set_is_used(tmp_path, name):
    case = CASES[name]
    exclude = ["--exclude", tmp_path] if name.startswith("pixmo-points") else []
    words = [tmp_path, tmp_path / "o.jsonl", "--as", name, *case.arguments, *exclude]
    args = parse([*map(str, words)], "a\n\nb\n\nc")
    job = Job(args, Report(args), Media(tmp_path), path=Path("a_oe_b.json"))
    layout = SETS[name]
    rows = [{**row, **more} for row in case.rows
            for more in ({}, {"image_sha256": "ab" * 32}, {"clip_start_time": None, **LONG})]
    unused = {column for column in layout.names if not any(
        outcome(layout, row, job) != outcome(
            layout, {key: value for key, value in row.items() if key != column}, job)
        for row in rows)}
    assert not unused
    for column in layout.unused:
        assert outcome(layout, {**case.rows[0], column: 1}, job)[0] == outcome(
            layout, case.rows[0], job)[0]


# --------------------------------------------------------------------------------------------------
# Label Studio


def studio(folder, *results, **fields):
    return convert(folder, {"a.json": [task(*results, **fields)]})


def test_a_turned_rectangle_of_label_studio_becomes_the_box_around_it(tmp_path):
    """A turn by 90 degrees around the corner at the top left: 32 x 12 pixels become 12 x 32."""
    turned = {**RECTANGLE, "value": {**RECTANGLE["value"], "y": 10, "rotation": 90}}
    (record,), _, _ = studio(tmp_path, turned)
    left = 0.25 - 12 / 64
    assert record["annotations"][0]["boxes"][0]["box"] == pytest.approx(
        [left, 0.1, 0.25, 0.1 + 32 / 48], abs=1e-6)


def test_regions_of_label_studio_have_a_shape_labels_and_other_results(tmp_path):
    """The results of one id are one region. A text about a region is not read, but named."""
    place = {"x": 25, "y": 50, "width": 50, "height": 25, "rotation": 0}
    results = [
        region("rectangle", labels=(), **place), region("labels", result="labels", **place),
        region("textarea", labels=(), text=["STOP"], **place),
        {"type": "relation", "from_id": "r1"},
        region("polygonlabels", 2, "polygonlabels", ["dog", "pet"], points=[[0, 0], [50, 10]]),
        region("keypointlabels", 3, "keypointlabels", x=10, y=20, width=0.2),
        region("ellipselabels", 4, "ellipselabels", ["moon"], x=10, y=20, radiusX=2, radiusY=3)]
    (record,), skipped, err = studio(tmp_path, *results)
    assert record["annotations"] == [
        point("cup", (0.1, 0.2), (0.5, 0.625), coords="unit"),
        box("dog", (0, 0, 0.5, 0.1), coords="unit"), box("pet", (0, 0, 0.5, 0.1), coords="unit")]
    assert skipped == {"a shape": 1}
    assert "label 'moon': 'ellipse' is not supported; use rectangles, polygons or key points" in err
    assert "'textarea of a region' is not used" in err


def test_choices_and_texts_of_label_studio_are_answers_and_captions(tmp_path):
    """The question is the text to which the result belongs, or the name of the result."""
    data = {"image": "s3://b/x/1.jpg?d=x%2F1.jpg", "q1": "How many?"}
    results = [
        RECTANGLE, about("choices", choices=["red", "blue"]), about("textarea", text=["A.", "B."]),
        about("textarea", to="q1", text=["Two."]), about("number", name="age", number=4)]
    records, skipped, _ = studio(tmp_path, *results, data=data)
    assert records == [image(
        {"type": "qa", "question": "the colour", "answer": "red, blue"}, caption("A."),
        caption("B."),
        {"type": "qa", "question": "How many?", "answer": "Two."},
        {"type": "qa", "question": "age", "answer": "4"},
        *MINIMAL["label-studio"][1]["annotations"], path="1.jpg")]
    assert skipped == {}
    for medium, path in (("image", "1.jpg"), ("video", "1.mp4")):
        records, _, _ = studio(tmp_path, about("choices", choices=["red"]), data={medium: path})
        assert records == [{medium: path, "annotations": [
            {"type": "qa", "question": "the colour", "answer": "red"}]}]


@pytest.mark.parametrize(("fields", "kind"), [
    ({"annotations": [{"result": []}]}, "no annotation"), ({"annotations": []}, "no annotation"),
    ({"annotations": [{"result": [], "was_cancelled": True}]}, "no annotation"),
    ({"annotations": [{"result": [RECTANGLE]}] * 2}, "several annotations"),
    ({"data": {"image": "a.jpg", "mask": "b.png"}}, "not one medium"),
    ({"data": {"text": "a"}}, "not one medium"),
    ({"annotations": [{"result": [about("taxonomy", taxonomy=[])]}]}, "wrong record"),
    ({"annotations": [{"result": [{**RECTANGLE, "image_rotation": 90}]}]}, "a shape"),
    ({"annotations": [{"result": [region("rectanglelabels", x="left")]}]}, "a shape"),
    ({"data": {"video": "a.mp4"}}, "wrong record"),
])
def test_tasks_of_label_studio_that_are_not_clear_are_skipped(tmp_path, fields, kind):
    assert studio(tmp_path, RECTANGLE, **fields)[:2] == ([], {kind: 1})


def test_of_several_annotations_the_ground_truth_is_used_and_the_file_is_found(tmp_path):
    """Label Studio renames and moves the files, so the end of a path counts."""
    for name in ("upload/1/ab-1.jpg", "1/ab-1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    both = [{"result": []}, {"result": [RECTANGLE], "ground_truth": True}]
    (record,), _, _ = studio(tmp_path, annotations=both)
    assert record["image"] == "upload/1/ab-1.jpg"
    assert len(record["annotations"]) == 1


def test_two_files_of_one_name_are_never_the_same_image(tmp_path):
    (tmp_path / "1.jpg").touch()
    tasks = [task(RECTANGLE, data={"image": f"/data/local-files/?d={folder}/1.jpg"})
             for folder in "aab"]
    records, skipped, err = convert(tmp_path, {"a.json": tasks})
    assert (len(records), skipped) == (2, {"several files with the name of the row": 1})
    assert "1.jpg may be a/1.jpg or b/1.jpg" in err


# --------------------------------------------------------------------------------------------------
# choices, answers and times


CHOICES = [  # fields of an entry, the index of the right option or a part of the message
    *(({"answer": right}, 1) for right in ("B", "(B)", "B.", 1, "1", 1.0, "bowl", ["bowl"])),
    ({"answer": ["A", "bowl"]}, [0, 1]), ({"answer": "bowl", "answer_idx": 1}, 1),
    ({"answer": "bowl", "answer_idx": "A"}, "answer and answer_idx do not agree"),
    ({"answer": "both"}, "'answer' is 'both', which is not the letter, the index"),
    ({"answer": True}, "which is not the letter"), ({"answer": None}, "none of the fields answer"),
    ({"options": ["1", "2"], "answer": 1}, "which is not the letter"),
    ({"options": ["5", "4", "3"], "answer": 3}, 2),
    ({"options": ["2", "1"], "answer_idx": 1, "answer": "B"}, 1),
    ({"options": ["1", "2"], "answer": "1"}, 0),
    *(({"options": ["A. cup", "(B) bowl"], "answer": right}, 1) for right in ("B", "B. bowl")),
    ({"answer": "B) bowl"}, 1), ({"answer": "A. bowl"}, "which is not the letter"),
    ({"options": {"x": "cup", "y": "bowl"}, "answer": "y"}, 1),
    ({"options": {"label": ["A", "B"], "text": ["cup", "bowl"]}, "answerKey": "B"}, 1),
    ({"options": {"label": ["1", "2"], "text": ["cup", "bowl"]}, "answer": "1"}, 0),
    ({"options": "['cup', 'bowl']"}, 1), ({"options": "cup or bowl"}, "this is not a list"),
    ({"options": ["cup"], "answer": 0}, "it has only one option"),
    ({"options": [str(k) for k in range(27)]}, "it has more than 26 options"),
    ({"options": ["<image2>", "bowl"]}, "an option: <image2> is not supported here"),
    ({"question": ["q"]}, "is neither a text nor a list of parts"),
    ({"options": [["cup"], "b"]}, "its options must be texts"),
    *(({"options": None, **columns}, 1) for columns in (
        {"A": "cup", "B": "bowl", "C": ""}, {"a0": "cup", "a1": "bowl"},
        {"choice_a": "cup", "choice_b": "bowl"}, {"option_a": "cup", "option_b": "bowl"})),
    ({"options": None, "candidates": ["cup", "bowl"], "answer": "bowl"}, 1),
    ({"A": "cup"}, "it has several lists of options")]


@pytest.mark.parametrize(("fields", "expected"), CHOICES)
def test_the_right_option_is_found_or_the_entry_is_skipped(tmp_path, fields, expected):
    records, _, err = convert(tmp_path, {"a.jsonl": [AB | fields, AB]})
    given = fields.get("options")
    is_numbers = isinstance(given, list) and given[-1].isdecimal()
    texts = given if is_numbers else ["cup", "bowl"]
    if isinstance(expected, str):
        assert records == [image(options("q", 1, "cup", "bowl"))]
        assert expected in err
    else:
        assert records[0] == image(options("q", expected, *texts))


def test_a_hint_comes_before_the_question_and_options_of_a_table_may_be_columns(tmp_path):
    text = "image,hint,question,A,B,C,answer\na.png,Look.,q,cup,bowl,,B\n"
    assert convert(tmp_path, {"a.csv": text})[0] == [image(options("Look.\nq", 1, "cup", "bowl"))]


def answers(*texts):
    return {"type": "qa", "turns": [{"question": "q", "answers": list(texts)}]}


QUESTION = {"image": "a.png", "question": "q"}


@pytest.mark.parametrize(("fields", "annotation"), [
    *(({key: cell}, answers("x", "2")) for key, cell in (
        ("answers", ["x", 2]), ("answer", ["x", 2]), ("answers", {"text": ["x", 2]}),
        ("answers", [{"answer": "x", "answer_id": 1}, {"answer": 2}]))),
    ({"answer": 2.5}, qa(("q", "2.5"))),
    ({"answer": "x", "answers": ["x"]}, None), ({"answers": [["x"]]}, None),
    ({"answers": ["x", "<__dj__eoc>"]}, None),
    ({"answer": True}, None),
])
def test_answers_may_be_several_or_numbers(tmp_path, fields, annotation):
    records, _, _ = convert(tmp_path, {"a.jsonl": [QUESTION | fields]})
    assert records == ([image(annotation)] if annotation else [])


@pytest.mark.parametrize(("fields", "video"), [
    ({"start_time": 1, "end_time": 2.5}, {"path": "v.mp4", "start": 1, "end": 2.5}),
    ({"begin": "0:01", "end": "1:02,5"}, {"path": "v.mp4", "start": 1, "end": 62.5}),
    ({"start": "1", "end": "1:00:02"}, {"path": "v.mp4", "start": 1, "end": 3602}),
    ({"start_time": 1}, None), ({"start_time": 1, "end_time": "late"}, None),
    ({"start_time": 1, "end_time": 2, "start": 1, "end": 2}, None),
])
def test_two_times_of_a_video_select_a_part_of_it(tmp_path, fields, video):
    records, _, _ = convert(tmp_path, {"a.jsonl": [{"video": "v.mp4", "text": "A.", **fields}]})
    assert records == ([{"video": video, "annotations": [caption("A.")]}] if video else [])


# --------------------------------------------------------------------------------------------------
# masks of COCO


def runs(mask):
    """A mask -> its run lengths down the columns, with zeros first."""
    pixels = np.concatenate([[False], np.asarray(mask, bool).T.ravel()])
    ends = [*np.flatnonzero(np.diff(pixels)), pixels.size - 1]
    return {"size": list(np.shape(mask)), "counts": np.diff([0, *ends]).tolist()}


def test_a_mask_becomes_its_box_or_a_point_inside_it():
    full = np.zeros((6, 8), bool)
    full[1:4, 2:7] = True
    assert place_of_mask(runs(full), [8, 6]) == [2, 1, 7, 4]
    ring = full.copy()
    ring[2, 3:6] = False
    assert place_of_mask(runs(ring), None) == [4.5, 3.5]
    # what pycocotools writes for the mask of test_scoring.py, whose centre has no object
    compressed = {"size": [9, 7], "counts": ";63LN123`0KE"}
    assert place_of_mask(compressed, None) == [2.5, 5.5]


@pytest.mark.parametrize("rle", [
    {"size": [2, 2], "counts": [1, 2]}, {"size": [2, 2], "counts": [5, -1]}, {"size": [2, 2]},
    {"size": [2, 2], "counts": "\u00e9"}, {"size": [2, 2], "counts": ["a"]}, {"counts": [4]},
    {"size": [10**6, 10**6], "counts": [10**12]}, {"size": [2, 2], "counts": [4]},
    {"size": [2, 2], "counts": [1.5, 2.5]}, {"size": [4, 1], "counts": [0, 4]}])
def test_a_mask_that_cannot_be_used_is_an_unreadable(rle):
    assert isinstance(place_of_mask(rle, [2, 2]), Unreadable)


def test_masks_give_boxes_and_one_annotation_for_each_label(tmp_path):
    full = np.zeros((48, 64), bool)
    full[2:6, 1:4] = True
    ring = np.zeros((48, 64), bool)
    ring[10:15, 10:15] = True
    ring[12, 12] = False
    masks = [{"image_id": 1, "category_id": k, "segmentation": runs(mask)}
             for k, mask in ((1, full), (2, full), (1, ring))]
    (record,), _, _ = convert(tmp_path, coco_images(*masks))
    assert record["annotations"] == [
        point("cup", (12.5, 13.5), (2.5, 4)), box("person", CORNERS)]


def test_coco_without_sizes_takes_them_from_the_images(tmp_path):
    Image.new("RGB", (20, 10)).save(tmp_path / "1.png")
    images = [{"id": k, "file_name": f"{k}.png"} for k in (1, 2)]
    records, skipped, err = convert(
        tmp_path, coco(boxed(1, 1, [1, 2, 30, 4]), boxed(2, 1), images=images))
    assert records == [image(box("cup", (1, 2, 20, 6)), path={
        "path": "1.png", "width": 20, "height": 10})]
    assert skipped == {"no size": 1}
    assert f"the width and height of the image, and {tmp_path}/2.png does not exist" in err


# --------------------------------------------------------------------------------------------------
# MOT


def test_a_class_of_mot_with_many_points_becomes_a_track_for_each_object(tmp_path):
    lines = "".join(f"{frame},{k},10,10,4,6,1,1,1\n" for frame in (1, 2) for k in range(300))
    (record,), _, _ = convert(tmp_path, {**MOT, "f/gt/gt.txt": lines})
    assert len(record["annotations"]) == 1  # of 600 points
    lines += "1,300,10,10,4,6,1,1,1\n"
    (record,), skipped, _ = convert(tmp_path, {**MOT, "f/gt/gt.txt": lines})
    assert (len(record["annotations"]), skipped) == (300, {"track without a visible point": 1})
    start = {"t": 0, "id": 7, "x": 12, "y": 13}
    assert record["annotations"][7] == track(
        "pedestrian", (0.5, 7, 12, 13), mode="from_point", query=start)


def test_names_frame_rates_hidden_objects_and_borders_of_mot(tmp_path):
    """25 frames per second give one frame per second. A box is cut at the border of the image."""
    info = MOT["f/seqinfo.ini"].replace("=2\n", "=25\n").replace("MOT17-02", "dance")
    frames = {f"f/img1/{k:08}.jpg": "" for k in range(1, 26)}
    files = {"f/seqinfo.ini": info, "f/gt/labels.txt": "dancer\nball\n", **frames,
             "f/gt/gt.txt": "1,1,-10,10,20,6,1,1,0\n2,1,9,9,9,9,1,1,1\n1,2,70,1,4,4,1,1,1\n"
                            "1,3,10,10,4,6,1,2,1\n"}
    (record,), skipped, _ = convert(tmp_path, files)
    assert record["video"]["fps"] == 1
    assert record["video"]["frames"] == ["img1/00000001.jpg"]
    (ball,) = record["annotations"]
    assert (ball["label"], ball["points"]) == ("ball", [{"t": 0, "id": 3, "x": 12, "y": 13}])
    assert skipped == {"track without a visible point": 1}


@pytest.mark.parametrize(("changed", "words"), [
    ({"f/img1/000002.jpg": None}, "img1 has no frame [2]"),
    ({"f/seqinfo.ini": MOT["f/seqinfo.ini"].replace("MOT17", "x")}, "write the names of the"),
    ({"f/seqinfo.ini": MOT["f/seqinfo.ini"].replace("Rate=2", "Rate=0.2")}, "frameRate is 0.2"),
    ({"f/seqinfo.ini": MOT["f/seqinfo.ini"].replace("Rate=2", "Rate=2.5")}, "frameRate is 2.5"),
    ({"f/gt/gt.txt": "1,1,1,1,2,2,1,0,1\n", **MOT_LABELS}, "no line for the class 0 of gt.txt"),
    ({"f/gt/gt.txt": "1,1,1,1,2,2,1,3,1\n", **MOT_LABELS}, "no line for the class 3 of gt.txt"),
    ({"f/seqinfo.ini": "[A]"}, "seqinfo.ini cannot be used"),
    ({"f/seqinfo.ini": "[Sequence]\na=%\n"}, "seqinfo.ini cannot be used: 'frameRate' is missing"),
    ({"f/gt/gt.txt": "1,1,x"}, "each line must have 8 to 10 numbers"),
    ({"f/gt/gt.txt": "1,1,x,2,3,4,1,1"}, "cannot be read as a record"),
    ({"f/gt/gt.txt": "1,1,1,1,2,2,0,1,1"}, "no line of gt.txt is used")])
def test_a_sequence_of_mot_that_cannot_be_used_is_named(tmp_path, changed, words):
    files = {name: text for name, text in {**MOT, **changed}.items() if text is not None}
    records, _, err = convert(tmp_path, files)
    assert not records
    assert words in err


# --------------------------------------------------------------------------------------------------
# negatives, and photographs without annotations


def coco_images(*annotations, names=("cup", "person", "dog"), **of_first):
    images = [{"id": k, "file_name": f"{k}.jpg", "width": 64, "height": 48} for k in (1, 2, 3)]
    images[0] |= of_first
    return coco(*annotations, images=images, categories=[
        {"id": k, "name": name} for k, name in enumerate(names, 1)])


def absent(records):
    """-> {image: labels of annotations without a point}."""
    return {record["image"]["path"] if isinstance(record["image"], dict) else record["image"]:
            {a["label"] for a in record["annotations"] if a.get("points") == []}
            for record in records}


TWO = (boxed(1, 1), boxed(2, 2))


def test_an_image_gets_labels_that_only_other_images_show(tmp_path):
    """The category dog has no object in the file, so nobody knows whether it was annotated.
    A caption is no annotation that can lack a label."""
    files = coco_images(*TWO, {"image_id": 1, "caption": "A."})
    records, skipped, err = convert(tmp_path, files, "--negatives", "5")
    assert absent(records) == {"1.jpg": {"person"}, "2.jpg": {"cup"}, "3.jpg": {"cup", "person"}}
    negative = {"type": "point", "label": "cup", "coords": "unit", "points": []}
    assert negative in records[-1]["annotations"]
    assert skipped == {}
    assert "--negatives 5: added absent labels to 3 images; with this flag you say that" in err


def test_without_the_flag_images_without_objects_are_counted(tmp_path):
    records, skipped, err = convert(tmp_path, coco_images(*TWO))
    assert (len(records), skipped) == (2, {"no annotation": 1})
    assert "image 3: no annotation: this image has no object; it can train that an object is" in err


def test_at_most_n_labels_are_drawn_by_a_hash_of_image_and_label(tmp_path):
    names = [f"label {k}" for k in range(40)]
    one_each = [boxed(1, k) for k in range(1, 41)]
    first = absent(convert(tmp_path, coco_images(*one_each, names=names), "--negatives", "3")[0])
    again = absent(convert(tmp_path, coco_images(*one_each[::-1], names=names),
                           "--negatives", "3")[0])
    assert first == again
    assert [len(labels) for labels in first.values()] == [0, 3, 3]
    assert first["2.jpg"] != first["3.jpg"]


@pytest.mark.parametrize("skipped", [
    {"category_id": 2, "bbox": BOX, "iscrowd": 1}, {"category_id": 2}, {"category_id": 9},
    {"category_id": 2, "bbox": [1, 2]}, {"category_id": 2, "bbox": BOX, "keypoints": [1, 1, 2]}])
def test_a_label_of_which_an_object_was_skipped_is_never_absent(tmp_path, skipped):
    records, _, _ = convert(
        tmp_path, coco_images(*TWO, {"image_id": 1, **skipped}), "--negatives", "5")
    assert absent(records)["1.jpg"] == set()


def test_labels_that_differ_only_in_case_and_files_of_one_image_are_compared(tmp_path):
    files = {}
    for k, (label, path) in enumerate((("cup", "1.jpg"), ("dog", "1.jpg"), ("Cup", "2.jpg"))):
        one = labelme(shape("rectangle", label, [1, 2], [3, 4]), path=path)
        files[f"f/{k}.json"] = one["f/a.json"]
    records, _, err = convert(tmp_path, files, "--negatives", "5")
    assert [{a["label"] for a in record["annotations"] if a.get("points") == []}
            for record in records] == [set(), set(), {"dog"}]
    assert "with this flag you say that every object of these labels is annotated" in err


def test_lvis_says_itself_which_labels_are_absent(tmp_path):
    """Images without the field get none, and labels that are not exhaustive are left out."""
    files = coco_images(*TWO, neg_category_ids=[2, 3], not_exhaustive_category_ids=[3])
    records, _, err = convert(tmp_path, files, "--negatives", "5")
    assert absent(records) == {"1.jpg": {"person"}, "2.jpg": set()}
    assert "added absent labels to 1 image\n" in err


def test_labels_of_another_source_are_never_absent(tmp_path):
    names = [write(tmp_path / name, coco(boxed(3, k))) for name, k in (("a", 1), ("b", 2))]
    status, _, _ = run(*names, tmp_path / "out.jsonl", "--negatives", "5")
    assert status == 0
    assert '"points": []' not in (tmp_path / "out.jsonl").read_text()


def test_empty_files_of_voc_yolo_and_label_studio_and_tables_are_images_without_objects(tmp_path):
    """A task of Label Studio that nobody has annotated is none."""
    empty = voc()["f/Annotations/1.xml"].replace("1.jpg", "2.jpg")
    table = "image,label,x1,y1,x2,y2,width,height\n1.jpg,cup,1,2,3,4,9,9\n2.jpg,,,,,,,\n"
    for k, (more, name) in enumerate((
            ({"f/Annotations/2.xml": empty, **voc(("cup", 2, 3, 30, 40))}, "2.jpg"),
            ({**yolo("cup", "0 .5 .5 .2 .2"), "f/labels/2.txt": "",
              "f/images/2.jpg": ""}, "images/2.jpg"),
            ({"a.json": [task(RECTANGLE, about("textarea", text="A.")),
                         task(data={"image": "2.jpg"}),
                         task(data={"image": "3.jpg"}) | {"annotations": []}]}, "2.jpg"),
            ({"a.csv": table}, "2.jpg"))):
        records, _, _ = convert(tmp_path / str(k), more, "--negatives", "1")
        assert {path: labels for path, labels in absent(records).items() if labels} == {
            name: {"cup"}}


@pytest.mark.parametrize(("name", "start"), [("photos", "photos/"), ("media", "")])
def test_a_folder_of_photographs_becomes_a_table_that_can_be_filled_in(tmp_path, name, start):
    """Paths are relative to the folder media/ beside the table, or else to the table's folder."""
    write(tmp_path, {
        f"{name}/{path}": "" for path in ("b/c.MP4", "a.jpg", "d.heic", "notes.txt")})
    folder = tmp_path / name
    table = tmp_path / "captions.csv"
    words = folder, table, "--template"
    status, found, err = run(*words)
    assert (status, found) == (0, {"files": 2})
    assert "1 file such as " in err
    assert run(*words, "--overwrite")[0] == 0
    assert table.read_text() == f"file_name,caption\n{start}a.jpg,\n{start}b/c.MP4,\n"
    filled = table.read_text().replace("a.jpg,", "a.jpg,A cat.")
    records, skipped, _ = convert(tmp_path, {table.name: filled})
    assert records == [image(caption("A cat."), path=f"{start}a.jpg")]
    assert skipped == {"wrong record": 1}
    assert run(write(tmp_path, {"empty/f/x.txt": ""}), tmp_path / "o.csv", "--template")[0] == 1
