"""Triton quantisers: one kernel for every granularity, dtype and stride; `triton_fused` has faster ones for most.

Bit-equal to `jetgraph.lowering.reference.quantize`: the largest magnitude is found on the bits of the numbers (so that
NaN and ±inf win instead of vanishing), quotients are those of IEEE division (the plain `/` of a GPU kernel is not), a
power of two is found on the bits, and NaN passes through the clamp.

This module and `triton_gemm` import triton when they are imported; `triton_provider` does so only to run them.
Shapes: R, C rows and columns of what is quantised, T tokens.  All offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.scale_layout import row_scales, token_scales
from jetgraph.lowering.triton_launch import launch
from jetgraph.precision import E4M3_MAX

E4M3 = torch.float8_e4m3fn
LEAST_SCALE = 2.0**-60
"""Below it `_quotient` might round otherwise than division does, and division itself is used."""
DIVISIONS = {"div": 0, "mul1/s": 1, "mulq/a": 2}
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _round_up_to_power_of_two(scale):
    """Smallest power of two ≥ a normal scale, by its bits; NaN stays NaN."""
    bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & INF_BITS
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)


@triton.jit
def _scale_and_factor(amax_bits, qmax, amax_floor, DIVISION: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of each block, and the factor that its values are multiplied with (DIVISION 0: a first guess)."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), amax_floor)
    amax = tl.where(amax_bits < INF_BITS, amax, float("nan"))
    scale = tl.math.div_rn(amax, amax * 0 + qmax)
    if POWER_OF_TWO:
        scale = _round_up_to_power_of_two(scale)
    if DIVISION == 2:  # torch computes `qmax / amax` of a Python number as (1 / amax) · qmax, two roundings
        factor = tl.math.div_rn(amax * 0 + 1.0, amax) * qmax
    else:
        factor = tl.math.div_rn(scale * 0 + 1.0, scale)
    return scale, factor


@triton.jit
def _e4m3_by_integers(q):
    """e4m3 byte of |q| ≤ 448 or NaN, to nearest even, without the hardware's cast (the interpreter's is wrong)."""
    bits = q.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    steps = magnitude.to(tl.float32, bitcast=True) + 16384.0  # one unit in the last place of 2^14 is 2^-9
    subnormal = steps.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude >= 0x3C800000, normal, subnormal)
    code = tl.where(magnitude > INF_BITS, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def _quotient(x, scale, reciprocal):
    """x / scale to nearest, in five operations, of a scale of at least 2^-60 and the nearest float to 1 / scale.

    The first correction leaves less than one unit in the last place; then the remainder is exact and the second rounds
    as division does (Markstein 1990).  Where it could underflow, |x / scale| < 2^-10 and the code is 0 either way.
    """
    q = x * reciprocal
    minus_x, minus_reciprocal = x * -1.0, reciprocal * -1.0  # so that -0 stays -0; triton's own minus is 0 - x
    q = tl.fma(tl.fma(q, scale, minus_x), minus_reciprocal, q)
    return tl.fma(tl.fma(q, scale, minus_x), minus_reciprocal, q)


@triton.jit
def _read(
    x,
    x_scales,
    tile_row,
    tile_col,
    num_rows,
    num_cols,
    x_row,
    x_col,
    x_scale_row,
    X_COLS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """A tile of x [R, C] in FP32, zeros past its edges; dequantised if X_COLS."""
    rows = tile_row.to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    cols = tile_col.to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tile = tl.load(x + rows[:, None] * x_row + cols[None, :] * x_col, mask=inside, other=0.0).to(tl.float32)
    if X_COLS:
        offsets = rows[:, None] * x_scale_row + (cols // X_COLS)[None, :]
        tile = tile * tl.load(x_scales + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def _emit(
    tile,
    tile_row,
    tile_col,
    codes,
    scales,
    num_rows,
    num_cols,
    code_row,
    code_col,
    scale_row,
    scale_col,
    qmax,
    amax_floor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise an FP32 tile, which is one block along every axis that blocks span, and store codes and scales."""
    amax_bits = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if COLS > 1:
        amax_bits = tl.max(amax_bits, axis=1, keep_dims=True)
    if ROWS > 1:
        amax_bits = tl.max(amax_bits, axis=0, keep_dims=True)
    scale, factor = _scale_and_factor(amax_bits, qmax, amax_floor, DIVISION, POWER_OF_TWO)
    if DIVISION > 0 or POWER_OF_TWO:  # a product with a power of two is the quotient
        q = tile * factor
    elif NATIVE:
        q = _quotient(tile, scale, factor)
    else:
        q = tl.math.div_rn(tile, tl.broadcast_to(scale, (TILE_R, TILE_C)))
    if not SATURATES:  # the hardware's cast clamps to ±448 itself, and keeps NaN
        q = tl.where(q == q, tl.minimum(tl.maximum(q, -qmax), qmax), q)
    if NATIVE:
        code = q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _e4m3_by_integers(q)
    rows = tile_row.to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    cols = tile_col.to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tl.store(codes + rows[:, None] * code_row + cols[None, :] * code_col, code, mask=inside)
    block_rows = rows if ROWS == 1 else tile_row.to(tl.int64) + tl.arange(0, 1)
    block_cols = cols if COLS == 1 else tile_col.to(tl.int64) + tl.arange(0, 1)
    inside = (block_rows * ROWS < num_rows)[:, None] & (block_cols * COLS < num_cols)[None, :]
    tl.store(scales + block_rows[:, None] * scale_row + block_cols[None, :] * scale_col, scale, mask=inside)


