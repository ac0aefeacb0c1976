"""Asking a model about records, and scoring what it says: with true answers in place of a model's, and with small random models."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
import model
import packing
from evaluation import evaluate, generate
from text.tracks import seconds
from toy import world as tiny
from training import weights

MEDIA = Path(__file__).parents[1] / "media"
CONFIG = dataclasses.replace(model.PRESETS["toy"], n_layer=2, vision=dataclasses.replace(model.TOY_VISION, n_layer=2, feature_layers=(1, 0)))
DATA = data.DataConfig(max_tokens=512, max_crops=1, length_hint=0, max_frames=6, vision=CONFIG.vision)
TOKENIZER = data.ByteTokenizer(tiny.WORDS)


@pytest.fixture(scope="module")
def grown():
    torch.manual_seed(0)
    return model.Molmo2(CONFIG).init_weights().eval()


def source(folder, *records):
    """Records with their media in tests/media."""
    path = folder / f"records-{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return data.Records(path, MEDIA)


@pytest.fixture
def answering(monkeypatch):
    """says(record, k, turn) -> text, in place of a model; -> what evaluate gives. It is asked question by question, in batches."""
    def run(records, says, masks_of=None, config=DATA, **options):
        order, prompted = [], evaluate.prompted

        def noted(*args):
            for group in prompted(*args):
                order[:] = [q for q, _ in group]
                yield group

        def generated(model, prompts, stops, max_new):
            assert len(prompts) == len(order) and max_new == max(q.limit for q in order)
            return [TOKENIZER.encode(says(q.record, q.k, q.turn)) for q in order]

        monkeypatch.setattr(evaluate, "prompted", noted)
        monkeypatch.setattr(evaluate, "generate", generated)
        monkeypatch.setattr(evaluate, "nll", lambda *args: {})
        return evaluate.evaluate(None, TOKENIZER, config, records, masks_of, **{"max_new": 10_000, **options})

    return run


def truth(record, k, turn):
    sight = data.read_headers(record, DATA)
    return data.turns_of(record["annotations"][k], record, sight.sizes, DATA, None, sight.times)[turn][1]


# ---------------------------------------------------------------------------------------------------------------
# the toy world


def test_a_perfect_model_scores_one_and_a_silent_one_what_is_absent(monkeypatch):
    """evaluate() with the model's answers replaced by the true ones, then by none, recognised by all that a model is given."""
    world = tiny.World("test")
    records = [world[i] for i in range(6)]

    def shown(prompt):
        return prompt.tokens.tobytes(), prompt.images.tobytes()

    true = {}
    for record in records:
        for a in record["annotations"]:
            prompt = data.encode_prompt([world.image(record)], [(data.question_of(a, record, DATA), None)], TOKENIZER, DATA)
            ((_, answer),) = data.turns_of(a, record, [(tiny.SIZE, tiny.SIZE)], DATA, data.rng_for(0))
            true[shown(prompt)] = TOKENIZER.encode(answer)

    def masks_of(record, k):
        return world.masks(record, record["annotations"][k])

    def scores(answer):
        monkeypatch.setattr(evaluate, "generate", lambda model, prompts, eos, max_new: [answer(p) for p in prompts])
        monkeypatch.setattr(evaluate, "nll", lambda *args: {})
        return evaluate.evaluate(None, TOKENIZER, DATA, records, masks_of, batch=7)[0]     # several batches

    perfect, silent = scores(lambda prompt: true[shown(prompt)]), scores(lambda prompt: [])
    assert perfect["point_f1"] == pytest.approx(1, abs=1e-4) and perfect["hits"] == "mask"
    assert perfect["count_accuracy"] == perfect["caption_exact"] == perfect["caption_recall"] == perfect["caption_precision"] == 1
    absent = np.mean([not a["points"] for r in records for a in r["annotations"] if a["type"] == "point"])
    assert silent["point_f1"] == pytest.approx(absent, abs=1e-4) and silent["caption_exact"] == silent["count_accuracy"] == 0


# ---------------------------------------------------------------------------------------------------------------
# every kind of question on every kind of media


