"""Train Molmo2 (paper: training, Table 12; spec 7, 10).

    python train.py --stage 1 --tiny                                   # laptop: the toy world, no download
    python train.py --stage 1 --tiny --data my.jsonl --media photos    # laptop, own records
    python train.py --stage 1 --data captions.jsonl=0.6 points.jsonl=0.3 text.jsonl=0.1 --preset 4b --device cuda
    python train.py --stage 1 --tiny --resume                          # go on where a run was stopped or killed

Config and command line: config.py. Order of this file: data, model, optimizer, loop, what is left behind. A step:

    packs -> Batch -> nll, lse per token -> sum(w * (nll + z * lse^2)) -> backward, over all micro-batches -> / sum of w -> clip -> AdamW

The one division, by the weight of the whole step and never of a micro-batch, makes packing and accumulation invisible.
"""

import dataclasses
import hashlib
import json
import math
import os
import platform
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import alive
import attention
import data
import model as models
import packing
import parallel
import plans
from loader import Loader, RunError
from text import tokenizer as text
from toy import world as tiny
from training import checkpoint, weights
from training.config import Config, GroupRates, Parser, UserError, as_text, config_from_json, field_values, override, parse  # noqa: F401 - tools ask for them here
from training.log import RunLog, commit, dropped_by, hardware, read_log, read_skips, save_nonfinite_batches
from training.sources import open_sources

# ---------------------------------------------------------------------------------------------------------------
# data


def directory_of(args, config):
    return Path(args.out or f"runs/stage{config.stage}{'-tiny' if args.tiny else ''}")


def occupied(out):
    return out.exists() and any(out.iterdir() if out.is_dir() else [out])


def run_directory(args, config, folder):
    """Makes the directory of a run that begins; what is there already, an old run or one without a checkpoint, is moved aside."""
    out = directory_of(args, config)
    if not folder and occupied(out):
        n = 1
        while (aside := out.with_name(f"{out.name}.old-{n}")).exists():
            n += 1
        out.rename(aside)
    try:
        (out / "model").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: {e.strerror}") from None
    return out


# what may be another on the way: where and how fast it is computed, not what
LAYOUT = {"device", "cp", "shard", "micro_batch", "workers", "activation_checkpointing", "uncheckpointed_blocks", "compile", "crop_bucket", "dry_run", "save_every",
          "keep", "eval_images", "max_skip", "on_nonfinite", "preset", "model"}


def plain_config(config):
    """{dotted field: value}, as JSON would hold it."""
    return {name: as_text(value) for name, value in field_values(config).items()}


def find_checkpoint(args, config):
    """-> the folder to go on from and its state, or None and {}; and config with the model of that run. UserError if the recipe differs."""
    out = directory_of(args, config)
    if not args.resume:
        if args.out and occupied(out):
            raise UserError(f"--out {out}: not empty; name another directory, or go on with that run: --resume")
        return None, {}, config
    found = checkpoint.complete_steps(out)
    if not found:
        if parallel.is_first():
            print(f"train.py: no complete checkpoint in {out}: the run starts afresh", file=sys.stderr)
        args.init = args.else_init
        return None, {}, config
    folder = out / f"step-{found[0]}"
    state = checkpoint.state_of(folder)
    try:
        shape = weights.config_from_dict(state["model"])
        text.load(folder, shape.n_vocab)
    except weights.CONFIG_ERRORS as e:
        raise checkpoint.LoadError(folder, e) from None
    if config.model != shape and (args.preset or config.model != models.PRESETS[config.preset]):
        raise UserError(f"--resume: {folder} has another model than --preset and --model.* ask for; leave them out")
    config = replace(config, model=shape, data=replace(config.data, vision=shape.vision))
    theirs, ours = state["config"], plain_config(config)
    differ = [f"{key} was {theirs.get(key)} and is {ours.get(key)}" for key in sorted({*theirs, *ours})
              if key.split(".")[0] not in LAYOUT and theirs.get(key) != ours.get(key)]
    if differ and not args.resume_anyway:
        raise UserError(f"--resume: {folder} is of another recipe: {'; '.join(differ)}. --resume-anyway goes on with it all the same")
    return folder, state, config


