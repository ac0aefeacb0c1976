"""One training step beside transformers' Molmo2: forward, backward, gradients dropped; no optimizer.

    python -m tools.bench step                              # a small random model on this machine's CPU: an hour on two cores
    python -m tools.bench step --preset toy --cases image stream --rounds 2 --no-memory             # two minutes
    python -m tools.bench step --preset toy --cases growth --dtypes float32 --lengths 1024 4096
    python -m tools.bench step --preset 4b --device cuda --dtypes bfloat16 --cases stream --stage 2 --n 16 --activation_checkpointing --no-theirs

Both have the same weights and learn the same tokens of the same examples; before anything is timed their losses and two gradients must
agree in float32. They take turns; a ratio is theirs over ours within a round, so above 1 ours is faster. Pixels and ids are random.

    image, video    one image of 9 crops, or 16 frames, and 300 tokens of text: nothing to pad, the same work on both sides
    padded, single  9, 5 and 2 crops and a text, a row for us; for transformers padded to the longest, as its processor does, or one by one
    stream          what fills --n rows of training, drawn as tools.pack_bench draws it. Ours: message trees, packed by packing.Planner.
                    Theirs: a sequence for each annotation, shuffled, in padded batches; videos apart, for it refuses them beside images
    growth          ours alone: rows of about --lengths, of several films or of one, and what of their time is attention, of all blocks

MFU: FLOPs of the work that has to be done (`useful`), the same for both sides, over seconds and over a large matrix product's FLOP/s.
What is done in vain (padding, what a mask hides, logits without a label, an image read once per annotation, blocks run again) is not
counted. Memory: the most that a step adds to what there was before it, its gradients and inputs included.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import attention
import model as models
import packing
from tools.bench import load as load_bench
from tools.bench import pack as pack_bench
from tools.bench import peers
from tools.bench.peers import clock, spread
from tools.bench.step_cases import PLAIN, Case, case_of, collate, example, plain

WATCHED = {"blocks.0.attn.q.weight": "model.language_model.layers.0.self_attn.q_proj.weight",    # a gradient reaches these last
           "vision.vit.blocks.0.q.weight": "model.vision_tower.layers.0.self_attn.q_proj.weight"}


# ---- one step

def step(side, model, config, case, dtype, args):
    """-> seconds, loss (mean over all labelled tokens), [gradients of WATCHED]. Inputs are on the device before the clock starts."""
    device, kind, seconds, loss, n = torch.device(args.device), getattr(torch, dtype), 0.0, 0.0, case.labelled
    for part in case.rows if side == "ours" else case.batches:
        if side == "ours":
            given = packing.collate([part], case.length, config.vision, args.crop_bucket).to(device)
            given = replace(given, weights=(given.weights > 0) / n)
        else:
            given = collate(part, config, device)
            share = int((given["labels"] >= 0).sum()) / n                # its loss is the mean over this batch
        began = clock(device)
        with torch.autocast(device.type, kind, enabled=kind != torch.float32, cache_enabled=not args.activation_checkpointing):        # as train.py
            value = (given.weights * model(given)[0]).sum() if side == "ours" else model(**given, use_cache=False).loss * share
        value.backward()
        seconds, loss = seconds + clock(device) - began, loss + value.item()
    weights = dict(model.named_parameters())
    watched = [weights[name] for name in (WATCHED if side == "ours" else WATCHED.values())]
    grads = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in watched]     # none where there was nothing to see
    began = clock(device)
    model.zero_grad()
    return seconds + clock(device) - began, loss, grads


def agree(name, ours, theirs):
    """RuntimeError unless what `step` gave for both is the same step."""
    if abs(ours[1] - theirs[1]) > 1e-4 * abs(theirs[1]):
        raise RuntimeError(f"{name}: not the same loss: ours {ours[1]}, theirs {theirs[1]}")
    for watched, a, b in zip(WATCHED, ours[2], theirs[2], strict=True):
        if (a - b).norm() > 1e-3 * b.norm():
            raise RuntimeError(f"{name}: not the same gradient of {watched}: off by {(a - b).norm():.3g}, its norm is {b.norm():.3g}")


def contenders(config, args, sides):
    """{side: model in training, float32}, of the same random weights. ValueError if transformers is missing."""
    torch.set_flush_denormal(True)       # as train.py does
    if "theirs" in sides:
        found = dict(zip(("ours", "theirs"), peers.peers(config, args.device, torch.float32), strict=True))
        if args.activation_checkpointing:
            found["theirs"].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        found = {"ours": peers.random_model(config, args.device, torch.float32)}
    found["ours"].activation_checkpointing, found["ours"].uncheckpointed_blocks = args.activation_checkpointing, args.uncheckpointed_blocks
    if args.compile:
        found["ours"].compile_blocks()
    return {side: found[side].train() for side in sides}


# ---- memory

def added(run, device):
    """MiB that run() adds at its highest; None where only Linux could tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if sys.platform != "linux":
        return None
    Path("/proc/self/clear_refs").write_text("5")        # forget the highest so far: it was reached while the models were made
    before = load_bench.memory("self", "VmRSS")
    run()
    return load_bench.memory("self", "VmHWM") - before


