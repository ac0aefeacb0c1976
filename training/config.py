"""The configuration of a run and the command line that sets it (paper: training, Table 12).

Values come from the defaults of Config, the recipe of the stage, the recipe of --tiny and the
flags. If several of them set a field, the last one counts. Every field is a flag:
`--micro-batch 2`, `--data.max_tokens=512`, `--lr.vit 1e-5`.
"""

import argparse
import dataclasses
import difflib
import inspect
import io
import re
import sys
import tokenize
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

import model as models
from data import DataConfig
from records.errors import Parser, UserError
from records.media import MAX_FRAMES
from stages import stage1, stage2, stage3
from stages import tiny as tiny_recipe
from weights.lora import LAYERS, LoraConfig

STAGES = {1: stage1, 2: stage2, 3: stage3}


@dataclass(frozen=True)
class GroupRates:
    """One number for each group of parameters."""

    vit: float  # the vision transformer
    connector: float  # pooling, projector and the extra embeddings of the special tokens
    llm: float  # the decoder


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    stage: int = 1  # the recipe, a file in stages/
    preset: str = "4b"  # model shape; the fields of `model` change it
    steps: int = 32_000  # optimizer steps; the learning rate schedule ends there
    batch: int = 128  # packs per optimizer step, over all ranks
    micro_batch: int = 4  # packs per forward pass of one rank; gradients are accumulated
    cp: int = 1  # context-parallel degree: number of ranks that share a row
    cp_exchange: str = "heads"  # heads: exchange heads (Ulysses); gather: gather k and v
    cp_heads: int = 0  # ranks in a group that exchanges heads; groups gather k and v; 0: all
    shard: int = 0  # ranks over which weights are sharded; 0: all; not given: the ranks of a node
    pack_crops: int = 16  # largest number of crops in a pack
    pool_size: int = 48  # examples from which the packer chooses
    lr: GroupRates = GroupRates(6e-6, 2e-4, 2e-5)  # peak learning rates
    warmup: GroupRates = GroupRates(2000, 200, 2000)  # steps of linear warm-up from 0
    final_lr: float = 0.1  # the cosine ends at this fraction of the peak learning rate
    betas: tuple = (0.9, 0.95)  # decay rates of AdamW
    adam_eps: float = 1e-6  # epsilon of AdamW
    clip: float = 1.0  # largest gradient norm; each parameter group is clipped by itself
    z_loss: float = 1e-4  # weight of the squared logsumexp in the loss
    residual_dropout: float = 0.0  # dropout of sub-layer outputs at every position
    response_dropout: float = 0.1  # dropout of sub-layer outputs where the target has loss
    freeze_embedding: bool = True  # the base embedding, and a tied head, are not trained
    train: tuple = ("vit", "connector", "llm")  # which parameter groups are trained
    lora: LoraConfig = LoraConfig()
    recompute: float = 1.0  # share of blocks that backward computes again; 2: attention, too
    compile: bool = False  # use torch.compile on each block (not given: on a GPU without --tiny)
    crop_bucket: int = 2  # the number of crops in a batch is padded to a multiple of this
    save_every: int = 500  # steps between checkpoints; one more is saved at the end; 0: none
    keep: int = 2  # how many of the newest checkpoints are kept, besides the best one; 0: all
    seed: int = 0  # seed of every random choice
    deterministic: bool = False  # train without dropout and with deterministic kernels
    device: str = "auto"  # cpu, cuda, mps (never tested); auto: cuda if there is one, else cpu
    dtype: str = "auto"  # dtype of the computation; trained weights are always float32
    max_skip: float = 0.01  # largest share of a source's records that may be unusable
    workers: int = 0  # decoding processes per rank (not given, on a GPU: its cores less 1, up to 8)
    vit: str = ""  # a folder as for --init; a new model starts with the ViT of this model
    eval_images: int = 200  # held-out images to evaluate on at the end of a toy run; 0: no scores
    data: DataConfig = DataConfig()
    model: models.ModelConfig = models.PRESETS["4b"]


