"""Removes the paper's choices from the toy, one at a time, with several seeds (paper:
ablations, Table 11).

    python -m tools.ablate --out runs/ablate       # all of them: hours; continues where it stopped
    python -m tools.ablate --only trees,packing --steps 400 --seeds 2 --out runs/ablate
    python -m tools.ablate --only long-context --init videos=runs/stage2-tiny --out runs/ablate
    python -m tools.ablate run trees --stage 1 --tiny --workers 0 ..       # train.py without trees

Every run is train.py in a process of its own. The runs of a family have the same number
of steps, with rows of the same size, and start from the same weights; so the examples
and the seconds of a step may differ, and are printed beside the scores.

A choice is removed by flags of train.py, or by replacing one function in the process of
the run. Decoding processes would not know of the replacement: such runs need --workers
0.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import data
import train
import vision
from records import mixture
from records.errors import warn
from tools.runs import final_scores
from toy import world
from training.config import Parser, UserError, parse
from training.log import read_log

# --------------------------------------------------------------------------------------------------
# the paper's choices that the toy can do without


@dataclass(frozen=True)
class Choice:
    name: str
    claim: str                       # the paper's, in a few words
    family: str                      # of STAGES
    metrics: tuple                   # that it should improve; the first one decides
    flags: tuple = ()                # of train.py, to do without it; else one of REMOVALS does


# Runs of a family are compared: they have the same stage and start from the same
# weights, those of the run with all choices of the family before.
STAGES = {"images": 1, "videos": 2, "long": 3}
STARTS = {"videos": "images", "long": "videos"}
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
NAMES = [choice.name for choice in CHOICES]


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
    """Stage 2 with as many videos as stage 3, as hard from the start: only their length
    differs."""
    world.mixture = partial(world.mixture, curriculum=False, video_share=world.VIDEO_SHARE[3])


REMOVALS = {
    "trees": remove_trees,
    "bidirectional": remove_bidirectional,
    "attentional-pooling": remove_attentional_pooling,
    "3x3-windows": remove_3x3_windows,
    "square-root-mixture": remove_square_root_mixture,
    "long-context": remove_long_context,
}


# --------------------------------------------------------------------------------------------------
# runs


class Run(NamedTuple):
    out: Path
    choice: str                      # that is removed, or "all" for none
    flags: list                      # of train.py


def plan_runs(args):
    """-> [Run, ..], each behind the run that it starts from."""
    only = args.only or NAMES
    chosen = [choice for choice in CHOICES
              if choice.name in only and choice.family not in args.baselines]
    families = {choice.family for choice in chosen}
    for family in ("long", "videos"):                    # the runs that these start from
        if family in families and STARTS[family] not in args.baselines:
            families.add(STARTS[family])
    runs = []
    for seed in range(args.seeds):
        for family in STAGES:
            if family in families:
                removed = [None, *(choice for choice in chosen if choice.family == family)]
                runs += [make_run(args, family, choice, seed) for choice in removed]
    return runs


def make_run(args, family, choice, seed):
    """choice: the Choice that is removed, or None."""
    flags = [
        "--stage", str(STAGES[family]), "--tiny", "--seed", str(seed), "--steps", str(args.steps),
        "--save-every", "0", "--workers", "0", "--eval_images", str(args.images),
        "--device", args.device,
    ]
    if family in STARTS:
        start = STARTS[family]
        flags += ["--init", str(args.baselines.get(start, run_path(args, start, None, seed)))]
    if choice:
        flags += choice.flags
    return Run(run_path(args, family, choice, seed), choice.name if choice else "all", flags)


def run_path(args, family, choice, seed):
    name = f"without-{choice.name}" if choice else "all"
    return args.out / f"{family}-{name}-{args.steps}-steps-seed-{seed}"


def perform(run):
    """Executes a run, unless it is finished. RuntimeError if it fails."""
    if final_scores(run.out):
        return
    shutil.rmtree(run.out, ignore_errors=True)           # of a run that was interrupted
    warn(run.out.name)
    command = [sys.executable, "-m", "tools.ablate", "run", run.choice, *run.flags]
    done = subprocess.run([*command, "--out", str(run.out)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{run.out.name} ended with status {done.returncode}")


def train_without(choice, flags):
    """train.py in this process without a choice of the paper; "all": with all of
    them."""
    if choice in REMOVALS:
        REMOVALS[choice]()
    train.main(flags)


# --------------------------------------------------------------------------------------------------
# comparisons


# Student's t: what a mean of 2, 3, .. pairs must exceed, in standard errors, to differ
# from 0 with 95 % confidence
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def compare(choice, metric, args):
    """One metric with and without a choice, means over pairs of runs with the same seed
    -> dict; None without a pair. error: standard error of the difference, None for a
    single seed."""
    pairs = []
    for seed in range(args.seeds):
        with_it = final_scores(run_path(args, choice.family, None, seed)) or {}
        without = final_scores(run_path(args, choice.family, choice, seed)) or {}
        if metric in with_it and metric in without:
            pairs.append((with_it[metric], without[metric]))
    if not pairs:
        return None
    n = len(pairs)
    gains = [a - b for a, b in pairs]
    mean = statistics.mean(gains)
    error = statistics.stdev(gains) / math.sqrt(n) if n > 1 else None
    verdict = "cannot tell"
    if n > 1 and abs(mean) > T_95[min(n, 10) - 2] * error:
        verdict = "agrees" if mean > 0 else "disagrees"
    return {
        "choice": choice.name, "metric": metric, "seeds": n,
        "with_it": statistics.mean(a for a, _ in pairs),
        "without": statistics.mean(b for _, b in pairs),
        "difference": mean, "error": error, "verdict": verdict,
    }


def print_costs(choice, args):
    """What a step of the runs with and without a choice holds: means; of seconds the
    median."""
    for name, removed in (("with", None), ("without", choice)):
        steps = []
        for seed in range(args.seeds):
            log = read_log(run_path(args, choice.family, removed, seed) / "log.jsonl")
            steps += [line for line in log if "loss" in line]
        if steps:
            examples, tokens, crops = (statistics.mean(step[key] for step in steps)
                                       for key in ("examples", "tokens", "crops"))
            seconds = statistics.median(step["seconds"] for step in steps)
            print(f"a step {name:7} {choice.name:20} {examples:.1f} examples, {tokens:.0f} tokens, "
                  f"{crops:.1f} crops, {seconds:.3f} s")


def print_report(args):
    rows = []
    for choice in CHOICES:
        found = [compare(choice, metric, args) for metric in choice.metrics]
        found = [row for row in found if row]
        for row in found:
            error = "" if row["error"] is None else f" +- {row['error']:.3f}"
            print(f"{row['choice']:20} {row['metric']:20} with {row['with_it']:.3f}  "
                  f"without {row['without']:.3f}  gain {row['difference']:+.3f}{error}  "
                  f"({row['seeds']} seeds)  {row['verdict']}")
        if found:
            print_costs(choice, args)
        rows += found
    print(json.dumps({"steps": args.steps, "rows": rows}))


# --------------------------------------------------------------------------------------------------
# the command


def parse_command(argv):
    """-> args. args.baselines: {family: run directory to use as the run with all
    choices instead of training one}."""
    parser = Parser(prog="tools.ablate", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=lambda names: names.split(","), help="some of: " + ", ".join(NAMES))
    add("--seeds", type=int, default=3, help="runs of each kind (default 3)")
    add("--steps", type=int, default=800, help="of each run (default 800)")
    add("--images", type=int, default=100,
        help="held-out examples of each kind to score (default 100)")
    add("--init", nargs="*", default=[], metavar="FAMILY=DIR",
        help="a run to start from, in place of that of images, or of videos")
    add("--device", default="cpu", help="default cpu")
    add("--out", type=Path, default=Path("runs/ablate"),
        help="a directory per run, named by choice, steps and seed; finished runs are not repeated")
    args = parser.parse_args(argv)
    if unknown := set(args.only or []) - set(NAMES):
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(NAMES)}")
    args.baselines = dict(item.partition("=")[::2] for item in args.init)
    for family, folder in args.baselines.items():
        if family not in ("images", "videos") or not Path(folder, "model").is_dir():
            parser.error(f"--init {family}={folder}: needs images or videos, and the directory of "
                         "a finished run")
    for run in plan_runs(args):
        parse(run.flags)                 # UserError before the first run
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        choice, *flags = argv[1:]
        train_without(choice, flags)
        return
    try:
        args = parse_command(argv)
        for run in plan_runs(args):
            perform(run)
    except (UserError, RuntimeError) as e:
        warn(str(e))
        raise SystemExit(2 if isinstance(e, UserError) else 1) from None
    print_report(args)


if __name__ == "__main__":
    main()
