"""What a run is told: its config, and the command line that sets it (paper: training, Table 12; spec 10).

in    the words after `train.py`
out   arguments, Config: defaults, then the stage's recipe, then --tiny's, then flags in their order

Any field can be set, --a.b=value; one that does not exist is refused with the nearest name.
"""

import argparse
import dataclasses
import difflib
import importlib
import math
from dataclasses import dataclass, replace

import model as models
from data import DataConfig
from records import media
from stages import tiny as tiny_recipe


@dataclass(frozen=True)
class GroupRates:
    vit: float
    connector: float                 # with the 128 extra embeddings
    llm: float


@dataclass(frozen=True)
class Config:
    stage: int = 1
    preset: str = "4b"               # where `model` starts from
    steps: int = 31_000              # the schedule ends there
    batch: int = 128                 # packs per step, over everything
    micro_batch: int = 4             # packs per forward on one rank; the rest of the batch is accumulated
    cp: int = 1                      # context-parallel degree: ranks that share a row
    shard: int = 0                   # ranks that hold the weights together, neighbours; 0: all of them
    pack_crops: int = 16             # crops of one pack
    pool: int = 48                   # examples the packer chooses from
    lr: GroupRates = GroupRates(6e-6, 2e-4, 2e-5)
    warmup: GroupRates = GroupRates(2000, 200, 2000)           # steps, linear from 0
    final_lr: float = 0.1            # the cosine ends at this share of the base rate
    betas: tuple = (0.9, 0.95)
    adam_eps: float = 1e-6
    clip: float = 1.0                # gradient norm, of each group by itself
    z_loss: float = 1e-4
    residual_dropout: float = 0.0    # at every position
    response_dropout: float = 0.1    # only where the target has loss
    freeze_embedding: bool = True    # the base embedding, and with it a tied head (spec 10)
    train: tuple = ("vit", "connector", "llm")
    activation_checkpointing: bool = True           # activation checkpointing: blocks keep their inputs only and run again in backward (spec 10)
    uncheckpointed_blocks: int = 0             # of the decoder, the last ones, that keep all and do not run again; tools.memory says how many fit
    compile: bool = False            # torch.compile, block by block
    crop_bucket: int = 8             # crops of a batch are padded to a multiple of this
    save_every: int = 500            # steps between checkpoints; 0: none
    keep: int = 2                    # checkpoints, the newest; 0: all
    rehearse: str = "auto"           # the fullest batch there can be, before the first step: auto (on a GPU), true, false
    on_nonfinite: str = "stop"       # NaN or Inf in loss or gradient: stop, or skip the step and count it
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"              # of the arithmetic; weights and optimizer are float32 always
    max_skip: float = 0.01           # share of a source's records that may be unusable, once 1,000 of it were drawn
    workers: int = 0                 # processes that decode ahead; 0: the training process does it (without --workers train.main chooses)
    vit_steps: int = 0               # steps of stage 0, at most `steps`: for a toy ViT that starts from nothing
    eval_images: int = 200           # held-out images asked about at the end of a toy run
    data: DataConfig = DataConfig()
    model: models.ModelConfig = models.PRESETS["4b"]


# ---------------------------------------------------------------------------------------------------------------
# the command line


class UserError(Exception):
    """Ends the command with status 2 and one sentence."""


class Parser(argparse.ArgumentParser):
    def error(self, message):        # one sentence instead of the whole usage
        raise UserError(message)


def fields_of(config, prefix=""):
    """'--a.b=default' of every field, for --help."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{f.name}.")
        else:
            yield f"--{prefix}{f.name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


def override(config, key, value, where):
    """config with one dotted field replaced; a string is parsed by the type of the field it replaces."""
    head, _, rest = key.partition(".")
    names = [f.name for f in dataclasses.fields(config)]
    if head not in names:
        near = difflib.get_close_matches(head, names, 1)
        hint = f" - did you mean '{near[0]}'?" if near else f"; there are {', '.join(names)}"
        raise UserError(f"{where}: no such field '{head}'{hint}")
    old = getattr(config, head)
    if dataclasses.is_dataclass(old):
        if not rest:
            raise UserError(f"{where}: '{head}' has fields of its own: {', '.join(f.name for f in dataclasses.fields(old))}")
        return replace(config, **{head: override(old, rest, value, where)})
    if rest:
        raise UserError(f"{where}: '{head}' has no field '{rest}'")
    if isinstance(value, str) and not isinstance(old, str):
        try:
            if isinstance(old, bool):
                value = {"true": True, "false": False, "1": True, "0": False}[value.lower()]
            elif isinstance(old, tuple):
                value = tuple((type(old[0]) if old else int)(v) for v in value.split(",") if v)
            else:
                value = type(old)(value)
        except (KeyError, ValueError):
            raise UserError(f"{where}: '{value}' is no {type(old).__name__}") from None
    return replace(config, **{head: value})


def config_from(d, like=None):
    """A Config as it stands in a run's config.json -> Config."""
    like = Config() if like is None else like
    return replace(like, **{name: config_from(value, getattr(like, name)) if isinstance(value, dict) else tuple(value)
                            if isinstance(value, list) else value for name, value in d.items()})


