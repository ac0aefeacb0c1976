"""Rows of other projects as native records (formats.md 7.5 and 8): what LLaVA, Hugging Face chats, Mantis and the Cauldron write.

in    a row of a .json or .jsonl file, a dict
out   a native record with one "qa" annotation, or one per question and answer (split_turns); and what was found on the way

    {"image": "9.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A tray."}]}
    {"image": "9.jpg", "annotations": [{"type": "qa", "turns": [{"question": "What is it?", "answer": "A tray."}]}]}

A placeholder is an `<image>` or `<video>` in a user's text, or a part of typed content without words:

    P1  as many image placeholders as images: the k-th is image k             P5  a leading block, or just one in the first
    P2  none at all: what is to be seen comes first                               turn, is taken out; else they keep their places
    P3  one video and one placeholder of either name: it is the video         P6  ... with the blanks around it; a prompt of nothing
    P4  anything else is refused, nothing is repeated or dropped                  but images stays a list of them
    P8  "", [] and null are no media                                          P7  in an answer or a system text it is refused

Only the shape of the chat is judged here; paths, times, weights and blank texts are judged in records.check, as in native records.
Left out: audio, boxes and masks, tools, pairs of a better and a worse answer. They are refused, not guessed at.
"""

import difflib
import re

KEYS = ("annotations", "conversations", "messages", "conversation", "texts")       # native, ShareGPT / LLaVA, HF, Mantis, Cauldron
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
         "system": "system"}
MEANT = {"img": "image", "imgs": "images", "image_path": "image", "image_file": "image", "image_paths": "images", "picture": "image",
         "pictures": "images", "photo": "image", "vid": "video", "video_path": "video", "video_file": "video", "clip_path": "video"}
UNSUPPORTED = ("audio", "audios", "sound", "sounds", "speech", "point_cloud", "point_clouds", "depth", "depths", "pdf", "pdfs")
ENTRY = ("path", "width", "height", "url", "sha256")                               # of an image or a video, as in native records
PLACEHOLDER = re.compile("(<image>|<video>|<audio>)")


class Refused(ValueError):
    """A record that cannot be used: a code of formats.md 9, what is wrong, where in the record, what to do about it."""

    def __init__(self, code, what, place="", hint=""):
        super().__init__(code, what, place, hint)
        self.code = code

    def __str__(self):
        code, what, place, hint = self.args
        return f"{code} {what}" + (f" ({place})" if place else "") + (f" - {hint}" if hint else "")


def shown(value):
    """A value of a record as it may stand in a message: short, on one line."""
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def form_of(record):
    """The one list key that tells what a record is: annotations, conversations, messages, conversation or texts; else Refused E06."""
    found = [k for k in KEYS if record.get(k) is not None] or [k for k in KEYS if k in record]
    if len(found) > 1:
        raise Refused("E06", f"both '{found[0]}' and '{found[1]}': a record has one of {', '.join(KEYS)}")
    if not found:
        keys = ", ".join(shown(k)[1:-1] for k in list(record)[:12]) or "none"
        near = difflib.get_close_matches("annotations", [shown(k)[1:-1] for k in list(record)[:12]], 1, 0.8)
        raise Refused("E06", f"no 'annotations': not a record of a known form; its fields are {keys}", "",
                      f"did you mean 'annotations' by '{near[0]}'?" if near else f"a known form has one of {', '.join(KEYS)}")
    return found[0]


