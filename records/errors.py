"""Errors, warnings, extra packages, locks and drafts: what training and all commands share."""

import argparse
import fcntl
import importlib
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from text.tokenizer import Unencodable


class DataError(ValueError):
    """A mistake in a user's data file. It stops the run. Text: "file:line: what is wrong"."""


class Unreadable(Exception):
    """A record or a media file that cannot be used. Only this record is skipped.

    Unreadable(kind, sentence): skipped records are counted by kind, such as "missing file".
    """

    def __str__(self):
        return ": ".join(self.args)


class UserError(Exception):
    """A mistake of the user. It ends the command with this sentence and status 2."""


class RunError(Exception):
    """The run failed on all ranks. It ends the command with this sentence and status 1."""


class RankError(RunError):
    """The run failed on one rank. This rank prints the sentence."""


class RankDataError(DataError):
    """A DataError that one rank has found. This rank prints the sentence."""


class Terminated(BaseException):
    """SIGTERM ends the command with status 143. The argument, if any, is the step whose checkpoint
    has been written. It is a BaseException, like KeyboardInterrupt: the code that decodes an image
    catches every Exception and skips the record."""
    def __str__(self):
        return f"SIGTERM: ended after step {self.args[0]}" if self.args else "SIGTERM: ended"


@contextmanager
def encodable():
    """Turns Unencodable into Unreadable, so that only the record of this text is skipped."""
    try:
        yield
    except Unencodable as e:
        raise Unreadable("wrong text", str(e)) from None


@contextmanager
def skipping(skipped, where):
    """Ends the block at an Unreadable, prints it, and adds {where: Unreadable} to the dict
    `skipped`. The code after the block continues. where: "file:line" of the record."""
    try:
        yield
    except Unreadable as e:
        warn(f"{where}: {e}; skipped")
        skipped[where] = e


@contextmanager
def explained(path):
    """Turns an exception about what a file contains into a ValueError in one sentence."""
    try:
        yield
    except Exception as e:  # safetensors, pickle, json and dataclasses raise their own
        if isinstance(e, OSError) and e.filename:
            raise
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        reason = f"{reason} is missing" if isinstance(e, KeyError) else reason
        raise ValueError(f"{path} cannot be used: {reason:.300}") from None


def import_extra(name, listed_in="requirements-extras.txt"):
    """Imports a package that only some commands need. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{name.partition('.')[0]} is needed: "
                         f"pip install -r {listed_in}") from None


def plural(n, noun):
    """(1, "record") -> "1 record"; (2, "record") -> "2 records"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def require_file(path):
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise Unreadable("missing file", str(path)[:300] + hint_of_path(path))


def refuse_pipe(path):
    """DataError if an input file is, for example, a named pipe, in which a command may wait for
    ever. A path that does not exist is accepted here."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: this is not a regular file; give the name of a file")


def hint_of_path(path):
    """-> what is wrong with a path that is no file, as the end of a sentence; "" if it is only
    missing."""
    name = str(path)
    if re.search(r"(^|/)[A-Za-z]:[\\/]", name):
        return ("; this is a path of Windows, where this code does not run; in WSL, "
                "C:\\Users is /mnt/c/Users")
    if "~" in Path(name).parts:
        return "; ~ is not replaced here, so write the path of your home folder"
    return "; this is a folder" if os.path.isdir(name[:4096]) else ""


def command_name():
    """The name of the command that runs in this process: "train.py", "tools.generate", .."""
    path = Path(sys.argv[0])
    if path.stem == "__main__":  # a package in tools/
        path = path.parent
    return f"tools.{path.stem}" if path.parent.name == "tools" else path.name


def visible(sentence):
    """A line of text -> the line to print on a terminal. A terminal would obey control characters,
    so they become escapes. If the locale is not UTF-8, other letters do, too, and the line says
    how to change this: with such a locale, files with these letters in their names are missing."""
    is_utf8 = sys.getfilesystemencoding() == "utf-8"
    shown = "".join(c if c.isprintable() and (is_utf8 or c.isascii()) else ascii(c)[1:-1]
                    for c in sentence)
    hint = "" if is_utf8 or sentence.isascii() else "; your locale is not UTF-8: set PYTHONUTF8=1"
    return shown + hint


def warn(text):
    """Prints one sentence per line on stderr, above the progress bar of a run."""
    for sentence in text.splitlines():
        tqdm.write(f"{command_name()}: {visible(sentence)}", file=sys.stderr)


def print_visible(line):
    """Prints a line that may contain texts of the user's files on stdout, as `visible`."""
    print(visible(line), flush=True)


def is_first_process():
    """Is this the first process of the launch? It works before join_ranks, too."""
    return int(os.environ.get("RANK", 0)) == 0


def lock(out, flag="--out", name="lock"):
    """Makes a directory and locks a file in it -> the file. No other run can write there until the
    file is closed or the process ends. UserError if the directory cannot be made or locked."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / name, "ab")
        if is_first_process():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        held = isinstance(e, BlockingIOError)
        reason = "another run is writing there" if held else e.strerror
        raise UserError(f"{flag} {out}: {reason}; choose another directory") from None
    return file


@contextmanager
def draft(path):
    """Gives the path of a hidden file beside `path`, which replaces `path` after the block. If the
    block fails, the hidden file is deleted and `path` does not change.

    UserError if another command is writing there. If that command was killed, its lock has ended,
    and the new command uses its hidden file again.
    """
    path = Path(path)
    hidden = path.with_name(f".draft-{path.name}")
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; give the name of a file")
    with lock(path.parent, f"{path.name} in", hidden.name):
        try:
            yield hidden
            hidden.replace(path)
        except BaseException:  # Ctrl-C too
            hidden.unlink(missing_ok=True)
            raise


class Parser(argparse.ArgumentParser):
    """Shows the first two paragraphs of `description` in --help. A mistake raises UserError. A
    value that is the path of a pipe raises DataError."""

    def __init__(self, description, formatter_class=argparse.RawDescriptionHelpFormatter, **rest):
        text = "\n\n".join(description.split("\n\n")[:2])
        super().__init__(description=text, formatter_class=formatter_class, **rest)

    def parse_known_args(self, *args, **options):
        found, unknown = super().parse_known_args(*args, **options)
        for value in vars(found).values():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, (str, Path)):
                    refuse_pipe(path)
        return found, unknown

    def error(self, message):
        raise UserError(message)
