"""Rows of other projects as native records: LLaVA (ShareGPT), Hugging Face chats, Mantis, Cauldron.

in    a row of a .json or .jsonl file, a dict
out   a native record with one "qa" annotation, or one per question (split_turns); and findings

    {"image": "9.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                         {"from": "gpt", "value": "A tray."}]}
    {"image": "9.jpg", "annotations": [{"type": "qa", "turns": [{"question": "What is it?",
                                                                "answer": "A tray."}]}]}

Only the shape of the chat is judged here. Paths, times, weights and blank texts are judged in
records/check.py, as in native records. Where images stand in the text: records/placeholders.py.
An answer of <box> tags becomes a "box" annotation (records/boxes.py). Audio, masks, tools and pairs
of a better and a worse answer are refused.
"""

import difflib
from typing import NamedTuple

from records.boxes import from_text
from records.errors import Finding, InvalidRecord, short_repr
from records.placeholders import (
    PLACEHOLDER,
    Placeholder,
    collect_media,
    listed,
    place_media,
    whole_number,
)

# the list key of a record: native, ShareGPT / LLaVA, Hugging Face, Mantis, Cauldron
LIST_KEYS = ("annotations", "conversations", "messages", "conversation", "texts")
ROLES = {"human": "user", "user": "user",
         "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
         "system": "system"}
MISSPELLED = {
    "img": "image", "image_path": "image", "image_file": "image", "picture": "image",
    "photo": "image", "imgs": "images", "image_paths": "images", "pictures": "images",
    "vid": "video", "video_path": "video", "video_file": "video", "clip_path": "video"}
UNSUPPORTED = ("audio", "audios", "sound", "sounds", "speech", "point_cloud", "point_clouds",
               "depth", "depths", "pdf", "pdfs")
COCO_HINT = ("it looks like COCO annotations (one object with images, annotations and categories); "
             "convert them to records with python -m tools.prepare coco")


class Turn(NamedTuple):
    role: str                        # user or assistant
    parts: list                      # texts and Placeholders
    weight: float                    # of the loss; None if not given
    place: str                       # in the row, for messages


def list_key(record):
    """The one list key that tells which form a record has, of LIST_KEYS; else InvalidRecord E06."""
    if {"images", "annotations", "categories"} <= set(record):
        raise InvalidRecord("E06", "this is not a record", "", COCO_HINT)
    found = [key for key in LIST_KEYS if record.get(key) is not None]
    found = found or [key for key in LIST_KEYS if key in record]
    known = ", ".join(LIST_KEYS)
    if len(found) > 1:
        message = f"the record has both '{found[0]}' and '{found[1]}'"
        raise InvalidRecord("E06", message, "", f"a record has one of {known}")
    if not found:
        fields = [short_repr(key)[1:-1] for key in list(record)[:12]]
        message = ("'annotations' is missing and the form of the record is not known: "
                   f"its fields are {', '.join(fields) or 'none'}")
        close = difflib.get_close_matches("annotations", fields, 1, 0.8)
        hint = f"a known form has one of {known}"
        if close:
            hint = f"did you mean 'annotations' by '{close[0]}'?"
        raise InvalidRecord("E06", message, "", hint)
    return found[0]