def test_true_answers_score_one_on_photographs_and_films(answering):
    """... by nearness: no masks. The text record is asked too; of the track, only frames that are shown."""
    records = [*data.Records(MEDIA / "records.jsonl"), *data.Records(MEDIA / "films.jsonl")]
    result, predictions = answering(records, truth)
    ones = [name for name in evaluate.SCORES if name not in ("vqa_score", "anls", "relaxed_accuracy")]
    assert {name: result[name] for name in ones} == dict.fromkeys(ones, pytest.approx(1, abs=1e-4))
    kinds = [a["type"] for r in records for a in r["annotations"]]
    assert result["n_qa"] == kinds.count("qa") + 1 == 8                  # one has two turns
    assert (result["n_track"], result["n_caption"], result["skipped"], result["hits"]) == (1, 7, 0, "within 5 % of the diagonal")
    track = next(p for p in predictions if p["type"] == "track")
    assert track["times"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and [t for t, *_ in track["predicted"]] == track["times"]
    assert track["true"][1] == [1.0, 1, pytest.approx(0.39 * 1280), pytest.approx(0.44 * 720)]


def test_nonsense_scores_nothing(answering):
    records = [*data.Records(MEDIA / "records.jsonl"), *data.Records(MEDIA / "films.jsonl")]
    nonsense = '<points coords="77 1 000 000">x</points>'                # a point in a corner, at a time and on an image that there is not
    result, predictions = answering(records, lambda *_: nonsense)
    # a choice is scored by what comes nearest, and a point counts as one
    asked = {"count_accuracy", "count_close", "choice_accuracy", "qa_accuracy"}
    assert all(result[name] == 0 for name in evaluate.SCORES if name in result and name not in asked)
    images = next(p for p in predictions if p["medium"] == "images" and p["type"] == "point")
    assert images["predicted"] == [[77.0, 1, 0.0, 0.0]] and images["images_point_precision"] == 0


def test_what_was_asked_and_said_is_kept(answering):
    (record, _, pets) = data.Records(MEDIA / "films.jsonl")
    _, predictions = answering([record, pets], lambda r, k, turn: "It stretches and yawns.")
    by_place = {(p["id"], p["annotation"]): p for p in predictions}
    assert len(by_place) == len(predictions) == 7
    row = by_place["rabbit", 2]
    assert row["prompt"].endswith("A. It stretches and yawns.\nB. It eats.\nC. It goes back to sleep.") and row["choice_accuracy"] == 1
    assert (row["text"], row["type"], row["medium"], len(row["times"])) == ("It stretches and yawns.", "qa", "video", 6)
    assert by_place["two pets", 1]["true"][0] == [1, 1, pytest.approx(0.381 * 451), pytest.approx(0.39 * 300)]
    assert "times" not in by_place["two pets", 1] and json.loads(json.dumps(predictions)) == predictions


def test_points_lie_on_the_image_they_name_in_its_own_pixels(answering, tmp_path):
    """chelsea is 451 x 300, coffee 600 x 400. The second point of the answer is right but for the image it names."""
    points = [{"image": 1, "x": 0.2, "y": 0.5}, {"image": 1, "x": 0.8, "y": 0.5}]
    records = source(tmp_path, {"images": ["chelsea.png", "coffee.png"],
                                "annotations": [{"type": "point", "label": "x", "coords": "unit", "points": points}]})
    said = '<points coords="1 1 800 500\t2 2 200 500">x</points>'
    result, (row,) = answering(records, lambda *_: said)
    assert row["predicted"] == [[1, 1, 0.8 * 451, 150.0], [2, 2, 120.0, 200.0]] and row["true"][0] == [2, 1, 120.0, 200.0]
    assert (result["images_point_precision"], result["images_point_recall"]) == (0.5, 0.5) and "point_f1" not in result
    masks = np.zeros((2, 400, 600), bool)                                # padded to the largest image
    masks[0, 199:202, 119:122] = masks[1, :, 500:] = True
    assert answering(records, lambda *_: said, lambda r, k: masks)[0]["images_point_f1"] == 0.5
    masks[0, 200, 120] = False
    assert answering(records, lambda *_: said, lambda r, k: masks)[0]["images_point_f1"] == 0


def test_nearness_is_measured_by_the_image_that_the_point_lies_on(answering, tmp_path):
    """33 pixels off: within 5 % of the diagonal of coffee, 36, and not of chelsea, 27."""
    for image, f1 in ((0, 0), (1, 1)):
        w = (451, 600)[image]
        a = {"type": "point", "label": "x", "coords": "unit", "points": [{"image": image, "x": 0.5 + 33 / w, "y": 0.5}]}
        records = source(tmp_path, {"images": ["chelsea.png", "coffee.png"], "annotations": [a]})
        said = f'<points coords="{image + 1} 1 500 500">x</points>'
        assert answering(records, lambda *_, said=said: said)[0]["images_point_f1"] == f1


def test_pixels_are_of_the_size_that_the_record_declares(answering, tmp_path):
    """A file that is half as large as its record says: the points are scaled to what is shown. Of one image, any frame is the first."""
    record = {"image": {"path": "coffee.png", "width": 1200, "height": 800},
              "annotations": [{"type": "point", "label": "spoon", "coords": "pixel", "points": [{"x": 732, "y": 566}]}]}
    _, (row,) = answering(source(tmp_path, record), lambda *_: '<points coords="3 1 610 708">x</points>')
    assert row["predicted"] == [[1, 1, 366, pytest.approx(283.2)]]
    assert row["true"] == [[1, 1, pytest.approx(366), pytest.approx(283)]] and row["point_f1"] == pytest.approx(1)


def test_counts_of_a_video_are_close_within_a_twentieth(answering, tmp_path):
    count = {"type": "count", "label": "x", "count": 40}
    records = source(tmp_path, {"image": "coins.png", "annotations": [count]}, {"video": "bigbuckbunny.mp4", "annotations": [count]})
    by_medium = {p["medium"]: p for p in answering(records, lambda *_: "37")[1]}
    assert [by_medium[m]["count_close"] for m in ("image", "video")] == [0, 1] and by_medium["video"]["count_accuracy"] == 0


def test_a_later_turn_is_asked_behind_the_true_answers_before_it(answering, monkeypatch):
    (record,) = [r for r in data.Records(MEDIA / "records.jsonl") if r["id"] == "astronaut"]
    seen, ask = {}, data.ask
    monkeypatch.setattr(data, "ask", lambda images, turns, *rest: seen.setdefault(len(turns), turns) and ask(images, turns, *rest))
    record["annotations"] = record["annotations"][2:]
    result, (first, second) = answering([record], lambda r, k, turn: ("no idea", "A flag.")[turn])
    assert seen[2][0][1] == "A model of a space shuttle with its boosters." and seen[2][1] == ("And on the left?", None)
    assert (first["turn"], first["qa_accuracy"], second["turn"], second["qa_accuracy"]) == (0, 0, 1, 1) and result["qa_accuracy"] == 0.5
    record["annotations"][0]["turns"][0]["weight"] = 0                   # context only
    assert answering([record], truth)[0]["n_qa"] == 1


@pytest.mark.parametrize(("turn", "style", "text", "scores"), [
    ({"answer": "12"}, "chart_qa", "12.5", {"qa_accuracy": 0, "relaxed_accuracy": 1}),
    ({"answers": ["hello", "hallo"]}, "doc_qa", "hxllo", {"qa_accuracy": 0, "anls": 0.8}),
    ({"answers": ["cat", "cat", "a cat", "dog"]}, "vqa2", "Cat", {"qa_accuracy": 0, "vqa_score": 1}),
    ({"answers": ["cat", "dog", "cow", "elk"]}, "vqa2", "dog", {"qa_accuracy": 1, "vqa_score": pytest.approx(1 / 3)}),
    ({"answer": "12"}, "user_qa", "12", {"qa_accuracy": 1}),
    ({"answer": "12", "explanation": "6 and 6"}, "cosyn_chart_exp", "Two times 6. Answer: 12", {"qa_accuracy": 1}),
    ({"options": ["x", "y"], "answer_idx": 1, "explanation": "since"}, "a_exp", "A. is wrong. Answer: B. y",
     {"qa_accuracy": 1, "choice_accuracy": 1}),
    ({"options": ["x", "y", "z"], "answer_idx": [0, 2]}, "a_okvqa_mc", "C. z\nA. x", {"qa_accuracy": 1, "choice_accuracy": 1}),
    ({"options": ["x", "y", "z"], "answer_idx": [0, 2]}, "a_okvqa_mc", "A. x", {"qa_accuracy": 0, "choice_accuracy": 0}),
    ({"options": ["b", "a"], "answer_idx": 0, "letters": False}, "ai2_diagram_no_letter", "b", {"qa_accuracy": 1, "choice_accuracy": 1}),
])
def test_a_question_is_scored_as_its_style_and_its_answers_ask_for(turn, style, text, scores):
    assert evaluate.score_qa(turn, style, text) == scores


def test_an_answer_may_be_as_long_as_its_kind(answering):
    """Spec 13; text beyond it is not scored."""
    limits = {}
    for record in [*data.Records(MEDIA / "records.jsonl"), *data.Records(MEDIA / "films.jsonl")]:
        for q in evaluate.questions_of(record, data.read_headers(record, DATA), DATA, None):
            limits.setdefault((q.a["type"], evaluate.medium(record)), q.limit)
    assert limits == {("caption", "image"): 2048, ("point", "image"): 192, ("qa", "image"): 384, ("count", "image"): 192,
                      ("qa", "text"): 384, ("caption", "video"): 2048, ("qa", "video"): 384, ("count", "video"): 2048,
                      ("track", "video"): 4096, ("point", "video"): 2048, ("qa", "images"): 384, ("point", "images"): 2048}
    choice, short = {"type": "qa", "options": ["a", "b"], "answer_idx": 0, "style": "x_mc"}, {"type": "qa", "style": "vqa2"}
    assert [evaluate.limit_of(a, {"image": "x"}) for a in (choice, short)] == [32, 12]
    world = tiny.World("test")
    long = "red circle, " * 100
    _, predictions = answering([world[1]], lambda *_: long, max_new=None)
    assert {p["type"]: TOKENIZER.encode(long)[: {"caption": 2048, "point": 192, "count": 192}[p["type"]]] == TOKENIZER.encode(p["text"])
            for p in predictions} == {"caption": True, "point": True, "count": True}


def test_a_text_is_not_scored_and_what_cannot_be_read_is_named(answering, tmp_path, capsys):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "cut.jpg").write_bytes((MEDIA / "rocket.jpg").read_bytes()[:9000])
    (tmp_path / "media" / "cut.mp4").write_bytes((MEDIA / "bigbuckbunny.mp4").read_bytes()[:300_000])
    caption = {"type": "caption", "text": "x"}
    lines = [{"annotations": [{"type": "text", "text": "A heron."}]}, {"image": "cut.jpg", "annotations": [caption, caption]},
             {"image": "gone.png", "annotations": [caption]}, {"video": "cut.mp4", "annotations": [caption]}]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result, predictions = answering(data.Records(path), lambda *_: "x")
    said = capsys.readouterr().err.splitlines()
    assert (result["skipped"], result["not_scored"], predictions) == (3, 1, []) and len(said) == 3
    assert all(f"records.jsonl:{n}:" in "\n".join(said) for n in (2, 3, 4)) and all(line.endswith("; skipped") for line in said)


