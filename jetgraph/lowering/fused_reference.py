"""Definitions of the fused operators: the ATen operators and quantisers that each stands for, on any device.

A kernel that replaces one must give its bits on the same device.  They call operators of `torch.ops.jetgraph`.
Shapes and arguments: `lowering.fused_ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import jetgraph.lowering.torch_ops  # noqa: F401  (defines the operators)

ops = torch.ops.jetgraph


def quantize_rows_and_tokens(x: Tensor, group: int, *rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _both(x, group, True, rule)


def rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, own_mean: bool, tokens: bool, group: int, *rule
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    s = x if residual is None else (x + residual).contiguous()  # a compiled graph was told so, however x lies
    r = inverse_rms(s, eps, own_mean)
    y = weight * (s.to(torch.float32) * r).to(torch.bfloat16)
    return (x.new_empty((0, *x.shape[1:])) if residual is None else s, r, *_both(_rows(y), group, tokens, rule))


def inverse_rms(x: Tensor, eps: float, own_mean: bool) -> Tensor:
    square = x.to(torch.float32).pow(2)
    return torch.rsqrt((ops.row_mean(square) if own_mean else square.mean(-1, keepdim=True)) + eps)


def rms_norm_rotary(
    x: Tensor, weight: Tensor | None, eps: float, own_mean: bool, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    if weight is None:
        h, r = x, x.new_empty((0,), dtype=torch.float32)
    else:
        r = inverse_rms(x, eps, own_mean)
        h = weight * (x.to(torch.float32) * r).to(torch.bfloat16)
    first, second = h.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (h * cos.unsqueeze(2) + turned * sin.unsqueeze(2)).contiguous(), r


def silu_mul_quantize(
    gate: Tensor, up: Tensor, tokens: bool, group: int, *rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _both(_rows(F.silu(gate) * up), group, tokens, rule)


def silu_mul_backward_quantize(dy: Tensor, gate: Tensor, up: Tensor, group: int, *rule) -> tuple[Tensor, ...]:
    d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    d_up = dy * F.silu(gate)
    return (*_both(_rows(d_gate), group, True, rule), *_both(_rows(d_up), group, True, rule))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _both(x: Tensor, group: int, tokens: bool, rule: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes, scales, codes_t, scales_t of x [T, C]."""
    rows = ops.quantize(x, 1, group, *rule)
    if tokens:
        return (*rows, *ops.quantize_tokens(x, group, *rule))
    return (*rows, torch.empty_like(rows[0][:0]), torch.empty_like(rows[1][:0]))
