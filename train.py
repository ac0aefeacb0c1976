"""Train Molmo2 (paper: training, Table 12; docs/molmo2.md 7, 10).

    python train.py --stage 1 --tiny                                   # laptop, toy world, no download
    python train.py --stage 1 --tiny --data my.jsonl --media photos    # laptop, own records
    python train.py --stage 1 --data captions.jsonl=0.6 points.jsonl=0.3 text.jsonl=0.1 --preset 4b
    python train.py --stage 1 --tiny --resume                          # continue a run
    torchrun --nproc-per-node 8 train.py --stage 3 --cp 8 --data mix.json --out runs/stage3

Order of this file: data, model, optimizer, the loop, the end. A step:

    packs -> Batch -> nll, lse of each token -> sum(w * (nll + z * lse^2)) -> backward, for all
    micro-batches -> / sum of w -> clip -> AdamW

The one division, by the weight of the whole step and never of a micro-batch, makes packing,
accumulation and the number of ranks invisible.
"""

import dataclasses
import hashlib
import json
import math
import os
import platform
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

import packing
import parallel
from evaluation import report
from training import checkpoint, weights
from training.config import Config, UserError, parse
from training.ending import Ending, Terminated
from training.lock import RunLock
from training.log import RunLog, commit, dropped_by, hardware
from training.planner import RunError
from training.resume import Checkpoint, config_as_text, find_checkpoint, make_run_directory, run_directory
from training.setup import default_workers, model_shape, open_loader, open_model, pick_device, pretrain_vit
from training.stats import StepStats, report_nonfinite


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""
    config: Config
    ranks: parallel.Ranks
    device: torch.device
    dtype: torch.dtype
    out: Path
    tokenizer: object
    data: dict                       # fingerprint of the data
    found: Checkpoint                # where it continues


# --------------------------------------------------------------------------------------------------
# optimizer


def build_optimizer(run, model):
    """Places and shards the model -> its trainable parameters by learning rate, and their AdamW."""
    config = run.config
    if run.ranks.mesh:
        parallel.parallelize(model, run.ranks.mesh, config.shard, run.dtype)
    else:
        model.to(run.device)
    if config.compile:
        model.compile_blocks()
    groups = {part: [p for p in parameters if p.requires_grad]
              for part, parameters in model.parameter_groups().items() if part in config.train}
    named = [{"params": parameters, "name": part} for part, parameters in groups.items()]
    optimizer = torch.optim.AdamW(named, lr=0.0, betas=config.betas, eps=config.adam_eps,
                                  weight_decay=0.0, fused=run.device.type != "mps")
    return groups, optimizer


def learning_rate(step, base, warmup, total, final=0.1):
    """Linear from 0 over `warmup` steps, then a cosine to final * base at `total`; step 1 is the first."""
    if step < warmup:
        return base * step / warmup
    if step >= total:
        return base * final
    cosine = math.cos(math.pi * (step - warmup) / (total - warmup))
    return base * (final + (1 - final) * (1 + cosine) / 2)


def set_learning_rates(optimizer, config, step):
    for group in optimizer.param_groups:
        base, warmup = getattr(config.lr, group["name"]), getattr(config.warmup, group["name"])
        warmup = min(warmup, config.steps // 10)         # of a run shorter than a few warm-ups
        group["lr"] = learning_rate(step, base, warmup, config.steps, config.final_lr)


def divide_and_clip(run, parameters, weight):
    """Divides summed gradients by the weight of the step and clips them -> the norm before clipping.

    The norm is over all ranks, which hold several copies of the gradient where --shard is given.
    """
    copies = run.ranks.world // run.config.shard if run.config.shard else 1
    gradients = [parallel.local(p.grad) for p in parameters if p.grad is not None]
    # float64 on a CPU only: a GPU sums in trees, and a float64 copy would not fit. One read for all
    wide = torch.float64 if run.device.type == "cpu" else None
    norms = [torch.linalg.vector_norm(g, dtype=wide) for g in gradients]
    square = sum(n * n for n in torch.stack(norms).tolist()) if norms else 0.0
    square = parallel.all_reduce_sums({"square": square})["square"] / copies
    norm = math.sqrt(square) / weight
    if gradients:
        torch._foreach_mul_(gradients, min(run.config.clip / (norm + 1e-6), 1) / weight)
    return norm


# --------------------------------------------------------------------------------------------------
# the loop


def train(run, model, groups, optimizer, loader, log, evaluate, eval_every=0):
    """Runs the steps that are left. evaluate(model) -> scores, called every eval_every steps."""
    config, ranks = run.config, run.ranks
    saver = checkpoint.Saver(run.out, config.keep, ranks.first, ranks.saving)
    stop_requested = []
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.append(True))    # ends after this step
    bar = tqdm(loader, total=config.steps, initial=run.found.step, unit="step", mininterval=1,
               desc=f"stage {config.stage}", disable=not ranks.first)
    n_skipped = run.found.state.get("skipped", 0)
    began = time.monotonic()
    for step, (plan, micro_batches) in enumerate(bar, run.found.step + 1):
        torch.manual_seed(dropout_seed(config.seed, step, ranks.rank))
        set_learning_rates(optimizer, config, step)
        stats = StepStats(loader.sources, config.cp)
        for rows in micro_batches:
            batch, nll = forward_backward(run, model, rows)
            stats.add(rows, batch, nll)
        stats.all_reduce()
        norms = {part: divide_and_clip(run, parameters, stats.weight)
                 for part, parameters in groups.items()}
        finite = math.isfinite(stats.loss) and all(map(math.isfinite, norms.values()))
        if finite:
            optimizer.step()
        else:
            n_skipped += 1
            batches = [batch_of(run, rows) for rows in stats.nonfinite]
            report_nonfinite(run, step, plan, stats, norms, batches)
        optimizer.zero_grad()

        others = sync_ranks(step, loader, saver, stop_requested, ranks)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        line = {"step": step, **loss_fields(stats, norms, finite), "lr": rates, "skipped_steps": n_skipped,
                **plan_fields(config, plan, stats, others), "seconds": time.monotonic() - began}
        log.step(line, others.newly_masked)
        bar.set_postfix(loss=f"{stats.loss:.3f}", fill=f"{line['fill_tokens']:.0%}", refresh=False)
        began = time.monotonic()
        if others.stop or is_due(step, config.save_every, config.steps):
            state = {"step": step, "config": config_as_text(config), "data": run.data,
                     "model": dataclasses.asdict(config.model), "skipped": n_skipped,
                     "loader": {"plans": plan.state, "masked": dict(others.masked)}}
            save(run, saver, step, model, optimizer, state)
        if others.stop:
            all_ranks_or_none(saver.wait)
            raise Terminated(f"SIGTERM: ended after step {step}; --resume continues from there")
        if is_due(step, eval_every) and step < config.steps:
            log.scores(step, evaluate(model))
            began = time.monotonic()
    all_ranks_or_none(saver.wait)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_due(step, every, last=None):
    return bool(every) and (step % every == 0 or step == last)


