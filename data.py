"""Records to arrays (paper: data, message trees, token weighting; spec 4, 5, 6.1, 7.1, 9).

    record --size--> (tokens, crops)         from text and image headers: what the packer plans with
    record --encode--> Example               tokens, targets, weights, positions, mask fields, pixels

A record is one visual input (an image, several, a video, or nothing) with annotations (records.py). Every annotation becomes
a short chat, a *branch*; all branches share one encoding of what is seen, the *trunk*, and cannot see each other: the message tree.

    record   {"image": "cat.png", "annotations": [{"type": "caption", ...}, {"type": "point", ...}]}
    trunk    BOS <low_res_im_start> <im_patch>.. <im_end> <im_start> <im_patch>.. <im_col> .. <im_end>
    branch   <|im_start|>user\\nlong_caption 4:<|im_end|>\\n<|im_start|>assistant\\n A tabby cat. <|im_end|>
    branch   <|im_start|>user\\npointing: eye<|im_end|>\\n<|im_start|>assistant\\n <points ...>eye</points> <|im_end|>

All randomness of an example is rng_for by (seed, its id, epoch); size makes the same draws as encode, so both agree.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

import vision
from mixture import Mixture, permute_index, rng_for  # noqa: F401
from records import media
from records.media import Unreadable
from records.reader import DataError, Options, Records, check, parse_line  # noqa: F401
from text.points import format_points, format_tracks, parse_points, unit_points  # noqa: F401 - readers look for them here
from text.prompts import question_of, turns_of  # noqa: F401
from text.tokenizer import SPECIAL, ByteTokenizer, chat  # noqa: F401
from vision import RELEASED, VisionConfig


@dataclass(frozen=True)
class DataConfig:
    max_tokens: int = 2536           # longest example, and length of a row (Table 12)
    max_crops: int = 8               # high-resolution crops of one image
    max_images: int = 5              # of one record; one with more is left out and counted (spec 2.4)
    max_frames: int = 128            # of one video: 16 in stage 1, 128 in stage 2, 384 in stage 3 (spec 3.1)
    fps: float = 2.0                 # frames per second of a video at most
    frame_markers: bool = True       # <frame_start> and <frame_end> around every frame, as released; False: around the video (spec 0.2)
    max_points: int = 60             # an annotation with more is left out and counted (spec 9.3)
    n_transcripts: int = 1             # of the spoken descriptions of an image, so many are read per epoch; 0 in stages 2 and 3 (spec 9.3)
    length_hint: int = 65            # "long_caption 65:" when asking for a caption; 0: no number (spec 4.3)
    prefix_all: bool = True          # stage 1: every prompt opens with its style; later only benchmark-like ones do
    separator: str = "\t"            # between groups of points: a tab in stage 1, ";" later (spec 5.1)
    sqrt_length: bool = False        # token weight 2 / sqrt(loss tokens of the branch): stages 2 and 3 (spec 7.1)
    sqrt_branches: bool = False      # token weight 1 / sqrt(branches kept)
    point_weight: float = 1.0        # flat weight of pointing, counting and tracking tokens; 0.2 in stages 2 and 3
    video_caption_weight: float = 1.0        # flat weight of the captions of videos; 0.1 in stages 2 and 3
    vision: VisionConfig = RELEASED  # geometry of crops: as the model's


# ---------------------------------------------------------------------------------------------------------------
# message tree -> arrays (spec 6.1, 7.1)


@dataclass(frozen=True)
class Branch:
    segments: list                   # [(ids, learn), ..], learn a factor of the weight, 0: read only; the last id is a target only
    weight: float = 1.0
    sqrt_length: bool = False        # times 2 / sqrt(n): n loss tokens, without the final EOS if there are several branches
    sqrt_branches: bool = False      # times 1 / sqrt(branches kept)


@dataclass
class Example:
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
    images: np.ndarray = None        # (n,P,F) uint8; of a CropShard, its crops only
    unit: np.ndarray = None          # (n,) int32, which image or frame a crop belongs to
    owner: np.ndarray = None         # (n,) int32, of a CropShard: the rank that has each crop
    pool_src: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    pool_dst: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    source: str = ""                 # the name of the source it was drawn from
    bad: str = ""                    # why its pixels could not be had: then it is `blank`


def layout(trunk, visual, branches, max_tokens=None):
    """trunk ids, visual (which of them are visual tokens, bool), branches -> Example without pixels.

        tokens   b I I I | Q Q A A | q a a        trunk, then the branches one after another
        targets  I I I Q | Q A A $ | a a $        next token; the last of a branch aims at EOS ($)
        loss     . . . . | . # # # | # # #
        pos      0 1 2 3 | 4 5 6 7 | 4 5 6        every branch restarts at the end of the trunk
        branch   0 0 0 0 | 1 1 1 1 | 2 2 2        a single branch is no tree: all 0

    The first branch that would run past max_tokens is left out, and all after it; but one that is too long by itself, before any
    was kept, is left out alone: whether an example can be used does not hang on the order of its branches.
    """
    kept, room, full, dropped_tokens = [], math.inf if max_tokens is None else max_tokens - len(trunk), False, 0
    for branch in branches:
        ids = [i for segment, _ in branch.segments for i in segment]
        learn = [flag for segment, flag in branch.segments for _ in segment]
        full = full or (len(ids) - 1 > room and bool(kept))
        if full or len(ids) - 1 > room:
            dropped_tokens += len(ids) - 1
        else:
            kept.append((branch, ids, learn))
            room -= len(ids) - 1
    tree = len(kept) > 1

    tokens, targets, weights = list(trunk), list(trunk[1:]), [0.0] * len(trunk)
    pos, number = list(range(len(trunk))), [0] * len(trunk)
    for j, (branch, ids, learn) in enumerate(kept, 1):
        w = branch.weight
        if branch.sqrt_length:
            w *= 2 / max(sum(flag > 0 for flag in (learn[:-1] if tree else learn)), 1) ** 0.5
        if branch.sqrt_branches:
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
    return Example(np.array(tokens), np.array(targets), np.array(weights, np.float32), np.array(pos),
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
    """[(H,W,3), ..] -> crops (n,P,F) uint8 of all of them (spec 2.4)."""
    none = np.zeros((0, config.vision.n_patch, config.vision.n_pixel), np.uint8)
    return np.concatenate([none, *(vision.crops(image, config.max_crops, config.vision)[0] for image in images[: config.max_images])])


def frame_crops(frames, n, config):
    """n frames (H,W,3), one at a time -> crops (n,P,F) uint8 (spec 3.2).

    Into an array of its full size from the start: small pieces kept between frames of 11 MB tear the memory of a process apart (384
    frames of 720p: 1.2 GiB instead of 0.5).
    """
    crops, k = np.empty((n, config.vision.n_patch, config.vision.n_pixel), np.uint8), -1
    for k, frame in enumerate(frames):
        crops[k] = vision.frame(frame, config.vision)[0][0]
    assert k == n - 1, f"{k + 1} frames came, not {n}"
    return crops


def pool_windows(sight, config):
    """pool_src (M,4) of images or (M,9) of frames, into the crops of all of them, one after the other (spec 2.3, 3.2)."""
    if sight.times is not None:
        each = [vision.frame_windows(config.vision)] * len(sight.times)
    else:
        grids = [vision.tiling(h, w, config.max_crops, config.vision) for w, h in sight.sizes[: config.max_images]]
        each = [vision.image_windows(*grid, config.vision) for grid in grids]
    starts = np.cumsum([0, *crops_per_image(sight, config)]) * config.vision.n_patch
    return np.concatenate([np.where(source < 0, -1, source + start) for source, start in zip(each, starts[:-1], strict=True)])


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
    patches = [tokenizer.special["im_patch"]] * len(vision.frame_windows(config.vision))
    parts = [] if config.frame_markers else [(first, True)]
    for k, t in enumerate(times):
        parts.append((tokenizer.encode(f"{' ' if k else ''}{t:.1f} "), False))
        parts.append((first + patches + last if config.frame_markers else patches, True))
    parts += [] if config.frame_markers else [(last, True)]
    parts.append((tokenizer.encode(subtitle_text(subtitles, times)), False))
    return [i for ids, _ in parts for i in ids], [visual for ids, visual in parts for _ in ids]


def clip_times(duration, config, start=0.0, end=math.inf):
    """Seconds from the start of a clip at which it is looked at, and the end of the clip in seconds of the file (spec 3.1, formats 7.2).

    Unreadable where the clip lies outside what the file holds.
    """
    end = min(end, duration)
    if not math.isfinite(end):
        raise Unreadable(f"S23 it lasts {end} s")
    if not 0 <= start < end and (start or duration):                      # a single picture lasts no time
        raise Unreadable(f"S23 from {start:g} to {end:g} s there is nothing of its {duration:g} s")
    return vision.frame_times(end - start, config.max_frames, config.fps), end


def shift_subtitles(subtitles, start):
    """Subtitles in seconds of the file -> in seconds of a clip that starts there."""
    if not subtitles or isinstance(subtitles, str):
        return subtitles
    return [(max(a - start, 0.0), b - start, words) for a, b, words in subtitles if b >= start]


def open_clip(path, config, subtitles=None, start=0.0, end=math.inf):
    """A video file -> (Clip, what media.probe tells of it), its frames decoded as they are asked for; Unreadable if it is none.

    start, end and the subtitles in seconds of the file; the clip's own time starts at 0 (spec 3.1, formats 7.2).
    """
    video = media.probe(path)
    times, _ = clip_times(video.duration, config, start, end)
    return Clip(times, media.frames(video, [start + t for t in times]), shift_subtitles(subtitles, start)), video


@dataclass
class MediaInfo:
    """What a record shows, as headers tell: what its tokens and its questions are made from."""
    sizes: list = field(default_factory=list)            # (width, height) of the images, or of the video
    times: list = None                                   # of a video: seconds of the clip at which it is looked at
    subtitles: object = None                             # in seconds of the clip


def read_headers(record, config):
    """A record -> MediaInfo, without decoding; Unreadable with the reason if its media are no good, or its times lie outside them (S10)."""
    source = record["source"]
    if "video" not in record:
        sizes = source.image_sizes(record) if "image" in record or "images" in record else []
        if len(sizes) > config.max_images:
            raise Unreadable(f"S03 {len(sizes)} images; --data.max_images is {config.max_images}")
        return MediaInfo(sizes)
    w, h, duration, shown = source.video_size(record)
    _, start, end = source.video_of(record)
    times, end = clip_times(duration, config, start, end)
    tracks = [a.get("fps", 2) for a in record["annotations"] if a["type"] == "track"]
    if tracks:                       # frames where the tracks have points: multiples of their rate that divide the film's (spec 3.1)
        own, film = max(int(min(tracks)), 1), round(0.5 / shown) if shown else 0     # a film of one frame may last no time
        times = vision.track_times(end - start, config.max_frames, [r for r in range(own, 11, own) if film % r == 0] or [own]) or [0.0]
    for i, a in enumerate(record["annotations"]):
        said = [p["t"] for p in a.get("points", ())] + [a[key] for key in ("start", "end", "at") if key in a] + a.get("times", [])
        said += [a["query"]["t"]] if "query" in a else []
        for t in said:
            if not start - shown <= t <= end + shown:                     # half a frame is allowed
                raise Unreadable(f"S10 annotations[{i}] is at {t:g} s; the clip is {start:g} to {end:g} s")
    entries = record.get("subtitles")
    if entries and not isinstance(entries, str):
        entries = [(s["start"], s["end"], s["text"]) for s in entries]
    return MediaInfo([(w, h)], times, shift_subtitles(entries, start))


def crops_per_image(sight, config):
    """How many crops each unit of a MediaInfo has: an image all of its own, a frame one."""
    if sight.times is not None:
        return [1] * len(sight.times)
    return [vision.pooled_grids(h, w, config.max_crops, config.vision)[2] for w, h in sight.sizes[: config.max_images]]


@dataclass(frozen=True)
class CropShard:
    """What of a row one of `cp` ranks decodes and encodes: the units whose middle lies in its part of the row's crops. No rank is
    further from an even share than one unit."""
    rank: int
    cp: int
    before: int                      # crops in the row before this example
    total: int                       # in all of the row

    def owners(self, units):
        """Crops of each unit -> (n,) the rank whose each of them is."""
        units = np.asarray(units, np.int64)
        return ((self.before + units.cumsum() - units / 2) * self.cp / max(self.total, 1)).astype(np.int32).clip(0, self.cp - 1)


def select_crops(example, share):
    """An Example with all of its crops -> with those of one rank only."""
    if example.unit is None:
        return example
    units, of_crop = np.unique(example.unit, return_inverse=True)
    owner = share.owners(np.bincount(of_crop, minlength=len(units)))[of_crop]
    return replace(example, images=example.images[owner == share.rank], owner=owner)


def build_tree(record, sight, tokenizer, config, seed, epoch):
    """Everything of an example but its pixels -> Example."""
    rng = rng_for(seed, record["id"], epoch)
    if sight.times is not None:
        ids, visual = video_ids(sight.times, sight.subtitles, tokenizer, config)
    else:
        ids, visual = visual_ids(sight.sizes, tokenizer, config)
    branches, crowded, spoken = [], 0, 0
    for i in rng.permutation(len(record["annotations"])):
        a = record["annotations"][i]
        spoken += a.get("style") == "transcript"
        if a.get("style") == "transcript" and spoken > config.n_transcripts:
            continue                                                      # its turn comes in another epoch
        if a["type"] != "track" and len(a.get("points", ())) > config.max_points:
            crowded += 1
            continue
        # a text without a prompt is learned as it stands, outside any chat
        bare = a["type"] == "text" and "prompt" not in a
        if bare:
            segments = [(tokenizer.encode(a["text"]) + [tokenizer.eos], True)]
        else:
            segments = chat(turns_of(a, record, sight.sizes, config, rng, sight.times), tokenizer)
            of_turns = [turn.get("weight", 1) for turn in a.get("turns", ())]        # a turn of weight 0 is context
            segments = [(ids, learn * of_turns[k // 2] if of_turns else learn) for k, (ids, learn) in enumerate(segments)]
        weight = record.get("weight", 1.0) * a.get("weight", 1.0)
        if a["type"] in ("point", "count", "track"):                      # flat: no roots (spec 7.1)
            branches.append(Branch(segments, weight * config.point_weight))
        elif a["type"] == "caption" and sight.times is not None:
            branches.append(Branch(segments, weight * config.video_caption_weight))
        else:
            branches.append(Branch(segments, weight, config.sqrt_length, config.sqrt_branches))
    example = layout([tokenizer.bos, *ids], [False, *visual], branches, config.max_tokens)
    example.id, example.dropped = record["id"], example.dropped + crowded
    return example


def size_and_tokens(record, tokenizer, config, seed, epoch):
    """-> (tokens, crops) and the Example without pixels that they were counted from. (0, 0) if nothing with loss fits the row."""
    sight = read_headers(record, config)
    example = build_tree(record, sight, tokenizer, config, seed, epoch)
    if example.weights.max(initial=0) == 0:
        return (0, 0), example
    return (len(example.tokens), sum(crops_per_image(sight, config))), example


def size(record, tokenizer, config, seed, epoch):
    """(tokens, crops) of an example, without decoding. (0, 0) if nothing with loss fits the row (S03, S04).

    record: from a source (Records, or the toy world), which knows where its media are; Unreadable if they cannot be used.
    """
    return size_and_tokens(record, tokenizer, config, seed, epoch)[0]


def encode(record, tokenizer, config, seed, epoch, share=None):
    """A record -> Example; Unreadable if its media cannot be decoded. share: decode the units of this CropShard only."""
    sight = read_headers(record, config)
    example = build_tree(record, sight, tokenizer, config, seed, epoch)
    if not sight.sizes:
        return example
    units = np.array(crops_per_image(sight, config))
    owner = share.owners(units) if share else np.zeros(len(units), np.int32)
    mine = np.flatnonzero(owner == share.rank) if share else np.arange(len(units))
    if sight.times is not None:
        example.images = frame_crops(record["source"].frames(record, [sight.times[k] for k in mine]), len(mine), config)
    else:
        example.images = visual_crops(record["source"].images(record, mine), config)
        if len(example.images) != units[mine].sum():
            raise Unreadable(f"S21 {record['where']}: its images have other sizes than their headers say")
    place_pixels(example, sight, tokenizer, config)
    example.owner = owner[example.unit] if share else None
    return example


def place_pixels(example, sight, tokenizer, config):
    """Adds to an Example which crops its visual tokens pool, and where these stand."""
    units = crops_per_image(sight, config)
    example.unit = np.repeat(np.arange(len(units), dtype=np.int32), units)
    example.pool_src = pool_windows(sight, config)
    example.pool_dst = np.flatnonzero(example.tokens == tokenizer.special["im_patch"])


def placeholder(name, tokens, crops, config, reason):
    """What stands in a row for a record that turned out bad while decoding -> Example of the size that was planned, without loss."""
    zeros = [np.zeros(tokens, kind) for kind in (np.int64, np.int64, np.float32, np.int64, np.int32, np.int32)]
    pixels = np.zeros((crops, config.vision.n_patch, config.vision.n_pixel), np.uint8) if crops else None
    return Example(*zeros, id=name, images=pixels, unit=np.arange(crops, dtype=np.int32) if crops else None, bad=reason)


def largest_example(config, crops, n_vocab, share=None):
    """An example that costs all that a row can: every token with loss, all crops, as many visual tokens as they can have, in windows of 9.

    For a rehearsal. share: of a CropShard, its crops only, dealt out as large images are.
    """
    P, T, zeros = config.vision.n_patch, config.max_tokens, np.zeros(config.max_tokens, np.int32)
    view = vision.windows(np.arange(P).reshape(config.vision.grid, -1), 2)
    source = np.concatenate([np.where(view < 0, -1, view + k * P) for k in range(crops)])[: T - 1]
    example = Example(np.arange(T) % n_vocab, np.arange(T) % n_vocab, np.ones(T, np.float32), np.arange(T), zeros, zeros, id="rehearsal")
    example.images = np.zeros((crops, P, config.vision.n_pixel), np.uint8)
    example.unit = np.arange(crops, dtype=np.int32) // (1 + config.max_crops)
    example.pool_src, example.pool_dst = np.pad(source, ((0, 0), (0, 5)), constant_values=-1), np.arange(1, 1 + len(source))
    return select_crops(example, share) if share else example


def encode_prompt(images, turns, tokenizer, config, clip=None):
    """A prompt to be continued -> Example. images: [(H,W,3) uint8, ..], may be empty; clip: a Clip instead of images;
    turns: [(question, answer), .., (question, None)]."""
    assert not (images and clip), "images and a video at once are no input of Molmo2"
    sizes = [image.shape[1::-1] for image in images]
    if clip:
        ids, visual = video_ids(clip.times, clip.subtitles, tokenizer, config)
    else:
        ids, visual = visual_ids(sizes, tokenizer, config)
    segments = chat(turns, tokenizer) + [([0], False)]                    # a target for the last token, never an input
    example = layout([tokenizer.bos, *ids], [False, *visual], [Branch(segments)])
    if clip or images:
        example.images = frame_crops(clip.frames, len(clip.times), config) if clip else visual_crops(images, config)
        place_pixels(example, MediaInfo(sizes, clip.times if clip else None), tokenizer, config)
    return example
