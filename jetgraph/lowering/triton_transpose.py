"""Transposing FP8 codes: [N, K] → [K, N], a byte a number.

WGRAD and DGRAD of libraries want codes that lie along their depth, and a copy byte by byte reaches a sixth of the
memory's bandwidth.  Here bytes move as words of four: a tile is 128 x 128 bytes, a thread holds four neighbouring rows
of a word, and exchanging their bytes gives words of the transposed matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_launch import launch
from jetgraph.lowering.triton_words import store, tile_at

SIDE = 128
LIMIT = 1 << 24
"""Rows and columns are fewer: offsets within a tile have 32 bits."""
WARPS = 4


@triton.jit
def _spread_bytes(a, b, J: tl.constexpr):
    """Byte J of a, then byte J of b."""
    return ((a >> (8 * J)) & 0xFF) | (((b >> (8 * J)) & 0xFF) << 8)


@triton.jit
def transpose_words_kernel(x, out, num_rows, num_cols, x_row, EVEN: tl.constexpr):
    """x [N, K] → out [K, N], both as words: x_row (words between rows of x) and N, K are multiples of 16 bytes."""
    tiles = tl.cdiv(num_cols, 128)
    row, col = tl.program_id(0) // tiles * 128, tl.program_id(0) % tiles * 128
    x, out = tile_at(x, row, x_row * 4, col // 4), tile_at(out, col, num_rows // 16 * 4, row // 4)
    fourths = tl.arange(0, 32)
    rows_left, cols_left = num_rows - row, num_cols - col
    words = ()
    for i in tl.static_range(4):
        rows = fourths * 4 + i
        at = x + (rows[:, None] * (x_row * 4) + fourths[None, :])
        if EVEN:
            word = tl.load(at)
        else:
            word = tl.load(at, mask=(rows < rows_left)[:, None] & (fourths * 4 < cols_left)[None, :], other=0)
        words = words + (word,)
    for j in tl.static_range(4):
        word = _spread_bytes(words[0], words[1], j) | (_spread_bytes(words[2], words[3], j) << 16)
        rows = fourths * 4 + j
        at = out + (rows[:, None] * (num_rows // 16 * 4) + fourths[None, :])
        store(at, tl.trans(word), rows, fourths * 4, cols_left, rows_left, EVEN)


@triton.jit
def transpose_bytes_kernel(x, out, num_rows, num_cols, x_row):
    """x [N, K] → out [K, N], for rows that start anywhere."""
    tiles = tl.cdiv(num_cols, 64)
    row, col = tl.program_id(0) // tiles * 64, tl.program_id(0) % tiles * 64
    x, out = tile_at(x, row, x_row, col), tile_at(out, col, num_rows, row)
    near = tl.arange(0, 64)
    rows_left, cols_left = num_rows - row, num_cols - col
    inside = (near < rows_left)[:, None] & (near < cols_left)[None, :]
    tile = tl.load(x + (near[:, None] * x_row + near[None, :]), mask=inside, other=0)
    store(out + (near[:, None] * num_rows + near[None, :]), tl.trans(tile), near, near, cols_left, rows_left, False)


def transpose_codes(codes: Tensor, warps: int = WARPS) -> Tensor:
    """codes [N, K] of one byte each, rows anywhere but dense → the same codes [K, N], contiguous.

    Raises:
        ValueError: they are not matrices of bytes with unit stride along K, or have 2^24 rows or columns.
    """
    fits = codes.ndim == 2 and codes.element_size() == 1 and max(codes.shape) < LIMIT
    if not (fits and (codes.stride(1) == 1 or codes.shape[1] <= 1) and codes.stride(0) < LIMIT):
        raise ValueError(
            f"got {codes.dtype} {list(codes.shape)} with strides {list(codes.stride())}; expected a matrix of bytes, "
            f"rows dense and at most {LIMIT} bytes apart, fewer than {LIMIT} a side"
        )
    num_rows, num_cols = codes.shape
    out = codes.new_empty((num_cols, num_rows))
    if not codes.numel():
        return out
    x_row = codes.stride(0)
    if num_rows % 16 == num_cols % 16 == x_row % 16 == codes.data_ptr() % 16 == 0:
        launch(transpose_words_kernel, (num_blocks(num_rows, SIDE) * num_blocks(num_cols, SIDE),),
            codes.view(torch.uint8).view(torch.int32), out.view(torch.uint8).view(torch.int32), num_rows, num_cols,
            x_row // 16, EVEN=num_rows % SIDE == num_cols % SIDE == 0, num_warps=warps,
        )  # fmt: skip
    else:
        launch(
            transpose_bytes_kernel,
            (num_blocks(num_rows, 64) * num_blocks(num_cols, 64),),
            codes.view(torch.uint8),
            out.view(torch.uint8),
            num_rows,
            num_cols,
            x_row,
            num_warps=warps,
        )
    return out
