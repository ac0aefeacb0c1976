"""Chats in other data formats as records: placeholders, boxes, and what is refused."""

import json

import pytest

from records.errors import Unreadable
from records.parse import parse
from tests.records.samples import write
from tests.tools.convert.command import CONFORMANCE, run
from tools.convert.chats import convert

# list key -> key of the role, key of the text, user, assistant
CHATS = {
    "conversations": ("from", "value", "human", "gpt"),
    "messages": ("role", "content", "user", "assistant"),
}


def row(*texts, key="conversations", **more):
    """A row whose turns are the user's and the assistant's alternately."""
    role, content, *roles = CHATS[key]
    return {**more, key: [{role: roles[k % 2], content: text} for k, text in enumerate(texts)]}


# --------------------------------------------------------------------------------------------------
# placeholders


@pytest.mark.parametrize(("texts", "media", "expected"), [
    # as many as images: the images in order
    (("what is\n<image>\nand <image>?", "a", "and <image>", "b"), {"images": ["x", "y", "z"]},
     [["what is\n", {"image": 0}, "\nand ", {"image": 1}, "?"], ["and ", {"image": 2}]]),
    # none: the media come first
    ((" what? ", "a", "why?", "b"), {"image": "x"}, [" what? ", "why?"]),
    (("what?", "a"), {"video": "v"}, ["what?"]),
    # one for a video, of either name
    (("<image>\nwhat?", "a"), {"video": "v"}, ["what?"]),
    (("who?", "a", "<video> and here?", "b"), {"video": "v"},
     ["who?", [{"video": 0}, " and here?"]]),
    # those that open the first turn, and a single one that closes it, are taken out
    (("<image>\n<image>\nq", "a"), {"images": ["x", "y"]}, ["q"]),
    (("q\n<image>", "a"), {"image": "x"}, ["q"]),
    (("Is <image> a cat?", "a"), {"image": "x"}, [["Is ", {"image": 0}, " a cat?"]]),
    (("<image> x <image>", "a"), {"images": ["x", "y"]}, [[{"image": 0}, " x ", {"image": 1}]]),
    (("q <image><image>", "a"), {"images": ["x", "y"]}, [["q ", {"image": 0}, {"image": 1}]]),
    # a prompt of nothing but images stays a list of them
    (("<image> <image>", "a"), {"image": ["x", "y"]}, [[{"image": 0}, {"image": 1}]]),
    (("", "a"), {"image": "x"}, [[{"image": 0}]]),
])
def test_what_placeholders_stand_for(texts, media, expected):
    native = convert(row(*texts, **media))
    parse(native)
    (annotation,) = native["annotations"]
    assert [turn["question"] for turn in annotation["turns"]] == expected
    assert [turn["answer"] for turn in annotation["turns"]] == [*texts[1::2]]


# --------------------------------------------------------------------------------------------------
# chats of every kind


@pytest.mark.parametrize("form", [
    lambda text: text, lambda text: {"from": "gpt", "value": text},
    lambda text: [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]])
@pytest.mark.parametrize("key", CHATS)
def test_a_row_with_chosen_and_rejected_is_a_preference(key, form):
    given = row("<image>\nq", key=key, image="x", chosen=form("a"), rejected=form("b"))
    native = convert(given)
    parse(native)
    assert native["annotations"] == [
        {"type": "preference", "question": "q", "chosen": "a", "rejected": "b"}]


@pytest.mark.parametrize("part", [
    {"type": "image", "image": "y"}, {"type": "image", "path": "y"}, {"type": "image", "url": "y"},
    {"type": "image_url", "image_url": {"url": "y"}}, {"type": "image_url", "image_url": "y"},
    {"type": "image", "text": None, "image": {"url": "y"}}])
def test_a_part_names_its_image_in_many_ways(part):
    native = convert(row([part, {"type": "text", "text": "q"}], "a", key="messages"))
    turns = [{"question": "q", "answer": "a"}]
    assert native == {"image": "y", "annotations": [{"type": "qa", "turns": turns}]}


PART = {"type": "video", "video": "v", "video_start": 1, "video_end": 4.5}


@pytest.mark.parametrize(("fields", "video"), [
    ({"messages": row([PART], "a", key="messages")["messages"]},
     {"path": "v", "start": 1, "end": 4.5}),
    ({"video": "v"}, "v"),
    ({"videos": ["v"]}, "v"),
    ({"video": "v", "start": 1, "end": 2}, {"path": "v", "start": 1, "end": 2}),
    ({"videos": [["f", "g"]], "fps": 1}, {"frames": ["f", "g"], "fps": 1}),
])
def test_videos_come_in_many_forms(fields, video):
    native = convert(fields if "messages" in fields else row("<video>q", "a", **fields))
    assert native["video"] == video
    parse(native)


