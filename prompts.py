"""What the user asks and what the model shall answer (spec 4.3): an annotation as turns of a chat."""

import numpy as np

from points import format_points, unit_points

# styles whose prompt is plain language from stage 2 on; every other style is named in front: "vqa2: What ..."
DEMO = {"pointing", "point_count", "cosyn_point", "user_qa", "long_caption", "short_caption", "correction_qa", "text_sft", "count"}
TEMPLATES = {
    "long_caption": ("Describe this image in detail.", "What does the picture show? Tell me everything.",
                     "Write a long caption for this image."),
    "short_caption": ("Describe this image briefly.", "Write a short caption for this image."),
    "pointing": ("Point to {}.", "Where are the {}?", "Show me every {}.", "Find {} in the image."),
    "point_count": ("How many {} are there? Point to them.", "Count the {} by pointing.", "Point to each {} and count."),
    "count": ("How many {} are there? Answer with a number.", "Only the number: how many {}?"),
}


def style_of(a, record, config, rng):
    if "style" in a:
        return a["style"]
    if a["type"] == "point":
        mode = a.get("mode") or ("point", "point_count")[int(rng.integers(2))]
        return "pointing" if mode == "point" else "point_count"
    return {"caption": "long_caption", "count": "count", "text": "text"}.get(a["type"]) or ("user_qa" if "image" in record else "text_sft")


def prompt(style, text, answer, config, rng=None):
    """The user's words (spec 4.3). text: label or question, "" for a caption; answer None and rng None when asking.

    Stage 1: `{style} {n}:` with n ~ a fifteenth of the answer's characters, noisy, left out in 10 %; pointing and
    counting have no n. Stages 2 and 3: natural templates for demo styles, `{style}:` for the rest.
    """
    if not config.prefix_all:
        if style in TEMPLATES:
            choices = TEMPLATES[style]
            return choices[int(rng.integers(len(choices))) if rng is not None else 0].format(text)
        return text if style in DEMO else f"{style}: {text}".rstrip()
    if style in ("pointing", "point_count", "cosyn_point", "count"):
        return f"{style}: {text}"
    if rng is None:
        hint = f" {config.length_hint}" if config.length_hint else ""
    else:
        n = max(len(answer) + int(rng.normal(0, 25)), 0) // 15
        hint = f" {n}" if rng.random() < 0.9 else ""
    return f"{style}{hint}: {text}".rstrip()


def answer_of(turn, rng):
    """(question, answer) of one turn: several people's answers, options and explanations (spec 4.3)."""
    question = turn["question"]
    if "options" in turn:
        order = rng.permutation(len(turn["options"])) if turn.get("shuffle_options") else range(len(turn["options"]))
        options = [turn["options"][i] for i in order]
        right = list(order).index(turn["answer_idx"])
        if turn.get("letters", True):
            options = [f"{chr(65 + i)}. {option}" for i, option in enumerate(options)]
        question = "\n".join([question, "Only return the correct answer option.", *options])
        answer = options[right]
    elif "answers" in turn:
        counts = {a: turn["answers"].count(a) for a in turn["answers"]}
        most = [a for a, n in counts.items() if n == max(counts.values())]
        answer = most[int(rng.integers(len(most)))]
    else:
        answer = turn["answer"]
    return question, f"{turn['explanation']} Answer: {answer}" if "explanation" in turn else answer


def turns_of(a, record, size, config, rng):
    """One annotation -> [(question, answer), ..]; size: (width, height) of the image, or None."""
    kind, style = a["type"], style_of(a, record, config, rng)
    if kind == "text":
        return [(a.get("prompt", ""), a["text"])]
    if kind == "caption":
        return [(prompt(style, "", a["text"], config, rng), a["text"])]
    if kind == "count":
        answer = str(a["count"]) if a["count"] else "There are none."
        return [(a["question"] if "question" in a else prompt(style, a["label"].lower(), answer, config, rng), answer)]
    if kind == "point":
        label = a.get("label", a.get("question"))
        mode = a.get("mode") or ("point_count" if style == "point_count" else "point")
        answer = format_points([(1, unit_points(a, size))], label.lower() if "label" in a else label, mode, config.separator)
        return [(a["question"] if "question" in a else prompt(style, label.lower(), answer, config, rng), answer)]
    turns = [answer_of(turn, rng) for turn in a.get("turns", [a])]
    if "system" in a:
        turns[0] = (f"System: {a['system']}\n{turns[0][0]}", turns[0][1])
    return [(prompt(style, turns[0][0], turns[-1][1], config, rng), turns[0][1]), *turns[1:]]


def question_of(a, record, config):
    """What the user says to get an annotation's answer: no randomness, the length hint of config (spec 4.3)."""
    kind = a["type"]
    plain = {"caption": "long_caption", "point": "pointing", "count": "count"}
    style = a.get("style") or plain.get(kind, "user_qa" if "image" in record else "text_sft")
    if kind == "caption":
        return prompt(style, "", None, config)
    if kind in ("point", "count"):
        style = "point_count" if a.get("mode", "point") != "point" and "style" not in a else style
        return a.get("question") or prompt(style, a["label"].lower(), None, config)
    if kind == "text":
        return a.get("prompt", "")
    question = answer_of({**a.get("turns", [a])[0], "shuffle_options": False}, np.random.default_rng(0))[0]
    return prompt(style, f"System: {a['system']}\n{question}" if "system" in a else question, None, config)
