"""What a training step keeps for its backward pass, and what single operations need beside it.

in    tools.memory.shape.Shape
out   bytes; of a patch, a visual token or a token where the docstring says so

One rule is behind all saved activations: autograd keeps what the backward pass of an operation
reads. y = x W needs x for the gradient of W, and W for the gradient of x; a product needs both
factors; a sum needs nothing. Autocast gives matrix products bfloat16 copies of float32 tensors, and
then these copies are kept.
"""

from typing import NamedTuple

from tools.memory.shape import (
    decoder_block_copies,
    decoder_block_parameters,
    parameters,
    vit_block_parameters,
)

NLL_CHUNK = 1024                     # positions whose logits exist at once: Molmo2.nll_chunk

# --------------------------------------------------------------------------------------------------
# saved activations


def matrix_input_saved(shape, n_matrices):
    """Of a number that n matrices read: autocast makes n copies; float32 is kept once, as it is."""
    return n_matrices * shape.compute_bytes if shape.compute_bytes < 4 else 4


def vit_block_saved(shape):
    """Of a patch, in a block that is trained. A frozen ViT keeps nothing: no gradient enters it."""
    s = shape.compute_bytes
    width = shape.vision.n_embd
    layer_norms = 2 * (4 * width + 2 * 4)                # float32 input; mean and deviation
    qkv_input = matrix_input_saved(shape, 3) * width
    up_input = matrix_input_saved(shape, 1) * width
    attention = s * 4 * width + 4 * shape.vision.n_head  # q, k, v, output; logsumexp of each head
    gelu = s * 2 * shape.vision.n_hidden                 # its input, and its output for `down`
    return layer_norms + qkv_input + up_input + attention + gelu


def layer_inputs_saved(shape, width, *layers):
    """Of a token, by linear layers of the decoder that read the same normalised input."""
    n = shape.inputs_kept(*layers)
    return matrix_input_saved(shape, n) * width if n else 0


def adapters_saved(shape, *layers):
    """Of a token, by adapters on these layers: what they compute between their two matrices."""
    return shape.compute_bytes * shape.lora.rank * shape.inputs_kept(*layers)


def rms_norm_saved(shape):
    """Of a token, by an RMSNorm of the residual stream: the float32 input and 1/rms, and the
    normalised input for the gradient of the scale. That is float32 where the norm reads the
    residual stream (qwen), and a product's dtype where it reads a product (olmo)."""
    saved = 4 * shape.model.n_embd + 4
    if shape.trains_llm:
        saved += (4 if shape.qwen else shape.compute_bytes) * shape.model.n_embd
    return saved


def flex_attention_saved(shape):
    """Of a token: q, k, v, output and logsumexp. Under Ulysses q, k and v are views of one tensor,
    and `out` reads a copy of the output, the one that was sent back."""
    s = shape.compute_bytes
    saved = s * (2 * shape.q_width + 2 * shape.exchanged_kv_width) + 4 * shape.model.n_head
    if shape.cp > 1:
        saved += s * shape.q_width * shape.inputs_kept("out")
    return saved


def attention_saved(shape):
    """Of a token, in the attention half of a block: norm, q, k, v, their norms, attention, dropout.

    A frozen decoder saves almost as much, since gradients pass through it; only what gradients of
    its weights would read is not kept.
    """
    m = shape.model
    saved = rms_norm_saved(shape) + flex_attention_saved(shape)
    if shape.qk_norm:
        saved += 4 * (shape.q_width + shape.kv_width)            # float32 inputs of their norms
        saved += 4 * (m.n_head + m.n_kv_head if shape.qwen else 2)       # their 1/rms
    saved += layer_inputs_saved(shape, m.n_embd, "q", "k", "v")
    saved += adapters_saved(shape, "q", "k", "v", "out")
    if shape.trains_llm and shape.qk_norm:
        saved += shape.compute_bytes * (shape.q_width + shape.kv_width)      # normalised q and k
    if shape.dropout:
        saved += m.n_embd                                        # a byte each: which numbers stay
    return saved


def mlp_saved(shape):
    """Of a token, in the MLP half of one block: norm, MLP, dropout."""
    m = shape.model
    saved = rms_norm_saved(shape)
    saved += shape.compute_bytes * 3 * m.n_hidden                # gate, silu(gate), up
    saved += layer_inputs_saved(shape, m.n_embd, "up", "gate")
    saved += adapters_saved(shape, "up", "gate", "down")
    saved += shape.compute_bytes * m.n_hidden * shape.inputs_kept("down")    # the product
    if shape.dropout:
        saved += m.n_embd
    return saved


def decoder_block_saved(shape):
    """Of a token, in one block that keeps everything."""
    return attention_saved(shape) + mlp_saved(shape)


