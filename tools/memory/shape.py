"""The largest micro-batch of one rank, and the model that it runs through: sizes and parameters.

The worst case is counted: full rows, all crops, loss at every token. The decoder's attention is
FlexAttention, as on a GPU.
"""

from dataclasses import dataclass
from typing import NamedTuple

from model import ModelConfig
from vision import VisionConfig
from weights.lora import LoraConfig


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    vision: VisionConfig
    # the batch
    rows: int                        # B, rows of one micro-batch
    row_tokens: int                  # T, tokens of a whole row
    tokens: int                      # of all rows, or of this rank's slice of them
    patches: int                     # that this rank encodes, in crops of padding too
    visual_tokens: int               # that this rank pools and projects
    received_tokens: int             # pooled tokens that are added to this rank's tokens
    window: int                      # K, patches that one visual token pools
    # widths, in numbers
    q_width: int                     # all query heads
    kv_width: int                    # all key heads, and the same for values
    exchanged_kv_width: int          # in Ulysses, which copies kv heads up to the number of ranks
    feature_width: int               # outputs of several ViT blocks side by side, which are pooled
    # bytes of a number
    compute_bytes: int               # in matrix products: 2 under bfloat16 autocast, else 4
    normed_bytes: int                # of q and k after their norms
    # the layout
    gpus: int
    cp: int                          # ranks that share a row
    weight_ranks: int                # ranks that hold one copy of the weights together
    # training
    checkpointing: bool              # activation checkpointing: blocks keep their inputs only
    uncheckpointed_blocks: int       # ... but the last of the decoder, which keep everything
    dropout: bool
    freeze_embedding: bool
    trains_vit: bool
    trains_connector: bool
    trains_llm: bool                 # the weights of the decoder, not adapters on it
    lora: LoraConfig = LoraConfig()
    frozen_bytes: int = 4            # of a number of a matrix that does not learn

    @property
    def copy_bytes(self):
        """Of a number of a weight in autocast's copy; float32 arithmetic needs no copy."""
        return self.compute_bytes if self.compute_bytes < 4 else 0

    @property
    def gradient_bytes(self):
        """Of a number of a matrix' gradient until it is added to .grad: the bfloat16 gradient and
        its float32 form exist together."""
        return 2 + 4 if self.compute_bytes == 2 else 4

    def copy_bytes_of(self, trained):
        """copy_bytes of a matrix: what is held in the dtype of the arithmetic needs no copy."""
        return self.copy_bytes if trained or self.frozen_bytes > self.compute_bytes else 0

    def inputs_kept(self, *layers):
        """How many of these linear layers of a decoder block keep their input for a gradient."""
        names = self.lora.layers if self.lora.rank else layers if self.trains_llm else ()
        return sum(layer in names for layer in layers)

    @property
    def sharded(self):               # FSDP is used
        return self.gpus > 1

    @property
    def qwen(self):                  # a norm before the residual branch, and of each head's q and k
        return self.model.family != "olmo"

    @property
    def qk_norm(self):
        return self.model.family != "llama"

    @property
    def embedding_size(self):        # numbers of the embedding table, and of an untied head
        return self.model.n_vocab * self.model.n_embd

    @property
    def trains_head(self):           # a tied head is the embedding
        return self.trains_llm and not (self.model.tied and self.freeze_embedding)


