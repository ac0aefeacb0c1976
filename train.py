"""Trains Molmo2 (paper: training, Table 12; docs/molmo2.md 7, 10).

    python train.py --stage 1 --tiny                            # laptop, toy world, no download
    torchrun --nproc-per-node 8 train.py --stage 3 --cp 8 --data mix.json --init runs/stage2

This file has three parts: the optimizer, the loop, and the end of a run. training/setup.py opens
the data and the model. One step computes, with loss weights w:

    for each micro-batch:   rows -> Batch -> nll, lse of each token (B,T)
                            sum(w * (nll + z * lse^2)) -> backward adds to the gradients
    once per step:          gradients / (sum of w over the whole step) -> clip -> AdamW

There is one division, by the loss weight of the whole step. If each micro-batch were divided by its
own weight, a token would count more in a light micro-batch than in a heavy one. In the example of
docs/walk/README.md, section 6, this changes the gradient by 52 % of its length. With one division,
the result without dropout does not depend on packing, accumulation or the number of ranks.
"""

import hashlib
import math
import os
import signal
import time
from functools import partial
from itertools import chain
from pathlib import Path

# This must happen before torch is imported. OpenMP's threads then spin for a moment and
# sleep. By default they spin for milliseconds; when another process uses the same
# cores, a step then takes 3.5 times as long (docs/log.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch
from tqdm import tqdm

import packing
import parallel
from evaluation import report
from records.errors import DataError, RunError, Terminated, Unreadable, UserError, lock, warn
from toy import world
from training import checkpoint
from training.config import parse
from training.loader import Ahead
from training.log import (
    RunLog,
    StepStats,
    describe_jump,
    describe_unreadable,
    end,
    end_if_explained,
    make_head,
    make_line,
    stop_nonfinite,
)
from training.setup import dry_run_largest_batch, fill_weights, start_run
from weights import files

# --------------------------------------------------------------------------------------------------
# optimizer


def place(run, model):
    """Puts the model on the device, or allocates this rank's shard of it there. Compiles blocks.
    run: a training.setup.Run, with the config, the ranks, the device and the loader."""
    if run.ranks.mesh:
        parallel.parallelize(model, run.ranks.mesh, run.config.shard, run.dtype)
    if model.norm.weight.is_meta:
        # Meta tensors have a shape and no memory. Since FSDP has sharded them already,
        # this allocates the shard of one rank, and no rank ever has the whole model.
        # The values are undefined until fill_weights reads them.
        model.to_empty(device=run.device)
    elif not run.ranks.mesh:
        model.to(run.device)
    if run.config.compile:
        model.compile_blocks()


def build_optimizer(run, model):
    """-> the trained parameters {group: [parameter, ..]}, and their AdamW.

    The groups are the ViT, the connector and the decoder. Each has its own learning rate, because
    in stage 1 the connector is new and the other two are not (Table 12).
    """
    config = run.config
    groups = {}
    for part, parameters in model.parameter_groups().items():
        if part in config.train:
            groups[part] = [p for p in parameters if p.requires_grad]
    named = [{"params": parameters, "name": part} for part, parameters in groups.items()]
    has_fused = run.device.type != "mps"
    # lr is 0 here, because step_once sets it before every step; weight_decay
    # is 0 as in the official code (docs/molmo2.md 10)
    optimizer = torch.optim.AdamW(named, lr=0.0, betas=config.betas, eps=config.adam_eps,
                                  weight_decay=0.0, fused=has_fused)
    return groups, optimizer


def learning_rate(step, base, warmup, total, final=0.1):
    """Linear from 0 over `warmup` steps, then a cosine that ends at final * base at step `total`.

    Steps count from 1, so the first update does not have a learning rate of 0.
    """
    if step < warmup:
        return base * step / warmup
    if step >= total:
        return base * final
    angle = math.pi * (step - warmup) / (total - warmup)
    from_1_to_0 = (1 + math.cos(angle)) / 2
    return base * (final + (1 - final) * from_1_to_0)