def connector_saved(shape):
    """Of a visual token, pooled from `window` patches and projected."""
    s = shape.compute_bytes
    v = shape.vision
    window = shape.window
    saved = (4 + s * 2 * window) * v.n_embd + 4 * window * v.n_head      # q, k, v; the softmax
    saved += s * 3 * shape.model.n_hidden                                # gate, silu(gate), up
    if shape.trains_connector:
        mean_and_window = matrix_input_saved(shape, 1) + matrix_input_saved(shape, 2) * window
        saved += mean_and_window * shape.feature_width           # mean for q; window for k, v
        saved += 2 * s * v.n_embd                                # input of `out`; of up and gate
        saved += s * shape.model.n_hidden                        # of down: the product
    return saved


class WholeBlocks(NamedTuple):
    """Decoder blocks that keep all of their activations."""
    count: int
    saved: int                       # bytes


def whole_blocks(shape):
    count = shape.uncheckpointed_blocks if shape.checkpointing else shape.model.n_layer
    saved = decoder_block_saved(shape) * shape.tokens
    # with checkpointing train.py turns autocast's weight cache off, so that each block keeps copies
    # of its weights; FSDP gathers weights in bfloat16, which need no copy
    if shape.checkpointing and not shape.sharded:
        saved += decoder_block_copies(shape)
    return WholeBlocks(count, count * saved)


