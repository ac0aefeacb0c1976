"""Counts and losses of each step, the log files of a run, and its messages.

    rows and losses of each micro-batch  --StepStats-->  sums over all ranks  --RunLog-->  log.jsonl
"""

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from records.errors import (
    RankDataError,
    RankError,
    RunError,
    Unreadable,
    draft,
    plural,
    visible,
    warn,
)
from records.reader import Records
from training.ranks import all_reduce_sums


def count_rows(rows):
    """Counts the contents of rows of data.Example -> {name: number}."""
    examples = [x for row in rows for x in row]
    return {
        "packs": len(rows),
        "examples": len(examples),
        "branches": sum(x.n_branches for x in examples if not x.unreadable),
        "tokens": sum(len(x.tokens) for x in examples),
        "crops": sum(0 if x.image_id is None else len(x.image_id) for x in examples),
        "visual_tokens": sum(len(x.pool_dst) for x in examples),
        "attention_pairs": sum(allowed_pairs(x.visible_until, x.bidir) for x in examples),
        "loss_tokens": sum(int((x.weights > 0).sum()) for x in examples),
        "unreadable_tokens": sum(len(x.tokens) for x in examples if x.unreadable),
        "branches_dropped": sum(x.dropped_branches for x in examples),
        "tokens_dropped": sum(x.dropped_tokens for x in examples),
    }


