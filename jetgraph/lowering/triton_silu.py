"""silu and its gradient on words, with the bits of ATen's CUDA kernels.

    silu(x)              x / (1 + exp(-x)), CUDA's expf, IEEE division
    silu_backward(dy, x) dy · s · fma(x, 1 - s, 1),  s = 1 / (1 + exp(-x)); nvcc contracts the product

``DIVIDES`` takes IEEE division as it is.  Without it, quotients are products with the hardware's reciprocal and FMA
corrections: fewer instructions, and the same bits for every BF16 x, of which there are 65,536 and `differing_inputs`
counts how many are not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from jetgraph.lowering.triton_words import high, low, pack, reciprocal

LIMIT = tl.constexpr(88.75)
"""exp(-x) is inf below -LIMIT, and 1 + exp(-x) is 1 above."""


@triton.jit
def _exp_of_minus(x, NATIVE: tl.constexpr):
    if NATIVE:
        return libdevice.exp(x * -1.0)
    else:
        return tl.exp(x * -1.0)


@triton.jit
def _fourfold(x, NATIVE: tl.constexpr):
    """d = (1 + exp(-x)) / 4 and an approximation of 1 / d: a reciprocal that stays normal up to exp's largest."""
    d = tl.fma(_exp_of_minus(x, NATIVE), 0.25, 0.25)
    return d, reciprocal(d)


@triton.jit
def _divided(x, d, r):
    """x / (4·d), r near 1 / d; beyond `LIMIT` x · 1 or x · 0, so that -inf gives NaN as inf / inf does."""
    q = x * r
    q = tl.fma(tl.fma(q * -1.0, d, x), r, q) * 0.25
    step = tl.inline_asm_elementwise("add.sat.f32 $0, $1, 0f00000000;", "=f,f", [x], tl.float32, True, 1)
    return tl.where(tl.abs(x) > LIMIT, x * step, q)


@triton.jit
def silu(x, DIVIDES: tl.constexpr, NATIVE: tl.constexpr):
    """FP32, to be rounded."""
    if DIVIDES:
        return tl.math.div_rn(x, _exp_of_minus(x, NATIVE) + 1.0)
    else:
        d, r = _fourfold(x, NATIVE)
        return _divided(x, d, r)


@triton.jit
def sigmoid_and_silu(x, DIVIDES: tl.constexpr, NATIVE: tl.constexpr):
    if DIVIDES:
        below = _exp_of_minus(x, NATIVE) + 1.0
        return tl.math.div_rn(x * 0 + 1.0, below), tl.math.div_rn(x, below)
    else:
        d, r = _fourfold(x, NATIVE)
        r = tl.fma(r, tl.fma(r * -1.0, d, 1.0), r)
        return tl.where(x < -LIMIT, 0.0, r * 0.25), _divided(x, d, r)


@triton.jit
def silu_words(word, DIVIDES: tl.constexpr, NATIVE: tl.constexpr):
    return pack(silu(low(word), DIVIDES, NATIVE), silu(high(word), DIVIDES, NATIVE), NATIVE)


@triton.jit
def gradient(d_silu, x, s):
    """Of x, in FP32, to be rounded; s is the sigmoid of x."""
    return d_silu * s * tl.fma(x, 1.0 - s, 1.0)


@triton.jit
def _every_input_kernel(words, silus, sigmoids, DIVIDES: tl.constexpr):
    """Words [32768] that hold every BF16 number once: silu of them as words, sigmoids [65536] in FP32."""
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    word = tl.load(words + at)
    tl.store(silus + at, silu_words(word, DIVIDES, True))
    left, left_silu = sigmoid_and_silu(low(word), DIVIDES, True)
    right, right_silu = sigmoid_and_silu(high(word), DIVIDES, True)
    tl.store(silus + 32768 + at, pack(left_silu, right_silu, True))
    tl.store(sigmoids + 2 * at, left)
    tl.store(sigmoids + 2 * at + 1, right)


def differing_inputs(device: torch.device, divides: bool) -> int:
    """For how many of the 65,536 BF16 numbers silu (either function's) or the sigmoid is not ATen's; NaN is NaN."""
    x = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    got, sigmoids = x.new_empty((2, 65536)), x.new_empty(65536, dtype=torch.float32)
    _every_input_kernel[(128,)](
        x.view(torch.int32), got.view(torch.int32), sigmoids, DIVIDES=divides, num_warps=4, enable_fp_fusion=False
    )
    silus, one = torch.nn.functional.silu(x), torch.ones_like(sigmoids)
    expected = one / (one + torch.exp(-x.float()))
    wrong = (got.view(torch.int16) != silus.view(torch.int16)) & ~(got.isnan() & silus.isnan())
    wrong_sigmoid = (sigmoids.view(torch.int32) != expected.view(torch.int32)) & ~(sigmoids.isnan() & expected.isnan())
    return int((wrong.any(0) | wrong_sigmoid).sum())
