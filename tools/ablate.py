"""Trains the toy with and without design choices of the paper, and compares the scores.

    python -m tools.ablate --only trees --seeds 1 --steps 3 --images 1 --out runs/try

The paper does this in section 4.4, Tables 8b and 11. Every run is train.py in its own process.
The runs of a family have the same number of steps, rows of the same size and the same initial
weights. The number of examples in a step, and its time, may differ.

A choice is removed by flags of train.py, or by replacing one function in the process of the run.
Decoding processes would still have the old function, so all runs use --workers 0.
"""

import io
import math
import statistics
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import data
import train
import vision
from records import mixture
from records.errors import RunError, warn
from tools.command import make_parser, positive, print_line, print_table, report_errors
from toy import world
from training.log import read_log
from training.processes import end_with_parent, process_context

# {family of runs: stage}, and {family: the family whose run with all choices gives its weights}
STAGES = {"images": 1, "videos": 2, "long": 3}
STARTS = {"videos": "images", "long": "videos"}


def remove_trees():
    """An example gets only one annotation of its record, which is drawn again in every epoch."""
    build_tree = data.build_tree

    def build_one(record, info, tokenizer, config, vision_config, seed, epoch):
        annotations = record["annotations"]
        k = mixture.rng_for(seed, record["key"], epoch, "alone").integers(len(annotations))
        one = record | {"annotations": [annotations[k]]}
        return build_tree(one, info, tokenizer, config, vision_config, seed, epoch)

    data.build_tree = build_one


def remove_bidirectional():
    layout = data.layout

    def causal_layout(prefix, is_visual, *rest):
        return layout(prefix, [False] * len(is_visual), *rest)

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
    """Trains with the data of stage 2, but with the share of videos of stage 3 and without the
    curriculum. The videos stay shorter, and 37 % of them have tracks, not 41 %."""
    world.mixture = partial(world.mixture, curriculum=False, video_share=world.VIDEO_SHARE[3])


class Choice(NamedTuple):
    """A design choice of the paper that can be removed from the toy."""
    family: str  # a key of STAGES
    metrics: tuple  # metrics that the choice should improve
    flags: tuple = ()  # flags of train.py that remove it
    remove: Callable | None = None  # function that removes it by replacing another function


IMAGE_METRICS = ("point_f1", "count_accuracy")
VIDEO_METRICS = ("qa_accuracy", "track_f1", "video_point_f1")
LONG_METRICS = ("long.qa_accuracy", "long.count_accuracy", "long.caption_recall",
                "long.video_point_f1", "qa_accuracy")
CHOICES = {
    # with packing, and with trees, a step trains on more annotations
    "packing": Choice("images", IMAGE_METRICS, flags=("--pool-size=1",)),
    "trees": Choice("images", IMAGE_METRICS, remove=remove_trees),
    "bidirectional": Choice("images", IMAGE_METRICS, remove=remove_bidirectional),
    "attentional-pooling": Choice("images", IMAGE_METRICS, remove=remove_attentional_pooling),
    # with token weights, long answers do not outweigh short ones
    "token-weights": Choice("videos", VIDEO_METRICS, flags=(
        "--data.sqrt_length=false", "--data.sqrt_branches=false",
        "--data.point_weight=1", "--data.video_caption_weight=1")),
    "3x3-windows": Choice("videos", VIDEO_METRICS, remove=remove_3x3_windows),
    "square-root-mixture": Choice("videos", VIDEO_METRICS, remove=remove_square_root_mixture),
    # without long context: stage 2 again, with the learning rates of stage 3
    "long-context": Choice(
        "long", LONG_METRICS, remove=remove_long_context,
        flags=("--stage", "2", "--lr.connector=2e-4", "--lr.llm=5e-4")),
}


class Run(NamedTuple):
    out: Path
    name: str  # the choice that is removed; "all": no choice is removed
    flags: list  # flags of train.py


def plan_runs(args):
    """-> [Run, ..]. Each run comes after the run from whose weights it starts."""
    families = {CHOICES[name].family for name in args.only}
    for family in ("long", "videos"):
        if family in families:
            families.add(STARTS[family])
    return [make_run(args, family, name, seed)
            for seed in range(args.seeds) for family in STAGES if family in families
            for name in ("all", *args.only) if name == "all" or CHOICES[name].family == family]


