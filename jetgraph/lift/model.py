"""Expansions of embedding and the logprob chain: where tokens enter and where observables are made."""

from __future__ import annotations

import math
from typing import Any

from jetgraph.graph import Attr
from jetgraph.layout import Value, is_token
from jetgraph.lift.lifter import FORMATS, Frame, Lifter, Zeros, handles, only, refuse_unless
from jetgraph.precision import F32, Format, Precision
from jetgraph.record import Op


@handles("aten.embedding")
def _embedding(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    weight, ids, *padding = args  # padding_idx matters to the gradient alone
    refuse_unless(len(padding) <= 1 and weight.atoms == weight.dims[0] + weight.dims[1], "embedding options")
    term = lift.builder.intern(
        "embed", (weight.term, ids.term), {}, ("T", lift.layouts.shape(weight)[1]), lift.builder.precision(weight.term)
    )
    return lift.layouts.view(lift.layouts.token_matrix(term), frame.shape(op))


@handles("aten.embedding_dense_backward")
def _embedding_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    grad, ids, rows, padding, scale_by_frequency = args
    refuse_unless(not scale_by_frequency, "scale_grad_by_freq")
    term = lift.layouts.read(grad)
    shape = (rows, lift.builder.num_features(term))
    attrs: dict[str, Attr] = {"rows": rows, "padding": padding}
    out = lift.builder.intern("embed_backward", (term, ids.term), attrs, shape, F32, "aten::embedding_dense_backward")
    return lift.layouts.value(lift.builder.round(out, lift.format_of(op)), shape)


@handles("aten.log_softmax")
def _log_softmax_to(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    value, dim, *dtype = args
    refuse_unless(not dtype or FORMATS[dtype[0].text] is lift.format_of(op), "a result of another dtype")
    return _log_softmax(lift, frame, op, (value, dim, False), kwargs)


@handles("aten._log_softmax")
def _log_softmax(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    value, dim, _half_to_float = args
    refuse_unless(dim in (-1, len(value.dims) - 1), "log_softmax over other than the last dimension")
    _whole_rows(lift, value)
    refuse_unless(lift.format_of(op) is Format.F32, f"log_softmax in {op.value.dtype}")
    term = lift.layouts.read(value)
    out = lift.builder.intern(
        "log_softmax", (term,), {}, lift.builder.nodes[term].type.shape, F32, "aten::_log_softmax"
    )
    return lift.layouts.view(lift.layouts.token_matrix(lift.builder.round(out, lift.format_of(op))), frame.shape(op))


def _whole_rows(lift: Lifter, value: Value) -> None:
    """The last dimension must hold every feature of a token, and no token axis."""
    refuse_unless(set(value.dims[-1]) == set(lift.layouts.features(value)), "a reduction over part of the features")


@handles("aten._log_softmax_backward_data")
def _log_softmax_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    grad, output, _dim, dtype = args
    refuse_unless(FORMATS[dtype.text] is lift.format_of(op), "a gradient of another dtype")
    _whole_rows(lift, output)
    terms = (lift.layouts.read(grad), lift.layouts.read(output))
    shape = lift.builder.nodes[terms[1]].type.shape
    kernel = "aten::_log_softmax_backward_data"
    out = lift.builder.intern("log_softmax_backward", terms, {}, shape, F32, kernel)
    return lift.layouts.view(lift.layouts.token_matrix(lift.builder.round(out, lift.format_of(op))), frame.shape(op))


@handles("aten.gather")
def _gather(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    value, dim, index = args[:3]
    refuse_unless(dim in (-1, len(value.dims) - 1) and not index.dims[-1], "gather of more than one feature per token")
    _whole_rows(lift, value)
    term = lift.layouts.read(value)
    out = lift.builder.intern("gather", (term, index.term), {}, ("T", 1), lift.builder.precision(term))
    return Value(out, lift.layouts.tokens, index.dims)


@handles("aten.new_zeros", "aten.zeros", "aten.zeros_like")
def _zeros(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    return Zeros(frame.shape(op))


@handles("aten.empty", "aten.new_empty_strided", "aten.empty_like", "aten.new_empty")
def _empty(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    shape = frame.shape(op)
    per_token = bool(lift.layouts.token_dims(shape))
    node_shape = ("T", math.prod(shape) // lift.layouts.num_tokens) if per_token else shape
    term = lift.builder.intern("poison", (), {"name": op.name}, node_shape, Precision(lift.format_of(op)))
    return lift.layouts.value(term, shape)


@handles("aten.copy_")
def _copy(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    target, source = args[:2]
    refuse_unless(lift.builder.format(target.term) is lift.builder.format(source.term), "a copy that converts")
    refuse_unless(lift.layouts.shape(target) == lift.layouts.shape(source), "a copy that broadcasts")
    return source


@handles("aten.scatter_add", "aten.scatter_add_")
def _scatter_add(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    base, dim, index, source = args
    refuse_unless(isinstance(base, Zeros) and dim in (-1, len(base.shape) - 1), "scatter_add into other than zeros")
    refuse_unless(not index.dims[-1] and any(map(is_token, source.atoms)), "scatter of more than one feature per token")
    size = base.shape[-1]
    term = lift.layouts.read(source)
    out = lift.builder.intern(
        "gather_backward", (term, index.term), {"size": size}, ("T", size), lift.builder.precision(term)
    )
    return lift.layouts.view(lift.layouts.token_matrix(out), frame.shape(op))
