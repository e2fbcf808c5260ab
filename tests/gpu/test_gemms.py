"""Every FP8 GEMM provider against a float64 oracle, bit for bit in its rows, and at the edges of its shapes.

The oracle multiplies dequantised codes in float64, in code of its own.  Numbers in brackets are rows of the public bug
reports.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import jetgraph.lowering.cuda_ops  # noqa: F401  (registers the kernels)
from jetgraph.lowering import registry
from jetgraph.lowering.provider import EXPECTED_SELF_TEST, Gemm
from tests.gpu.served import provider_or_skip

DEVICE = torch.device("cuda:0")
E4M3 = torch.float8_e4m3fn

ROUNDING = 2.0**-8
"""BF16 keeps 8 bits: half a unit in the last place is at most this much of the result."""
TOLERANCE = {
    "deep_gemm": 2.0**-12,
    "cublaslt": 2.0**-12,
    "triton": 2.0**-12,
    "reference": 2.0**-22,
}
"""Beyond the rounding of the result, relative to Σ|a·b|.  Hopper's FP8 units align the 32 products of one instruction
to the largest and cut about 13 bits below it: measured here, the three libraries lose the same 2^-12.4 at worst (few,
unequal products) and 2^-15 at K=4096.  Wrong layouts or scales cost more than 2^-4.  FP32 between groups adds 2^-24 a
group; the reference is exact within one."""


@pytest.fixture(params=[name for name, found in registry.PROVIDERS.items() if "fp8_gemm" in found.kernels])
def provider(request):
    return provider_or_skip(request.param, DEVICE)


def codes(rows: int, cols: int, seed: int, positive: bool = False) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    x = torch.randn(rows, cols, device=DEVICE, generator=generator) * 100
    return (x.abs() if positive else x).clamp(-448, 448).to(E4M3)


def scales(rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.rand(rows, cols, device=DEVICE, generator=generator) * 0.02 + 1e-3


def operands(num_rows: int, num_out: int, depth: int, b_rows: int, seed: int = 0, positive: bool = False):
    groups = -(-depth // 128)
    return (
        codes(num_rows, depth, seed, positive),
        scales(num_rows, groups, seed + 1),
        codes(num_out, depth, seed + 2, positive),
        scales(-(-num_out // b_rows), groups, seed + 3),
    )


def oracle(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_rows: int) -> tuple[Tensor, Tensor]:
    """float64 product, and the same of magnitudes."""
    depth = a.shape[1]
    group, row = torch.arange(depth, device=a.device) // 128, torch.arange(b.shape[0], device=a.device) // b_rows
    left = a.to(torch.float64) * a_scale.to(torch.float64)[:, group]
    right = b.to(torch.float64) * b_scale.to(torch.float64)[row][:, group]
    return left @ right.t(), left.abs() @ right.abs().t()


def skip_unless_served(provider, gemm: Gemm) -> None:
    reason = provider.refuses(gemm)
    if reason is not None:
        pytest.skip(f"{provider.name} refuses it: {reason}")


def skip_unless_row_invariant(provider) -> None:
    if provider.name == "reference":
        pytest.skip("exact by arithmetic, tested on the CPU")
    if not registry.probe(provider.name, DEVICE).row_invariant:
        pytest.skip("its rows may depend on each other; the registry keeps it out of the forward pass")


def assert_close(provider, got: Tensor, expected: Tensor, magnitude: Tensor) -> float:
    assert got.dtype is torch.bfloat16
    excess = ((got.to(torch.float64) - expected).abs() - ROUNDING * expected.abs()) / magnitude.clamp_min(1e-300)
    worst = excess.max().item() if excess.numel() else 0.0
    print(f"{provider.name}: worst error beyond rounding 2^{math.log2(max(worst, 1e-30)):.1f} of Σ|ab|")
    assert worst <= TOLERANCE[provider.name], worst
    return worst


def test_self_test_value_and_independent_rows(provider):  # [C4]
    finding = registry.probe(provider.name, DEVICE)
    print(finding)
    assert finding.self_test_value == EXPECTED_SELF_TEST
    assert finding.row_invariant == (provider.name != "cublaslt")


@pytest.mark.parametrize("b_rows", [128, 1])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "depth"),
    [(256, 512, 512), (130, 4096, 4096), (33, 768, 384), (64, 6144, 4096), (257, 576, 640)],
)
def test_against_float64(provider, num_rows, num_out, depth, b_rows):  # [K5]
    skip_unless_served(provider, Gemm(num_out, depth, b_rows))
    case = operands(num_rows, num_out, depth, b_rows)
    got = provider.fp8_gemm(*case, None, b_rows, 128)
    assert_close(provider, got, *oracle(*case, b_rows))


@pytest.mark.parametrize("tokens", [1, 17, 127, 128, 129, 130])
@pytest.mark.parametrize("features", [(576, 576), (2880, 2880), (10944, 576), (576, 1536)])
def test_odd_geometry(provider, tokens, features):  # [K2, K16, P9]
    num_out, depth = features
    for gemm, sizes in [
        (Gemm(num_out, depth), (tokens, num_out, depth)),
        (Gemm(num_out, 0, 1), (576, num_out, tokens)),
    ]:
        if provider.refuses(gemm) is None:
            case = operands(*sizes, gemm.b_rows)
            assert_close(provider, provider.fp8_gemm(*case, None, gemm.b_rows, 128), *oracle(*case, gemm.b_rows))


def test_no_tokens(provider):  # [K7]
    a, a_scale, b, b_scale = operands(3, 256, 256, 128)
    assert provider.fp8_gemm(a[:0], a_scale[:0], b, b_scale, None, 128, 128).shape == (0, 256)
    none = provider.fp8_gemm(a[:, :0], a_scale[:, :0], b[:, :0], b_scale[:1].expand(256, -1)[:, :0], None, 1, 128)
    assert none.shape == (3, 256)
    assert (none == 0).all()
    assert (torch.ones(3, device=DEVICE) + 1).sum().item() == 6  # no sticky error


@pytest.mark.parametrize("shape", [(4096, 4096), (576, 640), (2880, 2944), (24576, 4096), (512, 16384)])
def test_a_row_does_not_depend_on_the_others(provider, shape):  # [N15, K12]
    num_out, depth = shape
    skip_unless_served(provider, Gemm(num_out, depth))
    skip_unless_row_invariant(provider)
    a, a_scale, b, b_scale = operands(257, num_out, depth, 128)
    whole = provider.fp8_gemm(a, a_scale, b, b_scale, None, 128, 128)
    for m in (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256):
        assert torch.equal(provider.fp8_gemm(a[:m], a_scale[:m], b, b_scale, None, 128, 128), whole[:m]), m
    order = torch.randperm(257, device=DEVICE)
    assert torch.equal(provider.fp8_gemm(a[order], a_scale[order], b, b_scale, None, 128, 128), whole[order])


def test_more_rows_than_one_wave(provider):  # [N15]
    """Kernels are also chosen by how many tiles fill the machine: rows of 8192 against rows of 300."""
    skip_unless_served(provider, Gemm(4096, 4096))
    skip_unless_row_invariant(provider)
    a, a_scale, b, b_scale = operands(8192, 4096, 4096, 128)
    whole = provider.fp8_gemm(a, a_scale, b, b_scale, None, 128, 128)
    for m in (1, 16, 300, 2048):
        assert torch.equal(provider.fp8_gemm(a[:m], a_scale[:m], b, b_scale, None, 128, 128), whole[:m]), m


def test_the_error_does_not_grow_with_depth(provider):  # [K11]
    """All products positive: a sum that stays inside the tensor core loses bits as it grows."""
    worst = {}
    for depth in (512, 16384):
        case = operands(64, 256, depth, 128, positive=True)
        expected, _ = oracle(*case, 128)
        got = provider.fp8_gemm(*case, None, 128, 128).to(torch.float64)
        worst[depth] = ((got - expected) / expected).abs().max().item()
    print(provider.name, worst)
    assert worst[16384] < ROUNDING + 2.0**-11
    assert worst[16384] < 1.5 * worst[512]


def test_bias_is_added_before_the_rounding(provider):
    skip_unless_served(provider, Gemm(512, 512, bias=True))
    a, a_scale, b, b_scale = operands(65, 512, 512, 128)
    bias = torch.randn(512, device=DEVICE).bfloat16()
    expected, magnitude = oracle(a, a_scale, b, b_scale, 128)
    got = provider.fp8_gemm(a, a_scale, b, b_scale, bias, 128, 128)
    assert_close(provider, got, expected + bias.to(torch.float64), magnitude + bias.abs().to(torch.float64))


def test_any_strides_and_poisoned_tails(provider):  # [A1, K14, K16]
    """DGRAD reads a weight's codes and scales transposed; a row may end inside a larger buffer full of NaN."""
    a, a_scale, b, b_scale = operands(65, 640, 384, 128)
    expected = provider.fp8_gemm(a, a_scale, b, b_scale, None, 128, 128)
    poisoned = torch.full((65, 1024), 0x7F, dtype=torch.uint8, device=DEVICE)
    poisoned[:, 256:640] = a.view(torch.uint8)
    scale_memory = torch.full((65, 40), float("nan"), device=DEVICE)
    scale_memory[:, 4:7] = a_scale
    left, left_scale = poisoned[:, 256:640].view(E4M3), scale_memory[:, 4:7]
    right, right_scale = b.t().contiguous().t(), b_scale.t().contiguous().t()
    assert torch.equal(provider.fp8_gemm(left, left_scale, right, right_scale, None, 128, 128), expected)
    one = a_scale[:1].contiguous()
    shared = provider.fp8_gemm(a, one, b, b_scale, None, 128, 128)
    assert torch.equal(shared, provider.fp8_gemm(a, one.expand(65, -1).contiguous(), b, b_scale, None, 128, 128))


