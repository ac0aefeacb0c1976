"""Checkpoints: what a run needs to go on, bit by bit, on any number of ranks (paper: training; spec 12).

in    model, optimizer, and a state fit for JSON: step, config, where the data stand
out   out/step-N/, which another process, or another number of them, goes on from

    step-N.part/  __0_0.distcp ..   tensors, a file or more of each rank (torch.distributed.checkpoint)
                  .metadata         which tensor lies where
                  tokenizer files
                  state.json        the rest
                  complete          written last: the size of every file
    step-N/       its name, once all of that is on the disk

A save that is interrupted anywhere leaves a .part, which nobody reads and the next save of that step removes. The tensors are copied
before a save begins, and a thread writes them: the step does not wait for the disk. Randomness needs no state: that of a step is a
function of seed, step and rank.
"""

import builtins
import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# one process alone: torch says so at every save and load
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")

MEANS = ("step", "exp_avg", "exp_avg_sq")                    # what AdamW remembers of a parameter


class SaveError(Exception):
    """A checkpoint could not be written: one sentence."""


# ---------------------------------------------------------------------------------------------------------------
# tensors of a run by name


def tensors(model, optimizer):
    """{name: tensor} of weights and of what AdamW remembers: of the sharded, this rank's shards. Not copies."""
    named = dict(model.named_parameters())
    state = {f"model.{name}": p.detach() for name, p in named.items()}
    for name, p in named.items():
        state |= {f"{kind}.{name}": optimizer.state[p][kind] for kind in MEANS if kind in optimizer.state.get(p, ())}
    return state


def remember(model, optimizer, known):
    """Gives AdamW memories to be filled, for the parameters that had some when the checkpoint was made. known: names in it."""
    learns = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if f"exp_avg.{name}" in known and p in learns:
            # where AdamW itself would put it: its fused kernel counts steps beside the parameter
            device = p.device if optimizer.defaults["fused"] else "cpu"
            optimizer.state[p] = {"step": torch.zeros((), device=device), "exp_avg": torch.zeros_like(p.detach()),
                                  "exp_avg_sq": torch.zeros_like(p.detach())}


# ---------------------------------------------------------------------------------------------------------------
# writing


class Saver:
    """Writes checkpoints of a run into `out`, one at a time, and keeps the newest `keep` (0: all).

    `first`: is this the rank that puts the finishing touches? group: for the exchanges of the writing threads, gloo, theirs alone.
    """

    def __init__(self, out, keep=2, first=True, group=None):
        self.out, self.keep, self.first, self.group, self.running = Path(out), keep, first, group, None

    def save(self, step, model, optimizer, state, tokenizer):
        """Begins to write step-N; SaveError if an earlier save failed. The model may change as soon as this returns."""
        self.wait()
        part = self.out / f"step-{step}.part"
        try:
            if self.first:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                tokenizer.save(part)
        except OSError as e:
            raise SaveError(self.sentence(step, e)) from None
        writer = dcp.FileSystemWriter(part, single_file_per_rank=True, sync_files=True)
        copies = {name: t.clone() if t.device.type == "cpu" else t for name, t in tensors(model, optimizer).items()}
        future = dcp.async_save(copies, storage_writer=writer, process_group=self.group, no_dist=not dist.is_initialized())
        self.running = step, part, future, json.dumps(state)

    def done(self):
        """Is nothing being written? Then what was is complete; SaveError if it failed."""
        if self.running and self.running[2].done():
            self.wait()
        return self.running is None

    def wait(self):
        """Returns once what is being written is complete; SaveError if it failed."""
        if not self.running:
            return
        (step, part, future, state), self.running = self.running, None
        try:
            future.result()
            if self.first:
                self.complete(step, part, state)
        except Exception as e:                               # whatever the writing thread, or that of another rank, met with
            if self.first:
                shutil.rmtree(part, ignore_errors=True)      # on a full disk it is in the way
            raise SaveError(self.sentence(step, e)) from None

    def complete(self, step, part, state):
        write(part / "state.json", state)
        sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        write(part / "complete", json.dumps(sizes))
        whole = self.out / f"step-{step}"
        shutil.rmtree(whole, ignore_errors=True)             # of a run that went this way before
        part.rename(whole)
        sync(self.out)
        for old in steps(self.out)[self.keep :] if self.keep else ():
            shutil.rmtree(self.out / f"step-{old}", ignore_errors=True)

    def sentence(self, step, error):
        left = steps(self.out)
        kept = f"step-{left[0]} is complete, --resume goes on from there" if left else "there is none before it"
        return f"the checkpoint of step {step} cannot be written: {first_line(error)}; {kept}"


def first_line(error):
    if isinstance(error, dcp.api.CheckpointException):       # of several ranks, the first that failed
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def write(path, text):
    """A small file, on the disk when this returns."""
    with builtins.open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder):
    """The names in a folder are on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------------------
# reading


def steps(out):
    """Steps of which there is a complete checkpoint whose files have the sizes they were written with, newest first."""
    found = []
    for path in Path(out).glob("step-*"):
        try:
            sizes = json.loads((path / "complete").read_text())
            if re.fullmatch(r"step-\d+", path.name) and all((path / name).stat().st_size == n for name, n in sizes.items()):
                found.append(int(path.name[5:]))
        except (OSError, ValueError, AttributeError, TypeError):
            continue                                         # not complete: as if it were not there
    return sorted(found, reverse=True)


def state_of(folder):
    """What `save` was given as state."""
    return json.loads((Path(folder) / "state.json").read_text())


class Names(pickle.Unpickler):
    """torch.distributed.checkpoint keeps its table of contents as a pickle. Of pickles this reads those that hold nothing else."""

    KNOWN = frozenset({("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
        "_MEM_FORMAT_ENCODING")} | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch", "float32"),
        ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")})

    def find_class(self, module, name):
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        with builtins.open(Path(self.path) / ".metadata", "rb") as file:
            metadata = Names(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"a file outside the folder: {info.relative_path}")
        return metadata


def restore(folder, model, optimizer):
    """Weights and AdamW's memories from a checkpoint of any number of ranks, in place; ValueError in one sentence if they cannot be read.

    Parameters that have no memory there (their gradients have been None so far) have none afterwards.
    """
    try:
        reader = Reader(folder)
        remember(model, optimizer, reader.read_metadata().state_dict_metadata)
        dcp.load(tensors(model, optimizer), storage_reader=reader, no_dist=not dist.is_initialized())
    except Exception as e:                                   # a reader of files that may be damaged has errors of its own
        raise ValueError(f"{folder}: not readable as a checkpoint: {first_line(e)}") from None
