"""One run at a time in a run directory.

in    the directory of --out
out   a lock that the operating system releases when the process ends, however it ends
"""

import contextlib
import os
import socket
from pathlib import Path

from parallel import is_first_process
from records.errors import warn
from training.config import UserError

try:
    import fcntl
except ImportError:          # Windows
    fcntl = None


class RunLock:
    """`with RunLock(out):` keeps other runs out of the directory `out` until the block ends.

    Take it before anything is decided about `out`. What is locked is the file .NAME.lock beside
    it, so that the lock stays when `out` is renamed, and needs no `out` yet; where no file can be
    made there, the folder itself. Of the ranks of a run only the first takes the lock. UserError
    if another run holds it or if there is no place for it.

    The lock is fcntl.flock. On a network disk it keeps out other machines as far as the disk
    supports that: NFS does under Linux, Lustre only when mounted with `flock`. Where it does not,
    and on Windows, which has no fcntl, a warning is printed and nothing is locked.
    """

    def __init__(self, out):
        self.out = Path(out).resolve()
        self.file = self.out.parent / f".{self.out.name}.lock"
        self.made_folders = []
        self.handle = None
        if not is_first_process():
            return
        if fcntl is None:
            self.warn("this system has no fcntl")
            return
        while self.handle is None:
            self.handle = self.open()
            self.lock()
            if not self.is_current():            # its last holder has just removed it
                os.close(self.handle)
                self.handle = None

    def open(self):
        """A handle of the file or folder to lock, which processes that this one starts have not."""
        try:
            self.made_folders = [folder for folder in self.out.parents if not folder.exists()]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as e:
            if not self.out.is_dir():
                raise UserError(f"--out {self.out}: {e.strerror}") from None
            self.file = None
            return os.open(self.out, os.O_RDONLY)

    def lock(self):
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.handle)
            raise UserError(f"--out {self.out}: another run is writing there{self.holder()}; wait "
                            "for its end or name another directory") from None
        except OSError as e:
            self.warn(e.strerror)
        if self.file:
            with contextlib.suppress(OSError):   # only a hint, not needed where the disk is full
                os.truncate(self.handle, 0)
                os.write(self.handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def is_current(self):
        """Is the locked file still the one that others would open?"""
        try:
            return os.path.samestat(os.fstat(self.handle), os.stat(self.file or self.out))
        except FileNotFoundError:
            return False

    def holder(self):
        """Who wrote the lock file, in brackets; "" if that cannot be read."""
        try:
            words = self.file.read_text(errors="replace")[:100].split()
        except (OSError, AttributeError):
            return ""
        return f" ({' '.join(words)})" if words else ""

    def warn(self, reason):
        warn(f"--out {self.out} is not locked ({reason}): start no other run in it")

    def release(self):
        """Removes the lock file, and folders that were made for it and are empty."""
        if self.handle is None:
            return
        with contextlib.suppress(OSError):
            if self.file:
                self.file.unlink()
            for folder in self.made_folders:
                folder.rmdir()
        os.close(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()
