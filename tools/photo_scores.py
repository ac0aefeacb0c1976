"""How well a model knows composed photographs, part by part, beside chance.

    python -m tools.photo_scores runs/composed

in    data/PART.jsonl and data/masks.npz of tools.prepare stamps, PART/predictions.jsonl of
      tools.evaluate
out   a table: a column for every part, and in brackets chance; of every part PART/scenes.png, some
      scenes with the answers

Chance is the score of the same answers when they are taken for answers about the next scene of the
part. The next scene of a question is the next one with the same form of question, since "left" is
never an answer to "Is there any ..?". Counts and questions: or the score of always giving the most
frequent right answer, if that is higher.

A caption's recall is the share of the kinds in a scene that it names, its precision the share of
the kinds it names that are in the scene. The last line is the share of absent kinds at which the
model does not point; in brackets, of present kinds.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from evaluation.marks import draw_marks, numbered, side_by_side, stacked, with_text
from evaluation.metrics import count_from_text, hit_in_mask, score_points
from evaluation.text_metrics import exact_match
from records.errors import warn
from toy.photos import PARTS


def read_lines(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_answers(folder, part):
    """{style or type: [(prediction, annotation), ..]}, in the order of the records."""
    records = {record["id"]: record for record in read_lines(folder / "data" / f"{part}.jsonl")}
    order = {name: k for k, name in enumerate(records)}
    answers = {}
    predictions = read_lines(folder / part / "predictions.jsonl")
    for p in sorted(predictions, key=lambda p: (order[p["id"]], p["annotation"])):
        annotation = records[p["id"]]["annotations"][p["annotation"]]
        answers.setdefault(annotation.get("style", p["type"]), []).append((p, annotation))
    return answers


def kinds_of(text):
    return {noun.strip() for noun in text.split(",")}


def recall(text, annotation):
    true = kinds_of(annotation["text"])
    return len(true & kinds_of(text)) / len(true)


def precision(text, annotation):
    named = kinds_of(text)
    return len(named & kinds_of(annotation["text"])) / len(named)


def same_count(text, annotation):
    return count_from_text(text) == annotation["count"]


def same_answer(text, annotation):
    return exact_match(text, [annotation["answer"]])


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def with_next_truth(answers):
    """[(prediction, the annotation of the next scene), ..]; of questions, the next of a form."""
    forms = {}
    for p, annotation in answers:
        form = tuple(annotation.get("question", "").split()[:2])     # Is the, Which is, Is there
        forms.setdefault(form, []).append((p, annotation))
    pairs = []
    for of_form in forms.values():
        if len(of_form) > 1:
            truths = [annotation for _, annotation in of_form]
            others = truths[1:] + truths[:1]
            pairs += [(p, other) for (p, _), other in zip(of_form, others, strict=True)]
    return pairs


def always_the_same(answers):
    """The score of giving each form of question its most frequent right answer."""
    forms = {}
    for _, annotation in answers:
        form = tuple(annotation.get("question", "").split()[:2])
        truth = annotation.get("answer", annotation.get("count"))
        forms.setdefault(form, Counter())[truth] += 1
    right = sum(max(truths.values()) for truths in forms.values())
    return right / len(answers) if answers else float("nan")


def point_scores(answers, masks):
    """The F1 of points at kinds that are there, and its chance."""
    first_of = {p["id"]: p for p in reversed(answers)}
    scenes = list(dict.fromkeys(p["id"] for p in answers))
    next_of = dict(zip(scenes, scenes[1:] + scenes[:1], strict=True))

    def f1(answer, truth):
        predicted = [point[-2:] for point in answer["predicted"]]
        true = [point[-2:] for point in truth["true"]]
        hit = hit_in_mask(masks[f"{truth['id']}/{truth['annotation']}"])
        return score_points(predicted, true, hit).f1

    return (mean(f1(p, p) for p in answers),
            mean(f1(p, first_of[next_of[p["id"]]]) for p in answers))


def scores_of(answers, masks):
    """{name: (score, chance or None)}"""
    rules = {"count": [("counts", same_count)], "qa": [("questions", same_answer)]}
    for style in answers:
        if style.startswith("caption_"):
            language = style.removeprefix("caption_")
            rules[style] = [(f"captions {language}, recall", recall),
                            (f"captions {language}, precision", precision)]
    scores = {}
    for style in sorted(rules):
        of_style = answers.get(style, [])
        for name, rule in rules[style]:
            score, chance = (mean(rule(p["text"], annotation) for p, annotation in pairs)
                             for pairs in (of_style, with_next_truth(of_style)))
            if style in ("count", "qa"):
                chance = max(chance, always_the_same(of_style))
            scores[name] = score, chance
    present = [p for p, a in answers.get("point", ()) if a["points"]]
    absent = [p for p, a in answers.get("point", ()) if not a["points"]]
    scores["points, F1"] = point_scores(present, masks)
    scores["no points at absent kinds"] = (mean(not p["predicted"] for p in absent),
                                           mean(not p["predicted"] for p in present))
    return scores


def parts_of(folder):
    return [part for part in PARTS if (folder / part / "predictions.jsonl").is_file()]


def table(folder):
    """Markdown. OSError or ValueError if a file is missing."""
    parts = parts_of(folder)
    if not parts:
        raise ValueError(f"{folder}: no predictions of any part")
    masks = np.load(folder / "data" / "masks.npz")
    columns = {part: scores_of(read_answers(folder, part), masks) for part in parts}
    lines = [f"| | {' | '.join(parts)} |", "|---" * (len(parts) + 1) + "|"]
    names = {name: None for scores in columns.values() for name in scores}
    for name in names:
        cells = []
        for scores in columns.values():
            score, chance = scores.get(name, (float("nan"), None))
            cells.append(f"{score:.2f}" + (f" ({chance:.2f})" if chance is not None else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def lines_of(answers):
    """What was answered, and in brackets what would be right where it differs. Captions in English:
    the font has no letters of other languages."""
    lines = []
    for p, a in answers:
        if a.get("style") == "caption_en" or p["type"] in ("count", "qa"):
            asked = {"count": f"how many: {a.get('label')}?", "qa": a.get("question")}
            true = a.get("text") or a.get("answer") or str(a["count"])
            wrong = f"   ({true})" if p["text"].strip() != true else ""
            lines.append(f"{asked.get(p['type'], 'caption:')} {p['text']}{wrong}")
    return lines


def draw_scenes(folder, part, n=8):
    """The first n scenes with objects: the answers, and points at one kind, as rings, beside the
    true ones, as crosses -> PIL image."""
    records = {record["id"]: record for record in read_lines(folder / "data" / f"{part}.jsonl")}
    by_scene = {name: [] for name in records}
    for of_style in read_answers(folder, part).values():
        for p, annotation in of_style:
            by_scene[p["id"]].append((p, annotation))
    drawn = []
    for name, answers in by_scene.items():
        points = [p for p, annotation in answers if annotation.get("points")]
        if points and len(drawn) < n:
            predicted, true = ([place[-2:] for place in points[0][key]]
                               for key in ("predicted", "true"))
            path = folder / "data" / "media" / records[name]["image"]["path"]
            picture = draw_marks(np.asarray(Image.open(path)), numbered(predicted), true)
            drawn.append(with_text(picture, [points[0]["prompt"], *lines_of(answers)]))
    page = side_by_side(drawn[:4])
    return stacked(page, side_by_side(drawn[4:])) if len(drawn) > 4 else page


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.photo_scores", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RUN", help="OUT of stages/photos.sh")
    args = parser.parse_args(argv)
    try:
        folder = Path(args.folder)
        print(table(folder))
        for part in parts_of(folder):
            draw_scenes(folder, part).save(folder / part / "scenes.png")
    except (OSError, ValueError, KeyError) as e:
        warn(f"tools.photo_scores: {e!r}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
