"""Every fast way to attend in packed rows against the formula in float64, on random packs of message trees."""

import copy
import shutil
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import attention
import packing
import train
from tests.test_attention import Allocated
from tests.tools.test_memory import SMALL, batch_of, config_of, model_of

PACKS = 200


def pack(rng, B, T):
    """Rows of examples: trunks with images and text between them, some branches, padding. -> doc, branch, bidir (B,T)"""
    def upto(n):
        return int(torch.randint(1, n + 1, (1,), generator=rng))

    doc, branch, bidir = torch.full((B, T), -1, dtype=torch.int32), *torch.zeros(2, B, T, dtype=torch.int32)
    for b in range(B):
        at, example = 0, 0
        while at < T - upto(T // 4):
            n = min(upto(T), T - at)
            trunk, images = upto(n), upto(3)
            doc[b, at : at + n] = example
            order = torch.arange(trunk, dtype=torch.int32)
            bidir[b, at : at + trunk] = (order * images // trunk + 1) * (order % 5 > 0)
            order = torch.arange(n - trunk, dtype=torch.int32)
            branch[b, at + trunk : at + n] = order * upto(4) // max(n - trunk, 1) + 1
            at, example = at + n, example + 1
    return doc, branch, bidir


def inputs(rng, B, T, dtype=torch.float64, D=8):
    return [torch.randn(B, T, heads, D, dtype=dtype, generator=rng).requires_grad_() for heads in (4, 2, 2)]


def formula(q, k, v, allowed):
    """softmax(q k / sqrt D) v over the allowed keys, query head h with kv head h // (H/G), in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhts,bshd->bthd", score.masked_fill(~allowed[:, None], float("-inf")).softmax(-1), v)


def with_gradients(out, given):
    return [out, *torch.autograd.grad((out.double() ** 2).sum(), given)]


def test_the_area_is_the_number_of_pairs_allowed():
    rng = torch.Generator().manual_seed(0)
    for _ in range(PACKS):
        for fields in zip(*pack(rng, 2, 60), strict=True):
            doc, branch, bidir = (f.numpy() for f in fields)
            for d in range(doc.max() + 1):
                one = [f[fields[0] == d][None] for f in fields]
                assert attention.area(branch[doc == d], bidir[doc == d]) == attention.allow(*one).sum()
    assert attention.area(np.zeros(0, np.int32), np.zeros(0, np.int32)) == 0


def test_a_pack_is_what_it_says():
    rng, seen = torch.Generator().manual_seed(0), set()
    for _ in range(PACKS):
        doc, branch, bidir = pack(rng, 2, 40)
        assert (doc.diff() >= 0).logical_or(doc[:, 1:] == -1).all() and not bidir[branch > 0].any() and not (branch + bidir)[doc < 0].any()
        seen |= {(name, int(f.max())) for name, f in (("examples", doc), ("branches", branch), ("images", bidir), ("padding", doc < 0))}
    assert {("examples", 0), ("examples", 3), ("branches", 4), ("images", 3), ("padding", 0), ("padding", 1)} <= seen


@pytest.mark.parametrize("size", [3, 8, attention.BLOCK])
def test_documents_and_blocks_of_queries_equal_the_formula(size):
    """Forward and backward; of 3 or 8 tokens, most documents go in blocks of queries, of 1024 none."""
    rng, long = torch.Generator().manual_seed(size), 0
    for _ in range(PACKS):
        row = pack(rng, 2, 40)
        mask, given = attention.allow_by_document(*row, size), inputs(rng, 2, 40)
        long += sum(isinstance(part, attention.Long) for part in mask.parts)
        found = with_gradients(attention.attend(*given, mask), given)
        for a, b in zip(found, with_gradients(formula(*given, attention.allow(*row)), given), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    assert (long > PACKS / 2) == (size < attention.BLOCK)


@pytest.mark.parametrize(("T", "size", "strip"), [(40, 8, 2**24), (43, 8, 1000), (37, 5, 1), (6, 8, 100)])
def test_blocks_hold_what_the_rule_allows(T, size, strip):
    """Those of a query, which forward reads, and those of a key, which backward reads; nowhere is a part taken for the whole."""
    rng, kinds = torch.Generator().manual_seed(T), torch.zeros(3)
    for _ in range(PACKS):
        row = pack(rng, 2, T)
        mask, n = attention.allow_by_blocks(*row, size, strip), -(-T // size)
        padded = torch.zeros(2, n * size, n * size, dtype=torch.bool)
        padded[:, :T, :T] = attention.allow(*row)
        blocks = padded.unflatten(2, (n, size)).unflatten(1, (n, size))
        some, every = blocks.any(4).any(2), blocks.all(4).all(2)
        kinds += torch.tensor([(~some).sum(), (some & ~every).sum(), every.sum()])

        def listed(number, index, n=n):
            found = torch.zeros(2, n, n, dtype=torch.bool)
            for b, i in torch.cartesian_prod(torch.arange(2), torch.arange(n)).tolist():
                found[b, i, index[b, 0, i, : number[b, 0, i]].long()] = True
            return found

        assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), some & ~every)
        assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), every)
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices), (some & ~every).mT)
        assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices), every.mT)
        pairs = torch.arange(2)[:, None, None], 0, torch.arange(T)[:, None], torch.arange(T)
        assert torch.equal(mask.mask_mod(*pairs), attention.allow(*row))
        assert mask.seq_lengths == (T, T)
    assert (kinds > 0).all() or T == 6       # of six tokens in a block of eight, all lie in one, which is never whole


DEVICES = (pytest.param("cpu", marks=pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")),
           pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")))


@pytest.mark.parametrize("device", DEVICES)
def test_flex_attention_equals_the_formula_in_200_packs_and_is_compiled_once(device):
    """Forward in float32, on CUDA backward too: it has none on CPU. Called as a compiled model calls it, from outside of its graph."""
    rng = torch.Generator().manual_seed(0)
    attend, before = torch.compiler.disable(attention.attend), counters["stats"]["unique_graphs"]
    for _ in range(PACKS):
        row, given = pack(rng, 1, 300), inputs(rng, 1, 300, torch.float32, 32)
        moved = [x.detach().to(device).requires_grad_(device == "cuda") for x in given]
        mask = attention.allow_by_blocks(*(f.to(device) for f in row))
        out = attend(*moved, mask)
        expected = formula(*given, attention.allow(*row))
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-5 if device == "cpu" else 5e-3)       # TF32
        if device == "cuda":
            for a, b in zip(with_gradients(out, moved)[1:], with_gradients(expected, given)[1:], strict=True):
                torch.testing.assert_close(a.cpu().double(), b.double(), rtol=0, atol=5e-2)
    assert counters["stats"]["unique_graphs"] == before + 1
    # of another length, where no more may be compiled: an error, and not all T x T scores
    mask = attention.allow_by_blocks(*(f[:, :200].to(device) for f in row))
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        attend(*(x[:, :200] for x in moved), mask)


def test_autocast_reaches_what_flex_attention_is_given(monkeypatch):
    """q and k come from norms in float32, v from a product in bfloat16."""
    given = []
    monkeypatch.setattr(attention, "compiled_flex", lambda: lambda *x, **how: (given.extend(y.dtype for y in x), x[0])[1])
    q, k, v = inputs(torch.Generator(), 1, 16, torch.float32)
    mask = attention.allow_by_blocks(*torch.zeros(3, 1, 16, dtype=torch.int32))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.attend(q, k, v.bfloat16(), mask)
    attention.attend(q, k, v, mask)
    assert given == [torch.bfloat16] * 3 + [torch.float32] * 3 and out.shape == q.shape


@pytest.mark.slow
def test_blocks_of_a_row_of_stage_3_are_found_without_its_square():
    T = 36_864
    doc = torch.arange(T, dtype=torch.int32)[None] // 9000
    branch = (torch.arange(T, dtype=torch.int32)[None] % 9000 > 8000).int()
    with Allocated() as made:
        mask = attention.allow_by_blocks(doc, branch, torch.zeros_like(doc))
    assert made.largest <= 2**24 < T * T / 80
    n = T // 128
    assert 0 < mask.full_kv_num_blocks.sum() < mask.full_kv_num_blocks.sum() + mask.kv_num_blocks.sum() < n * n / 6


def test_backward_of_a_long_document_runs_no_attention_again():
    """Its result is kept; only masks are turned into numbers again."""

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            self.n += "scaled_dot_product" in str(f) and "backward" not in str(f)
            return f(*args, **(kwargs or {}))

    given = inputs(torch.Generator().manual_seed(0), 1, 64, torch.float32)
    mask = attention.allow_by_document(*torch.zeros(3, 1, 64, dtype=torch.int32), size=16)
    with Count() as counted:
        out = attention.attend(*given, mask)
        assert counted.n == 4
        out.sum().backward()
    assert counted.n == 4 and len(mask.parts[0].blocks) == 4


@pytest.mark.slow
def test_compiled_blocks_that_run_again_take_a_new_block_mask_every_step(monkeypatch):
    """As on CUDA, with SDPA under what the BlockMask says in place of its kernel: the gradients are those of plain blocks and documents."""
    def by_sdpa(q, k, v, block_mask, enable_gqa):
        B, T = q.shape[0], q.shape[2]
        allowed = block_mask.mask_mod(torch.arange(B)[:, None, None], 0, torch.arange(T)[:, None], torch.arange(T))
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], enable_gqa=enable_gqa)

    config, found = config_of(SMALL, activation_checkpointing=True, response_dropout=0.0), []
    for blocks in (False, True):
        torch.manual_seed(0)
        model, batch = model_of(config).train(), batch_of(config)
        if blocks:
            monkeypatch.setattr(attention, "packed_mask", attention.allow_by_blocks)
            monkeypatch.setattr(attention, "compiled_flex", lambda: by_sdpa)
            model.compile_blocks()
        for t in (48, 32, 96):
            model.zero_grad()
            model(replace(batch, doc=(torch.arange(96) // t).int().repeat(2, 1)))[0].sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, compiled in zip(found[:3], found[3:], strict=True):
        for a, b in zip(plain, compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(a.abs().max() + 1))


def test_packed_rows_go_to_flex_attention_where_it_can_be_compiled(monkeypatch):
    row = torch.zeros(3, 1, 16, dtype=torch.int32)
    assert isinstance(attention.packed_mask(*row), attention.Documents)

    class OnCuda(torch.Tensor):
        is_cuda = True

    row = [f.as_subclass(OnCuda) for f in row]
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    assert isinstance(attention.packed_mask(*row), attention.BlockMask)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert isinstance(attention.packed_mask(*row), attention.Documents)


@pytest.mark.slow
def test_fifty_different_packs_of_films_and_pictures_are_compiled_once():
    """Forward and backward with blocks that run again; after the second pack compiling is an error. Losses are those of plain blocks."""
    args, config = train.parse(["--stage", "2", "--tiny", "--batch", "1", "--data.max_tokens=512", "--pack_crops=16", "--crop_bucket=8"])
    sources, rates, _ = train.open_sources(args, config)
    plain, tokenizer, config = train.open_model(args, config)
    compiled = copy.deepcopy(plain)
    compiled.compile_blocks()
    plain.activation_checkpointing = compiled.activation_checkpointing = True
    compiled.uncheckpointed_blocks = 1
    loader, shapes = train.Loader(sources, rates, tokenizer, config), set()
    loader.begin()
    try:
        for number, (_, micro_batches) in enumerate(islice(loader, 50)):
            batch = packing.collate(*micro_batches, 512, config.data.vision, config.crop_bucket)
            torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default")
            found = compiled(batch)[0]
            (batch.weights * found).sum().backward()
            shapes.add((len(batch.images), tuple(batch.pool_src.shape), len(batch.labelled), int(batch.doc.max())))
            if number % 10 == 9:
                assert torch.allclose(found, plain(batch)[0], atol=1e-4)
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
    assert len(shapes) > 40
