"""A training step beside transformers' Molmo2: forward and backward, without the optimizer.

    python -m tools.bench step                # a small random model on this machine's CPU
    python -m tools.bench step --preset toy --cases image stream --rounds 2 --no-memory
    python -m tools.bench step --preset toy --cases growth --dtypes float32 --lengths 1024 4096
    python -m tools.bench step --preset 4b --device cuda --dtypes bfloat16 --cases stream \\
        --stage 2 --n 16 --activation-checkpointing --no-theirs

Both sides have the same weights and learn the same tokens of the same examples, with random pixels
and ids. Before anything is timed, their losses and two gradients must agree in float32.

    image, video    one image of 9 crops, or 16 frames, and 300 tokens of text: nothing to pad
    padded, single  9, 5 and 2 crops and a text: one row for us; for transformers padded to the
                    longest, as its processor does, or one by one
    stream          --n rows of training as tools.bench pack draws them. Ours: message trees, packed
                    by packing.Planner. Theirs: a sequence for each annotation, in random order, in
                    padded batches; videos apart, since transformers refuses them beside images
    growth          ours alone: rows of about --lengths tokens, of several videos or of one, and how
                    much of their time is attention

MFU is the FLOPs that have to be done (tools/bench/flops.py), the same for both sides, over the
seconds and over the FLOP/s of a large matrix product. Memory is the most that a step adds to what
there was before it, gradients and inputs included.
"""

import argparse
import statistics
from functools import partial

import torch

import attention
import model as models
import packing
from tools.bench import growth, peers
from tools.bench.flops import allowed_pairs, batch_work, count_crops, flops
from tools.bench.measure import check_device, in_turn, median_seconds, spread
from tools.bench.step_cases import PLAIN_CASES, make_case, n_crops
from tools.bench.stream import Recipe, recipe
from tools.bench.training_step import (
    added_memory,
    added_memory_in_child,
    build_models,
    check_agreement,
    training_step,
)

CASES = [*PLAIN_CASES, "stream"]
STREAM_ROW = Recipe(max_tokens=4096, max_crops=32, max_frames=8)  # without --stage

# ------------------------------------------------------------------------------------------------
# one case


