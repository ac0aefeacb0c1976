"""Safetensors files: headers, checks, and copies into a model's parameters.

A table says where tensors go, {names on disk: our names}: the rows of the tensors on disk, one
under the other, are the rows of our tensors, one under the other (examples: weights/released.py).

    1  stored_tensors                 the headers of all files of a folder: names, shapes, dtypes
    2  check_names, check_shapes      everything fits, before a tensor is read
    3  allocate                       memory for a model that was built on the meta device
    4  copy_tensors                   tensor by tensor: memory holds one copy of the weights; of a
                                      sharded model, the rows of this rank's shard
"""

import json
import zlib
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    file: Path
    name: str
    shape: list
    dtype: str                       # as safetensors writes it, "BF16"


def open_or_explain(reader, path, *args, **options):
    """reader(path, ..); ValueError in one sentence if it fails: every reader has errors of its own
    for truncated files."""
    try:
        return reader(path, *args, **options)
    except Exception as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise ValueError(f"{path}: not readable as weights: {reason}") from None


def stored_tensors(folder):
    """{name: StoredTensor} of model.safetensors, or else of all files that
    model.safetensors.index.json lists. Reads headers only."""
    single = folder / "model.safetensors"
    if single.is_file():
        return read_header(single)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: config.json without weights (neither "
                                "model.safetensors nor an index of several files)")
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index}: not an index of safetensors files") from None
    stored = {}
    for file in files:
        # A name with a folder in it could lead out of this one.
        if Path(str(file)).name != file or not (folder / file).is_file():
            raise FileNotFoundError(f"{folder}: the weight file '{file}' that the index names is "
                                    "missing")
        header = read_header(folder / file)
        if twice := set(header) & set(stored):
            raise ValueError(f"{folder / file}: the tensor {min(twice)} is in another file too")
        stored |= header
    return stored


def open_safetensors(path):
    """An open file, to be used with `with`."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(f"{path}: safetensors files need an extra package: pip install "
                         "safetensors") from None
    return open_or_explain(safe_open, path, "pt")


def read_header(path):
    """{name: StoredTensor} of one file."""
    header = {}
    with open_safetensors(path) as file:
        for name in file.keys():                         # noqa: SIM118 - it cannot be iterated
            tensor = file.get_slice(name)
            header[name] = StoredTensor(path, name, tensor.get_shape(), tensor.get_dtype())
    return header


def read_tensor(stored):
    """StoredTensor -> tensor. The file is opened anew for each, because the pages of a mapped file
    count as memory until it is closed."""
    with open_safetensors(stored.file) as file:
        return file.get_tensor(stored.name)


def check_names(stored, table, folder):
    """ValueError names the first tensor of a folder that is unknown or missing."""
    expected = {name for names in table for name in names}
    if unknown := set(stored) - expected:
        first = min(unknown)
        raise ValueError(f"{stored[first].file}: {len(unknown)} tensors unknown to this project, "
                         f"first {first}")
    if missing := expected - set(stored):
        raise ValueError(f"{folder}: {len(missing)} tensors missing, first {min(missing)}")


def check_shapes(stored, table, parameters):
    """ValueError names the first tensor that has another shape than ours, or that does not hold
    floats; parameters: {our name: tensor}."""
    for theirs, ours in table.items():
        file = stored[theirs[0]].file
        check_floats(stored, theirs)
        found = stacked_shape([stored[name].shape for name in theirs])
        expected = stacked_shape([list(parameters[name].shape) for name in ours])
        if found != expected:
            raise ValueError(f"{file}: {' and '.join(theirs)} has shape {found}, config.json asks "
                             f"for {expected}")


def check_floats(stored, names):
    for name in names:
        if stored[name].dtype not in DTYPES:
            raise ValueError(f"{stored[name].file}: {name} is stored as {stored[name].dtype}, not "
                             "as floats")


def stacked_shape(shapes):
    """Shape of tensors one under the other; the list of shapes if they cannot be stacked."""
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        return shapes
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]


def stored_dtypes(stored, table):
    """{our name: dtype in which no value is rounded}."""
    dtypes = {}
    for theirs, ours in table.items():
        dtype = reduce(torch.promote_types, [DTYPES[stored[name].dtype] for name in theirs])
        dtypes |= dict.fromkeys(ours, dtype)
    return dtypes


def copy_tensors(stored, table, parameters):
    """Copies the tensors on disk to the rows of our parameters that the table says."""
    for theirs, ours in table.items():
        start = 0                                        # row in all tensors of `theirs`
        for name in theirs:
            # opened anew for each, because the pages of a mapped file count as memory until then
            with open_safetensors(stored[name].file) as file:
                n_rows = stored[name].shape[0]
                copy_rows(file.get_slice(name), n_rows, start, [parameters[name] for name in ours])
            start += n_rows


def copy_rows(tensor, n_rows, start, parameters):
    """Row i of the tensor goes to row start + i of the parameters, one under the other. Of a
    sharded parameter only the rows of its shard are read."""
    end = start + n_rows
    first = 0                                            # row of the parameter's first row
    for parameter in parameters:
        own, offset = own_rows(parameter)
        begin = first + offset
        low = max(start, begin)
        high = min(end, begin + len(own))
        if low < high:
            own[low - begin : high - begin].copy_(tensor[low - start : high - start])
        first += len(parameter)


def own_rows(parameter):
    """-> what this rank holds of a parameter sharded by rows, and the number of its first row."""
    if not hasattr(parameter, "to_local"):
        return parameter, 0
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset[0]


def allocate(model, dtypes, device="cpu"):
    """Gives a model on the meta device uninitialised memory; dtypes: {parameter name: dtype}."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    return model.to_empty(device=device)


def write_safetensors(tensors, path):
    """{name: tensor} -> a file. ImportError if safetensors is not installed."""
    from safetensors.torch import save_file

    path.touch()                     # safetensors writes files with mode 0600, whatever the umask
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def checksum(path):
    """The CRC-32 of a file."""
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
    return crc32
