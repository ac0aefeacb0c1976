"""Checks and measures a GPU, and writes one JSON file and a table.

    python -m tools.gpu --out gpu                         # one CUDA GPU of 80 GB, ten minutes
    python -m tools.gpu --device cpu --small --out gpu    # the toy, in seconds: tests this file

A part that fails becomes a line of the table with its reason, and the other parts still run; the
exit status is 1. MFU divides the FLOPs of tools/bench/flops.py by the FLOP/s of a large matrix
product on this device, or by --peak. Ai2 measured 14.1 % for its own code in stage 1 of the 4B on
B300, and 19.4 % after tuning.
"""

import argparse
import gc
import json
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

import attention
import data
import model as models
import packing
import parallel
import train
from records.errors import warn
from tools import memory
from tools.bench import attend
from tools.bench.flops import batch_work, flops
from tools.bench.generate import our_answer, prompts, time_answer
from tools.bench.measure import check_device, clock
from tools.bench.step import matmul_peak
from tools.bench.step_cases import Plain, plain_example, stream_case
from training.config import parse
from training.log import commit, hardware
from training.setup import apply_recipe

TINY = replace(models.PRESETS["toy"], n_layer=2)
STEPS = {                            # the flags of train.py
    "stage 1, all parts, rows of 2,560":
        "--stage 1 --preset 4b --micro-batch 1 --data.max_tokens=2560",
    "stage 1, connector and decoder, rows of 2,560":
        "--stage 1 --preset 4b --micro-batch 1 --data.max_tokens=2560 --train connector,llm",
    "stage 2, connector and decoder, rows of 16,384":
        "--stage 2 --preset 4b --micro-batch 1 --train connector,llm"}
SMALL_STEPS = {
    "stage 1, toy": "--stage 1 --tiny --micro-batch 1 --data.max_tokens=512",
    "stage 2, toy": "--stage 2 --tiny --micro-batch 1"}

# --------------------------------------------------------------------------------------------------
# checks: the largest difference over the largest value, and how much it may be


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def check_attention(device, dtype):
    """Forward and gradients of attend under packed_mask, against SDPA under the dense mask."""
    (row,) = attend.rows(1024, 1)
    row = row.to(device)
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for heads in (8, 2, 2):
        x = torch.randn(1, 1024, heads, 64, generator=generator)
        inputs.append(x.to(device, dtype).requires_grad_())
    found = []
    for mask in (attention.packed_mask, attention.allow):
        out = attention.attend(*inputs, mask(row.visible_until, row.bidir))
        gradients = torch.autograd.grad(out.square().sum(), inputs)
        found.append([x.detach().float() for x in (out, *gradients)])
    return max(map(relative, *found))


def loss_and_gradients(model, rows, device, dtype=torch.float32):
    """-> loss (1,), all gradients in one vector, both float32."""
    longest = max(sum(len(x.tokens) for x in row) for row in rows)
    batch = packing.collate(rows, longest, TINY.vision, 2).to(device)
    model.zero_grad()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = (batch.weights * model(batch)[0]).sum()
    loss.backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.detach()[None], torch.cat(gradients)


def run_checks(device, compiles):
    torch.manual_seed(0)
    model = models.Molmo2(TINY).init_weights().to(device).train()
    rng = np.random.default_rng(0)
    examples = [plain_example(TINY, rng, Plain(60, (1, 1))), plain_example(TINY, rng, Plain(90))]
    expected = loss_and_gradients(model, [examples], device)

    def check_model(rows, dtype=torch.float32):
        return max(map(relative, loss_and_gradients(model, rows, device, dtype), expected))

    def check_compiled():
        model.compile_blocks()
        return check_model([examples])

    cases = {                        # a GPU may round products of float32
        "attention against a dense mask, float32": (
            lambda: check_attention(device, torch.float32), 0.01),
        "attention against a dense mask, bfloat16": (
            lambda: check_attention(device, torch.bfloat16), 0.05),
        "bfloat16 against float32": (lambda: check_model([examples], torch.bfloat16), 0.1),
        "a row against each example alone": (lambda: check_model([[x] for x in examples]), 0.01)}
    if compiles:
        cases["compiled against plain"] = (check_compiled, 0.01)
    results = {}
    for name, (check, limit) in cases.items():
        with reported(results, name):
            off = check()
            results[name] = {"off": off, "limit": limit, "ok": off <= limit}
    return results


@contextmanager
def reported(results, name):
    """A failure becomes the result of this name; memory is given back."""
    warn(f"{name} ..")
    try:
        yield
    except Exception as e:           # the other parts still count
        reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        results[name] = {"error": reason[:300], "ok": False}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------
# measurements


