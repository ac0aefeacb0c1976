"""Rows of other projects as native records: ShareGPT and LLaVA ("conversations"), Hugging Face and
OpenAI ("messages").

    {"image": "9.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                         {"from": "gpt", "value": "A tray."}]}
    {"image": "9.jpg", "annotations": [{"type": "qa", "turns": [{"question": "What is it?",
                                                                "answer": "A tray."}]}]}

A placeholder is an <image> or <video> in a text of the user, or a part of typed content:

    as many as images      the k-th stands for image k; one for a video, of either name
    none                   the images or the video come first
    any other number       is refused: nothing is repeated and nothing is dropped

Placeholders that open the first turn, and a single one that closes it, are taken out with the
blanks around them, since the images come first anyway. Others keep their places, as {"image": k}.

Only the shape of the chat is judged here; the record is checked like a native one (check.py).
"""

import re
from typing import NamedTuple

from records.check import require, short

CHAT_KEYS = ("conversations", "messages")        # by which such a row is known
ROLES = {
    "human": "user", "user": "user", "system": "system",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant"}
# fields that would change what is trained, and are not read
MISSPELLED = {
    "img": "image", "image_path": "image", "image_file": "image", "picture": "image",
    "photo": "image", "imgs": "images", "image_paths": "images", "pictures": "images",
    "vid": "video", "video_path": "video", "video_file": "video"}
UNSUPPORTED = ("audio", "audios", "sound", "sounds", "speech", "clip", "chosen", "rejected")
PLACEHOLDER = re.compile("(<image>|<video>)")
# Qwen-VL: <ref>a cup</ref><box>(12,40),(300,420)</box>; InternVL: <box>[[12, 40, 300, 420]]</box>
BOX_TAG = r"(?:<ref>([^<]*)</ref>\s*)?<box>([\d\s,()\[\]]*)</box>[\s.,;]*"


class Placeholder(NamedTuple):
    kind: str                        # image or video
    entry: object = None             # the path or object that it names; None: the row names it


class Turn(NamedTuple):
    role: str                        # user, assistant or system
    parts: list                      # texts and Placeholders
    weight: float = None             # of the loss, if given


def convert(row, split_turns=False):
    """A row -> native record; ValueError if it cannot be one.

    split_turns: every question with its answer is an annotation of its own, which does not see the
    others: right for visual questions, wrong for conversations.
    """
    row = {key: value for key, value in row.items() if value not in (None, "", [], [""], [None])}
    refuse_unsupported(row)
    system, turns = read_chat(row)
    placeholders = [part for turn in turns for part in turn.parts if isinstance(part, Placeholder)]
    media, references = collect_media(row, placeholders)
    questions = place_media([turn.parts for turn in turns[::2]], references)
    pairs, boxes = [], []
    for question, answer in zip(questions, turns[1::2], strict=True):
        text = "".join(answer.parts)
        weight = {} if answer.weight is None else {"weight": answer.weight}
        if "<box>" in text:
            boxes.append(read_boxes(question, text) | weight)
        else:
            pairs.append({"question": question, "answer": text, **weight})
    qa = {"type": "qa", **{key: row[key] for key in ("style",) if key in row}}
    if system:
        qa["system"] = system
    groups = [[pair] for pair in pairs] if split_turns else [pairs] if pairs else []
    kept = {key: row[key] for key in ("subtitles", "weight") if key in row}
    if "id" in row:
        kept["id"] = str(row["id"])
    return {**kept, **media, "annotations": [*({**qa, "turns": group} for group in groups), *boxes]}


def refuse_unsupported(row):
    if not any(key in row for key in ("image", "images", "video", "videos")):
        for key, meant in MISSPELLED.items():
            require(key not in row, "the row",
                    f"the field '{key}' is not read; did you mean '{meant}'?")
    for key in UNSUPPORTED:
        require(key not in row, "the row", f"'{key}' cannot be trained on; take the field out")


# --------------------------------------------------------------------------------------------------
# the chat


def read_chat(row):
    """-> (system text, [Turn, ..] of user and assistant alternately)."""
    key = next((key for key in CHAT_KEYS if key in row), None)
    require(key, "the row", f"there are no turns in {' or '.join(CHAT_KEYS)}")
    turns = [read_turn(turn, f"{key}[{k}]") for k, turn in enumerate(row[key])]
    system = [row["system"]] if "system" in row else []
    if turns and turns[0].role == "system":
        system.append("".join(turns.pop(0).parts))
    for k, turn in enumerate(turns):
        expected = ("user", "assistant")[k % 2]
        require(turn.role == expected, key, f"turn {k} is of the {turn.role}, not of the "
                f"{expected}: turns alternate, and the user is first")
    turns = turns[: len(turns) // 2 * 2]             # without a last question that has no answer
    require(turns, key, "there is no question with an answer")
    texts = [text for text in system if text.strip()]
    require(not PLACEHOLDER.search("".join(texts)), "system", "it cannot hold an image or a video")
    return "\n".join(texts), turns


def read_turn(turn, place):
    name = turn.get("from", turn.get("role"))
    require(name in ROLES, place, f"the role {short(name)} is not one of {', '.join(ROLES)}")
    require(not turn.get("tool_calls") and not turn.get("function_call"), place,
            "tool calls cannot be trained on")
    parts = read_parts(turn.get("value", turn.get("content")), place)
    require(ROLES[name] == "user" or all(isinstance(part, str) for part in parts), place,
            "only turns of the user can hold an image or a video")
    return Turn(ROLES[name], parts, turn.get("loss_weight"))


def read_parts(content, place):
    """The content of a turn, a text or typed parts -> texts and Placeholders."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    require(isinstance(content, list), place,
            f"a turn is a text or a list of parts, not {short(content)}")
    parts = []
    for part in content:
        part = without_nulls(part)                   # tables give every part the fields of all
        kind = str(part.get("type")).removesuffix("_url")
        require(kind in ("text", "image", "video"), place,
                f"a part is a text, an image or a video, not {short(part)}")
        require("index" not in part, place, "the 'index' of a part is not read: images stand in "
                "the order of the row's images")
        if kind == "text":
            pieces = PLACEHOLDER.split(part["text"])
            parts += [Placeholder(piece[1:-1]) if k % 2 else piece
                      for k, piece in enumerate(pieces) if piece]
        else:
            parts.append(Placeholder(kind, named_media(part, kind)))
    return parts


def without_nulls(value):
    return {key: field for key, field in value.items() if field is not None}


def named_media(part, kind):
    """The path or object that a part names; None: the next one of the row."""
    names = [key for key in (kind, f"{kind}_url", "path", "url") if part.get(key)]
    entry = part[names[0]] if names else None
    if isinstance(entry, dict) and "url" in entry:
        entry = entry["url"]
    if entry and kind == "video":
        clip = {"fps": "fps", "start": "video_start", "end": "video_end"}
        return read_video(entry, {name: part.get(key) for name, key in clip.items()})
    return entry


def read_boxes(question, text):
    """A question and an answer made of <box> tags, in thousandths -> a box annotation."""
    tags = re.findall(BOX_TAG, text)
    labels = {label.strip() for label, _ in tags if label.strip()}
    numbers = [[int(n) / 1000 for n in re.findall(r"\d+", inside)] for _, inside in tags]
    require(not re.sub(BOX_TAG, "", text).strip() and len(labels) < 2 and isinstance(question, str)
            and all(n and len(n) % 4 == 0 for n in numbers), "an answer with <box>",
            "it must hold the boxes of one <ref> and nothing else, as x1, y1, x2, y2 in "
            "thousandths of the image's sides")
    boxes = [{"box": n[k : k + 4]} for n in numbers for k in range(0, len(n), 4)]
    label = {"label": labels.pop()} if labels else {}
    return {"type": "box", "question": question, **label, "coords": "unit", "form": "xyxy",
            "boxes": boxes}


# --------------------------------------------------------------------------------------------------
# images and videos


def collect_media(row, placeholders):
    """-> the field image, images or video of a native record; and what the placeholders stand for
    one after the other: [{"image": 0}, ..] or [{"video": 0}]."""
    named = [part for part in placeholders if part.entry]
    images = listed(row, "image") + [part.entry for part in named if part.kind == "image"]
    videos = listed(row, "video") + [part.entry for part in named if part.kind == "video"]
    require(len(videos) < 2 and not (images and videos), "the row", "it must have images or one "
            f"video, not {len(images)} images and {len(videos)} videos")
    references = [{"video": 0}] if videos else [{"image": k} for k in range(len(images))]
    require(len(placeholders) in (0, len(references)), "the row",
            f"it has {len(placeholders)} placeholders for {len(references)} images or videos")
    require(len(named) in (0, len(placeholders)), "the row",
            "some of its images are named in the text, and others are not")
    if videos:
        return {"video": read_video(videos[0], row)}, references
    if len(images) == 1:
        return {"image": images[0]}, references
    return {"images": images} if images else {}, references


def listed(row, kind):
    """The images or videos of a row: a path, an object or a list of them, in the singular or the
    plural."""
    values = [row[key] for key in (kind, f"{kind}s") if key in row]
    entries = [entry for value in values
               for entry in (value if isinstance(value, list) else [value])]
    return [without_nulls(entry) if isinstance(entry, dict) else entry for entry in entries]


def read_video(video, fields):
    """A path, an object or a list of frames -> the same with the clip that the fields name."""
    if isinstance(video, list):
        video = {"frames": video, "fps": fields.get("fps")}
    clip = {key: fields[key] for key in ("start", "end") if fields.get(key) is not None}
    if not clip:
        return video
    return {**(video if isinstance(video, dict) else {"path": video}), **clip}


def place_media(prompts, references):
    """The user's turns as questions of a native record, texts or lists of texts and references."""
    following = iter(references)
    questions = []
    for k, parts in enumerate(prompts):
        parts = [part if isinstance(part, str) else next(following) for part in parts]
        if k == 0:
            parts = without_leading_media(parts, references)
        is_text = all(isinstance(part, str) for part in parts)
        questions.append("".join(parts) if is_text else parts)
    if references and isinstance(questions[0], str) and not questions[0].strip():
        questions[0] = references                    # a prompt of nothing but images
    return questions


def without_leading_media(parts, references):
    """The first turn without placeholders that only say that the images come first.

        <image> <image> Which is alive?      Which is alive?
        What is it? <image>                  What is it?
        Is <image> a cat?                    as it stands
    """
    places = [k for k, part in enumerate(parts) if not isinstance(part, str)]
    if not places or len(places) < len(references):
        return parts
    before = "".join(part for part in parts[: places[-1]] if isinstance(part, str))
    after = "".join(parts[places[-1] + 1 :])
    if not before.strip():
        return [after.lstrip()]
    if len(places) == 1 and not after.strip():
        return [before.rstrip()]
    return parts