def same_data(args, folder, state, purpose):
    """UserError if the run so far was with other data than `purpose` (plans.purpose) tells."""
    differ = [key for key in purpose if state["data"].get(key) != purpose[key]]
    if differ and not args.resume_anyway:
        raise UserError(f"--resume: {folder} is of other data ({', '.join(differ)} changed). --resume-anyway goes on with it all the same")


def seek(loader, folder, state, ranks):
    """The loader goes on where a checkpoint says, and masks unseen what the run found bad until it was interrupted."""
    try:
        loader.restore({**state["loader"], "masked": state["loader"]["masked"] if ranks.first else {}})
    except data.DataError:
        raise
    except (KeyError, TypeError, ValueError) as e:
        raise checkpoint.LoadError(folder, e) from None
    loader.known_bad = {b["draw"]: b["reason"] for b in read_skips(folder.parent)}


# ---------------------------------------------------------------------------------------------------------------
# model and optimizer


@dataclass
class Ranks:
    """This process among those that train the model; alone, it is the first of one."""
    rank: int = 0
    world: int = 1
    mesh: object = None
    dp: int = 1
    dp_rank: int = 0
    cp_rank: int = 0
    copies: int = 1                  # of the weights, where they are sharded over fewer ranks than there are

    meeting: object = None           # a group in which ranks wait however long it takes
    saving: object = None            # and one for the threads that write checkpoints
    pulse: object = None             # tells the others that this rank lives, and it when another does not

    @property
    def first(self):
        return self.rank == 0

    def meet(self):
        """Waits for what another does alone."""
        if self.meeting:
            dist.barrier(self.meeting)


def join(config, shape, device):
    """Under torchrun: the process group and the mesh -> Ranks, and config with a micro-batch that a rank has. UserError if so many cannot
    share the work of a model of this shape."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    config = replace(config, micro_batch=max(min(config.micro_batch, config.batch * config.cp // world), 1))
    why = parallel.misfit(world, config.cp, shape.n_head, shape.n_kv_head, config.batch, config.micro_batch, config.data.max_tokens,
                          config.shard)
    if why:
        raise UserError(why)
    if world == 1:
        return Ranks(), config
    mesh, *groups = parallel.join(config.cp, device)
    pulse = alive.Pulse()
    pulse.start()
    copies = world // config.shard if config.shard else 1
    return Ranks(dist.get_rank(), world, mesh, world // config.cp, mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank(), copies,
                 *groups, pulse), config


def workers_for(device):
    """How many processes decode ahead for one that trains: on a GPU, which would wait for films, the cores that it has, less its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1, 0), 8) if device.type == "cuda" else 0


def pick_device(config):
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise UserError(f"--device {name}: this machine or this torch has none")
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if name == "cuda" else "float32"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    return torch.device(name), getattr(torch, dtype)


def open_tokenizer(args, config, folder=None):
    """-> tokenizer, and config with the geometry of its model, as open_model finds them, without reading weights; folder: a checkpoint."""
    if folder:
        return text.load(folder, config.model.n_vocab), config
    if args.init is None:
        return data.ByteTokenizer(tiny.WORDS, config.model.n_vocab), config
    try:
        folder, shape, _ = weights.describe(args.init)
        tokenizer = text.load(folder, shape.n_vocab)
    except (OSError, ValueError) as e:
        raise UserError(f"--init {args.init}: {e}") from None
    return tokenizer, replace(config, model=shape, data=replace(config.data, vision=shape.vision))


def open_model(args, config, folder=None):
    """-> model on the CPU, tokenizer, and config with the model's shape: from --init, or new from --preset (a checkpoint will fill it)."""
    if args.init is not None:
        from evaluation.generate import open_model as open_run

        try:
            model, tokenizer, _ = open_run(args.init)
        except (OSError, ValueError) as e:
            raise UserError(f"--init {args.init}: {e}") from None
        shape, wanted = (replace(c, init_std=0.0, vision=replace(c.vision, neighbor_init=False)) for c in (model.config, config.model))
        if wanted != shape and (args.preset or config.model != models.PRESETS[config.preset]):
            raise UserError(f"--init {args.init}: its model has another shape than --preset and --model.* ask for; leave them out")
        config = replace(config, model=model.config, data=replace(config.data, vision=model.config.vision))
    else:
        try:
            model = models.Molmo2(config.model).init_weights()
            tokenizer = open_tokenizer(args, config, folder)[0]
        except (AssertionError, IndexError, RuntimeError, ValueError, ZeroDivisionError) as e:
            raise UserError(f"--model: no model has this shape: {e}") from None
    model.residual_dropout, model.response_dropout = config.residual_dropout, config.response_dropout
    model.activation_checkpointing, model.uncheckpointed_blocks = config.activation_checkpointing, config.uncheckpointed_blocks
    model.embedding.requires_grad_(not config.freeze_embedding)
    for part, parameters in model.parameter_groups().items():
        if part not in config.train:
            for p in parameters:
                p.requires_grad_(False)
    return model.train(), tokenizer, config


