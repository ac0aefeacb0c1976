"""What several runs ended with, side by side.

    python -m tools.runs runs/tiny/stage1 runs/tiny/stage2 runs/tiny/stage3
"""

import json
import sys
from pathlib import Path


def flat(metrics, prefix=""):
    """Nested scores -> {"long.qa_accuracy": .., ..}"""
    out = {}
    for key, value in metrics.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def result(run):
    """The scores and seconds that a run ended with, from its log, flat; None if it has not ended."""
    log = Path(run) / "log.jsonl"
    last = json.loads(lines[-1]) if log.exists() and (lines := log.read_text().splitlines()) else {}
    return flat({**last["eval"], "seconds": last["seconds"]}) if "eval" in last and "seconds" in last else None


def table(columns):
    """{name: {metric: number}} -> lines of text: a row per metric that any of them has, a column each; "-" where one has none."""
    metrics = list(dict.fromkeys(key for scores in columns.values() for key, value in scores.items() if isinstance(value, int | float)))
    width = max(map(len, metrics), default=0)
    cell = lambda v: "-" if v is None else str(v) if isinstance(v, int) else f"{v:.0f}" if v > 1 else f"{v:.3f}"       # noqa: E731
    lines = [" " * width + "".join(f"{name:>14}" for name in columns)]
    return lines + [f"{key:{width}}" + "".join(f"{cell(scores.get(key)):>14}" for scores in columns.values()) for key in metrics]


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    columns = {Path(run).name[-13:]: result(run) for run in sys.argv[1:]}
    missing = [run for run in sys.argv[1:] if result(run) is None]
    if missing:
        raise SystemExit(f"tools.runs: {missing[0]}: no log of a run that has ended")
    print(*table(columns), sep="\n")
    print(json.dumps(columns))


if __name__ == "__main__":
    main()
