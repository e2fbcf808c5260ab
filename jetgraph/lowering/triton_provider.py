"""The `triton` provider: our own kernels, for every shape; triton is imported only when a probe runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from jetgraph.lowering import reference
from jetgraph.lowering.provider import (
    FPROP,
    NO_TRITON,
    WGRAD,
    Finding,
    Gemm,
    Quantizer,
    failed,
    missing_hopper,
    self_test,
    triton_version,
)
from jetgraph.lowering.triton_fused_provider import GROUP, TEST_CASES, exercises, same_bits
from jetgraph.precision import E4M3_MAX, F32_TINY

SIDES = (1, 16, 32, 64, 128)


@dataclass(frozen=True)
class TritonKernels:
    """Quantisers bit-equal to the reference, and a block-scaled GEMM whose tile is the same for every M."""

    name: str = "triton"
    kernels: frozenset[str] = frozenset(
        {"quantize", "quantize_transposed", "quantize_tokens", "requantize_tokens", "fp8_gemm"}
    )

    def probe(self, device: torch.device) -> Finding:
        triton = triton_version()
        if triton is None:
            return Finding(self.name, False, NO_TRITON)
        versions = (("triton", triton),)
        missing = missing_hopper(device, least=(8, 9))
        if missing:
            return Finding(self.name, False, missing, versions)
        cases = (FPROP, replace(FPROP, bias=True), WGRAD)
        finding = self_test(self.name, self.fp8_gemm, cases, device, versions)
        wrong = self._wrong_quantiser(device) if finding.ok else ""
        if wrong:
            return replace(finding, ok=False, reason=wrong)
        if not finding.ok:
            return finding
        missing = words_refusal(device)
        return replace(finding, reason=f"{finding.reason}; not the faster quantiser: {missing}") if missing else finding

    def _wrong_quantiser(self, device: torch.device) -> str:
        """Which quantiser gives other bytes than the definition, in one sentence; "" if none does."""
        for shape, rule in TEST_CASES:
            x = exercises(*shape, rule, device)[0][1][0]
            codes, scale = reference.quantize(x, 1, GROUP, *rule)
            again = codes, scale, GROUP, GROUP, *rule
            values = reference.dequantize(codes, scale, 1, GROUP)
            try:
                pairs = {
                    "rows": (self.quantize(x, 1, GROUP, *rule), (codes, scale)),
                    "blocks": (self.quantize(x, GROUP, GROUP, *rule), reference.quantize(x, GROUP, GROUP, *rule)),
                    "tokens": (self.quantize_tokens(x, GROUP, *rule), reference.quantize_tokens(x, GROUP, *rule)),
                    "codes": (self.requantize_tokens(*again), reference.quantize_tokens(values, GROUP, *rule)),
                }
            except Exception as error:  # whatever a compiler throws at its first use is a refusal
                return f"its quantiser {failed(error)}"
            for of, (got, want) in pairs.items():
                if not all(map(same_bits, got, want)):
                    return f"its quantiser of {of} differs in bits from the definition, of {list(shape)} by {rule}"
        return ""

    def refuses(self, request: Gemm | Quantizer) -> str | None:
        if isinstance(request, Gemm):
            allowed = (0, 32, 64, 128)
            return None if request.group in allowed else f"groups of {request.group}; expected one of {allowed}"
        if request.rows not in SIDES or request.cols not in SIDES or request.rows == request.cols == 1:
            return f"blocks of {request.rows or '*'}x{request.cols or '*'}; expected sides of 1, 16, 32, 64 or 128"
        qmax, amax_floor, _, _ = request.rule
        if not (qmax <= E4M3_MAX and amax_floor / qmax >= F32_TINY):
            return f"qmax={qmax:g} floor={amax_floor:g}; expected a rule that `ScaleRule` accepts"
        return None

    def quantize(self, x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
        from jetgraph.lowering import triton_quantize

        return triton_quantize.quantize(x, *arguments)

    def quantize_transposed(self, x: Tensor, rows: int, cols: int, *rule) -> tuple[Tensor, Tensor]:
        from jetgraph.lowering import triton_fused, triton_quantize, triton_transpose

        if rows == cols and triton_fused.serves_tokens(x, rows, *rule) and not words_refusal(x.device):
            return triton_fused.quantize_transposed(x, rows, *rule)
        codes, scale = triton_quantize.quantize(x, rows, cols, *rule)
        return triton_transpose.transpose_codes(codes), scale.t().contiguous()

    def quantize_tokens(self, x: Tensor, group: int, *rule) -> tuple[Tensor, Tensor]:
        from jetgraph.lowering import triton_fused, triton_quantize

        by_words = triton_fused.serves_tokens(x, group, *rule) and not words_refusal(x.device)
        return (triton_fused if by_words else triton_quantize).quantize_tokens(x, group, *rule)

    def requantize_tokens(self, codes: Tensor, scale: Tensor, *arguments) -> tuple[Tensor, Tensor]:
        from jetgraph.lowering import triton_quantize

        return triton_quantize.requantize_tokens(codes, scale, *arguments)

    def fp8_gemm(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, b_rows: int, group: int
    ) -> Tensor:
        from jetgraph.lowering import triton_gemm

        return triton_gemm.fp8_gemm(a, a_scale, b, b_scale, bias, b_rows, group)


@cache
def words_refusal(device: torch.device) -> str:
    """Why `triton_fused` quantises neither tokens nor weights on ``device``; "" if its bytes are the plain ones."""
    from jetgraph.lowering import triton_fused, triton_quantize

    missing = missing_hopper(device)
    if missing:
        return missing
    try:
        for shape, rule in TEST_CASES:
            x = exercises(*shape, rule, device)[0][1][0]
            fast, plain = (k.quantize_tokens(x, GROUP, *rule) for k in (triton_fused, triton_quantize))
            codes, scale = triton_quantize.quantize(x, GROUP, GROUP, *rule)
            fast += triton_fused.quantize_transposed(x, GROUP, *rule)
            plain += codes.t(), scale.t()
            if not all(map(same_bits, fast, plain)):
                return f"it differs in bits, of {list(shape)} by {rule}"
    except Exception as error:  # whatever a compiler throws at its first use; the plain one needs no more than before
        return f"it failed with {type(error).__name__}"
    return ""
