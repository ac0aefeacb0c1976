"""The cases of tools.bench step, with random pixels and ids. We use packed rows, and transformers
uses padded batches. A message tree with three annotations is one example in our row, and three
sequences for transformers.
"""

from itertools import islice
from typing import NamedTuple

import numpy as np

import data
import packing
import vision
from records.visual import MediaInfo
from text.tokenizer import ByteTokenizer
from text.visual_tokens import images_tokens, video_tokens
from tools.bench import stream

STREAM_ROW = stream.Recipe(max_tokens=4096, max_crops=32, max_frames=8)
REFERENCE_BATCH = 4  # number of sequences in a batch for transformers, in the case "stream"


class Plain(NamedTuple):
    """An example with one annotation."""
    text: int  # tokens of its text
    tiling: tuple = None  # (rows, columns) of crops in the mosaic of its image


CASES = ("image", "stream")


class Case(NamedTuple):
    """The same examples for both implementations."""
    rows: list  # ours: for each row a list of data.Example, which are message trees
    batches: list  # reference: for each batch a list of data.Example with one annotation each
    length: int  # tokens of a row

    @property
    def labelled(self):
        """-> the number of tokens with loss, which is the same for both implementations."""
        return sum(int((e.weights > 0).sum()) for row in self.rows for e in row)


class Tree(NamedTuple):
    """The data.Example of a message tree, and one data.Example for each of its annotations."""
    whole: data.Example
    singles: list


def n_crops(example):
    return 0 if example.image_id is None else len(example.image_id)


def random_tree(config, rng, image_sizes, n_frames, texts, n_subtitles=0):
    """-> Tree with random ids and without pixels.

    image_sizes: (width, height) of each image. n_frames: number of frames if it has a video instead
    of images. texts: (tokens without loss, tokens with loss) of each annotation. n_subtitles:
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
    # The last id is only a target. It has no loss here, so that both implementations have the same
    # input tokens.
    branches = [data.Branch([(random_ids(n_read), False), (random_ids(n_learned), True),
                             ([0], False)]) for n_read, n_learned in texts]
    examples = []
    for kept in (branches, *([branch] for branch in branches)):
        example = data.layout(prefix, is_visual, kept, settings)
        if ids:
            data.place_visual_tokens(example, MediaInfo(image_sizes, times), tokenizer,
                                     settings.max_crops, config.vision)
        examples.append(example)
    return Tree(examples[0], examples[1:])


def set_random_pixels(examples, config, rng):
    """Gives the annotations of one example the same random crops. If a mosaic has only one crop, it
    is equal to the low-resolution view, because packing.collate relies on this."""
    image_id = examples[0].image_id
    if image_id is None:
        return
    shape = len(image_id), config.vision.n_patch, config.vision.n_pixel
    crops = rng.integers(0, 256, shape, np.uint8)
    if len(image_id) == 2 and image_id[0] == image_id[1]:
        crops[1] = crops[0]
    for example in examples:
        example.images = crops


def plain_example(config, rng, plain):
    """-> a data.Example with loss on all of its text, including the times of frames."""
    v = config.vision
    image_sizes = []
    if plain.tiling:
        rows, columns = plain.tiling
        overlap = v.crop - v.stride
        image_sizes = [(columns * v.stride + overlap, rows * v.stride + overlap)]
    (example,) = random_tree(config, rng, image_sizes, 0, [(0, plain.text)]).singles
    example.weights[:-1] = example.bidir[1:] == 0
    set_random_pixels([example], config, rng)
    return example


def draw_tree(config, rng, stage, max_frames):
    """-> a Tree of the stream. Its images have as many crops as in the released model, even if the
    crops of this config are smaller. Of each annotation, a quarter has no loss and the rest has."""
    draft = stream.draw(rng, stage)
    stride, released = config.vision.stride, vision.RELEASED.stride
    sizes = [(width * stride // released, height * stride // released)
             for height, width in draft.images]
    n_frames = len(vision.frame_times(draft.seconds, max_frames)) if draft.seconds else 0
    texts = [(n // 4 + 1, n - n // 4 - 1) for n in draft.texts]
    return random_tree(config, rng, sizes, n_frames, texts, draft.subtitles)


def stream_case(config, n, stage, limits):
    """-> the Case of n packed rows from the stream of a stage. limits: stream.Recipe of a row."""
    rng = np.random.default_rng(0)
    trees = []

    def next_size(_):
        trees.append(draw_tree(config, rng, stage, limits.max_frames))
        whole = trees[-1].whole
        return len(whole.tokens), n_crops(whole)

    # The first packs contain the largest examples of the pool. They are not typical, so the first
    # MAX_WAIT packs are skipped.
    planner = packing.Planner(next_size, limits.max_tokens, limits.max_crops)
    packs = [[e.index for e in pack]
             for pack in islice(planner, packing.MAX_WAIT, packing.MAX_WAIT + n)]
    for i in sorted(i for pack in packs for i in pack):
        set_random_pixels([trees[i].whole, *trees[i].singles], config, rng)
    rows = [[trees[i].whole for i in pack] for pack in packs]
    singles = [single for pack in packs for i in pack for single in trees[i].singles]
    singles = [singles[k] for k in rng.permutation(len(singles))]
    batches = []
    for is_video in (True, False):
        kind = [e for e in singles if (e.pool_src.shape[1] == 9) == is_video]
        for start in range(0, len(kind), REFERENCE_BATCH):
            batches.append(kind[start : start + REFERENCE_BATCH])
    return Case(rows, batches, limits.max_tokens)


def make_case(name, config, n):
    """-> the Case with this name. n: number of rows in the case "stream"."""
    if name == "stream":
        return stream_case(config, n, 2, STREAM_ROW)
    rng = np.random.default_rng(0)
    row = [plain_example(config, rng, Plain(300, (2, 4)))]
    return Case([row], [row], sum(len(example.tokens) for example in row))
