"""Records to arrays (paper: data, message trees, token weighting; spec 4, 5, 6.1, 7.1, 9).

    record --size--> (tokens, crops)         from text and image headers: what the packer plans with
    record --encode--> Encoded               tokens, targets, weights, positions, mask fields, pixels

A record is one visual input (an image here, or nothing) with annotations. Every annotation becomes a short chat, a
*branch*; all branches share one encoding of the image, the *trunk*, and cannot see each other: the message tree.

    record   {"image": "cat.png", "annotations": [{"type": "caption", ...}, {"type": "point", ...}]}
    trunk    BOS <low_res_im_start> <im_patch>.. <im_end> <im_start> <im_patch>.. <im_col> .. <im_end>
    branch   <|im_start|>user\\nlong_caption 4:<|im_end|>\\n<|im_start|>assistant\\n A tabby cat. <|im_end|>
    branch   <|im_start|>user\\npointing: eye<|im_end|>\\n<|im_start|>assistant\\n <points ...>eye</points> <|im_end|>

All randomness of an example is keyed by (seed, its id, epoch); size makes the same draws as encode, so both agree.
Left out so far: records of several images, video, tracks, dialects (a record that has them is refused with file:line).
"""

import difflib
import hashlib
import json
import math
import re
import sys
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

import media
import vision
from media import Unreadable, header, read_image
from points import format_points, format_tracks, parse_points, unit_points  # noqa: F401 - readers look for them here
from prompts import question_of, turns_of  # noqa: F401
from text import SPECIAL, ByteTokenizer, chat  # noqa: F401
from vision import RELEASED, VisionConfig


@dataclass(frozen=True)
class DataConfig:
    max_tokens: int = 2536           # longest example, and length of a row (Table 12)
    max_crops: int = 8               # high-resolution crops of one image
    max_images: int = 5              # of one example; what comes after them is left out (spec 2.4)
    max_frames: int = 128            # of one video: 16 in stage 1, 128 in stage 2, 384 in stage 3 (spec 3.1)
    fps: float = 2.0                 # frames per second of a video at most
    frame_markers: bool = True       # <frame_start> and <frame_end> around every frame, as released; False: around the video (spec 0.2)
    max_points: int = 60             # an annotation with more is left out and counted (spec 9.3)
    length_hint: int = 65            # "long_caption 65:" when asking for a caption; 0: no number (spec 4.3)
    prefix_all: bool = True          # stage 1: every prompt opens with its style; later only benchmark-like ones do
    separator: str = "\t"            # between groups of points: a tab in stage 1, ";" later (spec 5.1)
    root_length: bool = False        # token weight 2 / sqrt(loss tokens of the branch): stages 2 and 3 (spec 7.1)
    root_branches: bool = False      # token weight 1 / sqrt(branches kept)
    point_weight: float = 1.0        # flat weight of pointing and counting tokens; 0.2 in stages 2 and 3
    vision: VisionConfig = RELEASED  # geometry of crops: as the model's


class DataError(ValueError):
    """A user's mistake in a data file, told in one sentence that names the place."""


# ---------------------------------------------------------------------------------------------------------------
# records: reading and checking (format and codes: formats.md sections 7 and 9, README)

_COMMON = {"type": str, "style": str, "weight": float, "meta": dict}
_TARGET = {"question": str, "answer": str, "answers": list, "options": list, "answer_idx": int, "shuffle_options": bool,
           "letters": bool, "explanation": str}
_RECORD = {"id": str, "image": (str, dict), "annotations": list, "weight": float, "meta": dict}
_IMAGE = {"path": str, "width": int, "height": int, "url": str, "sha256": str}
_ANNOTATION = {
    "caption": {**_COMMON, "text": str},
    "qa": {**_COMMON, **_TARGET, "turns": list, "system": str},
    "point": {**_COMMON, "label": str, "question": str, "coords": str, "size": list, "points": list, "count": int, "mode": str},
    "count": {**_COMMON, "label": str, "question": str, "count": int},
    "text": {**_COMMON, "text": str, "prompt": str},
}
_REQUIRED = {"caption": ["text"], "qa": [], "point": ["coords", "points"], "count": ["count"], "text": ["text"]}
_LATER = {"images": "several images", "video": "video", "subtitles": "subtitles", "conversations": "the ShareGPT form",
          "messages": "the HF messages form", "conversation": "the Mantis form", "texts": "the Cauldron form"}


