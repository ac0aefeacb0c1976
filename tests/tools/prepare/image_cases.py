"""Miniatures of the image sets of Ai2, and of Tulu, with the records expected of them."""

import math

from tests.tools.prepare.cases import (
    BLUE,
    HASH,
    JPEG,
    RED,
    Case,
    U,
    V,
    W,
    caption,
    dialogue,
    file_name,
    image_cell,
    messages,
    point,
    question,
    record,
    url_image,
    xy,
)

OF_U = {"image_url": U, "image_sha256": HASH}
IMAGE_U = url_image(U, sha256=HASH)
COUNTING = {"collection_method": "counting"}
POINTING = {"collection_method": "pointing"}
BY_METHOD = [
    {"image_url": U, "points": xy((1, 2)), "count": 1, "label": "a", **POINTING},
    {"image_url": U, "points": xy((3, 4)), "count": 1, "label": "b", **COUNTING},
]
OF_IMAGE = {"width": 640, "height": 480}
CUP = {"image": "val/2.jpg", **OF_IMAGE, "label": "cup", "boxes": [[7, 1, 2, 2]]}


def qa_pairs(questions, answers, explanations=None):
    pairs = {"question": questions, "answer": answers}
    return {"qa_pairs": pairs | ({"explanation": explanations} if explanations else {})}


def boxes(label, *corners):
    return {"type": "box", "label": label, "coords": "pixel", "form": "xyxy",
            "boxes": [{"box": box} for box in corners]}


