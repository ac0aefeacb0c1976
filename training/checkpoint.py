"""Checkpoints, from which a run can continue on any number of ranks (paper: training).

    step-N.part/  __0_0.distcp ..    tensors, one file per rank (torch.distributed.checkpoint)
                  .metadata          lists which tensor is in which file
                  tokenizer files
                  state.json         step, recipe, position in the data, sizes and hash of files
    step-N/       the name of the folder after all of these files are on the disk

An interrupted save leaves a .part folder. Such a folder is never read, and the next save removes
it. Random numbers need no saved state, because they are a function of seed, step and rank.
Therefore a run continues bit for bit if the number of ranks is the same.
"""

import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import sys
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from records.errors import RunError, UserError, is_first_process, warn
from training.config import field_values
from training.log import best_step, read_log
from training.sources import list_changes
from weights import files, lora

# in a run of one process, torch would warn at every save and load that there are no others
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")

STEP = re.compile("step-[1-9][0-9]*")  # str.isdigit accepts digits such as ², which int() refuses
# Files in a run directory
RUN_FILES = ("config.json", "log.jsonl", "loss.png", "scores.png", "progress.gif",
             "result.json")
# Fields that may change when a run is resumed. They affect layout, speed and reports. The fields
# preset and model matter only at the start of a run.
LAYOUT_FIELDS = {
    "device", "cp", "cp_exchange", "cp_heads", "shard", "micro_batch", "workers",
    "recompute", "compile", "crop_bucket", "save_every", "keep", "eval_images", "max_skip",
    "preset", "model",
}
METADATA_CLASSES = {  # the only ones that .metadata may contain
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # the name of this module in Python 3.13
    "torch": {"Size", "float32", "bfloat16"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # torch would unpickle the data of a BytesStorageMetadata, which may run any code
    "torch.distributed.checkpoint.metadata":
        {*dcp.metadata.__all__, "_MEM_FORMAT_ENCODING"} - {"BytesStorageMetadata"},
}


class Checkpoint(NamedTuple):
    """The checkpoint from which a run continues. A new run has none, so its folder is None."""

    folder: Path = None
    step: int = 0
    state: dict = None
    init: str = None  # folder of the weights to read before the weights of the checkpoint


def find(args):
    """-> the Checkpoint in --out from which the run continues. UserError if the run may not write
    to --out, or if the run there started from other weights than --init. Deletes nothing."""
    out = Path(args.out)
    steps = [args.finish_at] if args.finish_at else None
    found = find_newest(out, steps) if args.resume else Checkpoint()
    if args.finish_at and not found.folder:
        raise UserError(f"--finish-at {args.finish_at}: {out} has no complete checkpoint of this "
                        f"step; it has checkpoints of the steps {list_steps(out)}")
    init = args.else_init or args.init
    if found.folder:
        began = found.state["init"] or "new weights"
        if args.init and Path(args.init).absolute() != Path(began).absolute():
            raise UserError(f"--init {args.init}: the run in {out} started from {began}; omit "
                            "--init, or choose another --out")
        # a checkpoint with adapters does not contain the base weights
        base = found.state["base"]
        return found._replace(init=(init or base) if base else None)
    check_directory(out, args, init)
    if args.resume and is_first_process():
        begins = f"from the weights of {init}" if init else "from the beginning"
        warn(f"there is no checkpoint in {out}; the run starts {begins}")
    return found._replace(init=init)


class Unpickler(pickle.Unpickler):
    """Reads .metadata. Plain pickle would call any function to which the file refers."""

    def find_class(self, module, name):
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, a foreign class")
        return super().find_class(module, name)


class Damaged(Exception):
    """The bits of a stored tensor have changed. The argument is the name of its file."""


class Reader(dcp.FileSystemReader):
    """Reads the tensors of a checkpoint. It reads .metadata with the Unpickler."""

    def read_metadata(self):
        with open(self.path / ".metadata", "rb") as file:
            return Unpickler(file).load()

    def _slice_file(self, file, info):
        """-> the stored bytes of one tensor as a file. Damaged if they have changed. torch.save
        stores a tensor as a zip file with a CRC-32, but torch.load does not compare it."""
        stored = io.BytesIO(super()._slice_file(file, info).read())
        try:
            with zipfile.ZipFile(stored) as parts:
                # torch can be told to write no CRC-32; then all of them are 0
                has_crc = any(part.CRC for part in parts.infolist())
                is_sound = not has_crc or parts.testzip() is None
        except Exception:  # zipfile raises many kinds
            is_sound = False
        if not is_sound:
            raise Damaged(info.relative_path)
        stored.seek(0)
        return stored


def find_newest(out, steps=None):
    """-> the newest Checkpoint in `out` whose small files are not damaged; without one,
    Checkpoint(). steps: only these count. Of files with tensors, only the sizes are compared."""
    for step in list_steps(out):
        if steps is not None and step not in steps:
            continue
        folder = out / f"step-{step}"
        with suppress(Exception):  # a damaged file may raise any exception
            state = json.loads((folder / "state.json").read_bytes())
            sizes = {name: (folder / name).stat().st_size for name in state["files"]}
            is_whole = state.pop("sha256") == hash_without_tensors(folder, state)
            known = Reader(folder).read_metadata().state_dict_metadata
            has_fields = "init" in state and "plans" in state["loader"] and "data" in state["data"]
            if known and is_whole and sizes == state["files"] and has_fields:
                return Checkpoint(folder, step, state)
        if is_first_process():
            warn(f"{folder}: a file is missing or damaged, or another version of this code wrote "
                 "it; trying the checkpoint before it")
    return Checkpoint()


def hash_without_tensors(folder, state):
    """A hash of a checkpoint's state and of its small files, which contain no tensors."""
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
    """Is this a run directory? If so, its config.json contains the command."""
    with suppress(OSError, ValueError):
        return "command" in json.loads((out / "config.json").read_bytes())
    return False


def check_directory(out, args, init):
    """UserError if a new run may not write to `out`."""
    foreign = [] if is_run(out) else [name for name in RUN_FILES if (out / name).exists()]
    holds_run = bool(list_steps(out)) or (out / "model").exists()
    is_empty = {path.name for path in out.iterdir()} <= {"lock"}
    reason = ""
    if holds_run and args.resume:
        reason = "contains a run without a complete checkpoint to resume; --overwrite deletes it"
    elif holds_run and not args.overwrite:
        reason = "contains a run; --resume continues it, --overwrite deletes it"
    elif foreign:
        reason = f"contains {', '.join(foreign)}, which was not written by a run"
    elif args.overwrite and not is_empty and not is_run(out):
        reason = "is not a run directory (it has no config.json); --overwrite does not delete it"
    for flag, folder in {"--init": init, "--vit": args.fields.get("vit")}.items():
        if args.overwrite and folder and Path(folder).resolve().is_relative_to(out.resolve()):
            reason = reason or f"--overwrite would delete the weights of {flag} {folder}"
    if reason:
        raise UserError(f"--out {out}: {reason}. You can also choose another directory")


def delete_run(out):
    """Deletes the files of a run, and no others. config.json stays, as it marks a run directory."""
    checkpoints = [path for path in out.glob("step-*") if STEP.fullmatch(path.stem)]
    for path in (*checkpoints, out / "model", out / "samples", out / "tensorboard"):
        shutil.rmtree(path, ignore_errors=True)
    for name in RUN_FILES[1:]:
        (out / name).unlink(missing_ok=True)


def recipe_fields(config, base=None):
    """-> {dotted field: its value as JSON}, for all fields that affect the results of a run. base:
    the folder of the base weights under adapters, which no checkpoint contains."""
    fields = {name: json.dumps(value) for name, value in field_values(config).items()
              if name.split(".")[0] not in LAYOUT_FIELDS}
    return fields | ({"base": files.fingerprint(base)} if base else {})


def check_unchanged(args, found, what, ours):
    """Compares the "recipe" or the "data" with the checkpoint -> True if nothing differs. If
    something differs: UserError, or with --resume-anyway False."""
    changes = list_changes(found.state[what], ours)
    if changes and not args.resume_anyway:
        raise UserError(f"--resume: {found.folder} does not have the same {what}: {changes}. To "
                        "continue anyway, use --resume-anyway")
    return not changes


def name_tensors(model, optimizer):
    """-> {name: tensor} of weights and optimizer state, without a copy. Each rank has its shards.

    Frozen weights of a model with adapters are not included: they are read from the base."""
    from_base = lora.has_adapters(model)
    named = {f"model.{name}": p.detach() for name, p in model.named_parameters()
             if p.requires_grad or not from_base}
    for name, p in model.named_parameters():
        named |= {f"{kind}.{name}": value for kind, value in optimizer.state.get(p, {}).items()}
    return named


def save(run, model, optimizer, step, position):
    """Writes step-N of a run. All ranks call it. position: state of the loader after this step."""
    part = run.out / f"step-{step}.part"
    try:
        if run.ranks.first:
            # an interrupted save leaves such a folder
            for old in run.out.glob("step-*.part"):
                shutil.rmtree(old)
            part.mkdir()
        run.ranks.barrier()
        dcp.save(name_tensors(model, optimizer), checkpoint_id=part,
                 no_dist=not dist.is_initialized())  # returns when its files are on the disk
        if run.ranks.first:
            complete(run, part, run.identity | {"step": step, "loader": position})
        run.ranks.barrier()
    except (OSError, dcp.api.CheckpointException) as e:
        # frees the disk, which may be full
        shutil.rmtree(part, ignore_errors=True)
        if explain(e) == "KeyboardInterrupt":  # torch catches Ctrl-C, too
            raise KeyboardInterrupt from None
        raise RunError(f"the checkpoint of step {step} cannot be written: {explain(e)}; --resume "
                       "continues from the checkpoint before it") from None


def complete(run, part, state):
    """Writes the last files of a checkpoint, renames its folder, removes the oldest checkpoints,
    but never the one with the lowest held-out loss."""
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
    # This step is evaluated after it is saved. So a line of this step or of a later one belongs to
    # an earlier attempt, whose checkpoints were deleted.
    lines = read_log(run.out / "log.jsonl")
    best = best_step([line for line in lines if line.get("step", 0) < state["step"]])
    for step in earlier[run.config.keep :] if run.config.keep else ():
        if step != best:
            shutil.rmtree(run.out / f"step-{step}")


def sync(path):
    """Waits until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def explain(error):
    """The first line of an error. If several ranks failed, it is the error of the first one."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # torch raises another error on top of the OSError of a full disk
    while error.__context__ and not isinstance(error, OSError):
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def restore(found, model, optimizer):
    """Fills weights and optimizer state from a Checkpoint that any number of ranks wrote. UserError
    on all ranks if a tensor that one of them reads is damaged."""
    folder = found.folder
    reader = Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    # step() makes the AdamW state that dcp.load fills, for parameters with state in the checkpoint
    for name, p in model.named_parameters():
        if f"exp_avg.{name}" in known and p.requires_grad:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    try:
        dcp.load(name_tensors(model, optimizer), storage_reader=reader,
                 no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as e:
        for error, _ in e.failures.values():
            if isinstance(error, Damaged):
                older = find_newest(folder.parent, range(found.step)).step
                raise UserError(f"--resume: {folder}: a tensor in {error} is damaged, because its "
                                "CRC-32 differs from the stored one; delete this folder, and "
                                f"--resume continues from step {older}") from None
        raise UserError(f"--resume: {folder} does not fit this model: {explain(e)}") from None


def repeat_command(*flags):
    """-> the command of this process for a shell, with these flags in place of the flags that
    concern an earlier run, such as --resume. Without flags, the command stays as it is."""
    # unlike sys.argv, it has the -m of python -m; the -u is from torchrun
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    if flags:
        words = [word for word in words if word not in ("--overwrite", "--resume")]
        if not {"--resume-anyway", "--resume_anyway"} & {*words} or flags != ("--resume",):
            words += flags
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launch = "python"
    if os.environ.get("WORLD_SIZE", "1") != local:
        launch = "torchrun on every node as before, with"
    elif local != "1":
        launch = f"torchrun --standalone --nproc-per-node {local}"
    return f"{launch} {shlex.join(words)}"


def how_to_go_on(run):
    """-> what an interrupted run has saved, and the command that continues it. run: None if nothing
    has been written yet. Then the same command can be repeated."""
    if not run:
        return f"nothing was written; start again with: {repeat_command()}"
    may_resume = bool(list_steps(run.out))
    if (run.out / "model").exists() and not may_resume:
        return f"the trained weights are in {run.out}/model, but were not evaluated"
    kept = "continue with" if may_resume else "nothing was saved; start again with"
    return f"{kept}: {repeat_command('--resume')}"
