"""`jetgraph::linear` and its two gradients: a linear layer in a declared precision, as one operator per GEMM.

`jetgraph.linear.Linear` calls them.  They carry the precision with them, so whoever runs the layer — our compiled
region, plain eager, another compiler, an exported program, a copy of the model — runs that precision or nothing.
Inside a compiled region `passes.quantize_linears` expands them into quantise → GEMM, where linears share operands;
called as they are, they compute the same bits from the same primitives.

Shapes: x [T, K], weight [N, K], bias [N], result and its gradient dy [T, N]; all BF16.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

import jetgraph.lowering.torch_ops  # noqa: F401  (registers the primitives)
from jetgraph.lowering.operators import Operator
from jetgraph.lowering.provider import Gemm
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.policy import LinearPrecision, WgradSource
from jetgraph.precision import Granularity, Precision

ops = torch.ops.jetgraph


@lru_cache(maxsize=256)
def parsed(precision: str) -> LinearPrecision:
    return LinearPrecision.parse(precision)


def block(precision: Precision) -> tuple[int, int]:
    """Rows and columns that share a scale; 0 is the whole axis, as the operators count."""
    assert precision.scale is not None
    granularity = precision.scale.granularity
    return granularity.rows or 0, granularity.cols or 0


def along_tokens(precision: Precision) -> bool:
    """Whether an operand of WGRAD is grouped along the tokens (else it has one scale for the whole tensor)."""
    assert precision.scale is not None
    return precision.scale.granularity != Granularity.per_tensor()


@Operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """FPROP: Q(x) · Q(weight)ᵀ + bias, accumulated in FP32 and rounded once to BF16."""
    p = parsed(precision)
    return ops.fp8_gemm(*_quantized(x, p.activation), *_quantized(weight, p.weight), bias, *gemm_grid("fprop", p))


@Operator
def linear_dgrad(dy: Tensor, weight: Tensor, precision: str) -> Tensor:
    """DGRAD: Q(dy) · Q(weight) → dx [T, K]; the weight's codes are FPROP's, read transposed."""
    p = parsed(precision)
    codes, scale = _quantized(weight, p.weight)
    return ops.fp8_gemm(*_quantized(dy, p.gradient), codes.t(), scale.t(), None, *gemm_grid("dgrad", p))


@Operator
def linear_wgrad(dy: Tensor, x: Tensor, precision: str) -> Tensor:
    """WGRAD: Q(dy)ᵀ · Q(x) → dW [N, K], both operands grouped along the tokens."""
    p = parsed(precision)
    left = _token_grouped(dy, p.wgrad)
    if p.wgrad_source is WgradSource.REQUANTIZE and along_tokens(p.wgrad):
        group, _, *rule = scale_arguments(p.wgrad.scale)  # type: ignore[arg-type]
        right = ops.requantize_tokens(*_quantized(x, p.activation), p.group, group, *rule)
    else:
        right = _token_grouped(x, p.wgrad)
    return ops.fp8_gemm(*left, *right, None, *gemm_grid("wgrad", p))


def gemm_grid(role: str, p: LinearPrecision) -> tuple[int, int]:
    """`jetgraph::fp8_gemm`'s last arguments: rows of b that share a scale, and the group along the contraction."""
    weight_rows, weight_cols = block(p.weight)
    if role == "fprop":
        return weight_rows, block(p.activation)[1]
    if role == "dgrad":
        return weight_cols, block(p.gradient)[1]
    return (1, block(p.wgrad)[0]) if along_tokens(p.wgrad) else (0, 0)


def linear_requests(num_out: int, depth: int, bias: bool, p: LinearPrecision) -> tuple[Gemm, Gemm, Gemm]:
    """FPROP, DGRAD and WGRAD of a linear with weight [num_out, depth], as the registry asks about them."""
    return (
        Gemm(num_out, depth, *gemm_grid("fprop", p), bias),
        Gemm(depth, num_out, *gemm_grid("dgrad", p), is_dgrad=True),
        Gemm(depth, 0, *gemm_grid("wgrad", p)),
    )


def _quantized(x: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    assert precision.scale is not None
    return ops.quantize(x, *scale_arguments(precision.scale))


def _token_grouped(x: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Codes [C, T] and their scales."""
    assert precision.scale is not None
    rows, _, *rule = scale_arguments(precision.scale)
    if along_tokens(precision):
        return ops.quantize_tokens(x, rows, *rule)
    codes, scale = _quantized(x, precision)
    return codes.t(), scale.t()


@linear.register_fake
def _(x, weight, bias, precision):
    return x.new_empty((x.shape[0], weight.shape[0]))


@linear_dgrad.register_fake
def _(dy, weight, precision):
    return dy.new_empty((dy.shape[0], weight.shape[1]))


@linear_wgrad.register_fake
def _(dy, x, precision):
    return dy.new_empty((dy.shape[1], x.shape[1]))


def _save(ctx, inputs, output) -> None:
    x, weight, bias, ctx.precision = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx, dy):
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias, _ = ctx.needs_input_grad
    dx = ops.linear_dgrad(dy, weight, ctx.precision) if need_x else None
    dw = ops.linear_wgrad(dy, x, ctx.precision) if need_weight else None
    return dx, dw, dy.sum(0) if need_bias else None, None


linear.register_autograd(_gradients, setup_context=_save)
linear_dgrad.refuse_gradient()
linear_wgrad.refuse_gradient()