def make_run(args, family, name, seed):
    flags = [
        "--stage", str(STAGES[family]), "--tiny", "--seed", str(seed),
        "--steps", str(args.steps), "--save-every", "0", "--workers", "0",
        "--eval-images", str(args.images), "--device", "cpu",
    ]
    if family in STARTS:
        flags += ["--init", str(run_path(args, STARTS[family], "all", seed))]
    if name in CHOICES:
        flags += CHOICES[name].flags
    return Run(run_path(args, family, name, seed), name, flags)


def run_path(args, family, name, seed):
    without = "without-" if name in CHOICES else ""
    return args.out / f"{family}-{without}{name}-{args.steps}-steps-seed-{seed}"


def perform(run):
    """Executes a run, unless it is finished. RunError if it fails."""
    if final_scores(run.out):
        return
    warn(run.out.name)
    # an interrupted run has this file, but a folder of the user does not
    overwrite = ["--overwrite"] if (run.out / "config.json").is_file() else []
    arguments = run.name, [*run.flags, *overwrite, "--out", str(run.out)]
    process = process_context().Process(target=train_without, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RunError(f"{run.out.name} ended with status {process.exitcode}")


def train_without(name, flags):
    """Runs train.py without one choice. This is the main function of a new process."""
    end_with_parent()
    if name in CHOICES and CHOICES[name].remove:
        CHOICES[name].remove()
    with redirect_stdout(io.StringIO()):
        train.main(flags)


def final_scores(run):
    """-> {metric: number} from the log of a finished run; {} if the run is not finished."""
    last = (read_log(run / "log.jsonl") or [{}])[-1]
    if not {"eval", "seconds"} <= last.keys():
        return {}
    scores = last["eval"]
    return scores | {f"long.{name}": n for name, n in scores.get("long", {}).items()}


# Student's t for 2, 3, .. pairs. A mean differs from 0 with 95 % confidence if it is larger than
# so many standard errors.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def compare(name, metric, args):
    """Compares one metric with and without a choice -> {name: number}. The numbers are means over
    pairs of runs with the same seed. None if no pair has this metric. error: standard error of the
    difference, None for a single seed."""
    pairs = []
    for seed in range(args.seeds):
        paths = [run_path(args, CHOICES[name].family, run, seed) for run in ("all", name)]
        pairs.append([final_scores(path).get(metric) for path in paths])
    pairs = [pair for pair in pairs if None not in pair]
    if not pairs:
        return None
    gains = [a - b for a, b in pairs]
    mean = statistics.mean(gains)
    n = len(pairs)
    error = statistics.stdev(gains) / math.sqrt(n) if n > 1 else None
    verdict = "cannot tell"
    if n > 1 and abs(mean) > T_95[min(n, 10) - 2] * error:
        verdict = "agrees" if mean > 0 else "disagrees"
    with_it, without = map(statistics.mean, zip(*pairs, strict=True))
    return {"with_it": with_it, "without": without, "difference": mean, "error": error,
            "seeds": n, "verdict": verdict}


def print_report(args):
    table = {(name, metric): found for name in CHOICES for metric in CHOICES[name].metrics
             if (found := compare(name, metric, args))}
    if table:
        print_table("choice: metric", {": ".join(key): found for key, found in table.items()})
    rows = [{"choice": name, "metric": metric, **found} for (name, metric), found in table.items()]
    print_line({"steps": args.steps, "rows": rows})


@report_errors
def main(argv=None):
    parser = make_parser("ablate", __doc__)
    add = parser.add_argument
    add("--only", type=lambda names: names.split(","), default=list(CHOICES),
        help=f"choices to remove, with commas (default all, takes hours): {', '.join(CHOICES)}")
    add("--seeds", type=positive, default=3, help="runs of each kind (default 3)")
    add("--steps", type=positive, default=800, help="steps of each run (default 800)")
    add("--images", type=positive, default=100,
        help="held-out examples of each kind to evaluate on (default 100)")
    add("--out", type=Path, default=Path("runs/ablate"),
        help="folder for the run directories; finished runs are not repeated")
    args = parser.parse_args(argv)
    if unknown := set(args.only) - set(CHOICES):
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(CHOICES)}")
    for run in plan_runs(args):
        perform(run)
    print_report(args)


if __name__ == "__main__":
    main()
