"""Attention nodes with torch: the kernel that ran, on tokens arranged as they were when it ran.

T = B·S tokens in B rows, H query and Hkv key heads of size D; n queries are the last of L keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from jetgraph.batch import ONE_SEQUENCE, Batch
from jetgraph.graph import Node
from jetgraph.lowering import torch_ops  # noqa: F401  (defines torch.ops.jetgraph)

aten = torch.ops.aten
ALIGNMENT = 8
"""Elements of a mask's row that the memory-efficient kernel wants a multiple of (ATen's ``mem_eff_alignment``)."""


def attention(node: Node, q: Tensor, k: Tensor, v: Tensor, batch: Batch = ONE_SEQUENCE) -> Tensor:
    """[B·n, H·D] for q [B·n, H·D] and k, v [B·L, Hkv·D]."""
    heads = [_by_head(node, x, batch) for x in (q, k, v)]
    if _ours(node, q):
        return torch.ops.jetgraph.attention(*heads, *_options(node), batch.first)[0].flatten(2).flatten(0, 1)
    return _by_token(_stock(node, q).forward(*heads, **_stock_options(node, batch))[0])


def attention_backward(
    node: Node, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch = ONE_SEQUENCE
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) for grad [T, H·D]."""
    heads = [_by_head(node, x, batch) for x in (q, k, v)]
    d_out = _by_head(node, grad, batch)
    if _ours(node, q):
        options = *_options(node), batch.first
        forward = torch.ops.jetgraph.attention(*heads, *options)
        grads = torch.ops.jetgraph.attention_backward(d_out.transpose(1, 2), *heads, *forward, *options)
    else:
        stock, options = _stock(node, q), _stock_options(node, batch)
        grads = stock.backward(d_out, *heads, stock.forward(*heads, **options), **options)
    return tuple(_by_token(g) for g in grads)


def _ours(node: Node, q: Tensor) -> bool:
    """Whether our operator runs it: its own nodes, and on a GPU those of an engine's kernel, which has none here."""
    return str(node.kernel).startswith("jetgraph::") or (q.is_cuda and _name(node) not in STOCK)


def _name(node: Node) -> str:
    return str(node.kernel).removesuffix("_backward")


def _by_head(node: Node, x: Tensor, batch: Batch) -> Tensor:
    """[T, H·D] → BF16 [B, H, S, D]."""
    dim = int(node.attr("head_dim"))  # type: ignore[arg-type]
    return x.to(torch.bfloat16).unflatten(-1, (-1, dim)).unflatten(0, (batch.num_rows, -1)).transpose(1, 2)


def _by_token(x: Tensor) -> Tensor:
    """[B, H, S, D] → [T, H·D]."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def _options(node: Node) -> tuple[float, int, float]:
    return float(node.attr("scale")), int(node.attr("window")), float(node.attr("softcap"))  # type: ignore[arg-type]


def _stock_options(node: Node, batch: Batch) -> dict:
    """Keywords of torch's kernel: the very mask tensor of the run if there was one, else is_causal."""
    scale, window, _ = _options(node)
    mask = batch.masks.get(window)
    if mask is not None and mask.dtype is torch.bool:  # as torch's own scaled_dot_product_attention converts it
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16, device=mask.device).masked_fill(~mask, float("-inf"))
    return {"causal": mask is None and node.attr("mask") == "causal", "mask": mask, "scale": scale}


# ----------------------------------------------------------------------------------------------------------- torch's


def _cpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> tuple:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward(grad, q, k, v, forward, *, causal: bool, mask: Tensor | None, scale: float) -> tuple:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, *forward, 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: None, scale: float) -> tuple:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)


def _flash_backward(grad, q, k, v, forward, *, causal: bool, mask: None, scale: float) -> tuple:
    out, logsumexp, *sizes, seed, offset, _debug = forward
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, logsumexp, *sizes, 0.0, causal, seed, offset, scale=scale
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> tuple:
    k, v, mask = _repeated(k, q), _repeated(v, q), _aligned(mask, q)
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)


def _efficient_backward(grad, q, k, v, forward, *, causal: bool, mask: Tensor | None, scale: float) -> tuple:
    repeated, which = (_repeated(k, q), _repeated(v, q), _aligned(mask, q)), [True, True, True, False]
    d_q, *d_kv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, *repeated, *forward, 0.0, which, causal, scale=scale
    )
    return d_q, *(g.unflatten(1, (k.shape[1], -1)).sum(2) for g in d_kv)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> tuple:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, causal, scale=scale)


def _cudnn_backward(grad, q, k, v, forward, *, causal: bool, mask: Tensor | None, scale: float) -> tuple:
    out, logsumexp, *sizes, seed, offset, _debug = forward
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, logsumexp, seed, offset, mask, *sizes, 0.0, causal, scale=scale
    )


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """K or V with a head for each of the queries': this kernel knows no groups."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _aligned(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """[B, H, S, S]: the mask as `scaled_dot_product_attention` hands it to this kernel, in rows of whole words."""
    if mask is None:
        return None
    num_keys = mask.shape[-1]
    wide = torch.nn.functional.pad(mask, (0, -num_keys % ALIGNMENT))
    return wide[..., :num_keys].expand(q.shape[0], q.shape[1], -1, -1)


class Stock(NamedTuple):
    """A kernel of torch's `scaled_dot_product_attention` and its gradient, without dropout, on [B, H, S, D].

    ``backward`` takes the gradient, q, k, v and everything that ``forward`` returned.
    """

    forward: Callable[..., tuple]
    backward: Callable[..., tuple]


STOCK = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": Stock(_cpu, _cpu_backward),
    "aten::_scaled_dot_product_flash_attention": Stock(_flash, _flash_backward),
    "aten::_scaled_dot_product_efficient_attention": Stock(_efficient, _efficient_backward),
    "aten::_scaled_dot_product_cudnn_attention": Stock(_cudnn, _cudnn_backward),
}


def _stock(node: Node, q: Tensor) -> Stock:
    """Torch's kernel that ran; on a CPU the one that there is, whoever's ran."""
    return STOCK[_name(node)] if q.is_cuda else Stock(_cpu, _cpu_backward)
