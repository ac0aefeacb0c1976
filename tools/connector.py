"""Stage 0, second part: a new connector learns the language model's words for what the ViT sees.

    python -m tools.connector runs/composed/base CUT_OUTS runs/composed/start \\
        --kinds toy/stamp_kinds.json --backgrounds PHOTOGRAPHS

A new connector writes vectors that mean nothing to the language model, and the gradient that comes
back through all of its layers is a slow teacher (docs/photos.md). So the connector is trained for
some minutes without these layers: the visual token of a bird becomes similar to the embedding of
the word " bird". A linear head tells cut-out and centre from it, as in tools.tower. The ViT
and the language model stay as they are. OUT is BASE with this connector.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import vision
from records.errors import DataError, warn
from tools.tower import IMAGES, labels, tasks_of
from toy.photos import Photos, add_arguments, open_cut_outs, read_backgrounds
from toy.vit import learning_rate, nll_of_tasks, patches_of
from weights import files
from weights.open_model import open_model_folder

LR = 1e-3
GROUND = "background"                # the word for what is no cut-out
# The smaller the factors, the longer the visual tokens become; with these, about as long as words.
LOGIT_FACTORS = (4.5, 4, 4, 4)


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tools.connector", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("base", metavar="BASE", help="of tools.hf base")
    add_arguments(parser)
    add("out", metavar="OUT")
    add("--steps", type=int, default=400, help="of eight images (default 400)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="default cpu")
    return parser.parse_args(argv)


@torch.no_grad()
def word_vectors(model, tokenizer, words):
    """(n,C) of length 1: the mean embedding of the tokens of each word."""
    vectors = []
    for word in words:
        tokens = torch.tensor([tokenizer.encode(f" {word}")], device=model.norm.weight.device)
        vectors.append(model.embed_tokens(tokens)[0].mean(0))
    return F.normalize(torch.stack(vectors), dim=1)


def labels_of_windows(placed, cut_outs, kinds, config):
    """(M,4) int64: tools.tower's classes of a scene for the windows of 2 x 2 patches. Where the
    grid is odd, the last windows jut out of the crop."""
    n_windows = math.ceil(config.grid / 2)               # along one side
    padding = 2 * n_windows * config.patch - config.crop         # pixels
    padded = [p._replace(mask=np.pad(p.mask, (0, padding))) for p in placed]
    return labels(padded, cut_outs, kinds, config, n_windows)


def train(model, tokenizer, photos, args):
    """Trains pooling and projector; -> {task: mean nll of the last tenth of the steps}."""
    kinds = sorted(photos.by_kind)
    cut_outs = [c for kind in kinds for c in photos.by_kind[kind]]
    config = model.config.vision
    vit = model.vision.vit
    tasks = tasks_of(cut_outs, kinds, config.grid)._replace(logit_factors=LOGIT_FACTORS)
    words = word_vectors(model, tokenizer, [*kinds, GROUND])

    patch_ids = np.arange(IMAGES * config.n_patch).reshape(IMAGES, config.grid, config.grid)
    pool_src = np.concatenate([vision.windows(ids, 2) for ids in patch_ids])
    pool_src = torch.from_numpy(pool_src).to(words.device)
    torch.manual_seed(args.seed)
    head = nn.Linear(model.config.n_embd, sum(tasks.n_classes[1:]), device=words.device)
    connector = [*model.vision.pool.parameters(), *model.vision.projector.parameters()]
    for parameter in connector:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW([*connector, *head.parameters()], LR, betas=(0.9, 0.95),
                                  eps=1e-6, weight_decay=0.0)
    history = []
    progress = tqdm(range(1, args.steps + 1), unit="step", desc="connector", mininterval=1)
    for step in progress:
        scenes = [photos.scene(i) for i in range((step - 1) * IMAGES, step * IMAGES)]
        classes = [labels_of_windows(placed, cut_outs, kinds, config) for _, placed in scenes]
        with torch.no_grad():
            features = vit(patches_of([image for image, _ in scenes], vit))
        tokens = model.vision.connect(features, pool_src)                        # (M,C)
        logits = [tokens @ words.T, *head(tokens).split(tasks.n_classes[1:], dim=1)]
        nll = nll_of_tasks(logits, np.concatenate(classes), tasks)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, LR, args.steps)
        sum(share * loss for share, loss in zip(tasks.loss_shares, nll, strict=True)).backward()
        nn.utils.clip_grad_norm_(connector, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item() for loss in nll])
        progress.set_postfix(kind=f"{history[-1][0]:.2f}", refresh=False)
    last = np.mean(history[-max(args.steps // 10, 1):], axis=0)
    return {name: round(float(nll), 4) for name, nll in zip(tasks.names, last, strict=True)}


def main(argv=None):
    args = parse(argv)
    torch.set_flush_denormal(True)
    out = Path(args.out)
    try:
        cut_outs, kinds = open_cut_outs(args.source, args.kinds)
        model, tokenizer, data_config = open_model_folder(args.base, args.device)
        photos = Photos(cut_outs, kinds, read_backgrounds(args.backgrounds), "train",
                        model.config.vision.crop, args.seed)
        nll = train(model.requires_grad_(False), tokenizer, photos, args)
        files.save(model, out)
        tokenizer.save(out)
        files.save_data_config(data_config, out)
    except (OSError, DataError, ValueError) as e:
        warn(f"tools.connector: {e}")
        raise SystemExit(2) from None
    print(json.dumps({"out": args.out, "steps": args.steps, "nll": nll}))


if __name__ == "__main__":
    main()
