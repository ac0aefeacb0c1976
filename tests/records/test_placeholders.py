"""Which media placeholders in a chat stand for: rules P1 to P8 of records/placeholders.py."""

import pytest

from records.dialects import convert
from tests.records.test_dialects import code, questions, row


def test_p1_as_many_placeholders_as_images_are_the_images_in_order():
    texts = ("what is\n<image>\nand <image>?", "a", "and <image>", "b")
    assert questions(row(*texts, images=["x", "y", "z"])) == [
        ["what is\n", {"image": 0}, "\nand ", {"image": 1}, "?"],
        ["and ", {"image": 2}]]


@pytest.mark.parametrize("media", [{"image": "x"}, {"images": ["x", "y"]}, {"video": "v"}])
def test_p2_without_a_placeholder_the_media_come_first(media):
    assert questions(row(" what? ", "a", "why?", "b", **media)) == [" what? ", "why?"]


@pytest.mark.parametrize("mark", ["<image>", "<video>"])
def test_p3_of_one_video_a_placeholder_of_either_name_is_the_video(mark):
    native, _ = convert(row(f"{mark}\nwhat?", "a", video="v"))
    turns = [{"question": "what?", "answer": "a"}]
    assert native == {"video": "v", "annotations": [{"type": "qa", "turns": turns}]}
    later = row("who?", "a", f"{mark} and here?", "b", video="v")
    assert questions(later) == ["who?", [{"video": 0}, " and here?"]]


@pytest.mark.parametrize(("texts", "media", "expected"), [
    (("<image> q", "a"), {}, "E30"),
    (("<video> q", "a"), {}, "E30"),
    (("q", "a", "<image>", "b"), {"image": ""}, "E30"),
    (("<image> q", "a"), {"images": ["x", "y"]}, "E31"),
    (("<image><image> q", "a"), {"image": "x"}, "E31"),
    (("<image> q", "a", "<image>", "b"), {"image": "x"}, "E31"),
    (("<video> q", "a"), {"image": "x"}, "E31"),
    (("<video><image> q", "a"), {"image": "x"}, "E31"),
    (("<image><video> q", "a"), {"video": "v"}, "E31"),
    (("q", "a", "<image><image>", "b"), {"video": "v"}, "E31"),
])
def test_p4_anything_else_is_refused_never_repeated_never_dropped(texts, media, expected):
    assert code(row(*texts, **media)) == expected


@pytest.mark.parametrize(("text", "n", "expected"), [
    ("<image>\n<image>\nq", 2, "q"),
    (" <image><image> q ", 2, "q "),
    ("<image>\nq", 1, "q"),
    ("q\n<image>", 1, "q"),
    ("see <image> here", 1, "see here"),
    ("see\n<image>\nhere", 1, "see\nhere"),
    ("see<image>here", 1, "see here"),
    ("<image> x <image>", 2, [{"image": 0}, " x ", {"image": 1}]),
    ("q <image><image>", 2, ["q ", {"image": 0}, {"image": 1}]),
])
def test_p5_a_leading_block_or_a_single_one_is_taken_out(text, n, expected):
    assert questions(row(text, "a", images=["x", "y"][:n])) == [expected]


def test_p5_a_leading_block_in_another_order_keeps_its_places():
    for order, expected in (((0, 1), "q"), ((1, 0), [{"image": 1}, {"image": 0}, "q"])):
        parts = [{"type": "image", "index": k} for k in order] + [{"type": "text", "text": "q"}]
        native, _ = convert(row(parts, "a", key="messages", images=["x", "y"]))
        assert native["annotations"][0]["turns"][0]["question"] == expected


def test_p5_holds_for_the_first_turn_alone():
    record = row("who?", "a", "<image> and now?", "b", image="x")
    assert questions(record) == ["who?", [{"image": 0}, " and now?"]]
    record = row("<image>who?", "a", "<image> now?", "b", image=["x", "y"])
    assert questions(record) == [[{"image": 0}, "who?"], [{"image": 1}, " now?"]]


@pytest.mark.parametrize(("text", "media", "expected"), [
    (" <image>\n", {"image": "x"}, [{"image": 0}]),
    ("<image> <image>", {"image": ["x", "y"]}, [{"image": 0}, {"image": 1}]),
    ("<image>", {"video": "v"}, [{"video": 0}]),
    ("", {"image": "x"}, [{"image": 0}]),
])
def test_p6_a_prompt_of_nothing_but_images_stays_a_list_of_them(text, media, expected):
    assert questions(row(text, "a", **media)) == [expected]


@pytest.mark.parametrize("mark", ["<image>", "<video>"])
def test_p7_a_placeholder_in_an_answer_or_a_system_text_is_refused(mark):
    assert code(row("q", f"a {mark}", image="x")) == "E24"
    assert code(row("q", "a", image="x", system=mark)) == "E24"
    chat = row("q", "a", key="messages", image="x")
    chat["messages"].insert(0, {"role": "system", "content": [{"type": mark[1:-1]}]})
    assert code(chat) == "E24"


@pytest.mark.parametrize("nothing", ["", [], None, [""], [None]])
def test_p8_nothing_in_a_field_of_media_is_no_media(nothing):
    record = row("q", "a", image=nothing, video=nothing, images=nothing, audios=nothing)
    native, _ = convert(record)
    assert not {"image", "images", "video"} & set(native)
    assert code(record) == ""
    assert convert(record | {"image": "x"})[0]["image"] == "x"
