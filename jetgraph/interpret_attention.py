"""Attention nodes with torch: the kernel that ran, on tokens arranged as they were when it ran.

T = B·S tokens in B rows, H query and Hkv key heads of size D; n queries are the last of L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetgraph.batch import ONE_SEQUENCE, Batch
from jetgraph.graph import Node
from jetgraph.lowering import torch_ops  # noqa: F401  (defines torch.ops.jetgraph)

aten = torch.ops.aten


def attention(node: Node, q: Tensor, k: Tensor, v: Tensor, batch: Batch = ONE_SEQUENCE) -> Tensor:
    """[B·n, H·D] for q [B·n, H·D] and k, v [B·L, Hkv·D]."""
    heads = [_by_head(node, x, batch) for x in (q, k, v)]
    if node.kernel == "jetgraph::attention":
        return torch.ops.jetgraph.attention(*heads, *_options(node), batch.first)[0].flatten(2).flatten(0, 1)
    out = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, **_stock_options(node, batch))[0]
    return _by_token(out)


def attention_backward(
    node: Node, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch = ONE_SEQUENCE
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) for grad [T, H·D]."""
    heads = [_by_head(node, x, batch) for x in (q, k, v)]
    d_out = _by_head(node, grad, batch)
    if node.kernel == "jetgraph::attention_backward":
        options = *_options(node), batch.first
        forward = torch.ops.jetgraph.attention(*heads, *options)
        grads = torch.ops.jetgraph.attention_backward(d_out.transpose(1, 2), *heads, *forward, *options)
    else:
        options = _stock_options(node, batch)
        forward = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, **options)
        causal = options.pop("is_causal")
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, *heads, *forward, 0.0, causal, **options
        )
    return tuple(_by_token(g) for g in grads)


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
    return {"is_causal": mask is None and node.attr("mask") == "causal", "attn_mask": mask, "scale": scale}
