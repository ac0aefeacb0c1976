"""Reads and writes model folders, and gathers a sharded model (paper: architecture).

    runs/mine/model/   config.json  model.pt  data.json  tokenizer files
    Molmo2-4B/         config.json  model-00001-of-00002.safetensors ..   a released folder

`load`, `read_weights` and `open_model_folder` read both kinds. Tensors on disk are mapped into
memory, so that each rank of a sharded model reads only the rows of its own shard.
"""

import dataclasses
import errno
import hashlib
import json
import math
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from data import DataConfig
from model import ModelConfig, Molmo2
from records.errors import explained, hint_of_path, import_extra, refuse_pipe
from stages import stage3
from text.tokenizer import load_tokenizer
from weights import lora, released

# The model name "toy" means these weights in the repository, while ./toy is a path.
TOY = Path(__file__).parent.parent / "toy" / "weights"
MAX_LAYERS = 1000  # a model with more would take minutes to build before its file is compared
# A released folder has no data.json, so it is used with the settings of stage 3.
RELEASED_SETTINGS = {name.removeprefix("data."): value for name, value in stage3.RECIPE.items()
                     if name.startswith("data.")}


class ModelFolder(NamedTuple):
    path: Path  # the folder with config.json
    config: ModelConfig
    table: dict  # of names (released.py) of a released folder; None if the folder has model.pt


@contextmanager
def writing(path):
    """Turns an error of torch or safetensors into an OSError with one sentence. If the disk is
    full, torch does not even name the file."""
    try:
        yield
    except Exception as e:  # safetensors raises its own
        sentence = f"the file cannot be written; is the disk full? {e}"
        raise OSError(errno.EIO, sentence, str(path)) from None


