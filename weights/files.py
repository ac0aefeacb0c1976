"""Weights on disk: save and load a model's folder (paper: architecture).

    runs/mine/model/    config.json  model.safetensors                     written by `save`
    Molmo2-4B/          config.json  model-00001-of-00002.safetensors ..   a released checkpoint

`load` takes both. It builds the model on the meta device, where tensors have shapes and no memory,
allocates it on its device, and copies tensor by tensor: memory holds one copy of the weights.
Names, shapes and dtypes of all tensors are checked before the first one is read.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import torch

from model import ModelConfig, Molmo2, YarnConfig
from vision import VisionConfig
from weights import released, tensor_files

MAX_PARAMETERS = 10**11              # sanity limit for an untrusted config.json
# what a config.json from elsewhere can raise on its way to a model
CONFIG_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError,
                 AssertionError, RuntimeError)


class ModelFolder(NamedTuple):
    path: Path                       # the folder with config.json
    config: ModelConfig
    raw: dict                        # config.json as it stands

    @property
    def released(self):              # in the layout of released checkpoints
        return "model_type" in self.raw


# ------------------------------------------------------------------------------------------------
# out


def save(model, folder):
    """config.json, and model.safetensors where safetensors is installed, else model.pt."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=1))
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    try:
        tensor_files.write_safetensors(tensors, folder / "model.safetensors")
    except ImportError:
        torch.save(tensors, folder / "model.pt")


def save_data_config(data_config, folder):
    """data.json: how records became tokens in training, to ask the model in the same way. The
    vision geometry is in config.json."""
    values = {f.name: getattr(data_config, f.name) for f in dataclasses.fields(data_config)}
    del values["vision"]
    (Path(folder) / "data.json").write_text(json.dumps(values))


# ------------------------------------------------------------------------------------------------
# config.json -> a model without memory


def describe(folder):
    """A run directory, its model/, or a released checkpoint's folder -> ModelFolder.

    FileNotFoundError or ValueError in one sentence if there is no model. Reads no weights; of a
    released checkpoint `config.tied` is not known yet.
    """
    folder = Path(folder)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    path = folder / "config.json"
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder, so no model here; released ones come "
                                "by hf download allenai/Molmo2-4B --local-dir Molmo2-4B")
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no model here (config.json is missing); name a run "
                                "directory, or the model/ in it")
    try:
        raw = json.loads(path.read_text())
        if "model_type" in raw:
            config = released.released_config(folder, raw)
        else:
            config = config_from_dict(raw)
        meta_model(config)
    except released.Unsupported:
        raise
    except CONFIG_ERRORS as e:
        raise ValueError(f"{path} describes no model of this project (or its run is not finished): "
                         f"{e!r:.300}") from None
    return ModelFolder(folder, config, raw)


def config_from_dict(raw):
    """config.json as `save` writes it -> ModelConfig. One of CONFIG_ERRORS if a field is unknown
    or of another type."""
    yarn = fill(YarnConfig, raw["yarn"])
    vision = fill(VisionConfig, raw["vision"])
    return fill(ModelConfig, {**raw, "yarn": yarn, "vision": vision})


