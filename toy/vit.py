"""Stage 0: the toy's ViT learns from labels. Released models start from SigLIP 2 instead.

A ViT from scratch behind a decoder from scratch learns colours within minutes and shapes
hardly at all, because one token in twenty of all answers names a shape. So the patches are
asked first, without words: which colour, which shape, where is the centre of the object?
At the start every head of the ViT attends to a neighbour. docs/log.md has the gains.
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

N_PLACES = shapes.SIZE // shapes.LATTICE + 1  # columns, and rows, of centres
TASKS = ("colour", "shape", "column", "row")  # column and row of the object's centre
LOSS_SHARES = (1, 4, 0.5, 0.5)
# Small factors on the logits make the features of a task large. Without them, places take
# up most of the variance, and the decoder does not find the shapes (docs/log.md).
LOGIT_FACTORS = (0.4, 0.4, 8, 8)
GROUND_WEIGHT = 0.1  # most patches are ground, and easy

# (rows down, columns right) to the neighbours of the four heads, in blocks 0, 1, 2 and again
OFFSETS = (((0, 1), (0, -1), (1, 0), (-1, 0)),
           ((1, 1), (1, -1), (-1, 1), (-1, -1)),
           ((0, 2), (0, -2), (2, 0), (-2, 0)))


def labels(scene, grid, kinds):
    """(grid*grid, 4) int64: the classes of TASKS for each patch of a toy scene.

    They are those of the object that covers most of the patch. Where none covers a quarter,
    it is ground: one past the last colour and the last shape, and no place (-1).
    """
    classes = np.tile((len(kinds.colours), len(kinds.shapes), -1, -1), (grid * grid, 1))
    if scene["objects"]:
        masks = torch.from_numpy(np.stack([shapes.mask_of(o) for o in scene["objects"]]))
        coverage = F.adaptive_avg_pool2d(masks.float(), grid).flatten(1)  # (n, grid*grid)
        best, which = (values.numpy() for values in coverage.max(0))
        of_objects = [
            [kinds.colours.index(o["colour"]), kinds.shapes.index(o["shape"]),
             o["x"] // shapes.LATTICE, o["y"] // shapes.LATTICE]
            for o in scene["objects"]
        ]
        is_object = best >= 0.25
        classes[is_object] = np.array(of_objects)[which[is_object]]
    return classes


def pretrain(vit, seed, steps, lr=1e-3, images=8, kinds_name="few"):
    """Trains the ViT on `steps` batches of scenes that no later stage shows, and yields
    {"step", "nll": {task: nats}, "seconds"} after each."""
    world = World("train", seed, questions="patches", kinds_name=kinds_name)
    crop = vit.config.crop
    n_features = len(vit.config.feature_layers) * vit.config.n_embd
    # one more class each for the ground
    n_classes = [len(world.kinds.colours) + 1, len(world.kinds.shapes) + 1, N_PLACES, N_PLACES]
    head = nn.Linear(n_features, sum(n_classes), device=vit.pos.device)
    optimizer = torch.optim.AdamW([*vit.parameters(), *head.parameters()], lr, betas=(0.9, 0.95),
                                  eps=1e-6, weight_decay=0.0, fused=vit.pos.device.type != "mps")
    for step in range(1, steps + 1):
        started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, lr, steps)
        scenes = [world.scene(i) for i in range((step - 1) * images, step * images)]
        pixels = np.stack([vision.resize(shapes.render(s), crop, crop) for s in scenes])
        patches = torch.from_numpy(vision.patchify(pixels, vit.config)).to(vit.pos.device)
        logits = head(vit(patches)).flatten(0, 1)  # (N*P, C), each image as one crop
        classes = np.concatenate([labels(s, vit.config.grid, world.kinds) for s in scenes])
        nll = nll_of_tasks(logits.split(n_classes, dim=1), classes)
        sum(share * loss for share, loss in zip(LOSS_SHARES, nll, strict=True)).backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rounded = [round(loss.item(), 4) for loss in nll]
        yield {"step": step, "nll": dict(zip(TASKS, rounded, strict=True)),
               "seconds": time.monotonic() - started}


def learning_rate(step, base, steps):
    """A linear rise over a tenth of the steps, times a cosine that falls to 0."""
    return base * min(1, 10 * step / steps) * (1 + math.cos(math.pi * step / (steps + 1))) / 2


def nll_of_tasks(logits, classes):
    """[(N,C) of each task], (N,4) -> [mean nll of each task], scalars in nats.

    Colour and shape: over all patches, ground weighted by GROUND_WEIGHT. Column and row:
    over the patches of objects, since ground has no place.
    """
    targets = torch.from_numpy(classes).to(logits[0].device)
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
    """Sets positions, queries and keys of a ViT. AssertionError if its heads do not fit.

    The first dimensions of the input, as many as a head has, hold sines and cosines of row
    and column, and no pixels. Keys read them as they are; queries read them rotated by the
    offset to the neighbour. So the score, a sum of cos(frequency * distance), is highest
    there. All of these weights learn.
    """
    config = vit.config
    d = config.n_embd // config.n_head
    assert config.n_head > 1 and d % 4 == 0, (
        f"{config.n_head} heads of {d} dimensions; it takes several of a multiple of 4, or "
        "--model.vision.neighbor_init=false")
    # a quarter turn per crop to one per patch
    frequency = torch.pi / 2 * torch.logspace(-np.log2(config.grid), 0, d // 4, base=2.0)
    angle = (torch.arange(config.grid) + 0.5)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)  # (grid, d/2)
    rows = wave[:, None].expand(-1, config.grid, -1)
    cols = wave[None].expand(config.grid, -1, -1)
    position = torch.cat([rows, cols], dim=-1).flatten(0, 1)  # (P,d)
    vit.pos.copy_(F.pad(position, (0, config.n_embd - d)))
    vit.patch.weight[:d] = 0

    for i, block in enumerate(vit.blocks):
        block.q.weight.mul_(0.1)  # a little of everything else
        block.k.weight.mul_(0.1)
        for h in range(config.n_head):
            head = slice(h * d, (h + 1) * d)
            down, right = OFFSETS[i % 3][h % 4]
            turned = torch.block_diag(rotation(frequency, down), rotation(frequency, right))
            block.q.weight[head, :d] = sharpness * turned
            block.k.weight[head, :d] = sharpness * torch.eye(d)


def rotation(frequency, n):
    """The matrix that takes sin a, cos a to sin(a + f n), cos(a + f n), for n patches."""
    sin = (frequency * n).sin().diag()
    cos = (frequency * n).cos().diag()
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)])
