"""What every command has: its parser, its tables, and its exit status after an error."""

import argparse
import errno
import functools
import os
import sys

import torch

from records.errors import Unreadable, warn
from training.config import Parser, RunError, UserError

FAILED = (RunError, torch.OutOfMemoryError)


def make_parser(name, text, **options):
    """The parser of `python -m tools.name`; `text` is the docstring of its module."""
    return Parser(text, prog=f"python -m tools.{name}", allow_abbrev=False, **options)


def whole_number(least, most=sys.maxsize):
    """-> the type of a flag: an int from `least` to `most`."""

    def number(text):
        if not least <= int(text) <= most:
            limit = f"at least {least}" if int(text) < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"{text} must be {limit}")
        return int(text)

    return number


positive = whole_number(1)


def show(value):
    """A cell of a table: floats with four digits, a spread as its median and range."""
    if isinstance(value, dict):
        return "{median:.3g} ({min:.3g}-{max:.3g})".format(**value)
    if isinstance(value, tuple):
        return "-".join(map(show, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def print_table(title, rows):
    """Prints {label: {column: value}}, with the same columns in all rows; "-" for None."""
    lines = [[title, *map(str, next(iter(rows.values())))]]
    lines += [[label, *map(show, row.values())] for label, row in rows.items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([label.ljust(widths[0]), *aligned]), flush=True)


def report_errors(main):
    """Decorates main(argv) of a command. An error is one sentence on stderr and ends the
    process: with status 1 if a run failed or the disk is full, else with 2, a mistake of
    the user. Ctrl-C ends it with 130."""

    @functools.wraps(main)
    def run(argv=None):
        try:
            return main(argv)
        except (UserError, *FAILED, Unreadable, OSError, ValueError) as error:
            # a mistake of the user is the same on all ranks
            if not isinstance(error, UserError) or os.environ.get("LOCAL_RANK", "0") == "0":
                warn(str(error))
            is_full = getattr(error, "errno", 0) == errno.ENOSPC
            sys.exit(1 if is_full or isinstance(error, FAILED) else 2)
        except KeyboardInterrupt:
            sys.exit(130)

    return run
