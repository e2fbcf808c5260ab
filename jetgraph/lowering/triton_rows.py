"""Reductions along a row in Triton, in an order that is written out and that only the row's length decides.

ATen's CUDA reductions choose threads by the number of rows too, so a row's sum has other last bits in another batch; a
rollout that decodes one token and a training step that sees a thousand would then round differently.  Triton's own
`tl.sum` adds in the order of a tensor's layout, which changes with the dtype that was loaded, the alignment of its
address and the number of warps: a fused norm could not repeat it.  So every addition is spelt out:

    lane[j] = x[j] + x[j + 128] + x[j + 256] + …      one after the other, for 128 lanes
    sum     = lane[0] + lane[1], lane[2] + lane[3], … neighbours in pairs, seven times

`triton_fused` adds squares by the same functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LENGTH = 65536
"""512 numbers a lane, one after the other; hidden sizes are far below."""
LANES = 128
ROWS, UNROLL = 4, 4
"""Rows a program, and loads in flight; neither changes a bit."""


@triton.jit
def add_neighbours(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """x [ROWS, 2·HALF] → [ROWS, HALF]: x[:, 2i] + x[:, 2i + 1]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    return even + odd


@triton.jit
def add_pairs(x, ROWS: tl.constexpr):
    """x [ROWS, 64], the sums of neighbouring lanes → [ROWS]."""
    x = add_neighbours(x, ROWS, 32)
    x = add_neighbours(x, ROWS, 16)
    x = add_neighbours(x, ROWS, 8)
    x = add_neighbours(x, ROWS, 4)
    x = add_neighbours(x, ROWS, 2)
    return tl.reshape(add_neighbours(x, ROWS, 1), (ROWS,))


@triton.jit
def mean_of(total, length):
    return tl.math.div_rn(total, total * 0 + length)


@triton.jit(do_not_specialize=["num_rows"])
def row_mean_kernel(x, out, num_rows, length, x_row, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    """out[r] = Σ x[r, :] / length."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.zeros((ROWS, 128), tl.float32)
    for start in range(0, length, 128 * UNROLL):
        for step in tl.static_range(UNROLL):
            cols = start + step * 128 + tl.arange(0, 128)
            inside = (rows < num_rows)[:, None] & (cols < length)[None, :]
            lanes += tl.load(x + rows[:, None] * x_row + cols[None, :], mask=inside, other=0.0)
    total = add_pairs(add_neighbours(lanes, ROWS, 64), ROWS)
    tl.store(out + rows, mean_of(total, length), mask=rows < num_rows)


def row_mean(x: Tensor) -> Tensor:
    """FP32 x [R, C] → its rows' means [R], FP32.

    Raises:
        ValueError: x is not FP32 [R, C], or a row is longer than `MAX_LENGTH`.
    """
    if x.dtype is not torch.float32 or x.ndim != 2 or x.shape[1] > MAX_LENGTH:
        raise ValueError(f"row_mean got {x.dtype} {list(x.shape)}; expected torch.float32 [R, C ≤ {MAX_LENGTH}]")
    x = x.contiguous()
    num_rows, length = x.shape
    out = x.new_empty(num_rows)
    if num_rows:
        row_mean_kernel[(triton.cdiv(num_rows, ROWS),)](
            x, out, num_rows, length, x.stride(0), ROWS=ROWS, UNROLL=UNROLL, num_warps=4, enable_fp_fusion=False
        )
    return out
