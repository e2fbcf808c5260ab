"""Expansions of ATen operators that arrange, compute pointwise or reduce; its neighbours hold the rest.

Both lifters (trainer and engine) share them.  In each: the arguments are already `Value`s, every one is used or
refused, and a BF16 result is FP32 arithmetic followed by `round(bf16)`.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from jetgraph.layout import Value, clamped, is_token
from jetgraph.lift.lifter import (
    Frame,
    Lifter,
    LiftError,
    Nothing,
    PaddedMask,
    QuantizedHalf,
    SequenceMask,
    Zeros,
    handles,
    only,
    refuse_unless,
    with_defaults,
)
from jetgraph.normal_form import TermBuilder, as_f32
from jetgraph.precision import Format
from jetgraph.record import Op, Symbol

# ------------------------------------------------------------------------------------------------------- arrangement


@handles("aten.view", "aten._unsafe_view", "aten.reshape")
def _view(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    refuse_unless(op.target != "aten.view.dtype", "bits read as another dtype")
    return lift.layouts.view(args[0], frame.shape(op))


@handles("aten.detach", "aten.alias", "aten.clone", "aten.contiguous", "aten.lift_fresh", "aten.lift_fresh_copy")
def _same(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, memory_format=...)
    return args[0]


@handles("aten.t", "aten.transpose", "aten.permute")
def _permute(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    source = args[0]
    rank = 2 if isinstance(source, QuantizedHalf) else len(source.dims)
    order = list(range(rank))
    if op.target.startswith("aten.permute"):
        order = [d % rank for d in args[1]]
    else:
        i, j = (args[1] % rank, args[2] % rank) if len(args) == 3 else (0, rank - 1)
        order[i], order[j] = order[j], order[i]
    if isinstance(source, QuantizedHalf):
        return replace(source, transposed=source.transposed ^ (order == [1, 0]))
    return lift.layouts.permute(source, order)


@handles("aten.unsqueeze")
def _unsqueeze(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    value, dim = args
    dims = list(value.dims)
    dims.insert(dim % (len(dims) + 1), ())
    return Value(value.term, value.atoms, tuple(dims))


@handles("aten.squeeze")
def _squeeze(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    return lift.layouts.view(args[0], frame.shape(op))


@handles("aten.expand")
def _expand(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    if isinstance(args[0], SequenceMask):
        return _whole_mask(frame, op, args[0])
    return lift.layouts.expand(args[0], frame.shape(op))


def _whole_mask(frame: Frame, op: Op, mask: SequenceMask) -> SequenceMask:
    """A view of a mask that keeps its queries and keys."""
    source = frame.spec(op.args[0])
    kept = source is not None and tuple(map(frame.sizes, source.shape))[-2:] == frame.shape(op)[-2:]
    refuse_unless(kept, "part of a mask")
    return mask


@handles("aten.slice")
def _slice(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    if isinstance(args[0], SequenceMask):
        return _whole_mask(frame, op, args[0])
    value, dim, start, stop, step = with_defaults(args, 0, None, None, 1)
    if isinstance(value, PaddedMask):
        columns = dim in (-1, len(frame.shape(op)) - 1) and not start and step == 1
        refuse_unless(columns and frame.shape(op)[-1] == value.num_keys, "part of a mask")
        return value.mask
    refuse_unless(step == 1, f"slice with step {step}")
    stop = None if stop is None or stop >= 1 << 31 else frame.sizes(stop)
    return lift.layouts.slice(value, dim, start, stop)


@handles("aten.slice_backward")
def _slice_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    value, sizes, dim, start, stop, step = args
    refuse_unless(step == 1, f"slice_backward with step {step}")
    sizes = [frame.sizes(s) for s in sizes]
    dim %= len(sizes)
    start, stop = (clamped(frame.sizes(bound), sizes[dim]) for bound in (start, stop))
    if (start, stop) == (0, sizes[dim]):
        return value
    return _padded(lift, value, dim, start, sizes[dim] - stop)


def _padded(lift: Lifter, value: Value, dim: int, before: int, after: int) -> Value:
    """Zeros joined before and after along one dimension; zeros are the constant 0 at that width."""
    layouts = lift.layouts
    value = layouts.value_of_read(value)
    axis = value.dims[dim]
    refuse_unless(len(axis) == 1 and not is_token(axis[0]), "padding of tokens")
    features = layouts.features(value)
    i = features.index(axis[0])
    outer = inner = 1
    for atom in features[:i]:
        outer *= layouts.size[atom]
    for atom in features[i + 1 :]:
        inner *= layouts.size[atom]
    zero, width = lift.builder.const(0.0), layouts.size[axis[0]]
    parts = [(zero, before), (value.term, width), (zero, after)]
    parts = [(term, size) for term, size in parts if size]
    term = lift.builder.cat([t for t, _ in parts], outer, [s for _, s in parts], inner)
    new = layouts.atom(before + width + after)
    atoms = tuple(new if a == axis[0] else a for a in value.atoms)
    return Value(term, atoms, tuple((new,) if d == dim else dims for d, dims in enumerate(value.dims)))


@handles("aten.split_with_sizes", "aten.split")
def _split(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, dim=...)
    value, sizes = args[:2]
    dim = args[2] if len(args) > 2 else kwargs.get("dim") or 0
    total = lift.layouts.shape(value)[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    parts, start = [], 0
    for size in sizes:
        parts.append(lift.layouts.slice(value, dim, start, start + size))
        start += size
    return tuple(parts)


@handles("getitem")
def _getitem(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    return args[0][args[1]]


@handles("aten.cat")
def _cat(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    values = [v for v in args[0] if not isinstance(v, Nothing)]
    return values[0] if len(values) == 1 else lift.layouts.cat(values, args[1] if len(args) > 1 else 0)


@handles("aten.slice_scatter")
def _slice_scatter(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    """An in-place write into columns, functionalised: what was before, what is new, what was after."""
    only(kwargs)
    base, source, dim, start, stop, step = with_defaults(args, ..., 0, None, None, 1)
    refuse_unless(step == 1, f"slice_scatter with step {step}")
    layouts = lift.layouts
    size = layouts.shape(base)[dim]
    start, stop = start or 0, size if stop is None else min(stop, size)
    pieces = [layouts.slice(base, dim, 0, start)] if start else []
    pieces.append(source)
    if stop < size:
        pieces.append(layouts.slice(base, dim, stop, size))
    lift.builder.rules["slice_scatter is cat"] += 1
    return layouts.cat(pieces, dim) if len(pieces) > 1 else source


# --------------------------------------------------------------------------------------------------------- pointwise


@handles("aten._to_copy", "prims.convert_element_type", "aten.to")
def _convert(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, dtype=..., layout=Symbol("object", "layout torch.strided"), device=..., memory_format=...)
    value = args[0]
    target = lift.format_of(op)
    source = lift.builder.format(value.term)
    if target is Format.I64:
        refuse_unless(source is Format.I64 and op.value.dtype == "int64", "a conversion to a narrower integer")
        return value
    if source is Format.I64:
        value = lift.layouts.pointwise("int_to_float", [value], Format.F32)
    if target is Format.F32:
        lift.builder.rules["widening keeps the number"] += 1
        return value
    refuse_unless(target is Format.BF16, f"conversion to {target}")
    return lift.layouts.pointwise("round", [value], target)


@handles("aten.add", "aten.sub", "aten.mul", "aten.div")
def _binary(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, alpha=1)
    a, b = (lift.operand(x) for x in args[:2])
    refuse_unless(len(args) == 2 and not isinstance(args[0], Zeros), f"{len(args)} arguments")
    refuse_unless(lift.format_of(op) in (Format.BF16, Format.F32), f"arithmetic in {op.value.dtype}")
    if lift.format_of(op) is Format.BF16:
        for value in (a, b):  # kernels round a wider scalar first, or not: only what BF16 holds is the same either way
            refuse_unless(
                value.dims != () or holds_in_bf16(lift.builder, value.term), "a scalar that BF16 does not hold"
            )
    return lift.layouts.pointwise(op.target.split(".")[1], [a, b], lift.format_of(op))


def holds_in_bf16(builder: TermBuilder, scalar: int) -> bool:
    """Whether a scalar term is a BF16 number."""
    if builder.op(scalar) != "const":
        return builder.format(scalar) is Format.BF16
    (bits,) = struct.unpack("<I", struct.pack("<f", float(dict(builder.nodes[scalar].attrs)["value"])))  # type: ignore[arg-type]
    return bits & 0xFFFF == 0


@handles("aten.add_")
def _add_in_place(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    return _binary(lift, frame, replace(op, target="aten.add.Tensor"), args, kwargs)


@handles("aten.neg", "aten.rsqrt", "aten.cos", "aten.sin", "aten.silu", "aten.tanh")
def _unary(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    name = op.target.split(".")[1]
    kernel = "" if name == "neg" else f"aten::{name}"
    exact = name in ("neg", "silu", "tanh") or lift.format_of(op) is Format.F32
    refuse_unless(exact, f"{name} in {op.value.dtype}")
    return lift.layouts.pointwise(name, [args[0]], lift.format_of(op), kernel=kernel)


@handles("aten.silu_backward")
def _silu_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    return lift.layouts.pointwise("silu_backward", list(args), lift.format_of(op))


@handles("aten.gelu", "aten.gelu_backward")
def _gelu(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, approximate=...)
    name = op.target.split(".")[1]
    attrs = {"approximate": kwargs.get("approximate", "none")}
    return lift.layouts.pointwise(name, list(args), lift.format_of(op), attrs, f"aten::{name}")


@handles("aten.tanh_backward")
def _tanh_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    """dy * (1 - y * y), rounded once."""
    only(kwargs)
    grad, y = args
    square = lift.layouts.pointwise("sq", [y], Format.F32)
    slope = lift.layouts.pointwise("sub", [lift.operand(1.0), square], Format.F32)
    return lift.layouts.pointwise("mul", [grad, slope], lift.format_of(op))


@handles("aten.pow")
def _pow(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    exponent = args[1]
    refuse_unless(isinstance(exponent, (int, float)), "tensor exponent")
    refuse_unless(lift.format_of(op) is Format.F32, f"pow in {op.value.dtype}")
    return lift.layouts.pointwise("pow", [args[0]], lift.format_of(op), {"exponent": as_f32(exponent)})


# -------------------------------------------------------------------------------------------------------- reductions


@handles("aten.mean")
def _mean(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    value, dims = args[0], [d % len(args[0].dims) for d in args[1]]
    refuse_unless(dims == [len(value.dims) - 1], "mean over other than the last dimension")
    return row_mean(lift, value, lift.format_of(op), len(args) > 2 and args[2], "aten::mean")


@handles("jetgraph.row_mean")
def _own_row_mean(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    return row_mean(lift, args[0], lift.format_of(op), True, "jetgraph::row_mean")


def row_mean(lift: Lifter, value: Value, fmt: Format, keep: bool, kernel: str) -> Value:
    """The mean over the last axis, which stays with size 1 if ``keep``."""
    layouts = lift.layouts
    if layouts.features(value) != [a for dim in value.dims for a in dim if not is_token(a)]:
        value = layouts.value_of_read(value)
    axis = value.dims[-1]
    refuse_unless(not any(map(is_token, axis)), "a mean over the tokens")
    size = layouts.shape(value)[-1]
    term = lift.builder.round(lift.builder.mean(value.term, size, kernel), fmt)
    atoms = tuple(a for a in value.atoms if a not in axis)
    return Value(term, atoms, value.dims[:-1] + (((),) if keep else ()))


@handles("aten.sum")
def _sum(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    value, layouts = args[0], lift.layouts
    rank = len(value.dims)
    dims = [d % rank for d in args[1]] if len(args) > 1 and args[1] else list(range(rank))
    keep = len(args) > 2 and args[2]
    if any(a not in value.atoms for dim in value.dims for a in dim):
        value = layouts.value_of_read(value)
    reduced = {a for d in dims for a in value.dims[d]}
    if not reduced:  # every summed dimension has size 1
        kept = [dim for d, dim in enumerate(value.dims) if keep or d not in dims]
        return lift.rounded(Value(value.term, value.atoms, tuple(kept)), op)
    over_tokens = [a for a in layouts.tokens if a in reduced]
    refuse_unless(over_tokens in ([], list(layouts.tokens)), "a sum over the tokens of one sequence")
    features = layouts.features(value)
    spec = frame.spec(op.args[0])
    visited = list(spec.layout) if spec is not None else []
    wide = lift.format_of(op) is Format.F32 and lift.builder.format(value.term) is not Format.F32
    kernel = ("aten::sum.f32" if wide else "aten::sum") + (
        f"@{','.join(map(str, _memory_order(lift, value, visited)))}" if visited else ""
    )
    term = lift.builder.sum(
        value.term, [layouts.size[a] for a in features], [a in reduced for a in features], bool(over_tokens), kernel
    )
    term = lift.builder.round(term, lift.format_of(op))
    atoms = tuple(a for a in value.atoms if a not in reduced)
    kept = [() if d in dims else dim for d, dim in enumerate(value.dims) if keep or d not in dims]
    return Value(term, atoms, tuple(kept))


def _memory_order(lift: Lifter, value: Value, layout: list[int]) -> list[int]:
    """The captured memory order as positions in the term's axes: the token axis (or batch, position), then features."""
    lead = lift.layouts.tokens if any(map(is_token, value.atoms)) else (0,)
    axes = [*lead, *lift.layouts.features(value)]
    return [axes.index(a) for d in layout for a in value.dims[d] if a in axes]


# ------------------------------------------------------------------------------------------------------------- sizes


@handles("aten.sym_size")
def _sym_size(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    if isinstance(args[0], Value):
        return lift.layouts.shape(args[0])[args[1]]
    spec = frame.spec(op.args[0])  # codes, scales and masks have no axes of their own: they lie as they were traced
    if spec is None:
        raise LiftError("the size of something that no operator made")
    return frame.sizes(spec.shape[args[1]])


@handles("mul", "add", "floordiv", "sub")
def _size_arithmetic(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    a, b = (frame.sizes(x) for x in args)
    return {"mul": a * b, "add": a + b, "sub": a - b, "floordiv": a // b if b else 0}[op.target]
