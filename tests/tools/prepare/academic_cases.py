"""Miniatures of the academic sets, and of LLaVA-Video, with the records expected of them."""

import pytest

from tests.tools.prepare.cases import (
    BLUE,
    JPEG,
    RED,
    Case,
    dialogue,
    file_name,
    image_cell,
    messages,
    question,
    record,
)

TWO_IMAGES = {"images": [image_cell(None, "l.png"), image_cell(None, "r.png")]}


def crowd(*answers):
    return [{"answer": answer} for answer in answers]


CASES = {
    "vqa2": Case(
        rows=[
            {"question": "What is it?", "image": image_cell(RED),
             "answers": crowd("cat", "dog", "cat")},
            {"question": "Which?", "image": image_cell(RED), "answers": crowd("this")},
            {"question": "Test?", "image": image_cell(BLUE), "answers": []},
            {"question": "Where?", "image": image_cell(None, "train2014/COCO_9.jpg"),
             "answers": crowd("there")},
            {"question": "Where?", "image": image_cell(None, "../secret.jpg"),
             "answers": crowd("there")},
        ],
        records=[
            record(question("vqa2", "What is it?", answers=["cat", "dog", "cat"]),
                   question("vqa2", "Which?", answers=["this"]), image=file_name(RED)),
            record(question("vqa2", "Where?", answers=["there"]), image="train2014/COCO_9.jpg"),
        ],
        skipped={"empty answer": 1, "path that leaves the media folder": 1},
    ),
    "textvqa": Case(
        rows=[{"question": "Brand?", "image": image_cell(RED), "answers": ["dakota", "digital"]}],
        records=[record(question("text_vqa", "Brand?", answers=["dakota", "digital"]),
                        image=file_name(RED))],
    ),
    "docvqa": Case(
        rows=[
            {"question": "Date?", "image": image_cell(RED), "answers": ["1/8/93"]},
            {"question": "Who?", "image": image_cell(RED), "answers": ["Ann"]},
        ],
        records=[
            record(question("doc_qa", "Date?", answers=["1/8/93"]), image=file_name(RED)),
            record(question("doc_qa", "Who?", answers=["Ann"]), image=file_name(RED)),
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
                   image=file_name(RED), weight=pytest.approx(1.47715, abs=1e-5)),
            record(question("chart_qa", "Which year?", answers=["2019"]),
                   image=file_name(RED), weight=pytest.approx(0.52285, abs=1e-5)),
        ],
    ),
    "ai2d": Case(
        rows=[
            {"image": image_cell(RED), "question": "Which is the root?", "question_id": "q1",
             "answer_texts": ["a", "b", "None of these"], "correct_answer": 1, "abc_label": True,
             "option_is_abc": [True, True, False]},
            {"image": image_cell(RED), "question": "What eats it?",
             "answer_texts": ["fox", "owl", "fox"], "correct_answer": 2, "abc_label": False,
             "option_is_abc": [False] * 3},
        ],
        records=[
            record(question("ai2_diagram_no_letter", "Which is the root?", answer_idx=1,
                            options=["A", "B", "None of these"], letters=False),
                   image=file_name(RED), meta={"question_id": "q1"}),
            record(question("ai2_diagram", "What eats it?", options=["fox", "owl"], answer_idx=0),
                   image=file_name(RED)),
        ],
    ),
    "scienceqa": Case(
        rows=[
            {"image": image_cell(RED), "question": "Which state?", "choices": ["Ohio", "Utah"],
             "answer": 1, "hint": "Look at the map."},
            {"image": None, "question": "Text only?", "choices": ["yes", "no"], "answer": 0},
        ],
        records=[record(
            question("science_qa", "Look at the map.\nWhich state?", options=["Ohio", "Utah"],
                     answer_idx=1), image=file_name(RED))],
        skipped={"no image": 1},
    ),
    "a-okvqa": Case(
        rows=[{"image": image_cell(JPEG), "question_id": "22", "question": "In the mouth?",
               "choices": ["pick", "straw"], "correct_choice_idx": 1}],
        records=[record(
            question("a_okvqa_mc", "In the mouth?", options=["pick", "straw"], answer_idx=1),
            image=file_name(JPEG, "jpg"), meta={"question_id": "22"})],
    ),
    "molmo2-mantis": Case(
        rows=[
            {"images": ["n/l.png", "n/r.png"], "mc_question": ["One dog?"],
             "choices": [["True", "False"]], "correct_choice_idx": [1]},
            {"images": ["n/l.png"], "mc_question": ["x"]},
        ],
        records=[record(
            question("mantis_instruct_mc", "One dog?", options=["True", "False"], answer_idx=1,
                     shuffle_options=True), images=["n/l.png", "n/r.png"])],
        skipped={"row of another shape": 1},
    ),
    "mantis": Case(
        rows=[TWO_IMAGES | {"conversation": messages(*texts)} for texts in (
            ("<image> <image>\nSame?", "No. ", "Sure?", "Yes."),
            ("Left: <image> right: <image>", "No."),
            ("<image> Same?", "No."))],
        records=[
            record(dialogue("user_qa", "Same?", "No.", "Sure?", "Yes."),
                   images=["l.png", "r.png"]),
            record(dialogue("user_qa", ["Left: ", {"image": 0}, " right: ", {"image": 1}], "No."),
                   images=["l.png", "r.png"]),
        ],
        skipped={"placeholders that do not fit the images": 1},
    ),
    "llava-video-178k": Case(
        is_json=True,
        rows=[
            {"data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": [{"from": "human", "value": "<image>\nWhy?"},
                               {"from": "gpt", "value": "Rain."}]},
            {"data_source": "0_30_s_nextqa", "video": "NExTQA/x.mp4",
             "conversations": messages("Where?\n<image>", "Here.", "Who?", "Ann.")},
            {"data_source": "a", "video": "y.mkv", "conversations": messages("q", "Here.")[1:]},
        ],
        records=[record(
            question("video_short_answer", "Why?", answer="Rain."),
            question("video_short_answer", "Where?", answer="Here."),
            question("video_short_answer", "Who?", answer="Ann."),
            video={"path": "0_30_s_nextqa/NExTQA/x.mp4"})],
        skipped={"turns that do not alternate": 1},
    ),
    "llava-video-178k-academic": Case(
        is_json=True,
        rows=[
            {"data_source": source, "video": "a.mp4", "conversations": messages("Why?", "Rain.")}
            for source in ("0_30_s_perceptiontest", "0_30_s_youtube_v0_1")],
        records=[record(question("video_short_answer", "Why?", answer="Rain."),
                        video={"path": "0_30_s_perceptiontest/a.mp4"})],
        skipped={"another source": 1},
    ),
}