# ---------------------------------------------------------------------------------------------------------------
# masks of videos


def film_with_masks(folder):
    """A clip from 2 to 5 s of the film, two points and two tracks in pixels of 1280 x 720; masks on the clock of the file."""
    tracks = [{"t": t, "id": i, "x": x, "y": 100} for t in (2.0, 3.0, 4.0) for i, x in (("b", 100), ("a", 900)) if (t, i) != (3.0, "a")]
    record = {"id": "clip", "video": {"path": "bigbuckbunny.mp4", "start": 2.0, "end": 5.0}, "annotations": [
        {"type": "point", "label": "x", "coords": "pixel", "size": [1280, 720],
         "points": [{"t": 2.5, "x": 100, "y": 100}, {"t": 4.0, "x": 900, "y": 600}]},
        {"type": "track", "label": "y", "coords": "pixel", "size": [1280, 720], "fps": 1, "points": tracks}]}
    points, objects = np.zeros((2, 3, 720, 1280), bool), np.zeros((2, 3, 720, 1280), bool)
    points[0, :2, :, :640] = points[1, 1:, 400:, 640:] = True            # of the first at 2.5 and 3 s, of the second at 3 and 4 s
    objects[0, [0, 2], :, 640:] = objects[1, :, :, :640] = True          # sorted: "a" is absent at 3 s, "b" is there
    times = {"clip/0/times": [2.5, 3.0, 4.0], "clip/1/times": [2.0, 3.0, 4.0]}
    np.savez(folder / "masks.npz", **{"clip/0": points, "clip/1": objects}, **times)
    return source(folder, record), folder / "masks.npz"


