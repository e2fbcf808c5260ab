"""Fused kernels against what they stand for, on the GPU: the graph without fusions, operator by operator, bit for bit.

The unfused side is `lowering.fused_reference`: ATen's operators and our quantisers on the same device.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import jetgraph
from jetgraph.lowering import fused_ops, fused_reference, reference, registry  # noqa: F401  (registers the operators)
from jetgraph.lowering.provider import Fused
from jetgraph.lowering.triton_fused_provider import TritonFused, exercises, silu_way
from tests.core.small_models import one_step, random_ids, random_model
from tests.core.test_scale_layout import SHAPES, apart_from_fakes

triton_fused = pytest.importorskip("jetgraph.lowering.triton_fused", reason="needs triton")
from jetgraph.lowering import triton_rotary, triton_rows, triton_silu, triton_transpose  # noqa: E402  (they import triton)
from jetgraph.lowering.triton_fused import Tile  # noqa: E402
from jetgraph.lowering.triton_provider import words_refusal  # noqa: E402

JET = (448.0, 1e-12, "div", False)
RULES = [
    JET, (448.0, 1e-4, "div", True), (448.0, 1e-4, "mul1/s", False), (448.0, 1e-4, "mulq/a", False),
    (240.0, 1e-10, "div", False),
]  # fmt: skip
COUNTS, FEATURES = (1, 17, 127, 128, 129, 1000), (576, 2880, 4096, 12288)
DEVICE = torch.device("cuda", 0)
ops = torch.ops.jetgraph


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """BF16 whose features have very different sizes, with zeros and -0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 9, shape[-1:], generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.02, -0.0, x).bfloat16().to(DEVICE)


def assert_same(got, expected) -> None:
    """Equal bits; NaN is NaN."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert (g.shape, g.dtype) == (e.shape, e.dtype)
        nan = e.float().isnan()
        assert torch.equal(g.float().isnan(), nan), f"result {i}: NaN elsewhere"
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[e.element_size()]
        different = (g.view(bits) != e.contiguous().view(bits)) & ~nan
        assert not different.any(), f"result {i}: {different.sum().item()} of {different.numel()} differ"


def check(kernel: str, *arguments, **options) -> None:
    """Our kernel itself, not whom the registry would choose."""
    got, expected = getattr(triton_fused, kernel)(*arguments, **options), getattr(fused_reference, kernel)(*arguments)
    assert_same(*(([one] if isinstance(one, Tensor) else one) for one in (got, expected)))


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize(("batch", "length", "heads"), [(0, 5, 2), (1, 1, 1), (1, 257, 9), (3, 130, 8)])
def test_rotation_of_heads(size, batch, length, heads):  # [A1, K14]
    x, weight = numbers(batch, length, heads, size), numbers(size, seed=1)
    for angles in (1, batch):
        cos, sin = (numbers(angles, length, size, seed=s) for s in (2, 3))
        views = torch.stack((x, x), -1)[..., 0]
        part = torch.cat((x, x[:, :, :1]), 2)[:, :, :heads]  # of wider rows, read where it lies
        for given in (x, views, part):
            for w in (weight, None):
                arguments = given, w, 1e-6, True, cos, sin
                assert_same(triton_rotary.rms_norm_rotary(*arguments), fused_reference.rms_norm_rotary(*arguments))


def test_angles_that_tokens_share_run_the_definition():
    x, cos, sin = numbers(2, 5, 3, 64), numbers(1, 1, 64, seed=1), numbers(2, 5, 64, seed=2)
    for angles in ((cos, cos), (sin, cos), (cos.float(), cos.float())):
        arguments = x, None, 0.0, True, *angles
        assert_same(ops.rms_norm_rotary(*arguments), fused_reference.rms_norm_rotary(*arguments))


def check_all(x, residual, gate, up, dy, weight, rule=JET) -> None:
    check("quantize_rows_and_tokens", x.reshape(-1, x.shape[-1]), 128, *rule)
    check("inverse_rms", x, 1e-6, True)
    for tokens in (False, True):
        check("rms_norm_quantize", x, None, weight, 1e-6, True, tokens, 128, *rule)
        check("rms_norm_quantize", x, residual, weight, 1e-6, True, tokens, 128, *rule)
        check("silu_mul_quantize", gate, up, tokens, 128, *rule, way=silu_way(DEVICE)[0])
    check("silu_mul_backward_quantize", dy, gate, up, 128, *rule, way=silu_way(DEVICE)[0])


def inputs(*shape: int) -> list[Tensor]:
    return [*(numbers(*shape, seed=s) for s in range(5)), numbers(shape[-1], seed=5)]


def test_the_provider_is_usable_and_chosen():
    finding = registry.probe("triton_fused", DEVICE)
    assert finding.ok, finding.reason
    assert registry.choose(Fused("rms_norm_quantize", 4096, 128, JET), DEVICE).name == "triton_fused"
    assert {k for k, _ in exercises(1, 32, JET, DEVICE)} == TritonFused().kernels


def test_silu_of_every_bf16_number():
    """By IEEE division it must be ATen's, and by products; a shorter way may miss a number, and is not taken then."""
    for way in range(triton_silu.PRODUCTS.value, len(triton_silu.WAYS)):
        assert triton_silu.differing_inputs(DEVICE, way) == ""
    assert triton_silu.differing_inputs(DEVICE, silu_way(DEVICE)[0]) == ""


