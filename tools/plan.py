"""Counts the tokens and crops of record files, or plans their packs before training.

    python -m tools.plan --stage 1 --tiny --init toy --data tests/media/records.jsonl \\
        --media tests/media

Without --out it prints the sizes of the records, how full the packed sequences are, and why
records are skipped. Each record counts once, as in its first epoch. No image or video is decoded.
The last line is one JSON object.

With --out plan.npz it decides which records share a packed sequence, and writes this plan for
train.py --plan. It needs no GPU. A plan contains the ids of records and no pixels. It is the same
for any number of workers. train.py stops if the record files, the tokenizer or the config have
changed since. It does not compare images and videos. A record whose size differs from the plan has
no loss.
"""

import json
from collections import Counter
from itertools import chain

import numpy as np
from tqdm import tqdm

import packing
from records.errors import draft
from records.mixture import Mixture
from tools.command import make_parser, output_file, positive, print_line, report_errors
from toy import world
from training.config import parse
from training.planner import PlanFile, StepPlanner, measure, name_kind
from training.setup import find_start
from training.sources import fingerprint, open_sources


def open_training(args, config):
    """Opens the data and the tokenizer as train.py does -> Mixture, tokenizer, config with the
    shape of the model."""
    generated = world.mixture(config.seed, config.stage)
    sources, rates, _ = open_sources(args, config, generated)
    start, config = find_start(args, config)
    return Mixture(sources, rates, config.seed), start.tokenizer, config


def count_records(sources, tokenizer, config):
    """-> {name: number} about all records of these sources, and about the packs made of them."""
    entries = [(source, i, 0) for source in sources for i in range(len(source))]
    measured = [measure(entries, tokenizer, config, k) for k in range(len(entries))]
    used = [found for found in measured if not found.reason]
    skipped = Counter(name_kind(found.reason) for found in measured if found.reason)
    numbers = {"records": len(entries), "usable": len(used), "skipped": dict(skipped)}
    if not used:
        return numbers
    sizes = [found.size for found in used]
    planner = packing.Planner(sizes, config.data.max_tokens, config.pack_crops, config.pool_size)
    tokens, crops = map(sum, zip(*sizes, strict=True))
    longest = max(used, key=lambda found: found.size[0])
    return numbers | {
        "branches": sum(found.n_branches for found in used),
        "branches_dropped": sum(found.dropped_branches for found in used),
        "tokens": tokens, "crops": crops, "longest": longest.size[0], "longest_id": longest.id,
        **describe_packs(list(planner), config)}


def describe_packs(packs, config):
    """[packs, each a list of packing.Item] -> {name: number}. longest_wait is a number of packs."""
    items = [item for pack in packs for item in pack]
    n = len(packs)
    waits = [k - item.arrived for k, pack in enumerate(packs) for item in pack]
    tokens = sum(item.tokens for item in items) / n
    crops = sum(item.crops for item in items) / n
    return {
        "packs": n, "fill_tokens": round(tokens / config.data.max_tokens, 4),
        "fill_crops": round(crops / config.pack_crops, 4),
        "examples_per_pack": round(len(items) / n, 2), "longest_wait": max(waits)}


def make_plan(mixture, tokenizer, config, n_packs):
    """-> {column: array} of a PlanFile, and {name: number} about the plan."""
    skipped = []  # (number of packs before the skipped record, "source: kind")
    before = Counter()
    steps = StepPlanner(mixture, tokenizer, config, config.workers)
    packs = []
    for k in tqdm(range(n_packs), unit="pack", desc="plan", mininterval=1):
        packs.append(next(steps.planner))
        counts = Counter({f"{source}: {kind}": n for source, kinds in steps.skipped.counts.items()
                          for kind, n in kinds.items()})
        skipped += [(k, name) for name in (counts - before).elements()]
        before = counts
    steps.close()
    items = list(chain(*packs))
    ids = [steps.ids[item.index] for item in items]
    columns = dict(zip(PlanFile.COLUMNS, np.array(items, np.int64).T, strict=True))
    columns |= {"ends": np.cumsum(list(map(len, packs))), "ids": as_bytes("\0".join(ids)),
                "skipped_in": np.array([n for n, _ in skipped], np.int64),
                "skipped_why": np.array([why for _, why in skipped], str)}
    return columns, {**describe_packs(packs, config), "skipped": dict(steps.skipped.counts)}


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def write_plan(path, mixture, tokenizer, config, n_packs):
    """Writes a PlanFile with n_packs packs -> {name: number} about the plan."""
    made_for = fingerprint(mixture.sources, mixture.rates, tokenizer, config)
    columns, found = make_plan(mixture, tokenizer, config, n_packs)
    np.savez_compressed(path, made_for=as_bytes(json.dumps(made_for)), **columns)
    return found


@report_errors
def main(argv=None):
    parser = make_parser("plan", __doc__, epilog="All other flags are those of train.py.")
    parser.add_argument("--packs", type=positive, metavar="N",
                        help="with --out: number of packs (default: --steps times --batch)")
    parser.add_argument("--out", type=output_file(".npz", b"made_for.npy"), metavar="FILE", help=(
        "the .npz file to write, for train.py --plan (default: only print numbers)"))
    args, rest = parser.parse_known_args(argv)
    run, config = parse(rest)
    if not args.out and (args.packs or not run.data):
        parser.error("without --out, --data FILE is required and --packs is not allowed")
    mixture, tokenizer, config = open_training(run, config)
    if args.out:
        n_packs = args.packs or config.steps * config.batch
        with draft(args.out) as path:
            found = write_plan(path, mixture, tokenizer, config, n_packs)
        print_line({"out": str(args.out), **found})
        return
    found = count_records(mixture.sources, tokenizer, config)
    for name, value in found.items():
        print(f"{name:18} {value}")
    print_line({"data": run.data, "stage": config.stage, **found})


if __name__ == "__main__":
    main()
