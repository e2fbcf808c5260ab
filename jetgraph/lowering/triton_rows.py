"""Reductions along a row in Triton, in an order that is written out and that only the row's length decides.

ATen's CUDA reductions choose threads by the number of rows too, so a row's sum has other last bits in another batch; a
rollout that decodes one token and a training step that sees a thousand would then round differently.  Triton's own
`tl.sum` adds in the order of a tensor's layout, which changes with the dtype that was loaded, the alignment of its
address and the number of warps: a fused norm could not repeat it.  So every addition is spelt out:

    a row is cut into pieces of 256 · 2^k numbers, the longest first, zeros behind its end (`pieces`)
    the halves of a piece are added, x[i] + x[i + half], until 256 numbers are left
    the pieces' 256 numbers are added one piece after the other
    neighbours are added in pairs, x[2i] + x[2i + 1], eight times

256 numbers are what a warp loads of a BF16 row, 16 bytes a thread: halves are added between registers, neighbours
between lanes.  A sum over an axis of two is one addition and has no order, wherever the layout puts it.
`triton_fused` adds squares by the same functions.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_launch import launch

LANES = tl.constexpr(256)
LONGEST = 8192
MAX_LENGTH = 65536
"""Eight pieces; hidden sizes are far below."""


@cache
def pieces(length: int) -> tuple[int, ...]:
    """Lengths of the pieces of a row: as many of `LONGEST` as fit, then ⌈rest/256⌉ · 256 in binary.

    >>> pieces(576), pieces(4096), pieces(20000)
    ((512, 256), (4096,), (8192, 8192, 2048, 1024, 512))
    """
    whole, rest = divmod(-(-length // 256), LONGEST // 256)
    return (LONGEST,) * whole + tuple(256 << k for k in reversed(range(rest.bit_length())) if rest >> k & 1)


@triton.jit
def add_halves(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, TO: tl.constexpr):
    """x [ROWS, LENGTH] → [ROWS, TO], the upper half on the lower one again and again."""
    if LENGTH == TO:
        return x
    else:
        HALF: tl.constexpr = LENGTH // 2
        return add_halves(tl.sum(tl.reshape(x, (ROWS, 2, HALF)), axis=1), ROWS, HALF, TO)


@triton.jit
def add_slabs(slabs, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    """`add_halves` of a piece that is held as a tuple of its COUNT slabs of 256 numbers, or of every other number."""
    if COUNT == 1:
        return slabs[FIRST]
    else:
        even = add_slabs(slabs, FIRST, COUNT // 2, STEP * 2)
        return even + add_slabs(slabs, FIRST + STEP, COUNT // 2, STEP * 2)


@triton.jit
def add_neighbours(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """x [ROWS, LENGTH] → [ROWS], neighbours in pairs."""
    if LENGTH == 1:
        return tl.reshape(x, (ROWS,))
    else:
        HALF: tl.constexpr = LENGTH // 2
        return add_neighbours(tl.sum(tl.reshape(x, (ROWS, HALF, 2)), axis=2), ROWS, HALF)


@triton.jit
def mean_of(total, length):
    return tl.math.div_rn(total, tl.zeros_like(total) + length)


@triton.jit(do_not_specialize=["num_rows"])
def row_mean_kernel(x, out, num_rows, length, x_row, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """out[r] = Σ x[r, :] / length."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    start = 0
    for i in tl.static_range(len(PIECES)):
        cols = start + tl.arange(0, PIECES[i])
        inside = (rows < num_rows)[:, None] & (cols < length)[None, :]
        piece = tl.load(x + rows[:, None] * x_row + cols[None, :], mask=inside, other=0.0)
        lanes += add_halves(piece, ROWS, PIECES[i], LANES)
        start += PIECES[i]
    tl.store(out + rows, mean_of(add_neighbours(lanes, ROWS, LANES), length), mask=rows < num_rows)


def row_mean(x: Tensor) -> Tensor:
    """FP32 x [R, C] → its rows' means [R], FP32.

    Raises:
        ValueError: x is not FP32 [R, C], or a row is empty or longer than `MAX_LENGTH`.
    """
    if x.dtype is not torch.float32 or x.ndim != 2 or not 0 < x.shape[1] <= MAX_LENGTH:
        raise ValueError(f"row_mean got {x.dtype} {list(x.shape)}; expected torch.float32 [R, 1 to {MAX_LENGTH}]")
    x = x.contiguous()
    num_rows, length = x.shape
    out = x.new_empty(num_rows)
    if num_rows:
        rows = max(1, 2048 // pieces(length)[0])  # a program's numbers; the sum of a row does not depend on it
        launch(
            row_mean_kernel,
            (num_blocks(num_rows, rows),),
            x,
            out,
            num_rows,
            length,
            x.stride(0),
            ROWS=rows,
            PIECES=pieces(length),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
