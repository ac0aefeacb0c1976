"""Stage 0, for the toy only: what the pre-training of SigLIP2 is to the released ViT.

Molmo2 begins with a ViT that can see. One that starts from nothing, behind a decoder that starts from nothing, learns
colours within minutes and shapes hardly at all: of all that is asked of the two, one token in twenty names a shape
(RESULTS.md). So the patches are asked first, without words: which colour, which shape, and where is its centre?
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import vision
from toy import world as tiny

COLOURS, SHAPES = list(tiny.COLOURS), list(tiny.SHAPES)
PLACES = tiny.SIZE // tiny.LATTICE + 1                   # columns, and rows, that a centre can lie in


def labels(scene, grid):
    """(grid*grid, 4) int64: colour, shape, column and row of the centre of the object that covers most of a patch.

    On the ground, that is where no object covers a quarter of it: one past the last colour and shape, and no place (-1).
    """
    out = np.tile([len(COLOURS), len(SHAPES), -1, -1], (grid * grid, 1))
    if scene["objects"]:
        masks = torch.from_numpy(np.stack([tiny.mask_of(o) for o in scene["objects"]]))
        cover, which = (v.numpy() for v in F.adaptive_avg_pool2d(masks.float(), grid).flatten(1).max(0))
        what = np.array([(COLOURS.index(o["colour"]), SHAPES.index(o["shape"]), o["x"] // tiny.LATTICE, o["y"] // tiny.LATTICE)
                         for o in scene["objects"]])
        out[cover >= 0.25] = what[which[cover >= 0.25]]
    return out


def pretrain(vit, seed, steps, lr=1e-3, images=8):
    """Trains the ViT for `steps` batches of images, scenes of the training side that no later stage shows.

    Yields {"step", "nll", "seconds"} after each; nll in nats: colour and shape over all patches, ground a tenth each, column
    and row over patches of objects, on factors as below. The head that answers is thrown away at the end.
    """
    config, device = vit.config, vit.pos.device
    world, sizes = tiny.World("train", seed, asks="patches"), [len(COLOURS) + 1, len(SHAPES) + 1, PLACES, PLACES]
    head = nn.Linear(len(config.feature_layers) * config.n_embd, sum(sizes), device=device)
    # small factors on the logits make features large: with none, places took up to 86 % of the variance of the features
    # and shapes 2 %, and the decoder did not notice shapes any more; with these it is 30 % and 35 % (RESULTS.md)
    factors, shares = (0.4, 0.4, 8, 8), (1, 4, 0.5, 0.5)
    optimizer = torch.optim.AdamW([*vit.parameters(), *head.parameters()], lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for step in tqdm(range(1, steps + 1), unit="step", desc="stage 0", mininterval=1):
        started = time.time()
        for group in optimizer.param_groups:             # up over a tenth, then a cosine to 0
            group["lr"] = lr * min(1, 10 * step / steps) * (1 + math.cos(math.pi * step / (steps + 1))) / 2
        scenes = [world.scene(i) for i in range((step - 1) * images, step * images)]
        pixels = np.stack([vision.resize(tiny.render(scene), config.crop, config.crop) for scene in scenes])
        truth = torch.from_numpy(np.concatenate([labels(scene, config.grid) for scene in scenes])).to(device)
        said = head(vit(torch.from_numpy(vision.patchify(pixels, config)).to(device))).flatten(0, 1).split(sizes, dim=1)
        weights = torch.where(truth[:, 2:3] < 0, 0.1, 1.0).repeat(1, 4)                    # most patches are ground, and easy
        weights[:, 2:] *= truth[:, 2:] >= 0                                              # only objects have a place
        nll = [(w * F.cross_entropy(f * s, t.clamp(min=0), reduction="none")).sum() / w.sum().clamp(min=1)
               for f, s, t, w in zip(factors, said, truth.unbind(1), weights.unbind(1), strict=True)]
        sum(share * n for share, n in zip(shares, nll, strict=True)).backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"step": step, "nll": dict(zip(("colour", "shape", "column", "row"), (round(v.item(), 4) for v in nll), strict=True)),
               "seconds": time.time() - started}
