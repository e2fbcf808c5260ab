"""Reductions along a row in Triton, in an order that only the row's length decides.

ATen's CUDA reductions choose threads by the number of rows too, so a row's sum has other last bits in another batch; a
rollout that decodes one token and a training step that sees a thousand would then round differently.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LENGTH = 65536
"""Numbers that one program holds in registers and shared memory; hidden sizes are far below."""


@triton.jit
def row_mean_kernel(x, out, length, x_row, BLOCK: tl.constexpr):
    """out[r] = Σ x[r, :] / length; one program a row, summed as a tree over BLOCK numbers."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + cols, mask=cols < length, other=0.0)
    total = tl.sum(values, axis=0)
    tl.store(out + row, tl.math.div_rn(total, total * 0 + length))


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
        block = triton.next_power_of_2(length)
        warps = 1 if block <= 512 else 4 if block <= 8192 else 8
        row_mean_kernel[(num_rows,)](x, out, length, x.stride(0), BLOCK=block, num_warps=warps, enable_fp_fusion=False)
    return out
