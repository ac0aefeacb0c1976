"""Prompts and answers of every style, against the official formatter and rule by rule.

The rules are in docs/molmo2.md 4.3 and 5.
"""

import copy
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data import DataConfig
from records.mixture import rng_for
from records.parse import parse
from tests.text.annotations import (
    CAPTION,
    COUNT,
    EVERY_STYLE,
    IMAGE,
    IMAGES,
    LATER,
    N_DRAWS,
    POINT,
    POINTS_IN_TIME,
    POINTS_ON_IMAGES,
    PREFIXED_LATER,
    QA,
    STAGE1,
    TEXT,
    VIDEO,
    VIDEO_FROM_30,
    XY,
    all_turns,
    answer_of,
    drawn_questions,
    draws,
    one_form,
    one_turn,
    question_of,
    share,
)
from text import styles
from text.styles import TEMPLATES, medium
from text.tokenizer import chat
from text.visual_tokens import shift_subtitles, subtitle_text
from vision import frame_times

CONFORMANCE = Path(__file__).parents[1] / "conformance"
VALUES = json.loads((CONFORMANCE / "chat_format.json").read_text())
CASES = VALUES["cases"]


# ------------------------------------------------------------------------------------------------
# the official formatter


class Characters:
    """The tokenizer of the cases: a character is its own id."""

    chat_start = 151644
    chat_end = 151645
    eos = 151645
    bos = 151645

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        special = {self.chat_start: "<|im_start|>", self.chat_end: "<|im_end|>"}
        return "".join(special.get(i) or chr(i) for i in ids)


KEPT = ("style", "question", "label", "answer", "answers", "options", "answer_idx", "explanation")


def native(example):
    """An example as the official formatter takes it -> (annotation, record)."""
    if "message_list" in example:
        ((messages, style),) = [(m["messages"], m["style"]) for m in example["message_list"]]
        pairs = zip(messages[::2], messages[1::2], strict=True)
        turns = [{"question": question, "answer": answer} for question, answer in pairs]
        return {"type": "qa", "style": style, "turns": turns}, TEXT
    record = VIDEO if example["style"].startswith("video") else IMAGE
    annotation = {key: example[key] for key in KEPT if key in example}
    if "timestamps" in example:
        points = []
        for time, frame in zip(example["timestamps"], example["points"], strict=True):
            points += [{"t": time, **point} for point in frame]
        return {"type": "point", **annotation, "coords": "percent", "points": points}, record
    if "points" in example:
        assert example["point_scale"] == 100
        points = [{"x": x, "y": y} for x, y in example["points"]]
        return {"type": "point", **annotation, "coords": "percent", "points": points}, record
    if "text" in example and "question" in example:      # a caption with its own question is a qa
        return {"type": "qa", **annotation, "answer": example["text"]}, record
    if "text" in example:
        return {"type": "caption", **annotation, "text": example["text"]}, record
    return {"type": "qa", **annotation}, record


def name_of(case):
    return case["input"]["example"].get("style", "messages")


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{name_of(c)}" for i, c in enumerate(CASES)])
def test_chats_equal_the_official_ones(case):
    given = case["input"]
    expected = case["expected"]
    expected = expected[0] if isinstance(expected[0], list) else expected
    config = {"stage1": STAGE1, "sft": LATER}[given["formatter"]]
    annotation, record = native(given["example"])
    if given["for_inference"]:
        turns = [(question_of(annotation, record, config), None)]
    else:
        rng = np.random.RandomState(given["rng_seed"]) if given["is_training"] else None
        turns = all_turns(annotation, record, config, rng, [(640, 480)])
    tokenizer = Characters()
    ours = []
    for ids, learn in chat(turns, tokenizer):
        assert not learn or ids[-1] == tokenizer.eos
        ours.append(tokenizer.decode(ids[:-1] if learn else ids))
    assert ours == expected


# ------------------------------------------------------------------------------------------------
# every style

every_style = pytest.mark.parametrize("style", EVERY_STYLE)


