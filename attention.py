"""The rule of the attention mask, and attention (paper: Figure 3, packing; docs/molmo2.md 6.3).

in    two integers per token: visible_until and bidir, (B,T) int32
out   which query may attend to which key, (B,T,T) bool, and attention with this mask on (B,T,H,D)

    allow(q, k) = k <= q < visible_until[k]   or   bidir[q] == bidir[k] != 0

    position       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
    tokens         b  I  I  I  Q  A  q  a  b  I  I  t  t  .  .   I visual; QA and qa are branches
    visible_until  8  8  8  8  6  6  8  8 13 13 13 13 13 15 15   first position not to attend to it
    bidir          0  1  1  1  0  0  0  0  0  2  2  0  0  0  0   equal: attend in both directions

    b              #  .  .  .  .  .  .  .  .  .  .  .  .  .  .
    I              #  #  #  #  .  .  .  .  .  .  .  .  .  .  .   an image attends to all of itself
    I              #  #  #  #  .  .  .  .  .  .  .  .  .  .  .
    I              #  #  #  #  .  .  .  .  .  .  .  .  .  .  .
    Q              #  #  #  #  #  .  .  .  .  .  .  .  .  .  .
    A              #  #  #  #  #  #  .  .  .  .  .  .  .  .  .   an answer: prefix and own branch
    q              #  #  #  #  .  .  #  .  .  .  .  .  .  .  .
    a              #  #  #  #  .  .  #  #  .  .  .  .  .  .  .   ... never another branch
    b              .  .  .  .  .  .  .  .  #  .  .  .  .  .  .
    I              .  .  .  .  .  .  .  .  #  #  #  .  .  .  .   ... never another example
    I              .  .  .  .  .  .  .  .  #  #  #  .  .  .  .
    t              .  .  .  .  .  .  .  .  #  #  #  #  .  .  .
    t              .  .  .  .  .  .  .  .  #  #  #  #  #  .  .
    .              .  .  .  .  .  .  .  .  .  .  .  .  .  #  .   padding attends to padding
    .              .  .  .  .  .  .  .  .  .  .  .  .  .  #  #

A row is a packed sequence. This one has two examples and padding. A line of the picture is a query,
a column is a key. The prefix of an example (in code: trunk) is its visual input, and each
annotation is a branch. Later tokens may attend to a prefix until its example ends, and to a branch
until the branch ends. Trees of any depth follow the same rule. "Later" means the position in the
row, not the RoPE position, because all branches of an example have the same RoPE positions.

The official code makes a dense float32 mask, 5.4 GB for the 36,864 tokens of stage 3. Here two
integers per token are enough, and each form of the mask below is made from the rule.
"""

from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Queries per chunk of a long document. In a row of stage 3 the largest tensor is then 151 MB, one
# chunk against all keys (docs/log.md). A document of up to twice as many tokens is one chunk.
CHUNK = 1024


def rule(q, k, visible_until_k, bidir_q, bidir_k):
    """The rule for positions q and k: numbers, or tensors that broadcast -> bool."""
    causal = (k <= q) & (q < visible_until_k)
    # text has bidir 0 and is only causal; otherwise text could attend to all later text
    both_ways = (bidir_q == bidir_k) & (bidir_k != 0)
    return causal | both_ways


def allow(visible_until, bidir, rows=slice(None), keys=slice(None)):
    """The rule for all query-key pairs: two (B,T) integers -> (B,T,T) bool, the dense mask.

    rows and keys, slices or index tensors, choose some of the queries and of the keys.
    """
    position = torch.arange(bidir.shape[1], device=bidir.device, dtype=torch.int32)
    q, k = position[rows][None, :, None], position[keys][None, None]  # (1,T,1), (1,1,T)
    return rule(q, k, visible_until[:, None, keys], bidir[:, rows, None], bidir[:, None, keys])