@pytest.mark.parametrize("ragged", [False, True])
def test_offsets_past_two_to_the_thirty_one(provider, ragged):  # [K9, N15 b]
    """524,418 rows of 4096 codes and 4096 results: the last rows lie beyond 2^31 in both."""
    if provider.name == "reference":
        pytest.skip("plain torch; float64 copies of it would not fit")
    num_rows = 524_288 + 130
    depth = 4096 - 64 * ragged
    skip_unless_served(provider, Gemm(4096, depth))
    b, b_scale = codes(4096, depth, 1), scales(32, 32, 2)
    a = torch.randint(0, 120, (num_rows, depth), dtype=torch.uint8, device=DEVICE).view(E4M3)
    a_scale = scales(num_rows, 32, 3)
    got = provider.fp8_gemm(a, a_scale, b, b_scale, None, 128, 128)
    for part in (slice(0, 130), slice(num_rows - 130, num_rows)):
        assert_close(provider, got[part], *oracle(a[part], a_scale[part], b, b_scale, 128))


def test_the_operators_run_the_chosen_provider():
    a, a_scale, b, b_scale = operands(65, 640, 640, 128)
    chosen = registry.choose(Gemm(640, 640), DEVICE)
    got = torch.ops.jetgraph.fp8_gemm(a, a_scale, b, b_scale, None, 128, 128)
    assert torch.equal(got, chosen.fp8_gemm(a, a_scale, b, b_scale, None, 128, 128))
    x = torch.randn(130, 640, device=DEVICE, dtype=torch.bfloat16)
    rule = (448.0, 1e-12, "div", False)
    for got, expected in [
        (torch.ops.jetgraph.quantize(x, 1, 128, *rule), torch.ops.jetgraph.quantize(x.cpu(), 1, 128, *rule)),
        (torch.ops.jetgraph.quantize_tokens(x, 128, *rule), torch.ops.jetgraph.quantize_tokens(x.cpu(), 128, *rule)),
    ]:
        assert torch.equal(got[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(got[1].cpu(), expected[1])


def test_scales_of_another_tensor_are_refused():  # [W3, W4]
    a, a_scale, b, b_scale = operands(65, 640, 640, 128)
    with pytest.raises(ValueError, match="scales are"):
        torch.ops.jetgraph.fp8_gemm(a, a_scale[:, :4], b, b_scale, None, 128, 128)
    with pytest.raises(ValueError, match="scales are"):
        torch.ops.jetgraph.requantize_tokens(a, a_scale[:, :4], 128, 128, 448.0, 1e-12, "div", False)


def test_a_training_step_through_the_operators():
    """FPROP, DGRAD and WGRAD of one linear on the GPU, each against float64 of the same codes."""
    x, w, dy = (torch.randn(*s, device=DEVICE, dtype=torch.bfloat16) for s in [(130, 640), (384, 640), (130, 384)])
    rule, ops = (448.0, 1e-12, "div", False), torch.ops.jetgraph
    weight = ops.quantize(w, 128, 128, *rule)
    cases = [
        (*ops.quantize(x, 1, 128, *rule), *weight, 128),
        (*ops.quantize(dy, 1, 128, *rule), weight[0].t(), weight[1].t(), 128),
        (*ops.quantize_tokens(dy, 128, *rule), *ops.quantize_tokens(x, 128, *rule), 1),
    ]
    for *case, b_rows in cases:
        gemm = Gemm(case[2].shape[0], 0 if b_rows == 1 else case[2].shape[1], b_rows)
        got = ops.fp8_gemm(*case, None, b_rows, 128)
        assert_close(registry.choose(gemm, DEVICE), got, *oracle(*case, b_rows))
