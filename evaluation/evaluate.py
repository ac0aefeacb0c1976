"""Scores of a model on records (paper: evaluation; docs/molmo2.md 13): captions, points, counts,
questions and tracks, on images and videos.

Every annotation but texts is asked about in the words of evaluation, greedily. Scores are means
over questions; in a conversation every turn is a question, asked after the true answers to earlier
turns.

caption_exact caption_recall caption_precision
point_f1 point_precision point_recall       on one image; on several images_point_.., on a video
                                            video_point_..
count_accuracy count_close                  of all media; close is wider for a video
track_precision track_recall track_f1 hota det_a ass_a
qa_accuracy                                 of all questions: the right option, else an exact match
                                            with one of the `answers`
choice_accuracy                             of questions with options
anls relaxed_accuracy vqa_score             of the styles in scoring.STYLE_SCORE; vqa_score also of
                                            all others with several `answers`
nll                                         the loss of training, with its weights, of all records
                                            and by source

A prediction holds the question and the answer; of points and tracks also `predicted` and `true`,
[[frame, id, x, y], ..] in pixels of what was shown, where frame is 1, the number of the image, or
seconds of the clip; of videos the `times` of the frames shown.

Masks (--masks, an .npz file with an array for each pointing or tracking annotation, named
"record id/annotation number"; or the function masks_of):
    images    (n,h,w) bool, one per point, in their order, each of its own image (padded to the
              largest)
    video     (n,t,h,w), one per point, or per object of a track by sorted ids; and the array
              "record id/annotation number/times", (t,) seconds of the file, as all times of a
              record. masks_of returns {"times": .., "masks": ..}
Without masks, a hit is inside the box of the matched point, where the annotation has boxes; else
within 5 % of the image's diagonal of the point; at the same tenth of a second.

Of several ranks each answers every n-th batch of questions. Which questions form a batch follows
from headers alone, whatever the number of ranks, so that scores are the same to the digit.
"""

import math
from collections import ChainMap, Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import data
import packing
import parallel
import vision
from evaluation.generate import generate
from evaluation.masks import check_masks
from evaluation.scoring import Question, hit_rule, score
from records.errors import Unreadable, warn
from records.visual import VideoClip, crops_per_image, read_headers
from text.prompts import turns_of
from text.styles import medium, style_of
from text.tokenizer import chat
from text.visual import images_tokens, video_tokens

TYPES = ("caption", "point", "count", "qa", "track")
LOCATED = ("point", "track")             # scored by places, with masks or without
SCORES = (
    "caption_exact", "caption_recall", "caption_precision",
    "point_f1", "point_precision", "point_recall",
    "images_point_f1", "images_point_precision", "images_point_recall",
    "video_point_f1", "video_point_precision", "video_point_recall",
    "count_accuracy", "count_close",
    "track_precision", "track_recall", "track_f1", "hota", "det_a", "ass_a",
    "qa_accuracy", "choice_accuracy", "vqa_score", "anls", "relaxed_accuracy",
)
MAX_CROPS = 256                          # encoded at once by the ViT
MAX_CACHED_TOKENS = 1 << 16              # rows x (prompt + answer): the slots of the KV cache


# -------------------------------------------------------------------------------------------------
# questions


def answer_limit(annotation, record):
    """Tokens of an answer at most (docs/molmo2.md 13)."""
    if annotation["type"] == "qa":
        turns = annotation.get("turns", [annotation])
        style = style_of(annotation, record, None)
        in_sentences = style in ("user_qa", "correction_qa", "text_sft")
        if in_sentences or any("explanation" in turn for turn in turns):
            return 384
        return 32 if any("options" in turn for turn in turns) else 12
    if annotation["type"] == "track":
        return 4096
    if annotation["type"] != "caption" and medium(record) == "image":
        return 192                       # points and counts of one image
    return 2048                          # captions; points and counts of videos and several images


