"""The processes that train a model together. The numbers and objects that steer a run
travel over gloo, so that no GPU is waited for; one process gets its own back."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import parallel


@dataclass
class Ranks:
    """This process among those that train the model; alone, it is the first of one.

    Ranks take very unequal times to read files, to decode or to answer. So objects have groups of
    their own, which wait for a day, while the tensors of a step wait for ten minutes.
    """
    rank: int = 0
    world: int = 1
    mesh: object = None
    dp: int = 1
    dp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    of_all: object = None  # the group in which all ranks exchange objects
    of_row: object = None  # and that of the ranks that share a row

    @property
    def first(self):
        return self.rank == 0

    def barrier(self):
        """Waits until all ranks are here."""
        if self.of_all:
            dist.barrier(self.of_all)

    def all_gather(self, value):
        """An object of each rank, in their order, for all of them."""
        return gather_objects(value, self.of_all)

    def gather_in_row(self, value):
        """The same of the ranks that share a row."""
        return gather_objects(value, self.of_row)

    def broadcast(self, value):
        """The object of the first rank, for all of them."""
        values = [value]
        if self.of_all:
            dist.broadcast_object_list(values, src=0, group=self.of_all)
        return values[0]


def gather_objects(value, group):
    if not group:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def device_of_rank(name):
    """-> torch.device. Under torchrun a CUDA device is the GPU of the local rank, whichever was
    named. A numbered GPU becomes torch's current one: exchanges and kernels may use that without
    being told."""
    device = torch.device(name)
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def join_ranks(cp, device, cp_heads=0):
    """Under torchrun: the process group and the mesh -> Ranks. A rank that does not answer for
    ten minutes ends the run; torch's flight recorder (stages/cluster.sh) names the exchange."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return Ranks()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    mesh = parallel.make_mesh(cp, device.type, cp_heads)
    a_day = {"backend": "gloo", "timeout": timedelta(days=1)}
    of_all = dist.new_group(**a_day)
    of_row = dist.new_subgroups(cp, **a_day)[0] if cp > 1 else None  # neighbours, as in the mesh
    return Ranks(dist.get_rank(), world, mesh, world // cp, mesh["dp"].get_local_rank(),
                 cp, mesh.cp.get_local_rank(), of_all, of_row)


def is_first_process():
    """Is this the first process of a launch, whether or not it has joined the others?"""
    return int(os.environ.get("RANK", 0)) == 0


def all_reduce_sums(numbers):
    """{name: number} of this rank -> {name: sum over all ranks}, each of the type it had."""
    if not dist.is_initialized():
        return dict(numbers)
    values = torch.tensor([float(v) for v in numbers.values()], dtype=torch.float64)
    dist.all_reduce(values)
    sums = zip(numbers, values.tolist(), strict=True)
    return {name: type(numbers[name])(value) for name, value in sums}
