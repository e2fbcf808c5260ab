"""The trainer's norm, activation and rotary arithmetic, as Hugging Face transformers writes it.  No vLLM in here.

Plain functional torch: nothing is written in place, every bf16 result is one rounding.  T tokens, H heads, D features
or head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import jetgraph.lowering.torch_ops  # noqa: F401  (defines torch.ops.jetgraph)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · r(x · rsqrt(mean(x²) + eps)), x in FP32, r rounds to x's dtype."""
    wide = x.to(torch.float32)
    square = wide.pow(2)
    # On a GPU ATen's mean depends on how many rows there are; the trainer's graph has this one there, too.
    variance = torch.ops.jetgraph.row_mean(square) if x.is_cuda else square.mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2D] = gate | up → silu(gate) · up, silu rounded first."""
    size = x.shape[-1] // 2
    return F.silu(x[..., :size]) * x[..., size:]


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D], cos and sin broadcast to [..., R], R ≤ D: x·cos + rotate_half(x)·sin on those, each rounded."""
    rotary_size = cos.shape[-1]
    if rotary_size == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    turned, passed = x[..., :rotary_size], x[..., rotary_size:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, passed), -1)
