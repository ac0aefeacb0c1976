"""Packs planned ahead, on machines without a GPU: rows of record ids, no pixels (paper: packing).

    python -m tools.plan --stage 2 --data a.jsonl b.jsonl --packs 4096 --out plan.npz
    torchrun --nproc-per-node 32 -m tools.plan ...            # the same plan, made by 32 processes
    python train.py --stage 2 --data a.jsonl b.jsonl --plan plan.npz      # the same run as without

A plan is tied to the record files, the tokenizer and the config, and is refused when one of them
has changed. Images and videos are not compared: one of another size than planned is masked.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from parallel import all_gather
from records.errors import DataError, warn
from records.mixture import Mixture
from training.config import Parser, UserError, parse
from training.planner import PlanFile, StepPlanner, measure, source_at
from training.setup import open_tokenizer
from training.sources import fingerprint, open_sources

CHUNK = 64                           # records that a process measures before results are exchanged


def measured_in_turns(mixture, tokenizer, config, rank, n_ranks):
    """-> a function of the indices 0, 1, 2 .. in their order, like planner.measure; the processes
    share the work and all know the results."""
    def stream():
        start = 0
        while True:
            turn = range(start + rank, start + CHUNK * n_ranks, n_ranks)
            try:
                mine = [measure(mixture, tokenizer, config, index) for index in turn]
            except (DataError, OSError) as e:        # sent to all, or the others would wait
                mine = str(e)
            of_ranks = all_gather(mine)
            for part in of_ranks:
                if isinstance(part, str):
                    raise DataError(part)
            for results in zip(*of_ranks, strict=True):
                yield from results
            start += CHUNK * n_ranks

    results = stream()
    return lambda index: next(results)


def make_plan(mixture, tokenizer, config, n_packs, rank, n_ranks):
    """Every process plans everything -> {column: array} of a PlanFile, and the StepPlanner."""
    skipped = []                     # (pack before which a record was skipped, "source: code")
    in_turns = measured_in_turns(mixture, tokenizer, config, rank, n_ranks)

    def measure_and_note(index):
        found = in_turns(index)
        if found.reason:
            name = f"{source_at(mixture, index)}: {found.reason[:3]}"
            skipped.append((steps.planner.n_packs, name))
        return found

    steps = StepPlanner(mixture, tokenizer, config, measure_and_note)
    items, ids, ends = [], [], []
    for _ in tqdm(range(n_packs), unit="pack", desc="plan", disable=rank > 0, mininterval=1):
        next(steps.planner)
        items += steps.planner.last
        ids += [steps.ids.pop(e.index) for e in steps.planner.last]
        ends.append(len(items))
    columns = dict(zip(PlanFile.COLUMNS, np.array(items, np.int64).T, strict=True))
    columns |= {"ends": np.array(ends), "ids": as_bytes("\0".join(ids)),
                "skipped_in": np.array([n for n, _ in skipped], np.int64),
                "skipped_why": np.array([why for _, why in skipped], str)}
    return columns, steps


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def summary(out, columns, config, skipped):
    n_packs = len(columns["ends"])
    pack_of = np.repeat(np.arange(n_packs), np.diff([0, *columns["ends"]]))
    fill = {name: columns[name].sum() / n_packs / limit for name, limit in
            (("tokens", config.data.max_tokens), ("crops", config.pack_crops))}
    return {"out": out, "packs": n_packs, "examples": len(pack_of),
            "fill_tokens": round(fill["tokens"], 4), "fill_crops": round(fill["crops"], 4),
            "longest_wait": int((pack_of - columns["arrived"]).max()), "dropped": dict(skipped)}


def plan(args, run, config, rank, n_ranks):
    """Writes the plan on the first process -> summary."""
    sources, rates, _ = open_sources(run, config)
    tokenizer, config = open_tokenizer(run, config)
    if n_ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=2))       # videos take their time
    made_for = fingerprint(sources, rates, tokenizer, config)
    if any(other != made_for for other in all_gather(made_for)):
        raise DataError("the processes do not see the same record files, tokenizer and config")
    mixture = Mixture(sources, rates, config.seed)
    n_packs = config.steps * config.batch if args.packs is None else args.packs
    columns, steps = make_plan(mixture, tokenizer, config, n_packs, rank, n_ranks)
    if rank == 0:
        part = Path(args.out).with_name(f"{Path(args.out).name}.tmp")
        with open(part, "wb") as file:
            np.savez_compressed(file, made_for=as_bytes(json.dumps(made_for)), **columns)
        os.replace(part, args.out)
    all_gather(None)                 # nobody leaves while the first still writes
    return summary(args.out, columns, config, steps.skipped.counts)


def main(argv):
    parser = Parser(prog="tools.plan", allow_abbrev=False, description=__doc__.split("\n")[0],
                    epilog="Other flags are those of train.py: name the data, stage, --init and "
                    "--seed of the run.")
    parser.add_argument("--packs", type=int, help="how many (default: --steps times --batch)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the plan, an .npz file")
    rank, n_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args, rest = parser.parse_known_args(argv)
        run, config = parse(rest)
        if args.packs is not None and args.packs < 1:
            raise UserError("--packs: at least 1")
        if Path(args.out).is_dir() or not Path(args.out).parent.is_dir():
            raise UserError(f"--out {args.out}: name a file in a folder that exists")
        found = plan(args, run, config, rank, n_ranks)
    except (UserError, DataError, OSError) as e:
        if rank == 0 or not dist.is_initialized():   # later on, all find the same
            warn(f"tools.plan: {e}")
        raise SystemExit(1 if isinstance(e, OSError) else 2) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
