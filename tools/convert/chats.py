"""Chats of ShareGPT, LLaVA, OpenAI, Hugging Face, ms-swift and others as records.

docs/chats.md says how placeholders and boxes are read. Fields and tags that are not read are
refused, unless --ignore names them. `args` are the flags of the command, which checks the record.
"""

import re
from typing import NamedTuple

from records.check import require, short
from records.errors import plural
from records.parse import as_object
from records.reader import CHAT_KEYS
from text.prompts import SYSTEM

ROLES = {
    "human": "user", "user": "user", "system": "system", "developer": "system",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant"}
# names of one field in several formats
TEXT = ("value", "content", "text")
WEIGHT = ("loss_weight", "weight", "loss", "train", "training")
REASONING = ("reasoning_content", "reasoning", "thinking")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
DESIRED = ("label", "kto_tag", "desirable")
MEDIA = {"image": ("image", "images", "image_url"), "video": ("video", "videos", "video_url")}
RESIZED = ("resized_width", "resized_height")
# the fields that are read: of a row, of a turn, and of its parts by their type
OF_ROW = {
    *CHAT_KEYS, "image", "images", "video", "videos", "start", "end", "fps", "objects", *RESIZED,
    "chosen", *REJECTED, *DESIRED, "id", "system", "subtitles", "style", "weight"}
OF_TURN = {"from", "role", *TEXT, *WEIGHT, *REASONING, *MEDIA["image"], *MEDIA["video"]}
OF_PART = {
    "text": {"type", *TEXT}, **{kind: {"type", kind, *TEXT} for kind in REASONING},
    "image": {"type", "image", "image_url", "path", "url"},
    "video": {"type", "video", "video_url", "path", "url", "video_start", "video_end", "fps"}}

PLACEHOLDER = re.compile(
    r"<img>(?P<path>[^<]+)</img>|(?:<\|vision_start\|>)?<\|?(?P<kind>image|video)"
    r"(?:here|_pad|[_ ]?(?P<number>\d+))?\|?>(?:<\|vision_end\|>)?", re.I)
OTHER_TAG = r"<\|\w+\|>|</?(?:img|audio|ref|box)>"  # is refused in a question
REF = r"(?:<ref>|<\|object_ref_start\|>)([^<]*)(?:</ref>|<\|object_ref_end\|>)"
LABEL = REF + r'|"label":\s*"([^"]*)"|\salt="([^"]*)"'
BOX = (rf"(?:{REF}\s*)?(?:<box>|<\|box_start\|>)(?P<numbers>[\d\s,()\[\]]*)"
       r"(?:</box>|<\|box_end\|>)[\s.,;]*")
OBJECT = rf"(?:{REF}\s*)?<bbox (?P<numbers>[^>]*)>[\s.,;]*"  # made by Reader
POINT = r'<points?(?P<numbers>(?:\s+[xy]\d*="[\d.]+")+)(?:\s+alt="[^"]*")?>[^<]*</points?>\.?'
JSON_LABEL = r'(?:,?\s*"label":\s*"[^"]*",?)?'
JSON = (rf'(?:```json)?[\s\[]*{{{JSON_LABEL}\s*"bbox_2d":\s*\[(?P<numbers>[-\d\s.,]*)\]'
        rf'{JSON_LABEL}\s*}}[\s,\]]*(?:```)?')
PLACES = {  # letters of an answer with boxes or points -> the form of each
    "<box>": BOX, "<|box_start|>": BOX, "<bbox ": OBJECT, "bbox_2d": JSON,
    "<point x": POINT, "<points x": POINT}
SCALES = {  # of a form, or of a bbox_type of ms-swift
    BOX: {"coords": "pixel", "size": [1000, 1000]}, POINT: {"coords": "percent"},
    "real": {"coords": "pixel"}, "norm1": {"coords": "unit"}}


class Placeholder(NamedTuple):
    kind: str  # image or video
    entry: object = None  # what it names; None: the next one of the row or the turn
    number: str = None  # of the image, if the tag has it


class Turn(NamedTuple):
    role: str  # user, assistant or system
    parts: list  # texts and, of the user, Placeholders
    weight: float = None  # of the loss, if given


def convert(row, args, report):
    """A row -> a record; Unreadable if it cannot be one."""
    row = report.known_fields(row, OF_ROW)
    for key in set(DESIRED) & row.keys():
        require(args.keep_desired and row[key] is True, "the row", f"'{key}' is {short(row[key])}: "
                f"--keep-desired takes answers that KTO marks with true, --ignore {key} takes all")
    system, turns, rejected = read_chat(row, args, report)
    prompts = [turn.parts for turn in turns[::2]]
    answers = ["".join(turn.parts) for turn in turns[1::2]]
    if media := listed(row):
        if not placeholders_in(prompts):
            refuse_tags("<image>|<video>", system + "".join(answers), "an answer", args.ignore)
        prompts = fit(prompts, media, "the row")
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
        qa = {"type": "qa"} | ({"system": system} if system else {})
        annotations = [{**qa, "turns": group} for group in groups]
    else:
        require(len(pairs) == 1 and "answer" in pairs[0], "the row",
                "a chosen and a rejected answer need one question, and no boxes")
        answers = {"chosen": pairs[0].pop("answer"), "rejected": rejected}
        annotations = [{"type": "preference", **pairs[0], **answers}]
    style = {"style": row["style"]} if "style" in row else {}
    kept = {key: row[key] for key in ("id", "subtitles", "weight") if key in row}
    kept |= {"id": str(row["id"])} if "id" in row else {}
    return {**kept, **visual, "annotations": [style | annotation for annotation in annotations]}


def read_chat(row, args, report):
    """-> system text, [Turn, ..] of user and assistant alternately, rejected text or None."""
    reader = Reader(row.get("objects", {}), args, report)
    chat = only(row, CHAT_KEYS, "the row") or []
    turns = [reader.turn(turn, f"turn {k}") for k, turn in enumerate(chat)]
    if "chosen" in row:
        turns.append(reader.last(row["chosen"], "chosen", turns))
    rejected = only(row, REJECTED, "the row")
    if rejected:
        require(turns and turns[-1].role == "assistant", "the row", "no answer is the chosen one")
        rejected = "".join(reader.last(rejected, "rejected", turns[:-1]).parts)
    require(not any(map(list, reader.objects.values())), "objects",
            "it has more entries than the texts have <ref-object> or <bbox>")
    system = [row["system"]] if "system" in row else []
    if turns and turns[0].role == "system":
        system.append("".join(turns.pop(0).parts))
    for k, turn in enumerate(turns):
        require(turn.role == ("user", "assistant")[k % 2], f"turn {k}",
                f"it is of the {turn.role}: they alternate, the user first")
    # a last question may have no answer
    turns = turns[: len(turns) // 2 * 2]
    require(turns, "the row", "there is no question with an answer")
    return "\n".join(text for text in system if text.strip()), turns, rejected


class Reader:
    """Reads turns, one after the other. objects: of ms-swift, for <ref-object> and <bbox>."""

    def __init__(self, objects, args, report):
        self.args = args
        self.known_fields = report.known_fields
        objects = report.known_fields(objects, {"ref", "bbox", "bbox_type"}, "objects")
        refs = [f"<|object_ref_start|>{ref}<|object_ref_end|>" for ref in objects.get("ref", ())]
        boxes = [f"<bbox {' '.join(f'{n:f}' for n in box)}>" for box in objects.get("bbox", ())]
        self.objects = {"<ref-object>": iter(refs), "<bbox>": iter(boxes)}

    def last(self, value, place, before):
        """A text, a turn, or turns that repeat those before it -> the last Turn, an answer."""
        given = value if isinstance(value, list) else [value]
        turns = [self.turn(turn if isinstance(turn, dict) else {"from": "gpt", "value": turn},
                           place) for turn in given]
        earlier = [turn.parts for turn in turns[:-1]]
        require(turns[-1].role == "assistant" and earlier in ([], [turn.parts for turn in before]),
                place, "it must be an answer, alone or behind the same turns as in the row")
        return turns[-1]

    def turn(self, turn, place):
        turn = self.known_fields(turn, OF_TURN, place)
        name = only(turn, ("from", "role"), place)
        require(name in ROLES, place, f"the role {short(name)} is not one of {', '.join(ROLES)}")
        role = ROLES[name]
        content = only(turn, TEXT, place) or ""
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if thoughts := only(turn, REASONING, place):
            content = [{"type": "reasoning", "text": thoughts}, *content]
        parts = [part for entry in content for part in self.part(entry, role, place)]
        if media := listed(turn):
            (parts,) = fit([parts], media, place)
        require(role == "user" or not placeholders_in([parts]), place,
                "only turns of the user can contain an image or a video")
        weight = only(turn, WEIGHT, place)
        require(role == "assistant" or not weight, place, "only answers can have a loss weight")
        return Turn(role, parts, int(weight) if isinstance(weight, bool) else weight)

    def part(self, part, role, place):
        """A part of a turn -> texts and Placeholders."""
        kind = str(part.get("type")).removeprefix("input_").removesuffix("_url")
        require(kind in OF_PART, place, f"a part is a text, an image or a video, not {short(part)}")
        part = self.known_fields(part, OF_PART[kind], place)
        if kind in MEDIA:
            entry = entry_of(only(part, (kind, f"{kind}_url", "path", "url"), place))
            if entry and kind == "video":
                entry = read_video(entry, {key.removeprefix("video_"): part[key] for key in part})
            return [Placeholder(kind, entry)]
        if kind in self.args.ignore:
            return []
        text = only(part, OF_PART[kind] - {"type"}, place) or ""
        if kind in REASONING:
            require(self.args.reasoning and role == "assistant", place, "the reasoning is not read:"
                    " --reasoning puts it before the answer, --ignore FIELD leaves it out")
            text += "\n\n"
        tags = "<ref-object>" if role == "user" else "<ref-object>|<bbox>"
        text = re.sub(tags, lambda tag: next(self.objects[tag[0]], tag[0]), text)
        refuse_tags("<ref-object>|<bbox>", text, place, self.args.ignore)
        return split_media(text, self.args.ignore) if role == "user" else [text]


def only(fields, names, place):
    """The value of the one of these names that is given, or None."""
    given = [name for name in names if name in fields]
    require(len(given) < 2, place, f"it has both {' and '.join(given)}; --ignore one of them")
    return fields[given[0]] if given else None


def refuse_tags(pattern, text, place, ignore):
    for tag in re.findall(pattern, text):
        require(tag in ignore, place, f"{tag} is not read there; --ignore '{tag}' keeps it")


def split_media(text, ignore):
    """A text of the user -> texts and Placeholders."""
    parts = []
    end = 0
    for tag in PLACEHOLDER.finditer(text):
        if tag[0] not in ignore:
            kind = (tag["kind"] or "image").lower()
            parts += [text[end : tag.start()], Placeholder(kind, tag["path"], tag["number"])]
            end = tag.end()
    return [part for part in (*parts, text[end:]) if part]


def read_answer(text, prompt, row, args):
    """-> the fields of a turn of a record: an answer, or boxes or points."""
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
            "it must contain nothing else, one label, and of a box left, top, right, bottom")
    places = [numbers[k : k + n] for k in range(0, len(numbers), n)]
    kind = row["objects"].get("bbox_type") or "real" if form == OBJECT else form
    size = [row[key] for key in RESIZED if key in row] or args.resized
    require(kind in SCALES or size, "an answer with boxes", "they are in pixels of a resized image:"
            " give its size with --resized W,H (1000,1000 for the thousandths of Qwen3-VL)")
    scale = SCALES.get(kind, {"coords": "pixel", "size": size})
    label = {"label": labels.pop()} if labels else {}
    if form == POINT:
        return {"type": "point", **label, **scale, "points": [{"x": x, "y": y} for x, y in places]}
    return {"type": "box", **label, **scale, "form": "xyxy", "boxes": [{"box": p} for p in places]}


def entry_of(value):
    """A path, or an object with a path -> itself; {"url": path} -> path."""
    if isinstance(value, dict):
        value = {key: field for key, field in value.items() if field is not None}
        return value.get("url") if value.keys() <= {"url", "detail"} else value
    return value


def listed(fields):
    """The images and videos that a row or a turn names, under each name -> Placeholders."""
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


def fit(prompts, media, place):
    """Prompts whose placeholders are these media, in order; without any, the media come first."""
    found = placeholders_in(prompts)
    n = len(found)
    numbers = [int(part.number) for part in found if part.number]
    is_in_order = numbers in ([], [*range(n)], [*range(1, n + 1)])
    require(n in (0, len(media)) and is_in_order and not any(part.entry for part in found), place,
            f"its placeholders ({n}) must stand for its images or videos ({len(media)}) in order")
    if not found:
        return [[*media, *prompts[0]], *prompts[1:]]
    media = iter(media)
    return [[part if isinstance(part, str) else next(media) for part in parts] for parts in prompts]


def place_media(row, prompts, ignore):
    """-> the field of media of a record, and the questions as lists of texts and references."""
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
    require(all([*images, *videos]), "the row", "it has a placeholder, but no image or video; "
            "--ignore with the tag, such as --ignore '<video>', keeps it as letters")
    require(len(videos) < 2 and not (images and videos), "the row", "it must have images or "
            f"one video, not {plural(len(images), 'image')} and {plural(len(videos), 'video')}")
    require(videos or not {"start", "end", "fps"} & row.keys(), "start, end, fps", "need a video")
    questions[0] = without_outer_media(questions[0], len(images) + len(videos))
    if videos:
        return {"video": read_video(videos[0], row)}, questions
    if len(images) == 1:
        return {"image": images[0]}, questions
    return {"images": images} if images else {}, questions


def without_outer_media(parts, n_media):
    """The first question without references to all media that open it, or one that closes it."""
    places = [k for k, part in enumerate(parts) if not isinstance(part, str)]
    if not places or len(places) < n_media:
        return parts
    before = "".join(part for part in parts[: places[-1]] if isinstance(part, str))
    after = "".join(parts[places[-1] + 1 :])
    if after.strip() and not before.strip():
        return [after.lstrip()]
    if before.strip() and not after.strip() and len(places) == 1:
        return [before.rstrip()]
    return parts  # also one of nothing but images


def read_video(video, fields):
    """A path, an object or a list of frames -> the same with the clip of the fields."""
    if isinstance(video, list):
        video = {"frames": video, "fps": fields.get("fps")}
    else:
        require("fps" not in fields, "fps", "it is read beside a list of frames; --ignore fps")
    clip = {key: fields[key] for key in ("start", "end") if key in fields}
    return {**as_object(video), **clip} if clip else video
