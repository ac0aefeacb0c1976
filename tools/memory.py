"""Counts the memory that one GPU needs for a training step, without a GPU.

    python -m tools.memory --stage 3 --preset 8b --gpus 128 --cp 8

Runs the step of train.py, with the largest possible batch, on fake tensors. These have
shapes, dtypes and lifetimes, but no storage. An operation that needs the values of a
tensor is an error, because the CPU would have to wait for the GPU. Three things are not
counted: workspace inside kernels, the CUDA context (half a GiB), and fragmentation. Leave a
tenth of the memory free.
"""

import copy
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

# this import defines the output shapes of collectives on fake tensors
import torch.distributed._tools.fake_collectives
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.stateless import _reparametrize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import attention
import model as models
import parallel
import train
from records.errors import UserError, explained
from tools.command import make_parser, positive, print_line, print_table, report_errors
from training.config import parse
from training.ranks import Ranks
from training.setup import apply_recipe, default_shard, largest_example, layout_error
from weights import files, lora

GIB = 2**30
GPU_SIZES = {16: 15.6, 24: 23.6, 40: 39.4, 48: 47.5, 80: 79.6, 141: 140.4}  # {GB: GiB}
# bytes of one NCCL communicator on a rank; this is an estimate and was not measured yet
NCCL_BUFFERS = 2**29


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages, at present and at the peak of each pass. held: {part:
    tensors that exist from the start, in nested lists and dicts}."""

    def __init__(self, held):
        super().__init__()
        self.sizes = {}  # {address of a storage: bytes}
        self.parts = {}
        self.now = 0
        self.phase = "forward"
        self.peaks = {}
        self.plain_resize = torch.UntypedStorage.resize_
        self.held = held  # keeps them alive
        for part, tensors in held.items():
            tensors = [parallel.local(x) for x in tree_leaves(tensors) if torch.is_tensor(x)]
            self.parts[part] = sum(x.nbytes for x in tensors)
            self.add(tensors)

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                weakref.finalize(storage, self.remove, storage._cdata)
                self.set_size(storage)

    def set_size(self, storage):
        self.now += storage.nbytes() - self.sizes.get(storage._cdata, 0)
        self.sizes[storage._cdata] = storage.nbytes()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)

    def remove(self, address):
        self.now -= self.sizes.pop(address)

    def resize(self, storage, size):
        """Replaces UntypedStorage.resize_. FSDP frees storages with it, without an operator that
        __torch_dispatch__ could count."""
        self.plain_resize(storage, size)
        if storage._cdata in self.sizes:
            self.set_size(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.phase == "forward" and torch._C._current_graph_task_id() != -1:
            self.phase = "backward"
            self.parts["saved for backward"] = self.now - sum(self.parts.values())
        out = func(*args, **(kwargs or {}))
        self.add([leaf for leaf in tree_leaves(out) if torch.is_tensor(leaf)])
        return out


def attend_causally(q, k, v, **options):
    """Replaces FlexAttention, which has no backward pass on the CPU. SDPA saves the same tensors:
    q, k, v, the output, and a logsumexp per head and token."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def drop_everywhere(residual, response, has_loss):
    """Replaces model.dropout. The probability is a number, because a trace cannot contain a fake
    tensor that is none of its inputs."""
    probability = max(residual, response)
    if not probability:
        return models.no_dropout
    return lambda x: x * (torch.rand_like(x) >= probability) / (1 - probability)


class Traced:
    """Replaces model.compile_for_training. torch.compile does not run on fake tensors, so this has
    only the part of it that decides what is stored: AOTAutograd traces forward and backward, and
    its partitioner chooses which tensors are stored, and which backward computes again. Equal
    blocks share one trace."""

    def __init__(self):
        self.traces = {}  # {(class of the module, method): traced function}

    def __call__(self, module, method, dynamic):
        if method not in ("before", "after", "forward"):
            return  # what the loss and the connector store is small, or computed again
        plain = getattr(module, method)

        def run(*inputs):
            # a function, `drop`, is the last input of a method, and no input of a graph
            functions = [x for x in inputs if callable(x)]
            tensors = inputs[: len(inputs) - len(functions)]

            def with_parameters(parameters, tensors):
                with _reparametrize_module(module, parameters):
                    return plain(*tensors, *functions)

            key = type(module), method
            given = dict(module.named_parameters()), tensors
            if key not in self.traces:
                self.traces[key] = aot_function(
                    with_parameters, boxed_nop, partition_fn=min_cut_rematerialization_partition,
                    decompositions=select_decomp_table())
                # the first call traces; no mode counts it, and no checkpoint stores its tensors
                with _disable_current_modes(), saved_tensors_hooks(lambda x: x, lambda x: x):
                    self.traces[key](*given)
            return self.traces[key](*given)

        setattr(module, method, run)


