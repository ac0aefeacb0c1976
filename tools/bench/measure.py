"""Functions that all benchmarks share: clock, rounds and ratios."""

import statistics
import time

import torch


def clock(device):
    """-> seconds of a monotonic clock, read after the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def spread(ratios):
    """Ratios, one per round -> {"median", "min", "max"}."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def relative_error(found, expected):
    """-> the largest difference of two tensors, divided by the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def run_rounds(runs, rounds):
    """{key: function} -> [{key: its result} for each round]. Every second round runs in reverse
    order, so that background load and caches affect all functions equally."""
    results = []
    for k in range(rounds):
        keys = list(runs)[::-1] if k % 2 else list(runs)
        results.append({key: runs[key]() for key in keys})
    return results
