"""Operators that compute something and quantise it in one go, defined by the operators that they stand for.

Definitions are in `lowering.fused_reference`: the same ATen operators, rounding where they round, and the same
quantisers.  On CUDA a kernel that gives their bits runs instead, if the registry knows one (`lowering.cuda_fused`).
`jetgraph.passes.fuse` puts them into graphs; the lifter reads them as the terms of their definitions (`lift.fused`).

Shapes: x, residual [..., C] BF16, weight [C] BF16; T the product of the leading sizes; codes [T, C] and scales
[T, ⌈C/group⌉] grouped along the features, codes_t [C, T] and scales_t [C, ⌈T/group⌉] along the tokens; scales lie as
`scale_layout` says.  What a caller does not ask for comes back with no elements.  ``rule`` is (qmax, amax_floor,
division, power_of_two).
"""

from __future__ import annotations

import torch
from torch import Tensor

import jetgraph.lowering.torch_ops
from jetgraph.lowering import fused_reference
from jetgraph.lowering.operators import Operator
from jetgraph.lowering.scale_layout import row_scales, token_scales


def _both_fake(x: Tensor, group: int, tokens: bool) -> tuple[Tensor, ...]:
    num_tokens, size = x.numel() // x.shape[-1], x.shape[-1]
    groups, token_groups = -(-size // group), (num_tokens + group - 1) // group
    codes = x.new_empty((num_tokens, size), dtype=torch.float8_e4m3fn)
    scales = row_scales(x, num_tokens, groups)
    if not tokens:
        return codes, scales, codes.new_empty((0, size)), scales.new_empty((0, groups))
    return codes, scales, codes.new_empty((size, num_tokens)), token_scales(x, size, token_groups)


@Operator
def quantize_rows_and_tokens(
    x: Tensor, group: int, qmax: float, amax_floor: float, division: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize(x, 1, group)` and `quantize_tokens(x, group)` of x [T, C]: what FPROP or DGRAD, and WGRAD, read."""
    return fused_reference.quantize_rows_and_tokens(x, group, qmax, amax_floor, division, power_of_two)


@quantize_rows_and_tokens.register_fake
def _(x, group, qmax, amax_floor, division, power_of_two):
    return _both_fake(x, group, True)


@Operator
def rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    own_mean: bool,
    tokens: bool,
    group: int,
    qmax: float,
    amax_floor: float,
    division: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s = x + residual; r = 1/√(mean(s²) + eps) [..., 1] FP32; the codes of weight · bf16(s · r).

    ``own_mean`` says whose mean it is: `jetgraph::row_mean`, or ATen's.  Returns (s, r, codes, scales, codes_t,
    scales_t); without a residual, s is empty.
    """
    rule = qmax, amax_floor, division, power_of_two
    return fused_reference.rms_norm_quantize(x, residual, weight, eps, own_mean, tokens, group, *rule)


@rms_norm_quantize.register_fake
def _(x, residual, weight, eps, own_mean, tokens, group, qmax, amax_floor, division, power_of_two):
    s = x.new_empty((0, *x.shape[1:])) if residual is None else x.new_empty(x.shape)
    return s, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), *_both_fake(x, group, tokens)


@Operator
def inverse_rms(x: Tensor, eps: float, own_mean: bool) -> Tensor:
    """1/√(mean(x²) + eps) [..., 1] FP32; ``own_mean`` as of `rms_norm_quantize`."""
    return fused_reference.inverse_rms(x, eps, own_mean)


@inverse_rms.register_fake
def _(x, eps, own_mean):
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@Operator
def rms_norm_rotary(
    x: Tensor, weight: Tensor | None, eps: float, own_mean: bool, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Heads x [B, S, H, D], normed by weight [D] if there is one, turned by cos and sin [1 or B, S, D].

    h = weight · bf16(x · r) with r [B, S, H, 1] as of `inverse_rms`; h · cos + (-second half of h, first half) · sin,
    every product and sum rounded to BF16.  Returns the heads [B, S, H, D] and r, which is empty without a weight.
    """
    return fused_reference.rms_norm_rotary(x, weight, eps, own_mean, cos, sin)


@rms_norm_rotary.register_fake
def _(x, weight, eps, own_mean, cos, sin):
    r = x.new_empty((0,) if weight is None else (*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape), r


@Operator
def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    tokens: bool,
    group: int,
    qmax: float,
    amax_floor: float,
    division: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes of bf16(silu(gate)) · up."""
    return fused_reference.silu_mul_quantize(gate, up, tokens, group, qmax, amax_floor, division, power_of_two)


@silu_mul_quantize.register_fake
def _(gate, up, tokens, group, qmax, amax_floor, division, power_of_two):
    return _both_fake(gate, group, tokens)


@Operator
def silu_mul_backward_quantize(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    group: int,
    qmax: float,
    amax_floor: float,
    division: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The codes, both ways, of d_gate = silu_backward(bf16(dy · up), gate), and then of d_up = dy · silu(gate)."""
    return fused_reference.silu_mul_backward_quantize(dy, gate, up, group, qmax, amax_floor, division, power_of_two)


@silu_mul_backward_quantize.register_fake
def _(dy, gate, up, group, qmax, amax_floor, division, power_of_two):
    return (*_both_fake(gate, group, True), *_both_fake(up, group, True))


import jetgraph.lowering.cuda_fused  # noqa: E402, F401  (how they run on a GPU; it needs them defined)
