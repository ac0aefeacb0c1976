"""Layouts of image and text sets: what a row becomes.

in    a row in the columns of its set, the Settings of sets.py, the Media folder
out   head: the visual input, weight and meta of a record
      builders: functions without arguments that make its annotations. They are called later, so
      that a Skip in one annotation does not cost the others.

    row       {"image_url": u, "label": "mug", "points": [{"x": 21.4, "y": 55.0}], "count": 1}
    head      {"image": {"path": sha256 of u, "url": u}}
    builders  [-> {"type": "point", "label": "mug", "coords": "percent", "count": 1,
                   "points": [{"x": 21.4, "y": 55.0}]}]

The order of options, the choice of a transcript, and pointing or counting are left to
the trainer. Left out: masks, and the boxes that Molmo2 draws into AI2D.
"""

import json
import re
from contextlib import suppress
from functools import partial

from records.errors import Unreadable
from records.media import image_size
from tools.prepare.annotations import (
    answer,
    box_annotation,
    caption,
    check_image_count,
    count_annotation,
    crowd_answers,
    dialogue,
    meta_of,
    multiple_choice,
    parse_messages,
    point_annotation,
    require,
    size_of,
    text_of,
    text_or_skip,
    xy_points,
)
from tools.prepare.media import check_path

MAX_POINTS = 60                      # of an annotation
# sources of Tulu that Molmo2 leaves out: puzzles, long reasoning, answers about the
# model itself
NOT_CHAT = re.compile("puzzle_data|verifiable-reasoning|dino-hardcodes|hardcoded-olmo")
# rows of ChartQA by who wrote the question (docs/molmo2.md 7.1)
CHARTQA_HUMAN = 20901
CHARTQA_MACHINE = 7398
CHARTQA_ALL = CHARTQA_HUMAN + CHARTQA_MACHINE


def captions(row, settings, media):
    """A caption, and the transcripts of the speech that it was written from."""
    builders = [partial(caption, row["caption"], "long_caption")]
    if settings.transcripts:
        for transcript in row.get("transcripts") or []:
            builders.append(partial(caption, transcript, "transcript"))
    return {"image": media.image_by_url(row["image_url"])}, builders


def points(row, settings, media):
    """A label per row. PixMo-Count is in pixels of the original image, whose size is
    read from the fetched file; rows for evaluation have a count and no points."""
    image = media.image_by_url(row["image_url"], row.get("image_sha256"))
    places = xy_points(row.get("points"))
    count = row.get("count")
    method = row.get("collection_method")
    require(settings.method in (None, method), "another collection_method")
    if count and not places:
        return {"image": image}, [partial(count_annotation, count, row["label"])]
    size = None
    if settings.coords == "pixel" and (media.root / image["path"]).is_file():
        with suppress(Unreadable):   # the trainer counts what is no image
            size = size_of(*image_size(media.root / image["path"]))
    builder = partial(point_annotation, places, settings.coords, row["label"], size=size,
                      count=count, clip=settings.clip, max_points=MAX_POINTS,
                      counts=settings.counts, **meta_of(collection_method=method))
    return {"image": image}, [builder]


def boxes(row, settings, media):
    """A label per row, as rows.coco_rows makes them. Where a crowd has one box, the
    places of the others are not known, so the label is left out."""
    size = size_of(row["width"], row["height"])
    require(size, "no size")
    image = {"path": check_path(row["image"]), "width": size[0], "height": size[1]}

    def annotation():
        require(row["boxes"] is not None, "a crowd in one box")
        return box_annotation(row["boxes"], row["label"], *size, MAX_POINTS)

    return {"image": image}, [annotation]


def image_questions(row, settings, media):
    image = media.image_by_url(row["image_url"], row.get("image_sha256"))
    return {"image": image}, [partial(answer, row["question"], "user_qa", row["answer"])]