@every_style
def test_stage_1_names_every_style_and_gives_a_length_to_all_but_pointing(style):
    annotation, record = EVERY_STYLE[style]
    generators = [rng_for(i) for i in range(200)]
    generators += [np.random.RandomState(i) for i in range(200)]
    questions = [one_turn(annotation, record, STAGE1, rng)[0] for rng in generators]
    before = copy.deepcopy((annotation, record))
    assert one_turn(annotation, record, STAGE1, rng_for(1)) == one_turn(
        annotation, record, STAGE1, rng_for(1))
    assert (annotation, record) == before
    if annotation["type"] in ("caption", "qa"):
        assert all(re.match(rf"{style}( \d+)?:( |$)", question) for question in questions)
        assert 0.03 < share([re.match(f"{style}:", question) for question in questions]) < 0.17
        assert question_of(annotation, record, STAGE1).startswith(f"{style} 65:")
    else:
        assert all(question.startswith(f"{style}: ") for question in questions)
        assert question_of(annotation, record, STAGE1).startswith(f"{style}: ")


@every_style
def test_later_stages_name_only_the_styles_of_benchmarks(style):
    annotation, record = EVERY_STYLE[style]
    questions = drawn_questions(annotation, record, n=200)
    for question in [*questions, question_of(annotation, record, LATER)]:
        assert question.startswith(f"{style}:") == (style in PREFIXED_LATER)
    assert all(question and "{" not in question for question in questions)
    own_words = annotation["type"] == "qa" and style != "video_short_answer"
    has_templates = not own_words and style not in ("transcript", "video_merged_caption")
    templates = {re.sub(r"[\d.:]+", "", question) for question in questions}     # without times
    assert len(templates) >= 3 if has_templates else len(templates) == 1


def test_a_video_is_called_a_video_and_several_images_are_plural():
    for annotation, record in EVERY_STYLE.values():
        words = " ".join(drawn_questions(annotation, record, n=300)).lower()
        words = re.sub(r"\w+:|image_\d", "", words)
        wrong = {"video": "image|picture|photo", "image": "video|images|pictures", "text": "image",
                 "images": r"video|\b(this|the|an?) (image|picture|photo)\b"}
        assert not re.search(wrong[medium(one_form(annotation, record)[1])], words)
    assert question_of(CAPTION, {"images": ["a.png"]}, LATER) == "Describe this image in detail."
    label = {"type": "point", "label": "photo of an image", "coords": "unit", "points": []}
    questions = drawn_questions(label, VIDEO, n=300)
    assert all("photo of an image" in question for question in questions)        # labels stay


POINTING = [
    style
    for style, (annotation, _) in EVERY_STYLE.items()
    if annotation["type"] in ("point", "count", "track")
]


@pytest.mark.parametrize("style", POINTING)
def test_an_annotations_own_question_replaces_the_template(style):
    annotation, record = EVERY_STYLE[style]
    annotation = {**annotation, "question": "Would you {look}?"}
    start = ""
    if style == "video_single_point_track_per_frame":
        start = f' <points coords="0.0 1 500 200">{annotation["label"]}</points>'
    in_stage_1 = f"{style}: Would you {{look}}?"
    later = in_stage_1 if style in PREFIXED_LATER else "Would you {look}?"
    assert question_of(annotation, record, LATER) == later + start
    drawn = {question.split("?")[0] for question in drawn_questions(annotation, record, n=50)}
    assert drawn == {later[:-1]}
    assert question_of(annotation, record, STAGE1) == in_stage_1 + start


def test_without_a_mode_half_the_points_are_also_counted_and_the_question_says_so():
    for annotation, record in ((POINT, IMAGE), (POINTS_ON_IMAGES, IMAGES), (POINTS_IN_TIME, VIDEO)):
        pairs = draws(annotation, record, STAGE1, n=400)
        assert 0.4 < share([answer.startswith("Counting") for _, answer in pairs]) < 0.6
        for question, answer in pairs:
            assert ("count" in question) == answer.startswith("Counting")
    # a question of its own does not say which answer is wanted: plain points
    pairs = draws({**POINT, "question": "Where is it?"}, n=100)
    assert {answer[:7] for _, answer in pairs} == {"<points"}


@pytest.mark.parametrize(("mode", "wordings"), [
    ("point", TEMPLATES["point"]), ("point_count", TEMPLATES["point_count"])])
def test_points_are_asked_for_in_24_wordings_of_many_kinds(mode, wordings):
    assert len(wordings) == 24
    assert all(wording.count("{label}") == 1 for wording in wordings)
    drawn = drawn_questions({**POINT, "mode": mode}, n=500)
    assert set(drawn) == {wording.format(label="cat") for wording in wordings}
    in_small_letters = [wording for wording in wordings if wording == wording.lower()]
    polite = [wording for wording in wordings if "please" in wording.lower()]
    questions = [wording for wording in wordings if wording.endswith("?")]
    assert min(len(in_small_letters), len(polite), len(questions)) >= 2


