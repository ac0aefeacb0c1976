"""Evaluates a training run, and writes its samples and curves (paper: evaluation).

    loss.png, scores.png    curves of the numbers in log.jsonl
    samples/                held-out images and videos with predicted and true points
    samples/step-N.png      answers about four toy images after step N of the training
    samples/step-N.json     answers about N_CANDIDATES toy images, of which the four are chosen
    progress.gif            an animation of these pictures
"""

import json
import shlex
import textwrap
from contextlib import contextmanager, suppress
from itertools import chain

import numpy as np
import torch

from evaluation import pictures
from evaluation.charts import finite, line_chart
from evaluation.evaluate import SCORES, TYPES, evaluate, mean_scores, questions_of
from evaluation.generate import evaluation_config
from records.errors import Unreadable, plural, print_visible, warn
from records.visual import read_headers
from text.styles import medium
from toy import world
from training.checkpoint import STEP, repeat_command
from training.log import best_step, held_out_loss, read_log, read_scores, read_steps
from weights import files, lora

# Target scores of the toy after the full recipe of a stage.
VIDEO_TARGETS = {"video_point_f1": 0.80, "track_f1": 0.80, "qa_accuracy": 0.90}
IMAGE_TARGETS = {"point_f1": 0.90, "count_accuracy": 0.93, "caption_exact": 0.75}
# A picture is drawn after these fractions of the steps. The first appears within a minute.
PICTURE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1)
N_SHOWN = 4  # images in a picture
N_CANDIDATES = 16
VERDICTS = {1: ("right", pictures.RIGHT), 0: ("wrong", pictures.WRONG)}
MAX_SOURCES = 8  # sources with a separate line in loss.png


def look(run, model, step):
    """Draws a picture if one is due after this step, and prints its scores -> {"picture": path},
    else {}. The progress bar shows the path. train.py calls only this function and the next three
    of this file."""
    due = {max(1, round(share * run.config.steps)) for share in PICTURE_SHARES}
    if run.eval_records is not None or step not in due:  # pictures show the toy world only
        return {}
    return {"picture": draw_step(run, model, step)}


def evaluate_step(run, model, log, step):
    """Writes the scores of a step to the log, prints them as one line, and draws the curves."""
    found = scores(run, model)
    log.write({"step": step, "eval": found})
    if run.ranks.first and found:
        losses = [f"{held_out_loss(of_set):.3f} ({name})" for name, of_set
                  in scores_by_set(found, first_set(run)).items() if held_out_loss(of_set)]
        line = [f"held-out loss {', '.join(losses)}", in_words(main_scores(found, targets_of(run)))]
        warn(f"step {step}: {'; '.join(line)}")
        draw_curves(run.out)


def scores(run, model, samples_dir=None):
    """Runs final_scores on all ranks. The first rank draws the pictures."""
    with whole_model(run, model) as whole:
        return final_scores(run, whole, samples_dir if run.ranks.first else None)


@contextmanager
def whole_model(run, model):
    """Gives each rank a whole copy of the model, to generate answers."""
    model.eval()
    whole = gather_on_each(model, run.ranks, run.device, run.dtype)
    # a model with adapters needs autocast as in training; a merged copy is in run.dtype already
    is_mixed = run.dtype != torch.float32 and lora.has_adapters(whole)
    with torch.autocast(run.device.type, run.dtype, enabled=is_mixed):
        yield whole
    model.train()


def gather_on_each(model, ranks, device, dtype):
    """-> the model that this rank evaluates. This is a copy on its device in `dtype`. A single
    process in float32 or with adapters evaluates the model itself."""
    if not ranks.mesh and (dtype == torch.float32 or lora.has_adapters(model)):
        return model
    return files.whole_copy(model, device, dtype)


