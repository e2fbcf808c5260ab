"""The Triton kernels that `triton_fused` launches: a norm row by row, tiles, gradients of a gated activation.

Matrices are of words (`triton_words`), [T, C/2]; ``units`` are features in eights, and ``x_units`` how many units lie
between the starts of two rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetgraph.lowering.triton_rows import add_pairs, mean_of
from jetgraph.lowering.triton_silu import gradient, sigmoid_and_silu, silu_words
from jetgraph.lowering.triton_words import high, load_words, low, multiply, pack, store_row_codes, store_token_codes

# -------------------------------------------------------------------------------------------- norms, row by row


@triton.jit
def _summed(x, residual, rows, words, num_rows, num_words, x_units, residual_units, RESIDUAL: tl.constexpr,
            NATIVE: tl.constexpr):  # fmt: skip
    word = load_words(x, rows, words, num_rows, num_words, x_units)
    if RESIDUAL:
        other = load_words(residual, rows, words, num_rows, num_words, residual_units)
        word = pack(low(word) + low(other), high(word) + high(other), NATIVE)
    return word


@triton.jit
def _normed(word, r, weight, words, num_words, NATIVE: tl.constexpr):
    """weight · bf16(word · r); r [R, 1]."""
    scale = tl.load(weight + words, mask=words < num_words, other=0)[None, :]
    return multiply(pack(low(word) * r, high(word) * r, NATIVE), scale, NATIVE)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x,
    residual,
    weight,
    sums,
    r_out,
    codes,
    scales,
    num_rows,
    units,
    x_units,
    residual_units,
    eps,
    qmax,
    qmax_inverse,
    amax_floor,
    RESIDUAL: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """s = x + residual and r of ROWS rows; with CODES, a second walk over them (from the caches) quantises."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    num_words = units * 4
    num_groups = tl.cdiv(num_words, 64)
    left, right = tl.zeros((ROWS, 64), tl.float32), tl.zeros((ROWS, 64), tl.float32)
    for start in range(0, num_words, 64 * UNROLL):
        for step in tl.static_range(UNROLL):
            words = (start + step * 64 + tl.arange(0, 64)).to(tl.int64)
            word = _summed(x, residual, rows, words, num_rows, num_words, x_units, residual_units, RESIDUAL, NATIVE)
            if RESIDUAL:
                inside = (rows < num_rows)[:, None] & (words < num_words)[None, :]
                tl.store(sums + rows[:, None] * num_words + words[None, :], word, mask=inside)
            left += low(word) * low(word)
            right += high(word) * high(word)
    r = tl.rsqrt(mean_of(add_pairs(left + right, ROWS), num_words * 2) + eps)
    tl.store(r_out + rows, r, mask=rows < num_rows)
    if CODES:
        for group in range(num_groups):
            words = (group * 64 + tl.arange(0, 64)).to(tl.int64)
            word = _summed(x, residual, rows, words, num_rows, num_words, x_units, residual_units, RESIDUAL, NATIVE)
            word = _normed(word, r[:, None], weight, words, num_words, NATIVE)
            scale = store_row_codes(
                word, rows, words, codes, num_rows, num_words, qmax, qmax_inverse, amax_floor,
                DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
            )  # fmt: skip
            tl.store(scales + rows * num_groups + group, scale, mask=rows < num_rows)


# --------------------------------------------------------------------------------------------------------- tiles

PLAIN, NORM, SILU_MUL = (tl.constexpr(i) for i in range(3))


@triton.jit
def _tile(SOURCE: tl.constexpr, a, b, r, rows, words, num_rows, num_words, a_units, b_units, DIVIDES: tl.constexpr,
          NATIVE: tl.constexpr):  # fmt: skip
    """Words of what is quantised: a; or b · bf16(a · r), b [C]; or bf16(silu(a)) · b."""
    word = load_words(a, rows, words, num_rows, num_words, a_units)
    if SOURCE == NORM:
        factor = tl.load(r + rows, mask=rows < num_rows, other=0.0)[:, None]
        word = _normed(word, factor, b, words, num_words, NATIVE)
    elif SOURCE == SILU_MUL:
        other = load_words(b, rows, words, num_rows, num_words, b_units)
        word = multiply(silu_words(word, DIVIDES, NATIVE), other, NATIVE)
    return word


