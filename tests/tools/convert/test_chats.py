"""Chats in other data formats: a table with every field and tag, and the record that results."""

import time
from types import SimpleNamespace

import pytest

from records.errors import Unreadable
from tests.records.samples import CAPTION, image, write
from tests.tools.convert.command import read, run
from tools.convert.chats import read_answer


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def chat(*turns, **row):
    """-> a row. Texts and lists of parts are turns of the user and the assistant alternately."""
    turns = [turn if isinstance(turn, dict) else (user, answer)[k % 2](turn)
             for k, turn in enumerate(turns)]
    return {**row, "messages": turns}


def made(*turns, system=None, **record):
    """-> a record. turns: (question, answer or fields of points or boxes, weight if any)."""
    found = []
    for question, text, *weight in turns:
        fields = {"answer": text} if isinstance(text, str) else text
        found.append({"question": question, **fields, **({"weight": weight[0]} if weight else {})})
    system = {"system": system} if system else {}
    return {**record, "annotations": [{"type": "qa", **system, "turns": found}]}


def pair(question="q", **record):
    return {**record, "annotations": [{"type": "text", "prompt": question, "text": text}
                                      for text in ("a", "b")]}


def boxes(*corners, label="cup", coords="pixel", **size):
    label = {"label": label} if label else {}
    return {"type": "box", **label, "coords": coords, **size, "form": "xyxy",
            "boxes": [{"box": list(corner)} for corner in corners]}


QA = made(("q", "a"))
X = {"image": "x"}
QA_X = {**X, **QA}
BOTH = [{"image": 0}, {"image": 1}]
XY = {"images": ["x", "y"]}
TEXT = {"type": "text", "text": "q"}
OF_X = made((["Of ", BOTH[0], "?"], "a"), **X)
FRAMES = {"frames": ["f", "g"], "fps": 1}
CLIP = {"path": "v", "start": 1, "end": 2}
PART = {"type": "video", "video": "v", "video_start": 1, "video_end": 2}
OBJECTS = {"ref": ["cup"], "bbox": [[1.5, 2, 30, 20], [3, 4, 30, 25]]}
FIND = chat("<image>Find the <ref-object>", "<bbox><bbox>", **X)
JSON = '```json\n[\n\t{"bbox_2d": [1, 2, 30, 20], "label": "cup"}\n]\n```'
THOUSAND = {"size": [1000, 1000]}

