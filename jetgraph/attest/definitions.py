"""Plain definitions of the operators that engines run: functional torch, FP32 arithmetic, every rounding written out.

`r` rounds to the result's format.  Where libraries disagree there are several definitions of one operator; an
attestation says which one holds, and the lifter expands exactly that one.  T tokens, C and D features, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def r(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """FP32 numbers that ``dtype`` holds: rounded to nearest even, then widened."""
    return x.to(dtype).float()


def truncate(x: Tensor) -> Tensor:
    """FP32 to BF16 by dropping the lower 16 bits: not a rounding, but what some kernels do."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


# ----------------------------------------------------------------------------------------------------------- norms


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, inner: bool = True) -> Tensor:
    """r(w · r(x · rsqrt(mean(x²) + eps))); without ``inner`` the inner rounding is left out.  x [.., C] any float."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = r(normed) if inner else normed
    return (weight.float() * normed).to(torch.bfloat16)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounded: bool = True, inner: bool = True
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, r(x + residual)).  ``rounded``: the norm reads the rounded sum, as Hugging Face does."""
    total = x.float() + residual.float()
    return rms_norm(r(total) if rounded else total, weight, eps, inner=inner), total.to(torch.bfloat16)


def rms_norm_oracle(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """float64 value and bound of `rms_norm` for any order of its FP32 sum.

    Two BF16 roundings of relative error u = 2⁻⁸ each, n + 8 FP32 operations of 2⁻²³ each, and one BF16 subnormal step.
    """
    wide = x.double()
    exact = weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    relative = (1 + 2.0**-8) ** 2 * (1 + (x.shape[-1] + 8) * 2.0**-23) - 1
    return exact, exact.abs() * relative + 2.0**-132


# ------------------------------------------------------------------------------------------------ activation, rotary


def silu_and_mul(x: Tensor, *, inner: bool = True) -> Tensor:
    """x [.., 2D] = gate | up → r(r(silu(gate)) · up); without ``inner`` silu is not rounded before the product."""
    gate, up = x.float().chunk(2, -1)
    activated = torch.nn.functional.silu(gate)
    return ((r(activated) if inner else activated) * up).to(torch.bfloat16)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, roundings: int = 3) -> Tensor:
    """x [T, H, D], cos and sin [T, D/2], neox: (x1·c − x2·s | x2·c + x1·s).

    ``roundings`` 3: both products and their sum are rounded; 1: only the sum.
    """
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    p = r if roundings == 3 else lambda value: value
    return torch.cat((p(first * cos) - p(second * sin), p(second * cos) + p(first * sin)), -1).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------------------- quantising


def quantize(
    x: Tensor,
    *,
    floor: float,
    division: str = "div",
    power_of_two: bool = False,
    scale_floor: float = 0.0,
    by_log2: bool = False,
    qmax: float = 448.0,
    group: int = 128,
) -> tuple[Tensor, Tensor]:
    """Codes [T, C] and FP32 scales [T, C/group] of finite x [T, C], written independently of the trainer's kernel.

    amax = max(|x|, floor), scale = amax / qmax, rounded up to a power of two if ``power_of_two`` (by the bits, or
    ``by_log2`` as exp2(ceil(log2(scale))) in FP32), then at least ``scale_floor``; codes are x / scale (``div``),
    x · (1/scale) (``mul1/s``) or x · (qmax · (1/amax)) (``mulq/a``).
    """
    blocks = x.float().unflatten(-1, (-1, group))
    amax = torch.maximum(blocks.abs().amax(-1), torch.tensor(floor, dtype=torch.float32, device=x.device))
    top = torch.tensor(qmax, device=x.device)  # CUDA divides by a Python number as a product with its reciprocal
    scale = amax / top
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if by_log2 else next_power_of_two(scale)
    if scale_floor:
        scale = scale.clamp_min(scale_floor)
    wide = scale[..., None]
    if division == "div":
        codes = blocks / wide
    elif division == "mul1/s":
        codes = blocks * (1.0 / wide)
    else:
        codes = blocks * (amax.reciprocal() * qmax)[..., None]  # what torch makes of a number / a tensor
    return codes.clamp(-qmax, qmax).to(E4M3).flatten(-2), scale


def next_power_of_two(scale: Tensor) -> Tensor:
    """Smallest power of two ≥ a positive normal FP32 number, by its bits: add all mantissa bits, clear the mantissa."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


# ------------------------------------------------------------------------------------------------------------- GEMM


def fp8_gemm_oracle(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, bits: int, group: int = 128
) -> tuple[Tensor, Tensor]:
    """float64 a @ b.T of scaled codes and a bound on its BF16 result.

    a [M, K], a_scale [M, K/g], b [N, K], b_scale [⌈N/128⌉, K/g].  Within a group every one of g additions may lose a
    unit of 2^-``bits`` of the largest running sum, at most Σ|a·b| of the group; then FP32 adds the groups, then BF16.
    """
    left = a.double().unflatten(-1, (-1, group))
    right = b.double().unflatten(-1, (-1, group))
    scale = a_scale.double()[:, None] * b_scale.double().repeat_interleave(128, 0)[: b.shape[0]][None]
    exact = (torch.einsum("mgk,ngk->mng", left, right) * scale).sum(-1)
    magnitude = torch.einsum("mgk,ngk->mng", left.abs(), right.abs()) * scale
    per_group = group * 2.0**-bits * magnitude
    over_groups = (scale.shape[-1] + 2) * 2.0**-23 * magnitude.sum(-1)
    bound = per_group.sum(-1) + over_groups
    return exact, bound + (exact.abs() + bound) * 2.0**-8 + 2.0**-133