def convert(record, split_turns=False, path_prefix_field=None):
    """A row -> (native record, [Finding, ..]); InvalidRecord if it cannot be converted.

    split_turns: every question with its answer is an annotation of its own, which does not see the
    others. path_prefix_field: a field of the row with the folder of its media (LLaVA-Video:
    data_source). A last question without an answer is left out with a finding S01; if nothing
    remains, the record is None.
    """
    key = list_key(record)
    row = {k: v for k, v in record.items() if v is not None}     # tables fill empty cells with null
    refuse_unsupported(row)
    system, turns = read_chat(row, key)
    findings = []
    if len(turns) % 2:
        turns = turns[:-1]
        if not turns:
            return None, [Finding("S01", "the last question has no answer")]
        findings.append(Finding("S01", "the last question has no answer; it is left out"))
    prompts = [turn.parts for turn in turns[::2]]
    placeholders = []
    for parts in prompts:
        placeholders += [part for part in parts if isinstance(part, Placeholder)]
    images, video, targets = collect_media(row, placeholders, path_prefix_field)
    questions = place_media(prompts, images, video, targets)

    pairs, boxes = [], []
    for question, answer in zip(questions, turns[1::2], strict=True):
        pair = {"question": question, "answer": "".join(answer.parts)}
        if "<box>" in pair["answer"]:
            pair = from_text(question, pair["answer"], answer.place)
            boxes.append(pair)
        else:
            pairs.append(pair)
        if answer.weight is not None:
            pair["weight"] = answer.weight
    native = native_record(row, key, images, video, system, pairs, split_turns)
    native["annotations"] += boxes
    return native, findings


def native_record(row, key, images, video, system, pairs, split_turns):
    """Puts the parts together; fields of the row that a native record does not have go to meta."""
    native = {}
    row_id = row.get("id")
    if whole_number(row_id) or (isinstance(row_id, str) and row_id):
        native["id"] = str(row_id)
    if video:
        native["video"] = video["path"] if list(video) == ["path"] else video
    elif images:
        native |= {"image": images[0]} if len(images) == 1 else {"images": images}
    native |= {name: row[name] for name in ("subtitles", "weight") if name in row}

    annotation = {"type": "qa"}
    if "style" in row:
        annotation["style"] = row["style"]
    if system:
        annotation["system"] = system
    groups = [[pair] for pair in pairs] if split_turns else [pairs] if pairs else []
    native["annotations"] = [{**annotation, "turns": group} for group in groups]

    used = {key, "id", "style", "system", "subtitles", "weight"}
    used |= {"image", "images", "video", "videos"}
    if video:
        used |= {"start", "end", "clip", "fps"}
    meta = {name: value for name, value in row.items() if name not in used}
    if isinstance(meta.get("meta"), dict):
        meta |= meta.pop("meta")
    if meta:
        native["meta"] = meta
    return native


def refuse_unsupported(row):
    """Other fields of a row may be anything, but a misspelled image would be trained on blindly."""
    media = any(row.get(name) for name in ("image", "images", "video", "videos"))
    for key, name in MISSPELLED.items():
        if isinstance(row.get(key), (str, list)) and row[key] and not media:
            raise InvalidRecord("E16", f"the field '{key}' is not read", "",
                                f"did you mean '{name}'?")
    for key in UNSUPPORTED:
        if listed(row.get(key)):
            raise InvalidRecord("E16", f"'{key}' is not an input of Molmo2", "",
                                "only images, or one video, and text")
    if "chosen" in row and "rejected" in row:
        raise InvalidRecord("E07", "a pair of a better and a worse answer cannot be trained on",
                            "chosen, rejected")


# --------------------------------------------------------------------------------------------------
# the chat


def read_chat(row, key):
    """The chat of a row -> (system text, [Turn, ..] of user and assistant alternately)."""
    system = row.get("system", "")
    turns = read_turns(row, key)
    if not isinstance(system, str):
        raise InvalidRecord("E07", f"a system text must be a text, not {short_repr(system)}",
                            "system")
    if PLACEHOLDER.search(system):
        raise InvalidRecord("E24", "a system text cannot hold a placeholder of an image or a video",
                            "system")
    system_texts = [system]
    if turns and turns[0].role == "system":
        system_texts.append("".join(turns.pop(0).parts))
    if not turns:
        raise InvalidRecord("E25", f"'{key}' has no turns")
    for k, turn in enumerate(turns):
        expected = ("user", "assistant")[k % 2]
        if turn.role != expected:
            hint = "turns alternate, and the user comes first"
            if turn.role == "system":
                hint = "a system text comes first"
            message = f"a turn of the {turn.role} stands where the {expected}'s should"
            raise InvalidRecord("E20", message, turn.place, hint)
    return "\n".join(text for text in system_texts if text.strip()), turns


