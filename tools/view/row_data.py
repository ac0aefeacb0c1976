"""The numbers behind the page of a packed row: what page.js reads and page.py writes as HTML.

in    PackedRow: the examples of a row and their records; packing.Batch, the same row as tensors
out   Tokens, the mask in blocks, runs of text, places of crops, points; a dictionary for JSON

Long lists travel as runs of equal values: [5, 5, 5, 0] is written [5, 3, 0, 1].
"""

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

import attention
import packing
from text.points import unit
from text.prompts import scales
from text.tokenizer import token_text
from text.tracks import since_start
from training.config import Config

MAX_BLOCKS = 256                         # along one side of the mask
# the special token that opens a run of visual tokens -> what the run shows
KIND_OF_OPENER = {"low_res_im_start": "view", "im_start": "mosaic", "frame_start": "frame"}
TEXT_BEFORE = 24                         # letters at most of the text in front of a frame or image


class PackedRow(NamedTuple):
    """One row as it is trained on."""
    examples: list                       # of data.Example, in the order of the row
    records: list                        # theirs
    tokenizer: object
    config: Config


def batch_of(packed):
    """PackedRow -> packing.Batch of one row."""
    config = packed.config
    return packing.collate([packed.examples], config.data.max_tokens, config.data.vision)


@dataclass(frozen=True)
class Tokens:
    """The fields of a row, each (T,), as NumPy arrays."""
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    pos: np.ndarray
    example: np.ndarray                  # which example of the row; its number of examples: padding
    visible_until: np.ndarray            # the first place that no longer sees the token
    bidir: np.ndarray                    # equal, not 0: tokens that see each other both ways
    annotation: np.ndarray               # 0 the part that annotations share, k the k-th annotation


def tokens_of(batch):
    """The one row of a Batch -> Tokens."""
    fields = ("tokens", "targets", "weights", "pos", "example", "visible_until", "bidir")
    row = {name: getattr(batch, name)[0].numpy() for name in fields}
    return Tokens(**row, annotation=annotation_numbers(row["example"], row["visible_until"]))


def annotation_numbers(example, visible_until):
    """(T,) 0 in the part that all annotations of an example share, k in its k-th annotation.

        tokens         b I I I Q A q a      I visual, Q A and q a two annotations
        visible_until  8 8 8 8 6 6 8 8      the shared part is visible to the end of the example
        annotation     0 0 0 0 1 1 2 2

    An example with one annotation is no tree, and all of it is 0.
    """
    numbers = np.zeros(len(example), np.int32)
    for start, stop in spans(example):
        ends_earlier = np.flatnonzero(visible_until[start:stop] < stop)
        if len(ends_earlier) == 0:
            continue
        first = start + int(ends_earlier[0])
        for k, (a, b) in enumerate(spans(visible_until[first:stop], first), 1):
            numbers[a:b] = k
    return numbers


# --------------------------------------------------------------------------------------------------
# short forms of long lists


def runs(values):
    """[5, 5, 5, 0] -> [5, 3, 0, 1]: each value and how many times it comes in succession."""
    values = np.asarray(values)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    lengths = np.diff(starts, append=len(values))
    if values.dtype.kind == "f":         # the shortest decimals that read back as the same float32
        numbers = [float(str(value)) for value in values[starts]]
    else:
        numbers = values[starts].tolist()
    return [n for pair in zip(numbers, lengths.tolist(), strict=True) for n in pair]


def runs_of_differences(values):
    """For positions and windows: they rise evenly, so that there are few runs. The first is a
    difference from 0."""
    return runs(np.diff(np.asarray(values), prepend=0))


