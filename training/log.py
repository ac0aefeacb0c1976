"""What a run writes about itself as it goes: log.jsonl, skips.jsonl, batches that are not finite,
and what it says on the terminal before its first step and beside its progress bar.

in    the numbers of a step, the records that were masked in it
out   files for charts and tools, and for the rest of an interrupted run
"""

import dataclasses
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from records.errors import warn
from training.tensorboard import Board


class RunLog:
    """log.jsonl, one line per step after a first line, and skips.jsonl; only the first rank writes.

    head: the first line of a run that begins. resume_step: the step after which a run continues; a
    line that a kill cut short is dropped, and of a step that is logged twice the later line counts.
    loss: that of the last step. tensorboard: write for TensorBoard too.
    """

    def __init__(self, out, writes, head, resume_step=None, tensorboard=False):
        self.loss = None
        self.out = out
        self.board = Board(out, resume_step) if tensorboard and writes else None
        self.logged = set()              # the indices that skips.jsonl has already
        self.skips = out / "skips.jsonl" if writes else Path(os.devnull)
        log = out / "log.jsonl" if writes else Path(os.devnull)
        if resume_step is not None:
            self.logged = {skip["index"] for skip in read_skips(out)}
            self.loss = loss_of(log, resume_step) if writes else None
            for path in (log, self.skips) if writes else ():
                drop_partial_line(path)
            self.file = open(log, "a", buffering=1)
        else:
            if writes:
                (out / "config.json").write_text(json.dumps(head, indent=1))
                self.skips.unlink(missing_ok=True)
            self.file = open(log, "w", buffering=1)
            self.file.write(json.dumps(head) + "\n")

    def step(self, line, masked):
        """Logs a step and the records that were masked in it, each index of the mixture once.

        masked: [{"index": .., "id": .., "where": .., "reason": ..}, ..]
        """
        self.write(line)
        self.loss = line["loss"]
        new = [skip for skip in masked if skip["index"] not in self.logged]
        if new:
            with open(self.skips, "a") as skips:
                for skip in sorted(new, key=lambda skip: skip["index"]):
                    skips.write(json.dumps({"step": line["step"], **skip}) + "\n")

    def scores(self, step, scores, **more):
        line = {"step": step, "eval": scores, **more}
        self.write(line)
        if self.board:
            self.board.pictures(step)

    def write(self, line):
        """FileNotFoundError, which ends the run, if another file or none has taken the log's place:
        what is written to a deleted file is lost."""
        if self.file.name != os.devnull:
            try:
                in_place = os.path.samestat(os.stat(self.file.name), os.fstat(self.file.fileno()))
            except FileNotFoundError:
                in_place = False
            if not in_place:
                raise FileNotFoundError(f"{self.out}: the run directory was deleted or moved while "
                                        "the run was writing to it; its log ends here")
        self.file.write(json.dumps(line) + "\n")
        if self.board:
            self.board.line(line)


# --------------------------------------------------------------------------------------------------
# reading


NUMBER = (int, float)
# fields of a line by which readers go, and their types
LINE_FIELDS = {"step": int, "seconds": NUMBER, "loss": (*NUMBER, type(None)), "lr": dict,
               "nll_by_source": (dict, type(None)), "eval": dict}


def is_well_formed(line):
    """Can readers rely on the fields of this line of a log?"""
    if not isinstance(line, dict):
        return False
    if any(key in line and not isinstance(line[key], kind) for key, kind in LINE_FIELDS.items()):
        return False
    numbers = [*line.get("lr", {}).values(), *(line.get("nll_by_source") or {}).values()]
    needed = {"step", "loss", "seconds"} if "lr" in line else {"step"} if "eval" in line else set()
    return needed <= line.keys() and all(isinstance(number, NUMBER) for number in numbers)


def read_log(path):
    """The lines of a file of the run as dicts, none where there is no file.

    A line that a kill cut short, that a disk damaged or that somebody changed is passed over.
    """
    lines = []
    for row in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if is_well_formed(line):
            lines.append(line)
    return lines


def read_skips(out):
    """The records that a run could not decode and masked: [{"index": .., "reason": .., ..}, ..].

    A damaged line is passed over: the run masks that record again.
    """
    return [skip for skip in read_log(out / "skips.jsonl")
            if isinstance(skip.get("index"), int) and isinstance(skip.get("reason"), str)]


