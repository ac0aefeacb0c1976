"""Converts entries with a question and an answer, or with a caption, to chats (chats.py).

    {"image": "9.jpg", "question": "What is it?", "answer": "A tray."}
    {"instruction": "Sum up.", "input": "..", "output": ".."}                   alpaca
    {"query": "<image>What is it?", "response": "A tray.", "images": [..]}      ms-swift
    {"prompt": [{"role": "user", ..}], "completion": [{"role": "assistant", ..}]}   TRL
    {"file_name": "9.jpg", "text": "A tray."}                                   imagefolder
"""

import re

from records.check import is_number, is_text, require
from tools.convert.chats import ROW_FIELDS, check_plain, read_chats
from tools.convert.make import whole
from tools.convert.media import VIDEO_SUFFIXES
from tools.convert.report import NOTHING
from tools.convert.rows import ANSWERS, CAPTIONS


def read_questions(row, job):
    """The answers of several people are a list of texts."""
    given = [name for name in ("answers", *ANSWERS.values()) if texts_of(row.get(name))]
    if not given:
        return read_chats(as_chat(row, ANSWERS, job), job)
    answer = next((answer for question, answer in ANSWERS.items() if question in row), None)
    require(answer and given[0] in ("answers", answer), "the entry",
            f"'{given[0]}' must be one text")
    rest = {key: value for key, value in row.items() if key != given[0]}
    require(answer not in rest, "the entry",
            f"it has both {given[0]} and {answer}; use --ignore for one of them")
    head, (qa,) = read_chats(as_chat({**rest, answer: "-"}, ANSWERS, job), job)
    del qa["turns"][-1]["answer"]
    texts = texts_of(row[given[0]])
    check_plain(texts, "an answer", job.args.ignore)
    qa["turns"][-1]["answers"] = texts
    return head, [qa]


def texts_of(cell):
    """A list of texts, numbers or {"answer": text}, or {"text": such a list} -> a list of texts.
    None for any other value."""
    cell = cell["text"] if isinstance(cell, dict) and "text" in cell else cell
    entries = [entry for entry in cell if entry not in NOTHING] if isinstance(cell, list) else ()
    entries = [entry.get("answer") if isinstance(entry, dict) else entry for entry in entries]
    if not entries or not all(is_number(entry) or is_text(entry) for entry in entries):
        return None
    return [str(whole(entry)) for entry in entries]


def read_captions(row, job):
    """Several captions of an entry are a list of texts."""
    name = next((name for name in CAPTIONS if name in row), None)
    captions = []
    for text in texts_of(row.get(name)) or [row.get(name)]:
        one = {**row, name: text} if name else row
        head, (caption,) = read_chats(as_chat(one, CAPTIONS, job), job)
        turns = caption.pop("turns", ())
        require([*map(set, turns)] == [{"question", "answer"}], "the entry",
                "if it has a caption, it must have no other text, and no boxes in the caption")
        captions.append(caption | {"type": "caption", "text": turns[0]["answer"]})
    return head, captions


def as_chat(row, names, job):
    """An entry -> a chat with its other fields. A caption answers an empty question."""
    rest = dict(row)
    if "file_name" in rest:
        name = rest.pop("file_name")
        medium = "video" if name.lower().endswith(VIDEO_SUFFIXES) else "image"
        require(medium not in rest, "the entry",
                f"it has both file_name and {medium}; use --ignore for one of them")
        rest[medium] = name
    key = next((key for key in names if key in rest), None)
    require(key, "the entry", f"it has none of the fields {', '.join(names)}")
    text = rest.pop(key)
    messages = []
    for turn in rest.pop("history", ()):  # [[question, answer], ..], or turns
        require(isinstance(turn, dict) or len(turn) == 2, "history",
                "it must contain pairs of a question and an answer")
        messages += [turn] if isinstance(turn, dict) else [*turns_of(turn[0], "user"),
                                                           *turns_of(turn[1], "assistant")]
    if names is CAPTIONS:
        for name in job.columns:  # such as question_id, questionId, qid
            require(not re.fullmatch("(?i)(q|query|question)_?(id|idx|type)", name), "the entry",
                    f"'{key}' may be a question without an answer, because the entry has "
                    f"'{name}'; --ignore {name} reads '{key}' as a caption")
        question, answer = "", text
    else:
        question = f"{text}\n{rest.pop('input')}" if "input" in rest else text
        answer = rest.pop(ANSWERS[key], None)
    messages += turns_of(question, "user")
    messages += [] if answer is None else turns_of(answer, "assistant")
    rest = job.report.known_fields(rest, ROW_FIELDS)  # a second question, for example
    return {**rest, "messages": messages}


def turns_of(value, role):
    """A field -> a list of turns. TRL has a list of turns, other formats have the text of one."""
    is_list = isinstance(value, list) and value and "role" in value[0]
    value = str(whole(value)) if is_number(value) else value
    return value if is_list else [{"role": role, "content": value}]

