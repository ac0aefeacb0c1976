"""Evaluation, samples and curves of a training run (paper: evaluation).

    loss.png, scores.png    curves, from log.jsonl
    samples/                held-out images and videos with predicted and true points
"""

import json
import shlex

import numpy as np

from evaluation import pictures
from evaluation.charts import finite, line_chart
from evaluation.evaluate import SCORES, evaluate
from evaluation.generate import evaluation_config
from toy import world
from toy.images import World
from training.log import read_log, read_steps
from weights import lora
from weights.files import gather_on_each

PROGRESS_SCORES = (
    "point_f1", "count_accuracy", "caption_exact", "video_point_f1", "track_f1", "qa_accuracy"
)


def scores_of_run(run, model, samples_dir=None):
    """final_scores by all ranks, each with a whole copy. The first rank draws."""
    whole = gather_on_each(model, run.ranks, run.device, run.dtype)
    with lora.autocast(whole, run.device, run.dtype):
        scores = final_scores(run, whole, samples_dir if run.ranks.first else None)
    run.ranks.barrier()  # for any time: the first draws
    return scores


def final_scores(run, model, samples_dir=None):
    """Metrics on the sets of --eval or on the held-out parts of the toy world, with pictures
    of answers in samples_dir. Those of every set but the first stand under its name."""
    config = run.config
    is_toy = run.eval_records is None
    if is_toy:
        sets = world.held_out(config.stage, config.seed, config.eval_images, config.toy_kinds)
        options = {"masks_of": toy_masks, "max_new": 128 if config.stage == 1 else 384}
        asked = config.data
    else:
        sets = run.eval_records
        options = {}
        asked = evaluation_config(config.data)
    metrics = {}
    for name, records in sets.items():
        found, predictions = evaluate(
            model, run.tokenizer, asked, records, ranks=run.ranks, **options)
        if samples_dir:
            folder = samples_dir / name if metrics or is_toy else samples_dir
            pictures.draw(predictions, records, folder, n=100 if is_toy else 24)
        if is_toy and name == "unseen":
            found |= score_of_unseen_kinds(predictions, records)
        metrics |= {name: found} if metrics else found
    return metrics


def toy_masks(record, index):
    return record["source"].masks(record, record["annotations"][index])


def score_of_unseen_kinds(predictions, records):
    """-> the mean F1 of points on kinds that training never shows, if any."""
    annotations = {record["id"]: record["annotations"] for record in records}
    unseen = {" ".join(kind) for kind in records[0]["source"].kinds.unseen}
    scores = []
    for p in predictions:
        annotation = annotations[p["id"]][p["annotation"]]
        if annotation.get("label") in unseen and annotation.get("points"):
            scores.append(p["point_f1"])
    if not scores:
        return {}
    return {"point_f1_of_unseen_kinds": round(sum(scores) / len(scores), 4)}


def running_mean(points):
    """[(x, y), ..] -> the mean of each point and its neighbours, 1 % of all points on each
    side: it does not lag behind a quick fall."""
    x, y = zip(*points, strict=True)
    n = len(points)
    sums = np.cumsum([0.0, *y])
    first = np.maximum(np.arange(n) - n // 100, 0)
    last = np.minimum(np.arange(n) + n // 100 + 1, n)
    means = (sums[last] - sums[first]) / (last - first)
    return list(zip(x, means.tolist(), strict=True))


def draw_curves(out):
    """loss.png of the run directory `out`: loss against steps, every step pale, and the
    running means of all sources and of each, those in most steps first."""
    losses = []
    by_source = {}
    for line in read_steps(read_log(out / "log.jsonl")):
        losses.append((line["step"], line["loss"]))
        for source, value in (line.get("nll_by_source") or {}).items():
            by_source.setdefault(source, []).append((line["step"], value))
    sources = sorted(by_source, key=lambda source: (-len(by_source[source]), source))
    means = {}
    for name, points in {"loss": losses, **{s: by_source[s] for s in sources}}.items():
        if points := finite(points, log=True):
            mean = running_mean(points)
            means[f"{name} {mean[-1][1]:.3f}"] = mean
    line_chart(means, out / "loss.png", "step", "loss: pale every step, dark the running mean",
               log=True, pale=losses)


def draw_progress(out):
    """scores.png of the run directory `out`: scores against minutes of training and stage 0.
    No file where no score was taken twice."""
    minutes = sum(line["seconds"] for line in read_log(out / "stage0.jsonl")) / 60
    series = {name: [] for name in PROGRESS_SCORES}
    for line in read_log(out / "log.jsonl"):
        if "loss" in line:
            minutes += line.get("seconds", 0) / 60
        for name in PROGRESS_SCORES:
            if name in line.get("eval", {}):
                series[name].append((minutes, line["eval"][name]))
    series = {name: points for name, points in series.items() if len(points) > 1}
    line_chart(series, out / "scores.png", "minutes", "score")


def print_end(run, loss, scores, seconds):
    """Prints what a run has learned and how to ask it; then one line of JSON. loss: of the
    last step, None if the log has none."""
    out = shlex.quote(str(run.out))
    is_toy = run.eval_records is None
    pictures_in = ""
    if learned := main_scores(scores):
        pictures_in = f", predicted points in {out}/samples"
        asked = "held-out examples" if is_toy else "the records of --eval"
        print(f"After {run.config.steps} steps the model reaches on {asked}: {learned}.")
    else:
        last = "is not in the log" if loss is None else f"is {loss:.3f}"
        print(f"After {run.config.steps} steps the loss {last}; no answer was scored.")
    if "unseen" in scores:
        print(f"On combinations that training never shows: {main_scores(scores['unseen'])}.")
    print(f"Curves are drawn in {out}/loss.png{pictures_in}; the weights are in {out}/model.\n"
          "Ask it something:")
    image = "IMAGE"
    prompt = "long_caption:"
    if is_toy:
        kinds_name = run.config.toy_kinds
        print(f"    python -m toy.world runs/toy-{kinds_name} --kinds {kinds_name} --n 20")
        image = f"runs/toy-{kinds_name}/{World('test', kinds_name=kinds_name).name}-3.png"
        prompt = "pointing: any shape"
    print(f'    python -m tools.generate --model {out} --image {image} --prompt "{prompt}"')
    print(json.dumps({"out": str(run.out), "steps": run.config.steps, "loss": loss,
                      "seconds": round(seconds, 1), "eval": scores}))


def main_scores(scores):
    """'caption_exact 0.850, point_f1 0.913', without the parts of these scores."""
    parts = ("precision", "recall", "close", "det_a", "ass_a")
    return ", ".join(f"{name} {scores[name]:.3f}" for name in SCORES
                     if name in scores and not name.endswith(parts))
