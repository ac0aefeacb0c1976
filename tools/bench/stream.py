"""A random stream of example sizes, used instead of the training mixture (docs/molmo2.md 9).

The groups have the released sampling rates, and tokens and crops are counted as in training.
The lengths of videos and answers, the sizes of images and the numbers of annotations are ASSUMED,
because they were not published. Two numbers are fitted, so that the official packer has the
reported number of examples per pack. VIDEO_SCALE is fitted to 3.8 in stage 2 (paper), and
CAPTION_TOKENS to 1.52 in stage 1 (Ai2, for rows of 2,560 tokens; docs/released.md). Pixels are not
needed, because a packer uses only sizes.
"""

import math
from bisect import bisect
from itertools import accumulate
from typing import NamedTuple

import numpy as np

import vision
from training.config import STAGES


class LogNormal(NamedTuple):
    """A log-normal distribution. Its numbers are clipped to [least, most]."""
    median: float
    sigma: float  # standard deviation of the logarithm
    least: float
    most: float

    def draw(self, rng):
        value = self.median * math.exp(self.sigma * rng.standard_normal())
        return min(max(value, self.least), self.most)


class Count(NamedTuple):
    """The distribution of 1 + a Poisson number. Its numbers are clipped to [least, most]."""
    mean: float
    least: int
    most: int

    def draw(self, rng):
        return min(max(1 + rng.poisson(self.mean - 1), self.least), self.most)


class Group(NamedTuple):
    """Examples of one kind: videos if `seconds` is given, else images, or text only."""
    share: float  # share of the stream; it is divided by the sum of all shares
    annotations: Count  # annotations of an example
    text: LogNormal  # tokens of one annotation
    images: tuple = (0, 0)  # smallest and largest number of images of an example
    seconds: LogNormal | None = None  # duration of its video
    subtitles: float = 0.0  # share of the videos that have subtitles


VIDEO_SCALE = 0.90  # multiplies every median duration; fitted to stage 2
# median tokens of a caption or a transcript in stage 1; fitted to stage 1
CAPTION_TOKENS = 320


def seconds(median, sigma, longest):
    """-> the distribution of the durations of videos."""
    return LogNormal(median * VIDEO_SCALE, sigma, 2, longest)


ONE = (1, 1)
SEVERAL = (2, 5)
# exactly two annotations, a caption and a transcript
CAPTIONS = Count(2, 2, 2), LogNormal(CAPTION_TOKENS, 0.35, 60, 800)
POINTING = Count(4, 1, 12), LogNormal(45, 0.9, 15, 600)
TEXT_ONLY = Count(1, 1, 1), LogNormal(450, 0.9, 30, 2304)
VIDEO_QA = Count(4.5, 1, 16), LogNormal(55, 0.8, 15, 700)
IMAGE_QA = Count(5, 1, 20), LogNormal(35, 0.8, 12, 500)

STAGE_1 = [
    Group(0.6, *CAPTIONS, images=ONE),
    Group(0.3, *POINTING, images=ONE),
    Group(0.1, *TEXT_ONLY),
]
STAGE_2 = [  # the released sampling rates sum to 1.1
    # demonstrations: long answers about a video, several images or one image
    Group(0.15 * 0.40, Count(3, 1, 8), LogNormal(180, 0.8, 30, 1500),
          seconds=seconds(55, 0.9, 3600)),
    Group(0.15 * 0.15, Count(3, 1, 8), LogNormal(120, 0.7, 20, 700), images=SEVERAL),
    Group(0.15 * 0.45, Count(3, 1, 10), LogNormal(140, 0.8, 20, 700), images=ONE),
    # academic videos: some are minutes long, and others are short clips
    Group(0.20 * 0.35, *VIDEO_QA, seconds=seconds(90, 0.7, 3600), subtitles=0.15),
    Group(0.20 * 0.65, *VIDEO_QA, seconds=seconds(11, 0.8, 3600), subtitles=0.15),
    # academic images
    Group(0.25 * 0.20, *IMAGE_QA, images=SEVERAL),
    Group(0.25 * 0.80, *IMAGE_QA, images=ONE),
    # tracking
    Group(0.15, Count(3, 1, 8), LogNormal(200, 0.9, 30, 1500), seconds=seconds(12, 0.8, 120)),
    # pointing in clips of up to 63 s
    Group(0.15, Count(4, 1, 12), LogNormal(70, 0.9, 15, 900), seconds=seconds(32, 0.6, 63)),
    Group(0.10, *POINTING, images=ONE),
    Group(0.10, *TEXT_ONLY),
]
GROUPS = {1: STAGE_1, 2: STAGE_2, 3: STAGE_2}
SUBTITLE_TOKENS = LogNormal(700, 0.8, 60, 4000)


