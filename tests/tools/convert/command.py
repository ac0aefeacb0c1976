"""The command in this process."""

import contextlib
import io
import json
from pathlib import Path

from tools.convert import __main__ as command

TESTS = Path(__file__).parents[2]
CONFORMANCE = TESTS / "conformance"


def run(*arguments):
    """-> exit status, the counts of the last line or None, stderr."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command.main([str(word) for word in arguments])
        except SystemExit as end:
            status = end.code
    lines = out.getvalue().splitlines()
    return status, json.loads(lines[-1]) if lines else None, err.getvalue()