def questions_of(record, info, config, max_new=None):
    """A record and its MediaInfo -> [Question, ..]. max_new: in place of answer_limit."""
    questions = []
    for index, annotation in enumerate(record["annotations"]):
        if annotation["type"] not in TYPES:
            continue
        limit = max_new or answer_limit(annotation, record)
        turns = turns_of(annotation, record, info.sizes, config, None, info.times)
        given = annotation.get("turns", [{}])
        for n, (text, _) in enumerate(turns):
            if given[n].get("weight", 1):            # a turn of weight 0 is context only
                asked = [*turns[:n], (text, None)]
                questions.append(Question(record, index, n, asked, info, limit))
    return questions


def collect_questions(records, config, masks_of, max_new):
    """Records -> [Question, ..], the records whose headers can be read, and {where: reason} of
    others.

    ValueError if masks do not fit: before hours of answers, not after.
    """
    questions, readable, skipped = [], [], {}
    for record in records:
        try:
            info = read_headers(record, config)
        except Unreadable as e:
            skipped[record["where"]] = str(e)
            continue
        readable.append(record)
        questions += questions_of(record, info, config, max_new)
    if masks_of:
        for q in questions:
            masks = masks_of(q.record, q.index) if q.annotation["type"] in LOCATED else None
            if masks is not None:
                check_masks(q, masks)
    return questions, readable, skipped


def decode_media(question, config):
    """-> images, VideoClip of what a question is about: [] and a VideoClip, or images and None."""
    source, info = question.record["source"], question.info
    if info.times is None:
        return (source.images(question.record) if info.sizes else []), None
    # as small as the ViT takes them: 384 frames of 11 MB would be 4 GB
    crop = config.vision.crop
    frames = source.frames(question.record, info.times)
    small = [vision.resize(frame, crop, crop) for frame in frames]
    return [], VideoClip(info.times, small, info.subtitles)


class Prompt(NamedTuple):
    """A question with the size of its prompt."""
    question: Question
    tokens: int
    crops: int


def plan_batches(questions, tokenizer, config, max_rows):
    """Questions -> lists of them in their order, each of at most max_rows, MAX_CROPS and
    MAX_CACHED_TOKENS. Media that several questions of a batch are about count once."""
    batches, prompts = [], []
    for question in questions:
        prompt = measure(question, tokenizer, config)
        if prompts and not fits([*prompts, prompt], max_rows):
            batches.append([p.question for p in prompts])
            prompts = []
        prompts.append(prompt)
    if prompts:
        batches.append([p.question for p in prompts])
    return batches


def measure(question, tokenizer, config):
    """A Question -> Prompt, from headers alone."""
    info = question.info
    if info.times is not None:
        ids, _ = video_tokens(info.times, info.subtitles, tokenizer, config)
    else:
        ids, _ = images_tokens(info.sizes, tokenizer, config)
    text = sum(len(part) for part, _ in chat(question.turns, tokenizer))
    return Prompt(question, 1 + len(ids) + text, sum(crops_per_image(info, config)))


def fits(prompts, max_rows):
    """Is [Prompt, ..] within max_rows, MAX_CROPS and MAX_CACHED_TOKENS?"""
    longest = max(p.tokens + p.question.max_new for p in prompts)
    crops = {p.question.record["where"]: p.crops for p in prompts}
    n_rows = len(prompts)
    n_crops = sum(crops.values())
    return n_rows <= max_rows and n_rows * longest <= MAX_CACHED_TOKENS and n_crops <= MAX_CROPS


def prompt_batches(batches, tokenizer, config, skipped):
    """Lists of questions -> yields lists of (question, prompt).

    Media that several questions of a batch are about are decoded once, and their prompts share the
    crops, which are encoded once. skipped: {where: reason}, to which undecodable records are added.
    """
    decoded = {}
    for batch in batches:
        prompts, crops = [], {}
        for question in batch:
            where = question.record["where"]
            if where in skipped:
                continue
            if where not in decoded:
                try:
                    decoded[where] = decode_media(question, config)
                except Unreadable as e:
                    skipped[where] = str(e)
                    continue
            images, clip = decoded[where]
            prompt = data.encode_prompt(images, question.turns, tokenizer, config, clip)
            prompt.images = crops.setdefault(where, prompt.images)
            prompts.append((question, prompt))
        decoded = {where: decoded[where]} if where in decoded else {}    # the next may begin so
        yield prompts


