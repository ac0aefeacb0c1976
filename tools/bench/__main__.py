"""Benchmarks: this project beside others at the same work, measured in one run.

    python -m tools.bench pack                # packers on streams like stages 1, 2 and 3
    python -m tools.bench load                # a video to model input, beside other decoders
    python -m tools.bench attend              # attention in packed rows, beside a dense mask
    python -m tools.bench step                # a training step, beside transformers' Molmo2
    python -m tools.bench generate            # answers, beside transformers' Molmo2
    python -m tools.bench run DIR --peak 989  # MFU of a run of train.py, from its log
    python -m tools.bench ranks               # start and small exchanges of up to 64 processes
    python -m tools.bench speedrun            # the first training command, beside an older commit

Each prints a table, then one JSON line that also holds the flags, the hardware, the date and the
commit. A ratio above 1 says that this project is faster. Contestants take turns, so that other
load on the machine meets all of them; a ratio is the median over the rounds, with its range.
"""

import argparse
import json
from datetime import date

import torch

from records.errors import warn
from tools.bench import attend, generate, load, pack, ranks, run, speedrun, step
from training.log import commit, hardware

COMMANDS = {
    "pack": pack,
    "load": load,
    "attend": attend,
    "step": step,
    "generate": generate,
    "run": run,
    "ranks": ranks,
    "speedrun": speedrun,
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is written, and the default of every flag that has one."""

    def _get_help_string(self, action):
        if action.default in (None, False):
            return action.help
        return super()._get_help_string(action)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=module.__doc__.splitlines()[0].split(":")[0].rstrip("."),
            description=module.__doc__,
            formatter_class=HelpFormatter,
        )
        module.add_arguments(command)
    return parser.parse_args(argv)


def four_digits(value):
    """The same results with four digits of every float: more digits would be noise."""
    if isinstance(value, dict):
        return {name: four_digits(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [four_digits(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main():
    args = parse()
    try:
        results = COMMANDS[args.command].run(args)
    except ValueError as e:
        warn(f"tools.bench: {e}")
        raise SystemExit(2) from None
    line = {
        "bench": args.command,
        **vars(args),
        "hardware": hardware(getattr(args, "device", "cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": str(date.today()),
        "cases": four_digits(results),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