@pytest.mark.parametrize("case", VALUES["modes"]["cases"],
                         ids=lambda case: case["input"].get("question", "no question"))
def test_of_several_modes_one_is_drawn_and_points_alone_are_asked_for_without_the_question(case):
    given = case["input"]
    annotation, record = native({"style": "video_point", **given})
    del annotation["style"]
    annotation["mode"] = given["mode"]
    found = Counter()
    for question, answer in draws(annotation, record, n=400):
        found[question if question == given.get("question") else None, answer] += 1
    assert found.keys() == {tuple(pair) for pair in case["expected"].values()}
    assert min(found.values()) > 160
    question, answer = case["expected"]["video_point_count"]
    assert answer_of(annotation, record) == answer             # the first mode, in evaluation
    in_stage_1 = drawn_questions(annotation, record, STAGE1, n=50)
    assert set(in_stage_1) == {f"video_point_count: {question or 'ball'}", "video_point: ball"}


def test_a_question_without_a_label_is_asked_in_every_mode():
    annotation = {key: POINT[key] for key in POINT if key != "label"}
    annotation |= {"question": "Cats?", "mode": ["point_count", "point"]}
    pairs = draws(annotation, n=50)
    assert {question for question, _ in pairs} == {"Cats?"}
    assert len({answer for _, answer in pairs}) == 2


# ------------------------------------------------------------------------------------------------
# captions


def test_a_caption_names_its_length_in_nine_of_ten():
    caption = {"type": "caption", "text": "y" * 150}
    questions = drawn_questions(caption, IMAGE, STAGE1, n=2000)
    numbers = [int(q[len("long_caption") : -1]) for q in questions if q != "long_caption:"]
    assert 0.88 < len(numbers) / 2000 < 0.92
    assert abs(np.mean(numbers) - (150 - 7) / 15) < 0.3          # normal(0, 25) // 15
    assert 1.3 < np.std(numbers) < 2.0
    assert question_of(CAPTION, IMAGE, STAGE1) == "long_caption 65:"
    assert question_of(CAPTION, IMAGE, DataConfig(length_hint=0)) == "long_caption:"


@pytest.mark.parametrize(("annotation", "times"), [
    ({**CAPTION, "start": 31, "end": 105.25}, [("1.0", "00:00:01.0"), ("75.2", "00:01:15.2")]),
    ({**CAPTION, "at": 3729.96}, [("3700.0", "01:01:40.0")]),
])
def test_times_in_prompts_count_from_the_start_of_the_clip_in_one_of_two_forms(annotation, times):
    questions = drawn_questions(annotation, VIDEO_FROM_30)
    as_seconds = [all(f" {s}" in f" {question}" for s, _ in times) for question in questions]
    as_clock = [all(clock in question for _, clock in times) for question in questions]
    assert all(a != b for a, b in zip(as_seconds, as_clock, strict=True))
    assert abs(share(as_clock) - 0.5) < 0.03
    assert all(s in question_of(annotation, VIDEO_FROM_30, LATER) for s, _ in times)
    in_stage_1 = question_of(annotation, VIDEO_FROM_30, STAGE1)
    assert in_stage_1.endswith(" to ".join(s for s, _ in times))


def test_a_caption_of_one_object_names_it():
    clip = {**CAPTION, "object": "dog", "start": 31, "end": 33}
    assert all(" dog" in question for question in drawn_questions(clip, VIDEO_FROM_30, n=100))
    assert question_of(clip, VIDEO_FROM_30, STAGE1).endswith(": dog, 1.0 to 3.0")


# ------------------------------------------------------------------------------------------------
# questions and answers


def test_a_system_turn_joins_the_first_question_and_turns_keep_their_order():
    turns = [{"question": letter, "answer": letter.upper()} for letter in "abc"]
    turns[-1]["answer"] = "C" * 600              # the length is that of the last answer
    qa = {"type": "qa", "system": "Be brief.", "turns": turns}
    expected = [("System: Be brief.\na", "A"), ("b", "B"), ("c", "C" * 600)]
    assert all_turns(qa, TEXT, LATER, rng_for(0)) == expected
    in_stage_1 = [("text_sft 65: System: Be brief.\na", "A"), *expected[1:]]
    assert all_turns(qa, TEXT, STAGE1) == in_stage_1
    drawn = [all_turns(qa, TEXT, STAGE1, rng_for(i))[0][0] for i in range(100)]
    numbers = [int(n) for question in drawn for n in re.findall(r"^text_sft (\d+):", question)]
    assert abs(np.mean(numbers) - 600 / 15) < 1
    prompted = {"type": "text", "prompt": "p", "text": "t", "style": "s"}
    assert all_turns(prompted, IMAGE, STAGE1, rng_for(0)) == [("p", "t")]