def learning_rates(config, step):
    """-> {group: its learning rate in a step}."""
    # at most a tenth of the run, because a short run would end during the warm-up otherwise
    longest_warmup = config.steps // 10
    rates = {}
    for part in config.train:
        base = getattr(config.lr, part)
        warmup = min(getattr(config.warmup, part), longest_warmup)
        rates[part] = learning_rate(step, base, warmup, config.steps, config.final_lr)
    return rates


def local_gradients(parameters):
    return [parallel.local(p.grad) for p in parameters if p.grad is not None]


def square_gradients(run, groups):
    """-> {group: sum of the squared gradients of this rank}. The CPU waits for the GPU here."""
    # float64 on a CPU only. A GPU adds in a tree, which rounds less, and may lack memory for it.
    wide = torch.float64 if run.device.type == "cpu" else None
    squares = {}
    for part, parameters in groups.items():
        squares[part] = 0.0
        norms = [torch.linalg.vector_norm(g, dtype=wide) for g in local_gradients(parameters)]
        if norms:
            # Every read makes the CPU wait for the GPU. One tolist per group gives 3 reads
            # per step of the 4B; one per gradient would give 813 (docs/log.md).
            read = torch.stack(norms).tolist()
            squares[part] = sum(norm * norm for norm in read)
    return squares


def divide_and_clip(run, groups, squares, weight):
    """Divides the summed gradients by the loss weight of the step, then clips each group by its own
    norm over all ranks -> {group: norm before clipping}. squares: {group: sum over all ranks}.

    With one common norm, a large gradient of the new connector would scale down the others.
    """
    # With HSDP, `copies` groups of ranks have equal gradients, and the sum over all
    # ranks counts every square `copies` times.
    copies = 1
    if run.config.shard:
        copies = run.ranks.world // run.config.shard
    norms = {}
    for part, parameters in groups.items():
        norm = math.sqrt(squares[part] / copies) / weight
        norms[part] = norm
        gradients = local_gradients(parameters)
        if gradients:
            clip = min(run.config.clip / (norm + 1e-6), 1)
            # dividing and clipping are one pass over the gradients, in place
            torch._foreach_mul_(gradients, clip / weight)
    return norms


# --------------------------------------------------------------------------------------------------
# the loop


