"""Functions that all commands share: parser, output files, tables and exit status."""

import argparse
import errno
import functools
import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from records.errors import Parser, RunError, Unreadable, UserError, lock, print_visible, warn

FAILED = (RunError, torch.OutOfMemoryError)
# of an OSError: the disk or the user's share is full, or a file is longer than the user may write
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
MARK = ".made-by"  # file in a folder that a command makes; it contains the name of the command


def make_parser(name, text, **options):
    """-> the parser of `python -m tools.name`. text: the docstring of its module."""
    return Parser(text, prog=f"python -m tools.{name}", allow_abbrev=False, **options)


def in_range(kind, least, most=sys.maxsize):
    """-> an argparse type for numbers from `least` to `most`. kind: int or float."""

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
    """-> an argparse type for the Path of an output file, whose name must end in `suffix`. An
    existing file may be replaced only if its first 4096 bytes contain `sign`, as in all files that
    the command writes."""

    def path(text):
        found = Path(text)
        if found.suffix != suffix:
            raise argparse.ArgumentTypeError(f"{text}: the name must end in {suffix}")
        if found.is_file():
            with open(found, "rb") as file:
                if sign not in file.read(4096):
                    raise argparse.ArgumentTypeError(
                        f"{text}: this command has not made this file; give another name")
        return found

    return path


def refuse_input(parser, path, inputs):
    """Ends the command with one sentence if the output file `path` is one of its inputs."""
    if any(path.exists() and os.path.exists(file) and path.samefile(file) for file in inputs):
        parser.error(f"{path}: this file is an input of the command; give another name")


@contextmanager
def own_folder(out, command, inputs=(), besides=()):
    """Makes the folder `out`, marks it as made by this command, and locks it during the block.

    UserError if the folder has files but not this mark, if one of the inputs is inside it, or if
    another process writes there. besides: names of files in it that belong to the user.
    """
    out = Path(out)
    mark = out / MARK
    for path in map(Path, inputs):
        if path.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out}: the input {path} lies in this folder; give another folder")
    with lock(out, "OUT", MARK):
        found = {path.name for path in out.iterdir()} - {MARK, *besides}
        made_by = mark.read_text(encoding="utf-8")
        if found and made_by != command:
            if not made_by:
                mark.unlink()
            raise UserError(f"{out} contains {', '.join(sorted(found)[:3])}, and {command} has not "
                            "made this folder; give another folder, or delete them")
        if made_by != command:  # on a full disk, writing it again could leave it empty
            mark.write_text(command, encoding="utf-8")
        yield out


def show(value):
    """A value -> the text of a cell: floats with four digits, a spread as "median (min-max)"."""
    if isinstance(value, dict):
        return "{median:.3g} ({min:.3g}-{max:.3g})".format(**value)
    if isinstance(value, tuple):
        return "-".join(map(show, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def print_table(title, entries):
    """Prints {label: {column: value}} as a table. All entries have the same columns."""
    lines = [[title, *map(str, next(iter(entries.values())))]]
    lines += [[label, *map(show, entry.values())] for label, entry in entries.items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print_visible("  ".join([label.ljust(widths[0]), *aligned]))


def print_line(found):
    """Prints the last line of a command, one JSON object. It is ASCII, so any locale prints it."""
    print(json.dumps(found), flush=True)


def report_errors(main):
    """Decorates main(argv) of a command. An error prints one sentence on stderr and ends the
    process. The status is 1 if a run failed or if memory or the disk is full, and 2 for a mistake
    of the user. Ctrl-C ends the process with status 130."""

    @functools.wraps(main)
    def run(argv=None):
        try:
            return main(argv)
        except (UserError, *FAILED, Unreadable, OSError, ValueError) as error:
            # a mistake of the user is the same on all ranks, so only one rank prints it
            if not isinstance(error, UserError) or os.environ.get("LOCAL_RANK", "0") == "0":
                if isinstance(error, UnicodeEncodeError):  # by a locale that is not UTF-8
                    error = ValueError(f"{error.object}: {error.reason}")
                warn(str(error))
            is_full = getattr(error, "errno", 0) in FULL
            sys.exit(1 if is_full or isinstance(error, FAILED) else 2)
        except KeyboardInterrupt:
            # a second Ctrl-C would interrupt the functions that Python calls at its end
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.exit(130)

    return run
