"""Expansions of LayerNorm, which torch computes as one operator, forward and backward.

RMSNorm needs none: transformers writes it in primitives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetgraph.layout import Value
from jetgraph.lift.lifter import Frame, Lifter, handles, only, refuse_unless
from jetgraph.normal_form import as_f32
from jetgraph.precision import BF16, F32, Format
from jetgraph.record import Op


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean or 1/σ of a layer_norm: functions of the term ``x`` and of eps that its backward reads again."""

    x: int
    eps: float


@handles("aten.native_layer_norm")
def _layer_norm(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    x, shape, weight, bias, eps = args
    term = _tokens(lift, x, shape)
    inputs = (term, *(_vector(lift, v, shape) for v in (weight, bias)))
    attrs = {"eps": as_f32(eps)}
    out = lift.builder.intern(
        "layer_norm", inputs, attrs, lift.builder.nodes[term].type.shape, F32, "aten::native_layer_norm"
    )
    statistics = Statistics(term, attrs["eps"])
    return _shaped(lift, frame, lift.builder.round(out, Format.BF16), op.value[0].shape), statistics, statistics


@handles("aten.native_layer_norm_backward")
def _layer_norm_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    """(dx, dw, db), of which the mask says which are wanted."""
    only(kwargs)
    grad, x, shape, mean, rstd, weight, _bias, _wanted = args
    term = _tokens(lift, x, shape)
    refuse_unless(isinstance(mean, Statistics) and mean == rstd and mean.x == term, "statistics of another tensor")
    inputs = (_tokens(lift, grad, shape), term, _vector(lift, weight, shape))
    type_ = lift.builder.nodes[term].type
    kernel = "aten::native_layer_norm_backward"
    node = lift.builder.intern("layer_norm_backward", inputs, {"eps": mean.eps}, type_.shape, F32, kernel)
    grads = []
    for index, spec in enumerate(op.value):
        if spec is None:
            grads.append(None)
            continue
        pick = lift.builder.intern("pick", (node,), {"index": index}, type_.shape if index == 0 else tuple(shape), BF16)
        grads.append(_shaped(lift, frame, pick, spec.shape) if index == 0 else lift.layouts.value(pick, shape))
    return tuple(grads)


def _tokens(lift: Lifter, x: Any, shape: Sequence[int]) -> int:
    """The term of a BF16 tensor whose normalised dimension is every feature of a token."""
    refuse_unless(isinstance(x, Value) and lift.builder.format(x.term) is Format.BF16, "layer_norm of other than BF16")
    features = lift.layouts.features(x)
    whole = len(shape) == 1 and set(x.dims[-1]) == set(features) and lift.builder.per_token(x.term)
    refuse_unless(whole, "layer_norm over other than all features of a token")
    return lift.layouts.read(x)


def _vector(lift: Lifter, x: Any, shape: Sequence[int]) -> int:
    refuse_unless(isinstance(x, Value) and lift.layouts.shape(x) == tuple(shape), "layer_norm without weight or bias")
    refuse_unless(lift.builder.format(x.term) is Format.BF16, "layer_norm with a weight or bias other than BF16")
    return lift.layouts.read(x)


def _shaped(lift: Lifter, frame: Frame, term: int, shape: Sequence[int | str]) -> Value:
    return lift.layouts.view(lift.layouts.token_matrix(term), tuple(map(frame.sizes, shape)))
