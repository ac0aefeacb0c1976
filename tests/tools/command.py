"""Runs a command in this process."""

import contextlib
import io


def run_main(main, *words):
    """-> exit status, stdout, stderr"""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
    return status or 0, out.getvalue(), err.getvalue()
