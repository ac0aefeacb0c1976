"""Removes the paper's choices from the toy, one at a time, with several seeds (paper: ablations).

    python -m tools.ablate --out runs/ablate       # all of them: hours; continues where it stopped
    python -m tools.ablate --only trees,packing --steps 400 --seeds 2 --out runs/ablate
    python -m tools.ablate --only long-context --init videos=runs/stage2-tiny --out runs/ablate

Every run is train.py in a process of its own (tools/ablations.py). The runs of a family have the
same number of steps, with rows of the same size, and start from the same weights; so the examples
and the seconds of a step may differ, and are printed beside the scores.
"""

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evaluation import charts, report
from records.errors import warn
from tools.ablations import CHOICES, FAMILIES
from tools.runs import final_scores, flatten
from training.config import UserError, parse
from training.log import read_log
from training.resume import LAYOUT_FIELDS

NAMES = [choice.name for choice in CHOICES]


class Run(NamedTuple):
    out: Path
    start: Path | None               # the run whose weights it starts from
    choice: str                      # that is removed, or "all" for none
    flags: list                      # of train.py


# --------------------------------------------------------------------------------------------------
# runs


def plan_runs(args, given):
    """-> [Run, ..], each behind the run that it starts from.

    given: {family: directory of a run that stands for the family's run with all choices}.
    """
    only = args.only.split(",") if args.only else NAMES
    chosen = [choice for choice in CHOICES if choice.name in only and choice.family not in given]
    families = {choice.family for choice in chosen}
    for family in reversed(FAMILIES):
        start = FAMILIES[family].start
        if family in families and start and start not in given:
            families.add(start)
    runs = []
    for seed in range(args.seeds):
        for family in FAMILIES:
            if family in families:
                start = FAMILIES[family].start
                if start:
                    start = Path(given.get(start, run_path(args.out, start, None, seed)))
                removed = [None, *(choice for choice in chosen if choice.family == family)]
                runs += [make_run(args, family, choice, seed, start) for choice in removed]
    return runs


def make_run(args, family, choice, seed, start):
    flags = [
        "--stage", str(FAMILIES[family].stage), "--tiny", "--seed", str(seed),
        "--steps", str(args.steps), "--save-every", "0", "--workers", "0",
        "--eval_images", str(args.images), "--device", args.device,
    ]
    if start:
        flags += ["--init", str(start)]
    if choice:
        flags += choice.flags
    name = choice.name if choice else "all"
    return Run(run_path(args.out, family, choice, seed), start, name, flags)


def run_path(out, family, choice, seed):
    name = f"without-{choice.name}" if choice else "all"
    return out / f"{family}-{name}-{seed}"


def changed_settings(run):
    """["steps 3, not 800", ..]: how the run in its directory differs; [] if there is none."""
    args, config = parse(run.flags)
    log = read_log(run.out / "log.jsonl")
    if not log or "command" not in log[0]:
        return []
    wanted = {"init": args.init, **json.loads(json.dumps(dataclasses.asdict(config)))}
    made = {"init": log[0]["command"].get("init"), **log[0]["config"]}
    ignored = LAYOUT_FIELDS - {"eval_images"}
    wanted = flatten({key: value for key, value in wanted.items() if key not in ignored})
    made = flatten({key: value for key, value in made.items() if key not in ignored})
    changed = []
    for key, value in made.items():
        # the geometry of images is that of the model in --init
        if value != wanted.get(key) and not key.startswith("data.vision."):
            changed.append(f"{key} {value}, not {wanted.get(key)}")
    return changed


def perform(runs, jobs):
    """Executes the runs, `jobs` at a time, each after the one that it starts from."""

    def execute(run, before):
        if before:
            before.result()              # it was submitted earlier, so this cannot deadlock
        shutil.rmtree(run.out, ignore_errors=True)       # of a run that was interrupted
        warn(run.out.name)
        command = [sys.executable, "-m", "tools.ablations", run.choice, *run.flags]
        subprocess.run([*command, "--out", str(run.out)], stdout=subprocess.DEVNULL, check=True)

    futures = {}
    pool = ThreadPoolExecutor(jobs)
    for run in runs:
        futures[run.out] = pool.submit(execute, run, futures.get(run.start))
    try:
        for future in as_completed(futures.values()):
            future.result()
    except subprocess.CalledProcessError as e:
        name = Path(e.cmd[-1]).name
        raise SystemExit(f"tools.ablate: {name} ended with {e.returncode}") from None
    finally:
        pool.shutdown(cancel_futures=True)               # running ones end, no other begins


# --------------------------------------------------------------------------------------------------
# comparisons


@dataclass
class Comparison:
    """One metric with and without a choice: means over pairs of runs with the same seed."""
    choice: str
    metric: str
    seeds: int
    with_it: float
    without: float
    difference: float
    error: float | None              # standard error of the difference; None for a single seed
    verdict: str = ""


# Student's t: what a mean of 2, 3, .. pairs must exceed, in standard errors, to differ from 0 with
# 95 % confidence
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def compare(choice, seeds, out):
    """-> [Comparison, ..], one for each metric of the choice that both runs of a seed have."""
    scores = []
    for seed in range(seeds):
        with_it = final_scores(run_path(out, choice.family, None, seed))
        without = final_scores(run_path(out, choice.family, choice, seed))
        if with_it and without:
            scores.append((with_it, without))
    comparisons = []
    for metric in choice.metrics:
        pairs = [(a[metric], b[metric]) for a, b in scores if metric in a and metric in b]
        if pairs:
            comparisons.append(compare_pairs(choice.name, metric, pairs))
    return comparisons


