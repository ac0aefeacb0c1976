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

import torch
import torch.nn.functional as F


def allow(doc, branch, bidir, rows=slice(None)):
    """May query q attend key k? Three (B,T) integers -> (B,T,T) bool; `rows` takes some of the queries only.

    No row is empty: every token sees itself, padding sees padding.
    """
    order = torch.arange(doc.shape[1], device=doc.device)
    q, k = (slice(None), rows, None), (slice(None), None)
    same_doc = doc[q] == doc[k]
    visible = (branch[k] == 0) | (branch[k] == branch[q])
    causal = order[rows, None] >= order
    both_ways = (bidir[q] > 0) & (bidir[q] == bidir[k])
    return same_doc & visible & (causal | both_ways)


def allow_by_document(doc, branch, bidir):
    """The same rule without the blocks in which nothing is allowed: masks (1,t,t) of the runs of one document, row after row."""
    new = torch.ones_like(doc, dtype=torch.bool)
    new[:, 1:] = doc[:, 1:] != doc[:, :-1]
    starts = new.flatten().nonzero()[:, 0].tolist()
    lengths = [b - a for a, b in zip(starts, [*starts[1:], doc.numel()], strict=True)]
    return [allow(*(f[None] for f in fields)) for fields in zip(*(f.flatten().split(lengths) for f in (doc, branch, bidir)), strict=True)]


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

    Or mask from allow_by_document: most of a packed row's mask is empty, and CPU kernels compute what is empty too
    (half of the attention of the toy). A seam: a plain function of tensors. The KV cache (tools/generate.py) is a
    wrapper around it, and so will be anything that exchanges heads between ranks. A mask of four dimensions, because
    with three SDPA falls to its slow kernel on CPU (2x).
    """
    if isinstance(mask, list):
        lengths = [m.shape[1] for m in mask]
        runs = zip(*(x.flatten(0, 1)[None].split(lengths, dim=1) for x in (q, k, v)), mask, strict=True)
        return torch.cat([attend(*run) for run in runs], dim=1).view_as(q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def draw(doc, branch, bidir, labels=None):
    """A mask as text, one row of the batch: fields (T,) -> lines of '#' (may attend) and '.'; labels: T characters."""
    grid = allow(doc[None], branch[None], bidir[None])[0].tolist()
    labels = labels or ["." if d < 0 else "I" if b else str(j % 10) for d, j, b in
                        zip(doc.tolist(), branch.tolist(), bidir.tolist(), strict=True)]
    lines = ["  " + "".join(labels)]
    lines += [f"{label} " + "".join("#" if cell else "." for cell in row) for label, row in zip(labels, grid, strict=True)]
    return "\n".join(lines)
