"""Packed rows of the stream of tools.bench pack, as examples with random pixels and ids, for the
commands that run a model or its attention."""

from itertools import islice

import numpy as np

import data
import model as models
import packing
import vision
from records.visual import MediaInfo
from text.tokenizer import ByteTokenizer
from text.visual_tokens import images_tokens, video_tokens
from tools.bench import stream

# A model that a CPU can train: a decoder of 8 x 512 and a ViT of 6 x 384 on crops of 378 pixels.
SMALL = models.ModelConfig(
    n_layer=8, n_embd=512, n_head=8, n_kv_head=2, head_dim=64, n_hidden=1536, n_vocab=32000,
    vision=vision.VisionConfig(n_layer=6, n_embd=384, n_head=6, n_hidden=1536,
                               feature_layers=(5, 2)))
PRESETS = {"bench": SMALL, **models.PRESETS}


def n_crops(example):
    return 0 if example.image_id is None else len(example.image_id)


def random_examples(config, rng, texts, image_sizes=(), n_frames=0, n_subtitles=0):
    """-> [data.Example of a message tree, data.Example of each of its annotations alone, ..], with
    random ids and without pixels.

    texts: (tokens without loss, tokens with loss) of each annotation. image_sizes: (width, height)
    of each image. n_frames: number of frames if it has a video instead of images. n_subtitles:
    tokens after the images or the video.
    """
    tokenizer = ByteTokenizer(n_vocab=config.n_vocab)
    settings = data.DataConfig()

    def random_ids(n):
        return rng.integers(10, config.n_vocab, n).tolist()

    times = [k / 2 for k in range(n_frames)] or None
    if times:
        ids, is_visual = video_tokens(times, None, tokenizer, settings, config.vision)
    else:
        ids, is_visual = images_tokens(image_sizes, tokenizer, settings.max_crops, config.vision)
    prefix = [tokenizer.bos, *ids, *random_ids(n_subtitles)]
    is_visual = [False, *is_visual, *[False] * n_subtitles]
    # The last id is only a target. It has no loss here, so that transformers has the same input
    # tokens (tools/bench/step.py).
    branches = [data.Branch([(random_ids(n_read), False), (random_ids(n_learned), True),
                             ([0], False)]) for n_read, n_learned in texts]
    examples = []
    for kept in (branches, *([branch] for branch in branches)):
        example = data.layout(prefix, is_visual, kept, settings)
        if ids:
            data.place_visual_tokens(example, MediaInfo(image_sizes, times), tokenizer,
                                     settings.max_crops, config.vision)
        examples.append(example)
    return examples


def set_random_pixels(examples, config, rng):
    """Gives the examples of one message tree the same random crops. If a mosaic has only one crop,
    it is equal to the low-resolution view, because packing.collate relies on this."""
    image_id = examples[0].image_id
    if image_id is None:
        return
    shape = len(image_id), config.vision.n_patch, config.vision.n_pixel
    crops = rng.integers(0, 256, shape, np.uint8)
    if len(image_id) == 2 and image_id[0] == image_id[1]:
        crops[1] = crops[0]
    for example in examples:
        example.images = crops


def draw_examples(config, rng, stage, max_frames):
    """-> random_examples of the stream. Its images have as many crops as in the released model,
    even if the crops of this config are smaller. Of each annotation, a quarter has no loss and the
    rest has."""
    draft = stream.draw(rng, stage)
    stride, released = config.vision.stride, vision.RELEASED.stride
    sizes = [(width * stride // released, height * stride // released)
             for height, width in draft.images]
    n_frames = len(vision.frame_times(draft.seconds, max_frames)) if draft.seconds else 0
    texts = [(n // 4 + 1, n - n // 4 - 1) for n in draft.texts]
    return random_examples(config, rng, texts, sizes, n_frames, draft.subtitles)


def draw_rows(config, n, stage, limits):
    """-> n packed rows of a stage, each a list of message trees, and all annotations alone. limits:
    stream.Recipe of a row."""
    rng = np.random.default_rng(0)
    drawn = []

    def next_size(_):
        drawn.append(draw_examples(config, rng, stage, limits.max_frames))
        tree = drawn[-1][0]
        return len(tree.tokens), n_crops(tree)

    # The first packs contain the largest examples of the pool. They are not typical, so the first
    # MAX_WAIT packs are skipped.
    planner = packing.Planner(next_size, limits.max_tokens, limits.max_crops)
    packs = [[e.index for e in pack]
             for pack in islice(planner, packing.MAX_WAIT, packing.MAX_WAIT + n)]
    for i in sorted(i for pack in packs for i in pack):
        set_random_pixels(drawn[i], config, rng)
    rows = [[drawn[i][0] for i in pack] for pack in packs]
    annotations = [example for pack in packs for i in pack for example in drawn[i][1:]]
    return rows, annotations
