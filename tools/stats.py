"""Counts records, tokens and crops of a file or a mixture, and how full their rows are.

    python -m tools.stats tests/media/records.jsonl --media tests/media --tiny --init toy

Also the longest example, and what is skipped and why. Each record counts once, as in its
first epoch; nothing is decoded. The last line is one JSON object.
"""

import json
from collections import Counter

import data
import packing
from records.errors import Unreadable
from records.visual import read_headers
from tools.command import make_parser, report_errors
from toy import world
from training.config import parse
from training.planner import name_kind, skip_reason
from training.setup import find_start
from training.sources import open_sources


def stats(readers, tokenizer, config):
    """-> {name: number} about all records of these readers under a Config."""
    sizes = []  # (tokens, crops) of each record that is used
    skipped = Counter()
    branches = dropped = longest = 0
    longest_id = ""
    given = tokenizer, config.data, config.seed, 0  # epoch 0
    for reader in readers:
        for i in range(len(reader)):
            try:
                record = reader[i]
                info = read_headers(record, config.data)
                example = data.build_tree(record, info, *given)
                size = data.size_of(example, info, config.data)
                reason = skip_reason(record, size, config)
            except Unreadable as e:
                reason = str(e)
            if reason:
                skipped[name_kind(reason)] += 1
                continue
            sizes.append(size)
            branches += example.n_branches
            dropped += example.dropped_branches
            if size[0] > longest:
                longest = size[0]
                longest_id = record["id"]
    found = {
        "records": sum(map(len, readers)), "usable": len(sizes), "skipped": dict(skipped),
        "branches": branches, "branches_dropped": dropped,
        "tokens": sum(t for t, _ in sizes), "crops": sum(c for _, c in sizes),
        "longest": longest, "longest_id": longest_id}
    planner = packing.Planner(
        sizes, config.data.max_tokens, config.pack_crops, config.pool_size)
    packs = list(planner)
    return found | describe_packs(packs, config) if packs else found


def describe_packs(packs, config):
    """[[packing.Item, ..] of each pack] -> {name: number}. A wait is counted in packs."""
    items = [item for pack in packs for item in pack]
    n = len(packs)
    waits = [k - item.arrived for k, pack in enumerate(packs) for item in pack]
    tokens = sum(item.tokens for item in items) / n
    crops = sum(item.crops for item in items) / n
    return {
        "packs": n, "fill_tokens": round(tokens / config.data.max_tokens, 4),
        "fill_crops": round(crops / config.pack_crops, 4),
        "examples_per_pack": round(len(items) / n, 2), "longest_wait": max(waits)}


@report_errors
def main(argv=None):
    parser = make_parser("stats", __doc__, epilog="All other flags are those of train.py.")
    add = parser.add_argument
    add("file", metavar="FILE", help=(
        "records (.jsonl), or a mixture, whose name ends in mix.json"))
    add("--stage", default="1", help="the stage whose row length and prompts count (default 1)")
    add("--media", metavar="DIR", help="where the paths in the records start")
    args, rest = parser.parse_known_args(argv)
    media = ["--media", args.media] if args.media else []
    run, config = parse(["--stage", args.stage, "--data", args.file, *media, *rest])
    readers, _, _ = open_sources(run, config, world)
    start, config = find_start(run, config, world)
    found = stats(readers, start.tokenizer, config)
    for name, value in found.items():
        print(f"{name:18} {value}")
    print(json.dumps({"file": args.file, "stage": config.stage, **found}))


if __name__ == "__main__":
    main()
