"""The final scores of several runs, side by side; the last line is JSON.

    python -m tools.runs runs/tiny/stage1 runs/tiny/stage2 runs/tiny/stage3
"""

import argparse
import json
from pathlib import Path

from records.errors import warn
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
    """Flat scores of a finished run, and its "seconds", from its log; None if it is unfinished."""
    log = read_log(Path(run) / "log.jsonl")
    last = log[-1] if log else {}
    if "eval" not in last or "seconds" not in last:
        return None
    return flatten({**last["eval"], "seconds": last["seconds"]})


def table(columns):
    """{run: {metric: number}} -> lines of text, a row for each metric; "-" where a run lacks it."""
    metrics = {}                         # a dict keeps the order of the first appearance
    for scores in columns.values():
        metrics |= {key: None for key, value in scores.items() if isinstance(value, int | float)}
    first = max(map(len, metrics), default=0)
    width = max(13, *map(len, columns)) + 1
    lines = [" " * first + "".join(f"{run:>{width}}" for run in columns)]
    for key in metrics:
        cells = [cell(key, scores.get(key)) for scores in columns.values()]
        lines.append(f"{key:{first}}" + "".join(f"{text:>{width}}" for text in cells))
    return lines


def cell(key, value):
    if value is None:
        return "-"
    return f"{value:.0f}" if key == "seconds" or isinstance(value, int) else f"{value:.3f}"


def exit_with(message):
    warn(message)
    raise SystemExit(2)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.runs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="run directory of train.py")
    runs = list(dict.fromkeys(parser.parse_args().runs))
    scores = {run: final_scores(run) for run in runs}
    for run in runs:
        if scores[run] is None:
            exit_with(f"tools.runs: {run} has no log of a finished run")
    names = {Path(run).name for run in runs}
    if len(names) == len(runs):
        scores = {Path(run).name: scores[run] for run in runs}
    print(*table(scores), sep="\n")
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
