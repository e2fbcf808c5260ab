"""Expansions of matrix products, BF16 and FP8: the operators whose role (FPROP, DGRAD, WGRAD) the graph must know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jetgraph.layout import Value, is_token
from jetgraph.lift.lifter import (
    CONTRACTION_ROLE,
    Frame,
    Lifter,
    QuantizedHalf,
    handles,
    only,
    refuse_unless,
    with_defaults,
)
from jetgraph.policy import LinearPrecision, WgradSource
from jetgraph.precision import Division, Format, Granularity, Precision, Scale, ScaleRule
from jetgraph.record import Op

# -------------------------------------------------------------------------------------------------------------- GEMM


def gemm(lift: Lifter, a: int, b: int, contraction: str, kernel: str) -> Value:
    """A gemm node as a captured [rows, cols] tensor; its role follows from what is contracted."""
    lift.builder.where = replace(lift.builder.where, role=CONTRACTION_ROLE[contraction])
    term = lift.builder.gemm(a, b, contraction, kernel)
    if contraction == "tn":
        return lift.layouts.value(term, lift.builder.nodes[term].type.shape)  # type: ignore[arg-type]
    return lift.layouts.token_matrix(term)


@handles("aten.mm")
def _mm(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    kernel = "aten::mm" if lift.format_of(op) is Format.BF16 else "aten::mm.f32"
    return lift.rounded(_bf16_gemm(lift, args[0], args[1], kernel), op)


@handles("aten.addmm")
def _addmm(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, alpha=1, beta=1)
    bias, a, b = args
    return with_bias(lift, op, _bf16_gemm(lift, a, b, "aten::addmm"), bias)


def with_bias(lift: Lifter, op: Op, product: Value, bias: Value | None) -> Value:
    """The FP32 sums of a GEMM, plus the bias [N] in FP32, rounded once: what ATen's addmm does too (measured)."""
    if bias is None:
        return lift.rounded(product, op)
    refuse_unless(len(bias.dims) == 1 and not any(map(is_token, bias.atoms)), "a bias that is not one row")
    return lift.layouts.pointwise("add", [product, bias], lift.format_of(op))


def _bf16_gemm(lift: Lifter, a: Value, b: Value, kernel: str) -> Value:
    layouts = lift.layouts
    if a.dims[0] == layouts.tokens and not any(map(is_token, b.atoms)):
        term = b.term
        refuse_unless(len(lift.builder.nodes[term].type.shape) == 2, "a matrix product with something not a matrix")
        rows, cols = b.dims
        contraction = "nt" if b.atoms == cols + rows else "nn"
        refuse_unless(b.atoms in (cols + rows, rows + cols), "a rearranged weight")
        return gemm(lift, layouts.read(a), term, contraction, kernel)
    refuse_unless(a.dims[1] == b.dims[0] == layouts.tokens, "a matrix product that is neither FPROP, DGRAD nor WGRAD")
    return gemm(lift, layouts.read(layouts.permute(a, (1, 0))), layouts.read(b), "tn", kernel)