def test_of_several_answers_one_of_the_most_frequent_is_learned():
    qa = {"type": "qa", "question": "q", "answers": ["a", "b", "c", "b", "a"]}
    counts = Counter(answer for _, answer in draws(qa))
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] / N_DRAWS - 0.5) < 0.04


def test_an_explanation_comes_before_the_answer_and_exp_styles_ask_for_it():
    qa = {**QA, "explanation": "It has whiskers."}
    answer = "It has whiskers. Answer: A cat."
    assert one_turn(qa, rng=rng_for(0)) == ("What is it?", answer)
    question = "What is it? Provide reasoning steps and then give the short answer."
    in_style = {**qa, "style": "cosyn_math_exp"}
    assert one_turn(in_style, rng=rng_for(0)) == (f"cosyn_math_exp: {question}", answer)
    options = {"question": "Which?", "options": ["x", "y"], "answer_idx": 1, "explanation": "e"}
    question, answer = one_turn({"type": "qa", "style": "b_exp", **options})
    assert answer == "e Answer: B. y"
    assert "\nA. x\nB. y" in question


@pytest.mark.parametrize(("parts", "text"), [
    (["Left: ", {"image": 0}, "\nRight: ", {"image": 1}, "\nSame?"],
     "Left: Image 1\nRight: Image 2\nSame?"),
    (["Is", {"image": 2}, "like", {"image": 0}, {"image": 1}, "?"],
     "Is Image 3 like Image 1 Image 2?"),
    ([{"video": 0}, "\nWhat happens?"], "What happens?"),
    (["What happens in ", {"video": 0}, "?"], "What happens in the video?"),
    (["Is it <image>?"], "Is it <image>?"),
], ids=str)
def test_questions_in_parts_become_text(parts, text):
    record = VIDEO if {"video": 0} in parts else IMAGES
    assert one_turn({**QA, "question": parts}, record, rng=rng_for(0))[0] == text
    in_style = {**QA, "style": "vqa2", "question": parts}
    assert question_of(in_style, record, LATER) == f"vqa2: {text}"


COUNTING = [
    "How many cats are there?",
    "So HOW MANY\ndogs? How many cats?",
    "howmany boats",
    "What is the number of legs?",
    "What's the exact total number of wheels?",
    "What number of people wear hats?",
    "The sign states the total of visitors. Is it right?",
    "Tally all votes.",
    "Count the cups.",
    "There are ____ spoons.",
]
NOT_COUNTING = [
    "Which country is it?",
    "His phone number?",
    "How much is it?",
    "How many years old is the tower?",
    "How many kilometers are left?",
    "How many square feet has the room?",
    "How many milliliters are in it?",
    "How many more cups than plates are there?",
    "How many ways lead out?",
    "Approximately how many people are there?",
    "What is the amount of money?",
    "What is the number of the bus?",
    "Give me the number of windows.",
    "Do not count all the cups.",
    "Does the vote count?",
    "Who is Count Orlok in this film?",
]


@pytest.mark.parametrize("question", [*COUNTING, *NOT_COUNTING])
def test_questions_that_look_like_counting_say_not_to_point(question):
    """The values are those of the official detector."""
    qa = {**QA, "question": question}
    questions = drawn_questions(qa, n=100)
    assert all(q.endswith(question) for q in questions)
    if question in COUNTING:
        assert all("point" in q for q in questions)
        assert len(set(questions)) > 2
    else:
        assert set(questions) == {question}
    for record, config, rng in ((IMAGE, LATER, None), (VIDEO, LATER, rng_for(0)),
                                (IMAGE, STAGE1, rng_for(0))):
        assert "point" not in one_turn(qa, record, config, rng)[0]


@pytest.mark.parametrize(("of_evaluation", "of_training"), [
    ("eval_short_answer", "vqa2"), ("eval_multiple_choice", "a_okvqa_mc"),
    ("video_eval_short_answer", "video_short_answer"),
    ("video_eval_multiple_choice", "video_multiple_choice"),
])
def test_a_style_of_evaluation_is_read_as_the_one_that_training_has(of_evaluation, of_training):
    record = parse({"annotations": [{"type": "qa", "style": of_evaluation, "question": "?",
                                     "answer": "a"}]})
    assert record["annotations"][0]["style"] == of_training


