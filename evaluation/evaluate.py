"""Score a model on records (paper: evaluation; spec 13): captions, points, counts, questions and tracks, on images and videos.

    python -m tools.evaluate --model runs/stage1-tiny --data toy/records.jsonl --masks toy/masks.npz
    python -m tools.evaluate --model runs/stage3 --data films.jsonl --frames 8 16 32 64 --draw pictures         # scores by frames

Every annotation but texts is asked for in the words of evaluation, greedily; metrics.py says what each score means. Means are over
questions, of a conversation over its turns, each of which is asked behind the true answers to those before it.

caption_exact caption_recall caption_precision
point_f1 point_precision point_recall       of one image; images_point_.. of several, video_point_.. of a video
count_accuracy count_close                  of all media; close is wider on a video
track_precision track_recall track_f1 hota det_a ass_a
qa_accuracy                                 of all questions: the right option, else letter for letter (one of the `answers`)
choice_accuracy                             of those with options alone
anls relaxed_accuracy vqa_score             of questions whose style says so (STYLE_SCORE), vqa_score of all others with `answers`
nll                                         what training minimises, weighted as there, of all records and by source

A prediction keeps what was asked and said; of points and tracks also `predicted` and `true`, [[frame, id, x, y], ..] in pixels of what
was shown, frame being 1, the number of the image, or seconds of the clip; of videos the `times` of the frames shown.

Masks (--masks, an .npz, an array per pointing or tracking annotation, named "record id/annotation number"; or masks_of):
    one image, or several     (n,h,w) bool, one per point, in their order, each in its own image (padded to the largest)
    video                     (n,t,h,w), one per point, or per object of a track by sorted ids; and "record id/annotation number/times",
                              (t,) seconds, as all times of a record on the clock of the file; of masks_of {"times": .., "masks": ..}
Without them a hit is within 5 % of the image's diagonal of the matched point, at the same tenth of a second.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import data
import packing
import vision
from evaluation import charts, metrics, pictures
from evaluation.generate import asking, generate, open_model
from text.points import parse_points, unit
from text.prompts import scales
from text.styles import medium, style_of
from text.tracks import seconds, track_frames, track_mode

TYPES = ("caption", "point", "count", "qa", "track")
SCORES = ("caption_exact", "caption_recall", "caption_precision",
          *(f"{where}point_{score}" for where in ("", "images_", "video_") for score in ("f1", "precision", "recall")),
          "count_accuracy", "count_close", "track_precision", "track_recall", "track_f1", "hota", "det_a", "ass_a",
          "qa_accuracy", "choice_accuracy", "vqa_score", "anls", "relaxed_accuracy")
STYLE_SCORE = dict.fromkeys(("doc_qa", "info_qa", "st_qa"), "anls")       # as their data sets are scored
STYLE_SCORE |= dict.fromkeys(("chart_qa", "chart_qa_weighted", "plot_qa"), "relaxed_accuracy")
CURVES = ("caption_exact", "caption_recall", "video_point_f1", "count_accuracy", "track_f1", "hota", "qa_accuracy", "choice_accuracy")
CROPS, TOKENS = 256, 1 << 16             # of a batch at most: crops encoded at once; rows x (prompt + answer), what the cache holds


@dataclass(frozen=True)
class Question:
    record: dict
    k: int                               # which of its annotations
    turn: int                            # and which turn of that
    turns: list                          # [(question, answer), .., (question, None)]
    sight: data.MediaInfo
    limit: int                           # tokens of the answer at most

    @property
    def a(self):
        return self.record["annotations"][self.k]


def limit_of(a, record):
    """Tokens of an answer at most (spec 13): short answers 12, options 32, questions of users 384, points and counts of one image 192,
    captions, and points and counts of videos or several images, 2048, tracks 4096."""
    if a["type"] == "qa":
        turns, style = a.get("turns", [a]), style_of(a, record, None)
        talk = style in ("user_qa", "correction_qa", "text_sft") or any("explanation" in turn for turn in turns)
        return 384 if talk else 32 if any("options" in turn for turn in turns) else 12
    if a["type"] == "track":
        return 4096
    return 192 if a["type"] != "caption" and medium(record) == "image" else 2048


def questions_of(record, sight, config, max_new):
    questions = []
    for k, a in enumerate(record["annotations"]):
        if a["type"] in TYPES:
            turns = data.turns_of(a, record, sight.sizes, config, None, sight.times)
            questions += [Question(record, k, n, [*turns[:n], (turns[n][0], None)], sight, max_new or limit_of(a, record))
                          for n in range(len(turns)) if n >= len(a.get("turns", ())) or a["turns"][n].get("weight", 1)]
    return questions


# ---------------------------------------------------------------------------------------------------------------
# asking


def prompted(questions, tokenizer, config, batch, bad):
    """Yields batches [(question, prompt), ..] within `batch` rows, CROPS and TOKENS. What several questions of a batch are about is
    decoded once, and their prompts share its crops, which are encoded once. bad: {where: reason} of what cannot be decoded, filled here."""
    group, crops, shown = [], {}, {}
    for q in questions:
        source, where, size = q.record["source"], q.record["where"], config.vision.crop
        if where in bad:
            continue
        if where not in shown:
            try:
                if q.sight.times is not None:    # kept as small as the ViT takes them: 384 of 11 MB would be 4 GB
                    frames = [vision.resize(frame, size, size) for frame in source.frames(q.record, q.sight.times)]
                    shown[where] = [], data.Clip(q.sight.times, frames, q.sight.subtitles)
                else:
                    shown[where] = (source.images(q.record) if q.sight.sizes else []), None
            except data.Unreadable as e:
                bad[where] = str(e)
                continue
        images, clip = shown[where]
        prompt = data.encode_prompt(images, q.turns, tokenizer, config, clip)
        longest = max(len(p.tokens) + other.limit for other, p in [*group, (q, prompt)])
        held = sum(len(c) for c in ({where: prompt.images} | crops).values() if c is not None)
        if group and (len(group) == batch or (len(group) + 1) * longest > TOKENS or held > CROPS):
            yield group
            group, crops, shown = [], {}, {where: shown[where]}
        prompt.images = crops.setdefault(where, prompt.images)
        group.append((q, prompt))
    if group:
        yield group


def evaluate(model, tokenizer, config, records, masks_of=None, batch=128, max_new=None):
    """records: from a source; masks_of(record, k) -> masks of annotation k (see above) or None -> metrics, predictions.

    max_new: tokens of every answer at most, instead of those of limit_of. A record whose media cannot be read is named on stderr
    and counted as skipped, a text, which has no score but its nll, as not_scored. ValueError if masks do not fit their annotation.
    """
    questions, good, bad, not_scored, records = [], [], {}, 0, list(records)
    for record in records:
        try:
            sight = data.read_headers(record, config)
        except data.Unreadable as e:
            bad[record["where"]] = str(e)
            continue
        asked = questions_of(record, sight, config, max_new)
        for q in asked if masks_of else ():                              # before an hour of answers, not after
            if q.a["type"] in ("point", "track"):
                check_masks(q, masks_of(record, q.k))
        questions, good = questions + asked, [*good, record]
        not_scored += sum(a["type"] not in TYPES for a in record["annotations"])
    # answers of a kind and of a length end at about the same time; but a film costs more than all that is said about it
    questions.sort(key=lambda q: (1, "", 0) if q.sight.times is not None else (0, q.a["type"], len(q.a.get("points", ()))))
    predictions, kinds_of_hit = [], set()
    for group in prompted(questions, tokenizer, config, batch, bad):
        answers = generate(model, [prompt for _, prompt in group], tokenizer.stops, max(q.limit for q, _ in group))
        for (q, _), ids in zip(group, answers, strict=True):
            text, located = tokenizer.decode(ids[: q.limit]), q.a["type"] in ("point", "track")
            masks = masks_of(q.record, q.k) if masks_of and located else None
            row = {"id": q.record["id"], "annotation": q.k, **({"turn": q.turn} if "turns" in q.a else {}), "type": q.a["type"],
                   "medium": medium(q.record), "prompt": q.turns[-1][0], "text": text, **score(q, text, masks)}
            predictions.append(row | ({"times": q.sight.times} if q.sight.times is not None else {}))
            if located:
                kinds_of_hit.add("within 5 % of the diagonal" if masks is None else "mask")
    result = {name: round(float(np.mean(values)), 4) for name in SCORES if (values := [p[name] for p in predictions if name in p])}
    result |= {f"n_{kind}": sum(p["type"] == kind for p in predictions) for kind in TYPES}
    lost = nll(model, tokenizer, config, [record for record in good if record["where"] not in bad], bad)
    result["nll"] = {name: round(value, 4) for name, value in lost.items()}
    for where, reason in bad.items():
        print(f"{where}: {reason}; skipped", file=sys.stderr)
    return {**result, "hits": " and ".join(sorted(kinds_of_hit)) or "none", "skipped": len(bad), "not_scored": not_scored}, predictions


@torch.no_grad()
def nll(model, tokenizer, config, records, bad=None):
    """-> {"all": nll, name of each source: nll}: the mean of -log p over tokens with loss, weighted as in training (spec 7.1), through the
    same encode, build and model. Examples as epoch 0 of seed 0 words them, whole: nothing is cut at max_tokens. A model in eval mode.

    bad: {where: reason}, to which records that cannot be decoded are added; without it they raise Unreadable.
    """
    config, sums = replace(config, max_tokens=None), {}
    sized = [(*data.size(record, tokenizer, config, 0, 0), i) for i, record in enumerate(records)]
    groups = []                                                           # of like lengths, so that little is padding
    for tokens, crops, i in sorted(size for size in sized if size[0]):
        if not groups or tokens * (len(groups[-1]) + 1) > TOKENS // 4 or crops + sum(sized[j][1] for j in groups[-1]) > CROPS:
            groups.append([])
        groups[-1].append(i)
    for group in groups:
        encoded = {}
        for i in group:
            try:
                encoded[i] = data.encode(records[i], tokenizer, config, 0, 0)
            except data.Unreadable as e:
                if bad is None:
                    raise
                bad[records[i]["where"]] = str(e)
        if not encoded:
            continue
        batch = packing.collate([[e] for e in encoded.values()], max(sized[i][0] for i in encoded), config.vision)
        batch = batch.to(model.norm.weight.device)
        lost, weight = (batch.weights * model(batch)[0]).double().sum(1).tolist(), batch.weights.double().sum(1).tolist()
        for i, *pair in zip(encoded, lost, weight, strict=True):
            for name in ("all", records[i]["source"].name):
                sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0)), pair, strict=True)]
    return {name: lost / weight for name, (lost, weight) in sums.items()}


# ---------------------------------------------------------------------------------------------------------------
# scoring


def score(q, text, masks):
    """An answer to a question -> its scores, of points and tracks also what is predicted and what is true."""
    a, kind = q.a, q.a["type"]
    if kind == "caption":
        recall, precision = metrics.score_statements(text, a["text"])
        return {"caption_exact": metrics.exact(text, [a["text"]]), "caption_recall": recall, "caption_precision": precision}
    if kind == "count":
        right, close = metrics.score_count(metrics.count_in(text), a["count"], medium(q.record) == "video")
        return {"count_accuracy": right, "count_close": close}
    if kind == "qa":
        return score_qa(a.get("turns", [a])[q.turn], style_of(a, q.record, None), text)
    return score_places(q, text, masks)


def score_qa(turn, style, text):
    """One turn. Behind an explanation, what counts stands after "Answer:" (spec 4.3); several right options are all named, a line each."""
    said = text.rpartition("Answer:")[2] if "explanation" in turn else text
    if "options" in turn:
        right = turn["answer_idx"] if isinstance(turn["answer_idx"], list) else [turn["answer_idx"]]
        lines = said.strip().splitlines() if len(right) > 1 else [said]
        chosen = {metrics.select_option(line, turn["options"], turn.get("letters", True)) for line in lines}
        return dict.fromkeys(("qa_accuracy", "choice_accuracy"), float(chosen == set(right)))
    answers = turn.get("answers") or [turn["answer"]]
    extra = STYLE_SCORE.get(style, "vqa_score" if "answers" in turn else None)
    measure = {"anls": metrics.anls, "relaxed_accuracy": metrics.relaxed, "vqa_score": metrics.vqa_score}
    return {"qa_accuracy": metrics.exact(said, answers), **({extra: measure[extra](said, answers)} if extra else {})}


def true_places(q):
    """Of a point or track annotation: [[frame, id, x, y], ..]; the ids of points are 1, 2, .. in the annotation's order."""
    a, record, sizes = q.a, q.record, q.sight.sizes
    scale = scales(record, sizes)
    if a["type"] == "track":
        (w, h), query = sizes[0], a["query"] if track_mode(a, record) == "from_point" else None
        frames = track_frames(a, record, scale[0], q.sight.times, query)
        return [[t, i, x * w, y * h] for t, objects in frames.items() for i, (x, y) in objects.items()]
    places = []
    for n, p in enumerate(a["points"], 1):
        image = p.get("image", 0)
        (x, y), (w, h) = unit(p, a, scale[image]), sizes[image]
        places.append([seconds(p["t"], record) if "t" in p else image + 1, n, x * w, y * h])
    return places