@handles("aten.bmm")
def _bmm(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    a, b = args
    refuse_unless(not a.dims[2] and not b.dims[1], "a batched product with a contraction longer than 1")
    counts = [lift.builder.op(x.term) == "int_to_float" for x in args]  # 0 + (-0) is +0: no negative zero may occur
    refuse_unless(any(counts), "a product of possibly negative numbers with K = 1")
    lift.builder.rules["matmul with K = 1 is mul"] += 1
    column = Value(a.term, a.atoms, (a.dims[0], a.dims[1], ()))
    row = Value(b.term, b.atoms, (b.dims[0], (), b.dims[2]))
    return lift.layouts.pointwise("mul", [column, row], lift.format_of(op))


@handles("jetgraph.row_tile_gemm")
def _row_tile_gemm(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, weight, bias = with_defaults(args, None, None)
    refuse_unless(weight.atoms == weight.dims[0] + weight.dims[1], "a rearranged weight")
    product = gemm(lift, lift.layouts.read(x), weight.term, "nt", "jetgraph::row_tile_gemm")
    return lift.layouts.view(with_bias(lift, op, product, bias), frame.shape(op))


# --------------------------------------------------------------------------------------------------------------- FP8


def _rule(qmax: float, floor: float, division: str, power_of_two: bool) -> ScaleRule:
    return ScaleRule(float(qmax), float(floor), Division(division), bool(power_of_two))


def _halves(term: int, transposed: bool) -> tuple[QuantizedHalf, QuantizedHalf]:
    return QuantizedHalf(term, "codes", transposed), QuantizedHalf(term, "scale", transposed)


@handles("jetgraph.quantize", "jetgraph.quantize_weight")
def _quantize(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, rows, cols, *rule = args
    return quantized_rows(lift, x, rows, cols, tuple(rule))


def quantized_rows(lift: Lifter, x: Value, rows: int, cols: int, rule: tuple) -> tuple[QuantizedHalf, QuantizedHalf]:
    """Codes and scales of a matrix, in blocks of rows x cols; 0 is the whole axis."""
    scale = Scale(Granularity(rows or None, cols or None), _rule(*rule))
    return _halves(lift.builder.quantize(_rows(lift, x), scale, "jetgraph::quantize"), False)


def _rows(lift: Lifter, x: Value) -> int:
    """The term of a matrix whose rows are tokens (or a stored parameter's rows): blocks are counted on it."""
    refuse_unless(len(x.dims) == 2, "blocks of something not a matrix")
    if any(map(is_token, x.atoms)):
        refuse_unless(x.dims[0] == lift.layouts.tokens, "blocks along another axis than a token's features")
        return lift.layouts.read(x)
    refuse_unless(x.atoms == x.dims[0] + x.dims[1], "blocks of a rearranged parameter")
    return x.term


@handles("jetgraph.quantize_transposed", "jetgraph.quantize_weight_transposed")
def _quantize_transposed(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, rows, cols, *rule = args
    scale = Scale(Granularity(rows or None, cols or None), _rule(*rule))
    return _halves(lift.builder.quantize(_rows(lift, x), scale, "jetgraph::quantize"), True)


@handles("jetgraph.quantize_tokens")
def _quantize_tokens(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, group, *rule = args
    return quantized_tokens(lift, x, group, tuple(rule))


def quantized_tokens(lift: Lifter, x: Value, group: int, rule: tuple) -> tuple[QuantizedHalf, QuantizedHalf]:
    """Codes and scales of a matrix in groups along its tokens, stored transposed."""
    scale = Scale(Granularity.per_token_group(group), _rule(*rule))
    return _halves(lift.builder.quantize(_rows(lift, x), scale, "jetgraph::quantize_tokens"), True)


@handles("jetgraph.requantize_tokens")
def _requantize_tokens(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    codes, scale_half, cols, group, *rule = args
    _check_halves(lift, codes, scale_half)
    held = lift.builder.precision(codes.term).scale
    refuse_unless(not codes.transposed and held is not None and held.granularity.cols == cols, "scales of another grid")
    scale = Scale(Granularity.per_token_group(group), _rule(*rule))
    return _halves(lift.builder.quantize(codes.term, scale, "jetgraph::requantize_tokens"), True)


def _check_halves(lift: Lifter, codes: Any, scale: Any) -> None:
    refuse_unless(isinstance(codes, QuantizedHalf) and isinstance(scale, QuantizedHalf), "codes that nothing quantised")
    refuse_unless((codes.part, scale.part) == ("codes", "scale"), "codes and scales exchanged")
    refuse_unless(codes.term == scale.term, "codes with the scales of another tensor")
    refuse_unless(codes.transposed == scale.transposed, "codes transposed without their scales")


@handles("jetgraph.fp8_gemm")
def _fp8_gemm(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    a, a_scale, b, b_scale, bias, b_rows, group, provider = with_defaults(args, *(None,) * 6, "")
    _check_halves(lift, a, a_scale)
    _check_halves(lift, b, b_scale)
    refuse_unless(b.transposed or not a.transposed, "token-grouped codes against a natural operand")
    contraction = "tn" if a.transposed else "nn" if b.transposed else "nt"
    rows = _stored_grid(lift, a).rows and 1  # the operator takes a scale for each row of a, or one for all of them
    for half, read in ((a, Granularity(rows, group or None)), (b, Granularity(b_rows or None, group or None))):
        held = _stored_grid(lift, half)
        refuse_unless(held == read, f"scales on grid {held} read as {read}")
    kernel = "jetgraph::fp8_gemm" if provider in ("", "reference") else f"jetgraph::fp8_gemm.{provider}"
    return _fp8_product(lift, op, a.term, b.term, contraction, bias, kernel)


def _stored_grid(lift: Lifter, half: QuantizedHalf) -> Granularity:
    """The blocks that share a scale, on the codes as they lie in memory: the operator's a [M, K] and b [N, K]."""
    scale = lift.builder.precision(half.term).scale
    refuse_unless(scale is not None, "codes without a scale")
    assert scale is not None
    grid = scale.granularity
    return Granularity(grid.cols, grid.rows) if half.transposed else grid


def _fp8_product(
    lift: Lifter,
    op: Op,
    a: int,
    b: int,
    contraction: str,
    bias: Value | None = None,
    kernel: str = "jetgraph::fp8_gemm",
) -> Value:
    """FP32 sums of quantised operands, plus the bias in FP32, rounded once."""
    return with_bias(lift, op, gemm(lift, a, b, contraction, kernel), bias)


# ------------------------------------------------------------------- linears called eagerly: the three GEMMs in one op


@handles("jetgraph.linear")
def _linear(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, weight, bias, text = args
    p = LinearPrecision.parse(text)
    return _fp8_product(lift, op, _codes(lift, x, p.activation), _codes(lift, weight, p.weight), "nt", bias)


@handles("jetgraph.linear_dgrad")
def _linear_dgrad(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    dy, weight, text = args
    p = LinearPrecision.parse(text)
    return _fp8_product(lift, op, _codes(lift, dy, p.gradient), _codes(lift, weight, p.weight), "nn")


@handles("jetgraph.linear_wgrad")
def _linear_wgrad(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    dy, x, text = args
    p = LinearPrecision.parse(text)
    grouped = p.wgrad.scale is not None and p.wgrad.scale.granularity != Granularity.per_tensor()
    kernel = "jetgraph::quantize_tokens" if grouped else "jetgraph::quantize"
    source, source_kernel = _rows(lift, x), kernel
    if grouped and p.wgrad_source is WgradSource.REQUANTIZE:
        source, source_kernel = _codes(lift, x, p.activation), "jetgraph::requantize_tokens"
    assert p.wgrad.scale is not None
    right = lift.builder.quantize(source, p.wgrad.scale, source_kernel)
    return _fp8_product(lift, op, _codes(lift, dy, p.wgrad, kernel), right, "tn")


def _codes(lift: Lifter, x: Value, precision: Precision, kernel: str = "jetgraph::quantize") -> int:
    assert precision.scale is not None
    return lift.builder.quantize(_rows(lift, x), precision.scale, kernel)