def allowed_pairs(visible_until, bidir):
    """How many query-key pairs the rule allows in one row, without a T x T mask: (T,) -> int.

    The queries k .. visible_until[k]-1 may attend to key k. In a group of n tokens that attend in
    both directions, n(n-1)/2 pairs have a key after the query; the causal part has all others.
    """
    causal = visible_until - torch.arange(len(visible_until), device=visible_until.device)
    n = bidir[bidir != 0].unique(return_counts=True)[1]
    return int(causal.sum() + (n * (n - 1) // 2).sum())


def packed_mask(visible_until, bidir, queries=None):
    """The mask of packed rows in the fastest form: FlexAttention if it compiles, otherwise chunks.
    queries: (t,) int64, positions of the queries if this rank has only some (parallel.gathered)."""
    if bidir.is_cuda and find_spec("triton") is not None:  # Windows has no triton
        return block_mask(visible_until, bidir, queries)
    if queries is not None:  # `gathered` on a CPU, for tests: a dense mask of t x T
        return allow(visible_until, bidir, queries)
    return document_mask(visible_until, bidir)


def attend(q, k, v, mask):
    """q (B,T,H,D), k and v (B,S,G,D) -> (B,T,H,D); query head h uses kv head h // (H/G).

    mask: (B,T,S) bool, None, or the result of packed_mask. For a DocumentMask this function is
    called again for each chunk, with the mask of the chunk. The KV cache (evaluation/generate.py)
    and Ulysses (parallel.py) are wrappers around this function.
    """
    if isinstance(mask, DocumentMask):
        return attend_documents(q, k, v, mask.documents)
    # No fused CUDA kernel takes a mask and grouped heads. Without fusion SDPA would
    # store all scores (B,H,T,S), so repeat the kv heads, which are much smaller.
    if torch.is_tensor(mask) and q.is_cuda and q.shape[2] > k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B,H,T,D), (B,G,S,D)
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        out = compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=grouped)
    else:
        # (B,1,T,S), one mask for all heads; with 3 dimensions SDPA is slow on a CPU
        mask = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# on a GPU: FlexAttention (arXiv 2412.05496) with lists of blocks
#
# Its kernel skips blocks of 128 x 128 pairs that are not listed, and calls the rule only in blocks
# that are not allowed as a whole. For a row of 36,864 tokens, the lists take 4.2 ms on an H200 and
# 27 ms on a CPU. There it was 48.8 s when every query-key pair was computed (docs/log.md).
#
# A block is needed if one of its pairs is allowed. The causal half of the rule allows one if the
# last query is not before the first key, and the first query is before the highest visible_until.
# A block is whole if all of its pairs are allowed: the first query is not before the
# last key, and the last query is before the lowest visible_until.


def block_mask(visible_until, bidir, queries=None, size=128):
    """(B,T) integers -> BlockMask: which size x size blocks are needed, which of them as a whole.
    queries: (t,) ascending positions of the queries; None: all T.

    For the queries [q0,q1) and keys [k0,k1) of a block:

        needed = q1 > k0 and q0 < max(visible_until[k0:k1]), or their bidir ranges overlap
        whole  = q0 >= k1 - 1 and q1 <= min(visible_until[k0:k1]), or both lie in one bidir group

    This is exact because data.layout keeps the tokens of an example, and of a branch, together, and
    bidir numbers rise along the row. The last block is never whole if the row ends inside it.
    """
    T = bidir.shape[1]
    positions = torch.arange(T, device=bidir.device)
    queries = positions if queries is None else queries

    def blocks(field):  # (.., n) -> (.., blocks, size); the last value fills up the last block
        n = field.shape[-1]
        filled = torch.arange(-(-n // size) * size, device=bidir.device)
        return field[..., filled.clamp(max=n - 1)].unflatten(-1, (-1, size))

    # (B,blocks,size) -> of each block the lowest number except 0 (T + 1 if there is
    # none), the highest, and the number of all its tokens (0 if they differ)
    def group_range(group):
        lowest = group.where(group != 0, T + 1).amin(2)
        highest = group.amax(2)
        return lowest, highest, highest.where(group.amin(2) == highest, 0)

    def is_full(n):  # for each block: does it end within the n positions?
        return torch.arange(size, n + size, size, device=bidir.device) <= n

    query = blocks(queries)  # (m,size)
    key = blocks(positions)  # (n,size)
    # (m,1) for queries against (n,) for keys: below, everything has the shape (B,m,n)
    q0, q1, k0, k1 = query[:, :1], query[:, -1:] + 1, key[:, 0], key[:, -1] + 1
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

    query = query.flatten().int()  # int32, as the other numbers
    until, group_k, group_q = (x.flatten(1) for x in (until, group_k, group_q))

    # FlexAttention compiles this into its kernel; b, h, q and k are indices
    def allowed(b, h, q, k):
        return rule(query[q], k, until[b, k], group_q[b, q], group_k[b, k])

    lists = [*block_list(needed & ~whole), *block_list(whole)]
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size, mask_mod=allowed, seq_lengths=(len(queries), T))


def block_list(blocks):
    """(B,m,n) bool -> how many are True in each line, (B,1,m); column numbers with these first,
    (B,1,m,n). FlexAttention takes lists of one fixed length, and the number that is valid."""
    # a stable sort of 1 and 0 leaves the columns of equal value in their order
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], numbers.int()[:, None]


@cache  # the first call compiles, which takes seconds
def compiled_flex_attention():
    # By default, rows of fewer than 128 tokens use another kernel, which is made for decoding. On
    # an H200 with torch 2.11 its compilation failed.
    flex = partial(flex_attention, kernel_options={"BACKEND": "TRITON"})
    # fullgraph makes a failed compilation an error; uncompiled it would build all T x T scores
    return torch.compile(flex, fullgraph=True)


