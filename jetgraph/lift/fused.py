"""Expansions of the fused operators (`lowering.fused_ops`): the terms of their definitions, so a graph means the same
with and without fusions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jetgraph.layout import Value
from jetgraph.lift.aten import row_mean
from jetgraph.lift.gemm import quantized_rows, quantized_tokens
from jetgraph.lift.lifter import Frame, Lifter, Nothing, handles, only
from jetgraph.precision import Format
from jetgraph.record import Op


def _matrix(lift: Lifter, x: Value) -> Value:
    """[..., C] as [T, C]."""
    return lift.layouts.token_matrix(lift.layouts.read(x))


def _both(lift: Lifter, x: Value, group: int, tokens: bool, rule: tuple) -> tuple[Any, ...]:
    rows = _matrix(lift, x)
    along_tokens = quantized_tokens(lift, rows, group, rule) if tokens else (None, None)
    return (*quantized_rows(lift, rows, 1, group, rule), *along_tokens)


@handles("jetgraph.quantize_rows_and_tokens")
def _rows_and_tokens(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, group, *rule = args
    return _both(lift, x, group, True, tuple(rule))


@handles("jetgraph.rms_norm_quantize")
def _rms_norm_quantize(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, residual, weight, eps, own_mean, tokens, group, *rule = args
    pointwise = lift.layouts.pointwise
    s = x if residual is None else pointwise("add", [x, residual], Format.BF16)
    r = _inverse_rms_of(lift, s, eps, own_mean)
    normed = pointwise("mul", [s, r], Format.BF16)
    y = pointwise("mul", [weight, normed], Format.BF16)
    return (None if residual is None else s, r, *_both(lift, y, group, tokens, tuple(rule)))


@handles("jetgraph.inverse_rms")
def _inverse_rms(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    return _inverse_rms_of(lift, *args)


def _inverse_rms_of(lift: Lifter, x: Value, eps: float, own_mean: bool) -> Value:
    pointwise = lift.layouts.pointwise
    square = pointwise("pow", [x], Format.F32, {"exponent": 2.0})
    mean = row_mean(lift, square, Format.F32, True, "jetgraph::row_mean" if own_mean else "aten::mean")
    shifted = pointwise("add", [mean, lift.operand(eps)], Format.F32)
    return pointwise("rsqrt", [shifted], Format.F32, kernel="aten::rsqrt")


@handles("jetgraph.rms_norm_rotary")
def _rms_norm_rotary(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    h, weight, eps, own_mean, *angles = args
    layouts, r = lift.layouts, Nothing()
    pointwise = layouts.pointwise
    if weight is not None:
        where = lift.builder.where
        lift.builder.where = replace(where, fqn=_owner(lift, weight, where.fqn))  # the norm, not whoever rotates
        r = _inverse_rms_of(lift, h, eps, own_mean)
        h = pointwise("mul", [weight, pointwise("mul", [h, r], Format.BF16)], Format.BF16)
        lift.builder.where = where
    h = layouts.permute(h, (0, 2, 1, 3))
    half = layouts.shape(h)[-1] // 2
    first, second = layouts.slice(h, 3, 0, half), layouts.slice(h, 3, half, None)
    turned = layouts.cat([pointwise("neg", [second], Format.BF16), first], 3)
    cos, sin = (Value(a.term, a.atoms, (a.dims[0], (), *a.dims[1:])) for a in angles)
    products = [pointwise("mul", [a, b], Format.BF16) for a, b in ((h, cos), (turned, sin))]
    return layouts.permute(pointwise("add", products, Format.BF16), (0, 2, 1, 3)), r


def _owner(lift: Lifter, weight: Value, otherwise: str) -> str:
    """The module that a parameter belongs to."""
    node = lift.builder.nodes[weight.term]
    return str(node.attr("name")).rpartition(".")[0] if node.op == "parameter" else otherwise


@handles("jetgraph.silu_mul_quantize")
def _silu_mul_quantize(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    gate, up, tokens, group, *rule = args
    silu = lift.layouts.pointwise("silu", [gate], Format.BF16, kernel="aten::silu")
    return _both(lift, lift.layouts.pointwise("mul", [silu, up], Format.BF16), group, tokens, tuple(rule))


@handles("jetgraph.silu_mul_backward_quantize")
def _silu_mul_backward_quantize(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    dy, gate, up, group, *rule = args
    pointwise = lift.layouts.pointwise
    d_silu = pointwise("mul", [dy, up], Format.BF16)
    d_gate = pointwise("silu_backward", [d_silu, gate], Format.BF16)
    d_up = pointwise("mul", [dy, pointwise("silu", [gate], Format.BF16, kernel="aten::silu")], Format.BF16)
    return tuple(half for d in (d_gate, d_up) for half in _both(lift, d, group, True, tuple(rule)))
