"""Model folders: reads and writes them, and gathers a sharded model (paper: architecture).

    runs/mine/model/   config.json  model.pt  data.json  tokenizer files
    Molmo2-4B/         config.json  model-00001-of-00002.safetensors ..   a released folder

`load`, `read_weights` and `open_model_folder` take both. Tensors on disk are mapped into
memory, so that each rank of a sharded model reads the rows of its own shard only.
"""

import dataclasses
import hashlib
import importlib
import json
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from data import DataConfig
from model import ModelConfig, Molmo2
from stages import stage3
from text.tokenizer import load_tokenizer
from weights import lora, released

# What the word "toy" names: the weights in the repository. ./toy is a path.
TOY = Path(__file__).parent.parent / "toy" / "weights"
# A released folder has no data.json: it is used with the settings of stage 3.
RELEASED_SETTINGS = {name.removeprefix("data."): value for name, value in stage3.RECIPE.items()
                     if name.startswith("data.")}


class ModelFolder(NamedTuple):
    path: Path  # the folder with config.json
    config: ModelConfig
    table: dict  # names of a released folder (released.py); None: model.pt


@contextmanager
def explained(path):
    """Turns an exception about what a file contains into a ValueError in one sentence."""
    try:
        yield
    except Exception as e:  # safetensors, pickle, json and dataclasses raise their own
        if isinstance(e, OSError) and e.filename:
            raise
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        reason = f"{reason} is missing" if isinstance(e, KeyError) else reason
        raise ValueError(f"{path} cannot be used: {reason:.300}") from None


def import_extra(name, listed_in="requirements-extras.txt"):
    """A package that only some commands need; ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{name.partition('.')[0]} is needed: "
                         f"pip install -r {listed_in}") from None


def save(model, folder):
    """Writes config.json, and model.pt with {name: tensor} in the dtypes of the model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(model.config), indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    try:
        torch.save(tensors, folder / "model.pt")
    except RuntimeError as e:  # of a full disk torch's writer says no more than its position
        raise OSError(f"{folder / 'model.pt'} cannot be written: {e}") from None


def save_data_config(data_config, folder):
    """Writes data.json: the settings used at inference, without the shape of crops."""
    values = dataclasses.asdict(data_config)
    del values["vision"]
    (Path(folder) / "data.json").write_text(json.dumps(values), encoding="utf-8")


def describe(folder):
    """A run directory, its model/, a released folder, or the word "toy" -> ModelFolder. OSError or
    ValueError in one sentence if there is no model."""
    folder = TOY if folder == "toy" else Path(folder)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    path = folder / "config.json"
    with explained(path):
        raw = json.loads(path.read_bytes()) if path.is_file() else {}
        if "n_layer" in raw:
            return ModelFolder(folder, config_from_dict(raw, ModelConfig()), None)
        config = released.released_config(folder, raw) if "model_type" in raw else None
    if config is None:
        raise FileNotFoundError(f"{folder}: no such folder with a model, or its run has not "
                                "finished; released ones come by hf download "
                                "allenai/Molmo2-4B --local-dir Molmo2-4B")
    config = dataclasses.replace(config, tied=has_tied_head(folder, raw))
    return ModelFolder(folder, config, released.released_names(config))


def config_from_dict(raw, like):
    """The JSON object of a configuration -> a dataclass like `like`, whose values it takes for
    missing fields. AttributeError names an unknown field, TypeError a value of another type."""
    values = {}
    for name, value in raw.items():
        default = getattr(like, name)
        kinds = (int, float) if isinstance(default, float) else type(default)
        if dataclasses.is_dataclass(default):
            value = config_from_dict(value, default)
        elif isinstance(default, tuple):
            value = tuple(value)
        elif not isinstance(value, kinds):
            raise TypeError(f"'{name}' must be of type {type(default).__name__}, not {value!r:.60}")
        values[name] = value
    return dataclasses.replace(like, **values)


