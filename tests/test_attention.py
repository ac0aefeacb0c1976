"""The mask rule against the official masks (conformance/attention_mask.json, tiny.npz), and attention under it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention

HERE = Path(__file__).parent / "conformance"
CASES = json.loads((HERE / "attention_mask.json").read_text())["cases"]
# im_start im_end im_patch im_col low_res_im_start im_low frame_start frame_end, in the ids of the cases
VISUAL = [512, 513, 514, 515, 516, 518, 519, 520]
STARTS = [516, 519]                                                      # low_res_im_start, frame_start: a new image or frame


def fields(tokens, sub, both_ways):
    """The official ids of a token -> doc, branch, bidir (1,T). sub: 100000 * example + 10000 in a trunk, or + branch from 0.

    both_ways: None; "image_tokens", as released: all visual tokens of an example are one group; "within_image": each image or
    frame is one, and sees those before it as text does.
    """
    sub = np.zeros(len(tokens), int) if sub is None else np.array(sub)
    doc = sub // 100000                                                  # -1 is padding: -1 // 100000 == -1
    is_tree = np.isin(doc, doc[sub % 100000 == 10000])
    branch = np.where(is_tree & (sub % 100000 != 10000), 1 + sub % 100000, 0)
    group = {None: 0, "image_tokens": 1, "within_image": 1 + np.cumsum(np.isin(tokens, STARTS))}[both_ways]
    bidir = np.isin(tokens, VISUAL) * group
    return [torch.from_numpy(x).int()[None] for x in (doc, branch, bidir)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['input']['name']}, {case['input']['bidirectional']}")
def test_mask_equals_the_official_code(case):
    c = case["input"]
    doc, branch, bidir = fields(c["input_ids"], c["subsegment_ids"], c["bidirectional"])
    ours = attention.allow(doc, branch, bidir)[0].int().tolist()
    real = [token != -1 for token in c["input_ids"]]                     # what padding sees, nobody reads
    expected = case["expected"]["allow_rows_as_strings"]
    assert ["".join(map(str, row)) for row, keep in zip(ours, real, strict=True) if keep] == \
        [row for row, keep in zip(expected, real, strict=True) if keep]


def test_mask_of_a_packed_row_equals_the_official_code():
    with np.load(HERE / "tiny.npz") as tiny:
        tokens, sub, packed = tiny["input_ids"], tiny["subsegment_ids"], tiny["allow_mask"]
    expected = np.unpackbits(packed, axis=1, count=len(tokens)).astype(bool)
    ours = attention.allow(*fields(tokens, sub, "image_tokens"))[0].numpy()
    assert len(tokens) == 963
    assert (tokens == -1).sum() == 7
    assert np.array_equal(ours[tokens != -1], expected[tokens != -1])


def test_no_row_is_empty_and_padding_sees_padding_only():
    with np.load(HERE / "tiny.npz") as tiny:
        tokens, sub = tiny["input_ids"], tiny["subsegment_ids"]
    mask = attention.allow(*fields(tokens, sub, "image_tokens"))[0].numpy()
    assert mask.any(1).all()
    assert not mask[tokens == -1][:, tokens != -1].any()


def test_some_rows_of_the_mask_equal_the_same_rows_of_the_whole():
    with np.load(HERE / "tiny.npz") as tiny:
        row = fields(tiny["input_ids"], tiny["subsegment_ids"], "image_tokens")
    assert torch.equal(attention.allow(*row, rows=slice(400, 500)), attention.allow(*row)[:, 400:500])


def picture():
    """The worked example of attention.py's docstring: labels, the three fields, {label: row as drawn}."""
    text = attention.__doc__
    labels = re.search(r"^ +tokens((?: +\S)+)  ", text, re.M)[1].split()
    numbers = [re.findall(r"-?\d", re.search(rf"^ +{name}(( *-?\d)+)  ", text, re.M)[1]) for name in ("doc", "branch", "bidir")]
    rows = {label: row.replace(" ", "") for label, row in re.findall(r"^ +(\w) +((?:[#.]  )+)", text, re.M)}
    return labels, [torch.tensor([int(n) for n in field]) for field in numbers], rows


def test_draw_gives_the_picture_in_the_docstring():
    labels, row, expected = picture()
    assert list(expected) == ["I", "A", "a", "t"]
    assert all(len(field) == len(labels) == 15 for field in row)
    header, *lines = attention.draw(*row, labels="".join(labels)).split("\n")
    assert header == "  " + "".join(labels)
    drawn = {}
    for line in lines:
        drawn.setdefault(line[0], line[2:])                              # of each label the first row
    assert {label: drawn[label] for label in expected} == expected


