"""Checkpoints: what a run needs to continue, bit by bit, on any number of ranks (paper: training).

in    model, optimizer, and a state fit for JSON: step, config, position in the data
out   out/step-N/, from which another process, or another number of them, continues

    step-N.part/  __0_0.distcp ..   tensors, one file of each rank (torch.distributed.checkpoint)
                  .metadata         which tensor is in which file
                  tokenizer files
                  state.json        the rest
                  complete          written last: size and CRC-32 of every file
    step-N/       its name once all of that is on the disk

A save that is interrupted anywhere leaves a .part, which is never read and which the next save of
that step removes. The tensors are copied before a save begins, and a thread writes them: the step
does not wait for the disk. Randomness needs no state: it is a function of seed, step and rank.
"""

import json
import os
import re
import shutil
import stat
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from parallel import all_gather
from training.checkpoint_files import Reader, Writer, checksum, sync, write_synced
from weights import lora

# of a process without others, torch says at every save and load that it is alone
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")           # what AdamW keeps for each parameter
DCP_ERRORS = (Exception, dcp.api.CheckpointException)    # the latter is only a BaseException


def first_line(error):
    if isinstance(error, dcp.api.CheckpointException):   # of several ranks: the first that failed
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class SaveError(Exception):
    """A checkpoint could not be written: one sentence."""


class LoadError(Exception):
    """A checkpoint cannot be read: one sentence with the folder, the error and what to do."""

    def __init__(self, folder, error, advice="without that folder, --resume continues from the "
                                             "checkpoint before it"):
        super().__init__(f"{folder}: not readable as a checkpoint: {first_line(error)}; {advice}")


# --------------------------------------------------------------------------------------------------
# tensors of a run by name


def tensors(model, optimizer):
    """{name: tensor} of weights and optimizer state, not copied; of sharded ones, this rank's.

    A model with adapters has the weights that do not learn from its base (training/resume.py)."""
    from_base = lora.has_adapters(model)
    named = {f"model.{name}": p.detach() for name, p in model.named_parameters()
             if p.requires_grad or not from_base}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        named |= {f"{kind}.{name}": state[kind] for kind in ADAM_STATE if kind in state}
    return named


def init_adam_state(model, optimizer, known):
    """Gives AdamW empty state to be filled, for the parameters that have one in `known`, the names
    in a checkpoint: a parameter whose gradient has always been None has none."""
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if f"exp_avg.{name}" in known and p in trained:
            # as AdamW itself does: its fused kernel counts steps on the device of the parameter
            device = p.device if optimizer.defaults["fused"] else "cpu"
            optimizer.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p.detach()),
                "exp_avg_sq": torch.zeros_like(p.detach()),
            }


# --------------------------------------------------------------------------------------------------
# writing


class PendingSave(NamedTuple):
    step: int
    part: Path  # the folder that is being written
    writer: Writer
    future: object
    state: str


class Saver:
    """Writes the checkpoints of a run into `out`, one at a time; the newest `keep` stay (0: all).

    first: is this the rank that completes them? group: a gloo group that only these saves use.
    """

    def __init__(self, out, keep=2, first=True, group=None):
        self.out = Path(out)
        self.keep = keep
        self.first = first
        self.group = group
        self.pending = None
        # on a GPU copies to pinned memory, several at a time; the memory is kept for the next save
        on_gpu = torch.cuda.is_available()
        self.stager = DefaultStager(StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False,
            use_non_blocking_copy=on_gpu))

    def begin(self, step, tokenizer):
        """Makes step-N.part; SaveError if that, or an earlier save, failed.

        All ranks must return from here before one of them calls `save`: that would make the folder
        again after the first rank failed to."""
        self.wait()
        part = self.out / f"step-{step}.part"
        try:
            if self.first:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                tokenizer.save(part)
        except OSError as e:
            shutil.rmtree(part, ignore_errors=True)  # on a full disk it is in the way
            raise SaveError(self.sentence(step, e)) from None

    def save(self, step, model, optimizer, state):
        """Starts to write step-N, once begun. The model may change as soon as this returns."""
        part = self.out / f"step-{step}.part"
        writer = Writer(part)
        future = dcp.async_save(tensors(model, optimizer), storage_writer=writer,  # copies first
                                async_stager=self.stager, process_group=self.group,
                                no_dist=not dist.is_initialized())
        self.pending = PendingSave(step, part, writer, future, json.dumps(state))

    def done(self):
        """Whether nothing is being written; completes what has been. SaveError if it failed."""
        if self.pending and self.pending.future.done():
            self.wait()
        return self.pending is None

    def wait(self):
        """Returns when what is being written is complete; SaveError if it failed."""
        if not self.pending:
            return
        pending = self.pending
        self.pending = None
        try:
            pending.future.result()
            if self.first:
                self.complete(pending)
        except DCP_ERRORS as e:  # whatever the writing thread, or that of another rank, met with
            if self.first:
                shutil.rmtree(pending.part, ignore_errors=True)
            raise SaveError(self.sentence(pending.step, e)) from None

    def complete(self, pending):
        """Writes the last files of a checkpoint, gives it its name and removes older ones."""
        part = pending.part
        write_synced(part / "state.json", pending.state)
        files = {}
        for path in sorted(part.iterdir()):
            crc32 = pending.writer.crc32.get(path.name)
            if crc32 is None:                            # a small file, written by this rank
                crc32 = checksum(path)
            files[path.name] = {"bytes": path.stat().st_size, "crc32": crc32}
            sync(path)                                   # the tokenizer's are not on the disk yet
        write_synced(part / "complete", json.dumps(files))
        sync(part)
        whole = self.out / f"step-{pending.step}"
        shutil.rmtree(whole, ignore_errors=True)  # of a run that passed this step before
        part.rename(whole)
        sync(self.out)
        self.remove_old(pending.step)

    def remove_old(self, step):
        """Removes checkpoints beyond the newest `keep`, and what a kill left half written."""
        try:
            kept = [f"step-{n}" for n in complete_steps(self.out)[: self.keep or None]]
        except LoadError:
            return  # one of them cannot be read just now: remove none
        for path in self.out.glob("step-*"):
            name = re.fullmatch(r"step-(\d+)(\.part)?", path.name)
            if name and int(name[1]) <= step and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def sentence(self, step, error):
        newest = newest_step(self.out)
        left = "there is none before it"
        if newest is not None:
            left = f"step-{newest} is complete, --resume continues from it"
        return f"the checkpoint of step {step} cannot be written: {first_line(error)}; {left}"


