"""The one mask rule, and attention under it (paper: message trees, packing; spec 6.3).

in    three integers per token: doc, branch, bidir (B,T) int32
out   which query may attend which key, (B,T,T) bool, and attention with it on (B,T,H,D)

    tokens    b  I  I  I  Q  A  q  a  b  I  I  t  t  .  .    b BOS, I visual token, Q A / q a two annotations of it
    doc       0  0  0  0  0  0  0  0  1  1  1  1  1 -1 -1    packed example; padding is a document of its own
    branch    0  0  0  0  1  1  2  2  0  0  0  0  0  0  0    0 the shared trunk, j the j-th annotation of the tree
    bidir     0  1  1  1  0  0  0  0  0  1  1  0  0  0  0    equal non-zero ids see each other both ways

      I       #  #  #  #  .  .  .  .  .  .  .  .  .  .  .    an image sees all of itself
      A       #  #  #  #  #  #  .  .  .  .  .  .  .  .  .    an answer sees the trunk and its own branch
      a       #  #  #  #  .  .  #  #  .  .  .  .  .  .  .    ... never the other branch
      t       .  .  .  .  .  .  .  .  #  #  #  #  .  .  .    ... never another example

Causality is the order in the row, not `pos`: branches share positions. The official code reaches the same mask
with two magic numbers and an inequality (spec 6.3); conformance/attention_mask.json says that both agree.
"""

from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def may_attend(query, key):
    """The rule. A query and a key, each (place in the row, doc, branch, bidir), numbers or tensors of them -> bool."""
    (at, doc, branch, bidir), (key_at, key_doc, key_branch, key_bidir) = query, key
    visible = (key_branch == 0) | (key_branch == branch)
    both_ways = (bidir > 0) & (bidir == key_bidir)
    return (doc == key_doc) & visible & ((at >= key_at) | both_ways)


def allow(doc, branch, bidir, rows=slice(None), keys=slice(None)):
    """The rule for all pairs: three (B,T) integers -> (B,T,T) bool; `rows` takes some of the queries only, `keys` of the keys.

    No row is empty: every token sees itself, padding sees padding.
    """
    fields = torch.arange(doc.shape[1], device=doc.device)[None], doc, branch, bidir
    return may_attend([f[:, rows, None] for f in fields], [f[:, None, keys] for f in fields])


