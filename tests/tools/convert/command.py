"""Runs tools.convert in this process."""

import json
from os.path import isfile
from pathlib import Path
from unittest.mock import patch

from tests.tools.command import run_main
from tools.convert import __main__ as command
from tools.convert import write

TESTS = Path(__file__).parents[2]


def read(path):
    """-> the records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(*arguments, media_are_there=True):
    """-> exit status; the counts of the last line, or None; stderr without the line about the
    format of the file. media_are_there: all media count as existing, since most tests have none."""
    with patch.object(write, "isfile", lambda path: media_are_there or isfile(path)):
        status, out, err = run_main(command.main, *arguments)
    lines = out.splitlines()
    others = [line for line in err.splitlines(True) if ": read as " not in line]
    return status, json.loads(lines[-1]) if lines else None, "".join(others)
