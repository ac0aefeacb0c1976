"""What a run has made of its machine: tokens per second and MFU of whole steps, from its log.

    python -m tools.bench run runs/x --peak 989             # an H100's TFLOP/s in bfloat16, as its data sheet has it; an H200's too

A step here is all of it: packs made, decoded, encoded, sent, forward, backward, ranks meeting, the optimizer. FLOPs are counted by the
convention of tools.bench step: of what has to be done, so not of padding, of what a mask hides, of logits without a label or of blocks
that run again; of a part that does not learn, no gradient of its weights, and of a ViT that does not learn no backward at all.
"""

import statistics
from pathlib import Path

from evaluation.report import steps_of
from tools.bench.step import flops
from training import weights
from training.log import read_log


def of_run(folder):
    """A run directory -> the first line of its log, its steps. ValueError where there is none."""
    lines = read_log(Path(folder) / "log.jsonl")
    if not lines or "config" not in lines[0]:
        raise ValueError(f"{folder}: no log of a run")
    steps = steps_of(lines)
    if any("pairs" not in line for line in steps) or "world" not in lines[0]:
        raise ValueError(f"{folder}: a log of an earlier version, whose steps do not say what they held")
    return lines[0], steps


def add_arguments(parser):
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--peak", type=float, required=True, help="TFLOP/s of one GPU in the run's arithmetic")
    parser.add_argument("--skip", type=int, default=5, help="steps at its beginning that do not count: compilers, caches (default 5)")


def run(args):
    """-> {"steps", "seconds", "tokens_per_second", "flops", "mfu", ..}: medians over steps. ValueError where there is nothing to count."""
    first, steps = of_run(args.run)
    config, gpus = first["config"], first["world"]
    if args.peak <= 0 or args.skip < 0:
        raise ValueError("--peak must be more than 0, --skip not less than 0")
    if len(steps) <= args.skip:
        raise ValueError(f"{args.run}: {len(steps)} steps, of which --skip {args.skip} do not count")
    model, steps = weights.meta_model(weights.config_from_dict(config["model"])), steps[args.skip :]
    window = 4 if config["stage"] == 1 else 9            # patches of a visual token, at most

    def work(s):
        patches = s["crops"] * model.config.vision.n_patch
        return flops(model, patches, window * s["visual_tokens"], s["visual_tokens"], s["tokens"], s["loss_tokens"], s["pairs"],
                     config["train"], config["freeze_embedding"])

    median = lambda of: statistics.median(map(of, steps))                    # noqa: E731
    found = {"steps": len(steps), "seconds": median(lambda s: s["seconds"]), "flops": median(work),
             "tokens_per_second": median(lambda s: s["tokens"] / s["seconds"]), "fill": median(lambda s: s["fill_tokens"]),
             "crops_per_second": median(lambda s: s["crops"] / s["seconds"]),
             "pairs_per_token": median(lambda s: s["pairs"] / max(s["tokens"], 1)),
             "mfu": median(lambda s: work(s) / s["seconds"]) / (gpus * args.peak * 1e12), "gpus": gpus,
             "run": {name: first.get(name) for name in ("hardware", "dtype", "commit")}}
    print(f"{args.run}: {found['steps']} steps of {found['seconds']:.3f} s, {found['tokens_per_second']:.0f} tokens and "
          f"{found['crops_per_second']:.1f} crops in a second, rows {found['fill']:.0%} full\n{found['flops'] / 1e12:.3g} TFLOP a step, "
          f"{found['mfu']:.1%} of {gpus} x {args.peak:g} TFLOP/s")
    return found
