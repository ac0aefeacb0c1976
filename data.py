"""Records to arrays (paper: data, message trees, token weighting; docs/molmo2.md 4 to 9).

    index --records.mixture--> record --size--> (tokens, crops)    from text and headers
                       record --encode--> Example          tokens, weights, mask fields, pixels

A record is one visual input (an image, several images, a video, or nothing) with annotations
(docs/records.md). Each annotation becomes a short chat, called a branch. All branches share one
encoding of the visual input, the prefix, and cannot attend to each other. This is the message tree.
In sequences of their own, the annotations of stage 2 would need 3.8 times as many sequences, and
each would encode its image again (RESULTS.md, "trees").

    record   {"image": "cat.png", "annotations": [{"type": "caption", ..}, {"type": "point", ..}]}
    prefix   BOS <low_res_im_start> <im_patch>.. <im_end> <im_start> <im_patch>.. <im_end>
    branch   <|im_start|>user\\nlong_caption 4:<|im_end|>\\n<|im_start|>assistant\\nA cat.<|im_end|>
    branch   <|im_start|>user\\nWhere?<|im_end|>\\n<|im_start|>assistant\\n<points ..><|im_end|>

    size                   encode
      read_headers           read_headers            sizes and durations of its media
      build                  build                   how many crops an image has
        build_tree             build_tree            which annotations are used, in which order
          segments_of            segments_of         annotation -> question and answer as ids
          layout                 layout              prefix and branches -> arrays
                             place_visual_tokens     which patches each visual token pools
                             images or frames        pixels

A record is a dict (docs/records.md). Its reader adds "id", "key" (for its random choices), "where"
(its file and line) and "source" (the reader itself). A reader is a sequence of records, which are
read from a file (records.reader.Records) or drawn (toy.images.World). Its methods raise Unreadable
if media cannot be used. `info` in this file is a records.visual.MediaInfo: sizes, times of frames
(None without a video), subtitles. The members of a reader:

    name, fingerprint        what a plan and a resumed run depend on
    image_sizes(record)      [(width, height), ..] from headers
    images(record, only)     [(H,W,3) uint8, ..]; only: their numbers, None: all of them
    video_size(record)       width, height, seconds, half of a frame's duration (tolerance of times)
    frames(record, times)    yields (H,W,3) uint8; times: seconds from the start of the clip

The random choices of an example depend on (seed, its key, epoch) only. So the planner, which calls
`build`, and the loader, which calls `encode` in another process later, make the same choices.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from records import visual
from records.errors import encodable
from records.mixture import rng_for
from text.prompts import annotations_of, has_points, kinds_and_weights, most_points, turns_of
from text.tokenizer import Segment, chat
from text.visual_tokens import images_tokens, video_tokens


@dataclass(frozen=True)
class DataConfig:
    max_tokens: int = 2560           # largest length of an example and of a row (paper: Table 12)
    max_crops: int = 8               # largest number of high-resolution crops of an image
    high_res_share: float = 0.0      # share of images with points that may have more crops
    high_res_crops: int = 24         # their largest number of crops, if all annotations still fit
    trained_crops: int = 0           # most_crops() of the training of --init, for evaluation
    max_images: int = 5              # a record with more images is skipped (docs/molmo2.md 2.4)
    max_frames: int = 128            # largest number of frames: 16, 128, 384 in stages 1, 2, 3
    fps: float = 2.0                 # largest number of frames per second of a video
    frame_markers: bool = True       # <frame_start>, <frame_end> around each frame, as released
    max_points: int = 60             # an annotation with more is skipped (docs/molmo2.md 9.3)
    multi_turn_share: float = 0.0    # share of videos whose points become one conversation
    n_transcripts: int = 1           # number of transcripts of an image that are used in an epoch
    length_hint: int = 65            # length in prompts of evaluation, "long_caption 65:"; 0: none
    prefix_all: bool = True          # every prompt begins with its style (stage 1); later only some
    separator: str = "\t"            # text between groups of points: a tab in stage 1, ";" later
    sqrt_length: bool = False        # multiply loss weights by 2 / sqrt(tokens); see token_weight
    sqrt_branches: bool = False      # divide loss weights by sqrt(branches)
    point_weight: float = 1.0        # loss weight of points, counts and tracks
    video_caption_weight: float = 1.0  # loss weight of captions of videos

    def most_crops(self):
        """The most crops of an image in this training, or in the training of the --init weights."""
        high_res_crops = self.high_res_crops if self.high_res_share else 0
        return max(self.max_crops, self.trained_crops, high_res_crops)


# --------------------------------------------------------------------------------------------------
# message tree -> arrays (paper: Figure 3, 3.2)


@dataclass(frozen=True)
class Branch:
    segments: list                   # [Segment(ids, factor of the loss weight), ..], question and
                                     # answer in turn
    kind: str = "qa"                 # the type of the annotation
    weight: float = 1.0              # the record's weight times the annotation's
    of_video: bool = False
    annotation: int = 0              # its number from 1 in what annotations_of returns
    turn_kinds: tuple = ()           # types of the turns of a conversation, two segments each


@dataclass
class Example:
    """One example of T tokens, n crops, M visual tokens. Positions are counted in the example."""
    tokens: np.ndarray               # (T,) int64, as are targets and pos
    targets: np.ndarray              # the next token
    weights: np.ndarray              # (T,) float32, loss weight of each target
    pos: np.ndarray                  # RoPE position
    visible_until: np.ndarray        # (T,) int32, as is bidir: the mask (attention.py)
    bidir: np.ndarray                # 1 for visual tokens, else 0
    annotation: np.ndarray           # (T,) int32, number of its annotation from 1; 0: prefix
    n_branches: int = 1
    dropped_branches: int = 0        # skipped: too long for the row, too many points, no point left
    dropped_tokens: int = 0          # tokens of the branches that were too long
    id: str = ""
    images: np.ndarray = None        # (n,P,F) uint8, of one rank with a parallel.CropShard
    image_id: np.ndarray = None      # (n,) int32, the image or frame that each crop belongs to
    cp_rank: np.ndarray = None       # (n,) int32, with a CropShard: the rank that has each crop
    pool_src: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    pool_dst: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    source: str = ""                 # the name of its reader
    unreadable: str = ""            # why it cannot be decoded; it is then a placeholder
                                    # of the same size (training/loader.py)


def token_weight(branch, n_loss, n_branches, config):
    """Loss weight of each token of a branch (paper: 3.2, token weighting; docs/molmo2.md 7.1).

    Apart from weights in the record, every weight is 1 in stage 1. In stages 2 and 3 it is 0.2 for
    points, counts and tracks, and 0.1 for captions of videos. For all else it is 2 / sqrt(loss
    tokens) / sqrt(branches kept). With weight 1 everywhere, a caption of 400 tokens would count 200
    times as much as an answer of 2 tokens; with the root it counts 14 times as much. The paper
    prints 4 / sqrt(n), the released code has 2 / sqrt(n).
    """
    if branch.kind in ("point", "count", "track"):
        return branch.weight * config.point_weight
    if branch.kind == "caption" and branch.of_video:
        return branch.weight * config.video_caption_weight
    assert branch.kind in ("caption", "qa", "text"), f"no rule for the weight of a {branch.kind}"
    weight = branch.weight
    if config.sqrt_length:
        weight *= 2 / max(n_loss, 1) ** 0.5
    if config.sqrt_branches:
        weight /= n_branches**0.5
    return weight


def fit(branches, room):
    """-> the branches that fit into `room` tokens, and how many tokens the others have.

    Branches are kept or skipped as a whole. As soon as one is kept, the next that does not fit is
    skipped with all after it. Before that, a branch that is too long is skipped alone, so that it
    does not take the others with it.
    """
    kept = []
    dropped_tokens = 0
    is_full = False
    for branch in branches:
        if not branch.segments:  # a track without a point on a sampled frame
            continue
        # minus one, because the last id of a branch is a target and never an input
        n = sum(len(ids) for ids, _ in branch.segments) - 1
        if n > room and kept:
            is_full = True
        if n > room or is_full:
            dropped_tokens += n
        else:
            kept.append(branch)
            room -= n
    return kept, dropped_tokens


def weigh(branch, n_branches, config):
    """-> the ids of a branch, and the loss weight of each when it is a target."""
    ids, kinds, factors = [], [], []
    for k, (segment_ids, factor) in enumerate(branch.segments):
        # segments 2t and 2t + 1 are question and answer of turn t, and each turn has its own kind
        kind = branch.turn_kinds[k // 2] if branch.turn_kinds else branch.kind
        ids += segment_ids
        kinds += [kind] * len(segment_ids)
        factors += [factor] * len(segment_ids)
    # The EOS at the end of a branch has loss. But in a tree, the official code does not count it
    # among the n loss tokens of the weight 2 / sqrt(n), so neither do we (docs/molmo2.md 7.1).
    n_counted = len(ids) - 1 if n_branches > 1 else len(ids)
    n_loss = Counter(kinds[i] for i in range(n_counted) if factors[i] > 0)
    weight_of = {}
    for kind in set(kinds):
        as_kind = replace(branch, kind=kind)
        weight_of[kind] = token_weight(as_kind, n_loss[kind], n_branches, config)
    weights = [weight_of[kind] * factor for kind, factor in zip(kinds, factors, strict=True)]
    return ids, weights


def layout(prefix, is_visual, branches, config, max_tokens=math.inf):
    """Ids of the prefix, which of them are visual tokens, branches -> Example without pixels.

        tokens         b I I I | Q Q A A | q a a        the prefix, then one branch after another
        targets        I I I Q | Q A A $ | a a $        next token; a branch ends with EOS ($)
        loss           . . . . | . # # # | # # #        where the target belongs to an answer
        pos            0 1 2 3 | 4 5 6 7 | 4 5 6        each branch continues the prefix
        visible_until  B B B B | 8 8 8 8 | B B B        B = 11, the end of the example
        bidir          0 1 1 1 | 0 0 0 0 | 0 0 0
    """
    start = len(prefix)
    kept, dropped_tokens = fit(branches, max_tokens - start)
    tokens = list(prefix)
    targets = [*prefix[1:], 0]  # the last one is set below
    weights = [0.0] * start
    pos = list(range(start))
    until = [0] * start  # set below
    annotation = [0] * start
    for number, branch in enumerate(kept):
        ids, id_weights = weigh(branch, len(kept), config)
        if number == 0:
            # The last token of the prefix comes before the first token of every branch, but it can
            # have one target only. So in a tree this target has no loss. Nothing is missed,
            # because a branch begins with a question, which has no loss anyway. Plain text without
            # a question has loss from its first token on, if it is the only branch.
            targets[-1] = ids[0]
            weights[-1] = id_weights[0] if len(kept) == 1 else 0.0
        tokens += ids[:-1]
        targets += ids[1:]
        weights += id_weights[1:]
        n = len(ids) - 1
        pos += range(start, start + n)
        until += [len(tokens)] * n  # later branches cannot attend to this one
        annotation += [branch.annotation] * n
    until[:start] = [len(tokens)] * start
    bidir = np.zeros(len(tokens), np.int32)
    bidir[:start] = is_visual
    return Example(
        np.array(tokens), np.array(targets), np.array(weights, np.float32), np.array(pos),
        np.array(until, np.int32), bidir, np.array(annotation, np.int32),
        n_branches=max(len(kept), 1), dropped_branches=len(branches) - len(kept),
        dropped_tokens=dropped_tokens)


# --------------------------------------------------------------------------------------------------
# record -> Example


def build(record, info, tokenizer, config, vision_config, seed, epoch):
    """-> an Example without its pixels, and the largest number of crops that its image may have. It
    is larger for a share of the images with points (paper: 3.2; docs/molmo2.md 2.4)."""
    example = build_tree(record, info, tokenizer, config, vision_config, seed, epoch)
    # A conversation that does not fit is skipped as a whole; as a tree, some of its turns may fit.
    # Other records are unchanged, but for the order of their branches.
    if config.multi_turn_share and example.dropped_branches:
        config = replace(config, multi_turn_share=0)
        example = build_tree(record, info, tokenizer, config, vision_config, seed, epoch)
    # "crops" gives this draw random numbers of its own, so that it does not change any prompt
    rng = rng_for(seed, record["key"], epoch, "crops")
    is_drawn = rng.random() < config.high_res_share
    n_images = len(record.get("images", ()))
    if is_drawn and n_images == 1 and has_points(record):
        max_crops = max(config.high_res_crops, config.max_crops)
        larger = replace(config, max_crops=max_crops)
        candidate = build_tree(record, info, tokenizer, larger, vision_config, seed, epoch)
        # more crops need more tokens; they are used only if no annotation is skipped for them
        if candidate.dropped_branches == example.dropped_branches:
            return candidate, max_crops
    return example, config.max_crops


@encodable()  # Unreadable if the tokenizer cannot encode a text (records/errors.py)
def build_tree(record, info, tokenizer, config, vision_config, seed, epoch):
    """-> an Example without its pixels."""
    rng = rng_for(seed, record["key"], epoch)
    prefix, is_visual = encode_prefix(info, tokenizer, config, vision_config)
    annotations = annotations_of(record, config, rng)
    branches = []
    n_over_max_points = 0
    n_transcripts = 0
    # The order is new in every epoch. If not all branches fit, each is kept in some epochs.
    for i in rng.permutation(len(annotations)):
        a = annotations[i]
        if a.get("style") == "transcript":
            n_transcripts += 1
            if n_transcripts > config.n_transcripts:
                continue  # another epoch uses another transcript
        if most_points(a) > config.max_points:
            n_over_max_points += 1
            continue
        weight = record["weight"] * a["weight"]
        kinds = [kind for kind, _ in kinds_and_weights(a)]  # one for each turn
        segments = segments_of(a, record, info, tokenizer, config, rng)
        branches.append(Branch(segments, a["type"], weight, info.times is not None, i + 1, kinds))
    example = layout(prefix, is_visual, branches, config, config.max_tokens)
    example.id = record["id"]
    example.dropped_branches += n_over_max_points
    return example


def encode_prefix(info, tokenizer, config, vision_config):
    """-> the ids of the prefix, and which of them are visual tokens."""
    if info.times is None:
        ids, is_visual = images_tokens(info.sizes, tokenizer, config.max_crops, vision_config)
    else:
        ids, is_visual = video_tokens(info.times, info.subtitles, tokenizer, config, vision_config)
    return [tokenizer.bos, *ids], [False, *is_visual]


def segments_of(a, record, info, tokenizer, config, rng):
    """An annotation -> the segments of its branch."""
    if a["type"] == "text" and "prompt" not in a:  # plain text, without a chat
        # In a tree the last token of the prefix has no loss, so the first word would
        # not be trained. A BOS at the start of the branch predicts it.
        text = Segment([*tokenizer.encode(a["text"]), tokenizer.eos], 1)
        if len(record["annotations"]) > 1:
            return [Segment([tokenizer.bos], 0), text]
        return [text]
    turns = turns_of(a, record, info.sizes, config, rng, info.times)
    weights = [weight for _, weight in kinds_and_weights(a)]
    segments = []
    for k, (ids, factor) in enumerate(chat(turns, tokenizer)):  # question, answer, question ..
        weight_of_turn = weights[k // 2]
        segments.append(Segment(ids, factor * weight_of_turn))  # factor: 0 in a question, else 1
    return segments


def size(record, tokenizer, config, vision_config, seed, epoch):
    """(tokens, crops) of an example, from text and the headers of its media. It does not decode
    them: a video of 384 frames takes 13 s to decode (RESULTS.md). Raises Unreadable."""
    info = visual.read_headers(record, config)
    example, max_crops = build(record, info, tokenizer, config, vision_config, seed, epoch)
    return size_of(example, info, max_crops, vision_config)


def size_of(example, info, max_crops, vision_config):
    """(tokens, crops), or (0, 0) if nothing with loss fits a row: training/planner.py skips it."""
    if not example.weights.any():
        return 0, 0
    n_crops = sum(visual.crops_per_image(info, max_crops, vision_config))
    return len(example.tokens), n_crops


def encode(record, tokenizer, config, vision_config, seed, epoch, shard=None):
    """A record -> Example. With a parallel.CropShard it has only the crops of one rank. Raises
    Unreadable."""
    info = visual.read_headers(record, config)
    example, max_crops = build(record, info, tokenizer, config, vision_config, seed, epoch)
    if not info.sizes:
        return example
    place_visual_tokens(example, info, tokenizer, max_crops, vision_config)
    n_crops = np.bincount(example.image_id)
    mine = np.arange(len(n_crops))  # numbers of the images or frames that are decoded
    if shard:
        # every rank has all tokens of the example, but decodes its own images only
        rank_of_image = shard.ranks(n_crops)
        mine = np.flatnonzero(rank_of_image == shard.cp_rank)
        example.cp_rank = rank_of_image[example.image_id]
    source = record["source"]
    if info.times is None:
        images = source.images(record, mine)
        example.images = visual.image_crops(images, max_crops, vision_config)
    else:
        frames = source.frames(record, [info.times[k] for k in mine])
        example.images = visual.frame_crops(frames, len(mine), vision_config)
    return example


def place_visual_tokens(example, info, tokenizer, max_crops, vision_config):
    """Adds which patches the visual tokens of an Example pool, and the positions of these tokens.

    Windows and <im_patch> tokens are in the same order, so pool_src[m] belongs to pool_dst[m].
    """
    n_crops = visual.crops_per_image(info, max_crops, vision_config)
    example.image_id = np.repeat(np.arange(len(n_crops), dtype=np.int32), n_crops)
    example.pool_src = visual.pool_windows(info, max_crops, vision_config)
    example.pool_dst = np.flatnonzero(example.tokens == tokenizer.special["im_patch"])
