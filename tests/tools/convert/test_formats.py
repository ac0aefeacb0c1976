"""Files in other formats: a table of files, their records, and the skipped entries. Also formats
that are not supported, and flags that choose, add, hold out and draw."""

import json
import re
import shlex

import pytest
from PIL import Image

from records.reader import Records
from tests.full_disk import files_up_to
from tests.test_readme import CI, ROOT
from tests.tools.convert.command import read, run
from tools import check

IMAGES = [{"id": 3, "file_name": "val/1.jpg", "width": 640, "height": 480},
          {"id": 1, "file_name": "../2.jpg", "width": 64, "height": 48}]
CATEGORIES = [{"id": 1, "name": "cup"}, {"id": 2, "name": "person"}]
LVIS = {"id": 3, "width": 64, "height": 48, "not_exhaustive_category_ids": ["2"],
        "coco_url": "http://images.cocodataset.org/val2017/003.jpg"}
FIRST = {"path": "val/1.jpg", "width": 640, "height": 480}
BOX = [1, 2, 3, 4]
CORNERS = (1, 2, 4, 6)  # of BOX


def sized(path):
    return {"path": path, "width": 64, "height": 48}


def boxed(image, category, bbox=BOX, **fields):
    """-> an annotation of COCO."""
    return {"image_id": image, "category_id": category, "bbox": bbox, **fields}


def coco(*annotations, images=(), categories=CATEGORIES):
    """images: by default the images of the annotations."""
    images = images or [i for i in IMAGES if i["id"] in [a["image_id"] for a in annotations]]
    return {"a.json": {"images": images, "categories": categories, "annotations": annotations}}


def shape(kind, label, *points, **fields):
    return {"label": label, "shape_type": kind, "points": points, **fields}


def labelme(*shapes, path="..\\img\\1.jpg", **fields):
    content = {"version": "5", "imageData": None, "imageWidth": 64, "imageHeight": 48, **fields}
    return {"f/a.json": {"imagePath": path, "shapes": shapes, **content}}


def yolo(classes, *lines, name="classes.txt"):
    return {f"f/{name}": classes, "f/labels/1.txt": "\n".join(lines), "f/images/1.jpg": ""}


def voc(*objects, folder="Annotations/"):
    """objects: (name, xmin, ymin, xmax, ymax) and more XML."""
    names = ("xmin", "ymin", "xmax", "ymax")
    text = "".join(
        f"<object><name>{label}</name><pose>Left</pose><bndbox>"
        + "".join(f"<{n}>{side}</{n}>" for n, side in zip(names, rest[:4], strict=True))
        + f"</bndbox>{''.join(rest[4:])}</object>" for label, *rest in objects)
    return {f"f/{folder}1.xml": "<annotation><folder>x</folder><filename>1.jpg</filename><size>"
            f"<width>64</width><height>48</height><depth>3</depth></size>{text}</annotation>",
            "f/JPEGImages/1.jpg": ""}


def box(label, *corners, coords="pixel"):
    return {"type": "box", "label": label, "coords": coords, "form": "xyxy",
            "boxes": [{"box": list(corner)} for corner in corners]}


def point(label, *places, coords="pixel"):
    return {"type": "point", "label": label, "coords": coords,
            "points": [{"x": x, "y": y} for x, y in places]}


def caption(text):
    return {"type": "caption", "text": text}


def qa(*pairs):
    return {"type": "qa", "turns": [{"question": q, "answer": a} for q, a in pairs]}


def said(role, text):
    return [{"role": role, "content": text}]


def image(*annotations, path="a.png"):
    return {"image": path, "annotations": list(annotations)}


PYYAML = pytest.mark.extras("yaml")
YAML = "path: ..\nnames:  # of classes\n{}\ndownload: |\n  names: [code]\n"
EYES = [image(box("eye", (0.2, 0.3, 0.4, 0.5), coords="unit"),
              box("big cup", (0.1, 0.1, 0.5, 0.6), coords="unit"), path="images/1.jpg")]
