"""The final scores of several runs, side by side; the last line is JSON.

    python -m tools.runs runs/tiny/stage1 runs/tiny/stage2 runs/tiny/stage3
"""

import json
from pathlib import Path

from tools.command import make_parser, report_errors
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


def make_table(columns, title="", digits=3):
    """{name of a column: {metric: number}} -> lines of text, a row for each metric; "-"
    where a column lacks it."""
    metrics = dict.fromkeys(metric for scores in columns.values() for metric in scores)
    width = max(13, *map(len, columns)) + 1
    lines = [f"{title:24}" + "".join(f"{name:>{width}}" for name in columns)]
    for metric in metrics:
        line = f"{metric:24}"
        for scores in columns.values():
            cell = scores.get(metric, "-")
            text = f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)
            line += f"{text:>{width}}"
        lines.append(line)
    return lines


@report_errors
def main(argv=None):
    parser = make_parser("runs", __doc__)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="of a run of train.py")
    scores = {run: final_scores(run) for run in parser.parse_args(argv).runs}
    for run, found in scores.items():
        if found is None:
            parser.error(f"{run} has no log of a finished run")
    print(*make_table(scores), sep="\n")
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
