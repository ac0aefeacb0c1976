"""What every benchmark uses: clocks, rounds, ratios and tables."""

import statistics
import time

import torch

from weights.files import explained


def check_device(device):
    """ValueError if torch cannot use this device."""
    with explained(f"--device {device}"):
        torch.zeros(1, device=device).item()


def clock(device):
    """Seconds of a monotonic clock, read after the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def spread(ratios):
    """[ratio, one per round] -> {"median", "min", "max"}, as the JSON line reports them."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def run_rounds(runs, rounds):
    """{key: function} -> [{key: its result} for each round]. Every second round goes in
    reverse order, so that background load and caches affect all equally."""
    results = []
    for k in range(rounds):
        keys = list(runs)[::-1] if k % 2 else list(runs)
        results.append({key: runs[key]() for key in keys})
    return results


def show(value):
    """A cell of a table: floats with four digits, a spread as its median and range."""
    if isinstance(value, dict):
        return "{median:.3g} ({min:.3g}-{max:.3g})".format(**value)
    if isinstance(value, tuple):
        return "-".join(map(show, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def print_table(title, rows):
    """Prints {label: {column: value}}, with the same columns in all rows."""
    lines = [[title, *next(iter(rows.values()))]]
    lines += [[label, *map(show, row.values())] for label, row in rows.items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([label.ljust(widths[0]), *aligned]), flush=True)
