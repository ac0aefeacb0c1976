"""FLOPs that a training step has to do, by a convention that both sides of a comparison share.

A matrix costs 2 FLOPs for each weight and each vector that it multiplies. Attention costs 4 for
each allowed pair of tokens and each number of a query, all heads together (products with keys and
with values). The backward pass costs as much again for the gradient that is passed on, and for
matrices once more for the gradient of the weights, where they learn. What need not be done is not
counted: padding, pairs that the mask hides, logits without a label, blocks that run again.
"""

from typing import NamedTuple

from torch import nn

import attention

ALL_PARTS = ("vit", "connector", "llm")


class Work(NamedTuple):
    """What a step processes."""

    patches: int = 0  # of all crops
    pooled: int = 0  # patches in the windows of all visual tokens
    visual: int = 0  # visual tokens
    tokens: int = 0
    labelled: int = 0  # tokens with loss
    pairs: int = 0  # of tokens that attend


def matrix_size(*modules):
    """Weights of all nn.Linear in the modules."""
    total = 0
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                total += layer.weight.numel()
    return total


def flops(model, work, train=ALL_PARTS, freeze_embedding=False):
    """FLOPs of forward and backward of a Work. train: the parts that learn. A part that does not
    learn still passes gradients on, if a part below it learns; a tied head does not learn where
    the embedding is frozen."""
    config = model.config
    vision = model.vision
    passes_gradient = {
        "vit": "vit" in train,
        "connector": "vit" in train or "connector" in train,
        "llm": len(train) > 0,
    }

    def matrices(part, learns):  # FLOPs for each weight and vector
        return 2 * (1 + passes_gradient[part] + learns)

    def pairs(part):  # FLOPs for each pair and number of a query
        return 4 * (1 + 2 * (passes_gradient[part] or part in train))

    vit = matrices("vit", "vit" in train) * matrix_size(vision.vit) * work.patches
    vit_pairs = config.vision.n_layer * work.patches * config.vision.n_patch
    vit += pairs("vit") * vit_pairs * config.vision.n_embd

    pool = vision.pool
    connector = matrix_size(pool.k, pool.v) * work.pooled
    connector += matrix_size(pool.q, pool.out, vision.projector) * work.visual
    connector *= matrices("connector", "connector" in train)
    connector += pairs("connector") * work.pooled * config.vision.n_embd

    llm = matrices("llm", "llm" in train) * matrix_size(*model.blocks) * work.tokens
    head_learns = "llm" in train and not (config.tied and freeze_embedding)
    llm += matrices("llm", head_learns) * config.n_vocab * config.n_embd * work.labelled
    llm += pairs("llm") * config.n_layer * work.pairs * config.n_head * config.head_dim
    return vit + connector + llm


def is_token(batch):
    """(B,T) bool: not padding."""
    return batch.example < len(batch.ids)


def allowed_pairs(batch):
    """Pairs of tokens that may attend, padding left out."""
    total = 0
    for row, length in enumerate(is_token(batch).sum(1).tolist()):
        fields = batch.visible_until[row, :length], batch.bidir[row, :length]
        total += attention.allowed_pairs(*fields)
    return total


def count_crops(batch, vision_config):
    """Crops of a batch that some visual token pools: all but blank ones."""
    pooled = batch.pool_src[batch.pool_src >= 0]
    return len((pooled // vision_config.n_patch).unique())


def batch_work(model, batch):
    """The Work of a packing.Batch."""
    vision_config = model.config.vision
    in_window = batch.pool_src >= 0
    return Work(
        patches=count_crops(batch, vision_config) * vision_config.n_patch,
        pooled=int(in_window.sum()),
        visual=int(in_window.any(1).sum()),
        tokens=int(is_token(batch).sum()),
        labelled=int((batch.weights > 0).sum()),
        pairs=allowed_pairs(batch),
    )
