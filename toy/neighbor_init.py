"""Start weights for a ViT that is trained from scratch: every head attends to a neighbour.

What it gains is in docs/log.md. Released ViTs start from SigLIP2 and do not use it.
"""

import numpy as np
import torch
import torch.nn.functional as F

# (rows down, columns right) to the neighbours of the four heads, in blocks 0, 1, 2 and again
OFFSETS = (((0, 1), (0, -1), (1, 0), (-1, 0)),
           ((1, 1), (1, -1), (-1, 1), (-1, -1)),
           ((0, 2), (0, -2), (2, 0), (-2, 0)))


@torch.no_grad()
def init_neighbor_heads(vit, sharpness=2.0):
    """Sets the positions, queries and keys of a vision.ViT; AssertionError if its heads do not fit.

    With d the width of a head, the first d dimensions of the input hold sines and cosines of row
    and column, and no pixels. Keys read them as they are; queries read them rotated by the offset
    to the neighbour, so that the score, a sum of cos(frequency * distance), is highest there. All
    of these weights learn.
    """
    config = vit.config
    d = config.n_embd // config.n_head
    fits = config.n_head > 1 and d % 4 == 0
    assert fits, (f"{config.n_head} heads of {d} dimensions cannot start at neighbours: it takes "
                  "several heads of a multiple of 4 dimensions; --model.vision.neighbor_init=false "
                  "starts them anywhere")
    # from a quarter turn per crop to a quarter turn per patch
    frequency = torch.pi / 2 * torch.logspace(-np.log2(config.grid), 0, d // 4, base=2.0)
    angle = (torch.arange(config.grid) + 0.5)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)                      # (grid, d/2)
    rows = wave[:, None].expand(-1, config.grid, -1)
    cols = wave[None].expand(config.grid, -1, -1)
    position = torch.cat([rows, cols], dim=-1).flatten(0, 1)                 # (P,d)
    vit.pos.copy_(F.pad(position, (0, config.n_embd - d)))
    vit.patch.weight[:d] = 0

    for i, block in enumerate(vit.blocks):
        block.q.weight.mul_(0.1)     # a little of everything else
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