def run_step(run, model, batch, buffers):
    """Runs a micro-batch on fake or on real tensors -> LiveBytes. Gradients and optimizer state
    exist already, as in the second micro-batch of a step. buffers: {name: other tensor}."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    live = LiveBytes({
        "weights": list(model.parameters()),
        "gradients": [p.grad for p in trained],
        "optimizer": [torch.zeros_like(parallel.local(p)) for p in trained for _ in range(2)],
        "batch": vars(batch),
        **buffers})
    with (
        patch.object(attention, "packed_mask", attention.block_mask),
        patch.object(attention, "compiled_flex_attention", lambda: attend_causally),
        patch.object(torch.UntypedStorage, "resize_", lambda *args: live.resize(*args)),
        live,
    ):
        train.forward_backward(run, model, batch)
    return live


def make_model(config, gpus, dtype, mode):
    """-> a fake model to train, and {name: buffer} of FSDP and NCCL. With several `gpus`, this is
    the model of the first rank, in a process group that sends nothing."""
    with mode:
        model = apply_recipe(models.Molmo2(config.model), config).train()
    if config.lora.rank:
        lora.hold_frozen(model, dtype)
    if gpus == 1:
        return model, {}
    # FSDP gathers into a buffer as large as the largest unit, the head (if tied: the embedding).
    # NCCL has one communicator for all ranks or for the ranks of a shard, one for the copies of a
    # shard, and one for the ranks that share a row. A rank has two more if --cp-heads makes groups:
    # one to exchange heads, and one to gather k and v.
    communicators = 1 + (config.shard not in (0, gpus)) + (config.cp > 1)
    communicators += 2 * (1 < config.cp_heads < config.cp)
    n_bytes = communicators * NCCL_BUFFERS
    with mode:
        buffers = {"FSDP's flat buffer": torch.empty_like(model.embedding.weight),
                   "NCCL's buffers": torch.empty(n_bytes, dtype=torch.uint8)}
    # not in the fake mode, because a mesh reads the values of its tensor of ranks
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    mesh = parallel.make_mesh(config.cp, cp_heads=config.cp_heads)
    parallel.parallelize(model, mesh, config.shard, dtype)
    parallel.set_last_micro_batch(model, True)
    return model, buffers


def count(config, dtype, gpus=1):
    """-> LiveBytes of the first of `gpus` ranks, after the largest micro-batch."""
    shard = parallel.CropShard(0, config.cp, 0, config.pack_crops) if config.cp > 1 else None
    example = largest_example(config, shard)
    run = SimpleNamespace(
        config=config, ranks=Ranks(), device=torch.device("cpu"), dtype=dtype)
    batch = copy.copy(train.batch_of(run, [[example]] * config.micro_batch))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    vars(batch).update({name: mode.from_tensor(x) for name, x in vars(batch).items()
                        if torch.is_tensor(x)})
    # rope_frequencies without its cache, in which a fake tensor would stay
    frequencies = getattr(models.rope_frequencies, "__wrapped__", models.rope_frequencies)
    # Blocks that are computed again store the same without compilation, and their graphs would be
    # counted with tensors that fused kernels do not have.
    traced = config.compile and config.recompute < 1
    dropout = drop_everywhere if traced else models.dropout
    with (
        patch.object(models, "rope_frequencies", frequencies),
        patch.object(models, "dropout", dropout),
        patch.object(models, "compile_for_training", Traced()),
    ):
        model, buffers = make_model(config, gpus, dtype, mode)
        if traced:
            model.compile_blocks()
        with mode:
            live = run_step(run, model, batch, buffers)
    if gpus > 1:
        dist.destroy_process_group()
    return live


def read_command(argv):
    """-> the number of GPUs, the arguments of train.py, the config that a rank would have."""
    parser = make_parser("memory", __doc__, epilog="All other flags are those of train.py.")
    parser.add_argument("--gpus", type=positive, default=1,
                        help="number of GPUs of the run, in nodes of 8 (default 1)")
    own, rest = parser.parse_known_args(argv)
    args, config = parse(rest)
    if "compile" not in args.fields:
        config = replace(config, compile=not args.tiny)  # as on a GPU
    with explained("--init" if args.init else "--model.*"):
        if args.init:
            config = replace(config, model=files.describe(args.init).config)
        files.meta_model(config.model)
    packs_of_rank = max(config.batch * config.cp // own.gpus, 1)
    config = replace(config, micro_batch=min(config.micro_batch, packs_of_rank))
    if "shard" not in args.fields:
        config = replace(config, shard=default_shard(own.gpus, 8))
    if error := layout_error(own.gpus, config, config.model):
        raise UserError(error)
    return own.gpus, args, config


@report_errors
def main(argv=None):
    gpus, args, config = read_command(argv)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    live = count(config, dtype, gpus)
    total = max(live.peaks.values())
    peaks = {f"peak of the {name} pass": n for name, n in live.peaks.items()}
    # all that did not exist before the forward pass: saved tensors and those of a moment
    held = sum(n for name, n in live.parts.items() if name != "saved for backward")
    numbers = {**live.parts, **peaks, "activations at the peak": total - held, "total": total}
    print(f"stage {config.stage}, {args.init or config.preset}, {dtype}: {config.micro_batch} x "
          f"{config.data.max_tokens} tokens, on one of {gpus} GPUs")
    print_table("part", {name: {"GiB": n / GIB} for name, n in numbers.items()})
    for size, gib in GPU_SIZES.items():
        share = total / (gib * GIB)
        verdict = "fits" if share <= 0.9 else "too tight" if share <= 1 else "does not fit"
        print(f"{size:4d} GB: {verdict}, {share:.0%} used")
    print_line({"gpus": gpus, "stage": config.stage, "micro_batch": config.micro_batch,
                "parts": live.parts, "peaks": live.peaks, "activations": total - held,
                "total": total})


if __name__ == "__main__":
    main()
