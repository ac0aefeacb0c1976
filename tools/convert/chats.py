"""Converts chats of ShareGPT, LLaVA, OpenAI, Hugging Face, ms-swift and others to records.

docs/convert.md describes the formats. An unsupported tag, or field of a turn, is an error unless
it is in --ignore. `row` is an entry of a file, and `args` are the flags of the command.
"""

import re
from typing import NamedTuple

from records.check import is_a, is_list_of, is_number, require, short
from records.errors import plural
from records.parse import as_object
from records.reader import CHAT_KEYS
from text.prompts import SYSTEM, question_text
from tools.convert.media import VIDEO_SUFFIXES

ROLES = {
    "human": "user", "user": "user", "system": "system", "developer": "system",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant"}
# the names that one field has in several formats
TEXT = ("value", "content", "text")
WEIGHT = ("loss_weight", "weight", "loss", "train", "training")
REASONING = ("reasoning_content", "reasoning", "thinking")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
DESIRED = ("label", "kto_tag", "desirable")
MEDIA = {"image": ("image", "images", "image_url"), "video": ("video", "videos", "video_url")}
TIMES = (  # of a part of a video
    ("start", "end"), ("start_time", "end_time"), ("startTime", "endTime"), ("begin", "end"),
    ("start_sec", "end_sec"), ("video_start", "video_end"), ("clip_start", "clip_end"))
RESIZED = ("resized_width", "resized_height")
ROW_FIELDS = (
    *CHAT_KEYS, "image", "images", "video", "videos", "start", "end", "fps", "objects", *RESIZED,
    "chosen", *REJECTED, *DESIRED, "id", "system", "subtitles", "style", "weight")
TURN_FIELDS = {"from", "role", *TEXT, *WEIGHT, *REASONING, *MEDIA["image"], *MEDIA["video"]}
PART_FIELDS = {  # {type of a part: its fields}
    "text": {"type", *TEXT}, **{kind: {"type", kind, *TEXT} for kind in REASONING},
    "image": {"type", "image", "image_url", "path", "url"},
    "video": {"type", "video", "video_url", "path", "url", "video_start", "video_end", "fps"}}

PLACEHOLDER = re.compile(
    r"<img>(?P<path>[^<]+)</img>|(?:<\|vision_start\|>)?<\|?(?P<kind>image|video)"
    r"(?:here|_pad|[_ ]?(?P<number>\d+))?\|?>(?:<\|vision_end\|>)?", re.I)
# Tags of other models. MARK is an error everywhere, OTHER_TAG in questions.
MARK = (r'<\|/?(?!object_ref_|box_)\w+\|>|<loc_?\d+>|<patch_index_\d+>|<__\w+>'
        r'|</?(?:seg|im_start|im_end)>|"(?:point|box)_2d"')
OTHER_TAG = (rf"{MARK}|<\|\w+\|>|</?(?:img|image|video|audio|ref|box|bx)>|<start_of_image>|\[IMG\]"
             "|< image >|<fake_token_around_image>")
REF = r"(?:<ref>|<\|object_ref_start\|>)([^<]*)(?:</ref>|<\|object_ref_end\|>)"
LABEL = REF + r'|"label":\s*"([^"]*)"|\salt="([^"]*)"'
BOX = (rf"(?:{REF}\s*)?(?:<box>|<\|box_start\|>)(?P<numbers>[\d\s,()\[\]]*)"
       r"(?:</box>|<\|box_end\|>)[\s.,;]*")
OBJECT = rf"(?:{REF}\s*)?<bbox (?P<numbers>[^<>]*)>[\s.,;]*"  # made by Reader
POINT = (r'<points?(?P<numbers>(?:\s+x\d*="[\d.]+"\s+y\d*="[\d.]+")+)(?:\s+alt="[^"]*")?>'
         r'[^<]*</points?>\.?')
JSON_LABEL = r'(?:,?\s*"label":\s*"[^"]*",?)?'
AROUND = r"(?:[\s,\[\]]|```(?:json)?)*"  # allowed before the first object, and after each
JSON = (rf'(?:\A{AROUND})?{{{JSON_LABEL}\s*"bbox_2d":\s*\[(?P<numbers>[-\d\s.,]*)\]'
        rf'{JSON_LABEL}\s*}}{AROUND}')
PLACES = {  # text that an answer with boxes or points contains: its pattern
    "<box>": BOX, "<|box_start|>": BOX, "<bbox ": OBJECT, "bbox_2d": JSON, "<point": POINT}
SCALES = {  # a pattern, or a bbox_type of ms-swift: how coordinates are given
    BOX: {"coords": "pixel", "size": [1000, 1000]}, POINT: {"coords": "percent"},
    "real": {"coords": "pixel"}, "norm1": {"coords": "unit"}}


class Placeholder(NamedTuple):
    kind: str  # image or video
    entry: object = None  # the image or video; None: the next one of the entry or the turn
    number: str = None  # the number in the tag, if there is one


class Turn(NamedTuple):
    role: str  # user, assistant or system
    parts: list  # texts; a turn of the user also has Placeholders
    weight: float = None  # loss weight, if given


def read_chats(row, job):
    """An entry -> (head, annotations). Unreadable if the entry cannot become a record."""
    args = job.args
    row = store_images(row, job.media)
    for key in set(DESIRED) & row.keys():
        require(args.keep_desired and row[key] is True, "the entry",
                f"'{key}' is {short(row[key])}; --keep-desired uses the answers that KTO marks "
                f"with true, --ignore {key} uses all answers")
    system, turns, rejected = read_chat(row, args, job.report)
    prompts = [turn.parts for turn in turns[::2]]
    answers = ["".join(turn.parts) for turn in turns[1::2]]
    if media := listed_media(row):
        if not placeholders_in(prompts):
            refuse_tags("<image>|<video>", system + "".join(answers), "an answer", args.ignore)
        prompts = fill_placeholders(prompts, media, "the entry")
    visual, questions = place_media(row, prompts, args.ignore)
    if system and rejected is not None:
        questions[0].insert(0, SYSTEM.format(system))
    pairs = []
    for k, parts in enumerate(questions):
        question = "".join(parts) if all(isinstance(part, str) for part in parts) else parts
        pairs.append({"question": question, **read_answer(answers[k], prompts[k], row, args)})
        if turns[2 * k + 1].weight is not None:
            pairs[k]["weight"] = turns[2 * k + 1].weight
    if rejected is None:
        groups = [[pair] for pair in pairs] if args.split_turns else [pairs]
        qa = {"system": system} if system else {}
        annotations = [{"type": "qa", **qa, "turns": group} for group in groups]
    else:
        rejected = read_answer(rejected, prompts[0], row, args).get("answer")
        is_plain = "answer" in pairs[0] and not {"style", "weight"} & {*row, *pairs[0]}
        require(len(pairs) == 1 and is_plain and rejected, "the entry", "with a chosen and a "
                "rejected answer it must have one question, no boxes, no style and no weight; "
                "--ignore FIELD ignores a field")
        annotations = [{"type": "text", "prompt": question_text(pairs[0]["question"]), "text": text}
                       for text in (pairs[0]["answer"], rejected)]
    style = {"style": row["style"]} if "style" in row else {}
    kept = {"id": str(row["id"])} if "id" in row else {}
    kept |= {key: row[key] for key in ("subtitles", "weight") if key in row}
    return {**kept, **visual}, [style | annotation for annotation in annotations]


def name_times(rows, job):
    """Yields the rows of a file. The two times of a part of a video get the names start and end,
    and times such as "1:02.5" become seconds."""
    for where, row in rows:
        of_video = isinstance(row, dict) and any(
            name in row or str(row.get("file_name")).lower().endswith(VIDEO_SUFFIXES)
            for name in MEDIA["video"])
        for names in TIMES if of_video else ():
            times = [seconds_of(row.get(name)) for name in names]
            if None not in times and not {"start", "end"} - {*names} & row.keys():
                row = {key: value for key, value in row.items() if key not in names}
                row |= dict(zip(("start", "end"), times, strict=True))
        yield where, row


def seconds_of(value):
    """A number, or a text such as "62.5", "1:02.5" or "0:01:02,5" -> seconds; None for others."""
    if is_number(value):
        return value
    parts = re.fullmatch(r"(?:(?:(\d+):)?(\d+):)?(\d+(?:[.,]\d+)?)", str(value).strip())
    if not parts:
        return None
    hours, minutes, seconds = (float((part or "0").replace(",", ".")) for part in parts.groups())
    return 3600 * hours + 60 * minutes + seconds


def store_images(row, media):
    """Writes images that a table contains to files, and gives their paths."""

    def stored(cell):
        return media.image(cell) if isinstance(cell, dict) and cell.get("bytes") else cell

    found = {key: row[key] for key in MEDIA["image"] if key in row}
    for key, cell in found.items():
        found[key] = [*map(stored, cell)] if isinstance(cell, list) else stored(cell)
    return row | found


def read_chat(row, args, report):
    """-> system text; [Turn, ..], alternately user and assistant; rejected text or None."""
    reader = Reader(row.get("objects", {}), args, report)
    chosen = row.get("chosen")
    # in TRL's format the turns before the answer may be only in `chosen`
    chat = one_of(row, CHAT_KEYS, "the entry") or (chosen[:-1] if isinstance(chosen, list) else [])
    if chosen:
        chat = [*chat, last_turn(chosen, "chosen", chat)]
    turns = [reader.turn(turn, f"turn {k}") for k, turn in enumerate(chat)]
    rejected = one_of(row, REJECTED, "the entry")
    require(rejected or not chosen, "the entry", "it has 'chosen', but no rejected answer")
    if rejected:
        require(turns and turns[-1].role == "assistant", "the entry", "it has no chosen answer")
        last = reader.turn(last_turn(rejected, "rejected", chat[:-1]), "rejected")
        require(last.role == "assistant" and last.weight is None, "rejected",
                "it must be an answer without a weight")
        rejected = "".join(last.parts)
    require(not any(map(list, reader.objects.values())), "objects",
            "it has more entries than the texts have <ref-object> or <bbox>")
    system = [row["system"]] if "system" in row else []
    if turns and turns[0].role == "system":
        system.append("".join(turns.pop(0).parts))
    for k, turn in enumerate(turns):
        require(turn.role == ("user", "assistant")[k % 2], f"turn {len(chat) - len(turns) + k}",
                f"this is a turn of the {turn.role}; the turns must be user, assistant, user, ..")
    turns = turns[: len(turns) // 2 * 2]  # a last question without an answer is ignored
    require(turns, "the entry", "there is no question with an answer")
    return "\n".join(text for text in system if text.strip()), turns, rejected


def last_turn(value, place, before):
    """A text, a turn, or a list that repeats the earlier turns -> the last turn."""
    *earlier, last = value if isinstance(value, list) else [value]
    require(earlier in ([], before), place, "it does not repeat the turns of the entry")
    return last if isinstance(last, dict) else {"role": "assistant", "content": last}


class Reader:
    """Reads turns in their order. objects: a field of ms-swift, for <ref-object> and <bbox>."""

    def __init__(self, objects, args, report):
        self.args = args
        self.known_fields = report.known_fields
        objects = report.known_fields(objects, {"ref", "bbox", "bbox_type"}, "objects")
        refs = [f"<|object_ref_start|>{ref}<|object_ref_end|>" for ref in objects.get("ref", ())]
        boxes = [f"<bbox {' '.join(f'{n:f}' for n in box)}>" for box in objects.get("bbox", ())]
        self.objects = {"<ref-object>": iter(refs), "<bbox>": iter(boxes)}

    def turn(self, turn, place):
        require(isinstance(turn, dict), place, f"a turn must be an object, not {short(turn)}")
        turn = self.known_fields(turn, TURN_FIELDS, place)
        name = one_of(turn, ("from", "role"), place)
        require(name in ROLES, place, f"the role {short(name)} is not one of {', '.join(ROLES)}")
        role = ROLES[name]
        content = one_of(turn, TEXT, place) or ""
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        require(is_list_of(is_a(dict))(content), place,
                f"{short(content)} is neither a text nor a list of parts")
        if thoughts := one_of(turn, REASONING, place):
            content = [{"type": "reasoning", "text": thoughts}, *content]
        parts = [part for entry in content for part in self.part(entry, role, place)]
        if media := listed_media(turn):
            (parts,) = fill_placeholders([parts], media, place)
        require(role == "user" or not placeholders_in([parts]), place,
                "only turns of the user can contain an image or a video")
        weight = one_of(turn, WEIGHT, place)
        require(role == "assistant" or not weight, place, "only answers can have a loss weight")
        return Turn(role, parts, int(weight) if isinstance(weight, bool) else weight)

    def part(self, part, role, place):
        """A part of a turn -> a list of texts and Placeholders."""
        kind = str(part.get("type")).removeprefix("input_").removesuffix("_url")
        require(kind in PART_FIELDS, place,
                f"a part must be a text, an image or a video, not {short(part)}")
        part = self.known_fields(part, PART_FIELDS[kind], place)
        if kind in MEDIA:
            entry = entry_of(one_of(part, (kind, f"{kind}_url", "path", "url"), place))
            if entry and kind == "video":
                entry = read_video(entry, {key.removeprefix("video_"): part[key] for key in part})
            return [Placeholder(kind, entry)]
        if kind in self.args.ignore:
            return []
        text = one_of(part, PART_FIELDS[kind] - {"type"}, place) or ""
        if kind in REASONING:
            require(self.args.reasoning and role == "assistant", place, "it has reasoning: add "
                    "--reasoning to put it before the answer, or --ignore FIELD to ignore it")
            text += "\n\n"
        tags = "<ref-object>" if role == "user" else "<ref-object>|<bbox>"
        text = re.sub(tags, lambda tag: next(self.objects[tag[0]], tag[0]), text)
        tags = "<ref-object>|<bbox>" if role == "user" else f"<ref-object>|<bbox>|{MARK}"
        refuse_tags(tags, text, place, self.args.ignore)
        return split_media(text, self.args.ignore) if role == "user" else [text]


def one_of(fields, names, place):
    """The value of the field with one of these names, or None. Unreadable if there are two."""
    given = [name for name in names if name in fields]
    require(len(given) < 2, place, f"it has both {' and '.join(given)}; use --ignore for one")
    return fields[given[0]] if given else None


def refuse_tags(pattern, text, place, ignore):
    for tag in re.finditer(pattern, text):
        require(tag[0] in ignore, place,
                f"{tag[0]} is not supported here; --ignore '{tag[0]}' keeps it as ordinary text")


def check_plain(texts, place, ignore):
    """Unreadable if one of these options or answers contains a placeholder or another tag."""
    for text in texts:
        refuse_tags(OTHER_TAG, text, place, ignore)
        refuse_tags(PLACEHOLDER, text, place, ignore)


def split_media(text, ignore):
    """A text of the user -> a list of texts and Placeholders."""
    parts = []
    end = 0
    for tag in PLACEHOLDER.finditer(text):
        if tag[0] not in ignore:
            kind = (tag["kind"] or "image").lower()
            parts += [text[end : tag.start()], Placeholder(kind, tag["path"], tag["number"])]
            end = tag.end()
    return [part for part in (*parts, text[end:]) if part]


def read_answer(text, prompt, row, args):
    """-> the fields of a turn of a record, with the answer, or with boxes or points."""
    name = next((name for name in PLACES if name in text and name not in args.ignore), None)
    if not name:
        return {"answer": re.sub(r"<\|object_ref_(start|end)\|>", "", text)}
    form = PLACES[name]
    labels = {label.strip() for found in re.findall(LABEL, text) for label in found} - {""}
    labels = labels or {label for part in prompt for label in re.findall(REF, str(part))}
    numbers = [float(n) for found in re.finditer(form, text)
               for n in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", found["numbers"])]
    n = 2 if form == POINT else 4
    is_complete = numbers and len(numbers) % n == 0 and len(labels) < 2
    require(is_complete and not re.sub(form, "", text).strip(), "an answer with boxes or points",
            "it must contain nothing else, at most one label, and four numbers for each box; "
            f"--ignore '{name}' keeps it as ordinary text")
    places = [numbers[k : k + n] for k in range(0, len(numbers), n)]
    kind = row["objects"].get("bbox_type") or "real" if form == OBJECT else form
    size = [row[key] for key in RESIZED if key in row] or args.resized
    require(kind in SCALES or size, "an answer with boxes", "its numbers refer to a resized image; "
            "give the size of this image with --resized W,H (1000,1000 for Qwen3-VL)")
    scale = SCALES.get(kind, {"coords": "pixel", "size": size})
    label = {"label": labels.pop()} if labels else {}
    if form == POINT:
        return {"type": "point", **label, **scale, "points": [{"x": x, "y": y} for x, y in places]}
    return {"type": "box", **label, **scale, "form": "xyxy", "boxes": [{"box": p} for p in places]}


def entry_of(value):
    """A path or an object with a path -> the same; {"url": path} -> path."""
    if isinstance(value, dict):
        value = {key: field for key, field in value.items() if field is not None}
        return value.get("url") if value.keys() <= {"url", "detail"} else value
    return value


def listed_media(fields):
    """The fields of an entry or a turn -> a Placeholder for each image and video in them."""
    found = []
    for kind, names in MEDIA.items():
        for value in (fields[name] for name in names if name in fields):
            if isinstance(value, dict) and all(map(PLACEHOLDER.fullmatch, value)):
                value = [*value.values()]  # {"<image_00>": path} of MiniCPM-V
            entries = value if isinstance(value, list) else [value]
            found += [Placeholder(kind, entry_of(entry)) for entry in entries]
    return found


def placeholders_in(prompts):
    return [part for parts in prompts for part in parts if isinstance(part, Placeholder)]


def fill_placeholders(prompts, media, place):
    """Replaces the placeholders by these media in their order; without any, media come first."""
    found = placeholders_in(prompts)
    n = len(found)
    numbers = [int(part.number) for part in found if part.number]
    is_in_order = numbers in ([], [*range(n)], [*range(1, n + 1)])
    require(n in (0, len(media)) and is_in_order and not any(part.entry for part in found), place,
            f"its placeholders ({n}) must match its images or videos ({len(media)}) in their order")
    if not found:
        return [[*media, *prompts[0]], *prompts[1:]]
    media = iter(media)
    return [[part if isinstance(part, str) else next(media) for part in parts] for parts in prompts]


def place_media(row, prompts, ignore):
    """-> the media of a record, and the questions as lists of texts and references to media."""
    media = {"image": [], "video": []}
    questions = []
    for parts in prompts:
        questions.append([])
        for part in parts:
            if isinstance(part, str):
                questions[-1].append(re.sub(REF, r"\1", part))
                refuse_tags(OTHER_TAG, questions[-1][-1], "a question", ignore)
            else:
                questions[-1].append({part.kind: len(media[part.kind])})
                media[part.kind].append(part.entry)
    images, videos = media.values()
    require(all([*images, *videos]), "the entry", "it has a placeholder, but no image or video; "
            "--ignore with the tag, such as --ignore '<video>', keeps it as ordinary text")
    require(len(videos) < 2 and not (images and videos), "the entry", "it must have images or "
            f"one video, not {plural(len(images), 'image')} and {plural(len(videos), 'video')}")
    require(videos or not {"start", "end", "fps"} & row.keys(), "start, end, fps",
            "they need a video")
    questions[0] = without_outer_media(questions[0], len(images) + len(videos))
    if videos:
        return {"video": read_video(videos[0], row)}, questions
    if len(images) == 1:
        return {"image": images[0]}, questions
    return {"images": images} if images else {}, questions


def without_outer_media(parts, n_media):
    """The first question without references to all media at its start, or to one at its end."""
    places = [k for k, part in enumerate(parts) if not isinstance(part, str)]
    if places and len(places) == n_media:
        before = "".join(part for part in parts[: places[-1]] if isinstance(part, str))
        after = "".join(parts[places[-1] + 1 :])
        if after.strip() and not before.strip():
            return [after.lstrip()]
        if before.strip() and not after.strip() and n_media == 1:
            return [before.rstrip()]
    return parts  # also if the question contains only images


def read_video(video, fields):
    """A path, an object or a list of frames -> the video of a record, with start and end."""
    clip = {key: fields[key] for key in ("start", "end") if key in fields}
    if isinstance(video, list):
        return {"frames": video, "fps": fields.get("fps"), **clip}
    require("fps" not in fields, "fps", "only a list of frames can have it; add --ignore fps")
    return {**as_object(video), **clip} if clip else video