# -------------------------------------------------------------------------------------------------
# answers and scores


def evaluate(
    model, tokenizer, config, records, masks_of=None, batch=128, max_new=None, progress=True,
    ranks=None, with_nll=True,
):
    """Records from a source -> metrics, predictions, on all ranks.

    masks_of(record, annotation index) -> masks of that annotation (see above) or None. batch:
    questions answered at once. max_new: tokens of every answer at most, in place of answer_limit.
    progress: show a bar on stderr. A record whose media cannot be read is named on stderr and
    counted in `skipped`; a text, which has only its nll, in `not_scored`. ValueError if masks
    do not fit their annotation. ranks: parallel.Ranks, each of which calls this with the same
    arguments and a whole model. with_nll False: no forward pass for the loss, `nll` is empty.
    """
    ranks = ranks or parallel.Ranks()
    records = list(records)
    questions, readable, skipped = collect_questions(records, config, masks_of, max_new)
    questions.sort(key=batch_order)
    batches = plan_batches(questions, tokenizer, config, batch)
    numbers = range(ranks.rank, len(batches), ranks.world)           # of this rank's batches
    mine = [batches[n] for n in numbers]
    bar = tqdm(
        total=sum(map(len, mine)), desc="evaluation", unit="question", leave=False, mininterval=1,
        disable=not (progress and mine and ranks.first),
    )
    answered = {}                        # {number of the batch: predictions}
    with bar:
        prompts_of = prompt_batches(mine, tokenizer, config, skipped)
        for number, group in zip(numbers, prompts_of, strict=True):
            answered[number] = answer(model, tokenizer, group, masks_of) if group else []
            bar.update(len(group))

    found = [pair for of_batch in gather_batches(answered, ranks) for pair in of_batch]
    predictions = [prediction for prediction, _ in found]
    hit_rules = {rule for _, rule in found if rule}
    skipped = gather_skipped(skipped, ranks)
    result = {}
    for name in SCORES:
        values = [p[name] for p in predictions if name in p]
        if values:
            result[name] = round(float(np.mean(values)), 4)
    result |= {f"n_{kind}": sum(p["type"] == kind for p in predictions) for kind in TYPES}
    decodable = [record for record in readable if record["where"] not in skipped]
    losses = nll(model, tokenizer, config, decodable, skipped, ranks) if with_nll else {}
    result["nll"] = {name: round(value, 4) for name, value in losses.items()}
    skipped = gather_skipped(skipped, ranks)
    if ranks.first:
        for where, reason in skipped.items():
            warn(f"{where}: {reason}; skipped")
    result["hits"] = " and ".join(sorted(hit_rules)) or "none"
    result["skipped"] = len(skipped)
    result["not_scored"] = sum(n_texts(record) for record in readable)
    return result, predictions


def gather_batches(done, ranks):
    """{number of a batch: result} of each rank -> the results of all batches in order, on all."""
    if ranks.world > 1:
        ranks.barrier()                  # for any time: ranks are done hours apart
        done = {n: result for of_rank in parallel.all_gather(done) for n, result in of_rank.items()}
    return [done[number] for number in sorted(done)]


def gather_skipped(skipped, ranks):
    """{where: reason} of all ranks, in the same order on all of them."""
    of_ranks = parallel.all_gather(skipped) if ranks.world > 1 else [skipped]
    return dict(ChainMap(*of_ranks))


