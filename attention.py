"""The mask rule, and attention under it (paper: message trees, packing; docs/molmo2.md 6.3).

in    two integers per token: visible_until and bidir, (B,T) int32
out   which query may attend to which key, (B,T,T) bool, and attention under it on (B,T,H,D)

    allow(q, k) = k <= q < visible_until[k]   or   bidir[q] == bidir[k] != 0

    place          0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
    tokens         b  I  I  I  Q  A  q  a  b  I  I  t  t  .  .   I visual, Q A and q a annotations
    visible_until  8  8  8  8  6  6  8  8 13 13 13 13 13 15 15   first place that no longer sees it
    bidir          0  1  1  1  0  0  0  0  0  2  2  0  0  0  0   equal: see each other both ways

    b              #  .  .  .  .  .  .  .  .  .  .  .  .  .  .
    I              #  #  #  #  .  .  .  .  .  .  .  .  .  .  .   an image sees all of itself
    I              #  #  #  #  .  .  .  .  .  .  .  .  .  .  .
    I              #  #  #  #  .  .  .  .  .  .  .  .  .  .  .
    Q              #  #  #  #  #  .  .  .  .  .  .  .  .  .  .
    A              #  #  #  #  #  #  .  .  .  .  .  .  .  .  .   an answer sees trunk and own branch
    q              #  #  #  #  .  .  #  .  .  .  .  .  .  .  .
    a              #  #  #  #  .  .  #  #  .  .  .  .  .  .  .   ... never the other branch
    b              .  .  .  .  .  .  .  .  #  .  .  .  .  .  .
    I              .  .  .  .  .  .  .  .  #  #  #  .  .  .  .   ... never another example
    I              .  .  .  .  .  .  .  .  #  #  #  .  .  .  .
    t              .  .  .  .  .  .  .  .  #  #  #  #  .  .  .
    t              .  .  .  .  .  .  .  .  #  #  #  #  #  .  .
    .              .  .  .  .  .  .  .  .  .  .  .  .  .  #  .   padding sees padding
    .              .  .  .  .  .  .  .  .  .  .  .  .  .  #  #

A token of the trunk is visible until its example ends, a token of a branch until the branch ends.
Trees of any depth follow the same rule. Causality is the order in the row, not the RoPE position,
which branches share.
"""

from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

CHUNK = 1024  # queries of a long document that attend together; up to twice as many are not cut


def rule(q, k, visible_until_k, bidir_q, bidir_k):
    """The rule for places q and k: numbers, or tensors that broadcast -> bool."""
    causal = (k <= q) & (q < visible_until_k)
    both_ways = (bidir_q == bidir_k) & (bidir_k != 0)
    return causal | both_ways


def allow(visible_until, bidir, rows=slice(None), keys=slice(None)):
    """The rule for all pairs: two (B,T) integers -> (B,T,T) bool, the dense mask.

    rows and keys, slices or index tensors, choose some of the queries and of the keys.
    """
    place = torch.arange(bidir.shape[1], device=bidir.device, dtype=torch.int32)
    q, k = place[rows][None, :, None], place[keys][None, None]
    return rule(q, k, visible_until[:, None, keys], bidir[:, rows, None], bidir[:, None, keys])


