"""Molmo2: a decoder whose input is visual tokens and text, and the loss of every token.

in    a packing.Batch
out   nll and logsumexp per token (B,T), 0 where there is no loss; logits(batch) for small inputs

Letters: B rows (packed sequences), T tokens, C width, H query heads, G key/value heads, D head
dimension, V vocabulary, M visual tokens. (Paper: 3.1; docs/molmo2.md 1.) One block serves three
families of decoders:

    qwen (4b, 8b)   x + attn(norm(x)),  x + mlp(norm(x))    q, k normalised in each head
    llama           the same                                q, k not normalised
    olmo (o7b)      x + norm(attn(x)),  x + norm(mlp(x))    q, k normalised over all heads together;
                                                            YaRN on some layers

What is special here, and easily done wrong:

    input       Pooled features are added to the embedding of <im_patch>. They do not replace it.
    attention   Visual tokens of an example attend to each other in both directions, also those of
                different frames. Branches do not attend to each other.
    position    Each branch continues the RoPE positions of the prefix, so they repeat in a row. The
                mask compares positions in the row instead.
    tokens      Tokens that Molmo2 adds, such as <im_patch>, have embeddings of their own (`extra`)
                and no row in the head, so they are never generated.
    loss        Targets are the next tokens already; the model shifts nothing. There is one value
                per token and no mean: train.py divides once. Logits exist in chunks only.

This file does not depend on records, tokenizers, caches or ranks. Context parallelism replaces two
functions of the model from outside, `attend` and `route`. A KV cache gives `transformer` an attend
function for each block.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import attention
from vision import SwiGLU, Vision, VisionConfig, recomputed


@dataclass(frozen=True)
class YarnConfig:
    layers: tuple = ()               # the blocks that use it; all others have plain RoPE
    factor: float = 8.0              # how many times longer the context becomes
    attention_factor: float = 1.2079441541679836  # 0.1 ln(factor) + 1, multiplies cos and sin
    # Count the full turns of a pair of dimensions in original_max tokens. A pair with more than
    # beta_fast turns keeps its frequency. With fewer than beta_slow it is divided by `factor`.
    beta_fast: float = 32.0          # in full turns: with more, a frequency is kept
    beta_slow: float = 1.0           # in full turns: with fewer, it is divided by `factor`
    original_max: int = 8192         # tokens of the context before it is made longer


@dataclass(frozen=True)
class ModelConfig:
    n_layer: int = 36                # blocks of the decoder
    n_embd: int = 4096               # C, width
    n_head: int = 32                 # H, query heads
    n_kv_head: int = 8               # G, key and value heads
    head_dim: int = 128              # D, width of a head
    n_hidden: int = 12288            # inner size of the MLP, and of the projector
    n_vocab: int = 151936            # V, rows of the embedding and of the head
    n_extra: int = 128               # input embeddings of special tokens, never predicted
    family: str = "qwen"             # qwen, olmo, or llama: qwen without norms of q and k
    tied: bool = False               # the head uses the weights of the embedding
    rope_theta: float = 1e6          # base of the rotary embedding
    yarn: YarnConfig = YarnConfig()
    eps: float = 1e-6                # epsilon of the RMSNorms
    init_std: float = 0.02           # of new weights; 0: 1/sqrt(fan in), and 1 for embeddings
    vision: VisionConfig = VisionConfig()


TOY_VISION = VisionConfig(n_layer=3, n_embd=128, n_head=4, n_hidden=512, feature_layers=(2, 0),
                          grid=10, patch=10, overlap_margin=2)
PRESETS = {
    "toy": ModelConfig(n_layer=4, n_embd=128, n_head=4, n_kv_head=2, head_dim=32, n_hidden=384,
                       n_vocab=384, rope_theta=1e4, init_std=0.0, vision=TOY_VISION),
    "small": ModelConfig(n_layer=28, n_embd=1024, n_head=16, n_hidden=3072, tied=True,
                         vision=VisionConfig(n_layer=10, n_embd=768, n_head=12, n_hidden=3072,
                                             feature_layers=(9, 3), grid=24, patch=16)),
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
        # the mean of squares in bfloat16 would have 2 or 3 digits, so use float32 or wider
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        # the official order: first the dtype of the input, then the weight (docs/molmo2.md 1.5)
        return wide.to(x.dtype) * self.weight


@cache  # once per device, because a copy in every step would make a GPU wait
def rope_frequencies(config, yarn=False, device="cpu"):
    """(D/2,) float32 radians per position, and the factor on cos and sin (docs/molmo2.md 1.5).

    YaRN (arXiv 2309.00071) keeps the frequency of dimensions that rotate fast, and divides the
    frequency of slow ones by `factor`. Between the two it blends.
    """
    D, theta = config.head_dim, config.rope_theta
    # from 1 radian per token in the first pair of dimensions to nearly 1 / theta in the last
    freq = 1.0 / theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    if not yarn:
        return freq.to(device), 1.0
    y = config.yarn

    # number of the pair of dimensions that makes `rotations` full turns in original_max tokens
    def pair_of(rotations):
        return D * math.log(y.original_max / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(y.beta_fast)), 0)
    # D - 1 as in transformers, although there are only D/2 pairs
    high = min(math.ceil(pair_of(y.beta_slow)), D - 1)
    ramp = (torch.arange(D // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)  # 0: keep the frequency, 1: divide it by the factor
    return (freq / y.factor * stretch + freq * (1 - stretch)).to(device), y.attention_factor


def rope_table(pos, freq, factor):
    """pos (B,T) -> cos, sin (B,T,1,D/2), float32."""
    # float32: bfloat16 has no odd numbers above 256, so some neighbours would be equal
    angle = (pos[..., None].float() * freq)[:, :, None]  # the 1 is for all heads
    return angle.cos() * factor, angle.sin() * factor


def rotate(x, cos, sin):
    """(B,T,H,D) -> the same shape; dimensions i and i + D/2 are one pair that rotates.

    Then the product of q and k depends on the difference of their positions only.
    """
    # Halves, as in the base models. With RoFormer's pairs i, i + 1, the rows of the q and k weights
    # of the base models would have to be permuted.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """The linear layers, norms and RoPE before attention, and the layer `out` after it. Block calls
    `attend` between the two."""

    def __init__(self, config):
        super().__init__()
        self.D = config.head_dim
        self.norm_per_head = config.family == "qwen"
        n_q, n_kv = config.n_head * self.D, config.n_kv_head * self.D
        self.q = nn.Linear(config.n_embd, n_q, bias=False)
        self.k = nn.Linear(config.n_embd, n_kv, bias=False)
        self.v = nn.Linear(config.n_embd, n_kv, bias=False)
        # these norms keep attention scores from growing; nn.Identity ignores its arguments
        norm = nn.Identity if config.family == "llama" else RMSNorm
        self.q_norm = norm(self.D if self.norm_per_head else n_q, config.eps)
        self.k_norm = norm(self.D if self.norm_per_head else n_kv, config.eps)
        self.out = nn.Linear(n_q, config.n_embd, bias=False)

    def forward(self, x, rope):  # (B,T,C) -> q (B,T,H,D), k and v (B,T,G,D)
        B, T, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)  # q (B,T,H*D), k and v (B,T,G*D)
        if not self.norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.view(B, T, -1, self.D) for x in (q, k, v))
        if self.norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        # Under autocast, norms with float32 weights return float32, and v is bfloat16. The kernels
        # and the exchange between ranks need one dtype, and bfloat16 is half as many bytes.
        q, k = (rotate(x, *rope).to(v.dtype) for x in (q, k))
        return q, k, v


class Block(nn.Module):
    """Two parts, `before` and `after`, with attention between them.

    recompute: backward computes the two parts again. Attention, the most expensive function of a
    long row, runs once. For backward the block then keeps x, and 20.5 KiB more per token of the 4B:
    q, k, v and the output of attention. If attention.py reorders the row, it is 8 KiB more.
    """

    def __init__(self, config):
        super().__init__()
        self.norm_after = config.family == "olmo"
        self.attn_norm = RMSNorm(config.n_embd, config.eps)
        self.mlp_norm = RMSNorm(config.n_embd, config.eps)
        self.attn = Attention(config)
        self.mlp = SwiGLU(config.n_embd, config.n_hidden, config.n_embd)

    def forward(self, x, rope, mask, attend, drop, recompute=False):  # (B,T,C) -> (B,T,C)
        if not recompute:
            q, k, v = self.before(x, rope)
            return self.after(x, attend(q, k, v, mask), drop)
        q, k, v = recomputed(self.before, x, rope)
        attended = attend(q, k, v, mask)
        return recomputed(self.after, x, attended, drop, preserve_rng_state=drop is not no_dropout)

    def before(self, x, rope):
        return self.attn(x if self.norm_after else self.attn_norm(x), rope)

    def after(self, x, attended, drop):  # (B,T,C), (B,T,H,D) -> (B,T,C)
        out = self.attn.out(attended.flatten(2))  # the heads are joined again
        # x itself is never normalised, so gradients pass through both sums unchanged
        if self.norm_after:
            x = x + drop(self.attn_norm(out))
            return x + drop(self.mlp_norm(self.mlp(x)))
        x = x + drop(out)
        return x + drop(self.mlp(self.mlp_norm(x)))


def no_dropout(x):
    return x


def dropout(residual, response, has_loss):
    """-> the dropout of a sub-layer's output, before it is added to x (docs/molmo2.md 7.4).

    The probability is `residual`. Where the target has loss, it is `response` if that is larger.
    Stage 1 uses `response` against overfitting to captions, stages 2 and 3 use `residual`.
    has_loss: (B,T) bool.
    """
    if residual == response == 0:
        return no_dropout
    probability = torch.where(has_loss, max(residual, response), residual)[..., None]  # (B,T,1)
    # F.dropout takes one probability for a whole tensor. The division keeps the expected value.
    return lambda x: x * (torch.rand_like(x) >= probability) / (1 - probability)


def compile_for_training(module, method, dynamic):
    # not for evaluation: every prompt has another length, so it would compile again and again
    plain = getattr(module, method)
    compiled = torch.compile(plain, dynamic=dynamic, fullgraph=True)  # one graph, or an error
    setattr(module, method, lambda *inputs: (compiled if module.training else plain)(*inputs))


# --------------------------------------------------------------------------------------------------
# the model


class Molmo2(nn.Module):
    def __init__(self, config):
        super().__init__()
        v = config.vision
        assert config.family in ("qwen", "olmo", "llama"), f"unknown family '{config.family}'"
        assert config.n_head % config.n_kv_head == 0, "query heads must be a multiple of kv heads"
        assert config.head_dim % 2 == 0, f"RoPE needs an even head_dim: {config.head_dim} is odd"
        assert v.n_embd % v.n_head == 0, (
            f"the vision width {v.n_embd} must be a multiple of its {v.n_head} heads")
        assert v.feature_layers and set(v.feature_layers) <= set(range(v.n_layer)), (
            f"a ViT of {v.n_layer} blocks does not have all feature_layers {v.feature_layers}")
        self.config = config
        self.embedding = nn.Embedding(config.n_vocab, config.n_embd)
        # Ids V .. V+127 are special tokens such as <im_patch>. The head has no row for them, so
        # the model cannot generate them. They are trained even if `embedding` is frozen.
        self.extra = nn.Embedding(config.n_extra, config.n_embd)
        self.vision = Vision(config.vision, config.n_hidden, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.eps)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.n_vocab, bias=False)
        # Two functions that parallel.share_rows replaces. `route` sends features to the rank that
        # has their tokens.
        self.attend = attention.attend
        self.route = lambda image_features, batch: image_features
        # apply_recipe in training/setup.py sets these three
        self.residual_dropout = self.response_dropout = 0.0
        self.recompute = 0.0  # share of blocks computed again in backward; 2: see n_recomputed
        # Positions whose logits exist at once. 1,024 times the vocabulary of Qwen in float32 are
        # 0.6 GiB; a row of stage 2 with loss on all of its 16,384 tokens would need 9.3 GiB.
        self.nll_chunk = 1024

    def forward(self, batch):
        """batch -> nll (B,T), lse (B,T) float32; both 0 where batch.weights is 0."""
        return self.nll(self.hidden(batch), batch.targets, batch.labelled)

    def hidden(self, batch):  # -> (B,T,C)
        # made once per batch, and used by all layers
        mask = attention.packed_mask(batch.visible_until, batch.bidir, batch.queries)
        probabilities = (self.residual_dropout, self.response_dropout) if self.training else (0, 0)
        drop = dropout(*probabilities, batch.weights > 0)
        return self.transformer(self.embed(batch), batch.pos, mask, drop=drop)

    def embed_tokens(self, tokens):  # (B,T) -> (B,T,C)
        # Both tables are read for every token, with ids clamped into their range. Then `where`
        # chooses. To select tokens by a mask, the CPU would wait for a GPU to count them.
        V = self.config.n_vocab
        in_vocabulary = self.embedding(tokens.clamp(max=V - 1))
        beyond = self.extra((tokens - V).clamp(min=0))
        return torch.where((tokens < V)[..., None], in_vocabulary, beyond)

    def embed(self, batch):
        """Token embeddings (B,T,C), with the pooled features added at their <im_patch> tokens."""
        x = self.embed_tokens(batch.tokens)
        n = self.n_recomputed()
        image_features = self.vision(batch.images, batch.pool_src, n)  # (M,C) of these crops
        image_features = self.route(image_features, batch).to(x.dtype)
        # The features are added to the embedding of <im_patch> and do not replace it
        # (docs/molmo2.md 1.4). An empty window adds zeros to token 0, which changes nothing.
        return x.flatten(0, 1).index_add(0, batch.pool_dst, image_features).view_as(x)

    def transformer(self, x, pos, mask, attends=None, drop=no_dropout):
        """x (B,T,C), pos (B,T), mask as `attend` takes it -> (B,T,C) after the final norm.

        attends: one attend function per block instead of self.attend. A KV cache needs this, since
        every block has its own keys and values.
        """
        config = self.config
        # cos and sin are the same in every layer, so they are computed once per batch
        plain = rope_table(pos, *rope_frequencies(config, device=pos.device))
        yarn = None
        if config.yarn.layers:
            yarn = rope_table(pos, *rope_frequencies(config, True, pos.device))
        # In backward, the first n_decoder blocks of the decoder are computed again.
        n_decoder = self.n_recomputed() - len(self.vision.vit.blocks)
        for i, block in enumerate(self.blocks):
            rope = yarn if i in config.yarn.layers else plain
            inputs = x, rope, mask, attends[i] if attends else self.attend, drop
            if i < n_decoder and self.recompute > 1:
                x = recomputed(block, *inputs, preserve_rng_state=drop is not no_dropout)
            else:
                x = block(*inputs, i < n_decoder)
        return self.norm(x)

    def n_recomputed(self):
        """The number of blocks that are computed again in backward: first those of the ViT, then of
        the decoder. Backward reaches the first blocks last, when the others are freed.

        `recompute` is their share. 2 means all blocks, and in the decoder attention, too, which
        takes the least memory.
        """
        n = len(self.vision.vit.blocks) + len(self.blocks)
        return round(min(self.recompute, 1) * n) if self.training else 0

    def lm_head(self, x):  # (..,C) -> (..,V)
        return F.linear(x, self.embedding.weight if self.head is None else self.head.weight)

    def logits(self, batch):
        """(B,T,V) for every position: small inputs only."""
        return self.lm_head(self.hidden(batch))

    def nll(self, x, targets, labelled):
        """x (B,T,C), targets (B,T), labelled (L,) flat positions with loss -> nll, lse (B,T).

        The head is applied to these L positions only, and to one chunk of them at a time. Backward
        computes the logits of a chunk again, so a (T,V) tensor never exists.
        """
        # row and column of each of the L positions
        position = labelled // targets.shape[1], labelled % targets.shape[1]
        hidden, target = x[position], targets[position]  # (L,C), (L,)

        # if nothing has loss, L is 0, and split gives one empty chunk
        chunks = zip(hidden.split(self.nll_chunk), target.split(self.nll_chunk), strict=True)
        parts = [recomputed(self.nll_of_chunk, *chunk) for chunk in chunks]
        nll, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        zeros = nll.new_zeros(targets.shape)
        return zeros.index_put(position, nll), zeros.index_put(position, lse)

    def nll_of_chunk(self, hidden, target):  # (n,C), (n,) with n at most nll_chunk -> (n,), (n,)
        logits = self.lm_head(hidden)  # (n,V)
        # float32, because the difference below would have 2 or 3 digits in bfloat16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lse = logits.logsumexp(-1)
        # -log softmax(logits)[target], written out because lse itself is needed too
        return lse - logits.gather(1, target[:, None])[:, 0], lse

    def compile_blocks(self):
        """Compiles the blocks, the connector and the loss for training. Each block is compiled by
        itself, so that one compilation serves all equal blocks.

        Attention is not part of it, because the documents differ from row to row. (B,T) never
        changes in the decoder. dynamic=True: the numbers of crops, of visual tokens and of tokens
        with loss may change without a new compilation.
        """
        for block in self.blocks:
            compile_for_training(block, "before", dynamic=None)
            compile_for_training(block, "after", dynamic=None)
        for block in self.vision.vit.blocks:
            compile_for_training(block, "forward", dynamic=True)
        compile_for_training(self.vision, "connect", dynamic=True)
        compile_for_training(self, "nll_of_chunk", dynamic=True)

    def parameter_groups(self):
        """{group: parameters}; each group has its own learning rate (docs/molmo2.md 10).

        The extra embeddings are new in stage 1, as the connector is, so they belong to its group.
        """
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
        """Draws new weights: normal matrices, biases of 0, norms of 1."""
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std or module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std or 1.0)
        nn.init.normal_(self.vision.vit.pos, std=0.02)
        return self
