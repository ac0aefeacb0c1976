"""Checks and measures a GPU, writes a JSON file and prints a table.

    python -m tools.gpu --device cpu --small

The example tests this file in seconds; without flags, a GPU of 80 GB takes ten minutes.
Compares bfloat16, packed rows, compiled blocks and attention with the plain model, then
measures. A part that fails becomes a line of the table with its reason, and the others
still run; the exit status is 1. For MFU see tools.bench step.
"""

import gc
import json
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

import model as models
import packing
import train
from records.errors import warn
from tools import memory
from tools.bench import attend
from tools.bench.flops import batch_work, flops
from tools.bench.generate import our_answer, prompts, time_answer
from tools.bench.measure import check_device, clock, relative_error
from tools.bench.step import matmul_peak
from tools.bench.step_cases import Plain, plain_example, stream_case
from tools.bench.stream import Recipe
from tools.command import make_parser, output_file, report_errors
from training.config import parse
from training.log import commit, hardware
from training.ranks import Ranks
from training.setup import apply_recipe, largest_example

TINY = replace(models.PRESETS["toy"], n_layer=2)
STEPS = {  # the flags of train.py
    "stage 1, all parts, rows of 2,560": "--stage 1 --preset 4b --micro-batch 1",
    "stage 1, connector and decoder, rows of 2,560":
        "--stage 1 --preset 4b --micro-batch 1 --train connector,llm",
    "stage 2, connector and decoder, rows of 16,384":
        "--stage 2 --preset 4b --micro-batch 1 --train connector,llm"}
SMALL_STEPS = {
    "stage 1, toy": "--stage 1 --tiny --micro-batch 1 --data.max_tokens=512",
    "stage 2, toy": "--stage 2 --tiny --micro-batch 1"}


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


def make_checks(device):
    """{name: function that makes a check}."""
    torch.manual_seed(0)
    model = models.Molmo2(TINY).init_weights().to(device).train()
    rng = np.random.default_rng(0)
    examples = [plain_example(TINY, rng, Plain(60, (1, 1))), plain_example(TINY, rng, Plain(90))]
    expected = loss_and_gradients(model, [examples], device)

    def compare(limit, rows=(examples,), dtype=torch.float32, compiled=False):
        if compiled:
            model.compile_blocks()
        found = loss_and_gradients(model, rows, device, dtype)
        off = max(map(relative_error, found, expected))
        return {"off": off, "limit": limit, "ok": off <= limit}

    # a GPU may round products of float32
    checks = {
        "bfloat16 against float32": partial(compare, 0.1, dtype=torch.bfloat16),
        "a row against each example alone": partial(compare, 0.01, [[x] for x in examples])}
    if device.type == "cuda":  # on a CPU compiling would take minutes
        checks["compiled against plain"] = partial(compare, 0.01, compiled=True)
    return checks


def measure_step(flags, device, peak, rounds):
    """Runs optimizer steps -> memory of the largest micro-batch, as tools.memory counts it
    and as it is; seconds and MFU of rows of training."""
    _, config = parse(flags.split())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = replace(config, device=str(device), compile=device.type == "cuda")
    found = {"GiB counted": max(memory.count(config, dtype).peaks.values()) / memory.GIB}
    torch.manual_seed(0)
    with device:
        model = models.Molmo2(config.model).init_weights()
    run = SimpleNamespace(config=config, ranks=Ranks(), device=device, dtype=dtype)
    train.place(run, apply_recipe(model, config).train())
    groups, optimizer = train.build_optimizer(run, model)

    def step(rows):
        batch, *_ = train.forward_backward(run, model, rows)
        train.divide_and_clip(run, groups, 1.0)
        optimizer.step()  # with a learning rate of 0
        return batch

    largest = largest_example(config.data, config.pack_crops, config.model.n_vocab)
    step([[largest]])
    # the second step finds gradients and optimizer state
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step([[largest]])
        found["GiB allocated"] = torch.cuda.max_memory_allocated() / memory.GIB
    optimizer.zero_grad()
    limits = Recipe(config.data.max_tokens, config.pack_crops, config.data.max_frames)
    case = stream_case(config.model, 2, config.stage, limits)
    for row in case.rows:  # compiles what their shapes need
        step([row])
    seconds = []
    rates = []
    for k in range(rounds):
        start = clock(device)
        batch = step([case.rows[k % 2]])
        seconds.append(clock(device) - start)
        work = batch_work(model, batch)
        rates.append(flops(model, work, config.train, config.freeze_embedding) / seconds[-1])
    return found | {"seconds": median(seconds), "MFU": median(rates) / peak}


