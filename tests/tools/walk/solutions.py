"""Solutions of the exercises in docs/walk, written without reading the code of the project."""

import numpy as np
import torch
import torch.distributed as dist

import parallel


def allow(visible_until, bidir):
    place = torch.arange(bidir.shape[1])
    causal = (place <= place[:, None]) & (place[:, None] < visible_until[:, None, :])
    both_ways = (bidir[:, :, None] == bidir[:, None, :]) & (bidir[:, None, :] != 0)
    return causal | both_ways


def best_subset(items, tokens, crops, bin_size, per_token, per_crop):
    reached = {(0, 0): []}
    for item in items:
        for (t, c), chosen in list(reached.items()):
            total = t + item.tokens, c + item.crops
            if total[0] <= tokens and total[1] <= crops and total not in reached:
                reached[total] = [*chosen, item]
    best = max(reached, key=lambda total: total[0] * per_token + total[1] * per_crop)
    return reached[best]


def token_weight(branch, n_loss, n_branches, config):
    weight = branch.weight
    if branch.kind in ("point", "count", "track"):
        return weight * config.point_weight
    if branch.kind == "caption" and branch.of_video:
        return weight * config.video_caption_weight
    if config.sqrt_length:
        weight = weight * 2 / max(n_loss, 1) ** 0.5
    if config.sqrt_branches:
        weight = weight / n_branches**0.5
    return weight


def windows(grid, k):
    h, w = grid.shape
    rows, cols = (h + k - 1) // k, (w + k - 1) // k
    whole = np.full((rows * k, cols * k), -1)
    top, left = (rows * k - h) // 2, (cols * k - w) // 2
    whole[top : top + h, left : left + w] = grid
    found = [whole[r * k : (r + 1) * k, c * k : (c + 1) * k].flatten()
             for r in range(rows) for c in range(cols)]
    return np.array(found)


def pool(self, features, pool_src):
    valid = (pool_src >= 0)[..., None]  # (M,K,1)
    # for a missing patch, another patch of its window is read, and where() replaces it by zeros
    source = torch.where(valid[..., 0], pool_src, pool_src.max(1, keepdim=True).values.clamp(min=0))
    window = torch.where(valid, features.flatten(0, 1)[source], 0)  # (M,K,2E)
    query = self.q(window.sum(1) / valid.sum(1).clamp(min=1))  # (M,E)

    def heads(x):
        return x.unflatten(-1, (self.n_head, -1))

    score = torch.einsum("mhd,mkhd->mkh", heads(query), heads(self.k(window)))
    score = score / (query.shape[-1] // self.n_head) ** 0.5
    # an empty window has no valid score, and a large negative number keeps softmax finite
    share = score.masked_fill(~valid, -1e9).softmax(1)
    pooled = torch.einsum("mkh,mkhd->mhd", share, heads(self.v(window)))
    return self.out(pooled.flatten(1))


def ulysses(attend, group):
    cp = dist.get_world_size(group)

    def to_heads(x):                     # (B,t,H,D) -> (B,T,H/cp,D)
        parts = torch.stack(x.chunk(cp, dim=2))
        return torch.cat(list(parallel.AllToAll.apply(parts, group)), dim=1)

    def exchanged(q, k, v, mask):
        if k.shape[2] < cp:
            k, v = (x.repeat_interleave(cp // x.shape[2], dim=2) for x in (k, v))
        out = attend(to_heads(q), to_heads(k), to_heads(v), mask)
        parts = torch.stack(out.chunk(cp, dim=1))
        return torch.cat(list(parallel.AllToAll.apply(parts, group)), dim=2)

    return exchanged


def forward_backward(run, model, batch):
    nll, lse = model(batch)
    loss = batch.weights * (nll + run.config.z_loss * lse**2)
    loss.sum().backward()
    return nll
