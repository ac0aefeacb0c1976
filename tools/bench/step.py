"""Times a training step without the optimizer, compared with the Molmo2 of transformers.

    python -m tools.bench step --preset toy --cases image --dtypes float32 --rounds 1

Both implementations have the same weights and train on the same tokens of the same examples, with
random pixels and ids. Before timing, their float32 losses and two gradients must agree. On a GPU,
our blocks are compiled, as in training.

MFU is the FLOPs that a step needs (tools/bench/flops.py), divided by its seconds and by the
FLOP/s of a large matrix product.
"""

import statistics
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

import packing
from tools.bench import peers
from tools.bench.flops import batch_work, flops
from tools.bench.measure import clock, run_rounds, spread
from tools.bench.step_cases import CASES, make_case
from tools.command import positive, print_table, show

SIDES = ("ours", "reference")
# {our name: name in transformers} of the weights whose gradients are compared. The gradients of the
# first blocks are computed last, so an error in any block changes them.
WATCHED = {
    "blocks.0.attn.q.weight": "model.language_model.layers.0.self_attn.q_proj.weight",
    "vision.vit.blocks.0.q.weight": "model.vision_tower.layers.0.self_attn.q_proj.weight",
}


class StepResult(NamedTuple):
    seconds: float
    loss: float  # mean over all tokens with loss
    gradients: list  # gradients of the weights in WATCHED


def our_loss(model, config, row, case, device):
    """A row -> a function that computes the part of this row in the mean loss of the case."""
    batch = packing.collate([row], case.length, config.vision).to(device)
    batch = replace(batch, weights=(batch.weights > 0) / case.labelled)
    return lambda: (batch.weights * model(batch)[0]).sum()


def reference_loss(model, config, examples, case, device):
    """Examples of a padded batch -> a function that computes their part in the mean loss."""
    inputs = peers.reference_inputs(examples, config, device)
    # transformers computes the mean over the batch
    share = int((inputs["labels"] >= 0).sum()) / case.labelled
    return lambda: model(**inputs, use_cache=False).loss * share


def training_step(side, model, config, case, dtype, args):
    """Runs forward and backward of one case with one of SIDES -> StepResult."""
    device = args.device
    is_ours = side == "ours"
    prepare = our_loss if is_ours else reference_loss
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    seconds = 0.0
    loss = 0.0
    for part in case.rows if is_ours else case.batches:
        loss_of_part = prepare(model, config, part, case, device)
        start = clock(device)
        with autocast:
            value = loss_of_part()
        value.backward()
        seconds += clock(device) - start
        loss += value.item()
    gradients = []
    for name in WATCHED.keys() if is_ours else WATCHED.values():
        weight = model.get_parameter(name)
        # the ViT has no gradient if the case has no image
        is_used = weight.grad is not None
        gradients.append(weight.grad.clone() if is_used else torch.zeros_like(weight))
    start = clock(device)
    model.zero_grad()
    seconds += clock(device) - start
    return StepResult(seconds, loss, gradients)


def check_agreement(case, ours, reference):
    """RuntimeError if the loss or a gradient differs between two StepResults."""
    found = [("loss", 1e-4, abs(ours.loss - reference.loss) / abs(reference.loss))]
    for name, a, b in zip(WATCHED, ours.gradients, reference.gradients, strict=True):
        found.append((f"gradients of {name}", 1e-3, (a - b).norm() / b.norm()))
    for name, limit, difference in found:
        if difference > limit:
            raise RuntimeError(f"{case}: the {name} differs by {difference:.1e}.")


def build_models(config, args):
    """-> {side: float32 model in training mode}, with the same random weights."""
    torch.set_flush_denormal(True)  # as in train.py
    models = dict(zip(SIDES, peers.model_pair(config, args.device, torch.float32), strict=True))
    if args.device.type == "cuda":
        models["ours"].compile_blocks()  # as in train.py
    return {side: model.train() for side, model in models.items()}


def matmul_peak(device, dtype):
    """-> FLOP/s of a large square matrix product, the median of five runs after a warm-up."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    b = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(6):
        start = clock(device)
        a @ b
        seconds.append(clock(device) - start)
    return 2 * n**3 / statistics.median(seconds[1:])


def describe(case, model):
    """-> the size of a case and the FLOPs that it needs."""
    batches = [packing.collate([row], case.length, model.config.vision) for row in case.rows]
    trees = [example for row in case.rows for example in row]
    singles = [example for batch in case.batches for example in batch]
    padded = sum(len(b) * max(len(e.tokens) for e in b) for b in case.batches)
    return {
        "labelled": case.labelled,
        "annotations": len(singles),
        "examples": len(trees),
        "flops": sum(flops(model, batch_work(model, batch)) for batch in batches),
        "ours": {"tokens": sum(len(e.tokens) for e in trees),
                 "padded": len(case.rows) * case.length},
        "reference": {"tokens": sum(len(e.tokens) for e in singles), "padded": padded},
    }


def bench_case(name, config, models, peaks, args):
    """Prints the table of one case -> its numbers. models: {side: model}. peaks: {dtype: FLOP/s}.
    RuntimeError if the implementations differ."""
    case = make_case(name, config, args.n)
    # otherwise the shapes of earlier cases would count for the limit of recompilations
    torch.compiler.reset()
    row = describe(case, models["ours"])
    runs = {(side, dtype): partial(training_step, side, model, config, case, dtype, args)
            for dtype in args.dtypes for side, model in models.items()}
    pair = [training_step(side, models[side], config, case, "float32", args) for side in SIDES]
    check_agreement(name, *pair)
    for run_step in runs.values():
        run_step()  # warm-up
    rounds = run_rounds(runs, args.rounds)
    row["sides"] = {}
    for side, dtype in runs:
        seconds = statistics.median(results[side, dtype].seconds for results in rounds)
        row["sides"][f"{side} {dtype}"] = {
            "seconds": seconds,
            "tokens_per_second": row[side]["tokens"] / seconds,
            "annotations_per_second": row["annotations"] / seconds,
            "mfu": row["flops"] / seconds / peaks[dtype],
        }
    print(f"\n{name}: {row['labelled']} tokens with loss; it needs {row['flops'] / 1e12:.3g} TFLOP")
    print_table(name, {key: row[key.split()[0]] | r for key, r in row["sides"].items()})
    row["ratios"] = {}
    for dtype in args.dtypes:
        ratios = [r["reference", dtype].seconds / r["ours", dtype].seconds for r in rounds]
        row["ratios"][dtype] = spread(ratios)
        print(f"time of reference / ours, {dtype}: {show(row['ratios'][dtype])}", flush=True)
    return row


def add_arguments(parser):
    dtypes = ("float32", "bfloat16")
    add = parser.add_argument
    add("--preset", choices=peers.PRESETS, default="small", help="shape of the model")
    add("--dtypes", nargs="+", choices=dtypes, default=list(dtypes), help="dtypes of autocast")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help=(
        "image: 9 crops and 300 tokens of text; stream: rows packed as in training, for the "
        "reference padded batches of annotations"))
    add("--rounds", type=positive, default=5, help="measurements of each case")
    add("--n", type=positive, default=1, help="number of rows in the case stream")


def run(args):
    """Prints a table for each case -> {"peak": {dtype: FLOP/s}, case: its numbers, ..}."""
    config = peers.PRESETS[args.preset]
    models = build_models(config, args)
    peaks = {dtype: matmul_peak(args.device, dtype) for dtype in args.dtypes}
    cases = {name: bench_case(name, config, models, peaks, args) for name in args.cases}
    return {"peak": peaks, **cases}
