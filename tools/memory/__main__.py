"""Where the memory of a GPU goes, by part, in a training step or an answer: counted, not measured.

    python -m tools.memory --stage 1 --preset 4b --train connector,llm --micro-batch 1
    python -m tools.memory --stage 3 --preset 8b --gpus 8 --cp 8
    python -m tools.memory --stage 3 --preset 8b --gpus 128 --cp 8       # in nodes of 8: --shard 8
    python -m tools.memory --stage 2 --init Molmo2-4B                    # shape of a saved model
    python -m tools.memory --stage 3 --preset 4b --generate              # a prompt and its answer

Takes the flags of train.py. Prints the parts, the moments of a step (the largest is the peak), what
a GPU sends, what fits, then one JSON line.

Not counted: integers per token beside the batch, workspace inside kernels, the CUDA context (half a
GiB), what torch.compile saves, and fragmentation of the allocator. Leave a tenth of the memory for
these.
"""

import json
from dataclasses import replace

from model import PRESETS
from records.errors import warn
from tools.memory.activations import saved_activations
from tools.memory.shape import largest_shape
from tools.memory.step import answering, most_uncheckpointed_blocks, sent, training
from training.config import Parser, UserError, parse
from training.setup import default_shard, layout_error
from weights import files, tensor_files

GIB = 2**30
# {what it is called: GiB that there are}
GPU_SIZES = {16: 15.6, 24: 23.6, 40: 39.4, 48: 47.5, 80: 79.6, 141: 140.4}
GPUS_OF_NODE = 8
USABLE = 0.9                             # of a GPU's memory: see "not counted" above


def with_shape_of_init(config, args):
    """The config with the shape of --init, a run directory or a released checkpoint's folder. Reads
    the head's weights of a released one: only they tell if it is tied."""
    if args.preset or config.model != PRESETS[config.preset]:
        raise UserError(f"--init {args.init}: has a shape of its own; leave out --preset and "
                        "--model.*")
    try:
        folder = files.describe(args.init)
        model = folder.config
        if folder.released:
            stored = tensor_files.stored_tensors(folder.path)
            model = replace(model, tied=files.has_tied_head(folder, stored))
    except (OSError, ValueError) as error:
        raise UserError(f"--init: {error}") from None
    return replace(config, model=model)


def read_command(argv):
    """-> this tool's own arguments, train.py's, its config with the micro-batch of one rank."""
    parser = Parser(
        prog="python -m tools.memory", description=__doc__.split("\n\n")[0], allow_abbrev=False,
        epilog="Takes all flags of train.py too (python train.py --help); --stage is required.")
    parser.add_argument("--gpus", type=int, default=1,
                        help="processes that train together (default 1); see also --cp, --shard")
    parser.add_argument("--generate", action="store_true",
                        help="inference: one prompt, or --micro-batch of them")
    own, rest = parser.parse_known_args(argv)
    args, config = parse(rest)
    if args.init is not None:
        config = with_shape_of_init(config, args)
    if own.gpus < 1 or (own.generate and own.gpus > 1):
        raise UserError(f"--gpus {own.gpus}: must be at least 1, and 1 with --generate")
    if own.generate:
        micro_batch = config.micro_batch if "micro_batch" in args.fields else 1
    else:                                # as in train.py: not more than a rank's share of the batch
        micro_batch = max(min(config.micro_batch, config.batch * config.cp // own.gpus), 1)
    if "shard" not in args.fields:
        config = replace(config, shard=default_shard(own.gpus, GPUS_OF_NODE))
    config = replace(config, micro_batch=micro_batch)
    if error := layout_error(own.gpus, config, config.model):
        raise UserError(error)
    return own, args, config


def print_table(title, rows, peak=None):
    print(f"\n{title}")
    for name, n in rows.items():
        print(f"{name:34s}{n / GIB:9.3f}{'  <- the peak' if name == peak else ''}")


def print_fit(total, blocks):
    """Which GPUs hold `total` bytes. blocks: {GB: how many decoder blocks need no checkpoint}."""
    print(f"\n{'total':34s}{total / GIB:9.3f}")
    for size in GPU_SIZES:
        share = total / (GPU_SIZES[size] * GIB)
        verdict = "does not fit"
        if share <= 1:
            verdict = "fits" if share <= USABLE else "fits, but with less than a tenth to spare"
        hint = f"; {USABLE:.0%} with --uncheckpointed_blocks={blocks[size]}" if blocks[size] else ""
        print(f"{size:4d} GB: {verdict}, {share:.0%} of it{hint}")


def report(own, args, config, compute_bytes):
    """Prints the tables and the JSON line."""
    shape = largest_shape(config, compute_bytes, own.gpus)
    count = answering(config, compute_bytes) if own.generate else training(shape)
    dtype = "bfloat16" if compute_bytes == 2 else "float32"
    name = args.init or config.preset
    trained = "" if own.generate else f"; trained: {', '.join(config.train)}"
    crops = shape.patches // shape.vision.n_patch
    print(f"stage {config.stage}, {name}, {dtype}: {shape.rows} x {shape.row_tokens} tokens; "
          f"on one GPU {crops} crops and {shape.visual_tokens} visual tokens, each pools "
          f"{shape.window} patches{trained}")
    print_table("GiB on one GPU, by part", count.parts)
    print_table("GiB on one GPU, at one moment", count.moments, count.peak)

    blocks = dict.fromkeys(GPU_SIZES, 0)
    more = {}
    if not own.generate:
        if shape.checkpointing:
            blocks = {size: most_uncheckpointed_blocks(shape, USABLE * gib * GIB)
                      for size, gib in GPU_SIZES.items()}
        saved = {f"--activation_checkpointing={on}": sum(
            saved_activations(replace(shape, checkpointing=on)).values()) for on in (True, False)}
        more = {"saved": saved, "sent": sent(shape)}
        print_table(f"GiB saved for the backward pass, in all (here: {shape.checkpointing})", saved)
        print_table("GiB that leave one GPU for a micro-batch", more["sent"])
    print_fit(count.total, blocks)
    print(json.dumps({
        "memory": "generate" if own.generate else "train", "preset": config.preset,
        "init": args.init, "stage": config.stage, "dtype": dtype, "train": config.train,
        "micro_batch": shape.rows, "max_tokens": shape.row_tokens, "gpus": shape.gpus,
        "cp": shape.cp, "shard": shape.weight_ranks,
        "activation_checkpointing": shape.checkpointing,
        "uncheckpointed_blocks": shape.uncheckpointed_blocks, "parts": count.parts,
        "moments": count.moments, "peak": count.peak, "total": count.total,
        "share_of_gb": {size: count.total / (gib * GIB) for size, gib in GPU_SIZES.items()},
        **more}))


def main(argv=None):
    try:
        own, args, config = read_command(argv)
    except UserError as error:
        warn(f"tools.memory: {error}")
        raise SystemExit(2) from None
    on_cpu = (config.dtype, config.device) == ("auto", "cpu")
    report(own, args, config, compute_bytes=4 if config.dtype == "float32" or on_cpu else 2)


if __name__ == "__main__":
    main()
