"""Trains Molmo2 (paper: training, Table 12; docs/molmo2.md 7, 10).

    python train.py --stage 1 --tiny                            # laptop, toy world, no download
    torchrun --nproc-per-node 8 train.py --stage 3 --cp 8 --data mix.json --init runs/stage2

Order of this file: optimizer, loop, end; training/setup.py opens data and model. A step:

    packs -> Batch -> nll, lse of each token -> sum(w * (nll + z * lse^2)) -> backward, for all
    micro-batches -> / sum of w -> clip -> AdamW

The one division, by the weight of the whole step and never of a micro-batch, makes packing,
accumulation and the number of ranks invisible.
"""

import hashlib
import math
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

# Before torch is imported: OpenMP's threads spin for a moment, then sleep. By default they spin for
# milliseconds, which makes a step beside another process 3.5 times as long (docs/log.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch
import torch.distributed as dist
from tqdm import tqdm

import packing
import parallel
from evaluation import report
from records.errors import DataError, Unreadable
from toy import world
from training import checkpoint
from training.config import RunError, Terminated, UserError, parse
from training.log import (
    RunLog,
    StepStats,
    end,
    end_if_explained,
    how_to_go_on,
    make_head,
    make_line,
    stop_nonfinite,
)
from training.preferences import find_references, objective, read_references
from training.ranks import all_reduce_sums
from training.setup import (
    dry_run_largest_batch,
    fill_weights,
    pretrain_vit,
    start_run,
    whole_model,
)
from weights import files

# --------------------------------------------------------------------------------------------------
# optimizer


def place(run, model):
    """Puts the model on the device, or allocates this rank's shard of it there; compiles blocks."""
    if run.ranks.mesh:
        parallel.parallelize(model, run.ranks.mesh, run.config.shard, run.dtype)
    if model.norm.weight.is_meta:
        model.to_empty(device=run.device)  # to be filled by fill_weights
    elif not run.ranks.mesh:
        model.to(run.device)
    if run.config.compile:
        model.compile_blocks()


def build_optimizer(run, model):
    """-> the parameters that learn {group: [parameter, ..]}, and their AdamW."""
    config = run.config
    groups = {part: [p for p in parameters if p.requires_grad]
              for part, parameters in model.parameter_groups().items() if part in config.train}
    named = [{"params": parameters, "name": part} for part, parameters in groups.items()]
    optimizer = torch.optim.AdamW(named, lr=0.0, betas=config.betas, eps=config.adam_eps,
                                  weight_decay=0.0, fused=run.device.type != "mps")
    return groups, optimizer


def learning_rate(step, base, warmup, total, final=0.1):
    """Linear from 0 over `warmup` steps, then a cosine that ends at final * base at step `total`.

    The first update is step 1.
    """
    if step < warmup:
        return base * step / warmup
    if step >= total:
        return base * final
    cosine = math.cos(math.pi * (step - warmup) / (total - warmup))
    return base * (final + (1 - final) * (1 + cosine) / 2)


