"""Molmo2: a decoder that reads visual tokens and text, and the loss of every token.

in    a packing.Batch
out   nll and logsumexp per token (B,T), 0 where there is no loss; logits(batch) for small inputs

Letters: B rows, T tokens, C width, H query heads, G kv heads, D head dim, V vocabulary, M visual
tokens. (Paper: architecture; docs/molmo2.md 1.) Three families, one block:

    qwen (4b, 8b)   x + attn(norm(x)),  x + mlp(norm(x))    q, k normalised per head (llama: not)
    olmo (o7b)      x + norm(attn(x)),  x + norm(mlp(x))    q, k normalised whole, before the split
                                                            into heads; YaRN on some layers

Nothing here knows of records, tokenizers, caches or ranks. The KV cache and Ulysses are wrapped
around `attend`, the sharing of vision over ranks around `route`, from outside.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attention
from vision import SwiGLU, Vision, VisionConfig


@dataclass(frozen=True)
class YarnConfig:
    layers: tuple = ()               # the blocks that use it; all others have plain RoPE
    factor: float = 8.0              # the context is stretched by this
    attention_factor: float = 1.2079441541679836  # multiplies cos and sin
    beta_fast: float = 32.0          # a dimension of more rotations in original_max stays as it is
    beta_slow: float = 1.0           # one of fewer is stretched by the whole factor
    original_max: int = 8192         # tokens of the context that is stretched


@dataclass(frozen=True)
class ModelConfig:
    n_layer: int = 36                # blocks of the decoder
    n_embd: int = 4096               # C, width
    n_head: int = 32                 # H, query heads
    n_kv_head: int = 8               # G, key and value heads
    head_dim: int = 128              # D, width of a head
    n_hidden: int = 12288            # inner size of the MLP, and of the projector
    n_vocab: int = 151936            # V, rows of the embedding and of the head
    n_extra: int = 128               # more input embeddings: special tokens, never predicted
    family: str = "qwen"             # qwen, olmo, or llama: qwen without norms of q and k
    tied: bool = False               # the head is the embedding
    rope_theta: float = 1e6          # base of the rotary embedding
    yarn: YarnConfig = YarnConfig()
    eps: float = 1e-6                # epsilon of the RMSNorms
    init_std: float = 0.02           # standard deviation of new weights; 0: 1/sqrt(fan in)
    vision: VisionConfig = VisionConfig()


TOY_VISION = VisionConfig(n_layer=3, n_embd=128, n_head=4, n_hidden=512, feature_layers=(2, 0),
                          grid=10, patch=10, overlap_margin=2, neighbor_init=True)
PRESETS = {
    "toy": ModelConfig(n_layer=4, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, n_hidden=384,
                       n_vocab=384, rope_theta=1e4, init_std=0.0, vision=TOY_VISION),
    "small": ModelConfig(n_layer=28, n_embd=1024, n_head=16, n_hidden=3072, tied=True,
                         vision=VisionConfig(10, 768, 12, 3072, (9, 3), grid=24, patch=16)),
    "4b": ModelConfig(n_embd=2560, n_hidden=9728, rope_theta=5e6, tied=True),
    "8b": ModelConfig(),
    "o7b": ModelConfig(n_layer=32, n_kv_head=32, n_hidden=11008, n_vocab=100278, family="olmo",
                       rope_theta=5e5, yarn=YarnConfig(layers=tuple(range(3, 32, 4)))),
}


# --------------------------------------------------------------------------------------------------
# parts


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # float32 inside, or wider
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


@cache  # once per device: a copy at every step would make a GPU wait
def rope_frequencies(config, yarn=False, device="cpu"):
    """(D/2,) float32 radians per position, and the factor on cos and sin (docs/molmo2.md 1.5).

    YaRN keeps the fast dimensions, divides the slow ones by `factor`, and blends between the two.
    """
    D, theta = config.head_dim, config.rope_theta
    freq = 1.0 / theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    if not yarn:
        return freq.to(device), 1.0
    y = config.yarn

    def dimension_of(rotations):  # which rotates so often within the original context
        return D * math.log(y.original_max / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(y.beta_fast)), 0)
    high = min(math.ceil(dimension_of(y.beta_slow)), D - 1)
    ramp = (torch.arange(D // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)
    return (freq / y.factor * stretch + freq * (1 - stretch)).to(device), y.attention_factor


def rope_table(pos, freq, factor):
    """pos (B,T) -> cos, sin (B,T,1,D/2), float32."""
    angle = (pos[..., None].float() * freq)[:, :, None]
    return angle.cos() * factor, angle.sin() * factor


def rotate(x, cos, sin):
    """(B,T,H,D): dimension i rotates with dimension i + D/2, in float32 or wider."""
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.D = config.head_dim
        self.norm_per_head = config.family == "qwen"
        n_q, n_kv = config.n_head * self.D, config.n_kv_head * self.D
        self.q = nn.Linear(config.n_embd, n_q, bias=False)
        self.k = nn.Linear(config.n_embd, n_kv, bias=False)
        self.v = nn.Linear(config.n_embd, n_kv, bias=False)
        norm = nn.Identity if config.family == "llama" else RMSNorm
        self.q_norm = norm(self.D if self.norm_per_head else n_q, config.eps)
        self.k_norm = norm(self.D if self.norm_per_head else n_kv, config.eps)
        self.out = nn.Linear(n_q, config.n_embd, bias=False)

    def forward(self, x, rope, mask, attend):  # (B,T,C)
        B, T, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.view(B, T, -1, self.D) for x in (q, k, v))  # heads H, G, G
        if self.norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        # under autocast norms give float32, and v is bfloat16, as exchanges and kernels want all
        q, k = (rotate(x, *rope).to(v.dtype) for x in (q, k))
        return self.out(attend(q, k, v, mask).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm_after = config.family == "olmo"
        self.attn_norm = RMSNorm(config.n_embd, config.eps)
        self.mlp_norm = RMSNorm(config.n_embd, config.eps)
        self.attn = Attention(config)
        self.mlp = SwiGLU(config.n_embd, config.n_hidden, config.n_embd)

    def forward(self, x, rope, mask, attend, drop):
        if self.norm_after:
            x = x + drop(self.attn_norm(self.attn(x, rope, mask, attend)))
            return x + drop(self.mlp_norm(self.mlp(x)))
        x = x + drop(self.attn(self.attn_norm(x), rope, mask, attend))
        return x + drop(self.mlp(self.mlp_norm(x)))


def dropout(residual, response, has_loss):
    """The dropout of a sub-layer's output before the residual add (docs/molmo2.md 7.4).

    At rate `residual` at every position (stages 2, 3), `response` where the target has loss (stage
    1); has_loss (B,T) bool.
    """
    if residual == response == 0:
        return lambda x: x
    rate = torch.where(has_loss, max(residual, response), residual)[..., None]  # (B,T,1)
    return lambda x: x * (torch.rand_like(x) >= rate) / (1 - rate)


# --------------------------------------------------------------------------------------------------
# the model


class Molmo2(nn.Module):
    def __init__(self, config):
        super().__init__()
        v = config.vision
        assert config.family in ("qwen", "olmo", "llama"), f"unknown family '{config.family}'"
        assert config.n_head % config.n_kv_head == 0, "query heads must be a multiple of kv heads"
        assert config.head_dim % 2 == 0, f"RoPE rotates pairs: head_dim {config.head_dim} is odd"
        assert v.n_embd % v.n_head == 0, f"vision width {v.n_embd}: no multiple of {v.n_head} heads"
        assert v.feature_layers and set(v.feature_layers) <= set(range(v.n_layer)), (
            f"a ViT of {v.n_layer} blocks has no features {v.feature_layers}")
        self.config = config
        self.embedding = nn.Embedding(config.n_vocab, config.n_embd)
        self.extra = nn.Embedding(config.n_extra, config.n_embd)  # ids V .. V+127, inputs only
        self.vision = Vision(config.vision, config.n_hidden, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.eps)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.n_vocab, bias=False)
        self.attend = attention.attend
        # under context parallelism: sends features to the rank that has their tokens
        self.route = lambda image_features, batch: image_features
        # set by the stage's recipe
        self.residual_dropout = self.response_dropout = 0.0
        self.activation_checkpointing = False
        self.uncheckpointed_blocks = 0
        self.nll_chunk = 1024  # positions whose logits exist at once

    def forward(self, batch):
        """batch -> nll (B,T), lse (B,T) float32; both 0 where batch.weights is 0."""
        return self.nll(self.hidden(batch), batch.targets, batch.labelled)

    def hidden(self, batch):  # -> (B,T,C)
        mask = attention.packed_mask(batch.visible_until, batch.bidir, batch.queries)
        rates = (self.residual_dropout, self.response_dropout) if self.training else (0, 0)
        drop = dropout(*rates, batch.weights > 0)
        return self.transformer(self.embed(batch), batch.pos, mask, drop=drop)

    def embed_tokens(self, tokens):  # (B,T) -> (B,T,C)
        V = self.config.n_vocab
        in_vocabulary = self.embedding(tokens.clamp(max=V - 1))
        beyond = self.extra((tokens - V).clamp(min=0))
        return torch.where((tokens < V)[..., None], in_vocabulary, beyond)

    def embed(self, batch):
        """Token embeddings (B,T,C); pooled features are added where their patch tokens are."""
        x = self.embed_tokens(batch.tokens)
        checkpointing = self.activation_checkpointing and self.training
        image_features = self.vision(batch.images, batch.pool_src, checkpointing)  # (M,C)
        image_features = self.route(image_features, batch).to(x.dtype)
        return x.flatten(0, 1).index_add(0, batch.pool_dst, image_features).view_as(x)

    def transformer(self, x, pos, mask, attends=None, drop=lambda x: x):
        """x (B,T,C), pos (B,T), mask as `attend` takes it -> (B,T,C) after the final norm.

        attends: one attend function per block, where they differ: a KV cache has a slot per block.
        """
        config = self.config
        plain = rope_table(pos, *rope_frequencies(config, device=pos.device))
        yarn = None
        if config.yarn.layers:
            yarn = rope_table(pos, *rope_frequencies(config, True, pos.device))
        n_checkpointed = 0  # the first blocks, because backward comes to them last
        if self.activation_checkpointing and self.training:
            n_checkpointed = len(self.blocks) - self.uncheckpointed_blocks
        for i, block in enumerate(self.blocks):
            rope = yarn if i in config.yarn.layers else plain
            inputs = x, rope, mask, attends[i] if attends else self.attend, drop
            if i < n_checkpointed:
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        return self.norm(x)

    def lm_head(self, x):  # (..,C) -> (..,V)
        return F.linear(x, self.embedding.weight if self.head is None else self.head.weight)

    def logits(self, batch):
        """(B,T,V) for every position: small inputs only."""
        return self.lm_head(self.hidden(batch))

    def nll(self, x, targets, labelled):
        """x (B,T,C), targets (B,T), labelled (L,) flat positions with loss -> nll, lse (B,T).

        Only these positions meet the head, a chunk at a time, computed again in backward: there is
        never a (T,V) tensor.
        """
        place = labelled // targets.shape[1], labelled % targets.shape[1]
        hidden, wanted = x[place], targets[place]

        def chunk(hidden, wanted):
            logits = self.lm_head(hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            lse = logits.logsumexp(-1)
            return lse - logits.gather(1, wanted[:, None])[:, 0], lse

        chunks = zip(hidden.split(self.nll_chunk), wanted.split(self.nll_chunk), strict=True)
        parts = [checkpoint(chunk, h, w, use_reentrant=False) for h, w in chunks]
        nll, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        zeros = nll.new_zeros(targets.shape)
        return zeros.index_put(place, nll), zeros.index_put(place, lse)

    def compile_blocks(self):
        """Blocks run compiled in training, each by itself: one compilation serves all of them.

        Attention stays outside, since documents differ from row to row; the number of crops, the
        first dimension in the ViT, may change.
        """
        self.attend = torch.compiler.disable(self.attend)
        for block in self.blocks:
            compile_for_training(block, dynamic=None)
        for block in self.vision.vit.blocks:
            compile_for_training(block, dynamic=True)

    def parameter_groups(self):
        """Parameters by learning rate: "vit", "connector" with the extra embeddings, "llm"."""
        groups = {"vit": [], "connector": [], "llm": []}
        for name, p in self.named_parameters():
            if name.startswith("vision.vit"):
                groups["vit"].append(p)
            elif name.startswith(("vision.", "extra.")):
                groups["connector"].append(p)
            else:
                groups["llm"].append(p)
        return groups

    @torch.no_grad()
    def init_weights(self):
        """New weights: normal matrices, zero biases, unit norms.

        With vision.neighbor_init the ViT's positions stay 0, for init_neighbor_heads of toy/vit.py.
        """
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std or module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std or 1.0)
        if not self.config.vision.neighbor_init:
            nn.init.normal_(self.vision.vit.pos, std=0.02)
        return self


def compile_for_training(block, dynamic):
    plain = block.forward
    compiled = torch.compile(plain, dynamic=dynamic)
    block.forward = lambda *inputs: (compiled if block.training else plain)(*inputs)
