"""What several runs ended with, side by side.

    python -m tools.runs runs/tiny/stage1 runs/tiny/stage2 runs/tiny/stage3
"""

import json
import sys
from pathlib import Path

from training.log import read_log


def flat(metrics, prefix=""):
    """Nested scores -> {"long.qa_accuracy": .., ..}"""
    out = {}
    for key, value in metrics.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def result(run):
    """The scores and seconds that a run ended with, from its log, flat; None if it has not ended."""
    last = (read_log(Path(run) / "log.jsonl") or [{}])[-1]
    return flat({**last["eval"], "seconds": last["seconds"]}) if "eval" in last and "seconds" in last else None


def table(columns):
    """{name: {metric: number}} -> lines of text: a row per metric that any of them has, a column each; "-" where one has none."""
    metrics = list(dict.fromkeys(key for scores in columns.values() for key, value in scores.items() if isinstance(value, int | float)))
    first, width = max(map(len, metrics), default=0), max(13, *map(len, columns)) + 1

    def cell(key, v):
        return "-" if v is None else f"{v:.0f}" if key == "seconds" or isinstance(v, int) else f"{v:.3f}"

    lines = [" " * first + "".join(f"{name:>{width}}" for name in columns)]
    return lines + [f"{key:{first}}" + "".join(f"{cell(key, scores.get(key)):>{width}}" for scores in columns.values()) for key in metrics]


def end(said):
    print(said, file=sys.stderr)
    raise SystemExit(2)


def main():
    given = list(dict.fromkeys(sys.argv[1:]))
    if not given or given[0].startswith("-"):
        end(__doc__)
    for run in given:
        if result(run) is None:
            end(f"tools.runs: {run}: no log of a run that has ended")
    short = {run: Path(run).name for run in given}
    names = short if len({*short.values()}) == len(given) else {run: run for run in given}
    columns = {names[run]: result(run) for run in given}
    print(*table(columns), sep="\n")
    print(json.dumps(columns))


if __name__ == "__main__":
    main()