def largest_shape(config, compute_bytes, gpus=1):
    """The most that one of `gpus` ranks computes in a forward pass with this train config -> Shape.

    An image has up to 196 visual tokens per crop (a view and a mosaic of one crop each), a frame
    only 81. But windows of a frame pool 9 patches and not 4, and a single frame in a batch widens
    the windows of all images in it. Stage 1 has no frames.
    """
    m = config.model
    v = config.model.vision
    rows = config.micro_batch
    row_tokens = config.data.max_tokens
    cp = config.cp
    # under context parallelism a rank encodes its share of a row's crops, at most one image more
    crops_of_row = -(-config.pack_crops // cp) + (config.data.max_crops if cp > 1 else 0)
    crops = rows * min(crops_of_row, config.pack_crops)
    padded_crops = -(-crops // config.crop_bucket) * config.crop_bucket
    tokens_per_crop = (-(-v.grid // 2)) ** 2
    return Shape(
        model=m, vision=v, rows=rows, row_tokens=row_tokens, tokens=rows * row_tokens // cp,
        patches=padded_crops * v.n_patch,
        visual_tokens=min(crops * tokens_per_crop, rows * row_tokens),
        received_tokens=min(rows * config.pack_crops * tokens_per_crop, rows * row_tokens // cp),
        window=4 if config.stage == 1 else 9,
        q_width=m.n_head * m.head_dim, kv_width=m.n_kv_head * m.head_dim,
        exchanged_kv_width=max(m.n_kv_head, cp) * m.head_dim,
        feature_width=len(v.feature_layers) * v.n_embd,
        # FSDP gathers the weights of the norms in bfloat16; on one GPU they are float32
        compute_bytes=compute_bytes, normed_bytes=4 if gpus == 1 else compute_bytes,
        gpus=gpus, cp=cp, weight_ranks=config.shard or gpus,
        checkpointing=config.activation_checkpointing,
        uncheckpointed_blocks=min(config.uncheckpointed_blocks, m.n_layer),
        dropout=config.residual_dropout + config.response_dropout > 0,
        freeze_embedding=config.freeze_embedding, trains_vit="vit" in config.train,
        trains_connector="connector" in config.train,
        trains_llm="llm" in config.train and not config.lora.rank, lora=config.lora,
        frozen_bytes=compute_bytes if config.lora.rank and config.frozen_dtype == "auto" else 4)


# --------------------------------------------------------------------------------------------------
# parameters


class Parameters(NamedTuple):
    """How many numbers. Autocast copies matrices with their biases, and nothing else."""
    in_matrices: int
    elsewhere: int                   # norms, embeddings, positions

    @property
    def total(self):
        return self.in_matrices + self.elsewhere


def vit_block_parameters(shape):
    width = shape.vision.n_embd
    hidden = shape.vision.n_hidden
    attention = 4 * (width * width + width)                      # q, k, v, out
    mlp = (width * hidden + hidden) + (hidden * width + width)   # up, down
    layer_norms = 2 * 2 * width
    return Parameters(attention + mlp, layer_norms)


def decoder_block_parameters(shape):
    width = shape.model.n_embd
    attention = width * (shape.q_width + 2 * shape.kv_width) + shape.q_width * width
    mlp = 3 * width * shape.model.n_hidden                       # up, gate, down
    if not shape.qk_norm:
        qk_norms = 0
    elif shape.qwen:
        qk_norms = 2 * shape.model.head_dim                      # one scale for all heads
    else:
        qk_norms = shape.q_width + shape.kv_width
    return Parameters(attention + mlp, 2 * width + qk_norms)


def adapter_parameters(shape):
    """Of one decoder block."""
    m = shape.model
    widths = {"q": (m.n_embd, shape.q_width), "k": (m.n_embd, shape.kv_width),
              "v": (m.n_embd, shape.kv_width), "out": (shape.q_width, m.n_embd),
              "up": (m.n_embd, m.n_hidden), "gate": (m.n_embd, m.n_hidden),
              "down": (m.n_hidden, m.n_embd)}
    return shape.lora.rank * sum(sum(widths[name]) for name in shape.lora.layers)


def decoder_block_copies(shape):
    """Bytes of autocast's copies of the matrices of one decoder block."""
    adapters = shape.copy_bytes * adapter_parameters(shape)
    matrices = decoder_block_parameters(shape).in_matrices
    return adapters + shape.copy_bytes_of(shape.trains_llm) * matrices


def parameters(shape):
    """{part: Parameters}, parts as in Molmo2.parameter_groups."""
    m = shape.model
    v = shape.vision
    vit = vit_block_parameters(shape)
    decoder = decoder_block_parameters(shape)
    patch_embedding = v.n_pixel * v.n_embd + v.n_embd
    pool_inputs = 3 * (shape.feature_width * v.n_embd + v.n_embd)            # q, k, v
    pool_output = v.n_embd * v.n_embd + v.n_embd
    projector = 2 * v.n_embd * m.n_hidden + m.n_hidden * m.n_embd            # up, gate, down
    head = 0 if m.tied else shape.embedding_size
    return {
        "vit": Parameters(patch_embedding + v.n_layer * vit.in_matrices,
                          v.n_patch * v.n_embd + v.n_layer * vit.elsewhere),
        "connector": Parameters(pool_inputs + pool_output + projector, m.n_extra * m.n_embd),
        "llm": Parameters(m.n_layer * decoder.in_matrices + head,
                          shape.embedding_size + m.n_layer * decoder.elsewhere + m.n_embd)}


class FsdpUnit(NamedTuple):
    """Parameters that FSDP gathers at once."""
    size: int
    count: int                       # how many units of this kind the model has
    trained: int                     # of `size`
    low: int                         # of `size`: numbers in Shape.frozen_bytes, all others in 4

    def bytes(self, frozen_bytes):
        return 4 * (self.size - self.low) + frozen_bytes * self.low


def fsdp_units(shape):
    """{name: FsdpUnit}, as parallel.parallelize wraps the model."""
    m = shape.model
    v = shape.vision
    sizes = {part: numbers.total for part, numbers in parameters(shape).items()}
    vit = vit_block_parameters(shape).total
    decoder = decoder_block_parameters(shape).total
    adapters = adapter_parameters(shape)
    extra_embedding = m.n_extra * m.n_embd
    patch_embedding = sizes["vit"] - v.n_layer * vit
    connector = sizes["connector"] - extra_embedding
    embedding_and_head = sizes["llm"] - m.n_layer * decoder
    own_unit = 0 if m.tied else shape.embedding_size     # a tied one stays with the head
    vision_trained = (patch_embedding if shape.trains_vit else 0) + (
        connector if shape.trains_connector else 0)
    model_trained = extra_embedding if shape.trains_connector else 0
    embedding_trained = 0
    if shape.trains_llm:
        frozen = shape.embedding_size if shape.freeze_embedding else 0
        embedding_trained = own_unit - min(frozen, own_unit)
        model_trained += embedding_and_head - frozen - embedding_trained
    counted = parameters(shape)
    connector_matrices = 0 if shape.trains_connector else counted["connector"].in_matrices
    patch_matrix = 0 if shape.trains_vit else patch_embedding - v.n_patch * v.n_embd
    low = {"ViT block": 0 if shape.trains_vit else vit_block_parameters(shape).in_matrices,
           "vision": patch_matrix + connector_matrices,
           "embedding": 0 if shape.trains_llm else own_unit,
           "decoder block": 0 if shape.trains_llm else decoder_block_parameters(shape).in_matrices,
           "model": 0 if shape.trains_llm else embedding_and_head - own_unit - m.n_embd}
    trained = {"embedding": embedding_trained, "ViT block": vit if shape.trains_vit else 0,
               "vision": vision_trained, "model": model_trained,
               "decoder block": decoder if shape.trains_llm else adapters}
    sizes = {"embedding": own_unit, "ViT block": vit, "vision": patch_embedding + connector,
             "decoder block": decoder + adapters,
             "model": embedding_and_head - own_unit + extra_embedding}
    counts = {"ViT block": v.n_layer, "decoder block": m.n_layer}
    return {name: FsdpUnit(size, counts.get(name, 1), trained[name], low[name])
            for name, size in sizes.items()}