def batch_of(run, rows):
    """This rank's part of a micro-batch, on the CPU."""
    config = run.config
    batch = packing.collate(rows, config.data.max_tokens, config.data.vision, config.crop_bucket)
    return parallel.shard(batch, run.ranks.cp_rank, config.cp)


def forward_backward(run, model, rows):
    """Adds the gradients of a micro-batch to those there are -> its Batch, nll (B,T)."""
    config, dtype = run.config, run.dtype
    batch = batch_of(run, rows).to(run.device)
    # cache_enabled=False: autocast's weight cache would hold a bf16 copy of every trainable weight
    with torch.autocast(run.device.type, dtype, enabled=dtype != torch.float32,
                        cache_enabled=not config.activation_checkpointing):
        nll, lse = model(batch)
    (batch.weights * (nll + config.z_loss * lse**2)).sum().backward()
    return batch, nll


def dropout_seed(seed, step, rank):
    """The same after a resume."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:7], "big")


def loss_fields(stats, norms, finite):
    """The fields of a log line that say what the step has learned; None where it is not finite."""
    return {"loss": stats.loss if finite else None, **stats.counts, "weight": stats.total_weight,
            "nll_by_source": stats.nll_by_source if finite else None,
            "grad_norm": math.hypot(*norms.values()) if finite else None,
            "grad_norms": norms if finite else None}


def plan_fields(config, plan, stats, others):
    """The fields of a log line that say which records the step was made of."""
    return {"fill_tokens": stats.counts["tokens"] / (config.batch * config.data.max_tokens),
            "fill_crops": stats.counts["crops"] / (config.batch * config.pack_crops),
            "longest_wait": plan.longest_wait,
            **dropped_by(Counter(plan.skipped) + others.masked),
            "ids": hashlib.sha256("\n".join(plan.ids).encode()).hexdigest()[:16]}


class Synced(NamedTuple):
    """What all ranks know after a step."""
    newly_masked: list               # records masked in it
    masked: Counter                  # of all masked so far, {"source: code": n}
    stop: bool                       # one of the ranks got SIGTERM


def sync_ranks(step, loader, saver, stop_requested, ranks):
    """-> Synced; RunError on all ranks if the checkpoint being written fails on one of them."""
    mine = (loader.newly_masked, loader.masked.counts) if ranks.cp_rank == 0 else ([], Counter())
    of_ranks = parallel.all_gather((error_of(saver.done), bool(stop_requested), *mine))
    loader.newly_masked = []
    newly_masked, masked = [], Counter()
    for failure, _, new, counts in of_ranks:
        if failure:
            raise RunError(f"step {step}: {failure}", on_all_ranks=True)
        newly_masked += new
        masked += counts
    return Synced(newly_masked, masked, any(stop for _, stop, *_ in of_ranks))


def save(run, saver, step, model, optimizer, state):
    """Begins to write a checkpoint; RunError on all ranks if one of them cannot."""
    all_ranks_or_none(lambda: saver.begin(step, run.tokenizer))
    saver.save(step, model, optimizer, state)


def error_of(act):
    """Why act() cannot write a checkpoint; "" if it can."""
    try:
        act()
    except checkpoint.SaveError as e:
        return str(e)
    return ""


def all_ranks_or_none(act):
    """Does what every rank must be able to do; if one of them cannot, all of them end."""
    failures = [failure for failure in parallel.all_gather(error_of(act)) if failure]
    if failures:
        raise RunError(failures[0], on_all_ranks=True)


# --------------------------------------------------------------------------------------------------
# the end


def export_model(model, ranks):
    """The model as one process has it; of a sharded one, a copy on the CPU of the first rank, else None."""
    if not ranks.mesh:
        return model
    tensors = parallel.gather_full_model(model)
    if not ranks.first:
        return None
    copy = weights.meta_model(model.config)
    copy.load_state_dict(tensors, assign=True)
    return copy.eval()


def final_evaluation(run, model, eval_records):
    """Writes weights, tokenizer, curves and samples -> scores; the others wait for the first rank."""
    exported = export_model(model.eval(), run.ranks)
    scores = None
    if run.ranks.first:
        folder = run.out / "model"
        weights.save(exported, folder)
        run.tokenizer.save(folder)
        settings = dataclasses.asdict(run.config.data)
        settings.pop("vision")                       # the model's config.json has it
        (folder / "data.json").write_text(json.dumps(settings))
        report.draw_curves(run.out)
        samples = run.out / "samples"
        scores = report.final_scores(run.config, exported, run.tokenizer, eval_records, samples)
    run.ranks.barrier()
    return scores


def first_log_line(run, args, model):
    params = {part: sum(p.numel() for p in ps) for part, ps in model.parameter_groups().items()}
    return {"config": dataclasses.asdict(run.config), "command": vars(args), "commit": commit(),
            "device": str(run.device), "hardware": hardware(run.device),
            "dtype": str(run.dtype).split(".")[-1], "world": run.ranks.world, "params": params,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def prepare(args, config, ending):
    """Opens everything that can be wrong before anything is written -> Run, model, loader, records
    to evaluate on."""
    device, dtype = pick_device(config)
    if "workers" not in args.fields:
        config = replace(config, workers=default_workers(device))
    found, config = find_checkpoint(args, config)
    world = int(os.environ.get("WORLD_SIZE", 1))
    most = max(config.batch * config.cp // world, 1)     # packs of a step that a rank has
    config = replace(config, micro_batch=min(config.micro_batch, most))
    if error := parallel.layout_error(world, config, model_shape(args, config, found)):
        raise UserError(error)
    ranks = ending.ranks = parallel.join(config.cp, device)
    config = replace(config, workers=parallel.broadcast(config.workers))     # the same on all ranks
    folders = sorted(set(parallel.all_gather(str(found.folder))))
    if len(folders) > 1:
        raise RunError(f"--resume: the ranks see different checkpoints ({', '.join(folders)})", True)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    model, tokenizer, config = open_model(args, config, found)
    loader, fingerprint, eval_records = open_loader(args, config, ranks, tokenizer, found)
    out = parallel.broadcast(make_run_directory(args, config, found) if ranks.first else None)
    ending.loader, ending.out = loader, out
    run = Run(config, ranks, device, dtype, out, tokenizer, fingerprint, found)
    return run, model, loader, eval_records


def main(argv=None):
    # gradients of softmax become denormal numbers, with which a CPU is 5 to 8 times slower; a setting
    # of this thread and those that it starts, so it comes before the first work
    torch.set_flush_denormal(True)
    began = time.monotonic()
    with Ending() as ending:
        args, config = parse(argv)
        with RunLock(run_directory(args, config)):
            run, model, loader, eval_records = prepare(args, config, ending)
            ranks, found = run.ranks, run.found
            if run.config.vit_steps and not args.init and not found.folder:
                vit = model.vision.vit.to(run.device)
                pretrain_vit(run.config, run.out if ranks.first else None, vit)
            head = first_log_line(run, args, model)
            groups, optimizer = build_optimizer(run, model)
            if found.folder:
                checkpoint.restore(found.folder, model, optimizer)
            log = RunLog(run.out, ranks.first, head, found.step or None)

            def evaluate(model):
                exported = export_model(model.eval(), ranks)
                scores = None
                if ranks.first:
                    scores = report.final_scores(run.config, exported, run.tokenizer, eval_records)
                ranks.barrier()
                model.train()
                return scores

            train(run, model, groups, optimizer, loader, log, evaluate, args.eval_every)
            scores = final_evaluation(run, model, eval_records)
            if ranks.mesh:
                dist.destroy_process_group()
            if ranks.first:
                end_report(run, log, scores, time.monotonic() - began)


def end_report(run, log, scores, seconds):
    """The last line of the log and of stdout."""
    log.scores(run.config.steps, scores, seconds=seconds)
    report.draw_progress(run.out)
    print(json.dumps({"out": str(run.out), "steps": run.config.steps, "loss": log.loss,
                      "seconds": round(seconds, 1), "eval": scores}))


if __name__ == "__main__":
    main()