def convert(record, split_turns=False, path_prefix_field=None):
    """A row -> (native record, findings). Findings are (code, message); S01 tells of a last question without an answer,
    which is left out, and if nothing remains the record is None. Refused, with its code, if it cannot be converted.

    split_turns: every question with its answer is an annotation of its own, which does not see the others.
    path_prefix_field: a field of the row that names the folder of its media (LLaVA-Video: data_source).
    """
    key = form_of(record)
    row = {k: v for k, v in record.items() if v is not None}              # tables fill what a row lacks with null
    _unsupported(row)
    system, turns = chat(row, key)
    findings = []
    if len(turns) % 2:
        turns = turns[:-1]
        findings = [("S01", "the last question has no answer" + ("; it is left out" if turns else ""))]
        if not turns:
            return None, findings
    asked = [parts for parts, _ in turns[::2]]
    marks = [part for parts in asked for part in parts if not isinstance(part, str)]
    images, video, refs = media(row, marks, path_prefix_field)
    pairs = [{"question": question, "answer": "".join(parts)} | weight
             for question, (parts, weight) in zip(placed(asked, images, video, refs), turns[1::2], strict=True)]

    common = {"type": "qa"} | ({"style": row["style"]} if "style" in row else {}) | ({"system": system} if system else {})
    named = _whole(row.get("id")) or (isinstance(row.get("id"), str) and row["id"])
    native = {"id": str(row["id"])} if named else {}
    if video:
        native["video"] = video["path"] if list(video) == ["path"] else video
    elif images:
        native |= {"image": images[0]} if len(images) == 1 else {"images": images}
    native |= {k: row[k] for k in ("subtitles", "weight") if k in row}
    native["annotations"] = [{**common, "turns": turns} for turns in ([[p] for p in pairs] if split_turns else [pairs])]
    used = {key, "id", "image", "images", "video", "videos", "system", "subtitles", "style", "weight"}
    used |= {"start", "end", "clip", "fps"} if video else set()
    meta = {k: v for k, v in row.items() if k not in used}
    if isinstance(meta.get("meta"), dict):
        meta |= meta.pop("meta")
    return native | ({"meta": meta} if meta else {}), findings


def _unsupported(row):
    for key, name in MEANT.items():      # other fields of a row may be anything, but a misspelled picture would be trained on blindly
        if isinstance(row.get(key), (str, list)) and row[key] and not any(row.get(n) for n in ("image", "images", "video", "videos")):
            raise Refused("E16", f"'{key}' is not read", "", f"did you mean '{name}'?")
    for key in UNSUPPORTED:
        if _entries(row.get(key)):
            raise Refused("E16", f"'{key}' is no input of Molmo2", "", "only images, or one video, and text")
    if "chosen" in row and "rejected" in row:
        raise Refused("E07", "a pair of a better and a worse answer cannot be trained on", "chosen, rejected")


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


# ---------------------------------------------------------------------------------------------------------------
# the chat


def chat(row, key):
    """-> system text, [(parts, {} or {"weight": ..}), ..] of user and assistant in turn; only answers are weighed. A part is a str
    or a placeholder, ("image" or "video", what): its number, its entry, or None for the next one."""
    turns = row.get(key)
    if not isinstance(turns, list):
        raise Refused("E07" if turns else "E25", f"'{key}' must be a list of turns, not {shown(turns)}")
    if key == "texts":
        turns = [{"role": role, "content": pair.get(role) if isinstance(pair, dict) else None}
                 for pair in turns for role in ("user", "assistant")]
    said = []
    for k, turn in enumerate(turns):
        place = f"{key}[{k // 2 if key == 'texts' else k}]"
        if not isinstance(turn, dict):
            raise Refused("E07", f"a turn must be an object, not {shown(turn)}", place)
        name = turn.get("from", turn.get("role"))
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None or turn.get("tool_calls") or turn.get("function_call"):
            raise Refused("E21", f"the role {shown(name)} is not known" if role is None else "tools cannot be trained on", place,
                          f"known are {', '.join(ROLES)}")
        parts = parts_of(turn.get("value", turn.get("content")), place)
        if role != "user" and not all(isinstance(part, str) for part in parts):
            raise Refused("E24", f"a placeholder for an image or a video in a turn of the {role}", place)
        weight = turn.get("loss_weight")
        said.append((role, parts, {} if weight is None else {"weight": weight}, place))

    system = row.get("system", "")
    if not isinstance(system, str) or PLACEHOLDER.search(system):
        raise Refused("E24" if isinstance(system, str) else "E07", f"{shown(system)} is no system text", "system")
    texts = [system]
    if said and said[0][0] == "system":
        texts.append("".join(said.pop(0)[1]))
    if not said:
        raise Refused("E25", f"'{key}' has no turns")
    for k, (role, *_, place) in enumerate(said):
        if role != ("user", "assistant")[k % 2]:
            hint = "a system text comes first" if role == "system" else "user and assistant speak in turn, the user first"
            raise Refused("E20", f"a turn of the {role} where the {('user', 'assistant')[k % 2]} should speak", place, hint)
    return "\n".join(text for text in texts if text.strip()), [(parts, weight) for _, parts, weight, _ in said]