def parse(argv):
    """Command line -> arguments, Config: defaults, then the stage's recipe, then --tiny's, then flags in their order."""
    parser = Parser(description="Train Molmo2 (paper: training, Table 12).", allow_abbrev=False, epilog=(
        "Any field of the config can be set, before a recipe changes them these are: " + " ".join(fields_of(Config()))))
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True, help="recipe from stages/")
    parser.add_argument("--tiny", action="store_true", help="toy model and laptop settings; toy world unless --data is given")
    parser.add_argument("--preset", choices=tuple(models.PRESETS), help="model shape (default: 4b, with --tiny toy)")
    parser.add_argument("--data", nargs="+", metavar="FILE[=rate]", help="record files (.jsonl, .json) and their shares, default 1 each;"
                        " a mix.json; or the folder of the recipe's published sets")
    parser.add_argument("--skip-missing", action="store_true", help="train without those files of a mixture that are not there")
    parser.add_argument("--plan", metavar="FILE", help="packs planned ahead by packing.py plan")
    parser.add_argument("--cache", metavar="DIR", help="examples encoded ahead by packing.py plan")
    parser.add_argument("--media", metavar="DIR", help="where the paths in the records start")
    parser.add_argument("--eval", metavar="FILE", help="records asked about at the end (with --data)")
    parser.add_argument("--eval-every", type=int, default=0, metavar="N", help="also every N steps (default 0: only at the end)")
    parser.add_argument("--init", metavar="DIR", help="start from the weights of a run directory")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint in --out, exactly; none: start")
    parser.add_argument("--resume-anyway", action="store_true", help="... even if the recipe or the data are others now")
    parser.add_argument("--else-init", metavar="DIR", help="with --resume: --init, as long as there is no checkpoint")
    parser.add_argument("--save-every", type=int, metavar="N", help="a checkpoint every N steps, and at the end (default 500; 0: none)")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N checkpoints (default 2; 0: all)")
    parser.add_argument("--on-nonfinite", choices=("stop", "skip"), help="NaN or Inf in loss or gradient: stop (default) or skip the step")
    parser.add_argument("--out", metavar="DIR",
                        help="run directory, empty if it is there (default runs/stage1-tiny and so on, an old one moved aside)")
    parser.add_argument("--steps", type=int, help="optimizer steps; the schedule ends there")
    parser.add_argument("--batch", type=int, help="packs per step, over everything")
    parser.add_argument("--micro-batch", type=int, help="packs per forward on one rank")
    parser.add_argument("--cp", type=int, help="context-parallel degree: processes that share a row (default 1)")
    parser.add_argument("--shard", type=int, help="processes that hold the weights together: those of a node (default 0: all)")
    parser.add_argument("--train", metavar="PARTS", help="which parts learn: vit,connector,llm (default all; with --tiny, of stages 2 and 3"
                        " connector,llm)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--workers", type=int, help="processes that decode ahead, 0 for none (default: on a GPU the cores that "
                        "each of its machine's processes has, less one, at most 8; elsewhere none, for torch uses them all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="arithmetic (auto: bfloat16 on a GPU, else float32)")
    parser.add_argument("--deterministic", action="store_true", help="dropout off, deterministic kernels")
    args, rest = parser.parse_known_args(argv)

    config = override(Config(), "stage", args.stage, "--stage")
    recipes = [importlib.import_module(f"stages.stage{args.stage}").RECIPE] + [tiny_recipe.RECIPE, tiny_recipe.STAGES[args.stage]] * args.tiny
    for recipe in recipes:
        for key, value in recipe.items():
            config = override(config, key, value, "recipe")
    for key in ("preset", "steps", "batch", "micro_batch", "cp", "shard", "train", "seed", "workers", "device", "dtype", "save_every",
                "keep", "on_nonfinite"):
        if getattr(args, key) is not None:
            config = override(config, key, getattr(args, key), f"--{key.replace('_', '-')}")
    config = replace(config, model=models.PRESETS[config.preset])
    flags = [option[2:] for action in parser._actions for option in action.option_strings]
    for item in rest:
        key, equals, value = item.partition("=")
        if not key.startswith("--") or not equals:
            near = difflib.get_close_matches(key.lstrip("-"), flags, 1)
            hint = f" - did you mean --{near[0]}?" if near else "; config fields are written --a.b=value"
            if any(field.startswith(f"{key}=") for field in fields_of(Config())):
                hint = f"; a field of the config is written {key}=value"
            raise UserError(f"{key}: no such flag{hint}")
        config = override(config, key[2:], value, key)
    config = replace(config, data=replace(config.data, vision=config.model.vision))
    if args.deterministic:
        config = replace(config, residual_dropout=0.0, response_dropout=0.0)
    # the batch of a laptop run may be smaller than the recipe's micro-batch, a short run shorter than its stage 0
    config = replace(config, micro_batch=min(config.micro_batch, config.batch), vit_steps=min(config.vit_steps, config.steps))
    for key in ("steps", "batch", "micro_batch", "cp", "pool", "crop_bucket", "pack_crops", "eval_images", "data.max_tokens",
                "data.max_crops", "data.max_images", "data.max_frames"):
        value = getattr(config.data, key[5:]) if key.startswith("data.") else getattr(config, key)
        if value < 1:
            raise UserError(f"--{key.replace('_', '-')}: must be at least 1, not {value}")
    for key in ("seed", "workers", "vit_steps", "max_skip", "shard", "save_every", "keep", "uncheckpointed_blocks"):
        if getattr(config, key) < 0:
            raise UserError(f"--{key.replace('_', '-')}: must be at least 0, not {getattr(config, key)}")
    if config.uncheckpointed_blocks and not config.activation_checkpointing:
        raise UserError(f"--uncheckpointed_blocks={config.uncheckpointed_blocks}: without activation_checkpointing no block runs again, and all keep what they compute")
    for key in ("max_points", "n_transcripts", "length_hint"):
        if getattr(config.data, key) < 0:
            raise UserError(f"--data.{key}: must be at least 0, not {getattr(config.data, key)}")
    if not 0 < config.data.fps < math.inf or config.data.max_frames > media.MAX_FRAMES:
        raise UserError(f"--data.fps={config.data.fps} --data.max_frames={config.data.max_frames}: frames per second above 0, and at most "
                        f"{media.MAX_FRAMES} of a video")
    if len(config.betas) != 2 or not all(0 <= b < 1 for b in config.betas):
        raise UserError(f"--betas: two numbers from 0 to below 1, not {config.betas}")
    args.resume |= args.resume_anyway
    if args.resume and args.init:
        raise UserError("--init: starts from weights, --resume goes on with a run; leave one out (or --resume --else-init DIR)")
    if args.else_init and not args.resume:
        raise UserError("--else-init: only goes with --resume; without it, --init")
    if config.rehearse not in ("auto", "true", "false"):
        raise UserError(f"--rehearse={config.rehearse}: auto, true or false")
    if config.on_nonfinite not in ("stop", "skip"):
        raise UserError(f"--on_nonfinite={config.on_nonfinite}: stop or skip")
    if args.eval_every < 0:
        raise UserError(f"--eval-every: must be at least 0, not {args.eval_every}")
    for flag in () if args.data else ("media", "eval", "skip_missing"):
        if getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')}: only goes with --data")
    for item in rest:
        if item.startswith("--data.vision."):
            raise UserError(f"{item}: geometry is the model's; set --model.vision.*")
    if config.batch % config.micro_batch:
        raise UserError(f"--micro-batch {config.micro_batch}: --batch {config.batch} is no multiple of it")
    if not config.train or set(config.train) - {"vit", "connector", "llm"}:
        raise UserError(f"--train {','.join(config.train)}: choose among vit, connector, llm")
    return args, config