def said_places(q, text):
    """Of an answer, the same. A point on an image that there is not counts as predicted, in pixels of the first, and hits nothing."""
    sizes, places = q.sight.sizes, []
    for frame, i, x, y in parse_points(text, 1, 1):
        shown = frame.is_integer() and 1 <= frame <= len(sizes)
        w, h = sizes[int(frame) - 1 if shown else 0]
        number = {"video": round(frame, 1), "image": 1}.get(medium(q.record), int(frame) if shown else frame)
        places.append([number, int(i), x * w, y * h])
    return places


def score_places(q, text, masks):
    """Points or tracks."""
    true, said, where, times = true_places(q), said_places(q, text), medium(q.record), q.sight.times
    kept = {"predicted": said, "true": true}
    if masks is not None and where == "video":                           # on the clock of the file -> of the clip
        in_film = metrics.in_film([seconds(t, q.record) for t in masks["times"]], masks["masks"])
    if q.a["type"] == "track":
        frames = [{}, {}]
        for side, places in zip(frames, (said, true), strict=True):
            for t, i, x, y in places:
                side.setdefault(t, {}).setdefault(i, (x, y))
        if masks is None:
            hit = lambda t, i, point: metrics.near([frames[1][t][i]], q.sight.sizes)(0, point)         # noqa: E731
        else:
            number = {i: n for n, i in enumerate(objects_of(q.a))}
            hit = lambda t, i, point: in_film(number[i], (t, *point))    # noqa: E731
        scores = metrics.score_tracks(*frames, hit)
        return {f"track_{name}" if name in ("precision", "recall", "f1") else name: value for name, value in scores.items()} | kept

    said, true = ([(frame, x, y) for frame, _, x, y in places] for places in (said, true))
    if masks is None:
        hit = metrics.near(true, [q.sight.sizes[frame - 1 if where == "images" else 0] for frame, *_ in true])
    else:
        hit = in_film if where == "video" else metrics.in_mask(masks)
    if where == "video":
        scores = metrics.score_video(said, true, hit, (times[-1], *q.sight.sizes[0]))
    else:
        scores = metrics.score_images(said, true, hit)
    prefix = "" if where == "image" else f"{where}_"
    return dict(zip((f"{prefix}point_{name}" for name in ("precision", "recall", "f1")), scores, strict=True)) | kept