@triton.jit(do_not_specialize=["num_rows"])
def tile_kernel(
    a,
    b,
    r,
    codes,
    scales,
    codes_t,
    scales_t,
    num_rows,
    units,
    a_units,
    b_units,
    qmax,
    qmax_inverse,
    amax_floor,
    SOURCE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FOURTH: tl.constexpr,
    WHOLE: tl.constexpr,
    REVERSED: tl.constexpr,
    DIVIDES: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes along the features (ROWS), along the tokens (TOKENS), of 4·FOURTH tokens x 128 features."""
    num_words = units * 4
    num_groups = tl.cdiv(num_words, 64)
    place = tl.program_id(0)
    if REVERSED:  # what the kernel before wrote last is still in the cache
        place = tl.num_programs(0) - 1 - place
    tile_row, group = place // num_groups, place % num_groups
    fourths = tile_row.to(tl.int64) * FOURTH + tl.arange(0, FOURTH)
    rows = fourths * 4
    words = group.to(tl.int64) * 64 + tl.arange(0, 64)
    w0 = _tile(SOURCE, a, b, r, rows, words, num_rows, num_words, a_units, b_units, DIVIDES, NATIVE)
    w1 = _tile(SOURCE, a, b, r, rows + 1, words, num_rows, num_words, a_units, b_units, DIVIDES, NATIVE)
    w2 = _tile(SOURCE, a, b, r, rows + 2, words, num_rows, num_words, a_units, b_units, DIVIDES, NATIVE)
    w3 = _tile(SOURCE, a, b, r, rows + 3, words, num_rows, num_words, a_units, b_units, DIVIDES, NATIVE)
    _store_tile(
        w0, w1, w2, w3, fourths, words, tile_row, group, codes, scales, codes_t, scales_t,
        num_rows, num_words, num_groups, qmax, qmax_inverse, amax_floor,
        ROWS, TOKENS, FOURTH, WHOLE, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip


@triton.jit
def _store_tile(
    w0,
    w1,
    w2,
    w3,
    fourths,
    words,
    tile_row,
    group,
    codes,
    scales,
    codes_t,
    scales_t,
    num_rows,
    num_words,
    num_groups,
    qmax,
    qmax_inverse,
    amax_floor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FOURTH: tl.constexpr,
    WHOLE: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    rows = fourths * 4
    if ROWS:
        s0 = store_row_codes(
            w0, rows + 0, words, codes, num_rows, num_words, qmax, qmax_inverse, amax_floor,
            DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
        s1 = store_row_codes(
            w1, rows + 1, words, codes, num_rows, num_words, qmax, qmax_inverse, amax_floor,
            DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
        s2 = store_row_codes(
            w2, rows + 2, words, codes, num_rows, num_words, qmax, qmax_inverse, amax_floor,
            DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
        s3 = store_row_codes(
            w3, rows + 3, words, codes, num_rows, num_words, qmax, qmax_inverse, amax_floor,
            DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
        scale = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (4 * FOURTH,))
        tokens = tile_row.to(tl.int64) * (4 * FOURTH) + tl.arange(0, 4 * FOURTH)
        tl.store(scales + tokens * num_groups + group, scale, mask=tokens < num_rows)
    if TOKENS:
        store_token_codes(
            w0, w1, w2, w3, fourths, words, tile_row, codes_t, scales_t, num_rows, num_words, tl.cdiv(num_rows, 128),
            qmax, qmax_inverse, amax_floor, WHOLE, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip


@triton.jit
def _gradients(dy, gate, up, rows, words, num_rows, num_words, dy_units, gate_units, up_units,
               DIVIDES: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Words of silu_backward(bf16(dy · up), gate) and of dy · bf16(silu(gate))."""
    d = load_words(dy, rows, words, num_rows, num_words, dy_units)
    g = load_words(gate, rows, words, num_rows, num_words, gate_units)
    d_silu = multiply(d, load_words(up, rows, words, num_rows, num_words, up_units), NATIVE)
    s_left, left = sigmoid_and_silu(low(g), DIVIDES, NATIVE)
    s_right, right = sigmoid_and_silu(high(g), DIVIDES, NATIVE)
    d_left, d_right = gradient(low(d_silu), low(g), s_left), gradient(high(d_silu), high(g), s_right)
    return pack(d_left, d_right, NATIVE), multiply(d, pack(left, right, NATIVE), NATIVE)


@triton.jit(do_not_specialize=["num_rows"])
def silu_mul_backward_kernel(
    dy,
    gate,
    up,
    gate_codes,
    gate_scales,
    gate_codes_t,
    gate_scales_t,
    up_codes,
    up_scales,
    up_codes_t,
    up_scales_t,
    num_rows,
    units,
    dy_units,
    gate_units,
    up_units,
    qmax,
    qmax_inverse,
    amax_floor,
    FOURTH: tl.constexpr,
    WHOLE: tl.constexpr,
    DIVIDES: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Both gradients of a gated activation, each quantised both ways."""
    num_words = units * 4
    num_groups = tl.cdiv(num_words, 64)
    tile_row, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    fourths = tile_row.to(tl.int64) * FOURTH + tl.arange(0, FOURTH)
    rows = fourths * 4
    words = group.to(tl.int64) * 64 + tl.arange(0, 64)
    g0, u0 = _gradients(
        dy, gate, up, rows, words, num_rows, num_words, dy_units, gate_units, up_units, DIVIDES, NATIVE,
    )  # fmt: skip
    g1, u1 = _gradients(
        dy, gate, up, rows + 1, words, num_rows, num_words, dy_units, gate_units, up_units, DIVIDES, NATIVE,
    )  # fmt: skip
    g2, u2 = _gradients(
        dy, gate, up, rows + 2, words, num_rows, num_words, dy_units, gate_units, up_units, DIVIDES, NATIVE,
    )  # fmt: skip
    g3, u3 = _gradients(
        dy, gate, up, rows + 3, words, num_rows, num_words, dy_units, gate_units, up_units, DIVIDES, NATIVE,
    )  # fmt: skip
    _store_tile(
        g0, g1, g2, g3, fourths, words, tile_row, group, gate_codes, gate_scales, gate_codes_t, gate_scales_t,
        num_rows, num_words, num_groups, qmax, qmax_inverse, amax_floor,
        True, True, FOURTH, WHOLE, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip
    _store_tile(
        u0, u1, u2, u3, fourths, words, tile_row, group, up_codes, up_scales, up_codes_t, up_scales_t,
        num_rows, num_words, num_groups, qmax, qmax_inverse, amax_floor,
        True, True, FOURTH, WHOLE, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip
