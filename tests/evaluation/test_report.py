"""The scores, samples and curves of a run: what is drawn from its log, and what the toy is scored
on."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from evaluation import report
from records import check
from records.reader import Records
from tests.evaluation.small_model import DATA, MEDIA, TOKENIZER
from tests.records.samples import CAPTION, GOOD, QA, TRACK, VIDEO_POINT, image, video, write
from training.ranks import Ranks

LOG = [
    {"config": {}},
    {"step": 1, "loss": 3.0, "lr": {"vit": 1e-6, "llm": 1e-5}, "seconds": 30,
     "nll_by_source": {"b": 2.0, "a": 4.0}},
    {"step": 2, "loss": 9.0, "lr": {"vit": 2e-6, "llm": 2e-5}, "seconds": 30,
     "nll_by_source": {"b": 9.0}},
    {"step": 2, "eval": {"point_f1": 0.25, "count_accuracy": 0.5, "nll": {"all": 2.5},
                         "old": {"nll": {"all": 1.5}}, "once": {"nll": {}}}},
    # once more, after a resume
    {"step": 2, "loss": 2.0, "lr": {"vit": 3e-6, "llm": 3e-5}, "seconds": 30,
     "nll_by_source": {"b": 2.5}},
    # not finite
    {"step": 3, "loss": None, "lr": {"vit": 4e-6, "llm": 4e-5}, "seconds": 60,
     "nll_by_source": None},
    {"step": 3, "eval": {"point_f1": 0.75, "caption_exact": 0.5, "nll": {"all": 2.25},
                         "old": {"nll": {"all": 1.75}}, "once": {"nll": {"all": 9}}}},
]

# which something else has written; they are ignored
FOREIGN = [[1], 2, {"lr": 1}, {"lr": 1, "step": 9}, {"eval": {"point_f1": 1.0}},
           {"step": 9, "eval": []}, {"step": 9, "eval": {"nll": 1}},
           {"step": 9, "eval": {"nll": {"all": "x"}}},
           {"step": 9, "eval": {"nll": {"of": 1}, "old": {"nll": [1]}}}]


@pytest.fixture
def run_folder(tmp_path):
    write(tmp_path / "log.jsonl", *LOG, *FOREIGN)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch):
    """The arguments of line_chart: [(series, xlabel, options), ..]"""
    calls = []

    def line_chart(series, path, xlabel, ylabel, **options):
        calls.append((series, xlabel, options))

    monkeypatch.setattr(report, "line_chart", line_chart)
    return calls


def test_the_running_mean_is_that_of_neighbours():
    values = np.random.default_rng(0).normal(size=1000)
    found = report.running_mean(list(enumerate(values.tolist())))
    wanted = [values[max(k - 10, 0) : k + 11].mean() for k in range(1000)]
    assert [x for x, _ in found] == list(range(1000))
    assert np.allclose([mean for _, mean in found], wanted)
    # a short run is shown as it is
    assert report.running_mean([(1, 5.0), (2, 7.0)]) == [(1, 5.0), (2, 7.0)]


def test_losses_are_drawn_by_source_and_the_later_line_of_a_step_counts(drawn, run_folder):
    report.draw_curves(run_folder)
    ((series, _, options),) = drawn
    losses = [(1, 3.0), (2, 2.0)]
    assert series == {
        "loss 2.000": losses, "b 2.500": [(1, 2.0), (2, 2.5)], "a 4.000": [(1, 4.0)],
        "held out 2.250": [(2, 2.5), (3, 2.25)], "held out old 1.750": [(2, 1.5), (3, 1.75)]}
    assert options == {"log": True, "pale": [*losses, (3, None)]}


def test_sources_beyond_the_eight_in_most_steps_are_one_line(drawn, tmp_path):
    """The mean of those that a step has. Of 60 sources the second step has nine."""
    names = [f"{k:02}" for k in range(60)]
    steps = [{name: 1.0 + k for k, name in enumerate(names)},
             dict.fromkeys([*names[1:9], names[59]], 5.0)]
    lines = [{"step": step, "loss": 1.0, "lr": {}, "nll_by_source": nll}
             for step, nll in enumerate(steps, 1)]
    write(tmp_path / "log.jsonl", *lines)
    report.draw_curves(tmp_path)
    ((series, *_),) = drawn
    assert list(series) == ["loss 1.000", *(f"{name} 5.000" for name in names[1:9]),
                            "others (52) 5.000"]
    assert series["others (52) 5.000"] == [(1, (1 + sum(range(10, 61))) / 52), (2, 5.0)]


def test_scores_stand_at_the_steps_of_the_losses(drawn, run_folder):
    report.draw_progress(run_folder)
    ((series, xlabel, _),) = drawn
    assert series == {"point_f1": [(2, 0.25), (3, 0.75)]}
    assert xlabel == "step"


@pytest.fixture
def evaluated(monkeypatch):
    """The arguments of evaluate, which finds a perfect score: [(records, options), ..]"""
    calls = []

    def evaluate(model, tokenizer, config, records, masks_of=None, **options):
        calls.append((records, masks_of, {"config": config, **options}))
        return {"point_f1": 1.0, "n_records": len(records)}, []

    monkeypatch.setattr(report, "evaluate", evaluate)
    return calls


def run_of(stage, eval_records=None, **settings):
    config = SimpleNamespace(stage=stage, seed=0, eval_images=2, data=replace(DATA, **settings))
    return SimpleNamespace(config=config, tokenizer=TOKENIZER, eval_records=eval_records,
                           ranks=Ranks())


@pytest.mark.parametrize(("stage", "parts", "max_new"), [
    (1, ["test", "unseen", "crowded"], 128), (2, ["test", "long", "unseen", "crowded"], 384),
])
def test_the_toy_is_scored_by_parts_with_its_own_masks(evaluated, stage, parts, max_new):
    metrics = report.final_scores(run_of(stage), None)
    assert metrics["point_f1"] == 1.0
    assert [name for name in metrics if name in ("long", "unseen", "crowded")] == parts[1:]
    names = []  # on the progress bars
    for records, masks_of, options in evaluated:
        name = options.pop("name")
        assert name == f"toy set {parts[len(names)]}"
        names.append(name)
        assert options == {"config": DATA, "max_new": max_new, "ranks": Ranks()}
        kinds = [annotation["type"] for annotation in records[0]["annotations"]]
        index = kinds.index("point")
        masks = masks_of(records[0], index)
        masks = masks["masks"] if "video" in records[0] else masks
        assert len(masks) == len(records[0]["annotations"][index]["points"])


def test_without_held_out_images_nothing_is_scored(evaluated):
    run = run_of(1)
    run.config.eval_images = 0
    assert report.final_scores(run, None) == {}
    assert not evaluated


def test_given_records_are_scored_as_by_tools_evaluate(evaluated, monkeypatch, tmp_path):
    """Each set apart, with the crops and frames of evaluation, and the limits by kind of question:
    a track of three objects in 40 frames takes 1,400 tokens."""
    drawn = []
    monkeypatch.setattr(report.pictures, "draw", lambda *args, **options: drawn.append(args))
    records = list(Records(MEDIA / "records.jsonl"))
    sets = {"a.jsonl": records, "b.jsonl": records[:1]}
    run = run_of(3, sets, max_crops=8, max_frames=128)
    metrics = report.final_scores(run, None, tmp_path / "samples")
    assert metrics.pop("b.jsonl") == {**metrics, "n_records": 1}
    assert metrics["n_records"] == len(records)
    asked = replace(DATA, max_crops=8, max_frames=384, max_images=20)
    for given, masks_of, options in evaluated:
        assert masks_of is None
        assert given == sets[options.pop("name")]
        assert options == {"config": asked, "ranks": Ranks()}
    assert drawn[0][1:] == (records, tmp_path / "samples")
    assert drawn[1][1:] == (records[:1], tmp_path / "samples" / "2-b.jsonl")
    assert report.final_scores(run_of(3, {}), None) == {}


def test_progress_is_drawn_of_the_same_images_at_every_step(tmp_path, monkeypatch, capsys):
    """Rings where the model points, its caption below; a run on other records draws none. One line
    has the scores."""
    answers = []
    found = {"point": {"type": "point", "predicted": [[1, "1", 50, 50]], "true": [],
                       "point_f1": 0.25},
             "caption": {"type": "caption", "caption_exact": 1.0}}

    def evaluate(model, tokenizer, config, records, **options):
        answers.append([
            {"id": record["id"], "annotation": k, "text": "red cross", **found[annotation["type"]]}
            for record in records for k, annotation in enumerate(record["annotations"])])
        return {}, answers[-1]

    monkeypatch.setattr(report, "evaluate", evaluate)
    run = run_of(1)
    run.out, run.device, run.dtype = tmp_path, torch.device("cpu"), torch.float32
    run.config.steps = 1000
    model = torch.nn.Linear(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(report, "draw_step", lambda run, model, step: step)
        due = [step for step in range(1001) if report.look(run, model, step)]
    assert due == [20, 50, 100, 200, 400, 700, 1000]
    shown = [report.look(run, model, step) for step in (20, 1000)]
    line = "picture of step 20: point_f1 0.250, caption_exact 1.000 on 16 held-out images\n"
    assert line in capsys.readouterr().err
    pages = [np.array(Image.open(of_step["picture"])) for of_step in shown]
    assert answers[0] == answers[1]
    assert len({answer["id"] for answer in answers[0]}) == report.N_CANDIDATES
    # the title alone differs
    assert np.array_equal(pages[0][:200], pages[1][:200])
    assert not np.array_equal(*pages)
    assert model.training
    record = report.candidates(run.config)[0]
    (image,) = record["source"].images(record)
    shown = np.array(Image.fromarray(image).resize((200, 200)), int)
    changed = np.abs(pages[0][:200, :200] - shown).max(2) > 100
    rows, columns = np.nonzero(changed[80:120, 80:120])
    assert abs(rows.mean() - 20) < 3  # a ring around the middle
    assert abs(columns.mean() - 20) < 3
    (tmp_path / "samples" / "step-².json").write_text("another's")
    for answer in answers[-1][3::6]:     # the caption of every third image becomes wrong
        answer["caption_exact"] = 0
    (tmp_path / "samples" / "step-1000.json").write_text(json.dumps(answers[-1]))
    report.animate_progress(run)
    page = np.array(Image.open(tmp_path / "samples" / "step-1000.png"), int)
    redness = page[200:260, :, 0] - page[200:260, :, 1]
    assert redness[:, 204:].max() > 100     # the second image has the first wrong caption
    assert redness[:, :200].max() <= 20
    assert redness[:, :200].min() < -80
    with Image.open(tmp_path / "progress.gif") as progress:
        durations = []
        for k in range(progress.n_frames):
            progress.seek(k)
            durations.append(progress.info["duration"])
    assert durations == [800, 3000]                      # milliseconds
    run.eval_records = {}
    assert report.look(run, model, 20) == {}


@pytest.mark.parametrize(("exact", "chosen"), [
    ("1111000011111111", "0124"),    # 12 of 16 captions are right, so 3 of 4
    ("0000000000000000", "0123"),
    ("0100000000000001", "0234"),
])
def test_the_images_of_the_animation_have_the_typical_score(exact, chosen):
    records = [{"id": str(k)} for k in range(len(exact))]
    answers = [{"id": str(k), "type": "caption", "caption_exact": float(x)}
               for k, x in enumerate(exact)]
    found = report.choose_typical(records, answers)
    assert "".join(record["id"] for record in found) == chosen


TOY_SCORES = {"point_f1": 0.9, "point_recall": 0.8, "unseen": {"caption_exact": 0.04, "nll": {}}}
TOY_END = """after 1,600 steps     score    target
point_f1              0.900     0.900
count_accuracy            -     0.930
caption_exact             -     0.750
Pictures: runs/x/progress.gif
Next: python -m tools.play --model runs/x
"""
OWN_END = f"""after 1,600 steps      mine      old\\x07
caption_exact         0.500         -
point_f1                  -     0.750
The held-out loss of mine was lowest at step 800 (runs/x/step-800). To end the run with this model \
instead: python train.py --out runs/x --finish-at 800
Pictures: runs/x/progress.gif
Next: python -m tools.generate --model runs/x --image {MEDIA}/chelsea.png --prompt long_caption:
"""
BARE_END = f"""After 1,600 steps the loss is not in the log. No answer was scored. \
To score answers, add --eval FILE.
Pictures: runs/x/progress.gif
Next: python -m tools.generate --model runs/x --image {MEDIA}/chelsea.png --prompt long_caption:
"""


@pytest.mark.parametrize(("eval_records", "log", "scores", "text"), [
    (None, [], TOY_SCORES, TOY_END),
    ({"mine": []}, [{"step": 800, "eval": {"nll": {"all": 1}}}],
     {"caption_exact": 0.5, "nll": {"all": 2}, "old\a": {"point_f1": 0.75, "nll": {}}}, OWN_END),
    ({}, [], {}, BARE_END),
])
def test_the_end_is_a_table_of_scores_the_pictures_and_what_to_do_next(
        capsys, tmp_path, monkeypatch, eval_records, log, scores, text):
    """The JSON object is in result.json, and is printed if it is asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "animate_progress", lambda run: None)
    command = ["python", "train.py", "--out", "runs/x", "--overwrite"]
    monkeypatch.setattr("sys.orig_argv", command)
    run = run_of(1, eval_records)
    run.out = Path("runs/x")
    run.config.steps = 1600
    (run.out / "step-800").mkdir(parents=True)
    (run.out / "progress.gif").touch()
    write(run.out / "log.jsonl", *log)
    mixture = SimpleNamespace(sources=[Records(MEDIA / "records.jsonl", MEDIA)])
    run.loader = SimpleNamespace(mixture=mixture)
    written = SimpleNamespace(write=lambda line: None)
    report.end(run, written, scores, 65.04)
    assert capsys.readouterr().out == text
    result = {"out": "runs/x", "steps": 1600, "loss": None, "seconds": 65.0, "eval": scores}
    assert json.loads((run.out / "result.json").read_text()) == result
    report.end(run, written, scores, 65.04, as_json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_an_evaluation_during_a_run_prints_one_line(tmp_path, monkeypatch, capsys):
    found = {"qa_accuracy": 0.2, "point_recall": 0.5, "nll": {"all": 0.148},
             "coco": {"nll": {"all": 0.988}}}
    run = run_of(1, {"llava": [], "coco": []})
    run.out = tmp_path
    monkeypatch.setattr(report, "scores", lambda *_: found)
    written = []
    report.evaluate_step(run, None, SimpleNamespace(write=written.append), 60)
    assert written == [{"step": 60, "eval": found}]
    line = "step 60: held-out loss 0.148 (llava), 0.988 (coco); qa_accuracy 0.200\n"
    assert capsys.readouterr().err.endswith(f": {line}")


VIDEO = str(MEDIA / "bigbuckbunny.mp4")
POINT = {**VIDEO_POINT, "label": "ear"}


@pytest.mark.parametrize(("files", "words"), [
    ([[GOOD, video(CAPTION, video="none.mp4"), video({**TRACK, "label": "ear"}, video=VIDEO)]],
     f"--video {VIDEO} --prompt 'video_point_track_per_frame: ear'"),
    ([[GOOD], [video({"type": "mine"}, POINT, video={"path": VIDEO})]],
     f"--video {VIDEO} --prompt 'video_point: ear'"),
    ([[video(POINT, video={"frames": ["coins.png"], "fps": 1})]], "--video VIDEO --prompt PROMPT"),
    ([[image(QA, images=["coins.png", "rocket.jpg"])]],
     f"--images {MEDIA}/coins.png {MEDIA}/rocket.jpg --prompt 'user_qa: q'"),
    ([[GOOD]], "--prompt PROMPT"),
    ([[GOOD, {"annotations": [QA]}]], "--prompt 'text_sft: q'"),
    ([[image({"type": "mine"}, image="coins.png")]], "--image IMAGE --prompt PROMPT"),
])
def test_the_question_to_try_is_the_first_of_the_data(tmp_path, monkeypatch, files, words):
    """Also of videos and of texts; a type without a score, and frames as files, have none."""
    monkeypatch.setitem(check.TABLES, "mine", {"type": "type!"})
    monkeypatch.setitem(check.TESTS, "mine", {})
    monkeypatch.setitem(check.NEEDED, "mine", ["type"])
    monkeypatch.setitem(check.KINDS, "type", ("a type", lambda value: True))
    sources = []
    for k, rows in enumerate(files):
        for row in rows:
            if "images" in row:
                del row["image"]
        sources.append(Records(write(tmp_path / f"{k}.jsonl", *rows), MEDIA))
    run = run_of(2, {})
    run.loader = SimpleNamespace(mixture=SimpleNamespace(sources=sources))
    assert report.first_question(run) == words
