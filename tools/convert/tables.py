"""Rows of questions and answers, or of captions, as chats (chats.py).

    {"image": "9.jpg", "question": "What is it?", "answer": "A tray."}
    {"instruction": "Sum up.", "input": "..", "output": ".."}                   alpaca
    {"query": "<image>What is it?", "response": "A tray.", "images": [..]}      ms-swift
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
    turns = list(rest.pop("history", ()))  # [[question, answer], ..]
    if kind == "captions":
        turns.append(["", text])
    else:
        question = f"{text}\n{rest.pop('input')}" if "input" in rest else text
        turns.append([question, rest.pop(ANSWERS[key], None)])
    messages = [{"role": role, "content": text} for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True) if text is not None]
    return {**rest, "messages": messages}


def as_caption(record):
    """The record of such a chat -> that of the caption."""
    (caption,) = record["annotations"]
    (turn,) = caption.pop("turns")
    return record | {"annotations": [caption | {"type": "caption", "text": turn["answer"]}]}