def answer(model, tokenizer, prompts, masks_of):
    """[(question, prompt), ..] -> [(prediction, how its hits are found, or ""), ..]."""
    longest = max(question.max_new for question, _ in prompts)
    answers = generate(model, [prompt for _, prompt in prompts], tokenizer.stops, longest)
    found = []
    for (question, _), ids in zip(prompts, answers, strict=True):
        text = tokenizer.decode(ids[: question.max_new])
        masks, rule = None, ""
        if question.annotation["type"] in LOCATED:
            masks = masks_of(question.record, question.index) if masks_of else None
            rule = hit_rule(question.annotation, masks)
        found.append((prediction_of(question, text, masks), rule))
    return found


def n_texts(record):
    """How many annotations are texts, which are not scored."""
    return sum(annotation["type"] not in TYPES for annotation in record["annotations"])


def batch_order(question):
    """Sort key. Answers of one type and length end at about the same time; but all questions about
    a video stay together, because decoding it costs more than the answers."""
    if question.info.times is not None:
        return 1, "", 0
    annotation = question.annotation
    return 0, annotation["type"], len(annotation.get("points", ()))


def prediction_of(question, text, masks):
    """A question and the text of its answer -> the line of predictions.jsonl, as a dict."""
    annotation = question.annotation
    return {
        "id": question.record["id"],
        "annotation": question.index,
        **({"turn": question.turn} if "turns" in annotation else {}),
        "type": annotation["type"],
        "medium": medium(question.record),
        "prompt": question.turns[-1][0],
        "text": text,
        **score(question, text, masks),
        **({"times": question.info.times} if question.info.times is not None else {}),
    }


# -------------------------------------------------------------------------------------------------
# loss


class Sized(NamedTuple):
    tokens: int
    crops: int
    index: int                           # of the record


def nll_batches(sizes):
    """[Sized, ..] -> lists of them of similar lengths, so that there is little padding."""
    groups = []
    for item in sorted(size for size in sizes if size.tokens):
        group = groups[-1] if groups else []
        crops = item.crops + sum(other.crops for other in group)
        full = item.tokens * (len(group) + 1) > MAX_CACHED_TOKENS // 4 or crops > MAX_CROPS
        if full or not groups:
            groups.append([])
        groups[-1].append(item)
    return groups


@torch.no_grad()
def nll(model, tokenizer, config, records, skipped=None, ranks=None):
    """-> {"all": nll, name of each source: nll}: the mean of -log p over tokens with loss,
    weighted as in training (docs/molmo2.md 7.1), for a model in eval mode.

    Examples are worded as in epoch 0 with seed 0, and whole: nothing is cut at max_tokens. skipped:
    {where: reason}, to which undecodable records are added; without it they raise Unreadable.
    """
    ranks = ranks or parallel.Ranks()
    config = replace(config, max_tokens=math.inf)
    sizes = []
    for index, record in enumerate(records):
        sizes.append(Sized(*data.size(record, tokenizer, config, 0, 0), index))
    done = {}                                        # {number of the group: losses of its rows}
    for number, group in enumerate(nll_batches(sizes)):
        if number % ranks.world != ranks.rank:
            continue
        examples, sources = [], []
        for item in group:
            record = records[item.index]
            try:
                examples.append(data.encode(record, tokenizer, config, 0, 0))
            except Unreadable as e:
                if skipped is None:
                    raise
                skipped[record["where"]] = str(e)
                continue
            sources.append(record["source"].name)
        if examples:
            longest = max(len(e.tokens) for e in examples)
            batch = packing.collate([[e] for e in examples], longest, config.vision)
            batch = batch.to(model.norm.weight.device)
            loss = (batch.weights * model(batch)[0]).double().sum(1).tolist()
            weight = batch.weights.double().sum(1).tolist()
            done[number] = list(zip(sources, loss, weight, strict=True))
    losses, weights = Counter(), Counter()           # by source
    for rows in gather_batches(done, ranks):
        for source, row_loss, row_weight in rows:
            for name in ("all", source):
                losses[name] += row_loss
                weights[name] += row_weight
    return {name: losses[name] / weights[name] for name in losses}
