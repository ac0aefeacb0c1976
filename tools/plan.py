"""Plans before training, without a GPU, which records share a row.

    python -m tools.plan --stage 1 --tiny --data tests/media/records.jsonl \\
        --media tests/media --packs 9 --out runs/plan.npz

The plan holds record ids, no pixels, and is the same for any number of workers. train.py
refuses it when the record files, the tokenizer or the config have changed. Media are not
compared: one whose size differs from the plan is masked.
"""

import json
import os
import signal
from functools import partial
from itertools import chain, count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from records.mixture import Mixture
from tools.command import make_parser, positive, report_errors
from tools.stats import describe_packs
from toy import world
from training.config import parse
from training.planner import PlanFile, StepPlanner, measure, name_kind
from training.setup import find_start
from training.sources import fingerprint, open_sources

CHUNK = 64  # records of a worker at a time
WORKER = {}  # in a worker's process: the arguments of `measure`


def start_worker(*arguments):
    WORKER["arguments"] = arguments


def measure_in_worker(index):
    return measure(*WORKER["arguments"], index)


def measure_in_order(mixture, tokenizer, config):
    """Yields what `measure` returns for the indices 0, 1, 2, .., from --workers processes."""
    arguments = mixture, tokenizer, config
    if not config.workers:
        yield from map(partial(measure, *arguments), count())
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the workers
    with get_context("spawn").Pool(config.workers, start_worker, arguments) as pool:
        signal.signal(signal.SIGINT, handler)
        n = CHUNK * config.workers
        for start in count(0, n):
            yield from pool.map(measure_in_worker, range(start, start + n))


def make_plan(mixture, tokenizer, config, n_packs):
    """-> {column: array} of a PlanFile, and {name: number} about it."""
    skipped = []  # (pack before which a record was skipped, "source: kind")
    results = measure_in_order(mixture, tokenizer, config)

    def measure_and_note(index):  # a planner asks for all indices in order
        found = next(results)
        if found.reason:
            name = f"{mixture[index][0].name}: {name_kind(found.reason)}"
            skipped.append((steps.planner.n_packs, name))
        return found

    steps = StepPlanner(mixture, tokenizer, config, measure_and_note)
    packs = []
    for _ in tqdm(range(n_packs), unit="pack", desc="plan", mininterval=1):
        packs.append(next(steps.planner))
    results.close()
    items = list(chain(*packs))
    ids = [steps.ids[item.index] for item in items]
    columns = dict(zip(PlanFile.COLUMNS, np.array(items, np.int64).T, strict=True))
    columns |= {"ends": np.cumsum(list(map(len, packs))), "ids": as_bytes("\0".join(ids)),
                "skipped_in": np.array([n for n, _ in skipped], np.int64),
                "skipped_why": np.array([why for _, why in skipped], str)}
    return columns, {**describe_packs(packs, config), "dropped": dict(steps.skipped.counts)}


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


@report_errors
def main(argv=None):
    parser = make_parser("plan", __doc__, epilog="All other flags are those of train.py.")
    parser.add_argument("--packs", type=positive,
                        help="how many packs (default: --steps times --batch)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the .npz file to write")
    args, rest = parser.parse_known_args(argv)
    run, config = parse(rest)
    if Path(args.out).is_dir():
        parser.error(f"--out {args.out}: name a file, not a folder")
    sources, rates, _ = open_sources(run, config, world)
    start, config = find_start(run, config, world)
    made_for = fingerprint(sources, rates, start.tokenizer, config)
    mixture = Mixture(sources, rates, config.seed)
    n_packs = args.packs or config.steps * config.batch
    columns, found = make_plan(mixture, start.tokenizer, config, n_packs)
    part = Path(f"{args.out}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "wb") as file:
        np.savez_compressed(file, made_for=as_bytes(json.dumps(made_for)), **columns)
    os.replace(part, args.out)
    print(json.dumps({"out": args.out, **found}))


if __name__ == "__main__":
    main()
