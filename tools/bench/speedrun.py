"""The first training command against the clock, beside a reference commit in the same run.

    python -m tools.bench speedrun                         # seeds 0, 1 and 2: hours
    python -m tools.bench speedrun --seeds 0 --steps 20    # only to try it

For each seed `python train.py --stage 1 --tiny` runs in a checkout of the reference commit and in
this working tree, one after the other, with nothing else on the machine. Minutes count from start
to exit, stage 0 and the evaluation included. An entry holds if every seed reaches the AIMS on its
own held-out images; its score is the share of the reference's time that it takes, the median over
the seeds. docs/training.md has the rules and the records.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from tools.bench.measure import REPOSITORY, in_turn, spread

REFERENCE = "a3f4ff6"
AIMS = {"point_f1": 0.90, "count_accuracy": 0.90, "caption_exact": 0.80}


def add_arguments(parser):
    add = parser.add_argument
    add("--reference", default=REFERENCE, help="the commit beside which this tree is measured")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, help="fewer steps than the recipe, to try the command")
    add("--eval-images", type=int, help="fewer held-out images, to try the command")


@contextmanager
def checkout(commit):
    """The files of a commit in a folder that is removed afterwards. ValueError if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "reference"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments):
    """-> what git prints; ValueError with its sentence if it fails."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def train_once(tree, seed, args):
    """Runs the first command in a folder -> {"seconds", and the scores of AIMS}."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "--stage", "1", "--tiny", "--seed", str(seed),
                   "--out", f"{folder}/run"]
        if args.steps:
            command += ["--steps", str(args.steps)]
        if args.eval_images:
            command += [f"--eval_images={args.eval_images}"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
    if done.returncode:
        raise ValueError(f"{' '.join(command)}\n{done.stderr[-1000:]}")
    scores = json.loads(done.stdout.splitlines()[-1])["eval"]
    return {"seconds": seconds, **{name: scores[name] for name in AIMS}}


def run(args):
    """Prints a line for every run and the verdict -> {"reference", "ours", "share_of_time"}."""
    results = {"reference": [], "ours": []}
    print(f"{'run':11} {'seed':>4} {'minutes':>8}" + "".join(f"{name:>16}" for name in AIMS))
    with checkout(args.reference) as reference:
        trees = {"reference": reference, "ours": REPOSITORY}
        for number, seed in enumerate(args.seeds):
            for name in in_turn(trees, number):
                found = train_once(trees[name], seed, args)
                results[name].append(found)
                cells = "".join(f"{found[score]:16.3f}" for score in AIMS)
                print(f"{name:11} {seed:4} {found['seconds'] / 60:8.1f}{cells}", flush=True)
    shares = [ours["seconds"] / theirs["seconds"]
              for ours, theirs in zip(results["ours"], results["reference"], strict=True)]
    holds = all(found[name] >= aim for found in results["ours"] for name, aim in AIMS.items())
    share = spread(shares)
    print(f"share of the reference's time: {share['median']:.2f} "
          f"({share['min']:.2f}-{share['max']:.2f}); the aims are "
          f"{'reached' if holds else 'not reached'}")
    return {**results, "share_of_time": share, "holds": holds}