CHOICES = {
    "cp_exchange": ("heads", "gather"),
    "device": ("auto", "cpu", "cuda", "mps"),
    "dtype": ("auto", "float32", "bfloat16"),
    "data.separator": ("\t", ";"),  # text/points.py cannot parse others
    "model.family": ("qwen", "olmo", "llama"),
}
# {fields: (least, greatest)}: a run with other values would fail, or not train as intended
RANGES = {
    "steps batch micro_batch cp pack_crops pool_size crop_bucket": (1, inf),
    "data.max_tokens data.max_crops data.max_images data.max_points": (1, inf),
    "data.high_res_crops": (1, inf),
    "data.high_res_share data.multi_turn_share": (0, 1),
    "recompute": (0, 2),
    "data.trained_crops": (0, inf),
    "data.max_frames": (1, MAX_FRAMES),
    "shard cp_heads save_every keep workers": (0, inf),
    "lora.rank eval_images data.n_transcripts data.length_hint": (0, inf),
    "seed warmup.vit warmup.connector warmup.llm": (0, 2**63),
    "lr.vit lr.connector lr.llm final_lr z_loss max_skip": (0, 1),
    "residual_dropout response_dropout": (0, 0.999999),
    "clip adam_eps data.fps lora.alpha": (1e-16, inf),
    "data.point_weight data.video_caption_weight": (0, 1000),
    "model.n_layer model.n_embd model.n_head model.n_kv_head model.head_dim": (1, inf),
    "model.n_hidden model.n_vocab model.n_extra model.rope_theta model.yarn.original_max": (1, inf),
    "model.eps model.vision.eps model.yarn.factor model.yarn.attention_factor": (1e-16, inf),
    "model.yarn.beta_fast model.yarn.beta_slow": (1e-16, inf),
    "model.vision.n_layer model.vision.n_embd model.vision.n_head": (1, inf),
    "model.vision.n_hidden model.vision.grid model.vision.patch": (1, inf),
    "model.init_std model.vision.overlap_margin": (0, inf),
}


