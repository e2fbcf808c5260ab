"""Expansions of vLLM's own CUDA operators, exactly as `jetgraph attest` found them on an H200 (vLLM 0.26.0).

Each takes the functional call's keyword arguments and returns what it wrote, in the order of its schema.  What the
definitions are is measured, not read: docs/findings.md; a definition that stops holding fails the attestation.

    rms_norm                   r(w · (x · rsqrt(mean(x²) + eps)))        one rounding, unlike Hugging Face
    fused_add_rms_norm         residual' = r(x + residual), then rms_norm of residual'
    silu_and_mul               r(r(silu(gate)) · up)
    rotary_embedding           r(x₁·c − x₂·s) | r(x₂·c + x₁·s)           one rounding, unlike Hugging Face
    per_token_group_fp8_quant  amax floor eps; with ue8m0 a power of two, and eps bounds the scale
    rms_norm_per_block_quant   quantise(r(w · r(x̂))), x̂ of the *unrounded* sum; FP32 scales, at least 1/(448·512)
    silu_and_mul_per_block_quant  quantise((gate · sigmoid(gate)) · up) without any rounding; the same scales
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetgraph.layout import Value
from jetgraph.lift.lifter import Lifter, QuantizedHalf, only, refuse_unless
from jetgraph.normal_form import as_f32
from jetgraph.precision import F32, Division, Format, Granularity, Scale, ScaleRule

FUSED_SCALE_FLOOR = 448.0 / (448.0 * 512.0)
"""amax floor of the fused quantisers: they bound the scale by 1/(448·512)."""

Expansion = Callable[[Lifter, dict[str, Any]], tuple[Any, ...]]


def group_scale(floor: float, *, power_of_two: bool, group: int = 128) -> Scale:
    return Scale(Granularity.per_group(group), ScaleRule(448.0, floor, Division.DIVIDE, power_of_two))


def _norm(lift: Lifter, x: Value, weight: Value, eps: float, kernel: str, *, inner: bool) -> Value:
    """w · x̂ in FP32, or with the inner rounding w · r(x̂); not rounded at the end.  ``kernel`` orders the sum."""
    layouts = lift.layouts
    width = layouts.shape(x)[-1]
    squares = layouts.pointwise("sq", [x], Format.F32)
    if layouts.features(squares) != [a for dim in squares.dims for a in dim if a in layouts.features(squares)]:
        squares = layouts.value_of_read(squares)
    axis = squares.dims[-1]
    term = lift.builder.mean(squares.term, width, kernel)
    mean = Value(term, tuple(a for a in squares.atoms if a not in axis), (*squares.dims[:-1], ()))
    shifted = layouts.pointwise("add", [mean, lift.operand(as_f32(eps))], Format.F32)
    inverse = layouts.pointwise("rsqrt", [shifted], Format.F32, kernel=kernel)
    normed = layouts.pointwise("mul", [x, inverse], Format.BF16 if inner else Format.F32)
    return layouts.pointwise("mul", [weight, normed], Format.F32)


def _round(lift: Lifter, value: Value) -> Value:
    return lift.layouts.pointwise("round", [value], Format.BF16)


def rms_norm(lift: Lifter, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    only(kwargs, result=..., input=..., weight=..., epsilon=...)
    return (
        _round(lift, _norm(lift, kwargs["input"], kwargs["weight"], kwargs["epsilon"], "vllm::rms_norm", inner=False)),
    )


def fused_add_rms_norm(lift: Lifter, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    only(kwargs, input=..., residual=..., weight=..., epsilon=...)
    total = lift.layouts.pointwise("add", [kwargs["input"], kwargs["residual"]], Format.BF16)
    normed = _norm(lift, total, kwargs["weight"], kwargs["epsilon"], "vllm::fused_add_rms_norm", inner=False)
    return _round(lift, normed), total


def _silu_and_mul(lift: Lifter, x: Value, *, inner: bool) -> Value:
    """silu(gate) · up in FP32; with ``inner`` silu is rounded first."""
    layouts = lift.layouts
    last = len(x.dims) - 1
    width = layouts.shape(x)[-1] // 2
    gate, up = (layouts.slice(x, last, i * width, (i + 1) * width) for i in (0, 1))
    fmt = Format.BF16 if inner else Format.F32
    activated = layouts.pointwise("silu", [gate], fmt, kernel="vllm::silu")
    return layouts.pointwise("mul", [activated, up], Format.F32)


def silu_and_mul(lift: Lifter, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    only(kwargs, result=..., input=...)
    return (_round(lift, _silu_and_mul(lift, kwargs["input"], inner=True)),)


def rotate(lift: Lifter, x: Value, rows: Value, size: int) -> Value:
    """x [T, H·D] turned by rows [T, D] = cos | sin, neox, one rounding."""
    layouts, half = lift.layouts, size // 2
    cos, sin = (layouts.slice(rows, 1, i * half, (i + 1) * half) for i in (0, 1))
    cos, sin = (Value(v.term, v.atoms, (v.dims[0], (), v.dims[1])) for v in (cos, sin))
    shape = layouts.shape(x)
    features = 1
    for width in shape[1:]:
        features *= width
    heads = layouts.view(x, (shape[0], features // size, size))
    first, second = (layouts.slice(heads, 2, i * half, (i + 1) * half) for i in (0, 1))

    def product(a: Value, b: Value) -> Value:
        return layouts.pointwise("mul", [a, b], Format.F32)

    low = layouts.pointwise("sub", [product(first, cos), product(second, sin)], Format.BF16)
    high = layouts.pointwise("add", [product(second, cos), product(first, sin)], Format.BF16)
    return layouts.view(layouts.cat([low, high], 2), shape)


# ------------------------------------------------------------------------------------------------------- quantising


def _codes(lift: Lifter, x: Value, scale: Scale, kernel: str) -> tuple[QuantizedHalf, QuantizedHalf]:
    refuse_unless(len(x.dims) == 2 and x.dims[0] == lift.layouts.tokens, "groups of something not [tokens, features]")
    term = lift.builder.quantize(lift.layouts.read(x), scale, kernel)
    return QuantizedHalf(term, "codes"), QuantizedHalf(term, "scale")


def per_token_group_fp8_quant(lift: Lifter, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The last two arguments choose a layout of the scales, not their values (attested)."""
    layout = {"dummy_is_scale_transposed": ..., "dummy_is_tma_aligned": ...}
    named = {"input": ..., "output_q": ..., "output_s": ..., "group_size": ..., "eps": ..., "scale_ue8m0": ...}
    only(kwargs, **named, **layout, fp8_min=-448.0, fp8_max=448.0)
    power_of_two = bool(kwargs["scale_ue8m0"])
    floor = float(f"{kwargs['eps'] * (448.0 if power_of_two else 1.0):.12g}")  # 4.48e-08, the same FP32 number
    scale = group_scale(floor, power_of_two=power_of_two, group=kwargs["group_size"])
    return _codes(lift, kwargs["input"], scale, "vllm::per_token_group_fp8_quant")


