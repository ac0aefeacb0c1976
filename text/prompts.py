"""Turns annotations into questions of the user and answers of the model (paper: data).

in    an annotation of a record (docs/records.md), the record, the sizes of its images or its video
out   [(question, answer), ..] for tokenizer.chat

    stage 1        long_caption 65:                  pointing: cat        text_sft 7: Name a prime.
    stages 2, 3    Describe this image in detail.    Where is the cat?    vqa2: What is it?

In stage 1 every prompt starts with its style. In later stages only prompts of benchmarks start with
a style, and other prompts are plain sentences (docs/molmo2.md 4.3). Visual tokens come before the
prompt.

Every random choice uses `rng`, a NumPy Generator or RandomState. In evaluation rng is None: nothing
is random, and the first template is used.
"""

import re

from text import choices, styles
from text.points import (
    TrackFrames,
    format_points,
    format_tracks,
    frame_time,
    points_on_frames,
    seconds,
    track_frames,
    track_rate,
    unit,
)
from text.styles import chance, medium, parts_of, pick

# "How many metres" asks for an amount: nobody answers it by pointing at each metre.
AMOUNT = (
    r"years|months|weeks|days|hours|minutes|((tera|giga|mega|deci|kilo|micro|centi|milli|nano|pico"
    r"|deca)?meters|metres)|acres|leagues|fathoms|hectares|(nautical|square|sq) miles|miles"
    r"|((square|sq) )?(inches|ft)|(square|sq) feet|((square|passing) )?yards|dollars|cents|pounds"
    r"|euros|seed|mph|kph|more|fewer|less|likes|cubic|gallons|quarts|(fluid )?ounces|pints|weight"
    r"|tons|(different )?ways|degrees|calories|hertz|horsepower|psi|atmospheres"
    r"|[a-z]*(seconds|liters|grams|bytes|watts)"
)
TOTAL = r"(total count|count|total number|total amount|total|number|num|amount)"
# The questions that the official detector finds (docs/molmo2.md 4.3).
COUNTING = re.compile(
    rf"(?!approximately).*\b(how ?many (?!{AMOUNT})"
    r"|(?<!do not )(count|tally) (all|every|each|the) |(there are|a total of) _{3,4}"
    rf"|(what|(what's|what (is|was|were)|states?|indicates?) the( exact| precise)?) {TOTAL} of "
    rf"(?!{AMOUNT}|money|the))\b",
    re.IGNORECASE | re.DOTALL,
)
SYSTEM = "System: {}\n"  # a system text, in front of the first question (docs/molmo2.md 4.1)


def turns_of(annotation, record, sizes, config, rng, times=None):
    """One annotation -> [(question, answer), ..], one for each turn. The list is empty if a track
    has no visible point on the input frames.

    sizes: (width, height) in pixels of every image, or of the video. config: a data.DataConfig.
    times: of the input frames, in seconds of the clip. None means all annotated times.
    """
    kind = annotation["type"]
    if kind == "text":
        return [(annotation.get("prompt", ""), annotation["text"])]
    if kind == "caption":
        return [caption_turn(annotation, record, config, rng)]

    def turn_of(part):
        if part["type"] == "qa":
            return qa_turn(part, annotation["style"], record, config, rng)
        if part["type"] == "track":
            return track_turn(part, record, sizes[0], config, rng, times)
        assert part["type"] in ("point", "count"), f"no words for a {part['type']}"
        return point_turn(part, record, sizes, config, rng, times)

    turns = [turn_of(part) for part in annotation.get("turns", [annotation])]
    if None in turns:
        return []
    return open_conversation(annotation, turns, config, rng) if kind == "qa" else turns


def kinds_and_weights(annotation):
    """-> [(type, loss weight), ..], one for each turn. A turn of weight 0 is only context."""
    turns = annotation.get("turns", [{"type": annotation["type"], "weight": 1}])
    return [(turn["type"], turn["weight"]) for turn in turns]


def has_points(record):
    """Does a record have an annotation of type point or count?"""
    return any(part["type"] in ("point", "count") for _, part in parts_of(record))


def most_points(annotation):
    """The largest number of points in one answer. Tracks have no such limit."""
    turns = annotation.get("turns", [annotation])
    return max(len(turn.get("points", ())) * (turn["type"] != "track") for turn in turns)


def annotations_of(record, config, rng):
    """The annotations of a record. If all annotations of a video are points, they become one
    conversation with probability config.multi_turn_share (paper: 3.2)."""
    annotations = record["annotations"]
    usable = all(annotation["type"] == "point" and most_points(annotation) <= config.max_points
                 for annotation in annotations)
    if (config.multi_turn_share and len(annotations) > 1 and usable
            and medium(record) == "video" and chance(rng, config.multi_turn_share)):
        turns = [annotations[k] for k in rng.permutation(len(annotations))]
        return [{"type": "qa", "style": "user_qa", "weight": 1, "turns": turns}]
    return annotations