def loss_of(log, step):
    """The loss of a step in a log, None if it is not there."""
    losses = [line["loss"] for line in read_log(log) if "lr" in line and line["step"] == step]
    return losses[-1] if losses else None


def drop_partial_line(path):
    """Cuts off a last line that a kill left unfinished, so that the next one begins a new line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


# --------------------------------------------------------------------------------------------------
# what else is noted of a run


def save_nonfinite_batches(out, step, batches, rank):
    """Writes batches whose loss is not finite to `out` as arrays."""
    for k, batch in enumerate(batches):
        arrays = {"ids": np.array(batch.ids)}
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            if torch.is_tensor(value):
                arrays[field.name] = value.cpu()
        np.savez(out / f"nonfinite-step-{step}-rank-{rank}-{k}.npz", **arrays)


def dropped_by_source(counts):
    """{"source: kind": n} -> {source: {kind: n}}, as in the log."""
    by_source = {}
    for key, n in counts.items():
        source, _, kind = key.rpartition(": ")
        by_source.setdefault(source, {})[kind] = n
    return by_source


def commit():
    """The commit of the code that runs, with + if files differ from it; 'unknown' without git."""
    here = Path(__file__).parents[1]

    def git(*words):
        return subprocess.check_output(["git", *words], cwd=here, text=True,
                                       stderr=subprocess.DEVNULL).strip()

    try:
        changed = git("status", "--porcelain", "-uno")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device):
    """The name of a GPU, or of the processor and how many cores it has."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")          # of Linux
    names = []
    if cpuinfo.is_file():
        names = re.findall(r"model name\s*: *(.*)", cpuinfo.read_text())
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {name}"


def first_log_line(run, args, model):
    params = {part: sum(p.numel() for p in ps) for part, ps in model.parameter_groups().items()}
    return {"config": dataclasses.asdict(run.config), "command": vars(args), "commit": commit(),
            "device": str(run.device), "hardware": hardware(run.device),
            "dtype": str(run.dtype).split(".")[-1], "world": run.ranks.world, "params": params,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def print_header(run, head):
    """What a run is about to do, on stderr above its progress bars. head: the first log line."""
    if not run.ranks.first:
        return
    config = run.config
    of_parts = [f"{part} {n / 1e6:.1f} M" for part, n in head["params"].items()]
    threads = f", {count(torch.get_num_threads(), 'thread')}" if run.device.type == "cpu" else ""
    done = run.resume_from.step
    steps = f"{config.steps - done} of {config.steps} are left" if done else str(config.steps)
    if config.vit_steps and not done and not head["command"]["init"]:
        steps += f" after {config.vit_steps} of stage 0"
    warn(f"stage {config.stage} on {head['device']} ({head['hardware']}{threads}), "
         f"{head['dtype']}, {count(head['world'], 'process')}\n"
         f"parameters: {', '.join(of_parts)}; {', '.join(config.train)} learn\n"
         f"steps: {steps}; a batch is {count(config.batch, 'row')} of {config.data.max_tokens} "
         "tokens\n"
         f"writes to {run.out}")


# In the first command a training step takes as long as 4 steps of stage 0, or as the answers about
# 3 held-out images (EPYC, one thread). Only for the time left that is displayed.
STAGE0_STEPS_PER_STEP = 4
RECORDS_PER_STEP = 3


def evaluation_in_steps(run):
    """How many training steps take as long as the evaluation at the end. 0 for records of the
    user, whose questions can take any time."""
    if run.eval_records is not None:
        return 0
    n_records = (2 if run.config.stage == 1 else 4) * run.config.eval_images     # of world.held_out
    return n_records / RECORDS_PER_STEP / run.ranks.world


def show_progress(bar, run, loss, fill):
    """Writes loss, the share of tokens that are filled and the time left behind the bar."""
    bar.set_postfix(loss=f"{loss:.3f}", fill=f"{fill:.0%}",
                    ends_in=time_left(bar, evaluation_in_steps(run)), refresh=False)


def time_left(bar, steps_after):
    """"07:40" until the whole command ends; "?" before any step was timed.

    steps_after: what comes after the steps of this progress bar, counted in such steps.
    """
    rate = bar.format_dict["rate"]
    return tqdm.format_interval((bar.total - bar.n + steps_after) / rate) if rate else "?"


def count(n, noun):
    plural = "es" if noun.endswith("s") else "s"
    return f"{n} {noun}{plural if n > 1 else ''}"
