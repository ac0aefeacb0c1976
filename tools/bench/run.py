"""Tokens per second and MFU of a run of train.py, from its log.

    python -m tools.bench run runs/x --peak 989     # TFLOP/s of an H100 in bfloat16, by data sheet

A step is all that train.py does in it: planning, decoding, encoding, transfers, forward, backward,
communication and the optimizer. tools/bench/flops.py says which FLOPs are counted; the windows of
all visual tokens count as full.
"""

from pathlib import Path
from statistics import median

from evaluation.report import steps_of
from tools.bench.flops import Work, flops
from training.log import read_log
from weights import files

# patches in the window of a visual token: of images, and of videos
IMAGE_WINDOW = 4
VIDEO_WINDOW = 9


def read_run(folder):
    """A run directory -> the first line of its log, and the lines of its steps."""
    lines = read_log(Path(folder) / "log.jsonl")
    if not lines or "config" not in lines[0]:
        raise ValueError(f"{folder} has no log of a run.")
    steps = steps_of(lines)
    if any("pairs" not in line for line in steps) or "world" not in lines[0]:
        raise ValueError(f"{folder} has a log of an earlier version, without counts for FLOPs.")
    return lines[0], steps


def step_work(line, config, vision_config):
    """A step's line of the log -> its Work."""
    window = IMAGE_WINDOW if config["stage"] == 1 else VIDEO_WINDOW
    return Work(
        patches=line["crops"] * vision_config.n_patch,
        pooled=window * line["visual_tokens"],
        visual=line["visual_tokens"],
        tokens=line["tokens"],
        labelled=line["loss_tokens"],
        pairs=line["pairs"],
    )


def add_arguments(parser):
    parser.add_argument("run", metavar="DIR", help="a run directory")
    parser.add_argument(
        "--peak", type=float, required=True, help="TFLOP/s of one GPU in the run's dtype"
    )
    parser.add_argument(
        "--skip", type=int, default=5, help="first steps that do not count: compilation, caches"
    )


def run(args):
    """Prints a summary -> medians over the steps. ValueError where no step counts."""
    first, steps = read_run(args.run)
    config = first["config"]
    gpus = first["world"]
    if args.peak <= 0 or args.skip < 0:
        raise ValueError("--peak must be more than 0, and --skip not less than 0.")
    if len(steps) <= args.skip:
        raise ValueError(f"{args.run} has {len(steps)} steps, and --skip {args.skip} of them.")
    steps = steps[args.skip :]
    model = files.meta_model(files.config_from_dict(config["model"]))
    seconds = [line["seconds"] for line in steps]
    step_flops = []
    for line in steps:
        work = step_work(line, config, model.config.vision)
        step_flops.append(flops(model, work, config["train"], config["freeze_embedding"]))
    flops_per_second = [n / s for n, s in zip(step_flops, seconds, strict=True)]
    found = {
        "steps": len(steps),
        "seconds": median(seconds),
        "flops": median(step_flops),
        "tokens_per_second": median(line["tokens"] / line["seconds"] for line in steps),
        "fill": median(line["fill_tokens"] for line in steps),
        "crops_per_second": median(line["crops"] / line["seconds"] for line in steps),
        "pairs_per_token": median(line["pairs"] / max(line["tokens"], 1) for line in steps),
        "mfu": median(flops_per_second) / (gpus * args.peak * 1e12),
        "gpus": gpus,
        "run": {name: first.get(name) for name in ("hardware", "dtype", "commit")},
    }
    print(
        f"{args.run}: {found['steps']} steps of {found['seconds']:.3f} s, "
        f"{found['tokens_per_second']:.0f} tokens and {found['crops_per_second']:.1f} crops a "
        f"second, rows {found['fill']:.0%} full\n"
        f"{found['flops'] / 1e12:.3g} TFLOP a step, {found['mfu']:.1%} of {gpus} x "
        f"{args.peak:g} TFLOP/s"
    )
    return found
