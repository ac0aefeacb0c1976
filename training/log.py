"""What a run writes about itself as it goes: log.jsonl, skips.jsonl, batches that were not finite.

in    the numbers of a step, the records that were found bad in it
out   files that readers, tools.view and the rest of an interrupted run go by
"""

import dataclasses
import json
import os
import platform
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import torch


class RunLog:
    """log.jsonl, a line per step after one with the config, and skips.jsonl; the first rank writes, the others do not.

    head: that first line, of a run that begins; goes_on: the step after which an interrupted one goes on. What a kill left unfinished
    is cut off, and of a step that the log then has twice, the later line counts.
    """

    def __init__(self, out, writes, head, goes_on=None):
        self.loss, self.told = None, {b["draw"] for b in read_skips(out)} if goes_on is not None else set()
        if writes and goes_on is None:
            (out / "config.json").write_text(json.dumps(head, indent=1))
            (out / "skips.jsonl").unlink(missing_ok=True)
        elif writes:
            drop_partial_line(out / "log.jsonl")
            drop_partial_line(out / "skips.jsonl")
            before = [line for line in read_log(out / "log.jsonl") if "lr" in line and line["step"] == goes_on]
            self.loss = before[-1]["loss"] if before else None
        self.log = open(out / "log.jsonl" if writes else os.devnull, "w" if goes_on is None else "a", buffering=1)
        self.skips = out / "skips.jsonl" if writes else Path(os.devnull)
        if goes_on is None:
            self.log.write(json.dumps(head) + "\n")

    def step(self, line, bad):
        """A step's line, and what was found bad in it: [{"draw":, "id":, "where":, "reason":}, ..]; of a draw once, whoever resumes."""
        self.log.write(json.dumps(line) + "\n")
        self.loss = line["loss"]
        new = [b for b in sorted(bad, key=lambda b: b["draw"]) if b["draw"] not in self.told]
        if new:
            with open(self.skips, "a") as skips:
                skips.writelines(json.dumps({"step": line["step"], **b}) + "\n" for b in new)

    def scores(self, number, scores, **more):
        self.log.write(json.dumps({"step": number, "eval": scores, **more}) + "\n")


def drop_partial_line(path):
    """Cuts off a last line that a kill left unfinished: what is appended stands on lines of its own."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_log(path):
    """The lines of a file of the run as dicts, none where there is no file; what a kill cut off, or a disk damaged, is passed over."""
    found = []
    for row in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(row)
        except ValueError:
            continue
        found += [line] if isinstance(line, dict) else []
    return found


def read_skips(out):
    """What earlier parts of the run found bad while decoding: [{"draw":, "reason":, ..}, ..]; of a cut last line it is found again."""
    return read_log(out / "skips.jsonl")


def save_nonfinite_batches(out, number, batches, rank):
    """Leaves batches whose loss is not finite in out, as arrays."""
    for k, batch in enumerate(batches):
        arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if torch.is_tensor(getattr(batch, f.name))}
        np.savez(out / f"nonfinite-step-{number}-rank-{rank}-{k}.npz", ids=np.array(batch.ids), **{n: a.cpu() for n, a in arrays.items()})


def dropped_by(counted):
    """{"source: reason": n} -> the fields of the log: by reason, and by source and reason."""
    by_reason, by_source = Counter(), {}
    for key, n in counted.items():
        source, _, reason = key.rpartition(": ")
        by_reason[reason] += n
        by_source.setdefault(source, {})[reason] = n
    return {"dropped": dict(by_reason), "dropped_by_source": by_source}


def commit():
    """The commit of the code that runs, with + if files differ from it; 'unknown' outside a checkout."""
    here = Path(__file__).parents[1]

    def git(*words):
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device):
    """The name of a GPU, or of the processor and how many cores it has."""
    if torch.device(device).type == "xpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")             # of Linux
    names = re.findall(r"model name\s*: *(.*)", info.read_text()) if info.is_file() else []
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"
