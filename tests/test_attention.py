"""Compares the rule of the attention mask with official masks, an older rule and brute force, and
the fast forms of attention with that rule."""

import json
import random
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from tools.bench.attend import rows
from training.log import allowed_pairs

CONFORMANCE = Path(__file__).parent / "conformance"
CASES = json.loads((CONFORMANCE / "attention_mask.json").read_text())["cases"]
# ids in the cases: im_start im_end im_patch im_col low_res_im_start im_low frame_start frame_end
VISUAL = [512, 513, 514, 515, 516, 518, 519, 520]
STARTS = [516, 519]                          # low_res_im_start, frame_start: a new image or frame
PACKS = 50


# --------------------------------------------------------------------------------------------------
# random rows, and the older rule of three integers as a reference


def random_tree(rng, n):
    """The branch number of each of n tokens of an example: 0 in the prefix, then 1, 2, .."""
    prefix = rng.randint(1, n)
    branches = rng.randint(1, 4)
    return [0] * prefix + [1 + i * branches // max(n - prefix, 1) for i in range(n - prefix)]


def random_row(rng, T):
    """-> doc, branch, bidir of a packed row: lists of T integers. Padding is document -1."""
    doc, branch, bidir = [], [], []
    while len(doc) < T - rng.randint(0, T // 4):
        n = min(rng.randint(1, T), T - len(doc))
        tree = random_tree(rng, n)
        images = rng.randint(0, 3)
        first = max(bidir, default=0) + 1
        doc += [max(doc, default=-1) + 1] * n
        branch += tree
        prefix = tree.count(0)
        in_image = [images > 0 and i % 5 > 0 for i in range(prefix)]
        bidir += [first + i * images // prefix if seen else 0 for i, seen in enumerate(in_image)]
        bidir += [0] * (n - prefix)
    padding = T - len(doc)
    return doc + [-1] * padding, branch + [0] * padding, bidir + [0] * padding


def until_of(doc, branch):
    """The position where each token's example (in the prefix) or branch ends; T for padding."""
    ends = {}
    for place, key in enumerate(zip(doc, branch, strict=True), 1):
        ends |= {key[0]: place, key: place}
    return [len(doc) if key[0] < 0 else ends[key if key[1] else key[0]]
            for key in zip(doc, branch, strict=True)]


def pack(rng, B, T):
    """-> visible_until, bidir (B,T) int32, and the mask of the older rule (B,T,T)."""
    rows = [random_row(rng, T) for _ in range(B)]
    until = torch.tensor([until_of(doc, branch) for doc, branch, _ in rows], dtype=torch.int32)
    doc, branch, bidir = torch.tensor(rows, dtype=torch.int32).unbind(1)
    return until, bidir, older_rule(doc, branch, bidir)


def older_rule(doc, branch, bidir):
    same_doc = doc[:, :, None] == doc[:, None]
    visible = (branch[:, None] == 0) | (branch[:, None] == branch[:, :, None])
    both_ways = (bidir[:, :, None] > 0) & (bidir[:, :, None] == bidir[:, None])
    causal = torch.ones(doc.shape[1], doc.shape[1], dtype=torch.bool).tril()
    return same_doc & visible & (causal | both_ways)


def inputs(rng, B, T, dtype=torch.float64, D=8):
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    return [torch.randn(B, T, heads, D, dtype=dtype, generator=generator).requires_grad_()
            for heads in (4, 2, 2)]


def formula(q, k, v, allowed):
    """softmax(q k / sqrt D) v over the allowed keys. Query head h uses kv head h // (H/G)."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    score = score.masked_fill(~allowed[:, None], float("-inf"))
    return torch.einsum("bhts,bshd->bthd", score.softmax(-1), v)


def with_gradients(out, given):
    return [out, *torch.autograd.grad((out.double() ** 2).sum(), given)]


class Observed(TorchDispatchMode):
    """Records the bytes of the largest tensor that is created, and counts calls of attention."""
    largest = 0
    n_attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.n_attention += "scaled_dot_product" in str(func) and "backward" not in str(func)
        for x in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(x):
                self.largest = max(self.largest, x.numel() * x.element_size())
        return out


# --------------------------------------------------------------------------------------------------
# the rule


def official_fields(tokens, sub, both_ways):
    """The official ids of the tokens -> visible_until, bidir, doc, branch (1,T).

    sub: 100000 * example + 10000 in a prefix, or + the branch, from 0; -1 is padding. both_ways:
    the tokens that attend to each other in both directions. None: no tokens. "image_tokens", as
    released: all visual tokens of an example. "within_image": the tokens of one image or frame.
    """
    sub = np.zeros(len(tokens), int) if sub is None else np.array(sub)
    doc = sub // 100000
    is_tree = np.isin(doc, doc[sub % 100000 == 10000])
    branch = np.where(is_tree & (sub % 100000 != 10000), 1 + sub % 100000, 0)
    group = {None: 0, "image_tokens": 1 + doc,
             "within_image": 1 + 1000 * doc + np.cumsum(np.isin(tokens, STARTS))}[both_ways]
    until = until_of(doc.tolist(), branch.tolist())
    fields = np.stack([until, np.isin(tokens, VISUAL) * group, doc, branch])
    return torch.from_numpy(fields).int()[:, None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["input"]["name"])
def test_mask_equals_the_official_code(case):
    c = case["input"]
    until, bidir, *_ = official_fields(c["input_ids"], c["subsegment_ids"], c["bidirectional"])
    ours = attention.allow(until, bidir)[0].int().tolist()
    real = [k for k, token in enumerate(c["input_ids"]) if token != -1]  # without padding
    expected = case["expected"]["allow_rows_as_strings"]
    assert ["".join(map(str, ours[k])) for k in real] == [expected[k] for k in real]


def test_mask_of_a_packed_row_equals_the_official_code():
    with np.load(CONFORMANCE / "tiny.npz") as tiny:
        tokens, sub, packed = tiny["input_ids"], tiny["subsegment_ids"], tiny["allow_mask"]
    expected = np.unpackbits(packed, axis=1, count=len(tokens)).astype(bool)
    until, bidir, *_ = official_fields(tokens, sub, "image_tokens")
    ours = attention.allow(until, bidir)[0].numpy()
    assert np.array_equal(ours[tokens != -1], expected[tokens != -1])


def test_two_integers_give_the_rule_of_three_on_20000_random_rows():
    rng = random.Random(0)
    seen = set()
    for _ in range(20):
        until, bidir, expected = pack(rng, 1000, 16)
        assert torch.equal(attention.allow(until, bidir), expected)
        seen |= {("images", int(bidir.max())), ("branches", len(until.unique()))}
    assert len(seen) > 2


def test_the_rule_gives_the_picture_in_the_docstring():
    text = attention.__doc__
    until, bidir = (re.search(rf"^ +{name}((?: +\d+){{15}})", text, re.M)[1].split()
                    for name in ("visible_until", "bidir"))
    row = torch.tensor([[list(map(int, until))], [list(map(int, bidir))]])
    allowed = attention.allow(*row)[0].tolist()
    drawn = [["#" if cell else "." for cell in row] for row in allowed]
    picture = re.findall(r"^    \S +((?:[#.]  ){14}[#.])", text, re.M)
    assert drawn == [row.split() for row in picture]


def test_allowed_pairs_counts_what_the_rule_allows():
    rng = random.Random(0)
    for _ in range(PACKS):
        until, bidir, expected = pack(rng, 1, 60)
        assert allowed_pairs(until[0].numpy(), bidir[0].numpy()) == expected.sum()
    nothing = np.zeros(0, np.int32)
    assert allowed_pairs(nothing, nothing) == 0


# --------------------------------------------------------------------------------------------------
# attention with this mask


def test_attend_equals_a_plain_softmax_with_grouped_heads():
    torch.manual_seed(0)
    B, T, S, H, G, D = 2, 5, 7, 6, 2, 4      # three query heads use each kv head
    q, k, v = (torch.randn(B, n, heads, D, dtype=torch.float64)
               for n, heads in ((T, H), (S, G), (S, G)))
    mask = torch.rand(B, T, S) < 0.5
    mask[:, :, 0] = True
    expected = torch.zeros(B, T, H, D, dtype=torch.float64)
    for b, t, h in np.ndindex(B, T, H):
        keys, values = k[b, mask[b, t], h // (H // G)], v[b, mask[b, t], h // (H // G)]
        expected[b, t, h] = (keys @ q[b, t, h] / D**0.5).softmax(0) @ values
    assert_close(attention.attend(q, k, v, mask), expected, rtol=0, atol=1e-12)
    assert_close(formula(q, k, v, mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [3, attention.CHUNK])
def test_documents_in_chunks_equal_the_formula(size):
    """Forward and backward. Chunks of 3 cut most documents; chunks of 1024 cut none."""
    rng = random.Random(size)
    cut = 0
    for _ in range(20):
        until, bidir, allowed = pack(rng, 2, 24)
        mask, given = attention.document_mask(until, bidir, size), inputs(rng, 2, 24)
        assert sum(chunks[-1].queries.stop for chunks in mask.documents) == 48
        cut += sum(len(chunks) > 1 for chunks in mask.documents)
        found = with_gradients(attention.attend(*given, mask), given)
        expected = with_gradients(formula(*given, allowed), given)
        assert_close(found, expected, rtol=0, atol=1e-11)
    assert (cut > 20) == (size < attention.CHUNK)


def test_a_chunk_of_one_branch_gets_no_key_of_the_others():
    until = torch.tensor([[30] * 6 + [14] * 8 + [22] * 8 + [30] * 8])
    for chunk in attention.chunk_mask(until, torch.zeros_like(until), slice(0, 30), 4):
        keys = torch.arange(30)[chunk.keys]
        needed = attention.allow(until, torch.zeros_like(until), chunk.queries)[0].any(0).nonzero()
        assert len(keys) <= len(needed) / 0.75


def test_some_queries_of_a_cache_equal_the_whole_mask():
    """Rows contain a tree, padding and an image. Every chunk only gets its own keys."""
    until = torch.tensor([[9] * 5 + [7] * 2 + [9] * 2 + [15] * 6 + [16], [16] * 16])
    bidir = torch.tensor([[0, 1, 1, 1, 0] + [0] * 11, [0] + [1] * 10 + [0] * 5])
    rng = random.Random(0)
    q, k, v = (x.detach() for x in inputs(rng, 2, 16))
    expected = attention.attend(q, k, v, attention.allow(until, bidir))
    for start, stop, size in ((0, 16, 4), (0, 16, 512), (5, 16, 3), (15, 16, 4)):
        rows = slice(start, stop)
        chunks = attention.chunk_mask(until, bidir, rows, size)
        found = attention.attend_chunks(q[:, rows], k, v, chunks)
        assert_close(found, expected[:, rows], rtol=0, atol=1e-12)
    alone = attention.chunk_mask(until[1:], bidir[1:], slice(0, 16), 4)
    assert [chunk.keys.stop for chunk in alone] == [11, 11, 12, 16]
    assert [chunk.mask is None for chunk in alone] == [False, True, False, False]


def test_attention_over_a_row_of_stage_3_makes_no_square_of_its_tokens():
    """The row is one video, and the largest tensor is the mask of a chunk. All sizes are a quarter
    of those in stage 3, which has 36,864 tokens in chunks of 1,024."""
    T, chunk = 36_864 // 4, attention.CHUNK // 4
    place = torch.arange(T)
    bidir = torch.where((place > 0) & (place < T - 600) & (place % 86 < 81), place // 86 + 1, 0)
    until = torch.full((T,), T)
    until[T - 600 : T - 300] = T - 300
    given = [torch.randn(1, T, 1, 8, requires_grad=True) for _ in range(3)]
    with Observed() as made:
        mask = attention.document_mask(until.int()[None], bidir.int()[None], size=chunk)
        attention.attend(*given, mask).sum().backward()
    assert made.largest <= 4 * chunk * T < T * T // 8
    assert sum(chunk.mask.nbytes for chunk in mask.documents[0]) < 0.6 * T * T
    assert all(x.grad.abs().sum() > 0 for x in given)


def test_backward_of_a_long_document_runs_no_attention_again():
    given = inputs(random.Random(0), 1, 64, torch.float32)
    until = torch.full((1, 64), 64)
    mask = attention.document_mask(until, torch.zeros_like(until), size=16)
    with Observed() as observed:
        out = attention.attend(*given, mask)
        assert observed.n_attention == 4
        out.sum().backward()
    assert observed.n_attention == 4
    assert len(mask.documents[0]) == 4


# --------------------------------------------------------------------------------------------------
# FlexAttention


def listed(number, index):
    """Are blocks in the lists of a BlockMask? (B,1,m), (B,1,m,n) -> (B,m,n) bool."""
    first = torch.arange(index.shape[-1]) < number[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter(3, index.long(), first)[:, 0]


def pick(pairs, query, key):
    """(B,T,T) -> (B,t,T): the lines of the positions `query` (B,t), the columns of `key` (B,T)."""
    return pairs[torch.arange(len(pairs))[:, None, None], query[:, :, None], key[:, None]]


def visual_first(bidir):
    """The text before the visual tokens of an example, these tokens, then its other text, .."""
    rows = []
    for numbers in bidir.tolist():
        order = []
        for position, number in enumerate(numbers):
            order.append((max(numbers[: position + 1]), number == 0, position))
        rows.append([position for *_, position in sorted(order)])
    return torch.tensor(rows)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("T", "size", "every"), [(43, 8, 1), (6, 8, 1), (40, 8, 2), (43, 8, 3)])
def test_block_lists_equal_what_the_rule_allows_block_by_block(T, size, every, ordered):
    """Forward uses the lists per query, and backward the lists per key. A rank of several has only
    every second or third block of queries. A block is whole if one half of the rule allows it."""
    rng = random.Random(T)
    kinds = torch.zeros(3)
    queries = torch.cat(torch.arange(T).split(size)[::every])
    t = len(queries)
    m, n = -(-t // size), -(-T // size)

    def blocks(pairs):
        padded = torch.zeros(2, m * size, n * size, dtype=torch.bool)
        padded[:, :t, :T] = pairs
        return padded.unflatten(2, (n, size)).unflatten(1, (m, size)).transpose(2, 3).flatten(3)

    for _ in range(PACKS):
        until, bidir, allowed = pack(rng, 2, T)
        given = None if every == 1 else queries
        made = attention.block_mask(until, bidir, given, size, ordered)
        query, key = queries.expand(2, t), torch.arange(T).expand(2, T)
        if ordered:
            query, key = queries[made.queries[0]], made.keys[0]
            assert torch.equal(key, visual_first(bidir))
            assert torch.equal(query, key[torch.isin(key, queries)].view(2, t))
        causal = attention.allow(until, torch.zeros_like(bidir))
        both_ways = (bidir[:, :, None] == bidir[:, None]) & (bidir[:, None] > 0)
        some = blocks(pick(allowed, query, key)).any(3)
        whole = blocks(pick(causal, query, key)).all(3)
        whole |= blocks(pick(both_ways, query, key)).all(3)
        kinds += torch.tensor([(~some).sum(), (some & ~whole).sum(), whole.sum()])
        mask = made.blocks if ordered else made
        assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), some & ~whole)
        assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), whole)
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices), (some & ~whole).mT)
        assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices), whole.mT)
        pairs = torch.arange(2)[:, None, None], 0, torch.arange(t)[:, None], torch.arange(T)
        assert torch.equal(mask.mask_mod(*pairs), pick(allowed, query, key))
        assert mask.seq_lengths == (t, T)
    assert (kinds > 0).all() or T == 6       # six tokens never fill a block of eight


def flex_by_sdpa(q, k, v, block_mask, enable_gqa):
    """FlexAttention has no backward on a CPU, so tests replace its kernel by SDPA with the rule."""
    place = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    allowed = block_mask.mask_mod(torch.arange(len(q))[:, None, None], 0, *place)[:, None]
    return F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=enable_gqa)


def put_visual_tokens_first(monkeypatch):
    """Rows of any length have the masks of long rows on a GPU."""
    ordered = partial(attention.block_mask, visual_first=True)
    monkeypatch.setattr(attention, "packed_mask", ordered)
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_by_sdpa)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_tokens_are_put_into_the_order_of_the_kernel_and_back(every, ordered, monkeypatch):
    """Forward and backward. A rank may have only every second query."""
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_by_sdpa)
    rng = random.Random(every)
    queries = torch.arange(0, 30, every)
    for _ in range(PACKS):
        until, bidir, allowed = pack(rng, 2, 30)
        q, k, v = given = inputs(rng, 2, 30)
        mask = attention.block_mask(until, bidir, queries, 8, ordered)
        found = with_gradients(attention.attend(q[:, queries], k, v, mask), given)
        expected = with_gradients(formula(*given, allowed)[:, queries], given)
        assert_close(found, expected, rtol=0, atol=1e-11)


def count_blocks(row, ordered):
    """-> number of blocks that are computed, and of those that are allowed in part."""
    mask = attention.block_mask(row.visible_until, row.bidir, visual_first=ordered)
    mask = mask.blocks if ordered else mask
    partial, whole = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
    return torch.tensor([partial + whole, partial])


@pytest.mark.parametrize(("tokens", "count", "before", "after"), [
    (2560, 8, 0.443, 0.425), (16384, 6, 0.442, 0.220),
    pytest.param(36864, 4, 0.505, 0.061, marks=pytest.mark.slow)])
def test_few_blocks_are_allowed_in_part_if_visual_tokens_come_first(tokens, count, before, after):
    """Rows of the stream of tools.bench. With -s this prints the numbers of docs/gpu.md."""
    several = rows(tokens, count)
    for ordered, expected in ((False, before), (True, after)):
        computed, partial = sum(count_blocks(row, ordered) for row in several).tolist()
        order = "visual first" if ordered else "row"
        print(f"{tokens} tokens, {order}: {computed} computed, {partial / computed:.1%} in part")
        assert partial / computed == pytest.approx(expected, abs=0.001)
    mask = attention.block_mask(several[0].visible_until, several[0].bidir)
    assert isinstance(mask, attention.OrderedBlocks) == (tokens > 4096)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling needs C++")
def test_flex_attention_equals_the_formula_and_is_compiled_once():
    """Forward only: FlexAttention has no backward on a CPU. tests/test_cuda.py tests both."""
    rng = random.Random(0)
    attend = torch.compiler.disable(attention.attend)    # FlexAttention is compiled by itself
    before = counters["stats"]["unique_graphs"]
    for _ in range(PACKS):
        until, bidir, allowed = pack(rng, 1, 300)
        given = [x.detach() for x in inputs(rng, 1, 300, torch.float32, 32)]
        out = attend(*given, attention.block_mask(until, bidir, visual_first=True))
        assert_close(out.double(), formula(*given, allowed), rtol=0, atol=2e-5)
    assert counters["stats"]["unique_graphs"] == before + 1
    # No graph may be compiled now. A new length is an error, and T x T scores are not computed.
    mask = attention.block_mask(until[:, :200].clamp(max=200), bidir[:, :200])
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        attend(*(x[:, :200] for x in given), mask)


def test_packed_rows_go_to_flex_attention_where_it_can_be_compiled(monkeypatch):
    class OnCuda(torch.Tensor):
        is_cuda = True

    until = torch.full((1, 16), 16)
    row = until, torch.zeros_like(until)
    assert isinstance(attention.packed_mask(*row), attention.DocumentMask)
    assert attention.packed_mask(*row, torch.tensor([1, 3])).shape == (1, 2, 16)
    row = [f.as_subclass(OnCuda) for f in row]
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    assert isinstance(attention.packed_mask(*row), attention.BlockMask)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert isinstance(attention.packed_mask(*row), attention.DocumentMask)
