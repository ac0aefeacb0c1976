"""The final scores of several runs, side by side; the last line is JSON.

    python -m tools.runs runs/tiny/stage1 runs/tiny/stage2 runs/tiny/stage3
"""

import argparse
import json
from pathlib import Path

from records.errors import warn
from training.config import Parser, UserError
from training.log import read_log


def flatten(scores, prefix=""):
    """Nested scores -> {"long.qa_accuracy": number, ..}"""
    flat = {}
    for key, value in scores.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def final_scores(run):
    """Flat scores of a finished run, and its "seconds", from its log; None if it is
    unfinished."""
    log = read_log(Path(run) / "log.jsonl")
    last = log[-1] if log else {}
    if "eval" not in last or "seconds" not in last:
        return None
    return flatten({**last["eval"], "seconds": last["seconds"]})


def table(columns):
    """{run: {metric: number}} -> lines of text, a row for each metric; "-" where a run
    lacks it."""
    metrics = dict.fromkeys(metric for scores in columns.values() for metric in scores)
    width = max(13, *map(len, columns)) + 1
    lines = [" " * 24 + "".join(f"{run:>{width}}" for run in columns)]
    for metric in metrics:
        cells = [scores.get(metric, "-") for scores in columns.values()]
        texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"{metric:24}" + "".join(f"{text:>{width}}" for text in texts))
    return lines


def main(argv=None):
    parser = Parser(prog="tools.runs", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="run directory of train.py")
    try:
        scores = {run: final_scores(run) for run in parser.parse_args(argv).runs}
        for run, found in scores.items():
            if found is None:
                parser.error(f"{run} has no log of a finished run")
    except UserError as e:
        warn(str(e))
        raise SystemExit(2) from None
    print(*table(scores), sep="\n")
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
