"""Expansions of attention: where a token meets the tokens before it.

A term speaks of one token and of *its own sequence's* prefix.  So one sequence per row, several sequences packed into
one row and rows padded on the left are the same term, mask ``causal``, provided that the captured call lets a token see
exactly its own prefix.  That is proven, never assumed:

* without a mask tensor a token sees its row: right iff every row is one sequence (`Lifter.rows_are_sequences`);
* a ``first`` or mask tensor is right iff its recorded values are the batch's (`SequenceStarts`, `SequenceMask`, made by
  `jetgraph.batch`).

Anything else is refused, so it becomes an `unknown` node and the verdict UNKNOWN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jetgraph.graph import Attr, Phase
from jetgraph.layout import Value
from jetgraph.lift.lifter import (
    Filled,
    Frame,
    Lifter,
    PaddedMask,
    SequenceMask,
    SequenceStarts,
    handles,
    only,
    refuse_unless,
)
from jetgraph.normal_form import as_f32
from jetgraph.precision import BF16, F32, Format
from jetgraph.record import Op


def attention_attrs(
    heads: int, kv_heads: int, head_dim: int, scale: float, *, mask: str = "causal", window: int = 0, softcap: float = 0
) -> dict[str, Attr]:
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": as_f32(scale),
        "mask": mask,
        "window": window,
        "softcap": as_f32(softcap),
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


def _once(lift: Lifter, x: Value) -> Value:
    """K or V [B, Hkv·R, S, D] without the copies of each head that grouped-query attention reads anyway."""
    held = tuple(a for a in x.dims[1] if a in x.atoms)
    refuse_unless(x.dims[1][: len(held)] == held, "K or V heads repeated in another order than groups")
    return replace(x, dims=(x.dims[0], held, *x.dims[2:]))


def _heads(lift: Lifter, q: Value, k: Value) -> tuple[int, int, int]:
    shape = lift.layouts.shape(q)
    return shape[1], lift.layouts.shape(k)[1], shape[3]


def _gradients(
    lift: Lifter, frame: Frame, op: Op, grad: int, qkv: tuple[int, int, int], attrs: dict[str, Attr], kernel: str
) -> tuple[Value, Value, Value]:
    """The three gradients as captured [B, H, S, D] tensors."""
    builder, layouts = lift.builder, lift.layouts
    node = builder.intern("attention_backward", (grad, *qkv), attrs, builder.nodes[qkv[0]].type.shape, F32, kernel)
    grads = []
    for index, (operand, spec) in enumerate(zip(qkv, op.value[:3], strict=True)):
        pick = builder.intern("pick", (node,), {"index": index}, builder.nodes[operand].type.shape, BF16)
        batch, heads, length, size = (frame.sizes(n) for n in spec.shape)
        value = layouts.view(layouts.token_matrix(pick), (batch, length, heads, size))
        grads.append(layouts.permute(value, (0, 2, 1, 3)))
    return tuple(grads)  # type: ignore[return-value]


def refuse_other_rows(lift: Lifter, q: Value, k: Value) -> None:
    """Queries and keys must be the same tokens: a captured step has no KV cache."""
    refuse_unless(q.dims[2] == k.dims[2], "keys of other tokens than the queries")


# ------------------------------------------------------------------------------------------------------------- ours


@handles("jetgraph.attention")
def _jetgraph_attention(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    q, k, v, *options = args
    attrs = _jetgraph_attrs(lift, q, k, options)
    out = attention(lift, _tokens_of(lift, q, k, v), attrs, "jetgraph::attention")
    batch, heads, length, head_dim = lift.layouts.shape(q)
    return lift.layouts.view(lift.layouts.token_matrix(out), (batch, length, heads, head_dim)), None


@handles("jetgraph.attention_backward")
def _jetgraph_attention_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs)
    grad, q, k, v, _out, _logsumexp, *options = args  # out and logsumexp are functions of q, k, v
    attrs = _jetgraph_attrs(lift, q, k, options)
    qkv = _tokens_of(lift, q, k, v)
    return _gradients(lift, frame, op, lift.layouts.read(grad), qkv, attrs, "jetgraph::attention_backward")


def _jetgraph_attrs(lift: Lifter, q: Value, k: Value, options: list) -> dict[str, Attr]:
    """(scale, window = 0, softcap = 0, first = None), as `jetgraph.lowering.reference.attention` defines them."""
    scale, *given = options
    window, softcap, first = [*given, *[0, 0.0, None][len(given) :]]
    refuse_other_rows(lift, q, k)
    if first is None:
        refuse_unless(lift.rows_are_sequences, "attention over rows that hold several sequences, or padding first")
    else:
        refuse_unless(isinstance(first, SequenceStarts), "first visible keys that are not the sequences' starts")
    return attention_attrs(*_heads(lift, q, k), scale, window=window, softcap=softcap)


# ----------------------------------------------------------------------------------------------------------- torch's

CPU_SDPA = "aten._scaled_dot_product_flash_attention_for_cpu"
FLASH, EFFICIENT, CUDNN = (f"aten._scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))
SDPA = {
    CPU_SDPA: ("dropout_p", "is_causal"),
    FLASH: ("dropout_p", "is_causal", "return_debug_mask"),
    EFFICIENT: ("attn_mask", "compute_log_sumexp", "dropout_p", "is_causal"),
    CUDNN: ("attn_mask", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask"),
}
"""By kernel, what its schema has by position after query, key and value; ``attn_bias`` is called attn_mask here."""
SEEDS, SIZES = ("philox_seed", "philox_offset"), ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
SDPA_BACKWARD = {
    CPU_SDPA: ("dropout_p", "is_causal"),
    FLASH: (*SIZES, "dropout_p", "is_causal", *SEEDS),
    EFFICIENT: (*SEEDS, "dropout_p", "grad_input_mask", "is_causal"),
    CUDNN: (*SEEDS, "attn_mask", *SIZES, "dropout_p", "is_causal"),
}
"""The same of its gradient, after grad_out, query, key, value, (EFFICIENT: the mask,) out and logsumexp."""


@handles(*SDPA)
def _sdpa(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, scale=..., attn_mask=...)
    kernel = op.target.rsplit(".", 1)[0]
    q, k, v, *options = args
    k, v = _once(lift, k), _once(lift, v)
    attrs = _sdpa_attrs(lift, q, k, dict(zip(SDPA[kernel], options, strict=False)) | kwargs)
    term = attention(lift, _tokens_of(lift, q, k, v), attrs, kernel.replace(".", "::"))
    batch, heads, length, head_dim = lift.layouts.shape(q)
    out = lift.layouts.view(lift.layouts.token_matrix(term), (batch, length, heads, head_dim))
    return lift.layouts.permute(out, (0, 2, 1, 3)), *[None for _ in op.value[1:]]


@handles(*(f"{kernel}_backward" for kernel in SDPA))
def _sdpa_backward(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, scale=..., attn_mask=...)
    kernel = op.target.rsplit(".", 1)[0]
    forward = kernel.removesuffix("_backward")
    grad, q, k, v, *others = args
    given = {"attn_mask": others.pop(0)} if forward == EFFICIENT else {}
    _out, _logsumexp, *options = others  # functions of q, k and v, as seeds of no dropout and sizes are
    given |= dict(zip(SDPA_BACKWARD[forward], options, strict=False)) | kwargs
    attrs = _sdpa_attrs(lift, q, k, given)
    qkv = _tokens_of(lift, q, k, v)
    grads = _gradients(lift, frame, op, _by_token(lift, grad), qkv, attrs, kernel.replace(".", "::"))
    return *grads, *[None for _ in op.value[3:]]  # a mask's gradient, which nobody asked for


def _sdpa_attrs(lift: Lifter, q: Value, k: Value, options: dict[str, Any]) -> dict[str, Attr]:
    """What SDPA's options say; those that are left out have their schema's defaults."""
    refuse_unless(options.get("dropout_p", 0.0) == 0.0, "attention dropout")
    refuse_other_rows(lift, q, k)
    causal, scale, mask = options.get("is_causal", False), options.get("scale"), options.get("attn_mask")
    if scale is None:
        scale = lift.layouts.shape(q)[3] ** -0.5
    heads = _heads(lift, q, k)
    if mask is None:
        refuse_unless(lift.rows_are_sequences, "attention over rows that hold several sequences, or padding first")
        return attention_attrs(*heads, scale, mask="causal" if causal else "full")
    refuse_unless(isinstance(mask, SequenceMask), "a mask tensor whose values are not those of causal attention")
    refuse_unless(not causal, "a mask tensor together with is_causal")
    return attention_attrs(*heads, scale, window=mask.window)


# ------------------------------------------------------------------------------------------------ masks on their way


@handles("aten.where")
def _where(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    """SDPA turns truth values into 0 and -inf."""
    only(kwargs)
    mask, seen, hidden = args
    refuse_unless(isinstance(mask, SequenceMask) and not mask.additive, "a choice by values")
    numbers = [x.value if isinstance(x, Filled) else None for x in (seen, hidden)]
    refuse_unless(numbers == [0.0, float("-inf")], f"a mask of {numbers}")
    return replace(mask, additive=True)


@handles("aten.constant_pad_nd")
def _padded_mask(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    """SDPA gives a mask aligned rows for the memory-efficient kernel, and cuts it again."""
    only(kwargs)
    mask, (before, after, *others) = args[:2]
    source = frame.spec(op.args[0])
    refuse_unless(isinstance(mask, SequenceMask) and source is not None, "padding of anything but a mask")
    refuse_unless(not others and frame.sizes(before) == 0 and frame.sizes(after) >= 0, f"padding by {args[1]}")
    return PaddedMask(mask, frame.sizes(source.shape[-1]))  # type: ignore[union-attr]


@handles("aten.scalar_tensor", "aten.full")
def _filled(lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
    only(kwargs, dtype=..., device=..., layout=..., pin_memory=...)
    return Filled(float(args[-1]))