def _fields(d, known, required, where, what):
    """The keys and types of one JSON object, or a DataError that says which is wrong."""
    if not isinstance(d, dict):
        raise DataError(f"{where}: E05 {what} must be an object, not {type(d).__name__}")
    for key, value in d.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise DataError(f"{where}: E07 unknown field '{key}' in {what}" + (f" - did you mean '{near[0]}'?" if near else ""))
        types = known[key] if isinstance(known[key], tuple) else (known[key],)
        types = (int, float) if types == (float,) else types
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise DataError(f"{where}: E07 '{key}' in {what} must be {'/'.join(t.__name__ for t in types)}, not {json.dumps(value)[:40]}")
        if isinstance(value, str) and key != "id" and not value.strip():
            raise DataError(f"{where}: E07 '{key}' in {what} is blank")
    for key in required:
        if key not in d:
            raise DataError(f"{where}: E07 '{key}' is missing in {what}")


def _check_turn(turn, where, what):
    kinds = [k for k in ("answer", "answers", "options") if k in turn]
    if "question" not in turn:
        raise DataError(f"{where}: E07 'question' is missing in {what}")
    if len(kinds) != 1:
        raise DataError(f"{where}: E07 {what} needs exactly one of answer, answers, options; it has {kinds or 'none'}")
    if "options" in turn:
        if not 2 <= len(turn["options"]) <= 26 or not all(isinstance(o, str) for o in turn["options"]):
            raise DataError(f"{where}: E33 options in {what} must be 2 to 26 strings")
        if not 0 <= turn.get("answer_idx", -1) < len(turn["options"]):
            raise DataError(f"{where}: E33 answer_idx in {what} must be 0 to {len(turn['options']) - 1}, not {turn.get('answer_idx')}")
    if "answers" in turn and not (turn["answers"] and all(isinstance(a, str) and a.strip() for a in turn["answers"])):
        raise DataError(f"{where}: E07 answers in {what} must be strings that are not blank")


def _check_points(a, where, what):
    span = {"unit": (1, 1), "percent": (100, 100), "pixel": tuple(a.get("size", (math.inf, math.inf)))}.get(a["coords"])
    if span is None or len(span) != 2 or not all(isinstance(s, (int, float)) and s > 0 for s in span):
        raise DataError(f"{where}: E07 {what} needs coords unit, percent or pixel, and a size of [width, height] in pixels")
    for p in a["points"]:
        if isinstance(p, dict) and ("t" in p or "image" in p):
            raise DataError(f"{where}: {'E60' if 't' in p else 'E61'} a point of a single image has neither t nor image ({what})")
        _fields(p, {"x": float, "y": float}, ["x", "y"], where, f"a point of {what}")
        check_inside(p, span, where, a["coords"])
    if "count" in a and a["count"] != len(a["points"]):
        raise DataError(f"{where}: S11 {what} has count {a['count']} and {len(a['points'])} points")
    if a.get("mode", "point") not in ("point", "point_count", "count_point"):
        raise DataError(f"{where}: E07 mode in {what} must be point, point_count or count_point, not '{a['mode']}'")


def check_inside(p, span, where, coords):
    """Up to 1 % outside is clipped later (W01); more is a mistake of units or of size."""
    for axis, size in zip("xy", span, strict=True):
        if not -0.01 * size <= p[axis] <= 1.01 * size:
            raise DataError(f"{where}: E62 point {axis}={p[axis]} lies outside 0..{size:g} (coords={coords}) - wrong units?")


