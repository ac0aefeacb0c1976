"""Trains the toy's ViT with labels, before stage 1. Released models start from SigLIP 2 instead.

If ViT and decoder are trained together from random weights, the ViT learns colours within minutes.
It hardly learns shapes, because only one answer token in twenty is the name of a shape. Therefore
`pretrain` trains the ViT alone. For each patch, the ViT predicts the colour, the shape and the
centre of the object. At the start, every head of the ViT attends to a neighbouring patch.
docs/log.md reports how much this helps. tools/vit.py is the command.
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import vision
from toy import shapes
from toy.images import World
from toy.shapes import KINDS

N_PLACES = shapes.SIZE // shapes.LATTICE + 1  # columns of possible centres; as many rows
TASKS = ("colour", "shape", "column", "row")  # column and row of the object's centre
LOSS_SHARES = (1, 4, 0.5, 0.5)
# Factors of the logits. With a small factor, the ViT must make the features of this task large.
# Otherwise coordinates cause most of the variance, and the decoder cannot use the shapes
# (docs/log.md).
LOGIT_FACTORS = (0.4, 0.4, 8, 8)
GROUND_WEIGHT = 0.1  # loss weight of the background: most patches show it, and it is easy

# (rows down, columns right) to the neighbour of each of four heads; block i uses OFFSETS[i % 3]
OFFSETS = (((0, 1), (0, -1), (1, 0), (-1, 0)),
           ((1, 1), (1, -1), (-1, 1), (-1, -1)),
           ((0, 2), (0, -2), (2, 0), (-2, 0)))


def labels(scene, grid):
    """The classes of TASKS for each patch of a toy scene, (grid*grid, 4) int64.

    The label is the object that covers most of the patch. If no object covers a quarter of the
    patch, the label is background: one class after the last colour and the last shape, and -1 for
    column and row.
    """
    classes = np.tile((len(KINDS.colours), len(KINDS.shapes), -1, -1), (grid * grid, 1))
    if scene["objects"]:
        masks = torch.from_numpy(np.stack([shapes.mask_of(o) for o in scene["objects"]]))
        coverage = F.adaptive_avg_pool2d(masks.float(), grid).flatten(1)  # (n, grid*grid)
        best, which = (values.numpy() for values in coverage.max(0))
        of_objects = [
            [KINDS.colours.index(o["colour"]), KINDS.shapes.index(o["shape"]),
             o["x"] // shapes.LATTICE, o["y"] // shapes.LATTICE]
            for o in scene["objects"]
        ]
        is_object = best >= 0.25
        classes[is_object] = np.array(of_objects)[which[is_object]]
    return classes


def labelled_images(world, numbers, config):
    """-> patches of the images with these numbers (N,P,F) uint8, classes of all patches (N*P,4)."""
    scenes = [world.scene(i) for i in numbers]
    pixels = np.stack([vision.resize(shapes.render(s), config.crop, config.crop) for s in scenes])
    classes = np.concatenate([labels(s, config.grid) for s in scenes])
    return vision.patchify(pixels, config), classes


def pretrain(vit, seed, steps, lr=1e-3, images=8):
    """Trains the ViT for `steps` steps, each with other images. No later stage uses these images.
    Yields {"step", "nll": {task: nats}, "seconds"} after each step."""
    world = World("train", seed, questions="patches")
    n_features = len(vit.config.feature_layers) * vit.config.n_embd
    # colour and shape have one more class, the background
    n_classes = [len(KINDS.colours) + 1, len(KINDS.shapes) + 1, N_PLACES, N_PLACES]
    head = nn.Linear(n_features, sum(n_classes), device=vit.pos.device)
    optimizer = torch.optim.AdamW([*vit.parameters(), *head.parameters()], lr, betas=(0.9, 0.95),
                                  eps=1e-6, weight_decay=0.0, fused=vit.pos.device.type != "mps")
    for step in range(1, steps + 1):
        started = time.monotonic()
        patches, classes = labelled_images(
            world, range((step - 1) * images, step * images), vit.config)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, lr, steps)
        patches = torch.as_tensor(patches).to(vit.pos.device)
        logits = head(vit(patches)).flatten(0, 1)  # (N*P, C); each image is one crop
        nll = nll_of_tasks(logits.split(n_classes, dim=1), classes)
        sum(share * loss for share, loss in zip(LOSS_SHARES, nll, strict=True)).backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rounded = [round(loss.item(), 4) for loss in nll]
        yield {"step": step, "nll": dict(zip(TASKS, rounded, strict=True)),
               "seconds": time.monotonic() - started}


def learning_rate(step, base, steps):
    """Linear warm-up over a tenth of the steps, times a cosine that decays to 0."""
    return base * min(1, 10 * step / steps) * (1 + math.cos(math.pi * step / (steps + 1))) / 2


def nll_of_tasks(logits, classes):
    """Logits [(N,C) of each task], classes (N,4) array -> [mean nll of each task], scalars in nats.

    For colour and shape, the mean is over all patches, and background has the weight
    GROUND_WEIGHT. For column and row, it is over the patches of objects.
    """
    targets = torch.as_tensor(classes).to(logits[0].device)
    is_object = targets[:, -1:] >= 0
    weights = torch.where(is_object, 1.0, GROUND_WEIGHT).repeat(1, len(TASKS))
    weights[:, -2:] *= is_object
    nll = []
    for k, factor in enumerate(LOGIT_FACTORS):
        target = targets[:, k].clamp(min=0)
        loss = F.cross_entropy(factor * logits[k], target, reduction="none")
        nll.append((weights[:, k] * loss).sum() / weights[:, k].sum().clamp(min=1))
    return nll


@torch.no_grad()
def init_neighbor_heads(vit, sharpness=2.0):
    """Sets the initial position embeddings, queries and keys of a ViT. AssertionError if the number
    or the size of its heads does not fit.

    Let a head have d dimensions. The first d dimensions of the ViT's input contain sines and
    cosines of row and column, and no pixels. Keys copy these values. Queries rotate them by the
    offset to the neighbour. The attention score is a sum of cos(frequency * distance), so it is
    highest at the neighbour. All of these weights are trained later.
    """
    config = vit.config
    d = config.n_embd // config.n_head
    assert config.n_head > 1 and d % 4 == 0, (
        f"the ViT has {config.n_head} heads of {d} dimensions. Use two or more heads of a multiple "
        "of 4 dimensions")
    # from a quarter turn over the whole crop to a quarter turn per patch
    frequency = torch.pi / 2 * torch.logspace(-np.log2(config.grid), 0, d // 4, base=2.0)
    angle = (torch.arange(config.grid) + 0.5)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)  # (grid, d/2)
    rows = wave[:, None].expand(-1, config.grid, -1)
    cols = wave[None].expand(config.grid, -1, -1)
    position = torch.cat([rows, cols], dim=-1).flatten(0, 1)  # (P,d)
    vit.pos.copy_(F.pad(position, (0, config.n_embd - d)))
    vit.patch.weight[:d] = 0

    for i, block in enumerate(vit.blocks):
        block.q.weight.mul_(0.1)  # the other dimensions keep a small influence
        block.k.weight.mul_(0.1)
        for h in range(config.n_head):
            head = slice(h * d, (h + 1) * d)
            down, right = OFFSETS[i % 3][h % 4]
            turned = torch.block_diag(rotation(frequency, down), rotation(frequency, right))
            block.q.weight[head, :d] = sharpness * turned
            block.k.weight[head, :d] = sharpness * torch.eye(d)


def rotation(frequency, n):
    """The matrix from (sin a, cos a) to (sin(a + f n), cos(a + f n)), an offset of n patches."""
    sin = (frequency * n).sin().diag()
    cos = (frequency * n).cos().diag()
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)])