# ---------------------------------------------------------------------------------------------------------------
# masks


def objects_of(a):
    """The ids of a track annotation in the order of its masks: numbers first, then names."""
    return sorted({p["id"] for p in a["points"]}, key=lambda i: (isinstance(i, str), i))


def check_masks(q, masks):
    """Do masks fit a pointing or tracking annotation, its media and its times? ValueError in one sentence."""
    if masks is None:
        return
    name, film = f"the masks of {q.record['id']}/{q.k}", q.sight.times is not None
    n = len(objects_of(q.a)) if q.a["type"] == "track" else len(q.a["points"])
    if film:
        w, h = q.sight.sizes[0]
        shape, expected = np.shape(masks["masks"]), (n, len(masks["times"]), h, w)
        if shape != expected:
            raise ValueError(f"{name} are {shape}; (points or objects, times, height, width) are {expected}")
        known = {seconds(t, q.record) for t in masks["times"]}
        missing = [frame for frame, *_ in true_places(q) if frame not in known]
        if missing:
            raise ValueError(f"{name} have none at {missing[0]} s of the clip, where a true point lies")
        return
    if len(masks) != n:
        raise ValueError(f"{name} are {len(masks)} for {n} points")
    for mask, (number, *_) in zip(masks, true_places(q), strict=True):
        w, h = q.sight.sizes[number - 1]
        if mask.shape != (h, w) and (len(q.sight.sizes) == 1 or mask.shape[0] < h or mask.shape[1] < w):
            raise ValueError(f"{name}: one is {mask.shape}, the image {(h, w)} (height, width)")