def check(record, where):
    """Raises DataError unless the record is one that this project can train on; where: 'file:line'."""
    for key, name in _LATER.items():
        if isinstance(record, dict) and key in record:
            raise DataError(f"{where}: E06 {name} ('{key}') cannot be trained on yet: only one image, or text alone")
    if isinstance(record, dict) and "annotations" not in record and not {"image", "id", "weight"} & set(record):
        raise DataError(f"{where}: E06 no 'annotations': not a record of a known form; its fields are {', '.join(record) or 'none'}")
    _fields(record, _RECORD, ["annotations"], where, "the record")
    if not record["annotations"]:
        raise DataError(f"{where}: E07 annotations is empty")
    image = record.get("image")
    if isinstance(image, dict):
        _fields(image, _IMAGE, ["path"], where, "image")
        if min(image.get("width", 1), image.get("height", 1)) < 1:
            raise DataError(f"{where}: E07 width and height of image must be at least 1 pixel")
    path = image["path"] if isinstance(image, dict) else image
    if path is not None and (re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path) or "\0" in path
                             or Path(path).is_absolute() or ".." in Path(path).parts):
        raise DataError(f"{where}: E10 image path '{path}' must lie below the media folder: no URL, no '..', not absolute")
    if record.get("weight", 1) <= 0:
        raise DataError(f"{where}: E07 weight must be above 0, not {record['weight']}")
    for i, a in enumerate(record["annotations"]):
        what = f"annotations[{i}]"
        kind = a.get("type") if isinstance(a, dict) else None
        if kind == "track":
            raise DataError(f"{where}: E50 {what} is a track, which needs a video")
        if kind not in _ANNOTATION:
            near = difflib.get_close_matches(str(kind), _ANNOTATION, 1)
            raise DataError(f"{where}: E07 {what} has type '{kind}', not one of {', '.join(_ANNOTATION)}"
                            + (f" - did you mean '{near[0]}'?" if near else ""))
        if kind == "qa" and isinstance(a.get("question"), list):
            raise DataError(f"{where}: E07 {what}: a question in parts needs several images, which cannot be trained on yet")
        _fields(a, _ANNOTATION[kind], _REQUIRED[kind], where, what)
        if a.get("weight", 1) < 0:
            raise DataError(f"{where}: E07 weight in {what} is negative")
        if kind in ("caption", "point", "count") and image is None:
            raise DataError(f"{where}: E50 {what} is a {kind}, but the record has no image")
        if kind == "qa":
            if ("turns" in a) == ("question" in a):
                raise DataError(f"{where}: E07 {what} needs either turns or a question")
            for j, turn in enumerate(a.get("turns", [])):
                _fields(turn, _TARGET, [], where, f"{what}.turns[{j}]")
            if a.get("turns") == []:
                raise DataError(f"{where}: E25 turns in {what} is empty")
            for turn in a.get("turns", [a]):
                _check_turn(turn, where, what)
        if kind in ("point", "count") and "label" not in a and "question" not in a:
            raise DataError(f"{where}: E07 {what} needs a label or a question")
        if kind == "point":
            _check_points(a, where, what)
        if a.get("count", 0) < 0:
            raise DataError(f"{where}: E07 count in {what} is negative")


def _sound(value):
    """No text in a JSON value holds what no file can: half of a surrogate pair, or a NUL."""
    if isinstance(value, dict):
        return all(_sound(k) and _sound(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_sound, value))
    return not isinstance(value, str) or not re.search("[\ud800-\udfff\\0]", value)


def parse_line(line, where):
    """One line of JSON -> dict; refuses what Python's json lets pass (NaN, a key given twice)."""

    def pairs(items):
        d = dict(items)
        if len(d) < len(items):
            keys = [k for k, _ in items]
            raise DataError(f"{where}: E04 the key '{next(k for k in keys if keys.count(k) > 1)}' is given twice")
        return d

    def number(text):
        if not math.isfinite(float(text)):
            raise DataError(f"{where}: E03 {text[:20]} is no finite number")
        return float(text)

    def integer(text):
        if len(text) > 18:
            raise DataError(f"{where}: E01 an integer of {len(text)} digits")
        return int(text)

    try:
        record = json.loads(line, object_pairs_hook=pairs, parse_constant=number, parse_float=number, parse_int=integer)
    except json.JSONDecodeError as e:
        hint = " - truncated?" if e.pos >= len(line.rstrip()) else ""
        raise DataError(f"{where}: E01 not JSON: {e.msg} at column {e.colno}{hint}") from None
    except RecursionError:
        raise DataError(f"{where}: E01 nested too deeply") from None
    if re.search(r"\\u(d[89a-f]|0000)", line, re.IGNORECASE) and not _sound(record):
        raise DataError(f"{where}: E02 half of a surrogate pair, or a NUL, in a text")
    return record


