"""A sharded model as one process has it: to be saved, and to be asked.

in    the model of a run, sharded over its ranks or not
out   a whole Molmo2: on the CPU of the first rank in float32, or on the device of every rank in the
      dtype of the run
"""

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from weights import files, lora


def gather_on_first(model, ranks):
    """-> on the first rank the model itself, or a copy on the CPU if it is sharded or has adapters,
    which are merged; None on the others."""
    if not ranks.mesh and not lora.has_adapters(model):
        return model
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors = get_model_state_dict(model, options=options)
    return whole_model(model, tensors, torch.float32) if ranks.first else None


def gather_on_each(model, ranks, device, dtype):
    """-> the model that this rank evaluates: a copy on its device, in the dtype of the arithmetic.

    Weights are gathered once and not, as in training, layer by layer: that would send all of them
    for every token of an answer, and ranks whose answers differ in length could not take part in
    the same collectives. In bfloat16 the copy takes 16 GiB for the 8B, beside this rank's part of
    the training state. One process in float32, or with adapters, evaluates
    the model itself.
    """
    if not ranks.mesh and (dtype == torch.float32 or lora.has_adapters(model)):
        return model
    tensors = {}
    for name, p in model.named_parameters():
        shard = p.detach().to(device, dtype)             # a cast before it is sent: half the bytes
        tensors[name] = shard.full_tensor() if hasattr(shard, "full_tensor") else shard
    return whole_model(model, tensors, dtype)


def whole_model(model, tensors, dtype):
    """A copy without adapters; dtype: of the merged tensors."""
    copy = files.meta_model(model.config)
    copy.load_state_dict(lora.merged(model, tensors, dtype), assign=True)
    return copy.eval()
