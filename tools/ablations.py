"""The paper's choices that the toy can do without (paper: ablations, Table 11).

    python -m tools.ablations trees --stage 1 --tiny --workers 0 ..      # train.py without trees

A choice is removed by flags of train.py, or by replacing one function in this process. Decoding
processes would not know of the replacement: such runs need --workers 0.
"""

import argparse
from dataclasses import dataclass
from functools import partial

import numpy as np

import data
import train
import vision
from records import mixture
from toy import world


@dataclass(frozen=True)
class Choice:
    name: str
    claim: str                       # the paper's, in a few words
    family: str                      # of FAMILIES
    metrics: tuple                   # that it should improve; the first one decides
    flags: tuple = ()                # of train.py, to do without it; else one of REMOVALS does


@dataclass(frozen=True)
class Family:
    """Runs that are compared: the same stage, the same start, the same number of steps."""
    stage: int
    start: str | None                # the family whose run with all choices they start from


FAMILIES = {
    "images": Family(1, None),
    "videos": Family(2, "images"),
    "long": Family(3, "videos"),
}
IMAGE_METRICS = ("point_f1", "count_accuracy")
CHOICES = (
    Choice("packing", "examples share a row, so a step sees more of them", "images",
           IMAGE_METRICS, ("--pool_size=1",)),
    Choice("trees", "annotations of an image share it, so a step sees more of them", "images",
           IMAGE_METRICS),
    Choice("bidirectional", "visual tokens attend to each other both ways", "images",
           IMAGE_METRICS),
    Choice("attentional-pooling", "better than the mean of a window", "images", IMAGE_METRICS),
    Choice("token-weights", "short answers are not outweighed by long ones", "videos",
           ("qa_accuracy", "video_point_f1", "track_f1"),
           ("--data.sqrt_length=false", "--data.sqrt_branches=false", "--data.point_weight=1",
            "--data.video_caption_weight=1")),
    Choice("3x3-windows", "better than 4x4 on frames", "videos",
           ("video_point_f1", "track_f1", "qa_accuracy")),
    Choice("square-root-mixture", "better than shares by size", "videos",
           ("qa_accuracy", "track_f1", "video_point_f1")),
    # without it: stage 2 once more, at the rates of stage 3
    Choice("long-context", "a last stage with more frames helps on long videos", "long",
           ("long.qa_accuracy", "long.count_accuracy", "long.caption_recall",
            "long.video_point_f1", "qa_accuracy"),
           ("--stage", "2", "--lr.connector=5e-4", "--lr.llm=5e-4")),
)


def remove_trees():
    """An example gets one of its record's annotations, drawn anew in every epoch."""
    build_tree = data.build_tree

    def build_one(record, info, tokenizer, config, seed, epoch):
        annotations = record["annotations"]
        rng = mixture.rng_for(seed, record["id"], epoch, "alone")
        record = record | {"annotations": [annotations[int(rng.integers(len(annotations)))]]}
        return build_tree(record, info, tokenizer, config, seed, epoch)

    data.build_tree = build_one


def remove_bidirectional():
    layout = data.layout

    def causal_layout(trunk, is_visual, *rest):
        return layout(trunk, [False] * len(is_visual), *rest)

    data.layout = causal_layout


def remove_attentional_pooling():
    def pool_mean(self, features, pool_src):
        valid = (pool_src >= 0)[..., None]
        window = features.flatten(0, 1)[pool_src.clamp(min=0)] * valid
        return self.out(self.v(window.sum(1) / valid.sum(1).clamp(min=1)))

    vision.Pool.forward = pool_mean


def remove_3x3_windows():
    def windows_4x4(config):
        patch_ids = np.arange(config.n_patch).reshape(config.grid, config.grid)
        return vision.windows(patch_ids, 4)

    vision.frame_windows = windows_4x4


def remove_square_root_mixture():
    world.sqrt_size = float


def remove_long_context():
    """Stage 2 with as many videos as stage 3, as hard from the start: only their length differs."""
    world.mixture = partial(world.mixture, curriculum=False, video_share=world.VIDEO_SHARE[3])


REMOVALS = {
    "trees": remove_trees,
    "bidirectional": remove_bidirectional,
    "attentional-pooling": remove_attentional_pooling,
    "3x3-windows": remove_3x3_windows,
    "square-root-mixture": remove_square_root_mixture,
    "long-context": remove_long_context,
}


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.ablations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", choices=["all", *(choice.name for choice in CHOICES)],
                        help="what to do without; all: with everything")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of train.py")
    args = parser.parse_args()
    if args.choice in REMOVALS:
        REMOVALS[args.choice]()
    train.main(args.flags)


if __name__ == "__main__":
    main()