def field_values(config, prefix=""):
    """-> {dotted name: value} of every field."""
    values = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            values |= field_values(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


# {flag of an earlier version or of other trainers: what to do}
REPLACED = {
    "--lr": "each part has its own: --lr.llm, --lr.connector and --lr.vit",
    "--learning-rate": "each part has its own: --lr.llm, --lr.connector and --lr.vit",
    "--beta": "python -m examples.preferences trains on preference pairs",
    "--activation-checkpointing": "use --recompute 1 for true, --recompute 0 for false",
    "--uncheckpointed-blocks": "--recompute 0.7 computes the first 70 % of all blocks again",
}
FIELDS = field_values(Config())
del FIELDS["stage"], FIELDS["preset"]  # make_parser adds these flags by itself


def override(config, name, value):
    """-> a copy of config with one dotted field replaced."""
    head, _, rest = name.partition(".")
    if rest:
        value = override(getattr(config, head), rest, value)
    return replace(config, **{head: value})


def spell_flag(key):
    """-> a flag as --help writes it: --micro-batch, but --data.max_tokens, as the field is named.
    On the command line, - and _ in a flag mean the same."""
    if "." in key:
        return key.replace("-", "_")
    return key.replace("_", "-")


def choose_reader(default):
    """-> the function that converts the text of a flag to the type of the field's default."""
    def true_or_false(text):
        if text.lower() not in ("true", "1", "false", "0"):
            raise ValueError(text)
        return text.lower() in ("true", "1")

    def list_with_commas(text):
        kind = type(default[0]) if default else int
        return tuple(kind(part) for part in text.split(",") if part)

    def text_with_tabs(text):  # a shell passes \t as two characters
        return text.replace("\\t", "\t")

    readers = {bool: true_or_false, tuple: list_with_commas, str: text_with_tabs}
    return readers.get(type(default), type(default))


@cache  # so that a process reads the source of each class once
def read_comments(config_class):
    """-> {field: the comment beside it}. It may continue in the next lines, right of the names:

        seed: int = 0  # seed of every random choice,
                       # also of new weights
    """
    comments = {}
    name = ""
    source = io.StringIO(inspect.getsource(config_class))
    for token in tokenize.generate_tokens(source.readline):
        column = token.start[1]
        if token.type == tokenize.NAME and column == 4:  # a field begins
            name = token.string
            comments[name] = ""
        elif token.type == tokenize.COMMENT and column > 4:
            comments[name] = f"{comments[name]} {token.string.strip('# ')}".strip()
    return comments


def describe_fields(config, prefix="", outer=""):
    """-> {dotted name: text for --help}, made of the comments beside the field and its parents."""
    comments = read_comments(type(config))
    texts = {}
    for name, value in vars(config).items():
        comment = comments[name].replace("%", "%%")
        text = outer + (comment or name)
        texts[prefix + name] = text
        if dataclasses.is_dataclass(value):
            texts |= describe_fields(value, f"{prefix}{name}.", f"{text}: ")
    return texts


def make_parser(words=()):
    """-> the parser. --help shows the defaults for --stage, --tiny and --preset in `words`."""
    first = Parser("", add_help=False, allow_abbrev=False)
    first.add_argument("--stage", type=int, choices=STAGES, help="stage to train (see stages/)")
    first.add_argument("--tiny", action="store_true",
                       help="toy model and settings for a laptop; without --data, toy images")
    first.add_argument("--preset", choices=models.PRESETS,
                       help="model shape (default 4b; with --tiny, toy)")
    asked, _ = first.parse_known_args(words)
    shown = make_config(asked.stage or 1, asked.tiny, asked.preset)
    recipe = f"--stage {shown.stage}"
    if asked.tiny:
        recipe += " --tiny"
    if asked.preset:
        recipe += f" --preset {asked.preset}"
    parser = Parser(
        f"Trains Molmo2 with the recipe of one stage (the defaults below are for {recipe}).\n\n"
        "    python train.py --stage 1 --tiny",
        allow_abbrev=False, usage="python train.py --stage N [--key value ..]", parents=[first],
        epilog="--key value and --key=value mean the same. In a key, - and _ mean the same.")
    add = parser.add_argument
    switch = partial(add, action="store_true")
    add("--data", nargs="+", action="extend", metavar="FILE[=rate]", help="record files (.jsonl) "
        "and their sampling rates (default 1); or a mix.json; or the folder of the published sets")
    add("--media", metavar="DIR", help="folder to which the paths in the records are relative "
        "(default: media/ beside the record file, else the folder of the record file)")
    switch("--skip-missing", help="skip files of a mixture that do not exist")
    add("--plan", metavar="FILE", help="packs that tools.plan has planned")
    add("--eval", nargs="+", action="extend", metavar="FILE",
        help="record files to evaluate on at the end, with scores for each file (needs --data)")
    add("--eval-every", type=int, default=0, metavar="N",
        help="also save and evaluate after every N steps (default 0: only at the end); the "
        "checkpoint with the lowest held-out loss in the first file of --eval is never deleted")
    add("--init", metavar="DIR", help="start from the weights of a run or a released checkpoint")
    add("--out", metavar="DIR", help="run directory (default runs/stage1-tiny and so on)")
    switch("--overwrite", help="delete the run in --out first")
    switch("--resume", help="continue from the newest checkpoint in --out; without one, start")
    switch("--resume-anyway", help="like --resume, but the recipe or the data may have changed")
    add("--finish-at", type=int, default=0, metavar="N",
        help="end the run in --out with the model of its checkpoint step-N, without training")
    switch("--json", help="also print result.json, as one line, after everything else")
    add("--else-init", metavar="DIR", help="with --resume: --init if there is no checkpoint yet")
    add("--lora", dest="lora.rank", type=int, default=argparse.SUPPRESS, metavar="R",
        help="train adapters of rank R instead of the decoder's weights (short for --lora.rank)")
    add_fields(parser, field_values(shown))
    return parser


def add_fields(parser, defaults):
    """Adds a flag for each field of Config. defaults: {name: value that --help shows}."""
    texts = describe_fields(Config())
    for name, default in FIELDS.items():
        alone = {"nargs": "?", "const": True} if isinstance(default, bool) else {}
        parser.add_argument(
            f"--{spell_flag(name)}", type=choose_reader(default), choices=CHOICES.get(name),
            metavar="X", default=argparse.SUPPRESS,
            help=f"{texts[name]} (default {defaults[name]!r})", **alone)


def make_config(stage, tiny, preset, fields=()):
    """-> the Config of a recipe. fields: {name: value} that replaces values of the recipe."""
    values = STAGES[stage].RECIPE | {"stage": stage}
    if tiny:
        if stage not in tiny_recipe.STAGES:
            raise UserError(f"--tiny: stages/tiny.py has no settings for stage {stage}")
        values |= tiny_recipe.RECIPE | tiny_recipe.STAGES[stage]
    if preset:
        values["preset"] = preset
    values["model"] = models.PRESETS[values.get("preset", Config.preset)]
    config = Config()
    for name, value in (values | dict(fields)).items():
        config = override(config, name, value)
    if config.lora.rank and "train" not in fields:
        config = replace(config, train=("connector", "llm"))
    if config.deterministic:
        config = replace(config, residual_dropout=0.0, response_dropout=0.0)
    # --batch may be smaller than the recipe's micro_batch
    config = replace(config, micro_batch=min(config.micro_batch, config.batch))
    if config.data.high_res_share:  # the crops of an image and its global view must fit a pack
        high_res_crops = max(min(config.data.high_res_crops, config.pack_crops - 1), 1)
        config = override(config, "data.high_res_crops", high_res_crops)
    if config.cp_exchange == "gather":
        config = replace(config, cp_heads=config.cp_heads or 1)
    return config


def parse(argv=None):
    """Command line -> args, Config. UserError for a mistake.

    args has the flags that are not fields of Config. args.fields: {name: value} of the fields on
    the command line. Some of the other fields depend on the machine (training/setup.py).
    """
    words = sys.argv[1:] if argv is None else argv
    words = [re.sub(r"(?<=^--)[^=]+", lambda key: spell_flag(key[0]), w) for w in words]
    parser = make_parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        key = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(key, parser._option_string_actions, 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists all"
        parser.error(f"{key}: no such flag or field; {REPLACED.get(key, hint)}")
    if args.stage is None:
        parser.error("--stage is missing; choose the stage to train, as in --stage 1")
    args.fields = {name: vars(args).pop(name) for name in [*vars(args)] if name in FIELDS}
    args.resume = args.resume or args.resume_anyway or args.finish_at > 0
    config = make_config(args.stage, args.tiny, args.preset, args.fields)
    args.out = args.out or f"runs/stage{config.stage}{'-tiny' if args.tiny else ''}"
    check(args, config)
    return args, config


def check(args, config):
    """UserError for values outside their range and for flags that contradict each other."""
    values = field_values(config)
    for names, (least, most) in RANGES.items():
        bounds = f"at least {least}" if most == inf else f"from {least} to {most}"
        for name in names.split():
            if not least <= values[name] <= most:  # NaN is in no range
                raise UserError(f"--{spell_flag(name)} {values[name]}: must be {bounds}")
    groups = set(config.train)
    layers = set(config.lora.layers)
    for is_wrong, sentence in (
        (len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas),
         "--betas needs two numbers from 0 to below 1"),
        (not groups or groups - {"vit", "connector", "llm"},
         "--train: choose one or more of vit, connector, llm"),
        (layers - {*LAYERS} or (config.lora.rank and not ("llm" in groups and layers)),
         f"--lora needs llm in --train, and in --lora.layers some of {', '.join(LAYERS)}"),
        (config.lora.rank and not args.fields.get("freeze_embedding", True),
         "--lora does not train the embedding; remove --freeze-embedding false"),
        (args.eval_every < 0, f"--eval-every {args.eval_every}: must be at least 0"),
        (args.finish_at < 0, f"--finish-at {args.finish_at}: must be at least 0"),
        (args.eval_every and args.data and not args.eval,
         "--eval-every needs --eval FILE, the records to evaluate on"),
        ((args.media or args.eval or args.skip_missing) and not args.data,
         "--media, --eval and --skip-missing need --data"),
        (args.resume and args.overwrite, "--resume and --overwrite contradict each other"),
        (args.else_init and (args.init or not args.resume),
         "--else-init needs --resume, and cannot be used with --init"),
    ):
        if is_wrong:
            raise UserError(sentence)