def test_points_and_tracks_of_a_clip_are_held_against_masks_in_its_own_time(answering, tmp_path):
    records, path = film_with_masks(tmp_path)
    masks_of, says = evaluate.open_masks(path, records), {}
    score = lambda: answering(records, lambda r, k, turn: says[k], masks_of)[0]          # noqa: E731
    # far from the true points but in their masks, at another of their times
    says = {0: '<points coords="1.0 1 200 900 2 900 600">x</points>',
            1: '<tracks coords="0.0 1 020 900 2 990 900\t1.0 1 020 900\t2.0 1 020 900 2 990 900">y</tracks>'}
    result = score()
    assert (result["hits"], result["video_point_f1"], result["track_f1"], result["hota"]) == ("mask", 1, 1, 1)
    says = {0: '<points coords="0.5 1 200 900 2 900 600">x</points>',                     # the second has no mask then
            1: '<tracks coords="0.0 1 020 900 2 990 900\t1.0 1 020 900 2 990 900\t2.0 1 020 900 2 990 900">y</tracks>'}
    result = score()
    assert result["video_point_f1"] == 0.5
    # frame 1.0: one of two is right; TP 5, FP 1; track 2 has three frames, its object two
    assert result["track_precision"] == pytest.approx(5 / 6, abs=1e-4) and result["track_recall"] == 1
    assert result["det_a"] == pytest.approx(5 / 6, abs=1e-4) and result["ass_a"] == pytest.approx((3 + 2 * 2 / 3) / 5, abs=1e-4)
    # seconds of the file are none of the clip
    says = {0: '<points coords="2.5 1 200 900;4.0 2 900 600">x</points>', 1: "No tracks available."}
    assert score()["video_point_f1"] == 0 and score()["hota"] == 0


def test_masks_that_do_not_fit_are_refused_before_anything_is_asked(answering, tmp_path):
    records, path = film_with_masks(tmp_path)
    whole = dict(np.load(path))
    silent = lambda *_: pytest.fail("asked")                             # noqa: E731
    for damage, words in (({"clip/0": whole["clip/0"][:1]}, r"'clip/0' needs an array \(2, t, h, w\)"),
                          ({"clip/0": whole["clip/0"][:, :, :, :9]}, "the masks of clip/0 are"),
                          ({"clip/1": whole["clip/1"][:, :2]}, "the masks of clip/1 are"),
                          ({"clip/1/times": np.array([2.0, 3.0, 3.5])}, "the masks of clip/1 have none at 2.0 s"),
                          ({"clip/1/times": None}, "'clip/1/times' is missing")):
        np.savez(tmp_path / "bad.npz", **{k: v for k, v in (whole | damage).items() if v is not None})
        with pytest.raises(ValueError, match=words):
            answering(records, silent, evaluate.open_masks(tmp_path / "bad.npz", records))
    a = {"type": "point", "label": "x", "coords": "unit", "points": [{"x": 0, "y": 0}]}
    one = source(tmp_path, {"image": "coins.png", "annotations": [a]})
    with pytest.raises(ValueError, match=r"one is \(384, 303\), the image \(303, 384\)"):
        answering(one, silent, lambda record, k: np.zeros((1, 384, 303), bool))


def test_a_track_from_a_point_is_scored_behind_it_and_for_its_object_alone(answering, tmp_path):
    points = [{"t": float(t), "id": i, "x": 10 + 20 * t, "y": y} for t in range(4) for i, y in ((7, 20), (3, 80))]
    a = {"type": "track", "label": "x", "coords": "percent", "mode": "from_point", "fps": 1, "points": points,
         "query": {"t": 1.0, "id": 3, "x": 30, "y": 80}}
    records = source(tmp_path, {"video": "bigbuckbunny.mp4", "annotations": [a]})
    _, (row,) = answering(records, truth)
    assert [(t, i, round(x / 1280, 3)) for t, i, x, _ in row["true"]] == [(2.0, 3, 0.5), (3.0, 3, 0.7)]
    assert row["hota"] == 1 and 'coords="1.0 1 300 800"' in row["prompt"]