def allowed_pairs(visible_until, bidir):
    """How many pairs the rule allows in one row, without looking at them: (T,) tensors -> int.

    Key k is seen by the queries k .. visible_until[k]-1. Of n tokens that see each other both ways,
    n(n-1)/2 pairs have the key behind the query.
    """
    causal = visible_until - torch.arange(len(visible_until), device=visible_until.device)
    n = bidir[bidir != 0].unique(return_counts=True)[1]
    return int(causal.sum() + (n * (n - 1) // 2).sum())


def packed_mask(visible_until, bidir, queries=None):
    """The mask of packed rows in the fastest form: FlexAttention where it compiles, else chunks.
    queries: (t,) int64, places of the only queries there are (parallel.gathered)."""
    if bidir.is_cuda and find_spec("triton") is not None:  # Windows has no triton
        return block_mask(visible_until, bidir, queries)
    if queries is not None:
        return allow(visible_until, bidir, queries)
    return document_mask(visible_until, bidir)


def attend(q, k, v, mask):
    """q (B,T,H,D), k and v (B,S,G,D) -> (B,T,H,D); query head h reads kv head h // (H/G).

    mask: (B,T,S) bool, None, or what packed_mask gives; for a DocumentMask each chunk comes here
    again with a mask of its own. The KV cache (evaluation/generate.py) and Ulysses (parallel.py)
    are wrappers around this function.
    """
    if isinstance(mask, DocumentMask):
        return attend_documents(q, k, v, mask.documents)
    if torch.is_tensor(mask) and q.is_cuda and q.shape[2] > k.shape[2]:  # no fused kernel has both
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        out = compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=grouped)
    else:
        mask = None if mask is None else mask[:, None]  # with 3 dimensions SDPA is slow on a CPU
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# on a GPU: FlexAttention with lists of blocks


def block_mask(visible_until, bidir, queries=None, size=128):
    """(B,T) integers -> BlockMask: which size x size blocks are needed, which of them as a whole.
    queries: (t,) ascending places of the queries; None: all T.

    Minima and maxima over a block's queries [q0,q1) and keys [k0,k1) decide, no pair is looked at:

        needed = q1 > k0 and q0 < max(visible_until[k0:k1]), or their bidir ranges overlap
        whole  = q0 >= k1 - 1 and q1 <= min(visible_until[k0:k1]), or both lie in one bidir group

    That is exact in the order of data.layout: an example, and each branch, lies together, and bidir
    numbers rise along the row. A last block that reaches beyond its end is never whole.
    """
    T = bidir.shape[1]
    places = torch.arange(T, device=bidir.device)
    queries = places if queries is None else queries

    def blocks(field):  # (.., n) -> (.., blocks, size); the last value fills the last
        n = field.shape[-1]
        filled = torch.arange(-(-n // size) * size, device=bidir.device)
        return field[..., filled.clamp(max=n - 1)].unflatten(-1, (-1, size))

    def group_range(group):  # lowest number but 0 (T + 1: none), highest, the one of all
        lowest = group.where(group != 0, T + 1).amin(2)
        highest = group.amax(2)
        return lowest, highest, highest.where(group.amin(2) == highest, 0)

    def is_full(n):  # of each block of n places
        return torch.arange(size, n + size, size, device=bidir.device) <= n

    place = blocks(queries)
    key = blocks(places)
    q0, q1, k0, k1 = place[:, :1], place[:, -1:] + 1, key[:, 0], key[:, -1] + 1
    until = blocks(visible_until)
    group_k = blocks(bidir)
    group_q = blocks(bidir[:, queries])
    lowest_q, highest_q, single_q = (x[:, :, None] for x in group_range(group_q))
    lowest_k, highest_k, single_k = (x[:, None] for x in group_range(group_k))
    overlap = (lowest_q <= highest_k) & (lowest_k <= highest_q)
    needed = (q1 > k0) & (q0 < until.amax(2)[:, None]) | overlap

    same_group = (single_q == single_k) & (single_k != 0)
    whole = (q0 >= k1 - 1) & (q1 <= until.amin(2)[:, None]) | same_group
    whole &= is_full(len(queries))[:, None] & is_full(T)

    place = place.flatten()
    until, group_k, group_q = (x.flatten(1) for x in (until, group_k, group_q))

    def allowed(b, h, q, k):
        return rule(place[q], k, until[b, k], group_q[b, q], group_k[b, k])

    lists = [*block_list(needed & ~whole), *block_list(whole)]
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size, mask_mod=allowed, seq_lengths=(len(queries), T))


def block_list(blocks):
    """(B,m,n) bool -> how many in each row of blocks, (B,1,m); their numbers first, (B,1,m,n)."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], numbers.int()[:, None]


@cache  # compiled at the first call: that takes seconds
def compiled_flex_attention():  # fullgraph: uncompiled it would build all T x T scores
    return torch.compile(flex_attention, fullgraph=True)


# --------------------------------------------------------------------------------------------------
# elsewhere: one document after the other, long ones in chunks of queries


class Chunk(NamedTuple):
    """A run of queries, the keys that any of them may attend to, and the mask between the two."""
    queries: slice
    keys: slice | torch.Tensor       # a range, or (n,) int64 places
    mask: torch.Tensor | None        # (B,queries,keys) bool; None: all allowed


@dataclass(frozen=True)
class DocumentMask:
    """A class, so that torch.compile does not compare the lists, which always differ."""
    documents: list  # of all rows, each a list of Chunk


def chunk_mask(visible_until, bidir, queries, size=CHUNK):
    """The mask of `queries`, a slice of the T places, in chunks of `size` -> [Chunk, ..]: those of
    a document, or the new tokens of the KV cache."""
    place = torch.arange(bidir.shape[1], device=bidir.device)
    chunks = []
    for start in range(queries.start, queries.stop, size):
        rows = slice(start, min(start + size, queries.stop))
        needed = (place < rows.stop) & (visible_until > rows.start)
        needed |= torch.isin(bidir, bidir[:, rows].flatten()) & (bidir != 0)
        keys = needed.any(0).nonzero()[:, 0]
        first, stop = int(keys[0]), int(keys[-1]) + 1
        if len(keys) > 0.75 * (stop - first):  # a range is a view; the mask excludes the others
            keys = slice(first, stop)
        mask = allow(visible_until, bidir, rows, keys)
        whole = bool(mask[:, 0].all()) and bool(mask.all())  # the first query often decides
        chunks.append(Chunk(rows, keys, None if whole else mask))
    return chunks


def document_mask(visible_until, bidir, size=CHUNK):
    """(B,T) integers -> DocumentMask: a document is a run of tokens that see nothing outside it."""
    documents = []
    for row, until in enumerate(visible_until.tolist()):
        start = 0
        while start < len(until):  # its first token is visible to its document's end
            n = until[start] - start
            own = row, None, slice(start, start + n)
            fields = visible_until[own] - start, bidir[own]
            documents.append(chunk_mask(*fields, slice(0, n), size if n > 2 * size else n))
            start += n
    return DocumentMask(documents)


def attend_documents(q, k, v, documents):
    lengths = [chunks[-1].queries.stop for chunks in documents]
    parts = (x.flatten(0, 1)[None].split(lengths, dim=1) for x in (q, k, v))
    done = [attend_chunks(*part) for part in zip(*parts, documents, strict=True)]
    return torch.cat(done, dim=1).view_as(q)


# selective checkpointing: outputs of SDPA's kernels are kept, the rest of a chunk is recomputed
save_sdpa_outputs = partial(create_selective_checkpoint_contexts, [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default])


def attend_chunks(q, k, v, chunks):
    """q (B,T,H,D), k and v (B,S,G,D), [Chunk, ..] -> (B,T,H,D), one chunk after the other.

    Several chunks are checkpointed one by one: backward selects the keys and turns the mask into
    numbers again, so that neither is stored. SDPA itself does not run again.
    """
    def run(q, k, v, keys, mask):
        if torch.is_tensor(keys):
            return attend(q, k.index_select(1, keys), v.index_select(1, keys), mask)
        return attend(q, k[:, keys], v[:, keys], mask)

    if len(chunks) == 1:
        return run(q, k, v, *chunks[0][1:])
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": save_sdpa_outputs}
    parts = q.split([chunk.queries.stop - chunk.queries.start for chunk in chunks], dim=1)
    return torch.cat([checkpoint(run, part, k, v, *chunk[1:], **options)
                      for part, chunk in zip(parts, chunks, strict=True)], dim=1)
