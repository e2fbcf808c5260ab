"""The declared scale rule, with the right values of the public bug reports (ids in brackets)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.policy import get_policy
from jetgraph.precision import Division, Format, Granularity, Precision, Scale, ScaleRule

GROUPS = Scale(Granularity.per_group(128))
BLOCKS = Scale(Granularity.per_block(128, 128))
RULES = [ScaleRule(division=division, power_of_two=pow2) for division in Division for pow2 in (False, True)]
GRIDS = [
    Granularity.per_group(128),
    Granularity.per_block(128, 128),
    Granularity.per_token_group(128),
    Granularity.per_token(),
    Granularity.per_tensor(),
]


def quantize(x: Tensor, scale: Scale = GROUPS) -> tuple[Tensor, Tensor]:
    codes, scales = reference.quantize(x, *scale_arguments(scale))
    return codes.float(), scales


def group_of(*values: float) -> Tensor:
    x = torch.zeros(1, 128, dtype=torch.float32)
    x[0, : len(values)] = torch.tensor(values)
    return x


def test_zero_blocks_have_finite_scales_and_no_nan_codes():  # [N5a, Q1]
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    weight[0, 0] = 1
    codes, scales = quantize(weight, BLOCKS)
    assert not codes.isnan().any()
    assert codes[0, 0] == 448
    assert codes.count_nonzero() == 1
    assert scales[0, 0] == torch.tensor(1.0) / 448
    assert scales.isfinite().all()
    assert (scales > 0).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_zeros_are_zeros_by_every_rule_on_every_grid(rule, grid):  # [Q1]
    """Also the negative zero, the smallest BF16 numbers (their scale is the floor's) and no element at all."""
    tiny = torch.tensor([0.0, -0.0, 9.2e-41, -9.2e-41]).bfloat16()
    for x in (torch.zeros(130, 192), tiny.repeat(130, 48), torch.zeros(0, 192), torch.zeros(130, 0)):
        codes, scales = quantize(x.bfloat16(), Scale(grid, rule))
        assert codes.count_nonzero() == 0
        assert scales.shape == grid.scale_shape(tuple(x.shape))
        floor = 1e-12 / 448
        assert torch.equal(scales, torch.full_like(scales, 2.0**-48 if rule.power_of_two else floor))
        assert 2.0**-49 < floor < 2.0**-48


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_non_finite_value_spoils_its_own_block_by_every_rule(rule, grid, bad):  # [N5b, N5c, Q5, Q6]
    x = torch.randn(130, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean_codes, clean_scales = quantize(x, Scale(grid, rule))
    for place in ((0, 0), (129, 191), (127, 128)):
        dirty = x.clone()
        dirty[place] = bad
        codes, scales = quantize(dirty, Scale(grid, rule))
        block = tuple(i // b if b else 0 for i, b in zip(place, (grid.rows, grid.cols), strict=True))
        assert scales[block].isnan()
        spoilt = torch.zeros_like(codes, dtype=torch.bool)
        spoilt[tuple(slice(i * b, (i + 1) * b) if b else slice(None)
                     for i, b in zip(block, (grid.rows, grid.cols), strict=True))] = True  # fmt: skip
        assert torch.equal(codes.isnan(), spoilt)
        assert torch.equal(codes[~spoilt], clean_codes[~spoilt])
        assert scales.isnan().sum() == 1
        assert torch.equal(scales[~scales.isnan()], clean_scales[~scales.isnan()])


def test_what_torch_itself_does_to_infinity():  # [Q5]
    """Why a cast is not enough: it hides an infinity as 448.  If this changes, the rule's words must be read again."""
    values = torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 1e4, math.inf, -math.inf])
    assert values.to(torch.float8_e4m3fn).float().tolist() == [448.0] * 7 + [-448.0]
    assert torch.tensor(math.nan).to(torch.float8_e4m3fn).float().isnan()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("largest", [448.0, 449.0, 464.0, 465.0, 480.0, 1e4, 3.3895e38])
def test_the_largest_of_a_block_is_never_hidden_nor_infinite(rule, largest):  # [Q5]
    x = group_of(largest, -largest, 1.0)
    codes, scales = quantize(x, Scale(Granularity.per_group(128), rule))
    if rule.power_of_two:
        assert 224 <= codes[0, 0] <= 448
        assert math.frexp(scales[0, 0].item())[0] == 0.5
    else:
        assert codes[0, 0] == 448
    assert codes[0, 1] == -codes[0, 0]
    assert (codes.double() * scales)[0, 0].item() == pytest.approx(x[0, 0].item(), rel=2**-4)


def test_a_quotient_just_above_qmax_saturates():  # [own run of the bug list: 9 % of random amax]
    amax = torch.rand(4000, generator=torch.Generator().manual_seed(0)) + 0.5
    above = (amax / (amax / 448) > 448).float().mean().item()
    assert 0.05 < above < 0.15
    codes, _ = quantize(torch.nn.functional.pad(amax[:, None], (0, 127)))
    assert (codes[:, 0] == 448).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_makes_its_whole_group_nan_and_no_other(bad):  # [N5b, N5c, Q5, Q6]
    x = torch.ones(2, 256)
    x[0, 5] = bad
    codes, scales = quantize(x)
    assert codes[0, :128].isnan().all()
    assert scales[0, 0].isnan()
    assert torch.equal(codes[0, 128:], codes[1, 128:])
    assert torch.equal(codes[1], torch.full((256,), 448.0))
    weight = torch.eye(256)[:128]
    out = reference.fp8_gemm(
        codes.to(torch.float8_e4m3fn), scales, *reference.quantize(weight, *scale_arguments(BLOCKS)), 128
    )
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("division", "first", "second"),
    [
        (Division.DIVIDE, 64.0, 20.0),
        (Division.RECIPROCAL_OF_SCALE, 64.0, 20.0),
        (Division.RECIPROCAL_OF_AMAX, 72.0, 22.0),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_fall_as_the_declared_division_says(division, first, second, sign):  # [N3, Q3]
    scale = Scale(Granularity.per_group(128), ScaleRule(division=division))
    assert quantize(sign * group_of(3.9375, 0.59765625), scale)[0][0, 1] == sign * first
    if division is not Division.RECIPROCAL_OF_SCALE:
        assert quantize(sign * group_of(3.9375, 0.1845703125), scale)[0][0, 1] == sign * second


def test_the_forms_of_division_differ_at_the_rate_that_was_measured():  # [N3, Q3: 0.05 % to 0.12 % of codes]
    x = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes = {d: quantize(x, Scale(Granularity.per_group(128), ScaleRule(division=d)))[0] for d in Division}
    for one, other in itertools.combinations(Division, 2):
        rate = (codes[one] != codes[other]).float().mean().item()
        assert 2e-4 < rate < 2e-3, (one, other)


def test_with_powers_of_two_all_forms_of_division_are_one():
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16() * 3.39e38
    x = x.clamp(-3.3895e38, 3.3895e38)  # near the end of FP32, where scale * qmax would be infinite
    for source in (x, x * 2.0**-100, x * 2.0**-130):
        results = [
            quantize(source, Scale(Granularity.per_group(128), ScaleRule(division=d, power_of_two=True)))
            for d in Division
        ]
        for codes, scales in results:
            assert torch.equal(codes, results[0][0])
            assert torch.equal(scales, results[0][1])
            assert codes.abs().max() >= 224


def test_power_of_two_scales_requantise_the_codes():  # [N2, Q9]
    x = group_of(3.0, 1.0, 0.7)
    for rule, expected_scale, values in [
        (ScaleRule(), 3 / 448, (3.0, 0.96428573, 0.69642860)),
        (ScaleRule(power_of_two=True), 2**-7, (3.0, 1.0, 0.6875)),
    ]:
        codes, scales = quantize(x, Scale(Granularity.per_group(128), rule))
        assert scales[0, 0].item() == pytest.approx(expected_scale, rel=1e-7)
        assert (codes * scales)[0, :3].tolist() == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_codes_belong_to_the_scale_that_is_kept(power_of_two):  # [Q9, N2]
    """Rounding the scale up after making the codes would inflate values by up to 2: no bias, errors of half a step."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5)).bfloat16()
    for grid in GRIDS:
        scale = Scale(grid, ScaleRule(power_of_two=power_of_two))
        codes, scales = reference.quantize(x, *scale_arguments(scale))
        restored = reference.dequantize(codes, scales, grid.rows or 0, grid.cols or 0)
        error = restored - x.float()
        assert (error.abs() <= x.float().abs() * 2**-4 + scales.max() * 2**-10).all()
        signed = (error * x.float().sign()).sum() / x.float().abs().sum()
        assert abs(signed) < 3e-3


def test_round_up_to_a_power_of_two_is_right_at_every_exponent():  # [N5d, Q6]
    """Below, at and one ulp above each power of two; expected by the bits of the number."""
    powers = torch.tensor([2.0**e for e in range(-125, 127)])
    below, above = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (0.0, math.inf))
    assert torch.equal(reference.round_up_to_power_of_two(powers), powers)
    assert torch.equal(reference.round_up_to_power_of_two(below), powers)
    assert torch.equal(reference.round_up_to_power_of_two(above), powers * 2)


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_round_up_to_a_power_of_two_is_the_smallest_that_is_not_less(value):  # [Q6]
    rounded = reference.round_up_to_power_of_two(torch.tensor(value)).item()
    assert math.frexp(rounded)[0] == 0.5
    assert rounded / 2 < value <= rounded


def test_round_up_to_a_power_of_two_is_right_one_ulp_above():  # [N5d, Q6]
    above = torch.nextafter(torch.tensor(2.0**-7), torch.tensor(1.0))
    scales = torch.stack([torch.tensor(2.0**-7), above, torch.tensor(1.0), torch.tensor(3.0)])
    assert reference.round_up_to_power_of_two(scales).tolist() == [2.0**-7, 2.0**-6, 1.0, 4.0]


def test_scales_are_fp32_and_stay_exact_through_requantisation():  # [Q11, Q14]
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = reference.quantize(x, *scale_arguments(GROUPS))
    assert scales.dtype is torch.float32
    again, _ = reference.quantize(reference.dequantize(codes, scales, 1, 128), *scale_arguments(GROUPS))
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))


def test_power_of_two_scales_do_not_survive_requantisation():  # [Q11: 412 of 4096 groups flip]
    """Why nothing here quantises what was dequantised: one group in ten picks another scale, and new codes."""
    x = (torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    arguments = scale_arguments(Scale(Granularity.per_group(128), ScaleRule(power_of_two=True)))
    codes, scales = reference.quantize(x, *arguments)
    again, again_scales = reference.quantize(reference.dequantize(codes, scales, 1, 128), *arguments)
    flipped = (scales != again_scales).float().mean().item()
    assert flipped == pytest.approx(412 / 4096, abs=0.03)
    assert not torch.equal(codes.view(torch.uint8), again.view(torch.uint8))


def test_masters_are_rounded_to_bf16_before_and_never_after():  # [bug list: 24,429 of 1,048,576 codes, 64 of 64 scales]
    """Quantising FP32 masters and quantising their BF16 copies are two functions; both sides take the BF16 copy."""
    master = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    wide, narrow = quantize(master, BLOCKS), quantize(master.bfloat16(), BLOCKS)
    assert (wide[0] != narrow[0]).float().mean().item() == pytest.approx(24_429 / 1_048_576, rel=0.15)
    assert (wide[1] != narrow[1]).sum() >= 60


@pytest.mark.parametrize("change", [
    *({"qmax": value} for value in (1.0, 449.0, math.nan)),
    *({"amax_floor": value} for value in (0.0, 1e-37, math.inf, math.nan)),
], ids=str)  # fmt: skip
def test_a_rule_that_could_make_a_scale_of_zero_or_infinity_does_not_exist(change):  # [Q1, Q5]
    with pytest.raises(ValueError, match="qmax|amax_floor"):
        ScaleRule(**change)


@given(st.floats(2, 448), st.floats(1e-34, 1e30), st.sampled_from(Division), st.booleans())
def test_any_rule_that_exists_gives_finite_positive_scales_to_zeros(qmax, floor, division, power_of_two):  # [Q1]
    rule = ScaleRule(qmax, floor, division, power_of_two)
    codes, scales = quantize(torch.zeros(1, 128), Scale(Granularity.per_group(128), rule))
    assert codes.count_nonzero() == 0
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert ScaleRule.parse(str(rule)) == rule


def test_operator_and_reference_give_the_same_bytes_on_a_large_matrix():  # [N3, V16]
    """One declared rule, the same codes everywhere: 0 differing bytes on randn 4096x4096 BF16."""
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight_scale = get_policy("jet").linear("model.layers.0.mlp.up_proj").weight.scale
    assert weight_scale is not None
    codes, scales = torch.ops.jetgraph.quantize(x, *scale_arguments(weight_scale))
    blocks = x.float().view(32, 128, 32, 128)
    expected_scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    expected = (blocks / expected_scale[:, None, :, None]).to(torch.float8_e4m3fn).view(4096, 4096)
    assert (codes.view(torch.uint8) != expected.view(torch.uint8)).sum() == 0
    assert torch.equal(scales, expected_scale)


@pytest.mark.parametrize("rows", [0, 1, 17, 127, 129, 130])
@pytest.mark.parametrize("cols", [576, 2880])
def test_ragged_edges_are_zero_padded(rows, cols):  # [K16, P9]
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)).bfloat16()
    for scale in (GROUPS, BLOCKS, Scale(Granularity.per_token_group(128))):
        codes, scales = quantize(x, scale)
        assert codes.shape == x.shape
        assert scales.shape == scale.granularity.scale_shape((rows, cols))
        g = scale.granularity
        restored = reference.dequantize(codes.to(torch.float8_e4m3fn), scales, g.rows or 0, g.cols or 0)
        assert (restored - x.float()).abs().max() <= x.float().abs().max() / 16 if rows else True


def test_a_group_ends_where_the_row_ends():  # [K16]
    """What lies after the row in memory must not reach the last, ragged group: poison it with NaN and 1e7."""
    clean = torch.randn(4, 2880, generator=torch.Generator().manual_seed(3))
    expected = quantize(clean)
    for poison in (float("nan"), 1e7):
        memory = torch.full((4, 3072), poison)
        memory[:, :2880] = clean
        got = quantize(memory[:, :2880])
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_any_strides_give_the_same_codes():  # [A1, K14]
    x = torch.randn(130, 576, generator=torch.Generator().manual_seed(4))
    expected = quantize(x)
    for view in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]):
        assert all(torch.equal(a, b) for a, b in zip(quantize(view), expected, strict=True))
    row = x[:1].expand(5, -1)
    assert torch.equal(quantize(row)[0], quantize(row.contiguous())[0])


def test_precision_prints_and_parses():
    for precision in (
        Precision(Format.BF16),
        Precision(Format.E4M3, GROUPS),
        Precision(
            Format.E4M3, Scale(Granularity.per_tensor(), ScaleRule(power_of_two=True), Format.E8M0, dynamic=False)
        ),
        Precision(Format.E4M3, Scale(Granularity.per_token(), ScaleRule(448.0, 1e-10, Division.RECIPROCAL_OF_AMAX))),
    ):
        assert Precision.parse(str(precision)) == precision
    with pytest.raises(ValueError, match="expected a format"):
        Precision.parse("f8 e4m3")
