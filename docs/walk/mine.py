"""The exercises of the walk (README.md in this folder): write the bodies, then run

    python -m tools.walk --check FILE                 # this file or a copy of it
"""

# ruff: noqa: F401    these are for what you write
import torch
import torch.distributed as dist

import parallel
import train


def allow(visible_until, bidir):
    """(B,T) integers -> (B,T,T) bool: may query q attend to key k?"""
    raise NotImplementedError


def best_subset(items, tokens, crops, bin_size, per_token, per_crop):
    """-> the list of those items that fill `tokens` and `crops` best."""
    raise NotImplementedError


def token_weight(branch, n_loss, n_branches, config):
    """-> the loss weight of each of the n_loss tokens of a data.Branch."""
    raise NotImplementedError


def windows(grid, k):
    """Patch ids (h,w) -> (M,k*k): windows of k x k, -1 for missing ones."""
    raise NotImplementedError


def pool(self, features, pool_src):
    """vision.Pool.forward: features (N,P,2E), patch ids (M,K) -> (M,E)."""
    raise NotImplementedError


def ulysses(attend, group):
    """attend for (B,T,H,D) -> the same for (B,T/cp,H,D); cp: group size."""
    raise NotImplementedError


def forward_backward(run, model, batch):
    """Adds the gradients of a micro-batch -> nll (B,T)."""
    raise NotImplementedError
