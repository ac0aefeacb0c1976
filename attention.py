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

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def allow(doc, branch, bidir, rows=slice(None), keys=slice(None)):
    """May query q attend key k? Three (B,T) integers -> (B,T,T) bool; `rows` takes some of the queries only, `keys` of the keys.

    No row is empty: every token sees itself, padding sees padding.
    """
    order = torch.arange(doc.shape[1], device=doc.device)
    q, k = (slice(None), rows, None), (slice(None), None, keys)
    same_doc = doc[q] == doc[k]
    visible = (branch[k] == 0) | (branch[k] == branch[q])
    causal = order[rows, None] >= order[keys]
    both_ways = (bidir[q] > 0) & (bidir[q] == bidir[k])
    return same_doc & visible & (causal | both_ways)


BLOCK = 1024                             # queries of a long document that are worked on at once


@dataclass(frozen=True)
class Long:
    """A document with too many tokens t for a mask (1,t,t): its fields, and blocks of queries with the keys that they may need."""
    fields: tuple                        # doc, branch, bidir, (1,t) each
    blocks: list                         # [(queries, a slice; keys, (n,) int64), ..]

    @property
    def shape(self):
        return self.fields[0].shape


@dataclass(frozen=True)
class Documents:
    """The mask of packed rows without what lies between documents. Not a plain list: a compiled block would be compiled anew for each
    length of it."""
    parts: list                          # one of each document of the rows, in their order: (1,t,t) bool, or Long


def allow_by_document(doc, branch, bidir, size=BLOCK):
    """The same rule without the blocks in which nothing is allowed, for the runs of one document, row after row: masks (1,t,t), or a
    Long where t is more than two blocks of `size`. All of it takes O(T) memory times `size`. -> Documents"""
    new = torch.ones_like(doc, dtype=torch.bool)
    new[:, 1:] = doc[:, 1:] != doc[:, :-1]
    starts = new.flatten().nonzero()[:, 0].tolist()
    lengths = [b - a for a, b in zip(starts, [*starts[1:], doc.numel()], strict=True)]
    runs = zip(*(f.flatten()[None].split(lengths, dim=1) for f in (doc, branch, bidir)), strict=True)
    return Documents([allow(*fields) if fields[0].shape[1] <= 2 * size else long(fields, size) for fields in runs])


def long(fields, size=BLOCK):
    """doc, branch, bidir (1,t) of one document -> Long. A block of queries may need what comes before its end and what sees it both
    ways, of the trunk and of its own branches: a block in one branch skips all others."""
    _, branch, bidir = (f[0] for f in fields)
    order, blocks = torch.arange(len(branch), device=branch.device), []
    for start in range(0, len(branch), size):
        rows = slice(start, min(start + size, len(branch)))
        both_ways = torch.isin(bidir, bidir[rows]) & (bidir > 0)
        keys = ((branch == 0) | torch.isin(branch, branch[rows])) & ((order < rows.stop) | both_ways)
        blocks.append((rows, keys.nonzero()[:, 0]))
    return Long(fields, blocks)


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

    Or mask from allow_by_document: most of a packed row's mask is empty, and kernels compute what is empty too (half of
    the attention of the toy). A seam: a plain function of tensors. The KV cache (tools/generate.py) and the exchange of
    heads between ranks (parallel.py) are wrappers around it. A mask of four dimensions, because with three SDPA falls to
    its slow kernel on CPU (2x).
    """
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


def attend_long(q, k, v, mask):
    """`attend` for a Long, a block of queries after the other, each run again in backward, so that no block's mask outlives it."""

    def block(q, k, v, rows, keys):
        return attend(q[:, rows], k[:, keys], v[:, keys], allow(*mask.fields, rows, keys))

    parts = [checkpoint(block, q, k, v, *at, use_reentrant=False, preserve_rng_state=False) for at in mask.blocks]
    return torch.cat(parts, dim=1)


def draw(doc, branch, bidir, labels=None):
    """A mask as text, one row of the batch: fields (T,) -> lines of '#' (may attend) and '.'; labels: T characters."""
    grid = allow(doc[None], branch[None], bidir[None])[0].tolist()
    labels = labels or ["." if d < 0 else "I" if b else str(j % 10) for d, j, b in
                        zip(doc.tolist(), branch.tolist(), bidir.tolist(), strict=True)]
    lines = ["  " + "".join(labels)]
    lines += [f"{label} " + "".join("#" if cell else "." for cell in row) for label, row in zip(labels, grid, strict=True)]
    return "\n".join(lines)
