"""A block-scaled FP8 GEMM in Triton: any M, N, K, any strides; the fallback where a library refuses the shape.

Every group of 128 is a fresh tensor-core sum, scaled and added to an FP32 accumulator: Hopper's FP8 units keep about 14
bits inside one sum, so the error does not grow with K.  The tile is the same for every M and nothing is split along K:
a row of the result does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_launch import launch


@triton.jit
def fp8_gemm_kernel(
    a,
    a_scale,
    b,
    b_scale,
    bias,
    out,
    num_rows,
    num_out,
    depth,
    a_row,
    b_row,
    a_scale_row,
    a_scale_group,
    b_scale_row,
    b_scale_group,
    HAS_BIAS: tl.constexpr,
    B_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    """out [M, N] = Σ_g (a_g · b_gᵀ) * (a_scale_g * b_scale_g) + bias; a [M, K] and b [N, K] have unit stride along K.

    WIDEN multiplies in FP32 (the interpreter cannot multiply codes)."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    band = tl.program_id(0) // (SWIZZLE * tiles_n)  # bands of SWIZZLE row tiles, so that tiles of b are read from L2
    height = tl.minimum(tiles_m - band * SWIZZLE, SWIZZLE)
    tile_m = band * SWIZZLE + (tl.program_id(0) % (SWIZZLE * tiles_n)) % height
    tile_n = (tl.program_id(0) % (SWIZZLE * tiles_n)) // height
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_in, cols_in = tl.minimum(rows, num_rows - 1), tl.minimum(cols, num_out - 1)  # repeat the last, store nothing
    k = tl.arange(0, GROUP)
    left = a + rows_in[:, None] * a_row + k[None, :]
    right = b + cols_in[None, :] * b_row + k[:, None]
    left_scale = a_scale + rows_in * a_scale_row
    if B_ROWS % BLOCK_N == 0:  # the whole tile of b has one scale
        right_scale = b_scale + (tile_n.to(tl.int64) * BLOCK_N // B_ROWS) * b_scale_row
    else:
        right_scale = b_scale + (cols_in // B_ROWS) * b_scale_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(tl.cdiv(depth, GROUP)):
        if EVEN:
            x, w = tl.load(left), tl.load(right)
        else:
            inside = k < depth - group * GROUP
            x = tl.load(left, mask=inside[None, :], other=0.0)
            w = tl.load(right, mask=inside[:, None], other=0.0)
        if WIDEN:
            dot = tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        else:
            dot = tl.dot(x, w)
        if B_ROWS % BLOCK_N == 0:
            acc += dot * (tl.load(left_scale) * tl.load(right_scale))[:, None]
        else:
            acc += dot * (tl.load(left_scale)[:, None] * tl.load(right_scale)[None, :])
        left += GROUP
        right += GROUP
        left_scale += a_scale_group
        right_scale += b_scale_group
    if HAS_BIAS:
        acc += tl.load(bias + cols_in).to(tl.float32)[None, :]
    inside = (rows < num_rows)[:, None] & (cols < num_out)[None, :]
    target = out + rows[:, None] * num_out + cols[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


ALL_ROWS = 1 << 30
GEMM_TILE = (64, 128, 4, 4)
"""BLOCK_M, BLOCK_N, warps, stages: one tile for every M, or rows would depend on how many there are."""


def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    b_rows: int,
    group: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    widen: bool = False,
    tile: tuple[int, int, int, int] = GEMM_TILE,
) -> Tensor:
    """`jetgraph::fp8_gemm`: a [M, K] · b [N, K]ᵀ (+ bias [N]), any strides, any M, N, K; group 0, 32, 64 or 128."""
    (num_rows, depth), num_out = a.shape, b.shape[0]
    a_scale = a_scale.expand(num_rows, -1)
    if group == 0:  # one scale along K: the same number for every group of 128
        group = 128
        a_scale, b_scale = (t.expand(-1, -(-depth // group)) for t in (a_scale, b_scale))
    out = a.new_empty((num_rows, num_out), dtype=out_dtype)
    if not out.numel():
        return out
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    block_m, block_n, warps, stages = tile
    launch(
        fp8_gemm_kernel,
        (num_blocks(num_rows, block_m) * num_blocks(num_out, block_n),),
        a,
        a_scale,
        b,
        b_scale,
        out if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        depth,
        a.stride(0),
        b.stride(0),
        *a_scale.stride(),
        *b_scale.stride(),
        HAS_BIAS=bias is not None,
        B_ROWS=b_rows or ALL_ROWS,
        GROUP=group,
        EVEN=depth % group == 0,
        WIDEN=widen,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SWIZZLE=8,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,  # said, because triton's default changes with its version and the bits with it
    )
    return out
