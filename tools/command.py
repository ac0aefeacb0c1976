"""What every command has: a parser, files that it may write, tables, and an exit status."""

import argparse
import errno
import functools
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from evaluation.generate import Sampling
from records.errors import Unreadable, warn
from training.checkpoint import lock
from training.config import Parser, RunError, UserError
from training.ranks import device_of_rank
from weights.files import explained, open_model_folder

FAILED = (RunError, torch.OutOfMemoryError)
MARK = ".made-by"  # a file in a folder that a command makes: the name of the command


def make_parser(name, text, **options):
    """The parser of `python -m tools.name`; `text` is the docstring of its module."""
    return Parser(text, prog=f"python -m tools.{name}", allow_abbrev=False, **options)


def in_range(kind, least, most=sys.maxsize):
    """-> the type of a flag: an int or float (kind) from `least` to `most`."""

    def number(text):
        value = kind(text)
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"{text} must be {limit}")
        return value

    return number


whole_number = functools.partial(in_range, int)
frame_rate = in_range(float, 1e-9, 1e12)
positive = whole_number(1)


def output_file(suffix, sign):
    """-> the type of a flag: the Path of a file to write, whose name ends in `suffix`. A file that
    is there is replaced only if `sign`, bytes of every file of this kind, is near its beginning."""

    def path(text):
        found = Path(text)
        if found.suffix != suffix:
            raise argparse.ArgumentTypeError(f"{text}: the name must end in {suffix}")
        if found.exists():
            with open(found, "rb") as file:
                if sign not in file.read(4096):
                    raise argparse.ArgumentTypeError(
                        f"{text}: this command has not made this file; give another name")
        return found

    return path


@contextmanager
def own_folder(out, command, inputs=(), besides=()):
    """Makes the folder `out`, marks it as that of this command, and locks it during the block.

    UserError if it is not empty and has no such mark, if one of the inputs lies in it, or if
    another process writes there. besides: names in it that belong to the user.
    """
    out = Path(out)
    mark = out / MARK
    for path in map(Path, inputs):
        if path.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out}: the input {path} lies in this folder; name another folder")
    with lock(out, "OUT", MARK):
        found = {path.name for path in out.iterdir()} - {MARK, *besides}
        made_by = mark.read_text(encoding="utf-8")
        if found and made_by != command:
            if not made_by:
                mark.unlink()
            raise UserError(f"{out} contains {', '.join(sorted(found)[:3])}, and {command} has not "
                            "made this folder; name another folder, or delete them")
        mark.write_text(command, encoding="utf-8")
        yield out


def open_device(name):
    """-> torch.device, see device_of_rank. ValueError if torch cannot use it."""
    with explained(f"--device {name}"):
        device = device_of_rank(name)
        torch.zeros(1, device=device)
    return device


def add_model(parser, seed_of="the sampling", model=None):
    """The flags of a command whose model answers, which `open_model` and `sampling` read. model:
    the default; without one the flag is required."""
    add = parser.add_argument
    add("--model", default=model, required=model is None, help=(
        f"a run directory, a released folder, or toy{' (default)' if model == 'toy' else ''}"))
    add("--device", default="cpu", help="cpu (default), cuda, ..")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the weights (default float32)")
    add("--temperature", type=in_range(float, 0), default=0.0, metavar="T", help=(
        "of the sampling; 0: greedy decoding (default)"))
    add("--top-p", type=in_range(float, 0, 1), default=1.0, metavar="P", help=(
        "draw from the most probable tokens that reach the probability P (default 1: all)"))
    add("--frequency-penalty", type=in_range(float, -2, 2), default=0.0, metavar="F", help=(
        "subtracted from a token's logit for each time that the answer has it (default 0)"))
    add("--seed", type=whole_number(0), default=0, help=f"of {seed_of} (default 0)")


def open_model(args):
    """-> model, tokenizer, DataConfig, as the flags of add_model say. OSError or ValueError in one
    sentence."""
    return open_model_folder(args.model, open_device(args.device), getattr(torch, args.dtype))


def sampling(args):
    return Sampling(args.temperature, args.top_p, args.frequency_penalty, args.seed)


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


def print_line(found):
    """Prints the last line of a command: one JSON object, in ASCII for every locale."""
    print(json.dumps(found), flush=True)


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