def teach_to_see(config, out, vit):
    """Stage 0: a released ViT starts from SigLIP2, the toy's from nothing but this. Leaves stage0.jsonl, a line per step, in out."""
    from toy import vit as stage0

    vit.requires_grad_(True)
    with open(out / "stage0.jsonl" if out else os.devnull, "w", buffering=1) as log:
        for line in stage0.pretrain(vit, config.seed, config.vit_steps):
            log.write(json.dumps(line) + "\n")
    vit.requires_grad_("vit" in config.train)


def learning_rate(step, base, warmup, total, final=0.1):
    """Linear from 0 over `warmup` steps, then a cosine that reaches final * base at `total`; the first update is step 1."""
    if step < warmup:
        return base * step / warmup
    if step >= total:
        return base * final
    return base * (final + (1 - final) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2)


def schedule(config, part, step):
    """The part's rate; a run shorter than a few warm-ups warms up over a tenth of itself."""
    warmup = min(getattr(config.warmup, part), config.steps // 10)
    return learning_rate(step, getattr(config.lr, part), warmup, config.steps, config.final_lr)


# ---------------------------------------------------------------------------------------------------------------
# the loop


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""
    config: Config
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    out: Path
    tokenizer: object
    always: dict                     # what every checkpoint says: config, model, data


def equip(run, model):
    """The model where it is trained, and shared out -> its parameters by learning rate, and their optimizer."""
    config = run.config
    if run.ranks.mesh:
        parallel.parallelize(model, run.ranks.mesh, config.shard, run.dtype)         # moves the shards alone
    else:
        model.to(run.device)
    if config.compile:
        model.compile_blocks()
    groups = {part: [p for p in ps if p.requires_grad] for part, ps in model.parameter_groups().items() if part in config.train}
    optimizer = torch.optim.AdamW([{"params": ps, "name": part} for part, ps in groups.items()], lr=0.0, betas=config.betas,
                                  eps=config.adam_eps, weight_decay=0.0, fused=run.device.type != "mps")
    return groups, optimizer


def train(run, model, groups, optimizer, loader, journal, evaluate, every=0, start=0, skipped=0):
    """The steps after `start`, of which `skipped` were not finite; the model has learned when it returns.

    evaluate() -> metrics, called every `every` steps.
    """
    config, ranks, told_to_end = run.config, run.ranks, []
    saver = checkpoint.Saver(run.out, config.keep, ranks.first, ranks.saving)
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))     # once the step is done; one that never ends is another's to tell
    if config.dry_run == "true" or (config.dry_run == "auto" and run.device.type == "cuda"):
        rehearse(run, model, groups)

    bar = tqdm(islice(loader, config.steps - start), total=config.steps, initial=start, unit="step", desc=f"stage {config.stage}",
               mininterval=1, disable=not ranks.first)
    began = time.time()
    for number, (step, micro_batches) in enumerate(bar, start + 1):
        torch.manual_seed(seed_of(config.seed, number, ranks.rank))      # dropout: the same after a resume
        for group in optimizer.param_groups:
            group["lr"] = schedule(config, group["name"], number)
        nll, weights, seen, suspects = Counter(), Counter(), Counter(), []       # the former two by source
        for rows, sums in behind(passed(run, model, rows) for rows in micro_batches):
            sums = sums.tolist()
            suspects += [] if math.isfinite(sum(sums)) else [rows]
            for source, part in zip((e.source for row in rows for e in row), sums, strict=False):
                nll[source] += part
            seen.update(census(rows))
            for example in (e for row in rows for e in row):
                weights[example.source] += float(example.weights.sum(dtype="float64")) / config.cp
        seen = counted(seen, config.cp)
        nll, weights = (parallel.total({name: float(sums[name]) for name in loader.names()}) for sums in (nll, weights))
        seen["weight"] = sum(weights.values())
        weight = max(seen["weight"], 1e-8)
        loss = sum(nll.values()) / weight
        norms = {part: divide_and_clip(ps, weight, config.clip, ranks.copies) for part, ps in groups.items()}
        finite = math.isfinite(loss) and all(map(math.isfinite, norms.values()))     # sums over ranks: all of them find the same
        if finite:
            optimizer.step()
        else:
            skipped += 1
            tell_nonfinite(run, number, step, loss, norms, suspects)
        optimizer.zero_grad()

        bad, masked, ended = compare(number, step, loader, saver, told_to_end, ranks)
        by_source = {name: nll[name] / weights[name] for name in nll if weights[name] > 0}
        line = {"step": number, "loss": loss if finite else None, **seen, "nll_by_source": by_source if finite else None,
                "lr": {g["name"]: g["lr"] for g in optimizer.param_groups},
                "grad_norm": math.hypot(*norms.values()) if finite else None, "grad_norms": norms if finite else None,
                "skipped_steps": skipped, "fill_tokens": seen["tokens"] / (config.batch * config.data.max_tokens),
                "fill_crops": seen["crops"] / (config.batch * config.pack_crops), "longest_wait": step.waited,
                **dropped_by(Counter(step.dropped) + masked), "ids": digest(step), "seconds": time.time() - began}
        began = time.time()
        journal.step(line, bad)
        bar.set_postfix(loss=f"{loss:.3f}", fill=f"{line['fill_tokens']:.0%}", refresh=False)
        if ended or (config.save_every and (number % config.save_every == 0 or number == config.steps)):
            now = {**run.always, "step": number, "skipped": skipped, "loader": {**loader.state(step), "masked": dict(masked)}}
            together(partial(saver.begin, number, run.tokenizer))
            saver.save(number, model, optimizer, now)
        if ended:
            together(saver.wait)
            raise Terminated(f"SIGTERM: ended after step {number}, which --resume goes on from")
        if every and number % every == 0 and number < config.steps:
            model.eval()
            scores = evaluate(plain(model, ranks))
            ranks.meet()
            journal.scores(number, scores)
            model.train()
            began = time.time()
    together(saver.wait)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def behind(items):
    """The same, each only once the next has begun: while a GPU works on that, its results of this one are read without waiting."""
    items = iter(items)
    last = next(items)
    for item in items:
        yield last
        last = item
    yield last


