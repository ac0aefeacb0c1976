"""Miniatures of the academic sets, and of LLaVA-Video, with the records expected of them."""

import pytest

from tests.tools.prepare.cases import (
    BLUE,
    IMAGE_CELL,
    JPEG,
    RED,
    Case,
    file_name,
    image_cell,
    messages,
    question,
)

VQA = {"question_id": "i", "question": "s", "answers": ["s"], "image": IMAGE_CELL}

CASES = {
    "vqa2": Case(
        columns=VQA | {"image_id": "i",
                       "answers": [{"answer": "s", "answer_confidence": "s", "answer_id": "i"}]},
        rows=[
            {"question": "What is it?", "image": image_cell(RED),
             "answers": [{"answer": "cat"}, {"answer": "dog"}, {"answer": "cat"}]},
            {"question": "Which?", "image": image_cell(RED), "answers": [{"answer": "this"}]},
            {"question": "Test?", "image": image_cell(BLUE), "answers": []},
            {"question": "Where?", "image": image_cell(None, "train2014/COCO_9.jpg"),
             "answers": [{"answer": "there"}]},
            {"question": "Where?", "image": image_cell(None, "../secret.jpg"),
             "answers": [{"answer": "there"}]},
        ],
        records=[
            {"image": file_name(RED),
             "annotations": [question("vqa2", "What is it?", answers=["cat", "dog", "cat"]),
                             question("vqa2", "Which?", answers=["this"])]},
            {"image": "train2014/COCO_9.jpg",
             "annotations": [question("vqa2", "Where?", answers=["there"])]},
        ],
        skipped={"empty answer": 1, "path that leaves the media folder": 1},
    ),
    "textvqa": Case(
        columns=VQA,
        rows=[
            {"question": "Brand?", "image": image_cell(RED),
             "answers": ["dakota", "dakota digital"]},
        ],
        records=[
            {"image": file_name(RED),
             "annotations": [question("text_vqa", "Brand?", answers=["dakota", "dakota digital"])]},
        ],
    ),
    "docvqa": Case(
        columns=VQA,
        rows=[
            {"question": "Date?", "image": image_cell(RED), "answers": ["1/8/93"]},
            {"question": "Who?", "image": image_cell(RED), "answers": ["Ann"]},
        ],
        records=[
            {"image": file_name(RED),
             "annotations": [question("doc_qa", "Date?", answers=["1/8/93"])]},
            {"image": file_name(RED), "annotations": [question("doc_qa", "Who?", answers=["Ann"])]},
        ],
    ),
    "chartqa": Case(
        columns={"image": IMAGE_CELL, "query": "s", "label": ["s"], "human_or_machine": "i"},
        rows=[
            {"image": image_cell(RED), "query": "How many?", "label": ["14"],
             "human_or_machine": 0},
            {"image": image_cell(RED), "query": "Which year?", "label": ["2019"],
             "human_or_machine": 1},
        ],
        records=[
            {"image": file_name(RED), "weight": pytest.approx(1.47715, abs=1e-5),
             "annotations": [question("chart_qa", "How many?", answers=["14"])]},
            {"image": file_name(RED), "weight": pytest.approx(0.52285, abs=1e-5),
             "annotations": [question("chart_qa", "Which year?", answers=["2019"])]},
        ],
    ),
    "ai2d": Case(
        columns={"image": IMAGE_CELL, "question": "s", "question_id": "s", "answer_texts": ["s"],
                 "correct_answer": "i", "abc_label": "b", "option_is_abc": ["b"],
                 "has_transparent_box": "b"},
        rows=[
            {"image": image_cell(RED), "question": "Which is the root?", "question_id": "q1",
             "answer_texts": ["a", "b", "None of these"], "correct_answer": 1, "abc_label": True,
             "option_is_abc": [True, True, False]},
            {"image": image_cell(RED), "question": "What eats it?",
             "answer_texts": ["fox", "owl", "fox"], "correct_answer": 2, "abc_label": False,
             "option_is_abc": [False] * 3},
        ],
        records=[
            {"image": file_name(RED), "meta": {"question_id": "q1"},
             "annotations": [question("ai2_diagram_no_letter", "Which is the root?",
                                      options=["A", "B", "None of these"], answer_idx=1,
                                      letters=False)]},
            {"image": file_name(RED),
             "annotations": [question("ai2_diagram", "What eats it?", options=["fox", "owl"],
                                      answer_idx=0)]},
        ],
    ),
    "scienceqa": Case(
        columns={"image": IMAGE_CELL, "question": "s", "choices": ["s"], "answer": "i",
                 "hint": "s"},
        rows=[
            {"image": image_cell(RED), "question": "Which state?", "choices": ["Ohio", "Utah"],
             "answer": 1, "hint": "Look at the map."},
            {"image": None, "question": "Text only?", "choices": ["yes", "no"], "answer": 0,
             "hint": ""},
        ],
        records=[
            {"image": file_name(RED),
             "annotations": [question("science_qa", "Look at the map.\nWhich state?",
                                      options=["Ohio", "Utah"], answer_idx=1)]},
        ],
        skipped={"no image": 1},
    ),
    "a-okvqa": Case(
        columns={"image": IMAGE_CELL, "question_id": "s", "question": "s", "choices": ["s"],
                 "correct_choice_idx": "i"},
        rows=[
            {"image": image_cell(JPEG), "question_id": "22", "question": "In the mouth?",
             "choices": ["pick", "cigarette"], "correct_choice_idx": 1},
        ],
        records=[
            {"image": file_name(JPEG, "jpg"), "meta": {"question_id": "22"},
             "annotations": [question("a_okvqa_mc", "In the mouth?", options=["pick", "cigarette"],
                                      answer_idx=1)]},
        ],
    ),
    "molmo2-mantis": Case(
        columns={"images": ["s"], "mc_question": ["s"], "oe_question": ["s"],
                 "direct_answer": ["s"], "choices": [["s"]], "correct_choice_idx": ["i"]},
        rows=[
            {"images": ["n/l.png", "n/r.png"], "mc_question": ["One dog?"], "oe_question": ["One?"],
             "direct_answer": ["no"], "choices": [["True", "False"]], "correct_choice_idx": [1]},
            {"images": ["n/l.png"], "mc_question": ["x"]},
        ],
        records=[
            {"images": ["n/l.png", "n/r.png"],
             "annotations": [question("mantis_instruct_mc", "One dog?", options=["True", "False"],
                                      answer_idx=1, shuffle_options=True)]},
        ],
        skipped={"row of another shape": 1},
    ),
    "mantis": Case(
        columns={"id": "s", "images": [IMAGE_CELL], "conversation": [{"role": "s", "content": "s"}],
                 "source": "s"},
        rows=[
            {"images": [image_cell(None, "l.png"), image_cell(None, "r.png")],
             "conversation": messages("<image> <image>\nSame?", "No. ", "Sure?", "Yes.")},
            {"images": [image_cell(None, "l.png"), image_cell(None, "r.png")],
             "conversation": messages("Left: <image> right: <image>", "No.")},
            {"images": [image_cell(None, "l.png"), image_cell(None, "r.png")],
             "conversation": messages("<image> Same?", "No.")},
        ],
        records=[
            {"images": ["l.png", "r.png"],
             "annotations": [{"type": "qa", "style": "user_qa",
                              "turns": [{"question": "Same?", "answer": "No."},
                                        {"question": "Sure?", "answer": "Yes."}]}]},
            {"images": ["l.png", "r.png"],
             "annotations": [{"type": "qa", "style": "user_qa",
                              "turns": [{"question": ["Left: ", {"image": 0}, " right: ",
                                                      {"image": 1}], "answer": "No."}]}]},
        ],
        skipped={"placeholders that do not fit the images": 1},
    ),
    "llava-video-178k": Case(
        columns=None,
        rows=[
            {"id": "7", "data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": [{"from": "human", "value": "<image>\nWhy?"},
                               {"from": "gpt", "value": "Rain."},
                               {"from": "human", "value": "Who?"},
                               {"from": "gpt", "value": "Ann."}]},
            {"id": 8, "data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": [{"from": "human", "value": "Where?\n<image>"},
                               {"from": "gpt", "value": "Here."}]},
            {"id": 9, "data_source": "a", "video": "y.mkv",
             "conversations": [{"from": "gpt", "value": "Here."}]},
        ],
        records=[
            {"video": {"path": "0_30_s_nextqa/NExTQA/x.mp4"},
             "annotations": [question("video_short_answer", "Why?", answer="Rain."),
                             question("video_short_answer", "Who?", answer="Ann."),
                             question("video_short_answer", "Where?", answer="Here.")]},
        ],
        skipped={"turns that do not alternate": 1},
    ),
    "llava-video-178k-academic": Case(
        columns=None,
        rows=[
            {"data_source": "0_30_s_perceptiontest", "video": "a.mp4",
             "conversations": messages("<image>\nWhy?", "Rain.")},
            {"data_source": "0_30_s_youtube_v0_1", "video": "b.mp4",
             "conversations": messages("<image>\nWhy?", "Rain.")},
        ],
        records=[
            {"video": {"path": "0_30_s_perceptiontest/a.mp4"},
             "annotations": [question("video_short_answer", "Why?", answer="Rain.")]},
        ],
        skipped={"another source": 1},
    ),
}
