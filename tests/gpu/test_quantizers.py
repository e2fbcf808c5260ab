"""The Triton quantisers against the reference on the CPU: the same bytes, for every scale rule and geometry.

The oracle runs on the CPU because that is where the reference is the definition; `test_the_reference_itself` says that
it gives the same bytes on the GPU.  Numbers in brackets are rows of the public bug reports.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from jetgraph.lowering import reference

triton_quantize = pytest.importorskip("jetgraph.lowering.triton_quantize", reason="needs triton")
from jetgraph.lowering import triton_fused  # noqa: E402  (it imports triton)

DEVICE = "cuda"
RULES = [
    (qmax, floor, division, pow2)
    for (qmax, floor), division, pow2 in itertools.product(
        [(448.0, 1e-12), (448.0, 1e-4), (240.0, 1e-10)], ["div", "mul1/s", "mulq/a"], [False, True]
    )
]
JET = (448.0, 1e-12, "div", False)
BLOCKS = [(1, 128), (128, 128), (128, 1)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers whose rows and columns have very different sizes, as activations have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * torch.exp2(torch.randint(-9, 9, (1, shape[1]), generator=generator))).to(dtype)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Equal bytes; a NaN is a NaN (processors disagree about the sign of 0/0)."""
    for g, e in zip(got, expected, strict=True):
        g = g.cpu()
        assert g.shape == e.shape
        assert g.dtype == e.dtype
        nan = e.float().isnan()
        assert torch.equal(g.float().isnan(), nan)
        bits = torch.uint8 if g.dtype is torch.float8_e4m3fn else torch.int32
        different = (g.view(bits) != e.view(bits)) & ~nan
        assert not different.any(), f"{different.sum().item()} of {different.numel()} differ"


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_scale_rule_gives_the_reference_bytes(rule):  # [Q3, N3, Q8]
    x = random(391, 1408)
    for rows, cols in BLOCKS:
        assert_same(triton_quantize.quantize(x.to(DEVICE), rows, cols, *rule), reference.quantize(x, rows, cols, *rule))
    tokens = reference.quantize(x.t(), 1, 128, *rule)
    for kernels in (triton_quantize, triton_fused):
        assert_same(kernels.quantize_tokens(x.to(DEVICE), 128, *rule), tokens)
    both = triton_fused.quantize_rows_and_tokens(x.to(DEVICE), 128, *rule)
    assert_same(both, (*reference.quantize(x, 1, 128, *rule), *tokens))
    transposed = reference.quantize_transposed(x, 128, 128, *rule)
    assert_same(triton_fused.quantize_transposed(x.to(DEVICE), 128, *rule), transposed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_byte_differs_on_sixteen_million_numbers(dtype):  # [Q3, N3, V16]
    x = random(4096, 4096, dtype=dtype)
    for rows, cols in BLOCKS:
        assert_same(triton_quantize.quantize(x.to(DEVICE), rows, cols, *JET), reference.quantize(x, rows, cols, *JET))


def test_every_bf16_number_gets_the_right_code():  # [Q5]
    """All 65,536 bit patterns, and FP32 neighbours of every rounding boundary of e4m3."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    assert_same(triton_quantize.quantize(bits.to(DEVICE), 1, 128, *JET), reference.quantize(bits, 1, 128, *JET))
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(0.0)), codes])
    x = torch.full((near.numel(), 128), 448.0)  # amax 448: scale 1, so x is cast as it is
    x[:, 1], x[:, 2] = near, -near
    assert_same(triton_quantize.quantize(x.to(DEVICE), 1, 128, *JET), reference.quantize(x, 1, 128, *JET))


def test_quotients_around_every_rounding_boundary():  # [Q3, N3]
    """Numbers within four units in the last place of boundary x scale, for 2,048 scales: where a division that is not
    exact, or is replaced by products, would show."""
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([torch.tensor([2.0**-10]), (codes[1:] + codes[:-1]) / 2])
    amax = torch.rand(2048, generator=torch.Generator().manual_seed(0)) * 3 + 1e-3
    middle = (ties * (amax / torch.full_like(amax, 448.0))[:, None]).view(torch.int32)
    for step in range(-4, 5):
        x = torch.cat([amax[:, None], (middle + step).view(torch.float32)], 1)
        assert_same(triton_quantize.quantize(x.to(DEVICE), 1, 128, *JET), reference.quantize(x, 1, 128, *JET))


def test_the_cast_by_integers_is_the_cast_of_the_hardware():
    """The CPU tests of indexing use it, because the interpreter's own cast rounds wrongly."""
    x = random(512, 1024, dtype=torch.float32).to(DEVICE)
    for rows, cols in BLOCKS:
        by_integers = triton_quantize.quantize(x, rows, cols, *JET, native=False)
        assert_same(triton_quantize.quantize(x, rows, cols, *JET), tuple(t.cpu() for t in by_integers))


@pytest.mark.parametrize("pow2", [False, True])
def test_zero_nan_and_inf_blocks(pow2):  # [N5, Q1, Q6]
    rule = (448.0, 1e-12, "div", pow2)
    x = torch.ones(5, 256)
    x[0, 5], x[1, 5], x[2, 200] = float("nan"), float("inf"), -float("inf")
    x[3] = 0
    for rows, cols in BLOCKS:
        codes, scales = triton_quantize.quantize(x.to(DEVICE), rows, cols, *rule)
        assert_same((codes, scales), reference.quantize(x, rows, cols, *rule))
    codes, scales = triton_quantize.quantize(x.to(DEVICE), 1, 128, *rule)
    assert codes[0, :128].float().isnan().all()
    assert codes[1, :128].float().isnan().all()
    assert codes[2, 128:].float().isnan().all()
    assert scales.isnan().sum() == 3
    assert (codes[3].float() == 0).all()


def test_power_of_two_one_ulp_above():  # [N5 d]
    x = torch.zeros(1, 128)
    x[0, 0] = torch.tensor(2.0**-7).nextafter(torch.tensor(1.0)) * 448
    _, scale = triton_quantize.quantize(x.to(DEVICE), 1, 128, 448.0, 1e-12, "div", True)
    assert scale.item() == 2.0**-6


@pytest.mark.parametrize("tokens", [0, 1, 17, 127, 129, 130])
@pytest.mark.parametrize("features", [576, 2880, 10944])
def test_odd_geometry(tokens, features):  # [K7, K16, P9]
    x = random(tokens, features)
    for rows, cols in BLOCKS:
        assert_same(triton_quantize.quantize(x.to(DEVICE), rows, cols, *JET), reference.quantize(x, rows, cols, *JET))
    both = triton_fused.quantize_rows_and_tokens(x.to(DEVICE), 128, *JET)
    assert_same(both, (*reference.quantize(x, 1, 128, *JET), *reference.quantize(x.t(), 1, 128, *JET)))
    transposed = torch.ops.jetgraph.quantize_transposed(x.to(DEVICE), 128, 128, *JET)  # whoever the registry chooses
    assert_same(transposed, reference.quantize_transposed(x, 128, 128, *JET))
    assert (torch.ones(3, device=DEVICE) + 1).sum().item() == 6  # no sticky error


@pytest.mark.parametrize("block", [(1, 16), (1, 64), (16, 1), (64, 1), (16, 32), (64, 64), (128, 32)])
def test_other_block_sizes(block):
    x = random(130, 200)
    assert_same(triton_quantize.quantize(x.to(DEVICE), *block, *JET), reference.quantize(x, *block, *JET))
    tokens = triton_quantize.quantize_tokens(x.to(DEVICE), 64, *JET)
    assert_same(tokens, reference.quantize(x.t(), 1, 64, *JET))


def test_any_strides_and_poisoned_tails():  # [A1, K14, K16]
    x = random(130, 576)
    expected = reference.quantize(x, 1, 128, *JET)
    memory = torch.full((130, 1024), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    memory[:, 300:876] = x.to(DEVICE)
    views = [
        memory[:, 300:876],
        x.t().contiguous().t().to(DEVICE),
        torch.stack([x, torch.full_like(x, 1e7)], -1).to(DEVICE)[..., 0],
    ]
    for view in views:
        assert_same(triton_quantize.quantize(view, 1, 128, *JET), expected)
        assert_same(triton_quantize.quantize_tokens(view, 128, *JET), reference.quantize(x.t(), 1, 128, *JET))
    row = x[:1].to(DEVICE).expand(5, -1)
    assert_same(triton_quantize.quantize(row, 1, 128, *JET), reference.quantize(x[:1].expand(5, -1), 1, 128, *JET))


def test_requantised_tokens():
    x = random(130, 576)
    codes, scale = reference.quantize(x, 1, 128, *JET)
    expected = reference.quantize(reference.dequantize(codes, scale, 1, 128).t(), 1, 128, *JET)
    assert_same(triton_quantize.requantize_tokens(codes.to(DEVICE), scale.to(DEVICE), 128, 128, *JET), expected)
    codes, scale = reference.quantize(x, 1, 0, *JET)  # one scale for a token
    expected = reference.quantize(reference.dequantize(codes, scale, 1, 0).t(), 1, 128, *JET)
    assert_same(triton_quantize.requantize_tokens(codes.to(DEVICE), scale.to(DEVICE), 0, 128, *JET), expected)


def test_offsets_past_two_to_the_thirty_one():  # [K9, N15 b]
    """524,418 x 4096 numbers: the last rows lie beyond 2^31, in x, in the codes and in the transposed codes."""
    x = torch.randn(524_288 + 130, 4096, device=DEVICE, dtype=torch.bfloat16)
    tail = x[-130:].cpu()
    codes, scales, codes_t, scales_t = triton_fused.quantize_rows_and_tokens(x, 128, *JET)
    expected = reference.quantize(tail, 1, 128, *JET)
    assert_same((codes[-130:], scales[-130:]), expected)
    last = reference.quantize(tail[-2:].t(), 1, 128, *JET)
    assert_same((codes_t[:, -2:].contiguous(), scales_t[:, -1:].contiguous()), last)
    del codes_t, scales_t
    assert torch.equal(triton_quantize.quantize(x, 1, 128, *JET)[0].view(torch.uint8), codes.view(torch.uint8))
    blocks, _ = triton_quantize.quantize(x, 128, 128, *JET)
    assert_same((blocks[-2:],), (reference.quantize(tail[-2:], 128, 128, *JET)[0],))


def test_the_reference_itself_gives_the_same_bytes_on_the_gpu():
    """CUDA divides by a Python number as a product with its reciprocal: the reference must not let it."""
    x = random(257, 1024)
    for rule in RULES:
        for rows, cols in BLOCKS:
            assert_same(reference.quantize(x.to(DEVICE), rows, cols, *rule), reference.quantize(x, rows, cols, *rule))
