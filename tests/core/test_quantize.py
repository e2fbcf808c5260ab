"""The declared scale rule, with the right values of the public bug reports (ids in brackets)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.policy import get_policy
from jetgraph.precision import Division, Format, Granularity, Precision, Scale, ScaleRule

GROUPS = Scale(Granularity.per_group(128))
BLOCKS = Scale(Granularity.per_block(128, 128))


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


def test_power_of_two_scales_requantise_the_codes():  # [N2, Q9]
    x = group_of(3.0, 1.0, 0.7)
    for rule, expected_scale, values in [
        (ScaleRule(), 3 / 448, (3.0, 0.96428573, 0.69642860)),
        (ScaleRule(power_of_two=True), 2**-7, (3.0, 1.0, 0.6875)),
    ]:
        codes, scales = quantize(x, Scale(Granularity.per_group(128), rule))
        assert scales[0, 0].item() == pytest.approx(expected_scale, rel=1e-7)
        assert (codes * scales)[0, :3].tolist() == pytest.approx(values, rel=1e-6)


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
