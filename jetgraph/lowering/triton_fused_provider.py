"""The `triton_fused` provider: our kernels of the fused operators, tested against their definitions before use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetgraph.lowering.provider import Finding, Fused, Request, Rule, triton_finding
from jetgraph.precision import E4M3_MAX

ROTARY = "rms_norm_rotary"
FUSED = frozenset(
    {
        "quantize_rows_and_tokens",
        "rms_norm_quantize",
        "inverse_rms",
        ROTARY,
        "silu_mul_quantize",
        "silu_mul_backward_quantize",
    }
)
HEAD_SIZES = (32, 64, 128, 256)
GROUP, FEATURE_MULTIPLE = 128, 16
LIMIT = 1 << 24
"""Tokens of a call, features, and numbers between two rows are fewer: offsets within a tile have 32 bits."""
LEAST_SCALE = 2.0**-60
USUAL: Rule = (448.0, 1e-12, "div", False)
TEST_CASES: tuple[tuple[tuple[int, int], Rule], ...] = (
    ((1, 576), USUAL), ((144, 336), (448.0, 1e-4, "mul1/s", True)), ((259, 336), USUAL),
)  # fmt: skip
"""One row; T a multiple of 16 or not; a ragged last group both ways; more than two groups of tokens."""


@dataclass(frozen=True)
class TritonFused:
    name: str = "triton_fused"
    kernels: frozenset[str] = FUSED

    def probe(self, device: torch.device) -> Finding:
        return triton_finding(self.name, device, self._tested)

    def _tested(self, device: torch.device) -> tuple[str, str]:
        wrong = self._wrong(device)
        if wrong:
            return f"differs in bits from the definition: {wrong}", ""
        return "", f"every bit of the definitions, silu by {silu_way(device)[1]}"

    def refuses(self, request: Request) -> str | None:
        if not isinstance(request, Fused):
            return "it runs fused operators alone"
        if request.group != GROUP:
            return f"groups of {request.group}; expected {GROUP}"
        if request.num_features % FEATURE_MULTIPLE:
            return f"{request.num_features} features; expected a multiple of {FEATURE_MULTIPLE}"
        if request.kernel == ROTARY and request.num_features not in HEAD_SIZES:
            return f"heads of {request.num_features}; expected one of {HEAD_SIZES}"
        if not request.own_mean:
            return "the mean is ATen's, whose order its kernels do not repeat; expected jetgraph::row_mean"
        qmax, amax_floor, _, _ = request.rule or USUAL
        if not (qmax <= E4M3_MAX and amax_floor / qmax >= LEAST_SCALE):
            return f"qmax={qmax:g} floor={amax_floor:g}; expected qmax ≤ {E4M3_MAX:g} and scales ≥ 2^-60"
        return None

    def fused(self, kernel: str, *arguments) -> Tensor | tuple[Tensor, ...]:
        """The fused operator ``kernel`` on CUDA tensors, for what `refuses` lets through."""
        from jetgraph.lowering import triton_fused, triton_rotary

        if kernel == ROTARY:
            return triton_rotary.rms_norm_rotary(*arguments)
        options = {}
        if kernel.startswith("silu"):
            options["way"] = silu_way(arguments[0].device)[0]
        return getattr(triton_fused, kernel)(*arguments, **options)

    def _wrong(self, device: torch.device) -> str:
        """Which operator differs from its definition, and where; "" if none does."""
        from jetgraph.lowering import fused_reference  # it needs the operators, and they need the providers

        for shape, rule in TEST_CASES:
            for kernel, arguments in exercises(*shape, rule, device):
                got_all, want_all = self.fused(kernel, *arguments), getattr(fused_reference, kernel)(*arguments)
                if isinstance(got_all, Tensor):
                    got_all, want_all = (got_all,), (want_all,)
                for i, (got, want) in enumerate(zip(got_all, want_all, strict=True)):
                    if not same_bits(got, want):
                        return f"result {i} of {kernel} of {list(shape)}"
        return ""


def silu_way(device: torch.device) -> tuple[int, str]:
    """Index and name of the cheapest way to a silu whose every bit is ATen's on ``device``.

    Raises:
        RuntimeError: there is none; the first number that differs.
    """
    from jetgraph.lowering import triton_silu

    way = triton_silu.first_that_agrees(device)
    return way, triton_silu.WAYS[way]


def exercises(num_rows: int, num_features: int, rule: Rule, device: torch.device) -> list[tuple[str, tuple]]:
    """(operator, arguments) that visit every kernel: normal numbers, a hundredth of them large, some zeros and -0."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator)
        x = x * torch.where(torch.rand(shape, generator=generator) < 0.01, 100.0, 1.0)
        return torch.where(torch.rand(shape, generator=generator) < 0.02, -0.0, x).bfloat16().to(device)

    shape = num_rows, num_features
    x, residual, gate, up, dy = (numbers(*shape) for _ in range(5))
    weight = numbers(num_features)
    cases: list[tuple[str, tuple]] = [
        ("quantize_rows_and_tokens", (x, GROUP, *rule)), ("inverse_rms", (x, 1e-6, True)),
    ]  # fmt: skip
    for num_sequences, size in enumerate(HEAD_SIZES[1:], 1):
        heads, head_weight = numbers(num_sequences, num_rows, 3, size), numbers(size)
        angles = numbers(num_sequences, num_rows, size), numbers(num_sequences, num_rows, size)
        shared = numbers(1, num_rows, size), numbers(1, num_rows, size)
        cases += [(ROTARY, (heads, head_weight, 1e-6, True, *angles)), (ROTARY, (heads, None, 0.0, True, *shared))]
    for tokens in (False, True):
        for added in (None, residual):
            cases.append(("rms_norm_quantize", (x, added, weight, 1e-6, True, tokens, GROUP, *rule)))
        cases.append(("silu_mul_quantize", (gate, up, tokens, GROUP, *rule)))
    return [*cases, ("silu_mul_backward_quantize", (dy, gate, up, GROUP, *rule))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