def clock(time):
    """75.5 -> "00:01:15.5" """
    tenths = round(time * 10)
    return f"{tenths // 36000:02d}:{tenths // 600 % 60:02d}:{tenths % 600 / 10:04.1f}"


def draw_template(task, record, rng):
    """A random template. If needed, "this image" becomes "this video" or "these images"."""
    text = pick(rng, styles.TEMPLATES[task])
    kind = medium(record)
    if kind == "video":
        return re.sub("image|picture|photo", "video", text)
    if kind == "images":
        text = re.sub("(the|this) (image|picture|photo)", r"\1 \2s", text)
        return text.replace("this ", "these ")
    return text


def add_style(style, text, config, rng, length=None, plain=False):
    """Puts the style in front of the question, if this stage uses it. text may be "".

    Stage 1: `{style} {n}: {text}`. n is a hint for the length of the answer: (its `length` in
    characters + noise) / 15. 10 % of the prompts have no n. For pointing and counting, length is
    None and there is no n.
    Later stages: `{style}: {text}`, or only the text if the style is unnamed or `plain` is set.
    """
    hint = ""
    if not config.prefix_all:
        if text and (plain or styles.UNNAMED_STYLE.fullmatch(style)):
            return text
    elif length is not None and rng is None:
        hint = f" {config.length_hint}" if config.length_hint else ""
    elif length is not None and rng.random() < 0.9:
        hint = f" {max(length + int(rng.normal(0, 25)), 0) // 15}"
    return f"{style}{hint}: {text}" if text else f"{style}{hint}:"


def caption_turn(annotation, record, config, rng):
    style = annotation["style"]
    part = styles.caption_part(annotation)
    task = part or styles.TASK_OF_STYLE.get(style)
    times = {}
    for key in ("start", "end", "at"):
        if key in annotation:
            times[key] = seconds(annotation[key], record)
    text = ""
    if config.prefix_all:
        words = [annotation.get("object"), " to ".join(map(str, times.values()))]
        text = ", ".join(filter(None, words))
    elif task in styles.CAPTION_TASKS:
        write_time = clock if times and chance(rng, 0.5) else str
        everything = "what happens" if part == "clip" else "what is to be seen"
        values = {key: write_time(time) for key, time in times.items()}
        values["what"] = annotation.get("object", everything)
        text = draw_template(task, record, rng).format(**values)
    answer = annotation["text"]
    return add_style(style, text, config, rng, len(answer)), answer


def open_conversation(annotation, turns, config, rng):
    """Puts the style and the system text in front of the first question of a conversation.
    The length hint is for the last answer. A question for points already has its own style."""
    style = annotation["style"]
    first = annotation["turns"][0]
    question, answer = turns[0]
    if "system" in annotation:
        question = SYSTEM.format(annotation["system"]) + question
    if first["type"] == "qa":
        plain = "options" in first or bool(styles.MULTIPLE_CHOICE_STYLE.fullmatch(style))
        last_answer = turns[-1][1]
        question = add_style(style, question, config, rng, len(last_answer), plain)
    return [(question, answer), *turns[1:]]


def qa_turn(turn, style, record, config, rng):
    """A turn of type qa -> (question, answer), without the style."""
    question = question_text(turn["question"])
    randomize = rng is not None and not config.prefix_all
    if style.endswith("_exp"):
        question = f"{question} {styles.REASONS}"
    if "options" in turn:
        question, answer = choices.lay_out(question, turn, randomize, rng)
    else:
        answers = turn["answers"] if "answers" in turn else [turn["answer"]]
        counts = {text: answers.count(text) for text in answers}
        most = max(counts.values())
        answer = pick(rng, [text for text, n in counts.items() if n == most])
        on_images = style in ("user_qa", "correction_qa") and medium(record) in ("image", "images")
        if randomize and on_images and COUNTING.match(question):
            # this sentence distinguishes it from questions that are answered with points
            question = pick(rng, styles.TEMPLATES["no_points"]) + question
        elif randomize and styles.TASK_OF_STYLE.get(style) == "short_answer":
            question = draw_template("short_answer", record, rng).format(question=question)
    if "explanation" in turn:
        answer = f"{turn['explanation']} Answer: {answer}"
    return question, answer