def open_masks(path, records):
    """An .npz with masks for every pointing and tracking annotation of the records -> masks_of; ValueError if one is not there."""
    masks = metrics.open_npz(path, "--masks")
    for record in records:
        film = "video" in record
        for k, a in enumerate(record["annotations"]):
            name = f"{record['id']}/{k}"
            if a["type"] not in ("point", "track"):
                continue
            n = len(objects_of(a)) if a["type"] == "track" else len(a["points"])
            if name not in masks or masks[name].ndim != 3 + film or len(masks[name]) != n:
                found = masks[name].shape if name in masks else "none"
                raise ValueError(f"--masks {path}: '{name}' needs an array ({n}, {'t, ' * film}h, w); found {found}")
            if film and f"{name}/times" not in masks:
                raise ValueError(f"--masks {path}: '{name}/times' is missing, the seconds of '{name}'")

    def masks_of(record, k):
        name = f"{record['id']}/{k}"
        return {"times": masks[f"{name}/times"], "masks": masks[name]} if "video" in record else masks.get(name)

    return masks_of


# ---------------------------------------------------------------------------------------------------------------
# the command


def table(by_frames):
    """{frames: metrics} -> text: a line per score, a column per number of frames."""
    names = [name for name in SCORES if any(name in scores for scores in by_frames.values())]
    lines = [["frames", *map(str, by_frames)]]
    lines += [[name, *(f"{scores[name]:.4f}" if name in scores else "-" for scores in by_frames.values())] for name in names]
    lines.append(["nll", *(f"{scores['nll']['all']:.4f}" if scores["nll"] else "-" for scores in by_frames.values())])
    return "\n".join(f"{line[0]:<24}" + "".join(f"{cell:>9}" for cell in line[1:]) for line in lines)