def spans(values, offset=0):
    """[(start, stop), ..] of the runs of equal values, counted from offset."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(offset + start, offset + stop) for start, stop in pairwise(edges)]


# --------------------------------------------------------------------------------------------------
# the mask


class MaskBlocks(NamedTuple):
    size: int                            # tokens along one side of a block
    counts: np.ndarray                   # (n,n) int64, allowed pairs of a query and a key in each


def mask_blocks(batch):
    """The mask of a Batch of one row in at most MAX_BLOCKS x MAX_BLOCKS blocks, from
    attention.allow: one example and `size` queries at a time, since all pairs would take too much
    memory."""
    example = batch.example[0].numpy()
    T = len(example)
    size = 1
    while MAX_BLOCKS * size < T:
        size *= 2
    n = -(-T // size)
    counts = np.zeros((n, n), np.int64)
    for start, stop in spans(example):
        block_of_key = np.arange(start, stop) // size
        for i in range(start // size, -(-stop // size)):
            queries = slice(max(i * size, start), min((i + 1) * size, stop))
            allowed = attention.allow(batch.visible_until, batch.bidir, rows=queries,
                                      keys=slice(start, stop))
            per_key = allowed[0].sum(0).numpy()
            counts[i] += np.bincount(block_of_key, per_key, minlength=n).astype(np.int64)
    return MaskBlocks(size, counts)


# --------------------------------------------------------------------------------------------------
# text


def token_names(tokenizer):
    """{id: what to show} of the tokens that decode to nothing."""
    names = {id_: token_text(name) for name, id_ in tokenizer.special.items()}
    names |= {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    return names | {tokenizer.chat_start: "<|im_start|>", tokenizer.chat_end: "<|im_end|>"}


class TextRun(NamedTuple):
    ids: list                            # of tokens to show
    first: int                           # positions in the row
    last: int
    weight: float                        # 0: nothing is learned here


def text_runs(row, start, stop, ends):
    """Tokens start to stop of Tokens -> [TextRun, ..]: what is read, and what is learned.

        position    52  53  54  55          weight 0: the token at the position
        token        :  \\n  red  cat        weight > 0: the target of the position, so that text is
        target      \\n red  cat EOS            shown once and in order:
        weight       0   w   w   w              (": \\n", 52, 53, 0)  ("red cat EOS", 53, 55, w)

    ends: the last token has a target of its own, EOS.
    """
    shown = [(int(row.tokens[start]), start, 0.0)]
    for t in range(start, stop):
        if row.weights[t] > 0 or (ends and t == stop - 1):
            shown.append((int(row.targets[t]), t, row.weights[t]))
        elif t + 1 < stop:
            shown.append((int(row.tokens[t + 1]), t + 1, 0.0))

    def kind(item):
        _, position, weight = item
        return float(weight), weight == 0 and bool(row.bidir[position])

    found = []
    for _, group in groupby(shown, kind):
        ids, positions, weights = zip(*group, strict=True)
        found.append(TextRun(list(ids), positions[0], positions[-1], weights[0]))
    return found


# --------------------------------------------------------------------------------------------------
# crops and points


class CropPlace(NamedTuple):
    """Where a crop of the batch belongs."""
    example: int
    kind: str                            # view, mosaic or frame
    number: int                          # of its image or frame in the example
    text_before: str                     # "Image 2", or the time of a frame


def crop_places(batch, row, tokenizer):
    """{crop: CropPlace}, from the visual tokens that pool its patches."""
    kind_of = {tokenizer.special[name]: kind for name, kind in KIND_OF_OPENER.items()}
    openers = np.flatnonzero(np.isin(row.tokens, list(kind_of)) & (row.bidir > 0))
    n_patch = batch.images.shape[1]
    places = {}
    count = {}                           # {example: images or frames so far}
    for patches, t in zip(batch.pool_src.numpy(), batch.pool_dst.numpy(), strict=True):
        example = int(row.example[t])
        for crop in dict.fromkeys((patches[patches >= 0] // n_patch).tolist()):
            if crop in places:           # the next window, or a mosaic that repeats its view
                continue
            opener = openers[np.searchsorted(openers, t, "right") - 1]
            kind = kind_of[int(row.tokens[opener])]
            if kind != "mosaic":
                count[example] = count.get(example, -1) + 1
            places[crop] = CropPlace(example, kind, count[example], text_before(row, t, tokenizer))
    return places


def text_before(row, t, tokenizer):
    """The text in front of the run of visual tokens that holds token t."""
    start = np.flatnonzero(row.bidir[:t] == 0)[-1] + 1
    other = np.flatnonzero((row.bidir[:start] > 0) | (row.example[:start] != row.example[t]))
    first = other[-1] + 1 if len(other) else 0
    return tokenizer.decode(row.tokens[first:start].tolist()).strip()[-TEXT_BEFORE:]


class Points(NamedTuple):
    label: str
    annotation: int                      # its number in the record
    points: list                         # of (x, y), fractions of the sides


def points_at(record, place):
    """What a record points at in one crop -> [Points, ..]; nothing is drawn into mosaics."""
    found = []
    for k, annotation in enumerate(record["annotations"]):
        if annotation["type"] not in ("point", "track") or place.kind == "mosaic":
            continue
        if place.kind == "frame":
            points = [p for p in annotation["points"] if is_at_time(p, record, place.text_before)]
        else:
            points = [p for p in annotation["points"] if p.get("image", 0) == place.number]
        size = None
        if annotation["coords"] == "pixel" and "size" not in annotation:
            sizes = pixel_sizes(record)
            size = sizes[min(place.number, len(sizes) - 1)]
        label = annotation.get("label", annotation.get("question", ""))
        found.append(Points(label, k, [unit(p, annotation, size) for p in points]))
    return found


def is_at_time(point, record, time):
    """time: as it stands in front of a frame, "0.5"."""
    return ("t" in point and f"{since_start(point['t'], record):.1f}" == time
            and not point.get("occluded"))


def pixel_sizes(record):
    """The scales of points in pixels, for each image or for the video."""
    source = record["source"]
    if "video" in record:
        sizes = [source.video_size(record)[:2]]
    else:
        sizes = source.image_sizes(record)
    return scales(record, sizes)


# --------------------------------------------------------------------------------------------------
# everything that page.js reads


def page_numbers(batch, row, blocks, tokenizer, config):
    """A dictionary fit for JSON."""
    names = token_names(tokenizer)
    ids = sorted({*row.tokens.tolist(), *row.targets.tolist()})
    fields = ("tokens", "targets", "weights", "example", "annotation", "visible_until", "bidir")
    return {
        "T": len(row.tokens),
        "ids": batch.ids,
        **{name: runs(getattr(row, name)) for name in fields},
        "pos": runs_of_differences(row.pos),
        "pieces": {i: names.get(i) or tokenizer.decode([i]) for i in ids},
        "patch": tokenizer.special["im_patch"],
        "grid": config.data.vision.grid,
        "pool_src": [runs_of_differences(column) for column in batch.pool_src.numpy().T],
        "pool_dst": runs_of_differences(batch.pool_dst.numpy()),
        "block": blocks.size,
        "counts": runs(blocks.counts.flatten())}
