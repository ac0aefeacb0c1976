"""train.py, but if there is only one GPU, all ranks use it. NCCL needs a GPU for each rank, so then
gloo sends all tensors. It copies them to the CPU and back."""

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import train


def whole(self):
    """DTensor.full_tensor, which crashes if gloo has tensors of a GPU (PyTorch issue 152645)."""
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, self.to_local().cpu())
    return torch.cat(shards)


if torch.cuda.device_count() < 2:
    DTensor.full_tensor = whole
    os.environ["LOCAL_RANK"] = "0"  # the number of the GPU
    dist.init_process_group("gloo")
    dist.init_process_group = lambda *_, **options: None
train.main()