def batch_of(run, rows):
    """What this rank works on of a micro-batch, on the CPU."""
    config = run.config
    batch = packing.collate(rows, config.data.max_tokens, config.data.vision, config.crop_bucket)
    return parallel.shard(batch, run.ranks.cp_rank, config.cp)


def passed(run, model, rows):
    """Forward and backward of a micro-batch -> it, and the summed weighted nll of each example and of padding, on the device, which may
    still be at work; gradients add to those there are."""
    config, dtype = run.config, run.dtype
    batch, n = batch_of(run, rows), sum(map(len, rows))
    first = torch.tensor([0, *accumulate(map(len, rows[:-1]))])
    here = batch.doc.unflatten(1, (config.cp, -1))[:, run.ranks.cp_rank]                  # of this rank's tokens; the mask wants all
    example = torch.where(here < 0, n, here + first[:, None])                             # of each token; the last is padding
    batch, example = batch.to(run.device), packing.to_device(example, run.device)
    # its cache would keep bfloat16 copies of all that learns until the forward ends, which is what activation_checkpointing saves
    with torch.autocast(run.device.type, dtype, enabled=dtype != torch.float32, cache_enabled=not config.activation_checkpointing):
        nll, lse = model(batch)
    (batch.weights * (nll + config.z_loss * lse**2)).sum().backward()
    return rows, torch.zeros(n + 1, device=run.device).index_add_(0, example.flatten(), (batch.weights * nll.detach()).flatten())


