"""Times this project and reference implementations on the same work.

    python -m tools.bench pack --n 2000 --seeds 1

Each command prints a table, and then one JSON line that also contains the flags, the hardware,
the date and the commit. A ratio is the median over the rounds, with its range.
"""

import argparse
import json
from datetime import date

import torch

from tools.bench import attend, flops, load, pack, scale, step, train
from tools.command import make_parser, print_line, report_errors
from tools.model_flags import open_device
from training.log import commit, hardware

COMMANDS = {"pack": pack, "load": load, "attend": attend, "step": step, "run": flops,
            "train": train, "scale": scale}
ON_DEVICE = ("load", "attend", "step", "train")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description and shows the default of every flag."""


@report_errors
def main(argv=None):
    parser = make_parser("bench", __doc__)
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = subparsers.add_parser(
            name, help=module.__doc__.splitlines()[0], description=module.__doc__,
            formatter_class=HelpFormatter)
        module.add_arguments(command)
        if name in ON_DEVICE:
            command.add_argument("--device", default="cpu",
                                 help="cpu, cuda, cuda:1, mps (never tested), ..")
    args = parser.parse_args(argv)
    flags = vars(args).copy()
    args.device = open_device(flags.get("device", "cpu"))
    results = COMMANDS[args.bench].run(args)
    # four digits of every float, because more digits would be noise
    cases = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.4g}"))
    line = {
        **flags,
        "hardware": hardware(args.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": str(date.today()),
        "cases": cases,
    }
    print_line(line)


if __name__ == "__main__":
    main()
