"""Indexing, masks and formulas of the exact kernels, in Triton's interpreter on the CPU.

Run by `test_exact_kernels.py`; not collected by name, like `triton_interpreted.py`.  The interpreter's BF16 products
and casts are wrong, so everything is FP32 here (``native=False``) and small tiles meet every edge; bits and roundings
are for tests/gpu/test_exact_ops.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from jetgraph.lowering import reference, triton_attention, triton_attention_backward, triton_bf16_gemm

WIDE = {"out_dtype": torch.float32, "native": False}
SMALL = {"tile": (16, 16, 1, 1)}
GRADIENT_TILES = ((16, 16, 1, 1), (16, 32, 1, 1))
EPSILON = 2.0**-20
"""FP32 sums of at most 200 numbers of size 1 … 4: 2^-24 each and some; a wrong key, mask or head is off by 2^-6."""

PACKED = torch.tensor([[0] * 5 + [5] * 9 + [14] + [15] * 25])
PADDED = torch.tensor([[0] * 40, [37] * 40, [55] * 40])
CASES = {
    "one query": (1, 2, 1, 1, 1, 16, 0, 0.0, None),
    "groups of three": (2, 6, 3, 37, 37, 64, 0, 0.0, None),
    "a chunk, heads of 80": (2, 6, 3, 7, 50, 80, 0, 0.0, None),
    "window": (1, 4, 2, 40, 40, 32, 7, 0.0, None),
    "window of one": (1, 2, 2, 20, 20, 16, 1, 0.0, None),
    "softcap": (1, 4, 2, 40, 40, 32, 0, 2.0, None),
    "packed": (1, 4, 2, 40, 40, 32, 0, 0.0, PACKED),
    "packed, window, softcap": (1, 4, 2, 40, 40, 32, 3, 2.0, PACKED),
    "left padding": (3, 4, 2, 40, 40, 32, 0, 0.0, PADDED),
    "left padding, window, a chunk": (3, 4, 2, 9, 40, 32, 5, 0.0, PADDED[:, -9:]),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def poisoned(x: Tensor) -> Tensor:
    """``x`` as a view in the middle of NaN, rows at multiples of 16 bytes."""
    memory = torch.full((*x.shape[:-2], x.shape[-2] + 8, x.shape[-1] + 16), float("nan"), dtype=x.dtype)
    view = memory[..., 4:-4, 8:-8]
    view.copy_(x)
    return view


def qkv(batch: int, heads: int, group: int, queries: int, keys: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (heads, queries), (heads // group, keys), (heads // group, keys)
    return tuple(poisoned(numbers(batch, *shape, size, seed=i)) for i, shape in enumerate(shapes))  # type: ignore


@pytest.fixture
def products_by_row(monkeypatch):
    """A row of numpy's product depends on the others, as BLAS likes; a row of an MMA does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, **_: np.einsum("mk,kn->mn", a, b, optimize=False))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outs", "depth"), [(1, 200, 72), (5, 130, 576), (33, 17, 100), (0, 5, 8)])
def test_gemm(rows, outs, depth, bias):
    x, weight = poisoned(numbers(rows, depth)), poisoned(numbers(outs, depth, seed=1))
    shift = numbers(outs, seed=2) if bias else None
    got = triton_bf16_gemm.row_tile_gemm(x, weight, shift, **WIDE, tile=(16, 32, 32, 1, 1))
    exact = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
    assert got.shape == exact.shape
    assert ((got - exact).abs() <= EPSILON * (x.double().abs() @ weight.double().abs().t() + 4)).all()


def test_gemm_keeps_leading_dimensions_and_refuses_other_dtypes():
    x, weight = numbers(2, 3, 40), numbers(24, 40)
    got = triton_bf16_gemm.row_tile_gemm(x, weight, **WIDE, tile=(16, 32, 32, 1, 1))
    assert got.shape == (2, 3, 24)
    with pytest.raises(ValueError, match="got torch.bfloat16, torch.float32; expected torch.bfloat16"):
        triton_bf16_gemm.row_tile_gemm(x, weight.float())
    with pytest.raises(ValueError, match=r"got \[2, 3, 40\] and \[24, 32\]"):
        triton_bf16_gemm.row_tile_gemm(x, weight[:, :32])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention(case):
    *sizes, window, softcap, first = case
    q, k, v = qkv(*sizes)
    options = sizes[-1] ** -0.5, window, softcap, first
    got, lse = triton_attention.attention(q, k, v, *options, **WIDE, **SMALL)
    wide = [t.double() for t in (q, k, v)]
    assert (got - reference.attention(*wide, *options)[0]).abs().max() < EPSILON
    scores = wide[0] @ wide[1].repeat_interleave(sizes[2], 1).mT * options[0]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    exact = scores.masked_fill(reference._hidden_keys(q, k, window, first)[:, :, 0], float("-inf")).logsumexp(-1)
    assert torch.equal(lse.isinf(), exact.isinf())
    assert ((lse - exact).abs().nan_to_num() < EPSILON).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case):
    *sizes, window, softcap, first = case
    inputs = qkv(*sizes)
    grad = numbers(sizes[0], sizes[3], sizes[1], sizes[5], seed=7)
    options = sizes[-1] ** -0.5, window, softcap, first
    forward = triton_attention.attention(*inputs, *options, **WIDE, **SMALL)
    got = triton_attention_backward.attention_backward(grad, *inputs, *forward, *options, **WIDE, tiles=GRADIENT_TILES)
    for ours, exact in zip(got, reference.attention_backward(*(t.double() for t in (grad, *inputs)), *options),
                           strict=True):  # fmt: skip
        assert (ours - exact).abs().max() < 16 * EPSILON  # sums of up to 40 queries' gradients


