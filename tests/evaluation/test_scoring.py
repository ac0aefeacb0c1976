"""Answers of every kind, on every kind of media, are scored as their annotations ask for.

The answers come from a function in place of a model; the questions go the way of tools.evaluate.
"""

import tracemalloc

import numpy as np
import pytest

from evaluation import evaluate as evaluation
from evaluation import scoring
from evaluation.masks import decode_mask, find_misfit, open_masks
from records.check import WORDS
from records.visual import read_headers
from tests.evaluation.answers import (
    all_records,
    clip_with_masks,
    evaluate_answers,
    source,
    true_answer,
)
from tests.evaluation.small_model import DATA, TOKENIZER
from tests.records.samples import QA, image, video
from text.points import seconds
from toy import world

MIDDLE = {"type": "point", "label": "x", "coords": "unit", "points": [{"x": 0.5, "y": 0.5}]}


def test_true_answers_score_one_on_images_and_videos():
    """By nearness, without masks. Of the track, only frames that are shown."""
    records = all_records()
    metrics, predictions = evaluate_answers(records, true_answer)
    # one annotation has no point, so its true answer has none
    other = ("vqa_score", "anls", "relaxed_accuracy", "point_valid")
    for name in evaluation.SCORES:
        if name not in other:
            assert metrics[name] == pytest.approx(1, abs=1e-4), name
    types = [a["type"] for record in records for a in record["annotations"]]
    # a box is read as points
    assert {*types, "box", "text"} == {*WORDS["type"]}
    assert metrics["n_qa"] == types.count("qa") + 1 == 8         # one has two turns
    assert (metrics["n_track"], metrics["n_caption"], metrics["skipped"]) == (1, 7, 0)
    assert metrics["hits"] == "within 5 % of the diagonal"
    (track,) = [p for p in predictions if p["type"] == "track"]
    assert track["times"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [t for t, *_ in track["predicted"]] == track["times"]
    assert track["true"][1] == [1.0, 1, pytest.approx(0.39 * 1280), pytest.approx(0.44 * 720)]


def test_points_in_a_conversation_are_asked_for_and_scored_as_others_are(tmp_path):
    point = {"type": "point", "label": "cat", "coords": "unit", "points": [{"x": 0.4, "y": 0.5}]}
    turns = [{"question": "How many?", "answer": "1"}, point]
    record = image({"type": "qa", "turns": turns}, image="chelsea.png")
    metrics, predictions = evaluate_answers(
        source(tmp_path, record),
        lambda question: '<points coords="1 1 400 500">cat</points>' if question.turn else "1",
        masks_of=lambda *key: 1 / 0)                         # no masks are looked for
    assert (metrics["n_qa"], metrics["n_point"]) == (1, 1)
    assert (metrics["qa_accuracy"], metrics["point_f1"]) == (1, 1)
    assert [(p["type"], p["annotation"], p["turn"]) for p in predictions] == [
        ("qa", 0, 0), ("point", 0, 1)]
    (record,) = source(tmp_path, record)
    questions = evaluation.questions_of(record, read_headers(record, DATA), DATA)
    assert [question.max_new for question in questions] == [384, 192]    # each by its kind


@pytest.mark.parametrize(("turn", "style", "text", "scores"), [
    ({"answer": "12"}, "chart_qa", "12.5", {"qa_accuracy": 0, "relaxed_accuracy": 1}),
    ({"answers": ["hello", "hallo"]}, "doc_qa", "hxllo", {"qa_accuracy": 0, "anls": 0.8}),
    ({"answers": ["cat", "cat", "a cat", "dog"]}, "vqa2", "A cat.",
     {"qa_accuracy": 0, "vqa_score": 1}),
    ({"answers": ["cat", "dog", "cow", "elk"]}, "vqa2", "dog",
     {"qa_accuracy": 1, "vqa_score": pytest.approx(1 / 3)}),
    ({"answer": "12"}, "user_qa", "12", {"qa_accuracy": 1}),
    ({"answer": "12", "explanation": "6 and 6"}, "cosyn_chart_exp", "Two times 6. Answer: 12",
     {"qa_accuracy": 1}),
    ({"options": ["x", "y"], "answer_idx": [1], "explanation": "since"}, "a_exp",
     "A. is wrong. Answer: B. y", {"qa_accuracy": 1, "choice_accuracy": 1}),
    ({"options": ["x", "y", "z"], "answer_idx": [0, 2]}, "a_okvqa_mc", "C. z\nA. x",
     {"qa_accuracy": 1, "choice_accuracy": 1}),
    ({"options": ["x", "y"], "answer_idx": [1]}, "a_okvqa_mc", "B. y\nIt is no x",
     {"qa_accuracy": 1, "choice_accuracy": 1}),
    ({"options": ["x", "y", "z"], "answer_idx": [0, 2]}, "a_okvqa_mc", "A. x",
     {"qa_accuracy": 0, "choice_accuracy": 0}),
    ({"options": ["b", "a"], "answer_idx": [0], "letters": False}, "ai2_diagram_no_letter", "b",
     {"qa_accuracy": 1, "choice_accuracy": 1}),
])
def test_a_question_is_scored_as_its_style_and_its_answers_ask_for(turn, style, text, scores):
    for plain in (True, False):
        assert scoring.score_qa(turn, style, text, plain) == scores


def test_answers_are_read_by_the_official_rules_only_in_published_styles(tmp_path):
    turn = {"question": "Which?", "options": ["x", "y"], "answer_idx": 1}
    records = source(tmp_path, image(
        {"type": "count", "label": "coins", "count": 3}, {"type": "qa", **turn},
        {"type": "qa", "style": "a_okvqa_mc", **turn},
        {**QA, "style": "tally_qa", "answer": "Yes"}, image="coins.png"))
    answers = ("Three.", "The answer is b.", "The answer is b.", "Answer: Yes")
    right = {None: (1, 1, 0, 1), "official": (0, 0, 0, 1), "plain": (1, 1, 1, 0)}
    for reading, expected in right.items():
        _, rows = evaluate_answers(records, lambda q: answers[q.index], reading=reading)
        found = [row.get("qa_accuracy", row.get("count_accuracy")) for row in rows]
        assert tuple(found) == expected
    # the VQA scores of A-OKVQA compare words as they are, and those of VQA without articles
    turn = {"answers": ["dog"] * 10}
    assert scoring.score_qa(turn, "vqa2", "the dog", False)["vqa_score"] == 1
    assert scoring.score_qa(turn, "a_okvqa_da", "the dog", False)["vqa_score"] == 0


@pytest.mark.parametrize(("text", "points", "counts"), [
    ('<points coords="1 1 100 100">x</points>', 1, 1), ("There are none.", 0, 1), ("3", 0, 1),
    ('<points coords="1 1 10 10">x</points>', 0, 0), ("I see some.", 0, 0),
])
def test_the_share_of_answers_that_can_be_read_stands_beside_the_scores(
        tmp_path, text, points, counts):
    """An answer is valid, as in the official code, if it has a point, or if it states a number."""
    count = {"type": "count", "label": "x", "count": 7}
    records = source(tmp_path, image(MIDDLE, count, image="coins.png"))
    metrics, _ = evaluate_answers(records, lambda q: text)
    assert (metrics["point_valid"], metrics["count_valid"]) == (points, counts)


def test_points_lie_on_the_image_they_name_in_its_own_pixels(tmp_path):
    """chelsea is 451 x 300, coffee 600 x 400. The second point of the answer is right but for the
    image that it names."""
    points = [{"image": 1, "x": 0.2, "y": 0.5}, {"image": 1, "x": 0.8, "y": 0.5}]
    annotation = {"type": "point", "label": "x", "coords": "unit", "points": points}
    images = ["chelsea.png", "coffee.png"]
    records = source(tmp_path, {"images": images, "annotations": [annotation]})
    answer = '<points coords="1 1 800 500\t2 2 200 500">x</points>'
    metrics, (row,) = evaluate_answers(records, lambda q: answer)
    assert row["predicted"] == [[1, 1, 0.8 * 451, 150.0], [2, 2, 120.0, 200.0]]
    assert row["true"][0] == [2, 1, 120.0, 200.0]
    assert metrics["images_point_precision"] == metrics["images_point_recall"] == 0.5
    assert "point_f1" not in metrics
    masks = np.zeros((2, 400, 600), bool)                # padded to the largest image
    masks[0, 199:202, 119:122] = masks[1, :, 500:] = True
    metrics, _ = evaluate_answers(records, lambda q: answer, lambda record, index: masks)
    assert metrics["images_point_f1"] == 0.5
    masks[0, 200, 120] = False
    metrics, _ = evaluate_answers(records, lambda q: answer, lambda record, index: masks)
    assert metrics["images_point_f1"] == 0


@pytest.mark.parametrize(("record", "number", "frame"), [
    (image(MIDDLE, image="coins.png"), 2, 1),
    (video({**MIDDLE, "points": [{"t": 0.5, "x": 0.5, "y": 0.5}]}, video="bigbuckbunny.mp4"),
     0.52, 0.5)])
def test_points_lie_on_the_only_image_and_times_are_rounded(tmp_path, record, number, frame):
    answer = f'<points coords="{number} 1 500 500">x</points>'
    _, (row,) = evaluate_answers(source(tmp_path, record), lambda q: answer)
    assert row["predicted"][0][0] == frame


def test_a_track_from_a_point_is_scored_after_it_and_for_its_object_alone(tmp_path):
    points = []
    for t in range(4):
        points += [{"t": float(t), "id": 7, "x": 10 + 20 * t, "y": 20},
                   {"t": float(t), "id": 3, "x": 10 + 20 * t, "y": 80}]
    annotation = {
        "type": "track", "label": "x", "coords": "percent", "mode": "from_point", "fps": 1,
        "points": points, "query": {"t": 1.0, "id": 3, "x": 30, "y": 80}}
    records = source(tmp_path, video(annotation, video="bigbuckbunny.mp4"))
    _, (row,) = evaluate_answers(records, true_answer)
    true = [(t, i, round(x / 1280, 3)) for t, i, x, _ in row["true"]]
    assert true == [(2.0, 3, 0.5), (3.0, 3, 0.7)]
    assert row["hota"] == 1
    assert 'coords="1.0 1 300 800"' in row["prompt"]


def test_masks_are_read_when_they_are_asked_for(tmp_path):
    path = tmp_path / "masks.npz"
    one = np.zeros((1, 500, 500), bool)
    np.savez(path, **{f"{k}/0": one for k in range(20)})
    tracemalloc.start()
    masks_of = open_masks(path)
    assert all(np.array_equal(masks_of({"id": k}, 0), one) for k in range(20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * one.nbytes
    assert masks_of({"id": 20}, 0) is None
    damaged = bytearray(path.read_bytes())
    damaged[1000] = 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"--masks .*masks\.npz cannot be used"):
        open_masks(path)({"id": 0}, 0)


def test_points_and_tracks_of_a_clip_are_compared_with_masks_on_its_own_clock(tmp_path):
    records, path = clip_with_masks(tmp_path)
    masks_of = open_masks(path)

    def metrics_of(points, tracks):
        answers = [points, tracks]
        return evaluate_answers(records, lambda q: answers[q.index], masks_of)[0]

    # far from the true points but in their masks, at another of their times
    metrics = metrics_of(
        '<points coords="1.0 1 200 900 2 900 600">x</points>',
        '<tracks coords="0.0 1 020 900 2 990 900\t1.0 1 020 900'
        '\t2.0 1 020 900 2 990 900">y</tracks>')
    assert metrics["hits"] == "mask"
    assert metrics["video_point_f1"] == metrics["track_f1"] == metrics["hota"] == 1
    # the second point has no mask at 0.5 s; the second track has none at 1.0 s
    metrics = metrics_of(
        '<points coords="0.5 1 200 900 2 900 600">x</points>',
        '<tracks coords="0.0 1 020 900 2 990 900\t1.0 1 020 900 2 990 900'
        '\t2.0 1 020 900 2 990 900">y</tracks>')
    assert metrics["video_point_f1"] == 0.5
    # of frame 1.0, one of two is right; TP 5, FP 1; track 2 has three frames, its object two
    assert metrics["track_precision"] == pytest.approx(5 / 6, abs=1e-4)
    assert metrics["track_recall"] == 1
    assert metrics["det_a"] == pytest.approx(5 / 6, abs=1e-4)
    assert metrics["ass_a"] == pytest.approx((3 + 2 * 2 / 3) / 5, abs=1e-4)
    # seconds of the file are not those of the clip
    metrics = metrics_of('<points coords="2.5 1 200 900;4.0 2 900 600">x</points>',
                         "No tracks available.")
    assert metrics["video_point_f1"] == metrics["hota"] == 0
    assert seconds(3.0, {"video": {"path": "x", "start": 2.0}}) == 1.0


@pytest.mark.parametrize(("damage", "message"), [
    (lambda m: m | {"clip/1": m["clip/1"][:, :2]}, "the masks of clip/1 have shape"),
    (lambda m: m | {"clip/1": m["clip/1"][..., 0]}, "the masks of clip/1 have shape"),
    (lambda m: m | {"clip/1/times": np.array([2.0, 3.0, 3.5])},
     "clip/1 have no entry for a point at 2.0 s"),
    (lambda m: {name: m[name] for name in m if name != "clip/1/times"},
     r"must be \(2, 0, 720, 1280\)"),
    (lambda m: {name: m[name] for name in m if name != "clip/0"}, "of clip/0 are missing"),
])
def test_masks_that_do_not_fit_are_refused_before_any_question(tmp_path, damage, message):
    records, path = clip_with_masks(tmp_path)
    np.savez(tmp_path / "bad.npz", **damage(dict(np.load(path))))
    with pytest.raises(ValueError, match=message):
        evaluate_answers(records, lambda q: pytest.fail("asked too early"),
                         open_masks(tmp_path / "bad.npz"))


def test_an_answer_may_be_as_long_as_its_kind(tmp_path):
    """docs/molmo2.md 13. Text beyond that is not scored."""
    limits = {}
    for record in all_records():
        info = read_headers(record, DATA)
        for question in evaluation.questions_of(record, info, DATA):
            key = question.annotation["type"], scoring.medium(record)
            limits.setdefault(key, question.max_new)
    assert limits == {
        ("caption", "image"): 2048, ("caption", "video"): 2048,
        ("point", "image"): 192, ("point", "images"): 2048, ("point", "video"): 2048,
        ("count", "image"): 192, ("count", "video"): 2048, ("track", "video"): 4096,
        ("qa", "text"): 384, ("qa", "image"): 384, ("qa", "images"): 384, ("qa", "video"): 384,
    }
    choice = {"type": "qa", "turns": [{"options": ["a", "b"], "answer_idx": [0]}], "style": "x_mc"}
    short = {"type": "qa", "turns": [{"answer": "a"}], "style": "vqa2"}
    assert evaluation.answer_limit(choice, {"images": ["x"]}) == 32
    assert evaluation.answer_limit(short, {"images": ["x"]}) == 12
    long = "red circle, " * 100
    _, predictions = evaluate_answers([world.World("test")[1]], lambda q: long, max_new=None)
    for p in predictions:            # in bytes, 512 or more
        longest = 2048 if p["type"] == "caption" else 512
        assert TOKENIZER.encode(p["text"]) == TOKENIZER.encode(long)[:longest]


def test_masks_of_another_size_than_the_image_do_not_fit(tmp_path):
    (record,) = source(tmp_path, image(MIDDLE, image="coins.png"))
    (question,) = evaluation.questions_of(record, read_headers(record, DATA), DATA)
    assert find_misfit(question, np.ones((1, 303, 384), bool)) is None
    assert find_misfit(question, np.ones((2, 303, 384), bool)).startswith("have 2 entries, but")
    assert find_misfit(question, np.ones((1, 384, 303), bool)).startswith("have shape")


def test_run_lengths_of_coco_are_decoded_down_the_columns():
    """The text is what pycocotools writes for this mask."""
    mask = np.zeros((9, 7), bool)
    mask[2:8, 1:4] = mask[0, 6] = True
    mask[4, 2] = False
    numbers = [11, 6, 3, 2, 1, 3, 3, 6, 19, 1, 8]
    for counts in (";63LN123`0KE", b";63LN123`0KE", numbers):
        assert np.array_equal(decode_mask({"size": [9, 7], "counts": counts}), mask)