@triton.jit
def quantize_kernel(
    x,
    x_scales,
    codes,
    scales,
    num_rows,
    num_cols,
    x_row,
    x_col,
    x_scale_row,
    code_row,
    code_col,
    scale_row,
    scale_col,
    qmax,
    amax_floor,
    X_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    DIVISION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SATURATES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x [R, C] in blocks of ROWS x COLS.  With X_COLS, x holds codes with one scale per 1 x X_COLS group."""
    num_tiles = tl.cdiv(num_cols, TILE_C)
    tile_row, tile_col = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    tile = _read(x, x_scales, tile_row, tile_col, num_rows, num_cols, x_row, x_col, x_scale_row, X_COLS, TILE_R, TILE_C)
    _emit(
        tile, tile_row, tile_col, codes, scales, num_rows, num_cols, code_row, code_col, scale_row, scale_col,
        qmax, amax_floor, ROWS, COLS, TILE_R, TILE_C, DIVISION, POWER_OF_TWO, SATURATES, NATIVE,
    )  # fmt: skip


LANES = {"rows": (16, 1), "block": (1, 4), "tokens": (16, 1)}
"""By what is quantised: how many numbers a tile has along an axis that blocks do not span, and its warps."""


def _empty(x: Tensor, rows: int, cols: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [R, C]; ``transposed``: codes are stored [C, R], and scales, seen so, stay as they lie."""
    num_rows, num_cols = x.shape
    grid = -(-num_rows // rows), -(-num_cols // cols)
    if transposed:
        return x.new_empty((num_cols, num_rows), dtype=E4M3), token_scales(x, *grid[::-1])
    scales = row_scales(x, *grid) if rows == 1 else x.new_empty(grid, dtype=torch.float32)
    return x.new_empty((num_rows, num_cols), dtype=E4M3), scales


def _rule_arguments(rule: tuple, native: bool) -> dict:
    """The scale rule as arguments of a kernel; ``native`` off computes every step as the interpreter can."""
    qmax, amax_floor, division, power_of_two = rule
    native = native and amax_floor / qmax >= LEAST_SCALE
    return {
        "qmax": qmax,
        "amax_floor": amax_floor,
        "DIVISION": 0 if power_of_two else DIVISIONS[division],  # exact by a power of two, in every form
        "POWER_OF_TWO": power_of_two,
        "SATURATES": native and qmax == E4M3_MAX,
        "NATIVE": native,
        "enable_fp_fusion": False,
    }


def _launch(
    x: Tensor,
    out: tuple[Tensor, Tensor],
    block: tuple[int, int],
    transposed: bool,
    rule: tuple,
    lanes: tuple[int, int],
    native: bool,
    x_scales: Tensor | None = None,
    x_cols: int = 0,
) -> None:
    if not x.numel():
        return
    num_rows, num_cols = x.shape
    tile_r, tile_c = (side if side > 1 else lanes[0] for side in block)
    strides = [t.stride()[::-1] if transposed else t.stride() for t in out]
    launch(
        quantize_kernel,
        (num_blocks(num_rows, tile_r) * num_blocks(num_cols, tile_c),),
        x,
        x if x_scales is None else x_scales,
        out[0].view(torch.uint8),
        out[1],
        num_rows,
        num_cols,
        *x.stride(),
        0 if x_scales is None else x_scales.stride(0),
        *strides[0],
        *strides[1],
        X_COLS=x_cols,
        ROWS=block[0],
        COLS=block[1],
        TILE_R=tile_r,
        TILE_C=tile_c,
        num_warps=lanes[1],
        **_rule_arguments(rule, native),
    )


def quantize(
    x: Tensor, rows: int, cols: int, *rule, lanes: tuple[int, int] | None = None, native: bool = True
) -> tuple[Tensor, Tensor]:
    """`jetgraph::quantize` of x [R, C] of any strides, in blocks of powers of two up to 128 a side, not 1x1."""
    out = _empty(x, rows, cols, False)
    kind = "rows" if rows == 1 else "block" if cols > 1 else "tokens"
    _launch(x, out, (rows, cols), False, rule, lanes or LANES[kind], native)
    return out


def quantize_tokens(
    x: Tensor, group: int, *rule, lanes: tuple[int, int] | None = None, native: bool = True
) -> tuple[Tensor, Tensor]:
    """`jetgraph::quantize_tokens`: x [T, C] → codes [C, T], scales [C, ⌈T/group⌉], read along C, stored along T."""
    out = _empty(x, group, 1, True)
    _launch(x, out, (group, 1), True, rule, lanes or LANES["tokens"], native)
    return out


def requantize_tokens(
    codes: Tensor, scale: Tensor, cols: int, group: int, *rule, native: bool = True
) -> tuple[Tensor, Tensor]:
    """`jetgraph::requantize_tokens`: codes [T, C] in 1 x cols groups (0: a row) → codes [C, T] along the tokens."""
    out = _empty(codes, group, 1, True)
    cols = cols or max(codes.shape[1], 1)
    _launch(codes, out, (group, 1), True, rule, LANES["tokens"], native, scale.contiguous(), cols)
    return out