def test_rows_keep_their_bits_in_every_company(products_by_row):  # [N15]
    """Dense, in chunks, packed behind another sequence, and one by one: the same operations in the same order."""
    q, k, v = qkv(1, 4, 2, 50, 50, 32)
    options = {**WIDE, **SMALL}
    whole, _ = triton_attention.attention(q, k, v, 0.2, **options)
    for count in (1, 5, 17):
        last, _ = triton_attention.attention(q[:, :, -count:], k, v, 0.2, **options)
        assert torch.equal(last, whole[:, -count:])
        begin, _ = triton_attention.attention(*(t[:, :, :count] for t in (q, k, v)), 0.2, **options)
        assert torch.equal(begin, whole[:, :count])
    behind = [torch.cat((t[:, :, :7], t), 2) for t in (q, k, v)]
    first = torch.tensor([[0] * 7 + [7] * 50])
    packed, _ = triton_attention.attention(*behind, 0.2, 0, 0.0, first, **options)
    assert torch.equal(packed[:, 7:], whole)
    assert torch.equal(packed[:, :7], whole[:, :7])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (9, 3.0)])
def test_pages_have_the_bits_of_dense_keys(products_by_row, interleaved, window, softcap):  # [N15]
    """Five sequences, one without new tokens and one of a single token; unused slots and pages are NaN."""
    lengths, counts, page, size = (50, 1, 33, 16, 20), (3, 1, 33, 0, 20), 16, 32
    inputs = [[t[0] for t in qkv(1, 4, 2, n, n, size)] for n in lengths]
    pages = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0)).int().tolist()
    shape = (len(order), 2, page, 2 * size) if interleaved else (len(order), page, 2, 2 * size)
    memory = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    both = memory.transpose(1, 2) if interleaved else memory
    table = torch.full((len(lengths), max(pages) + 1), 10**6, dtype=torch.int32)
    for row, (_, k, v) in enumerate(inputs):
        for position in range(lengths[row]):
            if position % page == 0:
                table[row, position // page] = order.pop()
            both[table[row, position // page], position % page] = torch.cat((k[:, position], v[:, position]), -1)
    rows = torch.cat([q[:, n - c :].transpose(0, 1) for (q, _, _), n, c in zip(inputs, lengths, counts, strict=True)])
    rows = torch.cat((rows, torch.full_like(rows[:4], float("nan"))))  # a batch padded for a CUDA graph
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out = torch.full(rows.shape, -7.0)
    options = (0.2, window, softcap)
    got, lse = triton_attention.paged_attention(
        rows, *both.split(size, -1), table, torch.tensor(lengths).int(), starts, *options, out=out, native=False,
        **SMALL,
    )  # fmt: skip
    assert got is out
    assert (got[sum(counts) :] == -7).all()
    for i, (q, k, v) in enumerate(inputs):
        part = slice(starts[i], starts[i + 1])
        dense, dense_lse = triton_attention.attention(q[None], k[None], v[None], *options, **WIDE, **SMALL)
        assert torch.equal(got[part], dense[0, lengths[i] - counts[i] :])
        assert torch.equal(lse[:, part], dense_lse[0, :, lengths[i] - counts[i] :])


def test_paged_attention_refuses_what_it_cannot_read():
    cache = torch.zeros(4, 16, 2, 64).bfloat16()
    integers = [torch.zeros(1, 4).int(), torch.ones(1).int(), torch.tensor([0, 1]).int()]
    q = numbers(1, 4, 32)
    for arguments, message in [
        ((q.float(), *cache.split(32, -1), *integers), "float32"),
        ((q, cache[..., :32], cache[:, :, :1, 32:].expand(-1, -1, 2, -1), *integers), "strides"),
        ((q, *cache.split(32, -1), integers[0].long(), *integers[1:]), "int32"),
        ((numbers(1, 4, 30), *cache[..., :60].split(30, -1), *integers), "strides|head size of 30"),
    ]:
        with pytest.raises(ValueError, match=message):
            triton_attention.paged_attention(*arguments, 0.2, native=False, **SMALL)


def test_dense_attention_refuses_what_it_does_not_serve():
    q, k, v = (numbers(1, 2, 5, 16) for _ in range(3))
    for arguments, message in [
        ((q.float(), k, v, 0.1), "float32"),
        ((q, k[:, :, :3], v[:, :, :3], 0.1), "5 queries of 3 positions"),
        ((q, k, v, -0.1), "scale=-0.1"),
        ((q, k, v, 0.1, 0, 0.0, torch.zeros(1, 5).int()), "first torch.int32"),
        ((q[..., :12], k[..., :12], v[..., :12], 0.1), "head size of 12"),
    ]:
        with pytest.raises(ValueError, match=message):
            triton_attention.attention(*arguments, native=False)


def test_the_last_query_that_may_see_a_block():
    """Against the definition, one query at a time."""
    for first in (PACKED, PADDED.clamp(max=40), torch.tensor([[9, 3, 30, 3, 40]])):
        got = triton_attention_backward.last_queries(first, 40, 16)
        for b in range(len(first)):
            for block in range(3):
                seeing = [i for i, f in enumerate(first[b].tolist()) if f < (block + 1) * 16]
                assert got[b, block] == max(seeing, default=-1)
