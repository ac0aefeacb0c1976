"""The paper's choices, taken away one at a time from the toy, with several seeds (paper: ablations, Table 11).

    python -m tools.ablate --out runs/ablate                            # all of them: hours; goes on where it was stopped
    python -m tools.ablate --only trees,packing --steps 400 --seeds 2 --out runs/ablate
    python -m tools.ablate --only long-context --init films=runs/stage2-tiny --out runs/ablate

Three families: pictures (stage 1 from a ViT that can see), films (stage 2 from that) and long films (stage 3 from that). Every run is
train.py itself, in a process of its own, with a few flags or with one function replaced (`take_away`): what is compared is the code that
trains. All runs of a family have the same number of steps, of rows of the same size. What a step sees and takes may differ by the choice,
and is told beside the scores. Seeds of stage 1 differ in everything; later families may start from one model (--init).
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
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
import mixture
import train
import vision
from evaluation import charts, report
from stages import tiny as tiny_recipe
from tools.runs import final_scores
from toy import videos as films
from training.log import read_log


@dataclass(frozen=True)
class Choice:
    """What the paper chose, and how the toy does without."""
    name: str
    says: str                        # the paper's claim, in a few words
    family: str                      # pictures | films | long
    metrics: tuple                   # what it should help, first the one that decides
    flags: tuple = ()                # of a run without it, where flags do


CHOICES = (
    Choice("packing", "examples share a row: more of them in the same time", "pictures", ("point_f1", "count_accuracy"), ("--pool_size=1",)),
    Choice("trees", "annotations share what they are about: more of them in the same time", "pictures", ("point_f1", "count_accuracy")),
    Choice("bidirectional", "visual tokens see each other both ways", "pictures", ("point_f1", "count_accuracy")),
    Choice("attentional pooling", "better than the mean of a window", "pictures", ("point_f1", "count_accuracy")),
    Choice("token weights", "short answers keep their say beside long ones", "films", ("qa_accuracy", "video_point_f1", "track_f1"),
           ("--data.sqrt_length=false", "--data.sqrt_branches=false", "--data.point_weight=1", "--data.video_caption_weight=1")),
    Choice("3x3 windows", "better than 4x4 on frames", "films", ("video_point_f1", "track_f1", "qa_accuracy")),
    Choice("square-root mixture", "better than shares by size", "films", ("qa_accuracy", "track_f1", "video_point_f1")),
    Choice("long context", "a last stage with more frames helps on long films", "long",
           ("long.qa_accuracy", "long.count_accuracy", "long.caption_recall", "long.video_point_f1", "qa_accuracy"),
           ("--stage", "2", "--lr.connector=5e-4", "--lr.llm=5e-4")),
)
# stage of each family, and where its runs start from: a ViT that can see, or what the family before learned with all choices
FAMILIES = {"pictures": ("1", "sighted"), "films": ("2", "pictures"), "long": ("3", "films")}


def take_away(name):
    """Replaces, in this process, what a choice consists in. Those that are flags need nothing."""
    if name == "trees":
        arrange = data.build_tree

        def alone(record, sight, tokenizer, config, seed, epoch):
            """One annotation of a record, drawn anew each time."""
            some = record["annotations"]
            one = some[int(data.rng_for(seed, record["id"], epoch, "alone").integers(len(some)))]
            return arrange({**record, "annotations": [one]}, sight, tokenizer, config, seed, epoch)

        data.build_tree = alone
    elif name == "bidirectional":
        layout = data.layout

        def causal(trunk, visual, branches, max_tokens=None):
            return layout(trunk, [False] * len(trunk), branches, max_tokens)

        data.layout = causal
    elif name == "attentional pooling":

        def mean(self, features, pool_src):
            valid = (pool_src >= 0)[..., None]
            window = features.flatten(0, 1)[pool_src.clamp(min=0)] * valid
            return self.out(self.v(window.sum(1) / valid.sum(1).clamp(min=1)))

        vision.Pool.forward = mean
    elif name == "3x3 windows":
        vision.frame_windows = lambda config: vision.windows(np.arange(config.n_patch).reshape(config.grid, config.grid), 4)
    elif name == "square-root mixture":
        mixture.share = lambda n, size=None, rate=None: float(n)
    elif name == "long context":         # at stage 3's rates, of learning and of films, no lessons: what differs is how long films are
        films.mixture = partial(films.mixture, lessons=False, moving=0.85)
    elif not any(c.name == name and c.flags for c in CHOICES):
        raise ValueError(f"nothing known of '{name}'; there are {', '.join(c.name for c in CHOICES)}")


def one(name, flags):
    """One run without a choice ("" : with all of them), in this process; train.py prints its result."""
    if name:
        take_away(name)
    train.main(flags)


def sighted(out, seed, steps):
    """Leaves a model that has had stage 0 alone, from which the runs on pictures start; of short runs a short one."""
    seen = len(read_log(out / "stage0.jsonl"))
    if not (out / "model" / "data.json").exists() or seen != min(steps, tiny_recipe.RECIPE["vit_steps"]):
        _, config = train.parse(["--stage", "1", "--tiny", "--seed", str(seed), "--steps", str(steps)])
        torch.set_flush_denormal(True)                   # as train.py
        torch.manual_seed(seed)
        model, tokenizer, config = train.open_model(argparse.Namespace(init=None), config)
        (out / "model").mkdir(parents=True, exist_ok=True)
        train.teach_to_see(config, out, model.vision.vit)
        train.leave(config, out, model, tokenizer)


def settings_of(out, words):
    """What differs between a run that is there and the words of one to be made; "" if nothing does, or none is there."""
    first = (read_log(out / "log.jsonl") or [{}])[0]
    if "command" not in first:
        return ""
    args, config = train.parse(words[1:])
    wanted = json.loads(json.dumps({**dataclasses.asdict(config), "init": args.init}))
    made = {**first["config"], "init": first["command"].get("init")}
    fields = [(key, made[key], wanted.get(key)) for key in made if key not in train.LAYOUT - {"eval_images"} | {"data"}]
    fields += [(f"data.{key}", value, wanted["data"].get(key)) for key, value in made.get("data", {}).items() if key != "vision"]
    return ", ".join(f"{key} {value}, not {other}" for key, value, other in fields if value != other)


def cost(run):
    """{"examples", "tokens", "crops": mean of a step, "seconds": median of one}: what a run's steps held, and how long they took."""
    steps = report.steps_of(read_log(run / "log.jsonl"))
    return {key: of(line[key] for line in steps) for key, of in (("examples", statistics.mean), ("tokens", statistics.mean),
            ("crops", statistics.mean), ("seconds", statistics.median))} if steps else {}


