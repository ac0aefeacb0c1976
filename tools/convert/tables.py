"""Rows of questions and answers, or of captions, as chats (chats.py).

    {"image": "9.jpg", "question": "What is it?", "answer": "A tray."}
    {"instruction": "Sum up.", "input": "..", "output": ".."}                   alpaca
    {"query": "<image>What is it?", "response": "A tray.", "images": [..]}      ms-swift
    {"prompt": [{"role": "user", ..}], "completion": [{"role": "assistant", ..}]}   TRL
    {"file_name": "9.jpg", "text": "A tray."}                                   imagefolder
"""

from records.check import require
from tools.convert.rows import ANSWERS, CAPTIONS
from tools.prepare.media import VIDEO_SUFFIXES


def as_chat(row, kind):
    """Fields that are not of the text stay. A caption becomes the answer to a blank question."""
    rest = {key: value for key, value in row.items() if value not in (None, "")}
    if "file_name" in rest:
        name = rest.pop("file_name")
        rest["video" if name.lower().endswith(VIDEO_SUFFIXES) else "image"] = name
    names = CAPTIONS if kind == "captions" else ANSWERS
    key = next((key for key in names if key in rest), None)
    require(key, "the row", f"it has none of the fields {', '.join(names)}")
    text = rest.pop(key)
    history = rest.pop("history", ())  # [[question, answer], ..]
    pairs = [(role, text) for turn in history
             for role, text in zip(("user", "assistant"), turn, strict=True)]
    if kind == "captions":
        pairs += [("user", ""), ("assistant", text)]
    else:
        question = f"{text}\n{rest.pop('input')}" if "input" in rest else text
        pairs += [("user", question), ("assistant", rest.pop(ANSWERS[key], None))]
    messages = [turn for role, text in pairs if text is not None for turn in turns_of(text, role)]
    return {**rest, "messages": messages}


def turns_of(value, role):
    """The turns that a field contains: of TRL they are a list, else there is one, a text."""
    is_list = isinstance(value, list) and value and "role" in value[0]
    return value if is_list else [{"role": role, "content": value}]


def as_caption(record):
    """The record of such a chat -> that of the caption."""
    (caption,) = record["annotations"]
    (turn,) = caption.pop("turns")
    return record | {"annotations": [caption | {"type": "caption", "text": turn["answer"]}]}