def measure_attention(tokens, dtype, device, model):
    """Compares attention with SDPA under a dense mask, and times both."""
    args = Namespace(rows=1, rounds=3, device=device.type, dtype=dtype)
    case = attend.bench_row_length(tokens, args, model.n_head, model.n_kv_head, model.head_dim)
    ours = case["ways"]["ours"]
    return {"ms forward and backward": 1e3 * ours["both"],
            "times dense SDPA": ours["dense_over"]["median"]}


def measure_answer(device, config, n_tokens):
    torch.manual_seed(0)
    with device:
        model = models.Molmo2(config).init_weights().eval()
    if device.type == "cuda":
        model.to(torch.bfloat16)
    found = {}
    for name, prompt in prompts(config).items():
        answer = our_answer(model, prompt, n_tokens)
        time_answer(answer)  # warms up
        timing = time_answer(answer)
        found[f"{name}: s to the first token"] = timing.prefill
        found[f"{name}: ms per token"] = 1e3 * timing.decode
    return found


def make_measurements(device, small, peak):
    """{name: function that measures}."""
    model = TINY if small else models.PRESETS["4b"]
    parts = {}
    for name, flags in (SMALL_STEPS if small else STEPS).items():
        parts[name] = partial(measure_step, flags, device, peak, 2 if small else 6)
    lengths = {512: "float32"} if small else {
        1024: "float32", 16_384: "bfloat16", 36_864: "bfloat16"}
    for tokens, dtype in lengths.items():
        name = f"attention, a row of {tokens:,}, {dtype}"
        parts[name] = partial(measure_attention, tokens, dtype, device, model)
    parts["answers"] = partial(measure_answer, device, model, 8 if small else 64)
    return parts


def run_part(name, part):
    """-> the numbers of a part, or the reason why it failed. Gives its memory back."""
    warn(f"{name} ..")
    try:
        return part()
    except Exception as e:  # the other parts still count
        reason = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        return {"error": reason[:300], "ok": False}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def markdown(found):
    """The results as a table for RESULTS.md."""
    lines = [f"{found['device']}, torch {found['torch']}, commit {found['commit']}, "
             f"{found['peak'] / 1e12:.3g} TFLOP/s of a matrix product", "",
             "| what | result |", "|---|---|"]
    for name, result in found["results"].items():
        cells = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                 for key, value in result.items()]
        lines.append(f"| {name} | {'; '.join(cells)} |")
    return "\n".join(lines)


@report_errors
def main(argv=None):
    parser = make_parser("gpu", __doc__)
    parser.add_argument("--device", default="cuda", help="device to measure (default cuda)")
    parser.add_argument("--small", action="store_true", help="measure the toy, not the 4B")
    parser.add_argument("--out", type=output_file(".json", b'"torch": "'), default="gpu.json",
                        help="file to write (default gpu.json)")
    args = parser.parse_args(argv)
    check_device(args.device)
    device = torch.device(args.device)
    torch.set_flush_denormal(True)  # as in train.py
    peak = matmul_peak(device, "bfloat16" if device.type == "cuda" else "float32")
    parts = make_checks(device) | make_measurements(device, args.small, peak)
    results = {name: run_part(name, part) for name, part in parts.items()}
    found = {"device": hardware(device), "torch": torch.__version__, "commit": commit(),
             "small": args.small, "peak": peak, "results": results}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(markdown(found))
    sys.exit(0 if all(result.get("ok", True) for result in results.values()) else 1)


if __name__ == "__main__":
    main()