def step_once(run, model, groups, optimizer, objective, step, steps, stop):
    """One step as the paper describes it -> its StepPlan (training/planner.py), StepStats of all
    ranks, {group: gradient norm}.

    objective: forward_backward, or another function with its arguments. steps: an Ahead, which
    yields for each step the plan of its packs and its micro-batches. stop: a Stop. Its
    `requested` is in the sum over all ranks, because all must stop after the same step.
    """
    config = run.config
    plan, micro_batches = next(steps)
    # a seed for each step, so that a resumed run needs no saved state of the generator
    torch.manual_seed(dropout_seed(config.seed, step, run.ranks.rank))
    rates = learning_rates(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rates[group["name"]]
    stats = StepStats(run.loader.sources, config.cp)
    # batch counts the packs of all ranks; dp groups of ranks have different packs
    n_micro_batches = config.batch // run.ranks.dp // config.micro_batch
    for k, (rows, batch) in enumerate(micro_batches, 1):
        parallel.set_last_micro_batch(model, k == n_micro_batches)
        # stats keeps tensors until the last micro-batch, so the CPU need not wait here
        stats.add(rows, batch, objective(run, model, batch))
    # While the GPU computes, the CPU plans the next step and makes its first Batch.
    steps.fetch()
    # sets loss, weight, squares and stop of stats, for all ranks together
    stats.all_reduce(stop.requested, square_gradients(run, groups))
    norms = divide_and_clip(run, groups, stats.squares, stats.weight)
    # An update with NaN would ruin every weight. All ranks have the same sums, so all stop.
    if not all(map(math.isfinite, (stats.loss, *norms.values()))):
        stop_nonfinite(run, step, plan, stats, norms)
    optimizer.step()
    optimizer.zero_grad()  # sets gradients to None, which frees their memory
    return plan, stats, norms


def train(run, model, groups, optimizer, objective, steps, log, report, eval_every=0):
    """Runs the remaining steps, and between them writes the log and checkpoints. steps: as in
    step_once. `report`, the module evaluation/report.py, may draw a picture after each step, and
    evaluates the model every eval_every steps."""
    config = run.config
    newest_picture = {}
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.request)
    done = run.resume_from.step
    bar = tqdm(range(done + 1, config.steps + 1), total=config.steps, initial=done, unit="step",
               mininterval=1, desc=f"stage {config.stage}", disable=not run.ranks.first)
    began = time.monotonic()
    for step in bar:
        plan, stats, norms = step_once(
            run, model, groups, optimizer, objective, step, steps, stop)
        line = make_line(config, step, plan, stats, norms, learning_rates(config, step))
        log.write(line | {"seconds": time.monotonic() - began})
        evaluates = is_due(step, eval_every) and step < config.steps
        if stats.stop or evaluates or is_due(step, config.save_every, config.steps):
            checkpoint.save(run, model, optimizer, step, {"plans": plan.state})
        if stats.stop:
            raise Terminated(step)
        newest_picture |= report.look(run, model, step)
        if evaluates:
            # the checkpoint above is written, so evaluation may be interrupted
            signal.signal(signal.SIGTERM, stop_at_once)
            if stop.requested:  # SIGTERM came after the sum over all ranks
                raise Terminated(step)
            report.evaluate_step(run, model, log, step)
            signal.signal(signal.SIGTERM, stop.request)
        bar.set_postfix(loss=f"{stats.loss:.3f}", fill=f"{line['fill_tokens']:.0%}",
                        **newest_picture, refresh=False)
        began = time.monotonic()  # "seconds" excludes checkpoint, picture and evaluation
    signal.signal(signal.SIGTERM, stop_at_once)
    # A run without checkpoints has nothing to resume from, so it ends normally.
    if stop.requested and config.save_every:
        raise Terminated(config.steps)


class Stop:
    """Notes SIGTERM during the steps, so that the run stops when the step is complete and saved.
    While the run starts, evaluates and finishes, stop_at_once handles SIGTERM."""
    requested = False

    def request(self, *_):
        self.requested = True


def stop_at_once(*_):
    """Handles SIGTERM outside of the steps, when there is nothing to save."""
    raise Terminated


def is_due(step, every, last=None):
    return bool(every) and (step % every == 0 or step == last)


def batch_of(run, rows):
    """rows, one list of data.Example per packed sequence -> this rank's part of the Batch, on the
    CPU.

    All ranks that share rows (config.cp of them, of which cp_heads exchange heads:
    parallel.make_mesh) make the whole Batch, because each must know which visual tokens the others
    need.
    """
    config = run.config
    batch = packing.collate(rows, config.data.max_tokens, config.model.vision, config.crop_bucket)
    return parallel.cut_for_rank(batch, run.ranks.cp_rank, config.cp, config.cp_heads)


def steps_with_batches(run, make_batch):
    """Yields the steps of the loader: (StepPlan, micro-batches of this rank). A micro-batch is
    (rows, Batch on the device). The first one is made together with the step, the others when they
    are needed. Nothing here waits for the GPU."""
    for plan, micro_batches in run.loader:
        made = ((rows, make_batch(run, rows).to(run.device)) for rows in micro_batches)
        yield plan, chain([next(made)], made)


