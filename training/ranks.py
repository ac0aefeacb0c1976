"""The processes (ranks) that train a model together. Objects, and the numbers that control a run,
are sent over gloo, so that the CPU need not wait for a GPU. A process alone sends nothing."""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import parallel
from records.errors import warn


@dataclass
class Ranks:
    """The position of this process among the processes that train the model.

    Ranks need very different times to read files, to decode or to generate answers. Objects
    have their own process groups with a timeout of a day. For the tensors of a step, it is shorter.
    """
    rank: int = 0
    world: int = 1
    mesh: object = None
    dp: int = 1
    dp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    of_all: object = None  # process group in which all ranks exchange objects
    of_row: object = None  # process group in which the ranks that share a row exchange objects

    @property
    def first(self):
        return self.rank == 0

    def barrier(self):
        """Waits until all ranks have called it."""
        if self.of_all:
            dist.barrier(self.of_all)

    def all_gather(self, value):
        """-> on every rank, the list of the values of all ranks, in the order of the ranks."""
        return gather_objects(value, self.of_all)

    def any_in_row(self, flag):
        """-> is the flag set on one of the ranks that share a row?"""
        n_set = torch.tensor(int(flag))
        if self.of_row:
            dist.all_reduce(n_set, group=self.of_row)
        return bool(n_set)

    def gather_in_row(self, value):
        """-> the values of the ranks that share a row."""
        return gather_objects(value, self.of_row)

    def leave(self):
        """Ends this process with status 0 if it is one of several. A process alone continues. Only
        stdout is flushed, so all other files must be closed before."""
        if self.mesh:
            sys.stdout.flush()
            dist.destroy_process_group()
            # The threads of gloo may still release tensors. If one of them did so while Python
            # ends, the process would abort. os._exit skips the end of Python.
            os._exit(0)

    def broadcast(self, value):
        """-> on every rank, the value of the first rank."""
        values = [value]
        if self.of_all:
            dist.broadcast_object_list(values, src=0, group=self.of_all)
        return values[0]


def gather_objects(value, group):
    values = [value]
    if group:
        values *= dist.get_world_size(group)
        dist.all_gather_object(values, value, group)
    return values


def device_of_rank(name):
    """-> torch.device. Under torchrun, a CUDA device becomes the GPU with the number of the local
    rank, even if `name` has another number. A GPU with a number becomes torch's current device,
    because collectives and kernels may use the current device by default."""
    # This must be set before a GPU is used. Expandable segments prevent fragmentation, because
    # tensor sizes differ from step to step.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device(name)
    if device.type == "mps":
        warn("--device mps: this code has never been run on MPS; compare the first losses or "
             "answers with those of --device cpu")
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def join_ranks(cp, device, cp_heads=0):
    """Under torchrun, makes the process groups and the mesh -> Ranks. If a rank does not respond, a
    timeout ends the run: after ten minutes in a group of all ranks, and after thirty (the default
    of torch) in a smaller group of the mesh (--cp, --shard). The flight recorder of torch
    (stages/cluster.sh) shows which collective did not complete."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return Ranks()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    mesh = parallel.make_mesh(cp, device.type, cp_heads)
    a_day = {"backend": "gloo", "timeout": timedelta(days=1)}
    of_all = dist.new_group(**a_day)
    of_row = dist.new_subgroups(cp, **a_day)[0] if cp > 1 else None  # neighbours, as in the mesh
    return Ranks(dist.get_rank(), world, mesh, world // cp, mesh.dp.get_local_rank(),
                 cp, mesh.cp.get_local_rank(), of_all, of_row)


def all_reduce_sums(numbers):
    """{name: number} of this rank -> {name: sum over all ranks}. The types stay the same."""
    values = torch.tensor([float(v) for v in numbers.values()], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values)
    sums = zip(numbers, values, strict=True)
    return {name: type(numbers[name])(value) for name, value in sums}
