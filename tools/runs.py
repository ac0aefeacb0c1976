"""The final scores of several runs, side by side; the last line is JSON.

    python -m tools.runs runs/tiny/stage1 runs/tiny/stage2 runs/tiny/stage3
"""

import json
from pathlib import Path

from tools.command import make_parser, print_table, report_errors
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


def compare(columns):
    """{name of a column: {metric: number}} -> {metric: {name of a column: number, or None}}"""
    metrics = dict.fromkeys(metric for scores in columns.values() for metric in scores)
    return {metric: {name: scores.get(metric) for name, scores in columns.items()}
            for metric in metrics}


@report_errors
def main(argv=None):
    parser = make_parser("runs", __doc__)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="of a run of train.py")
    scores = {run: final_scores(run) for run in parser.parse_args(argv).runs}
    for run, found in scores.items():
        if found is None:
            parser.error(f"{run} has no log of a finished run")
    print_table("", compare(scores))
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
