"""What the walk shows: one video, one photograph, one text, and a model of 58,000 weights.

Everything is real but its size: the records pass through data.py and packing.py as any other, the
model is model.Molmo2 with random weights. Numbers are float64, so that they are the same on every
machine to far more digits than the page prints.
"""

import itertools
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

import data
import model as models
import packing
from text.tokenizer import ByteTokenizer
from vision import VisionConfig

ROW = 112                            # tokens of a row
MAX_CROPS = 5                        # crops of a row
SEED = 0
# (tokens, crops) of a stream of examples: the video, the photograph, the text, then eight others
STREAM = [(52, 2), (36, 2), (16, 0), (32, 2), (32, 3), (68, 2), (48, 2), (28, 2), (64, 3), (28, 1),
          (64, 0)]
POOL = 6                             # examples that wait for a row at once
VISION = VisionConfig(n_layer=2, n_embd=16, n_head=2, n_hidden=32, feature_layers=(1, 0), grid=4,
                      patch=2, overlap_margin=1)
MODEL = models.ModelConfig(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, n_hidden=64,
                           n_vocab=384, init_std=0.0, vision=VISION)
DATA = data.DataConfig(max_tokens=ROW, max_crops=1, fps=2.0, prefix_all=False, separator=";",
                       sqrt_length=True, sqrt_branches=True, point_weight=0.2,
                       video_caption_weight=0.1, vision=VISION)
FLAT = replace(DATA, sqrt_length=False, sqrt_branches=False, point_weight=1.0,
               video_caption_weight=1.0)                 # every loss token has weight 1

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
    "text": [{"type": "text", "text": "A tree shares its trunk: the image is encoded once, "
                                      "and every branch reads it."}],
}
MARKUP = ["user\n", "assistant\n", "caption:", "0.0 ", " 0.5 ", '<points coords="', " 250", " 500",
          '">', "</points>"]


def make_tokenizer():
    """A byte tokenizer with one token for every word of the walk, so that a row can be printed."""
    words = list(MARKUP)
    for annotation in itertools.chain(*ANNOTATIONS.values()):
        for key in ("question", "answer", "text", "label"):
            words += re.findall(r" ?\S+", annotation.get(key, ""))
    return ByteTokenizer(dict.fromkeys(word for word in words if len(word) > 1))


class Reader:
    """The three records, with pixels of small whole numbers (data.RecordReader)."""
    name = "walk"
    fingerprint = "walk"

    def __len__(self):
        return len(ANNOTATIONS)

    def __getitem__(self, i):
        name = list(ANNOTATIONS)[i]
        record = {"id": name, "where": name, "source": self, "annotations": ANNOTATIONS[name]}
        if name == "video":
            record["video"] = "drawn"
        if name == "photo":
            record["image"] = "drawn"
        return record

    def image_sizes(self, record):
        return [(VISION.crop, VISION.crop)]

    def images(self, record, only=None):
        return [draw_square(2, 2, 4) for _ in ([0] if only is None else only)]

    def video_size(self, record):
        return VISION.crop, VISION.crop, 0.5, 0.25

    def video_of(self, record):
        return None, 0.0, 0.5

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
RECORDS = [Reader()[i] for i in range(len(ANNOTATIONS))]


def encode(config=DATA):
    """-> the three records as data.Example: the video, the photograph, the text."""
    return [data.encode(record, TOKENIZER, config, SEED, 0) for record in RECORDS]


def collate(rows, tokens=ROW):
    return packing.collate(rows, tokens, VISION)


def new_model(family="qwen"):
    """Molmo2 with random weights, in float64: the same on every machine."""
    torch.manual_seed(SEED)
    return models.Molmo2(replace(MODEL, family=family)).double().init_weights()


# --------------------------------------------------------------------------------------------------
# names of tokens and of runs of tokens, for pictures and messages

NAMES = {"im_patch": "I", "im_col": "col", "im_start": "[img", "im_end": "]",
         "low_res_im_start": "[low", "frame_start": "[fr", "frame_end": "]"}
SHORT = {"user\n": "user", "assistant\n": "asst", '<points coords="': "<points", "\n": "\\n"}
ANNOTATION_OF = {"caption:": "caption", "Where": "points", "How": "question", "Which": "question"}


def label(token):
    """A token id -> a few letters; visual tokens: I a patch, [low [img [fr ] col the markers."""
    token = int(token)
    special = {TOKENIZER.special[name]: text for name, text in NAMES.items()}
    special |= {TOKENIZER.chat_start: "<s>", TOKENIZER.chat_end: "</s>"}
    text = special.get(token) or TOKENIZER.decode([token])
    return SHORT.get(text, text.strip(" "))


class Part(NamedTuple):
    """A run of tokens of the row: the trunk of an example or one of its branches."""
    name: str                        # "video: trunk", "video: caption", .., "text", "padding"
    example: int                     # in the row; -1: padding
    start: int                       # places in the row
    stop: int


def parts_of(examples, tokens=None):
    """The examples of a row -> [Part, ..]; tokens: the length of the row, if it ends in padding."""
    parts, start = [], 0
    for number, x in enumerate(examples):
        stop = start + len(x.tokens)
        trunk = int((x.visible_until == len(x.tokens)).argmin()) or len(x.tokens)
        name = f"{x.id}: trunk" if x.id != "text" else "text"
        parts.append(Part(name, number, start, start + trunk))
        while parts[-1].stop < stop:
            first = parts[-1].stop - start
            labels = [label(token) for token in x.tokens[first : first + 3]]
            name = f"{x.id}: {ANNOTATION_OF[labels[2]]}"
            parts.append(Part(name, number, start + first, start + int(x.visible_until[first])))
        start = stop
    if tokens:
        parts.append(Part("padding", -1, start, tokens))
    return parts
