"""One training step of either side, forward and backward, and the memory that it adds."""

import gc
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import packing
from tools.bench import peers
from tools.bench.measure import REPOSITORY, child_command, clock, last_line, process_memory
from tools.bench.step_cases import Case, Plain, make_case, plain_example

# Gradients that are compared, by our name and transformers': the first blocks get theirs last.
WATCHED = {
    "blocks.0.attn.q.weight": "model.language_model.layers.0.self_attn.q_proj.weight",
    "vision.vit.blocks.0.q.weight": "model.vision_tower.layers.0.self_attn.q_proj.weight",
}
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3

# ------------------------------------------------------------------------------------------------
# one step


class StepResult(NamedTuple):
    seconds: float
    loss: float  # mean over all tokens with loss
    gradients: list  # of WATCHED


def our_loss(model, config, row, case, device):
    """A row -> function that computes its part of the case's mean loss. The inputs are on the
    device before the clock starts."""
    batch = packing.collate([row], case.length, config.vision).to(device)
    batch = replace(batch, weights=(batch.weights > 0) / case.labelled)
    return lambda: (batch.weights * model(batch)[0]).sum()


def their_loss(model, config, examples, case, device):
    """A padded batch -> function that computes its part of the case's mean loss."""
    inputs = peers.padded_batch(examples, config, device)
    share = int((inputs["labels"] >= 0).sum()) / case.labelled  # its loss is the batch's own mean
    return lambda: model(**inputs, use_cache=False).loss * share


def watched_gradients(side, model):
    parameters = dict(model.named_parameters())
    names = WATCHED.keys() if side == "ours" else WATCHED.values()
    gradients = []
    for name in names:
        weight = parameters[name]
        # the ViT has no gradient where there was no image
        gradients.append(torch.zeros_like(weight) if weight.grad is None else weight.grad.clone())
    return gradients


def training_step(side, model, config, case, dtype, args):
    """Forward and backward of one case by one side -> StepResult. Leaves no gradients behind."""
    device = torch.device(args.device)
    autocast_dtype = getattr(torch, dtype)
    seconds = 0.0
    loss = 0.0
    for part in case.rows if side == "ours" else case.batches:
        prepare = our_loss if side == "ours" else their_loss
        loss_of_part = prepare(model, config, part, case, device)
        start = clock(device)
        with torch.autocast(
            device.type,
            autocast_dtype,
            enabled=autocast_dtype != torch.float32,
            cache_enabled=not args.activation_checkpointing,  # as in train.py
        ):
            value = loss_of_part()
        value.backward()
        seconds += clock(device) - start
        loss += value.item()
    gradients = watched_gradients(side, model)
    start = clock(device)
    model.zero_grad()
    seconds += clock(device) - start
    return StepResult(seconds, loss, gradients)


def check_agreement(case, ours, theirs):
    """RuntimeError unless two StepResults are of the same step."""
    if abs(ours.loss - theirs.loss) > LOSS_TOLERANCE * abs(theirs.loss):
        raise RuntimeError(
            f"{case}: not the same loss: ours {ours.loss}, theirs {theirs.loss}."
        )
    for name, a, b in zip(WATCHED, ours.gradients, theirs.gradients, strict=True):
        difference = (a - b).norm()
        if difference > GRADIENT_TOLERANCE * b.norm():
            raise RuntimeError(
                f"{case}: not the same gradient of {name}: off by {difference:.3g}, its norm is "
                f"{b.norm():.3g}."
            )


def build_models(config, args, sides):
    """{side: model in training mode, float32}, with the same random weights. ValueError if
    transformers is missing."""
    torch.set_flush_denormal(True)  # as in train.py
    if "theirs" in sides:
        ours, theirs = peers.model_pair(config, args.device, torch.float32)
        found = {"ours": ours, "theirs": theirs}
        if args.activation_checkpointing:
            theirs.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    else:
        ours = peers.random_model(config, args.device, torch.float32)
        found = {"ours": ours}
    ours.activation_checkpointing = args.activation_checkpointing
    ours.uncheckpointed_blocks = args.uncheckpointed_blocks
    if args.compile:
        ours.compile_blocks()
    return {side: found[side].train() for side in sides}


# ------------------------------------------------------------------------------------------------
# memory


def added_memory(run, device):
    """MiB that run() adds at its highest; None on a CPU where Linux does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if sys.platform != "linux":
        return None
    # resets VmHWM: its highest value was reached while the models were made
    Path("/proc/self/clear_refs").write_text("5")
    before = process_memory("self", "VmRSS")
    run()
    return process_memory("self", "VmHWM") - before


def added_memory_in_child(case_name, side, dtype, args):
    """added_memory of a step on the CPU, in a process of its own. There malloc returns freed memory
    at once; else a tensor that reuses it would seem to cost nothing."""
    arguments = [case_name, side, dtype, vars(args)]
    done = subprocess.run(
        child_command("tools.bench.training_step", "measure_memory", arguments),
        cwd=REPOSITORY,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = last_line(done.stderr, f"exit status {done.returncode}")
        raise RuntimeError(f"{case_name}, memory of {side} {dtype}: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(case_name, side, dtype, flags):
    """What the child of added_memory_in_child does. flags: vars of the parent's arguments."""
    args = Namespace(**flags)
    config = peers.model_config(args.preset)
    sides = ("ours", "theirs") if side == "theirs" else ("ours",)
    model = build_models(config, args, sides).pop(side)
    case = make_case(case_name, config, args)
    # A first step: what torch imports or compiles in it is not memory of a step. A compiled model
    # needs the case's own shapes, any other does with a small one.
    first = case
    if not args.compile:
        small = [plain_example(config, np.random.default_rng(0), Plain(8, (1, 1)))]
        first = Case([small], [small], len(small[0].tokens))
    training_step(side, model, config, first, dtype, args)
    run = partial(training_step, side, model, config, case, dtype, args)
    return added_memory(run, torch.device("cpu"))
