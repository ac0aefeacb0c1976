"""What a record file holds, in the units that training counts in: `python data.py stats FILE [--stage N]`.

in    a record file, and the recipe that says how long a row is and how annotations become prompts
out   records, branches, tokens and crops, the longest; what would be left out and why; how full the packer makes rows

Each record counts once, as in its first epoch; nothing is decoded. The last line is one JSON object.
"""

import json
import sys
from collections import Counter

import data
import loader
import packing
import train


def stats(source, tokenizer, config):
    """-> dict of numbers about all records of a source under a train.Config."""
    sizes, branches, skipped, dropped, longest = [], 0, Counter(), 0, (0, "")
    for i in range(len(source)):
        try:
            record = source[i]
            size, example = data.size_and_tokens(record, tokenizer, config.data, config.seed, 0)
        except data.Unreadable as e:
            skipped[str(e)[:3]] += 1
            continue
        if reason := loader.misfit(record, size, config):
            skipped[reason[:3]] += 1
            continue
        sizes.append(size)
        branches += max(int(example.branch.max(initial=0)), 1)
        dropped += example.dropped
        longest = max(longest, (size[0], record["id"]))
    found = {"records": len(source), "usable": len(sizes), "skipped": dict(skipped), "branches": branches, "branches_dropped": dropped,
             "tokens": sum(t for t, _ in sizes), "crops": sum(c for _, c in sizes), "longest": longest[0], "longest_id": longest[1]}
    planner, packs, waited = packing.Planner(sizes, config.data.max_tokens, config.pack_crops, config.pool_size), 0, 0
    for _ in planner:
        packs, waited = packs + 1, max(waited, *(planner.packs - 1 - e[3] for e in planner.last))
    if packs:
        found |= {"packs": packs, "fill_tokens": round(found["tokens"] / packs / config.data.max_tokens, 4),
                  "fill_crops": round(found["crops"] / packs / config.pack_crops, 4), "examples_per_pack": round(len(sizes) / packs, 2),
                  "branches_per_pack": round(branches / packs, 2), "longest_wait": waited}
    return found


def main(argv):
    parser = train.Parser(prog="data.py", allow_abbrev=False, epilog="All other flags are train.py's: --init, --a.b=value.")
    parser.add_argument("command", choices=("check", "stats"))
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--stage", default="1", help="whose row length and prompts (default 1)")
    parser.add_argument("--media", metavar="DIR", help="where the paths in the records start")
    try:
        args, rest = parser.parse_known_args(argv)
        media = ["--media", args.media] if args.media else []
        run, config = train.parse(["--stage", args.stage, "--data", args.file, *media, *rest])
        sources, _, _ = train.open_sources(run, config)
        tokenizer, config = train.open_tokenizer(run, config)
        found = stats(sources[0], tokenizer, config)
    except (train.UserError, data.DataError, OSError) as e:
        print(f"data.py: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    for name, value in found.items():
        print(f"{name:18} {value}")
    print(json.dumps({"file": args.file, "stage": config.stage, **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
