"""Expansions of attention, embedding and the logprob chain: where tokens meet state and where observables are made."""

from __future__ import annotations

import math
from typing import Any

from jetgraph.graph import Attr, Phase
from jetgraph.layout import TOKEN_ATOM, Value
from jetgraph.lift import FORMATS, Frame, Lifter, Zeros, handles, only, refuse_unless
from jetgraph.normal_form import as_f32
from jetgraph.precision import BF16, F32, Format, Precision
from jetgraph.record import Op

# --------------------------------------------------------------------------------------------------------- attention


def attention_attrs(heads: int, kv_heads: int, head_dim: int, scale: float, mask: str = "causal") -> dict[str, Attr]:
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": as_f32(scale),
        "mask": mask,
        "window": 0,
        "softcap": 0.0,
    }


def attention(lift: Lifter, qkv: tuple[int, int, int], attrs: dict[str, Attr], kernel: str) -> int:
    """The attention node, rounded to BF16, for terms q [T, H·D], k and v [T, Hkv·D]; K and V become observables."""
    q, k, v = qkv
    if lift.builder.where.phase is Phase.FORWARD:
        lift.keys_values.append((k, v))
    features = int(attrs["heads"]) * int(attrs["head_dim"])  # type: ignore[arg-type]
    term = lift.builder.intern("attention", (q, k, v), attrs, ("T", features), F32, kernel)
    return lift.builder.round(term, Format.BF16)


def _by_token(lift: Lifter, x: Value) -> int:
    """[B, H, S, D] as a term [T, H·D]."""
    return lift.layouts.read(lift.layouts.permute(x, (0, 2, 1, 3)))


def _tokens_of(lift: Lifter, q: Value, k: Value, v: Value) -> tuple[int, int, int]:
    return _by_token(lift, q), _by_token(lift, k), _by_token(lift, v)


def _heads(lift: Lifter, q: Value, k: Value) -> tuple[int, int, int]:
    heads, head_dim = lift.layouts.shape(q)[1], lift.layouts.shape(q)[3]
    kept = [a for a in k.dims[1] if a in k.atoms]
    kv_heads = 1
    for atom in kept:
        kv_heads *= lift.layouts.size[atom]
    return heads, kv_heads, head_dim


def _attention_backward(
    lift: Lifter, grad: int, qkv: tuple[int, int, int], attrs: dict[str, Attr], kernel: str
) -> tuple[Value, Value, Value]:
    """The three gradients as captured [B, H, S, D] tensors."""
    builder, layouts = lift.builder, lift.layouts
    q = qkv[0]
    node = builder.intern("attention_backward", (grad, *qkv), attrs, builder.nodes[q].type.shape, F32, kernel)
    grads = []
    for index, operand in enumerate(qkv):
        pick = builder.intern("pick", (node,), {"index": index}, builder.nodes[operand].type.shape, BF16)
        heads = int(attrs["heads" if index == 0 else "kv_heads"])  # type: ignore[arg-type]
        value = layouts.view(layouts.token_matrix(pick), (1, layouts.num_tokens, heads, int(attrs["head_dim"])))  # type: ignore[arg-type]
        grads.append(layouts.permute(value, (0, 2, 1, 3)))
    return tuple(grads)  # type: ignore[return-value]


@handles("jetgraph.attention")
def _jetgraph_attention(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    q, k, v, scale = args
    attrs = attention_attrs(*_heads(lift, q, k), scale)
    out = attention(lift, _tokens_of(lift, q, k, v), attrs, "jetgraph::attention")
    return lift.layouts.view(lift.layouts.token_matrix(out), frame.shape(op))


@handles("jetgraph.attention_backward")
def _jetgraph_attention_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    grad, q, k, v, scale = args
    attrs = attention_attrs(*_heads(lift, q, k), scale)
    qkv = _tokens_of(lift, q, k, v)
    return _attention_backward(lift, lift.layouts.read(grad), qkv, attrs, "jetgraph::attention_backward")


SDPA = "aten._scaled_dot_product_flash_attention_for_cpu"


@handles(SDPA)
def _sdpa(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, scale=..., attn_mask=None)
    q, k, v, *options = args
    attrs = attention_attrs(*_heads(lift, q, k), kwargs["scale"], _sdpa_mask(options))
    term = attention(lift, _tokens_of(lift, q, k, v), attrs, SDPA.replace(".", "::"))
    batch, heads, length, head_dim = lift.layouts.shape(q)
    out = lift.layouts.view(lift.layouts.token_matrix(term), (batch, length, heads, head_dim))
    return lift.layouts.permute(out, (0, 2, 1, 3)), None


def _sdpa_mask(options: list) -> str:
    """SDPA's positional options: dropout probability, is_causal."""
    dropout, causal = (*options, *(0.0, False)[len(options) :])
    refuse_unless(dropout == 0.0, "attention dropout")
    return "causal" if causal else "full"


@handles(SDPA + "_backward")
def _sdpa_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, scale=..., attn_mask=None)
    grad, q, k, v, _out, _logsumexp, *options = args  # out and logsumexp are functions of q, k, v
    attrs = attention_attrs(*_heads(lift, q, k), kwargs["scale"], _sdpa_mask(options))
    kernel = (SDPA + "_backward").replace(".", "::")
    return _attention_backward(lift, _by_token(lift, grad), _tokens_of(lift, q, k, v), attrs, kernel)


# ------------------------------------------------------------------------------------------ embedding and observables


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
    return Value(out, (TOKEN_ATOM,), index.dims)


@handles("aten.new_zeros", "aten.zeros", "aten.zeros_like")
def _zeros(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    return Zeros(frame.shape(op))


@handles("aten.empty", "aten.new_empty_strided", "aten.empty_like", "aten.new_empty")
def _empty(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    shape = frame.shape(op)
    tokens = lift.layouts.num_tokens
    features = [s for s in shape if s != tokens]
    node_shape = shape if len(features) == len(shape) else ("T", math.prod(features))
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
    refuse_unless(not index.dims[-1] and TOKEN_ATOM in source.atoms, "scatter of more than one feature per token")
    size = base.shape[-1]
    term = lift.layouts.read(source)
    out = lift.builder.intern(
        "gather_backward", (term, index.term), {"size": size}, ("T", size), lift.builder.precision(term)
    )
    return lift.layouts.view(lift.layouts.token_matrix(out), frame.shape(op))
