"""Proves with equal logs that a change of structure changes nothing.

    python -m tests.equal_runs run FOLDER          # on the commit before, and on the one after
    python -m tests.equal_runs compare FOLDER FOLDER [FIELD ..]

Both commits need this file, and the same machine with the same number of threads. `compare` reads
the steps and scores of each run. All digits must be equal, except in the fields that are named
after the folders, and in `seconds`. Together the runs use all stages, ranks that share rows, ranks
of unequal work, workers, accumulation, records that cannot be decoded, a kill, and adapters.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from tests.training import processes

TOY = ["--tiny", "--init=toy", "--steps=20", "--deterministic", "--eval_images=2"]
OWN = ["--stage=1", "--tiny", "--steps=12", "--deterministic", "--save-every=2",
       "--keep=0", "--workers=2", "--batch=4", "--micro-batch=2"]
RUNS = {  # name: (flags, number of ranks)
    "stage1": (["--stage=1", *TOY], 0),
    "stage2": (["--stage=2", *TOY], 0),
    "stage3": (["--stage=3", *TOY], 0),
    "shared rows": (["--stage=3", *TOY, "--cp=2"], 2),
    "adapters": (["--stage=2", *TOY, "--lora=4"], 0),
    "unequal ranks": (["--stage=1", *TOY, "--batch=4", "--data", "{records}"], 2),
    "unreadable": ([*OWN, "--data", "{records}"], 0),
    "killed": ([*OWN, "--data", "{records}"], 0),
}


def write_records(folder):
    """-> the path of twelve records with images, of which three are truncated."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(12):
        path = folder / f"{i}.png"
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(path)
        text = "".join(rng.choice(list("abc "), int(rng.integers(2, 40))))
        lines.append(json.dumps({"image": path.name,
                                 "annotations": [{"type": "caption", "text": text}]}))
        if i in (2, 5, 7):
            path.write_bytes(path.read_bytes()[:3000])
    (folder / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "records.jsonl"


def run(folder):
    folder.mkdir(parents=True)
    records = write_records(folder)
    for name, (flags, ranks) in RUNS.items():
        out = folder / name
        flags = [flag.format(records=records) for flag in flags]
        process = processes.start(out, *flags, ranks=ranks)
        if name == "killed":
            processes.wait_for(process, lambda out=out: processes.n_lines(out) > 7)
            process.kill()
            process.communicate()
            process = processes.start(out, *flags, "--resume")
        processes.stderr_of(process)
        print(name, flush=True)


def read(folder, name, ignored):
    """-> {step: line}. After a kill, the later line of a step counts."""
    lines = {}
    for text in (folder / name / "log.jsonl").read_text(encoding="utf-8").splitlines()[1:]:
        line = json.loads(text)
        lines[line["step"], "eval" in line] = {k: v for k, v in line.items() if k not in ignored}
    return lines


def compare(before, after, *ignored):
    ignored = {"seconds", *ignored}
    all_equal = True
    for name in RUNS:
        found = [read(folder, name, ignored) for folder in (before, after)]
        is_equal = found[0] == found[1]
        all_equal = all_equal and is_equal
        print(f"{name}: {len(found[1])} lines, {'equal' if is_equal else 'DIFFERENT'}")
    all_equal = all_equal and read(after, "killed", ignored) == read(after, "unreadable", ignored)
    print("killed equals unreadable, and all is equal" if all_equal else "not equal")
    return 0 if all_equal else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    what, *folders = sys.argv[1:]
    if what == "run":
        run(Path(folders[0]))
    else:
        sys.exit(compare(*map(Path, folders[:2]), *folders[2:]))