def parts_of(content, place):
    """The content of a turn, text or typed parts -> [str or placeholder, ..]"""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Refused("E23", f"the content of a turn must be text or a list of parts, not {shown(content)}", place)
    parts = []
    for part in content:
        if not isinstance(part, dict):
            raise Refused("E23", f"a part must be an object with a type, not {shown(part)}", place)
        part = {k: v for k, v in part.items() if v is not None}           # null where another part has a value: formats.md 1.5
        kind = str(part.get("type")).removesuffix("_url")
        if kind == "text":
            text = part.get("text", part.get("value"))
            if not isinstance(text, str):
                raise Refused("E23", "a part of type text without text", place)
            for k, piece in enumerate(PLACEHOLDER.split(text)):
                parts += [(piece[1:-1], None)] if k % 2 else [piece] if piece else []
        elif kind in ("image", "video"):
            entry = next((part[k] for k in (kind, f"{kind}_url", "path", "url", "value") if k in part), part.get("index"))
            if isinstance(entry, dict) and kind == "image" and "url" in entry:
                entry = entry.get("path", entry["url"])                   # {"image_url": {"url": ..}}
            if kind == "video" and entry is not None:
                given = {new: part[old] for new, old in (("fps", "fps"), ("start", "video_start"), ("end", "video_end")) if old in part}
                entry = given | (entry if isinstance(entry, dict) else {"frames" if isinstance(entry, list) else "path": entry})
            parts.append((kind, entry))
        elif kind in ("audio", "input_audio"):
            parts.append(("audio", None))
        else:
            raise Refused("E22", f"a part of the unknown type {shown(part.get('type'))}", place, "known are text, image, image_url, video")
    if ("audio", None) in parts:
        raise Refused("E16", "audio is no input of Molmo2", place)
    return parts


# ---------------------------------------------------------------------------------------------------------------
# what is to be seen, and where in the chat


def media(row, marks, prefix=None):
    """The row and its placeholders in order -> [image, ..], video or None, as native records have them, and what each placeholder
    stands for, {"image": k} or {"video": 0}. Refused unless each stands for one thing and nothing is left over (P1 to P4)."""
    given = {kind: [key for key in (kind, f"{kind}s") if _entries(row.get(key))] for kind in ("image", "video")}
    for kind, keys in given.items():
        if len(keys) > 1:
            raise Refused("E13" if kind == "image" else "E15", f"both '{keys[0]}' and '{keys[1]}'")
    images, videos = (list(_entries(row.get(keys[0]))) if keys else [] for keys in given.values())
    refs, following = [], iter(range(len(images)))
    if videos and not images and marks in ([("image", None)], [("video", None)]):
        refs = [{"video": 0}]
    else:
        for kind, what in marks:
            if what is not None and not _whole(what):
                (images if kind == "image" else videos).append(what)
                what = len(images) - 1
            refs.append({"video": 0} if kind == "video" else {"image": next(following, None) if what is None else what})

    if images and videos:
        raise Refused("E14", "images and a video in one record")
    there = [{"video": 0}] * len(videos) or [{"image": k} for k in range(len(images))]
    if refs and not there:
        raise Refused("E30", f"{len(refs)} placeholders, but no image and no video")
    folder = _folder(row, prefix)
    video = _video(videos, row, folder)
    outside = [ref["image"] for ref, (_, what) in zip(refs, marks, strict=True) if _whole(what) and ref not in there]
    if outside:
        raise Refused("E32", f"there is no image {outside[0]}", "", f"the record has {len(images)}, counted from 0")
    if refs and (len(refs) != len(there) or any(ref not in refs for ref in there)):
        raise Refused("E31", f"{len(refs)} placeholders for {len(there)} {'video' if videos else 'images'}", "",
                      "one placeholder for each, or none at all")
    return [_entry(e, folder, "image") for e in images], video, refs


