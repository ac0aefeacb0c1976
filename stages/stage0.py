"""Stage 0, for the toy only: what the pre-training of SigLIP2 is to the released ViT.

Molmo2 begins with a ViT that can see. One that starts from nothing, behind a decoder that starts from nothing, learns
colours within minutes and shapes hardly at all: of all that is asked of the two, one token in twenty names a shape
(RESULTS.md). So the patches are asked first, without words: which colour, which shape, and where is its centre?
"""

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import vision
from stages import tiny

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
    """Trains the ViT for `steps` batches of images on scenes of the training side that no later stage shows.

    Yields {"step", "nll": of colour, shape, column and row, in nats per patch, "seconds"} after each; the head that
    answers is thrown away at the end.
    """
    config, device = vit.config, vit.pos.device
    world, sizes = tiny.World("train", seed, asks="patches"), [len(COLOURS) + 1, len(SHAPES) + 1, PLACES, PLACES]
    head = nn.Linear(2 * config.n_embd, sum(sizes), device=device)
    # small factors on the logits make features large: with none, places take 86 % of the variance of the features and
    # shapes 2 %, and the decoder does not notice shapes any more; with these, shapes 35 %
    scales, shares = (0.4, 0.4, 8, 8), (1, 4, 0.5, 0.5)
    # most patches are ground, and easy; only objects have a place
    weights = [torch.tensor([1.0] * (n - 1) + [0.1], device=device) for n in sizes[:2]] + [None, None]
    optimizer = torch.optim.AdamW([*vit.parameters(), *head.parameters()], lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False)
    started = time.time()
    for step in tqdm(range(1, steps + 1), unit="step", desc="stage 0", mininterval=1):
        scenes = [world.scene(i) for i in range((step - 1) * images, step * images)]
        pixels = np.stack([vision.resize(tiny.render(scene), config.crop, config.crop) for scene in scenes])
        truth = torch.from_numpy(np.concatenate([labels(scene, config.grid) for scene in scenes])).to(device)
        said = head(vit(torch.from_numpy(vision.patchify(pixels, config)).to(device))).flatten(0, 1).split(sizes, dim=1)
        nll = [F.cross_entropy(scales[k] * s, truth[:, k], weights[k], ignore_index=-1) for k, s in enumerate(said)]
        sum(share * n for share, n in zip(shares, nll, strict=True)).backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield {"step": step, "nll": dict(zip(("colour", "shape", "column", "row"), (round(v.item(), 4) for v in nll), strict=True)),
               "seconds": time.time() - started}
