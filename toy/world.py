"""The toy world: coloured shapes on textured backgrounds, with captions, counts, points, tracks.

A held-out scene is never a training scene (images.py). Four of the 24 combinations of colour and
shape occur in the split `unseen` only.
"""

from functools import cache, partial
from itertools import count, islice

from records.mixture import group_rates, sqrt_size
from toy.images import CURRICULUM, MAX_OBJECTS, NUMBERS, ImageSeries, Sums, World
from toy.shapes import KINDS, LATTICE, SIZE
from toy.videos import MovingShapes

# The toy's tokenizer encodes each of these strings as one id. The order determines the ids.
WORDS = (
    "user\n", "assistant\n", "pointing: ", "count: ", "long_caption", "text_sft",
    "There are none.", '<points coords="1', '">', "</points>", ", ", "nothing", "any", " shape",
    *(f"{number} " for number in NUMBERS),
    *KINDS.colours,
    *(f" {shape}" for shape in KINDS.shapes),
    *(f" {10 * v:03d}" for v in range(LATTICE, SIZE, LATTICE)),
    # for videos and several images
    "video_point: ", "video_count: ", "video_point_track_per_frame: ", "multi_image_pointing: ",
    "multi_image_count: ", "user_qa", "video_long_caption", "video_multiple_choice",
    '<points coords="', '<tracks coords="', "</tracks>", "No tracks available.", "Image ",
    "subtitle\n", "Only return the correct answer option.\n",
    *(f"\n{letter}. " for letter in "ABC"),
    "which", " comes", " leaves", " becomes", " moves", " first", "the named", " there at the end",
    " image shows ", " at ", "from", " to", " Answer: ", "left", "right", "up", "down", "nowhere",
    *(f" {k}" for k in range(1, 7)),
    *(f"{k / 2:.1f}" for k in range(18)),
    # of a larger world, which had more colours and shapes
    "orange", "cyan", "pink", " diamond", " bar",
)

# In stage 2 the model gets all frames of short videos, and every third frame of long ones.
LONG = (7, 18)  # minimum and maximum number of steps
SOURCES = {
    "images": World,
    "series": ImageSeries,
    "videos": MovingShapes,
    "tracks": partial(MovingShapes, questions="tracks"),
    "long-videos": partial(MovingShapes, steps=LONG, max_objects=5),
    "long-tracks": partial(MovingShapes, questions="tracks", steps=LONG, max_objects=4),
}
VIDEO_SHARE = {2: 0.7, 3: 0.85}  # {stage: sampling weight of all videos}


def mixture(seed, stage=1, curriculum=True, video_share=None):
    """-> (sources, their sampling weights) for a stage of --tiny. The weights sum to 1.

    Stage 1 has more captions than the published recipe, because the words are learned from them.
    Stages 2 and 3 have groups as in stages/stage2.py. The sources are endless, so the sizes that
    distribute the weight of a group are our choice. curriculum: do the sources of stages 1 and 2
    start with easy scenes? New stages use the mixture of stage 3.
    """
    stage = min(stage, 3)
    if stage == 1:
        options = {"curriculum": CURRICULUM if curriculum else 0, "max_objects": MAX_OBJECTS}
        captions = World("train", seed, **options)
        points = World("train", seed, questions="points", **options)
        return [captions, points, Sums(seed)], [0.75, 0.2, 0.05]
    short = {"curriculum": curriculum and stage == 2}
    videos = [
        (SOURCES["videos"]("train", seed, **short), 30_000),
        # with fewer tracks, the model forgets them in stage 3
        (SOURCES["tracks"]("train", seed, **short), 10_000 if stage == 2 else 20_000),
    ]
    if stage == 3:
        videos.append((SOURCES["long-videos"]("train", seed), 30_000))
        videos.append((SOURCES["long-tracks"]("train", seed), 10_000))
    others = [
        (World("train", seed, max_objects=MAX_OBJECTS), 5_000),
        (ImageSeries("train", seed), 9_000),
        (Sums(seed), 400),
    ]
    video_share = video_share or VIDEO_SHARE[stage]
    groups = (video_share, videos), (round(1 - video_share, 2), others)
    weighted = [(rate, [sqrt_size(n) for _, n in members]) for rate, members in groups]
    rates_of_videos, rates_of_others = group_rates(weighted)
    sources = [source for source, _ in videos + others]
    return sources, rates_of_videos + rates_of_others


def held_out(stage, seed, n):
    """-> {name of a set: records} for the evaluation. Each kind of record in a set has at most n.

    test: images, and from stage 2 on also several images, videos and tracks. long: long videos,
    from stage 2 on. unseen: images with combinations that are not in the training data. crowded:
    images with more objects than in the training data.
    """
    as_in_training = range(MAX_OBJECTS + 1)
    parts = {"test": held_out_images("test", seed, n, as_in_training)}
    if stage > 1:
        parts["test"] += first_records("series", seed, n // 4)
        parts["test"] += first_records("videos", seed, n // 2)
        parts["test"] += first_records("tracks", seed, n // 2)
        parts["long"] = first_records("long-videos", seed, n // 2)
        parts["long"] += first_records("long-tracks", seed, n // 2)
    parts["unseen"] = held_out_images("unseen", seed, n, as_in_training)
    parts["crowded"] = held_out_images("test", seed, n // 4, (5, 6))
    return parts


open_world = cache(World)  # an evaluation generates no scene that an earlier one has generated


def held_out_images(split, seed, n, n_objects):
    """The first n images (or one, if n is 0) of a split whose number of objects is in n_objects."""
    world = open_world(split, seed)
    fitting = (i for i in count() if len(world.scene(i)["objects"]) in n_objects)
    return [world[i] for i in islice(fitting, max(n, 1))]


def first_records(kind, seed, n):
    source = SOURCES[kind]("test", seed)
    return [source[i] for i in range(max(n, 1))]