def measure_step(flags, device, compiles, peak, rounds):
    """Optimizer steps of one micro-batch: the memory of the largest batch beside what tools.memory
    counts, the seconds of rows of training."""
    _, config = parse(flags.split())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = replace(config, device=str(device), compile=compiles)
    found = {"GiB counted": max(memory.count(config, dtype).peaks.values()) / memory.GIB}
    torch.manual_seed(0)
    with device:
        model = models.Molmo2(config.model).init_weights()
    run = SimpleNamespace(config=config, ranks=parallel.Ranks(), device=device, dtype=dtype)
    train.place(run, apply_recipe(model, config).train())
    groups, optimizer = train.build_optimizer(run, model)

    def step(rows):
        batch, _ = train.forward_backward(run, model, rows)
        train.divide_and_clip(run, groups, 1.0)
        optimizer.step()             # with a learning rate of 0
        return batch

    largest = data.largest_example(config.data, config.pack_crops, config.model.n_vocab)
    step([[largest]])
    if device.type == "cuda":        # the second step finds gradients and optimizer state
        torch.cuda.reset_peak_memory_stats()
        step([[largest]])
        found["GiB allocated"] = torch.cuda.max_memory_allocated() / memory.GIB
        found["GiB reserved"] = torch.cuda.max_memory_reserved() / memory.GIB
    optimizer.zero_grad()
    case = stream_case(config.model, Namespace(
        n=2, stage=config.stage, tokens=config.data.max_tokens, crops=config.pack_crops,
        frames=config.data.max_frames))
    for row in case.rows:            # compiles what their shapes need
        step([row])
    compiled = torch._dynamo.utils.counters["frames"]["ok"]
    seconds, rates = [], []
    for k in range(rounds):
        start = clock(device)
        batch = step([case.rows[k % 2]])
        seconds.append(clock(device) - start)
        work = batch_work(model, batch)
        rates.append(flops(model, work, config.train, config.freeze_embedding) / seconds[-1])
    compiled = torch._dynamo.utils.counters["frames"]["ok"] - compiled
    return found | {"seconds": median(seconds), "MFU": median(rates) / peak,
                    "compiled after warm-up": compiled}


def measure_attention(tokens, device, small):
    model = TINY if small else models.PRESETS["4b"]
    case = attend.bench_row_length(tokens, Namespace(
        rows=1, rounds=3, branches=0, device=device.type, heads=model.n_head,
        kv_heads=model.n_kv_head, dim=model.head_dim,
        dtype="bfloat16" if device.type == "cuda" else "float32"))
    ours = case["ways"]["ours"]
    return {"ms forward and backward": 1e3 * ours["both"],
            "times dense SDPA": ours["dense_over"]["median"]}


def measure_answer(device, small):
    config = TINY if small else models.PRESETS["4b"]
    torch.manual_seed(0)
    with device:
        model = models.Molmo2(config).init_weights().eval()
    if device.type == "cuda":
        model.to(torch.bfloat16)
    found = {}
    for name, prompt in prompts(config).items():
        answer = our_answer(model, prompt, 8 if small else 64)
        time_answer(answer)          # warms up
        timing = time_answer(answer)
        found[f"{name}: s to the first token"] = timing.prefill
        found[f"{name}: ms per token"] = 1e3 * timing.decode
    return found


def run_measurements(small, device, compiles, peak):
    results = {}
    for name, flags in (SMALL_STEPS if small else STEPS).items():
        with reported(results, name):
            results[name] = measure_step(flags, device, compiles, peak, 2 if small else 6)
    for tokens in ([512] if small else [16_384, 36_864]):
        name = f"attention, a row of {tokens:,}"
        with reported(results, name):
            results[name] = measure_attention(tokens, device, small)
    with reported(results, "answers"):
        results["answers"] = measure_answer(device, small)
    return results


# --------------------------------------------------------------------------------------------------
# output


def markdown(found):
    """The results as a table for RESULTS.md."""
    lines = [f"{found['device']}, torch {found['torch']}, commit {found['commit']}, "
             f"{found['peak'] / 1e12:.3g} TFLOP/s of a matrix product", "",
             "| what | result |", "|---|---|"]
    for name, result in {**found["checks"], **found["measurements"]}.items():
        cells = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                 for key, value in result.items()]
        lines.append(f"| {name} | {'; '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description="Check and measure everything on a GPU.")
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--small", action="store_true", help="the toy in place of the 4B")
    parser.add_argument("--peak", type=float, help="TFLOP/s that 100 %% MFU means")
    parser.add_argument("--out", default="gpu", help="name of a JSON file, and of the table's")
    args = parser.parse_args(argv)
    try:
        check_device(args.device)
    except ValueError as e:
        warn(str(e))
        raise SystemExit(2) from None
    device = torch.device(args.device)
    torch.set_flush_denormal(True)                       # as in train.py
    compiles = device.type == "cuda"                     # on a CPU it would take minutes
    peak = 1e12 * args.peak if args.peak else matmul_peak(
        device, "bfloat16" if compiles else "float32")
    found = {"device": hardware(device), "torch": torch.__version__, "commit": commit(),
             "small": args.small, "peak": peak, "checks": run_checks(device, compiles),
             "measurements": run_measurements(args.small, device, compiles, peak)}
    files = {"json": json.dumps(found, indent=1) + "\n", "md": markdown(found)}
    for kind, text in files.items():
        Path(f"{args.out}.{kind}").write_text(text)
    print(files["md"], end="")
    parts = [*found["checks"].values(), *found["measurements"].values()]
    raise SystemExit(0 if all(result.get("ok", True) for result in parts) else 1)


if __name__ == "__main__":
    main()