def saved_activations(shape):
    """{part: bytes} of what lives from the forward to the backward pass, without weight copies."""
    m = shape.model
    v = shape.vision
    if shape.checkpointing:          # float32 inputs of blocks, and of the pooling: the features
        vit = v.n_layer * 4 * v.n_embd * shape.patches
        connector = 4 * shape.feature_width * shape.patches
    else:
        vit = v.n_layer * vit_block_saved(shape) * shape.patches
        connector = connector_saved(shape) * shape.visual_tokens
    vit += shape.compute_bytes * v.n_pixel * shape.patches       # pixels: input of the first matrix
    added = 4 * m.n_embd * shape.received_tokens                 # index_add keeps what it adds
    if not shape.trains_vit:
        vit = 0
        if not shape.trains_connector:
            connector = added = 0

    whole = whole_blocks(shape)
    block_inputs = (m.n_layer - whole.count) * 4 * m.n_embd * shape.tokens
    rope_kinds = 2 if m.yarn.layers else 1
    rope_tables = rope_kinds * 2 * 4 * (m.head_dim // 2) * shape.tokens      # cos and sin
    final_norm_and_head = (4 + 4 + (4 if shape.trains_llm else 0)) * m.n_embd * shape.tokens
    return {"ViT": vit, "connector": connector, "pooled tokens": added,
            "decoder": whole.saved + block_inputs + rope_tables, "loss": final_norm_and_head}


def weight_copies(shape):
    """Autocast's copies of weights that live until the end of the backward pass.

    Autograd keeps the copies that gradients pass through. With activation checkpointing there are
    none: train.py turns autocast's weight cache off, and every use makes a copy of its own. FSDP
    gathers decoder blocks in the dtype of the arithmetic.
    """
    if shape.checkpointing:
        return 0
    sizes = parameters(shape)
    decoder = shape.model.n_layer * decoder_block_parameters(shape).in_matrices
    copied = shape.copy_bytes_of(shape.trains_llm) * (sizes["llm"].in_matrices - decoder)
    if shape.trains_vit or shape.trains_connector:
        copied += shape.copy_bytes_of(shape.trains_connector) * sizes["connector"].in_matrices
    if shape.trains_vit:
        copied += shape.copy_bytes * sizes["vit"].in_matrices
    if not shape.sharded:
        copied += shape.model.n_layer * decoder_block_copies(shape)
    if shape.model.tied and shape.trains_head:
        copied += shape.copy_bytes * shape.embedding_size        # as the head's matrix
    return copied


# --------------------------------------------------------------------------------------------------
# temporaries: what one operation holds at once beside everything that is saved


def vit_forward(shape):
    """The features so far and the residual stream; in a block its norm, q, k and v, both sides of
    GELU, and copies of its weights."""
    s = shape.compute_bytes
    v = shape.vision
    of_patch = 4 * shape.feature_width + (4 + 4 + 3 * s) * v.n_embd + 2 * s * v.n_hidden
    copies = shape.copy_bytes_of(shape.trains_vit) * vit_block_parameters(shape).in_matrices
    return of_patch * shape.patches + copies


def logits_forward(shape):
    """A chunk of float32 logits, logsumexp's copy of it, and a copy of the head's weight, where it
    does not live longer (weight_copies)."""
    chunk = min(NLL_CHUNK, shape.tokens)
    saved_with_weights = shape.trains_head and not shape.checkpointing
    copy_bytes = shape.copy_bytes_of(shape.trains_llm)
    head = 0 if saved_with_weights else copy_bytes * shape.embedding_size
    return 2 * 4 * chunk * shape.model.n_vocab + head


def loss_backward(shape):
    """Logits, the gradient of gather and three steps of logsumexp's; or later the gradients of the
    logits and of the head's weight. Beside them a copy of this weight."""
    chunk = min(NLL_CHUNK, shape.tokens)
    of_logits = 5 * 4 * chunk * shape.model.n_vocab
    of_head = shape.compute_bytes * chunk * shape.model.n_vocab
    if shape.trains_head:
        of_head += shape.gradient_bytes * shape.embedding_size
    return max(of_logits, of_head) + shape.copy_bytes_of(shape.trains_llm) * shape.embedding_size


def beyond_saved(shape, of_whole_block, recomputed):
    """What the decoder holds beyond saved activations in the backward of a block: the larger of two
    cases. A block that keeps everything adds `of_whole_block`. The first block that is recomputed
    adds `recomputed` and copies of its weights, when all blocks that keep everything are freed."""
    whole = whole_blocks(shape)
    cases = []
    if whole.count > 0:
        cases.append(of_whole_block)
    if whole.count < shape.model.n_layer:
        copies = decoder_block_copies(shape)
        cases.append(recomputed + (0 if shape.sharded else copies) - whole.saved)
    return max(cases)


def stream_gradients(shape):
    """Of the residual stream, and of the product that is added to it."""
    return (4 + shape.compute_bytes) * shape.model.n_embd * shape.tokens


def mlp_backward(shape):
    """All that the block saved, its input a second time; beside it the gradients of two of gate,
    silu and up, when only their product has been freed, or the gradient of one matrix."""
    m = shape.model
    recomputed = decoder_block_saved(shape) * shape.tokens
    of_activations = 2 * shape.compute_bytes * m.n_hidden * shape.tokens
    of_matrix = shape.gradient_bytes * m.n_embd * m.n_hidden if shape.trains_llm else 0
    return (beyond_saved(shape, 0, recomputed) + stream_gradients(shape)
            + max(of_activations, of_matrix))


def attention_backward(shape):
    """When the MLP half of the block has been freed. First the gradients of q, k and v, beside one
    of these: the output's gradient and its product with the output, a number per head; q's gradient
    in float32; second copies, which ranks exchange. Then, when these and k's norm have been freed,
    five float32 tensors of the backward pass of q's norm, beside the gradient of v."""
    s = shape.compute_bytes
    recomputed = attention_saved(shape) * shape.tokens
    freed_mlp = mlp_saved(shape) * shape.tokens

    of_qkv = s * (shape.q_width + 2 * shape.exchanged_kv_width)
    of_output = s * shape.q_width + 4 * shape.model.n_head
    of_float32_q = shape.normed_bytes * shape.q_width if shape.normed_bytes > s else 0
    exchanged = of_qkv if shape.cp > 1 else 0
    first = of_qkv + max(of_output, of_float32_q, exchanged)

    freed_norms = 4 * shape.kv_width
    if shape.trains_llm:
        freed_norms += s * (shape.q_width + shape.kv_width)
    then = (5 * 4 * shape.q_width + s * shape.exchanged_kv_width
            - flex_attention_saved(shape) - freed_norms)
    largest = max(first, then) if shape.qk_norm else first
    return (beyond_saved(shape, -freed_mlp, recomputed) + stream_gradients(shape)
            + largest * shape.tokens)


def connector_backward(shape):
    """The gradient of the windows, which comes through k and v when most of what is saved has been
    freed; and what is recomputed."""
    of_windows = 4 * shape.window * shape.feature_width * shape.visual_tokens
    if not shape.checkpointing:
        return of_windows
    matrices = parameters(shape)["connector"].in_matrices
    copies = shape.copy_bytes_of(shape.trains_connector) * matrices
    return of_windows + connector_saved(shape) * shape.visual_tokens + copies


def vit_block_backward(shape):
    """As the decoder's, with the input once; and the gradient of the features."""
    if not shape.trains_vit:
        return 0
    s = shape.compute_bytes
    v = shape.vision
    of_patch = (4 + s) * v.n_embd + s * v.n_hidden + 4 * shape.feature_width
    copies = 0
    if shape.checkpointing:
        of_patch += vit_block_saved(shape) - 4 * v.n_embd
        copies = shape.copy_bytes * vit_block_parameters(shape).in_matrices
    return of_patch * shape.patches + copies
