"""Molmo2 (paper: architecture; spec 1): a decoder that reads visual tokens and text, and the loss of every token.

in    a packing.Batch
out   nll and logsumexp per token (B,T), 0 where there is no loss;  logits(batch) for small inputs

Letters: B rows, T tokens, C width, H query heads, G kv heads, D head dim, V vocabulary, M visual tokens.

Two families, one block (spec 1.5):
    qwen (4b, 8b)   x + attn(norm(x)),  x + mlp(norm(x));   q and k normalised per head, after the split
    olmo (o7b)      x + norm(attn(x)),  x + norm(mlp(x));   q and k normalised whole, before the split; YaRN on some layers

Nothing here knows of records, tokenizers, caches or ranks: `attend` and `vision` are the two places to wrap.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attention
from vision import Vision, VisionConfig, init_neighbor_heads


@dataclass(frozen=True)
class YarnConfig:
    layers: tuple = ()               # the blocks that use it; all others have plain RoPE
    factor: float = 8.0              # context is stretched by this
    attention_factor: float = 1.2079441541679836     # multiplies cos and sin
    beta_fast: float = 32.0          # rotations within original_max above which a dimension stays as it is
    beta_slow: float = 1.0           # ... below which it is stretched wholly
    original_max: int = 8192         # tokens


@dataclass(frozen=True)
class ModelConfig:
    n_layer: int = 36
    n_embd: int = 4096               # C
    n_head: int = 32                 # H
    n_kv_head: int = 8               # G
    head_dim: int = 128              # D
    n_hidden: int = 12288            # inner size of the MLP, and of the projector
    n_vocab: int = 151936            # V, rows of embedding and head
    n_extra: int = 128               # further input embeddings for the special tokens: never predicted
    family: str = "qwen"             # or "olmo", see above
    tied: bool = False               # head = embedding
    rope_theta: float = 1e6
    yarn: YarnConfig = YarnConfig()
    eps: float = 1e-6                # of the RMSNorms
    init_std: float = 0.02           # of weights that start from nothing; 0: 1/sqrt(fan in), right at any width
    vision: VisionConfig = VisionConfig()


TOY_VISION = VisionConfig(n_layer=3, n_embd=128, n_head=4, n_hidden=512, feature_layers=(2, 0), grid=10, patch=10, overlap_margin=2, neighbor_init=True)
PRESETS = {
    "toy": ModelConfig(n_layer=4, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, n_hidden=384, n_vocab=384,
                  rope_theta=1e6, init_std=0.0, vision=TOY_VISION),
    "4b": ModelConfig(n_embd=2560, n_hidden=9728, rope_theta=5e6, tied=True),
    "8b": ModelConfig(),
    "o7b": ModelConfig(n_layer=32, n_kv_head=32, n_hidden=11008, n_vocab=100278, family="olmo", rope_theta=5e5,
                  yarn=YarnConfig(layers=tuple(range(3, 32, 4)))),
}


# ---------------------------------------------------------------------------------------------------------------
# parts


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))      # never below float32 inside
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


@cache                               # copied to a device once: a copy makes a GPU's queue wait
def rope_frequencies(config, yarn=False, device="cpu"):
    """(D/2,) float32 radians per position, and the factor on cos and sin (spec 1.5, conformance/rope.json).

    YaRN keeps the fast dimensions, divides the slow ones by `factor`, and blends between the two.
    """
    D, theta = config.head_dim, config.rope_theta
    freq = 1.0 / theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    if not yarn:
        return freq.to(device), 1.0
    y = config.yarn

    def dim_of(rotations):           # the dimension that turns so often within the original context
        return D * math.log(y.original_max / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dim_of(y.beta_fast)), 0), min(math.ceil(dim_of(y.beta_slow)), D - 1)
    stretch = ((torch.arange(D // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (freq / y.factor * stretch + freq * (1 - stretch)).to(device), y.attention_factor


def rope_table(pos, freq, factor):
    """pos (B,T) -> cos, sin (B,T,1,D/2), float32."""
    angle = (pos[..., None].float() * freq)[:, :, None]
    return angle.cos() * factor, angle.sin() * factor


def rotate(x, cos, sin):
    """(B,T,H,D): dimension i turns with dimension i + D/2, at least in float32."""
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.H, self.G, self.D = config.n_head, config.n_kv_head, config.head_dim
        self.per_head = config.family == "qwen"
        q, kv = self.H * self.D, self.G * self.D
        self.q, self.k, self.v = (nn.Linear(config.n_embd, n, bias=False) for n in (q, kv, kv))
        self.q_norm = RMSNorm(self.D if self.per_head else q, config.eps)
        self.k_norm = RMSNorm(self.D if self.per_head else kv, config.eps)
        self.out = nn.Linear(q, config.n_embd, bias=False)

    def forward(self, x, rope, mask, attend):            # (B,T,C)
        B, T, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.view(B, T, self.H, self.D), k.view(B, T, self.G, self.D), v.view(B, T, self.G, self.D)
        if self.per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(rotate(q, *rope), rotate(k, *rope), v, mask).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up, self.gate = (nn.Linear(config.n_embd, config.n_hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.post = config.family == "olmo"
        self.attn_norm, self.mlp_norm = RMSNorm(config.n_embd, config.eps), RMSNorm(config.n_embd, config.eps)
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x, rope, mask, attend, drop):
        if self.post:
            x = x + drop(self.attn_norm(self.attn(x, rope, mask, attend)))
            return x + drop(self.mlp_norm(self.mlp(x)))
        x = x + drop(self.attn(self.attn_norm(x), rope, mask, attend))
        return x + drop(self.mlp(self.mlp_norm(x)))


def dropout(residual, response, has_loss):
    """What happens to a sub-layer's output before the residual add (spec 7.4): `residual` at every position (stages 2, 3),
    or `response` where the target has loss (stage 1). has_loss (B,T) bool."""
    if residual == response == 0:
        return lambda x: x
    rate = torch.where(has_loss, max(residual, response), residual)[..., None]       # (B,T,1)
    return lambda x: x * (torch.rand_like(x) >= rate) / (1 - rate)


# ---------------------------------------------------------------------------------------------------------------
# the model


class Molmo2(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.family in ("qwen", "olmo"), f"family '{config.family}' is neither qwen nor olmo"
        assert config.n_head % config.n_kv_head == 0, f"{config.n_head} query heads cannot share {config.n_kv_head} kv heads"
        assert config.head_dim % 2 == 0, f"RoPE turns pairs: head_dim {config.head_dim} is odd"
        v = config.vision
        assert v.n_embd % v.n_head == 0, f"vision width {v.n_embd} is no multiple of its {v.n_head} heads"
        assert set(v.feature_layers) <= set(range(v.n_layer)) and v.feature_layers, f"a ViT of {v.n_layer} blocks has no features {v.feature_layers}"
        self.config = config
        self.embedding = nn.Embedding(config.n_vocab, config.n_embd)
        self.extra = nn.Embedding(config.n_extra, config.n_embd)                 # ids V .. V+127, inputs only
        self.vision = Vision(config.vision, config.n_hidden, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.eps)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.n_vocab, bias=False)
        self.attend = attention.attend
        self.route = lambda seen, batch: seen                                    # pooled tokens to the places that want them
        self.residual_dropout = self.response_dropout = 0.0                      # set by the stage's recipe
        self.nll_chunk = 1024                                                    # positions whose logits exist at once
        self.activation_checkpointing, self.uncheckpointed_blocks = False, 0                              # activation checkpointing: set by the recipe

    def forward(self, batch):
        """batch -> nll (B,T), lse (B,T) float32; both 0 where batch.weights is 0."""
        return self.nll(self.hidden(batch), batch.targets, batch.labelled)

    def hidden(self, batch):         # -> (B,T,C)
        mask = attention.packed_mask(batch.doc, batch.branch, batch.bidir)
        drop = dropout(self.residual_dropout, self.response_dropout, batch.weights > 0) if self.training else dropout(0, 0, None)
        return self.transformer(self.embed(batch), batch.pos, mask, drop=drop)

    def embed_tokens(self, tokens):  # (B,T) -> (B,T,C)
        V = self.config.n_vocab
        return torch.where((tokens < V)[..., None], self.embedding(tokens.clamp(max=V - 1)), self.extra((tokens - V).clamp(min=0)))

    def embed(self, batch):
        """Token embeddings (B,T,C), the pooled features added at the places of their patch tokens (spec 1.4)."""
        x = self.embed_tokens(batch.tokens)
        seen = self.vision(batch.images, batch.pool_src, self.activation_checkpointing and self.training)           # (M,C)
        return x.flatten(0, 1).index_add(0, batch.pool_dst, self.route(seen, batch).to(x.dtype)).view_as(x)

    def transformer(self, x, pos, mask, attends=None, drop=lambda x: x):
        """x (B,T,C), pos (B,T), mask as `attend` takes it -> (B,T,C) after the final norm.

        `attends` is one attend function per block, where they differ: a KV cache has one slot per block.
        """
        config = self.config
        plain = rope_table(pos, *rope_frequencies(config, device=pos.device))
        yarn = rope_table(pos, *rope_frequencies(config, True, pos.device)) if config.yarn.layers else None
        again = len(self.blocks) - self.uncheckpointed_blocks if self.activation_checkpointing and self.training else 0       # backward comes to the first ones last
        for i, block in enumerate(self.blocks):
            inputs = x, yarn if i in config.yarn.layers else plain, mask, attends[i] if attends else self.attend, drop
            x = checkpoint(block, *inputs, use_reentrant=False) if i < again else block(*inputs)
        return self.norm(x)

    def lm_head(self, x):            # (...,C) -> (...,V)
        return F.linear(x, self.embedding.weight if self.head is None else self.head.weight)

    def logits(self, batch):
        """(B,T,V) for every position: small inputs only."""
        return self.lm_head(self.hidden(batch))

    def nll(self, x, targets, labelled):
        """Only positions with loss meet the head, a chunk at a time, recomputed in backward: never a (T,V) tensor."""
        at = labelled // targets.shape[1], labelled % targets.shape[1]
        hidden, wanted = x[at], targets[at]

        def chunk(hidden, wanted):
            logits = self.lm_head(hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            lse = logits.logsumexp(-1)
            return lse - logits.gather(1, wanted[:, None])[:, 0], lse

        parts = [checkpoint(chunk, h, w, use_reentrant=False) for h, w in
                 zip(hidden.split(self.nll_chunk), wanted.split(self.nll_chunk), strict=True)]
        out = []
        for part in zip(*parts, strict=True):
            flat = torch.cat(part)
            out.append(flat.new_zeros(targets.shape).index_put(at, flat))
        return tuple(out)

    def compile_blocks(self):
        """Blocks run compiled in training, each by itself: one compilation serves all of them, and every step. Attention stays outside,
        since documents differ from row to row; of crops there may be any number."""
        self.attend = torch.compiler.disable(self.attend)
        for block, dynamic in [(b, None) for b in self.blocks] + [(b, True) for b in self.vision.vit.blocks]:
            plain, fast = block.forward, torch.compile(block.forward, dynamic=dynamic)
            block.forward = lambda *x, block=block, plain=plain, fast=fast: (fast if block.training else plain)(*x)

    def parameter_groups(self):
        """Parameters by learning rate (spec 10): vit, connector (with the extra embeddings), llm."""
        groups = {"vit": [], "connector": [], "llm": []}
        for name, p in self.named_parameters():
            part = "vit" if name.startswith("vision.vit") else "connector" if name.startswith(("vision.", "extra.")) else "llm"
            groups[part].append(p)
        return groups

    @torch.no_grad()
    def init_weights(self):
        """Weights for a start from nothing: normal matrices, zero biases, unit norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.init_std or module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.init_std or 1.0)
        vit = self.vision.vit
        if self.config.vision.neighbor_init:
            init_neighbor_heads(vit)
        else:
            nn.init.normal_(vit.pos, std=0.02)
        return self