def area(branch, bidir):
    """How many pairs of one example the rule allows: its (t,) numpy integers, trunk first -> int, without looking at the pairs."""
    of_branch = np.bincount(branch)[1:]
    key = branch.astype(np.int64) * (bidir.max(initial=0) + 1) + bidir
    _, both_ways = np.unique(key[bidir > 0], return_counts=True)
    earlier = np.cumsum(branch == 0).sum() + (of_branch * (of_branch + 1) // 2).sum()    # in the trunk; in the own branch; each sees itself
    return int(earlier + (both_ways * (both_ways - 1) // 2).sum())                       # and what comes later


def packed_mask(doc, branch, bidir):
    """The mask of packed rows as this machine attends fastest: blocks for FlexAttention where it can be compiled, else documents."""
    flex = doc.is_cuda and find_spec("triton") is not None               # there is none on Windows
    return (allow_by_blocks if flex else allow_by_document)(doc, branch, bidir)


# ---------------------------------------------------------------------------------------------------------------
# masks of packed rows without most of what is empty


def allow_by_blocks(doc, branch, bidir, size=128, strip=2**24):
    """The same rule for FlexAttention: which blocks of size x size pairs are allowed, which in part, and the rule for these. -> BlockMask

    A strip of `strip` pairs is looked at at a time: no (T,T) tensor. Once per batch, for all layers.
    """
    B, T = doc.shape
    n, fields, partly, wholly = -(-T // size), [], [], []
    for f, beyond in ((doc, -2), (branch, 0), (bidir, 0)):               # what fills the last block is a document of its own
        fields.append(F.pad(f, (0, n * size - T), value=beyond))
    high = max(strip // (B * n * size * size), 1) * size
    for start in range(0, n * size, high):
        pairs = allow(*fields, slice(start, start + high)).unflatten(2, (n, size)).unflatten(1, (-1, size))          # (B,r,size,n,size)
        some, every = pairs.any(4).any(2), pairs.all(4).all(2)
        partly.append(some & ~every)
        wholly.append(every)

    def listed(blocks):                  # (B,n,n) bool -> how many of each row (B,1,n), and which come first (B,1,n,n)
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

    def rule(b, h, q, k):
        return may_attend((q, *(f[b, q] for f in fields)), (k, *(f[b, k] for f in fields)))

    blocks = [part for parts in (partly, wholly) for part in listed(torch.cat(parts, dim=1))]
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(T, T))


BLOCK = 1024                             # queries of a long document that are worked on at once


@dataclass(frozen=True)
class Long:
    """The mask of a document with too many tokens t for one of (1,t,t): blocks of queries, each with the keys that it may need. A byte
    for each such pair: at 36,864 tokens that all see each other 1.4 GB, in pieces of 38 MB."""
    shape: tuple                         # (1,t)
    blocks: list                         # [(queries, a slice; keys (n,) int64; mask (1,queries,n) bool), ..]


@dataclass(frozen=True)
class Documents:
    """The mask of packed rows without what lies between documents. Not a plain list: a compiled block would be compiled anew for each
    length of it."""
    parts: list                          # one of each document of the rows, in their order: (1,t,t) bool, or Long


def allow_by_document(doc, branch, bidir, size=BLOCK):
    """The same rule without the blocks in which nothing is allowed, for the runs of one document, row after row: masks (1,t,t), or a
    Long where t is more than two blocks of `size`. Once per batch, for all layers. -> Documents"""
    new = torch.ones_like(doc, dtype=torch.bool)
    new[:, 1:] = doc[:, 1:] != doc[:, :-1]
    starts = new.flatten().nonzero()[:, 0].tolist()
    lengths = [b - a for a, b in zip(starts, [*starts[1:], doc.numel()], strict=True)]
    runs = zip(*(f.flatten()[None].split(lengths, dim=1) for f in (doc, branch, bidir)), strict=True)
    return Documents([allow(*fields) if fields[0].shape[1] <= 2 * size else long(fields, size) for fields in runs])


def long(fields, size=BLOCK):
    """doc, branch, bidir (1,t) of one document -> Long. A block of queries may need what comes before its end and what sees it both
    ways, of the trunk and of its own branches: a block in one branch skips all others. What lies outside of the block is seen alike by
    all queries of one branch and bidir: one of them is asked for all."""
    _, branch, bidir = (f[0] for f in fields)
    order, blocks = torch.arange(len(branch), device=branch.device), []
    for start in range(0, len(branch), size):
        rows = slice(start, min(start + size, len(branch)))
        both_ways = torch.isin(bidir, bidir[rows]) & (bidir > 0)
        keys = ((branch == 0) | torch.isin(branch, branch[rows])) & ((order < rows.stop) | both_ways)
        keys = keys.nonzero()[:, 0]
        kinds, kind = torch.stack([branch[rows], bidir[rows]]).unique(dim=1, return_inverse=True)
        one = order.new_empty(kinds.shape[1]).scatter_(0, kind, order[rows])             # of each kind, whichever
        mask = allow(*fields, one, keys)[:, kind]
        before = int((keys < start).sum())
        mask[:, :, before : before + rows.stop - start] = allow(*fields, rows, rows)
        blocks.append((rows, keys, mask))
    return Long(branch[None].shape, blocks)


def allow_by_rows(doc, branch, bidir, rows, size=512):
    """The same rule for the queries `rows` (a slice), a block of them at a time: [(queries of the block, counted from the first, number
    of keys up to the last that any of them may attend, mask (B,t,keys), or None where all of it is allowed), ..]."""
    parts = []
    for start in range(rows.start, rows.stop, size):
        block = slice(start, min(start + size, rows.stop))
        mask = allow(doc, branch, bidir, block)
        keys = int(mask.any(1).any(0).nonzero()[-1]) + 1
        mask = mask[:, :, :keys]
        parts.append((slice(block.start - rows.start, block.stop - rows.start), keys, None if bool(mask.all()) else mask))
    return parts


def attend(q, k, v, mask):
    """q (B,T,H,D), k and v (B,S,G,D), mask (B,T,S) bool or None -> (B,T,H,D); query head h reads kv head h // (H/G).

    Or mask from packed_mask: most of a packed row's mask is empty, and SDPA computes what is empty too (half of the
    attention of the toy). A seam: a plain function of tensors. The KV cache (tools/generate.py) and the exchange of
    heads between ranks (parallel.py) are wrappers around it. A mask of four dimensions, because with three SDPA falls to
    its slow kernel on CPU (2x).
    """
    if isinstance(mask, BlockMask):
        return attend_flex(q, k, v, mask)
    if isinstance(mask, Documents):
        lengths = [m.shape[1] for m in mask.parts]
        runs = zip(*(x.flatten(0, 1)[None].split(lengths, dim=1) for x in (q, k, v)), mask.parts, strict=True)
        return torch.cat([attend(*run) for run in runs], dim=1).view_as(q)
    if isinstance(mask, Long):
        return attend_long(q, k, v, mask)
    if mask is not None and q.is_cuda:   # the fused kernels there know masks or grouped heads, not both
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@cache
def compiled_flex():
    """Compiled when it is first called: to import a compiler costs seconds. Once for the length of a run's rows, anew for other shapes; and
    where those are too many an error, since without fullgraph it would silently run as written, with all T x T scores."""
    return torch.compile(flex_attention, fullgraph=True)


def attend_flex(q, k, v, mask):
    """`attend` under a BlockMask, in the dtype of autocast, which reaches q and k only behind their norms and not in all versions."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


# what backward does not compute again (unless the whole block runs again): the result of SDPA and its logsumexp, of these two kernels
kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
                                                      torch.ops.aten._scaled_dot_product_efficient_attention.default])


def attend_long(q, k, v, mask):
    """`attend` for a Long, a block of queries after the other. Backward picks each block's keys again, and turns its mask into numbers
    again, as SDPA does in every layer, so that neither outlives the block."""

    def block(q, k, v, rows, keys, mask):
        return attend(q[:, rows], k.index_select(1, keys), v.index_select(1, keys), mask)

    how = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": kept}
    return torch.cat([checkpoint(block, q, k, v, *at, **how) for at in mask.blocks], dim=1)


def draw(doc, branch, bidir, labels=None):
    """A mask as text, one row of the batch: fields (T,) -> lines of '#' (may attend) and '.'; labels: T characters."""
    grid = allow(doc[None], branch[None], bidir[None])[0].tolist()
    labels = labels or ["." if d < 0 else "I" if b else str(j % 10) for d, j, b in
                        zip(doc.tolist(), branch.tolist(), bidir.tolist(), strict=True)]
    lines = ["  " + "".join(labels)]
    lines += [f"{label} " + "".join("#" if cell else "." for cell in row) for label, row in zip(labels, grid, strict=True)]
    return "\n".join(lines)
