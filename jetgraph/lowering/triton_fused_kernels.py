"""Tiles that are made of one or more matrices and quantised both ways: the Triton kernels that `triton_fused` launches.

Matrices are of words (`triton_words`), [T, C/2]; ``units`` are features in eights, and ``a_units`` how many units lie
between the starts of two rows of a.  EVEN says that tiles have no ragged edge.  Next door: `triton_norm_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetgraph.lowering.triton_silu import gradient_words, silu_words
from jetgraph.lowering.triton_words import (
    high,
    load_words,
    low,
    multiply,
    pack,
    row_codes,
    store,
    store_token_codes,
    tile_at,
)

GROUP_WORDS = tl.constexpr(64)


@triton.jit
def neighbours(start, COUNT: tl.constexpr):
    """Numbers of COUNT neighbouring words.

    A thread shall hold four, the 16 bytes that it loads, and store their codes as 8 bytes: told of no more, the
    compiler does not exchange codes between threads to store 16.
    """
    return start + tl.max_contiguous(tl.arange(0, COUNT), 4)


@triton.jit
def normed(word, r, weight, words, num_words, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """weight · bf16(word · r); r [R, 1]."""
    if EVEN:
        scale = tl.load(weight + words)[None, :]
    else:
        scale = tl.load(weight + words, mask=words < num_words, other=0)[None, :]
    return multiply(pack(low(word) * r, high(word) * r, NATIVE), scale, NATIVE)


PLAIN, NORM, SILU_MUL, GATE_GRADIENT, UP_GRADIENT = (tl.constexpr(i) for i in range(5))


@triton.jit
def _tile_words(
    SOURCE: tl.constexpr, a, b, c, r, rows, words, num_rows, num_words, a_units, b_units, c_units,
    WAY: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Words of what is quantised:

    PLAIN a; NORM b · bf16(a · r), b [C]; SILU_MUL bf16(silu(a)) · b; UP_GRADIENT bf16(silu(a)) · b, b being dy;
    GATE_GRADIENT silu_backward(bf16(b · c), a), c being up.
    """
    word = load_words(a, rows, words, num_rows, num_words, a_units, EVEN)
    if SOURCE == NORM:
        if EVEN:
            factor = tl.load(r + rows)[:, None]
        else:
            factor = tl.load(r + rows, mask=rows < num_rows, other=0.0)[:, None]
        word = normed(word, factor, b, words, num_words, EVEN, NATIVE)
    elif SOURCE != PLAIN:
        other = load_words(b, rows, words, num_rows, num_words, b_units, EVEN)
        if SOURCE == GATE_GRADIENT:
            other = multiply(other, load_words(c, rows, words, num_rows, num_words, c_units, EVEN), NATIVE)
            word = gradient_words(other, word, WAY, NATIVE)
        else:
            word = multiply(silu_words(word, WAY, NATIVE), other, NATIVE)
    return word


@triton.jit
def quantize_tile(
    SOURCE: tl.constexpr,
    a,
    b,
    c,
    r,
    codes,
    scales,
    codes_t,
    scales_t,
    tile_row,
    group,
    num_rows,
    units,
    a_units,
    b_units,
    c_units,
    qmax,
    qmax_inverse,
    amax_floor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FOURTH: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    WAY: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes along the features (ROWS), along the tokens (TOKENS), of 4·FOURTH tokens x 128 features.

    BLOCKS: what is stored along the tokens has one scale a tile.
    """
    num_words = units * 4
    row, column = tile_row * (4 * FOURTH), group * GROUP_WORDS
    rows_left, words_left = num_rows - row, num_words - column
    fourths, words = tl.arange(0, FOURTH), neighbours(0, GROUP_WORDS)
    a = tile_at(a, row, a_units * 4, column)
    if SOURCE == NORM:
        b, r = b + column, tile_at(r, row, 1, 0)
    else:
        b, c = tile_at(b, row, b_units * 4, column), tile_at(c, row, c_units * 4, column)
    tokens, tile = (), ()
    for i in tl.static_range(4):
        rows = fourths * 4 + i
        word = _tile_words(
            SOURCE, a, b, c, r, rows, words, rows_left, words_left, a_units, b_units, c_units, WAY, EVEN, NATIVE,
        )  # fmt: skip
        tokens, tile = tokens + (rows,), tile + (word,)
    if ROWS:
        codes = tile_at(codes, row, num_words, column)
        found = ()
        for i in tl.static_range(4):
            code, scale = row_codes(
                tile[i], qmax, qmax_inverse, amax_floor, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
            )  # fmt: skip
            at = codes + (tokens[i][:, None] * num_words + words[None, :])
            store(at, code, tokens[i], words, rows_left, words_left, EVEN)
            found = found + (scale,)
        scale = tl.reshape(tl.join(tl.join(found[0], found[2]), tl.join(found[1], found[3])), (4 * FOURTH,))
        rows = tl.arange(0, 4 * FOURTH)
        tl.store(tile_at(scales, group, tl.cdiv(num_rows, 4) * 4, row) + rows, scale, mask=rows < rows_left)
    if TOKENS:
        if WHOLE:
            codes_t = tile_at(codes_t, column * 2, num_rows // 16 * 4, tile_row * FOURTH)
        else:
            codes_t = tile_at(codes_t, column * 2, num_rows, row)
        if BLOCKS:
            scales_t = tile_at(scales_t, group, tl.cdiv(num_rows, 4 * FOURTH), tile_row)
        else:
            scales_t = tile_at(scales_t, tile_row, num_words * 2, column * 2)
        store_token_codes(
            tile[0], tile[1], tile[2], tile[3], fourths, words, codes_t, scales_t, rows_left, words_left, num_rows,
            qmax, qmax_inverse, amax_floor,
            BLOCKS, WHOLE, EVEN, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip


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
    BLOCKS: tl.constexpr,
    FOURTH: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    WAY: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    num_groups = tl.cdiv(units, 16)
    tile_row, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    quantize_tile(
        SOURCE, a, b, b, r, codes, scales, codes_t, scales_t, tile_row, group, num_rows, units, a_units, b_units,
        b_units, qmax, qmax_inverse, amax_floor, ROWS, TOKENS, BLOCKS, FOURTH, WHOLE, EVEN, WAY,
        DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip


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
    SPLIT: tl.constexpr,
    FOURTH: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    WAY: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Both gradients of a gated activation, each quantised both ways: by two programs (SPLIT), or one after the other.

    Either way a tile of dy and gate is read twice and comes from a cache the second time; kept in registers, both
    gradients leave room for one program a multiprocessor.
    """
    num_groups = tl.cdiv(units, 16)
    place, turn = tl.program_id(0), 0
    if SPLIT:
        place, turn = place // 2, place % 2
    if not SPLIT or turn == 0:
        quantize_tile(
            GATE_GRADIENT, gate, dy, up, dy, gate_codes, gate_scales, gate_codes_t, gate_scales_t,
            place // num_groups, place % num_groups, num_rows, units, gate_units, dy_units, up_units,
            qmax, qmax_inverse, amax_floor,
            True, True, False, FOURTH, WHOLE, EVEN, WAY, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
    if not SPLIT or turn == 1:
        quantize_tile(
            UP_GRADIENT, gate, dy, dy, dy, up_codes, up_scales, up_codes_t, up_scales_t,
            place // num_groups, place % num_groups, num_rows, units, gate_units, dy_units, dy_units,
            qmax, qmax_inverse, amax_floor,
            True, True, False, FOURTH, WHOLE, EVEN, WAY, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