def matmul_peak(device, dtype):
    """FLOP/s of one large square matrix product."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    b = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, 5)


def describe(case, model, args):
    """The size of a case and of the work of each side: numbers that need no step."""
    device = torch.device(args.device)
    batches = [packing.collate([row], case.length, model.config.vision) for row in case.rows]
    fields = []
    for batch in batches:
        fields.append((batch.visible_until.to(device), batch.bidir.to(device)))
    mask_seconds = median_seconds(
        lambda: [attention.packed_mask(*row_fields) for row_fields in fields], device, 3
    )
    trees = [example for row in case.rows for example in row]
    singles = [example for batch in case.batches for example in batch]
    padded = sum(len(batch) * max(len(e.tokens) for e in batch) for batch in case.batches)
    area = len(batches) * case.length**2
    return {
        "labelled": case.labelled,
        "annotations": len(singles),
        "examples": len(trees),
        "flops": sum(flops(model, batch_work(model, batch)) for batch in batches),
        "mask_seconds": mask_seconds,
        "mask_share": sum(allowed_pairs(batch) for batch in batches) / area,
        "ours": {
            "tokens": sum(len(e.tokens) for e in trees),
            "padded": len(batches) * case.length,
            "crops": sum(count_crops(batch, model.config.vision) for batch in batches),
        },
        "theirs": {
            "tokens": sum(len(e.tokens) for e in singles),
            "padded": padded,
            "crops": sum(n_crops(example) for example in singles),
        },
    }


def frames_compiled(args, reset=False):
    """Frames that torch.compile has compiled so far, FlexAttention's on a GPU among them. reset
    forgets the compiled code: else the shapes of one case would count against the recompilation
    limit of the next."""
    if not args.compile and torch.device(args.device).type == "cpu":
        return 0
    if reset:
        torch._dynamo.reset()
    return torch._dynamo.utils.counters["frames"]["ok"]


def ratios_of(rounds, dtypes):
    """Seconds of theirs over ours within each round, by dtype, and float32 over bfloat16."""
    pairs = [(dtype, dtype) for dtype in dtypes]
    if len(dtypes) == 2:
        pairs.append(("float32", "bfloat16"))
    ratios = {}
    for a, b in pairs:
        name = f"theirs {a} / ours {b}"
        ratios[name] = spread(seconds["theirs", a] / seconds["ours", b] for seconds in rounds)
    return ratios


def bench_case(name, config, contestants, peaks, args):
    """Prints the table of one case -> its numbers. contestants: {side: model}; peaks: {dtype:
    FLOP/s}. RuntimeError where the sides differ."""
    case = make_case(name, config, args)
    device = torch.device(args.device)
    row = describe(case, contestants["ours"], args)
    compiled_before = frames_compiled(args, reset=True)
    checked = len(contestants) == 2
    if checked:
        results = {}
        for side, model in contestants.items():
            results[side] = training_step(side, model, config, case, "float32", args)
        check_agreement(name, results["ours"], results["theirs"])
    runs = {}
    for dtype in args.dtypes:
        for side, model in contestants.items():
            run_step = partial(training_step, side, model, config, case, dtype, args)
            runs[side, dtype] = run_step
            if not (checked and dtype == "float32"):
                run_step()  # warms up; the comparison has done so for float32
    compiled_warm = frames_compiled(args)
    rounds = []
    for k in range(args.rounds):
        rounds.append({key: runs[key]().seconds for key in in_turn(runs, k)})
    row["compiled"] = compiled_warm - compiled_before
    row["recompiled"] = frames_compiled(args) - compiled_warm
    row["sides"] = {}
    for (side, dtype), run_step in runs.items():
        seconds = statistics.median(seconds[side, dtype] for seconds in rounds)
        mib = None
        if args.memory and device.type == "cuda":
            mib = added_memory(run_step, device)
        elif args.memory:
            mib = added_memory_in_child(name, side, dtype, args)
        row["sides"][f"{side} {dtype}"] = {
            "seconds": seconds,
            "tokens_per_second": row[side]["tokens"] / seconds,
            "mib": mib,
            "annotations_per_second": row["annotations"] / seconds,
            "mfu": row["flops"] / seconds / peaks[dtype],
        }
    row["ratios"] = ratios_of(rounds, args.dtypes) if checked else {}
    print_case(name, row)
    return row


def print_case(name, row):
    compiled = "-"
    if row["compiled"]:
        compiled = f"{row['compiled']} frames, {row['recompiled']} after warm-up"
    print(
        f"\n{name}: {row['examples']} example(s), {row['annotations']} annotation(s), "
        f"{row['labelled']} tokens with loss; useful {row['flops'] / 1e12:.3g} TFLOP; "
        f"compiled: {compiled}\n"
        f"mask: {row['mask_share']:.1%} of T x T, built in {row['mask_seconds'] * 1e3:.1f} ms\n"
        f"{'':16s}  tokens  padded crops   seconds  tokens/s  annotations/s    MFU  MiB more"
    )
    for key, r in row["sides"].items():
        size = row[key.split()[0]]
        mib = "-" if r["mib"] is None else f"{r['mib']:.0f}"
        print(
            f"{key:16s} {size['tokens']:7d} {size['padded']:7d} {size['crops']:5d} "
            f"{r['seconds']:9.3f} {r['tokens_per_second']:9.0f} "
            f"{r['annotations_per_second']:14.2f} {r['mfu']:6.1%} {mib:>9s}"
        )
    for key, r in row["ratios"].items():
        print(f"{key}: {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})", flush=True)


# ------------------------------------------------------------------------------------------------
# the command


def add_arguments(parser):
    presets = ("small", *models.PRESETS)
    dtypes = ("float32", "bfloat16")
    switch = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--preset", choices=presets, default="small", help="shape of the model")
    add("--device", default="cpu", help="cpu, cuda, ..")
    add("--dtypes", nargs="+", choices=dtypes, default=list(dtypes), help="of autocast")
    add("--cases", nargs="+", choices=(*CASES, "growth"), default=CASES, help="see above")
    add("--rounds", type=int, default=5, help="measurements of each case")
    add("--n", type=int, default=1, help="rows of the stream")
    add("--stage", type=int, choices=(1, 2, 3), help="its recipe sets --tokens, --crops, --frames")
    add("--tokens", type=int, help=f"of a row of the stream, else {STREAM_ROW.max_tokens}")
    add("--crops", type=int, help=f"of a row of the stream, else {STREAM_ROW.max_crops}")
    add("--frames", type=int, help=f"of a video of the stream, else {STREAM_ROW.max_frames}")
    add("--lengths", type=int, nargs="+", default=growth.LENGTHS, help="tokens of rows of growth")
    add(
        "--videos",
        "--films",  # its name in earlier commits, so that both can be run with the same flags
        nargs="+",
        choices=growth.KINDS,
        default=list(growth.KINDS),
        help="in a row of growth: several of 16 frames, or one that fills it",
    )
    add("--peak", type=float, nargs="+", help="TFLOP/s for each of --dtypes, else measured")
    add("--compile", action="store_true", help="ours: compile the blocks")
    add(
        "--activation-checkpointing",
        "--recompute",  # its name in earlier commits
        action="store_true",
        help="both sides",
    )
    add(
        "--uncheckpointed-blocks",
        "--keep-blocks",  # its name in earlier commits
        type=int,
        default=0,
        help="ours: the last blocks of the decoder keep their activations",
    )
    add("--theirs", action=switch, default=True, help="measure transformers too")
    add("--memory", action=switch, default=True, help="a process for every number on a CPU")


def complete(args):
    """Fills in the size of the stream's rows and checks the flags; ValueError names a wrong one."""
    row = recipe(args.stage) if args.stage else STREAM_ROW
    if args.tokens is None:
        args.tokens = row.max_tokens
    if args.crops is None:
        args.crops = row.max_crops
    if args.frames is None:
        args.frames = row.max_frames
    if min(args.rounds, args.n, args.tokens, args.crops, args.frames, *args.lengths) < 1:
        raise ValueError(
            "--rounds, --n, --tokens, --crops, --frames and --lengths must be at least 1."
        )
    uncheckpointed = args.uncheckpointed_blocks
    if uncheckpointed < 0 or (uncheckpointed and not args.activation_checkpointing):
        raise ValueError(
            "--uncheckpointed-blocks must not be negative, and needs --activation-checkpointing."
        )
    if args.peak and len(args.peak) != len(args.dtypes):
        raise ValueError(f"--peak needs a number for each of --dtypes {' '.join(args.dtypes)}.")
    check_device(args.device)


def run(args):
    """Prints a table per case -> {"peak": FLOP/s by dtype, case: its numbers, ..}.
    ValueError where nothing can be measured, RuntimeError where both sides do not do the same."""
    complete(args)
    config = peers.model_config(args.preset)
    device = torch.device(args.device)
    compared = args.theirs and set(args.cases) != {"growth"}
    contestants = build_models(config, args, ("ours", "theirs") if compared else ("ours",))
    if args.peak:
        peaks = {dtype: n * 1e12 for dtype, n in zip(args.dtypes, args.peak, strict=True)}
    else:
        peaks = {dtype: matmul_peak(device, dtype) for dtype in args.dtypes}
    shown = [f"{n / 1e12:.3g} TFLOP/s in {dtype}" for dtype, n in peaks.items()]
    print(f"peak: {', '.join(shown)}")
    found = {"peak": peaks}
    for name in args.cases:
        if name != "growth":
            found[name] = bench_case(name, config, contestants, peaks, args)
    if "growth" in args.cases:
        found["growth"] = growth.run(config, contestants["ours"], args)
    return found