def question_text(question):
    """A question, a text or a list of texts and references, as one text.

    {"image": k} becomes "Image k+1", the text before the visual tokens of this image. {"video": 0}
    is removed at the start of the question, since the video comes there. Elsewhere it becomes
    "the video".
    """
    if isinstance(question, str):
        return question
    # NUL marks both ends of a reference. Between two letters it becomes a space.
    parts = []
    for part in question:
        if isinstance(part, str):
            parts.append(part)
        elif "video" in part:
            parts.append("\0the video\0")
        else:
            parts.append(f"\0Image {part['image'] + 1}\0")
    text = re.sub(r"^\0the video\0\s*", "", "".join(parts))
    return re.sub(r"(?<=\w)\0+(?=\w)", " ", text).replace("\0", "")


def point_turn(annotation, record, sizes, config, rng, times):
    """A point or count annotation (docs/molmo2.md 5.2). sizes: of all images."""
    mode = pick(rng, annotation["mode"])
    style = annotation.get("style") or styles.STYLES[medium(record)][mode]
    known = styles.TASK_OF_STYLE.get(style) in styles.POINT_TASKS
    question = annotation.get("question")
    label = pick(rng, annotation["labels"]) if "label" in annotation else question
    if "label" in annotation and medium(record) == "image":
        label = label.lower()
    if mode == "point" and len(annotation["mode"]) > 1 and "label" in annotation:
        question = None  # the user's question is for the modes that state a number
    text = question or label
    images = range(len(sizes))
    if known and not config.prefix_all and not question:
        text = draw_template(mode, record, rng).format(label=label)
        if medium(record) == "images" and annotation["type"] == "point":
            text, images = select_images(text, len(sizes), mode, rng)
    question = add_style(style, text, config, rng)
    if annotation["type"] == "count":
        return question, str(annotation["count"]) if annotation["count"] else "There are none."

    groups = {}
    for point in annotation["points"]:
        image = point.get("image", 0)
        if image in images:
            frame = image + 1 if "t" not in point else frame_time(point["t"], record, times)
            groups.setdefault(frame, []).append(unit(point, sizes[image]))
    return question, format_points(sorted(groups.items()), label, mode, config.separator)


def select_images(text, n_images, mode, rng):
    """-> (text, images). 50 % of the questions are about some of the images, and name them. The
    others say "all images", but half of those that require no number do not say it. The answer has
    only the points of the chosen images (docs/molmo2.md 5.2)."""
    images = range(n_images)
    if chance(rng, 0.5):
        order = rng.permutation(n_images)
        n_selected = 1 + int(rng.choice(n_images))
        images = sorted(int(k) for k in order[:n_selected])
        names = ", ".join(f"image_{k + 1}" for k in images)
    elif mode == "point" and chance(rng, 0.5):
        return text, images
    else:
        names = "all images"
    template = pick(rng, styles.TEMPLATES["image_selection"])
    question = re.sub(r"(?<![.?!])$", ".", text)  # another sentence may follow
    return template.format(question=question, images=names), images


def track_turn(annotation, record, size, config, rng, times):
    """A track annotation (docs/molmo2.md 5.3). size: (width, height) of the video.

    A track with mode from_point starts at the query. In 20 % it starts at another point of the
    object on an input frame, but not at the last one. Returns None if the annotation has points,
    but the answer would have none.
    """
    style, mode = annotation["style"], annotation["mode"]
    label = annotation["label"]
    text = annotation.get("question", label)
    query = None
    start_tag = ""
    if mode == "from_point":
        query = annotation["query"]
        shown = points_on_frames(annotation, record, times)
        track = [point for _, point in shown if point["id"] == query["id"]]
        if chance(rng, 0.2) and len(track) > 1:
            query = pick(rng, track[:-1])
        time = TrackFrames(annotation, record, times).text_time(query["t"])
        start = (time, [unit(query, size)])
        start_tag = format_points([start], label, separator=config.separator)
        text = f"{annotation['question']} {start_tag}" if "question" in annotation else start_tag
    known = styles.TASK_OF_STYLE.get(style) in styles.TRACK_TASKS
    if known and not config.prefix_all and "question" not in annotation:
        rate = track_rate(annotation)
        # in half of the prompts, 2 frames per second is not named (docs/molmo2.md 5.3)
        unnamed = rate is None or (rate == 2 and mode != "from_point" and chance(rng, 0.5))
        suffix = "" if unnamed else pick(rng, styles.TEMPLATES["rate_suffix"]).format(fps=rate)
        template = draw_template(mode, record, rng)
        text = template.format(label=label, rate=suffix, tag=start_tag)
    question = add_style(style, text, config, rng)
    if not annotation["points"]:
        return question, "There are none."
    frames = track_frames(annotation, record, size, times, query)
    if not frames:
        return None
    return question, format_tracks(frames.items(), label, config.separator)
