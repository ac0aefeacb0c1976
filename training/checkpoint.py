"""Checkpoints, from which a run continues on any number of ranks (paper: training).

    step-N.part/  __0_0.distcp ..    tensors, one file per rank (torch.distributed.checkpoint)
                  .metadata          which tensor is in which file
                  tokenizer files
                  state.json         step, recipe, position in the data, sizes and hash of files
    step-N/       the name of the folder once all of that is on the disk

A save that is interrupted leaves a .part folder, which is never read and which the next save
removes. Random numbers need no state: they are a function of seed, step and rank. So a run on as
many ranks as before continues bit for bit.
"""

import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from records.errors import warn
from training.config import RunError, UserError, field_values
from training.ranks import is_first_process
from training.sources import list_changes
from weights import files, lora

# a process without others is told at every save and load that it is alone
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")

STEP = re.compile("step-[1-9][0-9]*")  # str.isdigit accepts digits such as ², which int() refuses
# in the directory of a run; the last two are also there if it was stopped before its first step
RUN_FILES = ("config.json", "log.jsonl", "skips.jsonl", "loss.png", "scores.png", "progress.gif",
             "stage0.jsonl", "references.json")
# fields that may change when a run is resumed: they affect layout, speed and reports, or (preset,
# model, vit_steps) only what a run begins with
LAYOUT_FIELDS = {
    "device", "cp", "cp_exchange", "cp_heads", "shard", "micro_batch", "workers",
    "activation_checkpointing", "uncheckpointed_blocks", "compile", "crop_bucket", "save_every",
    "keep", "eval_images", "max_skip", "preset", "model", "vit_steps",
}
METADATA_CLASSES = {  # of which .metadata consists
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its name in Python 3.13
    "torch": {"Size", "float32", "bfloat16"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # torch would unpickle an entry of BytesStorageMetadata, which may run code
    "torch.distributed.checkpoint.metadata":
        {*dcp.metadata.__all__, "_MEM_FORMAT_ENCODING"} - {"BytesStorageMetadata"},
}


def lock(out, flag="--out", name="lock"):
    """Makes a directory and locks it by a file -> this file. Until it is closed, or the process
    ends, no other run writes there. UserError if that cannot be done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / name, "ab")
        if is_first_process():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        held = isinstance(e, BlockingIOError)
        reason = "another run is writing there" if held else e.strerror
        raise UserError(f"{flag} {out}: {reason}; name another directory") from None
    return file


class Checkpoint(NamedTuple):
    """The step after which a run continues; one that begins has no folder."""

    folder: Path = None
    step: int = 0
    state: dict = None
    init: str = None  # the folder of the weights to read before those of the checkpoint


def find(args):
    """-> the Checkpoint in --out from which the run continues. UserError if it may not write there,
    or if the run there began with other weights than --init. It changes nothing."""
    out = Path(args.out)
    found = find_newest(out) if args.resume else Checkpoint()
    init = args.else_init or args.init
    if found.folder:
        began = found.state["init"] or "new weights"
        if args.init and Path(args.init).absolute() != Path(began).absolute():
            raise UserError(f"--init {args.init}: the run in {out} began with {began}; leave "
                            "--init out, or name another --out")
        # a checkpoint of adapters does not hold the weights under them
        base = found.state["base"]
        return found._replace(init=(init or base) if base else None)
    check_directory(out, args, init)
    if args.resume and is_first_process():
        begins = f"with the weights of {init}" if init else "from the beginning"
        warn(f"no checkpoint in {out}: the run starts {begins}")
    return found._replace(init=init)


class Unpickler(pickle.Unpickler):
    """Reads .metadata. Plain pickle would run any function that the file names."""

    def find_class(self, module, name):
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which is no part of it")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads the tensors of a checkpoint, and by the Unpickler which there are."""

    def read_metadata(self):
        with open(self.path / ".metadata", "rb") as file:
            return Unpickler(file).load()


def find_newest(out):
    """The newest Checkpoint in `out` that is not damaged."""
    for step in list_steps(out):
        folder = out / f"step-{step}"
        with suppress(Exception):  # a damaged file may raise any
            state = json.loads((folder / "state.json").read_bytes())
            sizes = {name: (folder / name).stat().st_size for name in state["files"]}
            is_whole = state.pop("sha256") == hash_without_tensors(folder, state)
            known = Reader(folder).read_metadata().state_dict_metadata
            if known and is_whole and sizes == state["files"] and "init" in state:
                return Checkpoint(folder, step, state)
        if is_first_process():
            warn(f"{folder}: a file is missing or damaged, or of another version of this code; "
                 "trying the checkpoint before it")
    return Checkpoint()


def hash_without_tensors(folder, state):
    """A hash of the state of a checkpoint and of its files without tensors, which are small."""
    digest = hashlib.sha256(json.dumps(state).encode())
    for name in state["files"]:
        if not name.endswith(".distcp"):
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def list_steps(out):
    """Steps of the checkpoints in `out`, newest first."""
    names = [path.name for path in out.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted((int(name.removeprefix("step-")) for name in names), reverse=True)


def is_run(out):
    """Is this the directory of a run? Its config.json has the command."""
    with suppress(OSError, ValueError):
        return "command" in json.loads((out / "config.json").read_bytes())
    return False


def check_directory(out, args, init):
    """UserError if a run that begins may not write to `out`."""
    foreign = [] if is_run(out) else [name for name in RUN_FILES[:-2] if (out / name).exists()]
    holds_run = bool(list_steps(out)) or (out / "model").exists()
    is_empty = {path.name for path in out.iterdir()} <= {"lock"}
    reason = ""
    if holds_run and args.resume:
        reason = "contains a run without a complete checkpoint to resume; --overwrite deletes it"
    elif holds_run and not args.overwrite:
        reason = "contains a run; --resume continues it, --overwrite deletes it"
    elif foreign:
        reason = f"contains {', '.join(foreign)}, which no run has made"
    elif args.overwrite and not is_empty and not is_run(out):
        reason = "has no config.json, so it is no run directory to --overwrite"
    elif args.overwrite and init and Path(init).resolve().is_relative_to(out.resolve()):
        reason = f"--overwrite would delete the weights of --init {init}"
    if reason:
        raise UserError(f"--out {out}: {reason}; or name another directory")


def delete_run(out):
    """Deletes the files of a run alone. config.json stays: it marks a run directory."""
    checkpoints = [path for path in out.glob("step-*") if STEP.fullmatch(path.stem)]
    for path in (*checkpoints, out / "model", out / "samples", out / "tensorboard"):
        shutil.rmtree(path, ignore_errors=True)
    for name in RUN_FILES[1:]:
        (out / name).unlink(missing_ok=True)


def recipe_fields(config, base=None):
    """{dotted field: its value as JSON} of the fields that the results of a run depend on. base:
    the folder of the weights under adapters, which no checkpoint holds."""
    fields = {name: json.dumps(value) for name, value in field_values(config).items()
              if name.split(".")[0] not in LAYOUT_FIELDS}
    return fields | ({"base": files.fingerprint(base)} if base else {})


def check_unchanged(args, found, what, ours):
    """Is the "recipe" or "data" that of the checkpoint? If not: UserError, or False with
    --resume-anyway."""
    changes = list_changes(found.state[what], ours)
    if changes and not args.resume_anyway:
        raise UserError(f"--resume: {found.folder} is of another {what}: {changes}. "
                        "--resume-anyway continues all the same")
    return not changes


def name_tensors(model, optimizer):
    """{name: tensor} of weights and optimizer state, not copied; of shards, this rank's.

    A model with adapters has the weights that do not learn from its base."""
    from_base = lora.has_adapters(model)
    named = {f"model.{name}": p.detach() for name, p in model.named_parameters()
             if p.requires_grad or not from_base}
    for name, p in model.named_parameters():
        named |= {f"{kind}.{name}": value for kind, value in optimizer.state.get(p, {}).items()}
    return named


def save(run, model, optimizer, step, position):
    """Writes step-N of a run; all ranks call it. position: of the loader after this step."""
    part = run.out / f"step-{step}.part"
    try:
        if run.ranks.first:
            # an interrupted save leaves such a folder
            for old in run.out.glob("step-*.part"):
                shutil.rmtree(old)
            part.mkdir()
        run.ranks.barrier()
        dcp.save(name_tensors(model, optimizer), checkpoint_id=part,
                 no_dist=not dist.is_initialized())  # returns once its files are on the disk
        if run.ranks.first:
            complete(run, part, run.identity | {"step": step, "loader": position})
        run.ranks.barrier()
    except (OSError, dcp.api.CheckpointException) as e:
        # frees the disk, which may be full
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(f"the checkpoint of step {step} cannot be written: {explain(e)}; --resume "
                       "continues from the one before it") from None


def complete(run, part, state):
    """Writes the last files of a checkpoint, renames it and removes the oldest ones."""
    run.tokenizer.save(part)
    state["files"] = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
    state["sha256"] = hash_without_tensors(part, state)
    (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for path in (*part.iterdir(), part):
        sync(path)
    whole = part.with_suffix("")
    # there may be a damaged checkpoint of this step
    shutil.rmtree(whole, ignore_errors=True)
    part.rename(whole)
    sync(run.out)
    earlier = [step for step in list_steps(run.out) if step <= state["step"]]
    for step in earlier[run.config.keep :] if run.config.keep else ():
        shutil.rmtree(run.out / f"step-{step}")


def sync(path):
    """Returns when a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def explain(error):
    """The first line of the error of a save; of several ranks, of the first that failed."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # torch hides a full disk
    while error.__context__ and not isinstance(error, OSError):
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def restore(folder, model, optimizer):
    """Fills weights and optimizer state from a checkpoint of any number of ranks."""
    reader = Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    # gives AdamW state to be filled, but none to a parameter that never had a gradient
    for name, p in model.named_parameters():
        if f"exp_avg.{name}" in known and p.requires_grad:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    try:
        dcp.load(name_tensors(model, optimizer), storage_reader=reader,
                 no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as e:
        raise UserError(f"--resume: {folder} does not fit this model: {explain(e)}") from None
