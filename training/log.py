"""The numbers of a step, and what a run writes about itself.

    rows and losses of each micro-batch  --StepStats-->  sums over all ranks  --RunLog-->  log.jsonl

skips.jsonl lists the records that were found bad while decoding.
"""

import dataclasses
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

import attention
from records.errors import Unreadable, plural, warn
from records.reader import Records
from training.checkpoint import list_steps
from training.config import RankError, RunError
from training.planner import add_counts
from training.ranks import all_reduce_sums


def count_rows(rows):
    """{name: number} of what is in rows of data.Example."""
    examples = [x for row in rows for x in row]
    return {
        "packs": len(rows),
        "examples": len(examples),
        "branches": sum(x.n_branches for x in examples if not x.unreadable),
        "tokens": sum(len(x.tokens) for x in examples),
        "crops": sum(0 if x.image_id is None else len(x.image_id) for x in examples),
        "visual_tokens": sum(len(x.pool_dst) for x in examples),
        "attention_pairs": sum(count_pairs(x) for x in examples),
        "loss_tokens": sum(int((x.weights > 0).sum()) for x in examples),
        "unreadable_tokens": sum(len(x.tokens) for x in examples if x.unreadable),
        "branches_dropped": sum(x.dropped_branches for x in examples),
        "tokens_dropped": sum(x.dropped_tokens for x in examples),
    }


def count_pairs(example):
    """How many query-key pairs attention computes for a data.Example."""
    fields = example.visible_until, example.bidir
    return attention.allowed_pairs(*map(torch.from_numpy, fields))


class StepStats:
    """Sums over the micro-batches of a step: counts, weighted nll and weight by source.

    Losses are read from the device at the end of the step, so that no GPU is waited for.
    nonfinite: ids of the records of micro-batches whose loss is NaN or infinite.
    """

    def __init__(self, sources, cp):
        self.sources = sources
        self.cp = cp
        self.counts = Counter()
        self.losses = []  # of each micro-batch: ([(id, source), ..], nll of each example)
        self.sums = dict.fromkeys(product(("nll", "weight"), sources), 0.0)
        self.nonfinite = []
        self.margins = []  # of the preference pairs of each micro-batch

    def add(self, rows, batch, nll, margins=()):
        """nll (B,T): of each token of a Batch of these rows; weighted, summed by example."""
        self.margins.append(margins)
        examples = [x for row in rows for x in row]
        sums = torch.zeros(len(examples) + 1, device=nll.device)  # the last is padding
        sums.index_add_(0, batch.example.flatten(), (batch.weights * nll.detach()).flatten())
        self.losses.append(([(x.id, x.source) for x in examples], sums))
        self.counts.update(count_rows(rows))
        for x in examples:
            self.sums["weight", x.source] += float(x.weights.sum(dtype="float64")) / self.cp

    def all_reduce(self):
        """Sets counts, weight, loss and nll_by_source, summed over all ranks."""
        for examples, sums in self.losses:
            *sums, of_padding = sums.tolist()
            if not math.isfinite(sum(sums) + of_padding):
                self.nonfinite += [name for name, _ in examples]
            for (_, source), value in zip(examples, sums, strict=True):
                self.sums["nll", source] += value
        margins = [margin for part in self.margins for margin in map(float, part)]
        of_pairs = {"preferences": len(margins), "margin": sum(margins, 0.0),
                    "preferred": sum(margin > 0 for margin in margins)}
        sums = all_reduce_sums({**self.counts, **self.sums, **of_pairs})
        n = sums["preferences"]
        # the ranks that share a row have all counted it
        self.counts = {name: round(sums[name] / self.cp) for name in self.counts}
        self.preferences = {}
        if n:
            self.preferences = {"preferences": round(n / self.cp), "margin": sums["margin"] / n,
                                "preferred": sums["preferred"] / n}
        nll = {name: sums["nll", name] for name in self.sources}
        weights = {name: sums["weight", name] for name in self.sources}
        self.total_weight = sum(weights.values())
        self.weight = self.total_weight or 1.0  # without any loss nothing is learned
        self.loss = sum(nll.values()) / self.weight
        self.nll_by_source = {name: nll[name] / w for name, w in weights.items() if w > 0}


def stop_nonfinite(run, step, plan, stats, norms):
    """RunError that names the records of a step whose loss or gradient is not finite."""
    ids = dict.fromkeys(name for ids in run.ranks.all_gather(stats.nonfinite) for name in ids)
    raise RunError(f"step {step}: loss {stats.loss}, gradient norm {math.hypot(*norms.values())}; "
                   f"records: {', '.join(list(ids or plan.ids)[:20])}; to see them: python -m "
                   f"tools.view --run {run.out} --step {step} --out step-{step}.html")


def make_line(config, step, plan, stats, norms, rates, unreadable):
    """A step's line of log.jsonl. norms, rates: {group: number}; unreadable: of all ranks."""
    return {
        "step": step, "loss": stats.loss, **stats.counts, "weight": stats.total_weight,
        "nll_by_source": stats.nll_by_source, "grad_norm": math.hypot(*norms.values()),
        "grad_norms": norms, "lr": rates, **stats.preferences,
        "fill_tokens": stats.counts["tokens"] / (config.batch * config.data.max_tokens),
        "fill_crops": stats.counts["crops"] / (config.batch * config.pack_crops),
        "skipped": add_counts(plan.skipped, unreadable["counts"]),
        "ids": plan.hash,
    }