def test_attend_equals_a_plain_softmax_with_grouped_heads():
    torch.manual_seed(0)
    B, T, S, H, G, D = 2, 5, 7, 6, 2, 4                                  # three query heads read each kv head
    q, k, v = (torch.randn(B, n, heads, D, dtype=torch.float64) for n, heads in ((T, H), (S, G), (S, G)))
    mask = torch.rand(B, T, S) < 0.5
    mask[:, :, 0] = True
    expected = torch.zeros(B, T, H, D, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for h in range(H):
                keys, values = k[b, mask[b, t], h // (H // G)], v[b, mask[b, t], h // (H // G)]
                expected[b, t, h] = (keys @ q[b, t, h] / D**0.5).softmax(0) @ values
    torch.testing.assert_close(attention.attend(q, k, v, mask), expected, rtol=0, atol=1e-12)


def test_attention_by_document_is_attention_under_the_whole_mask():
    torch.manual_seed(0)
    doc = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 3, 3, 3, 3, 3], [3, 3, 4, 4, 4, 4]], dtype=torch.int32)     # 3: another row's
    branch = torch.tensor([[0, 1, 2, 0, 0, 0], [0, 0, 0, 1, 1, 2], [0, 1, 0, 0, 1, 2]], dtype=torch.int32)
    bidir = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    parts, whole = attention.allow_by_document(doc, branch, bidir), attention.allow(doc, branch, bidir)
    assert [m.shape[1] for m in parts.parts] == [3, 2, 1, 1, 5, 2, 4] and sum(int(m.sum()) for m in parts.parts) == int(whole.sum())
    inputs = [torch.randn(3, 6, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    out, grads = [], []
    for mask in (parts, whole):
        out.append(attention.attend(*inputs, mask))
        grads.append(torch.autograd.grad((out[-1] ** 2).sum(), inputs))
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=1e-12)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_attention_by_rows_is_attention_under_the_whole_mask():
    """Packed rows, a prompt with padding, and some queries of a cache: every block of queries, with only the keys it is given."""
    torch.manual_seed(0)
    doc = torch.tensor([[0] * 9 + [1] * 6 + [-1], [0] * 16], dtype=torch.int32)
    branch = torch.tensor([[0] * 5 + [1, 1, 2, 2] + [0] * 7, [0] * 16], dtype=torch.int32)
    bidir = torch.tensor([[0, 1, 1, 1, 0] + [0] * 11, [0, *[1] * 10, *[0] * 5]], dtype=torch.int32)
    whole = attention.allow(doc, branch, bidir)
    q, k, v = (torch.randn(2, 16, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    expected = attention.attend(q, k, v, whole)
    for rows, size in ((slice(0, 16), 4), (slice(0, 16), 512), (slice(5, 16), 3), (slice(15, 16), 4)):
        parts = attention.allow_by_rows(doc, branch, bidir, rows, size)
        got = torch.cat([attention.attend(q[:, rows][:, block], k[:, :keys], v[:, :keys], mask) for block, keys, mask in parts], dim=1)
        assert (got - expected[:, rows]).abs().max() < 1e-12
    alone = attention.allow_by_rows(doc[1:], branch[1:], bidir[1:], slice(0, 16), 4)
    assert [keys for _, keys, _ in alone] == [11, 11, 12, 16] and [mask is None for *_, mask in alone] == [False, True, False, False]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_long_document_in_blocks_is_attention_under_the_whole_mask(size):
    """Forward and backward, in float64; a block of one branch gets no key of the others."""
    rng = torch.Generator().manual_seed(size)
    for _ in range(20):
        trunk, n = int(torch.randint(1, 9, (1,), generator=rng)), int(torch.randint(0, 4, (1,), generator=rng))
        branch = torch.tensor([0] * trunk + [j for j in range(1, n + 1) for _ in range(6)], dtype=torch.int32)[None]
        bidir = torch.randint(0, 3, branch.shape, generator=rng, dtype=torch.int32) * (branch == 0)
        doc = torch.zeros_like(branch)
        whole, parts = attention.allow(doc, branch, bidir), attention.allow_by_document(doc, branch, bidir, size)
        assert isinstance(parts.parts[0], attention.Long) == (branch.shape[1] > 2 * size)
        inputs = [torch.randn(1, branch.shape[1], heads, 4, dtype=torch.float64, generator=rng).requires_grad_() for heads in (4, 2, 2)]
        found = []
        for mask in (parts, whole):
            out = attention.attend(*inputs, mask)
            found.append([out, *torch.autograd.grad((out**2).sum(), inputs)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        for rows, keys, _ in getattr(parts.parts[0], "blocks", ()):
            assert set(branch[0, keys].tolist()) <= {0, *branch[0, rows].tolist()}


class Allocated(TorchDispatchMode):
    """The largest tensor that is made, in bytes."""
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(x):
                self.largest = max(self.largest, x.numel() * x.element_size())
        return out


def test_attention_over_36864_tokens_makes_no_square_of_them():
    """A row of stage 3 that is one video, forward and backward: no tensor is larger than a block of queries against all keys."""
    T = 36_864
    bidir = torch.zeros(1, T, dtype=torch.int32)
    bidir[:, 1 : T - 600] = (torch.arange(T - 601) % 86 < 81).int() * (torch.arange(T - 601) // 86 + 1)              # 428 frames
    branch = torch.zeros(1, T, dtype=torch.int32)
    branch[:, T - 600 : T - 300], branch[:, T - 300 :] = 1, 2
    inputs = [torch.randn(1, T, 1, 8, requires_grad=True) for _ in range(3)]
    with Allocated() as made:
        mask = attention.allow_by_document(torch.zeros(1, T, dtype=torch.int32), branch, bidir)
        attention.attend(*inputs, mask).sum().backward()
    assert made.largest <= 4 * attention.BLOCK * T < T * T // 8
    assert sum(mask.nbytes for part in mask.parts for *_, mask in part.blocks) < 0.6 * T * T      # a byte for a pair
    assert all(x.grad.abs().sum() > 0 for x in inputs)