# --------------------------------------------------------------------------------------------------
# elsewhere: one document after the other, long ones in chunks of queries
#
# On a CPU, SDPA takes a dense mask only, and about half or more of a packed row's mask is False.
# With one dense mask per row, attention takes 1.4 to 1.9 times as long as this code (RESULTS.md).


class Chunk(NamedTuple):
    """Adjacent queries, the keys that any of them may attend to, and the mask between the two."""
    queries: slice
    keys: slice | torch.Tensor       # a range, or (n,) int64 positions
    mask: torch.Tensor | None        # (B,queries,keys) bool; None: all allowed


@dataclass(frozen=True)
class DocumentMask:
    """The documents of all rows. It is a class because torch.compile would compare plain lists, and
    compile again whenever the number of documents differs."""
    documents: list  # of lists of Chunk


def chunk_mask(visible_until, bidir, queries, size=CHUNK):
    """The mask of `queries`, a slice of the T positions, in chunks of `size` -> [Chunk, ..]. The
    queries are those of a document, or the new tokens of a KV cache."""
    position = torch.arange(bidir.shape[1], device=bidir.device)
    chunks = []
    for start in range(queries.start, queries.stop, size):
        rows = slice(start, min(start + size, queries.stop))
        # (B,T): keys that some query of these rows may attend to, by either half of the rule
        needed = (position < rows.stop) & (visible_until > rows.start)
        needed |= torch.isin(bidir, bidir[:, rows].flatten()) & (bidir != 0)
        keys = needed.any(0).nonzero()[:, 0]
        first, stop = int(keys[0]), int(keys[-1]) + 1
        # Selected keys are copied, and a range is only a view. A range that is mostly
        # needed is better, because the mask excludes the other keys anyway.
        if len(keys) > 0.75 * (stop - first):
            keys = slice(first, stop)
        mask = allow(visible_until, bidir, rows, keys)
        # a mask without any False is not needed; often the first query already has a False
        whole = bool(mask[:, 0].all()) and bool(mask.all())
        chunks.append(Chunk(rows, keys, None if whole else mask))
    return chunks


def document_mask(visible_until, bidir, size=CHUNK):
    """(B,T) integers -> DocumentMask. A document is a run of tokens that attend only to each other:
    an example of a packed row, or the padding of the row."""
    documents = []
    for row, until in enumerate(visible_until.tolist()):
        start = 0
        while start < len(until):
            # the first token of a document is in its prefix, so it is visible to the end
            n = until[start] - start
            # None adds a first dimension of size 1, because chunk_mask takes (B,T)
            own = row, None, slice(start, start + n)
            fields = visible_until[own] - start, bidir[own]
            documents.append(chunk_mask(*fields, slice(0, n), size if n > 2 * size else n))
            start += n
    return DocumentMask(documents)


def attend_documents(q, k, v, documents):
    # (B,T,H,D) -> (1,B*T,H,D), split into documents; no document crosses the end of a row
    lengths = [chunks[-1].queries.stop for chunks in documents]
    parts = (x.flatten(0, 1)[None].split(lengths, dim=1) for x in (q, k, v))
    done = [attend_chunks(*part) for part in zip(*parts, documents, strict=True)]
    return torch.cat(done, dim=1).view_as(q)


# Selective activation checkpointing: the outputs of these two kernels of SDPA are kept. The rest of
# a chunk is computed again in backward. Otherwise backward would run attention once more.
save_sdpa_outputs = partial(create_selective_checkpoint_contexts, [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default])


def attend_chunks(q, k, v, chunks):
    """q (B,T,H,D), k and v (B,S,G,D), [Chunk, ..] -> (B,T,H,D), one chunk after the other.

    Each of several chunks is checkpointed. Backward selects the keys again, and turns the mask into
    numbers again, so that neither is stored. SDPA itself does not run again.
    """
    # For a tensor of keys, index_select: its backward is an index_add. With it, a long document in
    # chunks is 1.17 times as fast as a loop over examples, without it 0.90 (docs/log.md).
    def run(q, k, v, keys, mask):
        if torch.is_tensor(keys):
            return attend(q, k.index_select(1, keys), v.index_select(1, keys), mask)
        return attend(q, k[:, keys], v[:, keys], mask)

    if len(chunks) == 1:
        return run(q, k, v, *chunks[0][1:])  # [1:]: keys and mask of the Chunk
    # attention draws no random numbers, so the state of the generator need not be kept
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": save_sdpa_outputs}
    parts = q.split([chunk.queries.stop - chunk.queries.start for chunk in chunks], dim=1)
    return torch.cat([checkpoint(run, part, k, v, *chunk[1:], **options)
                      for part, chunk in zip(parts, chunks, strict=True)], dim=1)