def test_a_system_kinds_and_weights_nothing_and_a_last_question_without_an_answer():
    messages = [{"role": "system", "content": "be brief"},
                {"role": "user", "content": "q", "loss_weight": 0},
                {"role": "assistant", "content": "a", "loss_weight": 0.5},
                {"role": "user", "content": "r"}]
    turns = [{"question": "q", "answer": "a", "weight": 0.5}]
    native = convert({"messages": messages, "image": "", "videos": [None], "tools": None})
    assert native == {"annotations": [{"type": "qa", "system": "be brief", "turns": turns}]}
    messages[0]["content"] = " "
    assert "system" not in convert({"messages": messages})["annotations"][0]


def test_turns_are_one_chat_unless_they_are_to_be_split():
    record = row("<image>\nq", "a", "r", "b", image="x", system="s")
    one = convert(record)["annotations"]
    split = convert(record, split_turns=True)["annotations"]
    assert [len(a["turns"]) for a in one] == [2]
    assert [len(a["turns"]) for a in split] == [1, 1]
    assert [a["turns"][0] for a in split] == one[0]["turns"]
    assert all(a["system"] == "s" for a in split)


def test_the_real_rows_are_these_records(tmp_path):
    def chat(*pairs):
        turns = [{"question": question, "answer": answer} for question, answer in pairs]
        return [{"type": "qa", "turns": turns}]

    (tmp_path / "rows.json").write_bytes((CONFORMANCE / "sharegpt.json").read_bytes())
    run(tmp_path / "rows.json", tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "sg1", "image": "coffee.png",
         "annotations": chat(("What is in the cup?", "Espresso."),
                             ("And under it?", "A red saucer."))},
        {"id": "sg2", "video": "bigbuckbunny.mp4",
         "annotations": chat(("Which animal is it?", "A rabbit."))},
        {"id": "sg3", "images": ["coffee.png", "chelsea.png"],
         "annotations": chat(("Which one is alive?", "The second, a cat."))},
        {"id": "sg4", "annotations": chat(("Say hello.", "Hello."))},
    ]


# --------------------------------------------------------------------------------------------------
# answers with <box>

QWEN = "<ref>the cup</ref><box>(100,200),(300,600)</box><box>(500,500),(700,600)</box>"
INTERNVL = "<ref>the cup</ref><box>[[100, 200, 300, 600], [500, 500, 700, 600]]</box>."


def chat(*turns):
    roles = ("human", "gpt") * len(turns)
    return [{"from": role, "value": text} for role, text in zip(roles, turns, strict=False)]


@pytest.mark.parametrize("answer", [QWEN, INTERNVL])
def test_an_answer_of_box_tags_becomes_an_annotation_of_its_own(answer):
    turns = chat("<image>\nWhat is it?", "A cup.", "Find the cups.", answer)
    alone = chat("Where?", "<box>[[1, 2, 3, 4]]</box>")
    record, other = (convert({"image": "a.png", "conversations": t}) for t in (turns, alone))
    parse(record)
    text, found = record["annotations"]
    assert [turn["answer"] for turn in text["turns"]] == ["A cup."]
    assert found == {
        "type": "box", "question": "Find the cups.", "label": "the cup", "coords": "unit",
        "form": "xyxy", "boxes": [{"box": [0.1, 0.2, 0.3, 0.6]}, {"box": [0.5, 0.5, 0.7, 0.6]}]}
    assert [a.keys() & {"question", "label"} for a in other["annotations"]] == [{"question"}]


BAD = ["It is here: <box>[[1, 2, 3, 4]]</box>", "<box>[[1, 2, 3]]</box>", "<box></box>",
       "<ref>a</ref><box>[[1, 2, 3, 4]]</box><ref>b</ref><box>[[1, 2, 3, 4]]</box>",
       "<box>[[0.1, 0.2, 0.3, 0.4]]</box>", "<box>[[1, 2, 3, 4]]"]


@pytest.mark.parametrize("answer", BAD)
def test_boxes_among_other_words_are_refused(answer):
    with pytest.raises(Unreadable, match=r"^wrong record: an answer with <box>: it must contain"):
        convert({"image": "a.png", "conversations": chat("Where?", answer)})


# --------------------------------------------------------------------------------------------------
# what is refused