def fill(kind, values):
    """A dataclass from values of the types of its defaults; JSON has lists for tuples, and 1 for
    1.0."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    for field in dataclasses.fields(kind):
        if field.name in values:
            value = values[field.name]
            expected = type(field.default)
            if type(value) is not expected and (expected, type(value)) != (float, int):
                raise TypeError(f"{field.name} = {value!r:.60} is not of type {expected.__name__}")
    return kind(**values)


def meta_model(config):
    """A model without memory, on the meta device. ValueError if its size is absurd."""
    layers = config.n_layer + config.vision.n_layer
    if layers > released.MAX_LAYERS:
        raise ValueError(f"{layers:,} layers, more than {released.MAX_LAYERS:,}")
    with torch.device("meta"):
        model = Molmo2(config)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters, more than {MAX_PARAMETERS:,}")
    return model


def fingerprint(folder):
    """{file: CRC-32} of the weights of what `describe` takes."""
    return {file.name: tensor_files.checksum(file) for file in describe(folder).path.iterdir()
            if file.suffix in (".safetensors", ".pt")}


# ------------------------------------------------------------------------------------------------
# in


def load(folder, dtype=torch.float32, device="cpu"):
    """What `describe` takes -> Molmo2 in eval mode; dtype None: as stored.

    FileNotFoundError or ValueError in one sentence if there is no model or its weights do not fit.
    device "meta": everything is checked, and nothing read; `read_weights` does that later.
    """
    folder = describe(folder)
    if is_pickled(folder):
        tensors = open_pickled(folder)
        model = meta_model(folder.config)
        dtypes = {name: t.dtype for name, t in tensors.items()}
    else:
        stored = tensor_files.stored_tensors(folder.path)
        model, table = match(folder, stored)
        dtypes = tensor_files.stored_dtypes(stored, table)
    if dtype is not None:
        dtypes = dict.fromkeys(dtypes, dtype)
    tensor_files.allocate(model, dtypes, device)
    if torch.device(device).type != "meta":
        read_weights(model, folder.path)
    return model.eval()


@torch.no_grad()
def read_weights(model, folder):
    """Reads a folder's weights into a model that `load` has found to fit; of a sharded one each
    rank reads its own rows. Errors as those of `load`."""
    folder = describe(folder)
    parameters = dict(model.named_parameters())
    if is_pickled(folder):
        for name, tensor in open_pickled(folder).items():
            tensor_files.copy_rows(tensor, len(tensor), 0, [parameters[name]])
    else:
        stored = tensor_files.stored_tensors(folder.path)
        _, table = match(folder, stored, model.config.tied)
        tensor_files.copy_tensors(stored, table, parameters)


def match(folder, stored, tied=None):
    """-> a model on the meta device and the table of its tensors, which are there and fit. Leaves
    the copy of a tied head out of `stored`; tied None: found out by reading the head."""
    config = folder.config
    if folder.released:
        tied = has_tied_head(folder, stored) if tied is None else tied
        config = dataclasses.replace(config, tied=tied)
        if tied:
            stored.pop(released.LM_HEAD, None)
        table = released.released_names(config)
    else:
        table = {(name,): [name] for name in meta_model(config).state_dict()}
    model = meta_model(config)
    tensor_files.check_names(stored, table, folder.path)
    tensor_files.check_shapes(stored, table, model.state_dict())
    return model, table


def is_pickled(folder):
    """Are the weights in model.pt, which `save` writes where safetensors is not installed?"""
    single = folder.path / "model.safetensors"
    return not folder.released and not single.is_file() and (folder.path / "model.pt").is_file()


def open_pickled(folder):
    """{name: tensor} of model.pt, mapped; they fit the model. Only tensors are unpickled."""
    path = folder.path / "model.pt"
    tensors = tensor_files.open_or_explain(torch.load, path, weights_only=True, mmap=True)
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise ValueError(f"{path}: holds something else than a dictionary of tensors")
    try:
        meta_model(folder.config).load_state_dict(tensors, assign=True)
    except RuntimeError as e:
        reason = " ".join(str(e).split())
        raise ValueError(f"{path}: weights do not fit config.json: {reason:.300}") from None
    return tensors


def has_tied_head(folder, stored):
    """Is the head of a released checkpoint a copy of the embedding's first rows, as in the
    released 4B? Without a head, config.json tells."""
    if not {released.LM_HEAD, *released.EMBEDDINGS} <= set(stored):
        text = folder.raw["text_config"]
        return bool(folder.raw.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    tensors = [stored[name] for name in (released.LM_HEAD, *released.EMBEDDINGS)]
    if any(len(t.shape) != 2 or t.dtype != tensors[0].dtype for t in tensors):
        return False
    head = tensor_files.read_tensor(stored[released.LM_HEAD])
    start = 0
    for name in released.EMBEDDINGS:
        rows = tensor_files.read_tensor(stored[name])[: len(head) - start]
        if not torch.equal(head[start : start + len(rows)], rows):
            return False
        start += len(rows)
    return start == len(head)