def rehearse(run, model, groups):
    """Two micro-batches as full as any can be, beside what the optimizer will hold, and forgotten: what does not fit is known before the
    first step. RunError with what to change."""
    config, ranks = run.config, run.ranks
    held = [torch.empty_like(parallel.local(p)) for ps in groups.values() for p in ps for _ in range(2)]
    share = data.CropShard(ranks.cp_rank, config.cp, 0, config.pack_crops) if config.cp > 1 else None
    row = [data.largest_example(config.data, config.pack_crops, config.model.n_vocab, share)]
    try:
        for _ in range(2):               # the second beside the gradients of the first
            passed(run, model, [row] * config.micro_batch)
    except torch.OutOfMemoryError as e:
        raise RunError(f"the fullest batch does not fit: {str(e).split('.')[0]}; a smaller --micro-batch or --data.max_tokens, a larger "
                       "--cp or more GPUs; python -m tools.memory counts it") from None
    for ps in groups.values():
        for p in ps:
            p.grad = None
    if run.device.type == "cuda" and ranks.first:
        tqdm.write(f"rehearsal: at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of a GPU", file=sys.stderr)
    del held


def counted(seen, cp):
    """The census of this rank -> of all; those that share a row have all counted it."""
    return {name: round(value) for name, value in parallel.total({name: value / cp for name, value in seen.items()}).items()}


def digest(step):
    return hashlib.sha256("\n".join(step.ids).encode()).hexdigest()[:16]


def compare(number, step, loader, saver, told_to_end, ranks):
    """What the ranks tell each other after a step -> records found bad in it, counts of all masked so far, is any of them told to end?

    RunError, on all of them, if they planned different records or if the checkpoint that is being written fails.
    """
    mine = (loader.bad, loader.masked) if ranks.cp_rank == 0 else ([], {})           # a group has agreed on them
    everyone = parallel.gathered((digest(step), failed_save(saver), bool(told_to_end), *mine))
    loader.bad = []
    if len(planned := {ids for ids, *_ in everyone}) > 1:
        raise RunError(f"step {number}: the ranks have planned different records ({', '.join(sorted(planned))}); do all of them see the "
                       "same files?", everywhere=True)
    if failed := next((why for _, why, *_ in everyone if why), ""):
        raise RunError(f"step {number}: {failed}", everywhere=True)
    bad, masked = [], Counter()
    for *_, found, so_far in everyone:
        bad, masked = bad + found, masked + Counter(so_far)
    return bad, masked, any(end for _, _, end, *_ in everyone)


def tell_nonfinite(run, number, step, loss, norms, suspects):
    """Names the records of a step whose loss or gradient is not finite and keeps the batch; RunError unless such steps are skipped."""
    batches = [batch_of(run, rows) for rows in suspects]
    save_nonfinite_batches(run.out, number, batches, run.ranks.rank)
    ids = [i for of_rank in parallel.gathered([i for batch in batches for i in batch.ids]) for i in of_rank]
    named = ", ".join([*dict.fromkeys(ids or step.ids)][:20])
    where = f"the batch is in {run.out}/nonfinite-step-{number}-*" if ids else f"tools.view --run {run.out} --step {number} shows them"
    said = f"step {number}: loss {loss}, gradient norm {math.hypot(*norms.values())}; records: {named}; {where}"
    if run.config.on_nonfinite == "stop":
        raise RunError(said, everywhere=True)
    if run.ranks.first:
        tqdm.write(f"{said}; skipped", file=sys.stderr)


def seed_of(seed, step, rank):
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:7], "big")


def together(act):
    """Does what every rank must be able to do; if one of them cannot, all of them end."""
    try:
        act()
        why = ""
    except checkpoint.SaveError as e:
        why = str(e)
    why = next(filter(None, parallel.gathered(why)), "")
    if why:
        raise RunError(why, everywhere=True)


def failed_save(saver):
    """Why the checkpoint that was being written cannot be; "" if it can, or goes on."""
    try:
        saver.done()
    except checkpoint.SaveError as e:
        return str(e)
    return ""


class Terminated(Exception):
    """Ends the command with status 143 and one sentence, that of every rank."""
    everywhere = True


def divide_and_clip(parameters, weight, limit, copies=1):
    """Sums of gradients -> the gradient of the mean, not longer than `limit`; returns its norm before that, over all ranks, which hold
    `copies` of it."""
    gradients = [parallel.local(p.grad) for p in parameters if p.grad is not None]
    # on a GPU in float32, where sums are trees and no copy in float64 fits; read once for all of them
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64 if g.is_cpu else None) for g in gradients]
    square = sum(n * n for n in torch.stack(norms).tolist()) if norms else 0.0
    norm = math.sqrt(parallel.total({"square": square})["square"] / copies) / weight
    if gradients:
        torch._foreach_mul_(gradients, min(limit / (norm + 1e-6), 1) / weight)
    return norm


