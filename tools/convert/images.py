"""Layouts of image and text sets. A layout is a function that converts one row of a set.

in    row: the columns of the set
      job: the media folder, the flags, and the file that is read
      further arguments: constants of the set and flags of the command, see sets.py
out   head: a dict with the visual input and the weight of the record
      builders: functions without arguments, one per annotation. They are called later, so
      that one annotation that cannot be used does not skip the others.

    row       {"image_url": u, "label": "mug", "points": [{"x": 21.4, "y": 55.0}], "count": 1}
    head      {"image": {"path": sha256 of u, "url": u}}
    builders  [-> {"type": "point", "label": "mug", "coords": "percent", "count": 1,
                   "points": [{"x": 21.4, "y": 55.0}]}]

Three choices are made in training: the order of options, one of several transcripts, and
pointing or counting. Two things are not converted: segmentation masks, and the boxes that
Molmo2 draws into AI2D images.
"""

import json
import re
from contextlib import suppress
from functools import partial

from records.errors import Unreadable
from records.media import image_size
from tools.convert import make
from tools.convert.make import size_of, skip_unless, text_of, xy_points
from tools.convert.media import check_path

# sources of Tulu that Molmo2 skips: puzzles, long reasoning, answers about the model itself
NOT_CHAT = re.compile("puzzle_data|verifiable-reasoning|dino-hardcodes|hardcoded-olmo")
# numbers of ChartQA questions written by people and by a program (docs/molmo2.md 7.1)
N_HUMAN = 20901
N_MACHINE = 7398


def captions(row, job):
    """A caption, and any transcripts of the speech from which it was written."""
    builders = [partial(make.caption, row["caption"], "long_caption")]
    builders += [partial(make.caption, transcript, "transcript")
                 for transcript in row.get("transcripts") or []]
    return job.media.visual(row), builders


def label_points(row, job, coords, clip=False, method=None, counts=None):
    """One label per row. The points of PixMo-Count are in pixels of the original image, so the
    size is read from the downloaded file. Rows for evaluation have a count and no points."""
    head = job.media.visual(row)
    points = xy_points(row.get("points"))
    count = row.get("count")
    skip_unless(method in (None, row.get("collection_method")), "another collection_method")
    if count and not points:
        return head, [partial(make.count, count, row["label"])]
    size = None
    if coords == "pixel":
        # a missing file is counted later; training skips and counts a file that is not an image
        with suppress(Unreadable):
            size = size_of(*image_size(job.media.root / head["image"]["path"]))
    builder = partial(make.point, points, coords, row["label"], size=size, count=count,
                      clip=clip, max_points=make.MAX_POINTS, counts=counts)
    return head, [builder]


def clocks(row, job):
    """PixMo-Clocks: the text is a time, such as "7:57:39 AM", or a sentence that no time is shown.
    The set contains no images. The image of a row is found by the id of the row."""
    name = check_path(row["example_id"])
    text = row["text"].strip()
    reply = f"The time shown is {text}" if text[:1].isdigit() else text
    builder = partial(make.answer, "What time is being shown?", "clocks", reply)
    return {"image": job.media.find(name) or name}, [builder]


def questions(row, job):
    builder = partial(make.answer, row["question"], "user_qa", row["answer"])
    return job.media.visual(row), [builder]