def main():
    parser = argparse.ArgumentParser(description="Score a model on records.")
    parser.add_argument("--model", required=True, help="run directory, or a folder with a released checkpoint")
    parser.add_argument("--data", required=True, help="records (.jsonl)")
    parser.add_argument("--media", help="folder of their images and videos")
    parser.add_argument("--masks", help='.npz with an array (n,h,w) per pointing annotation, named "record id/annotation number"; of '
                        'videos (n,t,h,w), also per tracking annotation, and "record id/annotation number/times"')
    parser.add_argument("--frames", type=int, nargs="+", metavar="N", help="frames of a video at most (default 384, or more if the model "
                        "learned with more); of several numbers, scores by frames, the last one's in full")
    parser.add_argument("--draw", metavar="DIR", help="write pictures with predicted and true points; frames.png for several --frames")
    parser.add_argument("--out", default=".", help="folder for predictions.jsonl (default: here)")
    parser.add_argument("--max-new", type=int, help="tokens of an answer at most (default: by its kind, from 12 to 4096)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default float32)")
    args = parser.parse_args()
    try:
        if args.max_new is not None and args.max_new < 1:
            raise ValueError("--max-new must be at least 1")
        numbers = list(dict.fromkeys(args.frames or [None]))
        if args.frames and not all(1 <= n <= data.media.MAX_FRAMES for n in numbers):
            raise ValueError(f"--frames must be from 1 to {data.media.MAX_FRAMES}, not {' '.join(map(str, numbers))}")
        model, tokenizer, config = open_model(args.model, args.device, getattr(torch, args.dtype))
        records = list(data.Records(args.data, args.media))
        if args.frames and not any("video" in record for record in records):
            raise ValueError(f"--frames: no video in {args.data}")
        masks_of = open_masks(args.masks, records) if args.masks else None
        for folder in filter(None, (args.out, args.draw)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        by_frames, kept = {}, []
        for n in numbers:
            result, predictions = evaluate(model, tokenizer, asking(config, frames=n), records, masks_of, max_new=args.max_new)
            if result["skipped"] == len(records):
                raise ValueError(f"{args.data}: none of its {len(records)} records could be used")
            by_frames[str(n)] = result
            kept += [p | ({"frames": n} if args.frames else {}) for p in predictions]
    except (OSError, ValueError) as e:
        print(f"tools.evaluate: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    with open(Path(args.out) / "predictions.jsonl", "w") as out:
        out.writelines(json.dumps(p) + "\n" for p in kept)
    if args.draw:
        pictures.draw(predictions, records, args.draw)
    if len(numbers) > 1:
        print(table(by_frames))
        if args.draw:
            series = {name: [(int(n), scores[name]) for n, scores in by_frames.items() if name in scores] for name in CURVES}
            series = {name: points for name, points in series.items() if points}
            charts.lines(series, Path(args.draw) / "frames.png", "frames", y=(0, 1), dots=True)
        result = {**result, "by_frames": by_frames}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