TABLE = [  # a row, its record or a part of the error message, and flags
    # turns
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "text": "a"}]}, QA),
    (chat({"role": "developer", "content": "t"}, user("q"), answer("a"), user("r"), system="s"),
     made(("q", "a"), system="s\nt")),
    (chat("q", "a", id=7, weight=2, tools=[], profile="me"), {"id": "7", "weight": 2, **QA}),
    (chat("q", "a", style="vqa2"), {"annotations": [{"style": "vqa2", **QA["annotations"][0]}]}),
    (chat("q", "a", "r", "b"), {"annotations": [made(turn)["annotations"][0]
                                                for turn in ("qa", "rb")]}, "--split-turns"),
    *(({**chat("q", "a"), "annotations": []}, *expected) for expected in (
        ["the record: unknown field 'messages'"], [QA, "--as chats"])),
    (chat("q"), "there is no question with an answer"),
    (chat("q", user("r"), answer("a")), "turn 1: this is a turn of the user; the turns must be"),
    (chat({"role": "system", "content": "s"}, user("q"), user("r"), answer("a")),
     "turn 2: this is a turn of the user"),
    (chat({"role": "tool", "content": "q"}, "a"), "turn 0: the role 'tool' is not one of"),
    (chat(user("q", value="r"), "a"), "turn 0: it has both value and content"),
    # fields that are not read
    *((chat("q", answer("a", **{key: "x"})), f"turn 1: the field '{key}' is not supported; rename")
      for key in ("name", "refusal", "loss_scale", "tool_calls", "audio")),
    (chat("q", answer("a", name="x", refusal=None)), QA, "--ignore other,name"),
    (chat([{**TEXT, "index": 0}], "a"), "turn 0: the field 'index' is not supported"),
    *((chat("q", "a", **X, **{key: "x"}), f"the entry: the field '{key}' is not supported")
      for key in ("img_path", "imageUrl", "Image", "image_id", "media", "frames", "sound", "tools",
                  "pdf", "options", "context", "is_correct", "rejected_images", "filename", "path",
                  "bbox", "loss", "answer", "solution", "pixel_values", "groundtruth", "keypoints",
                  "functions", "table", "question", "history", "A", "d", "a0", "Hint", "candidates",
                  "scores", "ignore", "attributes")),
    *((chat("q", "a", video="v", **{key: 1}), f"the entry: the field '{key}' is not supported")
      for key in ("start_time", "endTime", "timestamps", "begin", "ts")),
    (chat("q", "a", **X, timestamp="2026", questionId=1, attributes={"occluded": False}), QA_X),
    (chat([PART, TEXT], "a", time=3), "the entry: the field 'time' is not supported"),
    (chat("[]", [{**TEXT, "text": "[]"}]), made(("[]", "[]"))),
    (chat("q", "a", img_path="x"), QA, "--ignore img_path"),
    (image(CAPTION, img_path="x"), image(CAPTION), "--ignore img_path"),
    (chat("q", "a", source="coco"), "the entry: the field 'source' is not supported", "--strict"),
    (chat("q", "a", **X, start=1), "start, end, fps: they need a video"),
    # loss weights
    *((chat("q", answer("a", **{key: value})), made(("q", "a", weight)))
      for key, value, weight in (("loss_weight", 0.5, 0.5), ("weight", 0, 0), ("loss", False, 0),
                                 ("train", False, 0), ("training", True, 1))),
    (chat("q", answer("a", loss=True, weight=0)), "turn 1: it has both weight and loss"),
    (chat(user("q", loss=True), "a"), "turn 0: only answers can have a loss weight"),
    # preference pairs, answers marked for KTO, and reasoning
    *((chat("q", chosen=form("a"), rejected=form("b")), pair()) for form in (
        str, answer, lambda text: [answer(text)], lambda text: [user("q"), answer(text)])),
    (chat("<image>q", "a", rejected_response="b", **X), pair(**X)),
    (chat("q", "a", rejected_messages=[user("q"), answer("b")], system="s"), pair("System: s\nq")),
    (chat("q", "a", rejected_messages=[user("p"), answer("b")]), "it does not repeat the turns of"),
    (chat("q", "a", "q", rejected="b"), "it has no chosen answer"),
    (chat("q", "a", "r", "b", rejected="c"), "must have one question, no boxes"),
    (chat("q", "a", rejected="<box>(1,2),(3,4)</box>", **X), "must have one question, no boxes"),
    (chat("q", "a", rejected=answer("b", weight=0)), "rejected: it must be an answer without a"),
    (chat("q", answer("a", weight=0.5), rejected="b"), "no boxes, no style and no weight"),
    *((chat("q", "a", rejected="b", **{key: value}), *expected)
      for key, value in (("style", "vqa2"), ("weight", 2))
      for expected in (["no style and no weight"], [pair(), f"--ignore {key}"])),
    (chat("q", chosen="a"), "it has 'chosen', but no rejected answer"),
    (chat("q", "a", label=True), "'label' is True; --keep-desired uses the answers that KTO"),
    (chat("q", "a", label=True), QA, "--keep-desired"),
    (chat("q", "a", kto_tag=False), "'kto_tag' is False", "--keep-desired"),
    (chat("q", "a", label=False), QA, "--ignore label"),
    *((row, *expected) for row in (
        chat("q", answer("a", reasoning_content="x")), chat("q", answer("a", thinking="x")),
        chat("q", [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}]))
      for expected in (["--reasoning to put it before"], [made(("q", "x\n\na")), "--reasoning"],
                       [QA, "--ignore reasoning_content,thinking"])),
    (chat(user("q", reasoning="x"), "a"), "turn 0: it has reasoning", "--reasoning"),
    # placeholders
    (chat("p <image>", "a", "and <image>?", "b", **XY),
     made((["p ", BOTH[0]], "a"), (["and ", BOTH[1], "?"], "b"), **XY)),
    (chat("q", "a", "r", "b", **X), made(("q", "a"), ("r", "b"), **X)),
    (chat("<image>\n<image>\nq", "a", **XY), made(("q", "a"), **XY)),
    (chat("q\n<image>", "a", **X), QA_X),
    (chat("q <image><image>", "a", image=["x", "y"]), made((["q ", *BOTH], "a"), **XY)),
    (chat("<image><image>", "a", **X, images=["y"]), made((BOTH, "a"), **XY)),
    (chat("", "a", **X), made((BOTH[:1], "a"), **X)),
    (chat("q <image>", "a", "<image>", "b", **X), "must match its images or videos (1)"),
    *((chat(f"Of {tag}?", "a", **X), OF_X) for tag in (
        "<image>", "<Image>", "<|image|>", "<|image_1|>", "<image_1>", "<image_00>", "<ImageHere>",
        "<|vision_start|><|image_pad|><|vision_end|>")),
    (chat("<image_2><image_1>q", "a", **XY), "must match its images or videos (2) in their order"),
    (chat("<|image_1|>q", "a"), "it has a placeholder, but no image or video; --ignore"),
    (chat("Of <img>x</img>?", "a"), OF_X),
    (chat("<img>x</img>q", "a", image="y"), "must match its images or videos (1) in their order"),
    (chat("<|vision_start|>x<|vision_end|>", "a"), "<|vision_start|> is not supported here"),
    *((chat(f"q {tag}", "a"), f"a question: {tag} is not supported here") for tag in (
        "</image>", "<start_of_image>", "[IMG]", "<im_start>", "<|ref|>", "< image >", "<loc_12>")),
    *((chat("q", f"a {mark} b"), f"turn 1: {mark} is not supported here") for mark in (
        "<|im_end|>", "<|/det|>", "<loc0100>", "<patch_index_0012>", "<seg>", "<__dj__image>",
        '"point_2d"')),
    (chat("q", "a <|x|>"), made(("q", "a <|x|>")), "--ignore <|x|>"),
    (chat("<audio>q", "a"), "a question: <audio> is not supported here; --ignore '<audio>' keeps"),
    (chat("Of <video>?", "a"), made(("Of <video>?", "a")), "--ignore <video>"),
    (chat("q", "<video>", system="<image>"), made(("q", "<video>"), system="<image>")),
    (chat("<image>q", "![](<image>)", **X), made(("q", "![](<image>)"), **X)),
    (chat("q", "<image>", **X), "an answer: <image> is not supported here"),
    # images and videos of turns, parts and rows
    *((chat(user("q", **{key: value}), "a"), QA_X) for key, value in (
        ("images", ["x"]), ("image", "x"), ("image_url", {"url": "x", "detail": "low"}))),
    (chat(user("Of <image>?", images=["x"]), "a"), OF_X),
    (chat("q", answer("a", **X)), "only turns of the user can contain an image"),
    *((chat([part, TEXT], "a"), QA_X) for part in (
        {"type": "image", "image": "x", "text": None}, {"type": "image", "path": "x"},
        {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_image", "url": "x"})),
    (chat([{"type": "image"}, TEXT], "a", images=[{"path": "x", "bytes": None}]),
     {"image": {"path": "x"}, **QA}),
    (chat("<image_00>q", "a", image={"<image_00>": "x"}), QA_X),
    *((chat("q", "a", image=url), "must be the path of a downloaded file (URLs and base64 are not")
      for url in ({"url": "data:image/png;base64,AA"}, "file:///a.png", "https://x/a.png")),
    (chat([TEXT, {"type": "input_audio"}], "a"), "a part must be a text, an image or a video, not"),
    (chat("<image>q", "a", video="v"), {"video": "v", **QA}),
    (chat("<video>q", "a", videos=[["f", "g"]], fps=1), {"video": FRAMES, **QA}),
    (chat("q", "a", video="v", start=1, end=2), {"video": CLIP, **QA}),
    (chat([PART, TEXT], "a"), {"video": CLIP, **QA}),
    (chat([{**PART, "fps": 2}, TEXT], "a"), "only a list of frames can have it; add --ignore fps"),
    (chat("q", "a", **X, video="v"), "not 1 image and 1 video"),
    # boxes and points
    *((chat("<image>q", text, **X), made(("q", boxes((1, 2, 3, 4), **THOUSAND)), **X)) for text in (
        "<ref>cup</ref><box>(1,2),(3,4)</box>", "<ref>cup</ref><box>[[1, 2, 3, 4]]</box>.",
        "<|object_ref_start|>cup<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>")),
    (chat("Find <ref>cup</ref>", "<box>[[1, 2, 3, 4], [5, 6, 7, 8]]</box>", **X),
     made(("Find cup", boxes((1, 2, 3, 4), (5, 6, 7, 8), **THOUSAND)), **X)),
    (chat("p", "a", "q", answer("<box>(1,2),(3,4)</box>", loss=False), **X),
     made(("p", "a"), ("q", boxes((1, 2, 3, 4), label="", **THOUSAND), 0), **X)),
    *((chat("q", text, **X), "it must contain nothing else") for text in (
        "Here: <box>[[1, 2, 3, 4]]</box>", "<box>[[1, 2, 3]]</box>", "<box></box>", "<box>[1]",
        "<point>1,2</point>", '<points coords="1 2 3">cups</points>',
        "<box>[[0.1, 0.2, 0.3, 0.4]]</box>", f"{JSON} it is",
        '<points x1="1" x2="3" y1="2" y2="4" alt="cups">cups</points>',
        "<ref>a</ref><box>[[1, 2, 3, 4]]</box><ref>b</ref><box>[[1, 2, 3, 4]]</box>")),
    (chat("At <box>(1,2),(3,4)</box>?", "a", **X), "a question: <box> is not supported here"),
    *(({**FIND, "objects": {**OBJECTS, **more}},
       made(("Find the cup", boxes(*OBJECTS["bbox"], **size)), **X), flags)
      for more, size, flags in (({"bbox_type": "real"}, {}, ""), ({"bbox_type": None}, {}, ""),
                                ({"bbox_type": "none"}, {"size": [80, 60]}, "--resized 80,60"))),
    ({**FIND, "objects": {**OBJECTS, "bbox": [[0.1, 0, 1, 1e-5]] * 2, "bbox_type": "norm1"}},
     made(("Find the cup", boxes(*[(0.1, 0, 1, 1e-5)] * 2, coords="unit")), **X)),
    ({**FIND, "objects": {**OBJECTS, "bbox_type": "none"}}, "with --resized W,H"),
    (chat("q <ref-object>", "a <ref-object>", objects={"ref": ["c", "d"]}), made(("q c", "a d"))),
    ({**FIND, "objects": {"ref": ["cup"], "bbox": [[1, 2, 3, 4]]}}, "turn 1: <bbox> is not"),
    ({**FIND, "objects": {**OBJECTS, "bbox": [[10**400] * 4] * 2}}, "OverflowError: int too large"),
    (chat("q", f"{JSON}\n{JSON}", **X, resized_width=84, resized_height=56),
     made(("q", boxes((1, 2, 30, 20), (1, 2, 30, 20), size=[84, 56])), **X)),
    ({**FIND, "objects": {**OBJECTS, "ref": ["cup", "x"]}}, "objects: it has more entries"),
    ({**FIND, "objects": {**OBJECTS, "image_id": [1]}}, "objects: the field 'image_id' is not"),
    (FIND, "turn 0: <ref-object> is not supported here"),
    (chat("At <bbox>?", "a", **X, objects=OBJECTS), "turn 0: <bbox> is not supported here"),
    (chat("q", JSON, **X), "a resized image; give the size of this image with --resized W,H"),
    (chat("q", '{"label": "cup", "bbox_2d": [1, 2, 3, 4]}', **X),
     made(("q", boxes((1, 2, 3, 4), size=[80, 60])), **X), "--resized 80,60"),
    (chat("q", JSON, **X, resized_width=84, resized_height=56),
     made(("q", boxes((1, 2, 30, 20), size=[84, 56])), **X), "--resized 80,60"),
    (chat("q", "Use <box>", **X), "--ignore '<box>' keeps it as ordinary text"),
    (chat("q", "a bbox_2d", **X), made(("q", "a bbox_2d"), **X), "--ignore bbox_2d"),
    *((chat("q", text, **X), made(("q", {
        "type": "point", "label": "cup", "coords": "percent",
        "points": [{"x": x, "y": y} for x, y in places]}), **X)) for text, *places in (
            ('<point x="10.5" y="2" alt="cup">cup</point>', (10.5, 2)),
            ('<points x1="1" y1="2" x10="3" y10="4" alt="cup">it</points>', (1, 2), (3, 4)))),
]


@pytest.mark.parametrize(("row", "expected", "flags"), [(*entry, "")[:3] for entry in TABLE])
def test_every_field_and_tag_gives_this_record_or_this_sentence(tmp_path, row, expected, flags):
    path = write(tmp_path / "r.jsonl", chat("first", "a"), row)
    _, _, err = run(path, tmp_path / "out.jsonl", *flags.split())
    first, *records = read(tmp_path / "out.jsonl")
    assert first == made(("first", "a"))
    if isinstance(expected, str):
        (sentence,) = err.splitlines()
        assert f"{path}:2: " in sentence
        assert expected in sentence
    assert records == ([] if isinstance(expected, str) else [expected])


def test_fields_that_change_nothing_are_listed_once_at_the_end(tmp_path):
    """Every message about a row contains its line and its id."""
    rows = [chat("q", "a", id="\x1b", speech="x"),
            *[chat("q", "a", source=k, lang="") for k in "ab"]]
    _, counts, err = run(write(tmp_path / "r.jsonl", *rows), tmp_path / "out.jsonl")
    assert counts == {"rows": 3, "records": 2, "skipped": {"unknown field": 1}}
    first, last = err.splitlines()
    assert r"r.jsonl:1 id '\x1b': unknown field: the entry: the field 'speech' is not" in first
    assert last.endswith("'source' is not used; it occurs 2 times, for example with the value 'a'")


@pytest.mark.parametrize("answer", [
    "[ " * 10_000 + '{"bbox_2d": [' + "1, " * 10_000, "<bbox " * 20_000])
def test_a_long_answer_is_read_in_a_time_that_grows_with_its_length(answer):
    begin = time.process_time()
    with pytest.raises(Unreadable, match="it must contain nothing else"):
        read_answer(answer, [], {}, SimpleNamespace(ignore=[]))
    assert time.process_time() - begin < 1


SHAPES = """
null ; {"conversations":{}} ; {"conversations":[[]]} ; {"conversations":[{"from":[],"value":{}}]}
{"messages":[{"role":"user","content":[{"type":"image","image":[3]}]},{"role":"assistant"}]}
{"conversations":3} ; {"messages":[{"role":"user","content":[3]}]} ; [{"messages":[]}]
{"messages":[],"objects":3} ; {"messages":[{"role":"user","content":3}]}
{"messages":[],"rejected":"a"} ; {"messages":[],"chosen":"a"}
"""


def test_values_of_wrong_types_at_every_depth_are_refused(tmp_path):
    shapes = SHAPES.replace(" ; ", "\n").split()
    status, counts, _ = run(write(tmp_path / "r.jsonl", *shapes), tmp_path / "out.jsonl")
    assert (status, counts["records"]) == (1, 0)
    assert counts["skipped"] == {"wrong record": len(shapes)}