def plain(model, ranks):
    """The model as one process knows it; of a sharded one, a copy on the CPU of the first rank, None on the others."""
    if not ranks.mesh:
        return model
    weights = parallel.whole(model)
    if not ranks.first:
        return None
    copy = weights.meta_model(model.config)
    copy.load_state_dict(weights, assign=True)
    return copy.eval()


def census(rows):
    """What is in these rows, to be added up over the micro-batches of a step."""
    examples = [e for row in rows for e in row]
    return {"packs": len(rows), "examples": len(examples),
            "branches": sum(max(int(e.branch.max(initial=0)), 1) for e in examples if not e.bad),
            "tokens": sum(len(e.tokens) for e in examples), "crops": sum(0 if e.unit is None else len(e.unit) for e in examples),
            "visual_tokens": sum(len(e.pool_dst) for e in examples), "pairs": sum(attention.area(e.branch, e.bidir) for e in examples),
            "loss_tokens": sum(int((e.weights > 0).sum()) for e in examples),
            "masked_tokens": sum(len(e.tokens) for e in examples if e.bad),              # of records found bad while decoding
            "branches_dropped": sum(e.dropped for e in examples), "tokens_dropped": sum(e.dropped_tokens for e in examples)}


# ---------------------------------------------------------------------------------------------------------------
# what is left behind


def score(config, model, tokenizer, asked, folder=None):
    """-> metrics: of the records in `asked`, or, where that is None, of the held-out parts of the toy world; folder: samples go there."""
    from evaluation import charts, evaluate, pictures

    if asked is not None:
        # one limit for all answers: those by kind are for released tokenizers, and in bytes an answer is four times as long
        metrics, predictions = evaluate.evaluate(model, tokenizer, config.data, asked, max_new=512) if asked else ({}, [])
        if folder:
            pictures.draw(predictions, asked, folder)
        return metrics

    metrics = {}
    for part, records in tiny.held_out(config.stage, config.seed, config.eval_images).items():
        masks_of = lambda record, k: record["source"].masks(record, record["annotations"][k])      # noqa: E731
        found, predictions = evaluate.evaluate(model, tokenizer, config.data, records, masks_of, max_new=128 if config.stage == 1 else 384)
        if folder:
            pictures.draw(predictions, records, folder / part, n=100)
        if part == "unseen":
            annotations = {r["id"]: r["annotations"] for r in records}
            rare = [p["point_f1"] for p in predictions if tiny.is_rare(annotations[p["id"]][p["annotation"]])]
            found |= {"point_f1_of_unseen_kinds": round(sum(rare) / len(rare), 4)} if rare else {}
        metrics |= found if part == "test" else {part: found}
    if folder:
        charts.sheet(sorted((folder / "test").glob("*any_shape.png"))[:8], folder.parent / "samples.png")
    return metrics