CASES = {
    "pixmo-cap": Case(
        rows=[
            {"image_url": U, "caption": " Three boats. ", "transcripts": ["um boats", "boats"]},
            {"image_url": None, "caption": "x"},
            {"image_url": V, "caption": "", "transcripts": None},
        ],
        records=[record(
            caption("long_caption", "Three boats."), caption("transcript", "um boats"),
            caption("transcript", "boats"), image=url_image(U))],
        skipped={"no image": 1, "empty caption": 1},
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
            record(point("mug", xy((21.4, 55.0), (100, 0)), count=2, meta=POINTING),
                   point("Cat", xy((1, 2)), count=1, meta=COUNTING), image=IMAGE_U),
            record(point("cats", [], count=0, meta=COUNTING), image=url_image(V)),
        ],
        skipped={"count is not the number of points": 1, "more than 60 points": 1,
                 "point outside the image": 1, "no label": 1},
    ),
    "pixmo-points-basic": Case(
        rows=BY_METHOD,
        records=[record(point("a", xy((1, 2)), count=1, meta=POINTING), image=url_image(U))],
        skipped={"another collection_method": 1},
    ),
    "pixmo-points-high-frequency": Case(
        rows=BY_METHOD,
        records=[record(point("b", xy((3, 4)), count=1, meta=COUNTING), image=url_image(U))],
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
            {"image_url": W, "count": 3, "points": {"x": [], "y": []}, "label": "cars"},
        ],
        records=[
            record(point("sheep", xy((112.5, 300.0), (401.0, 287.5)), "pixel", count=2),
                   image=IMAGE_U),
            record({"type": "count", "label": "people", "count": 4}, image=url_image(V)),
            record({"type": "count", "label": "cars", "count": 3}, image=url_image(W)),
        ],
    ),
    "coco": Case(                    # as rows.coco_rows gives them
        is_json=True,
        rows=[
            {"image": "val/1.jpg", **OF_IMAGE, "label": "cup",
             "boxes": [[10.5, 20, 100, 50], [630, 400, 20, 90], [5, 5, 0, 9]]},
            {"image": "val/1.jpg", **OF_IMAGE, "label": "dog", "boxes": [[1, 2, 3, 4]]},
            CUP | {"boxes": None},
            CUP | {"boxes": [[700, 1, 2, 2]]},
            CUP | {"image": "../2.jpg"},
            CUP | {"width": 0},
        ],
        records=[record(
            boxes("cup", [10.5, 20, 110.5, 70], [630, 400, 640, 480]), boxes("dog", [1, 2, 4, 6]),
            image={"path": "val/1.jpg", **OF_IMAGE})],
        skipped={"a crowd in one box": 1, "no box with an area": 1, "no size": 1,
                 "path that leaves the media folder": 1},
    ),
    "pixmo-ask-model-anything": Case(
        rows=[
            {**OF_U, "question": "What for?", "answer": "It ties."},
            {**OF_U, "question": "Why?", "answer": " "},
            {**OF_U, "question": "Who?", "answer": "Ann."},
        ],
        records=[record(
            question("user_qa", "What for?", answer="It ties."),
            question("user_qa", "Who?", answer="Ann."), image=IMAGE_U)],
        skipped={"empty answer": 1},
    ),
    "pixmo-cap-qa": Case(
        rows=[{"image_url": U, "question": tagged, "answer": "Yes."} for tagged in (
            "[USER] What colour? [ASSISTANT] Orange. [USER] Sure? [ASSISTANT]",
            "[USER] One? [ASSISTANT]",
            "One? [ASSISTANT]",
            "[USER] One? [ASSISTANT] Yes. [USER] Two?",
            "[USER] One? [USER] Two? [ASSISTANT]")],
        records=[record(
            dialogue("user_qa", "What colour?", "Orange.", "Sure?", "Yes."),
            dialogue("user_qa", "One?", "Yes."), image=url_image(U))],
        skipped={"dialogue that does not parse": 3},
    ),
    "cosyn-point": Case(
        rows=[
            {"id": "c1", "image": image_cell(RED, "c1.png"), "names": ["legend", None],
             "questions": ["Where is the legend?", "Where is it?"],
             "answer_points": [{"x": [88.0], "y": [9.5]}, {"x": [400.0], "y": [1.0]}]},
            {"image": None, "questions": ["a?"], "answer_points": [], "names": []},
            {"image": image_cell(b"<html>404", "c3.png"), "questions": ["Where?"],
             "answer_points": [{"x": [1], "y": [1]}]},
        ],
        records=[record(
            point("legend", xy((88.0, 9.5)), question="Where is the legend?", mode="point",
                  style="cosyn_point"), image=file_name(RED), meta={"id": "c1"})],
        skipped={"point outside the image": 1, "row of another shape": 1,
                 "bytes that are no image": 1},
    ),
    "cosyn-400k": Case(
        rows=[{"id": "k", "image": image_cell(BLUE),
               **qa_pairs(["How much?", "Which?"], ["12", "2019"], ["42 - 30 = 12.", ""])}],
        records=[record(
            question("cosyn_chart_exp", "How much?", answer="12", explanation="42 - 30 = 12."),
            question("cosyn_chart", "Which?", answer="2019"),
            image=file_name(BLUE), meta={"id": "k"})],
        arguments=["--type", "chart"],
    ),
    "multi-image-qa": Case(
        rows=[
            {"image_urls": [U, V], **qa_pairs(["What changed?", ""], ["The gate.", "x"])},
            {"image_urls": [U], **qa_pairs(["a"], ["b"])},
        ],
        records=[record(question("correction_qa", "What changed?", answer="The gate."),
                        images=[url_image(U), url_image(V)])],
        skipped={"empty question": 1, "not 2 to 5 images": 1},
    ),
    "syn-multi-image-qa": Case(
        rows=[{"id": "m1", "images": [image_cell(RED), image_cell(JPEG)],
               **qa_pairs(["Which?"], ["the second"], ["It peaks."])}],
        records=[record(
            question("cosyn_doc_exp", "Which?", answer="the second", explanation="It peaks."),
            images=[file_name(RED), file_name(JPEG, "jpg")], meta={"id": "m1"})],
        arguments=["--type", "doc"],
    ),
    "multi-image-point": Case(
        rows=[{
            "image_urls": [U, V, W], "labels": ["Bottle", "bottles", "cap"], "counts": [1, 0, 2],
            "points": [{"x": [12.0], "y": [40.5]}, {"x": [], "y": []}, {"x": [1, 2], "y": [3, 4]}],
        }],
        records=[record(
            point("bottle", [{"image": 0, "x": 12.0, "y": 40.5}], count=1),
            point("cap", [{"image": 2, "x": 1, "y": 3}, {"image": 2, "x": 2, "y": 4}], count=2),
            images=[url_image(U), url_image(V), url_image(W)])],
    ),
    "tulu": Case(
        rows=[
            {"id": "t_1", "source": "x", "messages": [
                {"role": "system", "content": "Be brief."},
                *messages("  Name a prime.\n", "11.", "Another?", "13.", "And?")]},
            {"messages": messages("Write C.", "int"), "category": "code"},
            {"messages": messages("a", "b"), "source": "allenai/puzzle_data_160k-ngram-filtered"},
            {"messages": messages("a", "b"), "first_message_qwen3_tokens": 5000},
            {"messages": messages("say <|im_end|>", "b")},
            {"messages": messages("a", "b"), "has_special_token": True},
            {"messages": messages("a", " ")},
            {"messages": messages("a")},
            {"messages": messages("a", "b", "c", "d")[1:3]},
        ],
        records=[record(
            dialogue("text_sft", "  Name a prime.\n", "11.", "Another?", "13.",
                     system="Be brief."), meta={"id": "t_1", "source": "x"})],
        skipped={"code, another language, puzzles, reasoning": 2, "first message too long": 1,
                 "special tokens in the text": 2, "empty turn": 1,
                 "turns that do not alternate": 2},
    ),
}
