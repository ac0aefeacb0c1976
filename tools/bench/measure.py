"""What every benchmark needs: clocks, ratios with their range, the memory of a process, and
measurements in a process of their own."""

import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]


def check_device(device):
    """Raises ValueError with one sentence if torch cannot use this device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0].split(". ")[0]
        raise ValueError(f"--device {device}: {reason}") from None


def clock(device):
    """Seconds of a monotonic clock, read after the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def median_seconds(run, device, rounds):
    """Median seconds of run() over the rounds, after one call that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        start = clock(device)
        run()
        seconds.append(clock(device) - start)
    return statistics.median(seconds[1:])


def spread(ratios):
    """Ratios, one per round -> {"median", "min", "max"}, as the JSON line reports them."""
    ratios = list(ratios)
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def in_turn(contestants, round_number):
    """The contestants in their order, reversed in every second round, so that other load on the
    machine and the caches of the previous run meet all of them."""
    contestants = list(contestants)
    return contestants[::-1] if round_number % 2 else contestants


def process_memory(pid, key):
    """MiB of a process as Linux counts them: VmRSS is the present, VmHWM the highest value."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def child_command(module, function, arguments):
    """The command of a new Python process that calls module.function(*arguments) and prints the
    result as a line of JSON. The arguments must be fit for JSON. Run it in REPOSITORY."""
    code = (
        f"import json, sys; from {module} import {function}; "
        f"print(json.dumps({function}(*json.loads(sys.argv[1]))))"
    )
    return [sys.executable, "-c", code, json.dumps(arguments)]


def last_line(text, default):
    """The last line of a child's stderr, which names the exception."""
    lines = text.splitlines()
    return lines[-1] if lines else default
