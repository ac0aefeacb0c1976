"""Rows of other projects as native records: media for placeholders, chats, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from records.check import check
from records.dialects import convert
from records.errors import InvalidRecord
from records.index import Options, read_checked
from records.reader import DataError, Records, Unreadable

TESTS = Path(__file__).parents[1]
# list key -> key of the role, key of the text, user, assistant
CHATS = {
    "conversations": ("from", "value", "human", "gpt"),
    "messages": ("role", "content", "user", "assistant"),
    "conversation": ("role", "content", "user", "assistant"),
}


def row(*texts, key="conversations", **more):
    """A row whose turns are the user's and the assistant's alternately."""
    role, content, *roles = CHATS[key]
    return {**more, key: [{role: roles[k % 2], content: text} for k, text in enumerate(texts)]}


def questions(record):
    """The questions of a converted row, which must be sound as a native record."""
    native, findings = convert(record)
    assert findings == []
    assert check(native, "here") == []
    (annotation,) = native["annotations"]
    answers = [turn["value"] for turn in record["conversations"][1::2]]
    assert [turn["answer"] for turn in annotation["turns"]] == answers
    return [turn["question"] for turn in annotation["turns"]]


def code(record, **options):
    """The code with which a row is refused; "" if it is not."""
    try:
        native, findings = convert(record, **options)
        if native is None:
            return findings[-1].code
        found = check(native, "f:1")
        return found[0].code if found else ""
    except InvalidRecord as error:
        return error.code
    except DataError as error:
        return re.match(r"f:1: (\w\d\d) ", str(error))[1]


# --------------------------------------------------------------------------------------------------
# chats of every kind


def test_every_dialect_says_the_same():
    turns = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    expected = {"annotations": [{"type": "qa", "turns": turns}]}
    for key in CHATS:
        assert convert(row("q", "a", "r", "b", key=key))[0] == expected
    cauldron = [{"user": "q", "assistant": "a"}, {"user": "r", "assistant": "b", "source": "s"}]
    assert convert({"texts": cauldron})[0] == expected
    roles = ("user", "model", "human", "bot")
    mixed = [{"role": role, "content": text} for role, text in zip(roles, "qarb", strict=True)]
    assert convert({"conversations": mixed})[0] == expected


def test_typed_parts_are_texts_and_placeholders():
    parts = [{"type": "text", "text": "is ", "index": None},
             {"type": "image", "index": 1, "image": None},
             {"type": "text", "value": " like "},
             {"type": "image_url", "image_url": {"url": "sub/y.png"}},
             {"type": "image", "text": None},
             {"type": "text", "text": "?"}]
    answer = [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]
    native, _ = convert(row(parts, answer, key="messages", images=["w", "x"]))
    question = ["is ", {"image": 1}, " like ", {"image": 2}, {"image": 0}, "?"]
    assert native["images"] == ["w", "x", "sub/y.png"]
    assert native["annotations"][0]["turns"] == [{"question": question, "answer": "yes"}]


@pytest.mark.parametrize("part", [
    {"type": "image", "image": "y"}, {"type": "image", "path": "y"}, {"type": "image", "url": "y"},
    {"type": "image_url", "value": "y"}, {"type": "image_url", "image_url": "y"},
    {"type": "image", "image": {"path": "y", "bytes": None}}])
def test_a_part_names_its_image_in_many_ways(part):
    native, _ = convert(row([part, {"type": "text", "text": "q"}], "a", key="messages"))
    turns = [{"question": "q", "answer": "a"}]
    assert native == {"image": "y", "annotations": [{"type": "qa", "turns": turns}]}


def test_a_video_in_a_part_brings_its_clip_or_its_frames():
    def converted(**part):
        parts = [{"type": "video", **part}, {"type": "text", "text": "q"}]
        return row(parts, "a", key="messages")

    native, _ = convert(converted(video="v", video_start=1, video_end=4.5))
    assert native["video"] == {"path": "v", "start": 1, "end": 4.5}
    native, _ = convert(converted(video=["f", "g"], fps=2))
    assert native["video"] == {"frames": ["f", "g"], "fps": 2}
    assert check(native, "f:1") == []
    assert code(converted(video=["f", "g"])) == "E07"            # fps is missing


@pytest.mark.parametrize(("fields", "video"), [
    ({"video": "v"}, "v"),
    ({"videos": ["v"]}, "v"),
    ({"video": {"path": "v", "bytes": None}}, "v"),
    ({"video": "v", "clip": [1, 2]}, {"path": "v", "start": 1, "end": 2}),
    ({"video": "v", "start": 1, "end": 2}, {"path": "v", "start": 1, "end": 2}),
    ({"videos": [["f", "g"]], "fps": 1}, {"frames": ["f", "g"], "fps": 1}),
    ({"videos": [["f"]], "fps": 1}, {"frames": ["f"], "fps": 1}),
    ({"video": "v", "where": "s/t", "fps": 3}, "s/t/v"),
    ({"videos": [["f", "g"]], "fps": 1, "where": "s/"}, {"frames": ["s/f", "s/g"], "fps": 1}),
])
def test_videos_come_in_many_forms(fields, video):
    native, _ = convert(row("<video>q", "a", **fields), path_prefix_field="where")
    assert native["video"] == video
    assert check(native, "f:1") == []


def test_native_fields_are_honoured_and_all_others_kept_as_meta():
    native_fields = {"video": "v", "subtitles": "words", "weight": 2}
    others = {"data_source": "set", "score": 3}
    native, _ = convert(row("q", "a", id=7, style="vqa2", system="be brief", meta={"a": 1},
                            tools=None, **native_fields, **others))
    turns = [{"question": "q", "answer": "a"}]
    annotation = {"type": "qa", "style": "vqa2", "system": "be brief", "turns": turns}
    assert native == {"id": "7", **native_fields, "meta": {**others, "a": 1},
                      "annotations": [annotation]}
    assert check(native, "f:1") == []
    assert code(row("q", "a", weight=0)) == "E07"
    assert code(row("q", "a", image="x", subtitles="s")) == "E07"


def test_a_system_turn_and_weights_of_messages():
    messages = [{"role": "system", "content": "be brief"},
                {"role": "user", "content": "q", "loss_weight": 0},
                {"role": "assistant", "content": "a", "loss_weight": 0.5}]
    turns = [{"question": "q", "answer": "a", "weight": 0.5}]
    native, _ = convert({"messages": messages})
    assert native == {"annotations": [{"type": "qa", "system": "be brief", "turns": turns}]}
    messages[0]["content"] = " "
    assert "system" not in convert({"messages": messages})[0]["annotations"][0]


def test_turns_are_one_chat_unless_they_are_to_be_split():
    record = row("<image>\nq", "a", "r", "b", image="x", system="s")
    one = convert(record, split_turns=False)[0]["annotations"]
    split = convert(record, split_turns=True)[0]["annotations"]
    assert [len(a["turns"]) for a in one] == [2]
    assert [len(a["turns"]) for a in split] == [1, 1]
    assert [a["turns"][0] for a in split] == one[0]["turns"]
    assert all(a["system"] == "s" for a in split)


def test_a_last_question_without_an_answer_is_left_out_and_said(tmp_path):
    native, findings = convert(row("q", "a", "r"))
    assert native["annotations"][0]["turns"] == [{"question": "q", "answer": "a"}]
    assert [finding.code for finding in findings] == ["S01"]
    assert convert(row("q")) == (None, [("S01", "the last question has no answer")])
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row("q", "a", "r")) + "\n" + json.dumps(row("q")) + "\n")
    records = Records(path)
    assert len(records) == 2
    assert len(list(records)) == 1
    assert records.found["S01"].count == 2
    with pytest.raises(Unreadable, match=r"^S01 "):
        records[1]


# --------------------------------------------------------------------------------------------------
# what is refused


TEXT = {"type": "text", "text": "q"}
USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def messages(*parts, **more):
    """A row whose question has these typed parts."""
    return row(list(parts), "a", key="messages", **more)


def subtitle(start, end):
    return {"start": start, "end": end, "text": "x"}


PLANTED = [
    (row("q", "a", messages=[]), "E06"),
    ({"prompt": "q", "answer": "a"}, "E06"),
    ({"conversations": "q"}, "E07"),
    ({"conversations": ["q", "a"]}, "E07"),
    (row("q", ""), "E07"),
    (row(" ", "a"), "E07"),
    (row("q", "a", image=3), "E07"),
    (row("q", "a", image=["x", None]), "E07"),
    (row("q", "a", video="v", clip=[1]), "E07"),
    (row("q", "a", chosen="a", rejected="b"), "E07"),
    (row("q", "a", video="v", start=1), "E07"),
    (row("q", "a", image="https://x/y.jpg"), "E10"),
    (row("q", "a", image="../y.png"), "E10"),
    (row("q", "a", image={"bytes": "AAAA"}), "E10"),
    (messages({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}), "E10"),
    (row("q", "a", image="x", images=["y"]), "E13"),
    (row("q", "a", image="x", video="v"), "E14"),
    (row("q", "a", video=["v", "w"]), "E15"),
    (row("q", "a", video="v", videos=["w"]), "E15"),
    (row("q", "a", video="v", audio="s"), "E16"),
    (row("<audio>q", "a"), "E16"),
    (messages(TEXT, {"type": "input_audio", "input_audio": {}}), "E16"),
    ({"conversations": [{"from": "human", "value": "q"}] * 2}, "E20"),
    ({"conversations": [{"from": "gpt", "value": "q"}]}, "E20"),
    ({"messages": [USER, ASSISTANT, {"role": "system", "content": "s"}]}, "E20"),
    ({"messages": [{"role": "tool", "content": "q"}]}, "E21"),
    ({"messages": [{"content": "q"}]}, "E21"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "E21"),
    (messages({"type": "refusal"}), "E22"),
    (messages({"text": "q"}), "E22"),
    (messages({"type": "text"}), "E23"),
    (messages({"type": "text", "text": None}), "E23"),
    (row(3, "a"), "E23"),
    (row("q", None), "E23"),
    ({"texts": [{"user": "q"}]}, "E23"),
    ({"conversations": []}, "E25"),
    ({"messages": None}, "E25"),
    ({"messages": [{"role": "system", "content": "s"}]}, "E25"),
    (messages({"type": "image"}, TEXT), "E30"),
    (messages({"type": "video"}, TEXT), "E30"),
    (messages({"type": "image", "index": 0}, {"type": "text", "text": "<image>q"}, images=["x"]),
     "E31"),
    (messages({"type": "image", "image": "y"}, TEXT, images=["x"]), "E31"),
    (messages({"type": "image", "index": 1}, TEXT, images=["x"]), "E32"),
    (row("q", "a", video="v", clip=[5, 5]), "E40"),
    (row("q", "a", video="v", clip=[-1, 5]), "E40"),
    (row("q", "a", video="v", subtitles=[subtitle(3, 2)]), "E41"),
    (row("q", "a", video="v", subtitles=[subtitle(3, 9), subtitle(2, 9)]), "E41"),
    (row("q"), "S01"),
    (row("q", "say <|im_end|>"), "W07"),
    (row("q", "a"), ""),
]


@pytest.mark.parametrize(("record", "expected"), PLANTED,
                         ids=[f"{c}-{i}" for i, (_, c) in enumerate(PLANTED)])
def test_a_planted_mistake_has_its_code(record, expected):
    assert code(record) == expected


def test_a_row_that_is_refused_is_skipped_unless_the_file_is_to_be_sound(tmp_path):
    path = tmp_path / "r.json"
    rows = [row("q", "a"), row("q", "a", image="/x"), row("q", "a", "r", "b", key="conversation")]
    path.write_text(json.dumps(rows, indent=0))
    records = Records(path)
    assert len(records) == 3
    assert len(list(records)) == 2
    assert set(records.found) == {"E10"}
    with pytest.raises(Unreadable, match=r"^E10 the path '/x' is absolute \(image\)"):
        records[1]
    with pytest.raises(DataError, match=r"r.json:\d+: E10 "):
        Records(path, lenient=False)
    assert read_checked(json.dumps(row("q")), "f:1", Options())[0] is None


def test_the_real_rows_are_these_records():
    records = Records(TESTS / "conformance/sharegpt.json", TESTS / "media")

    def chat(*pairs):
        turns = [{"question": question, "answer": answer} for question, answer in pairs]
        return [{"type": "qa", "turns": turns}]

    assert [{k: v for k, v in r.items() if k not in ("where", "source")} for r in records] == [
        {"id": "sg1", "image": "coffee.png",
         "annotations": chat(("What is in the cup?", "Espresso."),
                             ("And under it?", "A red saucer."))},
        {"id": "sg2", "video": "bigbuckbunny.mp4",
         "annotations": chat(("Which animal is it?", "A rabbit."))},
        {"id": "sg3", "images": ["coffee.png", "chelsea.png"],
         "annotations": chat(("Which one is alive?", "The second, a cat."))},
        {"id": "sg4", "annotations": chat(("Say hello.", "Hello."))},
    ]


def test_rows_of_one_video_become_one_record_whose_questions_do_not_see_each_other(tmp_path):
    rows = [row("<image>\nq", "a", "r", "b", id=1, video="v", data_source="s"),
            row("q", "a"),
            row("<video>\nt", "c", id=2, video="v", data_source="s"),
            row("t", "c", id=3, video="v", data_source="other")]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    records = Records(tmp_path / "r.json", split_turns=True, group_by_media=True,
                      path_prefix_field="data_source", style="video_short_answer")
    found = [(r["id"], r.get("video"), len(r["annotations"])) for r in records]
    assert found == [("1", "s/v", 3), ("r.json:1", None, 1), ("3", "other/v", 1)]
    assert [a["turns"][0]["question"] for a in records[0]["annotations"]] == ["q", "r", "t"]
    styles = {a["style"] for r in records for a in r["annotations"]}
    assert styles == {"video_short_answer"}


@pytest.mark.parametrize(("key", "meant"), [
    ("img", "image"), ("image_path", "image"), ("imgs", "images"), ("video_path", "video")])
def test_a_misspelled_image_is_not_trained_on_blindly(key, meant):
    record = row("What is it?", "A cat.", **{key: "a.png"})
    with pytest.raises(InvalidRecord, match="is not read") as error:
        convert(record)
    assert error.value.code == "E16"
    assert meant in str(error.value)
    # beside an image that is named rightly it may hold anything
    assert convert({**record, "image": "a.png"})[0]["image"] == "a.png"
