"""A disk on which no file becomes longer than a few bytes."""

import resource
import signal
import sys
from contextlib import contextmanager


@contextmanager
def files_up_to(n_bytes):
    """In this block, writing more bytes to a file is an OSError, as on a full disk. Python must not
    write bytecode here: it would write a part of it, and read this part in the next run."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_no_bytecode
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
