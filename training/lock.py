"""One run at a time in a run directory.

in    the directory of --out
out   a lock that the operating system releases when the process ends, however it ends
"""

import contextlib
import os
import socket
import sys
from pathlib import Path

from parallel import is_first_process
from training.config import UserError

try:
    import fcntl
except ImportError:          # Windows
    fcntl = None


class RunLock:
    """`with RunLock(out):` keeps other runs out of the directory `out` until the block ends.

    Take it before anything is decided about `out`. What is locked is the file .NAME.lock beside it,
    so the lock stays when `out` is renamed, and needs no `out` yet. That file is never removed:
    another process may be opening it. Where no file can be made beside `out`, so that `out` cannot
    be renamed either, the folder itself is locked. Of the ranks of a run only the first takes the
    lock. UserError if another run holds it or if there is no place for it.

    The lock is fcntl.flock. On a network disk it keeps out other machines as far as the disk
    supports that: NFS does under Linux, Lustre only when mounted with `flock`. Where it does not,
    and on Windows, which has no fcntl, a warning is printed and nothing is locked.
    """

    def __init__(self, out):
        self.handle = None
        out = Path(out).resolve()
        if not is_first_process():
            return
        if fcntl is None:
            warn(out, "this system has no fcntl")
            return
        self.handle = open_lock(out)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UserError(f"--out {out}: another run is writing there{holder(out)}; wait for its "
                            "end or name another directory") from None
        except OSError as e:
            warn(out, e.strerror)
        else:
            note_holder(self.handle)

    def release(self):
        if self.handle is not None:
            os.close(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()


def lock_file(out):
    return out.parent / f".{out.name}.lock"


def open_lock(out):
    """A handle of the file to lock; it is not inherited by processes that this one starts."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return os.open(lock_file(out), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as e:
        if out.is_dir():
            return os.open(out, os.O_RDONLY)
        raise UserError(f"--out {out}: no file can be made beside it: {e.strerror}") from None


def note_holder(handle):
    """Writes into the lock file who holds it; not where a folder is locked or the disk is full."""
    with contextlib.suppress(OSError):
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())


def holder(out):
    """Who wrote the lock file, in brackets; "" if that cannot be read."""
    try:
        text = lock_file(out).read_text(errors="replace")[:100]
    except OSError:
        return ""
    return f" ({' '.join(text.split())})" if text.strip() else ""


def warn(out, reason):
    print(f"--out {out} is not locked ({reason}): start no other run in it", file=sys.stderr)
