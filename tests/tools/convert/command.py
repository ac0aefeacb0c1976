"""Runs tools.convert in this process."""

import contextlib
import io
import json
from os.path import isfile
from pathlib import Path
from unittest.mock import patch

from tools.convert import __main__ as command
from tools.convert import write

TESTS = Path(__file__).parents[2]


def run(*arguments, media_are_there=True):
    """-> exit status; the counts of the last line, or None; stderr without the line about the
    format of the file. media_are_there: all media count as existing, since most tests have none."""
    out = io.StringIO()
    err = io.StringIO()
    is_there = patch.object(write, "isfile", lambda path: media_are_there or isfile(path))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), is_there:
        try:
            status = command.main([str(word) for word in arguments])
        except SystemExit as end:
            status = end.code
    lines = out.getvalue().splitlines()
    others = [line for line in err.getvalue().splitlines(True) if ": read as " not in line]
    return status, json.loads(lines[-1]) if lines else None, "".join(others)