def save(model, folder):
    """Writes config.json, and model.pt with {name: tensor}, in the dtypes of the model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(model.config), indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    with writing(folder / "model.pt"):
        torch.save(tensors, folder / "model.pt")


def save_data_config(data_config, folder):
    """Writes data.json, the settings used at inference."""
    text = json.dumps(dataclasses.asdict(data_config))
    (Path(folder) / "data.json").write_text(text, encoding="utf-8")


def describe(folder):
    """A run directory, its model/, a released folder, or the word "toy" -> ModelFolder. Raises
    OSError or ValueError with one sentence if there is no model."""
    folder = TOY if folder == "toy" else Path(folder)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    for path in folder.glob("*"):
        refuse_pipe(path)
    path = folder / "config.json"
    with explained(path):
        raw = json.loads(path.read_bytes()) if path.is_file() else {}
        if "n_layer" in raw:
            return ModelFolder(folder, config_from_dict(raw, ModelConfig()), None)
        config = released.released_config(folder, raw) if "model_type" in raw else None
    if config is None:
        raise FileNotFoundError(f"{folder}: {why_no_model(folder)}")
    config = dataclasses.replace(config, tied=has_tied_head(folder, raw))
    return ModelFolder(folder, config, released.released_names(config))


def why_no_model(folder):
    """-> a sentence about a folder without a model."""
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    if steps:
        return (f"its run has not finished; the command of the run with --resume continues it, and "
                f"with --finish-at {max(steps)} makes a model of the checkpoint step-{max(steps)}")
    if folder.is_dir() and folder.name.startswith("step-"):
        return (f"this is a checkpoint; the command of its run with --finish-at {folder.name[5:]} "
                "makes a model of it")
    if folder.is_dir():
        return "this folder contains no model (no config.json of a model)"
    return (f"no such folder{hint_of_path(folder)}; to download a released model: hf download "
            "allenai/Molmo2-4B --local-dir Molmo2-4B")


def config_from_dict(raw, like):
    """The JSON object of a configuration -> a dataclass like `like`. Missing fields get the values
    of `like`. Raises AttributeError for an unknown field, TypeError for a wrong type, and
    ValueError for a negative or infinite number."""
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
        elif isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise ValueError(f"'{name}' must be a finite number and at least 0, not {value:g}")
        values[name] = value
    return dataclasses.replace(like, **values)


def meta_model(config, path="the shape of the model"):
    """A model on the meta device, where tensors have a shape but use no memory. ValueError if no
    model can have this shape. path: of config.json, for the message."""
    with torch.device("meta"), explained(path):
        n_layer = max(config.n_layer, config.vision.n_layer)
        assert n_layer <= MAX_LAYERS, f"{n_layer} layers are more than {MAX_LAYERS}"
        return Molmo2(config)


def has_tied_head(folder, raw):
    """Is the head of a released folder a copy of the embedding, as in the 4B? The first eight rows
    are compared. config.json has False for every model, so it only decides if there is no head."""
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
    """A tensor of a safetensors file, mapped into memory. The file is opened again for each one,
    because the parts that were read stay in memory until the mapped file is closed."""
    with explained(path), import_extra("safetensors").safe_open(path, "pt") as file:
        return file.get_tensor(name)


def read_table(path, files, table, shapes):
    """Yields (our name, tensor) by a table of names (released.py). files: {name on disk: file}.
    Tensors are mapped, except the two embeddings of a released folder, which are copies."""
    if "head.weight" not in shapes:
        files.pop(released.LM_HEAD, None)  # a tied head is only a copy of the embedding
    check_names(path, files.keys(), {name for theirs in table for name in theirs})
    for theirs, ours in table.items():
        stored = [read_tensor(files[name], name) for name in theirs]
        rows = stored[0] if len(stored) == 1 else torch.cat(stored)
        ends = accumulate(shapes[name][0] for name in ours[:-1])
        yield from zip(ours, rows.tensor_split(list(ends)), strict=True)


def read_pickled(path, names):
    """Yields (name, mapped tensor) of model.pt. The file is mapped again after every n bytes, where
    n is the size of its largest tensor, or 10 MB if this is more. This releases the memory of the
    parts that were read."""
    n_left = 0
    for name in names:
        if n_left <= 0:
            with explained(path):
                tensors = torch.load(path, mmap=True, weights_only=True)
                n_left = max([1e7, *(tensor.nbytes for tensor in tensors.values())])
            check_names(path, tensors.keys(), names)
        n_left -= tensors[name].nbytes
        yield name, tensors[name]


def check_names(path, found, expected):
    if different := found ^ expected:
        raise ValueError(f"{path} and config.json do not have the same tensors: {len(different)} "
                         f"differ, the first is {min(different)}")


def check_shape(path, name, tensor, shape):
    if tensor.shape != shape:
        raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, but config.json requires "
                         f"{list(shape)}")


def read(folder):
    """Yields (our name, mapped tensor) of a ModelFolder. Raises ValueError with one sentence if
    names or shapes do not fit config.json."""
    path = folder.path / "config.json"
    shapes = {name: t.shape for name, t in meta_model(folder.config, path).state_dict().items()}
    if folder.table is None:
        tensors = read_pickled(folder.path / "model.pt", shapes.keys())
    else:
        tensors = read_table(folder.path, weight_files(folder.path), folder.table, shapes)
    for name, tensor in tensors:
        check_shape(folder.path, name, tensor, shapes[name])
        yield name, tensor


def load(folder, dtype=torch.float32, device="cpu"):
    """-> Molmo2 in eval mode. folder: as in `describe`. dtype: None keeps the stored dtypes. Raises
    OSError or ValueError with one sentence if there is no model or its weights do not fit."""
    folder = describe(folder)
    model = meta_model(folder.config, folder.path / "config.json")
    tensors = {name: t.to(device, dtype, copy=True) for name, t in read(folder)}
    model.load_state_dict(tensors, assign=True)
    return model.eval()


@torch.no_grad()
def read_weights(model, folder):
    """Copies the weights of a folder, as in `describe`, into a model. If it is sharded, each rank
    reads only the rows of its shard. Raises the errors of `load`."""
    parameters = dict(model.named_parameters())
    for name, tensor in read(describe(folder)):
        lora.copy_rows(parameters[name], tensor)


def read_vit(folder, config):
    """-> {name: mapped tensor} of the ViT of a folder, as in `describe`. Raises the errors of
    `load`, and ValueError if config, a VisionConfig, is not the one of the folder."""
    found = describe(folder)
    theirs = dataclasses.asdict(found.config.vision)
    for name, value in dataclasses.asdict(config).items():
        if theirs[name] != value:
            raise ValueError(f"its ViT has {name} {theirs[name]}, but the new model has {value}; "
                             "give the folder of a ViT with the same --model.vision, or --vit= to "
                             "start with random weights")
    start = "vision.vit."
    return {name.removeprefix(start): t for name, t in read(found) if name.startswith(start)}


def fingerprint(folder):
    """A hash of config.json and of the files with tensors. Of each file it uses 256 evenly spaced
    samples of 4 KB, because further training changes nearly every number of a tensor."""
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
    """-> model, tokenizer and DataConfig, all that inference needs. folder: as in `describe`.
    Raises OSError or ValueError with one sentence if one of them cannot be read."""
    with explained(f"--device {device}"):
        torch.zeros(1, device=device)
    found = describe(folder)
    tokenizer = load_tokenizer(found.path, found.config.n_vocab)
    return load(folder, dtype, device), tokenizer, read_data_config(found)


def read_data_config(folder):
    """A ModelFolder -> the DataConfig that its model was trained with. Raises ValueError."""
    settings = folder.path / "data.json"
    if not settings.is_file():
        return DataConfig(**RELEASED_SETTINGS)
    with explained(settings):
        return config_from_dict(json.loads(settings.read_bytes()), DataConfig())


def whole_copy(model, device, dtype, keep=True):
    """A copy without shards and adapters. Tensors that need no conversion are shared. Ranks with
    keep=False get None. The copy is gathered once, because gathering layer by layer, as in
    training, would send all weights for every generated token."""
    tensors = {}
    for name, p in model.named_parameters():
        # the cast comes before the tensor is sent, so that half the bytes are sent
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