class Recipe(NamedTuple):
    max_tokens: int  # of a row
    max_crops: int  # of a row
    max_frames: int  # of a video


def recipe(stage):
    values = STAGES[stage].RECIPE
    return Recipe(values["data.max_tokens"], values["pack_crops"], values["data.max_frames"])


class Draft(NamedTuple):
    """What an example of the stream consists of, before it has pixels and ids."""
    images: list  # (height, width) of each
    seconds: float  # duration of its video; 0: no video
    subtitles: int  # tokens
    texts: list  # tokens of each annotation


class ExampleSize(NamedTuple):
    tokens: int  # tokens of the prefix and all branches
    crops: int
    prefix: int  # tokens that all annotations share: BOS, visual tokens, subtitles
    branches: list  # tokens of each annotation


WEB_AREA = LogNormal(7e5, 0.7, 1, 1e9)
WEB_ASPECT = LogNormal(math.exp(0.2), 0.35, 0.01, 100)


def draw_image_size(rng):
    """-> random (height, width) in pixels of a photograph, web image, chart or scanned page."""
    kind = rng.random()
    if kind < 0.40:
        return (480, 640) if rng.random() < 0.65 else (640, 480)
    if kind < 0.70:
        area = WEB_AREA.draw(rng)
        aspect = WEB_ASPECT.draw(rng)
        return int(math.sqrt(area / aspect)), int(math.sqrt(area * aspect))
    if kind < 0.88:
        height = np.clip(rng.normal(600, 120), 200, 1200)
        width = np.clip(rng.normal(850, 150), 300, 1600)
        return int(height), int(width)
    return (2200, 1700) if rng.random() < 0.8 else (1600, 1200)


def draw(rng, stage):
    """-> a random Draft. Its group in the mixture of the stage is drawn with the given shares."""
    groups = GROUPS[stage]
    edges = list(accumulate(group.share for group in groups))
    group = groups[bisect(edges, rng.random() * edges[-1])]
    images = []
    seconds = subtitles = 0
    if group.seconds:
        seconds = group.seconds.draw(rng)
        if rng.random() < group.subtitles:
            subtitles = int(SUBTITLE_TOKENS.draw(rng))
    else:
        least, most = group.images
        images = [draw_image_size(rng) for _ in range(rng.integers(least, most + 1))]
    texts = [int(group.text.draw(rng)) for _ in range(group.annotations.draw(rng))]
    return Draft(images, seconds, subtitles, texts)


def image_size(height, width):
    """-> (tokens, crops) of an image (docs/molmo2.md 2.3). The low-resolution grid and the mosaic
    each have two markers around them. The mosaic also has a column end after every row."""
    low, high, crops = vision.pooled_grids(height, width, max_crops=8)
    return low[0] * low[1] + 2 + high[0] * (high[1] + 1) + 2, crops


def video_size(seconds, max_frames):
    """-> (tokens, crops) of a video (docs/molmo2.md 3.2). Each frame has 81 visual tokens, two
    markers and its time, with one token per character: "0.0 ", then " 0.5 " and so on."""
    times = vision.frame_times(seconds, max_frames)
    tokens = sum(81 + 2 + len(f" {t:.1f} ") for t in times) - 1
    return tokens, len(times)


def size_of(draft, max_tokens, max_frames):
    """-> the ExampleSize of a Draft. Tokens beyond max_tokens are cut from the last annotations."""
    sizes = [image_size(*size) for size in draft.images]
    if draft.seconds:
        sizes = [video_size(draft.seconds, max_frames)]
    numbers = 3 * len(sizes) * (len(draft.images) > 1)  # tokens of the texts "Image 1"
    tokens = 1 + sum(n for n, _ in sizes) + numbers + draft.subtitles  # 1: BOS
    prefix = min(tokens, max_tokens - 1)
    ends = np.minimum(np.cumsum([prefix, *draft.texts]), max_tokens).tolist()
    return ExampleSize(ends[-1], sum(n for _, n in sizes), prefix, np.diff(ends).tolist())


def stream(stage, n, seed):
    """-> [ExampleSize, ..] of n examples. They depend only on the stage and the seed."""
    rng = np.random.default_rng([seed, stage])
    max_tokens, _, max_frames = recipe(stage)
    return [size_of(draw(rng, stage), max_tokens, max_frames) for _ in range(n)]
