"""Chats in other formats as records: ShareGPT and LLaVA ("conversations"), Hugging Face and OpenAI
("messages").

    {"image": "9.jpg", "conversations": [
        {"from": "human", "value": "<image>\\nWhat is it?"},
        {"from": "gpt", "value": "A tray."}]}
    {"image": "9.jpg", "annotations": [
        {"type": "qa", "turns": [{"question": "What is it?", "answer": "A tray."}]}]}

A placeholder is an <image> or <video> in a text of the user, or a part of typed content.
docs/records.md says what it stands for. The command checks the record.
"""

import re
from typing import NamedTuple

from records.check import require, short
from records.errors import plural
from records.reader import CHAT_KEYS

ROLES = {
    "human": "user", "user": "user", "system": "system",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant"}
# Fields that are not read, but would change what is trained: refused, the first ones only
# where the row has no image and no video.
MEDIA = "(image|img|picture|photo|video|vid|frame|media|file)s?"
UNSUPPORTED = "(audio|sound|speech|clip|pdf|depth|point_?cloud|tool)s?"
SUFFIX = "(_?(path|file|url|name)s?)?"
PLACEHOLDER = re.compile("(<image>|<video>)")
# Qwen-VL: <ref>cup</ref><box>(12,40),(300,420)</box>; InternVL: <box>[[12, 40, 300, 420]]</box>
BOX_TAG = r"(?:<ref>([^<]*)</ref>\s*)?<box>([\d\s,()\[\]]*)</box>[\s.,;]*"


class Placeholder(NamedTuple):
    kind: str  # image or video
    entry: object = None  # what it names; None: the next one of the row


class Turn(NamedTuple):
    role: str  # user, assistant or system
    parts: list  # texts and Placeholders
    weight: float = None  # of the loss, if given


def convert(row, split_turns=False):
    """A row -> a record; Unreadable if it cannot be one.

    split_turns: every question is an annotation of its own, which does not see the others:
    right for visual questions, wrong for conversations.
    """
    nothing = (None, "", [], [""], [None])
    row = {key: value for key, value in row.items() if value not in nothing}
    row, rejected = split_preference(row)
    has_media = {"image", "images", "video", "videos"} & set(row)
    for key in row:
        require(not re.fullmatch(UNSUPPORTED + SUFFIX, key, re.I), "the row",
                f"'{key}' cannot be trained on; take the field out")
        require(has_media or not re.fullmatch(MEDIA + SUFFIX, key, re.I), "the row",
                f"the field '{key}' is not read; did you mean 'image' or 'video'?")
    system, turns = read_chat(row)
    parts = [part for turn in turns for part in turn.parts]
    placeholders = [part for part in parts if isinstance(part, Placeholder)]
    media, references = collect_media(row, placeholders)
    questions = place_media([turn.parts for turn in turns[::2]], references)
    pairs = []
    boxes = []
    for question, answer in zip(questions, turns[1::2], strict=True):
        text = "".join(answer.parts)
        weight = {} if answer.weight is None else {"weight": answer.weight}
        if "<box>" in text:
            boxes.append(read_boxes(question, text) | weight)
        else:
            pairs.append({"question": question, "answer": text, **weight})
    qa = {"type": "qa"} | ({"system": system} if system else {})
    if "style" in row:
        qa["style"] = row["style"]
    groups = [[pair] for pair in pairs] if split_turns else [pairs] if pairs else []
    kept = {key: row[key] for key in ("subtitles", "weight") if key in row}
    if "id" in row:
        kept["id"] = str(row["id"])
    annotations = [{**qa, "turns": group} for group in groups] + boxes
    if rejected:
        require(len(pairs) == 1 and not boxes, "the row", "before 'chosen' stands one question")
        require(not system, "the row", "a pair is read without a system text; take it out")
        annotations = [{**qa, "type": "preference", "question": pairs[0]["question"],
                        "chosen": pairs[0]["answer"], "rejected": rejected}]
    return {**kept, **media, "annotations": annotations}


def split_preference(row):
    """A row with `chosen` and `rejected` -> the row with chosen as its last turn, the text
    of rejected; another row -> itself and None."""
    given = {"chosen", "rejected"} & set(row)
    key = next((key for key in CHAT_KEYS if key in row), None)
    if not given or not key:
        return row, None
    require(len(given) == 2, "the row", "'chosen' and 'rejected' go together")
    texts = []
    for side in ("chosen", "rejected"):
        turn = row[side][-1] if isinstance(row[side], list) else row[side]
        turn = turn if isinstance(turn, dict) else {"from": "gpt", "value": turn}
        turn = read_turn(turn, side)
        text = "".join(turn.parts)
        require(turn.role == "assistant" and text.strip(), side, "it ends without an answer")
        texts.append(text)
    rest = {name: value for name, value in row.items() if name not in given}
    return rest | {key: [*row[key], {"from": "gpt", "value": texts[0]}]}, texts[1]


def read_chat(row):
    """-> (system text, [Turn, ..] of user and assistant alternately)."""
    key = next((key for key in CHAT_KEYS if key in row), None)
    require(key, "the row", f"there are no turns in {' or '.join(CHAT_KEYS)}")
    turns = [read_turn(turn, f"{key}[{k}]") for k, turn in enumerate(row[key])]
    system = [row["system"]] if "system" in row else []
    if turns and turns[0].role == "system":
        system.append("".join(turns.pop(0).parts))
    for k, turn in enumerate(turns):
        require(turn.role == ("user", "assistant")[k % 2], key,
                f"turn {k} is of the {turn.role}: they alternate, the user first")
    # a last question may have no answer
    turns = turns[: len(turns) // 2 * 2]
    require(turns, key, "there is no question with an answer")
    texts = [text for text in system if text.strip()]
    require(not PLACEHOLDER.search("".join(texts)), "system",
            "it cannot contain an image or a video")
    return "\n".join(texts), turns


def read_turn(turn, place):
    name = turn.get("from", turn.get("role"))
    require(name in ROLES, place,
            f"the role {short(name)} is not one of {', '.join(ROLES)}")
    require(not turn.get("tool_calls") and not turn.get("function_call"), place,
            "tool calls cannot be trained on")
    parts = read_parts(turn.get("value", turn.get("content")), place)
    role = ROLES[name]
    require(role == "user" or all(isinstance(part, str) for part in parts), place,
            "only turns of the user can contain an image or a video")
    return Turn(role, parts, turn.get("loss_weight"))


def read_parts(content, place):
    """The content of a turn, a text or typed parts -> texts and Placeholders."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    require(isinstance(content, list), place,
            f"a turn is a text or a list of parts, not {short(content)}")
    parts = []
    for part in content:
        part = without_nulls(part)
        kind = str(part.get("type")).removesuffix("_url")
        require(kind in ("text", "image", "video"), place,
                f"a part is a text, an image or a video, not {short(part)}")
        require(kind != "text" or isinstance(part.get("text"), str), place,
                "a part of type text needs a 'text'")
        require("index" not in part, place,
                "the 'index' of a part is not read: images come in the order of the row's")
        if kind == "text":
            pieces = PLACEHOLDER.split(part["text"])
            parts += [Placeholder(piece[1:-1]) if k % 2 else piece
                      for k, piece in enumerate(pieces) if piece]
        else:
            parts.append(Placeholder(kind, named_media(part, kind)))
    return parts


def without_nulls(value):  # tables give every object the fields of all
    return {key: field for key, field in value.items() if field is not None}


def named_media(part, kind):
    """The path or object that a part names; None: the next one of the row."""
    names = (kind, f"{kind}_url", "path", "url")
    entry = next((part[key] for key in names if part.get(key)), None)
    if isinstance(entry, dict) and "url" in entry:
        entry = entry["url"]
    if entry and kind == "video":
        clip = {"start": part.get("video_start"), "end": part.get("video_end")}
        return read_video(entry, {"fps": part.get("fps"), **clip})
    return entry


def read_boxes(question, text):
    """A question and an answer of <box> tags in thousandths -> a box annotation."""
    tags = re.findall(BOX_TAG, text)
    labels = {label.strip() for label, _ in tags if label.strip()}
    numbers = []
    for _, inside in tags:
        numbers.append([int(n) / 1000 for n in re.findall(r"\d+", inside)])
    is_alone = not re.sub(BOX_TAG, "", text).strip() and isinstance(question, str)
    is_complete = len(labels) < 2 and all(n and len(n) % 4 == 0 for n in numbers)
    require(is_alone and is_complete, "an answer with <box>",
            "it must contain the boxes of one <ref> alone, as x1, y1, x2, y2 in thousandths")
    boxes = [{"box": n[k : k + 4]} for n in numbers for k in range(0, len(n), 4)]
    label = {"label": labels.pop()} if labels else {}
    return {"type": "box", "question": question, **label, "coords": "unit",
            "form": "xyxy", "boxes": boxes}


def collect_media(row, placeholders):
    """-> the field of media of a record; and what placeholders stand for, in their
    order: [{"image": 0}, ..] or [{"video": 0}]."""
    named = [part for part in placeholders if part.entry]
    images = listed(row, named, "image")
    videos = listed(row, named, "video")
    require(len(videos) < 2 and not (images and videos), "the row", "it must have images or "
            f"one video, not {plural(len(images), 'image')} and {plural(len(videos), 'video')}")
    references = [{"image": k} for k in range(len(images))]
    references += [{"video": 0}] * len(videos)
    n = len(placeholders)
    require(n in (0, len(references)), "the row",
            f"it has {plural(n, 'placeholder')}, but the number of its images or videos is "
            f"{len(references)}")
    require(len(named) in (0, n), "the row",
            "some of its images are named in the text, and others are not")
    if videos:
        return {"video": read_video(videos[0], row)}, references
    if len(images) == 1:
        return {"image": images[0]}, references
    return {"images": images} if images else {}, references


def listed(row, named, kind):
    """The images or videos of a row, under either name, and of its placeholders."""
    entries = [part.entry for part in named if part.kind == kind]
    for key in (kind, f"{kind}s"):
        value = row.get(key, [])
        entries += value if isinstance(value, list) else [value]
    return [without_nulls(entry) if isinstance(entry, dict) else entry for entry in entries]


def read_video(video, fields):
    """A path, an object or a list of frames -> the same with the clip of the fields."""
    if isinstance(video, list):
        video = {"frames": video, "fps": fields.get("fps")}
    clip = {key: fields[key] for key in ("start", "end") if fields.get(key) is not None}
    if not clip:
        return video
    return {**(video if isinstance(video, dict) else {"path": video}), **clip}


def place_media(prompts, references):
    """The user's turns as questions of a record."""
    following = iter(references)
    questions = []
    for k, parts in enumerate(prompts):
        parts = [part if isinstance(part, str) else next(following) for part in parts]
        if k == 0:
            parts = without_leading_media(parts, references)
        is_text = all(isinstance(part, str) for part in parts)
        questions.append("".join(parts) if is_text else parts)
    if references and isinstance(questions[0], str) and not questions[0].strip():
        questions[0] = references  # a prompt of nothing but images
    return questions


def without_leading_media(parts, references):
    """The first turn without placeholders that open it, and a single one that closes it.

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
