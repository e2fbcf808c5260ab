"""Heads' RMSNorm and rotary embedding in one read: the Triton kernel of `jetgraph::rms_norm_rotary`.

A row is one head of one token, held as words (`triton_words`) of its two halves, which are what rotation pairs.  The
sum of squares is `triton_rows`' of a row of at most 256 numbers: neighbours in pairs, one half and then the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_fused import as_words
from jetgraph.lowering.triton_fused_kernels import neighbours, normed
from jetgraph.lowering.triton_launch import launch
from jetgraph.lowering.triton_rows import add_neighbours, mean_of
from jetgraph.lowering.triton_words import add, high, low, multiply, tile_at

SIGNS = tl.constexpr(-0x7FFF8000)
"""The sign of both numbers of a word."""
ROWS = 32


@triton.jit
def _squares(word, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Σ of the squares of the numbers of words [ROWS, WORDS]."""
    return add_neighbours(low(word) * low(word) + high(word) * high(word), ROWS, WORDS)


@triton.jit
def _rotated(word, other, cos, sin, NATIVE: tl.constexpr):
    return add(multiply(word, cos, NATIVE), multiply(other, sin, NATIVE), NATIVE)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_positions", "batch_rows", "units"])
def rotary_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    r_out,
    num_rows,
    num_heads,
    num_positions,
    batch_rows,
    units,
    eps,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    NORM: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rows of 2·WORDS words, those of a token beside each other and tokens of x ``units`` of eight numbers apart.

    cos and sin have ``batch_rows`` rows a sequence, 0 if all sequences share them.
    """
    row = tl.program_id(0) * ROWS
    rows, words = tl.arange(0, ROWS), neighbours(0, WORDS)
    inside = (rows < num_rows - row)[:, None]
    token, first = (row + rows) // num_heads, row // num_heads
    x = tile_at(x, first, units * 4, 0)
    head = (token - first) * (units * 4) + ((row + rows) % num_heads) * (2 * WORDS)
    of = head[:, None] + words[None, :]
    left, right = tl.load(x + of, mask=inside, other=0), tl.load(x + of + WORDS, mask=inside, other=0)
    if NORM:
        total = _squares(left, ROWS, WORDS) + _squares(right, ROWS, WORDS)
        r = tl.rsqrt(mean_of(total, 4 * WORDS) + eps)
        tl.store(tile_at(r_out, row, 1, 0) + rows, r, mask=rows < num_rows - row)
        left = normed(left, r[:, None], weight, words, WORDS, True, NATIVE)
        right = normed(right, r[:, None], weight + WORDS, words, WORDS, True, NATIVE)
    angle = ((token // num_positions) * batch_rows + token % num_positions).to(tl.int64)
    turn = angle[:, None] * (2 * WORDS) + words[None, :]
    cos_left, sin_left = tl.load(cos + turn, mask=inside, other=0), tl.load(sin + turn, mask=inside, other=0)
    cos_right = tl.load(cos + turn + WORDS, mask=inside, other=0)
    sin_right = tl.load(sin + turn + WORDS, mask=inside, other=0)
    out = tile_at(out, row, 2 * WORDS, 0)
    at = rows[:, None] * (2 * WORDS) + words[None, :]
    tl.store(out + at, _rotated(left, right ^ SIGNS, cos_left, sin_left, NATIVE), mask=inside)
    tl.store(out + at + WORDS, _rotated(right, left, cos_right, sin_right, NATIVE), mask=inside)


def rms_norm_rotary(
    x: Tensor, weight: Tensor | None, eps: float, own_mean: bool, cos: Tensor, sin: Tensor, *, native: bool = True
) -> tuple[Tensor, Tensor]:
    """`jetgraph::rms_norm_rotary` of x [B, S, H, D], with `jetgraph::row_mean`'s mean; D a power of two, 32 to 256.

    x may be part of wider rows, as q is of a merged GEMM's result.
    """
    batch, length, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    r = x.new_empty((batch, length, num_heads, 1) if weight is not None else (0,), dtype=torch.float32)
    if x.numel():
        words, units = as_words(x.reshape(batch * length, num_heads * size))  # a part of wider rows lies where it is
        cos, sin = (as_words(t.contiguous())[0] for t in (cos, sin))
        num_rows = batch * length * num_heads
        launch(rotary_kernel, (num_blocks(num_rows, ROWS),),
            words, words if weight is None else as_words(weight)[0], cos, sin, out.view(torch.int32), r,
            num_rows, num_heads, length, length if cos.shape[0] > length else 0, units, eps,
            ROWS=ROWS, WORDS=size // 4, NORM=weight is not None, NATIVE=native, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, r