def allowed_pairs(visible_until, bidir):
    """The mask fields of an example or of a row, (T,) NumPy arrays -> how many query-key pairs the
    rule of attention.py allows.

    The queries k .. visible_until[k]-1 may attend to key k. In a group of n tokens that attend in
    both directions, n(n-1)/2 pairs have a key after the query; the causal part has all others.
    """
    causal = visible_until - np.arange(len(visible_until))
    _, n = np.unique(bidir[bidir != 0], return_counts=True)
    return int(causal.sum() + (n * (n - 1) // 2).sum())


class StepStats:
    """Sums over the micro-batches of a step: counts, and for each source weighted nll and weight.

    Losses are read from the device at the end of the step, so that the CPU need not wait before.
    nonfinite: ids of all records in micro-batches whose loss is NaN or infinite.
    """

    def __init__(self, sources, cp):
        self.sources = sources
        self.cp = cp
        self.counts = Counter()
        self.losses = []  # of each micro-batch: ([(id, source), ..], nll of each example)
        self.sums = dict.fromkeys(product(("nll", "weight", "unreadable"), sources), 0.0)
        self.nonfinite = []

    def add(self, rows, batch, nll):
        """Adds a micro-batch: its rows, their Batch, and nll (B,T) of each token. The weighted nll
        is summed for each example."""
        examples = [x for row in rows for x in row]
        sums = torch.zeros(len(examples) + 1, device=nll.device)  # the last sum is of padding
        sums.index_add_(0, batch.example.flatten(), (batch.weights * nll.detach()).flatten())
        self.losses.append(([(x.id, x.source) for x in examples], sums))
        self.counts.update(count_rows(rows))
        for x in examples:
            self.sums["weight", x.source] += float(x.weights.sum(dtype="float64")) / self.cp
            self.sums["unreadable", x.source] += bool(x.unreadable)

    def all_reduce(self, stop, squares):
        """Sums over all ranks, with one collective. stop: must this rank stop? squares: {group: sum
        of the squared gradients of this rank}. Sets counts, total_weight, weight, loss,
        nll_by_source, unreadable, squares, and stop: must one of the ranks stop?"""
        for examples, sums in self.losses:
            *sums, of_padding = sums.tolist()
            if not math.isfinite(sum(sums) + of_padding):
                self.nonfinite += [name for name, _ in examples]
            for (_, source), value in zip(examples, sums, strict=True):
                self.sums["nll", source] += value
        of_groups = {("square", part): square for part, square in squares.items()}
        sums = all_reduce_sums({**self.counts, **self.sums, **of_groups, "stop": stop})
        self.stop = bool(sums["stop"])
        self.squares = {part: sums["square", part] for part in squares}
        # all ranks that share a row have counted it
        self.counts = {name: round(sums[name] / self.cp) for name in self.counts}
        nll = {name: sums["nll", name] for name in self.sources}
        weights = {name: sums["weight", name] for name in self.sources}
        unreadable = {name: round(sums["unreadable", name] / self.cp) for name in self.sources}
        self.unreadable = {name: n for name, n in unreadable.items() if n}
        self.total_weight = sum(weights.values())
        self.weight = self.total_weight or 1.0  # a step without loss must not divide by 0
        self.loss = sum(nll.values()) / self.weight
        self.nll_by_source = {name: nll[name] / w for name, w in weights.items() if w > 0}


def stop_nonfinite(run, step, plan, stats, norms):
    """Raises a RunError with the records of a step whose loss or gradient is not finite."""
    ids = dict.fromkeys(name for ids in run.ranks.all_gather(stats.nonfinite) for name in ids)
    raise RunError(f"step {step}: loss {stats.loss}, gradient norm {math.hypot(*norms.values())}; "
                   f"records: {', '.join(list(ids or plan.ids)[:20])}; to see them: python -m "
                   f"tools.view --run {run.out} --step {step} --out step-{step}.html")


def make_line(config, step, plan, stats, norms, rates):
    """-> the line of a step in log.jsonl. norms: gradient norms {group: number}. rates: learning
    rates {group: number}."""
    return {
        "step": step, "loss": stats.loss, **stats.counts, "weight": stats.total_weight,
        "nll_by_source": stats.nll_by_source, "grad_norm": math.hypot(*norms.values()),
        "grad_norms": norms, "lr": rates,
        "fill_tokens": stats.counts["tokens"] / (config.batch * config.data.max_tokens),
        "fill_crops": stats.counts["crops"] / (config.batch * config.pack_crops),
        "skipped": plan.skipped, "unreadable": stats.unreadable,
        "ids": plan.hash,
    }


class RunLog:
    """Writes log.jsonl on the first rank. On other ranks it does nothing.

    head: the first line of a new run. A resumed run appends to the file. Before, it removes a last
    line that is incomplete because the run was killed.
    """

    def __init__(self, run, head):
        self.writes = run.ranks.first
        if not self.writes:
            return
        log = run.out / "log.jsonl"
        if not run.resume_from.step:
            with draft(run.out / "config.json") as path:  # half a file would block the next run
                path.write_text(json.dumps(head, indent=1), encoding="utf-8")
            log.write_text(json.dumps(head) + "\n", encoding="utf-8")
        if log.exists():
            os.truncate(log, log.read_bytes().rfind(b"\n") + 1)
        self.file = open(log, "a", buffering=1, encoding="utf-8")

    def write(self, line):
        if self.writes:
            self.file.write(json.dumps(line) + "\n")


OLD_NAMES = {"masked_tokens": "unreadable_tokens", "pairs": "attention_pairs", "dropped": "skipped"}


def read_log(path):
    """-> the lines of a .jsonl file that are dicts. A line that is cut off, or whose "step" is not
    a number, is skipped. Without a file: []. Old names of fields are replaced by the new ones."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return [{OLD_NAMES.get(name, name): value for name, value in line.items()}
            for line in lines if isinstance(line, dict) and isinstance(line.get("step", 0), int)]


def read_steps(lines):
    """Lines of log.jsonl -> the lines of steps, in order. If a step occurs twice, the later line
    counts."""
    by_step = {line["step"]: line for line in lines if {"step", "loss", "lr"} <= line.keys()}
    return [by_step[step] for step in sorted(by_step)]


def describe_jump(run, rates):
    """-> a sentence if the schedule of a resumed run does not continue the schedule before it, else
    "". rates: {group: learning rate of today's schedule at the step of the checkpoint}."""
    step = run.resume_from.step
    logged = {line["step"]: line["lr"] for line in read_steps(read_log(run.out / "log.jsonl"))}
    before = logged.get(step, {})
    jumps = [f"{group} from {before[group]:.3g} to {now:.3g}"
             for group, now in rates.items() if before.get(group, now) != now]
    if not jumps:
        return ""
    return f"after step {step} the learning rate jumps, because of new flags: {', '.join(jumps)}"


def read_scores(lines):
    """Lines of log.jsonl -> [(step, scores), ..] of the lines with scores."""
    return [(line["step"], line["eval"]) for line in lines
            if "step" in line and isinstance(line.get("eval"), dict)]


def held_out_loss(scores):
    """The scores of a held-out set -> its loss. None if they contain no finite loss."""
    nll = scores.get("nll")
    loss = nll.get("all") if isinstance(nll, dict) else None
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def best_step(lines):
    """Lines of log.jsonl -> the step with the lowest held-out loss, or None without such a loss. If
    there are several held-out sets, the first one decides. The later line of a step counts."""
    losses = {step: held_out_loss(scores) for step, scores in read_scores(lines)}
    losses = {step: loss for step, loss in losses.items() if loss is not None}
    return min(losses, key=losses.get, default=None)


def describe_unreadable(out):
    """-> a sentence about the records that a run could not decode, or "" if there are none."""
    counts = Counter()
    for line in read_steps(read_log(out / "log.jsonl")):
        counts.update(line.get("unreadable", {}))
    if not counts:
        return ""
    by_source = ", ".join(f"{name}: {n:,}" for name, n in counts.items())
    return (f"{plural(counts.total(), 'example')} could not be decoded and had no loss "
            f"({by_source}); 'python -m tools.check FILE --decode' lists the records")


def make_head(run, args, model):
    """-> the first line of log.jsonl. It also prints on stderr what the run will do."""
    config = run.config
    params = {part: sum(p.numel() for p in ps) for part, ps in model.parameter_groups().items()}
    command = vars(args) | {"init": run.start.weights}
    head = {"config": dataclasses.asdict(config), "command": command, "commit": commit(),
            "device": str(run.device), "hardware": hardware(run.device),
            "dtype": str(run.dtype).split(".")[-1], "world": run.ranks.world, "params": params,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}
    if run.ranks.first:
        n_left = config.steps - run.resume_from.step
        sizes = ", ".join(f"{part} {n / 1e6:.1f} M" for part, n in params.items())
        warn(f"stage {config.stage} on {head['device']} ({head['hardware']}), "
             f"{head['dtype']}, processes: {head['world']}\n"
             f"parameters: {sizes}; trained parts: {', '.join(config.train)}\n"
             f"steps: {n_left} of {config.steps} remain; a batch has {plural(config.batch, 'row')} "
             f"of {config.data.max_tokens} tokens; the run writes to {run.out}")
        if n_left:
            warn(describe_length(run))
    return head


def describe_length(run):
    """-> how much data the run will use, and how many epochs of the first three files. This is an
    estimate from the number of examples in the first step."""
    config = run.config
    mixture = run.loader.mixture
    # a resumed run uses the step that its log has first, so that it prints the same numbers
    logged = read_steps(read_log(run.out / "log.jsonl")) if run.resume_from.step else []
    n = config.steps * (logged[0]["examples"] if logged else run.loader.examples_per_step)
    epochs = [f"epochs of {source.name}: {n * rate / sum(mixture.rates) / len(source):.3g}"
              for source, rate in zip(mixture.sources, mixture.rates, strict=True)
              if isinstance(source, Records)]  # the toy world is endless, so it has no epochs
    packs = plural(config.steps * config.batch, "pack")
    examples = f"about {plural(n, 'example')} in {plural(config.steps, 'step')}"
    return ", ".join([f"data: {packs}", examples, *epochs[:3]])


def commit():
    """-> the commit of this code, with + if files were changed; 'unknown' without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parents[1], encoding="utf-8",
                                       stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device):
    """-> the name of the GPU, or the number of cores and the name of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    names = re.findall(r"model name\s*: *(.*)", text)
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


# {pattern of an error of torch: sentence}, for errors with a cause outside of the code
CAUSES = {
    r"out of memory|can't allocate memory": "out of memory; use a smaller --micro-batch or "
    "--data.max_tokens, or a larger --cp; python -m tools.memory computes the memory of a step",
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed out|Broken pipe|communicator was aborted|"
    r"ncclRemoteError|setting up NCCL|got 0 bytes|Connection was likely closed|timeout after":
    "another process has ended or hangs",
    r"DataLoader worker \(pid":
    "a process of --workers has ended; if the machine lacks memory, use fewer --workers",
}


def end(status, error):
    """Ends the process and prints one sentence on stderr. An error of all ranks is printed once per
    machine. An error of one rank is printed by this rank."""
    alone = isinstance(error, (RankError, RankDataError, Unreadable, OSError))
    joined = dist.is_initialized()
    sentence = str(error) or type(error).__name__
    if alone and joined:
        sentence = f"rank {dist.get_rank()}: {sentence}"
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        lines = "\n".join(f"train.py: {visible(line)}" for line in sentence.splitlines())
        if joined:
            lines = f"\n{lines}"  # below an unfinished progress bar
        print(lines, file=sys.stderr, flush=True)
    if joined:
        os._exit(status)  # leaving the process group would wait for the other processes
    raise SystemExit(status) from None


def end_if_explained(error):
    """Ends this rank with a sentence if the error of torch matches one of CAUSES."""
    for pattern, sentence in CAUSES.items():
        if re.search(pattern, str(error)):
            end(1, RankError(f"{sentence}: {str(error).splitlines()[0]}"))