def rms_norm_per_block_quant(lift: Lifter, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """(codes, scales[, residual']): no argument says ue8m0 and none says eps of the scale."""
    named = ("result", "input", "weight", "scale", "epsilon", "residual", "group_size", "is_scale_transposed")
    only(kwargs, **dict.fromkeys(named, ...))
    x, residual = kwargs["input"], kwargs.get("residual")
    total = x if residual is None else lift.layouts.pointwise("add", [x, residual], Format.F32)
    kernel = "vllm::rms_norm_per_block_quant"
    normed = _round(lift, _norm(lift, total, kwargs["weight"], kwargs["epsilon"], kernel, inner=True))
    scale = group_scale(FUSED_SCALE_FLOOR, power_of_two=False, group=kwargs["group_size"])
    written = _codes(lift, normed, scale, kernel)
    return written if residual is None else (*written, _round(lift, total))


def silu_and_mul_per_block_quant(lift: Lifter, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    only(kwargs, **dict.fromkeys(("out", "input", "scales", "group_size", "is_scale_transposed"), ...))
    scale = group_scale(FUSED_SCALE_FLOOR, power_of_two=False, group=kwargs["group_size"])
    return _codes(lift, _silu_and_mul(lift, kwargs["input"], inner=False), scale, "vllm::silu_and_mul_per_block_quant")


EXPANSIONS: dict[str, Expansion] = {
    "_C.rms_norm": rms_norm,
    "_C.fused_add_rms_norm": fused_add_rms_norm,
    "_C.silu_and_mul": silu_and_mul,
    "_C.per_token_group_fp8_quant": per_token_group_fp8_quant,
    "_C.rms_norm_per_block_quant": rms_norm_per_block_quant,
    "_C.silu_and_mul_per_block_quant": silu_and_mul_per_block_quant,
}


def log_softmax_of(lift: Lifter, logits: Value, token_ids: Value) -> Value:
    """The second model runner's Triton kernel: FP32 log-softmax of the raw logits, gathered at ``token_ids``."""
    builder = lift.builder
    term = lift.layouts.read(logits)
    kernel = "vllm::_topk_log_softmax_kernel"
    whole = builder.intern("log_softmax", (term,), {}, builder.nodes[term].type.shape, F32, kernel)
    chosen = builder.intern("gather", (whole, token_ids.term), {}, ("T", 1), F32)
    return lift.layouts.token_matrix(chosen)
