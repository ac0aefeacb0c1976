"""The exercises of the walk (README.md in this folder): write the bodies, then run

    python -m tools.walk --check FILE                 # this file or a copy of it
"""

# ruff: noqa: F401    these are for what you write
import torch
import torch.distributed as dist

import parallel
import train


def allow(visible_until, bidir):
    """Two (B,T) integer tensors -> (B,T,T) bool: may query q (dim 1) attend to key k (dim 2)?"""
    raise NotImplementedError


def best_subset(items, tokens, crops, bin_size, per_token, per_crop):
    """-> the list of those items that fill `tokens` and `crops` best."""
    raise NotImplementedError


def token_weight(branch, n_loss, n_branches, config):
    """Loss weight of each token of a data.Branch with n_loss loss tokens, one of n_branches."""
    raise NotImplementedError


def ulysses(attend, group):
    """attend for (B,T,H,D) -> the same for (B,T/cp,H,D); cp = dist.get_world_size(group)."""
    raise NotImplementedError


def forward_backward(run, model, rows):
    """Adds the gradients of a micro-batch to those there are -> its Batch, nll (B,T)."""
    raise NotImplementedError


def merge(one, other):
    """(out (B,T,H,D), lse (B,T,H)) of attention to two parts of the keys -> those of all keys."""
    raise NotImplementedError