def test_a_shorter_silu_misses_three_numbers_at_most():
    for way in range(triton_silu.PRODUCTS.value):
        found = triton_silu.differing_inputs(DEVICE, way)
        assert not found or re.match(r"silu of [123] of 65,536 BF16 numbers", found), found


def test_tokens_on_words_are_the_references():  # [Q3]
    assert words_refusal(DEVICE) == ""
    x = numbers(391, 1408)
    expected = tuple(t.to(DEVICE) for t in reference.quantize(x.cpu().t(), 1, 128, *JET))
    assert_same(triton_fused.quantize_tokens(x, 128, *JET), expected)
    assert_same(ops.quantize_tokens(x, 128, *JET), expected)
    assert_same(ops.quantize_tokens(x[:, 1:], 128, *JET), tuple(t[1:].contiguous() for t in expected))  # 2 bytes off


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (144, 272), (4096, 12288), (576, 1536), (130, 70), (1000, 49)])
def test_transposed_codes(shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    memory = torch.zeros(shape[0] + 2, shape[1] + 48, dtype=torch.uint8, device=DEVICE)
    memory[1:-1, 16:-32] = codes
    for given in (codes, memory[1:-1, 16:-32]):
        got = triton_transpose.transpose_codes(given.view(torch.float8_e4m3fn))
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.uint8), codes.t())


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("count", COUNTS)
def test_every_geometry(count, features):  # [K7, K16, P9]
    check_all(*inputs(count, features))
    assert (torch.ones(3, device=DEVICE) + 1).sum().item() == 6  # no sticky error


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule(rule):  # [Q3, N3, Q8]
    check_all(*inputs(259, 1408), rule=rule)


def test_batches_and_views_with_poisoned_tails():  # [A1, K14]
    batch = [t.view(3, 43, 576) if t.ndim == 2 else t for t in inputs(129, 576)]
    check_all(*batch)
    views = []
    for t in inputs(129, 576)[:5]:
        memory = torch.full((131, 640), float("nan"), dtype=t.dtype, device=DEVICE)
        memory[1:-1, 40:616] = t
        views.append(memory[1:-1, 40:616])
    check_all(*views, numbers(576, seed=5))
    transposed = [t.t().contiguous().t() for t in inputs(129, 576)[:5]]
    check_all(*transposed, numbers(576, seed=5))
    odd = torch.empty(129 * 576 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(129, 576)  # 2 bytes off
    odd.copy_(numbers(129, 576))
    check("quantize_rows_and_tokens", odd, 128, *JET)


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e-8, 1e4, 1e30])
def test_sizes_from_one_end_to_the_other(size):
    check_all(*((t.float() * size).bfloat16() for t in inputs(130, 576)))


