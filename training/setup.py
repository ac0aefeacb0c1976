"""What a run starts with: device, data, model, and a dry run that tells whether they fit."""

import json
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

import data
import model as models
import parallel
from records.errors import DataError, warn
from records.mixture import Mixture
from text.tokenizer import ByteTokenizer, load_tokenizer
from toy import vit as stage0
from toy import world
from training.config import Config, UserError
from training.loader import Loader
from training.log import STAGE0_STEPS_PER_STEP, evaluation_in_steps, time_left
from training.planner import PlanFile, RunError, StepPlanner
from training.resume import (
    Checkpoint,
    check_data,
    find_base,
    find_checkpoint,
    make_run_directory,
    restore_loader,
)
from training.sources import fingerprint, open_sources
from weights import files, lora

# --------------------------------------------------------------------------------------------------
# device and data


def pick_device(config):
    """-> device and dtype of the arithmetic; weights that learn and the optimizer are float32."""
    # read at the first allocation. The sizes of blocks differ from row to row: segments that grow
    # prevent fragmentation
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    name = config.device
    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    missing = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if missing.get(name):
        raise UserError(f"--device {name}: this machine or this torch has none")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    return torch.device(name), getattr(torch, dtype)


def default_workers(device):
    """Decoding processes of a rank: on a GPU, which would wait for videos, its cores but one."""
    if device.type != "cuda":
        return 0
    linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return min(max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1, 0), 8)


