"""Device functions on words: 32 bits that hold two neighbouring BF16 numbers of a row, the left one in the low half.

The fused kernels are bound by instructions, not by memory, so they work on two numbers at a time where the hardware
can: rounding two to BF16, two to e4m3, the larger of two magnitudes.  A tile of 4·R tokens is held as four tensors
[R, 64] of words; tensor i has tokens i, 4 + i, 8 + i, …, so a thread holds four neighbouring tokens of a feature and
stores their codes, which WGRAD reads along the tokens, as one word.

``NATIVE`` off computes every step as Triton's interpreter can.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetgraph.lowering.triton_quantize import _e4m3_by_integers, _scale_and_factor

GROUP = 128
WORDS = tl.constexpr(GROUP // 2)
"""A tile is one group of features wide."""


# ------------------------------------------------------------------------------------------------------- two BF16


@triton.jit
def low(word):
    """The left number, in FP32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_bits(x):
    """FP32 bits of x rounded to BF16, to nearest even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000) & -65536


@triton.jit
def pack(left, right, NATIVE: tl.constexpr):
    """Two FP32 numbers, rounded to BF16."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((_rounded_bits(left) >> 16) & 0xFFFF) | _rounded_bits(right)


@triton.jit
def multiply(a, b, NATIVE: tl.constexpr):
    """BF16 products of words, rounded once: in FP32 a product of two BF16 numbers is exact."""
    if NATIVE:
        return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        return pack(low(a) * low(b), high(a) * high(b), NATIVE)


@triton.jit
def add(a, b, NATIVE: tl.constexpr):
    """BF16 sums of words.

    ATen adds in FP32 and rounds again.  That is one rounding too: where a sum is not exact in FP32, the smaller number
    is too small to bring it near the middle between two BF16 numbers.
    """
    if NATIVE:
        return tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        return pack(low(a) + low(b), high(a) + high(b), NATIVE)


# ----------------------------------------------------------------------------------------------------- addresses


@triton.jit
def tile_at(pointer, row, stride, column):
    """``pointer`` [·] moved to (row, column), in 64 bits.

    What is left to add within a tile fits in 32 bits, which costs one instruction a row; `triton_fused` checks sizes.
    """
    return pointer + (row.to(tl.int64) * stride + column)


@triton.jit
def load_words(x, rows, words, num_rows, num_words, units, EVEN: tl.constexpr):
    """Words [R, W] of a matrix whose rows are ``units`` of eight numbers apart; zeros past its edges, if it has any.

    Strides in units tell the compiler that every row starts at a multiple of 16 bytes.
    """
    at = x + (rows[:, None] * (units * 4) + words[None, :])
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(rows < num_rows)[:, None] & (words < num_words)[None, :], other=0)


@triton.jit
def store(at, value, rows, columns, num_rows, num_columns, EVEN: tl.constexpr):
    if EVEN:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :])


# ---------------------------------------------------------------------------------------------------- quantising