# ---------------------------------------------------------------------------------------------------------------
# a model


def test_what_is_asked_together_is_answered_as_if_asked_alone_and_seen_once(grown, monkeypatch):
    """Random weights: five questions about a film, one decoding, one encoding, the answers of five prompts of their own."""
    record = data.Records(MEDIA / "films.jsonl")[0]
    sight, decoded, encoded, see = data.read_headers(record, DATA), [], [], grown.vision.forward
    frames = record["source"].frames
    monkeypatch.setattr(record["source"], "frames", lambda *args: decoded.append(1) or frames(*args))
    monkeypatch.setattr(grown.vision, "forward", lambda images, *rest: encoded.append(len(images)) or see(images, *rest))
    _, predictions = evaluate.evaluate(grown, TOKENIZER, DATA, [record], max_new=8)
    assert len(predictions) == 5 and decoded[0] == 1 and encoded[0] == len(sight.times) == 6
    assert len(decoded) == len(encoded) == 2                             # once more for the nll
    for p in predictions:
        turns = data.turns_of(record["annotations"][p["annotation"]], record, sight.sizes, DATA, None, sight.times)
        clip = data.Clip(sight.times, list(frames(record, sight.times)), sight.subtitles)
        (ids,) = generate.generate(grown, [data.encode_prompt([], [(turns[0][0], None)], TOKENIZER, DATA, clip)], TOKENIZER.stops, 8)
        assert p["text"] == TOKENIZER.decode(ids), p["prompt"]


def test_crops_that_prompts_share_give_the_same_numbers_as_copies(grown):
    """packing.collate: of an image with a mosaic and of one that is its own, among others."""
    config = dataclasses.replace(DATA, max_crops=4)
    prompts = []
    for name in ("coffee.png", "coins.png", "coffee.png"):
        image = np.array(Image.open(MEDIA / name).convert("RGB").resize((120, 80) if name == "coins.png" else (300, 200)))
        prompts.append(data.encode_prompt([image], [(f"pointing: {len(prompts)}", None)], TOKENIZER, config))
    assert np.array_equal(prompts[0].images, prompts[2].images)
    T = max(len(p.tokens) for p in prompts)
    apart = packing.collate([[p] for p in prompts], T, CONFIG.vision)
    rows = [[p] for p in (*prompts[:2], dataclasses.replace(prompts[2], images=prompts[0].images))]
    shared = packing.collate(rows, T, CONFIG.vision, shared=True)
    assert len(packing.collate(rows, T, CONFIG.vision).images) == len(apart.images)        # in training, what comes twice is there twice
    assert len(apart.images) - len(shared.images) == len(prompts[0].images) == len(apart.unit) - len(shared.unit)
    with torch.no_grad():
        assert torch.allclose(grown.logits(apart), grown.logits(shared), atol=1e-5)


@pytest.mark.parametrize(("rows", "crops", "tokens"), [(9, 1000, 1 << 20), (30, 14, 1 << 20), (30, 1000, 3000)])
def test_a_batch_holds_no_more_rows_crops_and_tokens_than_allowed(monkeypatch, rows, crops, tokens):
    """... each limit alone, and all but the last batch as large as it may be."""
    monkeypatch.setattr(evaluate, "CROPS", crops)
    monkeypatch.setattr(evaluate, "TOKENS", tokens)
    records = [*data.Records(MEDIA / "records.jsonl"), *data.Records(MEDIA / "films.jsonl")]
    questions = [q for r in records for q in evaluate.questions_of(r, data.read_headers(r, DATA), DATA, 20)]
    groups = list(evaluate.prompted(questions, TOKENIZER, DATA, rows, {}))
    assert [q for group in groups for q, _ in group] == questions and len(groups) > 1

    def fits(group):
        held = {q.record["where"]: len(p.images) for q, p in group if p.images is not None}
        return len(group) <= rows and sum(held.values()) <= crops and len(group) * max(len(p.tokens) + q.limit for q, p in group) <= tokens

    for group, following in zip(groups, [*groups[1:], None], strict=True):
        assert fits(group) or len(group) == 1
        assert following is None or not fits([*group, following[0]])
        shared = {id(p.images) for _, p in group if p.images is not None}
        assert len(shared) == len({q.record["where"] for q, _ in group if q.sight.sizes})


def test_frames_made_small_once_are_the_frames_of_training():
    """... which encode makes from the full ones."""
    record = data.Records(MEDIA / "films.jsonl")[1]
    (group,) = evaluate.prompted(evaluate.questions_of(record, data.read_headers(record, DATA), DATA, 9), TOKENIZER, DATA, 9, {})
    assert np.array_equal(group[0][1].images, data.encode(record, TOKENIZER, DATA, 0, 0).images)
    assert "(yawns)" in TOKENIZER.decode(group[0][1].tokens.tolist())    # what is said is shown, in seconds of the clip
    assert "0.5 - 2.0 (yawns)" in TOKENIZER.decode(group[0][1].tokens.tolist())


def test_validation_nll_is_the_weighted_mean_of_training_by_source(grown, monkeypatch):
    """Against the formula, record by record, with the weights of stage 2; in batches of any size the same."""
    config = dataclasses.replace(DATA, sqrt_length=True, sqrt_branches=True, point_weight=0.2, video_caption_weight=0.1, prefix_all=False)
    records = [*data.Records(MEDIA / "records.jsonl"), *data.Records(MEDIA / "films.jsonl")]
    sums = {"records.jsonl": [], "films.jsonl": []}
    for record in records:
        x = data.encode(record, TOKENIZER, dataclasses.replace(config, max_tokens=5000), 0, 0)
        batch = packing.collate([[x]], len(x.tokens), CONFIG.vision)
        with torch.no_grad():
            logits = grown.logits(batch)[0].log_softmax(-1)
        # by hand: log p of each target that has a weight
        at = batch.weights[0] > 0
        lost = -(logits[at].gather(1, batch.targets[0][at][:, None])[:, 0] * batch.weights[0][at]).sum()
        sums[record["source"].name].append((float(lost), float(batch.weights.sum())))
    everything = [*sums["records.jsonl"], *sums["films.jsonl"]]
    expected = {name: sum(l for l, _ in pairs) / sum(w for _, w in pairs) for name, pairs in {"all": everything, **sums}.items()}
    assert expected["records.jsonl"] != pytest.approx(expected["films.jsonl"], abs=1e-3)
    assert evaluate.nll(grown, TOKENIZER, config, records) == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(evaluate, "TOKENS", 1)
    assert evaluate.nll(grown, TOKENIZER, config, records) == pytest.approx(expected, abs=1e-4)


def test_records_that_break_while_decoding_are_left_out_of_the_nll(grown, tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "cut.jpg").write_bytes((MEDIA / "rocket.jpg").read_bytes()[:9000])
    text = {"type": "text", "text": "A heron."}
    good, bad = {"annotations": [text]}, {"image": "cut.jpg", "annotations": [text]}
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (good, bad)))
    records, reasons = list(data.Records(path)), {}
    assert evaluate.nll(grown, TOKENIZER, DATA, records, reasons) == evaluate.nll(grown, TOKENIZER, DATA, records[:1])
    assert list(reasons) == [f"{path}:2"]
    with pytest.raises(data.Unreadable):
        evaluate.nll(grown, TOKENIZER, DATA, records)
    result, _ = evaluate.evaluate(grown, TOKENIZER, DATA, records)
    assert result["skipped"] == 1 and set(result["nll"]) == {"all", "records.jsonl"} and result["not_scored"] == 2


# ---------------------------------------------------------------------------------------------------------------
# the command


