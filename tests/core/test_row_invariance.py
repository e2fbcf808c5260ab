"""A row of every reference kernel depends on that row alone, for any number of rows in the call."""

from __future__ import annotations

import pytest
import torch

from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.precision import Granularity, Scale

COUNTS = [1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]  # [N15, K12]
ROWS = scale_arguments(Scale(Granularity.per_group(128)))
BLOCKS = scale_arguments(Scale(Granularity.per_block(128, 128)))


@pytest.fixture(scope="module")
def activations():
    return torch.randn(257, 576, generator=torch.Generator().manual_seed(0)).bfloat16()


def fp8(x):
    weight = torch.randn(200, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    return reference.fp8_gemm(*reference.quantize(x, *ROWS), *reference.quantize(weight, *BLOCKS), 128)


def bf16(x):
    weight = torch.randn(200, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    return reference.row_tile_gemm(x, weight)


def layer_norm(x):
    weight, bias = torch.randn(2, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    return torch.nn.functional.layer_norm(x, (576,), weight, bias)


@pytest.mark.parametrize("kernel", [fp8, bf16, layer_norm, torch.nn.functional.gelu, torch.tanh])
def test_leading_and_permuted_rows(kernel, activations):
    whole = kernel(activations)
    for count in COUNTS:
        assert torch.equal(kernel(activations[:count]), whole[:count]), count
    order = torch.randperm(257, generator=torch.Generator().manual_seed(2))
    assert torch.equal(kernel(activations[order]), whole[order])


def test_fp8_gemm_is_the_exact_dot_product_in_group_order():
    """Against integer arithmetic: e4m3 numbers are multiples of 2^-9."""
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight = torch.randn(130, 576, generator=torch.Generator().manual_seed(4)).bfloat16()
    (a, a_scale), (b, b_scale) = reference.quantize(x, *ROWS), reference.quantize(weight, *BLOCKS)
    left, right = (a.float() * 512).to(torch.int64), (b.float() * 512).to(torch.int64)
    expected = torch.zeros(5, 130)
    for g in range(5):
        part = slice(g * 128, min((g + 1) * 128, 576))
        dot = ((left[:, part] @ right[:, part].T).double() / 2**18).float()
        expected += dot * (a_scale[:, g : g + 1] * b_scale.repeat_interleave(128, 0)[:130, g])
    assert torch.equal(reference.fp8_gemm(a, a_scale, b, b_scale, 128), expected)


def test_long_contractions_stay_exact():  # [K11]
    x, weight = torch.rand(3, 16384, generator=torch.Generator().manual_seed(5)), torch.rand(64, 16384)
    (a, a_scale), (b, b_scale) = reference.quantize(x, *ROWS), reference.quantize(weight, *BLOCKS)
    got = reference.fp8_gemm(a, a_scale, b, b_scale, 128)
    oracle = reference.dequantize(a, a_scale, 1, 128).double() @ reference.dequantize(b, b_scale, 128, 128).double().T
    assert ((got - oracle) / oracle).abs().max() < 128 * 2**-24  # one FP32 rounding per group of 128


@pytest.mark.parametrize("positions", [(1, 1), (1, 40), (7, 40), (40, 40), (16, 129)])
def test_attention_of_a_chunk_is_attention_of_the_whole(positions):
    chunk, length = positions
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, h, length, 64, generator=generator).bfloat16() for h in (9, 3, 3))
    whole = reference.attention(q, k, v, 0.125)[0]
    part = reference.attention(q[:, :, -chunk:], k, v, 0.125)[0]
    assert torch.equal(part, whole[:, -chunk:])
    extended = (
        torch.cat([k, torch.full_like(k[:, :, :3], 1e4)], 2),
        torch.cat([v, torch.full_like(v[:, :, :3], 1e4)], 2),
    )
    longer = torch.cat([q, q[:, :, :3]], 2)
    assert torch.equal(reference.attention(longer, *extended, 0.125)[0][:, :length], whole)  # the future adds nothing


def test_attention_against_a_float64_oracle():
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, h, 33, 64, generator=generator).bfloat16() for h in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True, scale=0.125
    )
    got = reference.attention(q, k, v, 0.125)[0].transpose(1, 2)
    assert torch.equal(got, expected.to(torch.bfloat16))
    assert torch.autograd.gradcheck(
        lambda *qkv: torch.ops.jetgraph.attention(*qkv, 0.125)[0],
        [torch.randn(1, h, 5, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)],
    )
