"""Computes tokens per second and MFU (model FLOPs utilization) of a run from its log.

    python -m tools.bench run runs/tuned --peak 0.2 --skip 1

The seconds of a step include planning, decoding, encoding, transfers, forward, backward,
communication and the optimizer. The windows of all visual tokens are counted as full.

FLOPs are the work that a training step needs. They are counted in the same way for every
implementation. A matrix costs 2 FLOPs for each weight and each input vector. Attention costs
4 FLOPs for each allowed query-key pair and each element of a query. The backward pass of a
matrix costs the same again for its inputs, and once more if its weights are trained. The
backward pass of attention costs twice as much as the forward pass. Four things are not counted:
padding, pairs that the mask hides, logits without a label, and blocks that activation
checkpointing computes again.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torch import nn

from model import ModelConfig
from records.errors import UserError
from tools.command import print_table, whole_number
from training.log import allowed_pairs, read_log, read_steps
from weights import files

PARTS = ("vit", "connector", "llm")


class Work(NamedTuple):
    """What a step processes: numbers of tokens, patches and pairs."""
    patches: int = 0  # patches of all crops
    pooled: int = 0  # patches in the windows of all visual tokens
    visual: int = 0  # visual tokens
    tokens: int = 0
    labelled: int = 0  # tokens with loss
    pairs: int = 0  # allowed query-key pairs


def matrix_size(*modules):
    """-> the number of weights of all nn.Linear in the modules."""
    layers = [layer for module in modules for layer in module.modules()]
    return sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear))


def flops(model, work, train=PARTS, freeze_embedding=False, lora_rank=0):
    """-> FLOPs of the forward and backward pass for a Work. train: the trained parts. A tied head
    is not trained if the embedding is frozen. With adapters (lora_rank above 0), the matrices of
    the decoder are not trained. The small matrices of the adapters are not counted."""
    config = model.config
    vision = model.vision

    def needs_backward(part):  # is this part, or a part before it, trained?
        return any(below in train for below in PARTS[: PARTS.index(part) + 1])

    def matrices(part, learns):  # FLOPs for each weight and input vector
        return 2 * (1 + needs_backward(part) + learns)

    def pairs(part):  # FLOPs for each query-key pair and each element of a query
        return 4 * (1 + 2 * needs_backward(part))

    vit = matrices("vit", "vit" in train) * matrix_size(vision.vit) * work.patches
    vit_pairs = config.vision.n_layer * work.patches * config.vision.n_patch
    vit += pairs("vit") * vit_pairs * config.vision.n_embd

    pool = vision.pool
    connector = matrix_size(pool.k, pool.v) * work.pooled
    connector += matrix_size(pool.q, pool.out, vision.projector) * work.visual
    connector *= matrices("connector", "connector" in train)
    connector += pairs("connector") * work.pooled * config.vision.n_embd

    llm_learns = "llm" in train and not lora_rank
    llm = matrices("llm", llm_learns) * matrix_size(*model.blocks) * work.tokens
    head_learns = llm_learns and not (config.tied and freeze_embedding)
    llm += matrices("llm", head_learns) * config.n_vocab * config.n_embd * work.labelled
    llm += pairs("llm") * config.n_layer * work.pairs * config.n_head * config.head_dim
    return vit + connector + llm


def batch_work(model, batch):
    """-> the Work of a packing.Batch, without padding and without blank crops."""
    n_patch = model.config.vision.n_patch
    in_window = batch.pool_src >= 0
    n_crops = len((batch.pool_src[in_window] // n_patch).unique())
    lengths = (batch.example < len(batch.ids)).sum(1).tolist()
    rows = zip(batch.visible_until.numpy(), batch.bidir.numpy(), lengths, strict=True)
    pairs = sum(allowed_pairs(until[:n], bidir[:n]) for until, bidir, n in rows)
    return Work(
        patches=n_crops * n_patch,
        pooled=int(in_window.sum()),
        visual=int(in_window.any(1).sum()),
        tokens=sum(lengths),
        labelled=int((batch.weights > 0).sum()),
        pairs=pairs,
    )


def all_pairs(work, row_tokens):
    """The Work of one row -> the same as torchtitan and OLMo-core count it: each token of the row,
    also padding, attends to all tokens and has logits."""
    return work._replace(tokens=row_tokens, labelled=row_tokens, pairs=row_tokens**2)


def logged_work(line, stage, vision_config):
    """The line of a step in log.jsonl -> its Work. In stage 1, all media are images, whose windows
    have 2 x 2 patches. In later stages, all windows count as 3 x 3, the windows of videos."""
    window = 4 if stage == 1 else 9
    return Work(
        patches=line["crops"] * vision_config.n_patch,
        pooled=window * line["visual_tokens"],
        visual=line["visual_tokens"],
        tokens=line["tokens"],
        labelled=line["loss_tokens"],
        pairs=line["attention_pairs"],
    )


def add_arguments(parser):
    add = parser.add_argument
    add("run", metavar="DIR", help="a run directory")
    add("--peak", type=float, required=True, default=argparse.SUPPRESS,
        help="peak TFLOP/s of one GPU in the dtype of the run; 989 for an H100 in bfloat16")
    add("--skip", type=whole_number(0), default=5, help="how many first steps are ignored")


def run(args):
    """Prints a table -> medians over the steps. UserError if no step is left."""
    lines = read_log(Path(args.run) / "log.jsonl")
    steps = read_steps(lines)[args.skip :]
    if not steps or args.peak <= 0:
        raise UserError(f"{args.run}: no log of more than {args.skip} steps, "
                        "or --peak is not above 0")
    config = lines[0]["config"]
    gpus = lines[0]["world"]
    model = files.meta_model(files.config_from_dict(config["model"], ModelConfig()))
    step_flops = []
    for line in steps:
        work = logged_work(line, config["stage"], model.config.vision)
        step_flops.append(flops(
            model, work, config["train"], config["freeze_embedding"], config["lora"]["rank"]))
    rates = [n / line["seconds"] for n, line in zip(step_flops, steps, strict=True)]
    found = {
        "steps": len(steps),
        "seconds": median(line["seconds"] for line in steps),
        "flops": median(step_flops),
        "tokens_per_second": median(line["tokens"] / line["seconds"] for line in steps),
        "mfu": median(rates) / (gpus * args.peak * 1e12),
        "gpus": gpus,
    }
    print_table("medians of the steps", {args.run: found})
    return found