TEXT = {"type": "text", "text": "q"}
USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def messages(*parts, **more):
    """A row whose question has these typed parts."""
    return row(list(parts), "a", key="messages", **more)


PLANTED = [
    (row("<image> q", "a"), "1 placeholder, but the number of its images or videos is 0"),
    (row("<image> q", "a", images=["x", "y"]), "the number of its images or videos is 2"),
    (row("<image> q", "a", "<image>", "b", image="x"), "2 placeholders, but the number"),
    (row("q", "a", image="x", images=["y"]), ""),                # both are its images
    (row("q", "a", image="x", video="v"), "not 1 image and 1 video"),
    (row("q", "a", video=["v", "w"]), "not 0 images and 2 videos"),
    (messages({"type": "image", "image": "y"}, TEXT, images=["x"]), "1 placeholder, but"),
    (messages({"type": "image", "image": "y"}, {"type": "image"}, images=["x"]), "named in the"),
    (messages({"type": "image", "index": 0}, TEXT, images=["x"]), "'index' of a part"),
    (row("q", "a <image>", image="x"), "only turns of the user"),
    (row("q", "a", image="x", system="<video>"), "system: it cannot contain"),
    (row("q", "a", image_path="x"), "'image_path' is not read; did you mean 'image' or 'video'?"),
    *((row("q", "a", **{name: "x"}), f"the field '{name}' is not read") for name in (
        "video_path", "image_url", "img_path", "Image", "media", "files", "frames")),
    (row("q", "a", image_path="x", image="x"), ""),              # beside an image: anything
    *((row("q", "a", image="x", **{name: "x"}), f"'{name}' cannot be trained on") for name in (
        "clip", "audio_path", "tools", "pdf", "depth", "point_cloud")),
    (row("q", chosen="a"), "'chosen' and 'rejected' go together"),
    (row("q", chosen="a", rejected={"from": "gpt"}), "rejected"),
    (row("q", "a", "q", chosen="a", rejected="b"), "before 'chosen' stands one question"),
    (row("q", "a", chosen="a", rejected="b"), "they alternate"),
    (row("q", chosen="a", rejected="b", system="s"), "without a system text"),
    (messages({"type": "text"}), "a part of type text needs a 'text'"),
    (messages(TEXT, {"type": "input_audio", "input_audio": {}}), "a part is a text, an image"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "tool calls cannot be trained on"),
    ({"messages": [{"role": "tool", "content": "q"}, ASSISTANT]}, "the role 'tool' is not one of"),
    ({"conversations": [{"from": "human", "value": "q"}] * 2}, "they alternate"),
    ({"messages": [USER, ASSISTANT, {"role": "system", "content": "s"}]}, "they alternate"),
    (row("q"), "there is no question with an answer"),
    (row(3, "a"), "a turn is a text or a list of parts"),
    (row(" ", "a"), "'question' must be a text"),
    (row("q", "a", image=3), "image: it must be an object"),
    (row("q", "a", videos=[["f", "g"]]), "'fps'"),
]


@pytest.mark.parametrize(("record", "words"), PLANTED)
def test_a_row_is_refused_in_a_sentence_and_costs_itself_alone(tmp_path, record, words):
    path = write(tmp_path / "r.jsonl", row("q", "a"), record, row("r", "b"))
    status, counts, err = run(path, tmp_path / "out.jsonl")
    assert status == 0
    skipped = {"wrong record": 1} if words else {}
    assert counts == {"rows": 3, "records": 3 - bool(words), "skipped": skipped}
    if words:
        (sentence,) = err.splitlines()
        assert sentence.startswith(f"tools.chats: {path}:2: wrong record: ")
        assert words in sentence
        assert sentence.endswith("; skipped")
    else:
        assert err == ""


SHAPES = """
null ; {"conversations":{}} ; {"conversations":[[]]} ; {"conversations":[{"from":[],"value":{}}]}
{"messages":[{"role":"user","content":[{"type":"image","image":[3]}]},{"role":"assistant"}]}
{"conversations":3} ; {"messages":[{"role":"user","content":[3]}]} ; [{"messages":[]}]
"""


def test_values_of_wrong_types_at_every_depth_are_refused(tmp_path):
    shapes = SHAPES.replace(" ; ", "\n").split()
    status, counts, _ = run(write(tmp_path / "r.jsonl", *shapes), tmp_path / "out.jsonl")
    assert (status, counts["records"]) == (1, 0)
    assert counts["skipped"] == {"wrong record": len(shapes)}