def runs_of(args, given):
    """-> [(name, directory, start, words after `ablate one`), ..] in an order in which every start is there when it is needed."""
    wanted, runs = [c for c in CHOICES if not args.only or c.name.replace(" ", "-") in args.only.split(",")], []
    families = list(FAMILIES)
    last = max((families.index(c.family) for c in wanted), default=-1)
    for seed in range(args.seeds):
        for family in families[: last + 1]:
            stage, before = FAMILIES[family]
            if family in given:
                continue
            chosen, here = [c for c in wanted if c.family == family], families.index(family)
            # a later one starts from it, directly or by way of those between
            needed = any(not {*families[here + 1 : families.index(c.family)]} & {*given} for c in wanted if families.index(c.family) > here)
            for c in [None, *chosen] if chosen or needed else []:
                start = given.get(before) or args.out / (f"sighted-{seed}" if before == "sighted" else directory(before, None, seed))
                flags = ["--stage", stage, "--tiny", "--seed", str(seed), "--steps", str(args.steps), "--save-every", "0",
                         "--workers", "0",       # they would not know what was taken away
                         f"--eval_images={args.images}", "--device", args.device, "--init", str(start), *(c.flags if c else ())]
                runs.append((directory(family, c, seed), start, [c.name if c else "", *flags]))
    return runs


def directory(family, choice, seed):
    return f"{family}-{f'without-{choice.name}' if choice else 'all'}-{seed}".replace(" ", "-")


def compare(choice, seeds, out):
    """-> [{"choice", "metric", "with", "without", "difference", "error", "costs", "commits"}, ..]: means over seeds, pairs of one seed,
    standard error; what a step of each pair saw and took, and of which programs the runs are."""
    rows = []
    for metric in choice.metrics:
        pairs = [[final_scores(out / directory(choice.family, c, seed)) for c in (choice, None)] for seed in range(seeds)]
        pairs = [(a[metric], b[metric]) for a, b in pairs if a and b and metric in a and metric in b]
        if not pairs:
            continue
        gains = [b - a for a, b in pairs]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
        made = [[out / directory(choice.family, c, seed) for c in (None, choice)] for seed in range(seeds)]
        costs = [[cost(run) for run in pair] for pair in made if all(map(cost, pair))]
        commits = {read_log(run / "log.jsonl")[0].get("commit") for pair in made for run in pair if read_log(run / "log.jsonl")}
        rows.append({"choice": choice.name, "metric": metric, "seeds": len(gains), "with": statistics.mean(b for _, b in pairs),
                     "without": statistics.mean(a for a, _ in pairs), "difference": statistics.mean(gains), "error": error,
                     "costs": costs, "commits": sorted(map(str, commits))})
    return rows


