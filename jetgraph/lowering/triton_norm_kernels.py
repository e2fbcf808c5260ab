"""The Triton kernels of RMSNorm with a residual and codes, that `triton_fused` launches.

As in `triton_fused_kernels`; rows are added in the order of `triton_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetgraph.lowering.triton_fused_kernels import GROUP_WORDS, neighbours, normed
from jetgraph.lowering.triton_rows import add_halves, add_neighbours, add_slabs, mean_of
from jetgraph.lowering.triton_words import add, high, load_words, low, row_codes, store, tile_at

SLAB = tl.constexpr(128)
"""Words of a row that a warp loads at a time: two groups, and the lanes of `triton_rows`."""


@triton.jit
def _r_of(first, second, num_words, eps, ROWS: tl.constexpr):
    """1/√(mean + eps) [ROWS] from sums of the squares of the left and of the right numbers of words."""
    return tl.rsqrt(mean_of(add_neighbours(first + second, ROWS, SLAB), num_words * 2) + eps)


@triton.jit
def _load_sum(x, residual, sums, rows, words, num_rows, num_words, x_units, residual_units, RESIDUAL: tl.constexpr,
              EVEN: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Words of x, or of x + residual, which are stored."""
    word = load_words(x, rows, words, num_rows, num_words, x_units, EVEN)
    if RESIDUAL:
        word = add(word, load_words(residual, rows, words, num_rows, num_words, residual_units, EVEN), NATIVE)
        store(sums + (rows[:, None] * num_words + words[None, :]), word, rows, words, num_rows, num_words, EVEN)
    return word


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
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """s = x + residual, r and codes of ROWS rows, which stay in registers in between.  Meant for one warp a row."""
    row = tl.program_id(0) * ROWS
    num_words = units * 4
    num_groups = tl.cdiv(num_words, GROUP_WORDS)
    x, residual = tile_at(x, row, x_units * 4, 0), tile_at(residual, row, residual_units * 4, 0)
    sums = tile_at(sums, row, num_words, 0)
    rows, left = tl.arange(0, ROWS), num_rows - row
    pieces, start = (), 0
    for i in tl.static_range(len(PIECES)):
        word = _load_sum(
            x, residual, sums, rows, neighbours(start, PIECES[i] // 2), left, num_words, x_units, residual_units,
            RESIDUAL, EVEN, NATIVE,
        )  # fmt: skip
        pieces = pieces + (word,)
        start += PIECES[i] // 2
    first, second = tl.zeros((ROWS, SLAB), tl.float32), tl.zeros((ROWS, SLAB), tl.float32)
    for i in tl.static_range(len(PIECES)):
        first += add_halves(low(pieces[i]) * low(pieces[i]), ROWS, PIECES[i] // 2, SLAB)
        second += add_halves(high(pieces[i]) * high(pieces[i]), ROWS, PIECES[i] // 2, SLAB)
    r = _r_of(first, second, num_words, eps, ROWS)
    tl.store(tile_at(r_out, row, 1, 0) + rows, r, mask=rows < left)
    codes, scales, scale_column = tile_at(codes, row, num_words, 0), scales + row, tl.cdiv(num_rows, 4) * 4
    start = 0
    for i in tl.static_range(len(PIECES)):
        words = neighbours(start, PIECES[i] // 2)
        word = normed(pieces[i], r[:, None], weight, words, num_words, EVEN, NATIVE)
        code, scale = row_codes(
            tl.reshape(word, (ROWS * (PIECES[i] // 128), GROUP_WORDS)), qmax, qmax_inverse, amax_floor,
            DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
        )  # fmt: skip
        at = codes + (rows[:, None] * num_words + words[None, :])
        store(at, tl.reshape(code, (ROWS, PIECES[i] // 2)), rows, words, left, num_words, EVEN)
        groups = start // GROUP_WORDS + tl.arange(0, PIECES[i] // 128)
        at = scales + (groups.to(tl.int64)[None, :] * scale_column + rows[:, None])
        store(at, tl.reshape(scale, (ROWS, PIECES[i] // 128)), rows, groups, left, num_groups, EVEN)
        start += PIECES[i] // 2


@triton.jit(do_not_specialize=["num_rows"])
def inverse_rms_kernel(
    x,
    r_out,
    num_rows,
    units,
    x_units,
    eps,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """r of ROWS rows, each within a warp however many warps there are."""
    row = tl.program_id(0) * ROWS
    num_words = units * 4
    x = tile_at(x, row, x_units * 4, 0)
    rows, left = tl.arange(0, ROWS), num_rows - row
    first, second = tl.zeros((ROWS, SLAB), tl.float32), tl.zeros((ROWS, SLAB), tl.float32)
    start = 0
    for i in tl.static_range(len(PIECES)):
        lefts, rights = (), ()
        for slab in tl.static_range(PIECES[i] // 256):
            words = neighbours(start + slab * SLAB, SLAB)
            word = load_words(x, rows, words, left, num_words, x_units, EVEN)
            lefts = lefts + (low(word) * low(word),)
            rights = rights + (high(word) * high(word),)
        first += add_slabs(lefts, 0, PIECES[i] // 256, 1)
        second += add_slabs(rights, 0, PIECES[i] // 256, 1)
        start += PIECES[i] // 2
    tl.store(tile_at(r_out, row, 1, 0) + rows, _r_of(first, second, num_words, eps, ROWS), mask=rows < left)
