"""A training step or an answer added up: bytes by part, bytes at each moment, bytes that are sent.

FSDP2 shards float32 weights, gradients and optimizer state. It gathers the block at work and the
next one, decoder blocks in the dtype of the arithmetic, everything else in float32; last norm and
head, and an embedding that is tied to it, stay gathered from the forward pass to the end of the
backward pass. Every unit arrives in one flat buffer before it is copied to its tensors; these come
from a memory pool of their own, which keeps the largest.
"""

from dataclasses import replace
from typing import NamedTuple

import parallel
from tools.memory import activations
from tools.memory.shape import fsdp_units, largest_shape, parameters

MASK_BLOCK = 128                     # FlexAttention's mask lists blocks of 128 x 128 pairs
NCCL_BUFFERS = 2**29                 # of one communicator on a rank; an estimate, not measured yet


class Count(NamedTuple):
    parts: dict                      # {part: bytes}; they do not all exist at the same time
    moments: dict                    # {moment: bytes}; the largest is the peak

    @property
    def peak(self):                  # the name of the largest moment
        return max(self.moments, key=self.moments.get)

    @property
    def total(self):
        return self.moments[self.peak]


def batch_bytes(shape):
    """The tensors of packing.Batch."""
    of_slice = (4 * 8 + 4) * shape.tokens                # tokens, targets, pos, labelled; weights
    # visible_until, bidir, example: whole on every rank
    of_rows = 3 * 4 * shape.rows * shape.row_tokens
    pixels = shape.vision.n_pixel * shape.patches
    return of_slice + of_rows + pixels + 8 * (
        shape.window * shape.visual_tokens + shape.received_tokens)          # pool_src, pool_dst