def end(run, log, scores, seconds, as_json=False):
    """Logs the final scores, draws the curves and the animation, and prints a summary. result.json
    contains the same as one JSON object; with as_json, it is also printed as the last line."""
    log.write({"step": run.config.steps, "eval": scores, "seconds": seconds})
    draw_curves(run.out)
    draw_progress(run.out)
    animate_progress(run)
    lines = read_log(run.out / "log.jsonl")
    losses = [line["loss"] for line in read_steps(lines) if line["step"] <= run.config.steps]
    loss = losses[-1] if losses else None
    print_end(run, loss, scores, best_step(lines))
    result = json.dumps({"out": str(run.out), "steps": run.config.steps, "loss": loss,
                         "seconds": round(seconds, 1), "eval": scores})
    (run.out / "result.json").write_text(result + "\n", encoding="utf-8")
    if as_json:
        print(result)


def candidates(config):
    """The same held-out toy images at every step, with two questions each: the points of all
    objects, and the caption."""
    shown = []
    for record in world.held_out_images("test", config.seed, N_CANDIDATES, (2, 3, 4)):
        asked = [a for a in record["annotations"]
                 if a["type"] == "caption"
                 or (a["type"], a["label"]) == ("point", "any shape")]
        shown.append(record | {"annotations": asked})
    return shown


def draw_step(run, model, step):
    """Writes samples/step-N.png with the first candidates, and the answers about all candidates,
    from which animate_progress draws it again -> its path."""
    path = run.out / "samples" / f"step-{step}.png"
    records = candidates(run.config)
    with whole_model(run, model) as whole:
        _, answers = evaluate(whole, run.tokenizer, run.config.data, records, max_new=64,
                              ranks=run.ranks, with_nll=False, name=f"the picture of step {step}")
        if run.ranks.first:
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".json").write_text(json.dumps(answers), encoding="utf-8")
            draw_page(run, step, records[:N_SHOWN], answers).save(path)
            warn(f"picture of step {step}: {scores_of_pictures(answers)}")
    return path


def scores_of_pictures(answers):
    scores = main_scores(mean_scores(answers), ("point_f1", "caption_exact"))
    return f"{in_words(scores)} on {N_CANDIDATES} held-out images"


def draw_page(run, step, records, answers):
    """Draws the two answers about each record, and marks its caption as right or wrong -> image."""
    images = []
    labels = []
    colours = []
    for record in records:
        # in the order of the annotations
        points, caption = (answer for answer in answers if answer["id"] == record["id"])
        shown = record["source"].images(record)
        images.append(pictures.draw_images(shown, points["predicted"], points["true"]))
        word, colour = VERDICTS[caption["caption_exact"]]
        colours.append(colour)
        lines = textwrap.wrap(f"{word}: {caption['text']}", 28)[:3]
        lines += [""] * (3 - len(lines))  # all pictures of progress.gif have the same size
        labels.append("\n".join(lines))
    # two columns, so that the text can be read on a phone
    grid = pictures.image_grid(images, labels, height=200, columns=2, colours=colours)
    title = [f"After {step:,} of {run.config.steps:,} steps: {scores_of_pictures(answers)}.",
             "Rings: predicted points of all shapes. Crosses: true points.",
             "Text: predicted caption, which is right if every word is right."]
    return pictures.with_text(grid, title)


def choose_typical(records, answers):
    """-> N_SHOWN of the records. The share of right captions among them is the share among all
    records, rounded. The first right ones and the first wrong ones are chosen."""
    exact = {a["id"]: a["caption_exact"] for a in answers if a["type"] == "caption"}
    right = [name for name in exact if exact[name]]
    wrong = [name for name in exact if not exact[name]]
    n_right = round(N_SHOWN * len(right) / len(exact))
    chosen = right[:n_right] + wrong[:N_SHOWN - n_right]
    return [record for record in records if record["id"] in chosen]


def animate_progress(run):
    """Draws the pictures of draw_step again with images on which the last step has its typical
    score, and writes progress.gif with all of them. Without answers, no file is written."""
    folder = run.out / "samples"
    answers = {int(path.stem[5:]): json.loads(path.read_text(encoding="utf-8"))
               for path in folder.glob("step-*.json")
               if STEP.fullmatch(path.stem) and int(path.stem[5:]) <= run.config.steps}
    if not answers:
        return
    records = choose_typical(candidates(run.config), answers[max(answers)])
    pages = []
    for step in sorted(answers):
        pages.append(draw_page(run, step, records, answers[step]))
        pages[-1].save(folder / f"step-{step}.png")
    pictures.save_gif(pages, run.out / "progress.gif", [0.8] * (len(pages) - 1) + [3])