# --------------------------------------------------------------------------------------------------
# reading


def complete_steps(out):
    """Steps of the checkpoints in `out` whose files have the sizes that were written, newest first.

    [] only if there is no checkpoint: LoadError where there may be one that cannot be read.
    """
    advice = "--resume starts a new run only where there is no checkpoint at all"
    try:
        with os.scandir(out) as entries:
            folders = [Path(entry.path) for entry in entries
                       if re.fullmatch(r"step-\d+", entry.name) and entry.is_dir()]
        intact = [int(folder.name[5:]) for folder in folders if is_intact(folder)]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise LoadError(out, e, advice) from None
    if folders and not intact:
        names = ", ".join(sorted(folder.name for folder in folders))
        raise LoadError(out, f"files are missing or cut short in {names}", advice)
    return sorted(intact, reverse=True)


def newest_step(out):
    """The step that --resume continues from; None if there is none, or none that can be read."""
    try:
        return next(iter(complete_steps(out)), None)
    except LoadError:
        return None


DAMAGE = (FileNotFoundError, ValueError, AttributeError, TypeError, KeyError, RecursionError)


def is_intact(folder):
    """Are all files of a checkpoint there, in their sizes? OSError if that cannot be known."""
    try:
        files = json.loads((folder / "complete").read_bytes())
        for name, file in files.items():
            status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != file["bytes"]:
                return False
    except DAMAGE:
        return False
    return True


def damage_of(folder, rank=0, ranks=1, only=None):
    """What is wrong with the contents of a checkpoint's files, "" if nothing: of each `ranks`-th
    file from number `rank` on, or of the file `only`."""
    try:
        files = json.loads((folder / "complete").read_bytes())
        for name in [only] if only else sorted(files)[rank::ranks]:
            if checksum(folder / name) != files[name]["crc32"]:
                return f"{name} is damaged: it has another checksum than when it was written"
    except (OSError, *DAMAGE) as e:
        return first_line(e)
    return ""


STATE_TYPES = {"step": int, "config": dict, "model": dict, "data": dict, "skipped_steps": int,
               "loader": dict}


def state_of(folder):
    """The state that `save` was given, with the keys of STATE_TYPES; LoadError if it is damaged."""
    folder = Path(folder)
    if damage := damage_of(folder, only="state.json"):
        raise LoadError(folder, damage)
    try:
        state = json.loads((folder / "state.json").read_bytes())
        for key, kind in STATE_TYPES.items():
            if type(state[key]) is not kind:
                raise ValueError(f"state.json has another {key}")
        if f"step-{state['step']}" != folder.name:
            raise ValueError("state.json has another step")
    except (OSError, *DAMAGE) as e:
        raise LoadError(folder, e) from None
    return state


def restore(folder, model, optimizer):
    """Fills weights and optimizer state from a checkpoint of any number of ranks, in place.

    Called by all ranks; each compares the checksums of its part of the files. Parameters without
    optimizer state there have none afterwards. LoadError, on all ranks, if it cannot be read.
    """
    alone = not dist.is_initialized()
    part = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    for damage in all_gather(damage_of(Path(folder), *part)):
        if damage:
            raise LoadError(folder, damage)
    try:
        reader = Reader(folder)
        init_adam_state(model, optimizer, reader.read_metadata().state_dict_metadata)
        dcp.load(tensors(model, optimizer), storage_reader=reader, no_dist=alone)
    except DCP_ERRORS as e:              # the file layer has errors of its own for damaged files
        raise LoadError(folder, e) from None