# what a mean of 2, 3, .. pairs must exceed, in standard errors, to differ from 0 with 95 % (Student's t)
CERTAIN = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def verdict(row):
    if row["error"] is None or abs(row["difference"]) <= CERTAIN[min(row["seeds"] - 2, len(CERTAIN) - 1)] * row["error"]:
        return "cannot tell"
    return "agrees" if row["difference"] > 0 else "disagrees"


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["one"]:
        return one(argv[1], argv[2:])
    parser = argparse.ArgumentParser(description="Take the paper's choices away from the toy, one at a time.")
    parser.add_argument("--only", help="some of: " + ", ".join(c.name.replace(" ", "-") for c in CHOICES))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--steps", type=int, default=800, help="of each run (default 800)")
    parser.add_argument("--images", type=int, default=100, help="held-out examples of each kind that are asked about (default 100)")
    parser.add_argument("--init", nargs="*", default=[], metavar="FAMILY=DIR", help="a run that stands for pictures, or for films")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/ablate"), help="a directory per run; what is there is not run again")
    args = parser.parse_args(argv)
    for key in ("seeds", "steps", "images", "jobs"):
        if getattr(args, key) < 1:
            parser.error(f"--{key}: must be at least 1, not {getattr(args, key)}")
    names = [c.name.replace(" ", "-") for c in CHOICES]
    if unknown := {*(args.only or names[0]).split(",")} - {*names}:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    given = dict(item.partition("=")[::2] for item in args.init)
    for family, folder in given.items():
        if family not in list(FAMILIES)[:-1] or not (Path(folder) / "model").is_dir():
            parser.error(f"--init {family}={folder}: a family (pictures, films) and the directory of a run")
    runs = runs_of(args, given)
    for name, _, words in runs:
        if other := settings_of(args.out / name, words):
            parser.error(f"{args.out / name} was made with other settings ({other}); name another --out")
    runs = [run for run in runs if final_scores(args.out / run[0]) is None]
    for seed in range(args.seeds):
        if any(start == (out := args.out / f"sighted-{seed}") for _, start, _ in runs):
            sighted(out, seed, args.steps)
    perform(runs, args)
    rows = [row for choice in CHOICES for row in compare(choice, args.seeds, args.out)]
    for row in rows:
        row["verdict"] = verdict(row)
        error = math.nan if row["error"] is None else row["error"]
        print(f"{row['choice']:20} {row['metric']:20} with {row['with']:.3f}  without {row['without']:.3f}  "
              f"gain {row['difference']:+.3f} +- {error:.3f}  ({row['seeds']} seeds)  {row['verdict']}")
    for row in {row["choice"]: row for row in rows}.values():
        for k, side in enumerate(("with", "without")):
            if row["costs"]:
                mean = {key: statistics.mean(pair[k][key] for pair in row["costs"]) for key in row["costs"][0][k]}
                print("a step {:7} {:20} {examples:.1f} examples, {tokens:.0f} tokens, {crops:.1f} crops, {seconds:.3f} s".format(
                    side, row["choice"], **mean))
        if len(row["commits"]) > 1:
            print(f"{row['choice']}: of different programs, {', '.join(row['commits'])}", file=sys.stderr)
    first = {(c.name, c.metrics[0]) for c in CHOICES}
    deciding = [row for row in rows if row["error"] is not None and (row["choice"], row["metric"]) in first]
    if deciding:                         # a single seed has no error bars
        charts.save_bars([(f"{r['choice']} ({r['metric']})", r["difference"], r["difference"] - r["error"], r["difference"] + r["error"])
                     for r in deciding], args.out / "ablate.png")
    print(json.dumps({"steps": args.steps, "rows": rows}))


def perform(runs, args):
    """Runs them, some at a time, each once what it starts from is there."""

    def run(name, before, words):
        if before:
            before.final_scores()              # it was begun earlier, so this cannot wait for ever
        shutil.rmtree(args.out / name, ignore_errors=True)               # of a run that was stopped
        print(name, file=sys.stderr)
        command = [sys.executable, "-m", "tools.ablate", "one", *words, "--out", str(args.out / name)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    made, pool = {}, ThreadPoolExecutor(args.jobs)
    for name, start, words in runs:
        made[args.out / name] = pool.submit(run, name, made.get(Path(start)), words)
    try:
        for future in as_completed(made.values()):
            future.final_scores()
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"tools.ablate: {Path(e.cmd[-1]).name} ended with {e.returncode}") from None
    finally:
        pool.shutdown(cancel_futures=True)               # what has begun ends by itself, no other begins


if __name__ == "__main__":
    main()
