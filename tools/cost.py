"""FLOPs and GPU hours of the real stages: an estimate, since nothing here was run on a GPU.

    python -m tools.cost                                   # the 4B and the 8B on H100
    python -m tools.cost --presets o7b --peak 2250 --mfu 0.194

A row is the mean over the packs of the stream of sizes of tools.bench pack, and FLOPs are counted
as in tools/bench/flops.py: padding, what the mask hides and blocks that run again are left out. All
parts learn but the embedding. Every token of an annotation counts as labelled, and windows pool 4
patches in stage 1, else 9, so head and connector are upper bounds. MFU is the share of the GPU's
peak that does this work: see docs/training.md for published values.
"""

import argparse
import json
from collections import Counter
from datetime import date

import attention
import packing
from model import PRESETS
from stages.recipes import STAGES
from tools.bench.__main__ import four_digits
from tools.bench.attend import packed_row
from tools.bench.flops import Work, flops
from tools.bench.run import IMAGE_WINDOW, VIDEO_WINDOW
from tools.bench.stream import ExampleSize, recipe, stream, video_size
from training.log import commit
from weights import files

H100 = 989                               # TFLOP/s in bfloat16, by data sheet
PARTS = {                                # of a step, by the fields of Work that cause it
    "decoder": ("tokens",),
    "its attention": ("pairs",),
    "ViT": ("patches",),
    "connector": ("pooled", "visual"),
    "head": ("labelled",),
}


def row_work(examples, stage, n_patch):
    """The Work of one row that holds these [ExampleSize, ..]."""
    row = packed_row(examples, recipe(stage).max_tokens)
    tokens = row.starts[-1]              # without padding
    visual = int((row.bidir > 0).sum())
    return Work(
        patches=n_patch * sum(e.crops for e in examples),
        pooled=(IMAGE_WINDOW if stage == 1 else VIDEO_WINDOW) * visual,
        visual=visual,
        tokens=tokens,
        labelled=sum(sum(e.branches) for e in examples),
        pairs=attention.allowed_pairs(row.visible_until[0, :tokens], row.bidir[0, :tokens]),
    )


def mean_row(stage, n, n_patch):
    """The mean Work of the rows that n examples of a stage's stream fill."""
    examples = stream(stage, n, seed=0)
    total = Counter()
    rows = 0
    for pack in packing.Planner([(e.tokens, e.crops) for e in examples], *recipe(stage).limits):
        total.update(row_work([examples[i] for i in pack], stage, n_patch)._asdict())
        rows += 1
    return Work(**{field: total[field] / rows for field in Work._fields})


def longest_video_row(stage, n_patch):
    """The Work of a row that holds one video with as many frames as there may be, and a question
    in the rest."""
    limits = recipe(stage)
    tokens, frames = video_size(limits.max_frames, limits.max_frames)
    trunk = min(1 + tokens, limits.max_tokens - 1)
    rest = limits.max_tokens - trunk
    return row_work([ExampleSize(limits.max_tokens, frames, trunk, [rest])], stage, n_patch)


def flops_of_parts(model, work):
    """{part: FLOPs of forward and backward of a Work}; flops() is linear in every field."""
    found = {}
    for part, fields in PARTS.items():
        alone = Work(**{field: getattr(work, field) for field in fields})
        found[part] = flops(model, alone, freeze_embedding=True)
    return found


def cost(preset, stage, n):
    """FLOPs of a whole stage by part, and the attention of a row that is one long video."""
    model = files.meta_model(PRESETS[preset])
    n_patch = model.config.vision.n_patch
    values = STAGES[stage].RECIPE
    rows = values["steps"] * values["batch"]
    work = mean_row(stage, n, n_patch)
    parts = {part: rows * f for part, f in flops_of_parts(model, work).items()}
    found = {"rows": rows, "tokens": rows * work.tokens, "parts": parts,
             "total": sum(parts.values())}
    if stage > 1:                        # stage 1 has no videos
        longest = flops_of_parts(model, longest_video_row(stage, n_patch))
        found["attention_of_a_long_video"] = longest["its attention"] / longest["decoder"]
    return found


def print_cost(preset, stage, found, mfu, peak):
    parts = ", ".join(f"{part} {n / 1e18:.0f}" for part, n in found["parts"].items())
    hours = [found["total"] / (share * peak * 1e12) / 3600 for share in mfu]
    shown = ", ".join(f"{h:,.0f} at {share:.1%}" for h, share in zip(hours, mfu, strict=True))
    print(f"{preset} stage {stage}: {found['total'] / 1e18:,.0f} EFLOP ({parts}); "
          f"GPU hours: {shown}")
    if "attention_of_a_long_video" in found:
        ratio = found["attention_of_a_long_video"]
        print(f"   in a row that is one long video, attention costs {ratio:.2f} of the decoder")
    return hours


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.cost", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=["4b", "8b"])
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--mfu", nargs="+", type=float, default=[0.40, 0.194, 0.141],
                        help="shares of the peak: a hope; published, tuned and as released")
    parser.add_argument("--peak", type=float, default=H100, help="TFLOP/s of one GPU (H100)")
    parser.add_argument("--n", type=int, default=4000, help="examples of the stream")
    args = parser.parse_args(argv)
    table = {}
    for preset in args.presets:
        for stage in args.stages:
            found = cost(preset, stage, args.n)
            found["hours"] = print_cost(preset, stage, found, args.mfu, args.peak)
            table[f"{preset} stage {stage}"] = found
    print(json.dumps(four_digits({"cost": vars(args), "stages": table, "commit": commit(),
                                  "date": str(date.today())})))


if __name__ == "__main__":
    main()