class Records:
    """A .jsonl file of native records and the folder of their images. `source[i]` -> record with id and where."""

    def __init__(self, path, media=None):
        self.path = Path(path)
        if not self.path.exists():
            raise DataError(f"{path}: no such file")
        if self.path.is_dir():
            raise DataError(f"{path}: a folder; name the .jsonl file in it")
        beside = self.path.parent / "media"
        self.media = Path(media) if media else beside if beside.is_dir() else self.path.parent
        if not self.media.is_dir():
            raise DataError(f"--media {media}: no such folder")
        self.name, self.records, ids = self.path.name, [], set()
        try:
            lines = self.path.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as e:
            raise DataError(f"{path}: E02 not UTF-8 at byte {e.start}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            record = parse_line(line, where)
            check(record, where)
            record = {**record, "id": record.get("id", f"{self.path.name}:{number}"), "where": where, "source": self}
            if record["id"] in ids:
                print(f"{where}: E08 the id '{record['id']}' was given before", file=sys.stderr)
            ids.add(record["id"])
            self._scale_pixels(record)
            self.records.append(record)
        if not self.records:
            raise DataError(f"{path}: E05 the file holds no record")

    def _scale_pixels(self, record):
        """Points in pixels without a size are on the scale that the image entry declares, else the file's own, which
        only its header tells; then their range is checked (formats 7.3)."""
        loose = [a for a in record["annotations"] if a["type"] == "point" and a["coords"] == "pixel" and "size" not in a]
        if not loose:
            return
        image = record["image"]
        if isinstance(image, dict) and {"width", "height"} <= set(image):
            span = image["width"], image["height"]
            for a in loose:
                a["size"] = list(span)
        else:
            try:
                span = self.image_size(record)
            except Unreadable:
                return                                                    # counted as a skip when its turn comes
        for p in (p for a in loose for p in a["points"]):
            check_inside(p, span, record["where"], "pixel")

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        return self.records[i]

    @property
    def fingerprint(self):
        """Of all that the file says: ties a plan made ahead to it."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def path_of(self, record):
        image = record["image"]
        return self.media / (image["path"] if isinstance(image, dict) else image)

    def image_size(self, record):
        """(width, height) as displayed, from the file's header."""
        return header(self.path_of(record))

    def image(self, record):
        """(H,W,3) uint8 as displayed; Unreadable if the file is cut short or damaged."""
        return read_image(self.path_of(record))


# ---------------------------------------------------------------------------------------------------------------
# message tree -> arrays (spec 6.1, 7.1)


@dataclass(frozen=True)
class Branch:
    segments: list                   # [(ids, learn), ..]; the last id is a target only, never an input
    weight: float = 1.0
    root_length: bool = False        # times 2 / sqrt(n): n loss tokens, without the final EOS if there are several branches
    root_branches: bool = False      # times 1 / sqrt(branches kept)


@dataclass
class Encoded:
    """One example, laid out. Rows of pool_src point into this example's own crops, pool_dst into its own tokens."""
    tokens: np.ndarray               # (T,) int64, as are targets and pos
    targets: np.ndarray
    weights: np.ndarray              # (T,) float32
    pos: np.ndarray
    branch: np.ndarray               # (T,) int32, as is bidir
    bidir: np.ndarray
    dropped: int = 0                 # branches that did not fit
    dropped_tokens: int = 0          # and their tokens
    id: str = ""
    images: np.ndarray = None        # (n,P,F) uint8
    pool_src: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    pool_dst: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    bad: str = ""                    # why its pixels could not be had: then it is `blank`


def layout(trunk, visual, branches, max_tokens=None):
    """trunk ids, visual (which of them are visual tokens, bool), branches -> Encoded without pixels.

        tokens   b I I I | Q Q A A | q a a        trunk, then the branches one after another
        targets  I I I Q | Q A A $ | a a $        next token; the last of a branch aims at EOS ($)
        loss     . . . . | . # # # | # # #
        pos      0 1 2 3 | 4 5 6 7 | 4 5 6        every branch restarts at the end of the trunk
        branch   0 0 0 0 | 1 1 1 1 | 2 2 2        a single branch is no tree: all 0

    The first branch that would run past max_tokens is left out, and all after it.
    """
    kept, room, dropped_tokens = [], math.inf if max_tokens is None else max_tokens - len(trunk), 0
    for branch in branches:
        ids = [i for segment, _ in branch.segments for i in segment]
        learn = [flag for segment, flag in branch.segments for _ in segment]
        room = room - (len(ids) - 1) if room >= 0 else room
        if room >= 0:
            kept.append((branch, ids, learn))
        else:
            dropped_tokens += len(ids) - 1
    tree = len(kept) > 1

    tokens, targets, weights = list(trunk), list(trunk[1:]), [0.0] * len(trunk)
    pos, number = list(range(len(trunk))), [0] * len(trunk)
    for j, (branch, ids, learn) in enumerate(kept, 1):
        w = branch.weight
        if branch.root_length:
            w *= 2 / max(sum(learn[:-1] if tree else learn), 1) ** 0.5
        if branch.root_branches:
            w /= len(kept) ** 0.5
        if j == 1:
            targets.append(ids[0])                                        # what the trunk's last token aims at
            weights[-1] = w * learn[0] * (not tree)
        tokens += ids[:-1]
        targets += ids[1:]
        weights += [w * flag for flag in learn[1:]]
        pos += range(len(trunk), len(trunk) + len(ids) - 1)
        number += [j if tree else 0] * (len(ids) - 1)
    if not kept:
        targets.append(0)
    bidir = np.zeros(len(tokens), np.int32)
    bidir[: len(trunk)] = visual
    return Encoded(np.array(tokens), np.array(targets), np.array(weights, np.float32), np.array(pos),
                   np.array(number, np.int32), bidir, dropped=len(branches) - len(kept), dropped_tokens=dropped_tokens)


def image_ids(w, h, tokenizer, config):
    """The visual tokens of an image (spec 2.3): ids. Low-resolution view first; column ends only in the mosaic."""
    s = tokenizer.special
    low, high, _ = vision.pooled_grids(h, w, config.max_crops, config.vision)
    return ([s["low_res_im_start"]] + [s["im_patch"]] * (low[0] * low[1]) + [s["im_end"]]
            + [s["im_start"]] + ([s["im_patch"]] * high[1] + [s["im_col"]]) * high[0] + [s["im_end"]])


def visual_ids(sizes, tokenizer, config):
    """What follows BOS: ids, and which of them are visual tokens. sizes: [(width, height), ..] of the images in their order;
    where there are several, the text "Image 1" and so on comes before each (spec 2.4)."""
    ids, visual = [], []
    for k, (w, h) in enumerate(sizes[: config.max_images], 1):
        name, image = tokenizer.encode(f"Image {k}") if len(sizes) > 1 else [], image_ids(w, h, tokenizer, config)
        ids += name + image
        visual += [False] * len(name) + [True] * len(image)
    return ids, visual


def visual_crops(images, config):
    """[(H,W,3), ..] -> crops (n,P,F) uint8 of all of them, and pool_src (M,4) into these (spec 2.4)."""
    return _joined((vision.crops(image, config.max_crops, config.vision) for image in images[: config.max_images]), config)


def _joined(parts, config):
    crops, sources, shift = [], [], 0
    for patches, pool_src in parts:
        crops.append(patches)
        sources.append(np.where(pool_src < 0, -1, pool_src + shift))
        shift += len(patches) * config.vision.n_patch
    return np.concatenate(crops), np.concatenate(sources)


@dataclass
class Clip:
    """A video as it is looked at: when, and what is shown then."""
    times: list                      # seconds from its start (vision.frame_times)
    frames: object                   # (H,W,3) uint8 for each time; may decode as it goes
    subtitles: object = None         # [(start, end, text), ..] in the same seconds, or one text that is shown always


def subtitle_text(subtitles, times):
    """What of the subtitles is read: entries that touch a second before or after a frame that is seen (spec 3.2)."""
    if not subtitles or isinstance(subtitles, str):
        return f"subtitle\n{subtitles}" if subtitles else ""
    near = [(a, b, words) for a, b, words in subtitles if any(a <= t + 1 and b >= t - 1 for t in times)]
    return "subtitle\n" + "".join(f"{a:.1f} - {b:.1f} {words}\n" for a, b, words in near) if near else ""


def video_ids(times, subtitles, tokenizer, config):
    """The tokens of a video: ids, and which of them are visual (spec 3.2). 0.0 and 0.5 are text, and so are subtitles.

    0.0 <frame_start> 81 x <im_patch> <frame_end> 0.5 <frame_start> .. <frame_end> subtitle
    """
    first, last = [tokenizer.special["frame_start"]], [tokenizer.special["frame_end"]]
    patches = [tokenizer.special["im_patch"]] * (-(-config.vision.grid // 3)) ** 2
    parts = [] if config.frame_markers else [(first, True)]
    for k, t in enumerate(times):
        parts.append((tokenizer.encode(f"{' ' if k else ''}{t:.1f} "), False))
        parts.append((first + patches + last if config.frame_markers else patches, True))
    parts += [] if config.frame_markers else [(last, True)]
    parts.append((tokenizer.encode(subtitle_text(subtitles, times)), False))
    return [i for ids, _ in parts for i in ids], [visual for ids, visual in parts for _ in ids]


def open_clip(path, config, subtitles=None, start=0.0, end=math.inf):
    """A video file -> (Clip, what media.probe tells of it), its frames decoded as they are asked for; Unreadable if it is none.

    start, end and the subtitles in seconds of the file; the clip's own time starts at 0 (spec 3.1, formats 7.2).
    """
    video = media.probe(path)
    end = min(end, video.duration)
    if not 0 <= start < end and (start or video.duration):                # a single picture lasts no time
        raise Unreadable(f"S22 {path}: from {start:g} to {end:g} s there is nothing of its {video.duration:g} s")
    times = vision.frame_times(end - start, config.max_frames, config.fps)
    if subtitles and not isinstance(subtitles, str):
        subtitles = [(a - start, b - start, words) for a, b, words in subtitles]
    return Clip(times, media.frames(video, [start + t for t in times]), subtitles), video


def keyed(seed, *key):
    """A generator for the seed and anything else (numbers or strings): the same on every machine and in every process."""
    return np.random.default_rng([seed, *(zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key)])


def arrange(record, size, tokenizer, config, seed, epoch):
    """Everything of an example but its pixels -> Encoded. size: (width, height) of its image, or None."""
    rng = keyed(seed, record["id"], epoch)
    ids, visual = visual_ids([size] if size else [], tokenizer, config)
    branches, crowded = [], 0
    for i in rng.permutation(len(record["annotations"])):
        a = record["annotations"][i]
        if len(a.get("points", ())) > config.max_points:
            crowded += 1
            continue
        # a text without a prompt is learned as it stands, outside any chat
        bare = a["type"] == "text" and "prompt" not in a
        if bare:
            segments = [(tokenizer.encode(a["text"]) + [tokenizer.eos], True)]
        else:
            segments = chat(turns_of(a, record, [size] if size else [], config, rng), tokenizer)
        weight = record.get("weight", 1.0) * a.get("weight", 1.0)
        if a["type"] in ("point", "count"):                                                  # flat: no roots (spec 7.1)
            branches.append(Branch(segments, weight * config.point_weight))
        else:
            branches.append(Branch(segments, weight, config.root_length, config.root_branches))
    example = layout([tokenizer.bos, *ids], [False, *visual], branches, config.max_tokens)
    example.id, example.dropped = record["id"], example.dropped + crowded
    return example


def measured(record, tokenizer, config, seed, epoch):
    """-> (tokens, crops) and the Encoded without pixels that they were counted from. (0, 0) if nothing with loss fits the row."""
    pixels = record["source"].image_size(record) if "image" in record else None
    example = arrange(record, pixels, tokenizer, config, seed, epoch)
    if example.weights.max(initial=0) == 0:
        return (0, 0), example
    return (len(example.tokens), vision.pooled_grids(*pixels[::-1], config.max_crops, config.vision)[2] if pixels else 0), example


def size(record, tokenizer, config, seed, epoch):
    """(tokens, crops) of an example, without decoding. (0, 0) if nothing with loss fits the row (S03, S04).

    record: from a source (Records, or the toy world), which knows where its image is; Unreadable if it cannot be opened.
    """
    return measured(record, tokenizer, config, seed, epoch)[0]


def encode(record, tokenizer, config, seed, epoch):
    """A record -> Encoded; Unreadable if its image cannot be decoded."""
    if "image" not in record:
        return arrange(record, None, tokenizer, config, seed, epoch)
    example = arrange(record, record["source"].image_size(record), tokenizer, config, seed, epoch)
    example.images, example.pool_src = visual_crops([record["source"].image(record)], config)
    example.pool_dst = np.flatnonzero(example.tokens == tokenizer.special["im_patch"])
    return example


def blank(name, tokens, crops, config, reason):
    """What stands in a row for a record that turned out bad while decoding -> Encoded of the size that was planned, without loss."""
    zeros = [np.zeros(tokens, kind) for kind in (np.int64, np.int64, np.float32, np.int64, np.int32, np.int32)]
    pixels = np.zeros((crops, config.vision.n_patch, config.vision.n_pixel), np.uint8) if crops else None
    return Encoded(*zeros, id=name, images=pixels, bad=reason)


def ask(images, turns, tokenizer, config, clip=None):
    """A prompt to be continued -> Encoded. images: [(H,W,3) uint8, ..], may be empty; clip: a Clip instead of images;
    turns: [(question, answer), .., (question, None)]."""
    assert not (images and clip), "images and a video at once are no input of Molmo2"
    if clip:
        ids, visual = video_ids(clip.times, clip.subtitles, tokenizer, config)
    else:
        ids, visual = visual_ids([image.shape[1::-1] for image in images], tokenizer, config)
    segments = chat(turns, tokenizer) + [([0], False)]                    # a target for the last token, never an input
    example = layout([tokenizer.bos, *ids], [False, *visual], [Branch(segments)])
    if clip:
        example.images, example.pool_src = _joined((vision.frame(frame, config.vision) for frame in clip.frames), config)
    elif images:
        example.images, example.pool_src = visual_crops(images, config)
    if clip or images:
        example.pool_dst = np.flatnonzero(example.tokens == tokenizer.special["im_patch"])
    return example


# ---------------------------------------------------------------------------------------------------------------
# mixtures


@lru_cache(maxsize=64)
def _shuffled(n, *key):
    return keyed(*key).permutation(n)


@lru_cache(maxsize=1024)
def _round_keys(*key):
    return keyed(*key).integers(1 << 32, size=4, dtype=np.uint64).tolist()


def permuted(i, n, *key):
    """Where the keyed permutation of 0..n-1 sends i, without holding the permutation: a Feistel network of four rounds.

    It shuffles the numbers of an even number of bits, of which n may not be one: what lands at n or above goes round again.
    """
    half = max((n - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for k in _round_keys(*key):
            mixed = (right + k) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF           # multiply and fold: every bit reaches every other
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 32) & mask
        i = left << half | right
        if i < n:
            return i


class Mixture:
    """Draw i -> (source, index, epoch), a function of (seed, i) alone: no state, any draw at once.

    Shares are exact: of any first n draws (n a multiple of `block`) source k has its rate's share to within one per
    source before it; inside a block the order is shuffled. Every epoch of a source is a permutation of it (spec 9).
    """

    def __init__(self, sources, rates, seed, block=1000):
        assert len(sources) == len(rates) > 0 and min(rates) > 0, rates
        self.sources, self.seed, self.block = sources, seed, block
        # the first source takes its share of all draws, the next its share of what is left, and so on
        left = np.cumsum(np.array(rates, np.float64)[::-1])[::-1]
        self.shares = (np.array(rates) / left).tolist()

    def __getitem__(self, i):
        block, r = divmod(i, self.block)
        n = block * self.block + int(_shuffled(self.block, self.seed, "block", block)[r])
        for k, share in enumerate(self.shares):
            before, after = math.floor(n * share), math.floor((n + 1) * share)
            if after > before or k == len(self.shares) - 1:
                n = before if k < len(self.shares) - 1 else n
                source = self.sources[k]
                epoch, j = divmod(n, len(source))
                ordered = getattr(source, "ordered", False)               # an endless source that comes as it is
                return k, j if ordered else permuted(j, len(source), self.seed, source.name, epoch), epoch
            n -= before


if __name__ == "__main__":
    from tools import stats  # `python data.py stats FILE`

    stats.main(sys.argv[1:])
