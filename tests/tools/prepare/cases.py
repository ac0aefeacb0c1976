"""Parts of the miniatures of published sets, and the miniatures of the image sets and of Tulu with
their expected records."""

import hashlib
import io
import math
from typing import NamedTuple

import pytest
from PIL import Image


class Case(NamedTuple):
    """A miniature of a published set, and the expected result."""

    rows: list
    records: list                    # the expected records, without ids
    skipped: dict = {}               # noqa: RUF012 - nobody changes it
    arguments: tuple = ()            # for the command
    is_json: bool = False            # else it is published as parquet


U = "https://example.org/u.jpg"
V = "https://example.org/v.jpg?a=1&b=2"
W = "http://example.org/w"
HASH = "ab" * 32


def image_file(colour, kind="png", size=(6, 4)):
    """-> the bytes of an image file."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


RED = image_file("red")
BLUE = image_file("blue")
JPEG = image_file("green", "jpeg")


def sha(value):
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()


def image_cell(data=None, path=None):
    return {"bytes": data, "path": path}


def asked(question, image=RED, **columns):
    """-> a row with an image file."""
    return {"question": question, "image": image_cell(image), **columns}


def url_image(url, **more):
    """-> the image entry of a record."""
    return {"path": sha(url), "url": url, **more}


def of_messages(*messages):
    """-> a row of Ai2's own copy of a set: an image with all its questions."""
    return {"image": "coco/a.jpg", "message_list": list(messages), "metadata/image_id": 7}


def xy(*pairs):
    """-> points as a list of structs."""
    return [{"x": x, "y": y} for x, y in pairs]


def messages(*texts):
    """-> messages of user and assistant alternately."""
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def record(*annotations, **head):
    """-> a record. head: the fields image, images or video, and weight."""
    return {**head, "annotations": list(annotations)}


def question(style, words, **target):
    return {"type": "qa", "style": style, "question": words, **target}


def dialogue(style, *texts, **more):
    pairs = zip(texts[::2], texts[1::2], strict=True)
    turns = [{"question": words, "answer": reply} for words, reply in pairs]
    return {"type": "qa", "style": style, "turns": turns, **more}


def caption(style, words):
    return {"type": "caption", "style": style, "text": words}


def point(label, points, coords="percent", **more):
    return {"type": "point", "label": label, "coords": coords, "points": points, **more}


OF_U = {"image_url": U, "image_sha256": HASH}
IMAGE_U = url_image(U, sha256=HASH)
COUNTING = {"collection_method": "counting"}
POINTING = {"collection_method": "pointing"}
BY_METHOD = [
    {"image_url": U, "points": xy((1, 2)), "count": 1, "label": "a", **POINTING},
    {"image_url": U, "points": xy((3, 4)), "count": 1, "label": "b", **COUNTING},
]

TWO_IMAGES = {"images": [image_cell(None, "l.png"), image_cell(None, "r.png")]}


def crowd(*answers):
    return [{"answer": answer} for answer in answers]


def qa_pairs(questions, answers, explanations=None):
    pairs = {"question": questions, "answer": answers}
    return {"qa_pairs": pairs | ({"explanation": explanations} if explanations else {})}