def meta_model(config):
    """A model on the meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        return Molmo2(config)


def has_tied_head(folder, raw):
    """Is the head of a released folder a copy of the embedding, as in the 4B? The first eight
    rows tell. config.json, which says False for every model, decides where there is no head."""
    files = weight_files(folder)
    names = {released.LM_HEAD, released.EMBEDDINGS[0]}
    if not names <= files.keys():
        return bool(raw.get("tie_word_embeddings") or raw["text_config"].get("tie_word_embeddings"))
    head, embedding = (read_tensor(files[name], name)[:8] for name in names)
    return torch.equal(head, embedding)


def weight_files(folder):
    """{name of a tensor: its file} of a released folder."""
    path = folder / "model.safetensors"
    if path.is_file():
        with explained(path), import_extra("safetensors").safe_open(path, "pt") as file:
            return dict.fromkeys(file.keys(), path)
    path = folder / "model.safetensors.index.json"
    with explained(path):
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}


def read_tensor(path, name):
    """A tensor of a safetensors file, mapped into memory. The file is opened anew for each:
    what was read of a mapped file is memory of the process until it is closed."""
    with explained(path), import_extra("safetensors").safe_open(path, "pt") as file:
        return file.get_tensor(name)


def read_table(path, files, table, shapes):
    """Yields (our name, tensor) by a table of names (released.py). files: {name on disk:
    file}. Tensors are mapped, but for the two embeddings of a released folder: copies."""
    if "head.weight" not in shapes:
        files.pop(released.LM_HEAD, None)  # a tied head is stored as a copy
    check_names(path, files.keys(), {name for theirs in table for name in theirs})
    for theirs, ours in table.items():
        stored = [read_tensor(files[name], name) for name in theirs]
        rows = stored[0] if len(stored) == 1 else torch.cat(stored)
        ends = accumulate(shapes[name][0] for name in ours[:-1])
        yield from zip(ours, rows.tensor_split(list(ends)), strict=True)


def read_pickled(path, names):
    """Yields (name, mapped tensor) of model.pt. The file is mapped anew whenever as much as
    its largest tensor has been read: that releases the memory of what was read."""
    n_left = 0
    for name in names:
        if n_left <= 0:
            with explained(path):
                tensors = torch.load(path, mmap=True, weights_only=True)
                n_left = max(tensor.nbytes for tensor in tensors.values())
            check_names(path, tensors.keys(), names)
        n_left -= tensors[name].nbytes
        yield name, tensors[name]


def check_names(path, found, expected):
    if different := found ^ expected:
        raise ValueError(f"{path} and config.json name other tensors ({len(different)}), the first "
                         f"is {min(different)}")


def check_shape(path, name, tensor, shape):
    if tensor.shape != shape:
        raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, config.json asks for "
                         f"{list(shape)}")


def read(folder):
    """Yields (our name, mapped tensor) of a ModelFolder. ValueError in one sentence if names
    or shapes are not those that config.json asks for."""
    shapes = {name: t.shape for name, t in meta_model(folder.config).state_dict().items()}
    if folder.table is None:
        tensors = read_pickled(folder.path / "model.pt", shapes.keys())
    else:
        tensors = read_table(folder.path, weight_files(folder.path), folder.table, shapes)
    for name, tensor in tensors:
        check_shape(folder.path, name, tensor, shapes[name])
        yield name, tensor


def load(folder, dtype=torch.float32, device="cpu"):
    """What `describe` takes -> Molmo2 in eval mode; dtype None: as stored. OSError or
    ValueError in one sentence if there is no model or its weights do not fit."""
    folder = describe(folder)
    model = meta_model(folder.config)
    tensors = {name: t.to(device, dtype, copy=True) for name, t in read(folder)}
    model.load_state_dict(tensors, assign=True)
    return model.eval()


@torch.no_grad()
def read_weights(model, folder):
    """Reads the weights of what `describe` takes into a model; of a sharded one each rank
    reads the rows of its shard. Errors as those of `load`."""
    parameters = dict(model.named_parameters())
    for name, tensor in read(describe(folder)):
        lora.copy_rows(parameters[name], tensor)


def fingerprint(folder):
    """A hash of config.json and the files of the tensors: of 256 evenly spaced samples of 4 KB of
    each, since further training changes nearly every number of a tensor."""
    digest = hashlib.sha256()
    for path in sorted(describe(folder).path.iterdir()):
        if path.name not in ("config.json", "model.pt") and path.suffix != ".safetensors":
            continue
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            for start in range(0, size, size // 256 + 1):
                file.seek(start)
                digest.update(file.read(4096))
    return digest.hexdigest()


def open_model_folder(folder, device="cpu", dtype=torch.float32):
    """What `describe` takes -> model, tokenizer, DataConfig: all that is needed to ask. OSError or
    ValueError in one sentence if one of them cannot be read."""
    with explained(f"--device {device}"):
        torch.zeros(1, device=device)
    found = describe(folder)
    tokenizer = load_tokenizer(found.path, found.config.n_vocab)
    return load(folder, dtype, device), tokenizer, read_data_config(found)


def read_data_config(folder):
    """A ModelFolder -> the DataConfig that its model was trained with; ValueError."""
    data_config = DataConfig(**RELEASED_SETTINGS)
    settings = folder.path / "data.json"
    if settings.is_file():
        with explained(settings):
            data_config = config_from_dict(json.loads(settings.read_bytes()), DataConfig())
    return dataclasses.replace(data_config, vision=folder.config.vision)


def gather_on_each(model, ranks, device, dtype):
    """-> the model that this rank evaluates: a copy on its device, in the dtype of the
    arithmetic; one process in float32, or with adapters, evaluates the model itself."""
    if not ranks.mesh and (dtype == torch.float32 or lora.has_adapters(model)):
        return model
    return whole_copy(model, device, dtype)


def whole_copy(model, device, dtype, keep=True):
    """A copy without shards and adapters, which shares what it need not convert; None on ranks
    that do not keep it. Gathered once: layer by layer, as in training, all weights would be sent
    for every generated token."""
    tensors = {}
    for name, p in model.named_parameters():
        # a cast before it is sent: half the bytes
        tensor = p.detach().to(dtype)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            tensors[name] = tensor.to(device)
    if not keep:
        return None
    copy = meta_model(model.config)
    copy.load_state_dict(lora.merged(model, tensors, dtype), assign=True)
    return copy.eval()