@triton.jit
def _larger_halves(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x within one unit in the last place, of a normal number with a normal reciprocal."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _factors(
    amax_bits, qmax, qmax_inverse, amax_floor, DIVISION: tl.constexpr, POWER_OF_TWO: tl.constexpr, NATIVE: tl.constexpr
):
    """scale, and a product's factor in two parts: x / scale is fma(x, upper, x · lower), rounded once.

    The largest magnitude is compared as an integer, so that NaN stays the largest; inf becomes NaN in the correction.
    ``qmax_inverse`` is 1 / qmax, rounded: with one correction it divides every BF16 number as IEEE division does.
    ``upper`` is below 1 / scale whatever the hardware's reciprocal rounds to, so that ``lower`` is not negative and a
    product with it keeps -0.
    """
    if NATIVE and DIVISION == 0 and not POWER_OF_TWO:
        amax = tl.maximum(amax_bits, amax_floor.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        guess = amax * qmax_inverse
        scale = tl.fma(tl.fma(guess, qmax * -1.0, amax), qmax_inverse, guess)
        upper = (reciprocal(scale).to(tl.int32, bitcast=True) - 2).to(tl.float32, bitcast=True)
        return scale, upper, tl.fma(scale * -1.0, upper, 1.0) * upper
    else:
        scale, factor = _scale_and_factor(amax_bits, qmax, amax_floor, DIVISION, POWER_OF_TWO)
        return scale, factor, factor * 0


@triton.jit
def _quotient(
    x,
    scale,
    upper,
    lower,
    qmax,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x / scale, clamped unless the hardware's cast does it.

    Of a BF16 x, `fma(x, upper, x · lower)` gives the code of IEEE division: tests/core/test_words.py divides every BF16
    number by every scale that BF16 numbers can have.
    """
    if DIVISION > 0 or POWER_OF_TWO:
        q = x * upper
    elif NATIVE:
        q = tl.fma(x, upper, x * lower)
    else:
        q = tl.math.div_rn(x, scale + x * 0)
    if not SATURATES:
        q = tl.where(q == q, tl.minimum(tl.maximum(q, -qmax), qmax), q)
    return q


@triton.jit
def _two_codes(left, right, NATIVE: tl.constexpr):
    """int16: e4m3 of the left number in the low byte."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b;"
            " cvt.rn.satfinite.e4m3x2.f32 a, $3, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 b, $4, $2;"
            " mov.b32 $0, {a, b}; }",
            "=r,r,r,r,r", [left, right], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (_e4m3_by_integers(left).to(tl.int32) | (_e4m3_by_integers(right).to(tl.int32) << 8)).to(tl.int16)


@triton.jit
def _four_codes(a, b, c, d, NATIVE: tl.constexpr):
    """int32: e4m3 of a in the lowest byte."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 p, q;"
            " cvt.rn.satfinite.e4m3x2.f32 p, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 q, $4, $3;"
            " mov.b32 $0, {p, q}; }",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = _e4m3_by_integers(a).to(tl.int32) | (_e4m3_by_integers(b).to(tl.int32) << 8)
        return first | (_e4m3_by_integers(c).to(tl.int32) << 16) | (_e4m3_by_integers(d).to(tl.int32) << 24)


@triton.jit
def row_codes(
    word,
    qmax,
    qmax_inverse,
    amax_floor,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Words [R, 64], R groups of features → pairs of codes [R, 64], scales [R]."""
    magnitudes = word & 0x7FFF7FFF
    if NATIVE:
        larger = tl.reduce(magnitudes, 1, _larger_halves)
        amax_bits = tl.maximum(larger << 16, larger & -65536)
    else:
        amax_bits = tl.max(tl.maximum(magnitudes << 16, magnitudes & -65536), axis=1)
    scale, upper, lower = _factors(amax_bits, qmax, qmax_inverse, amax_floor, DIVISION, POWER_OF_TWO, NATIVE)
    s, u, v = scale[:, None], upper[:, None], lower[:, None]
    left = _quotient(low(word), s, u, v, qmax, DIVISION, POWER_OF_TWO, SATURATES, NATIVE)
    right = _quotient(high(word), s, u, v, qmax, DIVISION, POWER_OF_TWO, SATURATES, NATIVE)
    return _two_codes(left, right, NATIVE), scale


@triton.jit
def _store_token_codes_of(
    a,
    b,
    c,
    d,
    amax_bits,
    fourths,
    features,
    codes_t,
    scales_t,
    num_tokens,
    num_features,
    code_tokens,
    qmax,
    qmax_inverse,
    amax_floor,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise FP32 numbers [R, 64] of four neighbouring tokens each, one scale a feature."""
    scale, upper, lower = _factors(amax_bits, qmax, qmax_inverse, amax_floor, DIVISION, POWER_OF_TWO, NATIVE)
    s, u, v = scale[None, :], upper[None, :], lower[None, :]
    code = _four_codes(
        _quotient(a, s, u, v, qmax, DIVISION, POWER_OF_TWO, SATURATES, NATIVE),
        _quotient(b, s, u, v, qmax, DIVISION, POWER_OF_TWO, SATURATES, NATIVE),
        _quotient(c, s, u, v, qmax, DIVISION, POWER_OF_TWO, SATURATES, NATIVE),
        _quotient(d, s, u, v, qmax, DIVISION, POWER_OF_TWO, SATURATES, NATIVE),
        NATIVE,
    )
    code = tl.trans(code)
    if WHOLE:  # ``codes_t`` points at words, and rows are a multiple of 16 bytes long
        at = codes_t + (features[:, None] * (code_tokens // 16 * 4) + fourths[None, :])
        store(at, code, features, fourths * 4, num_features, num_tokens, EVEN)
    else:
        for i in tl.static_range(4):
            tokens = fourths * 4 + i
            at = codes_t + (features[:, None] * code_tokens + tokens[None, :])
            store(at, (code >> (8 * i)).to(tl.uint8), features, tokens, num_features, num_tokens, False)
    if BLOCKS:
        tl.store(scales_t + features * 0, scale, mask=features == 0)
    else:
        tl.store(scales_t + features, scale, mask=features < num_features)


@triton.jit
def store_token_codes(
    w0,
    w1,
    w2,
    w3,
    fourths,
    words,
    codes_t,
    scales_t,
    num_tokens,
    num_words,
    code_tokens,
    qmax,
    qmax_inverse,
    amax_floor,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise four tensors of words, together one group of tokens, along the tokens; codes stored [C, T].

    BLOCKS: one scale for all.

    ``fourths`` [R] are a quarter of the tokens of w0; ``codes_t`` points at the tile, whose rows are ``code_tokens``
    apart.
    """
    m0, m1, m2, m3 = w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF, w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF
    if NATIVE:
        larger = tl.reduce(_larger_halves(_larger_halves(m0, m1), _larger_halves(m2, m3)), 0, _larger_halves)
        amax_left, amax_right = larger << 16, larger & -65536
    else:
        left = tl.maximum(tl.maximum(m0 << 16, m1 << 16), tl.maximum(m2 << 16, m3 << 16))
        right = tl.maximum(tl.maximum(m0 & -65536, m1 & -65536), tl.maximum(m2 & -65536, m3 & -65536))
        amax_left, amax_right = tl.max(left, axis=0), tl.max(right, axis=0)
    if BLOCKS:
        amax_left = amax_left * 0 + tl.max(tl.maximum(amax_left, amax_right), axis=0)
        amax_right = amax_left
    _store_token_codes_of(
        low(w0), low(w1), low(w2), low(w3), amax_left, fourths, words * 2, codes_t, scales_t,
        num_tokens, num_words * 2, code_tokens, qmax, qmax_inverse, amax_floor,
        BLOCKS, WHOLE, EVEN, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip
    _store_token_codes_of(
        high(w0), high(w1), high(w2), high(w3), amax_right, fourths, words * 2 + 1, codes_t, scales_t,
        num_tokens, num_words * 2, code_tokens, qmax, qmax_inverse, amax_floor,
        BLOCKS, WHOLE, EVEN, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip
