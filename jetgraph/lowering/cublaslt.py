"""The `cublaslt` provider: block-scaled GEMMs of cuBLASLt through `torch.nn.functional.scaled_mm`, on Hopper.

What the library wants and does not always check (docs/kernels.md):
* scales of 1x128 groups stored column by column, [M, K/128] with strides (1, M);
* scales of 128x128 blocks as [K/128 rounded up to 4, N/128], stored along the first axis.  `torch._scaled_mm` accepts
  an unpadded grid and returns wrong numbers; `scaled_mm` refuses it.  Versions of torch differ in whether N/128 is
  rounded up in the *shape* too; the memory behind it is padded here either way;
* a number of rows that is a multiple of 4: rows are added here.

Its heuristics choose a kernel by M, and for few rows and a long K one that splits K: rows of 63 and of 257 differed at
N=512, K=16384.  It therefore never serves a forward pass by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from jetgraph.lowering.provider import (
    E4M3,
    FPROP,
    WGRAD,
    Finding,
    Gemm,
    Quantizer,
    missing_hopper,
    refuses_blocks,
    self_test,
)

GROUP = 128
ROW_MULTIPLE = 4
ALIGNMENT = 16
"""Bytes: what cuBLASLt asks of the leading dimension of codes, so of N and K."""


@dataclass(frozen=True)
class CublasLt:
    name: str = "cublaslt"
    kernels: frozenset[str] = frozenset({"fp8_gemm"})

    def probe(self, device: torch.device) -> Finding:
        versions = (("torch", torch.__version__), ("CUDA", str(torch.version.cuda)))
        missing = missing_hopper(device, exact=True)
        if missing is None and tuple(int(n) for n in str(torch.version.cuda).split(".")[:2]) < (12, 9):
            missing = f"block scales came to cuBLASLt in CUDA 12.9, and torch was built with {torch.version.cuda}"
        if missing is None and not hasattr(F, "scaled_mm"):
            missing = f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; install torch 2.11 or newer"
        if missing:
            return Finding(self.name, False, missing, versions)
        cases = (FPROP, replace(FPROP, bias=True), WGRAD)
        return self_test(self.name, self.fp8_gemm, cases, device, versions, row_invariant=False)

    def refuses(self, request: Gemm | Quantizer) -> str | None:
        if not isinstance(request, Gemm):
            return "it has no quantiser"
        return refuses_blocks(request, ALIGNMENT)

    def fp8_gemm(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, b_rows: int, group: int
    ) -> Tensor:
        """`jetgraph::fp8_gemm`; a bias is added in FP32, before the one rounding to BF16."""
        num_rows, num_out = a.shape[0], b.shape[0]
        if not (num_rows and num_out and a.shape[1]):
            return shifted(a.new_zeros((num_rows, num_out), dtype=torch.float32), bias)
        missing = -num_rows % ROW_MULTIPLE
        left, right = whole_groups(a, missing), whole_groups(b)
        left_scale = a_scale.expand(num_rows, -1)
        left_scale = column_major(F.pad(left_scale, (0, 0, 0, missing)) if missing else left_scale)
        if b_rows == 1:
            right_scale, kind = column_major(b_scale), F.ScalingType.BlockWise1x128
        else:
            right_scale, kind = block_scales(b_scale, rows_are_padded(a.device)), F.ScalingType.BlockWise128x128
        out = F.scaled_mm(
            left,
            right.t(),
            left_scale,
            F.ScalingType.BlockWise1x128,
            right_scale,
            kind,
            output_dtype=torch.bfloat16 if bias is None else torch.float32,
        )[:num_rows]
        return out if bias is None else shifted(out, bias)


def shifted(out: Tensor, bias: Tensor | None) -> Tensor:
    """FP32 product (+ bias), rounded once to BF16."""
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)


def whole_groups(codes: Tensor, more_rows: int = 0) -> Tensor:
    """Codes [R, K] contiguous, K filled up with zeros to whole groups (a ragged number of tokens), rows added below."""
    more = -codes.shape[1] % GROUP
    if not more and not more_rows:
        return dense(codes)
    return F.pad(codes.view(torch.uint8), (0, more, 0, more_rows)).view(E4M3)


def dense(codes: Tensor) -> Tensor:
    """Codes [R, K] contiguous; DGRAD's, the transposed view of a weight's, by our kernel where it runs."""
    if codes.is_cuda and not codes.is_contiguous() and codes.t().is_contiguous() and transposes(codes.device):
        from jetgraph.lowering import triton_transpose

        return triton_transpose.transpose_codes(codes.t())
    return codes.contiguous()


@cache
def transposes(device: torch.device) -> bool:
    """Whether our kernel transposes codes on ``device``; else torch copies them, which takes longer."""
    try:
        from jetgraph.lowering import triton_transpose

        cases = [torch.arange(rows * 16, device=device).view(rows, 16).to(torch.uint8) for rows in (16, 5)]
        return all(torch.equal(triton_transpose.transpose_codes(case), case.t()) for case in cases)
    except Exception:  # no triton, or one that does not load, or no C compiler for what launches its kernels
        return False


def column_major(scale: Tensor) -> Tensor:
    """[R, G] with strides (1, R)."""
    return scale.t().contiguous().t()


def block_scales(scale: Tensor, pad_rows: bool) -> Tensor:
    """Scales [N/128, K/128] as [K/128 rounded up to 4, N/128], zeros behind; N/128 rounded up too if ``pad_rows``."""
    rows, groups = scale.shape
    padded = scale.new_zeros((rows + -rows % 4, groups + -groups % 4))
    padded[:rows, :groups] = scale
    return (padded if pad_rows else padded[:rows]).t()


@cache
def rows_are_padded(device: torch.device) -> bool:
    """Whether this torch wants N/128 rounded up to a multiple of 4 in the shape of the block scales."""
    codes = torch.zeros(GROUP, GROUP, dtype=E4M3, device=device)
    scale, block = codes.new_ones((GROUP, 1), dtype=torch.float32), codes.new_ones((1, 1), dtype=torch.float32)
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    try:
        F.scaled_mm(
            codes, codes.t(), column_major(scale), kinds[0], block_scales(block, False), kinds[1],
            output_dtype=torch.bfloat16,
        )  # fmt: skip
    except (RuntimeError, ValueError):
        return True
    return False