class RunLog:
    """Writes log.jsonl and skips.jsonl; the first rank does.

    head: the first line of a run that begins. One that is resumed appends, after it has cut off a
    line that a kill left unfinished.
    """

    def __init__(self, run, head):
        self.writes = run.ranks.first
        if not self.writes:
            return
        log = run.out / "log.jsonl"
        self.skips = run.out / "skips.jsonl"
        if not run.resume_from.step:
            (run.out / "config.json").write_text(json.dumps(head, indent=1), encoding="utf-8")
            log.write_text(json.dumps(head) + "\n", encoding="utf-8")
            self.skips.unlink(missing_ok=True)
        for path in (log, self.skips):
            if path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.file = open(log, "a", buffering=1, encoding="utf-8")

    def step(self, line, unreadable):
        """Logs a step, and the records that were found unreadable in it:
        [{"index": .., "id": .., "where": .., "reason": ..}, ..]."""
        self.write(line)
        for skip in sorted(unreadable, key=lambda skip: skip["index"]) if self.writes else ():
            with open(self.skips, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": line["step"], **skip}) + "\n")

    def write(self, line):
        if self.writes:
            self.file.write(json.dumps(line) + "\n")


OLD_NAMES = {"masked_tokens": "unreadable_tokens", "pairs": "attention_pairs", "dropped": "skipped"}


def read_log(path):
    """The lines of a .jsonl file that are dicts, and whose "step" is a number, without one cut
    short; [] without a file. Fields of runs of older versions get the names of today."""
    lines = []
    for row in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(row))
    return [{OLD_NAMES.get(name, name): value for name, value in line.items()}
            for line in lines if isinstance(line, dict) and isinstance(line.get("step", 0), int)]


def read_steps(lines):
    """Lines of log.jsonl -> those of steps in order, of a step that occurs twice the later."""
    by_step = {line["step"]: line for line in lines if {"step", "loss", "lr"} <= line.keys()}
    return [by_step[step] for step in sorted(by_step)]


def make_head(run, args, model):
    """-> the first line of log.jsonl; says on stderr what the run is about to do."""
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
             f"parameters: {sizes}; {', '.join(config.train)} are trained\n"
             f"steps: {n_left} of {config.steps}; a batch: {plural(config.batch, 'row')} of "
             f"{config.data.max_tokens} tokens; writes to {run.out}")
        if n_left:
            warn(describe_length(run))
    return head


def describe_length(run):
    """How much data the steps of a run are, by the first step; epochs of three sources."""
    config = run.config
    mixture = run.loader.mixture
    n = config.steps * run.loader.examples_per_step
    epochs = [f"epochs of {source.name}: {n * rate / sum(mixture.rates) / len(source):.3g}"
              for source, rate in zip(mixture.sources, mixture.rates, strict=True)
              if isinstance(source, Records)]  # the toy world has no end
    packs = plural(config.steps * config.batch, "pack")
    examples = f"about {plural(n, 'example')} in {plural(config.steps, 'step')}"
    return ", ".join([f"data: {packs}", examples, *epochs[:3]])


def commit():
    """The commit of this code, with + if files differ from it; 'unknown' without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parents[1], text=True,
                                       stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device):
    """The name of a GPU, or of the processor and how many cores it has."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    names = re.findall(r"model name\s*: *(.*)", text)
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


# {pattern: sentence} of torch's errors that have a cause outside of the code
CAUSES = {
    r"out of memory|can't allocate memory": "out of memory; use a smaller --micro-batch or "
    "--data.max_tokens, or a larger --cp; python -m tools.memory counts what a step takes",
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed out|Broken pipe|communicator was aborted|"
    r"ncclRemoteError|setting up NCCL|got 0 bytes|Connection was likely closed|timeout after|"
    r"DataLoader worker \(pid": "another process has ended or hangs",
}


def end(status, error):
    """Ends the process with one sentence on stderr. An error of all ranks is printed once per
    machine, an error of one rank by that rank."""
    alone = isinstance(error, (RankError, Unreadable, OSError))
    joined = dist.is_initialized()
    sentence = str(error) or type(error).__name__
    if alone and joined:
        sentence = f"rank {dist.get_rank()}: {sentence}"
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        lines = "\n".join(f"train.py: {line}" for line in sentence.splitlines())
        if joined:
            lines = f"\n{lines}"  # below an unfinished progress bar
        print(lines, file=sys.stderr, flush=True)
    if joined:
        os._exit(status)  # to leave the process group would wait for the others
    raise SystemExit(status) from None


def end_if_explained(error):
    """Ends this rank if the error of torch is one of CAUSES."""
    for pattern, sentence in CAUSES.items():
        if re.search(pattern, str(error)):
            end(1, RankError(f"{sentence}: {str(error).splitlines()[0]}"))


def how_to_go_on(run):
    """What an interrupted run has kept, and the command that goes on. run: None before anything has
    been written; then the same command can be repeated."""
    words = list(sys.argv)
    kept = "nothing has changed; start again with"
    if run:
        words = [word for word in words if word not in ("--overwrite", "--resume")]
        may_resume = bool(list_steps(run.out))
        if (run.out / "model").exists() and not may_resume:
            return f"the trained weights are in {run.out}/model, and were not evaluated"
        if not {"--resume-anyway", "--resume_anyway"} & {*words}:
            words.append("--resume")
        kept = "continue with" if may_resume else "nothing was kept; start again with"
        if not may_resume and (run.out / "stage0.jsonl").exists():
            kept = "nothing was kept, stage 0 included; start again with"
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launch = "python"
    if os.environ.get("WORLD_SIZE", "1") != local:
        launch = "torchrun on every node as before, with"
    elif local != "1":
        launch = f"torchrun --standalone --nproc-per-node {local}"
    return f"{kept}: {launch} {shlex.join(words)}"
