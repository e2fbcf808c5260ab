"""The row-invariant BF16 GEMM on tensor cores: the head and the unquantised linears, in training and in a rollout.

A library picks its kernel by the number of rows, so a token's logits would have other last bits when it is decoded
alone than in a training batch.  Here a row's bits do not depend on it: K is walked from 0 upwards by the same steps
into one FP32 accumulator, nothing split along K, in a tile for many rows as in one for few.  A row of a tensor-core
product is the sum of its own products, so its bits are those of (row, weight, bias) alone; the self-test compares both
tiles, tests/gpu/test_exact_ops.py 1 row to 32,768.

Accumulation is the tensor core's: products exact, sums in FP32 with the hardware's own truncation.  The definition
(`reference.row_tile_gemm`, FP32 on a CPU) has other last bits of FP32 and mostly the same BF16 number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_launch import launch

GEMM_TILE = (128, 128, 64, 8, 4)
"""BLOCK_M, BLOCK_N, BLOCK_K, warps, stages; `benchmarks.exact --sweep` times others."""
FEW_ROWS_TILE = (64, 128, 64, 4, 5)
"""For a decoding batch, of at most BLOCK_M rows: the same BLOCK_K, hence the same bits."""
SWIZZLE = 8


@triton.jit(do_not_specialize=["num_rows"])
def bf16_gemm_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    depth,
    x_row,
    weight_row,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    """out [M, N] = x [M, K] · weight [N, K]ᵀ + bias; unit stride along K.

    EVEN: BLOCK_K divides K.  NATIVE off multiplies in FP32, as Triton's interpreter can.
    """
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    band = tl.program_id(0) // (SWIZZLE * tiles_n)  # bands of SWIZZLE row tiles, so that the weight is read from L2
    height = tl.minimum(tiles_m - band * SWIZZLE, SWIZZLE)
    tile_m = band * SWIZZLE + (tl.program_id(0) % (SWIZZLE * tiles_n)) % height
    tile_n = (tl.program_id(0) % (SWIZZLE * tiles_n)) // height
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_in, cols_in = tl.minimum(rows, num_rows - 1), tl.minimum(cols, num_out - 1)  # repeat the last, store nothing
    k = tl.arange(0, BLOCK_K)
    left = x + rows_in[:, None] * x_row + k[None, :]
    right = weight + cols_in[None, :] * weight_row + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            inside = k < depth - step * BLOCK_K
            a = tl.load(left, mask=inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        if NATIVE:
            acc = tl.dot(a, b, acc)
        else:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K
    if HAS_BIAS:
        acc += tl.load(bias + cols_in).to(tl.float32)[None, :]
    inside = (rows < num_rows)[:, None] & (cols < num_out)[None, :]
    tl.store(out + rows[:, None] * num_out + cols[None, :], acc.to(out.dtype.element_ty), mask=inside)


def row_tile_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    native: bool = True,
    tile: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """`jetgraph::row_tile_gemm`: BF16 x [..., K] · weight [N, K]ᵀ (+ bias [N]) → BF16 [..., N]; any strides, any sizes.

    The bias is added in FP32, before the one rounding.  ``out_dtype`` FP32 leaves that out (the interpreter truncates).
    ``tile`` is chosen by the number of rows.

    Raises:
        ValueError: an operand is not BF16, or the sizes do not fit together.
    """
    num_out, depth = weight.shape
    operands = (x, weight) if bias is None else (x, weight, bias)
    if any(t.dtype is not torch.bfloat16 for t in operands):
        raise ValueError(f"row_tile_gemm got {', '.join(str(t.dtype) for t in operands)}; expected torch.bfloat16")
    if x.shape[-1] != depth or (bias is not None and bias.shape != (num_out,)):
        shapes = " and ".join(str(list(t.shape)) for t in operands)
        raise ValueError(f"row_tile_gemm got {shapes}; expected [..., K], [N, K] and a bias [N]")
    rows = same_start(x.reshape(-1, depth))
    out = x.new_empty((rows.shape[0], num_out), dtype=out_dtype)
    if not out.numel():
        return out.view(*x.shape[:-1], num_out)
    weight = same_start(weight)
    if tile is None:
        tile = FEW_ROWS_TILE if rows.shape[0] <= FEW_ROWS_TILE[0] else GEMM_TILE
    block_m, block_n, block_k, warps, stages = tile
    launch(
        bf16_gemm_kernel,
        (num_blocks(rows.shape[0], block_m) * num_blocks(num_out, block_n),),
        rows,
        weight,
        out if bias is None else same_start(bias),
        out,
        rows.shape[0],
        num_out,
        depth,
        rows.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        EVEN=depth % block_k == 0,
        NATIVE=native,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SWIZZLE=SWIZZLE,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,  # said, because triton's default changes with its version and the bits with it
    )
    return out.view(*x.shape[:-1], num_out)


def same_start(x: Tensor) -> Tensor:
    """``x``, or a copy of it if it is not contiguous or does not start at a multiple of 16 bytes.

    Triton compiles another binary for other strides and alignments; one row's bits shall come from one binary.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