def forward_backward(run, model, batch):
    """Adds the gradients of a micro-batch to those that are already there -> the loss of each token
    (B,T)."""
    config = run.config
    # The weights are float32, and autocast casts them to bfloat16 where they are used. Its cache
    # would keep all these copies: 7 GiB, by a count of all tensors (docs/log.md). Without
    # activation checkpointing the backward pass keeps them anyway, so the cache costs nothing.
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32,
                        cache_enabled=config.recompute == 0):
        nll, lse = model(batch)  # float32, and 0 where there is no loss
    # A sum and not a mean, because divide_and_clip divides once per step. lse is the logarithm
    # of the softmax's denominator. The z-loss, its square, keeps lse small (docs/molmo2.md 7.2).
    total = (batch.weights * (nll + config.z_loss * lse**2)).sum()
    total.backward()
    # the log reports nll without the z-loss, so that it is the usual cross-entropy
    return nll


def dropout_seed(seed, step, rank):
    """A seed for one step and one rank. A resumed run draws the same dropout, and different ranks
    draw different dropout."""
    text = f"{seed} {step} {rank}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:7], "big")  # of 56 bits, because torch takes less than 64


# --------------------------------------------------------------------------------------------------
# the end


def finish(run, model, log, report, began, as_json):
    """Saves weights, tokenizer and the settings that inference needs. Then `report` evaluates the
    model and prints the scores, with as_json also as JSON."""
    folder = run.out / "model"
    whole = files.whole_copy(model, "cpu", torch.float32, keep=run.ranks.first)
    if run.ranks.first:
        files.save(whole, folder)
        run.tokenizer.save(folder)
        files.save_data_config(run.config.data, folder)
    # Writing a large model takes long. This barrier waits for a day. Without it, the other ranks
    # would wait in the next collective, which fails after some minutes (training/ranks.py).
    run.ranks.barrier()
    scores = report.scores(run, model, run.out / "samples")
    if run.ranks.first:
        warn(describe_unreadable(run.out))
        seconds = time.monotonic() - began
        report.end(run, log, scores, seconds, as_json)


def main(argv=None, open_objective=None, make_batch=batch_of):
    """open_objective: run -> a function in place of forward_backward. make_batch: a function in
    place of batch_of. examples/preferences.py has both."""
    # Gradients of softmax become denormal numbers, and products with these take a CPU 5
    # to 10 times as long (docs/log.md). The setting holds for this thread and the
    # threads that it starts, so it must come first.
    torch.set_flush_denormal(True)
    began = time.monotonic()
    run = None
    try:
        signal.signal(signal.SIGTERM, stop_at_once)
        args, config = parse(argv)
        with lock(Path(args.out)):
            generated = world.mixture(config.seed, config.stage)  # used without --data
            run, model = start_run(args, config, generated)
            objective = open_objective(run) if open_objective else forward_backward
            first_line = make_head(run, args, model)  # of the log
            place(run, model)
            groups, optimizer = build_optimizer(run, model)
            # before any weight is read, so that a lack of memory ends the run at once
            if run.device.type == "cuda":
                compute = partial(objective, run, model)
                dry_run_largest_batch(run, groups, make_batch, compute)
            fill_weights(run, model, optimizer)
            log = RunLog(run, first_line)
            if run.ranks.first and 0 < run.resume_from.step < run.config.steps:
                # says nothing unless other flags let the learning rate jump here
                warn(describe_jump(run, learning_rates(run.config, run.resume_from.step)))
            steps = Ahead(steps_with_batches(run, make_batch))
            train(run, model, groups, optimizer, objective, steps, log, report, args.eval_every)
            finish(run, model, log, report, began, args.json)
        run.ranks.leave()
    # exit status 2: the user can correct it; 1: the run failed; 143 and 130: a signal ended it
    except (UserError, DataError) as e:
        end(2, e)
    except (RunError, Unreadable, OSError) as e:
        end(1, e)
    except Terminated as e:
        end(143, f"{e}; {checkpoint.how_to_go_on(run)}")
    except KeyboardInterrupt:
        end(130, f"interrupted; {checkpoint.how_to_go_on(run)}")
    except RuntimeError as e:
        end_if_explained(e)  # with a sentence, if training/log.py has one for it
        raise


if __name__ == "__main__":
    main()