def test_subtitles_are_read_within_a_second_of_a_frame_and_from_the_start_of_the_clip():
    lines = [(0.0, 3.9, "before"), (1.0, 4.1, "at"), (6.1, 7.0, "behind"), (5.9, 7.0, "until")]
    assert subtitle_text(lines, [5.0]) == "subtitle\n1.0 - 4.1 at\n5.9 - 7.0 until\n"
    assert subtitle_text(lines, [50.0]) == subtitle_text([], [5.0]) == ""
    assert subtitle_text("words", []) == "subtitle\nwords"
    shifted = shift_subtitles(lines, 4.0)
    assert shifted[0] == (0.0, pytest.approx(0.1), "at")
    assert len(shifted) == 3


# ------------------------------------------------------------------------------------------------
# points and counts: modes, scales, times, several images


TAG = '<points coords="1 1 100 900 2 500 200">cat</points>'


def test_points_and_counts_of_an_image():
    answers = {
        "point": TAG,
        "point_count": f"Counting the {TAG} shows a total of 2.",
        "count_point": f"There are 2 {TAG}.",
    }
    for mode, expected in answers.items():
        assert {answer for _, answer in draws({**POINT, "mode": mode}, n=20)} == {expected}
    assert one_turn(COUNT) == ("How many cat are there? Answer with a number.", "2")
    assert answer_of({**COUNT, "count": 0}) == "There are none."
    assert answer_of({**POINT, "points": []}) == "There are none."
    # the points are known, but only their number is wanted
    assert answer_of({**POINT, "style": "count"}) == "2"
    questions = "\n".join(drawn_questions({**COUNT, "style": "point_count"}, n=50))
    assert not re.search("point to|pointing", questions.lower())
    own = {"type": "point", "style": "cosyn_point", "question": "Which Bar?"}
    assert one_turn({**own, "coords": "percent", "points": [XY]}) == (
        "Which Bar?", '<points coords="1 1 500 200">Which Bar?</points>')


def test_of_several_labels_one_is_drawn_for_the_question_and_the_answer():
    annotation = {**POINT, "label": ["Cat", "kitten"], "mode": "point"}
    pairs = draws(annotation, config=STAGE1, n=400)
    counts = Counter(re.search(">(.*)<", answer)[1] for _, answer in pairs)
    assert counts.keys() == {"cat", "kitten"}
    assert min(counts.values()) > 160
    assert all(f">{question.removeprefix('pointing: ')}<" in answer for question, answer in pairs)
    assert answer_of(annotation) == TAG                        # the first one, in evaluation
    assert {answer for _, answer in draws({**COUNT, "label": ["Cat", "kitten"]}, n=9)} == {"2"}


@pytest.mark.parametrize(("coords", "size", "record"), [
    ("unit", None, IMAGE),
    ("percent", None, IMAGE),
    ("pixel", None, IMAGE),
    ("pixel", None, {"image": {"path": "a", "width": 200, "height": 50}}),
    ("pixel", [400, 20], {"image": {"path": "a", "width": 200, "height": 50}}),
    ("pixel", [400, 20], VIDEO),
], ids=str)
def test_the_scale_of_points_is_their_own_size_or_the_declared_one_or_the_files(
        coords, size, record):
    declared = next(iter(record.values()))
    of_record = (200, 50) if isinstance(declared, dict) else (10, 10)
    scales = {"unit": (1, 1), "percent": (100, 100), "pixel": size or of_record}
    width, height = scales[coords]
    point = {"x": 0.25 * width, "y": 0.5 * height}
    if "video" in record:
        point["t"] = 1
    annotation = {"type": "point", "label": "l", "coords": coords, "points": [point]}
    if size:
        annotation["size"] = size
    assert ' 1 250 500">' in answer_of(annotation, record, rng=rng_for(0))