def compare_pairs(choice, metric, pairs):
    """pairs: [(score with the choice, score without it), ..]"""
    n = len(pairs)
    gains = [a - b for a, b in pairs]
    error = statistics.stdev(gains) / math.sqrt(n) if n > 1 else None
    row = Comparison(
        choice, metric, n, statistics.mean(a for a, _ in pairs),
        statistics.mean(b for _, b in pairs), statistics.mean(gains), error)
    row.verdict = verdict(row)
    return row


def margin(row):
    """Half the width of the 95 % confidence interval of a difference."""
    return T_95[min(row.seeds, 10) - 2] * row.error


def verdict(row):
    if row.error is None or abs(row.difference) <= margin(row):
        return "cannot tell"
    return "agrees" if row.difference > 0 else "disagrees"


def cost(run):
    """Means over the steps of a run, of seconds the median; None if it has no steps."""
    steps = report.steps_of(read_log(run / "log.jsonl"))
    if not steps:
        return None
    means = {key: statistics.mean(line[key] for line in steps)
             for key in ("examples", "tokens", "crops")}
    return {**means, "seconds": statistics.median(line["seconds"] for line in steps)}


def print_costs(choice, seeds, out):
    """What a step of the runs with and without a choice holds and takes, and their programs."""
    commits = set()
    for name, removed in (("with", None), ("without", choice)):
        paths = [run_path(out, choice.family, removed, seed) for seed in range(seeds)]
        costs = [found for found in map(cost, paths) if found]
        if costs:
            mean = {key: statistics.mean(found[key] for found in costs) for key in costs[0]}
            print(f"a step {name:7} {choice.name:20} {mean['examples']:.1f} examples, "
                  f"{mean['tokens']:.0f} tokens, {mean['crops']:.1f} crops, "
                  f"{mean['seconds']:.3f} s")
        for path in paths:
            commits |= {str(line.get("commit")) for line in read_log(path / "log.jsonl")[:1]}
    if len(commits) > 1:
        warn(f"{choice.name}: the runs are of different programs, {', '.join(sorted(commits))}")


def draw(rows, path):
    """Comparisons of the first metric of each choice with their 95 % confidence intervals; one that
    holds 0 is a "cannot tell"."""
    deciding = {(choice.name, choice.metrics[0]) for choice in CHOICES}
    bars = []
    for row in rows:
        if row.error is not None and (row.choice, row.metric) in deciding:
            label = f"{row.choice} ({row.metric})"
            gain, half = row.difference, margin(row)
            bars.append(charts.Bar(label, gain, gain - half, gain + half))
    charts.save_bars(bars, path, xlabel="gain, 95 % confidence interval", baseline=0.0)


def print_report(args):
    rows = []
    for choice in CHOICES:
        found = compare(choice, args.seeds, args.out)
        for row in found:
            error = math.nan if row.error is None else row.error
            print(f"{row.choice:20} {row.metric:20} with {row.with_it:.3f}  "
                  f"without {row.without:.3f}  gain {row.difference:+.3f} +- {error:.3f}  "
                  f"({row.seeds} seeds)  {row.verdict}")
        if found:
            print_costs(choice, args.seeds, args.out)
        rows += found
    if any(row.error is not None for row in rows):
        draw(rows, args.out / "ablate.png")
    print(json.dumps({"steps": args.steps, "rows": [dataclasses.asdict(row) for row in rows]}))


# --------------------------------------------------------------------------------------------------
# the command


def positive(text):
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {n}")
    return n


def parse_command(argv):
    """-> args, {family: directory of a run that stands for it}"""
    parser = argparse.ArgumentParser(
        description="Remove the paper's choices from the toy, one at a time.")
    parser.add_argument("--only", help="some of: " + ", ".join(NAMES))
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--steps", type=positive, default=800, help="of each run (default 800)")
    parser.add_argument("--images", type=positive, default=100,
                        help="held-out examples of each kind to score (default 100)")
    parser.add_argument("--init", nargs="*", default=[], metavar="FAMILY=DIR",
                        help="a run that stands for images, or for videos")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time (default 1)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/ablate"),
                        help="a directory per run; finished runs are not repeated")
    args = parser.parse_args(argv)
    unknown = set(args.only.split(",") if args.only else []) - set(NAMES)
    if unknown:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(NAMES)}")
    given = dict(item.partition("=")[::2] for item in args.init)
    for family, folder in given.items():
        if family not in ("images", "videos") or not Path(folder, "model").is_dir():
            parser.error(f"--init {family}={folder}: needs images or videos, and the directory of "
                         "a finished run")
    for run in plan_runs(args, given):
        try:
            changed = changed_settings(run)
        except UserError as e:
            parser.error(str(e))
        if changed:
            parser.error(f"{run.out} was made with other settings ({', '.join(changed)}); name "
                         "another --out")
    return args, given


def main(argv=None):
    args, given = parse_command(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    unfinished = [run for run in plan_runs(args, given) if final_scores(run.out) is None]
    perform(unfinished, args.jobs)
    print_report(args)


if __name__ == "__main__":
    main()
