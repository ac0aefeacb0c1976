"""Evaluates a model on records (paper: evaluation; docs/molmo2.md 13).

Every annotation becomes a question, except the type `text`. In a conversation,
every turn with a weight above 0 is a question. Its prompt contains the true answers to earlier
turns. Answers are generated greedily by default. Each score in SCORES is a mean over questions.
nll is the training loss with its loss weights.

A prediction contains the question, the answer and the scores. For points and tracks it also
contains `predicted` and `true`, [[frame, id, x, y], ..] as in text.points.Place, and `hits`. For
videos it contains the `times` of the frames. If the answer ended at its token limit, `cut` is true.

`hits` names the rule for a correct point. "mask": the point lies in the mask of the matched object
(masks.py). Without masks, "box": it lies in the box of the object. Without boxes, its distance to
the true point is at most 5 % of the image diagonal. In videos, its time must also be the same,
rounded to 0.1 s.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from tqdm import tqdm

import data
import packing
from evaluation.generate import GREEDY, generate
from evaluation.masks import find_misfit
from evaluation.prompts import VideoClip, encode_prompt, resized
from evaluation.scoring import Question, annotation_of, score
from records.errors import skipping, visible
from records.visual import read_headers
from text.prompts import kinds_and_weights, turns_of
from text.styles import medium
from text.tokenizer import ByteTokenizer
from training.ranks import Ranks

TYPES = ("caption", "point", "count", "qa", "track")
LOCATED = ("point", "track")  # scored by coordinates; masks are optional
NO_SCORES = {"predicted", "true", "hits"}  # keys of scoring.score that are not scores
SCORES = (
    "caption_exact", "caption_recall", "caption_precision",
    # records with one image; "valid" is the share of answers with at least one point
    "point_f1", "point_precision", "point_recall", "point_valid",
    "images_point_f1", "images_point_precision", "images_point_recall", "images_point_valid",
    "video_point_f1", "video_point_precision", "video_point_recall", "video_point_valid",
    # all media; "close" allows a larger error for a video; "valid": the answer states a number
    "count_accuracy", "count_close", "count_valid",
    "track_precision", "track_recall", "track_f1", "hota", "det_a", "ass_a",
    "qa_accuracy",  # the right option, or an exact match if there are no options
    "choice_accuracy",  # only questions with options
    "vqa_score", "anls", "relaxed_accuracy",  # see scoring.STYLE_SCORE
)
MAX_ROWS = 128  # questions in one batch
MAX_CROPS = 256  # crops in one batch of the ViT
MAX_CACHED_TOKENS = 1 << 16  # slots of the KV cache: rows x (prompt + answer)
LEAST_BYTES = 512  # answer limit if tokens are bytes, because a word needs several bytes


def answer_limit(annotation, record):
    """The maximum number of tokens of an answer (docs/molmo2.md 13)."""
    if annotation["type"] == "track":
        return 4096
    if annotation["type"] == "caption":
        return 2048
    if annotation["type"] != "qa":  # points and counts
        return 192 if medium(record) == "image" else 2048
    turns = annotation["turns"]
    style = annotation["style"]
    explains = any("explanation" in turn for turn in turns)
    if explains or style in ("user_qa", "correction_qa", "text_sft"):
        return 384
    return 32 if any("options" in turn for turn in turns) else 12


def questions_of(record, info, config, max_new=None, least=1):
    """A record and its MediaInfo -> [Question, ..]. An answer may have max_new tokens. If max_new
    is None, the maximum is answer_limit or `least`, whichever is larger."""
    questions = []
    for index, annotation in enumerate(record["annotations"]):
        if annotation["type"] == "text":
            continue  # these types have no question
        assert annotation["type"] in TYPES, (
            f"no score for the type {annotation['type']}: add it to TYPES")
        turns = turns_of(annotation, record, info.sizes, config, None, info.times)
        for n, (_, weight) in enumerate(kinds_and_weights(annotation) if turns else ()):
            if weight:
                asked = [*turns[:n], (turns[n][0], None)]
                limit = max_new or max(answer_limit(annotation_of(annotation, n), record), least)
                questions.append(Question(record, index, n, asked, info, limit))
    return questions


def collect_questions(records, config, masks_of=None, max_new=None, least=1):
    """Records -> [Question, ..], {where: Unreadable} of the records whose headers cannot be read
    (records.errors.skipping). ValueError if masks do not fit. This is checked before hours of
    generation start."""
    questions = []
    skipped = {}
    for record in records:
        where = record["where"]
        with skipping(skipped, where):
            info = read_headers(record, config)
        if where in skipped:
            continue
        for question in questions_of(record, info, config, max_new, least):
            if masks_of and question.annotation["type"] in LOCATED and not question.is_turn:
                misfit = find_misfit(question, masks_of(record, question.index))
                if misfit:
                    raise ValueError(f"the masks of {record['id']}/{question.index} {misfit}")
            questions.append(question)
    return questions, skipped


def batch_order(question):
    """Sort key. Answers of the same type and length end at about the same time.
    Questions about one video stay together, because decoding takes longer than the answers."""
    if question.info.times is not None:
        return 1, "", 0
    annotation = question.annotation
    return 0, annotation["type"], len(annotation.get("points", ()))


def decode_media(question, vision_config):
    """Decodes the media of a question -> (images, None) or ([], VideoClip)."""
    source = question.record["source"]
    info = question.info
    if info.times is None:
        return (source.images(question.record) if info.sizes else []), None
    small = resized(source.frames(question.record, info.times), vision_config.crop)
    return [], VideoClip(info.times, small, info.subtitles)


def prompt_batches(questions, tokenizer, config, vision_config, skipped):
    """Yields lists of (question, prompt), each as long as `fits` allows. If several questions of
    a batch have the same media, these are decoded once, and the prompts share the crops.
    skipped: {where: Unreadable}; this function adds the records that cannot be decoded."""
    batch = []
    decoded = {}  # {where: (images, clip)} of this batch
    crops = {}
    for question in questions:
        where = question.record["where"]
        if where in skipped:
            continue
        with skipping(skipped, where):
            if where not in decoded:
                decoded[where] = decode_media(question, vision_config)
            images, clip = decoded[where]
            prompt = encode_prompt(
                images, question.turns, tokenizer, config, vision_config, clip)
            prompt.id = f"{question.record['id']}/{question.index}/{question.turn}"
        if where in skipped:
            continue
        if batch and not fits([*batch, (question, prompt)]):
            yield batch
            batch = []
            decoded = {where: decoded[where]}
            crops = {}
        prompt.images = crops.setdefault(where, prompt.images)
        batch.append((question, prompt))
    if batch:
        yield batch


def fits(batch):
    """Does the batch [(question, prompt), ..] respect MAX_ROWS, MAX_CROPS and MAX_CACHED_TOKENS?"""
    longest = max(len(prompt.tokens) + question.max_new for question, prompt in batch)
    crops = {q.record["where"]: len(p.images) for q, p in batch if p.images is not None}
    small = len(batch) <= MAX_ROWS and len(batch) * longest <= MAX_CACHED_TOKENS
    return small and sum(crops.values()) <= MAX_CROPS


def evaluate(model, tokenizer, config, records, masks_of=None, max_new=None, ranks=None,
             with_nll=True, reading=None, sampling=GREEDY, name="records"):
    """Records from a source -> metrics, predictions sorted by record id and annotation.

    masks_of(record, annotation index) -> masks of this annotation (masks.py) or None.
    max_new: maximum tokens of an answer, instead of answer_limit. with_nll=False: no loss. name:
    what the progress bar says is evaluated.
    reading: see scoring.score. If the media of a record cannot be read, a warning is printed and
    the record is counted in `skipped`. Answers that ended at their token limit are counted in
    `cut`. Each of `ranks` evaluates a part of the records and needs the whole model. Its batches
    differ from those of one process, so one or two answers in 100 can differ by rounding.
    """
    ranks = ranks or Ranks()
    records = list(records)
    mine = records[ranks.rank :: ranks.world]
    least = LEAST_BYTES if isinstance(tokenizer, ByteTokenizer) else 1
    questions, skipped = collect_questions(mine, config, masks_of, max_new, least)
    questions.sort(key=batch_order)
    predictions = []
    with tqdm(total=len(questions), desc=visible(f"evaluating {name}"), unit="question",
              leave=False, mininterval=1, delay=1, disable=not (questions and ranks.first)) as bar:
        for batch in prompt_batches(questions, tokenizer, config, model.config.vision, skipped):
            predictions += answer(model, tokenizer, batch, masks_of, reading, sampling)
            bar.update(len(batch))
    losses = losses_of(model, tokenizer, config, mine, skipped) if with_nll else []

    found = ranks.all_gather((predictions, losses, list(skipped)))
    by_kind = zip(*found, strict=True)
    predictions, losses, skipped = (list(chain(*parts)) for parts in by_kind)
    predictions.sort(key=lambda p: (p["id"], p["annotation"], p.get("turn", 0)))
    rules = {p["hits"] for p in predictions if "hits" in p}
    return {
        **mean_scores(predictions),
        "nll": mean_nll(losses),
        "hits": " and ".join(sorted(rules)) or "none",
        "skipped": len(skipped),
        "cut": sum("cut" in p for p in predictions),
    }, predictions


def mean_scores(predictions):
    """-> {score: mean over the predictions with this score, "n_caption": how many, ..}"""
    result = {}
    for name in SCORES:
        values = [p[name] for p in predictions if name in p]
        if values:
            result[name] = round(float(np.mean(values)), 4)
    n = Counter(p["type"] for p in predictions)
    return result | {f"n_{kind}": n[kind] for kind in TYPES}


def answer(model, tokenizer, batch, masks_of, reading, sampling):
    """[(question, prompt), ..] -> predictions, the lines of predictions.jsonl."""
    questions, prompts = zip(*batch, strict=True)
    longest = max(question.max_new for question in questions)
    answers = generate(model, prompts, tokenizer.stops, longest, sampling)
    predictions = []
    for question, ids in zip(questions, answers, strict=True):
        annotation = question.annotation
        text = tokenizer.decode(ids[: question.max_new])
        is_located = masks_of and annotation["type"] in LOCATED and not question.is_turn
        masks = masks_of(question.record, question.index) if is_located else None
        times = question.info.times
        scores = score(question, text, masks, reading)
        new = scores.keys() - {*SCORES, *NO_SCORES}
        assert not new, f"the scores {new} are not in SCORES: add them"
        predictions.append({
            "id": question.record["id"],
            "annotation": question.index,
            **({"turn": question.turn} if question.is_turn else {}),
            "type": annotation["type"],
            "medium": medium(question.record),
            "prompt": question.turns[-1][0],
            "text": text,
            **({"cut": True} if len(ids) >= question.max_new else {}),
            **scores,
            **({} if times is None else {"times": times}),
        })
    return predictions


@torch.no_grad()
def losses_of(model, tokenizer, config, records, skipped):
    """-> [(source, sum of weight * -log p, sum of weights) of each record], with the loss weights
    of training (docs/molmo2.md 7.1). Prompts are chosen as in epoch 0 with seed 0. An example keeps
    config.max_tokens tokens after its visual tokens, because more text would take minutes.
    skipped: see prompt_batches."""
    whole = replace(config, max_tokens=math.inf)
    vision_config = model.config.vision
    losses = []
    for record in records:
        where = record["where"]
        if where in skipped:
            continue
        with skipping(skipped, where):
            example = data.encode(record, tokenizer, whole, vision_config, 0, 0)
        if where in skipped:
            continue
        n = len(np.trim_zeros(example.bidir, "b")) + config.max_tokens  # after the visual tokens
        names = ("tokens", "targets", "weights", "pos", "visible_until", "bidir", "annotation")
        example = replace(example, **{name: getattr(example, name)[:n] for name in names})
        example.visible_until = example.visible_until.clip(max=n)
        batch = packing.collate([[example]], len(example.tokens), vision_config)
        batch = batch.to(model.norm.weight.device)
        loss = (batch.weights * model(batch)[0]).double().sum().item()
        losses.append((record["source"].name, loss, batch.weights.double().sum().item()))
    return losses


def mean_nll(losses):
    """The result of losses_of -> {"all": nll, source: nll, ..}, weighted means."""
    sums = Counter()
    weights = Counter()
    for source, loss, weight in losses:
        for name in ("all", source):
            sums[name] += loss
            weights[name] += weight
    return {name: round(sums[name] / weights[name], 4) for name in sums if weights[name]}