def tagged_dialogues(row, job):
    """Parses "[USER] q1 [ASSISTANT] a1 [USER] q2 [ASSISTANT]". The last answer is in its own
    column."""
    before, *parts = re.split(r"\[(USER|ASSISTANT)\]", row["question"].strip())
    roles = parts[::2]
    *texts, after = parts[1::2]
    alternate = roles == ["USER", "ASSISTANT"] * (len(roles) // 2)
    skip_unless(alternate and not before and not after, "dialogue that does not parse")
    texts = [text_of(text) for text in [*texts, row["answer"]]]
    turns = list(zip(texts[::2], texts[1::2], strict=True))
    return job.media.visual(row), [partial(make.dialogue, turns, "user_qa")]


def pointing_questions(row, job):
    """CoSyn-point: the question is the prompt, and the name is the label in the answer."""

    def build(question, cell, name):
        return make.point(xy_points(cell), "percent", name, question, mode="point",
                          style="cosyn_point")

    questions = row["questions"]
    names = row.get("names") or [None] * len(questions)
    cells = zip(questions, row["answer_points"], names, strict=True)
    return job.media.visual(row), [partial(build, *each) for each in cells]


def qa_pairs(row, job, style=None, image_type=None):
    """Questions about one image, or about two to five images. qa_pairs has lists of questions,
    explanations and answers. Without a style, `image_type` gives the style of CoSyn."""
    if not style:
        style = "cosyn_document" if image_type == "document" else f"cosyn_{image_type}_exp"
    cells = row.get("images", row.get("image_urls"))
    head = job.media.visual(row) if "image" in row else job.media.images(cells)
    pairs = row["qa_pairs"]
    explanations = [None] * len(pairs["question"])
    if style.endswith("_exp") and pairs.get("explanation"):
        explanations = pairs["explanation"]

    def build(question, reply, explanation):
        if not text_of(explanation):
            return make.answer(question, style.removesuffix("_exp"), reply)
        return make.answer(question, style, reply, explanation=text_of(explanation))

    cells = zip(pairs["question"], pairs["answer"], explanations, strict=True)
    return head, [partial(build, *each) for each in cells]


def same_label(a, b):
    """Are two labels equal except for a plural ending?"""
    return a in (b, b + "s", b + "es") or b in (a + "s", a + "es")


def points_of_images(row, job):
    """Every image has a label that a person wrote, and a normalised label. Images whose normalised
    labels are equal except for a plural ending share one annotation, which lists the labels that
    people wrote."""
    head = job.media.images(row["image_urls"])
    labels = row.get("normalized_labels")
    labels = labels or [label.strip().lower() for label in row["labels"]]
    counts = row.get("counts") or [None] * len(labels)
    members = {}  # label -> image numbers
    for i, label in enumerate(labels):
        known = next((other for other in members if same_label(label, other)), label)
        members.setdefault(known, []).append(i)

    def build(label, numbers):
        points = [{"image": i, **point}
                  for i in numbers for point in xy_points(row["points"][i])]
        counted = [counts[i] for i in numbers]
        count = None if None in counted else sum(counted)
        annotation = make.point(points, "percent", label, count=count, clip=True)
        return annotation | {"label": [text_of(row["labels"][i]) or label for i in numbers]}

    return head, [partial(build, *each) for each in members.items()]


def messages(row, job, read, **more):
    """Ai2's copies have a row for each image, with a list of its questions.

    read, more: the layout of one question, and its arguments."""
    found = [read({**row, **message}, job, **more) for message in row["message_list"]]
    skip_unless(found, "no question")
    return found[0][0], [builder for _, builders in found for builder in builders]


def crowd_questions(row, job, style, column="answers"):
    """A question with the answers of several people. Answers are texts or structs."""
    answers = [entry["answer"] if isinstance(entry, dict) else entry
               for entry in row[column] or []]

    def build():
        texts = [text_of(text) for text in answers if text_of(text)]
        return {"type": "qa", "style": style, "question": text_of(row["question"]),
                "answers": texts}

    return job.media.visual(row), [build]


def chart_questions(row, job):
    """ChartQA. Questions that people wrote have a larger loss weight."""
    row = row | {"question": row["query"], "answers": row["label"]}
    head, builders = crowd_questions(row, job, "chart_qa")
    by_human = row["human_or_machine"] in (0, "human")
    weight = 2 * (N_HUMAN if by_human else N_MACHINE) / (N_HUMAN + N_MACHINE)
    return head | {"weight": weight}, builders


def image_choices(row, job, style, options="choices", right="correct_choice_idx"):
    """options, right: the columns of the options and of the index of the right option."""
    texts = row[options]
    fields = {}
    are_letters = row.get("option_is_abc") or []
    if row.get("abc_label") and sum(are_letters) >= len(texts) - 1:
        # AI2D: the options are letters that the image shows
        texts = [text.upper() if is_letter else text
                 for text, is_letter in zip(texts, are_letters, strict=True)]
        style = "ai2_diagram_no_letter"
        fields = {"letters": False}
    parts = [text_of(row.get("hint")), text_of(row["question"])]
    question = "\n".join(part for part in parts if part)
    builder = partial(make.choice, question, style, texts, row[right], **fields)
    return job.media.visual(row), [builder]


def image_set_choices(row, job):
    """Lists of questions, of their options, and of the indices of the right options."""
    rights = row["correct_choice_idx"]
    cells = zip(row["mc_question"], row["choices"], rights, strict=True)
    head = job.media.images(row["images"])

    def build(question, texts, right):
        return make.choice(question, "mantis_instruct_mc", texts, right, shuffle_options=True)

    return head, [partial(build, *each) for each in cells]


def conversations(row, job):
    """Mantis: every <image> is in front of the first question, or inside the questions. All turns
    become one dialogue."""
    head = job.media.images(row["images"])
    n_images = len(head["images"])
    _, turns = make.split_turns(row["conversation"])
    questions = [question.split("<image>") for question, _ in turns]
    n_placeholders = sum(len(parts) - 1 for parts in questions)
    in_replies = any("<image>" in reply for _, reply in turns)
    skip_unless(n_placeholders in (0, n_images) and not in_replies,
            "placeholders that do not fit the images")
    first = questions[0]
    if len(first) > n_images and not "".join(first[:-1]).strip():
        # remove placeholders in front, since training puts the images there
        questions[0] = first[-1:]
    numbers = iter(range(n_images))
    new_turns = []
    for parts, (_, reply) in zip(questions, turns, strict=True):
        pieces = [parts[0]]
        for part in parts[1:]:
            pieces += [{"image": next(numbers)}, part]
        question = [piece for piece in pieces if piece]
        if len(parts) == 1:
            question = parts[0].strip()
        skip_unless(question, "empty question")
        new_turns.append((question, reply.strip()))
    return head, [partial(make.dialogue, new_turns, "user_qa")]


def text_dialogue(row, job, first_tokens):
    """Text without images, unchanged. As in Molmo2, rows are filtered by their source and by the
    columns of the classified copy."""
    is_chat = not NOT_CHAT.search(row.get("source") or "")
    skip_unless(is_chat and row.get("category") not in ("code", "non-english"),
            "code, another language, puzzles, reasoning")
    n_tokens = row.get("first_message_qwen3_tokens") or 0
    skip_unless(n_tokens <= first_tokens, "first message too long")
    system, turns = make.split_turns(row["messages"])
    in_text = re.search(r"<\|\w+\|>", json.dumps([system, turns]))
    is_special = in_text or row.get("has_special_token")
    skip_unless(not is_special, "special tokens in the text")
    return {}, [partial(make.dialogue, turns, "text_sft", system)]