def mask_bytes(shape):
    """attention.block_mask. For queries and for keys, of partly and of fully allowed blocks: their
    int32 numbers, and how many there are in a row of blocks."""
    blocks = -(-shape.row_tokens // MASK_BLOCK)
    lists = 4 * 4 * blocks * (blocks + 1)
    fields = 2 * 4 * MASK_BLOCK * blocks                 # visible_until, bidir
    return shape.rows * (lists + fields)


def static_bytes(shape):
    """{part: bytes} of what is there throughout the step."""
    units = fsdp_units(shape).values()
    size = sum(unit.bytes(shape.frozen_bytes) * unit.count for unit in units)
    trained = sum(unit.trained * unit.count for unit in units)
    model = fsdp_units(shape)["model"]
    gathered = model.bytes(shape.frozen_bytes) if shape.sharded else 0
    flat = max(unit.bytes(shape.frozen_bytes) for unit in units) if shape.sharded else 0
    # communicators: of all ranks or of those that hold the weights, of copies, of a shared row
    copies = shape.weight_ranks < shape.gpus
    communicators = 1 + copies + (shape.cp > 1) if shape.sharded else 0
    return {"weights": size // shape.weight_ranks,
            "gradients": 4 * trained // shape.weight_ranks,      # from the second micro-batch on
            "optimizer": 2 * 4 * trained // shape.weight_ranks,  # AdamW's two averages
            "batch": batch_bytes(shape),
            "mask": mask_bytes(shape),
            "gathered: embedding and head": gathered,
            "FSDP's flat buffer": flat,
            "NCCL's buffers": NCCL_BUFFERS * communicators}


def gathered_bytes(shape):
    """{name: bytes} of the weights that FSDP gathers for a while: of two blocks at a time."""
    if not shape.sharded:
        return {"gathered: decoder blocks": 0, "gathered: vision": 0}
    units = fsdp_units(shape)
    vision = units["vision"].bytes(shape.frozen_bytes)
    return {"gathered: decoder blocks": 2 * shape.compute_bytes * units["decoder block"].size,
            "gathered: vision": vision + 2 * units["ViT block"].bytes(shape.frozen_bytes)}


def unreduced_gradients(shape):
    """{FSDP unit: bytes} of gradients that are whole until they have been summed over ranks: of a
    block, and in float32 of the one before it; of everything else until the end of the backward."""
    if not shape.sharded:
        return {"decoder block": 0, "ViT block": 0, "vision": 0, "model": 0}      # and embedding
    units = fsdp_units(shape)
    return {"decoder block": (4 + shape.compute_bytes) * units["decoder block"].trained,
            "ViT block": 2 * 4 * units["ViT block"].trained,
            "vision": 4 * units["vision"].trained,
            "model": 4 * (units["model"].trained + units["embedding"].trained)}


def temporaries(shape):
    """{operation: bytes} that it holds at once, beside everything that is saved."""
    return {"ViT forward": activations.vit_forward(shape),
            "logits forward": activations.logits_forward(shape),
            "loss backward": activations.loss_backward(shape),
            "MLP backward": activations.mlp_backward(shape),
            "attention backward": activations.attention_backward(shape),
            "connector backward": activations.connector_backward(shape),
            "ViT block backward": activations.vit_block_backward(shape)}


def training(shape):
    """One training step -> Count."""
    static = static_bytes(shape)
    saved = activations.saved_activations(shape)
    copies = activations.weight_copies(shape)
    temporary = temporaries(shape)
    gathered = gathered_bytes(shape)
    decoder_blocks, vision = gathered.values()
    unreduced = unreduced_gradients(shape)

    always = sum(static.values())
    # what lives while the backward pass is in the vision part, and while it is in the decoder
    in_vision = always + copies + saved["ViT"] + unreduced["model"]
    in_decoder = in_vision + decoder_blocks + (
        saved["connector"] + saved["pooled tokens"] + saved["decoder"])
    moments = {
        "forward of the ViT": always + saved["ViT"] + temporary["ViT forward"] + vision,
        "end of the forward": always + sum(saved.values()) + copies + temporary["logits forward"]
        + decoder_blocks,
        "backward of the loss": in_decoder + saved["loss"] + temporary["loss backward"],
        "backward of an MLP": in_decoder + temporary["MLP backward"] + unreduced["decoder block"],
        "backward of attention": in_decoder + temporary["attention backward"]
        + unreduced["decoder block"],
        "backward of the connector": in_vision + saved["connector"]
        + temporary["connector backward"] + vision + unreduced["vision"],
        "backward of a ViT block": in_vision + temporary["ViT block backward"] + vision
        + unreduced["vision"] + unreduced["ViT block"],
        "end of the backward": always + copies + vision
        + 2 * (unreduced["vision"] + unreduced["model"])}
    parts = static | gathered
    parts |= {f"saved: {part}": n for part, n in saved.items()}
    parts["copies of weights"] = copies
    parts |= {f"temporary: {operation}": n for operation, n in temporary.items()}
    return Count(parts, moments)


def most_uncheckpointed_blocks(shape, size):
    """How many decoder blocks can keep all of their activations in a step of `size` bytes; 0 where
    the step does not fit with any."""
    most = 0
    for n in range(1, shape.model.n_layer + 1):
        if training(replace(shape, uncheckpointed_blocks=n)).total <= size:
            most = n
    return most


def sent(shape):
    """{exchange: bytes} that leave one rank for one micro-batch, at most: for the only one of a
    step. Of several, the first alone gathers the model's own unit, the last alone all-reduces.

    Of R ranks that gather n bytes, or sum them up and keep a shard each, one sends n (R-1)/R; where
    each keeps the whole sum, twice that, as in a ring. Scalars (losses, norms) are left out.
    """
    m = shape.model
    units = fsdp_units(shape)
    shards = shape.weight_ranks
    replicas = shape.gpus // shards
    learns_to_see = shape.trains_vit or shape.trains_connector
    whole = {}
    for name, unit in units.items():
        of_unit = unit.bytes(shape.frozen_bytes)
        if name == "decoder block":
            of_unit = shape.compute_bytes * unit.size
        whole[name] = of_unit * unit.count
    # in the backward pass everything is gathered again but the model's own unit, which stays, and a
    # frozen embedding. FSDP gathers one unit ahead, and so even one block of a frozen ViT
    again = whole["decoder block"] + whole["vision"]
    if units["embedding"].trained:
        again += whole["embedding"]
    if shape.trains_vit:
        again += whole["ViT block"]
    elif learns_to_see:
        again += units["ViT block"].bytes(shape.frozen_bytes)
    gradients = 4 * sum(unit.trained * unit.count for unit in units.values())

    layer = parallel.bytes_sent(m, shape.rows * shape.row_tokens, shape.cp, shape.compute_bytes)
    # forward, backward, and a second forward of the blocks that are recomputed
    passes = 3 * m.n_layer - activations.whole_blocks(shape).count
    pooled_forward = pooled_backward = 0
    if shape.cp > 1:                 # at most: all of them belong to tokens of other ranks
        pooled_forward = shape.compute_bytes * m.n_embd * shape.visual_tokens
        if learns_to_see:
            pooled_backward = shape.compute_bytes * m.n_embd * shape.received_tokens
    return {
        "Ulysses, forward of a layer": layer,
        "Ulysses, all layers": passes * layer,
        "pooled tokens, forward": pooled_forward,
        "pooled tokens, backward": pooled_backward,
        "weights, forward": sum(whole.values()) * (shards - 1) // shards,
        "weights, backward": again * (shards - 1) // shards,
        "gradients, reduce-scatter": gradients * (shards - 1) // shards,
        "gradients, all-reduce": 2 * gradients // shards * (replicas - 1) // replicas}


def answering(config, compute_bytes):
    """A prompt and its answer, data.max_tokens together, by tools.generate -> Count. Weights are in
    the dtype of the arithmetic."""
    shape = largest_shape(config, compute_bytes)
    s = compute_bytes
    m = shape.model
    v = shape.vision
    static = {"weights": s * sum(numbers.total for numbers in parameters(shape).values()),
              "cache": m.n_layer * 2 * shape.kv_width * s * shape.tokens,
              "batch": batch_bytes(shape)}
    of_patch = s * (shape.feature_width + 5 * v.n_embd + 2 * v.n_hidden)     # as in training
    # windows, their mean, k, v; in float32 q, and v weighted. Or gate, up, product of the projector
    pooling = s * ((shape.feature_width + 2 * v.n_embd) * shape.window + shape.feature_width)
    pooling += 4 * v.n_embd * (1 + shape.window)
    of_visual_token = max(pooling, s * 3 * m.n_hidden)
    connector = (s * m.n_embd * shape.tokens + s * shape.feature_width * shape.patches   # features
                 + of_visual_token * shape.visual_tokens)
    # the stream: of the model, of the block, after attention, normalised. q, k, v and float32 RoPE
    # (q, its rotated halves, both joined), or gate, up and product
    attention = s * (shape.q_width + 2 * shape.kv_width) + 3 * 4 * shape.q_width
    of_token = 4 * s * m.n_embd + max(attention, 3 * s * m.n_hidden)
    mask = shape.rows * shape.row_tokens * shape.row_tokens
    temporary = {"ViT": of_patch * shape.patches,
                 "connector": connector,
                 "decoder": of_token * shape.tokens + mask,
                 "logits": (s + 4) * m.n_vocab * shape.rows}
    always = sum(static.values())
    parts = static | {f"temporary: {operation}": n for operation, n in temporary.items()}
    return Count(parts, {f"prefill: {name}": always + n for name, n in temporary.items()})