def choose_layout(args, config, device):
    """The config with what this machine decides, where it was not given: fields of LAYOUT_FIELDS,
    which affect the speed and not the results."""
    given = args.fields
    if "workers" not in given:
        config = replace(config, workers=default_workers(device))
    if "shard" not in given:
        world = int(os.environ.get("WORLD_SIZE", 1))
        config = replace(config, shard=default_shard(
            world, int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    if device.type == "cuda" and "compile" not in given:
        if find_spec("triton") is None:              # Windows has none
            warn("train.py: no triton, so blocks are not compiled")
        else:
            # a block that fails to compile runs as it is, and torch logs why
            torch._dynamo.config.suppress_errors = True
            config = replace(config, compile=True)
    return config


def open_on_first_rank(ranks, args, config):
    """open_sources(args, config) on the first rank, which sends the others where the records of
    each file begin: they do not read the files for that (records/reader.py)."""
    opened = None
    if ranks.first:
        try:
            opened = open_sources(args, config)
        except DataError as e:       # sent to all, or the others would wait
            opened = e
    opened = parallel.broadcast(opened)
    if isinstance(opened, DataError):
        opened.on_all_ranks = True
        raise opened
    return opened


def default_shard(world, ranks_of_node):
    """--shard where it is not given: of several nodes each holds all weights, because between
    nodes gathering them for every micro-batch would take longer than computing with them."""
    return ranks_of_node if world > ranks_of_node and world % ranks_of_node == 0 else 0


def open_loader(args, config, ranks, tokenizer, resume_from, sources, rates):
    """-> Loader with its first step planned, fingerprint of the data."""
    made_for = fingerprint(sources, rates, tokenizer, config)
    if any(other != made_for for other in parallel.all_gather(made_for)):
        raise RunError("the ranks do not see the same record files, tokenizer and config", True)
    mixture = Mixture(sources, rates, config.seed)
    plans = None
    if ranks.first:
        planner = StepPlanner(mixture, tokenizer, config)
        plans = PlanFile(args.plan, made_for, config) if args.plan else planner
    loader = Loader(mixture, tokenizer, config, plans, ranks, resume_from.step)
    if resume_from.folder:
        check_data(args, resume_from, made_for)
        restore_loader(loader, plans, resume_from)
    if resume_from.step < config.steps:
        loader.begin()
    return loader, made_for


# --------------------------------------------------------------------------------------------------
# model


def open_model(args, config, resume_from):
    """-> model, tokenizer, and config with its shape: from --init, or new from --preset.

    Without --init a new model is on the CPU. With --init or --resume it is on the meta device, so
    that no rank ever holds all of it: build_optimizer allocates each rank's shard, fill_weights or
    checkpoint.restore reads it.
    """
    if args.init is not None:
        try:
            model, tokenizer, _ = files.open_model_folder(args.init, read=False)
        except (OSError, ValueError) as e:
            raise UserError(f"--init {args.init}: {e}") from None
        asked_for = args.preset or config.model != models.PRESETS[config.preset]
        if asked_for and without_init(config.model) != without_init(model.config):
            raise UserError(f"--init {args.init}: its model has another shape than --preset and "
                            "--model.* ask for; leave them out")
        vision = model.config.vision
        config = replace(config, model=model.config, data=replace(config.data, vision=vision))
    else:
        try:
            if resume_from.folder:
                model = files.meta_model(config.model)
            else:
                model = models.Molmo2(config.model).init_weights()
                if config.model.vision.neighbor_init:
                    stage0.init_neighbor_heads(model.vision.vit)
            n_vocab = config.model.n_vocab
            tokenizer = (load_tokenizer(resume_from.folder, n_vocab) if resume_from.folder
                         else ByteTokenizer(world.WORDS, n_vocab))
        except (AssertionError, IndexError, RuntimeError, ValueError, ZeroDivisionError) as e:
            raise UserError(f"--model: no model has this shape: {e}") from None
    return apply_recipe(model, config).train(), tokenizer, config


def apply_recipe(model, config):
    """What a stage's recipe sets of a model: dropout, checkpointing, which parts learn."""
    model.residual_dropout = config.residual_dropout
    model.response_dropout = config.response_dropout
    model.activation_checkpointing = config.activation_checkpointing
    model.uncheckpointed_blocks = config.uncheckpointed_blocks
    model.embedding.requires_grad_(not config.freeze_embedding)
    if config.lora.rank:
        lora.add_adapters(model, config.lora)
    for part, parameters in model.parameter_groups().items():
        if part not in config.train:
            for p in parameters:
                p.requires_grad_(False)
    return model


def fill_weights(args, config, model):
    """Initialises the adapters, if any, and reads this rank's part of the weights of --init."""
    lora.init_adapters(model, config.seed)
    if args.init is not None:
        try:
            files.read_weights(model, args.init)
        except (OSError, ValueError) as e:
            raise UserError(f"--init {args.init}: {e}") from None


def open_tokenizer(args, config):
    """-> tokenizer of --init or of the toy, config with its model's shape; reads no weights."""
    if args.init is None:
        return ByteTokenizer(world.WORDS, config.model.n_vocab), config
    try:
        folder, shape, _ = files.describe(args.init)
        tokenizer = load_tokenizer(folder, shape.n_vocab)
    except (OSError, ValueError) as e:
        raise UserError(f"--init {args.init}: {e}") from None
    return tokenizer, replace(config, model=shape, data=replace(config.data, vision=shape.vision))


def without_init(shape):
    """A ModelConfig without the fields that matter only to new weights."""
    return replace(shape, init_std=0.0, vision=replace(shape.vision, neighbor_init=False))


def model_shape(args, config, resume_from):
    """The ModelConfig that open_model will find, without reading weights."""
    if resume_from.folder or args.init is None:
        return config.model
    try:
        return files.describe(args.init)[1]
    except (OSError, ValueError) as e:
        raise UserError(f"--init {args.init}: {e}") from None


def pretrain_vit(run, vit):
    """Stage 0: released ViTs start from SigLIP2, the toy's from this. Its log is stage0.jsonl."""
    config = run.config
    vit.requires_grad_(True)
    path = run.out / "stage0.jsonl" if run.ranks.first else os.devnull
    steps_after = STAGE0_STEPS_PER_STEP * (config.steps + evaluation_in_steps(run))
    lines = stage0.pretrain(vit, config.seed, config.vit_steps, kinds_name=config.toy_kinds)
    bar = tqdm(lines, total=config.vit_steps, unit="step", mininterval=1, desc="stage 0",
               disable=not run.ranks.first)
    with open(path, "w", buffering=1) as log:
        for line in bar:
            log.write(json.dumps(line) + "\n")
            bar.set_postfix(ends_in=time_left(bar, steps_after), refresh=False)
    vit.requires_grad_("vit" in config.train)


def dry_run_largest_batch(run, groups, forward_backward):
    """Runs two micro-batches as large as any can be, beside as much as the optimizer will hold.

    RunError, before the first step, if they do not fit; --dry_run says whether it is done.
    forward_backward(rows) adds to the gradients.
    """
    config, ranks = run.config, run.ranks
    if config.dry_run == "false" or (config.dry_run == "auto" and run.device.type != "cuda"):
        return
    parameters = [p for of_group in groups.values() for p in of_group]
    state = [torch.empty_like(parallel.local(p)) for p in parameters for _ in range(2)]
    shard = None
    if config.cp > 1:
        shard = data.CropShard(ranks.cp_rank, config.cp, 0, config.pack_crops)
    example = data.largest_example(config.data, config.pack_crops, config.model.n_vocab, shard)
    rows = [[example]] * config.micro_batch
    try:
        for _ in range(2):           # the second beside the gradients of the first
            forward_backward(rows)
    except torch.OutOfMemoryError as e:
        raise RunError(f"the largest batch does not fit: {str(e).split('.')[0]}; use a smaller "
                       "--micro-batch or --data.max_tokens, a larger --cp or more GPUs; python -m "
                       "tools.memory counts it") from None
    for p in parameters:
        p.grad = None
    if run.device.type == "cuda" and ranks.first:
        peak = torch.cuda.max_memory_allocated() / 2**30
        warn(f"dry run: at most {peak:.1f} GiB of a GPU")
    del state


def cp_degrees(n_head, n_kv_head):
    """Context-parallel degrees that these heads allow: query heads are dealt out evenly, kv heads
    too, or as many copies of each as there are ranks for it."""
    return [cp for cp in range(1, n_head + 1)
            if n_head % cp == 0 and (n_kv_head % cp == 0 or cp % n_kv_head == 0)]


def layout_error(world, config, model):
    """Why `world` ranks cannot train this Config and ModelConfig, a sentence; "" if they can."""
    cp, batch, tokens = config.cp, config.batch, config.data.max_tokens
    degrees = cp_degrees(model.n_head, model.n_kv_head)
    if cp not in degrees:
        return (f"--cp {cp}: {model.n_head} query and {model.n_kv_head} kv heads allow "
                f"{', '.join(map(str, degrees))}")
    if world % cp:
        fit = [c for c in degrees if world % c == 0]
        return (f"--cp {cp}: {world} processes are no multiple of it; "
                f"{', '.join(map(str, fit))} would do")
    packs = world // cp * config.micro_batch
    if batch % packs:
        near = [str(n) for n in (batch // packs * packs, -(-batch // packs) * packs) if n]
        return (f"--batch {batch}: no multiple of {world // cp} data-parallel ranks times "
                f"--micro-batch {config.micro_batch}; {', '.join(near)} would do")
    if config.shard and world % config.shard:
        fit = [str(n) for n in range(1, world + 1) if world % n == 0]
        return (f"--shard {config.shard}: {world} processes are no multiple of it; "
                f"{', '.join(fit)} would do")
    if tokens % cp:
        return f"--data.max_tokens={tokens}: no multiple of --cp {cp}; {tokens // cp * cp} would do"
    return ""


# --------------------------------------------------------------------------------------------------
# all of it


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""
    config: Config
    ranks: parallel.Ranks
    device: torch.device
    dtype: torch.dtype
    out: Path
    tokenizer: object
    loader: Loader
    fingerprint: dict                # of the data
    eval_records: dict               # {name: records} of --eval; None: the toy world's
    resume_from: Checkpoint          # of step 0 if the run begins
    base: dict                       # LoRA: path and checksums of the weights below


def start_run(args, config, ending):
    """Opens everything that can be wrong, before anything is written -> Run, model."""
    device, dtype = pick_device(config)
    config = choose_layout(args, config, device)
    resume_from, config = find_checkpoint(args, config)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    packs_of_rank = max(config.batch * config.cp // world_size, 1)
    config = replace(config, micro_batch=min(config.micro_batch, packs_of_rank))
    if error := layout_error(world_size, config, model_shape(args, config, resume_from)):
        raise UserError(error)
    ranks = ending.ranks = parallel.join(config.cp, device)
    config = replace(config, workers=parallel.broadcast(config.workers))     # one for all ranks
    folders = sorted(set(parallel.all_gather(str(resume_from.folder))))
    if len(folders) > 1:
        raise RunError(f"--resume: the ranks see different checkpoints: {', '.join(folders)}", True)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    # before the model, which may take minutes, so that a mistake in --data does not
    sources, rates, eval_records = open_on_first_rank(ranks, args, config)
    base = find_base(args, config, resume_from)
    model, tokenizer, config = open_model(args, config, resume_from)
    if config.lora.rank and config.frozen_dtype == "auto":
        lora.hold_frozen(model, dtype)
    loader, made_for = open_loader(args, config, ranks, tokenizer, resume_from, sources, rates)
    ending.loader = loader
    out = make_run_directory(args, config, resume_from) if ranks.first else None
    out, args.init = parallel.broadcast((out, args.init))        # the first rank may have moved it
    ending.out = out
    run = Run(config, ranks, device, dtype, out, tokenizer, loader, made_for, eval_records,
              resume_from, base)
    return run, model
