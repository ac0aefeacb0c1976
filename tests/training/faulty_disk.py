"""A disk that fails when a test wants it to: full, torn writes, or an outage."""

import builtins
import io
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest


class Killed(BaseException):
    """Stands for the end of the process: no handler of Exceptions catches it."""


class UnbufferedFile(io.FileIO):
    """Every write is an operation of the disk; one that fails leaves half of its content."""

    def write(self, content):
        content = content.encode() if isinstance(content, str) else bytes(content)
        try:
            self.disk.operation("write", self.name)
        except BaseException:
            super().write(content[: len(content) // 2])
            raise
        self.disk.unsynced_contents.add(os.fstat(self.fileno()).st_ino)
        return super().write(content)


class FaultyDisk:
    """While it is entered, `hook(n, what, path)` is called before the n-th operation (from 0) that
    changes something in `folder`. The hook may raise, or wait.

    `lose_power` takes away what was not synced.
    """

    def __init__(self, folder, hook=lambda n, what, path: None):
        self.folder = str(folder)
        self.hook = hook
        self.count = 0
        self.lock = threading.RLock()
        self.unsynced_contents = set()   # inodes
        self.unsynced_names = {}         # inode -> inode of its folder

    def operation(self, what, path):
        with self.lock:
            n = self.count
            self.count += 1
        self.hook(n, what, str(path))

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.real_open = builtins.open
        self.real = {name: getattr(os, name) for name in ("mkdir", "rename", "unlink", "rmdir")}
        self.real_fsync = os.fsync
        for name in self.real:
            self.patch.setattr(os, name, partial(self.change, name))
        self.patch.setattr(os, "fsync", self.fsync)
        for module in (builtins, io):
            self.patch.setattr(module, "open", self.open)
        return self

    def __exit__(self, *error):
        self.patch.undo()

    def change(self, name, path, *args, **kwargs):
        if kwargs.get("dir_fd") is None and not str(path).startswith(self.folder):
            return self.real[name](path, *args, **kwargs)
        self.operation(name, path)
        result = self.real[name](path, *args, **kwargs)
        if name in ("mkdir", "rename"):
            self.note_name(args[0] if name == "rename" else path)
        return result

    def fsync(self, handle):
        self.operation("fsync", handle)
        self.real_fsync(handle)
        inode = os.fstat(handle).st_ino
        self.unsynced_contents.discard(inode)
        self.unsynced_names = {child: folder for child, folder in self.unsynced_names.items()
                               if folder != inode}

    def open(self, path, mode="r", *args, **kwargs):
        if not str(path).startswith(self.folder) or not set(mode) & set("wax"):
            return self.real_open(path, mode, *args, **kwargs)
        self.operation("create", path)
        file = UnbufferedFile(str(path), mode.replace("t", "").replace("b", ""))
        file.disk = self
        self.unsynced_contents.add(os.fstat(file.fileno()).st_ino)
        self.note_name(path)
        return file

    def note_name(self, path):
        self.unsynced_names[os.stat(path).st_ino] = os.stat(os.path.dirname(path)).st_ino

    def lose_power(self):
        """Cuts files in half whose content was not synced, and takes back names that were not."""
        for path in sorted(Path(self.folder).rglob("*"), key=lambda p: -len(p.parts)):
            status = path.stat()
            if path.is_file() and status.st_ino in self.unsynced_contents:
                os.truncate(path, status.st_size // 2)
            if status.st_ino not in self.unsynced_names:
                continue
            if path.is_file():
                path.unlink()
            elif path.suffix == ".part":
                shutil.rmtree(path)
            else:
                path.rename(f"{path}.part")
