"""The packed row of the walk (a video, a photograph and a text) and a model of 58,000 parameters.

Only the sizes are small. The records pass through data.py and packing.py, and the model is
model.Molmo2 with random weights. The model computes in float64, so that all digits on the page are
the same on every machine.
"""

import itertools
import re
from typing import NamedTuple

import numpy as np
import torch

import data
import model as models
import packing
from records.parse import parse
from text.tokenizer import ByteTokenizer
from tools import view
from vision import VisionConfig

ROW = 112  # tokens of a row
MAX_CROPS = 5  # crops of a row
SEED = 0
VISION = VisionConfig(n_layer=2, n_embd=16, n_head=2, n_hidden=32, feature_layers=(1, 0), grid=4,
                      patch=2, overlap_margin=1)
MODEL = models.ModelConfig(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, n_hidden=64,
                           n_vocab=384, init_std=0.0, vision=VISION)
DATA = data.DataConfig(max_tokens=ROW, max_crops=1, fps=2.0, prefix_all=False, separator=";",
                       sqrt_length=True, sqrt_branches=True, point_weight=0.2,
                       video_caption_weight=0.1)

ANNOTATIONS = {
    "video": [
        {"type": "qa", "question": "How many balls?", "answer": "one"},
        {"type": "caption", "style": "caption", "text": "a ball rolls"},
        {"type": "point", "question": "Where is it?", "label": "ball", "coords": "percent",
         "points": [{"t": 0.0, "x": 25, "y": 50}]},
    ],
    "photo": [
        {"type": "caption", "style": "caption", "text": "a red square on grass"},
        {"type": "qa", "question": "Which colour?", "answer": "red"},
    ],
    "text": [{"type": "text", "text": "A tree shares its prefix: the image is encoded once, "
                                      "and every branch reads it."}],
}
MARKUP = ["user\n", "assistant\n", "caption:", "0.0 ", " 0.5 ", '<points coords="', " 250", " 500",
          '">', "</points>"]


def make_tokenizer():
    """A byte tokenizer with one token for each word of the walk, so that a row is easy to print."""
    words = list(MARKUP)
    for annotation in itertools.chain(*ANNOTATIONS.values()):
        for key in ("question", "answer", "text", "label"):
            words += re.findall(r" ?\S+", annotation.get(key, ""))
    return ByteTokenizer(dict.fromkeys(word for word in words if len(word) > 1))


class Drawn:
    """A reader of records (see data.py) that draws the images and frames of the records."""
    name = "walk"

    def image_sizes(self, record):
        return [(VISION.crop, VISION.crop)]

    def images(self, record, only=None):
        return [draw_square(2, 2, 4) for _ in ([0] if only is None else only)]

    def video_size(self, record):
        return VISION.crop, VISION.crop, 0.5, 0.25

    def frames(self, record, times):
        for time in times:
            yield draw_square(1 + round(6 * time), 3, 2)


def draw_square(x, y, side):
    """A red square on green: (8,8,3) uint8."""
    image = np.zeros((VISION.crop, VISION.crop, 3), np.uint8)
    image[:] = 60, 140, 60
    image[y : y + side, x : x + side] = 200, 30, 30
    return image


TOKENIZER = make_tokenizer()
MEDIA = {"video": {"video": "drawn"}, "photo": {"image": "drawn"}, "text": {}}


def make_record(name, annotations, **media):
    """-> a record as training reads it. Its images or frames are drawn."""
    record = parse({"id": name, "annotations": annotations, **media})
    return record | {"key": name, "where": name, "source": Drawn()}


RECORDS = [make_record(name, annotations, **MEDIA[name])
           for name, annotations in ANNOTATIONS.items()]


def encode(shards=(None, None, None)):
    """-> the three records as data.Example: the video, the photograph, the text.

    shards: for each record the parallel.CropShard of a rank, or None to encode all crops.
    """
    return [encode_record(*pair) for pair in zip(RECORDS, shards, strict=True)]


def encode_record(record, shard=None):
    return data.encode(record, TOKENIZER, DATA, VISION, SEED, 0, shard)


def collate(examples, tokens=ROW):
    """[data.Example, ..] -> packing.Batch with one row."""
    return packing.collate([examples], tokens, VISION)


def new_model():
    """Molmo2 in float64 with random weights, which are the same in every call."""
    torch.manual_seed(SEED)
    return models.Molmo2(MODEL).double().init_weights()


ANNOTATION_OF = {"caption:": "caption", "Where": "points", "How": "question", "Which": "question"}


class Part(NamedTuple):
    """A span of tokens in the row: the prefix of an example, one of its branches, or padding."""
    name: str  # "video: prefix", "video: caption", .., "text", "padding"
    start: int  # positions in the row
    stop: int


def find_parts(examples, tokens=None):
    """The examples of a row -> [Part, ..]. tokens: the length of the row if it has padding."""
    parts = []
    place = 0
    for x in examples:
        for number, (start, stop) in enumerate(view.find_parts(x)):
            name = "text" if x.id == "text" else f"{x.id}: prefix"
            if number:
                word = TOKENIZER.decode(x.tokens[start + 2 : start + 3])  # after "user\n"
                name = f"{x.id}: {ANNOTATION_OF[word]}"
            parts.append(Part(name, place + start, place + stop))
        place += len(x.tokens)
    if tokens:
        parts.append(Part("padding", place, tokens))
    return parts
