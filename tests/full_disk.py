"""A disk on which no file becomes longer than a few bytes."""

import resource
import signal
from contextlib import contextmanager


@contextmanager
def files_up_to(n_bytes):
    """In this block, writing more bytes to a file is an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