LINES = ("0 0.3 0.4 0.2 0.2", "", "1 0.1 0.2 0.5 0.1 0.3 0.6")
LABELME = [image(box("cup", (1, 2, 30, 40), (40, 5, 50, 9)), path=sized("../img/1.jpg"))]
CUP_SHAPE = shape("rectangle", "cup", [30, 40], [1, 2])
CUP, PERSON = [image(box(label, CORNERS), path=FIRST) for label in ("cup", "person")]
TEXT_QA = {"annotations": [qa("qa")]}
PAIR = [{"annotations": [{"type": "text", "prompt": "q", "text": text} for text in ("a", "b")]}]
# {name of a file: content}, the records, {reason: number of skipped entries}
TABLE = [
    # COCO, Roboflow, LVIS
    (coco(boxed(3, 1, [10.5, 20, 100, 50]), boxed(1, 2), boxed(3, 2),
          boxed(3, 1, [630, 400, 20, 90])),
     [image(box("cup", (10.5, 20, 110.5, 70), (630, 400, 640, 480)), box("person", CORNERS),
            path=FIRST), image(box("person", CORNERS), path=sized("../2.jpg"))], {}),
    (coco({"image_id": 3, "category_id": 1, "segmentation": [[5, 9, 8, 2], [1, 3, 2, 4]]}),
     [image(box("cup", (1, 2, 8, 9)), path=FIRST)], {}),
    (coco(boxed(3, 1), {"image_id": 3, "category_id": 1}, boxed(3, 2)), [PERSON], {"no box": 1}),
    (coco(boxed(3, 9), boxed(3, "9"), boxed(3, "dog"), boxed(3, 2)), [PERSON], {"no label": 2}),
    (coco(boxed(3, "1"), boxed("3", 2), categories=[
        CATEGORIES[0], {"id": "2", "name": "person"}], images=[
            {**IMAGES[0], "id": "3", "file_name": "val\\1.jpg"}]),
     [image(box("cup", CORNERS), box("person", CORNERS), path=FIRST)], {}),
    (coco(boxed(3, 1), boxed(3, 2, ignore=1), boxed(1, 1, score=0.9)), [CUP],
     {"a crowd": 1, "wrong record": 1}),
    (coco(boxed(3, 1), boxed(4, 1), boxed(5, 1), images=[
        IMAGES[0], {"id": 4, "file_name": "b.jpg", "width": 10 ** 400, "height": 48}]),
     [CUP], {"wrong size": 1, "wrong record": 1}),
    (coco(boxed(3, 1, [700, 1, 2, 2]), boxed(3, 2), boxed(1, 1, [1, 2, "3", 4]),
          boxed(1, 2)),
     [image(box("person", CORNERS), path=path) for path in (FIRST, sized("../2.jpg"))],
     {"a box without an area": 1, "wrong numbers": 1}),
    (coco(*({"image_id": 3, "category_id": 1, "segmentation": [numbers]}
            for numbers in ([], [1, 2, 3], ["a", 1])), boxed(3, 2)),
     [PERSON], {"wrong numbers": 1}),
    (coco(boxed(3, 1, [1, 2, 3, 0]), boxed(3, 1), images=IMAGES), [],
     {"a box without an area": 1, "no annotation": 1}),
    (coco(boxed(3, 1), categories=[*CATEGORIES, {"id": 1, "name": "cat"}]), [],
     {"wrong record": 1}),
    (coco(boxed(3, 1), boxed(3, 2, iscrowd=1)), [CUP], {"a crowd": 1}),
    (coco(boxed(3, 1), boxed(3, 2), images=[LVIS]),
     [image(box("cup", CORNERS), path=sized("val2017/003.jpg"))], {"a crowd": 1}),
    (coco(boxed(3, 1), boxed(3, 2, keypoints=[7, 8, 2])), [CUP], {"key points": 1}),
    (coco(*[boxed(3, 1, [k, k, 2, 2]) for k in range(40)],
          *[boxed(3, 2, [k, k, 2, 2]) for k in range(40)],
          *[boxed(1, 1, [1, 1, 2, 2])] * 61),
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
    (labelme(CUP_SHAPE, shape("polygon", "cup", [40, 9], [50, 5]),
             shape("line", "edge", [1, 1], [2, 2]),
             shape("rectangle", "__ignore__", [1, 1], [2, 2])),
     LABELME, {"a shape": 1, "no object": 1}),
    (labelme(CUP_SHAPE, path="a.json"), [], {"wrong record": 1}),
    (labelme(shape(None, "cup", [1, 2], [9, 9], group_id=4),
             shape("polygon", "cup", [30, 3], [20, 40], group_id=4),
             shape("rectangle", "cup", [40, 5], [50, 9], group_id=None)), LABELME, {}),
    (labelme(shape("point", "eye", [5, 6]), shape("point", "eye", [7, 8]), path="1.jpg"),
     [image(point("eye", (5, 6), (7, 8)), path=sized("1.jpg"))], {}),
    (labelme(CUP_SHAPE, shape("point", "cup", [5, 6]),
             shape("polygon", "cup", [40, 9], [50, 5])),
     [image(point("cup", (5, 6), (15.5, 21), (45, 7)), path=LABELME[0]["image"])], {}),
    ({**labelme(shape("rectangle", "cup", [1, 2], [3, 4]), imageWidth=None),
      "f/b.json": {"imagePath": "b.jpg", "shapes": []}}, [], {"wrong size": 1, "no annotation": 1}),
    # YOLO: the names of classes as a list, a map, and without YAML; boxes and polygons
    *(pytest.param(yolo(YAML.format(names), *LINES, name="data.yaml"), EYES, {}, marks=PYYAML)
      for names in ('  "0": eye  # left\n  1: big cup', '- "\\x65ye"\n- big cup',
                    "  [eye, big cup]  # two")),
    (yolo("eye\x85\nbig cup\n", *LINES), EYES, {}),
    # polygons whose first numbers would be a box that leaves the image
    (yolo("eye", *["0 .1 .1 .6 .1 .3 .1 .1 .05"] * 3),
     [image(box("eye", *[(0.1, 0.05, 0.6, 0.1)] * 3, coords="unit"), path="images/1.jpg")], {}),
    # half of these polygons may be boxes with key points
    (yolo("eye", *["0 .4 .4 .6 .4 .6 .6 .4 .6"] * 2, "0 .4 .4 .6 .4 .5 .5",
          "0 .8 .8 .9 .8 .9 .9 .8 .9"),
     [image(box("eye", *[(0.4, 0.4, 0.6, 0.6)] * 2, (0.4, 0.4, 0.6, 0.5), (0.8, 0.8, 0.9, 0.9),
                coords="unit"),
            path="images/1.jpg")], {}),
    ({**yolo("eye", LINES[0]), "f/README.txt": "", "f/images/3.jpg": "",
      **{f"f/labels/{k}.txt": line for k, line in enumerate([
          "", LINES[0], "0 30 40 20 20", "0 0.1 0.2 0.3 0.4 0.5", "7 0.3 0.4 0.2 0.2",
          "eye 0.3 0.4 0.2 0.2", "1e400 0.3 0.4 0.2 0.2", "0.5 0.3 0.4 0.2 0.2",
          "9" * 400 + LINES[0], "gone"], 2)},
      **{f"f/images/{k}.png": "" for k in range(2, 11)}},
     [image(EYES[0]["annotations"][0], path="images/1.jpg")],
     {"missing file": 2, "no annotation": 1, "wrong record": 6, "no label": 1}),
    ({"labels-1/f/1.txt": LINES[0], "labels-1/f/1.jpg": "", "labels-1/f/classes.txt": "eye"},
     [image(EYES[0]["annotations"][0], path="1.jpg")], {}),
    # Pascal VOC counts pixels from 1; a table has a line for each box
    (voc(("cup", 2, 3, 30, 40), ("cup", 41, 6, 50, 9), ("dog", 60, 1, 90, 10)),
     [image(box("cup", (1, 2, 30, 40), (40, 5, 50, 9)), box("dog", (59, 0, 64, 10)),
            path=sized("JPEGImages/1.jpg"))], {}),
    ({name: text.replace("1.jpg</f", "1</f") for name, text in voc(("dog", 60, 1, 90, 10)).items()},
     [image(box("dog", (59, 0, 64, 10)), path=sized("JPEGImages/1.jpg"))], {}),
    (voc(("cup", 2, 3, 30, "wide"), ("dog", 60, 1, 90, 10), folder=""),
     [image(box("dog", (59, 0, 64, 10)), path=sized("JPEGImages/1.jpg"))],
     {"wrong numbers": 1}),
    ({"a.csv": "filename,width,height,class,xmin,ymin,xmax,ymax\n1.jpg,64,48,cup,1,2,30,40\n"
      "f\\2.jpg,64,48,dog,1,2,3,4\n1.jpg,64,48,cup,40,5,50,9\n1.jpg,64,48,eye,,,,\n"},
     [image(box("cup", (1, 2, 30, 40), (40, 5, 50, 9)), path=sized("1.jpg")),
      image(box("dog", (1, 2, 3, 4)), path=sized("f/2.jpg"))], {"wrong numbers": 1}),
    # x and y of a point; with a width they may be the corner of a box
    ({"a.csv": "image,label,x,y,width\na.png,cup,3,4,\na.png,cup,5.5,6,\na.png,dog,1,2,3\n"
      "a.png,eye,1,,\na.png,dog,3,4,\n", "a.png": Image.new("1", (64, 48))},
     [image(point("cup", (3, 4), (5.5, 6)), path=sized("a.png"))],
     {"point or box": 1, "wrong numbers": 1}),
    # rows of questions
    ({"a.csv": "image,question,answer\na.png,q,a\n,r,b\n"},
     [image(qa("qa")), {"annotations": [qa("rb")]}], {}),
    ({"a.csv": "image, question,answer\na.png,q,a,b\n\na.png,q,a\n"}, [image(qa("qa"))],
     {"wrong record": 1}),
    ({"a.csv": "\ufeffimage;question;answer\na.png;q;a\n"}, [image(qa("qa"))], {}),
    ({"a.tsv": 'image\tquestion\tanswer\tchoices\na.png\t"q\n""r"""\t[]\t[]\n'},
     [image(qa(('q\n"r"', "[]")))], {}),
    ({"a.json": [{"instruction": "q", "input": "more", "output": "a", "system": "s"},
                 {"instruction": "q", "input": "", "output": "a", "history": [["o", "p"]]},
                 {"query": "q", "response": "a",
                  "history": [*said("user", "o"), *said("assistant", "p")]},
                 {"query": "q", "response": "a", "history": [["o"]]}]},
     [{"annotations": [{**qa(("q\nmore", "a")), "system": "s"}]},
      *[{"annotations": [qa("op", "qa")]}] * 2], {"wrong record": 1}),
    ({"a.jsonl": [{"query": "<image>q", "response": "a", "images": ["a.png"]},
                  {"prompt": "q", "completion": "a"}, {"question": "q"}]},
     [image(qa("qa")), TEXT_QA], {"wrong record": 1}),
    # preference pairs, and turns of TRL
    *(({"a.json": [{**start, "chosen": [*turns, *said("assistant", "a")],
                    "rejected": [*turns, *said("assistant", "b")]}]}, PAIR, {})
      for start, turns in (({"prompt": said("user", "q")}, []), ({}, said("user", "q")))),
    ({"a.json": [{"prompt": "q", "chosen": "a", "rejected": "b"}]}, PAIR, {}),
    ({"a.jsonl": [{"prompt": said("user", "q"), "completion": said("assistant", "a")}]},
     [TEXT_QA], {}),
    ({"a.jsonl": [{"image": "a.png", "texts": "q"}, {"question": "q", "answer": "a"}]},
     [TEXT_QA], {"unknown format": 1}),
    # captions
    ({"a.jsonl": [{"image": "a.png", "caption": "A cat."}, {"text": "of nothing"}]},
     [image(caption("A cat."))], {"wrong record": 1}),
    ({"a.jsonl": [{"image": "a.png", "text": "A cat."}, *({"image": "a.png", **row} for row in (
        {"text": "A cat.", "history": [["q", "a"]]}, {"text": "<box>[[1, 2, 3, 4]]</box>"},
        {"text": "A cat.", "rejected": "A dog."}, {"text": "A cat.", "file_name": "b.png"}))]},
     [image(caption("A cat."))], {"wrong record": 4}),
    ({"a.jsonl": [{"instruction": "Look.", "question": "q", "answer": "a", "output": "a"},
                  {"question": "q", "answer": "a", "question_id": 7}]},
     [TEXT_QA], {"unknown field": 1}),
    ({"a.jsonl": [{"image": "a.png", "text": "A cat."}, *(
        {"image": "a.png", "text": "A cat?", name: 7} for name in ("question_id", "queryId", "qid")
     )]},
     [image(caption("A cat."))], {"wrong record": 3}),
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
        if isinstance(content, Image.Image):
            content.save(path)
            continue
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return next(folder.rglob("f"), folder / next(iter(files)))


@pytest.mark.parametrize(("files", "records", "skipped"), TABLE)
def test_a_file_becomes_these_records(tmp_path, files, records, skipped):
    path = write(tmp_path, files)
    out = (path if path.is_dir() else tmp_path) / "out.jsonl"
    status, counts, err = run(path, out)
    found = read(out) if records else []
    assert found == records
    assert (status, counts["skipped"]) == (0 if records else 1, skipped)
    more = re.findall(r"; skipped, and (\d+) more", err)
    assert err.count("; skipped") + sum(map(int, more)) == sum(skipped.values())
    if records:
        assert len(Records(out)) == len(records)   # training can read them


@pytest.mark.parametrize(("files", "words"), [
    ({"f/Annotations/a.xml": "<annotation"}, "f/Annotations/a.xml: not XML: unclosed token"),
    ({"a.xml": "<annotations><meta/><image/></annotations>"}, "this is XML of CVAT; export COCO"),
    ({"a.csv": "image,label,xmin,ymin,xmax,ymax\na.png,cup,0.1,0.2,0.4,1\n"}, "with --unit unit"),
    ({"a.csv": "image,label,x,y\n,cup,3,4\n"}, "the entry: it does not name its image"),
    ({"a.csv": "image,class,x1,y1,x2,y2\na.png,1,1,2,4,6\n"}, "write the name of the class"),
    ({"a.csv": "image,label,x1,xmin,y1,x2,y2\na.png,cup,1,1,2,4,6\n"}, "both xmin and x1"),
    (voc(("cup", 2, 3, 5, 7, "<part><name>handle</name></part>")), "field 'part' is not supported"),
    ({"f/g/seqinfo.ini": ""}, "f: this is MOT; give each folder that contains seqinfo.ini"),
    ({"a.json": [{"image": "a", "annotator": 1, "annotation_id": 7}]},
     "a.json[0]: unknown format: this is JSON-MIN or CSV of Label Studio; export JSON"),
    ({"a.json": {"video": {}, "masklet": []}}, "this is SA-V, whose masks have no names;"),
    ({"a.json": [{"video": "a.mp4", "QA": [{"q": "q", "a": "a"}]}]}, "write them as messages"),
    ({"a.json": [{"audio": "a.wav", "text": "a"}]}, "--ignore audio,audios uses the rest"),
    (coco(boxed(3, 1, keypoints=[1, 2, 2])),
     "export boxes without them, or add --ignore keypoints"),
    ({"a.json": [{"image": "a", "annotations": [{"label": "l", "coordinates": {}}]}]},
     "this is CreateML; export COCO or YOLO"),
    ({"a.jsonl": [{"question": "q", "options": ["a", "b"], "answer": k} for k in (1, 2)]},
     "a.jsonl: 'answer' is 2, but there are 2 options. Indices must start at 0"),
    ({"a.json": {"videos": [], "annotations": []}}, "this is TAO or YouTube-VIS; write its tracks"),
    ({"a.json": {"asset": {}, "regions": []}}, "this is VoTT; export"),
    ({"a.json": {"_via_settings": {}, "_via_img_metadata": {}}},
     "this is VGG Image Annotator; export COCO"),
    ({"a.json": [{"path": "b.jsonl", "rate": 1}]}, "this is a mixture; give it a name"),
    ({"a.json": [{"group": "g", "data": []}]}, "this is a mixture; give it a name"),
    ({"f/labels/train/1.txt": "", "f/data.yaml": "names: [a]"}, "files below it: "),
    ({"f/labels/1.txt": LINES[0], "f/images/1.jpg": ""}, "YOLO needs .txt files in this folder, "),
    ({"f/labels/1.txt": LINES[0], "f/classes.txt": "a"}, "and images with the same names in "),
    *(pytest.param(yolo(text, LINES[0], name="data.yaml"), words, marks=PYYAML) for text, words in (
        ("kpt_shape: [1, 3]\nnames: [a]", "and no key points"), ("a", "must contain 'names'"),
        ("names: [a", "line 1, column 10"), ("names: {a: 0}", "class 'a' in 'names' must be a"),
        *((f"names: [{name}]", "class 0 in 'names' must be a number with a text; put quotes")
          for name in ("yes", "010", "2026-01-01", "null", "[a]")))),
    # key points of two and of three numbers, outside of the box and hidden; a score and an id
    *((yolo("a", *[f"0 .5 .5 .2 .2 {rest}"] * 3, "0 .8 .8 .9 .8 .9 .9 .8 .9", LINES[0]),
       "3 lines with")
      for rest in (".45 .45 .55 .55", ".1 .1 .9 .9", ".45 .45 1 .9 .1 0", ".91 1", ".45 .52")),
    ({"f/a.json": [], "f/b.json": {"images": [], "annotations": [{"image_id": 1}]}},
     "f/b.json: a folder with several files of this kind must contain files of LabelMe; give one"),
    ({"f/a.jpg": "", "f/b/c.mp4": ""}, "f: this is a folder with 2 photographs or videos and no "),
    ({"f/a.doc": ""}, "f: this is not a known format; --help lists the formats"),
    ({"f/g/a.jsonl": [], "f/a.yaml": ""}, "/f/g/a.jsonl"),
    ({"a.csv": "image,image,text\na,b,c"}, "a.csv: the table cannot be read; save"),
    ({"a.csv": "image,caption\na.png," + "x" * 200_000}, "a.csv:2: the entry that begins"),
    ({"a.csv": 'image,text\na.png,x\n\nb.png,"y\n"\n"b\n.png","z\nc.png,x\n'},
     "a.csv:6: the entry that begins in this line cannot be read (unexpected end of data); if a"),
    ({"a.tsv": 'file_name\ttext\na.png\tx\nb.png\t"Good!" he said.\n'}, "a.tsv:3: the entry that"),
    ({"f/metadata.jsonl": [], "f/metadata.csv": "file_name,text\na.png,x\n"},
     "metadata.csv:2: a folder with several files of this kind must contain files of LabelMe"),
])
def test_a_format_that_is_not_read_is_named_with_what_to_do(tmp_path, files, words):
    status, _, err = run(write(tmp_path, files), tmp_path / "out.jsonl")
    assert status
    assert words in err
    assert not (tmp_path / "out.jsonl").exists()


def test_fields_of_annotations_that_are_not_read_are_listed(tmp_path):
    files = coco(boxed(3, 1, colour=0.1))
    err = run(write(tmp_path, files), tmp_path / "out.jsonl")[2]
    assert err.endswith("'colour' is not used; it occurs 1 time, for example with the value 0.1\n")
    files = labelme(shape("point", "eye", [5, 6], flags={"difficult": True}))
    assert "'flags' is not used" in run(write(tmp_path, files), tmp_path / "out2.jsonl")[2]


def test_a_misspelled_style_is_told_once(tmp_path):
    rows = [image({**caption("x"), "style": style}) for style in ("mine", "long_captoin", "cuont")]
    err = run(write(tmp_path, {"a.jsonl": rows}), tmp_path / "out.jsonl")[2]
    assert err == (f"tools.formats: {tmp_path}/out.jsonl:2: annotations[0]: unknown style "
                   "'long_captoin' - did you mean 'long_caption'?\n")


@pytest.mark.parametrize(("files", "words", "flags"), [
    (coco(boxed(3, 1, **{field: 1})), words, flags)
    for field, words, flags in (
        ("rejected", "an annotation: the field 'rejected' is", ["--ignore", "rejected"]),
        ("score", "add --ignore score", ["--ignore", "score"]),
        ("iscrowd", "add --ignore iscrowd,ignore", ["--ignore", "iscrowd,ignore"]))
] + [(yolo("cup", "0 .5 .5 .2 .2 .4 .4 .6 .6"), "add --as yolo-polygons",
      ["--as", "yolo-polygons"])])
def test_a_message_names_the_flag_that_helps(tmp_path, files, words, flags):
    path = write(tmp_path, files)
    status, _, err = run(path, tmp_path / "out.jsonl")
    assert status
    assert words in err
    assert run(path, tmp_path / "out.jsonl", *flags)[:2] == (
        0, {"rows": 1, "records": 1, "skipped": {}})


def test_control_characters_of_a_file_are_not_printed(tmp_path):
    bad = "\x1b[2J\a"
    for k, files in enumerate((
            coco(boxed(3, 1, [9]), boxed(bad, 1, [9]), categories=[{"id": 1, "name": bad}]),
            labelme(shape("point", bad, [5]), shape(bad, "cup", [5, 6])),
            yolo("eye", f"0 .5 .5 .2 .2 {bad}"))):
        folder = tmp_path / str(k)
        err = run(write(folder, files), tmp_path / "out.jsonl")[2]
        assert not {*bad[:1], "\a"} & {*err}
        assert "\\x1b" in err


def test_without_any_of_its_media_a_file_is_not_written(tmp_path):
    row = {"image": "a\x1b.png", "question": "q", "answer": "a"}
    path = write(tmp_path, {"a.jsonl": [row, {**row, "image": "b.png"}]})
    status, counts, err = run(path, tmp_path / "out.jsonl", media_are_there=False)
    assert (status, counts) == (1, {"rows": 2, "records": 0, "skipped": {}})
    assert f"such as {tmp_path}/a\\x1b.png; set --media DIR to the folder where" in err
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "b.png").touch()
    status, _, err = run(path, tmp_path / "out.jsonl", media_are_there=False)
    assert status == 0
    assert f": 1 of 2 images and videos do not exist, such as {tmp_path}/a\\x1b.png; set" in err


TIMES = "00:00:01,000 --> 00:00:02,000\n"


def add_subtitles(folder, videos, files):
    """-> status, counts, stderr of the command, and the texts of all records. The text in each file
    is its own name."""
    records = [{"video": video, "annotations": [caption("x")]} for video in videos]
    path = write(folder, {"r.jsonl": records, **{f"s/{name}": TIMES + name for name in files}})
    out = folder / "out.jsonl"
    result = run(path, out, "--subtitles", folder / "s", "--overwrite")
    records = read(out) if out.exists() else []
    return *result, [[e["text"] for e in record.get("subtitles", [])] for record in records]


def test_subtitles_are_added_to_the_video_of_the_same_name(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/c.srt").write_text("none")
    path = write(tmp_path, {"own.jsonl": [{"video": "a.mp4", "annotations": [caption("x")],
                            "subtitles": [{"start": 3, "end": 4, "text": "own"}]}]})
    frames = {"frames": ["1.png"], "fps": 1}
    files = ["a.srt", "a.vtt", "b.vtt", ".srt"]
    _, counts, err, texts = add_subtitles(
        tmp_path, ["a.mp4", "./a.mp4", "b.mp4", "c.mp4", "d.mp4", frames], files)
    assert texts == [["a.srt"], ["a.srt"], ["b.vtt"], [], []]
    assert counts["skipped"] == {"wrong subtitles": 1}
    assert f"wrong subtitles: {tmp_path}/s/c.srt: no subtitle found" in err
    assert (f": found 4 subtitle files in {tmp_path}/s, and 2 of them have the name of a video\n"
            in err)
    run(path, tmp_path / "b.jsonl", "--subtitles", tmp_path / "s")
    assert '"text": "own"' in (tmp_path / "b.jsonl").read_text()


def test_a_subtitle_file_never_reaches_another_video_of_the_same_name(tmp_path):
    films = ["x/film.mp4", "y/film.mp4"]
    status, _, err, texts = add_subtitles(tmp_path, films, ["film.srt"])
    assert (status, texts) == (1, [])
    assert (f"s/film.srt has the name of several videos: {tmp_path}/x/film.mp4, "
            f"{tmp_path}/y/film.mp4; move it to a folder" in err)
    # the file of the other video may be the one in the folder above
    assert add_subtitles(tmp_path, films, ["x/film.srt"])[0] == 1
    _, _, _, texts = add_subtitles(tmp_path, films, ["y/film.vtt"])
    assert texts == [["x/film.srt"], ["y/film.vtt"]]
    # a path in FILE may be longer than the path in --subtitles
    assert add_subtitles(tmp_path, ["v/x/film.mp4"], [])[3] == [["x/film.srt"]]


def test_the_name_of_a_subtitle_file_may_contain_one_language(tmp_path):
    videos = ["film.mp4", "talk.mp4", "part.one.mp4"]
    files = ["film.en-US.vtt", "talk.de.srt", "talk.en.srt", "part.one.en.srt"]
    _, counts, err, texts = add_subtitles(tmp_path, videos, files)
    assert texts == [["film.en-US.vtt"], ["part.one.en.srt"]]
    assert counts["skipped"] == {"several subtitle files": 1}
    assert (f"{tmp_path}/s/talk.de.srt, {tmp_path}/s/talk.en.srt: give the file that you want the "
            "name talk.srt; skipped" in err)
    assert add_subtitles(tmp_path, videos, ["talk.srt"])[3][1] == ["talk.srt"]
    # film.en-US.vtt may belong to either of them
    assert add_subtitles(tmp_path, ["film.mp4", "film.en-US.mp4"], [])[0] == 1


def test_no_picture_is_in_training_and_held_out(tmp_path):
    """The hash of a path decides. A record of several images goes to the part of its images."""
    names = [f"{n}.png" for n in range(200)]
    rows = [image(caption("x"), path=name) for name in names]
    rows += [{"id": str(k), "annotations": [qa("qa")]} for k in range(9)]
    rows += [{"images": [f"new/{name}", f"./{name}"], "annotations": [qa("qa")]} for name in names]
    rows += [{"images": names, "annotations": [qa("qa")]}]               # images of both parts
    path = write(tmp_path, {"r.jsonl": rows})
    _, counts, _ = run(path, tmp_path / "out.jsonl", "--hold-out", "0.2")
    parts = [read(tmp_path / name) for name in ("out.jsonl", "out-held-out.jsonl")]
    assert [counts["records"], counts["held_out"]] == list(map(len, parts))
    assert (counts["rows"], counts["skipped"]) == (410, {"pictures of both parts": 1})
    assert 50 < counts["held_out"] < 120
    train, held_out = ({name.removeprefix("./") for record in part
                        for name in record.get("images", [record.get("image", "text")])}
                       for part in parts)
    assert not train & held_out
    assert len(train | held_out) == 401
    path = write(tmp_path, {"one.jsonl": rows[:1]})
    status, _, err = run(path, tmp_path / "b.jsonl", "--hold-out", "0.2")
    assert (status, (tmp_path / "b.jsonl").exists()) == (1, False)
    assert "--hold-out 0.2 leaves one file without a record" in err
    assert run(path, tmp_path / "b.jsonl", "--hold-out", "0")[1]["records"] == 1


def test_the_form_of_a_path_does_not_change_what_is_held_out(tmp_path):
    """photos/1.png of rows.jsonl and 1.png with --media photos are the same image. The folder of
    the clone does not matter either."""
    found = []
    for home, media in (("a", "photos"), ("b", "."), ("b", "absolute")):
        root = tmp_path / home
        for name in ("photos", "out"):
            (root / name).mkdir(parents=True, exist_ok=True)
        start = {"photos": "", ".": "photos/", "absolute": f"{root}/photos/"}[media]
        rows = [image(caption(str(n)), path=f"{start}{n}.png") for n in range(40)]
        path = write(root, {"rows.jsonl": rows})
        folder = root / "photos" if media == "photos" else root
        status, _, err = run(path, root / "out/out.jsonl", "--hold-out", "0.3", "--overwrite",
                             "--media", folder)
        assert (status, err) == (0, "")
        found.append([record["annotations"][0]["text"]
                      for record in read(root / "out/out-held-out.jsonl")])
    assert found[0] == found[1] == found[2]
    assert 0 < len(found[0]) < 40


def test_the_first_images_are_drawn_with_their_boxes(tmp_path):
    Image.new("RGB", (400, 300)).save(tmp_path / "a.png")
    square = image(box("cup", (0.25, 0.25, 0.75, 0.75), coords="unit"))
    path = write(tmp_path, {"r.jsonl": [TEXT_QA, square, square, square]})
    assert run(path, tmp_path / "out.jsonl", "--draw", "2")[0] == 0
    picture = Image.open(tmp_path / "out.draw.png")
    assert picture.width == 2 * 480 + 4
    columns = [x for x in range(picture.width) if picture.getpixel((x, 120))[0] > 200]
    sides = [x for x in columns if x - 1 not in columns]  # sides of boxes, and the gap
    assert sides == pytest.approx([120, 360, 480, 604, 844], abs=6)
    with files_up_to(2000):
        status, _, err = run(path, tmp_path / "b.jsonl", "--draw", "2")
    assert (status, (tmp_path / "b.draw.png").exists()) == (1, False)
    assert "File too large" in err
    assert f"{tmp_path}/b.jsonl is complete" in err


PAGE = [line for line in CI["commands"](ROOT / "docs/own_data.md") if "tools.convert" in line]


@pytest.mark.parametrize("command", PAGE)
def test_each_command_of_the_page_makes_records_that_can_be_trained(tmp_path, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[3:]
    words[1] = str(tmp_path / "out.jsonl")
    status, counts, _ = run(*words, media_are_there=False)
    assert (status, counts["skipped"]) == (0, {})
    assert check.main([words[1], "--decode"]) == 0