def added_alone(name, side, dtype, args):
    """`added` by a step on the CPU, in a process of its own. What that frees goes back at once: else the next tensor would cost nothing."""
    command = [sys.executable, "-m", "tools.step_bench", json.dumps([name, side, dtype, vars(args)])]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
                          capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.splitlines() or [f"ended with {done.returncode}"])[-1]
        raise RuntimeError(f"{name}, memory of {side} {dtype}: {why}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- what there is to do, and how fast it could be done

def area(doc, branch, bidir):
    """Pairs of tokens of packed rows that may attend, padding left out."""
    rows = zip(*(f.cpu().numpy() for f in (doc, branch, bidir)), strict=True)
    return sum(attention.area(b[d == n], v[d == n]) for d, b, v in rows for n in range(d.max() + 1))


def flops(model, patches, pooled, visual, tokens, labelled, pairs, learn=("vit", "connector", "llm"), frozen=False):
    """FLOPs of forward and backward of so many patches, of patches in windows, visual tokens, tokens, tokens with loss and pairs that
    attend: 2 for each weight of a matrix and each vector that meets it, 4 for each pair and each number of a query, all heads together
    (products with keys and with values). Backward takes as many for what lies below and, of weights, as many again for those that learn;
    frozen: the embedding does not, nor a head that is tied to it."""
    c, v, see = model.config, model.config.vision, model.vision
    size = lambda *parts: sum(m.weight.numel() for part in parts for m in part.modules() if isinstance(m, nn.Linear))     # noqa: E731
    vit, connector, llm = (part in learn for part in ("vit", "connector", "llm"))
    below = {"vit": vit, "connector": vit or connector, "llm": vit or connector or llm}  # is there a gradient to pass on?
    cost = lambda part, own: 2 * (1 + below[part] + own)                     # noqa: E731
    of_pairs = lambda part, own: 4 * (1 + 2 * (below[part] or own))          # noqa: E731
    total = cost("vit", vit) * size(see.vit) * patches + of_pairs("vit", vit) * v.n_layer * patches * v.n_patch * v.n_embd
    met = size(see.pool.k, see.pool.v) * pooled + size(see.pool.q, see.pool.out, see.projector) * visual
    total += cost("connector", connector) * met + of_pairs("connector", connector) * pooled * v.n_embd
    total += cost("llm", llm) * size(*model.blocks) * tokens
    total += cost("llm", llm and not (c.tied and frozen)) * c.n_vocab * c.n_embd * labelled
    return total + of_pairs("llm", llm) * c.n_layer * pairs * c.n_head * c.head_dim


def useful(model, batch, *how):
    """`flops` of a Batch."""
    valid = batch.pool_src >= 0
    return flops(model, len(batch.unit) * model.config.vision.n_patch, int(valid.sum()), int(valid.any(1).sum()),
                 int((batch.doc >= 0).sum()), int((batch.weights > 0).sum()), area(batch.doc, batch.branch, batch.bidir), *how)


def median_of(run, device, n):
    def timed():
        began = clock(device)
        run()
        return clock(device) - began

    timed()
    return statistics.median(timed() for _ in range(n))


def matmul_peak(device, dtype):
    """FLOP/s of one large square product."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * n**3 / median_of(lambda: a @ b, device, 5)


def work_of(case, model, args):
    """What a case asks for, and what each side makes of it: numbers that need no step."""
    batches = [packing.collate([row], case.length, model.config.vision) for row in case.rows]
    fields = [[f.to(args.device) for f in (b.doc, b.branch, b.bidir)] for b in batches]
    masks = median_of(lambda: [attention.packed_mask(*f) for f in fields], torch.device(args.device), 3)
    real = lambda parts: sum(len(e.tokens) for part in parts for e in part)                  # noqa: E731
    crops = sum(len(e.unit) for part in case.batches for e in part if e.unit is not None)
    padded = sum(len(part) * max(len(e.tokens) for e in part) for part in case.batches)
    return {"labelled": case.labelled, "annotations": sum(map(len, case.batches)), "examples": sum(map(len, case.rows)),
            "flops": sum(useful(model, b) for b in batches), "mask_seconds": masks,
            "mask_share": sum(area(*f) for f in fields) / (len(batches) * case.length**2),
            "ours": {"tokens": real(case.rows), "padded": len(batches) * case.length, "crops": sum(len(b.unit) for b in batches)},
            "theirs": {"tokens": real(case.batches), "padded": padded, "crops": crops}}


# ---- measuring

def frames_compiled(args, reset=False):
    """So far, FlexAttention's on a GPU among them; reset: forget them, else one case's shapes would use up what the next may compile."""
    if not args.compile and torch.device(args.device).type == "cpu":
        return 0
    if reset:
        torch._dynamo.reset()
    return torch._dynamo.utils.counters["frames"]["ok"]


def measure(name, config, contestants, peaks, args):
    """One case -> its row of the JSON; prints it."""
    case, device = case_of(name, config, args), torch.device(args.device)
    found, start, checked = work_of(case, contestants["ours"], args), frames_compiled(args, reset=True), {}
    if len(contestants) == 2:
        checked = {side: step(side, model, config, case, "float32", args) for side, model in contestants.items()}
        agree(name, **checked)
    run = {(side, dtype): partial(step, side, model, config, case, dtype, args) for dtype in args.dtypes
           for side, model in contestants.items()}
    for (_, dtype), one in run.items():
        if not checked or dtype != "float32":            # else it is warm already
            one()
    warm = frames_compiled(args)
    rounds = [{key: run[key]()[0] for key in list(run)[:: -1 if k % 2 else 1]} for k in range(args.rounds)]
    found |= {"compiled": warm - start, "recompiled": frames_compiled(args) - warm, "sides": {}, "ratios": {}}
    for side, dtype in run:
        seconds, mib = statistics.median(r[side, dtype] for r in rounds), None
        if args.memory:
            mib = added(run[side, dtype], device) if device.type == "cuda" else added_alone(name, side, dtype, args)
        found["sides"][f"{side} {dtype}"] = {
            "seconds": seconds, "tokens_per_second": found[side]["tokens"] / seconds, "mib": mib,
            "annotations_per_second": found["annotations"] / seconds, "mfu": found["flops"] / seconds / peaks[dtype]}
    pairs = [(d, d) for d in args.dtypes] + [("float32", "bfloat16")] * (len(args.dtypes) == 2)
    for a, b in pairs if checked else []:
        found["ratios"][f"theirs {a} / ours {b}"] = spread(r["theirs", a] / r["ours", b] for r in rounds)

    compiled = f"{found['compiled']} frames, {found['recompiled']} after warm-up" if warm > start else "-"
    print(f"\n{name}: {found['examples']} example(s), {found['annotations']} annotation(s), {found['labelled']} tokens with loss; useful "
          f"{found['flops'] / 1e12:.3g} TFLOP; compiled: {compiled}\nmask: {found['mask_share']:.1%} of T x T, built in "
          f"{found['mask_seconds'] * 1e3:.1f} ms\n{'':16s}  tokens  padded crops   seconds  tokens/s  annotations/s    MFU  MiB more")
    for key, r in found["sides"].items():
        w, mib = found[key.split()[0]], "-" if r["mib"] is None else format(r["mib"], ".0f")
        print(f"{key:16s} {w['tokens']:7d} {w['padded']:7d} {w['crops']:5d} {r['seconds']:9.3f} {r['tokens_per_second']:9.0f} "
              f"{r['annotations_per_second']:14.2f} {r['mfu']:6.1%} {mib:>9s}")
    for key, r in found["ratios"].items():
        print(f"{key}: {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})", flush=True)
    return found


@contextmanager
def no_attention(model):
    """What attends adds queries, keys and values up instead, without a mask: all else of a step stays, the gradients of all three too."""
    def added(q, k, v, mask):
        return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], dim=2)

    kept = model.attend, attention.packed_mask
    model.attend, attention.packed_mask = added, lambda *_: None
    try:
        yield
    finally:
        model.attend, attention.packed_mask = kept


def growth(config, model, args):
    """Rows of films with 300 tokens of text each -> {row: seconds of a step, and of one that does all but attend}; the ViT's attention is
    part of both. Rows take turns, and the latter is compared, per token, with the first row's of as many films, several or one."""
    found, cases, rounds, rng = {}, {}, [], np.random.default_rng(0)
    one, two = (len(example(config, rng, [], n, [(0, 300)])[0].tokens) for n in (1000, 1001))    # a frame, its time written at length
    fit = {length: max((length - 301) // (two - one), 0) for length in args.lengths}
    rows = dict.fromkeys((n, min(16, fit[n]) if films == "several" else fit[n], dtype)
                         for n in args.lengths for films in args.films for dtype in args.dtypes)
    for length, frames, dtype in rows:
        film = plain(config, rng, 300, frames=frames)
        row = [film] * max(length // len(film.tokens), 1)
        T = len(film.tokens) * len(row)
        batch = packing.collate([row], T, config.vision)
        pairs, name = area(batch.doc, batch.branch, batch.bidir), f"{T} tokens in {len(row)} film(s), {dtype}"
        found[name] = {"tokens": T, "documents": len(row), "crops": len(batch.unit), "pairs": pairs, "mask_share": pairs / T**2}
        cases[name] = Case([row], [], T), dtype, (dtype, frames > 16)

    for k in range(args.rounds + 1):
        whole, rest = {}, {}
        for name, (case, dtype, _) in cases.items():
            whole[name] = step("ours", model, config, case, dtype, args)[0]
            with no_attention(model):
                rest[name] = step("ours", model, config, case, dtype, args)[0]
        rounds += [(whole, rest)] * (k > 0)              # the first warms up
    print("\n                                        crops    mask  us a token: all  attention     rest  rest / first (range)  ns a pair")
    for name, r in found.items():
        first = next(other for other in cases if cases[other][2] == cases[name][2])
        whole, rest = (statistics.median(times[part][name] for times in rounds) for part in (0, 1))
        grown = spread(times[name] / times[first] * found[first]["tokens"] / r["tokens"] for _, times in rounds)
        r |= {"seconds": whole, "rest_seconds": rest, "rest_over_first": grown}
        us, ns = [t / r["tokens"] * 1e6 for t in (whole, whole - rest, rest)], (whole - rest) / r["pairs"] * 1e9
        print(f"{name:38s}{r['crops']:7d} {r['mask_share']:7.1%} {us[0]:16.1f} {us[1]:10.1f} {us[2]:8.1f}  "
              f"{grown['median']:6.2f} ({grown['min']:.2f}-{grown['max']:.2f}) {ns:16.1f}", flush=True)
    return found


def add_arguments(parser):
    parser.add_argument("--preset", choices=("small", *models.PRESETS), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    cases = [*PLAIN, "stream"]
    parser.add_argument("--cases", nargs="+", choices=(*cases, "growth"), default=cases, help="default: all but growth")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--n", type=int, default=1, help="rows of the stream (default 1)")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="takes --tokens, --crops and --frames from its recipe")
    parser.add_argument("--tokens", type=int, help="of a row of the stream (default 4096)")
    parser.add_argument("--crops", type=int, help="of a row of the stream (default 32)")
    parser.add_argument("--frames", type=int, help="of a video of the stream at most (default 8)")
    parser.add_argument("--batch", type=int, default=4, help="theirs: sequences in a batch of the stream (default 4)")
    parser.add_argument("--crop-bucket", type=int, default=1, help="ours: crops of a row are padded to a multiple of it (default 1)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16_384, 36_864], help="of rows of growth, in tokens")
    parser.add_argument("--films", nargs="+", choices=("several", "one"), default=["several", "one"],
                        help="in a row of growth: several of 16 frames, one that fills it (default: both, in turn)")
    parser.add_argument("--peak", type=float, nargs="+", help="TFLOP/s of the machine, one for each of --dtypes (default: measured)")
    parser.add_argument("--compile", action="store_true", help="ours: blocks run compiled")
    parser.add_argument("--activation_checkpointing", action="store_true", help="both: activation checkpointing")
    parser.add_argument("--keep-blocks", type=int, default=0, help="ours: so many of the decoder's blocks keep all the same (default 0)")
    parser.add_argument("--no-theirs", dest="theirs", action="store_false", help="ours alone")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="on a CPU it takes a process for every number")


def run(args):
    """Prints a table per case -> {"peak": FLOP/s by dtype, case: its numbers, ..}. ValueError where nothing can be measured, RuntimeError
    where both sides do not do the same."""
    (tokens, crops), frames = pack_bench.recipe(args.stage) if args.stage else ((4096, 32), 8)
    for name, usual in (("tokens", tokens), ("crops", crops), ("frames", frames)):
        setattr(args, name, usual if getattr(args, name) is None else getattr(args, name))
    if min(args.rounds, args.n, args.tokens, args.crops, args.frames, args.batch, args.crop_bucket, *args.lengths) < 1:
        raise ValueError("--rounds, --n, --tokens, --crops, --frames, --batch, --crop-bucket and --lengths must be at least 1")
    if args.uncheckpointed_blocks < 0 or (args.uncheckpointed_blocks and not args.activation_checkpointing):
        raise ValueError("--keep-blocks: not less than 0, and only with --activation_checkpointing, which runs the others again")
    if args.peak and len(args.peak) != len(args.dtypes):
        raise ValueError(f"--peak wants a number for each of --dtypes {' '.join(args.dtypes)}")
    peers.reach(args.device)
    config, device = peers.SMALL if args.preset == "small" else models.PRESETS[args.preset], torch.device(args.device)
    contestants = contenders(config, args, ("ours", "theirs") if args.theirs and set(args.cases) != {"growth"} else ("ours",))
    given = [n * 1e12 for n in args.peak or ()] or [matmul_peak(device, dtype) for dtype in args.dtypes]
    peaks = dict(zip(args.dtypes, given, strict=True))
    print("peak: " + ", ".join(f"{n / 1e12:.3g} TFLOP/s in {dtype}" for dtype, n in peaks.items()))
    found = {"peak": peaks} | {name: measure(name, config, contestants, peaks, args) for name in args.cases if name != "growth"}
    return found | ({"growth": growth(config, contestants["ours"], args)} if "growth" in args.cases else {})


if __name__ == "__main__":               # one number of added_alone
    name, side, dtype, given = json.loads(sys.argv[1])
    args = Namespace(**given)
    config = peers.SMALL if args.preset == "small" else models.PRESETS[args.preset]
    own = contenders(config, args, ("ours", "theirs") if side == "theirs" else ("ours",)).pop(side)
    case, little = case_of(name, config, args), [plain(config, np.random.default_rng(0), 8, (1, 1))]
    # what torch imports in the first step, or compiles, is no memory of a step
    step(side, own, config, case if args.compile else Case([little], [little], len(little[0].tokens)), dtype, args)
    print(json.dumps(added(partial(step, side, own, config, case, dtype, args), torch.device("cpu"))))