def read_turns(row, key):
    """The turns of a row in their order, also one of the system."""
    given = row.get(key)
    if not isinstance(given, list):
        code = "E07" if given else "E25"
        raise InvalidRecord(code, f"'{key}' must be a list of turns, not {short_repr(given)}")
    if key != "texts":
        return [read_turn(turn, f"{key}[{k}]") for k, turn in enumerate(given)]
    turns = []
    for k, pair in enumerate(given):
        for role in ("user", "assistant"):
            content = pair.get(role) if isinstance(pair, dict) else None
            turns.append(read_turn({"role": role, "content": content}, f"texts[{k}]"))
    return turns


def read_turn(turn, place):
    if not isinstance(turn, dict):
        raise InvalidRecord("E07", f"a turn must be an object, not {short_repr(turn)}", place)
    name = turn.get("from", turn.get("role"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidRecord("E21", f"the role {short_repr(name)} is not known", place,
                            f"known are {', '.join(ROLES)}")
    if turn.get("tool_calls") or turn.get("function_call"):
        raise InvalidRecord("E21", "tool calls cannot be trained on", place)
    parts = read_parts(turn.get("value", turn.get("content")), place)
    if role != "user" and any(isinstance(part, Placeholder) for part in parts):
        message = f"a turn of the {role} cannot hold a placeholder of an image or a video"
        raise InvalidRecord("E24", message, place)
    return Turn(role, parts, turn.get("loss_weight"), place)


def read_parts(content, place):
    """The content of a turn, a text or typed parts -> texts and Placeholders."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        message = ("the content of a turn must be a text or a list of parts, "
                   f"not {short_repr(content)}")
        raise InvalidRecord("E23", message, place)
    parts = []
    for part in content:
        if not isinstance(part, dict):
            message = f"a part must be an object with a type, not {short_repr(part)}"
            raise InvalidRecord("E23", message, place)
        # Tables unify the fields of parts and fill those that a part does not have with null.
        part = {key: value for key, value in part.items() if value is not None}
        kind = str(part.get("type")).removesuffix("_url")
        if kind == "text":
            parts += split_text(part.get("text", part.get("value")), place)
        elif kind in ("image", "video"):
            parts.append(Placeholder(kind, media_of_part(part, kind)))
        elif kind in ("audio", "input_audio"):
            parts.append(Placeholder("audio"))
        else:
            message = f"the type of a part, {short_repr(part.get('type'))}, is not known"
            raise InvalidRecord("E22", message, place, "known are text, image, image_url, video")
    if Placeholder("audio") in parts:
        raise InvalidRecord("E16", "audio is not an input of Molmo2", place)
    return parts


def split_text(text, place):
    if not isinstance(text, str):
        raise InvalidRecord("E23", "a part of type text has no text", place)
    parts = []
    for k, piece in enumerate(PLACEHOLDER.split(text)):
        if k % 2:
            parts.append(Placeholder(piece[1:-1]))
        elif piece:
            parts.append(piece)
    return parts


def media_of_part(part, kind):
    """The path, object or number that a part of typed content names; None if it names nothing."""
    names = [key for key in (kind, f"{kind}_url", "path", "url", "value") if key in part]
    entry = part[names[0]] if names else part.get("index")
    if kind == "image" and isinstance(entry, dict) and "url" in entry:
        return entry.get("path", entry["url"])           # {"image_url": {"url": ..}}
    if kind == "video" and entry is not None:
        if not isinstance(entry, dict):
            entry = {"frames" if isinstance(entry, list) else "path": entry}
        beside = {"fps": "fps", "start": "video_start", "end": "video_end"}
        return {name: part[key] for name, key in beside.items() if key in part} | entry
    return entry
