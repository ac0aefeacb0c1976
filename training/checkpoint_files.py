"""The files of a checkpoint: tensors through torch.distributed.checkpoint, with a checksum of each.

Writer and Reader are those of torch, with three differences: every rank computes the CRC-32 of its
own file and the first rank gets all of them; a full disk is reported as such; and a .metadata file
that somebody else wrote cannot run code.
"""

import dataclasses
import os
import pickle
import re
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import WriteResult


def write_synced(path, text):
    """Writes a small file, which is on the disk when this returns."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path):
    """A file, or the names in a folder, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path):
    """The CRC-32 of a file."""
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
    return crc32


@dataclasses.dataclass(frozen=True)
class CheckedResult(WriteResult):
    crc32: int = 0           # of the whole file that the tensor is in


class Writer(dcp.FileSystemWriter):
    """On the first rank `crc32` holds {name: CRC-32} of all ranks' files once they are written."""

    def __init__(self, folder):
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.crc32 = {}

    def write_data(self, *args):
        try:
            results = super().write_data(*args).wait()
        except RuntimeError as e:            # torch.save raises it after the disk was full
            cause = e
            while cause and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or e from None
        names = {result.storage_data.relative_path for result in results}
        crc32 = {name: checksum(self.path / name) for name in names}
        checked = [CheckedResult(**vars(result), crc32=crc32[result.storage_data.relative_path])
                   for result in results]
        future = torch.futures.Future()
        future.set_result(checked)
        return future

    def finish(self, metadata, results):     # on the first rank, with the results of all ranks
        for of_rank in results:
            self.crc32 |= {r.storage_data.relative_path: r.crc32 for r in of_rank}
        super().finish(metadata, results)


class SafeUnpickler(pickle.Unpickler):
    """Reads the pickled .metadata of torch.distributed.checkpoint and refuses any other class."""

    METADATA = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata",
                "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
    KNOWN = frozenset({
        *(("torch.distributed.checkpoint.metadata", name) for name in METADATA),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    })

    def find_class(self, module, name):
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = SafeUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        for info in metadata.storage_data.values():
            if not re.fullmatch(r"__\d+_\d+\.distcp", info.relative_path):
                raise pickle.UnpicklingError(f"a file outside the folder: {info.relative_path}")
        return metadata
