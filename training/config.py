"""The configuration of a run and the command line that sets it (paper: training, Table 12).

in    the words after `train.py`
out   the arguments that are no settings (files, --resume ...), and a Config

A Config is made of defaults, then the stage's recipe, then the recipe of --tiny, then the flags.
One rule for all flags: `--key value` and `--key=value` are the same, so are `-` and `_` in a key,
and every field is a key: `--micro-batch 2`, `--data.max_tokens=512`, `--lr.vit 1e-5`.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import model as models
from data import DataConfig
from stages import tiny as tiny_recipe
from stages.recipes import STAGES
from training.limits import CHOICES, broken_rule
from weights.lora import LoraConfig


class UserError(Exception):
    """A mistake of the user: ends the command with status 2 and this one sentence."""


@dataclass(frozen=True)
class GroupRates:
    """One number for each group of parameters."""

    vit: float  # the vision transformer
    connector: float  # pooling, projector and the extra embeddings of the special tokens
    llm: float  # the decoder


@dataclass(frozen=True)
class Config:
    """All settings of a run. UserError for a value that training/limits.py refuses."""

    stage: int = 1  # which recipe of stages/
    preset: str = "4b"  # the model shape that `model` starts from
    steps: int = 31_000  # optimizer steps; the learning rate schedule ends there
    batch: int = 128  # packs per optimizer step, over all ranks
    micro_batch: int = 4  # packs per forward pass of one rank; the rest is accumulation
    cp: int = 1  # context-parallel degree: ranks that share a row
    shard: int = 0  # neighbouring ranks that share the weights; 0: all (not given: those of a node)
    pack_crops: int = 16  # crops of one pack at most
    pool_size: int = 48  # examples that the packer chooses from
    lr: GroupRates = GroupRates(6e-6, 2e-4, 2e-5)  # peak learning rates
    warmup: GroupRates = GroupRates(2000, 200, 2000)  # steps of linear warm-up from 0
    final_lr: float = 0.1  # the cosine ends at this fraction of the peak learning rate
    betas: tuple = (0.9, 0.95)  # of AdamW
    adam_eps: float = 1e-6  # of AdamW
    clip: float = 1.0  # largest gradient norm, of each parameter group by itself
    z_loss: float = 1e-4  # weight of the squared logsumexp in the loss
    residual_dropout: float = 0.0  # dropout of sub-layer outputs at every position
    response_dropout: float = 0.1  # dropout of sub-layer outputs where the target has loss
    freeze_embedding: bool = True  # the base embedding (and with it a tied head) does not learn
    train: tuple = ("vit", "connector", "llm")  # the parameter groups that learn
    lora: LoraConfig = LoraConfig()
    activation_checkpointing: bool = True  # blocks keep only their inputs and rerun in backward
    uncheckpointed_blocks: int = 0  # last decoder blocks that keep all activations all the same
    compile: bool = False  # torch.compile, block by block (when not given, on a GPU: true)
    crop_bucket: int = 2  # the crops of a batch are padded to a multiple of this
    save_every: int = 500  # steps between checkpoints, and one at the end; 0: none
    keep: int = 2  # how many checkpoints stay, the newest; 0: all
    dry_run: str = "auto"  # try the largest possible batch before step 1; auto: on a GPU
    on_nonfinite: str = "stop"  # at NaN or Inf in loss or gradient: stop, or skip the step
    seed: int = 0  # of every random choice
    device: str = "auto"  # auto: cuda, else mps, else cpu
    dtype: str = "auto"  # of the arithmetic; what learns and the optimizer are always float32
    frozen_dtype: str = "auto"  # of matrices that do not learn beside adapters; auto: --dtype
    max_skip: float = 0.01  # share of a source's records that planning may skip
    workers: int = 0  # decoding processes per rank (when not given, on a GPU: its cores less one)
    vit_steps: int = 0  # steps of stage 0 for a toy ViT that starts from nothing
    eval_images: int = 200  # held-out images asked about at the end of a toy run
    toy_kinds: str = "few"  # combinations in the toy's single images: few 6 x 4, many 9 x 6
    data: DataConfig = DataConfig()
    model: models.ModelConfig = models.PRESETS["4b"]

    def __post_init__(self):
        # the crops are those that the model expects, so there is one geometry and not two
        object.__setattr__(self, "data", replace(self.data, vision=self.model.vision))
        for name, value in field_values(self).items():
            if rule := broken_rule(name, as_tuple(value)):
                raise UserError(f"--{name} {as_text(value)[:60]}: {rule}")


# --------------------------------------------------------------------------------------------------
# fields by their dotted names


def field_values(config, prefix=""):
    """{dotted name: value} of every field, but for data.vision, which is a copy of model.vision."""
    values = {}
    for field in dataclasses.fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        if not dataclasses.is_dataclass(value):
            values[name] = value
        elif name != "data.vision":
            values |= field_values(value, f"{name}.")
    return values


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def as_text(value):
    """The value of a field as the command line takes it."""
    return ",".join(map(str, as_tuple(value)))


def unknown_key(key, known):
    """UserError for a key that is not in `known`, with the nearest one that is."""
    near = difflib.get_close_matches(key, known, 1)
    hint = f" - did you mean --{near[0]}?" if near else "; --help lists all"
    return UserError(f"--{key}: no such flag or field{hint}")


def parsed(text, old, key):
    """The text of a field as a value of the type of `old`; UserError if it is none."""
    try:
        if isinstance(old, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(old, tuple):
            kind = type(old[0]) if old else int
            return tuple(kind(part) for part in text.split(",") if part)
        return type(old)(text)
    except (KeyError, ValueError):
        kinds = {bool: "true or false", int: "an integer", float: "a number"}
        kind = kinds.get(type(old), "a list with commas between its values")
        raise UserError(f"--{key} {text}: not {kind}") from None


def override(config, key, value):
    """config with one dotted field replaced; a string is parsed by the type of that field."""
    values = field_values(config)
    if key not in values:
        raise unknown_key(key, values)
    if isinstance(value, str):
        value = parsed(value, values[key], key)

    def replaced(part, names):
        head, *rest = names
        return replace(part, **{head: replaced(getattr(part, head), rest) if rest else value})

    return replaced(config, key.split("."))


def config_from_json(fields, like=None):
    """A Config from the JSON object that dataclasses.asdict made of one (config.json of a run)."""
    like = Config() if like is None else like
    values = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = config_from_json(value, getattr(like, name))
        values[name] = tuple(value) if isinstance(value, list) else value
    return replace(like, **values)


# --------------------------------------------------------------------------------------------------
# the command line


class Parser(argparse.ArgumentParser):
    """Raises UserError with one sentence, where argparse would print the usage and exit."""

    def error(self, message):
        raise UserError(message)


STAGE = {"type": int, "choices": tuple(STAGES), "required": True}
SWITCH = {"action": "store_true"}
FILE = {"metavar": "FILE"}
FOLDER = {"metavar": "DIR"}
FLAGS = {                    # {flag: (kind, help)}: the recipe of a run, what it reads and writes
    "stage": (STAGE, "the recipe of stages/"),
    "tiny": (SWITCH, "toy model and laptop settings; toy world unless --data is given"),
    "preset": ({"choices": tuple(models.PRESETS)}, "model shape (default 4b; with --tiny, toy)"),
    "data": ({"nargs": "+", "metavar": "FILE[=rate]"}, "record files (.jsonl, .json), their rates"
             " (default 1); a mix.json; or the folder of the recipe's published sets"),
    "media": (FOLDER, "where the paths in the records start"),
    "skip-missing": (SWITCH, "train without the files of a mixture that are missing"),
    "plan": (FILE, "packs planned ahead by tools.plan"),
    "eval": ({"nargs": "+", **FILE}, "records asked about at the end (with --data), each file"
             " scored apart"),
    "eval-every": ({"type": int, "default": 0, "metavar": "N"},
                   "evaluate every N steps too (default 0: only at the end)"),
    "tensorboard": (SWITCH, "scalars and samples for TensorBoard, in tensorboard/ of the run"),
    "init": (FOLDER, "start from the weights of a run directory or of a released checkpoint"),
    "out": (FOLDER, "run directory, new or empty (default runs/stage1-tiny and so on, where an"
            " older run is renamed)"),
    "resume": (SWITCH, "continue from the newest checkpoint in --out, exactly; none there: start"),
    "resume-anyway": (SWITCH, "--resume, even if the recipe or the data have changed"),
    "else-init": (FOLDER, "with --resume: --init, as long as there is no checkpoint"),
    "deterministic": (SWITCH, "dropout off, deterministic kernels"),
}


source_of = cache(inspect.getsource)


class FlagParser(Parser):
    """Adds the fields of the config to --help, each with the comment beside it in the source."""

    def format_help(self):
        lines = ["", "fields of the config, with their defaults before a recipe changes them:"]
        for name, value in field_values(Config()).items():
            part = Config()
            comments = []
            for field in name.split("."):
                pattern = rf"^    {field}: .*?# *(.+)$"
                comments += re.findall(pattern, source_of(type(part)), re.MULTILINE)
                part = getattr(part, field)
            default = as_text(value).strip() or repr(value)
            lines.append(f"  {f'--{name} {default}':<44} {': '.join(comments)}")
        return super().format_help() + "\n".join(lines) + "\n"


def split_arguments(argv):
    """The words of a command line -> those of FLAGS, for argparse, and {field: text}."""
    fields = field_values(Config())
    for_argparse = []
    texts = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, text = word[2:].partition("=")
        flag = key.replace("_", "-")
        field = "lora.rank" if key == "lora" else key.replace("-", "_")
        if not word.startswith("--"):
            for_argparse.append(word)
        elif flag in FLAGS or flag == "help":
            for_argparse.append(f"--{flag}{equals}{text}")
        elif field not in fields:
            raise unknown_key(key, [*FLAGS, *fields])
        elif equals:
            texts[field] = text
        elif words and not words[0].startswith("--"):
            texts[field] = words.pop(0)
        else:
            raise UserError(f"--{key}: needs a value")
    return for_argparse, texts


def parse(argv):
    """Command line (None: of this process) -> (arguments of FLAGS, Config); or UserError.

    args.fields keeps the fields that were given, {name: text}: train.py chooses some of the others.
    """
    for_argparse, texts = split_arguments(sys.argv[1:] if argv is None else argv)
    parser = FlagParser(
        description="Train Molmo2 (paper: training, Table 12).", allow_abbrev=False,
        epilog="--key value and --key=value are the same, and so are - and _ in a key.")
    for flag, (kind, text) in FLAGS.items():
        parser.add_argument(f"--{flag}", help=text, **kind)
    args = parser.parse_args(for_argparse)
    args.fields = texts
    args.resume = args.resume or args.resume_anyway

    recipe = dict(STAGES[args.stage].RECIPE)
    if args.tiny:
        recipe |= tiny_recipe.RECIPE | tiny_recipe.STAGES[args.stage]
    recipe |= {"stage": args.stage}
    recipe |= {"preset": args.preset} if args.preset else {}
    config = Config()
    for key, value in recipe.items():
        config = override(config, key, value)
    config = replace(config, model=models.PRESETS[config.preset])
    for key, text in texts.items():
        config = override(config, key, text)
    if config.lora.rank and "train" not in texts:
        config = replace(config, train=("connector", "llm"))
    if args.deterministic:
        config = replace(config, residual_dropout=0.0, response_dropout=0.0)
    # a laptop's batch may be smaller than the recipe's micro-batch, a short run than its stage 0
    config = replace(config, micro_batch=min(config.micro_batch, config.batch),
                     vit_steps=min(config.vit_steps, config.steps))
    check_together(args, config)
    return args, config


def check_together(args, config):
    """UserError for flags that contradict one another."""
    vision = config.model.vision
    if config.batch % config.micro_batch:
        raise UserError(f"--micro-batch {config.micro_batch}: --batch {config.batch} is not a "
                        "multiple of it")
    if config.uncheckpointed_blocks and not config.activation_checkpointing:
        raise UserError(f"--uncheckpointed_blocks {config.uncheckpointed_blocks}: only goes with "
                        "--activation_checkpointing true")
    if len(config.betas) != 2:
        raise UserError(f"--betas {as_text(config.betas)}: must be two numbers")
    if not config.train:
        raise UserError(f"--train: choose from {', '.join(CHOICES['train'])}")
    if config.lora.rank and not ("llm" in config.train and config.lora.layers):
        raise UserError("--lora: needs llm in --train, and a layer in --lora.layers")
    if 2 * vision.overlap_margin >= vision.grid:
        raise UserError(f"--model.vision.overlap_margin {vision.overlap_margin}: must be less than "
                        f"half of --model.vision.grid {vision.grid}")
    if args.tensorboard and not find_spec("tensorboard"):
        raise UserError("--tensorboard needs an extra package: pip install tensorboard")
    if args.resume and args.init:
        raise UserError("--init starts from weights and --resume continues a run: leave one of "
                        "them out (or use --resume --else-init DIR)")
    if args.else_init and not args.resume:
        raise UserError("--else-init only goes with --resume; without it, use --init")
    if args.eval_every < 0:
        raise UserError(f"--eval-every {args.eval_every}: must be at least 0")
    for flag in () if args.data else ("media", "eval", "skip_missing"):
        if getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')}: only goes with --data")
