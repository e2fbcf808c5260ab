"""Indexing and layout of the Triton kernels, in Triton's interpreter on the CPU; run by `test_providers.py`.

Not collected by name: TRITON_INTERPRET must be set before triton is imported, so it needs a process of its own.  The
interpreter's cast to e4m3 rounds wrongly and it cannot multiply codes, so codes are made by integers (`native=False`)
and products in FP32 (`widen=True`); the GPU tests compare those with the hardware's.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from jetgraph.lowering import reference, triton_copy, triton_gemm, triton_quantize, triton_rows
from jetgraph.sync.receiver import word_sums
from jetgraph.sync.together import Together

JET = (448.0, 1e-12, "div", False)
RULES = [(448.0, 1e-4, d, p) for d, p in itertools.product(["div", "mul1/s", "mulq/a"], [False, True])]
WIDE = {"lanes": (128, 1), "native": False}


def random(rows: int, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, cols, generator=generator) * torch.arange(1.0, cols + 1)).bfloat16()


def assert_same(got, expected) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        bits = torch.uint8 if e.dtype is reference.E4M3 else torch.int32
        assert torch.equal(g.view(bits), e.view(bits))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule(rule):
    x = random(3, 200)
    assert_same(triton_quantize.quantize(x, 1, 128, *rule, **WIDE), reference.quantize(x, 1, 128, *rule))


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1), (64, 32)])
def test_blocks_of_a_view_with_a_poisoned_tail(block):
    x = random(130, 200)
    memory = torch.full((130, 600), float("nan"), dtype=torch.bfloat16)
    memory[:, 1:401:2] = x
    got = triton_quantize.quantize(memory[:, 1:401:2], *block, *JET, **WIDE)
    assert_same(got, reference.quantize(x, *block, *JET))


def test_tokens():
    x = random(130, 200)
    expected = reference.quantize(x.t(), 1, 128, *JET)
    assert_same(triton_quantize.quantize_tokens(x, 128, *JET, **WIDE), expected)


def test_requantised_tokens():
    codes, scale = reference.quantize(random(130, 72), 1, 128, *JET)
    expected = reference.quantize(reference.dequantize(codes, scale, 1, 128).t(), 1, 128, *JET)
    assert_same(triton_quantize.requantize_tokens(codes, scale, 128, 128, *JET, native=False), expected)
    codes, scale = reference.quantize(random(30, 40), 1, 0, *JET)  # one scale for a token
    expected = reference.quantize(reference.dequantize(codes, scale, 1, 0).t(), 1, 128, *JET)
    assert_same(triton_quantize.requantize_tokens(codes, scale, 0, 128, *JET, native=False), expected)


def test_nothing_to_do():
    x = random(0, 200)
    assert_same(triton_quantize.quantize(x, 1, 128, *JET), reference.quantize(x, 1, 128, *JET))


def test_non_finite_groups():  # [N5]
    x = torch.ones(4, 128)
    x[0, 5], x[1, 6], x[2] = float("nan"), float("inf"), 0.0
    for pow2 in (False, True):
        rule = (448.0, 1e-12, "div", pow2)
        codes, scales = triton_quantize.quantize(x, 1, 128, *rule, **WIDE)
        assert (codes[:2].view(torch.uint8) == 0x7F).all()
        assert scales[:2].isnan().all()
        assert_same((codes[2:], scales[2:]), reference.quantize(x[2:], 1, 128, *rule))


@pytest.mark.parametrize(("num_rows", "num_out", "depth", "b_rows"), [(5, 200, 300, 128), (70, 130, 130, 1)])
def test_gemm(num_rows, num_out, depth, b_rows):
    """Codes with ragged K, transposed b, shared a_scale, bias: against the reference, in FP32."""
    a, a_scale = reference.quantize(random(num_rows, depth), 1, 128, *JET)
    b, b_scale = reference.quantize(random(num_out, depth), b_rows, 128, *JET)
    bias = torch.randn(num_out, generator=torch.Generator().manual_seed(1)).bfloat16()
    transposed = b.t().contiguous().t(), b_scale.t().contiguous().t()
    options = {"out_dtype": torch.float32, "widen": True}
    got = triton_gemm.fp8_gemm(a, a_scale, *transposed, bias, b_rows, 128, **options)
    expected = reference.fp8_gemm(a, a_scale, b, b_scale, b_rows) + bias.float()
    assert ((got - expected).abs() <= 1e-6 * expected.abs().max()).all()
    shared = triton_gemm.fp8_gemm(a, a_scale[:1], b, b_scale, None, b_rows, 128, **options)
    expected = reference.fp8_gemm(a, a_scale[:1], b, b_scale, b_rows)
    assert ((shared - expected).abs() <= 1e-6 * expected.abs().max()).all()


def test_gemm_with_one_scale_for_everything():
    a, b = (torch.randn(n, 200, generator=torch.Generator().manual_seed(n)).to(reference.E4M3) for n in (5, 130))
    scale = torch.tensor([[0.5]])
    got = triton_gemm.fp8_gemm(a, scale, b, scale * 3, None, 0, 0, out_dtype=torch.float32, widen=True)
    expected = reference.fp8_gemm(a, scale, b, scale * 3, 0, 0)
    assert ((got - expected).abs() <= 1e-6 * expected.abs().max()).all()


@pytest.mark.parametrize("length", [1, 31, 320, 576, 4096])
def test_row_means(length):
    x = torch.randn(5, length, generator=torch.Generator().manual_seed(0))
    for given in (x, x.t().contiguous().t()):
        assert (triton_rows.row_mean(given).double() - x.double().mean(-1)).abs().max() < 1e-6
    assert triton_rows.row_mean(x[:0]).shape == (0,)


def test_row_means_refuse_what_is_not_fp32():
    with pytest.raises(ValueError, match=r"row_mean got torch.bfloat16 \[2, 8\]; expected torch.float32"):
        triton_rows.row_mean(torch.zeros(2, 8).bfloat16())


def test_tensors_written_together(monkeypatch):
    """Several chunks of one tensor, ends within a block, a row of a merged weight; what has no whole words is left."""
    monkeypatch.setattr(triton_copy, "CHUNK", 100)
    monkeypatch.setattr(triton_copy, "BLOCK", 64)
    merged = random(6, 400)
    live = {
        "long": torch.zeros(2003, dtype=torch.float64),
        "rows": merged[2:4],
        "short": torch.zeros(8, dtype=torch.uint8),
        "odd": torch.zeros(3, dtype=torch.float32),
        "strided": torch.zeros(16, 16)[:, :8],
    }
    new = {n: torch.arange(1.0, t.numel() + 1).to(t.dtype).reshape(t.shape) for n, t in live.items()}
    new["long"] = -new["long"]  # sums beyond 2^63
    before = merged.clone()
    together = Together.on_device(live, new, torch.device("cpu"))
    assert together is not None
    assert together.names == ("long", "rows", "short")
    together.copy()
    for name in together.names:
        assert torch.equal(live[name], new[name])
    assert not live["odd"].any()
    assert not live["strided"].any()
    assert torch.equal(merged[:2], before[:2])
    assert torch.equal(merged[4:], before[4:])
    assert together.sums() == together.sums() == word_sums({name: new[name] for name in together.names})
