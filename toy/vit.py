"""Stage 0, for the toy only: what the pre-training of SigLIP2 is to the released ViT.

Molmo2 starts from a pre-trained ViT. A ViT from scratch behind a decoder from scratch learns
colours within minutes and shapes hardly at all, because one token in twenty of all answers names a
shape (docs/log.md). So the patches are asked first, without words: which colour, which shape, and
where is the centre of the object?
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import vision
from toy import shapes
from toy.images import World

COLOURS = list(shapes.COLOURS)
SHAPES = list(shapes.SHAPES)
N_PLACES = shapes.SIZE // shapes.LATTICE + 1             # columns, and rows, of centres

TASKS = ("colour", "shape", "column", "row")
N_CLASSES = [len(COLOURS) + 1, len(SHAPES) + 1, N_PLACES, N_PLACES]
LOSS_SHARES = (1, 4, 0.5, 0.5)
# Small factors on the logits make the features of a task large. Without them, places take up most
# of the variance of the features, and the decoder does not find the shapes in them (docs/log.md).
LOGIT_FACTORS = (0.4, 0.4, 8, 8)
GROUND_WEIGHT = 0.1                  # most patches are ground, and easy


def labels(scene, grid):
    """(grid*grid, 4) int64: the classes of TASKS for the object that covers most of a patch.

    Where no object covers a quarter of the patch, it is ground: one past the last colour and the
    last shape, and no place (-1).
    """
    classes = np.tile([len(COLOURS), len(SHAPES), -1, -1], (grid * grid, 1))
    objects = scene["objects"]
    if objects:
        masks = torch.from_numpy(np.stack([shapes.mask_of(o) for o in objects]))
        coverage = F.adaptive_avg_pool2d(masks.float(), grid).flatten(1)         # (n, grid*grid)
        best, which = (values.numpy() for values in coverage.max(0))
        of_objects = []
        for o in objects:
            column = o["x"] // shapes.LATTICE
            row = o["y"] // shapes.LATTICE
            of_objects.append((COLOURS.index(o["colour"]), SHAPES.index(o["shape"]), column, row))
        is_object = best >= 0.25
        classes[is_object] = np.array(of_objects)[which[is_object]]
    return classes


def pretrain(vit, seed, steps, lr=1e-3, images=8):
    """Trains the ViT for `steps` batches of images: training scenes that no later stage shows.

    Yields {"step", "nll": {task: nats}, "seconds"} after each. The head that answers is thrown away
    at the end.
    """
    config = vit.config
    world = World("train", seed, questions="patches")
    n_features = len(config.feature_layers) * config.n_embd
    head = nn.Linear(n_features, sum(N_CLASSES), device=vit.pos.device)
    parameters = [*vit.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for step in tqdm(range(1, steps + 1), unit="step", desc="stage 0", mininterval=1):
        started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, lr, steps)
        scenes = [world.scene(i) for i in range((step - 1) * images, step * images)]
        nll = losses(vit, head, scenes)
        total = sum(share * loss for share, loss in zip(LOSS_SHARES, nll, strict=True))
        total.backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rounded = [round(loss.item(), 4) for loss in nll]
        yield {"step": step, "nll": dict(zip(TASKS, rounded, strict=True)),
               "seconds": time.monotonic() - started}


def learning_rate(step, base, steps):
    """A linear rise over a tenth of the steps, times a cosine that falls to 0."""
    return base * min(1, 10 * step / steps) * (1 + math.cos(math.pi * step / (steps + 1))) / 2


def losses(vit, head, scenes):
    """Mean nll of each task, four scalars in nats.

    Colour and shape: over all patches, ground with GROUND_WEIGHT. Column and row: over patches of
    objects, since ground has no place.
    """
    config = vit.config
    pixels = [vision.resize(shapes.render(scene), config.crop, config.crop) for scene in scenes]
    patches = torch.from_numpy(vision.patchify(np.stack(pixels), config)).to(vit.pos.device)
    classes = np.concatenate([labels(scene, config.grid) for scene in scenes])
    targets = torch.from_numpy(classes).to(vit.pos.device)                       # (N*P, 4)
    logits = head(vit(patches)).flatten(0, 1).split(N_CLASSES, dim=1)            # 4 x (N*P, C)

    is_object = targets[:, 2:3] >= 0
    weights = torch.where(is_object, 1.0, GROUND_WEIGHT).repeat(1, len(TASKS))
    weights[:, 2:] *= is_object
    nll = []
    for k, factor in enumerate(LOGIT_FACTORS):
        target = targets[:, k].clamp(min=0)
        loss = F.cross_entropy(factor * logits[k], target, reduction="none")
        nll.append((weights[:, k] * loss).sum() / weights[:, k].sum().clamp(min=1))
    return nll
