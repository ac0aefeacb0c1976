"""Stage 0: it replaces the pre-training that the released ViT has had as SigLIP2.

Molmo2 starts from a pre-trained ViT. A ViT from scratch behind a decoder from scratch learns
colours within minutes and shapes hardly at all, because one token in twenty of all answers names a
shape (docs/log.md). So the patches are asked first, without words: which colour, which shape, and
where is the centre of the object?
"""

import math
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import vision
from toy import shapes
from toy.images import World

N_PLACES = shapes.SIZE // shapes.LATTICE + 1             # columns, and rows, of centres


class Tasks(NamedTuple):
    """What is asked about every patch. The last two are the column and the row of the centre of its
    object; ground has none."""
    names: tuple
    n_classes: list
    loss_shares: tuple
    # Small factors on the logits make the features of a task large. Without them, places take up
    # most of the variance of the features, and the decoder does not find the shapes in them
    # (docs/log.md).
    logit_factors: tuple


GROUND_WEIGHT = 0.1                  # most patches are ground, and easy


def tasks_of(kinds):
    """What stage 0 asks in a world of these kinds, with one more class each for the ground."""
    return Tasks(
        names=("colour", "shape", "column", "row"),
        n_classes=[len(kinds.colours) + 1, len(kinds.shapes) + 1, N_PLACES, N_PLACES],
        loss_shares=(1, 4, 0.5, 0.5),
        logit_factors=(0.4, 0.4, 8, 8),
    )


def labels(scene, grid, kinds):
    """(grid*grid, 4) int64: the classes of tasks_of(kinds) for each patch of a toy scene. The
    ground is one past the last colour and the last shape, and has no place (-1)."""
    masks = []
    classes = []
    for o in scene["objects"]:
        masks.append(shapes.mask_of(o))
        column = o["x"] // shapes.LATTICE
        row = o["y"] // shapes.LATTICE
        colour = kinds.colours.index(o["colour"])
        classes.append((colour, kinds.shapes.index(o["shape"]), column, row))
    ground = (len(kinds.colours), len(kinds.shapes), -1, -1)
    return classes_of_patches(masks, classes, ground, grid)


def classes_of_patches(masks, of_objects, of_ground, grid):
    """(grid*grid, tasks) int64: the classes of the object that covers most of a patch.

    masks: (H,W) bool of each object; where none covers a quarter of the patch, it is ground.
    """
    classes = np.tile(of_ground, (grid * grid, 1))
    if masks:
        masks = torch.from_numpy(np.stack(masks))
        coverage = F.adaptive_avg_pool2d(masks.float(), grid).flatten(1)         # (n, grid*grid)
        best, which = (values.numpy() for values in coverage.max(0))
        is_object = best >= 0.25
        classes[is_object] = np.array(of_objects)[which[is_object]]
    return classes


def pretrain(vit, seed, steps, lr=1e-3, images=8, kinds_name="few"):
    """Trains the ViT for `steps` batches of images: training scenes that no later stage shows.

    Yields {"step", "nll": {task: nats}, "seconds"} after each. The head that answers is thrown away
    at the end.
    """
    world = World("train", seed, questions="patches", kinds_name=kinds_name)
    pretraining = Pretraining(vit, tasks_of(world.kinds), steps, lr)
    for step in range(1, steps + 1):
        started = time.monotonic()
        scenes = [world.scene(i) for i in range((step - 1) * images, step * images)]
        pixels = [shapes.render(scene) for scene in scenes]
        classes = [labels(scene, vit.config.grid, world.kinds) for scene in scenes]
        nll = pretraining.step(step, pixels, classes)
        yield {"step": step, "nll": nll, "seconds": time.monotonic() - started}


class Pretraining:
    """A ViT, the head that answers from its features, and their optimizer."""

    def __init__(self, vit, tasks, steps, lr=1e-3):
        self.vit = vit
        self.tasks = tasks
        self.steps = steps
        self.lr = lr
        n_features = len(vit.config.feature_layers) * vit.config.n_embd
        self.head = nn.Linear(n_features, sum(tasks.n_classes), device=vit.pos.device)
        self.optimizer = torch.optim.AdamW([*vit.parameters(), *self.head.parameters()], lr,
                                           betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)

    def step(self, step, pixels, classes):
        """One step on images [(H,W,3), ..] and the classes of their patches [(P,tasks), ..]
        -> {task: nats}"""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.lr, self.steps)
        nll = losses(self.vit, self.head, self.tasks, pixels, classes)
        total = sum(share * loss for share, loss in zip(self.tasks.loss_shares, nll, strict=True))
        total.backward()
        nn.utils.clip_grad_norm_(self.vit.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        rounded = [round(loss.item(), 4) for loss in nll]
        return dict(zip(self.tasks.names, rounded, strict=True))


def learning_rate(step, base, steps):
    """A linear rise over a tenth of the steps, times a cosine that falls to 0."""
    return base * min(1, 10 * step / steps) * (1 + math.cos(math.pi * step / (steps + 1))) / 2


def losses(vit, head, tasks, pixels, classes):
    """Mean nll of each task, scalars in nats."""
    logits = head(vit(patches_of(pixels, vit))).flatten(0, 1)                    # (N*P, C)
    return nll_of_tasks(logits.split(tasks.n_classes, dim=1), np.concatenate(classes), tasks)


def patches_of(pixels, vit):
    """Images [(H,W,3), ..] -> (N,P,F) uint8 on the ViT's device, each image as one crop."""
    crop = vit.config.crop
    pixels = np.stack([vision.resize(image, crop, crop) for image in pixels])
    return torch.from_numpy(vision.patchify(pixels, vit.config)).to(vit.pos.device)


def nll_of_tasks(logits, classes, tasks):
    """[(N,C) of each task], (N,tasks) -> [mean nll of each task], scalars in nats.

    The first tasks: over all patches, ground weighted by GROUND_WEIGHT. Column and row: over the
    patches of objects, since ground has no place.
    """
    targets = torch.from_numpy(classes).to(logits[0].device)
    is_object = targets[:, -1:] >= 0
    weights = torch.where(is_object, 1.0, GROUND_WEIGHT).repeat(1, len(tasks.names))
    weights[:, -2:] *= is_object
    nll = []
    for k, factor in enumerate(tasks.logit_factors):
        target = targets[:, k].clamp(min=0)
        loss = F.cross_entropy(factor * logits[k], target, reduction="none")
        nll.append((weights[:, k] * loss).sum() / weights[:, k].sum().clamp(min=1))
    return nll
