"""Benchmarks: this project and reference implementations on the same work, timed in one run.

    python -m tools.bench pack                # packers on streams like stages 1, 2 and 3
    python -m tools.bench load                # a video to model input, against its decoding alone
    python -m tools.bench attend              # attention in packed rows, against a dense mask
    python -m tools.bench step                # a training step, against transformers' Molmo2
    python -m tools.bench generate            # answers, against transformers' Molmo2
    python -m tools.bench run DIR --peak 989  # MFU of a run of train.py, from its log

Each command prints a table, then one JSON line, also with the flags, the hardware, the
date and the commit. A ratio is the median over the rounds, with its range.
"""

import argparse
import json
from datetime import date

import torch

from tools.bench import attend, flops, generate, load, pack, step
from tools.command import make_parser, report_errors
from training.log import commit, hardware

COMMANDS = {"pack": pack, "load": load, "attend": attend, "step": step, "generate": generate,
            "run": flops}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is written, and the default of every flag."""


@report_errors
def main(argv=None):
    parser = make_parser("bench", __doc__)
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        title = module.__doc__.splitlines()[0]
        module.add_arguments(subparsers.add_parser(
            name, help=title, description=module.__doc__, formatter_class=HelpFormatter))
    args = parser.parse_args(argv)
    results = COMMANDS[args.bench].run(args)
    # four digits of every float: more would be noise
    cases = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.4g}"))
    line = {
        **vars(args),
        "hardware": hardware(getattr(args, "device", "cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": str(date.today()),
        "cases": cases,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