def set_learning_rates(optimizer, config, step):
    for group in optimizer.param_groups:
        base = getattr(config.lr, group["name"])
        # a short run warms up over a tenth of it
        warmup = min(getattr(config.warmup, group["name"]), config.steps // 10)
        group["lr"] = learning_rate(step, base, warmup, config.steps, config.final_lr)


def divide_and_clip(run, groups, weight):
    """Divides summed gradients by the weight of the step, then clips each group by its own norm,
    over all ranks -> {group: norm before clipping}."""
    copies = run.ranks.world // run.config.shard if run.config.shard else 1  # HSDP
    # float64 on a CPU only: a GPU sums in trees, and a float64 copy would not fit; one read a group
    wide = torch.float64 if run.device.type == "cpu" else None
    gradients = {}
    squares = {}
    norms = {}
    for part, parameters in groups.items():
        gradients[part] = [parallel.local(p.grad) for p in parameters if p.grad is not None]
        of_part = [torch.linalg.vector_norm(g, dtype=wide) for g in gradients[part]]
        squares[part] = sum(n * n for n in torch.stack(of_part).tolist()) if of_part else 0.0
    for part, square in all_reduce_sums(squares).items():
        norms[part] = math.sqrt(square / copies) / weight
        if gradients[part]:
            clip = min(run.config.clip / (norms[part] + 1e-6), 1)
            torch._foreach_mul_(gradients[part], clip / weight)
    return norms


# --------------------------------------------------------------------------------------------------
# the loop


def train(run, model, groups, optimizer, log, watcher, eval_every=0):
    """Runs the steps that are left. The watcher may look at the model after each step, and scores
    it every eval_every steps (evaluation/report.py)."""
    config = run.config
    newest_picture = {}
    stop_requested = []

    def stop_after_this_step(*_):
        stop_requested.append(True)

    signal.signal(signal.SIGTERM, stop_after_this_step)
    bar = tqdm(run.loader, total=config.steps, initial=run.resume_from.step, unit="step",
               mininterval=1, desc=f"stage {config.stage}", disable=not run.ranks.first)
    n_micro_batches = config.batch // run.ranks.dp // config.micro_batch
    began = time.monotonic()
    for step, (plan, micro_batches) in enumerate(bar, run.resume_from.step + 1):
        torch.manual_seed(dropout_seed(config.seed, step, run.ranks.rank))
        set_learning_rates(optimizer, config, step)
        stats = StepStats(run.loader.sources, config.cp)
        for k, rows in enumerate(micro_batches, 1):
            parallel.set_last_micro_batch(model, k == n_micro_batches)
            # what it holds is read at the end of the step: no wait here
            stats.add(rows, *forward_backward(run, model, rows))
        stats.all_reduce()
        norms = divide_and_clip(run, groups, stats.weight)
        if not all(map(math.isfinite, (stats.loss, *norms.values()))):
            stop_nonfinite(run, step, plan, stats, norms)
        optimizer.step()
        optimizer.zero_grad()

        stop, newly_unreadable, unreadable = run.loader.exchange(bool(stop_requested))
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        line = make_line(config, step, plan, stats, norms, rates, unreadable)
        log.step(line | {"seconds": time.monotonic() - began}, newly_unreadable)
        evaluates = is_due(step, eval_every) and step < config.steps
        if stop or evaluates or is_due(step, config.save_every, config.steps):
            position = {"plans": plan.state, "unreadable": unreadable}
            checkpoint.save(run, model, optimizer, step, position)
        if stop:
            raise Terminated(step)
        newest_picture |= watcher.look(run, model, step)
        if evaluates:
            signal.signal(signal.SIGTERM, stop_at_once)
            if stop_requested:  # since the step was done
                raise Terminated(step)
            watcher.evaluate_step(run, model, log, step)
            signal.signal(signal.SIGTERM, stop_after_this_step)
        bar.set_postfix(loss=f"{stats.loss:.3f}", fill=f"{line['fill_tokens']:.0%}",
                        **newest_picture, refresh=False)
        began = time.monotonic()  # without checkpoint, picture and evaluation
    signal.signal(signal.SIGTERM, stop_at_once)
    if stop_requested and config.save_every:  # without a checkpoint all would be lost
        raise Terminated(config.steps)


def stop_at_once(*_):
    """The handler of SIGTERM outside of the steps, where nothing is left to save."""
    raise Terminated


def is_due(step, every, last=None):
    return bool(every) and (step % every == 0 or step == last)


def batch_of(run, rows):
    """This rank's part of a micro-batch, on the CPU."""
    config = run.config
    batch = packing.collate(rows, config.data.max_tokens, config.data.vision, config.crop_bucket)
    return parallel.cut_for_rank(batch, run.ranks.cp_rank, config.cp, config.cp_heads)


def forward_backward(run, model, rows):
    """Adds the gradients of a micro-batch to those there are -> its Batch, losses (B,T), margins of
    its preference pairs."""
    config = run.config
    batch = batch_of(run, rows).to(run.device)
    # with activation checkpointing no cache of autocast: it would keep a bf16 copy of every weight
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32,
                        cache_enabled=not config.activation_checkpointing):
        nll, lse = model(batch)
    total = (batch.weights * (nll + config.z_loss * lse**2)).sum()
    losses, margins = nll, ()
    if batch.pairs:  # of preferences
        total, losses, margins = objective(run, batch, nll, lse)
    total.backward()
    return batch, losses, margins


def dropout_seed(seed, step, rank):
    """Of a step and rank alone, so that a resumed run draws the same."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:7], "big")


# --------------------------------------------------------------------------------------------------
# the end


def finish(run, model, log, watcher, began):
    """Saves weights, tokenizer and the settings used at inference; the watcher scores the model and
    reports."""
    folder = run.out / "model"
    whole = files.whole_copy(model, "cpu", torch.float32, keep=run.ranks.first)
    if run.ranks.first:
        files.save(whole, folder)
        run.tokenizer.save(folder)
        files.save_data_config(run.config.data, folder)
    run.ranks.barrier()  # writing takes long, and the tensors gathered next wait ten minutes only
    scores = watcher.scores(run, model, run.out / "samples")
    if run.ranks.mesh:
        dist.destroy_process_group()
    if run.ranks.first:
        watcher.end(run, log, scores, time.monotonic() - began)


def main(argv=None):
    # denormal numbers, as gradients of softmax become, make a CPU 5 to 8 times slower; the setting
    # holds for this thread and those that it starts, so it comes before the first work
    torch.set_flush_denormal(True)
    began = time.monotonic()
    run = None
    try:
        signal.signal(signal.SIGTERM, stop_at_once)
        args, config = parse(argv)
        with checkpoint.lock(Path(args.out)):
            run, model = start_run(args, config, world)
            head = make_head(run, args, model)
            if run.config.vit_steps and run.start.is_new:
                pretrain_vit(run, model.vision.vit.to(run.device), world)
            place(run, model)
            groups, optimizer = build_optimizer(run, model)
            if run.device.type == "cuda":
                dry_run_largest_batch(run, groups, partial(forward_backward, run, model))
            fill_weights(run, model, optimizer)
            if run.config.beta:
                references = read_references(run)
                if references is None:
                    with whole_model(run, model, torch.float32) as whole:
                        references = find_references(run, whole)
                run = replace(run, references=references)
            log = RunLog(run, head)
            train(run, model, groups, optimizer, log, report, args.eval_every)
            finish(run, model, log, report, began)
    except (UserError, DataError) as e:
        end(2, e)
    except (RunError, Unreadable, OSError) as e:
        end(1, e)
    except Terminated as e:
        end(143, f"{e}; {how_to_go_on(run)}")
    except KeyboardInterrupt:
        end(130, f"interrupted; {how_to_go_on(run)}")
    except RuntimeError as e:
        end_if_explained(e)
        raise


if __name__ == "__main__":
    main()
