"""Opens everything that a run needs: device, layout, data and model. Tests the largest batch."""

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import model as models
import parallel
import vision
from records.errors import DataError, RunError, UserError, explained, warn
from records.mixture import Mixture
from records.reader import Records, stamp_of
from text.tokenizer import ByteTokenizer, load_tokenizer
from training import checkpoint
from training.config import Config
from training.loader import Loader, select_crops, text_example
from training.planner import PlanFile, StepPlanner
from training.ranks import Ranks, device_of_rank, join_ranks
from training.sources import fingerprint, open_sources
from weights import files, lora


def pick_device(config):
    """-> device and dtype of the computation. UserError if this machine has no such device.
    "auto" does not choose MPS, since this code was never run there."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(),
             "mps": torch.backends.mps.is_available()}
    name = config.device
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        raise UserError(f"--device {name}: no such device was found; this machine has none, or "
                        "this build of PyTorch does not support it")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    return device_of_rank(name), getattr(torch, dtype)


def choose_layout(args, config, device):
    """-> config, with shard, workers and compile chosen for the hardware if they are not given.
    micro_batch becomes at most a rank's share of the batch. All of them affect only the speed."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    chosen = {"shard": default_shard(world, ranks_of_node)}
    if device.type == "cuda":
        # all cores of a rank except one decode, because the GPU would wait for videos otherwise
        cores = len(os.sched_getaffinity(0)) // ranks_of_node
        chosen |= {"workers": min(max(cores - 1, 0), 8), "compile": not args.tiny}
    chosen = {name: value for name, value in chosen.items() if name not in args.fields}
    packs_of_rank = max(config.batch * config.cp // world, 1)
    return replace(config, micro_batch=min(config.micro_batch, packs_of_rank), **chosen)


def default_shard(world, ranks_of_node):
    """-> --shard if it is not given. With several nodes, each node has all weights, because
    gathering weights from other nodes in every micro-batch would take longer than computing."""
    return ranks_of_node if world > ranks_of_node and world % ranks_of_node == 0 else 0


def layout_error(world, config, model):
    """-> a sentence, why this model cannot be trained on `world` ranks; "" if it can."""
    cp = config.cp
    heads = config.cp_heads or cp
    kv_heads = model.n_kv_head
    if cp % heads:
        return f"--cp {cp} is not a multiple of --cp-heads {heads}"
    if model.n_head % heads or (kv_heads % heads and heads % kv_heads):
        return (f"--cp {cp}: {model.n_head} query and {kv_heads} kv heads cannot be distributed "
                f"over {heads} ranks; --cp-exchange gather works with any number of heads")
    if world % cp:
        return f"--cp {cp}: the number of processes, {world}, is not a multiple of it"
    dp = world // cp  # data-parallel ranks
    if config.batch % (dp * config.micro_batch):
        fitting = [n for n in range(1, config.micro_batch) if config.batch % (dp * n) == 0]
        hint = f"--micro-batch {fitting[-1]}" if fitting else f"a multiple of {dp} for --batch"
        return (f"--batch {config.batch} is not a multiple of {dp} data-parallel ranks times "
                f"--micro-batch {config.micro_batch}; use {hint}")
    if config.shard and world % config.shard:
        return f"--shard {config.shard}: the number of processes, {world}, is not a multiple of it"
    if config.data.max_tokens % cp:
        return f"--data.max_tokens={config.data.max_tokens} is not a multiple of --cp {cp}"
    return ""


def open_data(args, config, ranks, tokenizer, resume_from, generated):
    """-> Loader that continues after `resume_from`, records of --eval, fingerprint of the data.
    The first rank reads the files, and sends the byte offsets of their records to the others."""
    opened = None
    planner = None
    if ranks.first:
        try:
            opened = open_sources(args, config, generated)
            if args.plan:
                made_for = fingerprint(*opened[:2], tokenizer, config)
                planner = PlanFile(args.plan, made_for, config)
        except DataError as e:  # sent to all ranks, because the others would wait otherwise
            opened = e
    opened = ranks.broadcast(opened)
    if isinstance(opened, DataError):
        raise opened
    sources, rates, eval_records = opened
    made_for = fingerprint(sources, rates, tokenizer, config)
    stamps = [stamp_of(source.path) for source in sources if isinstance(source, Records)]
    seen = str(resume_from.folder), made_for, stamps
    if any(other != seen for other in ranks.all_gather(seen)):
        raise RunError("the ranks do not have the same checkpoint, record files and config; are "
                       "--out and --data on a disk that all nodes share?")
    mixture = Mixture(sources, rates, config.seed)
    if ranks.first and not planner:
        planner = StepPlanner(mixture, tokenizer, config, math.ceil(config.workers / 2))
    loader = Loader(mixture, tokenizer, config, planner, ranks, resume_from.step)
    if resume_from.folder:
        same_data = checkpoint.check_unchanged(args, resume_from, "data", made_for)
        if planner:
            planner.restore(resume_from.state["loader"]["plans"], same_data)
    loader.begin()
    return loader, eval_records, made_for


class Start(NamedTuple):
    """What the model of a run starts from."""
    tokenizer: object
    weights: str = None  # folder of weights; None: new weights, or the checkpoint has all of them
    is_new: bool = True  # the weights are new: there is no folder and no checkpoint


def find_start(args, config, resume_from=None):
    """-> Start, and config with the shape of its model, from --init, the checkpoint or the recipe.
    UserError if a file cannot be read, or if the command line sets another shape."""
    resume_from = resume_from or checkpoint.Checkpoint(init=args.init)
    weights = resume_from.init
    folder = resume_from.folder
    shape = config.model
    trained_crops = config.data.trained_crops
    where = "--model"
    try:
        if weights is not None:
            where = f"--init {weights}"
            model_folder = files.describe(weights)
            folder, shape, _ = model_folder
            trained_crops = files.read_data_config(model_folder).most_crops()
        elif folder:
            where = "--resume"
            with explained(folder):
                shape = files.config_from_dict(resume_from.state["model"], shape)
                trained_crops = json.loads(resume_from.state["recipe"]["data.trained_crops"])
        if folder:
            tokenizer = load_tokenizer(folder, shape.n_vocab)
        else:
            # a new model gets the words of the toy
            words = load_tokenizer(files.TOY, models.PRESETS["toy"].n_vocab).words
            tokenizer = ByteTokenizer(words, shape.n_vocab)
    except (AssertionError, OSError, ValueError) as e:
        raise UserError(f"{where}: {e}") from None
    asked_for = args.preset or any(name.startswith("model.") for name in args.fields)
    found = replace(shape, init_std=config.model.init_std)  # this field affects only new weights
    if asked_for and config.model != found:
        raise UserError(f"{where}: the shape of its model differs from --preset and --model.*; "
                        "remove these flags")
    if weights is not None and args.fields.get("vit"):
        raise UserError(f"--vit {config.vit}: {where} has all weights, and --vit is for a new "
                        "model; remove one of the two flags")
    data_config = replace(config.data, trained_crops=trained_crops)
    return Start(tokenizer, weights, not folder), replace(config, model=shape, data=data_config)


def open_model(config, start):
    """-> a model with the shape and the settings of the config.

    A new model is on the CPU. Any other model is on the meta device, so that no rank ever has the
    whole model: train.place allocates the shard of each rank, and fill_weights reads it.
    """
    vit = None
    if start.is_new and config.vit:
        try:
            vit = files.read_vit(config.vit, config.model.vision)
        except (OSError, ValueError) as e:
            raise UserError(f"--vit {config.vit}: {e}") from None
    try:
        if start.is_new:
            model = models.Molmo2(config.model).init_weights()
        else:
            model = files.meta_model(config.model)
    except (AssertionError, IndexError, RuntimeError, ValueError, ZeroDivisionError) as e:
        raise UserError(f"--model: a model cannot have this shape: {e}") from None
    if vit:
        model.vision.vit.load_state_dict(vit)
    return apply_recipe(model, config).train()


def apply_recipe(model, config):
    """Sets dropout, checkpointing, adapters and the trained parts of a model as in the recipe."""
    model.residual_dropout = config.residual_dropout
    model.response_dropout = config.response_dropout
    model.recompute = config.recompute
    model.embedding.requires_grad_(not config.freeze_embedding)
    if config.lora.rank:
        lora.add_adapters(model, config.lora)
    for part, parameters in model.parameter_groups().items():
        for p in parameters if part not in config.train else ():
            p.requires_grad_(False)
    return model


def fill_weights(run, model, optimizer):
    """Reads this rank's shard of the weights, first from --init, then from the checkpoint."""
    if run.config.lora.rank:
        lora.init_adapters(model, run.config.seed)
    if run.start.weights is not None:
        try:
            files.read_weights(model, run.start.weights)
        except (OSError, ValueError) as e:
            raise UserError(f"--init {run.start.weights}: {e}") from None
    if run.resume_from.folder:
        checkpoint.restore(run.resume_from, model, optimizer)


def dry_run_largest_batch(run, groups, make_batch, forward_backward):
    """Runs two micro-batches of the largest possible size, with Adam's memory allocated. So a lack
    of memory ends the run before step 1. make_batch(run, rows) -> the Batch of a micro-batch.
    forward_backward(batch) adds to the gradients."""
    config = run.config
    parameters = [p for of_group in groups.values() for p in of_group]
    adam = [torch.empty_like(parallel.local(p)) for p in parameters for _ in range(2)]
    shard = None
    if config.cp > 1:
        shard = parallel.CropShard(run.ranks.cp_rank, config.cp, 0, config.pack_crops)
    example = largest_example(config, shard)
    for _ in range(2):  # the second one runs while the gradients of the first one exist
        forward_backward(make_batch(run, [[example]] * config.micro_batch).to(run.device))
    del adam
    for p in parameters:
        p.grad = None
    if run.ranks.first:
        peak = torch.cuda.max_memory_allocated() / 2**30
        warn(f"dry run: the largest batch needs {peak:.1f} GiB of a GPU")


def largest_example(config, shard=None):
    """-> a data.Example that fills a row. Every token has loss. It has config.pack_crops crops, and
    as many visual tokens as these can have: 2 x 2 patches each, in windows that are padded to 9."""
    T = config.data.max_tokens
    n_crops = config.pack_crops
    v = config.model.vision
    example = text_example(np.arange(T) % config.model.n_vocab, 1, id="largest")
    view = vision.windows(np.arange(v.n_patch).reshape(v.grid, v.grid), 2)
    source = np.concatenate([np.where(view < 0, -1, view + k * v.n_patch) for k in range(n_crops)])
    source = source[: T - 1]
    example.images = np.zeros((n_crops, v.n_patch, v.n_pixel), np.uint8)
    example.image_id = np.arange(n_crops, dtype=np.int32) // (1 + config.data.most_crops())
    example.pool_src = np.pad(source, ((0, 0), (0, 5)), constant_values=-1)
    example.pool_dst = np.arange(1, 1 + len(source))
    return select_crops(example, shard)


@dataclass(frozen=True)
class Run:
    """Everything that does not change during a run."""
    config: Config
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    out: Path
    start: Start
    loader: Loader
    eval_records: dict  # {name: records} of --eval; None: evaluate on the toy world
    resume_from: checkpoint.Checkpoint
    identity: dict  # saved in checkpoints: model, recipe, data, base of adapters, first --init

    @property
    def tokenizer(self):
        return self.start.tokenizer


def start_run(args, config, generated):
    """-> Run, model. Opens and checks all inputs before anything is written. generated: as in
    open_sources."""
    device, dtype = pick_device(config)
    config = choose_layout(args, config, device)
    resume_from = checkpoint.find(args)
    start, config = find_start(args, config, resume_from)
    if error := layout_error(int(os.environ.get("WORLD_SIZE", 1)), config, config.model):
        raise UserError(error)
    if config.lora.rank and start.weights is None:
        raise UserError("--lora adds adapters to trained weights; give these weights with --init")
    if resume_from.folder and ("packs" in resume_from.state["loader"]["plans"]) != bool(args.plan):
        raise UserError("--plan: --resume needs --plan if the run started with it, and must not "
                        "have it otherwise")
    base = str(files.describe(start.weights).path.absolute()) if config.lora.rank else None
    recipe = checkpoint.recipe_fields(config, base)
    if resume_from.folder:
        checkpoint.check_unchanged(args, resume_from, "recipe", recipe)
        config = replace(config, steps=args.finish_at or config.steps)
    ranks = join_ranks(config.cp, device, config.cp_heads)
    config = replace(config, workers=ranks.broadcast(config.workers))  # the same on all ranks
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    # before the model, which may take minutes to make, so that a mistake in --data shows at once
    loader, eval_records, made_for = open_data(
        args, config, ranks, start.tokenizer, resume_from, generated)
    model = open_model(config, start)
    if config.lora.rank:
        lora.hold_frozen(model, dtype)
    if args.overwrite and ranks.first:
        checkpoint.delete_run(Path(args.out))
    ranks.barrier()
    init = resume_from.state["init"] if resume_from.folder else start.weights
    identity = {"model": asdict(config.model), "recipe": recipe, "data": made_for, "base": base,
                "init": init}
    run = Run(config, ranks, device, dtype, Path(args.out), start, loader, eval_records,
              resume_from, identity)
    return run, model
