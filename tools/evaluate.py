"""Score a model on records: point F1, counting, exact captions (spec 13, without the defects listed there).

    python -m tools.evaluate --model runs/stage1-tiny --data toy/records.jsonl --masks toy/masks.npz

point F1    per annotation: predicted and true points are matched one to one by distance (Hungarian); a hit is a matched
            prediction inside the matched object's mask, or, where there are no masks, within 5 % of the image's
            diagonal. Nothing to find: 1 if nothing was predicted, else 0. Mean over annotations.
counting    the number the text states; a text without one counts as the number of its points. (The official code
            counts points only, so that a bare "5" is 0, and its video code cannot read "There are none.")
caption     the text equals the caption.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch

import data
from tools.generate import draw_points, generate, open_model


def assign(cost):
    """(n,m) costs -> [(row, column), ..], min(n, m) pairs of the smallest total (Hungarian, shortest augmenting paths)."""
    cost = np.asarray(cost, dtype=np.float64)
    if cost.size == 0:
        return []
    if cost.shape[0] > cost.shape[1]:
        return sorted((r, c) for c, r in assign(cost.T))
    n, m = cost.shape
    u, v = np.zeros(n + 1), np.zeros(m + 1)              # potentials; row and column 0 are the artificial root
    match = np.zeros(m + 1, dtype=int)                   # row of each column
    for row in range(1, n + 1):
        match[0], column = row, 0
        shortest, came = np.full(m + 1, np.inf), np.zeros(m + 1, dtype=int)
        used = np.zeros(m + 1, dtype=bool)
        while match[column]:
            used[column] = True
            reduced = cost[match[column] - 1] - u[match[column]] - v[1:]
            better = ~used[1:] & (reduced < shortest[1:])
            shortest[1:][better], came[1:][better] = reduced[better], column
            nearest = int(np.where(used[1:], np.inf, shortest[1:]).argmin()) + 1
            step = shortest[nearest]
            u[match[used]] += step
            v[used] -= step
            shortest[~used] -= step
            column = nearest
        while column:                                    # turn the augmenting path around
            match[column], column = match[came[column]], came[column]
    return sorted((int(match[j]) - 1, j - 1) for j in range(1, m + 1) if match[j])


def score_points(predicted, truth, hit):
    """predicted and truth: [(x, y), ..] in pixels; hit(k, (x, y)): does the point hit true object k? -> precision, recall, F1."""
    if not truth or not predicted:
        return (float(not truth and not predicted),) * 3
    distance = np.linalg.norm(np.array(predicted)[:, None] - np.array(truth)[None], axis=-1)
    hits = sum(hit(k, predicted[i]) for i, k in assign(distance))
    precision, recall = hits / len(predicted), hits / len(truth)
    return precision, recall, 2 * precision * recall / (precision + recall + 1e-10)


def in_mask(masks):
    """masks (n,h,w) bool -> hit(k, point): the rounded point lies in mask k."""

    def hit(k, point):
        x, y = round(point[0]), round(point[1])
        return 0 <= y < masks.shape[1] and 0 <= x < masks.shape[2] and bool(masks[k, y, x])

    return hit


def near(truth, w, h):
    radius = 0.05 * (w * w + h * h) ** 0.5
    return lambda k, point: (point[0] - truth[k][0]) ** 2 + (point[1] - truth[k][1]) ** 2 <= radius**2


def count_in(text):
    """The number a text states, else how many points it has, else None."""
    if "there are none" in text.lower():
        return 0
    stated = (re.fullmatch(r"\s*(\d+)\s*\.?\s*", text) or re.search(r"total of (\d+)", text)
              or re.match(r"\s*There (?:are|is) (\d+)\b", text))
    if stated:
        return int(stated.group(1))
    return len(data.parse_points(text, 1, 1)) or None


def evaluate(model, tokenizer, config, records, masks_of=None, batch=128, max_new=256):
    """records: from a source; masks_of(record, k) -> (n,h,w) bool or None for annotation k -> metrics, predictions.

    Asks every caption, point and count annotation; questions of other kinds have no score here and are left out.
    """
    asked = []
    for record in records:
        image = record["source"].image(record) if "image" in record else None
        for k, a in enumerate(record["annotations"]):
            if a["type"] in ("caption", "point", "count"):
                question = data.question_of(a, record, config)
                asked.append((record, k, question, data.ask(image, [(question, None)], tokenizer, config), image.shape[:2]))
    # prompts of a kind together: they end at about the same time
    asked.sort(key=lambda item: (item[0]["annotations"][item[1]]["type"], len(item[3].tokens)))
    predictions, sums, kind_of_hit = [], {}, set()
    for start in range(0, len(asked), batch):
        group = asked[start : start + batch]
        answers = generate(model, [prompt for *_, prompt, _ in group], tokenizer.eos, max_new)
        for (record, k, question, _, (h, w)), ids in zip(group, answers, strict=True):
            a, text = record["annotations"][k], tokenizer.decode(ids)
            row = {"id": record["id"], "annotation": k, "type": a["type"], "prompt": question, "text": text}
            if a["type"] == "caption":
                scores = {"caption_exact": float(text.strip() == a["text"].strip())}
            elif a["type"] == "count":
                n = count_in(text)
                scores = {"count_accuracy": float(n == a["count"]), "count_close": float(n is not None and abs(n - a["count"]) <= 1)}
            else:
                truth = [(x * w, y * h) for x, y in data.unit_points(a, (w, h))]
                predicted = [(x, y) for _, _, x, y in data.parse_points(text, w, h)]
                masks = masks_of(record, k) if masks_of else None
                kind_of_hit.add("within 5 % of the diagonal" if masks is None else "mask")
                scores = dict(zip(("point_precision", "point_recall", "point_f1"),
                                  score_points(predicted, truth, near(truth, w, h) if masks is None else in_mask(masks)), strict=True))
                row |= {"predicted": predicted, "true": truth}
            for name, value in scores.items():
                sums.setdefault(name, []).append(value)
            predictions.append(row | scores)
    metrics = {name: round(float(np.mean(values)), 4) for name, values in sorted(sums.items())}
    asked_of = {f"n_{kind}": sum(p["type"] == kind for p in predictions) for kind in ("caption", "point", "count")}
    return {**metrics, **asked_of, "hits": " and ".join(sorted(kind_of_hit)) or "none"}, predictions


def draw(predictions, records, folder, n=24):
    """Pictures with predicted points (rings) beside true ones (crosses), for the first n pointing questions by id."""
    folder, by_id = Path(folder), {r["id"]: r for r in records}
    folder.mkdir(parents=True, exist_ok=True)
    pointing = sorted((p for p in predictions if p["type"] == "point"), key=lambda p: (p["id"], p["annotation"]))
    for p in pointing[:n]:
        record = by_id[p["id"]]
        image = record["source"].image(record)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{p['id']}-{p['annotation']}-{p['prompt'].split(': ')[-1]}")
        draw_points(image, p["predicted"], truth=p["true"]).save(folder / f"{name}.png")


def main():
    parser = argparse.ArgumentParser(description="Score a model on records.")
    parser.add_argument("--model", required=True, help="run directory")
    parser.add_argument("--data", required=True, help="records (.jsonl)")
    parser.add_argument("--media", help="folder of their images")
    parser.add_argument("--masks", help='.npz with an array (n,h,w) per pointing annotation, named "record id/annotation number"')
    parser.add_argument("--draw", metavar="DIR", help="write pictures with predicted and true points")
    parser.add_argument("--out", default=".", help="folder for predictions.jsonl (default: here)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    try:
        model, tokenizer, config = open_model(args.model, args.device)
        source = data.Records(args.data, args.media)
        masks = np.load(args.masks) if args.masks else {}
        readable, skipped = [], []
        for i in range(len(source)):
            try:
                if "image" in source[i]:
                    source.image(source[i])
                readable.append(source[i])
            except data.Unreadable as e:
                skipped.append(f"{source[i]['where']}: {e}")
    except (OSError, ValueError) as e:
        print(f"tools.evaluate: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    for line in skipped:
        print(f"{line}; skipped", file=sys.stderr)
    metrics, predictions = evaluate(model, tokenizer, config, readable, lambda record, k: masks.get(f"{record['id']}/{k}"))
    if args.draw:
        draw(predictions, readable, args.draw)
    with open(Path(args.out) / "predictions.jsonl", "w") as out:
        out.writelines(json.dumps(p) + "\n" for p in predictions)
    print(json.dumps({**metrics, "skipped": len(skipped)}))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