def first_line(run, args, params):
    """Of the log: what was asked for, and of which program and machine."""
    return {"config": dataclasses.asdict(run.config), "command": vars(args), "commit": commit(), "device": str(run.device),
            "hardware": hardware(run.device), "dtype": str(run.dtype).split(".")[-1], "world": run.ranks.world, "params": params,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def leave(config, out, model, tokenizer):
    """Weights, tokenizer and what is needed to ask as in training, in out/model."""
    weights.save(model, out / "model")
    tokenizer.save(out / "model")
    state = {f.name: getattr(config.data, f.name) for f in dataclasses.fields(config.data) if f.name != "vision"}
    (out / "model" / "data.json").write_text(json.dumps(state))


def finish(config, out, model, tokenizer, asked):
    """Weights, curves, evaluation, samples -> the metrics."""
    from evaluation import charts

    model.eval()
    leave(config, out, model, tokenizer)
    charts.losses(read_log(out / "log.jsonl"), out / "loss.png")
    charts.rates(read_log(out / "log.jsonl"), out / "lr.png")
    return score(config, model, tokenizer, asked, out / "samples")


def draw_progress(out):
    from evaluation import charts

    begun = sum(line["seconds"] for line in read_log(out / "stage0.jsonl"))
    charts.progress(read_log(out / "log.jsonl"), out / "eval.png", begun)


def end(ranks, error, status):
    """Ends the command with one sentence: of the ranks of a run the first that has one, of those not joined yet one on each machine."""
    if ranks.pulse:
        alone = status == 1 and isinstance(error, Exception) and not getattr(error, "everywhere", False)
        ranks.pulse.end(f"rank {ranks.rank}: {error}" if alone else str(error), status)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train.py: {error}", file=sys.stderr, flush=True)
    raise SystemExit(status) from None


def main(argv=None):
    # what softmax gives far patches becomes denormal in backward, and a CPU multiplies such numbers eight times slower. A setting of this
    # thread and of those that it starts, so before the first work
    torch.set_flush_denormal(True)
    begun, ranks, out = time.time(), Ranks(), None   # alone, until it has joined the others
    try:
        args, config = parse(argv)
        device, dtype = pick_device(config)
        if "workers" not in args.fields:
            config = replace(config, workers=workers_for(device))
        folder, state, config = find_checkpoint(args, config)
        ranks, config = join(config, open_tokenizer(args, config, folder)[1].model, device)
        if len(folders := set(parallel.gathered(str(folder)))) > 1:
            raise RunError(f"--resume: the ranks see different checkpoints ({', '.join(sorted(folders))})", everywhere=True)
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        # everything that can be wrong is opened before anything is written
        sources, rates, asked = open_sources(args, config)
        model, tokenizer, config = open_model(args, config, folder)
        purpose = plans.purpose(sources, rates, tokenizer, config)
        loader = Loader(sources, rates, tokenizer, config, ranks.dp_rank, ranks.dp, args.plan, None,
                        part=(ranks.cp_rank, config.cp), agree=partial(parallel.agreed, mesh=ranks.mesh))
        if folder:
            same_data(args, folder, state, purpose)
            seek(loader, folder, state, ranks)
        else:
            loader.begin()
        out = parallel.gathered(run_directory(args, config, folder) if ranks.first else None)[0]
        if config.vit_steps and not args.init and not folder:
            teach_to_see(config, out if ranks.first else None, model.vision.vit.to(device))
        params = {part: sum(p.numel() for p in ps) for part, ps in model.parameter_groups().items()}
        run = Run(config, ranks, device, dtype, out, tokenizer,
                  {"config": plain_config(config), "model": dataclasses.asdict(config.model), "data": purpose})
        groups, optimizer = equip(run, model)
        if folder:
            checkpoint.restore(folder, model, optimizer)
        journal = RunLog(out, ranks.first, first_line(run, args, params), state.get("step"))
        evaluate = lambda model: score(config, model, tokenizer, asked) if ranks.first else None             # noqa: E731
        train(run, model, groups, optimizer, loader, journal, evaluate, args.eval_every, state.get("step", 0), state.get("skipped", 0))
        model = plain(model, ranks)
        metrics = finish(config, out, model, tokenizer, asked) if ranks.first else None
        ranks.meet()
    except (UserError, data.DataError, checkpoint.LoadError) as e:
        end(ranks, e, 2)
    except (RunError, data.Unreadable, checkpoint.SaveError, OSError) as e:
        end(ranks, e, 1)
    except Terminated as e:
        end(ranks, e, 143)
    except KeyboardInterrupt:
        saved = checkpoint.newest_step(out) if out else None
        end(ranks, f"interrupted{f'; --resume goes on from step {saved}' if saved is not None else ''}", 130)
    except torch.OutOfMemoryError as e:
        end(ranks, f"rank {ranks.rank}: {str(e).split('.')[0]}; python -m tools.memory counts what a step takes", 1)
    except RuntimeError as e:
        if not (ranks.pulse and alive.is_of_others(e)):
            raise
        end(ranks, alive.obituary(ranks.pulse.silent(), ranks.world, e), 1)
    if ranks.pulse:
        ranks.pulse.leave()
        dist.destroy_process_group()
    if not ranks.first:
        return
    seconds = time.time() - begun
    journal.scores(config.steps, metrics, seconds=seconds)
    draw_progress(out)
    print(json.dumps({"out": str(out), "steps": config.steps, "loss": journal.loss, "seconds": round(seconds, 1),
                      "eval": metrics}))


if __name__ == "__main__":
    main()
