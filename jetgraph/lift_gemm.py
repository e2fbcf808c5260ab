"""Expansions of matrix products, BF16 and FP8: the operators whose role (FPROP, DGRAD, WGRAD) the graph must know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jetgraph.layout import TOKEN_ATOM, Value
from jetgraph.lift import CONTRACTION_ROLE, Frame, Lifter, QuantizedHalf, handles, only, refuse_unless
from jetgraph.precision import Division, Format, Granularity, Scale, ScaleRule
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
    product = _bf16_gemm(lift, a, b, "aten::addmm")
    return lift.layouts.pointwise("add", [product, bias], lift.format_of(op))


def _bf16_gemm(lift: Lifter, a: Value, b: Value, kernel: str) -> Value:
    layouts = lift.layouts
    if a.dims[0] == (TOKEN_ATOM,) and TOKEN_ATOM not in b.atoms:
        term = b.term
        refuse_unless(len(lift.builder.nodes[term].type.shape) == 2, "a matrix product with something not a matrix")
        rows, cols = b.dims
        contraction = "nt" if b.atoms == cols + rows else "nn"
        refuse_unless(b.atoms in (cols + rows, rows + cols), "a rearranged weight")
        return gemm(lift, layouts.read(a), term, contraction, kernel)
    refuse_unless(a.dims[1] == b.dims[0] == (TOKEN_ATOM,), "a matrix product that is neither FPROP, DGRAD nor WGRAD")
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
    x, weight = args
    refuse_unless(weight.atoms == weight.dims[0] + weight.dims[1], "a rearranged weight")
    out = lift.rounded(gemm(lift, lift.layouts.read(x), weight.term, "nt", "jetgraph::row_tile_gemm"), op)
    return lift.layouts.view(out, frame.shape(op))


# --------------------------------------------------------------------------------------------------------------- FP8


def _rule(qmax: float, floor: float, division: str, power_of_two: bool) -> ScaleRule:
    return ScaleRule(float(qmax), float(floor), Division(division), bool(power_of_two))


def _halves(term: int, transposed: bool) -> tuple[QuantizedHalf, QuantizedHalf]:
    return QuantizedHalf(term, "codes", transposed), QuantizedHalf(term, "scale", transposed)


@handles("jetgraph.quantize")
def _quantize(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, rows, cols, *rule = args
    scale = Scale(Granularity(rows or None, cols or None), _rule(*rule))
    return _halves(lift.builder.quantize(_rows(lift, x), scale, "jetgraph::quantize"), False)


def _rows(lift: Lifter, x: Value) -> int:
    """The term of a matrix whose rows are tokens (or a stored parameter's rows): blocks are counted on it."""
    refuse_unless(len(x.dims) == 2, "blocks of something not a matrix")
    if TOKEN_ATOM in x.atoms:
        refuse_unless(x.dims[0] == (TOKEN_ATOM,), "blocks along another axis than a token's features")
        return lift.layouts.read(x)
    refuse_unless(x.atoms == x.dims[0] + x.dims[1], "blocks of a rearranged parameter")
    return x.term


@handles("jetgraph.quantize_tokens")
def _quantize_tokens(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, group, *rule = args
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
    a, a_scale, b, b_scale, bias, b_rows, group = args
    _check_halves(lift, a, a_scale)
    _check_halves(lift, b, b_scale)
    refuse_unless(b.transposed or not a.transposed, "token-grouped codes against a natural operand")
    contraction = "tn" if a.transposed else "nn" if b.transposed else "nt"
    grids = {
        "nt": ((1, group), (b_rows, group)),
        "nn": ((1, group), (group, b_rows)),
        "tn": ((group, 1), (group, b_rows)),
    }
    for half, grid in zip((a, b), grids[contraction], strict=True):
        scale = lift.builder.precision(half.term).scale
        held = None if scale is None else (scale.granularity.rows, scale.granularity.cols)
        refuse_unless(held == grid, f"scales on grid {held} read as {grid}")
    out = gemm(lift, a.term, b.term, contraction, "jetgraph::fp8_gemm")
    if bias is not None:
        return lift.layouts.pointwise("add", [out, bias], lift.format_of(op))
    return lift.rounded(out, op)