def test_points_of_a_video_have_the_times_of_its_frames():
    """A clip that starts at 0.3 s has the frames 0.0, 0.5, .., and 3.7. The official code rounds
    2.2 and 2.7 down to 2.0 and 2.5."""
    record = {"video": {"path": "a.mp4", "start": 0.3, "end": 4.0}}
    points = [{"t": t, **XY} for t in (2.5, 3.0, 4.0)]
    answer = answer_of({**POINT, "points": points, "mode": "point"}, record,
                       times=[*np.arange(0, 3.7, 0.5), 3.7])
    assert answer == '<points coords="2.0 1 500 200;2.5 2 500 200;3.7 3 500 200">Cat</points>'
    # published points and clips are at multiples of 0.5 s, where the nearest frame is the official
    # one, t // 0.5 * 0.5
    for start, t in itertools.product((0, 6.5, 30), (0.0, 0.5, 7.5, 62.5)):
        record = {"video": {"path": "a.mp4", "start": start, "end": start + 63}}
        times = frame_times(63, 128, 2)
        point = [{"t": start + t, **XY}]
        answer = answer_of({**POINT, "points": point}, record, times=times)
        assert f'coords="{t // 0.5 * 0.5} 1 500 200"' in answer


def test_points_of_a_video_are_grouped_by_seconds_from_the_start_of_the_clip():
    # the label of a video keeps its capitals
    tag = '<points coords="0.5 1 900 400 2 911 800;3.0 3 500 200">Cat</points>'
    assert answer_of({**POINTS_IN_TIME, "mode": "point"}, VIDEO_FROM_30) == tag
    counted = answer_of({**POINTS_IN_TIME, "mode": "point_count"}, VIDEO_FROM_30)
    assert counted == f"Counting the {tag} shows a total of 3."
    assert 'coords="30.5 1 900 400 2 911 800;33.0 3' in answer_of(POINTS_IN_TIME, VIDEO)
    # times that are the same in the text are one group
    points = [{"t": t, **XY} for t in (29.98, 30.02, 30.26, 30.3)]
    groups = 'coords="0.0 1 500 200 2 500 200;0.3 3 500 200 4 500 200"'
    assert groups in answer_of({**POINTS_IN_TIME, "points": points}, VIDEO_FROM_30)


def test_questions_about_several_images_mean_all_of_them_or_name_some():
    pairs = draws({**POINTS_ON_IMAGES, "mode": "point_count"}, IMAGES)
    named = [(re.findall(r"image_(\d)", question), answer) for question, answer in pairs]
    assert abs(share([names for names, _ in named]) - 0.5) < 0.03
    assert all(names or "all images" in question
               for (question, _), (names, _) in zip(pairs, named, strict=True))
    # the same without a number: half of the prompts about all images do not say so
    questions = drawn_questions({**POINTS_ON_IMAGES, "mode": "point"}, IMAGES)
    assert abs(share(["all images" in question for question in questions]) - 0.25) < 0.03
    subsets = Counter()
    for names, answer in named:
        assert names == sorted(set(names))
        subsets[tuple(names)] += 1
        wanted = {int(k) for k in names} or {1, 2, 3, 4}
        total = 2 * (1 in wanted) + (3 in wanted)
        assert answer.endswith(f"total of {total}." if total else "There are none.")
        coords = re.search('coords="(.*?)"', answer)
        groups = coords[1].split(";") if coords else []
        assert {int(group.split()[0]) for group in groups} == wanted & {1, 3}
    assert len(subsets) == 16            # every non-empty subset of four, and none named
    for question, _ in pairs:
        assert not re.search(r"\w (Look|Consider)", question)
        if re.findall(r"image_(\d)", question) == ["2", "4"]:
            assert re.search(r"image_2, image_4(?!\d)", question)
    assert "all images" in question_of(POINTS_ON_IMAGES, IMAGES, LATER)
    assert one_turn(POINTS_ON_IMAGES, IMAGES, STAGE1, rng_for(0))[0].endswith(": Cat")
    for question, answer in draws({**POINTS_ON_IMAGES, "question": "Where?"}, IMAGES, n=50):
        assert "image_" not in question
        assert answer.startswith("<points")


def test_an_edited_wording_reaches_the_tokens(monkeypatch):
    """text/templates.txt is for users to edit."""
    file = Path(styles.__file__).with_name("templates.txt")
    edited = file.read_text(encoding="utf-8").replace("Point to {label}.", "Zeige auf {label}.")
    monkeypatch.setattr(styles.Path, "read_text", lambda path, encoding: edited)
    monkeypatch.setattr(styles, "TEMPLATES", styles.read_templates())
    question, *_ = chat(all_turns({**POINT, "mode": "point"}), Characters())
    assert "user\nZeige auf cat.<" in Characters().decode(question.ids)
