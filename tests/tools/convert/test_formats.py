"""Files in other formats: a table of files, their records, and the skipped entries. Also formats
that are not supported, and flags that choose, add, hold out and draw."""

import json
import shlex

import pytest
from PIL import Image

from records.reader import Records
from tests.test_readme import CI, ROOT
from tests.tools.convert.command import run
from tools import check

IMAGES = [{"id": 3, "file_name": "val/1.jpg", "width": 640, "height": 480},
          {"id": 1, "file_name": "../2.jpg", "width": 64, "height": 48}]
CATEGORIES = [{"id": 1, "name": "cup"}, {"id": 2, "name": "person"}]
LVIS = {"id": 3, "width": 64, "height": 48, "not_exhaustive_category_ids": [2],
        "coco_url": "http://images.cocodataset.org/val2017/003.jpg"}
FIRST = {"path": "val/1.jpg", "width": 640, "height": 480}
SECOND = {"path": "../2.jpg", "width": 64, "height": 48}


def coco(*annotations, images=(), categories=CATEGORIES):
    """annotations: dicts, or (image, category, bbox). images: by default the images of these."""
    names = ("image_id", "category_id", "bbox")
    found = [a if isinstance(a, dict) else dict(zip(names, a, strict=True)) for a in annotations]
    images = images or [i for i in IMAGES if i["id"] in [a["image_id"] for a in found]]
    return {"a.json": {"images": images, "categories": categories, "annotations": found}}


def shape(kind, label, *points, **fields):
    return {"label": label, "shape_type": kind, "points": points, **fields}


def labelme(*shapes, path="..\\img\\1.jpg", **fields):
    content = {"version": "5", "imageData": None, "imageWidth": 64, "imageHeight": 48, **fields}
    return {"f/a.json": {"imagePath": path, "shapes": shapes, **content}}


def yolo(classes, *lines, name="data.yaml"):
    return {f"f/{name}": classes, "f/labels/1.txt": "\n".join(lines), "f/images/1.jpg": ""}


def box(label, *corners, coords="pixel"):
    return {"type": "box", "label": label, "coords": coords, "form": "xyxy",
            "boxes": [{"box": list(corner)} for corner in corners]}


def caption(text):
    return {"type": "caption", "text": text}


def qa(*pairs):
    return {"type": "qa", "turns": [{"question": q, "answer": a} for q, a in pairs]}


def said(role, text):
    return [{"role": role, "content": text}]


def image(*annotations, path="a.png"):
    return {"image": path, "annotations": list(annotations)}


YAML = "path: ..\nnames:  # of classes\n{}\nnc: 2\n"
EYES = [image(box("eye", (0.2, 0.3, 0.4, 0.5), coords="unit"),
              box("big cup", (0.1, 0.1, 0.5, 0.6), coords="unit"), path="images/1.jpg")]
LINES = ("0 0.3 0.4 0.2 0.2", "", "1 0.1 0.2 0.5 0.1 0.3 0.6")
LABELME = [image(box("cup", (1, 2, 30, 40), (40, 5, 50, 9)),
                 path={**SECOND, "path": "../img/1.jpg"})]
