"""Start weights for a ViT that starts from nothing: every head looks at one neighbour of its patch."""

import numpy as np
import torch
import torch.nn.functional as F

# (rows down, columns right) that the heads of a block look at: nearest, diagonal, next but one
OFFSETS = (((0, 1), (0, -1), (1, 0), (-1, 0)),
           ((1, 1), (1, -1), (-1, 1), (-1, -1)),
           ((0, 2), (0, -2), (2, 0), (-2, 0)))


@torch.no_grad()
def init_neighbor_heads(vit, sharpness=2.0):
    """Queries and keys of a vision.ViT such that each head attends to one neighbour; AssertionError
    if its heads do not allow it.

    The first D of the E dimensions hold sines and cosines of row and column, and no pixels. Keys
    read them as they are, queries read them rotated by the offset to the neighbour, so that the
    score, a sum of cos(frequency * distance), is highest there. All of it is free to change.
    """
    config = vit.config
    D = config.n_embd // config.n_head
    assert D % 4 == 0 and D < config.n_embd, (
        f"{config.n_head} heads of {D} dimensions cannot start at neighbours: it takes several heads "
        "of a multiple of 4 dimensions; --model.vision.neighbor_init=false starts them anywhere")
    # from a quarter turn per crop to a quarter turn per patch
    frequency = torch.pi / 2 * torch.logspace(-np.log2(config.grid), 0, D // 4, base=2.0)
    angle = (torch.arange(config.grid) + 0.5)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)                      # (grid, D/2)
    rows = wave[:, None].expand(-1, config.grid, -1)
    cols = wave[None].expand(config.grid, -1, -1)
    position = torch.cat([rows, cols], dim=-1).flatten(0, 1)                 # (P,D)
    vit.pos.copy_(F.pad(position, (0, config.n_embd - D)))
    vit.patch.weight[:D] = 0

    for i, block in enumerate(vit.blocks):
        block.q.weight.mul_(0.1)     # a little of everything else
        block.k.weight.mul_(0.1)
        for h in range(config.n_head):
            head = slice(h * D, (h + 1) * D)
            down, right = OFFSETS[i % 3][h % 4]
            turned = torch.block_diag(rotation(frequency, down), rotation(frequency, right))
            block.q.weight[head, :D] = sharpness * turned
            block.k.weight[head, :D] = sharpness * torch.eye(D)


def rotation(frequency, n):
    """The matrix that takes sin a, cos a to sin(a + f n), cos(a + f n), for n patches."""
    sin, cos = (frequency * n).sin().diag(), (frequency * n).cos().diag()
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)])