CASES = {
    "pixmo-cap": Case(
        rows=[
            {"image_url": U, "caption": " Three boats. ", "transcripts": ["um boats", "boats"]},
            {"image_url": V, "caption": "", "transcripts": None},
        ],
        records=[record(
            caption("long_caption", "Three boats."), caption("transcript", "um boats"),
            caption("transcript", "boats"), image=url_image(U))],
        skipped={"wrong record": 1},
    ),
    "pixmo-cap-only": Case(
        rows=[{"image_url": U, "caption": "Boats.", "transcripts": ["um"]}],
        records=[record(caption("long_caption", "Boats."), image=url_image(U))],
    ),
    "pixmo-points": Case(
        rows=[
            {**OF_U, "points": xy((21.4, 55.0), (100.3, -5)), "count": 2, "label": "mug",
             **POINTING},
            {"image_url": V, "points": [], "count": 0, "label": "cats", **COUNTING},
            {**OF_U, "points": xy((1, 2)), "count": 1, "label": "Cat", **COUNTING},
            {**OF_U, "points": xy((1, 2)), "count": 2, "label": "torn"},
            {**OF_U, "points": xy(*[(1, 2)] * 61), "count": 61, "label": "crowd"},
            {**OF_U, "points": xy((1, math.nan)), "count": 1, "label": "nan"},
            {**OF_U, "points": xy((1, 2)), "count": 1, "label": " "},
        ],
        records=[
            record(point("mug", xy((21.4, 55.0), (100, 0)), count=2),
                   point("Cat", xy((1, 2)), count=1), image=IMAGE_U),
            record(point("cats", [], count=0), image=url_image(V)),
        ],
        skipped={"more than 60 points": 1, "wrong record": 3},
    ),
    "pixmo-points-basic": Case(
        rows=BY_METHOD,
        records=[record(point("a", xy((1, 2)), count=1), image=url_image(U))],
        skipped={"another collection_method": 1},
    ),
    "pixmo-points-high-frequency": Case(
        rows=BY_METHOD,
        records=[record(point("b", xy((3, 4)), count=1), image=url_image(U))],
        skipped={"another collection_method": 1},
    ),
    "pixmo-points-eval": Case(
        rows=[{"image_url": U, "points": xy((1, 2)), "label": "a", "masks": [[[True]]]}],
        records=[record(point("a", xy((1, 2))), image=url_image(U))],
    ),
    "pixmo-count": Case(
        rows=[
            {**OF_U, "count": 2, "points": {"x": [112.5, 401.0], "y": [300.0, 287.5]},
             "label": "sheep"},
            {"image_url": V, "count": 4, "points": None, "label": "people"},
        ],
        records=[
            record(point("sheep", xy((112.5, 300.0), (401.0, 287.5)), "pixel", count=2),
                   image=IMAGE_U),
            record({"type": "count", "label": "people", "count": 4}, image=url_image(V)),
        ],
    ),
    "pixmo-clocks": Case(
        rows=[
            {"example_id": "face/003_08:15:30.8_name", "text": "8:15:30"},
            {"example_id": "face/004", "text": "The time is not shown in the image."},
            {"example_id": "face/../004", "text": "1:00 AM"},
        ],
        records=[
            record(question("clocks", "What time is being shown?",
                            answer="The time shown is 8:15:30"), image="face/003_08:15:30.8_name"),
            record(question("clocks", "What time is being shown?",
                            answer="The time is not shown in the image."), image="face/004"),
        ],
        skipped={"path that leaves the media folder": 1},
    ),
    "pixmo-ask-model-anything": Case(
        rows=[
            {**OF_U, "question": "What for?", "answer": "It ties."},
            {**OF_U, "question": "Who?", "answer": "Ann."},
        ],
        records=[record(
            question("user_qa", "What for?", answer="It ties."),
            question("user_qa", "Who?", answer="Ann."), image=IMAGE_U)],
    ),
    "pixmo-cap-qa": Case(
        rows=[{"image_url": U, "question": tagged, "answer": "Yes."} for tagged in (
            "[USER] What colour? [ASSISTANT] Orange. [USER] Sure? [ASSISTANT]",
            "[USER] One? [ASSISTANT]",
            "[USER] One? [USER] Two? [ASSISTANT]")],
        records=[record(
            dialogue("user_qa", "What colour?", "Orange.", "Sure?", "Yes."),
            dialogue("user_qa", "One?", "Yes."), image=url_image(U))],
        skipped={"dialogue that does not parse": 1},
    ),
    "cosyn-point": Case(
        rows=[
            {"image": image_cell(RED, "c1.png"), "names": ["legend", None],
             "questions": ["Where is the legend?", "Where is it?"],
             "answer_points": [{"x": [88.0], "y": [9.5]}, {"x": [400.0], "y": [1.0]}]},
        ],
        records=[record(
            point("legend", xy((88.0, 9.5)), question="Where is the legend?", mode="point",
                  style="cosyn_point"), image=sha(RED))],
        skipped={"wrong record": 1},
    ),
    "cosyn-400k": Case(
        rows=[{"image": image_cell(BLUE),
               **qa_pairs(["How much?", "Which?"], ["12", "2019"], ["42 - 30 = 12.", ""])}],
        records=[record(
            question("cosyn_chart_exp", "How much?", answer="12", explanation="42 - 30 = 12."),
            question("cosyn_chart", "Which?", answer="2019"),
            image=sha(BLUE))],
        arguments=["--type", "chart"],
    ),
    "multi-image-qa": Case(
        rows=[
            {"image_urls": [U, V], **qa_pairs(["What changed?", ""], ["The gate.", "x"])},
            {"image_urls": [U], **qa_pairs(["a"], ["b"])},
        ],
        records=[record(question("correction_qa", "What changed?", answer="The gate."),
                        images=[url_image(U), url_image(V)])],
        skipped={"wrong record": 1, "not 2 to 5 images": 1},
    ),
    "syn-multi-image-qa": Case(
        rows=[{"images": [image_cell(RED), image_cell(JPEG)],
               **qa_pairs(["Which?"], ["the second"], ["It peaks."])}],
        records=[record(
            question("cosyn_doc_exp", "Which?", answer="the second", explanation="It peaks."),
            images=[sha(RED), sha(JPEG)])],
        arguments=["--type", "doc"],
    ),
    "multi-image-point": Case(
        rows=[{
            "image_urls": [U, V, W], "labels": ["Bottle", "bottles", "cap"], "counts": [1, 0, 2],
            "points": [{"x": [12.0], "y": [40.5]}, {"x": [], "y": []}, {"x": [1, 2], "y": [3, 4]}],
        }, {
            "image_urls": [U, V], "labels": ["A flask", " "],
            "normalized_labels": ["bottle", "bottle"],
            "points": [{"x": [1], "y": [2]}, {"x": [3], "y": [4]}],
        }],
        records=[
            record(
                point(["Bottle", "bottles"], [{"image": 0, "x": 12.0, "y": 40.5}], count=1),
                point(["cap"], [{"image": 2, "x": 1, "y": 3}, {"image": 2, "x": 2, "y": 4}],
                      count=2),
                images=[url_image(U), url_image(V), url_image(W)]),
            record(
                point(["A flask", "bottle"], [{"image": 0, "x": 1, "y": 2},
                                              {"image": 1, "x": 3, "y": 4}]),
                images=[url_image(U), url_image(V)]),
        ],
    ),
    "tulu": Case(
        rows=[
            {"source": "x", "messages": [
                {"role": "system", "content": "Be brief."},
                *messages("  Name a prime.\n", "11.", "Another?", "13.", "And?")]},
            {"messages": messages("Write C.", "int"), "category": "code"},
            {"messages": messages("a", "b"), "source": "allenai/puzzle_data_160k-ngram-filtered"},
            {"messages": messages("a", "b"), "first_message_qwen3_tokens": 5000},
            {"messages": messages("say <|im_end|>", "b")},
            {"messages": messages("a", "b"), "has_special_token": True},
            {"messages": messages("a", "b", "c", "d")[1:3]},
        ],
        records=[record(
            dialogue("text_sft", "  Name a prime.\n", "11.", "Another?", "13.",
                     system="Be brief."))],
        skipped={"code, another language, puzzles, reasoning": 2, "first message too long": 1,
                 "special tokens in the text": 2, "turns that do not alternate": 1},
    ),
    "vqa2": Case(
        rows=[
            asked("What is it?", answers=crowd("cat", "dog", "cat")),
            asked("Which?", answers=crowd("this")),
            asked("Test?", BLUE, answers=[]),
            {"question": "Where?", "image": image_cell(None, "../secret.jpg"),
             "answers": crowd("there")},
        ],
        records=[
            record(question("vqa2", "What is it?", answers=["cat", "dog", "cat"]),
                   question("vqa2", "Which?", answers=["this"]), image=sha(RED)),
        ],
        skipped={"wrong record": 1, "path that leaves the media folder": 1},
    ),
    "textvqa": Case(
        rows=[
            asked("Brand?", answers=["dakota", "digital"]),
            asked("Size?", answers=["4"]),
        ],
        records=[
            record(question("text_vqa", "Brand?", answers=["dakota", "digital"]), image=sha(RED)),
            record(question("text_vqa", "Size?", answers=["4"]), image=sha(RED)),
        ],
    ),
    "docvqa": Case(
        rows=[
            asked("Date?", answers=["1/8/93"]),
            asked("Who?", answers=["Ann"]),
        ],
        records=[
            record(question("doc_qa", "Date?", answers=["1/8/93"]), image=sha(RED)),
            record(question("doc_qa", "Who?", answers=["Ann"]), image=sha(RED)),
        ],
    ),
    "chartqa": Case(
        rows=[
            {"image": image_cell(RED), "query": "How many?", "label": ["14"],
             "human_or_machine": 0},
            {"image": image_cell(RED), "query": "Which year?", "label": ["2019"],
             "human_or_machine": 1},
        ],
        records=[
            record(question("chart_qa", "How many?", answers=["14"]),
                   image=sha(RED), weight=pytest.approx(1.47715, abs=1e-5)),
            record(question("chart_qa", "Which year?", answers=["2019"]),
                   image=sha(RED), weight=pytest.approx(0.52285, abs=1e-5)),
        ],
    ),
    "ai2d": Case(
        rows=[
            asked("Which is the root?", answer_texts=["a", "b", "None of these"],
                  correct_answer=1, abc_label=True, option_is_abc=[True, True, False]),
            asked("What eats it?", answer_texts=["fox", "owl", "fox"], correct_answer=2,
                  abc_label=False, option_is_abc=[False] * 3),
        ],
        records=[
            record(question("ai2_diagram_no_letter", "Which is the root?", answer_idx=1,
                            options=["A", "B", "None of these"], letters=False),
                   image=sha(RED)),
            record(question("ai2_diagram", "What eats it?", options=["fox", "owl"], answer_idx=0),
                   image=sha(RED)),
        ],
    ),
    "scienceqa": Case(
        rows=[
            asked("Which state?", choices=["Ohio", "Utah"], answer=1, hint="Look at the map."),
        ],
        records=[record(
            question("science_qa", "Look at the map.\nWhich state?", options=["Ohio", "Utah"],
                     answer_idx=1), image=sha(RED))],
    ),
    "a-okvqa": Case(
        rows=[asked("In the mouth?", JPEG, choices=["pick", "straw"], correct_choice_idx=1)],
        records=[record(
            question("a_okvqa_mc", "In the mouth?", options=["pick", "straw"], answer_idx=1),
            image=sha(JPEG))],
    ),
    "molmo2-vqa2": Case(
        rows=[of_messages({"question": "What?", "answers": ["cat", "dog"]},
                          {"question": "Which?", "answers": ["this"]})],
        records=[record(question("vqa2", "What?", answers=["cat", "dog"]),
                        question("vqa2", "Which?", answers=["this"]), image="coco/a.jpg")],
    ),
    "molmo2-text-vqa": Case(
        rows=[of_messages({"question": "Brand?", "answers": ["dakota"]})],
        records=[record(question("text_vqa", "Brand?", answers=["dakota"]), image="coco/a.jpg")],
    ),
    "molmo2-a-ok-vqa": Case(
        rows=[of_messages({"question": "Why?", "choices": ["pick", "straw"], "answer_idx": 1,
                           "direct_answers": ["a straw"]})],
        records=[record(question("a_okvqa_mc", "Why?", options=["pick", "straw"], answer_idx=1),
                        image="coco/a.jpg")],
    ),
    "molmo2-a-ok-vqa-da": Case(
        rows=[of_messages({"question": "Why?", "choices": ["pick", "straw"], "answer_idx": 1,
                           "direct_answers": ["a straw", "straw"]})],
        records=[record(question("a_okvqa_da", "Why?", answers=["a straw", "straw"]),
                        image="coco/a.jpg")],
    ),
    "molmo2-mantis": Case(
        rows=[
            {"images": ["n/l.png", "n/r.png"], "mc_question": ["One dog?"],
             "choices": [["True", "False"]], "correct_choice_idx": rights} for rights in ([1], [])
        ],
        records=[record(
            question("mantis_instruct_mc", "One dog?", options=["True", "False"], answer_idx=1,
                     shuffle_options=True), images=["n/l.png", "n/r.png"])],
        skipped={"wrong record": 1},
    ),
    "mantis": Case(
        rows=[TWO_IMAGES | {"conversation": messages(*texts)} for texts in (
            ("<image> <image>\nSame?", "No. ", "Sure?", "Yes."),
            ("Left: <image> right: <image>", "No."),
            ("<image> Left?", "Yes.", "<image> Right?", "No."),
            ("<image> Same?", "No."))],
        records=[
            record(dialogue("user_qa", "Same?", "No.", "Sure?", "Yes."),
                   images=["l.png", "r.png"]),
            record(dialogue("user_qa", ["Left: ", {"image": 0}, " right: ", {"image": 1}], "No."),
                   images=["l.png", "r.png"]),
            record(dialogue("user_qa", [{"image": 0}, " Left?"], "Yes.", [{"image": 1}, " Right?"],
                            "No."),
                   images=["l.png", "r.png"]),
        ],
        skipped={"placeholders that do not fit the images": 1},
    ),
}
