"""silu and its gradient on words, with the bits of ATen's CUDA kernels.

    silu(x)              bf16(x / (1 + exp(-x))), CUDA's expf, IEEE division
    silu_backward(dy, x) dy · s · fma(x, 1 - s, 1),  s = 1 / (1 + exp(-x)); nvcc contracts the product

There are only 65,536 BF16 numbers, so what is cheaper need not be exact by construction: `first_that_agrees` asks the
device which of four ways has ATen's bits for each of them.

    SHORT     silu from the hardware's exponential and reciprocal, six operations.  Only three numbers have a silu
              within 2^-22 of the middle between two BF16 numbers: -2^-8, 2^-7, 5.9375.
    SHORT_1   the same with another rounding on the way, should one of the three come out wrong
    PRODUCTS  CUDA's expf, and the hardware's reciprocal with FMA corrections
    DIVISION  CUDA's expf and IEEE division

The sigmoid of the gradient is FP32 and must be ATen's to the last bit: by IEEE division in DIVISION, else by PRODUCTS.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from jetgraph.lowering.triton_words import high, low, pack, reciprocal

WAYS = ("short", "short, scaled later", "products", "division")
"""Cheapest first; a kernel is given the index."""
SHORT, SHORT_1, PRODUCTS, DIVISION = (tl.constexpr(i) for i in range(4))

LIMIT = tl.constexpr(88.75)
"""exp(-x) is inf below -LIMIT, and 1 + exp(-x) is 1 above."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp_of_minus(x, NATIVE: tl.constexpr):
    if NATIVE:
        return libdevice.exp(x * -1.0)
    else:
        return tl.exp(x * -1.0)


@triton.jit
def _power_of_two(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _fourfold(x, NATIVE: tl.constexpr):
    """d = (1 + exp(-x)) / 4 and an approximation of 1 / d: a reciprocal that stays normal up to exp's largest."""
    d = tl.fma(_exp_of_minus(x, NATIVE), 0.25, 0.25)
    return d, reciprocal(d)


@triton.jit
def _divided(x, d, r):
    """x / (4·d), r near 1 / d; beyond `LIMIT` x · 1 or x · 0, so that -inf gives NaN as inf / inf does."""
    q = x * r
    q = tl.fma(tl.fma(q, d, x * -1.0), r * -1.0, q) * 0.25  # in these signs -0 stays -0
    step = tl.inline_asm_elementwise("add.sat.f32 $0, $1, 0f00000000;", "=f,f", [x], tl.float32, True, 1)
    return tl.where(tl.abs(x) > LIMIT, x * step, q)


@triton.jit
def silu(x, WAY: tl.constexpr, NATIVE: tl.constexpr):
    """FP32, to be rounded to BF16."""
    if WAY == DIVISION:
        return tl.math.div_rn(x, _exp_of_minus(x, NATIVE) + 1.0)
    elif WAY == PRODUCTS:
        d, r = _fourfold(x, NATIVE)
        return _divided(x, d, r)
    elif WAY == SHORT_1:
        d = tl.fma(_power_of_two(x * -LOG2_E), 0.25, 0.25)
        return x * 0.25 * reciprocal(d)
    else:
        d = _power_of_two(tl.fma(x, -LOG2_E, -2.0)) + 0.25
        return x * 0.25 * reciprocal(d)


@triton.jit
def sigmoid(x, WAY: tl.constexpr, NATIVE: tl.constexpr):
    if WAY == DIVISION:
        return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), _exp_of_minus(x, NATIVE) + 1.0)
    else:
        d, r = _fourfold(x, NATIVE)
        r = tl.fma(r, tl.fma(r * -1.0, d, 1.0), r)
        return tl.where(x < -LIMIT, 0.0, r * 0.25)


@triton.jit
def silu_words(word, WAY: tl.constexpr, NATIVE: tl.constexpr):
    return pack(silu(low(word), WAY, NATIVE), silu(high(word), WAY, NATIVE), NATIVE)


@triton.jit
def _gradient(d_silu, x, WAY: tl.constexpr, NATIVE: tl.constexpr):
    s = sigmoid(x, WAY, NATIVE)
    return d_silu * s * tl.fma(x, 1.0 - s, 1.0)


@triton.jit
def gradient_words(d_silu, word, WAY: tl.constexpr, NATIVE: tl.constexpr):
    """`silu_backward` of words."""
    left = _gradient(low(d_silu), low(word), WAY, NATIVE)
    return pack(left, _gradient(high(d_silu), high(word), WAY, NATIVE), NATIVE)


@triton.jit
def _every_input_kernel(words, silus, sigmoids, WAY: tl.constexpr):
    """Words [32768] that hold every BF16 number once: silu of them as words, sigmoids [65536] in FP32."""
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    word = tl.load(words + at)
    tl.store(silus + at, silu_words(word, WAY, True))
    tl.store(sigmoids + 2 * at, sigmoid(low(word), WAY, True))
    tl.store(sigmoids + 2 * at + 1, sigmoid(high(word), WAY, True))


def differing_inputs(device: torch.device, way: int) -> str:
    """For how many of the 65,536 BF16 numbers silu or its sigmoid is not ATen's, and the first; "" if for none."""
    x = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16)
    silus, sigmoids = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    _every_input_kernel[(128,)](
        x.view(torch.int32), silus.view(torch.int32), sigmoids, WAY=way, num_warps=4, enable_fp_fusion=False
    )
    one = torch.ones_like(sigmoids)
    expected = {
        "silu": (silus, torch.nn.functional.silu(x), torch.int16),
        "sigmoid": (sigmoids, one / (one + torch.exp(-x.float())), torch.int32),
    }
    found = []
    for name, (got, aten, bits) in expected.items():
        different = (got.view(bits) != aten.view(bits)) & ~(got.isnan() & aten.isnan())
        if different.any():
            first = int(different.nonzero()[0])
            found.append(
                f"{name} of {int(different.sum()):,} of 65,536 BF16 numbers, first of {x[first].item()} "
                f"({first:#06x}): {got[first].item()!r}, and ATen's is {aten[first].item()!r}"
            )
    return "; ".join(found)


@cache
def first_that_agrees(device: torch.device) -> int:
    """The cheapest of `WAYS` whose every silu and sigmoid is ATen's on ``device``.

    Raises:
        RuntimeError: none is.
    """
    for way in range(len(WAYS)):
        wrong = differing_inputs(device, way)
        if not wrong:
            return way
    raise RuntimeError(f"silu by {WAYS[-1]} differs from ATen's: {wrong}")