def final_scores(run, model, samples_dir=None):
    """Evaluates on the files of --eval, or on the held-out parts of the toy world -> metrics. The
    result contains the metrics of the first set. Each other set has its metrics under its name.
    Pictures of answers are written to samples_dir."""
    config = run.config
    is_toy = run.eval_records is None
    if is_toy and not config.eval_images:
        return {}
    if is_toy:
        sets = world.held_out(config.stage, config.seed, config.eval_images)
        options = {"masks_of": toy_masks, "max_new": 128 if config.stage == 1 else 384}
        asked = config.data
    else:
        sets = run.eval_records
        options = {}
        asked = evaluation_config(config.data)
    metrics = {}
    for k, (name, records) in enumerate(sets.items()):
        label = f"toy set {name}" if is_toy else name
        found, predictions = evaluate(
            model, run.tokenizer, asked, records, ranks=run.ranks, name=label, **options)
        if samples_dir:
            folder = (samples_dir / name if is_toy
                      else pictures.folder_of_set(samples_dir, k, name))
            pictures.draw(predictions, records, folder, n=100 if is_toy else 24)
        metrics |= {name: found} if metrics else found
    return metrics


def toy_masks(record, index):
    return record["source"].masks(record, record["annotations"][index])


def running_mean(points):
    """[(x, y), ..] -> the same points, with y averaged over 1 % of all points on each side. A mean
    over both sides does not lag behind a quick fall."""
    x, y = zip(*points, strict=True)
    n = len(points)
    sums = np.cumsum([0.0, *y])
    first = np.maximum(np.arange(n) - n // 100, 0)
    last = np.minimum(np.arange(n) + n // 100 + 1, n)
    means = (sums[last] - sums[first]) / (last - first)
    return list(zip(x, means.tolist(), strict=True))


def scores_by_set(scores, first=""):
    """The result of final_scores -> {name of a set: its scores}. first: name of the first set."""
    others = {name: s for name, s in scores.items() if isinstance(s, dict) and "nll" in s}
    return {first: scores} | others


def first_set(run):
    """-> the name of the first set of final_scores."""
    return next(iter(run.eval_records), "") if run.eval_records is not None else "test"


def draw_curves(out):
    """Draws loss.png in the run directory `out`, with the loss at every step and its running mean.
    The sources that occur in most steps have separate running means, and the others a common one.
    Held-out sets are shown if they have two or more values of nll."""
    lines = read_log(out / "log.jsonl")
    losses = []
    by_source = {}
    for line in read_steps(lines):
        losses.append((line["step"], line["loss"]))
        for source, value in (line.get("nll_by_source") or {}).items():
            by_source.setdefault(source, []).append((line["step"], value))
    sources = sorted(by_source, key=lambda source: (-len(by_source[source]), source))
    shown = {"loss": losses, **{source: by_source[source] for source in sources[:MAX_SOURCES]}}
    if others := sources[MAX_SOURCES:]:
        values = {}  # of each step
        for step, value in finite(chain(*(by_source[source] for source in others)), log=True):
            values.setdefault(step, []).append(value)
        shown[f"others ({len(others)})"] = [(k, np.mean(values[k])) for k in sorted(values)]
    means = {}
    for name, points in shown.items():
        if points := finite(points, log=True):
            mean = running_mean(points)
            means[f"{name} {mean[-1][1]:.3f}"] = mean
    held_out = {}  # {name: {step: nll}}; the last line of a step counts
    for step, found in read_scores(lines):
        for name, scores in scores_by_set(found).items():
            held_out.setdefault(name, {})[step] = held_out_loss(scores)
    for name, by_step in held_out.items():
        points = finite(sorted(by_step.items()), log=True)
        if len(points) > 1:
            means[f"held out {name}".rstrip() + f" {points[-1][1]:.3f}"] = points
    line_chart(means, out / "loss.png", "step", "loss (pale: every step, dark: running mean)",
               log=True, pale=losses)


def draw_progress(out):
    """Draws scores.png in the run directory `out`, with the steps of loss.png. A score needs two or
    more values. If no score has them, no file is written."""
    series = {name: [] for name in IMAGE_TARGETS | VIDEO_TARGETS}
    for step, found in read_scores(read_log(out / "log.jsonl")):
        for name in found.keys() & series:
            series[name].append((step, found[name]))
    series = {name: sorted(points) for name, points in series.items() if len(points) > 1}
    line_chart(series, out / "scores.png", "step", "score")


def print_end(run, loss, scores, best):
    """Prints the scores of a run, the paths of its pictures, and the command to try next. loss: the
    loss of the last step, or None if the log contains no step. best: as from log.best_step."""
    out = shlex.quote(str(run.out))
    steps = plural(run.config.steps, "step")
    targets = targets_of(run)
    columns = {name: main_scores(of_set, targets)
               for name, of_set in scores_by_set(scores, first_set(run)).items()}
    if targets:
        columns = {"score": columns[first_set(run)], "target": targets}
    if scores:
        print_scores(f"after {steps}", columns)
    else:
        last = "is not in the log" if loss is None else f"is {loss:.3f}"
        how = " To score answers, add --eval FILE." if run.eval_records is not None else ""
        print_visible(f"After {steps} the loss {last}. No answer was scored.{how}")
    if best and best != run.config.steps and (run.out / f"step-{best}").exists():
        of_first = f" of {first_set(run)}" if len(columns) > 1 else ""
        print_visible(f"The held-out loss{of_first} was lowest at step {best} ({out}/step-{best}). "
                      "To end the run with this model instead: "
                      f"{repeat_command('--finish-at', str(best))}")
    drawn = [name for name in ("progress.gif", "samples", "loss.png") if (run.out / name).exists()]
    print_visible(f"Pictures: {', '.join(f'{out}/{name}' for name in drawn)}")
    if run.eval_records is None:
        print_visible(f"Next: python -m tools.play --model {out}")
    else:
        print_visible(f"Next: python -m tools.generate --model {out} {first_question(run)}")


def print_scores(title, columns):
    """Prints {column: {name of a score: number}} as a table."""
    names = dict.fromkeys(chain(*columns.values()))
    wide = max(map(len, [title, *names]))
    print_visible("  ".join([title.ljust(wide), *(column.rjust(8) for column in columns)]))
    for name in names:
        cells = [f"{of[name]:.3f}" if name in of else "-" for of in columns.values()]
        aligned = [cell.rjust(max(8, len(column)))
                   for column, cell in zip(columns, cells, strict=True)]
        print_visible("  ".join([name.ljust(wide), *aligned]))


def first_question(run):
    """-> flags for tools.generate, such as '--image cat.png --prompt "pointing: cats"'. The prompt
    is the first question in the first 20 records of each file of --data. If there is none, the user
    must fill in the flags: '--video VIDEO --prompt PROMPT'."""
    config = evaluation_config(run.config.data)
    words = []
    for source in run.loader.mixture.sources:
        for i in range(min(len(source), 20)):
            with suppress(Unreadable):
                record = source[i]
                kind = medium(record)
                words = [] if kind == "text" else [f"--{kind}", kind.upper()]
                if "frames" in record.get("video", ()):
                    continue  # --video needs a video file
                asked = [a for a in record["annotations"] if a["type"] in TYPES]
                info = read_headers(record, config)
                questions = questions_of(record | {"annotations": asked}, info, config)
                if questions:
                    paths = map(str, source.paths_of(record))
                    prompt = questions[0].turns[-1][0]
                    return shlex.join([*words[:1], *paths, "--prompt", prompt])
    return shlex.join([*words, "--prompt", "PROMPT"])


def targets_of(run):
    """-> {score: target} of the toy; {} for other records."""
    if run.eval_records is not None:
        return {}
    return IMAGE_TARGETS if run.config.stage == 1 else VIDEO_TARGETS


def main_scores(scores, names=()):
    """-> {name: score} of these names. Without names: all scores except components such as
    precision and recall."""
    parts = ("precision", "recall", "close", "det_a", "ass_a")
    names = names or [name for name in SCORES if not name.endswith(parts)]
    return {name: scores[name] for name in names if name in scores}


def in_words(scores):
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