@pytest.fixture
def command(grown, tmp_path, monkeypatch, capsys):
    weights.save(grown, tmp_path / "run")
    TOKENIZER.save(tmp_path / "run")
    (tmp_path / "run" / "data.json").write_text(json.dumps({"max_tokens": 512, "max_crops": 1, "length_hint": 0}))

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["evaluate", "--model", str(tmp_path / "run"), "--out", str(tmp_path / "out"), *map(str, flags)])
        try:
            evaluate.main()
            status = 0
        except SystemExit as end:
            status = end.code
        rows = tmp_path / "out" / "predictions.jsonl"
        out = capsys.readouterr()
        return status, out.out.splitlines(), out.err.splitlines(), [json.loads(r) for r in rows.open()] if rows.exists() else []

    return run


def test_scores_by_frames_are_a_table_a_curve_and_part_of_the_json(command, tmp_path, monkeypatch):
    """The curve itself is drawn by charts.lines; here: what it is given."""
    drawn = []
    monkeypatch.setattr(evaluate.charts, "lines", lambda *args, **how: drawn.append(args), raising=False)
    records, masks = film_with_masks(tmp_path)
    status, out, _, rows = command("--data", records.path, "--media", MEDIA, "--masks", masks, "--frames", 2, 3, "--max-new", 3,
                                   "--draw", tmp_path / "drawn")
    result = json.loads(out[-1])
    assert status == 0 and list(result["by_frames"]) == ["2", "3"] and result["by_frames"]["3"]["hota"] == result["hota"]
    assert {(r["frames"], len(r["times"])) for r in rows} == {(2, 2), (3, 3)}
    table = [line.split() for line in out[:-1]]
    assert table[0] == ["frames", "2", "3"] and ["video_point_f1", "0.0000", "0.0000"] in table
    nll = [result["by_frames"][n]["nll"]["all"] for n in ("2", "3")]
    assert table[-1] == ["nll", *(f"{x:.4f}" for x in nll)] and nll[0] != nll[1]          # it was shown other frames
    ((series, path, label),) = drawn
    assert series == {name: [(2, 0.0), (3, 0.0)] for name in ("video_point_f1", "track_f1", "hota")}
    assert (path, label) == (tmp_path / "drawn" / "frames.png", "frames")


def test_one_number_of_frames_replaces_that_of_training(command, tmp_path):
    records, masks = film_with_masks(tmp_path)
    base = ["--data", records.path, "--media", MEDIA, "--masks", masks, "--max-new", 3]
    status, out, _, rows = command(*base, "--frames", 2)
    assert status == 0 and len(out) == 1 and "by_frames" not in json.loads(out[0]) and {len(r["times"]) for r in rows} == {2}
    assert {len(r["times"]) for r in command(*base)[3]} == {15}          # for a track, five a second


@pytest.mark.parametrize(("flags", "words"), [
    (["--frames", "0"], "--frames must be from 1 to"), (["--frames", "8", "4096"], "--frames must be from 1 to"),
    (["--frames", "8", "--data", MEDIA / "records.jsonl"], "--frames: no video in"), (["--max-new", "0"], "--max-new"),
    (["--masks", "half.npz"], "the masks of clip/0 are"), (["--media", "."], "none of its 1 records could be used")])
def test_a_mistake_costs_one_sentence(command, tmp_path, monkeypatch, flags, words):
    records, path = film_with_masks(tmp_path)
    np.savez(tmp_path / "half.npz", **{k: v[:, :, ::2] if v.ndim == 4 else v for k, v in np.load(path).items()})
    monkeypatch.chdir(tmp_path)
    status, out, err, _ = command("--data", records.path, "--media", MEDIA, *flags)
    assert status == 2 and not out and words in err[-1] and len(err) == 1 + ("none of its" in words)           # and what is skipped


def test_pictures_are_drawn_of_single_images(command, tmp_path):
    status, *_ = command("--data", MEDIA / "records.jsonl", "--draw", tmp_path / "drawn", "--max-new", 2)
    names = sorted(p.name.split("-")[0] for p in (tmp_path / "drawn").glob("*.png"))
    assert status == 0 and names == ["astronaut", "chelsea", "coffee", "coins", "coins"]


def test_the_tables_of_what_is_scored_name_scores_that_exist():
    assert set(evaluate.CURVES) <= set(evaluate.SCORES) and set(evaluate.STYLE_SCORE.values()) <= set(evaluate.SCORES)
    assert seconds(3.0, {"video": {"path": "x", "start": 2.0}}) == 1.0