def tagged_dialogues(row, settings, media):
    """"[USER] q1 [ASSISTANT] a1 [USER] q2 [ASSISTANT]", and the last answer in a column
    of its own."""
    before, *parts = re.split(r"\[(USER|ASSISTANT)\]", row["question"].strip())
    roles = parts[::2]
    *texts, after = parts[1::2]
    alternate = roles == ["USER", "ASSISTANT"] * (len(roles) // 2)
    require(alternate and not before and not after, "dialogue that does not parse")
    texts = [text_or_skip(text, "turn") for text in [*texts, row["answer"]]]
    turns = list(zip(texts[::2], texts[1::2], strict=True))
    image = media.image_by_url(row["image_url"])
    return {"image": image}, [partial(dialogue, turns, "user_qa")]


def questions_with_points(row, settings, media):
    """CoSyn-point: a question is the prompt, the name is the label of the answer."""

    def annotation(question, cell, name):
        return point_annotation(xy_points(cell), "percent", name, question, mode="point",
                                style="cosyn_point")

    questions = row["questions"]
    names = row.get("names") or [None] * len(questions)
    builders = []
    for each in zip(questions, row["answer_points"], names, strict=True):
        builders.append(partial(annotation, *each))
    return {"image": media.image_of_cell(row["image"]), **meta_of(id=row.get("id"))}, builders


def qa_pairs(row, settings, media):
    """qa_pairs{question[], explanation[], answer[]} on one image, or on two to five."""
    if "image" in row:
        head = {"image": media.image_of_cell(row["image"])}
    else:
        cells = row["images"] if "images" in row else row.get("image_urls")
        head = {"images": check_image_count([media.image_of_cell(cell) for cell in cells])}
    style = settings.style
    if "{type}" in style:
        kind = settings.type or settings.file.absolute().parent.name
        style = "cosyn_document" if kind == "document" else style.format(type=kind)
    pairs = row["qa_pairs"]
    explanations = [None] * len(pairs["question"])
    if style.endswith("_exp") and pairs.get("explanation"):
        explanations = pairs["explanation"]

    def annotation(question, reply, explanation):
        if not text_of(explanation):
            return answer(question, style.removesuffix("_exp"), reply)
        return answer(question, style, reply, explanation=text_of(explanation))

    builders = []
    for each in zip(pairs["question"], pairs["answer"], explanations, strict=True):
        builders.append(partial(annotation, *each))
    return head | meta_of(id=row.get("id")), builders


def same_label(a, b):
    """Equal but for a plural?"""
    return a in (b, b + "s", b + "es") or b in (a + "s", a + "es")


def points_of_images(row, settings, media):
    """A label per image. Images whose labels differ in a plural at most share an
    annotation."""
    images = check_image_count([media.image_by_url(url) for url in row["image_urls"]])
    labels = row.get("normalized_labels") or [label.strip().lower() for label in row["labels"]]
    counts = row.get("counts") or [None] * len(images)
    cells = list(zip(row["points"], counts, strict=True))
    members = {}                     # label -> image numbers
    for i, label in zip(range(len(images)), labels, strict=True):
        known = next((other for other in members if same_label(label, other)), label)
        members.setdefault(known, []).append(i)

    def annotation(label, numbers):
        places = []
        count = 0
        for i in numbers:
            cell, cell_count = cells[i]
            places += [{"image": i, **point} for point in xy_points(cell)]
            count = None if None in (count, cell_count) else count + cell_count
        return point_annotation(places, "percent", label, count=count, clip=True)

    builders = [partial(annotation, label, numbers) for label, numbers in members.items()]
    return {"images": images}, builders


def questions_with_crowd_answers(row, settings, media):
    """Answers of several people, as texts or as structs. In ChartQA, questions that
    people wrote weigh more."""
    head = {"image": media.image_of_cell(row["image"])}
    answers = row[settings.answers_column] or []
    if isinstance(answers, str):
        answers = [answers]
    answers = [entry["answer"] if isinstance(entry, dict) else entry for entry in answers]
    if "human_or_machine" in row:
        human = row["human_or_machine"] in (0, "human")
        head["weight"] = 2 * (CHARTQA_HUMAN if human else CHARTQA_MACHINE) / CHARTQA_ALL
    question = row[settings.question_column]
    return head, [partial(crowd_answers, question, settings.style, answers)]


def image_multiple_choice(row, settings, media):
    options = row[settings.options_column]
    style = settings.style
    fields = {}
    are_letters = row.get("option_is_abc") or []
    if row.get("abc_label") and sum(are_letters) >= len(options) - 1:
        # AI2D: the options are letters in the image.
        options = [option.upper() if is_letter else option
                   for option, is_letter in zip(options, are_letters, strict=True)]
        style = "ai2_diagram_no_letter"
        fields = {"letters": False}
    parts = [text_of(row.get("hint")), text_of(row["question"])]
    question = "\n".join(part for part in parts if part)

    def annotation():
        return multiple_choice(question, style, options, row[settings.right_column], **fields)

    head = {"image": media.image_of_cell(row["image"])}
    return head | meta_of(question_id=row.get("question_id")), [annotation]


def multi_image_multiple_choice(row, settings, media):
    """A list of questions, of their options, and of the numbers of the right ones."""
    questions = zip(row["mc_question"], row["choices"], row["correct_choice_idx"], strict=True)
    images = check_image_count([media.image_of_cell(cell) for cell in row["images"]])
    builders = []
    for question, options, right in questions:
        builders.append(partial(multiple_choice, question, "mantis_instruct_mc", options, right,
                                shuffle_options=True))
    return {"images": images}, builders


def multi_image_conversations(row, settings, media):
    """Mantis: <image> as a block in front, or inside the questions; all turns are one
    dialogue."""
    images = check_image_count([media.image_of_cell(cell) for cell in row["images"]])
    _, turns = parse_messages(row["conversation"])
    questions = [question.split("<image>") for question, _ in turns]
    n_placeholders = sum(len(parts) - 1 for parts in questions)
    in_replies = any("<image>" in reply for _, reply in turns)
    require(n_placeholders in (0, len(images)) and not in_replies,
            "placeholders that do not fit the images")
    first = questions[0]
    if len(first) > len(images) and not "".join(first[:-1]).strip():
        questions[0] = first[-1:]    # a block in front: the trainer puts images there anyway
    numbers = iter(range(len(images)))
    new_turns = []
    for parts, (_, reply) in zip(questions, turns, strict=True):
        if len(parts) == 1:
            question = parts[0].strip()
        else:
            question = [parts[0]]
            for part in parts[1:]:
                question += [{"image": next(numbers)}, part]
            question = [part for part in question if part]
        require(question, "empty question")
        new_turns.append((question, reply.strip()))
    return {"images": images}, [partial(dialogue, new_turns, "user_qa")]


def messages(row, settings, media):
    """Text alone, word for word. The filters are Molmo2's, by source and by the columns
    of its classified copy."""
    is_chat = not NOT_CHAT.search(row.get("source") or "")
    require(is_chat and row.get("category") not in ("code", "non-english"),
            "code, another language, puzzles, reasoning")
    n_tokens = row.get("first_message_qwen3_tokens") or 0
    require(n_tokens <= settings.first_tokens, "first message too long")
    system, turns = parse_messages(row["messages"])
    in_text = re.search(r"<\|\w+\|>", json.dumps([system, turns]))
    require(not (in_text or row.get("has_special_token")), "special tokens in the text")
    head = meta_of(id=row.get("id"), source=row.get("source"))
    return head, [partial(dialogue, turns, "text_sft", system)]
