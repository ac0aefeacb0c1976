"""The first hour on a GPU: checks, then measurements, as one JSON file and a table.

    python -m tools.gpu --out gpu                      # one CUDA GPU of 80 GB or more, ten minutes
    python -m tools.gpu --device cpu --small --out gpu # the same on the toy, in seconds: no numbers
                                                       # to keep, but nothing here is broken

Checks: attention against the formula, compiled blocks against plain ones, bfloat16 against float32,
examples in one row against each alone. Measurements: a step of the 4B in stages 1 and 2 with its
memory beside what tools.memory counts, attention beside dense SDPA, tokens of an answer.

A part that fails is a line of the table with its reason, and the others run all the same. Exit
status 1 where a check failed. MFU is by the FLOPs of tools/bench/flops.py and the FLOP/s of a large
matrix product on this device; --peak is another one, of the data sheet. What Ai2 measured of its
own code for stage 1 of the 4B on B300: 14.1 %, tuned 19.4 %.
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
from tools.bench import attend
from tools.bench.flops import batch_work, flops
from tools.bench.generate import our_answer, prompts, time_answer
from tools.bench.measure import check_device, clock
from tools.bench.step import matmul_peak
from tools.bench.step_cases import Plain, plain_example, stream_case
from tools.memory.shape import largest_shape
from tools.memory.step import training
from training.config import parse
from training.loader import first_line
from training.log import commit, hardware
from training.setup import apply_recipe

GIB = 2**30
TINY = replace(models.PRESETS["toy"], n_layer=2)
STEPS = {                            # the flags of train.py
    "stage 1, all parts, rows of 2,560":
        ["--stage", "1", "--preset", "4b", "--micro-batch", "1", "--data.max_tokens=2560"],
    "stage 1, connector and decoder, rows of 2,560":
        ["--stage", "1", "--preset", "4b", "--micro-batch", "1", "--data.max_tokens=2560",
         "--train", "connector,llm"],
    "stage 2, connector and decoder, rows of 16,384":
        ["--stage", "2", "--preset", "4b", "--micro-batch", "1", "--train", "connector,llm"],
}
SMALL_STEPS = {
    "stage 1, toy": ["--stage", "1", "--tiny", "--micro-batch", "1", "--data.max_tokens=512"],
    "stage 2, toy": ["--stage", "2", "--tiny", "--micro-batch", "1"],
}

# --------------------------------------------------------------------------------------------------
# checks: {name: largest difference over the largest value}, and what it may be


def relative(found, expected):
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def check_attention(device, dtype):
    """Forward and gradients of attend under packed_mask, against SDPA under the formula."""
    (row,) = attend.rows(1024, 1)
    row = row.to(device)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1024, heads, 64, generator=generator).to(device, dtype)
               .requires_grad_() for heads in (8, 2, 2))
    found = []
    for mask in (attention.packed_mask(row.visible_until, row.bidir),
                 attention.allow(row.visible_until, row.bidir)):
        out = attention.attend(q, k, v, mask)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    return max(relative(a.float(), b.float()) for a, b in zip(*found, strict=True))


def tiny_model(device):
    torch.manual_seed(0)
    return models.Molmo2(TINY).init_weights().to(device).train()


def tiny_examples():
    rng = np.random.default_rng(0)
    return [plain_example(TINY, rng, Plain(60, (1, 1))), plain_example(TINY, rng, Plain(90))]


def loss_and_gradients(model, rows, device, dtype=torch.float32):
    longest = max(sum(len(x.tokens) for x in row) for row in rows)
    batch = packing.collate(rows, longest, TINY.vision, 2).to(device)
    model.zero_grad()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = (batch.weights * model(batch)[0]).sum()
    loss.backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.detach()[None], torch.cat(gradients)


def check_model(device, change):
    """A small model before and after a change: differences of its loss and gradients."""
    model = tiny_model(device)
    rows = [tiny_examples()]
    expected = loss_and_gradients(model, rows, device)
    found = change(model, rows)
    return max(relative(a, b) for a, b in zip(found, expected, strict=True))


def run_checks(device, compiles):
    def compiled(model, rows):
        model.compile_blocks()
        return loss_and_gradients(model, rows, device)

    def half(model, rows):
        return loss_and_gradients(model, rows, device, torch.bfloat16)

    def alone(model, rows):
        return loss_and_gradients(model, [[x] for x in rows[0]], device)

    cases = {                        # a GPU may round products of float32
        "attention against the formula, float32": (
            lambda: check_attention(device, torch.float32), 0.01),
        "attention against the formula, bfloat16": (
            lambda: check_attention(device, torch.bfloat16), 0.05),
        "bfloat16 against float32": (lambda: check_model(device, half), 0.1),
        "a row against each example alone": (lambda: check_model(device, alone), 0.01),
    }
    if compiles:
        cases["compiled against plain"] = (lambda: check_model(device, compiled), 0.01)
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
    except Exception as e:           # whatever a first run meets with; the other parts still count
        results[name] = {"error": f"{type(e).__name__}: {first_line(e)}"[:300],
                         "ok": False}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------
# measurements


def measure_step(flags, device, compiles, peak, rounds=5):
    """Optimizer steps of one micro-batch: of the largest batch for the memory, of rows of training
    for the seconds."""
    _, config = parse(flags)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = replace(config, device=str(device), compile=compiles)
    torch.manual_seed(0)
    with device:
        model = models.Molmo2(config.model).init_weights()
    run = SimpleNamespace(config=config, ranks=parallel.Ranks(), device=device, dtype=dtype)
    groups, optimizer = train.build_optimizer(run, apply_recipe(model, config).train())

    def step(rows):
        batch, _ = train.forward_backward(run, model, rows)
        train.divide_and_clip(run, groups, 1.0)
        optimizer.step()             # a learning rate of 0
        return batch

    largest = data.largest_example(config.data, config.pack_crops, config.model.n_vocab)
    step([[largest]])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step([[largest]])
    shape = largest_shape(config, 2 if dtype == torch.bfloat16 else 4)
    found = {"GiB counted": training(shape).total / GIB}
    if device.type == "cuda":
        found["GiB allocated"] = torch.cuda.max_memory_allocated() / GIB
        found["GiB reserved"] = torch.cuda.max_memory_reserved() / GIB
    del largest
    optimizer.zero_grad()
    case = stream_case(config.model, Namespace(
        n=2, stage=config.stage, tokens=config.data.max_tokens, crops=config.pack_crops,
        frames=config.data.max_frames))
    for row in case.rows:            # compiles what shapes need
        step([row])
    compiled = torch._dynamo.utils.counters["frames"]["ok"]
    seconds, work = [], []
    for k in range(rounds):
        start = clock(device)
        batch = step([case.rows[k % 2]])
        seconds.append(clock(device) - start)
        work.append(flops(model, batch_work(model, batch), config.train, config.freeze_embedding))
    rates = [w / s for w, s in zip(work, seconds, strict=True)]
    found |= {"seconds": median(seconds), "TFLOP/s": median(rates) / 1e12,
              "MFU": median(rates) / peak,
              "compiled after warm-up": torch._dynamo.utils.counters["frames"]["ok"] - compiled}
    return found


def measure_attention(tokens, device, small):
    heads = {"heads": 4, "kv_heads": 2, "dim": 32} if small else {
        "heads": 32, "kv_heads": 8, "dim": 128}
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    case = attend.bench_row_length(tokens, Namespace(
        rows=1, rounds=3, branches=0, device=device.type, dtype=dtype, **heads))
    ours = case["ways"]["ours"]
    return {"ms forward and backward": 1e3 * ours["both"],
            "times dense SDPA": ours["dense_over"]["median"]}


def measure_answer(device, small):
    config = TINY if small else models.PRESETS["4b"]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = models.Molmo2(config).init_weights().to(dtype).eval()
    found = {}
    for name, prompt in prompts(config).items():
        answer = our_answer(model, prompt, 8 if small else 64)
        time_answer(answer)          # warms up
        timing = time_answer(answer)
        found |= {f"{name}: s to the first token": timing.prefill,
                  f"{name}: ms per token": 1e3 * timing.decode}
    return found


def run_measurements(args, device, compiles, peak):
    results = {}
    for name, flags in (SMALL_STEPS if args.small else STEPS).items():
        with reported(results, name):
            results[name] = measure_step(flags, device, compiles, peak, 2 if args.small else 6)
    for tokens in ([512] if args.small else [16_384, 36_864]):
        name = f"attention, a row of {tokens:,}"
        with reported(results, name):
            results[name] = measure_attention(tokens, device, args.small)
    with reported(results, "answers"):
        results["answers"] = measure_answer(device, args.small)
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
        warn(f"tools.gpu: {e}")
        raise SystemExit(2) from None
    device = torch.device(args.device)
    torch.set_flush_denormal(True)                       # as in train.py
    compiles = device.type == "cuda"                     # on a CPU it would take minutes
    if args.peak:
        peak = args.peak * 1e12
    else:
        peak = matmul_peak(device, "bfloat16" if compiles else "float32")
    found = {"device": hardware(device), "torch": torch.__version__, "commit": commit(),
             "small": args.small, "peak": peak, "checks": run_checks(device, compiles),
             "measurements": run_measurements(args, device, compiles, peak)}
    text = markdown(found)
    for kind, content in {"json": json.dumps(found, indent=1) + "\n", "md": text}.items():
        Path(f"{args.out}.{kind}").write_text(content)
    print(text, end="")
    parts = [*found["checks"].values(), *found["measurements"].values()]
    raise SystemExit(0 if all(result.get("ok", True) for result in parts) else 1)


if __name__ == "__main__":
    main()
