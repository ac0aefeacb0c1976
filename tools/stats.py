"""What a record file, or a mixture, holds in the units that training counts in.

    python -m tools.stats FILE [--media DIR] [--stage N] [--tiny] [--init DIR] [--a.b=value]

Records, branches, tokens and crops, the longest example, what is skipped and why, and how full the
packer makes rows. Each record counts once, as in its first epoch; nothing is decoded. FILE may be a
mix.json. The last line is one JSON object. Other flags are those of train.py.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field

import data
import packing
from records.errors import DataError, Unreadable, printable, warn
from training.config import Parser, UserError, parse
from training.planner import skip_reason
from training.setup import open_tokenizer
from training.sources import open_sources


@dataclass
class Counts:
    sizes: list = field(default_factory=list)        # (tokens, crops) of each record that is used
    skipped: Counter = field(default_factory=Counter)
    branches: int = 0
    branches_dropped: int = 0
    longest: int = 0
    longest_id: str = ""


def count(reader, tokenizer, config, counts):
    """Adds all records of a reader to Counts."""
    for i in range(len(reader)):
        try:
            record = reader[i]
            size, example = data.size_and_example(record, tokenizer, config.data, config.seed, 0)
            reason = skip_reason(record, size, config)
        except Unreadable as e:
            reason = str(e)
        if reason:
            counts.skipped[reason[:3]] += 1
            continue
        counts.sizes.append(size)
        counts.branches += example.n_branches
        counts.branches_dropped += example.dropped_branches
        if (size[0], record["id"]) > (counts.longest, counts.longest_id):
            counts.longest, counts.longest_id = size[0], record["id"]


def stats(readers, tokenizer, config):
    """-> {name: number} about all records of these readers under a Config."""
    counts = Counts()
    for reader in readers:
        count(reader, tokenizer, config, counts)
    found = {
        "records": sum(map(len, readers)), "usable": len(counts.sizes),
        "skipped": dict(counts.skipped), "branches": counts.branches,
        "branches_dropped": counts.branches_dropped, "tokens": sum(t for t, _ in counts.sizes),
        "crops": sum(c for _, c in counts.sizes), "longest": counts.longest,
        "longest_id": counts.longest_id}
    limits = config.data.max_tokens, config.pack_crops
    planner = packing.Planner(counts.sizes, *limits, config.pool_size)
    waits = [0]
    for _ in planner:
        waits += [planner.n_packs - 1 - e.arrived for e in planner.last]
    if packs := planner.n_packs:
        found |= {"packs": packs, "fill_tokens": round(found["tokens"] / packs / limits[0], 4),
                  "fill_crops": round(found["crops"] / packs / limits[1], 4),
                  "examples_per_pack": round(len(counts.sizes) / packs, 2),
                  "branches_per_pack": round(counts.branches / packs, 2),
                  "longest_wait": max(waits)}
    return found


def main(argv):
    parser = Parser(prog="tools.stats", allow_abbrev=False, description=__doc__.split("\n")[0],
                    epilog="Other flags are those of train.py, such as --init and --a.b=value.")
    parser.add_argument("file", metavar="FILE", help="records (.jsonl, .json) or a mix.json")
    parser.add_argument("--stage", default="1", help="whose row length and prompts (default 1)")
    parser.add_argument("--media", metavar="DIR", help="where the paths in the records start")
    try:
        args, rest = parser.parse_known_args(argv)
        media = ["--media", args.media] if args.media else []
        run, config = parse(["--stage", args.stage, "--data", args.file, *media, *rest])
        readers, _, _ = open_sources(run, config)
        tokenizer, config = open_tokenizer(run, config)
        found = stats(readers, tokenizer, config)
    except (UserError, DataError, OSError) as e:
        warn(f"tools.stats: {e}")
        raise SystemExit(2) from None
    for name, value in found.items():
        print(f"{name:18} {printable(str(value))}")
    print(json.dumps({"file": args.file, "stage": config.stage, **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
