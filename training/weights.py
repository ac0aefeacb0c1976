"""Weights on disk: a run's model/ and released folders, read a tensor at a time (paper: architecture)."""

import dataclasses
import json
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import torch

from model import ModelConfig, Molmo2, YarnConfig
from vision import VisionConfig


def save(model, folder):
    """config.json, and model.safetensors where safetensors is installed, else model.pt."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=1))
    weights = {name: p.detach().cpu().contiguous() for name, p in model.state_dict().items()}
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save(weights, folder / "model.pt")
    else:
        save_file(weights, folder / "model.safetensors")


def config_from_dict(d):
    """config.json as `save` writes it -> ModelConfig; one of the errors in CONFIG_ERRORS for a field that is unknown or of another type."""
    def filled(kind, d):
        d = {k: tuple(v) if isinstance(v, list) else v for k, v in d.items()}
        for name, usual in ((f.name, type(f.default)) for f in dataclasses.fields(kind) if f.name in d):
            if type(d[name]) not in ((int, float) if usual is float else (usual,)):
                raise TypeError(f"{name} = {d[name]!r:.60} is not of type {usual.__name__}")
        return kind(**d)

    return filled(ModelConfig, {**d, "yarn": filled(YarnConfig, d["yarn"]), "vision": filled(VisionConfig, d["vision"])})


# what a config that somebody else wrote can raise on its way to a model
CONFIG_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, AssertionError, RuntimeError)


MAX_LAYERS, MAX_PARAMETERS = 1000, 10**11                                # a config that asks for more is no model, or nobody's friend


def meta_model(config):
    """A model of this shape without memory: its weights come from a file. ValueError if the shape is absurd."""
    layers = config.n_layer + config.vision.n_layer
    if layers > MAX_LAYERS:
        raise ValueError(f"{layers:,} layers, more than {MAX_LAYERS:,}")
    with torch.device("meta"):
        model = Molmo2(config)
    if (n := sum(p.numel() for p in model.parameters())) > MAX_PARAMETERS:
        raise ValueError(f"{n:,} parameters, more than {MAX_PARAMETERS:,}")
    return model


def open_or_explain(reader, path, *args, **options):
    """reader(path, ..), and one sentence where the file cannot be read: each reader has errors of its own for files cut short."""
    try:
        return reader(path, *args, **options)
    except Exception as e:
        raise ValueError(f"{path}: not readable as weights: {(str(e).splitlines() or [type(e).__name__])[0]}") from None


def shards(folder):
    """{tensor name: its safetensors file} of a folder: model.safetensors, or the files that an index names."""
    folder, single = Path(folder), Path(folder) / "model.safetensors"
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(f"{folder}: safetensors files need an extra package: pip install safetensors") from None
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        with open_or_explain(safe_open, single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: config.json without weights (no model.safetensors and no index of several)")
    try:
        where = json.loads(index.read_text())["weight_map"]
        files = {file: folder / Path(file).name for file in set(where.values())}          # nothing outside the folder
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index}: not an index of safetensors files") from None
    for file, path in files.items():
        if str(file) != path.name or not path.is_file():
            raise FileNotFoundError(f"{folder}: the shard '{file}' that the index names is missing")
    for path in files.values():
        with open_or_explain(safe_open, path, "pt") as file:
            promised, there = {name for name, at in where.items() if files[at] == path}, set(file.keys())
        if promised - there:
            raise ValueError(f"{path}: the tensor {min(promised - there)} that the index promises is missing")
        if there - promised:
            raise ValueError(f"{path}: the tensor {min(there - promised)} is not in the index")
    return {name: files[file] for name, file in where.items()}


class RowConcat:
    """Tensors on disk, one under the other, read by rows: `rows[a:b]`. Use as a context: it closes the files behind it."""

    def __init__(self, names, where):
        from safetensors import safe_open

        self.files = ExitStack()
        self.parts = [self.files.enter_context(open_or_explain(safe_open, where[name], "pt")).get_slice(name) for name in names]
        shapes = [part.get_shape() for part in self.parts]
        self.starts = [0, *accumulate(shape[0] if shape else 0 for shape in shapes)]
        self.shape = [self.starts[-1], *shapes[0][1:]] if all(shape[1:] == shapes[0][1:] for shape in shapes) else shapes

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.files.close()

    def __getitem__(self, rows):
        first, last, _ = rows.indices(self.starts[-1])
        spans = zip(self.parts, self.starts, self.starts[1:], strict=False)
        cuts = [part[max(first - at, 0) : min(last, end) - at] for part, at, end in spans if max(first, at) < min(last, end)]
        return cuts[0] if len(cuts) == 1 else torch.cat(cuts)


def read(where, table, like, dtype=None, device="cpu", prepare=None):
    """Weights on disk -> {our name: tensor}, holding one tensor more than the result at any time.

    where: {name on disk: file}; table: {names on disk: our names}: the rows of these, one under the other, are the rows of those
    (no names of ours: not wanted); like: {our name: something of its shape}; prepare: {name on disk: what to do with the tensor
    first}; dtype None: as stored. ValueError names what is unknown, missing, of another shape or of no float type, before a tensor is read.
    """
    prepare, known, found = prepare or {}, {name for names in table for name in names}, {}
    for what, names in (("unknown to this project", set(where) - known), ("missing", known - set(where))):
        if names:
            first, folder = min(names), next(iter(where.values())).parent
            raise ValueError(f"{where.get(first, folder)}: {len(names)} tensors {what}, first {first}")
    wanted = {theirs: [sum(like[x].shape[0] for x in ours), *like[ours[0]].shape[1:]] for theirs, ours in table.items() if ours}
    for theirs, shape in wanted.items():
        with RowConcat(theirs, where) as rows:
            if theirs[0] not in prepare and rows.shape != shape:
                raise ValueError(f"{where[theirs[0]]}: {' and '.join(theirs)} has shape {rows.shape}, config.json asks for {shape}")
            odd = {part.get_dtype() for part in rows.parts} - {"F64", "F32", "F16", "BF16"}
            if odd:
                raise ValueError(f"{where[theirs[0]]}: {theirs[0]} is stored as {min(odd)}, not as floats")
    for theirs, shape in wanted.items():
        with RowConcat(theirs, where) as rows:
            start = 0
            if theirs[0] in prepare:
                rows = prepare[theirs[0]](rows[:])
                if list(rows.shape) != shape:
                    raise ValueError(f"{where[theirs[0]]}: {theirs[0]} becomes {list(rows.shape)}, config.json asks for {shape}")
            for ours in table[theirs]:
                end = start + like[ours].shape[0]
                found[ours] = rows[start:end].to(device=device, dtype=dtype, copy=True)
                start = end
    return found


def describe(folder):
    """A run directory, its model/, or a released checkpoint's folder -> the folder with config.json, ModelConfig, config.json as it stands.

    FileNotFoundError or ValueError in one sentence if there is no model; no weights are read.
    """
    folder = Path(folder)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: no such folder, so no model here; released ones come by hf download allenai/Molmo2-4B "
                                    "--local-dir Molmo2-4B")
        raise FileNotFoundError(f"{folder}: no model here (config.json is missing); name a run directory, or the model/ in it")
    try:
        raw = json.loads((folder / "config.json").read_text())
        if "model_type" not in raw:
            config = config_from_dict(raw)
            meta_model(config)
    except CONFIG_ERRORS as e:
        raise ValueError(f"{folder}/config.json describes no model of this project (or its run is not finished): {e!r:.300}") from None
    if "model_type" in raw:
        from training import hf

        config = hf.describe(folder, raw)
    return folder, config, raw


def load(folder, dtype=torch.float32, device="cpu"):
    """What `describe` takes -> Molmo2 in eval mode; dtype None: as stored. Errors as there.

    Reads one tensor at a time, so that memory holds the model once.
    """
    folder, config, raw = describe(folder)
    if "model_type" in raw:
        from training import hf

        return hf.load(folder, config, raw, dtype, device)
    model = meta_model(config)
    like = model.state_dict()
    if (folder / "model.pt").is_file() and not (folder / "model.safetensors").is_file():
        stored = open_or_explain(torch.load, folder / "model.pt", weights_only=True, mmap=True)
        if not isinstance(stored, dict) or not all(map(torch.is_tensor, stored.values())):
            raise ValueError(f"{folder}/model.pt: holds something else than weights by name")
        weights = {name: w.to(device=device, dtype=dtype, copy=True) for name, w in stored.items()}
    else:
        weights = read(shards(folder), {(name,): [name] for name in like}, like, dtype, device)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        raise ValueError(f"{folder}: weights do not fit config.json: {str(e).splitlines()[1].strip()}") from None
    return model.eval()
