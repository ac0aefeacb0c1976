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
FAILED = Exception, dcp.api.CheckpointException              # the latter is no Exception, only a BaseException


class SaveError(Exception):
    """A checkpoint could not be written: one sentence."""


class LoadError(Exception):
    """A checkpoint cannot be read: one sentence."""

    def __init__(self, folder, error):
        super().__init__(f"{folder}: not readable as a checkpoint: {first_line(error)}; without that folder, --resume goes on from the one "
                         "before it")


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


class Writer(dcp.FileSystemWriter):
    def write_data(self, *args):
        try:
            return super().write_data(*args)
        except RuntimeError as e:                            # torch.save tells what it met with after the disk was full
            full = e
            while full and not isinstance(full, OSError):
                full = full.__context__
            raise full or e from None


class Saver:
    """Writes checkpoints of a run into `out`, one at a time, and keeps the newest `keep` (0: all).

    `first`: is this the rank that puts the finishing touches? group: for the exchanges of the writing threads, gloo, theirs alone.
    """

    def __init__(self, out, keep=2, first=True, group=None):
        self.out, self.keep, self.first, self.group, self.running = Path(out), keep, first, group, None

    def begin(self, step, tokenizer):
        """Makes step-N.part; SaveError if that, or an earlier save, failed. No rank saves before all have returned from here: it would
        make the folder again that the first could not."""
        self.wait()
        part = self.out / f"step-{step}.part"
        try:
            if self.first:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                tokenizer.save(part)
        except OSError as e:
            shutil.rmtree(part, ignore_errors=True)          # on a full disk it is in the way
            raise SaveError(self.sentence(step, e)) from None

    def save(self, step, model, optimizer, state):
        """Begins to write step-N, once begun. The model may change as soon as this returns."""
        part = self.out / f"step-{step}.part"
        writer = Writer(part, single_file_per_rank=True, sync_files=True)
        future = dcp.async_save(tensors(model, optimizer), storage_writer=writer, process_group=self.group,      # copies them first
                                no_dist=not dist.is_initialized())
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
        except FAILED as e:                                  # whatever the writing thread, or that of another rank, met with
            if self.first:
                shutil.rmtree(part, ignore_errors=True)
            raise SaveError(self.sentence(step, e)) from None

    def complete(self, step, part, state):
        write(part / "state.json", state)
        sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        for name in sizes:
            sync(part / name)                                # the tokenizer's are not there yet
        write(part / "complete", json.dumps(sizes))
        sync(part)
        whole = self.out / f"step-{step}"
        shutil.rmtree(whole, ignore_errors=True)             # of a run that went this way before
        part.rename(whole)
        sync(self.out)
        kept = [f"step-{n}" for n in steps(self.out)[: self.keep or None]]
        for path in self.out.glob("step-*"):                 # the older, and what kills left half written or half removed
            name = re.fullmatch(r"step-(\d+)(\.part)?", path.name)
            if name and int(name[1]) <= step and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

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
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            continue                                         # not complete: as if it were not there
    return sorted(found, reverse=True)


KEYS = {"step": int, "config": dict, "model": dict, "data": dict, "skipped": int, "loader": dict}


def state_of(folder):
    """What `save` was given as state, with these keys; LoadError if it is not."""
    try:
        state = json.loads((Path(folder) / "state.json").read_text())
        wrong = [key for key, kind in KEYS.items() if type(state[key]) is not kind]
        if wrong or f"step-{state['step']}" != Path(folder).name:
            raise ValueError(f"state.json has another {(wrong or ['step'])[0]}")
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as e:
        raise LoadError(folder, e) from None
    return state


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
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = Names(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        for info in metadata.storage_data.values():
            if not re.fullmatch(r"__\d+_\d+\.distcp", info.relative_path):
                raise pickle.UnpicklingError(f"a file outside the folder: {info.relative_path}")
        return metadata


def restore(folder, model, optimizer):
    """Weights and AdamW's memories from a checkpoint of any number of ranks, in place; LoadError if they cannot be read.

    Parameters that have no memory there (their gradients have been None so far) have none afterwards.
    """
    try:
        reader = Reader(folder)
        remember(model, optimizer, reader.read_metadata().state_dict_metadata)
        dcp.load(tensors(model, optimizer), storage_reader=reader, no_dist=not dist.is_initialized())
    except FAILED as e:                                      # a reader of files that may be damaged has errors of its own
        raise LoadError(folder, e) from None
