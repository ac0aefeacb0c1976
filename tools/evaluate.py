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
import zipfile
from pathlib import Path

import numpy as np
import torch

import data
from prompts import medium
from tools.generate import asking, draw_points, generate, open_model


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


def evaluate(model, tokenizer, config, records, masks_of=None, batch=128, max_new=512):
    """records: from a source; masks_of(record, k) -> (n,h,w) bool or None for point annotation k -> metrics, predictions.

    Asks every caption, point and count annotation of a single image or of none; other questions, several images and videos have
    no score here and are left out, the latter two counted as not_scored. A record whose image cannot be read is named on stderr.
    """
    questions, skipped, not_scored = [], 0, 0
    for record in records:
        if medium(record) in ("images", "video"):
            not_scored += 1
            continue
        try:
            if medium(record) == "image":
                record["source"].image_sizes(record)         # and whether its points lie on it
                record["source"].images(record)
        except data.Unreadable as e:
            print(f"{record['where']}: {e}; skipped", file=sys.stderr)
            skipped += 1
            continue
        questions += [(record, k, data.question_of(a, record, config)) for k, a in enumerate(record["annotations"])
                      if a["type"] in ("caption", "point", "count")]
    # answers of a kind and of a length end at about the same time
    batch = max(1, min(batch, 256 // (1 + config.max_crops)))            # crops of a batch, all of which are encoded at once
    questions.sort(key=lambda q: (q[0]["annotations"][q[1]]["type"], len(q[0]["annotations"][q[1]].get("points", ()))))
    predictions, kinds_of_hit = [], set()
    for start in range(0, len(questions), batch):
        group = questions[start : start + batch]
        by_place = {record["where"]: record for record, _, _ in group}   # ids may repeat
        decoded = {where: record["source"].images(record) if medium(record) == "image" else [] for where, record in by_place.items()}
        images = [decoded[record["where"]] for record, _, _ in group]
        prompts = [data.ask(shown, [(question, None)], tokenizer, config) for shown, (_, _, question) in zip(images, group, strict=True)]
        answers = generate(model, prompts, tokenizer.stops, max_new)
        for (record, k, question), shown, ids in zip(group, images, answers, strict=True):
            a, text = record["annotations"][k], tokenizer.decode(ids)
            masks = masks_of(record, k) if masks_of and a["type"] == "point" else None
            row = {"id": record["id"], "annotation": k, "prompt": question, "text": text}
            predictions.append(row | score(a, text, shown[0].shape[:2] if shown else (1, 1), masks))
            if a["type"] == "point":
                kinds_of_hit.add("within 5 % of the diagonal" if masks is None else "mask")
    names = sorted({name for p in predictions for name in p if name.startswith(("point_", "count_", "caption_"))})
    metrics = {name: round(float(np.mean([p[name] for p in predictions if name in p])), 4) for name in names}
    metrics |= {f"n_{kind}": sum(p["type"] == kind for p in predictions) for kind in ("caption", "point", "count")}
    return {**metrics, "hits": " and ".join(sorted(kinds_of_hit)) or "none", "skipped": skipped, "not_scored": not_scored}, predictions


def score(a, text, shape, masks):
    """One answer against its annotation -> its scores; shape (h, w) of the image, masks (n,h,w) of its points or None."""
    (h, w), kind = shape, a["type"]
    if kind == "caption":
        return {"type": kind, "caption_exact": float(text.strip() == a["text"].strip())}
    if kind == "count":
        n = count_in(text)
        return {"type": kind, "count_accuracy": float(n == a["count"]), "count_close": float(n is not None and abs(n - a["count"]) <= 1)}
    truth = [(x * w, y * h) for x, y in data.unit_points(a, (w, h))]
    predicted = [(x, y) for _, _, x, y in data.parse_points(text, w, h)]
    precision, recall, f1 = score_points(predicted, truth, near(truth, w, h) if masks is None else in_mask(masks))
    return {"type": kind, "point_precision": precision, "point_recall": recall, "point_f1": f1, "predicted": predicted, "true": truth}


def draw(predictions, records, folder, n=24):
    """Pictures with predicted points (rings) beside true ones (crosses), for the first n pointing questions by id."""
    folder, by_id = Path(folder), {r["id"]: r for r in records}
    folder.mkdir(parents=True, exist_ok=True)
    pointing = sorted((p for p in predictions if p["type"] == "point"), key=lambda p: (p["id"], p["annotation"]))
    for p in pointing[:n]:
        record = by_id[p["id"]]
        image = record["source"].images(record)[0]
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{p['id']}-{p['annotation']}-{p['prompt'].split(': ')[-1]}")
        draw_points(image, p["predicted"], truth=p["true"]).save(folder / f"{name}.png")


def main():
    parser = argparse.ArgumentParser(description="Score a model on records.")
    parser.add_argument("--model", required=True, help="run directory, or a folder with a released checkpoint")
    parser.add_argument("--data", required=True, help="records (.jsonl)")
    parser.add_argument("--media", help="folder of their images")
    parser.add_argument("--masks", help='.npz with an array (n,h,w) per pointing annotation, named "record id/annotation number"')
    parser.add_argument("--draw", metavar="DIR", help="write pictures with predicted and true points")
    parser.add_argument("--out", default=".", help="folder for predictions.jsonl (default: here)")
    parser.add_argument("--max-new", type=int, default=512, help="tokens of an answer at most (default 512)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default float32)")
    args = parser.parse_args()
    try:
        if args.max_new < 1:
            raise ValueError("--max-new must be at least 1")
        model, tokenizer, config = open_model(args.model, args.device, getattr(torch, args.dtype))
        config = asking(config)
        records = list(data.Records(args.data, args.media))
        masks = open_masks(args.masks, records) if args.masks else {}
        for folder in filter(None, (args.out, args.draw)):
            Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        print(f"tools.evaluate: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    masks_of = lambda record, k: masks.get(f"{record['id']}/{k}")         # noqa: E731
    metrics, predictions = evaluate(model, tokenizer, config, records, masks_of, max_new=args.max_new)
    if args.draw:
        draw(predictions, records, args.draw)
    with open(Path(args.out) / "predictions.jsonl", "w") as out:
        out.writelines(json.dumps(p) + "\n" for p in predictions)
    print(json.dumps(metrics))


def open_masks(path, records):
    """An .npz with an array (points, h, w) for every pointing annotation of the records; ValueError if one is not there."""
    try:
        masks = dict(np.load(path))
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as e:
        raise ValueError(f"--masks {path}: no .npz file: {e}") from None
    for record in records:
        for k, a in enumerate(record["annotations"]):
            if a["type"] == "point":
                name = f"{record['id']}/{k}"
                if name not in masks or masks[name].ndim != 3 or len(masks[name]) != len(a["points"]):
                    found = masks[name].shape if name in masks else "none"
                    raise ValueError(f"--masks {path}: '{name}' needs an array ({len(a['points'])}, h, w); found {found}")
    return masks


if __name__ == "__main__":
    main()