def placed(asked, images, video, refs):
    """The users' turns as questions of native records: text where what is to be seen comes first anyway, else a list (P5, P6)."""
    seen, refs = [{"video": 0}] if video else [{"image": k} for k in range(len(images))], iter(refs)
    asked = [[part if isinstance(part, str) else next(refs) for part in parts] for parts in asked]
    first = asked[0]
    places = [k for k, part in enumerate(first) if not isinstance(part, str)]
    leading = bool(places) and not "".join(p for p in first[: places[-1]] if isinstance(p, str)).strip()
    if places and len(places) == len(seen) and (len(seen) == 1 or (leading and [first[k] for k in places] == seen)):
        before, after = "".join(first[: places[0]]), "".join(first[places[-1] + 1 :])
        left, right = before.rstrip(), after.lstrip()
        gap = before[len(left) :] + after[: len(after) - len(right)]
        asked[0] = [left + (("\n" if "\n" in gap else " ") if left and right else "") + right]
    questions = ["".join(parts) if all(isinstance(p, str) for p in parts) else parts for parts in asked]
    if seen and isinstance(questions[0], str) and not questions[0].strip():
        questions[0] = seen
    return questions


def _video(videos, row, folder):
    if len(videos) > 1:
        raise Refused("E15", f"{len(videos)} videos in one record", "", "the frames of one video are [[path, ..]], with fps")
    if not videos:
        return None
    video = _entry(videos[0], folder, "video")
    clip = row.get("clip")
    if clip is not None and not (isinstance(clip, list) and len(clip) == 2):
        raise Refused("E07", f"clip must be [start, end] in seconds, not {shown(clip)}")
    times = dict(zip(("start", "end"), clip or (), strict=False)) | {k: row[k] for k in ("start", "end") if k in row}
    return video | times | ({"fps": row["fps"]} if "frames" in video and "fps" in row else {})


def _entries(value):
    """A path, an object or a list of them -> list; "", [] and null are nothing (P8)."""
    entries = value if isinstance(value, list) else [value]
    return entries if any(entries) else []


def _folder(row, field):
    folder = row.get(field, "") if field else ""
    if not isinstance(folder, str):
        raise Refused("E07", f"must be the name of a folder, not {shown(folder)}", field)
    return f"{folder.rstrip('/')}/" if folder else ""


def _entry(value, folder, kind):
    """One image or video: a path, an object, or (video) a list of the paths of frames; the folder comes in front."""
    if isinstance(value, dict):
        if value.get("bytes"):
            raise Refused("E10", f"the bytes of the {kind} stand in the row", "", "write them to a file and name its path")
        entry = {k: value[k] for k in (*ENTRY, "frames", "fps", "start", "end", "duration") if value.get(k) is not None}
    else:
        entry = {"frames" if kind == "video" and isinstance(value, list) else "path": value}
    paths = entry["frames"] if "frames" in entry else [entry.get("path")]
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise Refused("E07", f"{shown(value)} is no path of {'an image' if kind == 'image' else 'a video'}")
    entry |= {"frames": [folder + path for path in paths]} if "frames" in entry else {"path": folder + paths[0]}
    return entry["path"] if kind == "image" and list(entry) == ["path"] else entry