PAIR = [{"annotations": [{"type": "text", "prompt": "q", "text": text} for text in ("a", "b")]}]
# {name of a file: content}, the records, {reason: number of skipped entries}
TABLE = [
    # COCO, Roboflow, LVIS
    (coco((3, 1, [10.5, 20, 100, 50]), (1, 2, [1, 2, 3, 4]), (3, 2, [1, 2, 3, 4]),
          (3, 1, [630, 400, 20, 90])),
     [image(box("cup", (10.5, 20, 110.5, 70), (630, 400, 640, 480)), box("person", (1, 2, 4, 6)),
            path=FIRST), image(box("person", (1, 2, 4, 6)), path=SECOND)], {}),
    (coco({"image_id": 3, "category_id": 1, "segmentation": [[5, 9, 8, 2], [1, 3, 2, 4]]}),
     [image(box("cup", (1, 2, 8, 9)), path=FIRST)], {}),
    (coco((3, 1, [1, 2, 3, 4]), {"image_id": 3, "category_id": 1}, (3, 2, [1, 2, 3, 4])),
     [image(box("person", (1, 2, 4, 6)), path=FIRST)], {"no box": 1}),
    (coco((3, 9, [1, 2, 3, 4]), (3, 2, [1, 2, 3, 4])),
     [image(box("person", (1, 2, 4, 6)), path=FIRST)], {"no label": 1}),
    (coco((3, 1, [1, 2, 3, 4]), (4, 1, [1, 2, 3, 4]), (5, 1, [1, 2, 3, 4]), images=[
        IMAGES[0], {"id": 4, "file_name": "b.jpg"}]),
     [image(box("cup", (1, 2, 4, 6)), path=FIRST)], {"no size": 1, "wrong record": 1}),
    (coco((3, 1, [700, 1, 2, 2]), (3, 2, [1, 2, 3, 4]), (1, 1, [1, 2]), (1, 2, [1, 2, 3, 4])),
     [image(box("person", (1, 2, 4, 6)), path=path) for path in (FIRST, SECOND)],
     {"a box without an area": 1, "wrong numbers": 1}),
    (coco(*({"image_id": 3, "category_id": 1, "segmentation": [numbers]}
            for numbers in ([], [1, 2, 3], ["a", 1])), (3, 2, [1, 2, 3, 4])),
     [image(box("person", (1, 2, 4, 6)), path=FIRST)], {"wrong numbers": 1}),
    (coco((3, 1, [1, 2, 3, 0]), (3, 1, [1, 2, 3, 4]), images=IMAGES), [],
     {"a box without an area": 1, "no annotation": 1}),
    (coco((3, 1, [1, 2, "3", 4]), (3, 2, [1, 2, 3, 4])),
     [image(box("person", (1, 2, 4, 6)), path=FIRST)], {"wrong numbers": 1}),
    (coco((3, 1, [1, 2, 3, 4]), categories=[*CATEGORIES, {"id": 1, "name": "cat"}]), [],
     {"wrong record": 1}),
    (coco((3, 1, [1, 2, 3, 4]),
          {"image_id": 3, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": 1}),
     [image(box("cup", (1, 2, 4, 6)), path=FIRST)], {"a crowd": 1}),
    (coco((3, 1, [1, 2, 3, 4]), (3, 2, [1, 2, 3, 4]), images=[LVIS]),
     [image(box("cup", (1, 2, 4, 6)), path={"path": "val2017/003.jpg", "width": 64, "height": 48})],
     {"a crowd": 1}),
    (coco((3, 1, [1, 2, 3, 4]),
          {"image_id": 3, "category_id": 2, "bbox": [1, 2, 3, 4], "keypoints": [7, 8, 2]}),
     [image(box("cup", (1, 2, 4, 6)), path=FIRST)], {"key points": 1}),
    (coco(*[(3, 1, [k, k, 2, 2]) for k in range(40)], *[(3, 2, [k, k, 2, 2]) for k in range(40)],
          *[(1, 1, [1, 1, 2, 2])] * 61),
     [image(box("cup", *[(k, k, k + 2, k + 2) for k in range(40)]), path=FIRST),
      image(box("person", *[(k, k, k + 2, k + 2) for k in range(40)]), path=FIRST)],
     {"more than 60 points": 1}),
    (coco({"image_id": 3, "caption": "Two."}, {"image_id": 3, "caption": "A pair."},
          {"image_id": 1, "caption": "One."}, categories=None),
     [image(caption("Two."), caption("A pair."), path="val/1.jpg"),
      image(caption("One."), path="../2.jpg")], {}),
    (coco({"image_id": 3, "caption": "Cup.", "bbox": [1, 2, 3, 4]},
          {"image_id": 1, "caption": "One.", "rejected": "Two."}), [],
     {"wrong record": 1, "unknown field": 1}),
    # LabelMe: a folder of files, or one file
    (labelme(shape("rectangle", "cup", [30, 40], [1, 2]), shape("polygon", "cup", [40, 9], [50, 5]),
             shape("line", "edge", [1, 1], [2, 2])), LABELME, {"a line": 1}),
    (labelme(shape(None, "cup", [1, 2], [9, 9], group_id=4),
             shape("polygon", "cup", [30, 3], [20, 40], group_id=4),
             shape("rectangle", "cup", [40, 5], [50, 9], group_id=None)), LABELME, {}),
    (labelme(shape("point", "eye", [5, 6]), shape("point", "eye", [7, 8]), path="1.jpg"),
     [image({"type": "point", "label": "eye", "coords": "pixel",
             "points": [{"x": 5, "y": 6}, {"x": 7, "y": 8}]},
            path={"path": "1.jpg", "width": 64, "height": 48})], {}),
    (labelme(shape("rectangle", "cup", [30, 40], [1, 2]), shape("point", "cup", [5, 6]),
             shape("polygon", "cup", [40, 9], [50, 5])),
     [image(*LABELME[0]["annotations"], {"type": "point", "label": "cup", "coords": "pixel",
                                         "points": [{"x": 5, "y": 6}]},
            path=LABELME[0]["image"])], {}),
    ({**labelme(shape("rectangle", "cup", [1, 2], [3, 4]), imageWidth=None),
      "f/b.json": {"imagePath": "b.jpg", "shapes": []}}, [], {"no size": 1, "no annotation": 1}),
    # YOLO: the names of classes as a list, a map, in brackets, and without YAML
    *((yolo(YAML.format(names), *LINES), EYES, {}) for names in (
        "  0: eye  # left\n  1: big cup", "- eye\n- 'big cup'", "  [eye,\n   \"big cup\"]",
        "{0: 'eye', 1: big cup}", '  "0": "eye"\n  "1": big cup # right')),
    (yolo("names: ['it''s # 1', \"two\"]", LINES[0]),
     [image({**EYES[0]["annotations"][0], "label": "it's # 1"}, path="images/1.jpg")], {}),
    (yolo("eye\nbig cup\n", *LINES, name="classes.txt"), EYES, {}),
    ({**yolo("eye", LINES[0], name="classes.txt"), "f/README.txt": "", "f/images/3.jpg": "",
      **{f"f/labels/{k}.txt": line for k, line in enumerate([
          "", LINES[0], "0 30 40 20 20", "0 0.1 0.2 0.3 0.4 0.5", "7 0.3 0.4 0.2 0.2",
          "eye 0.3 0.4 0.2 0.2", "1e400 0.3 0.4 0.2 0.2", "0.5 0.3 0.4 0.2 0.2", "gone"], 2)},
      **{f"f/images/{k}.png": "" for k in range(2, 10)}},
     [image(EYES[0]["annotations"][0], path="images/1.jpg")],
     {"missing file": 2, "no annotation": 1, "wrong record": 5, "no label": 1}),
    ({"labels-1/f/1.txt": LINES[0], "labels-1/f/1.jpg": "", "labels-1/f/classes.txt": "eye"},
     [image(EYES[0]["annotations"][0], path="1.jpg")], {}),
    # rows of questions
    ({"a.jsonl": [{"image": "a.png", "question": "q", "answer": "a"}]}, [image(qa("qa"))], {}),
    ({"a.csv": "image,question,answer\na.png,q,a\n,r,b\n"},
     [image(qa("qa")), {"annotations": [qa("rb")]}], {}),
    ({"a.csv": "image, question,answer\na.png,q,a,b\n\na.png,q,a\n"}, [image(qa("qa"))],
     {"wrong record": 1}),
    ({"a.csv": "\ufeffimage;question;answer\na.png;q;a\n"}, [image(qa("qa"))], {}),
    ({"a.json": [{"instruction": "q", "input": "more", "output": "a", "system": "s"},
                 {"instruction": "q", "input": "", "output": "a", "history": [["o", "p"]]},
                 {"query": "q", "response": "a",
                  "history": [*said("user", "o"), *said("assistant", "p")]},
                 {"query": "q", "response": "a", "history": [["o"]]}]},
     [{"annotations": [{**qa(("q\nmore", "a")), "system": "s"}]},
      *[{"annotations": [qa("op", "qa")]}] * 2], {"wrong record": 1}),
    ({"a.jsonl": [{"query": "<image>q", "response": "a", "images": ["a.png"]},
                  {"prompt": "q", "completion": "a"}, {"question": "q"}]},
     [image(qa("qa")), {"annotations": [qa("qa")]}], {"wrong record": 1}),
    # preference pairs, and turns of TRL
    *(({"a.json": [{**start, "chosen": [*turns, *said("assistant", "a")],
                    "rejected": [*turns, *said("assistant", "b")]}]}, PAIR, {})
      for start, turns in (({"prompt": said("user", "q")}, []), ({}, said("user", "q")))),
    ({"a.json": [{"prompt": "q", "chosen": "a", "rejected": "b"}]}, PAIR, {}),
    ({"a.jsonl": [{"prompt": said("user", "q"), "completion": said("assistant", "a")}]},
     [{"annotations": [qa("qa")]}], {}),
    ({"a.jsonl": [{"image": "a.png", "texts": "q"}, {"question": "q", "answer": "a"}]},
     [{"annotations": [qa("qa")]}], {"unknown format": 1}),
    # captions
    ({"a.jsonl": [{"image": "a.png", "caption": "A cat."}, {"text": "of nothing"}]},
     [image(caption("A cat."))], {"wrong record": 1}),
    ({"a.jsonl": [{"image": "a.png", "text": "A cat."}, *({"image": "a.png", **row} for row in (
        {"text": "A cat.", "history": [["q", "a"]]}, {"text": "<box>[[1, 2, 3, 4]]</box>"},
        {"text": "A cat.", "rejected": "A dog."}, {"text": "A cat.", "file_name": "b.png"}))]},
     [image(caption("A cat."))], {"wrong record": 4}),
    ({"a.jsonl": [{"instruction": "Look.", "question": "q", "answer": "a", "output": "a"},
                  {"question": "q", "answer": "a", "question_id": 7}]},
     [{"annotations": [qa("qa")]}], {"unknown field": 1}),
    ({"f/metadata.csv": "file_name,text\na.png,\"A cat, grey.\"\n", "f/other.json": {}},
     [image(caption("A cat, grey."))], {}),
    ({"f/metadata.jsonl": [{"file_name": "a.MP4", "text": "A film."}]},
     [{"video": "a.MP4", "annotations": [caption("A film.")]}], {}),
]


def write(folder, files):
    """Writes files {name: content} -> the folder f if there is one, else the only file."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            content = "\n".join(map(json.dumps, content))
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return next(folder.rglob("f"), folder / next(iter(files)))


@pytest.mark.parametrize(("files", "records", "skipped"), TABLE)
def test_a_file_becomes_these_records(tmp_path, files, records, skipped):
    path = write(tmp_path, files)
    out = (path if path.is_dir() else tmp_path) / "out.jsonl"
    status, counts, err = run(path, out)
    found = [json.loads(line) for line in out.open()] if records else []
    assert found == records
    assert (status, counts["skipped"]) == (0 if records else 1, skipped)
    assert err.count("; skipped") == sum(skipped.values())
    if records:
        assert len(Records(out)) == len(records)   # training can read them


@pytest.mark.parametrize(("files", "words"), [
    ({"f/Annotations/a.xml": "<annotation/>"}, "f: this is XML of Pascal VOC or CVAT; export COCO"),
    ({"a.xml": "<annotations/>"}, "a.xml: this is XML of Pascal VOC or CVAT; export"),
    ({"f/seqinfo.ini": "", "f/gt/gt.txt": "1,1,2,3,4,5"}, "f: this is MOT; write its tracks"),
    ({"a.parquet": "PAR1"}, "a.parquet: this is Parquet; write a .jsonl file"),
    ({"a.json": [{"data": {"image": "a"}, "annotations": [{"result": []}]}]},
     "a.json[0]: unknown format: this is Label Studio; export COCO or YOLO"),
    ({"a.json": [{"image": "a", "annotations": [{"label": "l", "coordinates": {}}]}]},
     "this is CreateML; export COCO or YOLO"),
    ({"a.json": {"videos": [], "annotations": []}}, "this is TAO or YouTube-VIS; write its tracks"),
    ({"a.json": {"asset": {}, "regions": []}}, "this is VoTT; export"),
    ({"a.json": {"_via_img_metadata": {}}}, "this is VGG Image Annotator; export COCO"),
    ({"a.json": [{"path": "b.jsonl", "rate": 1}]}, "this is a mixture; give it a name"),
    ({"a.json": [{"group": "g", "data": []}]}, "this is a mixture; give it a name"),
    ({"f/labels/train/1.txt": "", "f/data.yaml": "names: [a]"}, "f/labels/train']"),
    (yolo("kpt_shape: [1, 3]\nnames: [a]", "0 0.3 0.4 0.2 0.2 0.3 2"), "and no key points"),
    ({"f/a.json": [], "f/b.json": {"images": [], "annotations": [{"image_id": 1}]}},
     "f/b.json: a folder with several .json files must contain files of LabelMe; give one"),
    ({"f/a.jpg": ""}, "f: this is not a known format; --help lists the known"),
    ({"f/g/a.jsonl": [], "f/a.yaml": ""}, "/f/g/a.jsonl"),
    ({"a.csv": "image,image,text\na,b,c"}, "a.csv: the table cannot be read; save"),
    ({"a.csv": "image,caption\na.png," + "x" * 200_000}, "a.csv: the table cannot be read; save"),
])
def test_a_format_that_is_not_read_is_named_with_what_to_do(tmp_path, files, words):
    status, _, err = run(write(tmp_path, files), tmp_path / "out.jsonl")
    assert status
    assert words in err
    assert not (tmp_path / "out.jsonl").exists()


def test_fields_of_annotations_that_are_not_read_are_listed(tmp_path):
    files = coco({"image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.1})
    err = run(write(tmp_path, files), tmp_path / "out.jsonl")[2]
    assert err.endswith("'score' is not used; it occurs 1 time, for example with the value 0.1\n")
    files = labelme(shape("point", "eye", [5, 6], flags={"difficult": True}))
    assert "'flags' is not used" in run(write(tmp_path, files), tmp_path / "out2.jsonl")[2]


def test_without_any_of_its_media_a_file_is_not_written(tmp_path):
    row = {"image": "a.png", "question": "q", "answer": "a"}
    path = write(tmp_path, {"a.jsonl": [row, {**row, "image": "b.png"}]})
    status, counts, err = run(path, tmp_path / "out.jsonl", media_are_there=False)
    assert (status, counts) == (1, {"rows": 2, "records": 0, "skipped": {}})
    assert f"such as {tmp_path}/a.png; set --media DIR to the folder where" in err
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "b.png").touch()
    status, _, err = run(path, tmp_path / "out.jsonl", media_are_there=False)
    assert status == 0
    assert f": 1 of 2 images and videos do not exist, such as {tmp_path}/a.png; set --media" in err


def test_subtitles_are_added_to_the_video_of_the_same_name(tmp_path):
    times = "00:00:01,000 --> 00:00:02,000\n"
    write(tmp_path, {"s/a.srt": f"1\n{times}one\n", "s/b.vtt": f"WEBVTT\n\n{times}two\n",
                     "s/c.srt": "none"})
    own = [{"start": 3, "end": 4, "text": "own"}]
    records = [{"video": f"{name}.mp4", "annotations": [caption("x")]} for name in "abcd"]
    path = write(tmp_path, {"r.jsonl": [*records, {**records[0], "subtitles": own}]})
    _, counts, err = run(path, tmp_path / "out.jsonl", "--subtitles", tmp_path / "s")
    found = [json.loads(line).get("subtitles") for line in open(tmp_path / "out.jsonl")]
    cue = {"start": 1.0, "end": 2.0}
    assert found == [[{**cue, "text": "one"}], [{**cue, "text": "two"}], None, own]
    assert counts["skipped"] == {"wrong record": 1}
    assert (f": found 3 subtitle files in {tmp_path}/s, and 2 of them have the name of a video\n"
            in err)
    assert "no subtitle found" in err
    assert run(path, tmp_path / "b.jsonl", "--subtitles", tmp_path / "none")[0] == 2


def test_no_picture_is_in_training_and_held_out(tmp_path):
    """The hash of a path decides. A record of several images goes to the part of its images."""
    names = [f"{n}.png" for n in range(200)]
    rows = [image(caption("x"), path=name) for name in names] + [{"annotations": [qa("qa")]}] * 9
    rows += [{"images": [f"new/{name}", f"./{name}"], "annotations": [qa("qa")]} for name in names]
    rows += [{"images": names, "annotations": [qa("qa")]}]               # images of both parts
    path = write(tmp_path, {"r.jsonl": rows})
    _, counts, _ = run(path, tmp_path / "out.jsonl", "--hold-out", "0.2")
    parts = [[json.loads(line) for line in open(tmp_path / name)]
             for name in ("out.jsonl", "out-held-out.jsonl")]
    assert [counts["records"], counts["held_out"]] == list(map(len, parts))
    assert (counts["rows"], counts["skipped"]) == (410, {"pictures of both parts": 1})
    assert 50 < counts["held_out"] < 120
    train, held_out = ({name.removeprefix("./") for record in part
                        for name in record.get("images", [record.get("image", "text")])}
                       for part in parts)
    assert not train & held_out
    assert len(train | held_out) == 401
    (tmp_path / "out.jsonl").unlink()  # the other output file still exists
    assert run(path, tmp_path / "out.jsonl", "--hold-out", "0.2")[0] == 2
    path = write(tmp_path, {"one.jsonl": rows[:1]})
    status, _, err = run(path, tmp_path / "b.jsonl", "--hold-out", "0.2")
    assert (status, (tmp_path / "b.jsonl").exists()) == (1, False)
    assert "--hold-out 0.2 leaves one file without a record" in err
    assert run(path, tmp_path / "b.jsonl", "--hold-out", "0")[1]["records"] == 1


def test_the_first_images_are_drawn_with_their_boxes(tmp_path):
    Image.new("RGB", (400, 300)).save(tmp_path / "a.png")
    square = image(box("cup", (0.25, 0.25, 0.75, 0.75), coords="unit"))
    path = write(tmp_path, {"r.jsonl": [{"annotations": [qa("qa")]}, square, square, square]})
    assert run(path, tmp_path / "out.jsonl", "--draw", "2")[0] == 0
    picture = Image.open(tmp_path / "out.draw.png")
    assert picture.width == 2 * 480 + 4
    columns = [x for x in range(picture.width) if picture.getpixel((x, 120))[0] > 200]
    sides = [x for x in columns if x - 1 not in columns]  # sides of boxes, and the gap
    assert sides == pytest.approx([120, 360, 480, 604, 844], abs=6)


PAGE = [line for line in CI["commands"](ROOT / "docs/own_data.md") if "tools.convert" in line]


@pytest.mark.parametrize("command", PAGE)
def test_each_command_of_the_page_makes_records_that_can_be_trained(tmp_path, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[3:]
    words[1] = str(tmp_path / "out.jsonl")
    status, counts, _ = run(*words, media_are_there=False)
    assert (status, counts["skipped"]) == (0, {})
    assert check.main([words[1], "--decode"]) == 0