def test_zero_rows_and_no_rows():
    check_all(*(t * 0 for t in inputs(130, 576)))
    check_all(*inputs(0, 576))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_loud(value):  # [N5]
    """The same groups are NaN as without fusion, and they are not hidden."""
    for place in range(5):
        given = inputs(130, 576)
        given[place][7, 300] = value
        check_all(*given)
    x = numbers(130, 576)
    x[7, 300] = value
    codes, scales, codes_t, scales_t = ops.quantize_rows_and_tokens(x, 128, *JET)
    assert scales.isnan().nonzero().tolist() == [[7, 2]]
    assert scales_t.isnan().nonzero().tolist() == [[300, 0]]
    assert codes[7, 256:384].float().isnan().all()
    assert codes_t[300, :128].float().isnan().all()
    r = ops.rms_norm_quantize(x, None, numbers(576, seed=5), 1e-6, True, False, 128, *JET)[1]
    assert not r[7].isfinite() or r[7].item() == 0.0  # 1/√inf
    assert r.isfinite().sum() >= 129


@pytest.mark.parametrize("length", [1, 100, 576, 2880, 4097, 12288])
def test_row_means_do_not_depend_on_rows_alignment_or_warps(length):  # [N15]
    x = torch.randn(257, length, device=DEVICE)
    whole = triton_rows.row_mean(x)
    for count in (1, 2, 3, 63, 128):
        assert torch.equal(triton_rows.row_mean(x[:count]), whole[:count])
    shifted = torch.empty(257 * length + 1, device=DEVICE)[1:].view(257, length).copy_(x)
    assert torch.equal(triton_rows.row_mean(shifted), whole)
    rest, lanes = torch.nn.functional.pad(x, (0, -length % 256)), torch.zeros(257, 256, device=DEVICE)
    for size in triton_rows.pieces(length):
        piece, rest = rest[:, :size], rest[:, size:]
        while piece.shape[1] > 256:
            piece = piece[:, : piece.shape[1] // 2] + piece[:, piece.shape[1] // 2 :]
        lanes = lanes + piece
    assert not rest.numel()
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    assert torch.equal(lanes[:, 0] / torch.full_like(lanes[:, 0], length), whole)


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_tiles_and_warps_change_no_bit(warps):
    x, _, gate, up, dy, _ = inputs(384, 1408)
    for height in (16, 32, 64, 128):
        tile = Tile(height, warps)
        for tokens in (False, True):
            check("silu_mul_quantize", gate, up, tokens, 128, *JET, tile=tile)
    for tile in (Tile(128, warps), Tile(128, warps, split=False), Tile(128, warps, registers=128)):
        check("silu_mul_backward_quantize", dy, gate, up, 128, *JET, tile=tile)
    check("quantize_rows_and_tokens", x, 128, *JET, tile=Tile(128, warps))


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 2), Tile(2, 2), Tile(1, 4), Tile(1, 1, registers=128)], ids=str)
def test_rows_of_a_norm_change_no_bit(tile):
    for features in (576, 2880, 4096, 5120, 12288):
        x, residual, *_, weight = inputs(131, features)
        for added in (None, residual):
            check("rms_norm_quantize", x, added, weight, 1e-6, True, False, 128, *JET, tile=tile)


def test_offsets_past_two_to_the_thirty_one():  # [K9]
    """300,034 x 8192 numbers: the last tokens lie beyond 2^31 in every result."""
    x = torch.randn(300_034, 8192, device=DEVICE, dtype=torch.bfloat16)
    codes, scales, codes_t, scales_t = triton_fused.quantize_rows_and_tokens(x, 128, *JET)
    tail = x[-130:]
    expected = fused_reference.quantize_rows_and_tokens(tail, 128, *JET)
    assert_same((codes[-130:], scales[-130:]), expected[:2])
    last = fused_reference.quantize_rows_and_tokens(x[300_032:], 128, *JET)
    assert_same((codes_t[:, 300_032:].contiguous(), scales_t[:, -1:].contiguous()), last[2:])


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("length", [17, 131])
def test_a_fused_model_has_every_bit(kind, length):
    plain, fused = (jetgraph.compile(random_model(kind).cuda(), "jet", fused=on) for on in (False, True))
    ids = random_ids(plain, 2, length).cuda()
    (logits, grads), (fused_logits, fused_grads) = one_step(plain, ids), one_step(fused, ids)
    assert torch.equal(fused_logits, logits)
    assert [n for n in grads if not torch.equal(grads[n], fused_grads[n])] == []
    with torch.no_grad():
        assert torch.equal(fused(input_ids=ids, use_cache=False).logits, logits)
    assert [f for f in fused.jetgraph.fusions() if f.refusal] == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_lie_as_their_fakes_say(shape):
    assert apart_from_fakes(*shape, DEVICE) == []
